"""Every metric the gateway serves, each declared once with its description.

A scrape reads the stats page of the stages (metric_rows.py), the links and files (metric_files.py), and the counters of
the gateway itself.
"""

import contextlib
import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator
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
from kmq.broker.histogram import BOUNDS_S, Snapshot
from kmq.gateway.core.broker import Broker
from kmq.gateway.core.metric_files import FILES
from kmq.gateway.core.metric_rows import ROWS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_LAGS = 1000  # partitions of groups; each takes some reads of a file
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each one, which says what `rate` knows without it

Lag = tuple[str, str, int, int, float]  # group, topic, partition, messages, seconds
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
GROUP_LAG = (
    "kmq_group_lag",
    f"Messages of a partition that a group has not committed; of at most {MOST_LAGS} partitions, by group.",
    ("group", "topic", "partition"),
)
GROUP_LAG_SECONDS = (
    "kmq_group_lag_seconds",
    "Time since the first of these messages was received; 0 without one.",
    ("group", "topic", "partition"),
)
DECLARED: list[tuple[str, str, tuple[str, ...]]] = [
    *(row[:3] for row in SCRAPED),
    *((timed.name, timed.help, ()) for timed in TIMED),
    *(BUILD_INFO, GRPC_REQUESTS, GRPC_SECONDS, EGRESS_REQUESTS, EGRESS_BYTES, HTTP_REQUESTS, HTTP_SECONDS),
    *(GROUP_LAG, GROUP_LAG_SECONDS),
]


class _Scrape(Collector):
    """Reads every metric of SCRAPED at each scrape."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def collect(self) -> Iterator[Family]:
        for metric in SCRAPED:
            kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            with contextlib.suppress(FileNotFoundError):  # the file is gone, or not there yet
                for labels, value in metric.read(self.broker):
                    family.add_metric(labels, value)
            yield family
        for timed in TIMED:
            yield _family(timed, self.broker.page.histogram(timed.what).snapshot())
        build = GaugeMetricFamily(BUILD_INFO[0], BUILD_INFO[1], labels=BUILD_INFO[2])
        build.add_metric((kmq.__version__, platform.python_version()), 1)
        yield build

    def describe(self) -> list[Family]:
        return []  # otherwise registering would read every metric


def _family(timed: Timed, seen: Snapshot) -> Family:
    """Return a histogram of the stats page as Prometheus has it: each bucket with all times below its bound."""
    bounds = [*(f"{bound:.6f}".rstrip("0") for bound in BOUNDS_S), "+Inf"]
    counts = list(accumulate(seen.counts))
    family = HistogramMetricFamily(timed.name, timed.help)
    family.add_metric((), list(zip(bounds, counts, strict=True)), seen.sum_s)
    return family


class Requests:
    """The metrics of requests, which the gateway counts itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(*GRPC_REQUESTS, registry=self.registry)
        self._seconds = Histogram(*GRPC_SECONDS, registry=self.registry, buckets=_BUCKETS)
        self._egress = Counter(*EGRESS_REQUESTS, registry=self.registry)
        self._sent = Counter(*EGRESS_BYTES, registry=self.registry)
        self._http = Counter(*HTTP_REQUESTS, registry=self.registry)
        self._http_seconds = Histogram(*HTTP_SECONDS, registry=self.registry, buckets=_BUCKETS)
        ProcessCollector(registry=self.registry)
        self._lag = Gauge(*GROUP_LAG, registry=self.registry)
        self._lag_seconds = Gauge(*GROUP_LAG_SECONDS, registry=self.registry)
        self.lags: Callable[[], Awaitable[Iterable[Lag]]] | None = None  # the gateway sets it

    async def look(self) -> None:
        """Look how far the groups are; call before each scrape."""
        rows = await self.lags() if self.lags is not None else ()
        self._lag.clear()
        self._lag_seconds.clear()
        for group, topic, partition, messages, seconds in rows:
            self._lag.labels(group, topic, str(partition)).set(messages)
            self._lag_seconds.labels(group, topic, str(partition)).set(seconds)

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

    def count_sent(self, nbytes: int) -> None:
        """Count bytes of records that the consumer port has sent."""
        self._sent.inc(nbytes)


def page(broker: Broker, requests: Requests) -> bytes:
    """Return all metrics as text. Reads files, so call it in a thread."""
    registry = CollectorRegistry()
    registry.register(_Scrape(broker))
    return generate_latest(registry) + generate_latest(requests.registry)
