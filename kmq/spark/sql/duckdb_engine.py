"""DuckDB as the engine of `kmq sql`: on this machine, without Java.

    SELECT key, value_text FROM orders WHERE offset >= 1500   → Arrow batches of these two columns, from offset 1500 on

DuckDB asks a table for the columns that a statement needs, with the filters that it has pushed down. The table answers
with the Arrow batches that a task of Spark would read.

Invariant   A statement only reads. It is a SELECT (or FROM, VALUES, DESCRIBE, SHOW, SUMMARIZE, EXPLAIN, PIVOT), or it
            makes or drops a view. DuckDB itself has no access to files, network, extensions and variables of Python,
            and its settings are locked: it refuses a function such as read_text. All scans of a statement see the same
            records.
Filters     A range of offsets is skipped if Arrow can prove from its first and last offset (and time, if the filter has
            one) that no record passes. The records of other ranges are filtered one by one.
Memory      One batch of a scan at a time, about 1 MiB of lines. DuckDB's own memory for sorting, joining and grouping
            is memory_limit; beyond that it uses files in a directory that is removed at the end.
"""

import base64
import json
import math
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import cache
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.types as kinds
from pyarrow.fs import LocalFileSystem

from kmq.errors import ConfigError, KmqError
from kmq.log.damage import DamageError
from kmq.log.reader import WAL
from kmq.message import record
from kmq.spark.source import batches, columns
from kmq.spark.source.broker import Broker
from kmq.spark.source.brokers import open_broker
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.plan import LEAST_BYTES, MOST_TASKS, OffsetSpan, without_gaps
from kmq.spark.sql.shell import GROUPS_VIEW, Engine, GroupRow, QueryResult, Views, group_rows, unknown_topic

SETTINGS = ("memory_limit", "threads", "temp_directory")  # that --conf may give
_MEMORY = "512MB"  # as much as Spark's driver has
_LOCKED = {
    "TimeZone": "UTC",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "enable_external_access": "false",
    "lock_configuration": "true",
}
_ROWS = 1000  # in a batch of a result
_FEW = 1000  # records: a smaller range is not cut


@contextmanager
def opened(source: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[Engine]:
    """Yield the engine. `source`: the options that name brokers. `settings`: of DuckDB, some of SETTINGS."""
    for name in settings:
        if name not in SETTINGS:
            raise ConfigError(f"--conf {name}: of DuckDB there are {', '.join(SETTINGS)}")
    with tempfile.TemporaryDirectory(prefix="kmq-duckdb-") as spill, duckdb.connect(":memory:") as connection:
        for name, value in {"memory_limit": _MEMORY, "temp_directory": spill, **settings, **_LOCKED}.items():
            text = value.replace("'", "''")
            try:
                connection.execute(f"SET {name} = '{text}'")
            except duckdb.Error as error:
                raise ConfigError(f"--conf {name}={value}: {_said(error)}") from None
        database = _Database(connection, dict(source))
        yield Engine(lambda text, views: _query(database, text, views), connection.interrupt)


# --- statements ------------------------------------------------------------------------------------------------------

_READING = ("SELECT", "EXPLAIN", "MULTI")  # types of statements; MULTI: a PIVOT
_VIEW = re.compile(r"\s*(create\s+(or\s+replace\s+)?(temp(orary)?\s+)?|drop\s+)view\b", re.IGNORECASE)
_EXPLAIN = re.compile(r"\s*explain(\s+analyze)?\s+", re.IGNORECASE)
# Strings and comments, which stay; a name between backticks; `offset` as a column, which else is a word of LIMIT.
_TOKEN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|--[^\n]*|/\*.*?\*/|`([^`]*)`|(?<!\.)\b(offset)\b(?!\s*[\d($?])""",
    re.IGNORECASE | re.DOTALL,
)


@dataclass
class _Database:
    connection: duckdb.DuckDBPyConnection
    source: dict[str, str]
    tables: "dict[str, TopicTable]" = field(default_factory=dict)  # by name: what this process has registered
    faults: list[BaseException] = field(default_factory=list)  # of the scans of this statement


def quoted(text: str) -> str:
    """Return a statement with its names between backticks, and the column `offset`, in DuckDB's own quotes."""

    def name(found: re.Match[str]) -> str:
        inner = found[1] if found[1] is not None else found[2]
        return found[0] if inner is None else '"' + inner.replace('"', '""') + '"'

    return _TOKEN.sub(name, text)


@contextmanager
def _query(database: _Database, text: str, views: Views) -> Iterator[QueryResult]:
    began = time.monotonic()
    database.faults.clear()
    text = quoted(text)
    try:
        has_result = _check_reads(database.connection, text)
        _register(database, views)
        if has_result:
            yield _result(database.connection.sql(text), began)
        else:
            database.connection.execute(text)
            yield QueryResult([], [], lambda limit: iter(()), lambda: iter(()), began)
    except duckdb.Error as error:
        if database.faults:
            raise database.faults[0] from None
        said = _said(error)
        if missing := re.match(r"Catalog Error: Table with name (.+?) does not exist", said):
            if len(alike := _alike(missing[1], views)) > 1:
                advice = "ask all_topics where topic = '…', or --engine spark"
                raise ConfigError(f"DuckDB cannot tell {' and '.join(alike)} apart; {advice}") from None
            raise unknown_topic(f"`{missing[1]}`", views.topics) from None
        more = "; more: --conf memory_limit=2GB" if isinstance(error, duckdb.OutOfMemoryException) else ""
        raise KmqError(said + more) from error


def _check_reads(connection: duckdb.DuckDBPyConnection, text: str) -> bool:
    """Return True if a statement has a result. Raises ConfigError unless it only reads, or makes or drops a view."""
    found = connection.extract_statements(text)
    kind = " and ".join(statement.type.name for statement in found)
    if kind == "EXPLAIN":
        return _check_reads(connection, _EXPLAIN.sub("", _bare(text), count=1))
    if kind in _READING:
        return True
    if kind in ("CREATE", "DROP") and _VIEW.match(_bare(text)):
        return False
    raise ConfigError(f"kmq sql only reads: SELECT, DESCRIBE, SHOW, EXPLAIN, CREATE VIEW, DROP VIEW; not {kind}")


def _bare(text: str) -> str:
    """Return a statement without the comments before it."""
    return re.sub(r"\A(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/)+", "", text, flags=re.DOTALL)


def _said(error: Exception) -> str:
    """Return DuckDB's message as one line, without the piece of the statement that it points at."""
    return " ".join(re.split(r"\n\s*LINE \d+:", str(error))[0].split())


def _register(database: _Database, views: Views) -> None:
    """Register the views that a statement names, and let the views of earlier statements read the ends of the logs
    again.
    """
    connection, tables = database.connection, database.tables
    for name in [name for name in tables if name not in {*views.topics, *views.named} or len(_alike(name, views)) > 1]:
        connection.unregister(name)
        del tables[name]
    for table in tables.values():
        table.forget()
    for view, subscription in views.named.items():
        if view not in tables and len(_alike(view, views)) == 1:
            tables[view] = TopicTable(ReadOptions({**database.source, **subscription}), database.faults)
            connection.register(view, tables[view])
    if views.has_groups:
        connection.register(GROUPS_VIEW, _groups(database.source))


def _alike(view: str, views: Views) -> list[str]:
    """Return the views in a statement that DuckDB takes for this name, because it ignores upper and lower case."""
    return sorted(each for each in {*views.topics, *views.named} if each.lower() == view.lower())


def _groups(source: Mapping[str, str]) -> pa.Table:
    types = {int: pa.int64(), str: pa.string(), datetime: pa.timestamp("us", "UTC")}
    schema = pa.schema([(name, types[kind]) for name, kind in GroupRow.__annotations__.items()])
    return pa.Table.from_pylist([row._asdict() for row in group_rows(source)], schema)


# --- tables ----------------------------------------------------------------------------------------------------------


_EVERYTHING = columns.select(columns.COLUMNS.items())


class TopicTable(ds.Dataset):  # type: ignore[misc]
    """A view. DuckDB treats it as a data set of Arrow: it reads `schema`, and calls `scanner` for each scan.

    `faults`: gets the error of a scan, of which DuckDB passes on only the text.
    """

    def __init__(self, options: ReadOptions, faults: list[BaseException]) -> None:
        self._options, self._faults = options, faults
        self._spans: list[tuple[Broker, OffsetSpan]] | None = None

    @property
    def schema(self) -> pa.Schema:
        return _EVERYTHING.schema

    def forget(self) -> None:
        """Read the ends of the logs again for the next scan."""
        self._spans = None

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **others: Any) -> Any:
        """Return a reader as DuckDB expects it. `columns`: without those that only the filter needs; None: all."""
        names = list(columns or _EVERYTHING.names)
        schema = pa.schema([self.schema.field(name) for name in names])
        return SimpleNamespace(
            to_reader=lambda: pa.RecordBatchReader.from_batches(schema, self._batches(names, filter))
        )

    def _batches(self, names: list[str], condition: Any) -> Iterator[pa.RecordBatch]:
        words = {*names, *re.findall(r"\w+", str(condition))}
        wanted = names if condition is None else [name for name in _EVERYTHING.names if name in words]
        selection = columns.select((name, columns.COLUMNS[name]) for name in wanted)
        try:
            for broker, span in self._ranges(condition):
                for batch in batches.read(broker, [span], selection):
                    if condition is None:
                        yield batch
                    else:
                        yield from pa.Table.from_batches([batch]).filter(condition).select(names).to_batches()
        except GeneratorExit:
            raise
        except BaseException as error:
            self._faults.append(error)
            raise

    def _ranges(self, condition: Any) -> Iterator[tuple[Broker, OffsetSpan]]:
        """Yield the ranges that may have matching records."""
        if self._spans is None:
            self._spans = list(_all_spans(self._options))
        for broker, span in self._spans:
            for part in [span] if condition is None else narrowed(broker, span, condition):
                yield broker, part


def _all_spans(options: ReadOptions) -> Iterator[tuple[Broker, OffsetSpan]]:
    """Yield all current records of the requested topics, as ranges by broker, topic and partition."""
    for name in options.brokers:
        broker = open_broker(name, bool(options.paths), options.access, tier=options.tier)
        there = [*broker.topics()] if options.pattern else options.topics
        bounds = broker.bounds([topic for topic in there if options.wants(topic)])
        for (topic, partition), (first, end) in sorted(bounds.items()):
            if first < end:
                span = OffsetSpan((name, topic, partition), first, end)
                for part in without_gaps([span], {span.key: broker.gaps.get((topic, partition), ())}):
                    yield broker, part


def narrowed(broker: Broker, span: OffsetSpan, condition: Any) -> Iterator[OffsetSpan]:
    """Yield the parts of a range that may have matching records, as far as Arrow can tell."""
    name, topic, partition = span.key
    edges = [span.start, span.end]
    if len(span) >= _FEW:
        cuts = broker.cuts(topic, partition, span.start, span.end, LEAST_BYTES)
        edges[1:1] = cuts[:: -(-len(cuts) // MOST_TASKS) or 1]
    has_time = re.search(r"\b(recv_ts|timestamp)\b", str(condition))
    fixed = (ds.field("broker") == name) & (ds.field("topic") == topic) & (ds.field("partition") == partition)

    @cache
    def time_at(offset: int) -> Any:
        """Return when the record at an offset was received; None if that is unknown."""
        with suppress(DamageError):
            for _, lines in broker.read(topic, partition, offset, min(offset + 64, span.end)):
                if first_lines := lines.lstrip(b"\n"):
                    return pa.scalar(record.stamp(first_lines)[1], pa.timestamp("us", "UTC"))
        return None

    def may_pass(start: int, end: int) -> bool:
        bounds = fixed & (ds.field("offset") >= start) & (ds.field("offset") < end)
        if topic == WAL:
            bounds &= (ds.field("seq") >= start) & (ds.field("seq") < end)
        if has_time:  # recv_ts never goes back
            if (low := time_at(start)) is not None:
                bounds &= (ds.field("recv_ts") >= low) & (ds.field("timestamp") >= low)
            if end < span.end and (high := time_at(end)) is not None:
                bounds &= (ds.field("recv_ts") <= high) & (ds.field("timestamp") <= high)
        # A file of a data set may have statistics of its rows. By them Arrow drops a file without opening it.
        one = ds.FileSystemDataset.from_paths(
            ["range"], _EVERYTHING.schema, ds.IpcFileFormat(), filesystem=LocalFileSystem(), partitions=[bounds]
        )
        return any(True for _ in one.get_fragments(filter=condition))

    def search(low: int, high: int) -> Iterator[OffsetSpan]:
        if not may_pass(edges[low], edges[high]):
            return
        if high - low == 1:
            yield OffsetSpan(span.key, edges[low], edges[high])
            return
        middle = (low + high) // 2
        yield from search(low, middle)
        yield from search(middle, high)

    yield from search(0, len(edges) - 1)


# --- results ---------------------------------------------------------------------------------------------------------


def _result(relation: Any, began: float) -> QueryResult:
    """Return the result for the shell, as Spark would print it."""
    reader = relation.to_arrow_reader(_ROWS)
    names, types = reader.schema.names, reader.schema.types
    numbers = [kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_decimal(kind) for kind in types]

    def values() -> Iterator[tuple[Any, ...]]:
        return chain.from_iterable(zip(*(column.to_pylist() for column in batch), strict=True) for batch in reader)

    def rows(limit: int) -> Iterator[Sequence[str | None]]:
        return ([*map(_text, row, types)] for row in islice(values(), limit or None))

    def lines() -> Iterator[str]:
        keys = [json.dumps(name, ensure_ascii=False) for name in names]
        for row in values():
            yield "{" + ",".join(f"{key}:{_json(*each)}" for key, *each in zip(keys, row, types, strict=True)) + "}"

    return QueryResult(names, numbers, rows, lines, began)


def _text(value: Any, kind: pa.DataType) -> str | None:
    """Return a value as Spark casts it to a string."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), repr(value))
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(" ")
        return text.rstrip("0") if "." in text else text
    if kinds.is_map(kind):
        return (
            "{" + ", ".join(f"{_text(key, kind.key_type)} -> {_inner(it, kind.item_type)}" for key, it in value) + "}"
        )
    if kinds.is_struct(kind):
        return "{" + ", ".join(_inner(value[part.name], part.type) for part in kind) + "}"
    if kinds.is_list(kind) or kinds.is_fixed_size_list(kind):
        return "[" + ", ".join(_inner(each, kind.value_type) for each in value) + "]"
    return str(value)


def _inner(value: Any, kind: pa.DataType) -> str:
    return "null" if value is None else str(_text(value, kind))


def _json(value: Any, kind: pa.DataType) -> str:
    """Return a value as JSON: bytes in base64, times in UTC with microseconds, maps as objects."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bytes):
        return json.dumps(base64.b64encode(value).decode())
    if isinstance(value, datetime):
        return json.dumps(value.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z")
    if kinds.is_map(kind):
        pairs = [(_text(key, kind.key_type), _json(each, kind.item_type)) for key, each in value]
        return "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{each}" for key, each in pairs) + "}"
    if kinds.is_struct(kind):
        parts = [(part.name, _json(value[part.name], part.type)) for part in kind]
        return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{each}" for name, each in parts) + "}"
    if kinds.is_list(kind) or kinds.is_fixed_size_list(kind):
        return "[" + ",".join(_json(each, kind.value_type) for each in value) + "]"
    return json.dumps(_text(value, kind))
