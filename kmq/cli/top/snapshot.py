"""The state of a broker for `kmq top`: one value, made from a document in the form of GET /api/overview.

Invariant   `parse` never fails and never invents: a value that is missing, or of another type, is None. The document
            may come from any server that a URL leads to.
Rows        A field of a row has the name that it has in the document; `_decode` reads it by its type, text or number.
Memory      At most _ROWS topics, groups, findings and events; a text is cut at _LONGEST characters.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_ROWS = 200
_LONGEST = 2000

Document = dict[str, Any]
_Row = TypeVar("_Row")


class StageRow(NamedTuple):
    """A process, and what it moves."""

    name: str
    state: str
    restarts: float | None
    connections: float | None
    seq: float | None
    refused: float | None
    dropped: float | None
    rate: float | None  # messages a second
    bytes_rate: float | None


class LinkRow(NamedTuple):
    """What waits between two processes. `fill`: 0 to 1."""

    name: str
    bytes: float | None
    capacity: float | None
    messages: float | None
    fill: float | None


class Latency(NamedTuple):
    """How long something takes, in seconds."""

    name: str
    p50: float | None
    p99: float | None


class FindingRow(NamedTuple):
    """What is wrong, and what to do."""

    code: str
    why: str
    advice: str
    is_error: bool


class IntakeRow(NamedTuple):
    """A port of KMQ_INTAKES, and what came to it."""

    name: str  # port, kind and topic
    rate: float | None  # lines a second
    bytes_rate: float | None
    connections: float | None
    refused: float | None
    dropped: float | None


class KafkaRow(NamedTuple):
    """The port for Kafka's clients."""

    port: float | None
    connections: float | None
    producers: float | None
    batches_from_cache: float | None  # batches that consumers got as they were produced
    batches_from_lines: float | None  # and those that were made from lines


class CopyRow(NamedTuple):
    """What KMQ_TIER has."""

    seq: float | None
    behind: float | None  # messages that are on disk and not there
    age_s: float | None  # of the oldest of them
    bytes: float | None  # of old records of topics
    behind_bytes: float | None  # of old records that wait on the disk


class TopicRow(NamedTuple):
    """A topic by its rate."""

    topic: str
    rate: float | None
    bytes_rate: float | None
    records: float | None
    bytes: float | None
    partitions: float | None


class GroupLagRow(NamedTuple):
    """A group by its lag."""

    group: str
    state: str
    members: float | None
    lag: float | None
    lag_seconds: float | None


class EventRow(NamedTuple):
    """What happened, and when (unix seconds)."""

    at: float
    kind: str
    about: str
    text: str


class TopSnapshot(NamedTuple):
    """The state of a broker at `as_of` (unix seconds)."""

    as_of: float
    is_ready: bool
    supervisor: str
    instance: str
    version: str
    stages: list[StageRow]
    links: list[LinkRow]
    latency: list[Latency]
    findings: list[FindingRow]
    intakes: list[IntakeRow]
    kafka: KafkaRow | None
    copy: CopyRow | None
    topics: list[TopicRow]
    topics_total: int
    groups: list[GroupLagRow]
    groups_total: int
    events: list[EventRow]  # newest first
    notes: dict[str, str]  # about topics, groups or events: why there are none, or how they are known
    problem: str = ""  # why nothing newer is known

    @property
    def is_up(self) -> bool:
        return any(stage.state not in ("down", "stopped", "dead") for stage in self.stages)

    def stage(self, name: str) -> StageRow | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def link(self, name: str) -> LinkRow | None:
        return next((link for link in self.links if link.name == name), None)


def parse(document: object, problem: str = "") -> TopSnapshot:
    """Return the snapshot of an overview."""
    overview = _map(document)
    status, rates = _map(overview.get("status")), _map(overview.get("rates"))
    notes = {key: _text(value) for key, value in _map(overview.get("notes")).items()}
    topics = [_decode(TopicRow, row) for row in _rows(overview.get("topics"))]
    groups = [_decode(GroupLagRow, row) for row in _rows(overview.get("groups"))]
    events = [_decode(EventRow, row | {"at": _number(row.get("at")) or 0.0}) for row in _rows(overview.get("events"))]
    return TopSnapshot(
        as_of=_number(overview.get("as_of")) or 0.0,
        is_ready=status.get("ready") is True,
        supervisor=_text(status.get("supervisor")),
        instance=_text(status.get("instance")),
        version=_text(status.get("version")),
        stages=[_stage(row, _map(rates.get(_text(row.get("name"))))) for row in _rows(status.get("stages"))],
        links=_links(status),
        latency=_latency(overview, status),
        findings=_findings(status),
        intakes=[_intake(row) for row in _rows(overview.get("intakes"))],
        kafka=_decode(KafkaRow, kafka) if (kafka := _map(status.get("kafka"))) else None,
        copy=_decode(CopyRow, copy) if (copy := _map(status.get("copy"))) else None,
        topics=sorted(topics, key=lambda row: (-(row.rate or 0), -(row.bytes_rate or 0), row.topic)),
        topics_total=_count(overview.get("topics_total"), topics),
        groups=sorted(groups, key=lambda row: (-(row.lag or 0), row.group)),
        groups_total=_count(overview.get("groups_total"), groups),
        events=sorted(events, key=lambda event: -event.at),
        notes=notes,
        problem=problem,
    )


def _map(value: object) -> Document:
    return value if isinstance(value, dict) else {}


def _rows(value: object) -> list[Document]:
    return [row for row in value[:_ROWS] if isinstance(row, dict)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]
    except OverflowError:
        return None


def _count(value: object, rows: list[Any]) -> int:
    number = _number(value)
    return len(rows) if number is None else int(number)


def _decode(kind: Callable[..., _Row], row: Document) -> _Row:
    """Return a row of the snapshot: each field from the value of its name."""
    kinds = kind.__annotations__.items()
    return kind(**{name: _text(row.get(name)) if of is str else _number(row.get(name)) for name, of in kinds})


def _stage(row: Document, rates: Document) -> StageRow:
    moved = {"rate": rates.get("messages"), "bytes_rate": rates.get("bytes")}
    return _decode(StageRow, row | moved | {"state": _text(row.get("state")) or "-"})


def _links(status: Document) -> list[LinkRow]:
    rows = _rows(status.get("links"))
    if not rows:  # an older broker reports only what waits
        backlog = _map(status.get("backlog"))
        rows = [
            {"name": "raw", "bytes": backlog.get("raw_bytes")},
            {"name": "framed", "messages": backlog.get("framed_messages")},
            {"name": "durable", "messages": backlog.get("durable_messages")},
        ]
    return [_decode(LinkRow, row) for row in rows]


def _latency(overview: Document, status: Document) -> list[Latency]:
    rows = _map(status.get("latency")) | _map(overview.get("latency"))  # since the start, and recent ones
    return [_decode(Latency, _map(rows.get(name)) | {"name": name}) for name in ("ack", "sync", "routed")]


def _findings(status: Document) -> list[FindingRow]:
    rows = [(row, row.get("severity") == "error") for row in _rows(status.get("findings"))]
    if "findings" not in status:
        rows = [(row, True) for row in _rows(status.get("reasons"))]
        rows += [(row, False) for row in _rows(status.get("warnings"))]
    return [
        FindingRow(_text(row.get("code")), _text(row.get("why")), _text(row.get("advice")), is_error)
        for row, is_error in rows
    ]


def _intake(row: Document) -> IntakeRow:
    name = f"{_number(row.get('port')) or 0:.0f}/{_text(row.get('kind'))} {_text(row.get('topic'))}"
    return _decode(IntakeRow, row | {"name": name})
