"""The result of an audit, and its texts: as a table on a terminal, and as JSON. page.py: as a page with plots."""

import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from kmq.log import segment
from kmq.log.reader import WAL
from kmq.spark.audit.findings import FINDINGS, NOTES, EvidenceRow
from kmq.spark.audit.snapshot import BUCKETS, AuditSource
from kmq.spark.source.brokers import Directory

# --- result ----------------------------------------------------------------------------------------------------------


class LocatedRow(NamedTuple):
    """A finding, or a note that has a place. `file`: below the data directory; "" if unknown."""

    broker: str
    row: EvidenceRow
    file: str


class Moment(NamedTuple):
    """Records and bytes of a topic that were received at a time (µs since the epoch)."""

    broker: str
    topic: str
    time: int
    records: int
    nbytes: int


Key = tuple[str, str, int]  # broker, topic, partition


class AuditResult(NamedTuple):
    """The result of an audit."""

    sources: list[AuditSource]
    totals: dict[str, dict[Key, int]]  # finding or note → log → records
    found: list[LocatedRow]  # the first findings
    noted: list[LocatedRow]  # the first notes
    moments: list[Moment]  # in order of time
    hours: list[Moment]

    @property
    def findings(self) -> dict[str, int]:
        """Finding → its number of records, or of places."""
        return {what: sum(self.totals[what].values()) for what in FINDINGS if what in self.totals}

    @property
    def notes(self) -> dict[str, int]:
        """Note → its number of records."""
        return {what: sum(self.totals[what].values()) for what in NOTES if what in self.totals}

    @property
    def records(self) -> int:
        """The number of records that the WAL received."""
        return sum(each.records for each in self.hours)

    @property
    def affected(self) -> int:
        """The number of records, or of places, with findings."""
        return sum(self.findings.values())

    @property
    def is_good(self) -> bool:
        """Return True if there is no finding."""
        return not self.findings


def sum_by_hour(moments: list[Moment]) -> list[Moment]:
    """Return the sums of each broker, topic and hour, in order of time. A moment lies within one hour."""
    sums: dict[tuple[str, str, int], Moment] = {}
    for moment in moments:
        hour = moment._replace(time=moment.time - moment.time % BUCKETS[-1])
        so_far = sums.get(hour[:3])
        more = (so_far.records, so_far.nbytes) if so_far else (0, 0)
        sums[hour[:3]] = hour._replace(records=hour.records + more[0], nbytes=hour.nbytes + more[1])
    return list(sums.values())


def located(audited: list[AuditSource], fields: Sequence[Any]) -> LocatedRow:
    """Return a row of the evidence, which begins with its broker's name, together with its file."""
    broker, row = fields[0], EvidenceRow(*fields[1:])
    source = next(source for source in audited if source.name == broker)
    return LocatedRow(broker, row, _file(source, row))


def _file(source: AuditSource, row: EvidenceRow) -> str:
    """Return the file of a row, below the data directory; "" if unknown."""
    if not source.is_path:
        return row.path
    data = Directory(source.name).path
    if row.path:
        return os.path.relpath(row.path, data)
    directory, at = (
        ("append", row.first_seq) if row.topic == WAL else (f"topics/{row.topic}/{row.partition}", row.offset)
    )
    segments = [path for first, path in segment.listing(f"{data}/{directory}") if first <= at]
    return os.path.relpath(segments[-1], data) if segments else ""


# --- words -----------------------------------------------------------------------------------------------------------

_WIDTH = 240  # least columns of a terminal that tables are laid out for
_HOURS = 100  # lines of topics and hours in a table


def where(found: LocatedRow, with_broker: bool = False) -> str:
    """Return the log of a finding: `append`, or `<topic>/<partition>`."""
    row = found.row
    log = "append" if row.topic == WAL else f"{row.topic}/{row.partition}"
    return f"{found.broker} {log}" if with_broker else log


def at(found: LocatedRow) -> str:
    """Return the position in the log: an offset of a queue, or the byte of damage; "" if unknown."""
    row = found.row
    if row.path:
        return f"byte {row.byte:,}"
    return f"offset {row.offset:,}" if row.offset >= 0 else ""


def seqs(found: LocatedRow) -> str:
    """Return the seqs of a finding: `17`, or `17 to 20`; "" if unknown."""
    first, last = found.row.first_seq, found.row.last_seq
    if not first:
        return ""
    return f"{first}" if first == last else f"{first} to {last}"


def what(found: LocatedRow) -> str:
    """Return the meaning of a finding, in words."""
    row = found.row
    return f"{FINDINGS.get(row.what) or NOTES[row.what]}" + (f" ({row.detail})" if row.detail else "")


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_json(result: AuditResult, limit: int) -> dict[str, Any]:
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
        "records": result.records,
        "findings": result.findings,
        "notes": result.notes,
        "shown": [{"broker": each.broker, "file": each.file} | each.row._asdict() for each in result.found[:limit]],
        "hours": [each._asdict() for each in result.hours],
    }


# --- the terminal ----------------------------------------------------------------------------------------------------


def show(result: AuditResult, limit: int) -> None:
    """Print findings, then records and bytes by hour, then what was compared, and the verdict."""
    from rich.console import Console
    from rich.markup import escape as escape_markup
    from rich.table import Table

    from kmq.config.terminal import console

    # A table whose lines wrap is better than a table with "…" in place of a seq.
    out = Console(highlight=False, width=max(_WIDTH, console().width))
    many = len(result.sources) > 1
    if result.found:
        table = Table("finding", "where", "seq", box=None, pad_edge=False, header_style="bold")
        table.add_column("records", justify="right")
        for title in ("file", "at", ""):
            table.add_column(title)
        for each in result.found[:limit]:
            row = each.row
            texts = row.what, where(each, many), seqs(each), f"{row.records:,}", each.file, at(each), row.detail
            table.add_row(*map(escape_markup, texts))
        out.print(table)
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
    print(f"audit: {result.records:,} records, {verdict(result)}")


def verdict(result: AuditResult) -> str:
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
