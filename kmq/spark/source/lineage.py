"""Does a broker still have the records that a stream has read? A data directory restored from an older copy does not.

Such a copy has the same id, and gives the seqs and offsets after its end to other records. By offsets alone these would
look like records that were read, or the reverse. So a stream remembers the seq and recv_ts of the last record it has
read in each partition (plan.py), and looks for that record.

WAL          Seqs are contiguous and recv_ts never decreases. So a WAL that has the latest remembered record, with its
             recv_ts, has all earlier records. One record is read, however many partitions there are. A WAL that ends
             before that record, or has another one there, belongs to a restored copy.
Partition    If retention has removed the record from the WAL: the record is where it was read. If it was removed there
             too, no record at its place or after it has the same or a lower seq.
Shorter      If the WAL has a partition's last read record, but the partition ends before it, the router is recovering
             and rebuilds the partition. The stream does not read it until it has its old length.
Not covered  Damage: unreadable records are not compared, and reading them fails by itself. Offsets of format 1: no
             stamps.
"""

from kmq.errors import RetryError
from kmq.log.damage import DamageError
from kmq.log.reader import WAL
from kmq.message import record
from kmq.spark.source.broker import Broker
from kmq.spark.source.brokers import Directory
from kmq.spark.source.plan import Stamp

_LOOK_BACK = (1, 64, 4096)  # records: the bare newlines of compacted records have no stamp


def stamp_of(line: bytes) -> Stamp:
    """Return (seq, recv_ts in µs) of a stored line."""
    seq, ts, _ = line.split(b"|", 2)
    return int(seq), record.parse_ts(ts)


def stamp_at(broker: Broker, topic: str, partition: int, start: int, end: int) -> Stamp | None:
    """Return the stamp of the first record of offsets start…end-1 that compaction left, or None."""
    for ahead in (*_LOOK_BACK, end - start):
        for _, lines in broker.read(topic, partition, start, min(end, start + ahead)):
            if line := lines.lstrip(b"\n"):
                return stamp_of(line)
    return None


def stamp_before(broker: Broker, topic: str, partition: int, first: int, offset: int) -> Stamp | None:
    """Return the stamp of the last remaining record of first…offset-1; None if it is not near or unreadable."""
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
    """Return whether the WAL has this record; None if it cannot tell.

    It cannot tell if retention removed the record, a repair named it as lost, or a gateway does not know yet how much
    of the WAL is durable.
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
    """Return True if a partition may be the one that was read up to `offset`, with `stamp` as the last record."""
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
