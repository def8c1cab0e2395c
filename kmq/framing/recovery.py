"""Framer start: opens the ring `framed`, and loads the dedupe table and the topics up to the next seq.

Example: the WAL ends at seq 90 and two blocks 91-100 wait in the ring; the table then covers records 1-100.

Invariant   The ring and the WAL agree on the next seq, or the framer stops and reports it. The dedupe table and the
            catalog cover all records before the next seq: those in the WAL, and those in blocks that wait in the ring.
Not covered A WAL that was changed while the ring existed: the two disagree, which stops the framer.
"""

import os
from collections.abc import Iterator
from functools import partial

from kmq.broker.admission import spare_inodes
from kmq.broker.stage import Stage
from kmq.errors import CorruptError, RetryError
from kmq.framing.dedupe import DedupeTable
from kmq.framing.topics import Catalog, TopicRequests
from kmq.links.layout import Block
from kmq.links.ownership import FileLock
from kmq.links.ring import RingWriter
from kmq.log import checkpoint, dedupe_file, dropped, topic_changes, wal
from kmq.log.damage import DamageError
from kmq.log.segment import last_line
from kmq.message import record

_UNROUTED = 1 << 20  # records searched for new topics; more records wait only if router.ckpt is missing


def open_ring(stage: Stage) -> RingWriter:
    """Return the ring, new or as the last framer left it. It is checked against the WAL."""
    data, is_synced = stage.settings.data, not stage.settings.fsync

    def next_after_wal() -> tuple[int, int]:
        seq, recv_ts = checkpoint.agreed_end(data, ask_queues=is_synced)
        return seq + 1, recv_ts

    ring = stage.open_ring("framed", next_after_wal)
    waiting = ring.first_waiting_seq()  # read this before the WAL: a running durability advances both
    in_wal = wal.last_numbered(data)[0]
    if in_wal >= ring.last.next_seq or (not ring.drops and in_wal + 1 < waiting):
        raise CorruptError(
            f"the WAL ends at seq {in_wal}, but the ring {ring.path} holds seq {waiting} to {ring.last.next_seq - 1}:"
            " run kmq verify --repair, which restores the WAL from the queues; if the WAL was restored on purpose to an"
            " older state, queues and checkpoints too, remove the ring while the broker is down"
        )
    return ring


def waiting_blocks(ring: RingWriter) -> tuple[list[Block], int]:
    """Return the blocks that wait in the ring, and the last seq before them.

    Call this before reading the WAL, because durability moves blocks from the ring to the WAL.
    """
    blocks = [block for block in ring.waiting() if block.count]
    return blocks, (blocks[0].first_seq if blocks else ring.last.next_seq) - 1


def remember(stage: Stage, ring: RingWriter, now: int) -> tuple[DedupeTable, bool]:
    """Return the dedupe table up to the next seq, and whether producers.ckpt covered less."""
    settings = stage.settings
    table = DedupeTable(
        settings.producers, settings.producer_ttl, settings.dedupe_count, settings.dedupe_age, settings.kafka_producers
    )
    waiting, in_wal = waiting_blocks(ring)
    try:
        seq = table.load(settings.data, ring.last.next_seq - 1, stage.beat)
    except ValueError as err:
        seq, path = 0, dedupe_file.path(settings.data)
        stage.log.warn("producers_unreadable", file=path, reason=str(err), effect="it is removed and the WAL read")
        os.unlink(path)  # other messages may yet get the seqs that it covers
    read = max(seq, wal.first_seq(settings.data) - 1)  # retention may have deleted records that no checkpoint covers
    for lines in read_wal(stage, read + 1, in_wal):
        table.absorb(lines, now)
        read = record.seq_of(last_line(lines))
        stage.beat()
    missing = dropped.without(read + 1, in_wal, dropped.accounted(settings.data))
    if missing and not ring.drops:  # an incomplete table would store retries a second time
        raise RetryError(f"the WAL reads up to seq {read} only, but has been written up to {in_wal}")
    for block in waiting:
        if block.first_seq > seq:
            table.absorb(bytes(block.data), now)
    if wal.first_seq(settings.data) > seq + 1:
        table.assume_forgotten()
    return table, seq < ring.last.next_seq - 1


def known_topics(stage: Stage, ring: RingWriter) -> tuple[Catalog, TopicRequests]:
    """Return the topics that exist, and the numbered requests that the router has not carried out (WAL and ring)."""
    settings = stage.settings

    def routed_seq() -> int:
        return max(stage.page.rows["router"].seq, checkpoint.routed_seq(settings.data))

    def past_seq() -> int:
        row_seq = stage.page.rows["router"].seq  # if it is ahead of this WAL, it is of another one
        return max(row_seq if row_seq < ring.last.next_seq else 0, checkpoint.routed_seq(settings.data))

    catalog = Catalog(
        settings.data,
        most=settings.max_topics,
        may_create=settings.auto_create_topics == "on",
        routed_seq=routed_seq,
        spare_inodes=partial(spare_inodes, settings.data),
        past_seq=past_seq,
    )
    numbered: dict[str, int] = {}

    def absorb(lines: bytes) -> None:
        catalog.absorb(lines)
        numbered.update((change.request, change.seq) for change in topic_changes.changes(lines))

    waiting, in_wal = waiting_blocks(ring)
    first = max(min(routed_seq(), past_seq()) + 1, wal.first_seq(settings.data), in_wal - _UNROUTED)
    for lines in read_wal(stage, first, in_wal):
        absorb(lines)
        stage.beat()
    for block in waiting:
        absorb(bytes(block.data))
    return catalog, TopicRequests(settings.data, past_seq, numbered)


def read_wal(stage: Stage, low: int, high: int) -> Iterator[bytes]:
    """Yield the records low…high of the WAL. Durability, not the framer, repairs its end after a power cut."""
    data = stage.settings.data
    try:
        for lines in wal.read(data, low, high):
            yield lines
            low = record.seq_of(last_line(lines)) + 1
        return
    except DamageError as err:
        stage.log.warn(
            "wal_damaged", reason=str(err), effect="read again once durability has repaired the end of the WAL"
        )
    owner, row = FileLock(f"{data}/append/.owner"), stage.page.rows["durability"]

    def has_repaired() -> bool | None:
        return (owner.is_held() and row.state_name in ("waiting", "ready")) or None

    stage.wait_for("durability, to repair the WAL", has_repaired)
    stage.state("recovering")
    yield from wal.read(data, low, high)
