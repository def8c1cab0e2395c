"""What a scrape reads from links and files: how full they are, and how far topics are."""

import os
import time
from collections.abc import Callable
from functools import lru_cache, partial

from kmq.broker import links
from kmq.gateway.core.broker import Broker
from kmq.gateway.core.metric_rows import Metric, Samples
from kmq.gateway.core.topic_rates import TopicRates
from kmq.links import fifo, layout, received
from kmq.log import compaction, passes, segment, topics
from kmq.log.passes import Pass, Table, Tables

_MAX_TABLES = 100  # compacted topics that are shown one by one
_TABLES_S = 5.0  # the compacted topics are looked for once in this time, because each look reads all declarations


def _backlogs(broker: Broker) -> Samples:
    return [((ring,), layout.backlog(broker.settings.instance, ring)) for ring in ("framed", "durable")]


def _raw_bytes(broker: Broker) -> Samples:
    fd = os.open(f"{broker.settings.pipes}/raw", os.O_RDONLY | os.O_NONBLOCK)
    try:
        return [((), fifo.waiting_bytes(fd) + received.waiting_bytes(broker.settings.instance))]
    finally:
        os.close(fd)


def _links(broker: Broker, name: str) -> Samples:
    """Return one figure of each link that exists."""
    return [((link.name,), getattr(link, name)) for link in links.look(broker.settings) if link.capacity]


def _wal_bytes(broker: Broker) -> Samples:
    return [((), sum(os.stat(path).st_size for _, path in segment.listing(f"{broker.settings.data}/append")))]


def _disk_free(broker: Broker) -> Samples:
    disk = os.statvfs(broker.settings.data)
    return [((), disk.f_bavail * disk.f_frsize)]


def _topics(broker: Broker) -> Samples:
    return [((), len(topics.names(broker.settings.data)))]


@lru_cache(maxsize=1)
def _rates(data: str, most: int) -> TopicRates:
    return TopicRates(data, most)


def _of(broker: Broker) -> TopicRates:
    return _rates(broker.settings.data, broker.settings.metrics_topics)


def _topic_messages(broker: Broker) -> Samples:
    return [((name,), count) for name, count in _of(broker).counts()]


def _end_offsets(broker: Broker) -> Samples:
    rates = _of(broker)
    for topic in rates.named():
        for partition in range(rates.bounds.declared(topic)[0]):
            yield (topic, str(partition)), rates.bounds.of(topic, partition)[1]


@lru_cache(maxsize=1)
def _known(data: str) -> Tables:
    return Tables(data)


@lru_cache(maxsize=1)
def _tables(data: str, period: int) -> list[Table]:
    return _known(data).found()


def _compacted(broker: Broker, value: Callable[[Table, int, Pass | None, int], float | None]) -> Samples:
    data = broker.settings.data
    found = {table.name: table for table in _tables(data, int(time.monotonic() / _TABLES_S))}
    tables = [found[name] for name in _of(broker).rank(list(found), _MAX_TABLES)]
    rows, ends = (passes.read(data), compaction.synced_ends(data)) if tables else ({}, {})
    for table in tables:
        for number in range(table.partitions):
            end = ends.get((table.name, number), 0)
            figure = value(table, number, passes.of(rows, table, number), end)
            if figure is not None:
                yield (table.name, str(number)), figure


def _uncompacted_bytes(broker: Broker) -> Samples:
    data = broker.settings.data
    return _compacted(broker, lambda table, number, done, end: passes.pending(data, (table.name, number), done, end)[1])


def _compacted_at(broker: Broker) -> Samples:
    return _compacted(broker, lambda table, number, done, end: done.at if done else None)


FILES = (
    Metric("kmq_ring_messages", "Messages that wait in a ring.", ("ring",), _backlogs),
    Metric(
        "kmq_raw_bytes",
        "Bytes that wait between ingress and framer, in the FIFO and in the ring `received`.",
        (),
        _raw_bytes,
    ),
    Metric("kmq_link_bytes", "Bytes that wait in a link.", ("link",), partial(_links, name="bytes")),
    Metric("kmq_link_capacity_bytes", "Bytes that fit into a link.", ("link",), partial(_links, name="capacity")),
    Metric(
        "kmq_link_fill",
        "How full a link is, from 0 to 1, by bytes or messages; 1 also while its writer waits for room.",
        ("link",),
        partial(_links, name="fill"),
    ),
    Metric("kmq_wal_bytes", "Bytes of the WAL's segments.", (), _wal_bytes),
    Metric("kmq_disk_free_bytes", "Bytes free on the disk of KMQ_DATA.", (), _disk_free),
    Metric("kmq_topics", "Topics that exist.", (), _topics),
    Metric(
        "kmq_topic_messages_total",
        "Messages of a topic: those of the KMQ_METRICS_TOPICS topics with the most in the last hour, by name; `other`: of"
        " all others, since the gateway's start.",
        ("topic",),
        _topic_messages,
    ),
    Metric(
        "kmq_end_offset",
        "Offset that the next record of a partition gets; of the topics named in kmq_topic_messages_total.",
        ("topic", "partition"),
        _end_offsets,
    ),
    Metric(
        "kmq_uncompacted_bytes",
        "Bytes of a compacted topic that were sealed since the last pass of the compactor.",
        ("topic", "partition"),
        _uncompacted_bytes,
    ),
    Metric(
        "kmq_compacted_seconds",
        "Unix time of the last pass of the compactor over a partition; absent before the first.",
        ("topic", "partition"),
        _compacted_at,
    ),
)
