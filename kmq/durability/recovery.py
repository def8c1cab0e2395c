"""What durability finds at its start: how much of the WAL is on disk, and which waiting blocks the WAL has already.

Invariant   Nothing of the WAL is shown before it is on disk. Records that were shown, or acknowledged, are never cut.
            Waiting blocks are stored only after the records that the WAL has under their seqs; these must be the same.
Crash       Recovery may be cut off anywhere and starts again.
"""

from kmq.broker.stage import Stage
from kmq.errors import CorruptError
from kmq.files import Buffer
from kmq.links import layout
from kmq.links.layout import Block
from kmq.links.ring import RingReader
from kmq.log import dropped, wal
from kmq.log.wal import Wal


def recover_wal(stage: Stage, log: Wal, framed: RingReader) -> None:
    """Make everything in the WAL durable, so that the router and the producers may learn of it from here on."""
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
        # Records were appended that are not known to be on disk. Trust the ring rather than the page cache as long as
        # the ring still has them. Keep what `durable` has been shown: under a lax KMQ_FSYNC that is more than is
        # synced, and the router has it. Under drop_oldest `framed` may have only the end of these records, and the WAL
        # only the first lines of a block that the ring has whole.
        shown = layout.last_seq(stage.settings.instance, "durable", stage.ring_identity("durable"))
        keep = max(synced, waiting - 1, shown)
        if keep < log.last_seq or framed.sync_failed:
            if framed.sync_failed and not stage.settings.fsync:
                keep = synced  # else what the ring has released counts as acknowledged
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


def without_stored(log: Wal, framed: RingReader, blocks: list[Block]) -> list[tuple[Buffer, int, int, int]]:
    """Return (lines, first seq, count, recv_ts) of what the WAL lacks; CorruptError if it has other records."""
    last = log.last_seq
    new: list[tuple[Buffer, int, int, int]] = []
    for block in blocks:
        data, first_seq = block.data, block.first_seq
        if first_seq <= last:  # after a restart: stored before the ring was told so
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
