"""Framer stage: numbers the lines that reach it and puts them, as blocks, into the ring `framed`.

Example: the line `orders.eu|<sent>|7|hello` becomes the line `17|<received>|orders.eu|<sent>|7|hello` of a block.

Links       in: FIFO `raw`, ring `received` (sole reader)   out: ring `framed` (sole writer)
Owns        the reading ends of both, the sequence, the dedupe table.

Invariant   Every line in the FIFO, and every line in `received` that the FIFO announces, gets exactly one seq. Seqs are
            dense. The messages of one control line have consecutive seqs, also over turns and restarts. A
            line that is not a message gets a seq too, as dead.malformed. However much is staged, a turn looks at no
            more than about parser.TURN lines one by one before the next sign of life. A change of a topic is a record,
            too (kmq/framing/topics.py). So is the beginning of an epoch in a shard: it is the first record that its
            leader numbers.
Crash       All state is in the ring's shared memory. One store commits a block, the next seq, and the source of the
            block: bytes of the FIFO, and a position in `received` (ring.py, staging.py, received.py). After a kill
            before that store, the same lines are framed again, in the same place with the same seqs. After a kill
            following it they are never framed again.
            The same lines get the same replies, because the dedupe table is rebuilt from the records that were
            committed. If the ring is gone too (the pod restarted), the sequence continues after the last record of the
            WAL. While another pod still writes to the WAL (a replacement came early) the framer waits: a ring made now
            would soon be older than the WAL.
Not covered A WAL that was changed while the ring lived: the two disagree, which stops the framer.
"""

import os
import select
import sys
import time
from functools import partial

from kmq.broker.clock import AgeClock, HeldTimes
from kmq.broker.stage import Stage, main, wait_for_ring
from kmq.framing import blocks
from kmq.framing.blocks import LineBatch, frame
from kmq.framing.dedupe import DedupeSaver
from kmq.framing.parser import Parser, ReceivedLines
from kmq.framing.recovery import known_topics, open_ring, remember
from kmq.links import fifo, received
from kmq.links.fifo import waiting_bytes
from kmq.links.layout import Received, shm_path
from kmq.links.ownership import FileLock, is_of_another_pod
from kmq.links.ring import RingWriter
from kmq.links.role import STARTING, RoleReading
from kmq.links.staging import READ_BYTES, StagingAreas, area_bytes
from kmq.log import topic_changes
from kmq.log.committed import encode_epoch
from kmq.message import record
from kmq.message.routing import LEVEL

_IDLE_MS = 100  # longest wait on the FIFO: how often to look for changes of topics
_DRAIN_POLL_S = 0.01  # while draining: how often to look whether ingress is gone
_TICK_S = 0.25  # how often to ask the clock by which ids are forgotten
_HEAP_BYTES = 1 << 20  # twice this much free memory is kept between two turns
_LAST_CHECKPOINT_S = 1.0  # how long a stop may wait for durability, so that the next start has nothing to read again


def other_pod(stage: Stage) -> str:
    """Return the holder of the WAL if it is the durability stage of another pod; "" if not.

    While that stage runs, the next seq is not known.
    """
    lock = FileLock(f"{stage.settings.data}/append/.owner")
    holder = lock.holder() if lock.is_held() else ""
    return holder if is_of_another_pod(holder, stage.who) else ""


def check_pipe(stage: Stage, ring: RingWriter, staging: StagingAreas) -> None:
    """Forget a line that was read in part if the FIFO that held its rest is gone.

    A mark on the FIFO shows that it is still the same. If no mark could be set, assume the same FIFO, because a FIFO
    lives as long as any stage.
    """
    if ring.pipe_marked and not fifo.is_marked(stage.raw):
        forgotten = staging.forget_unfinished()
        if forgotten:
            stage.log.warn("unfinished_line_forgotten", bytes=forgotten, reason="the FIFO died with all its holders")
    ring.pipe_marked = fifo.mark(stage.raw)


def await_received(stage: Stage) -> None:
    """Wait for the ring `received`, unless no ingress runs that could make it, or make it again."""
    path, ingress = shm_path(stage.settings.instance, received.NAME), FileLock(f"{stage.settings.pipes}/ingress.owner")
    before = stage.row.state_name
    stage.wait_for("ring received, from ingress", lambda: os.path.exists(path) or not ingress.is_held() or None)
    stage.state(before)


class Framer:
    """Turns staged lines into blocks of the ring."""

    def __init__(self, stage: Stage, ring: RingWriter, staging: StagingAreas, clock: AgeClock) -> None:
        self.stage, self.ring, self.staging, self.clock = stage, ring, staging, clock
        self.now, self._tick = int(clock.now_s()), time.monotonic()  # by the trusted clock, and when it was last asked
        self._messages, self._bytes = stage.row.messages, stage.row.bytes  # to read the row costs more than to write it
        self.held_times = HeldTimes(stage.row, stage.log)
        self.table, is_behind = remember(stage, ring, self.now)
        done = Received(ring.last.birth, ring.last.position)
        self.source = ReceivedLines(stage.attach_received, done, partial(await_received, stage))
        topics, self.requests = known_topics(stage, ring)
        self.parser = Parser(stage.settings.max_line, self.table, self.source, ring.limits, topics)
        self.saver = DedupeSaver(stage.settings.data, self.table, stage.beat, is_behind)
        if ring.last.next_seq == ring.base_seq and stage.role is not None:  # its maker may have been killed before this
            self._begin_epoch(stage.role.read())

    def turn(self) -> bool:
        """Parse the whole lines that are staged, and append them as blocks; return False if there were none."""
        staging, ring = self.staging, self.ring
        if time.monotonic() - self._tick > _TICK_S:
            self.now, self._tick = int(self.clock.now_s()), time.monotonic()
            self.held_times.look(ring.last.last_ts)
            self._count()
        text = staging.lines()
        begun = self.parser.begun(text)  # before anything else gets a seq
        # After the read, so that a topic declared before a line was sent is numbered before that line.
        numbered = not begun and self._number_changes()
        if text:
            batch = self.parser.batch(begun or text, ring.last.next_seq, self.now)
        elif not staging.make_room() and staging.is_full:
            position, max_line = self.source.done.position, self.stage.settings.max_line
            batch = blocks.endless(ring.last.next_seq, position, staging.unfinished(), max_line)
        else:
            return numbered
        self._append(batch)
        return True

    def _begin_epoch(self, role: RoleReading) -> None:
        """As the new leader of a shard, number the record of the epoch before all other records of this epoch."""
        if role.role == STARTING:
            now, broker = record.format_ts(time.time_ns() // 1000), self.stage.settings.broker or os.uname().nodename
            line = encode_epoch(role.epoch, role.mark, broker, LEVEL, now)
            self._append(blocks.single(self.ring.last.next_seq, self.source.done.position, line))

    @property
    def _lasting_seq(self) -> int | None:
        """The seq up to which no record can be lost: on disk, in a shard also committed."""
        synced, hw = self.ring.synced_seq, self.stage.hw
        return synced if synced is None or hw is None else min(synced, hw)

    def _number_changes(self) -> bool:
        """Number each due change of a topic as a record in a block of its own; return False if no change was due."""
        changes = self.requests.due()
        for change in changes:
            seq, position = self.ring.last.next_seq, self.source.done.position
            line = topic_changes.encode(change, record.format_ts(time.time_ns() // 1000))
            self._append(blocks.single(seq, position, line))
            self.requests.numbered(change, seq)
        return bool(changes)

    def _append(self, batch: LineBatch) -> None:
        """Append `batch` block by block. The last commit swaps the staging areas, unless `batch.more` lines follow."""
        ring, staging, stage, source, row = self.ring, self.staging, self.stage, self.source, self.stage.row
        before = self._bytes
        for framed, is_last in frame(batch, ring.limits, ring.last.last_ts, source.done.birth):
            count = framed.stamp.count
            nbytes = len(framed.lines) + len(framed.replies)
            if not ring.has_room(nbytes, count):
                wait_for_ring(row, stage.check, ring, nbytes, count)
            staging.append(framed, swaps=is_last and not batch.more)
            source.committed(framed.received)
            self._messages += count
            self._bytes += len(framed.lines)
            row.messages, row.bytes = self._messages, self._bytes
            row.seq = ring.last.next_seq - 1
            stage.beat()
        if batch.is_empty:
            done = Received(source.done.birth, batch.position)
            staging.swap_areas(staging.consumed + batch.used, done)
            source.committed(done)
        self.saver.framed(self._bytes - before, ring.last.next_seq, self._lasting_seq, self.now)
        if batch.replies:
            self._count()

    def _count(self) -> None:
        row, table = self.stage.row, self.table
        row.duplicates, row.refused = self.parser.duplicates, self.parser.refused
        row.producers, row.remembered = len(table.names), len(table.window.ids)
        row.kafka_producers = table.kafka.count

    def rest(self) -> None:
        """Write a checkpoint of the dedupe table if one is due and possible. Call it when there is nothing to frame."""
        self.saver.framed(0, self.ring.last.next_seq, self._lasting_seq, self.now)

    def close(self) -> None:
        """Write a last checkpoint of the table, unless durability is gone or takes too long to store its records."""
        self.saver.begin_snapshot(self.ring.last.next_seq - 1, self.now)
        until = time.monotonic() + _LAST_CHECKPOINT_S
        while not self.saver.finish(self._lasting_seq) and time.monotonic() < until:
            if self.saver.pending and not self.saver.busy and self.ring.reader_is_gone():
                break
            self.stage.pause(_DRAIN_POLL_S)


def run(stage: Stage) -> None:
    """Promise: see the module. Settings → links → recover → loop → drain."""
    settings = stage.settings
    # A turn frees some hundred kilobytes. The C library may give them back to the kernel, and then the next turn faults
    # them in again; that depends on the layout of the heap. Freeing one large, untouched block raises the library's
    # limit for giving memory back to twice the size of the block (mallopt(3), M_MMAP_THRESHOLD).
    bytes(_HEAP_BYTES)
    owner = stage.own(f"{settings.pipes}/raw.owner", f"FIFO {settings.pipes}/raw (reader)")
    if holder := other_pod(stage):
        stage.wait_for(f"the WAL, held by {holder}", lambda: not other_pod(stage) or None)
    ring = open_ring(stage)
    stage.log.info("seq_resume", seq_resume=ring.last.next_seq - 1, ring="new" if ring.created else "kept")
    staging = StagingAreas(ring, area_bytes(settings.max_line))
    check_pipe(stage, ring, staging)
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
        elif read < READ_BYTES and not (framed and staging.has_lines):  # the FIFO was empty: wait for more
            poll.poll(_IDLE_MS)
    framer.close()
    ring.close()
    owner.release()


if __name__ == "__main__":
    sys.exit(main("framer", run))
