"""format("kmq"), writing: the rows of a batch or a stream as messages, each stored exactly once.

    df.write.format("kmq").mode("append").option("kmq.producers", "a:5673").option("topic", "orders")
        .option("kmq.producer", "backfill-7").save()
    df.writeStream.format("kmq").option("kmq.producers", "a:5673").option("checkpointLocation", …).start()

Columns, by name; others are not looked at:
    value               binary or string; null is a tombstone, which empty is not
    routing_key         binary or string, as in the line; or topic and key; or option `topic`, which wins, and key (null: none)
    producer_ts         string or timestamp; without it now
    headers             map<string,string>
    producer and id     both, or neither is looked at: under which name and number the broker knows a row. Numbers have at most 18
                        digits and rise within a producer, whose rows of a batch are in one Spark partition:
                        df.repartition("producer").sortWithinPartitions("producer", "id")

Options:
    kmq.producers       where ingress listens: host:5673, several with commas. A Spark partition (a producer, where there is that
                        column) always goes to the same one of them: leave the list as it is while a checkpoint lives
    kmq.token           bearer token, where the broker asks for one
    topic               of all rows
    kmq.producer        name of this job. A batch needs one, for it has nothing else to be known by: see Again
    kmq.timeout         seconds that a broker which does not answer is waited for (600), with a warning every 10 s

Invariant   A row is stored once, whatever is killed or tried again. Its line carries a producer and a number, of which the
            broker knows what it has: `<kmq.producer, or s>-<query id>-<Spark partition>` and batch · 10⁹ + row in a stream, also
            in a batch that its foreachBatch writes; `<kmq.producer>-<Spark partition>` and row in any other batch. From the
            same checkpoint Spark gives a batch that is run again the same number.
Crash       of the driver, an executor, a Python worker: the rows come again with the same numbers; the broker answers `!dup`.
            of the broker: kmq.Producer connects again and sends what has no reply.
            Writers that a dead driver leaves behind, and speculative attempts: the later one fences the other, which waits and
            takes its turn again, so that none stops the other for ever. What both send is stored once.
Again       A batch run again under its name stores what is missing and nothing twice, if its rows are the same, in the same
            Spark partitions and order. Another batch needs another name. A row that comes under the number of another one, or
            below numbers that were passed over, fails the task with id_reused or id_too_old. The broker compares topic, key,
            headers and value of the last 4,096 rows of a partition; an older row counts as stored, and where all do a warning
            says it.
Order       So rows must come in the same order again: from files and from KMQ they do; behind a shuffle only after
            sortWithinPartitions by columns that tell all rows apart, or with producer and id of your own.
Not covered There is no transaction: rows are readable as they are stored, also those of a batch that fails later. Of two writers
            with one name and different rows at the same time one fails, or loses the rows that are older than said above.
"""

import logging
import re
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from kmq.client.producer import Delivery, Fenced, NotAnswered, Producer, Refused
from kmq.errors import ConfigError, KmqError, RetryError
from kmq.settings import KIB, MIB
from kmq.spark.lines import Ints, RowError, block, numbers, pieces, to_lines

# Of what runs a task (Spark's own names, guarded by a test): set in streams, and in what foreachBatch does.
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
BATCH_ROWS = BATCHES = 10**9  # numbers of a batch in a Spark partition; batches: 18 digits are all there are

_TEXT = ("string", "binary")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_COLUMNS = {
    "value": _TEXT,
    "routing_key": _TEXT,
    "topic": _TEXT,
    "key": _TEXT,
    "producer_ts": (*_TEXT, "timestamp"),
    "headers": ("map<string,string>",),
    "producer": _TEXT,
    "id": (*_TEXT, *_INTEGERS),
}
_OPTIONS = ("kmq.producers", "kmq.token", "kmq.producer", "kmq.timeout")
_PORT = 5673
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")  # of a producer (design 2.4)
_PIECE_BYTES = 256 * KIB  # of one send: what ingress receives at once
_IN_FLIGHT_BYTES = 16 * MIB
_OPEN = 8  # connections of a task whose rows have many producers
_SAY_S = 10.0
_TURNS_S = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # pauses of one that was fenced, ever longer: two never stop each other


class _Options:
    """The write options, checked; ConfigError names what is wrong."""

    def __init__(self, given: Mapping[str, str]) -> None:
        options = {name.lower(): text for name, text in given.items()}
        for name in options:
            if name.startswith("kmq.") and name not in _OPTIONS:
                raise ConfigError(f"{name}: is none of the options of a writer: topic, {', '.join(_OPTIONS)}")
        self.brokers = [_address(part) for part in options.get("kmq.producers", "").split(",") if part.strip()]
        if not self.brokers:
            raise ConfigError("kmq.producers: where to write to is missing: host:port of a broker's line protocol")
        self.token, self.topic = options.get("kmq.token", ""), options.get("topic", "")
        self.producer = options.get("kmq.producer", "")
        if self.producer and not _NAME.fullmatch(self.producer):
            raise ConfigError(f"kmq.producer={self.producer!r}: must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        try:
            self.timeout_s = float(options.get("kmq.timeout", "600"))
        except ValueError:
            self.timeout_s = 0.0
        if not 0 < self.timeout_s < 1e9:
            raise ConfigError(f"kmq.timeout={options['kmq.timeout']!r}: must be seconds, over 0")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host:
        host, port = text.strip(), str(_PORT)
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"kmq.producers={text.strip()!r}: must be host:port")
    return host.strip("[]"), int(port)


class Written(WriterCommitMessage):
    """What a task has written: rows, and how many of them the broker had from an earlier attempt."""

    def __init__(self, rows: int, duplicates: int) -> None:
        self.rows, self.duplicates = rows, duplicates


class _Writer:
    """What batch and stream have in common. Made on the driver, pickled, used in each task."""

    streaming = False

    def __init__(self, schema: StructType, options: Mapping[str, str], overwrite: bool) -> None:
        self.options = _Options(options)
        if overwrite:
            raise ConfigError("a log is only ever added to: mode('append'), outputMode append or update")
        kinds = {field.name: field.dataType.simpleString() for field in schema.fields if field.name in _COLUMNS}
        for name, kind in kinds.items():
            if kind not in _COLUMNS[name]:
                raise ConfigError(f"column {name}: must be {' or '.join(_COLUMNS[name])}, not {kind}")
        if "value" not in kinds:
            raise ConfigError("column value is missing: the payload, binary or string")
        if not (self.options.topic or "routing_key" in kinds or "topic" in kinds):
            raise ConfigError("where to write to is missing: column routing_key, column topic or option topic")
        self.has_ids = "producer" in kinds and "id" in kinds
        if "producer" in kinds and "id" not in kinds:
            raise ConfigError("column producer needs column id: the number of each row, rising within its producer")
        if not (self.streaming or self.has_ids or self.options.producer):
            raise ConfigError(
                "a batch write needs option kmq.producer, a name of this job, so that what is tried again is stored once;"
                " or columns producer and id"
            )

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """One task. Returns when the broker has answered for every row."""
        task = TaskContext.get()
        assert task is not None
        identify: Callable[[pa.RecordBatch, int], _Identity]
        identify = _Given() if self.has_ids else _Counted(*self._identity(task))
        place = None if self.has_ids else task.partitionId()
        with _Senders(self.options, place) as senders:
            rows = 0
            for batch in batches:
                if batch.num_rows:
                    self._write(senders, batch, identify(batch, rows), rows)
                    rows += batch.num_rows
            return Written(rows, senders.finish())

    def _write(self, senders: "_Senders", batch: pa.RecordBatch, identity: "_Identity", first_row: int) -> None:
        """All of a batch or, where one of its rows is no message, nothing of it."""
        ids, owners = identity
        limit = min(senders.max_line(name) for name, _ in owners)
        lines = to_lines(batch, ids, time.time(), topic=self.options.topic, max_line=limit, first_row=first_row)
        for name, rows in owners:
            for piece in pieces(lines if rows is None else lines.take(pa.array(rows)), _PIECE_BYTES):
                senders.send(name, block(piece))

    def _identity(self, task: TaskContext) -> tuple[str, int]:
        """(producer, number of its first row) of this task's rows."""
        query, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        name, first = self.options.producer or "s", 0
        if query and batch:
            name, first = f"{name}-{query}", int(batch) * BATCH_ROWS
        elif self.streaming:
            raise KmqError(f"Spark does not say which query and batch this is: no {QUERY_ID} or no {BATCH_ID}")
        name = f"{name}-{task.partitionId()}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"kmq.producer={self.options.producer!r}: is too long, for {name!r} has over 64 characters"
            )
        if first >= BATCHES * BATCH_ROWS:
            raise ConfigError(f"batch {batch}: a query has at most {BATCHES:,}; go on with a new checkpoint")
        return name, first


_Identity = tuple[Ints, list[tuple[str, Ints | None]]]  # ids, and whose rows (None: all)


class _Counted:
    """Numbers made from the place of a row."""

    def __init__(self, name: str, first: int) -> None:
        self._name, self._first = name, first

    def __call__(self, batch: pa.RecordBatch, first_row: int) -> _Identity:
        end = first_row + batch.num_rows
        if end > BATCH_ROWS:
            raise KmqError(f"over {BATCH_ROWS:,} rows in one Spark partition: more partitions, or smaller batches")
        return np.arange(self._first + first_row, self._first + end), [(self._name, None)]


class _Given:
    """Numbers from columns `producer` and `id`. One that is not above the last would count as stored, and be lost: an error."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def __call__(self, batch: pa.RecordBatch, first_row: int) -> _Identity:
        ids = numbers(batch, first_row)
        coded = batch.column("producer").cast(pa.string()).dictionary_encode()
        if coded.null_count:
            raise RowError(first_row + pc.index(coded.is_null(), True).as_py(), "producer", "is null")
        codes = coded.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
        owners: list[tuple[str, Ints | None]] = []
        for name, rows in zip(coded.dictionary.to_pylist(), parts, strict=True):
            self._check(name, ids[rows], first_row + rows)
            owners.append((name, rows if len(parts) > 1 else None))
        return ids, owners

    def _check(self, name: str, ids: Ints, rows: Ints) -> None:
        if not _NAME.fullmatch(name):
            raise RowError(int(rows[0]), "producer", f"{name[:100]!r}: must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        before = np.concatenate(([self._last.get(name, -1)], ids[:-1]))
        wrong = ids <= before
        if wrong.any():
            at = int(wrong.argmax())
            why = f"{ids[at]} comes after {before[at]} of the same producer {name}: sortWithinPartitions(producer, id)"
            raise RowError(int(rows[at]), "id", why)
        self._last[name] = int(ids[-1])


class KmqWriter(_Writer, DataSourceArrowWriter):
    """df.write. See the module."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver, when all tasks are done; everything has been stored by then."""
        rows, duplicates = _sum(messages)
        if rows and duplicates == rows:
            _log().warning(
                "all %d rows had been stored before with kmq.producer=%s: the same job again, or a name used twice",
                rows,
                self.options.producer,
            )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What has been stored stays; the same job run again stores the rest."""
        _log().warning("the write failed: what is stored stays, and the same job run again stores the rest")


class KmqStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """df.writeStream. See the module."""

    streaming = True

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to do: everything has been stored, and if Spark forgets this, it is known to the broker."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """What has been stored stays; the batch comes again, from the same checkpoint."""


def _sum(messages: Sequence[WriterCommitMessage | None]) -> tuple[int, int]:
    done = [message for message in messages if isinstance(message, Written)]
    return sum(each.rows for each in done), sum(each.duplicates for each in done)


# --- sending -------------------------------------------------------------------------------------------------------------


class _Senders:
    """The producers of a task: one, or those that column `producer` names, the latest of them connected."""

    def __init__(self, options: _Options, place: int | None) -> None:
        """`place` says which of the brokers; None: the name of a producer does."""
        self._options, self._place = options, place
        self._open: OrderedDict[str, Sender] = OrderedDict()
        self._duplicates = 0

    def max_line(self, name: str) -> int:
        return self._sender(name).max_line

    def send(self, name: str, lines: bytes) -> None:
        self._sender(name).send(lines)

    def _sender(self, name: str) -> "Sender":
        sender = self._open.get(name)
        if sender is None:
            if len(self._open) >= _OPEN:
                self._close(next(iter(self._open)))
            options = self._options
            place = zlib.crc32(name.encode()) if self._place is None else self._place
            host, port = options.brokers[place % len(options.brokers)]
            sender = self._open[name] = Sender(name, host, port, options.token, options.timeout_s)
        self._open.move_to_end(name)
        return sender

    def _close(self, name: str) -> None:
        sender = self._open.pop(name)
        sender.finish()
        self._duplicates += sender.duplicates

    def finish(self) -> int:
        """Wait for all replies. Returns how many rows had been stored before."""
        for name in list(self._open):
            self._close(name)
        return self._duplicates

    def __enter__(self) -> "_Senders":
        return self

    def __exit__(self, *_: object) -> None:
        for sender in self._open.values():
            sender.abort()


class Sender:
    """One producer at one broker: whole lines with numbers of their own, each stored once."""

    def __init__(self, name: str, host: str, port: int, token: str, timeout_s: float) -> None:
        self._name, self._address, self._timeout_s = name, f"{host}:{port}", timeout_s
        self._make = partial(
            Producer,
            host,
            port,
            producer=name,
            first_id=0,  # the lines bring ids of their own: nobody need ask for the last one, and wait for it
            token=token,
            timeout_s=timeout_s,
            max_in_flight_bytes=_IN_FLIGHT_BYTES,
            stall_s=_SAY_S,
            on_stall=self._say,
        )
        self._unsent: deque[bytes] = deque()
        self._sent: deque[tuple[Delivery, bytes]] = deque()  # without a reply, when last looked at
        self._turns = iter(_TURNS_S)
        self.duplicates = 0
        self._connect()

    def send(self, lines: bytes) -> None:
        """Queue lines; waits while the broker pushes back."""
        self._unsent.append(lines)
        self._go_on(False)

    def finish(self) -> None:
        """Wait until all is stored, and end."""
        try:
            self._go_on(True)
        finally:
            self._end()

    def abort(self) -> None:
        """End now."""
        self._end()

    def _connect(self) -> None:
        self._producer = self._make()
        deadline = time.monotonic() + self._timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                self.max_line = self._producer.connect(min(_SAY_S, max(left, 0.0)))
                return
            except NotAnswered as err:
                if left <= _SAY_S:
                    self._end()
                    raise self._failed(err) from err
                self._say(str(err))
            except Refused as err:
                self._end()
                raise self._failed(err) from err

    def _go_on(self, to_the_end: bool) -> None:
        while True:
            try:
                while self._unsent:
                    self._sent.append((self._producer.send_lines(self._unsent[0]), self._unsent.popleft()))
                if to_the_end:
                    self._producer.flush()
                while self._sent and self._sent[0][0].done:
                    self._sent.popleft()[0].result()
                return
            except Fenced as err:
                self._wait_for_a_turn(err)
            except (Refused, NotAnswered) as err:
                raise self._failed(err) from err

    def _wait_for_a_turn(self, err: Fenced) -> None:
        """Another attempt of this task is at work; if it succeeds Spark ends us, and if it was left behind it ends soon."""
        pause_s = next(self._turns, None)
        if pause_s is None:
            raise self._failed(err) from err
        self._say(f"fenced: another attempt of this task, or a job of the same name; next turn in {pause_s:g} s")
        self._end()
        again = [lines for delivery, lines in self._sent if delivery.error is not None or not delivery.done]
        self._sent.clear()
        self._unsent.extendleft(reversed(again))
        time.sleep(pause_s)
        self._connect()

    def _end(self) -> None:
        self.duplicates += self._producer.duplicates
        self._producer.abort()

    def _failed(self, err: KmqError) -> KmqError:
        kind = RetryError if isinstance(err, (NotAnswered, Fenced)) else KmqError
        text = f"producer {self._name} at {self._address}: {err}"
        if isinstance(err, Refused) and err.code in ("id_reused", "id_too_old"):
            text += (
                "; rows that come again must be the same in the same order (sortWithinPartitions, or columns producer and id),"
                " and another batch needs another kmq.producer"
            )
        return kind(text)

    def _say(self, text: str) -> None:
        _log().warning("producer %s at %s: %s", self._name, self._address, text)


def _log() -> logging.Logger:
    return logging.getLogger("kmq.spark")
