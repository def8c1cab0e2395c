"""`__consumer_offsets` as a table of `kmq sql`: how far each consumer group is, a row for each partition.

The records of that topic are read here, not by tasks of Spark: only the last one of each key counts, and few bytes are
left of it. Partitions that do not exist any more are left out, as `kmq groups describe` does.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from kmq.gateway.groups.offset_table import TOPIC, Committed, Place, decode_key, decode_payload, scan
from kmq.log.reader import WAL
from kmq.spark.source.brokers import Broker, open_broker
from kmq.spark.source.options import Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VIEW = TOPIC
SCHEMA = (
    "`group` string, topic string, `partition` int, committed bigint, `end` bigint, lag bigint, member string,"
    " generation int, metadata string, time timestamp, broker string"
)


class Row(NamedTuple):
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


def table(spark: "SparkSession", source: Mapping[str, str]) -> "DataFrame":
    """Return the table as it is now. `source`: the options that name brokers."""
    return spark.createDataFrame(list(rows(source)), SCHEMA)


def rows(source: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of all brokers, by group, topic and partition."""
    options = Options({**source, "subscribe": WAL})
    for name in options.brokers:
        yield from _rows_of(open_broker(name, bool(options.paths), options.access))


def _rows_of(broker: Broker) -> Iterator[Row]:
    committed = _committed(broker)
    bounds = broker.bounds(sorted({place.topic for place in committed}))
    for place, last in sorted(committed.items()):
        first, end = bounds.get((place.topic, place.partition), (0, None))
        if end is None:
            continue
        time = datetime.fromtimestamp(last.ts, UTC)
        lag = max(0, end - max(first, last.offset))
        yield Row(*place[:3], last.offset, end, lag, *last[2:5], time, broker.name)


def _committed(broker: Broker) -> dict[Place, Committed]:
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
        if isinstance(row, Committed):  # else a message that was given back, or a tombstone
            found[place] = row
    return found
