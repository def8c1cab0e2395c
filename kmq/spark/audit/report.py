"""Presents an audit's result in words: as a table on a terminal, and as JSON. page.py: as a page with plots."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from kmq.log.reader import WAL
from kmq.spark.audit.findings import FINDINGS, NOTES
from kmq.spark.audit.found import Found, Moment, Result

_WIDTH = 240  # least columns of a terminal that tables are laid out for
_HOURS = 100  # lines of topics and hours in a table


def where(found: Found, with_broker: bool = False) -> str:
    """Return the log of a finding: `append`, or `<topic>/<partition>`."""
    row = found.row
    log = "append" if row.topic == WAL else f"{row.topic}/{row.partition}"
    return f"{found.broker} {log}" if with_broker else log


def at(found: Found) -> str:
    """Return the position in the log: an offset of a queue, or the byte of damage; "" if unknown."""
    row = found.row
    if row.path:
        return f"byte {row.byte:,}"
    return f"offset {row.offset:,}" if row.offset >= 0 else ""


def seqs(found: Found) -> str:
    """Return the seqs of a finding: `17`, or `17 to 20`; "" if unknown."""
    first, last = found.row.first_seq, found.row.last_seq
    if not first:
        return ""
    return f"{first}" if first == last else f"{first} to {last}"


def what(found: Found) -> str:
    """Return the meaning of a finding, in words."""
    row = found.row
    return f"{FINDINGS.get(row.what) or NOTES[row.what]}" + (f" ({row.detail})" if row.detail else "")


# --- JSON ------------------------------------------------------------------------------------------------------------


def table(result: Result, limit: int) -> dict[str, Any]:
    """Return the whole result for JSON, with at most `limit` findings one by one."""
    return {
        "result": "pass" if result.is_good else "fail",
        "brokers": [
            {
                "broker": each.name,
                "first_seq": each.snapshot.wal[0],
                "last_seq": each.snapshot.wal[1] - 1,
                "routed_seq": each.snapshot.routed,
                "queues": len(each.snapshot.queues),
            }
            for each in result.sources
        ],
        "records": records(result),
        "findings": result.findings,
        "notes": result.notes,
        "shown": [{"broker": each.broker, "file": each.file} | each.row._asdict() for each in result.found[:limit]],
        "hours": [each._asdict() for each in result.hours],
    }


def records(result: Result) -> int:
    return sum(each.records for each in result.hours)


def found(result: Result) -> int:
    return sum(result.findings.values())


# --- the terminal ----------------------------------------------------------------------------------------------------


def show(result: Result, limit: int) -> None:
    """Print findings, then records and bytes by hour, then what was compared, and the verdict."""
    from rich.console import Console
    from rich.markup import escape as escape_markup
    from rich.table import Table

    from kmq.config.terminal import console

    # A table whose lines wrap is better than a table with "…" in place of a seq.
    out = Console(highlight=False, width=max(_WIDTH, console().width))
    many = len(result.sources) > 1
    if result.found:
        found = Table("finding", "where", "seq", box=None, pad_edge=False, header_style="bold")
        found.add_column("records", justify="right")
        for title in ("file", "at", ""):
            found.add_column(title)
        for each in result.found[:limit]:
            row = each.row
            texts = row.what, where(each, many), seqs(each), f"{row.records:,}", each.file, at(each), row.detail
            found.add_row(*map(escape_markup, texts))
        out.print(found)
        if len(result.found) > limit:
            print(f"… the first {limit}; more with --limit")
        print()
    counts = Table("topic", "hour (UTC)", box=None, pad_edge=False, header_style="bold")
    counts.add_column("records", justify="right")
    counts.add_column("bytes", justify="right")
    rows = by_topic_and_hour(result.hours, many)
    for topic, hour, count, nbytes in rows[:_HOURS]:
        counts.add_row(escape_markup(topic), hour, f"{count:,}", f"{nbytes:,}")
    out.print(counts)
    if len(rows) > _HOURS:
        print(f"… and {len(rows) - _HOURS:,} more; all with --json")
    print()
    for source in result.sources:
        first, end = source.snapshot.wal
        print(f"{source.name}: seq {first} to {end - 1} against {len(source.snapshot.queues)} queues")
    for kind, count in result.findings.items():
        print(f"finding: {kind} {count:,} ({FINDINGS[kind]})")
    for kind, count in result.notes.items():
        print(f"note: {kind} {count:,} ({NOTES[kind]})")
    print(f"audit: {records(result):,} records, {verdict(result)}")


def verdict(result: Result) -> str:
    """Return `all good`, or the findings with their numbers of records."""
    return ", ".join(f"{kind} {count:,}" for kind, count in result.findings.items()) or "all good"


def by_topic_and_hour(hours: Iterable[Moment], many: bool) -> list[tuple[str, str, int, int]]:
    rows = sorted(hours, key=lambda each: (each.broker, each.topic, each.time))
    return [
        (
            f"{each.broker} {each.topic}" if many else each.topic,
            f"{as_time(each.time):%Y-%m-%d %H}h",
            each.records,
            each.nbytes,
        )
        for each in rows
    ]


def as_time(micros: int) -> datetime:
    return datetime.fromtimestamp(micros / 1e6, UTC)
