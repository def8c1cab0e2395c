"""`kmq sql`: topics as views, for one query or at a prompt, and its results as a table, CSV or JSON.

    kmq sql "select key, count(*) from orders group by key"

Every topic is a view under its name (`jobs.eu` between backticks). So are `append`, the WAL, and `all_topics`. A query
sees the records that are durable when it begins. Only topics that it names are read.

`__consumer_offsets` is a table: the offsets of each consumer group, a row for each partition. The records of that topic
are read here, not by an engine: only the last record of each key counts, and few bytes are left of them. Partitions
that no longer exist are left out, as in `kmq groups describe`.

This module has what both engines share. spark_engine.py and duckdb_engine.py each make an Engine; neither needs the
other's packages.
"""

import contextlib
import csv
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from kmq.config.terminal import while_read
from kmq.errors import EXIT_OK, ConfigError
from kmq.gateway.groups.offset_table import TOPIC, OffsetTable, decode_key, decode_payload, partition_lag, scan
from kmq.log.reader import WAL
from kmq.spark import failures
from kmq.spark.source.broker import Broker
from kmq.spark.source.brokers import open_broker
from kmq.spark.source.options import ReadOptions

# --- results ---------------------------------------------------------------------------------------------------------

_MAX_CHARS = 60  # of a value in a table; CSV and JSON print all of it
_WIDE = 1 << 16  # columns of a terminal: more than a table of shortened values can have


class QueryResult(NamedTuple):
    """The result of a statement, computed when it is read. Two columns may have the same name."""

    names: Sequence[str]  # of the columns; empty if the statement has no result
    numbers: Sequence[bool]  # which columns are numbers
    rows: Callable[[int], Iterator[Sequence[str | None]]]  # at most so many (0: all), values as text in full
    lines: Callable[[], Iterator[str]]  # a JSON object for each row
    began: float  # on the monotonic clock, when the statement was taken


Show = Callable[[QueryResult], None]


def as_table(max_rows: int) -> Show:
    """Return a function that prints an aligned table of at most `max_rows` rows (0: all), with long values shortened.

    It prints the number of rows and the seconds taken on stderr.
    """

    def show(result: QueryResult) -> None:
        rows = list(result.rows(max_rows + 1 if max_rows else 0))
        if not result.names:
            return
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
        for name, is_number in zip(result.names, result.numbers, strict=True):
            table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
        shown = rows[:max_rows] if max_rows else rows
        for row in shown:
            table.add_row(*(cell_text(value) for value in row))
        width = Console(width=_WIDE).measure(table).maximum  # long lines wrap in the terminal, so that nothing is lost
        Console(width=width, highlight=False, markup=False).print(table)
        more = f"; there are more: --rows {10 * max_rows}, or --csv" if len(rows) > len(shown) else ""
        print(f"{len(shown)} row(s) in {time.monotonic() - result.began:.1f} s{more}", file=sys.stderr)

    return show


def as_csv(result: QueryResult) -> None:
    """Print CSV with a header; values are printed in full."""
    rows = result.rows(0)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(result.names)
    writer.writerows(while_read(rows))


def as_json(result: QueryResult) -> None:
    """Print one JSON object per row, with binary columns in base64."""
    for line in while_read(result.lines()):
        print(line)


def cell_text(value: str | None) -> str:
    """Return a value as a cell of a table shows it: printable, and at most _MAX_CHARS characters."""
    if value is None:
        return "NULL"
    text = value if value.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"


# --- consumer groups -------------------------------------------------------------------------------------------------


class GroupRow(NamedTuple):
    """One partition of one group: a row of the table. `end`: the partition's next offset. `lag`: in messages."""

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


def group_rows(source: Mapping[str, str]) -> Iterator[GroupRow]:
    """Yield the rows of all brokers, by group, topic and partition."""
    options = ReadOptions({**source, "subscribe": WAL})
    for name in options.brokers:
        yield from _rows_of(open_broker(name, bool(options.paths), options.access, tier=options.tier))


def _rows_of(broker: Broker) -> Iterator[GroupRow]:
    table = _last_rows(broker)
    committed = [(group, *row) for group in table.groups for row in sorted(table.commits_of(group).items())]
    bounds = broker.bounds(sorted({topic for _, (topic, _), _ in committed}))
    waiting = {group: table.waiting(group) for group in table.groups}
    for group, place, last in committed:
        first, end = bounds.get(place, (0, None))
        if end is None:
            continue
        at = datetime.fromtimestamp(last.ts, UTC)
        lag, _ = partition_lag((first, end), last.offset, waiting[group].get(place, ()), broker.gaps.get(place, ()))
        yield GroupRow(
            group, *place, last.offset, end, lag, last.member, last.generation, last.metadata, at, broker.name
        )


def _last_rows(broker: Broker) -> OffsetTable:
    """Return the last record of each key. Invalid records are skipped, as in the gateway."""
    payloads: dict[bytes, tuple[int, bytes]] = {}
    for (topic, number), (first, end) in broker.bounds([TOPIC]).items():
        for _, lines in broker.read(topic, number, first, end):
            payloads.update((key, (seq, payload)) for seq, key, payload in scan(lines))
    found = OffsetTable()
    for key, (seq, payload) in payloads.items():
        if payload:  # else a tombstone
            with contextlib.suppress(ValueError):
                found.put(decode_key(key), decode_payload(payload, seq))
    return found


# --- statements ------------------------------------------------------------------------------------------------------

WAL_VIEW, ALL_VIEW, GROUPS_VIEW = OWN_VIEWS = "append", "all_topics", TOPIC
WORD = re.compile(r"""`([^`]+)`|"([^"]+)"|([A-Za-z0-9_]+)""")
_STATEMENT = re.compile(r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`|--[^\n]*|[^;])+""")
_SHOW_TABLES = re.compile(r"\s*show\s+tables\s*;?\s*", re.IGNORECASE)
_HISTORY = Path.home() / ".kmq_sql_history"


class Views(NamedTuple):
    """The views that a statement may name."""

    topics: list[str]  # that exist now
    named: dict[str, dict[str, str]]  # views that it names → the option of format("kmq") that selects the records
    has_groups: bool
    has_cases: bool  # some topics differ in upper and lower case only


class Engine(NamedTuple):
    """Runs statements. `query`: a context in which the result is read. `cancel`: a signal handler may call it."""

    query: Callable[[str, Views], AbstractContextManager[QueryResult]]
    cancel: Callable[[], None]


def words(text: str) -> list[str]:
    """Return the words of a statement, without the quotes of names."""
    return ["".join(groups) for groups in WORD.findall(text)]


def views_of(text: str, topics: list[str]) -> Views:
    """Return the views that a statement names."""
    named = set(words(text))
    has_cases = len({topic.lower() for topic in topics}) < len(topics)
    if not has_cases:
        named = {name.lower() for name in named}
    views = {topic: {"subscribe": topic} for topic in topics if {topic, topic.lower()} & named}
    views.pop(GROUPS_VIEW, None)
    if WAL_VIEW in named:
        views[WAL_VIEW] = {"subscribe": WAL}
    if ALL_VIEW in named:
        views.setdefault(ALL_VIEW, {"subscribePattern": r"(?!__).*"})
    return Views(topics, views, GROUPS_VIEW in named, has_cases)


def unknown_topic(name: str, topics: Iterable[str]) -> ConfigError:
    """Return the error that a statement names a table which does not exist. `name`: quoted."""
    return ConfigError(f"unknown topic {name}; expected one of {', '.join([*_shown(topics), *OWN_VIEWS])}")


class Shell:
    """Run statements over the topics of one source. `show`: prints a result."""

    def __init__(self, engine: Engine, source: dict[str, str], show: Show) -> None:
        self.engine, self.source, self._show = engine, source, show

    def topics(self) -> list[str]:
        """Return the names of the topics that exist now."""
        options = ReadOptions({**self.source, "subscribe": WAL})
        opened = (open_broker(name, bool(options.paths), options.access, tier=options.tier) for name in options.brokers)
        return sorted({topic for broker in opened for topic in broker.topics()})

    def run(self, text: str) -> None:
        """Run one statement and show its result. Raises ConfigError if it names a topic that does not exist."""
        topics = self.topics()
        with self.engine.query(text, views_of(text, topics)) as result:
            self._show(_tables(result, topics) if _SHOW_TABLES.fullmatch(text) else result)


def _tables(made: QueryResult, topics: Iterable[str]) -> QueryResult:
    """Return the result of `show tables`: a row for each topic, and for each view that KMQ or the session has made.

    `made`: the engine's result, which has only the views that were used.
    """
    at = next(at for at, name in enumerate(made.names) if name.lower() in ("name", "tablename", "viewname"))
    names = sorted({*_shown(topics), *OWN_VIEWS, *(row[at] or "" for row in made.rows(0))})

    def rows(limit: int) -> Iterator[Sequence[str | None]]:
        return iter([(name,) for name in names[: limit or None]])

    def lines() -> Iterator[str]:
        return (json.dumps({"name": name}, ensure_ascii=False) for name in names)

    return QueryResult(["name"], [False], rows, lines, made.began)


def _shown(topics: Iterable[str]) -> list[str]:
    """Return the topics without those of KMQ itself, which can be queried but are not listed."""
    return [topic for topic in topics if not topic.startswith("__")]


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
            signal.signal(signal.SIGINT, lambda number, frame: shell.engine.cancel())
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
