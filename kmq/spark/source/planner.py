"""The brokers of a query, as its planner on the driver sees them: where the query begins, resumes and ends, its tasks.

Before a stream resumes, its planner asks: does each broker still have the records that the stream has read? A data
directory restored from an older copy does not. Such a copy has the same id, and gives the seqs and offsets after its
end to other records. By offsets alone these would look like records that were read, or the reverse. So a stream
remembers the seq and recv_ts of the last record it has read in each partition (plan.py), and looks for that record.
Example: orders/0 was read up to offset 1500, and its last record has the stamp "4711 1700000000.000123".

WAL          Seqs are contiguous and recv_ts never decreases. So a WAL that has the latest remembered record, with its
             recv_ts, has all earlier records. One record is read, however many partitions there are. A WAL that ends
             before that record, or has another record with its seq, belongs to a restored copy.
Partition    If retention has removed the record from the WAL: the record is where it was read. If it was removed there
             too, no record at its offset or after it has the same or a lower seq.
Shorter      If the WAL has a partition's last read record, but the partition ends before it, the router is recovering
             and rebuilds the partition. The stream does not read it until it has its old length.
Hold         With onUnreachable=hold a broker that does not answer, or has another data directory, is left out of plans.
             A thread waits until it answers. So only the plan during which it fails waits for it, for HOLD_S. Which
             brokers are left out never changes within a plan.
Not covered  Damage: unreadable records are not compared, and reading them fails by itself. Offsets of format 1: no
             stamps.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from threading import Condition, Thread
from typing import TypeVar

from pyspark.sql.datasource import InputPartition

from kmq.errors import ConfigError, KmqError, RetryError
from kmq.log import gaps
from kmq.log.damage import DamageError
from kmq.log.gaps import Gaps
from kmq.log.reader import WAL
from kmq.logfmt import Logger
from kmq.message import record
from kmq.spark.connections import Access, ReplacedError, UnreachableError, have_one_address, nearest
from kmq.spark.paths import scheme
from kmq.spark.source import ends, plan
from kmq.spark.source.broker import Broker
from kmq.spark.source.brokers import AT_A_TIME, LOOK_S, open_broker, recognised
from kmq.spark.source.ends import LATEST
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.plan import Bounds, DataLossError, Key, Offsets, OffsetSpan, Stamp, StreamPosition
from kmq.spark.source.store import Lineage

HOLD_S = 2.0  # with onUnreachable=hold: how long a plan waits for a broker that has just failed
_PAUSE_S = 1.0  # between two looks whether the old volume of a broker is back
_has_back = Condition()  # notified when a broker of any query answers again; not a field, because Spark pickles queries

T = TypeVar("T")

# --- the same records ------------------------------------------------------------------------------------------------

_ADVICE = (
    "start with a new checkpoint to read what is there now,"
    " or continue with failOnDataLoss=false: with what was received after that record"
)
_LOOK_BACK = (1, 64, 4096)  # records: the bare newlines of compacted records have no stamp


def stamp_at(broker: Broker, topic: str, partition: int, start: int, end: int) -> Stamp | None:
    """Return the stamp of the first record of offsets start…end-1 that compaction left, or None."""
    for ahead in (*_LOOK_BACK, end - start):
        for _, lines in broker.read(topic, partition, start, min(end, start + ahead)):
            if line := lines.lstrip(b"\n"):
                return record.stamp(line)
    return None


def stamp_before(broker: Broker, topic: str, partition: int, first: int, offset: int) -> Stamp | None:
    """Return the stamp of the last remaining record of first…offset-1; None if it is not near or unreadable."""
    if stamp := broker.stamp_at_end(topic, partition, offset):
        return stamp
    try:
        for back in _LOOK_BACK:
            low, last = max(first, offset - back), b""
            for _, lines in broker.read(topic, partition, low, offset) if low < offset else ():
                text = lines.rstrip(b"\n")
                last = text[text.rfind(b"\n") + 1 :] or last
            if last:
                return record.stamp(last)
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
        end = gaps.passed(broker.gaps.get((WAL, 0), ()), end)  # after a fork the seqs up to there are given out
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


# --- the brokers of a query ------------------------------------------------------------------------------------------


class Task(InputPartition):
    """Ranges of one broker, and all that another process needs to read them, one after the other."""

    def __init__(
        self, spans: Sequence[OffsetSpan], options: ReadOptions, data_id: str, lineage: Lineage | None = None
    ) -> None:
        """`data_id`: the task reads only this data directory, and waits for it without a limit; "": see Remote.

        `lineage`: what the task reads, as of the commit that the plan has seen.
        """
        self.broker, self.spans = spans[0].key[0], spans
        self._data_id, self._lineage = data_id, lineage
        self._is_path, self._access, self._tier = bool(options.paths), options.access, options.tier
        self.fail_on_data_loss = options.fail_on_data_loss

    def open(self) -> Broker:
        """Return the broker that has the records."""
        if self._lineage is not None:
            return self._lineage
        return open_broker(self.broker, self._is_path, self._access, self._data_id, self._tier)


class QueryLogs:
    """The brokers of a query, as its planner sees them."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self._cores = options.cores or len(os.sched_getaffinity(0))
        self.away: dict[str, KmqError] = {}  # brokers that are left out, and why
        # (a broker that answers again, the names of all brokers at that moment)
        self._back: deque[tuple[str, list[str]]] = deque()
        self.skipped: set[Key] = set()  # partitions whose deletion has been logged

    @cached_property
    def brokers(self) -> dict[str, Broker]:
        return {name: self._open(name) for name in self.options.brokers}

    def _open(self, name: str) -> Broker:
        return open_broker(name, bool(self.options.paths), self._access(HOLD_S), tier=self.options.tier)

    def _access(self, patience_s: float) -> Access:
        """Return how a plan connects. `patience_s`: with onUnreachable=hold, in place of kmq.patience."""
        access = self.options.access
        if not self.options.holds:
            return access
        return replace(access, timeout_s=min(access.timeout_s, LOOK_S), patience_s=patience_s)

    def each(self, ask: Callable[[str], T], names: Iterable[str] | None = None) -> dict[str, T]:
        """Return the result of `ask` for each broker that is not away. Up to AT_A_TIME gateways are asked at the
        same time.
        """
        there = self.brokers.keys() - self.away.keys()
        present = [name for name in (self.brokers if names is None else names) if name in there]
        if len(present) < 2 or self.options.paths:
            return {name: ask(name) for name in present}
        with ThreadPoolExecutor(min(AT_A_TIME, len(present))) as pool:
            answers = {name: pool.submit(ask, name) for name in present}
        for answer in answers.values():
            if self.options.holds and isinstance(error := answer.exception(), UnreachableError):
                self._hold(error)  # hold all that failed at the same time
        return {name: answer.result() for name, answer in answers.items()}

    # --- brokers that are away ---------------------------------------------------------------------------------------

    def planned(self, plan: Callable[[], T]) -> T:
        """Return the result of `plan`. With onUnreachable=hold it is called again without brokers that are away."""
        self._take_back()
        while True:
            try:
                return plan()
            except (UnreachableError, ReplacedError) as error:
                if not self.options.holds:
                    raise
                self._hold(error)

    def wait(self) -> None:
        """Wait until a broker that was away answers."""
        with _has_back:
            _has_back.wait_for(lambda: self._back)

    def _hold(self, error: UnreachableError | ReplacedError) -> None:
        if error.broker in self.away:
            return
        self.away[error.broker] = error
        effect = "its offsets stay, the other brokers go on; it goes on when it is back"
        Logger("spark").warn("broker_held", at=error.broker, reason=error, effect=effect)
        Thread(target=self._watch, args=(error.broker, getattr(error, "now", "")), daemon=True).start()

    def _watch(self, name: str, other: str) -> None:
        """Wait until a broker answers with another data id than `other`, and note which addresses are one shard
        then.
        """
        names = self.options.servers
        with suppress(KmqError):  # other errors are for the next plan that asks this broker
            broker = open_broker(name, False, self._access(math.inf))
            while broker.identity() == other:
                time.sleep(_PAUSE_S)
            names = recognised(names, self._access(HOLD_S), waits=False)
        with _has_back:
            self._back.append((name, names))
            _has_back.notify_all()

    def _take_back(self) -> None:
        while self._back:
            back, names = self._back.popleft()
            if self.away.pop(back, None) is not None:
                Logger("spark").info("broker_back", at=back)
            self._join(names)

    def _join(self, names: Iterable[str]) -> None:
        """Merge brokers that `names` shows to be one shard. Needed after all addresses of the shard were silent.

        Brokers are never split: a shard that has just failed looks like several brokers again.
        """
        joined: dict[str, list[str]] = {}
        for broker in self.brokers:
            shard = next((name for name in names if have_one_address(name, broker)), broker)
            joined.setdefault(shard, []).append(broker)
        if len(joined) < len(self.brokers):
            now = [",".join(parts) for parts in joined.values()]
            self.options.name_brokers(now)
            self.brokers = {name: self.brokers.get(name) or self._open(name) for name in now}
            self.away = {name: error for name, error in self.away.items() if name in now}

    # --- what there is -----------------------------------------------------------------------------------------------

    def survey(self) -> tuple[dict[str, str], Callable[[], Bounds]]:
        """Return the data id of each broker, and a function that returns `bounds` at that moment. Only it reads files.

        Raises ConfigError if two names lead to one broker.
        """
        identities: dict[str, str] = {}
        names: dict[str, str] = {}
        found = self.each(self._survey_of)
        for name, (identity, _) in found.items():
            if identity in names:
                raise ConfigError(
                    f"{names[identity]} and {name} are the same data directory, or copies of one (id {identity});"
                    " a stream reads it under one name"
                )
            names[identity], identities[name] = name, identity
        return identities, lambda: {key: edges for _, look in found.values() for key, edges in look().items()}

    def gaps(self) -> dict[Key, Gaps]:
        """Return the gaps of partitions, as of the last look at their bounds."""
        here = [(name, broker) for name, broker in self.brokers.items() if name not in self.away]
        return {(name, *log): found for name, broker in here for log, found in broker.gaps.items()}

    def bounds(self) -> Bounds:
        """Return the bounds of all requested partitions that exist now."""
        return {key: edges for _, look in self.each(self._survey_of).values() for key, edges in look().items()}

    def _survey_of(self, name: str) -> tuple[str, Callable[[], Bounds]]:
        options = self.options
        identity, look = self.brokers[name].survey([] if options.pattern else options.topics, options.wants)
        return identity, lambda: {(name, *log): edges for log, edges in look().items() if options.wants(*log)}

    def look_anew(self, name: str, bounds: Bounds) -> None:
        """Open the broker again and read its bounds: its files may have been replaced."""
        self.brokers[name] = self._open(name)
        for key in [key for key in bounds if key[0] == name]:
            del bounds[key]
        bounds |= self._survey_of(name)[1]()

    # --- where records are -------------------------------------------------------------------------------------------

    def cuts(self, spans: Sequence[OffsetSpan], nbytes: int) -> dict[Key, list[int]]:
        """Return where to cut each range into ranges of about `nbytes`."""
        of: dict[str, list[OffsetSpan]] = {}
        for span in spans:
            of.setdefault(span.key[0], []).append(span)

        def ask(name: str) -> dict[Key, list[int]]:
            return {span.key: self.brokers[name].cuts(*span.key[1:], span.start, span.end, nbytes) for span in of[name]}

        return {key: at for found in self.each(ask, of).values() for key, at in found.items()}

    def offset_of_time(self, key: Key, micros: int) -> int:
        return self.brokers[key[0]].offset_of_time(key[1], key[2], micros)

    def offsets_of_time(self, keys: Iterable[Key], micros: int) -> Offsets:
        logs = _by_broker(keys)
        found = self.each(lambda name: self.brokers[name].offsets_of_time(logs[name], micros), logs)
        return {(name, *log): offset for name, offsets in found.items() for log, offset in offsets.items()}

    def time_at(self, key: Key, start: int, end: int) -> int | None:
        found = stamp_at(self.brokers[key[0]], key[1], key[2], start, end)
        return found[1] if found else None

    def bytes_of(self, key: Key, start: int, end: int) -> int:
        return sum(len(lines) for _, lines in self.brokers[key[0]].read(key[1], key[2], start, end))

    def stamp_before(self, key: Key, first: int, offset: int) -> Stamp | None:
        return stamp_before(self.brokers[key[0]], key[1], key[2], first, offset)

    def stamps_before(self, places: Mapping[Key, tuple[int, int]]) -> dict[Key, Stamp]:
        """Return the stamps of the last records of these ranges, `first`…`offset`-1, where there are any."""
        logs = _by_broker(places)

        def find(name: str) -> dict[Key, Stamp | None]:
            return {(name, *log): self.stamp_before((name, *log), *places[name, *log]) for log in logs[name]}

        found = self.each(find, logs).values()
        return {key: stamp for stamps in found for key, stamp in stamps.items() if stamp is not None}

    # --- where a query begins and ends -------------------------------------------------------------------------------

    def starting(self, bounds: Bounds, default: int, brokers: Container[str] | None = None) -> Offsets:
        """Return where the query begins in each partition, or in those of `brokers`.

        Raises ConfigError if options name what does not exist; a broker that is away may have it. If a log grows during
        the lookup of a time, `bounds` grow too.
        """
        options = self.options
        if not self.away:
            self._check_exist(bounds)
            ends.check_named(options.start, bounds, options.wants)
        mine = {key: edges for key, edges in bounds.items() if brokers is None or key[0] in brokers}
        starts = ends.resolve(options.start, mine, default, self.offsets_of_time)
        bounds |= mine
        ends.check_matches(options.start, starts, mine, options.time_strategy)
        return starts

    def ending(self, bounds: Bounds) -> Offsets:
        """Return where a batch ends, in the same way."""
        options = self.options
        ends.check_named(options.end, bounds, options.wants)
        return ends.resolve(options.end, bounds, LATEST, self.offsets_of_time)

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
        counts = {WAL: 1}
        for topics in self.each(lambda name: self.brokers[name].topics()).values():
            counts |= {name: max(found.partitions, counts.get(name, 0)) for name, found in topics.items()}
        if topic in counts:
            has = ", ".join(map(str, range(counts[topic])))
            raise ConfigError(f"assign: there is no partition {partition} of topic {topic!r} at {where}; it has {has}")
        if any(map(scheme, self.options.paths)):
            where += ", which has rows of topics with tier=on, tables, and all others in its WAL: subscribe __append"
        raise ConfigError(
            f"topic {topic!r} does not exist at {where}{nearest(topic, counts)}; subscribePattern takes what there is"
        )

    # --- tasks -------------------------------------------------------------------------------------------------------

    def cut(self, spans: list[OffsetSpan]) -> plan.Cut:
        """Return how the ranges are cut into tasks."""
        options = self.options
        return plan.cut(spans, self.cuts, self._cores, options.min_partitions, options.max_records_per_partition)

    def tasks(self, spans: Iterable[OffsetSpan]) -> list[Task]:
        """Cut the ranges now and return the tasks that read them."""
        spans = plan.without_gaps(spans, self.gaps())
        found = self.cut(spans)
        pieces = (piece for span in spans for piece in plan.cut_up(span, found.at.get(span.key, ())))
        return self.as_tasks(plan.shared(pieces, found.tasks))

    def as_tasks(
        self, shares: Iterable[Sequence[OffsetSpan]], identities: Mapping[str, str] | None = None
    ) -> list[Task]:
        """`identities`: data ids of the brokers that tasks wait for."""
        ids, tasks = identities or {}, []
        for share in shares:
            name = share[0].key[0]
            broker = self.brokers[name]
            lineage = broker.only(share) if isinstance(broker, Lineage) else None
            tasks.append(Task(share, self.options, ids.get(name, ""), lineage))
        return tasks


def _by_broker(keys: Iterable[Key]) -> dict[str, list[tuple[str, int]]]:
    logs: dict[str, list[tuple[str, int]]] = {}
    for name, topic, partition in keys:
        logs.setdefault(name, []).append((topic, partition))
    return logs


# --- resuming --------------------------------------------------------------------------------------------------------


def begun(logs: QueryLogs, read: StreamPosition, bounds: Bounds) -> Offsets:
    """Return how far a stream has read, and where partitions begin that replace deleted ones of the same name.

    A topic that was created again after a deletion is another topic. Raises DataLossError if a topic was deleted
    before all of it was read, or was requested by name. Removes the stamps of a topic that was accepted.
    """
    before = read.offsets
    new, lost = bounds.keys() - before.keys(), before.keys() - bounds.keys()
    # Retention keeps the last record of a partition, so this is rare unless the topic was created again.
    passed = {key for key in before.keys() & bounds.keys() if 0 < before[key] <= bounds[key][0]}
    if not new and not lost and not passed:
        return before
    ends: Offsets = {}
    last_seqs: dict[Key, int] = {}
    for name, accounts in logs.each(lambda name: logs.brokers[name].ledger()).items():
        for topic, _, last_seq, offsets in accounts.get("deleted", ()):
            for number, end in enumerate(offsets):
                ends[name, topic, number] = end
                last_seqs[name, topic, number] = last_seq
    back = {
        key
        for key in passed & ends.keys()
        if before[key] < ends[key] or (key in read.last and read.last[key][0] <= last_seqs[key])
    }
    for key in sorted((lost & ends.keys()) | back):
        unread = OffsetSpan(key, before[key], ends[key])
        if not logs.options.wants(*key[1:]):
            continue
        if logs.options.fail_on_data_loss and (len(unread) or not logs.options.pattern):
            what = f"the topic was deleted; it was read up to offset {before[key]} of {ends[key]}"
            raise DataLossError(key, f"{what}; another topic has its name now" if key in back else what)
        if len(unread) and key in lost and key not in logs.skipped:
            logs.skipped.add(key)
            plan.warn_skipped(unread)
    for key in back:  # the new topic is accepted: the stamp is of the old one
        read.last.pop(key, None)
    return {key: ends[key] for key in new & ends.keys()} | before


def check_same_records(logs: QueryLogs, read: StreamPosition, bounds: Bounds) -> None:
    """Raise DataLossError if a broker now has other records than those that were read.

    Records removed by retention or compaction are no difference. With failOnDataLoss=false this only warns, sets
    `read` back to the first record received after the last one read (earlier records are not new), and reads `bounds`
    again.
    """
    stamps_of: dict[str, dict[Key, Stamp]] = {}
    for key, stamp in read.last.items():
        stamps_of.setdefault(key[0], {})[key] = stamp
    latest = {name: max(of.values(), key=lambda stamp: (stamp[1], stamp[0])) for name, of in stamps_of.items()}
    found = logs.each(lambda name: wal_has(logs.brokers[name], latest[name]), latest)
    for name, has in found.items():
        stamps = stamps_of[name]
        if has:
            continue
        others = [key for key, stamp in stamps.items() if not _is_same(logs, key, stamp, read, bounds, has)]
        if others and logs.options.fail_on_data_loss:
            raise DataLossError(others[0], _restored(stamps[others[0]]), _ADVICE)
        if others:
            logs.look_anew(name, bounds)
        for key in others:
            _set_back(logs, key, read, bounds)


def _is_same(
    logs: QueryLogs, key: Key, stamp: Stamp, read: StreamPosition, bounds: Bounds, latest_is_there: bool | None
) -> bool:
    """Return True if a partition has the record of `stamp`, or had it until retention removed it."""
    broker = logs.brokers[key[0]]
    if latest_is_there is not None and (found := wal_has(broker, stamp)) is not None:
        return found
    if key not in bounds:
        return latest_is_there is None  # deleted, which `begun` has reported
    return partition_has(broker, key[1], key[2], stamp, read.offsets[key], bounds[key][1])


def _set_back(logs: QueryLogs, key: Key, read: StreamPosition, bounds: Bounds) -> None:
    micros = read.last.pop(key)[1]
    before = read.offsets.pop(key)
    now = None
    if key in bounds:
        first, end = bounds[key]
        now = read.offsets[key] = min(max(first, logs.offset_of_time(key, micros + 1)), end)
        if stamp := logs.stamp_before(key, first, now):
            read.last[key] = stamp
    Logger("spark").warn(
        "restored_copy_found", broker=key[0], topic=key[1], partition=key[2], read_up_to=before, resumed_at=now
    )


def _restored(stamp: Stamp) -> str:
    seq, micros = stamp
    when = f"{micros // 1_000_000}.{micros % 1_000_000:06d}"
    return (
        f"the last record read of it, seq {seq} received at {when}, is not there:"
        " the data directory was restored from an older copy (or lost its end in a power cut),"
        " and may have given its offsets to other records"
    )
