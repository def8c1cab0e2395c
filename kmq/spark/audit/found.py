"""The result of an audit: the values that its reports show."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from kmq.log import segment
from kmq.log.reader import WAL
from kmq.spark.audit.findings import FINDINGS, NOTES, Row
from kmq.spark.audit.snapshot import BUCKETS, Source
from kmq.spark.source.brokers import Directory


class Found(NamedTuple):
    """A finding, or a note that has a place. `file`: below the data directory; "" if unknown."""

    broker: str
    row: Row
    file: str


class Moment(NamedTuple):
    """Records and bytes of a topic that were received at a time (µs since the epoch)."""

    broker: str
    topic: str
    time: int
    records: int
    nbytes: int


Key = tuple[str, str, int]  # broker, topic, partition


class Result(NamedTuple):
    """The result of an audit."""

    sources: list[Source]
    totals: dict[str, dict[Key, int]]  # finding or note → log → records
    found: list[Found]  # the first findings
    noted: list[Found]  # the first notes
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
    def is_good(self) -> bool:
        """Return True if there is no finding."""
        return not self.findings


def by_hour(moments: list[Moment]) -> list[Moment]:
    """Return the sums of each broker, topic and hour, in order of time. A moment lies within one hour."""
    sums: dict[tuple[str, str, int], Moment] = {}
    for moment in moments:
        hour = moment._replace(time=moment.time - moment.time % BUCKETS[-1])
        so_far = sums.get(hour[:3])
        more = (so_far.records, so_far.nbytes) if so_far else (0, 0)
        sums[hour[:3]] = hour._replace(records=hour.records + more[0], nbytes=hour.nbytes + more[1])
    return list(sums.values())


def found(audited: list[Source], fields: Sequence[Any]) -> Found:
    """Return a row of the evidence, which begins with its broker's name, together with its file."""
    broker, row = fields[0], Row(*fields[1:])
    source = next(source for source in audited if source.name == broker)
    return Found(broker, row, _file(source, row))


def _file(source: Source, row: Row) -> str:
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
