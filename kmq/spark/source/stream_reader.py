"""spark.readStream: where each micro-batch ends, and what is checked before a stream resumes from a checkpoint.

    latestOffset(start)   → {"data": {"orders": {"0": 1500}, …}}, a plan.StreamPosition as JSON

Needs pyspark 4.2, whose classes are imported here. So only a stream imports this module.

Invariant   A task of a batch reads as batch_reader.py says. `partitions` needs nothing but the two offsets of a batch
            (plan.py): a repeated batch always has the same tasks. Without new records latestOffset returns its start
            unchanged, so that no batch runs.
Unlimited   A batch without a limit ends where the partitions end. Their ends are read one after the other, so one
            partition may reach some milliseconds further in time than another; a watermark of seconds covers that. A
            batch with a limit ends at one recv_ts (plan.py).
Hold        With onUnreachable=hold the offsets of a broker that is away stay as they are, so a batch has no records of
            it. A batch that was planned with records of a broker is never planned otherwise: it waits for that broker.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from kmq.errors import ConfigError
from kmq.logfmt import Logger
from kmq.spark.connections import ReplacedError, have_one_address
from kmq.spark.source import plan
from kmq.spark.source.batch_reader import TaskReader
from kmq.spark.source.ends import LATEST
from kmq.spark.source.group import GroupOffsets
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.plan import Bounds, DataLossError, Key, Offsets, OffsetSpan, StreamPosition
from kmq.spark.source.planner import QueryLogs, begun, check_same_records


class StreamReader(TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """spark.readStream: one object plans a query on the driver, as long as the query lives; tasks do the reading."""

    def __init__(
        self,
        schema: StructType,
        options: ReadOptions,
        consume: bytes = b"",
    ) -> None:
        """`consume`: a task calls it with its records and returns the rows that it yields, in place of the records.

        It is a pickled function that takes batches.Blocks and yields Arrow batches. The planner does not import its
        modules.
        """
        super().__init__(schema, consume)
        self._options = options
        self._logs = QueryLogs(options)
        self._target: Offsets | None = None  # where Trigger.AvailableNow ends
        self._latest: dict[str, Any] | None = None
        self._last_batch = -math.inf  # when the last batch was planned
        self._compared: dict[str, str] = {}  # data ids of brokers that the checkpoint was compared with
        self._ends: Offsets = {}  # of the logs, as last seen
        group = options.group_id
        self._group = GroupOffsets(group, options.servers, options.access) if group else None
        self._initial: dict[str, Any] | None = None  # where the first batch begins, if this process decided that
        # The last offset returned, and the data ids and bounds then.
        self._planned: tuple[dict[str, Any], dict[str, str], Bounds] | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._logs.planned(self._begin)

    def _begin(self) -> dict[str, Any]:
        identities, look = self._logs.survey()
        bounds = look()
        starts = self._logs.starting(bounds, LATEST)
        self._logs.check_complete(bounds)
        # If the first batch is uncommitted, Spark asks again. Its end tells where it began; `latest` has moved since.
        position = StreamPosition(starts, identities | dict.fromkeys(self._logs.away, ""), begins=dict(starts))
        self._remember(position, position.offsets, bounds)
        self._initial = position.to_json()
        return self._initial

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = {key: end for key, (_, end) in self._logs.planned(self._logs.bounds).items()}

    # --- how far a batch goes ----------------------------------------------------------------------------------------

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return self._logs.planned(lambda: self._next(start, limit))

    def _next(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        identities, look = self._logs.survey()
        position = StreamPosition.of_json(start)
        read, bounds = self._with_current_names(position, identities), look()
        before = dict(read.offsets)
        if self._group is not None and start != self._initial:
            # Spark plans a batch only when the previous one has finished. So the last batch is committed here too, if
            # another plan follows: with AvailableNow, or after a restart. kmq/spark/streaming/listener.py covers the
            # other cases.
            self._group.commit({key: at for key, at in before.items() if key[0] in identities})
        away = {key: (0, at) for key, at in before.items() if key[0] not in identities}  # brokers that are away
        is_new = self._begin_late(position, read, identities, bounds)
        bounds |= away
        if self._compared != identities or self._there(bounds) != before:
            check_same_records(self._logs, read, bounds)
            self._check_begins(read, bounds)
            self._compared = identities
        self._ends = {k: max(end, self._ends.get(k, 0)) if k in away else end for k, (_, end) in bounds.items()}
        self._latest = plan.to_json(self._ends, read.identities)
        stamps = len(read.last)
        begins = begun(self._logs, read, bounds)
        is_new |= len(read.last) < stamps
        begins, there = plan.up_to_gaps(begins, self._there(bounds), self._logs.gaps())
        spans = plan.wanted(begins, there)  # a partition that is shorter than its read offset waits
        # Save now where a broker begins, and that another topic was accepted: a later plan would decide otherwise.
        if not is_new:
            if not spans and read.offsets == before:
                return start
            if not isinstance(limit, ReadAllAvailable) and self._must_wait(spans):
                return start
        position = self._batch(read, before, begins, spans, bounds, limit)
        table = position.to_json()
        self._planned = table, read.identities, bounds
        return table

    def _begin_late(
        self, position: StreamPosition, read: StreamPosition, identities: dict[str, str], bounds: Bounds
    ) -> bool:
        """Let brokers begin that were away when the stream began. Return True if there are any."""
        missing = [broker for broker, identity in position.identities.items() if not identity]
        late = {name for name in identities if any(have_one_address(name, broker) for broker in missing)}
        if late:
            read.offsets |= self._logs.starting(bounds, LATEST, late)
            self._logs.check_complete({key: edges for key, edges in bounds.items() if key[0] in late})
        return bool(late)

    def _check_begins(self, read: StreamPosition, bounds: Bounds) -> None:
        """Raise ConfigError if the stream is to begin beyond the end of a log.

        Partitions with a stamp were read before: their logs are only shorter for a while, during a recovery.
        """
        for key in (read.offsets.keys() & bounds.keys()) - read.last.keys():
            begin, end = read.offsets[key], bounds[key][1]
            if read.cuts is None or begin <= end:
                continue
            what = f"startingOffsets: {plan.name_of(key)} ends at {end}, which is before {begin}"
            if self._options.fail_on_data_loss:
                raise ConfigError(f"{what}; failOnDataLoss=false begins at the end")
            Logger("spark").warn("start_beyond_end", what=what)
            read.offsets[key] = end

    def _there(self, bounds: Bounds) -> Offsets:
        """Return how far this stream may read now."""
        if self._target is None:
            return {key: end for key, (_, end) in bounds.items()}
        return {key: min(bounds.get(key, (0, 0))[1], end) for key, end in self._target.items()}

    def _must_wait(self, spans: list[OffsetSpan]) -> bool:
        """Return True if minOffsetsPerTrigger holds the records back: at most maxTriggerDelay since the last batch."""
        least, now = self._options.min_offsets, time.monotonic()
        is_late = now - self._last_batch >= self._options.max_trigger_delay_s
        if least and self._target is None and sum(map(len, spans)) < least and not is_late:
            return True
        self._last_batch = now
        return False

    def _batch(
        self,
        read: StreamPosition,
        before: Offsets,
        begins: Offsets,
        spans: list[OffsetSpan],
        bounds: Bounds,
        limit: ReadLimit,
    ) -> StreamPosition:
        """Return the end of the next batch: its offsets, and everything that a replay needs."""
        there = [plan.within(span, bounds) for span in spans]  # records removed by retention do not count for a limit
        reached = {span.key: span.end for span in spans}
        if not isinstance(limit, ReadAllAvailable):
            options = self._options
            reached |= plan.limited(there, options.max_offsets, options.max_bytes, self._logs.cuts, self._logs)
        offsets = begins | reached
        order = {key: offsets[key] for key in sorted(offsets)}
        # The ranges that `partitions` will find between the two offsets, without records that no longer exist.
        wanted = {span.key for span in spans if reached[span.key] > span.start}
        parts = [OffsetSpan(part.key, part.start, reached[part.key]) for part in there if part.key in wanted]
        found = self._logs.cut(sorted(parts, key=lambda part: part.key))
        is_first = read.begins == before
        named = {key: at for key, at in begins.items() if is_first or at != before.get(key, plan.least(key[1]))}
        position = StreamPosition(order, read.identities, dict(read.last), found.at, named, found.tasks)
        self._remember(position, reached, bounds)
        return position

    def _remember(self, position: StreamPosition, reached: Offsets, bounds: Bounds) -> None:
        """Put the stamps of the last records before these offsets into the position."""
        places: dict[Key, tuple[int, int]] = {}
        for key, offset in position.offsets.items():
            first, end = bounds.get(key, (offset, offset))
            is_known = key in position.last and key not in reached
            if first < offset <= end and not is_known:
                places[key] = first, offset
        position.last |= self._logs.stamps_before(places)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Tell Spark that there is a limit. Spark can express only one option; `latestOffset` obeys all of them."""
        options = self._options
        if options.max_offsets:
            return ReadMaxRows(options.max_offsets)
        if options.max_bytes:
            return ReadMaxBytes(options.max_bytes)
        return ReadMinRows(options.min_offsets) if options.min_offsets else ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._latest

    # --- what a batch reads ------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        while (found := self._logs.planned(lambda: self._ends_of(start, end))) is None:
            self._logs.wait()
        read, ends, bounds = found
        spans = plan.wanted(read.offsets | ends.begins, ends.offsets)
        if self._options.fail_on_data_loss:
            self._check_forward(read, ends)
            plan.check_there(spans, bounds)
        else:
            for part in (part for span in spans for part in plan.gone(span, bounds)):
                plan.warn_skipped(part)
        identities = ends.identities if self._options.holds else {}
        if ends.cuts is None:
            there = [piece for span in spans if len(piece := plan.within(span, bounds))]
            pieces = plan.cut_as_format_1(there, self._logs.cuts, self._options.min_partitions)
            return self._logs.as_tasks(([piece] for piece in pieces), identities)
        cut = (piece for span in spans for piece in plan.cut_up(span, ends.cuts.get(span.key, ())))
        shares = plan.shared(cut, ends.tasks)
        return self._logs.as_tasks(([plan.within(piece, bounds) for piece in share] for share in shares), identities)

    def _ends_of(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> tuple[StreamPosition, StreamPosition, Bounds] | None:
        """Return both offsets of a batch and the bounds, as planned by this process or else by an earlier one.

        None if the batch has records of a broker that is away. Raises ConfigError if that broker was replaced.
        """
        planned = self._planned if self._planned is not None and self._planned[0] == end else None
        identities, look = self._logs.survey() if planned is None else (planned[1], lambda: planned[2])
        read, ends = (self._with_current_names(StreamPosition.of_json(table), identities) for table in (start, end))
        missing = {span.key[0] for span in plan.wanted(read.offsets | ends.begins, ends.offsets)} - identities.keys()
        if missing:
            for name, error in self._logs.away.items():
                if isinstance(error, ReplacedError) and any(have_one_address(name, broker) for broker in missing):
                    raise ConfigError(str(error))
            return None
        bounds = look()
        if planned is None and self._options.fail_on_data_loss:
            check_same_records(self._logs, ends, bounds)
        if ends.cuts is None:
            read.offsets = begun(self._logs, read, bounds)
        return read, ends, bounds

    def _check_forward(self, read: StreamPosition, ends: StreamPosition) -> None:
        for key, stop in ends.offsets.items():
            begin = ends.begins.get(key, read.offsets.get(key, 0))
            if begin > stop:
                raise DataLossError(key, f"offsets went back from {begin} to {stop}")

    def _with_current_names(self, position: StreamPosition, now: dict[str, str]) -> StreamPosition:
        """Return the position under the names of this query's brokers; the data id tells which broker is which.

        Offsets of one data directory mean nothing in another one.
        """
        current = {identity: name for name, identity in now.items()}
        names: dict[str, str] = {}
        for broker, identity in position.identities.items():
            at = next((name for name in now if have_one_address(name, broker)), None)
            if identity in current:
                names[broker] = current[identity]
            elif identity and at is not None and identity in self._logs.brokers[at].ancestors():
                names[broker] = at  # it was put back and forked: no offset has been given to another record
            elif identity and at is not None:
                raise ReplacedError(at, identity, now[at])
            elif at is None and self._logs.away:  # it may be one of the brokers that are away
                names[broker] = broker
            elif identity:
                raise ConfigError(f"{broker} is in the checkpoint, but not among the brokers of this query")
        renamed = position.renamed(names)
        renamed.identities |= now
        return renamed
