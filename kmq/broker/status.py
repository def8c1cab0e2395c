"""What `kmq status` shows: the state and rates of each process, and what waits in each link. Read-only.

Invariant   `kmq status`, `kmq top`, the console and /metrics show the same number for the same thing: they all read here.
Memory      Samples of the last LATENCY_S, some hundred numbers each.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import kmq
from kmq.access.certificate import utc
from kmq.broker import clock
from kmq.broker.concerns import Finding
from kmq.broker.health import LIFELESS, Verdict, judge, state_of
from kmq.broker.histogram import HistogramSnapshot, difference, quantile
from kmq.broker.ports import closed_doors
from kmq.broker.stats import AGENT, REPLICA, TIER, TIER_PROBLEMS, TIMED, Row, StatsPage, peek
from kmq.broker.supervisor import Supervision, taken
from kmq.config.intakes import IntakePort
from kmq.config.settings import STAGES, Settings
from kmq.links import fifo, layout, received
from kmq.logfmt import pairs

# --- links -----------------------------------------------------------------------------------------------------------


class LinkStatus:
    """One link at one moment. `messages`: None where a link does not count them; `fill`: 0 to 1."""

    __slots__ = ("bytes", "capacity", "fill", "messages", "name")

    def __init__(
        self, name: str, nbytes: int, capacity: int, messages: int | None = None, slots: int = 0, is_full: bool = False
    ) -> None:
        self.name, self.bytes, self.capacity, self.messages = name, nbytes, capacity, messages
        by_bytes = nbytes / capacity if capacity else 0.0
        by_count = messages / slots if messages and slots else 0.0
        # A ring is full when either limit is reached, or when the next block is too large for what is left.
        self.fill = 1.0 if is_full else round(min(1.0, max(by_bytes, by_count)), 4)

    def fields(self) -> dict[str, object]:
        """Return what JSON shows."""
        return {name: getattr(self, name) for name in ("name", "bytes", "capacity", "messages", "fill")}


def look(settings: Settings) -> list[LinkStatus]:
    """Return all links, in the order in which a message passes them; [] if there is no FIFO."""
    try:
        raw = os.open(f"{settings.pipes}/raw", os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return []
    try:
        links = [LinkStatus("raw", fifo.waiting_bytes(raw), fifo.capacity(raw))]
    finally:
        os.close(raw)
    bytes_only = layout.filling(settings.instance, received.NAME)
    links.append(LinkStatus(received.NAME, bytes_only.nbytes, bytes_only.capacity, is_full=bytes_only.is_full))
    return links + [LinkStatus(name, *layout.filling(settings.instance, name)) for name in layout.RINGS]


# --- pace ------------------------------------------------------------------------------------------------------------

Latency = dict[str, float]  # p50, p99 in seconds; count
LATENCY_S = 10.0  # what latencies are measured over


class _Sample(NamedTuple):
    at: float  # CLOCK_MONOTONIC
    moved: dict[str, tuple[int, int, int]]  # stage → when it was started; messages, bytes
    times: dict[str, HistogramSnapshot]  # by name of TIMED
    intakes: list[dict[str, int | str]]


class StagePace:
    """Rates and latencies of the stages, from samples of the stats page over the last LATENCY_S."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()

    def add(self, page: StatsPage | None, intakes: Sequence[IntakePort] = ()) -> None:
        """Take a sample. `page`: None if the broker is down, which clears all samples. `intakes`: its KMQ_INTAKES."""
        if page is None:
            self._samples.clear()
            return
        at, rows = time.monotonic(), page.rows
        moved = {name: (rows[name].started, rows[name].messages, rows[name].bytes) for name in STAGES}
        times = {name: page.histogram(name).snapshot() for name in TIMED.values()}
        self._samples.append(_Sample(at, moved, times, page.intakes(intakes)))
        while len(self._samples) > 2 and at - self._samples[1].at >= LATENCY_S:
            self._samples.popleft()

    def _span(self, seconds: float) -> tuple[_Sample, _Sample] | None:
        """Return the newest sample and the one at least `seconds` before it, else the oldest; None without two."""
        if len(self._samples) < 2:
            return None
        new = self._samples[-1]
        return new, next((old for old in reversed(self._samples) if new.at - old.at >= seconds), self._samples[0])

    def rates(self, seconds: float) -> dict[str, dict[str, float]]:
        """Return messages and bytes a second by stage, over the last `seconds`; {} until they are known."""
        span = self._span(seconds)
        if span is None:
            return {}
        new, old = span
        spent_s = max(1e-3, new.at - old.at)
        rates = {}
        for name, (started, *counts) in new.moved.items():
            before = old.moved[name][1:] if old.moved[name][0] == started else (0, 0)  # a new process counts from 0
            messages, nbytes = (
                round(max(0, count - was) / spent_s, 1) for count, was in zip(counts, before, strict=True)
            )
            rates[name] = {"messages": messages, "bytes": nbytes}
        return rates

    def intakes(self, seconds: float) -> list[dict[str, object]]:
        """Return what each intake has counted, with its lines and bytes a second (at first None)."""
        if not self._samples:
            return []
        now = self._samples[-1].intakes
        new, old = self._span(seconds) or (self._samples[-1], self._samples[-1])
        spent_s = new.at - old.at
        rows: list[dict[str, object]] = []
        for row, was in zip(now, old.intakes, strict=False):
            is_new = int(row["lines"]) < int(was["lines"])  # a restarted ingress counts from 0
            more = [int(row[name]) - (0 if is_new else int(was[name])) for name in ("lines", "bytes")]
            rate, bytes_rate = (round(count / spent_s, 1) if spent_s else None for count in more)
            rows.append({**row, "rate": rate, "bytes_rate": bytes_rate})
        return rows

    def latency(self, seconds: float = LATENCY_S) -> dict[str, Latency | None]:
        """Return p50 and p99 of the last `seconds`; None without a measurement."""
        span = self._span(seconds)
        if span is None:
            return dict.fromkeys(TIMED.values())
        new, old = span
        return {name: _quantiles(difference(new.times[name], old.times[name])) for name in TIMED.values()}


def _quantiles(times: HistogramSnapshot) -> Latency | None:
    p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
    return None if p50 is None or p99 is None else {"p50": p50, "p99": p99, "count": times.count}


# --- status ----------------------------------------------------------------------------------------------------------

_SAMPLE_S = 0.5  # how long rates are measured


class StageStatus:
    """One line of the table: a process."""

    def __init__(self, name: str, row: Row) -> None:
        self.name, self.pid = name, row.pid
        self.messages, self.bytes, self.seq = row.messages, row.bytes, row.seq
        self.restarts, self.connections = row.restarts, row.connections
        self.refused, self.dropped = row.refused, row.dropped
        self.begun = row.started  # CLOCK_MONOTONIC, ns
        self.exit_code = row.exit_code
        self.age_s = row.age_s
        self.state = state_of(name, row)
        self.rate = 0.0

    def fields(self) -> dict[str, object]:
        """Return what JSON shows; the start in unix seconds, by the present time of day."""
        age_s = (time.monotonic_ns() - self.begun) / 1e9
        shown = {name: value for name, value in vars(self).items() if name != "begun"}
        return shown | {"started": round(time.time() - age_s, 3) if self.begun else None}


class BrokerStatus:
    """The whole broker at one moment."""

    def __init__(self, instance: str, verdict: Verdict, supervisor: str) -> None:
        """Make the status of a broker that is down; `collect` adds what a running broker has."""
        self.as_of, self.instance, self.verdict = time.time(), instance, verdict
        self.supervisor = supervisor  # up, killed, other or down
        self.stages: list[StageStatus] = []
        self.gateway: StageStatus | None = None
        self.agent: StageStatus | None = None
        self.replica: StageStatus | None = None
        self.tier: StageStatus | None = None
        self.copy: dict[str, object] | None = None  # how far KMQ_TIER has the WAL
        self.role = ""  # of the replica, with its details
        self.followers: list[dict[str, object]] = []  # of the shard that this broker leads
        self.backlog: dict[str, int] = {}
        self.links: list[LinkStatus] = []
        self.intakes: list[dict[str, int | str]] = []
        self.kafka: dict[str, int] | None = None  # the port for Kafka's clients; None: there is no such port
        self.latency: dict[str, Latency | None] = dict.fromkeys(TIMED.values())
        self.closed: list[str] = []  # ports of the gateway that another program uses
        self.clock = ""  # why the time of day is not trusted, and what to do; "": it is trusted

    @property
    def processes(self) -> list[StageStatus]:
        return [*self.stages, *filter(None, (self.gateway, self.agent, self.replica, self.tier))]

    @property
    def ready(self) -> bool:
        return self.verdict.ready


def page_of(settings: Settings) -> StatsPage | None:
    """Return a copy of the stats page of these settings; None if it is missing or another broker's."""
    page = peek(settings.instance)
    # A copy: a process that becomes ready meanwhile must not appear as ready here and as starting there.
    return page.copy() if page is not None and page.serves(settings.data) else None


def collect(settings: Settings) -> BrokerStatus:
    """Return the status now, without rates."""
    page = page_of(settings)
    supervisor = Supervision(settings).word
    if page is None:
        return BrokerStatus(settings.instance, _verdict(None, settings), supervisor)
    status = BrokerStatus(settings.instance, _verdict(page, settings), supervisor)
    status.stages = [StageStatus(name, page.rows[name]) for name in STAGES]
    status.gateway, status.agent, status.replica, status.tier = (
        StageStatus(name, row) if (row := page.rows[name]).pid else None for name in ("gateway", AGENT, REPLICA, TIER)
    )
    status.copy = _copy(page)
    status.role = _role(page.rows[REPLICA])
    status.followers = _followers(page)
    status.links = look(settings)
    status.intakes = page.intakes(settings.intakes)
    status.kafka = _kafka(page)
    status.closed = closed_doors(page.rows["gateway"].doors_closed)
    status.backlog = {"raw_bytes": sum(link.bytes for link in status.links if link.name in ("raw", received.NAME))}
    status.backlog |= {f"{name}_messages": layout.backlog(settings.instance, name) for name in layout.RINGS}
    status.latency = {what: _quantiles(page.histogram(what).snapshot()) for what in TIMED.values()}  # since their start
    status.clock = _clock(page)
    return status


def _verdict(page: StatsPage | None, settings: Settings) -> Verdict:
    """Return the verdict. If the broker is down because another one has its name or its files, that is the reason."""
    verdict = judge(page, settings)
    is_down = verdict.against("durability")
    if is_down is None or is_down.code not in ("down", "stopped") or (found := taken(settings)) is None:
        return verdict
    processes = tuple(dict.fromkeys(name for reason in verdict.reasons for name in reason.processes))
    return Verdict([Finding("down", "broker", *found, processes)], [], [])


def _copy(page: StatsPage) -> dict[str, object] | None:
    """Return what the process `tier` says of the copy and of topics; None without it. A follower is never behind."""
    row = page.rows[TIER]
    if not row.pid:
        return None
    behind, age_s = page.tier_lacks()
    copied = {"seq": row.seq, "behind": behind, "age_s": round(age_s, 3), "problem": TIER_PROBLEMS[row.standing]}
    return copied | {"objects": row.rows, "bytes": row.row_bytes, "behind_bytes": row.behind_bytes}


def _role(row: Row) -> str:
    if not row.version:
        return row.role_name
    return f"{row.role_name}, epoch {row.epoch}, ISR {row.isr}/{row.brokers}"


def _followers(page: StatsPage) -> list[dict[str, object]]:
    row = page.rows[REPLICA]
    if row.role_name not in ("starting", "leading") or row.silence() or row.state_name == "stopped":
        return []
    return [
        {
            "broker": name,
            "connected": bool(each["connected"]),
            "in_isr": bool(each["in_isr"]),
            "ack_delay": each["ack_delay_us"] / 1e6 if each["ack_delay_us"] else None,
            "slow": bool(each["slow_since"]),
            "lag": each["lag"] if each["connected"] else None,
        }
        for name, each in page.followers()
    ]


def _kafka(page: StatsPage) -> dict[str, int] | None:
    row = page.rows["gateway"]
    if not row.kafka_port or state_of("gateway", row) in LIFELESS:
        return None
    return {
        "port": row.kafka_port,
        "connections": row.kafka_connections,
        "producers": page.rows["framer"].kafka_producers,
        "batches_from_cache": row.kafka_cached,
        "batches_from_lines": row.kafka_rendered,
        "misdirected": row.kafka_misdirected,
    }


def _clock(page: StatsPage) -> str:
    suspects = [page.rows[name] for name in STAGES if page.rows[name].clock_suspect]
    if not suspects:
        return ""
    row = max(suspects, key=clock.steady_in_s)
    return f"{clock.suspicion(row)}; {clock.ADVICE}"


def trust_clock(settings: Settings) -> None:
    """Tell every stage that the time of day is right."""
    page = peek(settings.instance)
    if page is not None and page.serves(settings.data):
        for name in STAGES:
            clock.trust(page.rows[name])


def collect_with_rates(settings: Settings) -> BrokerStatus:
    """Return the status with messages per second, measured for _SAMPLE_S."""
    pace = StagePace()
    pace.add(page_of(settings))
    time.sleep(_SAMPLE_S)
    status = collect(settings)
    pace.add(page_of(settings))
    rates = pace.rates(_SAMPLE_S)
    for stage in status.stages:
        stage.rate = rates[stage.name]["messages"] if rates else 0.0
    return status


def logfmt(status: BrokerStatus) -> str:
    """Return one line per process, one for the links, and one for the verdict and each of its reasons: for scripts."""
    lines = [
        pairs(
            stage=s.name,
            pid=s.pid,
            state=s.state,
            restarts=s.restarts,
            messages=s.messages,
            bytes=s.bytes,
            rate=round(s.rate),
            seq=s.seq,
            refused=s.refused,
            dropped=s.dropped,
            connections=s.connections,
            heartbeat_age_s=f"{s.age_s:.1f}",
        )
        for s in status.processes
    ]
    verdict = status.verdict
    lines += [pairs(intake=each["topic"], **{k: v for k, v in each.items() if k != "topic"}) for each in status.intakes]
    lines += [
        pairs(follower=each["broker"], **{k: _plain(v) for k, v in each.items() if k != "broker"})
        for each in status.followers
    ]
    if status.kafka is not None:
        lines.append(pairs(kafka=status.kafka["port"], **{k: v for k, v in status.kafka.items() if k != "port"}))
    if status.copy is not None:
        lines.append(
            pairs(copy="tier", **{name: value or 0 for name, value in status.copy.items() if name != "problem"})
        )
    lines += [pairs(links="backlog", **status.backlog), pairs(broker="ready" if verdict.ready else "not_ready")]
    lines.append(pairs(supervisor=status.supervisor))
    lines += [pairs(reason=r.code, about=r.about, why=r.why, advice=r.advice) for r in verdict.reasons]
    lines += [pairs(warning=w.code, about=w.about, why=w.why, advice=w.advice) for w in verdict.warnings]
    return "\n".join(lines)


def _plain(value: object) -> object:
    return int(value) if isinstance(value, bool) else "-" if value is None else value


def as_json(status: BrokerStatus) -> dict[str, object]:
    """Return the status as a value for JSON."""
    verdict = status.verdict
    return {
        "as_of": status.as_of,
        "instance": status.instance,
        "version": kmq.__version__,
        "ready": verdict.ready,
        "reasons": [reason.fields() for reason in verdict.reasons],
        "warnings": [warning.fields() for warning in verdict.warnings],
        "findings": [finding.fields() for finding in verdict.findings],
        "certificates": [
            {"process": c.process, "file": c.path, "setting": c.setting, "not_after": utc(c.validity.not_after)}
            for c in verdict.certificates
        ],
        "stages": [stage.fields() for stage in status.processes],
        "backlog": status.backlog,
        "links": [link.fields() for link in status.links],
        "intakes": status.intakes,
        "kafka": status.kafka,
        "followers": status.followers,
        "copy": status.copy,
        "latency": status.latency,
        "clock": status.clock or "trusted",
        "supervisor": status.supervisor,
    }
