"""Durability stage: turns framed blocks into durable lines, then shows them to the router.

Example: a block with seqs 17…19 from `framed` is appended to append.log and synced. Then its replies go to `acks`, and
the block to `durable`.

Links       in: ring `framed` (sole reader)   out: ring `durable` (sole writer), FIFO `acks`
Owns        the WAL (lock append/.owner), the durable cursor, the `framed` lines of dropped.log.

Invariant   No record of the WAL is shown before it is on disk. Records that were shown or acknowledged are never cut.
            A block enters `durable`, and its replies the FIFO `acks`, only after the fdatasync that covers its lines
            has returned (except under a KMQ_FSYNC other than `always`, see wal.py). The cursor of `framed` moves last.
            If the WAL has records with the seqs of a waiting block already, they must be the same; only the rest of the
            block is stored.
            In a shard a block that is on disk waits for the high watermark hw (kmq/links/role.py). Then it is replied
            to, shown and released. So at most one ring of records is ever uncommitted, and no client hears of them.
Crash       before the fsync      the blocks are still in the ring. The next start cuts their unsynced lines from the
                                  WAL and appends them again;
            after the fsync       the blocks are read again and compared with the WAL's records of the same seqs. They
                                  are not written again. Their replies are sent again, and they are pushed if `durable`
                                  lacks them. If the records differ the process ends: the ring gave these seqs to other
                                  messages, and nothing of the block has been stored;
            inside a line         Wal cuts the torn end, which had not been shown;
            fsync failed          the ring remembers it, the process ends, the next start uses a new segment (wal.py);
            during the start      a start may be killed at any point; the next one begins again.
Not covered A disk that lies about fdatasync.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kmq.broker.admission import Admission
from kmq.broker.clock import AgeClock
from kmq.broker.stage import OomKills, SlowSyncs, Stage, main, wait_for_ring
from kmq.config.states import InForce
from kmq.errors import CorruptError, RetryError
from kmq.links import layout
from kmq.links.fifo import AckWriter
from kmq.links.layout import Block, Framed
from kmq.links.ring import RingReader, RingWriter
from kmq.links.role import LEADING
from kmq.log import checkpoint, dropped, identity, remnant, wal
from kmq.log.committed import shown_seq
from kmq.log.segment import Limits
from kmq.log.wal import RETIRED_AT_ONCE, Stored, Wal

_NOTE_NS = 1_000_000_000  # the open index block gets a provisional line this often, while there are writes


class Durability:
    """Moves blocks from `framed` through the WAL to `durable`. The constructor makes all of the WAL durable first."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self._is_started = stage, False
        self.wal = open_wal(stage, self._wait_for_room, self._count_sync)
        self.framed = attach_framed(stage)
        recover_wal(stage, self.wal, self.framed)
        self.durable = open_durable(stage, self.wal, self.framed)
        self.acks = AckWriter(stage.acks)
        self.syncs, self.sync_times = SlowSyncs(stage.row), stage.page.histogram("sync")
        self.admission = Admission(stage.settings, lambda: stage.row.bytes)
        self.in_force = InForce(stage.settings)
        self.wal.limits = Limits.of(self.in_force.settings)
        self.named = max([0, *(gone.last for gone in dropped.accounted(stage.settings.data))])
        self.clock = AgeClock(stage.row, self.wal.last_ts, stage.log)
        self._noted = time.monotonic_ns()
        self._postponed = self._has_more_due = False
        self.uncommitted: deque[Block] = deque()  # on disk, and above hw
        self._is_started = True
        stage.note_sync()
        stage.row.last_record = self.wal.last_ts * 1000
        self.oom_kills = OomKills(stage.row)
        self.roll_if_over()
        remnant.claim_spare(stage.settings.data)

    def _wait_for_room(self, path: str) -> None:
        """Make room while the disk is full, then wait. May be called in the middle of an append."""
        if self._is_started:
            self._retain()
        else:
            remnant.release_spare(self.stage.settings.data)
        self.stage.wait_for_room(path)

    def _count_sync(self, seconds: float) -> None:
        if self._is_started:
            self.sync_times.observe(seconds)

    def turn(self) -> bool:
        """Commit all blocks that wait as one group; return False if there were none."""
        blocks = self.framed.take()
        if blocks:
            self._name_gap(blocks[0])
            new, position = self._store(blocks)
            committed = blocks
            if self.stage.role is not None:
                self.stage.note_sync()
                self.uncommitted += blocks
                committed = self._committed()
            self._reply(committed)  # first, because producers wait for the replies and not for the rest
            if new:
                self._note(new, position)
            self._finish(committed)
        else:
            self._commit()
            if self.uncommitted and (committed := self._committed()):
                self._reply(committed)
                self._finish(committed)
            if self.acks.waiting:
                self.acks.flush()
        if self._has_more_due:
            self._retain()
        if time.monotonic_ns() - self._noted > _NOTE_NS:
            self.wal.note_open_block()
            if self.in_force.changed():
                self.wal.limits = Limits.of(self.in_force.settings)
            self.roll_if_over()
            self._retain()
            self.oom_kills.look()
            self.stage.end_disk_full()
            remnant.claim_spare(self.stage.settings.data)
            self._noted = time.monotonic_ns()
        return bool(blocks)

    def _committed(self) -> list[Block]:
        """Take the blocks up to hw from the uncommitted blocks."""
        hw, found = self.stage.hw or 0, []
        while self.uncommitted and self.uncommitted[0].last_seq <= hw:  # a block of replies only has the seq before it
            found.append(self.uncommitted.popleft())
        return found

    def is_news(self) -> bool:
        """Return True if a block that waited for hw is committed now."""
        return bool(self.uncommitted) and self.uncommitted[0].last_seq <= (self.stage.hw or 0)

    def awaits_hw(self) -> bool:
        """Return True if blocks wait for hw while this broker leads: their producers may still get replies."""
        role = self.stage.role
        return bool(self.uncommitted) and role is not None and role.read().role == LEADING

    def _finish(self, blocks: list[Block]) -> None:
        """Show the blocks to the router, and release their room in the ring."""
        if blocks:
            self._show(blocks)
            self.framed.release(blocks[-1])
            if self.stage.role is not None:
                self.stage.row.seq = blocks[-1].last_seq

    def _name_gap(self, block: Block) -> None:
        """Name in dropped.log the seqs that drop_oldest dropped before this block, before the block is stored."""
        expected = max(self.wal.last_seq, self.named) + 1
        if block.first_seq <= expected:
            return
        if not self.framed.jumped:
            raise CorruptError(f"the WAL ends at seq {expected - 1}, but the ring goes on at {block.first_seq}")
        settings, row = self.stage.settings, self.stage.row
        dropped.append(settings.data, "framed", expected, block.first_seq - 1, self.stage.wait_for_room)
        self.named = block.first_seq - 1
        row.dropped += block.first_seq - expected
        self.stage.log.warn("dropped", ring="framed", first_seq=expected, last_seq=self.named)

    def _store(self, blocks: list[Block]) -> tuple[list[Stored], int]:
        """Append the lines that the WAL lacks, and sync: the commit point. Return the lines and their byte position."""
        new = without_stored(self.wal, self.framed, [block for block in blocks if block.count])
        if not new:
            return new, 0
        nbytes = sum(len(data) for data, *_ in new)
        while self.admission.must_wait(nbytes):
            self.roll_if_over()  # a sealed segment may be deleted, which makes room
            self._retain()
            self.stage.wait_for_room(f"{self.stage.settings.data} (KMQ_DATA_QUOTA)", "quota")
        with self._syncing():
            position = self.wal.write(new)  # may seal a segment, which syncs
            self.wal.commit()
        if self.stage.role is None:
            self.stage.row.seq = self.wal.last_seq
        return new, position

    def _note(self, new: list[Stored], position: int) -> None:
        """Add the stored lines to the index and to the stats page."""
        row = self.stage.row
        self.wal.index(new, position)
        self.stage.end_disk_full()
        row.messages += sum(count for _, _, count, _ in new)
        row.bytes += sum(len(data) for data, *_ in new)

    def _commit(self) -> None:
        """Sync the lines that are due under KMQ_FSYNC, when no new block has come."""
        if self.wal.synced_seq < self.wal.last_seq:
            with self._syncing():
                self.wal.commit()

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        """Wrap calls that may sync: the ring remembers up to which seq all is synced, and whether a sync has failed."""
        before, began = self.wal.synced_seq, time.monotonic()
        try:
            yield
        except (RetryError, OSError):
            self.framed.sync_failed = True
            raise
        self.framed.set_synced(self.wal.synced_seq)
        if self.wal.synced_seq > before:
            self.stage.row.synced = time.time_ns()
            self.syncs.observe(time.monotonic() - began)

    def roll_if_over(self) -> None:
        """Seal the active segment if it is over its limits, also an idle one: only sealed segments can be deleted."""
        with self._syncing():
            postponed = self.wal.roll_if_over(self.clock.now_s(), bool(self.admission.refusal()))
        if postponed and not self._postponed:
            self.stage.log.warn(
                "roll_postponed", file=self.wal.path, reason="no room", effect="retention waits; tried again"
            )
        self._postponed = postponed

    def _retain(self) -> None:
        """Delete some old segments, unless the router may be about to read them to repair a queue."""
        stage, self._has_more_due = self.stage, False
        if stage.page.rows["router"].state_name in ("starting", "waiting", "recovering"):
            return
        needed_after = partial(checkpoint.wal_is_free_up_to, stage.settings.data)
        deleted = self.wal.retain(needed_after, self.clock.now_s())
        if not deleted and stage.settings.tier and (lacking := self.admission.shortage()) > 0:
            deleted = self.wal.make_room(needed_after, lacking)
            if deleted:
                self.admission.recount()
                nbytes = sum(gone.size for gone in deleted)
                stage.log.info("room_from_tier", log="append", segments=len(deleted), bytes=nbytes)
        self._has_more_due = len(deleted) == RETIRED_AT_ONCE
        for gone in deleted:
            stage.log.info("segment_deleted", file=gone.path, first_seq=gone.first, bytes=gone.size)

    def _reply(self, blocks: list[Block]) -> None:
        """Send the replies, also of blocks that were stored before a kill: those may not have been sent."""
        replies = b"".join([block.replies for block in blocks if block.replies])
        if replies:
            lost = self.acks.lost
            self.acks.put(replies)
            if self.acks.lost > lost:
                self.stage.log.warn("replies_lost", bytes=self.acks.lost - lost, reason="nobody reads the FIFO acks")

    def _show(self, blocks: list[Block]) -> None:
        """Push the blocks that `durable` does not have yet."""
        durable = self.durable
        for block in blocks:
            if not block.count or block.first_seq < durable.last.next_seq:
                continue
            if not durable.has_room(len(block.data), block.count):
                wait_for_ring(self.stage.row, self.stage.check, durable, len(block.data), block.count)
            durable.append(Framed(block.data, block.stamp))
        self.stage.beat()


# --- the start -------------------------------------------------------------------------------------------------------


def open_wal(stage: Stage, wait_for_room: Callable[[str], None], on_sync: Callable[[float], None]) -> Wal:
    """Return the WAL, and log what was found wrong with it."""
    settings = stage.settings
    if identity.raise_version(settings.data, wal.last_numbered(settings.data)[0] + 1):
        stage.log.info(
            "format_raised", to=identity.LABELLED, effect="releases before this one do not open the directory any more"
        )
    unindexed = wal.torn_bytes(settings.ring_bytes)
    log = Wal(settings.data, wait_for_room, unindexed, Limits.of(settings), settings.fsync, stage.check, on_sync)
    for path in log.restored:
        stage.log.warn("index_restored", file=path)
    for err in log.misplaced:
        stage.log.error("damaged", file=err.path, reason=err)
        stage.row.found_damage()
    if log.cut_bytes:
        stage.log.warn("torn_tail_cut", file=log.path, bytes=log.cut_bytes, last_seq=log.last_seq)
    if log.set_aside:
        stage.log.warn(
            "set_aside", file=f"{settings.data}/append.log", now=log.set_aside, effect="the symlink is made again"
        )
    return log


def attach_framed(stage: Stage) -> RingReader:
    framed = stage.wait_for("ring framed, from the framer", partial(stage.attach_ring, "framed"))
    assert isinstance(framed, RingReader)
    return framed


def recover_wal(stage: Stage, log: Wal, framed: RingReader) -> None:
    """Make everything in the WAL durable, so that it may then be shown to the router and acknowledged."""
    synced = framed.synced_seq
    last_framed = framed.committed().next_seq - 1
    if log.last_seq > last_framed:  # another instance has written here meanwhile: cut nothing
        raise CorruptError(
            f"the WAL ends at seq {log.last_seq}, but the ring {framed.path} has numbered up to {last_framed} only:"
            " it is older than the WAL; remove it while the broker is down"
        )
    waiting = framed.first_waiting_seq()
    if dropped.without(log.last_seq + 1, waiting - 1, dropped.accounted(log.data)) and not framed.drops:
        raise CorruptError(
            f"the WAL ends at seq {log.last_seq}, but the ring goes on at {waiting}: the WAL was cut;"
            " run kmq verify --repair, which restores it from the queues"
        )
    if synced is None:
        log.rewrite_tail(wal.torn_bytes(framed.size))
    elif log.last_seq > synced or framed.sync_failed:
        # Some appended records may not be on disk. While the ring still has them, trust the ring rather than the page
        # cache. Keep the records that `durable` has shown: under a lax KMQ_FSYNC these are more than the synced ones,
        # and the router has them. Under drop_oldest `framed` may have only the last of these records, and the WAL only
        # the first lines of a block that the ring has whole.
        shown = layout.last_seq(stage.settings.instance, "durable", stage.ring_identity("durable"))
        keep = max(synced, waiting - 1, shown)
        if keep < log.last_seq or framed.sync_failed:
            if framed.sync_failed and not stage.settings.fsync:
                keep = synced  # else all records that the ring has released count as acknowledged
            stage.log.info("unsynced_cut", from_seq=keep + 1, to_seq=log.last_seq, new_segment=framed.sync_failed)
            log.cut_after(keep)
            if framed.sync_failed:
                log.rewrite_after(synced)
                log.roll()
        else:
            log.rewrite_tail(wal.torn_bytes(framed.size))
    log.sync()
    framed.set_synced(log.last_seq)
    framed.sync_failed = False


def open_durable(stage: Stage, log: Wal, framed: RingReader) -> RingWriter:
    """Return the ring `durable`. Raises CorruptError if it has shown records that the WAL does not have.

    In a shard the end of the WAL may not be committed. So a new ring begins after the last seq shown on this disk.
    The records between that seq and the first block of the new role are committed with this block. The router reads
    them from the WAL.
    """

    def begin() -> tuple[int, int]:
        shown = log.last_seq if stage.role is None else shown_seq(log.data)
        return shown + 1, log.last_ts

    durable = stage.open_ring("durable", begin)
    if durable.last.next_seq > log.last_seq + 1 and not framed.drops:
        raise CorruptError(
            f"the WAL ends at seq {log.last_seq}, but the ring {durable.path} has shown seq {durable.last.next_seq - 1}"
        )
    return durable


def without_stored(log: Wal, framed: RingReader, blocks: list[Block]) -> list[Stored]:
    """Return (lines, first seq, count, recv_ts) of records that the WAL lacks; CorruptError if it has other records."""
    last = log.last_seq
    new: list[Stored] = []
    for block in blocks:
        data, first_seq = block.data, block.first_seq
        if first_seq <= last:  # a kill came after the block was stored and before the ring released it
            until = min(block.last_seq, last)
            stored = b"".join(wal.read(log.data, first_seq, until))
            if stored.count(b"\n") != until - first_seq + 1 or data[: len(stored)] != stored:
                raise CorruptError(
                    f"the WAL {log.path} and the ring {framed.path} hold different records from seq {first_seq} on: run"
                    " kmq verify --repair, and if it finds no damage remove the ring; what only the ring holds has not"
                    " been acknowledged"
                )
            data, first_seq = data[len(stored) :], until + 1
        if data:
            new.append((data, first_seq, block.last_seq - first_seq + 1, block.recv_ts))
    return new


def run(stage: Stage) -> None:
    """Promise: see the module. Settings → links → recover → loop → drain."""
    directory = f"{stage.settings.data}/append"
    owner = stage.own(f"{directory}/.owner", f"WAL {directory}", traces=f"{directory}/*.log")
    stage.state("recovering")
    job = Durability(stage)
    stage.row.seq = job.wal.last_seq if stage.role is None else job.durable.last.next_seq - 1
    stage.ready(last_seq=job.wal.last_seq)

    while True:
        busy = job.turn()
        stage.beat()
        if stage.stopping:
            stage.state("draining")
            if not busy and job.framed.writer_is_gone() and not job.awaits_hw():
                break
            stage.check()
        job.framed.wait(job.is_news)  # returns at once if there is more
    job.uncommitted.clear()  # the blocks are views of the ring
    job.wal.close()
    job.durable.close()
    job.framed.close()
    owner.release()


if __name__ == "__main__":
    sys.exit(main("durability", run))
