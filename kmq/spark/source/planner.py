"""The brokers of a query as its planner on the driver sees them: bounds, where the query begins and ends, its tasks."""

import os
from collections.abc import Iterable

from kmq.errors import ConfigError, RetryError
from kmq.log.damage import DamageError
from kmq.log.reader import WAL
from kmq.message import record
from kmq.spark.connections import nearest
from kmq.spark.source import ends, plan
from kmq.spark.source.brokers import Broker, Directory, open_broker
from kmq.spark.source.ends import LATEST
from kmq.spark.source.options import Options
from kmq.spark.source.plan import Bounds, Key, Offsets, Range, Stamp
from kmq.spark.source.reading import Task

# --- lineage ---------------------------------------------------------------------------------------------------------
# Does a broker still have the records that a stream has read? A data directory restored from an older copy does not.
#
# Such a copy has the same id, and gives the seqs and offsets after its end to other records. By offsets alone these would
# look like records that were read, or the reverse. So a stream remembers the seq and recv_ts of the last record it has
# read in each partition (plan.py), and looks for that record.
#
# WAL          Seqs are contiguous and recv_ts never decreases. So a WAL that has the latest remembered record, with its
#              recv_ts, has all earlier records. One record is read, however many partitions there are. A WAL that ends
#              before that record, or has another one there, belongs to a restored copy.
# Partition    If retention has removed the record from the WAL: the record is where it was read. If it was removed there
#              too, no record at its place or after it has the same or a lower seq.
# Shorter      If the WAL has a partition's last read record, but the partition ends before it, the router is recovering
#              and rebuilds the partition. The stream does not read it until it has its old length.
# Not covered  Damage: unreadable records are not compared, and reading them fails by itself. Offsets of format 1: no
#              stamps.

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


# --- planner ---------------------------------------------------------------------------------------------------------


class Logs:
    """The brokers of a query, as its planner sees them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._cores = options.cores or len(os.sched_getaffinity(0))
        self.brokers: dict[str, Broker] = {name: self._open(name) for name in options.brokers}

    def _open(self, name: str) -> Broker:
        return open_broker(name, bool(self.options.paths), self.options.access)

    def identities(self) -> dict[str, str]:
        """Return the data id of each broker. Raises ConfigError if two names lead to one broker."""
        found: dict[str, str] = {}
        names: dict[str, str] = {}
        for name, broker in self.brokers.items():
            found[name] = broker.identity()
            if found[name] in names:
                raise ConfigError(
                    f"{names[found[name]]} and {name} are the same data directory, or copies of one (id {found[name]});"
                    " a stream reads it under one name"
                )
            names[found[name]] = name
        return found

    def bounds(self) -> Bounds:
        """Return the bounds of all requested partitions that exist now."""
        return {key: edges for name in self.brokers for key, edges in self._bounds_of(name).items()}

    def _bounds_of(self, name: str) -> Bounds:
        options, broker = self.options, self.brokers[name]
        there = [*broker.topics(), WAL] if options.pattern else options.topics
        found = broker.bounds([topic for topic in there if options.wants(topic)])
        return {(name, *log): edges for log, edges in found.items() if options.wants(*log)}

    def look_anew(self, name: str, bounds: Bounds) -> None:
        """Open the broker again and read its bounds: its files may have been replaced."""
        self.brokers[name] = self._open(name)
        for key in [key for key in bounds if key[0] == name]:
            del bounds[key]
        bounds |= self._bounds_of(name)

    # --- where records are -------------------------------------------------------------------------------------------

    def cuts(self, key: Key, start: int, end: int, nbytes: int) -> list[int]:
        return self.brokers[key[0]].cuts(key[1], key[2], start, end, nbytes)

    def offset_of_time(self, key: Key, micros: int) -> int:
        return self.brokers[key[0]].offset_of_time(key[1], key[2], micros)

    def time_at(self, key: Key, start: int, end: int) -> int | None:
        found = stamp_at(self.brokers[key[0]], key[1], key[2], start, end)
        return found[1] if found else None

    def bytes_of(self, key: Key, start: int, end: int) -> int:
        return sum(len(lines) for _, lines in self.brokers[key[0]].read(key[1], key[2], start, end))

    def stamp_before(self, key: Key, first: int, offset: int) -> Stamp | None:
        return stamp_before(self.brokers[key[0]], key[1], key[2], first, offset)

    # --- where a query begins and ends -------------------------------------------------------------------------------

    def starting(self, bounds: Bounds, default: int) -> Offsets:
        """Return where the query begins in each partition. Raises ConfigError if options name what does not exist.

        If a log grows during the lookup of a time, `bounds` grow too.
        """
        options = self.options
        self._check_exist(bounds)
        ends.check_named(options.start, bounds, options.wants)
        starts = ends.resolve(options.start, bounds, default, self.offset_of_time)
        ends.check_matches(options.start, starts, bounds, options.time_strategy)
        return starts

    def ending(self, bounds: Bounds) -> Offsets:
        """Return where a batch ends, in the same way."""
        options = self.options
        ends.check_named(options.end, bounds, options.wants)
        return ends.resolve(options.end, bounds, LATEST, self.offset_of_time)

    def check_complete(self, bounds: Bounds) -> None:
        """Raise ConfigError if offsets are given as JSON, but not for every partition."""
        for end in (self.options.start, self.options.end):
            ends.check_complete(end, bounds)

    def _check_exist(self, bounds: Bounds) -> None:
        """Check that a broker has each topic requested by name: a typing error must not look like an empty topic."""
        there = {key[1:] for key in bounds}
        for topic in self.options.topics:
            wanted = self.options.assigned.get(topic)
            if wanted is None and not any(name == topic for name, _ in there):
                self._refuse(topic)
            for partition in wanted or ():
                if (topic, partition) not in there:
                    self._refuse(topic, partition)

    def _refuse(self, topic: str, partition: int = 0) -> None:
        """Raise the error that a topic, or this partition of it, does not exist."""
        where = ", ".join(self.options.brokers)
        known = {WAL: 1}
        for broker in self.brokers.values():
            known |= {name: max(found.partitions, known.get(name, 0)) for name, found in broker.topics().items()}
        if topic in known:
            has = ", ".join(map(str, range(known[topic])))
            raise ConfigError(f"assign: there is no partition {partition} of topic {topic!r} at {where}; it has {has}")
        raise ConfigError(
            f"topic {topic!r} does not exist at {where}{nearest(topic, known)}; subscribePattern takes what there is"
        )

    # --- tasks -------------------------------------------------------------------------------------------------------

    def cut(self, spans: list[Range]) -> dict[Key, list[int]]:
        """Return where each range is cut into tasks."""
        options = self.options
        return plan.cut(spans, self.cuts, self._cores, options.min_partitions, options.max_records_per_partition)

    def tasks(self, spans: Iterable[Range]) -> list[Task]:
        """Cut the ranges now and return the tasks that read them."""
        spans = list(spans)
        edges = self.cut(spans)
        return self.as_tasks(piece for span in spans for piece in plan.cut_up(span, edges.get(span.key, ())))

    def as_tasks(self, pieces: Iterable[Range]) -> list[Task]:
        options = self.options
        return [Task(piece, bool(options.paths), options.access, options.fail_on_data_loss) for piece in pieces]
