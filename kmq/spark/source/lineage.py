"""Does a broker still have the records that a stream has read? A data directory restored from an older copy does not.

Such a copy has the same id, and gives the seqs and offsets behind its end to other records: by offsets alone those would
look like records that were read, or the other way round. So a stream remembers of each partition the seq and recv_ts of the
last record it has read (plan.py), and that record is looked for.

In the WAL   Seqs are contiguous and recv_ts never decreases, so a WAL that has the latest of the records remembered, with that
             recv_ts, has all that came before. One record is read, however many partitions there are. A WAL that ends before
             it, or has another record there, is of a restored copy.
In its       Where retention took it from the WAL: the record is where it was read, or, if retention or compaction took it from
partition    there too, no record at its place or after it has its seq or a lower one.
Shorter      A partition that ends before what was read of it, while the WAL has that record, is being rebuilt: the router is
             recovering. Nothing is read of it until it is as long as it was.
Not covered  Damage: what cannot be read is not compared, reading it is an error of its own. Offsets of format 1, without stamps.
"""

from kmq import record
from kmq.errors import RetryError
from kmq.log.damage import DamageError
from kmq.spark.source.broker import Broker
from kmq.spark.source.brokers import Directory
from kmq.spark.source.options import WAL
from kmq.spark.source.plan import Stamp

_LOOK_BACK = (1, 64, 4096)  # records: behind compaction, a bare newline says nothing


def stamp_of(line: bytes) -> Stamp:
    """(seq, recv_ts in µs) of a stored line."""
    seq, ts, _ = line.split(b"|", 2)
    return int(seq), record.parse_ts(ts)


def stamp_at(broker: Broker, topic: str, partition: int, start: int, end: int) -> Stamp | None:
    """Of the first record of offsets start…end-1 that compaction left; None where there is none."""
    for ahead in (*_LOOK_BACK, end - start):
        for _, lines in broker.read(topic, partition, start, min(end, start + ahead)):
            if line := lines.lstrip(b"\n"):
                return stamp_of(line)
    return None


def stamp_before(broker: Broker, topic: str, partition: int, first: int, offset: int) -> Stamp | None:
    """Of the last record of offsets first…offset-1 that compaction left; None where none is near, or it cannot be read."""
    if isinstance(broker, Directory) and (stamp := broker.stamp_at_end(topic, partition, offset)):
        return stamp
    try:
        for back in _LOOK_BACK:
            low, last = max(first, offset - back), b""
            for _, lines in broker.read(topic, partition, low, offset) if low < offset else ():
                kept = lines.rstrip(b"\n")
                last = kept[kept.rfind(b"\n") + 1 :] or last
            if last:
                return stamp_of(last)
            if low == first:
                break
    except DamageError:
        pass
    return None


def wal_has(broker: Broker, stamp: Stamp) -> bool | None:
    """Whether the WAL has this record; None where it cannot tell.

    Retention took it, or a repair has named it as lost, or a gateway does not know yet what of the WAL is durable.
    """
    seq = stamp[0]
    try:
        found = stamp_at(broker, WAL, 0, seq, seq + 1)
        if found is not None and found[0] == seq:
            return found == stamp
        _, end = broker.bounds([WAL])[WAL, 0]
    except (DamageError, RetryError):
        return None
    return False if end <= seq else None


def partition_has(broker: Broker, topic: str, partition: int, stamp: Stamp, offset: int, end: int) -> bool:
    """Whether a partition that was read up to `offset`, and last the record of `stamp`, may be the same one still."""
    seq = stamp[0]
    at = broker.offset_of_seq(topic, partition, seq)
    try:
        found = stamp_at(broker, topic, partition, at, at + 1) if at < end else None
        if at < offset and found is not None:
            return found == stamp and broker.offset_of_seq(topic, partition, seq + 1) >= min(offset, end)
        if found is not None:
            return found[0] > seq
        return offset >= end or stamp_at(broker, topic, partition, offset, end) is None
    except DamageError:
        return True
