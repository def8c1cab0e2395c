"""A world for random walks of the copy: directories that are cloned and put back, processes that are killed and live on as
zombies, a store whose answers are lost, late or wrong. The code is the real one; the world only decides what happens next.

    world = World(path, random.Random(7))
    for _ in range(40): world.step()            raises Violated

Promises    The lines of the rows in force are a part of the WAL of one directory, never of two. Commits can always be read.
            Each row has its object, byte for byte. Nothing is ahead of the rows of the WAL. The rows of the partition
            are its lines from the first one on. Whatever left the disk of a directory is in rows that its file `tier`
            names, byte for byte what its WAL has.
"""

import random
import shutil
from pathlib import Path
from typing import Any

from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room
from tier_stores import LyingStore

from kmq.errors import KmqError
from kmq.log import identity, reader, rows, segment, wal
from kmq.log.rows import full_key
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.router.queues import Queues
from kmq.tier import objects
from kmq.tier.commits import CommitLog
from kmq.tier.turn import Copier, TurnOptions


class Violated(AssertionError):
    """A promise does not hold."""


class Killed(BaseException):
    """Ends a process at a request."""


class WorldStore(LyingStore):
    """A store whose fates the world draws for each call."""

    def __init__(self, root: str, rnd: random.Random) -> None:
        super().__init__(root)
        self._rnd = rnd
        self.is_calm = True

    def create(self, key: str, content: bytes) -> bool:
        fate = "" if self.is_calm else self._rnd.choices(FATES, WEIGHTS)[0]
        if fate == "killed":
            raise Killed
        if fate == "altered" and "/commits/" in key:
            fate = "done"  # nobody can mend a commit that the store itself has altered
        self.plan = [fate] if fate not in ("", "killed after") else []
        made = super().create(key, content)
        if fate == "killed after":
            raise Killed
        return made


# A record or two a segment, of which one may stay on the disk.
LIMITS = Limits(segment_bytes=64, tier="on", local_retention_bytes=64)
FATES = ("", "lost", "done", "late", "altered", "killed", "killed after")
WEIGHTS = (60, 6, 8, 10, 6, 5, 5)


def turn(store: Any, process: Copier, processes: list[Copier]) -> None:
    """One turn of a process, in which requests may go wrong. Who is killed is no longer among the others."""
    store.is_calm = False
    try:
        process.turn()
    except Killed:
        processes.remove(process)
    except KmqError:
        pass
    finally:
        store.is_calm = True


class World:
    def __init__(self, path: Path, rnd: random.Random, store: Any = None) -> None:
        """`store`: as WorldStore, a Store with `is_calm` and `deliver`."""
        self.path, self.rnd = path, rnd
        self.store = store or WorldStore(str(path / "store"), rnd)
        self.made = 0
        self.directories: list[str] = []
        self.processes: list[Copier] = []
        self.lineage = ""
        self.snapshot = ""
        self._begin()

    def _begin(self) -> None:
        data = str(self.path / "d0")
        identity.open_data(data)
        self.lineage = identity.lineage(data)
        self.directories.append(data)
        self._append(data)

    def _append(self, data: str) -> None:
        """Some records that no other directory has."""
        log, queues = Wal(data, no_room, 1 << 20), Queues(data, no_room, FakeLogger(), LIMITS)
        queues.recover(log.last_seq)
        lines = []
        for _ in range(self.rnd.randint(1, 4)):
            self.made += 1
            lines.append(b"t.k|0|%d|%d" % (self.made, self.made))
        routed = block(lines, log.last_seq + 1)
        log.append([(routed.data, log.last_seq + 1, routed.count, FIRST_TS + routed.last_seq)])
        log.sync()
        queues.route([routed])
        log.close()
        queues.close()

    def _copy(self, of: str) -> str:
        self.made += 1
        target = str(self.path / f"d{self.made}")
        shutil.copytree(of, target, symlinks=True)
        return target

    def _process(self, data: str) -> None:
        def durable() -> int:
            last = wal.last_stored(data)[0]
            return last if self.rnd.random() < 0.7 else max(1, last - self.rnd.randint(1, 3))

        options = TurnOptions(1 << 20, 0, durable, limits=lambda: LIMITS)
        self.processes.append(Copier(data, self.store, FakeLogger(), options))
        del self.processes[:-4]

    def step(self) -> None:
        what = self.rnd.random()
        if what < 0.25:
            self._append(self.rnd.choice(self.directories))
        elif what < 0.40 or not self.processes:
            self._process(self.rnd.choice(self.directories))
        elif what < 0.46:
            self.store.deliver()
        elif what < 0.50 and len(self.directories) < 3:
            self.directories.append(self._copy(self.rnd.choice(self.directories)))
        elif what < 0.53:
            self.snapshot = self._copy(self.rnd.choice(self.directories))
        elif what < 0.57 and self.snapshot:
            self._put_back()
        else:
            turn(self.store, self.rnd.choice(self.processes), self.processes)
        self.check()

    def _put_back(self) -> None:
        """An older state takes the place of a directory; its processes are gone, and it goes on with other records."""
        at = self.rnd.randrange(len(self.directories))
        self.processes = [each for each in self.processes if each.data != self.directories[at]]
        self.directories[at], self.snapshot = self.snapshot, ""
        if self.rnd.random() < 0.7:
            self._append(self.directories[at])
        self._process(self.directories[at])

    # --- the promises ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        try:
            state = CommitLog(self.store, self.lineage, "check@here").read()
            copied = b"".join(self._lines(row) for row in state.wal)
        except KmqError as err:
            raise Violated(str(err)) from err
        first = state.wal_first
        if state.wal and not any(self._has(data, first, copied) for data in [*self.directories, *self._gone()]):
            raise Violated(f"rows up to seq {state.wal_end - 1} are of no single directory")
        ahead = [name for name, row in state.files.items() if row.number("seq") >= state.wal_end]
        ahead += [name for name, row in state.tables.items() if row.number("seq") >= state.wal_end]
        ahead += [row.name for row in state.rows_of_logs() if int(row.values["seq"].partition("-")[2]) >= state.wal_end]
        if ahead:
            raise Violated(f"{ahead} are ahead of seq {state.wal_end - 1}")
        try:
            tiered = b"".join(self._lines(row) for row in state.rows_of_logs())
            if not copied.startswith(tiered):
                raise Violated("the rows of the partition are not its lines")
            for data in self.directories:
                self._check_disk(data)
        except KmqError as err:
            raise Violated(str(err)) from err

    def _check_disk(self, data: str) -> None:
        """Nothing that has left the disk is lost to its readers."""
        directory = f"{data}/topics/t/0"
        listed = segment.listing(directory)
        local = listed[0][0] if listed else 0
        found = rows.of(directory)
        if found.begin(local) > 0:
            raise Violated(f"{data}: begins with {found.begin(local)}, and offset 0 was never deleted")
        for row in found.cold(local):
            content = b"".join(
                objects.unpack(
                    objects.CheckedPieces(
                        self.store.get(full_key(self.lineage, row.key)), row.key, row.size, row.sha256
                    ),
                    row.key,
                )
            )
            if b"".join(reader.read(data, *row.seqs)) != content:
                raise Violated(f"{data}: offsets {row.base} to {row.next - 1} are other records in the store")

    def _gone(self) -> list[str]:
        """Directories that were put back, as they were then: their processes wrote what they had."""
        return [str(path) for path in self.path.glob("d*") if str(path) not in self.directories]

    def _lines(self, row: Any) -> bytes:
        key = full_key(self.lineage, row.values["key"])
        pieces = objects.CheckedPieces(self.store.get(key), key, row.number("size"), row.values["sha256"])
        return b"".join(objects.unpack(pieces, key))

    def _has(self, data: str, first: int, copied: bytes) -> bool:
        last = wal.last_stored(data)[0]
        return b"".join(reader.read(data, first, last)).startswith(copied)
