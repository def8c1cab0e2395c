"""A world for random walks of a shard's copy: three replicas, elections, leaders that do not know that they were deposed.

    world = ShardWorld(path, random.Random(7))
    for _ in range(100): world.step()           raises Violated

The WAL of each replica, the role pages, the copiers and the store are the real ones. The world plays the replication: a
leader appends, another replica gets the same, then hw rises; a new leader has all that was committed; who was deposed
keeps what it had appended alone, until it follows and cuts that.

Promises    What the rows in force hold is the beginning of what was committed. Claims never bear a lower epoch than one
            before. Commits can always be read.
"""

import os
import random
from pathlib import Path

from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room
from tier_world import Violated, WorldStore, turn

from kmq.errors import KmqError
from kmq.links import role
from kmq.links.role import FOLLOWING, STARTING, RolePage
from kmq.log import committed, identity
from kmq.log.rows import full_key
from kmq.log.wal import Wal
from kmq.tier import objects, store
from kmq.tier.commits import CommitLog, decode
from kmq.tier.turn import Copier, Leadership, TurnOptions

LINEAGE = "7" * 32
_FAR = 1e9  # of the monotonic clock


class WorldReplica:
    """One directory. `lines`: what its WAL has, as sent."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.data = name, str(path / name)
        identity.open_data(self.data)
        (path / name / "lineage").write_text(f"{LINEAGE}\n")
        self.instance = f"tierworld-{os.getpid()}-{name}"
        self.page = RolePage.make(self.instance, identity.read(self.data, "id"))
        self.lines: list[bytes] = []
        self.processes: list[Copier] = []
        self.is_zombie = False

    def append(self, lines: list[bytes]) -> None:
        log = Wal(self.data, no_room, 1 << 20)
        made = block(lines, len(self.lines) + 1)
        log.append([(made.data, len(self.lines) + 1, made.count, FIRST_TS + made.last_seq)])
        log.sync()
        log.close()
        self.lines += lines

    def follow(self, lines: list[bytes], epoch: int) -> None:
        """Cut what the leader has not, and take what it has."""
        self.page.leave()
        same = next((n for n, (a, b) in enumerate(zip(self.lines, lines, strict=False)) if a != b), len(self.lines))
        same = min(same, len(lines))
        if same < len(self.lines):
            committed.cut_after(self.data, same, epoch)
            del self.lines[same:]
        if lines[same:]:
            self.append(lines[same:])
        self.page.enter(FOLLOWING, epoch, 7, len(self.lines))
        self.is_zombie = False

    def lead(self, epoch: int) -> None:
        self.page.leave()
        self.page.enter(STARTING, epoch, 7, len(self.lines))
        self.page.lead_until(_FAR, _FAR)
        self.page.open_doors()
        self.is_zombie = False

    def start(self, store: WorldStore) -> None:
        leadership = Leadership(self.instance, identity.read(self.data, "id"), "s")
        options = TurnOptions(1 << 20, 0, leadership.committed, leadership=leadership)
        self.processes.append(Copier(self.data, store, FakeLogger(), options))
        del self.processes[:-2]


class ShardWorld:
    def __init__(self, path: Path, rnd: random.Random) -> None:
        self.rnd, self.store, self.epoch, self.made = rnd, WorldStore(str(path / "store"), rnd), 0, 0
        self.replicas = [WorldReplica(path, name) for name in "abc"]
        self.committed: list[bytes] = []
        self.leader = self.replicas[0]
        self._elect(self.leader)

    def close(self) -> None:
        for each in self.replicas:
            role.remove(each.instance)

    def _elect(self, replica: WorldReplica) -> None:
        old, self.leader, self.epoch = self.leader, replica, self.epoch + 1
        if old is not replica:
            old.is_zombie = self.rnd.random() < 0.6
            if not old.is_zombie:
                old.page.leave()
        self.made += 1
        replica.append([b"__e.x|0|%d|epoch %d" % (self.made, self.epoch)])
        self.committed = [*replica.lines]
        replica.lead(self.epoch)

    def step(self) -> None:
        rnd, leader, what = self.rnd, self.leader, self.rnd.random()
        others = [each for each in self.replicas if each is not leader]
        if what < 0.25:
            lines = [b"t.k|0|%d|%d" % (self.made + n, self.made + n) for n in range(1, rnd.randint(2, 5))]
            self.made += len(lines)
            writer = rnd.choice([leader, *(each for each in others if each.is_zombie)])
            writer.append(lines)  # a zombie numbers messages, too, but nothing of it is committed
        elif what < 0.40:
            rnd.choice(others).follow(leader.lines, self.epoch)
            self.committed = [*leader.lines]
            leader.page.raise_hw(len(leader.lines))
        elif what < 0.50:
            able = [
                each for each in others if not each.is_zombie and each.lines[: len(self.committed)] == self.committed
            ]
            if able:
                self._elect(rnd.choice(able))
        elif what < 0.55:
            self.store.deliver()
        elif what < 0.65:
            rnd.choice(self.replicas).start(self.store)
        else:
            self._turn(rnd.choice([leader, *self.replicas]))
        self._check()

    def _turn(self, replica: WorldReplica) -> None:
        if not replica.processes:
            replica.start(self.store)
        turn(self.store, self.rnd.choice(replica.processes), replica.processes)

    # --- the promises ------------------------------------------------------------------------------------------------

    def _epochs(self) -> list[int]:
        found = []
        for key in self.store.names(f"{LINEAGE}/commits"):
            commit = decode(store.get(self.store, key), int(key.rpartition("/")[2]))
            found += [each.number("epoch") for each in commit.lines if each.verb == "claim"]
        return found

    def _check(self) -> None:
        try:
            state = CommitLog(self.store, LINEAGE, "check@here").read()
            copied = b"".join(
                piece
                for row in state.wal
                for piece in objects.unpack(self.store.get(full_key(LINEAGE, row.values["key"])), "row")
            )
        except KmqError as err:
            raise Violated(str(err)) from err
        right = block(self.committed, 1).data if self.committed else b""
        if not bytes(right).startswith(copied):
            raise Violated(f"the rows up to seq {state.wal_end - 1} are not what was committed")
        epochs = self._epochs()
        if epochs != sorted(epochs):
            raise Violated(f"the claims bear the epochs {epochs}")
