"""What a scrape reads from the stats page: the numbers of every process, and what is judged from them.

The counters of a process restart at 0 when it is restarted, as Prometheus expects, except those that say "ever".
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kmq.broker.readiness import ALL_WARNINGS, REASONS, state_of
from kmq.broker.stats import AGENT, PROCESSES, STATES, Row
from kmq.config.settings import STAGES
from kmq.gateway.core.broker import Broker

Samples = Iterable[tuple[tuple[str, ...], float]]  # label values, sample value


class Metric(NamedTuple):
    """One row of a table. A metric is a counter if its name ends in `_total`, otherwise a gauge."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Broker], Samples]


def _rows(value: Callable[[Row], float], names: tuple[str, ...] = PROCESSES) -> Callable[[Broker], Samples]:
    """Return a reader of one value per process, for the processes that have ever been started."""
    return lambda broker: [((name,), value(row)) for name in names if (row := broker.page.rows[name]).pid]


def _single(name: str, value: Callable[[Row], float]) -> Callable[[Broker], Samples]:
    """Return a reader of a value that only the process `name` has."""
    return lambda broker: [((), value(broker.page.rows[name]))]


def _agent(value: Callable[[Row], float]) -> Callable[[Broker], Samples]:
    """Return a reader of a value of the agent, if this broker has one."""
    return lambda broker: [((), value(row)) for row in [broker.page.rows[AGENT]] if row.pid]


def _synced_age(broker: Broker) -> Samples:
    synced = broker.page.rows["durability"].synced
    return [((), time.time() - synced / 1e9)] if synced else []


def _ready(broker: Broker) -> Samples:
    return [((), broker.verdict().ready)]


def _not_ready(broker: Broker) -> Samples:
    present = {reason.code for reason in broker.verdict().reasons}
    return [((code,), code in present) for code in REASONS]


def _warnings(broker: Broker) -> Samples:
    present = {warning.code for warning in broker.verdict().warnings}
    return [((code,), code in present) for code in ALL_WARNINGS]


def _certificates(broker: Broker) -> Samples:
    certificates = broker.verdict().certificates
    return [((used.process, used.path), used.validity.not_after) for used in certificates]


def _errors(broker: Broker) -> Samples:
    row = broker.page.rows["ingress"]
    counts = {"auth": row.errs_auth, "format": row.errs_format, "limit": row.errs_limit, "order": row.errs_order}
    return [((reason,), count) for reason, count in counts.items()]


def _auth_failures(broker: Broker) -> Samples:
    for name in _DOORS:
        row = broker.page.rows[name]
        if row.pid:
            yield (name, "no_token"), row.auth_missing
            yield (name, "wrong_token"), max(0, row.unauthorized - row.auth_missing - row.auth_local)
            yield (name, "not_local"), row.auth_local


def _looked(value: Callable[[Row], float], has: Callable[[Row], int]) -> Callable[[Broker], Samples]:
    """Return a reader of a size that ingress has looked at, where there is one."""
    return lambda broker: [((), value(row)) for row in [broker.page.rows["ingress"]] if has(row)]


_STAGE = ("stage",)
_DOORS = ("ingress", "gateway")  # the processes that listen on ports

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
    Metric("kmq_messages_total", "Messages a stage has moved.", _STAGE, _rows(lambda r: r.messages, STAGES[1:])),
    Metric("kmq_bytes_total", "Bytes of messages a stage has moved.", _STAGE, _rows(lambda r: r.bytes, STAGES)),
    Metric(
        "kmq_seq",
        "Last seq that a stage has finished: numbered by framer, on disk by durability, in its queue by router.",
        _STAGE,
        _rows(lambda r: r.seq, STAGES[1:]),
    ),
    Metric("kmq_restarts_total", "How often a process has been started again.", _STAGE, _rows(lambda r: r.restarts)),
    Metric(
        "kmq_state",
        f"State of a process: the index into {', '.join(s or 'down' for s in STATES)}.",
        _STAGE,
        _rows(lambda r: r.state),
    ),
    Metric(
        "kmq_heartbeat_age_seconds", "Time since the last heartbeat of a process.", _STAGE, _rows(lambda r: r.age_s)
    ),
    Metric(
        "kmq_clock_trusted",
        "1: a stage trusts the time of day; 0: it deletes and forgets nothing by age (kmq clock).",
        _STAGE,
        _rows(lambda r: not r.clock_suspect, STAGES[1:]),
    ),
    Metric(
        "kmq_refused_total",
        "Lines that were no messages and became dead.malformed, by the stage that refused them.",
        _STAGE,
        _rows(lambda r: r.refused, STAGES[:2]),
    ),
    Metric(
        "kmq_dropped_total",
        "Messages that drop_oldest has dropped; dropped.log names them.",
        _STAGE,
        _rows(lambda r: r.dropped, STAGES[2:]),
    ),
    Metric(
        "kmq_duplicates_total",
        "Messages answered with the seq they had been stored under before.",
        (),
        _single("framer", lambda r: r.duplicates),
    ),
    Metric("kmq_producers", "Producer names that are remembered.", (), _single("framer", lambda r: r.producers)),
    Metric("kmq_remembered_ids", "Arbitrary message ids remembered.", (), _single("framer", lambda r: r.remembered)),
    Metric("kmq_connections", "Connections of producers.", (), _single("ingress", lambda r: r.connections)),
    Metric("kmq_gateway_connections", "Connections to the gateway.", (), _single("gateway", lambda r: r.connections)),
    Metric("kmq_askers", "Connections on the ack port.", (), _single("ingress", lambda r: r.askers)),
    Metric(
        "kmq_turned_away_total",
        "Connections and calls that were refused or evicted because too many were open.",
        _STAGE,
        _rows(lambda r: r.turned_away, _DOORS),
    ),
    Metric(
        "kmq_cut_off_total",
        "Connections and calls that a deadline, or the limit on unread bytes, has ended.",
        _STAGE,
        _rows(lambda r: r.cut_off, _DOORS),
    ),
    Metric(
        "kmq_unauthorized_total",
        "Connections and requests without a valid token.",
        _STAGE,
        _rows(lambda r: r.unauthorized, _DOORS),
    ),
    Metric(
        "kmq_unanswered",
        "Messages of acknowledged producers that have no reply yet.",
        (),
        _single("ingress", lambda r: r.unanswered),
    ),
    Metric(
        "kmq_last_durable_write_age_seconds",
        "Time since a write was last synced to disk; absent until durability has synced one.",
        (),
        _synced_age,
    ),
    Metric(
        "kmq_cluster_epoch",
        "Last message of the cluster's Broadcast Queue that this broker has processed.",
        (),
        _agent(lambda r: r.epoch),
    ),
    Metric(
        "kmq_cluster_lag",
        "Messages of the Broadcast Queue that this broker knows of and has not processed.",
        (),
        _agent(lambda r: max(0, r.newest - r.epoch)),
    ),
    Metric(
        "kmq_cluster_connected",
        "1: this broker's agent follows the Broadcast Queue; 0: Consul does not answer it.",
        (),
        _agent(lambda r: state_of(AGENT, r) == "ready"),
    ),
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
        _STAGE,
        _rows(lambda r: r.unclean_ends),
    ),
    Metric(
        "kmq_damage_found",
        "Damaged blocks and files that were found on reading or verifying, ever since the stats page was made.",
        _STAGE,
        _rows(lambda r: r.damage),
    ),
    Metric(
        "kmq_oom_kills_total",
        "Processes of the broker's cgroup that the kernel has killed for lack of memory, ever since the stats page was made.",
        (),
        _single("durability", lambda r: r.oom_kills),
    ),
    Metric(
        "kmq_disk_size_bytes",
        "Size of the disk of KMQ_DATA.",
        (),
        _looked(lambda r: r.disk_size, lambda r: r.disk_size),
    ),
    Metric(
        "kmq_inodes_free",
        "Inodes free on the disk of KMQ_DATA; absent if the file system does not count them.",
        (),
        _looked(lambda r: r.inodes_free, lambda r: r.inodes_total),
    ),
    Metric(
        "kmq_inodes", "Inodes of the disk of KMQ_DATA.", (), _looked(lambda r: r.inodes_total, lambda r: r.inodes_total)
    ),
    Metric(
        "kmq_quota_used_bytes",
        "Upper bound of the bytes under KMQ_DATA; absent without KMQ_DATA_QUOTA.",
        (),
        _looked(lambda r: r.quota_used, lambda r: r.quota_limit),
    ),
    Metric(
        "kmq_quota_bytes",
        "KMQ_DATA_QUOTA; absent without one.",
        (),
        _looked(lambda r: r.quota_limit, lambda r: r.quota_limit),
    ),
    Metric("kmq_groups", "Consumer groups.", (), _single("gateway", lambda r: r.groups)),
    Metric(
        "kmq_groups_stalled",
        "Groups that have committed nothing for five minutes although there are messages for them.",
        (),
        _single("gateway", lambda r: r.groups_stalled),
    ),
)
