"""`kmq sql`: topics as views, for one query or at a prompt, and its results as a table, CSV or JSON.

Every topic is a view under its name (`jobs.eu` between backticks). So are `append`, the WAL, and `all_topics`. A query
sees the records that are durable when it begins. Only topics that it names are read. Only columns that it names are
read, if the text shows for certain which these are; otherwise all columns.

`__consumer_offsets` is a table: how far each consumer group is, a row for each partition. The records of that topic are
read here, not by tasks of Spark: only the last one of each key counts, and few bytes are left of it. Partitions that do
not exist any more are left out, as `kmq groups describe` does.
"""

import contextlib
import csv
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from kmq.config.terminal import while_read
from kmq.errors import EXIT_OK, ConfigError
from kmq.gateway.groups.offset_table import TOPIC, CommittedOffset, RowKey, decode_key, decode_payload, scan
from kmq.log.reader import WAL
from kmq.spark import failures
from kmq.spark.source.brokers import Broker, open_broker
from kmq.spark.source.options import ReadOptions
from kmq.spark.streaming.streams import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# --- results ---------------------------------------------------------------------------------------------------------

_MAX_CHARS = 60  # of a value in a table; CSV and JSON print all of it
_WIDE = 1 << 16  # columns of a terminal: more than a table of shortened values can have
_ISO = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"
_NUMBERS = ("byte", "short", "integer", "long", "float", "double", "tinyint", "smallint", "int", "bigint")

Show = Callable[["DataFrame", Progress], None]


def as_table(max_rows: int) -> Show:
    """Return a function that prints an aligned table of at most `max_rows` rows (0: all), with long values shortened.

    It prints the number of rows and the seconds taken on stderr.
    """

    def show(frame: "DataFrame", progress: Progress) -> None:
        begin = time.monotonic()
        texts = _texts(frame)
        rows = texts.take(max_rows + 1) if max_rows else texts.collect()
        progress.stop()
        if not frame.columns:
            return  # the statement has no result
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
        for field in frame.schema.fields:
            is_number = field.dataType.typeName() in _NUMBERS or field.dataType.typeName().startswith("decimal")
            table.add_column(field.name, justify="right" if is_number else "left", no_wrap=True)
        shown = rows[:max_rows] if max_rows else rows
        for row in shown:
            table.add_row(*(cell_text(value) for value in row))
        width = Console(width=_WIDE).measure(table).maximum  # long lines wrap in the terminal, so that nothing is lost
        Console(width=width, highlight=False, markup=False).print(table)
        more = f"; there are more: --rows {10 * max_rows}, or --csv" if len(rows) > len(shown) else ""
        print(f"{len(shown)} row(s) in {time.monotonic() - begin:.1f} s{more}", file=sys.stderr)

    return show


def as_csv(frame: "DataFrame", progress: Progress) -> None:
    """Print CSV with a header; values are printed in full."""
    rows = _texts(frame).toLocalIterator(prefetchPartitions=True)
    progress.stop()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(frame.columns)
    writer.writerows(while_read(rows))


def as_json(frame: "DataFrame", progress: Progress) -> None:
    """Print one JSON object per row, with binary columns in base64."""
    from pyspark.sql.functions import struct, to_json

    lines = frame.select(to_json(struct("*"), {"ignoreNullFields": "false", "timestampFormat": _ISO}))
    rows = lines.toLocalIterator(prefetchPartitions=True)
    progress.stop()
    for (line,) in while_read(rows):
        print(line)


def _texts(frame: "DataFrame") -> "DataFrame":
    """Return every column as text: times in the session's zone, bytes as UTF-8. Two columns may have the same name."""
    from pyspark.sql.functions import col

    names = [f"c{number}" for number in range(len(frame.columns))]
    return frame.toDF(*names).select(*(col(name).cast("string") for name in names))


def cell_text(value: str | None) -> str:
    """Return a value as a cell of a table shows it: printable, and at most _MAX_CHARS characters."""
    if value is None:
        return "NULL"
    text = value if value.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"


# --- consumer groups -------------------------------------------------------------------------------------------------

SCHEMA = (
    "`group` string, topic string, `partition` int, committed bigint, `end` bigint, lag bigint, member string,"
    " generation int, metadata string, time timestamp, broker string"
)


class GroupRow(NamedTuple):
    """One partition of one group, in the order of SCHEMA. `end`: the partition's next offset. `lag`: in messages."""

    group: str
    topic: str
    partition: int
    committed: int
    end: int
    lag: int
    member: str
    generation: int
    metadata: str
    time: datetime
    broker: str


def groups_table(spark: "SparkSession", source: Mapping[str, str]) -> "DataFrame":
    """Return the table as it is now. `source`: the options that name brokers."""
    return spark.createDataFrame(list(group_rows(source)), SCHEMA)


def group_rows(source: Mapping[str, str]) -> Iterator[GroupRow]:
    """Yield the rows of all brokers, by group, topic and partition."""
    options = ReadOptions({**source, "subscribe": WAL})
    for name in options.brokers:
        yield from _rows_of(open_broker(name, bool(options.paths), options.access))


def _rows_of(broker: Broker) -> Iterator[GroupRow]:
    committed = _committed(broker)
    bounds = broker.bounds(sorted({place.topic for place in committed}))
    for place, last in sorted(committed.items()):
        first, end = bounds.get((place.topic, place.partition), (0, None))
        if end is None:
            continue
        at = datetime.fromtimestamp(last.ts, UTC)
        lag = max(0, end - max(first, last.offset))
        yield GroupRow(*place[:3], last.offset, end, lag, *last[2:5], at, broker.name)


def _committed(broker: Broker) -> dict[RowKey, CommittedOffset]:
    """Return the last commit of each place. Records that are none are passed over, as the gateway does."""
    payloads: dict[bytes, tuple[int, bytes]] = {}
    for (topic, number), (first, end) in broker.bounds([TOPIC]).items():
        for _, lines in broker.read(topic, number, first, end):
            payloads.update((key, (seq, payload)) for seq, key, payload in scan(lines))
    found = {}
    for key, (seq, payload) in payloads.items():
        try:
            place, row = decode_key(key), decode_payload(payload, seq) if payload else None
        except ValueError:
            continue
        if isinstance(row, CommittedOffset):  # else a message that was given back, or a tombstone
            found[place] = row
    return found


# --- statements ------------------------------------------------------------------------------------------------------

WAL_VIEW, ALL_VIEW, GROUPS_VIEW = OWN_VIEWS = "append", "all_topics", TOPIC
_WORD = re.compile(r"`([^`]+)`|([A-Za-z0-9_]+)")
# Syntax that uses columns without naming them: a star, a natural join, a pipe, a statement other than a plain SELECT.
_UNNAMED = re.compile(
    r"\*|\bnatural\b|\btable\b|\blateral\b|\|>|^\s*(?!select\b|with\b|\s)"
    r"|\b(?:union|except|intersect|minus|all|distinct)\s+from\b",
    re.IGNORECASE,
)
_STATEMENT = re.compile(r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`|--[^\n]*|[^;])+""")
_HISTORY = Path.home() / ".kmq_sql_history"


class Shell:
    """Run statements over the topics of one source. `show`: prints a result."""

    def __init__(self, spark: "SparkSession", source: dict[str, str], show: Show) -> None:
        self.spark, self.source, self._show = spark, source, show

    def topics(self) -> list[str]:
        """Return the names of the topics that exist now."""
        options = ReadOptions({**self.source, "subscribe": WAL})
        opened = (open_broker(name, bool(options.paths), options.access) for name in options.brokers)
        return sorted({topic for broker in opened for topic in broker.topics()})

    def query(self, text: str) -> "DataFrame":
        """Return the result of one statement, not computed yet, over views of the topics that it names.

        Raises ConfigError if the statement names a topic that does not exist.
        """
        topics = self.topics()
        named = {quoted or plain for quoted, plain in _WORD.findall(text)}
        columns = needed(text)
        if len({topic.lower() for topic in topics}) < len(topics):
            self.spark.conf.set("spark.sql.caseSensitive", "true")
        else:
            named = {name.lower() for name in named}
        views = {topic: {"subscribe": topic} for topic in topics if {topic, topic.lower()} & named}
        views.pop(GROUPS_VIEW, None)
        if WAL_VIEW in named:
            views[WAL_VIEW] = {"subscribe": WAL}
        if ALL_VIEW in named:
            views.setdefault(ALL_VIEW, {"subscribePattern": r"(?!__).*"})
        for view, subscription in views.items():
            reader = self.spark.read.format("kmq").options(**self.source, **subscription)
            (reader.schema(columns) if columns else reader).load().createOrReplaceTempView(f"`{view}`")
        if GROUPS_VIEW in named:
            groups_table(self.spark, self.source).createOrReplaceTempView(f"`{GROUPS_VIEW}`")
        try:
            return self.spark.sql(text)
        except Exception as error:
            if missing := re.match(r"\[TABLE_OR_VIEW_NOT_FOUND\] The table or view (\S+)", str(error)):
                known = ", ".join([*_shown(topics), *OWN_VIEWS])
                raise ConfigError(f"unknown topic {missing[1]}; expected one of {known}") from None
            raise

    def run(self, text: str) -> None:
        """Run one statement and show its result."""
        with Progress(self.spark, "sql") as progress:
            self._show(self.query(text), progress)

    def cancel(self) -> None:
        """Cancel the running query; may be called from a signal handler.

        Uses a thread, because the query occupies the main thread's connection to Spark.
        """
        threading.Thread(target=self.spark.sparkContext.cancelAllJobs).start()


def _shown(topics: Iterable[str]) -> list[str]:
    """Return the topics without those of KMQ itself, which are tables too, and in no list."""
    return [topic for topic in topics if not topic.startswith("__")]


def needed(text: str) -> str:
    """Return the schema of the columns that a query names; "" for all, if its text does not name all that it needs."""
    from kmq.spark.source.columns import COLUMNS

    text = re.sub(r"'[^']*'", "''", re.sub(r"count\s*\(\s*\*\s*\)", "count(1)", text, flags=re.IGNORECASE))
    words = [(quoted or plain).lower() for quoted, plain in _WORD.findall(text)]
    if _UNNAMED.search(text) or words.count("from") > words.count("select"):
        return ""
    return ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items() if name.lower() in words) or "offset bigint"


def statements(text: str) -> Iterator[str]:
    """Yield the statements of a script. A semicolon ends a statement, unless it is in quotes or in a comment."""
    for part in _STATEMENT.findall(text):
        if part.strip():
            yield part.strip()


# --- prompt ----------------------------------------------------------------------------------------------------------


def prompt(shell: Shell) -> int:
    """Read statements from a terminal, with history, until its end (Ctrl-D). Ctrl-C cancels the running query.

    Returns the exit code.
    """
    import readline

    with contextlib.suppress(OSError):
        readline.read_history_file(_HISTORY)
    readline.set_completer(_completer([*{*shell.topics(), *OWN_VIEWS}]))
    readline.parse_and_bind("tab: complete")
    print("Topics are tables. End a statement with a semicolon, and the prompt with Ctrl-D.")
    print("tables: " + ", ".join([*map(_quoted, _shown(shell.topics())), *OWN_VIEWS]))
    while True:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            text = _read_statement()
            signal.signal(signal.SIGINT, lambda number, frame: shell.cancel())
            for statement in statements(text):
                shell.run(statement)
        except EOFError:
            print()
            return EXIT_OK
        except KeyboardInterrupt:
            print()  # the line typed so far is discarded
        except Exception as error:
            cause = failures.explain(error)
            if cause is None:
                raise
            print(f"kmq: {cause}", file=sys.stderr)
        finally:
            with contextlib.suppress(OSError):
                readline.write_history_file(_HISTORY)


def _read_statement() -> str:
    text = input("kmq> ")
    while text.strip() and not text.rstrip().endswith(";"):
        text += "\n" + input("  -> ")
    return text


def _completer(tables: list[str]) -> Callable[[str, int], str | None]:
    from kmq.spark.source.columns import COLUMNS

    words = [*map(_quoted, tables), *COLUMNS, "select", "from", "where", "group by", "order by", "limit"]

    def complete(start: str, number: int) -> str | None:
        return ([word for word in words if word.startswith(start)] + [None])[number]

    return complete


def _quoted(topic: str) -> str:
    """Return a topic's name in SQL: between backticks unless it is a plain word."""
    return topic if re.fullmatch(r"[A-Za-z_]\w*", topic) else f"`{topic}`"
