"""Every metric the gateway serves, each declared once with its description.

A scrape reads the stats page of the stages, the links and files, and the counters of the gateway itself. The counters
of a process restart at 0 when it is restarted, as Prometheus expects, except those that say "ever".
"""

import contextlib
import os
import platform
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

import kmq
from kmq.broker import status
from kmq.broker.health import ALL_WARNINGS, REASONS, Verdict, judge, state_of
from kmq.broker.histogram import BOUNDS_S, HistogramSnapshot
from kmq.broker.stats import AGENT, PROCESSES, REPLICA, ROLES, STATES, TIER, TIER_REQUESTS, Row
from kmq.broker.topic_rates import BusiestTopics
from kmq.config.settings import STAGES
from kmq.gateway.core.broker import Broker
from kmq.gateway.core.cold import ColdReads
from kmq.links import layout, received
from kmq.log import compaction, passes, segment, topics
from kmq.log.passes import CompactedTopic, CompactedTopics, Pass
from kmq.log.segment_reader import Segments
from kmq.wire import refusals

# --- from the stats page ---------------------------------------------------------------------------------------------

Samples = Iterable[tuple[tuple[str, ...], float]]  # label values, sample value
Read = Callable[["Scrape"], Samples]


class Metric(NamedTuple):
    """One row of a table. A metric is a counter if its name ends in `_total`, otherwise a gauge."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: Read


_STAGE = ("stage",)
_DOORS = ("ingress", "gateway")  # the processes that listen on ports


def _rows(field: str, names: tuple[str, ...] = PROCESSES) -> tuple[tuple[str, ...], Read]:
    """Return label and reader of one value per process, for processes that have ever been started."""
    return _STAGE, lambda scrape: [
        ((name,), getattr(row, field)) for name in names if (row := scrape.page.rows[name]).pid
    ]


def _single(name: str, field: str, has: str = "") -> tuple[tuple[str, ...], Read]:
    """Return no label, and the reader of a value that only process `name` has. `has`: absent while this field is 0."""
    return (), lambda scrape: [
        ((), getattr(row, field)) for row in [scrape.page.rows[name]] if not has or getattr(row, has)
    ]


def _clock_trusted(scrape: "Scrape") -> Samples:
    return [((name,), not row.clock_suspect) for name in STAGES[1:] if (row := scrape.page.rows[name]).pid]


def _cluster_lag(scrape: "Scrape") -> Samples:
    return [((), max(0, row.newest - row.epoch)) for row in [scrape.page.rows[AGENT]] if row.pid]


def _cluster_connected(scrape: "Scrape") -> Samples:
    return [((), state_of(AGENT, row) == "ready") for row in [scrape.page.rows[AGENT]] if row.pid]


def _replica(value: Callable[[Row], float | None]) -> tuple[tuple[str, ...], Read]:
    """Return no label, and the reader of a figure of the replica. None: absent, as without a replica."""
    return (), lambda scrape: [
        ((), figure) for row in [scrape.page.rows[REPLICA]] if row.pid and (figure := value(row)) is not None
    ]


def _follower(value: Callable[[dict[str, int]], float]) -> tuple[tuple[str, ...], Read]:
    return ("broker",), lambda scrape: [((name,), value(each)) for name, each in scrape.page.followers()]


def _replica_role(scrape: "Scrape") -> Samples:
    row = scrape.page.rows[REPLICA]
    return [((role,), row.role_name == role) for role in ROLES[1:] if row.pid]


def _tier_age(scrape: "Scrape") -> Samples:
    return [((), scrape.page.tier_lacks()[1])] if scrape.page.rows[TIER].pid else []


def _tier_behind(scrape: "Scrape") -> Samples:
    row = scrape.page.rows[TIER]
    return [((), (time.monotonic_ns() - row.due_since) / 1e9 if row.due_since else 0.0)] if row.pid else []


def _tier_requests(scrape: "Scrape") -> Samples:
    row, cold = scrape.page.rows[TIER], scrape.cold
    for call, answer in TIER_REQUESTS if row.pid else ():
        yield (TIER, call, answer), getattr(row, f"{call}_{answer}")
    if cold is not None and cold.store is not None:
        for (call, answer), count in [*cold.store.requests.items()]:
            yield ("gateway", call, answer), count


def _tier_received(scrape: "Scrape") -> Samples:
    row, cold = scrape.page.rows[TIER], scrape.cold
    found = [((TIER,), row.received)] if row.pid else []
    return [*found, *([(("gateway",), cold.store.received)] if cold is not None and cold.store is not None else [])]


def _cold(value: Callable[[ColdReads], float]) -> tuple[tuple[str, ...], Read]:
    """Return no label, and the reader of a figure of the gateway's cold reads; absent without KMQ_TIER."""
    return (), lambda scrape: [((), value(scrape.cold))] if scrape.cold is not None and scrape.settings.tier else []


def _synced_age(scrape: "Scrape") -> Samples:
    synced = scrape.page.rows["durability"].synced
    return [((), time.time() - synced / 1e9)] if synced else []


def _ready(scrape: "Scrape") -> Samples:
    return [((), scrape.verdict.ready)]


def _not_ready(scrape: "Scrape") -> Samples:
    present = {reason.code for reason in scrape.verdict.reasons}
    return [((code,), code in present) for code in REASONS]


def _warnings(scrape: "Scrape") -> Samples:
    present = {warning.code for warning in scrape.verdict.warnings}
    return [((code,), code in present) for code in ALL_WARNINGS]


def _certificates(scrape: "Scrape") -> Samples:
    certificates = scrape.verdict.certificates
    return [((used.process, used.path), used.validity.not_after) for used in certificates]


def _errors(scrape: "Scrape") -> Samples:
    row = scrape.page.rows["ingress"]
    return [((reason,), getattr(row, f"errs_{reason}")) for reason in refusals.CLASSES]


def _auth_failures(scrape: "Scrape") -> Samples:
    for name in _DOORS:
        row = scrape.page.rows[name]
        if row.pid:
            yield (name, "no_token"), row.auth_missing
            yield (name, "wrong_token"), max(0, row.unauthorized - row.auth_missing - row.auth_local)
            yield (name, "not_local"), row.auth_local


def _intakes(field: str) -> tuple[tuple[str, ...], Read]:
    """Return labels and reader of one value per intake."""
    return ("port", "kind", "topic"), lambda scrape: [
        ((str(each["port"]), str(each["kind"]), str(each["topic"])), int(each[field]))
        for each in scrape.page.intakes(scrape.settings.intakes)
    ]


ROWS = (
    Metric("kmq_ready", "1: a message sent now would be made durable, as /readyz says; 0: it would not.", (), _ready),
    Metric(
        "kmq_not_ready", "1: this reason keeps the broker from being ready; 0: it does not.", ("reason",), _not_ready
    ),
    Metric("kmq_warning", "1: an operator must act on this warning, ready or not; 0: no.", ("reason",), _warnings),
    Metric(
        "kmq_certificate_expires_seconds",
        "Unix time at which a certificate file that a process uses is not valid any more.",
        ("stage", "file"),
        _certificates,
    ),
    Metric("kmq_messages_total", "Messages a stage has moved.", *_rows("messages", STAGES[1:])),
    Metric("kmq_bytes_total", "Bytes of messages a stage has moved.", *_rows("bytes", STAGES)),
    Metric(
        "kmq_seq",
        "Last seq that a stage has finished: numbered by framer, on disk by durability, in its queue by router.",
        *_rows("seq", STAGES[1:]),
    ),
    Metric("kmq_restarts_total", "How often a process has been started again.", *_rows("restarts")),
    Metric(
        "kmq_state", f"State of a process: the index into {', '.join(s or 'down' for s in STATES)}.", *_rows("state")
    ),
    Metric("kmq_heartbeat_age_seconds", "Time since the last heartbeat of a process.", *_rows("age_s")),
    Metric(
        "kmq_clock_trusted",
        "1: a stage trusts the time of day; 0: it deletes and forgets nothing by age (kmq clock).",
        _STAGE,
        _clock_trusted,
    ),
    Metric(
        "kmq_refused_total",
        "Lines that were no messages and became dead.malformed, by the stage that refused them.",
        *_rows("refused", STAGES[:2]),
    ),
    Metric(
        "kmq_dropped_total",
        "Messages that drop_oldest has dropped; dropped.log names them.",
        *_rows("dropped", STAGES[2:]),
    ),
    Metric(
        "kmq_duplicates_total",
        "Messages answered with the seq they had been stored under before.",
        *_single("framer", "duplicates"),
    ),
    Metric("kmq_producers", "Producer names that are remembered.", *_single("framer", "producers")),
    Metric(
        "kmq_kafka_producers",
        "Of these, producers of Kafka clients, each per partition (KMQ_KAFKA_PRODUCERS).",
        *_single("framer", "kafka_producers"),
    ),
    Metric("kmq_remembered_ids", "Arbitrary message ids remembered.", *_single("framer", "remembered")),
    Metric("kmq_connections", "Connections of producers.", *_single("ingress", "connections")),
    Metric("kmq_intake_lines_total", "Raw lines that an intake (KMQ_INTAKES) has taken.", *_intakes("lines")),
    Metric("kmq_intake_bytes_total", "Bytes of these lines.", *_intakes("bytes")),
    Metric("kmq_intake_connections", "Connections to an intake.", *_intakes("connections")),
    Metric("kmq_intake_dropped_total", "Datagrams that the kernel has dropped unread.", *_intakes("dropped")),
    Metric(
        "kmq_intake_refused_total",
        "Connections and datagrams from addresses that KMQ_INTAKES_FROM does not have.",
        *_intakes("refused"),
    ),
    Metric("kmq_gateway_connections", "Connections to the gateway.", *_single("gateway", "connections")),
    Metric("kmq_askers", "Connections on the ack port.", *_single("ingress", "askers")),
    Metric(
        "kmq_turned_away_total",
        "Connections and calls that were refused or evicted because too many were open.",
        *_rows("turned_away", _DOORS),
    ),
    Metric(
        "kmq_cut_off_total",
        "Connections and calls that a deadline, or the limit on unread bytes, has ended; connections that spoke HTTP or TLS"
        " to a port of lines.",
        *_rows("cut_off", _DOORS),
    ),
    Metric("kmq_unauthorized_total", "Connections and requests without a valid token.", *_rows("unauthorized", _DOORS)),
    Metric(
        "kmq_unanswered",
        "Messages of acknowledged producers that have no reply yet.",
        *_single("ingress", "unanswered"),
    ),
    Metric(
        "kmq_last_durable_write_age_seconds",
        "Time since a write was last synced to disk; absent until durability has synced one.",
        (),
        _synced_age,
    ),
    Metric(
        "kmq_cluster_epoch",
        "Last message of the Broadcast Queue that this broker has processed.",
        *_single(AGENT, "epoch", "pid"),
    ),
    Metric(
        "kmq_cluster_lag",
        "Messages of the Broadcast Queue that this broker knows of and has not processed.",
        (),
        _cluster_lag,
    ),
    Metric(
        "kmq_cluster_connected",
        "1: this broker's agent follows the Broadcast Queue; 0: Consul does not answer it.",
        (),
        _cluster_connected,
    ),
    Metric(
        "kmq_replica_role", "1: the role of this broker in its shard; 0: it has another one.", ("role",), _replica_role
    ),
    Metric(
        "kmq_replica_epoch", "Epoch of the register that this broker has promised.", *_replica(lambda row: row.epoch)
    ),
    Metric(
        "kmq_replica_version",
        "Version of the register that this broker has promised.",
        *_replica(lambda row: row.version),
    ),
    Metric("kmq_replica_isr", "Replicas in the ISR, as far as this broker knows.", *_replica(lambda row: row.isr)),
    Metric(
        "kmq_replica_hw_lag",
        "Records in the WAL that are not committed yet; absent until one is.",
        *_replica(lambda row: max(0, row.last - row.seq) if row.seq else None),
    ),
    Metric(
        "kmq_replica_behind_seconds",
        "Follower: time out of the ISR. Leader: time since hw has reached what was numbered then; 0: it keeps up.",
        *_replica(lambda row: (time.monotonic_ns() - row.behind_since) / 1e9 if row.behind_since else 0),
    ),
    Metric(
        "kmq_replica_ack_delay_seconds",
        "Of a leader: what the follower `broker` takes to confirm a block; 0: nothing was measured yet.",
        *_follower(lambda each: each["ack_delay_us"] / 1e6),
    ),
    Metric(
        "kmq_replica_elections_total",
        "Elections that this broker has carried out.",
        *_replica(lambda row: row.elections),
    ),
    Metric(
        "kmq_replica_cut_records_total",
        "Records that were cut from the end of this WAL, because a leader did not have them; they are in cut/.",
        *_replica(lambda row: row.cut_records),
    ),
    Metric(
        "kmq_tier_wal_age_seconds",
        "Age of the oldest synced record that is not in KMQ_TIER; 0: all are.",
        (),
        _tier_age,
    ),
    Metric("kmq_tier_copied_seq", "Last record of the WAL that is in KMQ_TIER.", *_single(TIER, "seq", "pid")),
    Metric("kmq_tier_bytes_total", "Bytes that were sent to KMQ_TIER.", *_single(TIER, "bytes", "pid")),
    Metric(
        "kmq_tier_received_bytes_total",
        "Bytes that came from KMQ_TIER: read back or compared (tier), fetched in for readers (gateway).",
        _STAGE,
        _tier_received,
    ),
    Metric(
        "kmq_tier_requests_total",
        "Requests to KMQ_TIER by call (create, get, names, delete) and answer (ok, missing, failed).",
        ("stage", "call", "answer"),
        _tier_requests,
    ),
    Metric("kmq_tier_objects_total", "Objects that were made in KMQ_TIER.", *_single(TIER, "objects", "pid")),
    Metric(
        "kmq_tier_orphans_total",
        "Objects that were deleted from KMQ_TIER because no commit names them.",
        *_single(TIER, "orphans", "pid"),
    ),
    Metric("kmq_tier_rows", "Objects in KMQ_TIER with old records of topics, in force.", *_single(TIER, "rows", "pid")),
    Metric("kmq_tier_row_bytes", "Bytes of lines in these objects.", *_single(TIER, "row_bytes", "pid")),
    Metric(
        "kmq_tier_behind_bytes",
        "Bytes of old records that local limits would delete from the disk, and that are not in KMQ_TIER.",
        *_single(TIER, "behind_bytes", "pid"),
    ),
    Metric(
        "kmq_tier_behind_seconds",
        "Time since when there are such records, without a break; 0: there are none.",
        (),
        _tier_behind,
    ),
    Metric(
        "kmq_tier_local_limit_bytes",
        "Sum of local_retention_bytes over all partitions with tier=on.",
        *_single(TIER, "local_limit", "pid"),
    ),
    Metric("kmq_tier_cache_bytes", "Bytes of objects in tier/cache.", *_cold(lambda cold: cold.nbytes)),
    Metric(
        "kmq_tier_cache_reads_total",
        "Reads of objects that are in tier/cache.",
        *_cold(lambda cold: Segments.cold_reads),
    ),
    Metric(
        "kmq_tier_cache_misses_total",
        "Objects that a reader had to wait for, because they were not in tier/cache.",
        *_cold(lambda cold: cold.waits),
    ),
    Metric(
        "kmq_tier_cache_waits_total",
        "Objects that had to wait for room in tier/cache.",
        *_cold(lambda cold: cold.cache_waits),
    ),
    Metric(
        "kmq_tier_cold_waiting",
        "Objects that are being fetched in for readers of old records.",
        *_cold(lambda cold: cold.waiting),
    ),
    Metric("kmq_tier_commits", "Number of the last commit in KMQ_TIER.", *_single(TIER, "commits", "pid")),
    Metric(
        "kmq_errors_total",
        "Messages and connections of producers that got !err: auth (token), format, limit (disk, quota, too many), order"
        " (fenced, id reused or too old).",
        ("reason",),
        _errors,
    ),
    Metric(
        "kmq_auth_failures_total",
        "What kmq_unauthorized_total counts, by reason: no_token, wrong_token, not_local (reserved topics).",
        ("stage", "reason"),
        _auth_failures,
    ),
    Metric(
        "kmq_unclean_ends_total",
        "How often a process did not report its end, so it was killed or has crashed; ever since the stats page was made.",
        *_rows("unclean_ends"),
    ),
    Metric(
        "kmq_damage_found",
        "Damaged blocks and files that were found on reading or verifying, ever since the stats page was made.",
        *_rows("damage"),
    ),
    Metric(
        "kmq_oom_kills_total",
        "Processes of the broker's cgroup that the kernel has killed for lack of memory, ever since the stats page was made.",
        *_single("durability", "oom_kills"),
    ),
    Metric("kmq_disk_size_bytes", "Size of the disk of KMQ_DATA.", *_single("ingress", "disk_size", "disk_size")),
    Metric(
        "kmq_inodes_free",
        "Inodes free on the disk of KMQ_DATA; absent if the file system does not count them.",
        *_single("ingress", "inodes_free", "inodes_total"),
    ),
    Metric("kmq_inodes", "Inodes of the disk of KMQ_DATA.", *_single("ingress", "inodes_total", "inodes_total")),
    Metric(
        "kmq_quota_used_bytes",
        "Upper bound of the bytes under KMQ_DATA; absent without KMQ_DATA_QUOTA.",
        *_single("ingress", "quota_used", "quota_limit"),
    ),
    Metric("kmq_quota_bytes", "KMQ_DATA_QUOTA; absent without one.", *_single("ingress", "quota_limit", "quota_limit")),
    Metric("kmq_groups", "Consumer groups.", *_single("gateway", "groups")),
    Metric(
        "kmq_groups_stalled",
        "Groups that have committed nothing for five minutes although there are messages for them.",
        *_single("gateway", "groups_stalled"),
    ),
)


# --- from links and files --------------------------------------------------------------------------------------------

_MAX_TABLES = 100  # compacted topics that are shown one by one
_TABLES_S = 5.0  # between two looks for compacted topics, because each look reads all declarations


def _backlogs(scrape: "Scrape") -> Samples:
    return [((ring,), layout.backlog(scrape.settings.instance, ring)) for ring in ("framed", "durable")]


def _raw_bytes(scrape: "Scrape") -> Samples:
    links = [link for link in scrape.links if link.name in ("raw", received.NAME)]
    return [((), sum(link.bytes for link in links))] if links else []


def _links(scrape: "Scrape", name: str) -> Samples:
    """Return one figure of each link that exists."""
    return [((link.name,), getattr(link, name)) for link in scrape.links if link.capacity]


def _wal_bytes(scrape: "Scrape") -> Samples:
    return [((), sum(os.stat(path).st_size for _, path in segment.listing(f"{scrape.settings.data}/append")))]


def _disk_free(scrape: "Scrape") -> Samples:
    disk = os.statvfs(scrape.settings.data)
    return [((), disk.f_bavail * disk.f_frsize)]


def _topics(scrape: "Scrape") -> Samples:
    return [((), len(topics.names(scrape.settings.data)))]


@lru_cache(maxsize=1)
def _rates(data: str, most: int) -> BusiestTopics:
    return BusiestTopics(data, most)


def _of(scrape: "Scrape") -> BusiestTopics:
    return _rates(scrape.settings.data, scrape.settings.metrics_topics)


def _topic_messages(scrape: "Scrape") -> Samples:
    return [((name,), count) for name, count in _of(scrape).counts()]


def _end_offsets(scrape: "Scrape") -> Samples:
    rates = _of(scrape)
    for topic in rates.named():
        for partition in range(rates.bounds.declared(topic)[0]):
            yield (topic, str(partition)), rates.bounds.of(topic, partition)[1]


@lru_cache(maxsize=1)
def _compacted_topics(data: str) -> CompactedTopics:
    return CompactedTopics(data)


@lru_cache(maxsize=1)
def _tables(data: str, period: int) -> list[CompactedTopic]:
    return _compacted_topics(data).found()


def _compacted(scrape: "Scrape", value: Callable[[CompactedTopic, int, Pass | None, int], float | None]) -> Samples:
    data = scrape.settings.data
    found = {table.name: table for table in _tables(data, int(time.monotonic() / _TABLES_S))}
    tables = [found[name] for name in _of(scrape).rank(list(found), _MAX_TABLES)]
    rows, ends = (passes.read(data), compaction.synced_ends(data)) if tables else ({}, {})
    for table in tables:
        for number in range(table.partitions):
            end = ends.get((table.name, number), 0)
            figure = value(table, number, passes.of(rows, table, number), end)
            if figure is not None:
                yield (table.name, str(number)), figure


def _uncompacted_bytes(scrape: "Scrape") -> Samples:
    data = scrape.settings.data
    return _compacted(scrape, lambda table, number, done, end: passes.pending(data, (table.name, number), done, end)[1])


def _compacted_at(scrape: "Scrape") -> Samples:
    return _compacted(scrape, lambda table, number, done, end: done.at if done else None)


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


# --- from the gateway itself -----------------------------------------------------------------------------------------

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_LAGS = 1000  # partitions of groups; each takes some reads of a file
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each one, which says what `rate` knows without it

Lag = tuple[str, str, int, int, float, int]  # group, topic, partition, messages, seconds, overtaken
SCRAPED = (*ROWS, *FILES)


class Timed(NamedTuple):
    """A histogram of the stats page. `what`: one of the values of stats.TIMED."""

    name: str
    help: str
    what: str


TIMED = (
    Timed("kmq_ack_seconds", "Time from reading a train of messages to its last reply; one train a connection.", "ack"),
    Timed("kmq_sync_seconds", "Time of an fdatasync of the WAL.", "sync"),
    Timed("kmq_routed_seconds", "Time from the receipt of a block of messages until it is in its queues.", "routed"),
)
BUILD_INFO = "kmq_build_info", "Always 1; the labels say which KMQ and which Python this is.", ("version", "python")
GRPC_REQUESTS = "kmq_grpc_requests_total", "gRPC calls that have ended, by method and status.", ("method", "code")
GRPC_SECONDS = "kmq_grpc_seconds", "Time that unary gRPC calls took.", ("method",)
EGRESS_REQUESTS = (
    "kmq_egress_requests_total",
    "Requests on the consumer port that have ended, by their first word and the code of the refusal, if any.",
    ("request", "code"),
)
EGRESS_BYTES = "kmq_egress_bytes_total", "Bytes of records that the consumer port has sent.", ()
KAFKA_REQUESTS = (
    "kmq_kafka_requests_total",
    "Requests of Kafka clients that have ended, by kind and the first error of the answer, if any.",
    ("request", "code"),
)
KAFKA_CONNECTIONS = "kmq_kafka_connections", "Connections of Kafka clients.", ()
KAFKA_BATCHES = (
    "kmq_kafka_batches_total",
    "Batches of records given to Kafka consumers: as they were produced (cache), or made from lines (lines).",
    ("source",),
)
HTTP_REQUESTS = (
    "kmq_http_requests_total",
    "Requests to /api that have ended, by operation and the code of the refusal, if any.",
    ("operation", "code"),
)
HTTP_SECONDS = (
    "kmq_http_request_seconds",
    "Time that requests to /api took; a consume that waits takes as long as its client asks.",
    ("operation",),
)
_OF_GROUP = ("group", "topic", "partition")
GROUP_LAG = (
    "kmq_group_lag",
    f"Messages of a partition that a group has not committed, or has given back; of at most {MOST_LAGS} partitions, by group.",
    _OF_GROUP,
)
GROUP_LAG_SECONDS = "kmq_group_lag_seconds", "Time since the first of them was received; 0 without one.", _OF_GROUP
GROUP_OVERTAKEN = "kmq_group_overtaken_total", "Messages deleted before the group had read them.", _OF_GROUP
DECLARED: list[tuple[str, str, tuple[str, ...]]] = [
    *(row[:3] for row in SCRAPED),
    *((timed.name, timed.help, ()) for timed in TIMED),
    *(BUILD_INFO, GRPC_REQUESTS, GRPC_SECONDS, EGRESS_REQUESTS, EGRESS_BYTES, HTTP_REQUESTS, HTTP_SECONDS),
    *(KAFKA_REQUESTS, KAFKA_CONNECTIONS, KAFKA_BATCHES, GROUP_LAG, GROUP_LAG_SECONDS, GROUP_OVERTAKEN),
]


class Scrape(Collector):
    """One scrape: reads every metric of SCRAPED, all from one look at the page and the links."""

    def __init__(self, broker: Broker, cold: ColdReads | None = None) -> None:
        self.settings, self.page, self.cold = broker.settings, broker.page.copy(), cold

    @cached_property
    def verdict(self) -> Verdict:
        return judge(self.page, self.settings)

    @cached_property
    def links(self) -> list[status.LinkStatus]:
        return status.look(self.settings)

    def collect(self) -> Iterator[Family]:
        for metric in SCRAPED:
            kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            with contextlib.suppress(FileNotFoundError):  # the file is gone, or not there yet
                for labels, value in metric.read(self):
                    family.add_metric(labels, value)
            yield family
        for timed in TIMED:
            yield _family(timed, self.page.histogram(timed.what).snapshot())
        build = GaugeMetricFamily(BUILD_INFO[0], BUILD_INFO[1], labels=BUILD_INFO[2])
        build.add_metric((kmq.__version__, platform.python_version()), 1)
        yield build

    def describe(self) -> list[Family]:
        return []  # otherwise registering would read every metric


def _family(timed: Timed, seen: HistogramSnapshot) -> Family:
    """Return a histogram of the stats page as Prometheus has it: each bucket with all times below its bound."""
    bounds = [*(f"{bound:.6f}".rstrip("0") for bound in BOUNDS_S), "+Inf"]
    counts = list(accumulate(seen.counts))
    family = HistogramMetricFamily(timed.name, timed.help)
    family.add_metric((), list(zip(bounds, counts, strict=True)), seen.sum_s)
    return family


class Requests:
    """The metrics of requests, which the gateway counts itself."""

    def __init__(
        self, lags: Callable[[], Awaitable[Iterable[Lag]]] | None = None, cold: ColdReads | None = None
    ) -> None:
        """`lags` returns the lags of groups. `cold`: reads of old records, which have counts of their own."""
        self.cold = cold
        self.registry = CollectorRegistry()
        self._requests = Counter(*GRPC_REQUESTS, registry=self.registry)
        self._seconds = Histogram(*GRPC_SECONDS, registry=self.registry, buckets=_BUCKETS)
        self._egress = Counter(*EGRESS_REQUESTS, registry=self.registry)
        self._sent = Counter(*EGRESS_BYTES, registry=self.registry)
        self._kafka = Counter(*KAFKA_REQUESTS, registry=self.registry)
        self.kafka_connections = Gauge(*KAFKA_CONNECTIONS, registry=self.registry)
        self._batches = Counter(*KAFKA_BATCHES, registry=self.registry)
        self.batches = {"cache": 0, "lines": 0}  # the same, for the stats page
        self._http = Counter(*HTTP_REQUESTS, registry=self.registry)
        self._http_seconds = Histogram(*HTTP_SECONDS, registry=self.registry, buckets=_BUCKETS)
        ProcessCollector(registry=self.registry)
        self._lag = Gauge(*GROUP_LAG, registry=self.registry)
        self._lag_seconds = Gauge(*GROUP_LAG_SECONDS, registry=self.registry)
        self._overtaken = Counter(*GROUP_OVERTAKEN, registry=self.registry)
        self._lags = lags

    async def look(self) -> None:
        """Update the lags of groups. Call it before each scrape."""
        rows = await self._lags() if self._lags is not None else ()
        for metric in (self._lag, self._lag_seconds, self._overtaken):
            metric.clear()
        for group, topic, partition, messages, seconds, overtaken in rows:
            self._lag.labels(group, topic, str(partition)).set(messages)
            self._lag_seconds.labels(group, topic, str(partition)).set(seconds)
            self._overtaken.labels(group, topic, str(partition)).inc(overtaken)

    def count_http(self, operation: str, code: str, seconds: float) -> None:
        """Count one request to /api that has ended. `code`: why it was refused; OK if it was not."""
        self._http.labels(operation, code).inc()
        self._http_seconds.labels(operation).observe(seconds)

    def count(self, method: str, code: str, seconds: float) -> None:
        """Count one call that has ended."""
        self._requests.labels(method, code).inc()
        if not method.endswith(("Stream", "Subscribe")):  # the client decides how long a stream lasts
            self._seconds.labels(method).observe(seconds)

    def count_egress(self, request: str, code: str) -> None:
        """Count one request on the consumer port that has ended. `code`: why it was refused; OK if it was not."""
        self._egress.labels(request, code).inc()

    def count_kafka(self, request: str, code: str) -> None:
        """Count one request of a Kafka client that has ended. `code`: its error; OK if it has none."""
        self._kafka.labels(request, code).inc()

    def count_batch(self, source: str) -> None:
        """Count a batch for a Kafka consumer: from the `cache`, or from `lines`."""
        self._batches.labels(source).inc()
        self.batches[source] += 1

    def count_sent(self, nbytes: int) -> None:
        """Count bytes of records that the consumer port has sent."""
        self._sent.inc(nbytes)


def page(broker: Broker, requests: Requests) -> bytes:
    """Return all metrics as text. Reads files, so call it in a thread."""
    registry = CollectorRegistry()
    registry.register(Scrape(broker, requests.cold))
    return generate_latest(registry) + generate_latest(requests.registry)
