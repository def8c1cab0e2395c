"""Prints results of queries as a table, as CSV, or as JSON."""

import csv
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from kmq.config.terminal import while_read
from kmq.spark.streaming.streams import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
