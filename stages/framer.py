"""Framer stage: numbers the lines of the FIFO and puts them, as blocks, into the ring `framed`.

Links       in: FIFO `raw` (sole reader)   out: ring `framed` (sole writer)
Owns        the reading end of the FIFO, the sequence.

Invariant   Every line that reached the FIFO gets exactly one seq; seqs are dense. A line that is no message gets one too,
            as dead.malformed. However much is staged, a turn looks at no more than framing.TURN lines one by one before the
            next sign of life.
Crash       All state is in the ring's shared memory, and one store commits a block, the next seq and the bytes of the
            FIFO that the block came from (ring.py, staging.py). Killed before that store the same lines are framed again, in
            the same place with the same seqs; killed after it, never again.
            The same lines get the same replies, because the table of producers is rebuilt from what was committed.
            When the ring is gone too (the pod restarted) the sequence goes on from the last record of the WAL. While another
            pod still writes there (a replacement came early) we wait: a ring made now would be older than the WAL later.
Not covered A WAL that was changed behind a living ring: the two disagree, which stops us here.
"""

import os
import select
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from functools import partial
from operator import itemgetter

from kmq import record
from kmq.broker.admission import spare_inodes
from kmq.broker.clock import AgeClock, HeldTimes
from kmq.broker.stage import Stage, main
from kmq.errors import CorruptError, RetryError
from kmq.framing import parser
from kmq.framing.catalog import Catalog
from kmq.framing.checkpointer import Checkpointer
from kmq.framing.dedupe import DedupeTable
from kmq.links import fifo
from kmq.links.fifo import waiting_bytes
from kmq.links.layout import Commit, field
from kmq.links.ownership import FileLock
from kmq.links.ring import RingWriter
from kmq.links.staging import READ_BYTES, Staging, area_bytes
from kmq.log import checkpoint, dedupe_file, dropped, numbered, wal
from kmq.log.damage import DamageError
from kmq.log.lines import last_line

_IDLE_MS = 500  # longest wait on the FIFO: only the heartbeat needs it
_DRAIN_POLL_S = 0.01  # while draining: how often we look whether ingress is gone
_STAMP_BYTES = 40  # most that a seq and a time add to a line
_REPLY_BYTES = 120  # most that a reply takes beside its reason
_UNROUTED = 1 << 20  # records looked through for topics that are still to come; more wait only without router.ckpt
_TICK_S = 0.25  # how often the clock is asked that ids are forgotten by
_LAST_CHECKPOINT_S = 1.0  # how long a stop may wait for durability, so that the next start has nothing to read again


def other_pod(stage: Stage) -> str:
    """Who holds the WAL, where that is not our pod's durability but another's, by its host name; else ""."""
    lock = FileLock(f"{stage.settings.data}/append/.owner")
    holder = lock.holder() if lock.is_held() else ""
    return holder if field(holder, "host") not in ("", field(stage.who, "host")) else ""


def open_ring(stage: Stage) -> RingWriter:
    """The ring, new or as the last framer left it, checked against the WAL."""
    data, is_synced = stage.settings.data, not stage.settings.fsync

    def next_after_wal() -> tuple[int, int]:
        seq, recv_ts = numbered.agreed_end(data, ask_queues=is_synced)
        return seq + 1, recv_ts

    ring = stage.open_ring("framed", next_after_wal)
    waiting = ring.first_waiting_seq()  # before the WAL is read: a living durability moves both on
    in_wal = numbered.end(data)[0]
    if in_wal >= ring.last.next_seq or (not ring.drops and in_wal + 1 < waiting):
        raise CorruptError(
            f"the WAL ends at seq {in_wal}, but the ring {ring.path} holds seq {waiting} to {ring.last.next_seq - 1}: run"
            " kmq verify --repair, which restores the WAL from the queues; if the WAL was restored on purpose to an older"
            " state, queues and checkpoints too, remove the ring while the broker is down"
        )
    return ring


def know_pipe(stage: Stage, ring: RingWriter, staging: Staging) -> None:
    """Is this the FIFO that what is staged came from? If not, a line or a group that was half read never gets its rest.

    Half a group is forgotten whole: without their group its lines would be taken for some that nobody asked to acknowledge,
    and be stored beside those that their producer sends again.

    Where the mark could not be set we cannot tell, and take it for the same: that holds while any stage lives.
    """
    if ring.pipe_marked and not fifo.is_marked(stage.raw):
        forgotten = staging.forget_unfinished(parser.whole)
        if forgotten:
            stage.log.warn("unfinished_line_forgotten", bytes=forgotten, reason="the FIFO died with all its holders")
    ring.pipe_marked = fifo.mark(stage.raw)


def read_wal(stage: Stage, low: int, high: int) -> Iterator[bytes]:
    """The records low…high of the WAL. What a power cut left of its end and its index is mended by durability, not by us."""
    data = stage.settings.data
    try:
        for lines in wal.read(data, low, high):
            yield lines
            low = record.seq_of(last_line(lines)) + 1
        return
    except DamageError as err:
        stage.log.warn(
            "wal_damaged", reason=str(err), effect="read again when durability has mended what a power cut leaves"
        )
    owner, row = FileLock(f"{data}/append/.owner"), stage.page.rows["durability"]

    def has_mended() -> bool | None:
        return (owner.is_held() and row.state_name in ("waiting", "ready")) or None

    stage.wait_for("durability, to mend the WAL", has_mended)
    stage.state("recovering")
    yield from wal.read(data, low, high)


def remember(stage: Stage, ring: RingWriter, now: int) -> tuple[DedupeTable, bool]:
    """What has been stored already, up to the next seq: from the checkpoint, the WAL, and the blocks that still wait.

    True beside it where the checkpoint did not say all of it.
    """
    settings = stage.settings
    table = DedupeTable(settings.producers, settings.producer_ttl, settings.dedupe_count, settings.dedupe_age)
    blocks = [block for block in ring.waiting() if block.count]  # before the WAL is read: durability moves them there
    in_wal = (blocks[0].first_seq if blocks else ring.last.next_seq) - 1
    try:
        seq = table.load(settings.data, ring.last.next_seq - 1, stage.beat)
    except ValueError as err:
        seq, path = 0, dedupe_file.path(settings.data)
        stage.log.warn("producers_unreadable", file=path, reason=str(err), effect="it is removed and the WAL read")
        os.unlink(path)  # the seqs it speaks of may yet come, as other messages
    read = max(seq, wal.first_seq(settings.data) - 1)  # retention may have taken what no checkpoint speaks of any more
    for lines in read_wal(stage, read + 1, in_wal):
        table.absorb(lines, now)
        read = record.seq_of(last_line(lines))
        stage.beat()
    missing = dropped.without(read + 1, in_wal, dropped.accounted(settings.data))
    if missing and not ring.drops:  # a table that is too short would store again what comes again
        raise RetryError(f"the WAL reads up to seq {read} only, but has been written up to {in_wal}")
    for block in blocks:
        if block.first_seq > seq:
            table.absorb(bytes(block.data), now)
    return table, seq < ring.last.next_seq - 1


def known_topics(stage: Stage, ring: RingWriter) -> Catalog:
    """The topics that exist, and those that numbered messages will make: in blocks that wait, and in the WAL."""
    settings = stage.settings

    def routed_seq() -> int:
        return max(stage.page.rows["router"].seq, checkpoint.routed_seq(settings.data))

    catalog = Catalog(
        settings.data,
        most=settings.max_topics,
        may_create=settings.auto_create_topics == "on",
        routed_seq=routed_seq,
        spare_inodes=partial(spare_inodes, settings.data),
    )
    blocks = [block for block in ring.waiting() if block.count]  # before the WAL is read: durability moves them there
    in_wal = (blocks[0].first_seq if blocks else ring.last.next_seq) - 1
    first = max(routed_seq() + 1, wal.first_seq(settings.data), in_wal - _UNROUTED)
    for lines in read_wal(stage, first, in_wal):
        catalog.absorb(lines)
        stage.beat()
    for block in blocks:
        catalog.absorb(bytes(block.data))
    return catalog


class Framer:
    """The job: from the staging area to the ring."""

    def __init__(self, stage: Stage, ring: RingWriter, staging: Staging, clock: AgeClock) -> None:
        self.stage, self.ring, self.staging, self.clock = stage, ring, staging, clock
        self.now, self._tick = int(clock.now_s()), time.monotonic()  # by the trusted clock, and when it was last asked
        self.held_times = HeldTimes(stage.log)
        self.table, is_behind = remember(stage, ring, self.now)
        self.topics = known_topics(stage, ring)
        self.parser = parser.Parser(stage.settings.max_line, self.table, self.topics)
        self.checkpointer = Checkpointer(stage.settings.data, self.table, stage.beat, is_behind)

    def turn(self) -> bool:
        """Frame the whole lines that are staged, as many as one turn may; whether there were any."""
        staging = self.staging
        if time.monotonic() - self._tick > _TICK_S:
            self.now, self._tick = int(self.clock.now_s()), time.monotonic()
            self.held_times.look(self.ring.last.last_ts)
        text = staging.lines()
        if not text:
            return not self._makes_room() and staging.filled == staging.size and self._endless()
        batch = parser.plain(text, self.topics, self.ring.last.next_seq)
        if batch is None:
            ordered = parser.untangle(text)
            if ordered is not text:
                self._carry(staging.consumed + len(text), ordered)
                return True
            batch = self.parser.parse(text, self.ring.last.next_seq, self.now)
        if batch.used:
            self._frame(batch)
            return True
        self._makes_room()
        return False

    def _frame(self, batch: parser.Batch) -> None:
        """Number the lines of `batch` and append them, block by block; the last commit also swaps the areas."""
        ring, staging, row = self.ring, self.staging, self.stage.row
        base, consumed = staging.consumed, staging.consumed
        answers, answered, start = batch.answers, 0, 0
        stops = self._stops(batch)
        for number, (stop, end) in enumerate(stops, 1):
            lines = batch.lines[start:stop]
            last = ring.last
            recv_ts = max(time.time_ns() // 1000, last.last_ts)
            block, added = record.number(lines, last.next_seq, record.format_ts(recv_ts)) if lines else (b"", 0)
            replies = b""
            if answers:
                until = bisect_right(answers, end, lo=answered, key=itemgetter(0))
                replies = parser.replies(answers[answered:until], start, last.next_seq)
                answered = until
            self._wait_room(len(block) + len(replies), len(lines))
            consumed = base + end if batch.cuts else consumed + len(block) - added
            area, offset = staging.active, consumed
            if number == len(stops) and not batch.more:
                area, offset = staging.carried(base + batch.used)
            ring.append(block, last.next_seq, len(lines), len(batch.key), recv_ts, area, offset, replies)
            staging.follow(ring.last)
            row.messages += len(lines)
            row.bytes += len(block)
            row.seq = ring.last.next_seq - 1
            start = stop
            self.stage.beat()
        if not stops:
            self._carry(base + batch.used, b"")
        self.checkpointer.framed(batch.used, ring.last.next_seq, ring.synced_seq, self.now)
        self._count()

    def close(self) -> None:
        """Leave a checkpoint of the table, unless durability is gone or takes too long to store what it speaks of."""
        self.checkpointer.take(self.ring.last.next_seq - 1, self.now)
        until = time.monotonic() + _LAST_CHECKPOINT_S
        while not self.checkpointer.finish(self.ring.synced_seq) and time.monotonic() < until:
            if self.checkpointer.pending and not self.checkpointer.busy and self.ring.reader_is_gone():
                break
            self.stage.pause(_DRAIN_POLL_S)

    def rest(self) -> None:
        """Nothing to frame: what the checkpoint waits for may have come."""
        self.checkpointer.framed(0, self.ring.last.next_seq, self.ring.synced_seq, self.now)

    def _count(self) -> None:
        row, table = self.stage.row, self.table
        row.duplicates, row.producers, row.remembered = self.parser.duplicates, len(table.names), len(table.window)

    def _stops(self, batch: parser.Batch) -> list[tuple[int, int]]:
        """Where the lines are cut into blocks that the ring takes: (lines, bytes of the text), the latter only with cuts."""
        count, max_count, max_bytes = len(batch.lines), self.ring.max_count, self.ring.max_bytes
        said = sum(_REPLY_BYTES + len(answer[-1]) for answer in batch.answers)
        fits = sum(map(len, batch.lines)) + count * _STAMP_BYTES + said <= max_bytes
        if batch.cuts is None:
            if fits:
                return [(stop, 0) for stop in (*range(max_count, count, max_count), count)] if count else []
            return self._greedy([(at, 0) for at in range(1, count + 1)], batch)
        return batch.cuts[-1:] if fits and count <= max_count else self._greedy(batch.cuts, batch)

    def _greedy(self, cuts: list[tuple[int, int]], batch: parser.Batch) -> list[tuple[int, int]]:
        """Each block as large as it may be."""
        max_count, max_bytes, lines = self.ring.max_count, self.ring.max_bytes, batch.lines
        answers = deque(batch.answers)
        stops: list[tuple[int, int]] = []
        count = cost = at = 0  # of the block so far
        before = 0, 0
        for cut in cuts:
            more = sum(map(len, lines[at : cut[0]])) + (cut[0] - at) * _STAMP_BYTES
            while answers and answers[0][0] <= cut[1]:
                more += _REPLY_BYTES + len(answers.popleft()[-1])
            if before != (0, 0) and (cost + more > max_bytes or count + cut[0] - at > max_count):
                stops.append(before)
                count = cost = 0
            count, cost, at, before = count + cut[0] - at, cost + more, cut[0], cut
        return [*stops, cuts[-1]] if cuts else []

    def _wait_room(self, nbytes: int, count: int) -> None:
        ring = self.ring
        if not ring.has_room(nbytes, count):
            while not ring.wait_room(nbytes, count):
                self.stage.check()

    def _carry(self, consumed: int, lines: bytes) -> None:
        """Move what is unfinished to the other area, behind `lines`, in a commit of its own."""
        last = self.ring.last
        area, offset = self.staging.carried(consumed, lines)
        self.ring.commit(Commit(last.head, last.messages, last.next_seq, last.last_ts, area, offset))
        self.staging.follow(self.ring.last)

    def _makes_room(self) -> bool:
        """Move what is unfinished to the start of an area, where its rest fits; whether it was not there already."""
        if not self.staging.consumed:
            return False
        self._carry(self.staging.consumed, b"")
        return True

    def _endless(self) -> bool:
        """The area is full of bytes without a newline: nobody who writes whole lines does that. Keep them, refused."""
        staging = self.staging
        raw = staging.unfinished()
        line = record.malformed("too_long", raw, len(raw), self.stage.settings.max_line)
        self._frame(parser.Batch([line], [(1, len(raw))], len(raw), b""))
        return True


def run(stage: Stage) -> None:
    """Promise: see the module. Settings → links → loop → drain."""
    settings = stage.settings
    owner = stage.own(f"{settings.pipes}/raw.owner", f"FIFO {settings.pipes}/raw (reader)")
    if holder := other_pod(stage):
        stage.wait_for(f"the WAL, held by {holder}", lambda: not other_pod(stage) or None)
    ring = open_ring(stage)
    stage.log.info("seq_resume", seq_resume=ring.last.next_seq - 1, ring="new" if ring.created else "kept")
    staging = Staging(ring, area_bytes(settings.max_line))
    know_pipe(stage, ring, staging)
    stage.state("recovering")
    framer = Framer(stage, ring, staging, AgeClock(stage.row, ring.last.last_ts, stage.log))
    stage.row.seq = ring.last.next_seq - 1
    stage.ready()

    ingress = FileLock(f"{settings.pipes}/ingress.owner")
    poll = select.poll()
    poll.register(stage.raw, select.POLLIN)
    poll.register(stage.signalled, select.POLLIN)
    while True:
        read = staging.read(stage.raw)
        framed = framer.turn()
        if not framed:
            framer.rest()
        stage.beat()
        if stage.stopping:
            stage.state("draining")
            if not framed and not read and not ingress.is_held() and waiting_bytes(stage.raw) == 0:
                break
            stage.check()
            if not framed and not read:
                stage.pause(_DRAIN_POLL_S)
        elif read < READ_BYTES and not (framed and staging.lines()):  # the FIFO was empty: ask by waiting for it
            poll.poll(_IDLE_MS)
    framer.close()
    ring.close()
    owner.release()


if __name__ == "__main__":
    sys.exit(main("framer", run))
