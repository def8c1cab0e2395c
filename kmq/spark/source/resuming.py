"""Where a stream resumes, and whether its brokers still have the records that it has read (lineage.py)."""

from kmq.logfmt import Logger
from kmq.spark.source import lineage
from kmq.spark.source.plan import Bounds, DataLossError, Key, Offsets, Position, Stamp
from kmq.spark.source.planner import Logs


class Resumption:
    """Compares what a stream has read with what its brokers have."""

    def __init__(self, logs: Logs) -> None:
        self._logs, self._options = logs, logs.options

    def begun(self, read: Position, bounds: Bounds) -> Offsets:
        """Return how far a stream has read, and where partitions begin that replace deleted ones of the same name.

        A topic that came back under the name of a deleted one is another topic. Raises DataLossError if a topic was
        deleted before all of it was read, or was requested by name.
        """
        known = read.offsets
        new, lost = bounds.keys() - known.keys(), known.keys() - bounds.keys()
        # Retention keeps the last record of a partition, so this is rare unless the topic came back.
        passed = {key for key in known.keys() & bounds.keys() if 0 < known[key] <= bounds[key][0]}
        if not new and not lost and not passed:
            return known
        ends: Offsets = {}
        last_seqs: dict[Key, int] = {}
        for name, broker in self._logs.brokers.items():
            for topic, _, last_seq, offsets in broker.ledger().get("deleted", ()):
                for number, end in enumerate(offsets):
                    ends[name, topic, number] = end
                    last_seqs[name, topic, number] = last_seq
        back = {
            key
            for key in passed & ends.keys()
            if known[key] < ends[key] or (key in read.last and read.last[key][0] <= last_seqs[key])
        }
        for key in sorted((lost & ends.keys()) | back):
            unread = ends[key] > known[key]
            if (
                self._options.fail_on_data_loss
                and self._options.wants(*key[1:])
                and (unread or not self._options.pattern)
            ):
                what = f"the topic was deleted; it was read up to offset {known[key]} of {ends[key]}"
                raise DataLossError(key, f"{what}; another topic has its name now" if key in back else what)
        return {key: ends[key] for key in new & ends.keys()} | known

    def check_same_records(self, read: Position, bounds: Bounds) -> None:
        """Raise DataLossError if a broker now has other records than those that were read.

        Records removed by retention or compaction are no difference. With failOnDataLoss=false this only warns, sets
        `read` back to the first record received after the last one read (no earlier is new), and reads `bounds` again.
        """
        for name, broker in self._logs.brokers.items():
            stamps = {key: stamp for key, stamp in read.last.items() if key[0] == name}
            if not stamps:
                continue
            latest = max(stamps.values(), key=lambda stamp: (stamp[1], stamp[0]))
            has = lineage.wal_has(broker, latest)
            if has:
                continue
            others = [key for key, stamp in stamps.items() if not self._is_same(key, stamp, read, bounds, has)]
            if others and self._options.fail_on_data_loss:
                raise DataLossError(others[0], _restored(stamps[others[0]]), _ADVICE)
            if others:
                self._logs.look_anew(name, bounds)
            for key in others:
                self._set_back(key, read, bounds)

    def _is_same(self, key: Key, stamp: Stamp, read: Position, bounds: Bounds, latest_is_there: bool | None) -> bool:
        """Return True if a partition has the record of `stamp`, or had it until it was taken."""
        broker = self._logs.brokers[key[0]]
        if latest_is_there is not None and (found := lineage.wal_has(broker, stamp)) is not None:
            return found
        if key not in bounds:
            return latest_is_there is None  # deleted, which `begun` has reported
        return lineage.partition_has(broker, key[1], key[2], stamp, read.offsets[key], bounds[key][1])

    def _set_back(self, key: Key, read: Position, bounds: Bounds) -> None:
        micros = read.last.pop(key)[1]
        before = read.offsets.pop(key)
        now = None
        if key in bounds:
            first, end = bounds[key]
            now = read.offsets[key] = min(max(first, self._logs.offset_of_time(key, micros + 1)), end)
            if stamp := self._logs.stamp_before(key, first, now):
                read.last[key] = stamp
        Logger("spark").warn(
            "restored_copy_found", broker=key[0], topic=key[1], partition=key[2], read_up_to=before, resumed_at=now
        )


_ADVICE = (
    "start with a new checkpoint to read what is there now,"
    " or continue with failOnDataLoss=false: with what was received after that record"
)


def _restored(stamp: Stamp) -> str:
    seq, micros = stamp
    when = f"{micros // 1_000_000}.{micros % 1_000_000:06d}"
    return (
        f"the last record read of it, seq {seq} received at {when}, is not there:"
        " the data directory was restored from an older copy (or lost its end in a power cut),"
        " and may have given its offsets to other records"
    )
