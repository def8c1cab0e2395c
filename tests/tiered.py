"""A broker without its processes, whose old records go to a store: WAL, router and kmq.tier of one data directory.

broker = TieredBroker(tmp_path, Limits(segment_bytes=4096, tier="on", local_retention_bytes=8192))
broker.send(*lines)
broker.turn()              kmq.tier copies, the router installs and deletes

shard = [TieredReplica(tmp_path, name, limits) for name in "abc"]     replicas of one shard; the test sends each its lines
shard[0].lead(1)
"""

import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room, stored
from tier_stores import LyingStore

from kmq.config.settings import load
from kmq.links import role
from kmq.links.role import FOLLOWING, STARTING, RolePage
from kmq.log import gaps, identity, reader, rows, segment, topics, wal
from kmq.log.gaps import Fork
from kmq.log.rows import NotHereError
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.router.queues import Queues
from kmq.tier.cache import TierCache
from kmq.tier.commits import CommitLog, TierState
from kmq.tier.restore import Restore, find_source
from kmq.tier.turn import Copier, FollowsError, Leadership, TurnOptions

LINEAGE = "7" * 32  # of the replicas


class TieredBroker:
    def __init__(self, path: Path, limits: Limits, object_bytes: int = 1 << 26, partitions: int = 1) -> None:
        self.data, self.limits, self.object_bytes = str(path / "data"), limits, object_bytes
        self.store = LyingStore(str(path / "store"))
        self.logger = FakeLogger()
        self.now_s = FIRST_TS / 1e6
        self.shortage = 0  # bytes
        self.next_seq = 1
        self.sent: list[bytes] = []  # stored lines, of all topics
        self._open()
        topics.declare(self.data, "t", partitions, partitioner="crc32")
        self.start()
        self.kill_copier()

    def _open(self) -> None:
        identity.open_data(self.data)

    def start(self) -> None:
        self.wal = Wal(self.data, no_room, 1 << 20, Limits(segment_bytes=self.limits.segment_bytes))
        self.queues = Queues(
            self.data,
            no_room,
            self.logger,
            self.limits,
            now_s=lambda: self.now_s,
            lacks_room=lambda: self.shortage > 0,
            shortage=lambda: self.shortage,
        )
        self.queues.recover(self.wal.last_seq)

    def options(self) -> TurnOptions:
        return TurnOptions(self.object_bytes, 0, lambda: wal.last_stored(self.data)[0], limits=lambda: self.limits)

    def kill_copier(self) -> None:
        """The next turn is that of a new process."""
        options = self.options()
        self.copier = Copier(self.data, self.store, self.logger, options)

    def lose_wal_before(self, seq: int) -> None:
        """Delete segments of the WAL as its retention does, up to the one that has this seq."""
        self.wal.close()
        listed = segment.listing(f"{self.data}/append")
        for (_, path), (following, _) in pairwise(listed):
            if following <= seq:
                os.unlink(path)
                os.unlink(segment.index_path(path))
        self.wal = Wal(self.data, no_room, 1 << 20, Limits(segment_bytes=self.limits.segment_bytes))

    def stop(self) -> None:
        self.queues.close()
        self.wal.close()

    def kill(self) -> None:
        self.wal.close()

    def fork(self, seq: int, offset: int) -> None:
        self.stop()
        gaps.write_forks(self.data, [*gaps.forks(self.data), Fork(seq, offset)])
        self.start()

    def send(self, *lines: bytes, group: int = 10) -> None:
        for at in range(0, len(lines), group):
            some = [*lines[at : at + group]]
            text = stored(some, self.next_seq)
            last = self.next_seq + len(some) - 1
            self.wal.append([(b"".join(text), self.next_seq, len(text), FIRST_TS + last)])
            self.wal.sync()
            self.queues.route([block(some, self.next_seq)])
            self.queues.make_topics()
            self.next_seq = last + 1
            self.sent += text
        self.now_s = (FIRST_TS + self.next_seq) / 1e6

    def checkpoint(self) -> None:
        self.queues.settle()
        self.queues.checkpoints.start()
        self.queues.settle()

    def tick(self) -> None:
        """The router's ticks until nothing changes: installs, rolls, retires."""
        for _ in range(4):
            self.queues.retention.roll_over_soon()
            self.queues.tick()
            self.queues.settle()

    def turn(self) -> None:
        self.checkpoint()
        self.copier.turn()
        self.tick()

    # --- what is there -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> TierState:
        return CommitLog(self.store, identity.lineage(self.data), "reader@here").read()

    def rows(self, number: int = 0) -> list[tuple[int, int]]:
        """(base, next) of the rows in the file `tier` of a partition."""
        return [(row.base, row.next) for row in rows.of(self.directory(number)).rows]

    def directory(self, number: int = 0) -> str:
        return f"{self.data}/topics/t/{number}"

    def local(self, number: int = 0) -> list[int]:
        """First offsets of the segments."""
        return [first for first, _ in segment.listing(self.directory(number))]

    def begin(self, number: int = 0) -> int:
        return reader.partition(self.data, "t", number).first_offset

    def read(self, offset: int = 0, number: int = 0) -> bytes:
        """All lines of a partition from an offset on, by its reader; what is not here is fetched in."""
        log, cache, found = reader.partition(self.data, "t", number), TierCache(self.data, self.store, 1 << 30), b""
        while offset < log.end_offset():
            try:
                first, text = log.read(offset, 1 << 20)
            except NotHereError as err:
                cache.fetch(err.directory, err.life, err.row)
                continue
            assert first == offset, f"{first} in place of {offset}"
            found, offset = found + text, first + text.count(b"\n")
        return found


class TieredReplica(TieredBroker):
    """The same as a replica of a shard, which follows at first. The store is that of all replicas below `path`.

    What is sent is committed: the test sends each replica the same lines in the same order.
    """

    def __init__(self, path: Path, name: str, limits: Limits, object_bytes: int = 1 << 26, partitions: int = 1) -> None:
        self.name, self.instance = name, f"tiered-{os.getpid()}-{path.name}-{name}"
        super().__init__(path / name, limits, object_bytes, partitions)
        self.store = LyingStore(str(path / "store"))
        self.kill_copier()

    def _open(self) -> None:
        super()._open()
        Path(self.data, "lineage").write_text(f"{LINEAGE}\n")
        self.page = RolePage.make(self.instance, identity.read(self.data, "id"))
        self.follow(1)

    def close(self) -> None:
        self.kill()
        role.remove(self.instance)

    def options(self) -> TurnOptions:
        leadership = Leadership(self.instance, identity.read(self.data, "id"), "s")
        return super().options()._replace(durable=leadership.committed, leadership=leadership)

    def lead(self, epoch: int) -> None:
        self.page.leave()
        self.page.enter(STARTING, epoch, 7, self.next_seq - 1)
        self.page.lead_until(1e9, 1e9)  # of the monotonic clock
        self.page.open_doors()

    def follow(self, epoch: int) -> None:
        self.page.leave()
        self.page.enter(FOLLOWING, epoch, 7, self.next_seq - 1)
        self.page.show_leader({"broker": "z"})

    def send(self, *lines: bytes, group: int = 10) -> None:
        super().send(*lines, group=group)
        self.page.raise_hw(self.next_seq - 1)

    def turn(self) -> None:
        """A turn, also of a follower."""
        self.checkpoint()
        with suppress(FollowsError):
            self.copier.turn()
        self.tick()


def lines(count: int, begin: int = 0, size: int = 100, topic: bytes = b"t") -> list[bytes]:
    return [b"%b|1|%d|%b" % (topic, n, b"%d" % n * (size // len(str(n)))) for n in range(begin, begin + count)]


def read_all(made: TieredBroker) -> dict[int, bytes]:
    """Every record of the partition by offset, from the store where it lies there alone."""
    log, cache = reader.partition(made.data, "t", 0), TierCache(made.data, made.store, 1 << 30)
    found: dict[int, bytes] = {}
    offset = log.first_offset
    while True:
        try:
            first, text = log.read(offset)
        except NotHereError as err:
            cache.fetch(err.directory, err.life, err.row)
            continue
        if not text:
            return found
        found |= dict(enumerate(text.splitlines(keepends=True), first))
        offset = first + text.count(b"\n")


def cold_broker(path: Path, count: int = 400, partitions: int = 1, object_bytes: int = 8192) -> TieredBroker:
    """A broker of `count` messages, most of which lie in the store alone."""
    limits = Limits(segment_bytes=4096, tier="on", local_retention_bytes=3 * 4096)
    made = TieredBroker(path, limits, object_bytes, partitions)
    made.send(*lines(count))
    made.turn()
    made.tick()
    assert made.rows()[0][0] == 0 and made.local()[0] > 0 and made.begin() == 0
    made.stop()
    return made


def restored(made: TieredBroker, path: Path, drill: bool = False, downloads: bool = False) -> TieredBroker:
    """A broker on the directory that `kmq restore` makes of the copy."""
    settings = load({"KMQ_DATA": str(path), "KMQ_SEGMENT_BYTES": "64 KiB"}, "none.toml")
    source = find_source(made.store, "", "restore@here")
    assert source is not None
    Restore(made.store, source, settings, FakeLogger(), lambda nbytes: None).run(drill, downloads)
    return opened(made, str(path))


def opened(made: TieredBroker, data: str) -> TieredBroker:
    """A broker on another directory, with the same store."""
    again = TieredBroker.__new__(TieredBroker)
    again.__dict__.update(made.__dict__)
    again.data, again.logger = data, FakeLogger()
    again.start()
    again.next_seq = gaps.forks(data)[-1].seq + 1_000_000_000
    again.kill_copier()
    return again
