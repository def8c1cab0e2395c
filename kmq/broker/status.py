"""What `kmq status` shows: the state of each process, what waits in each link, and how full it is. Only reads."""

import os
import time

import kmq
from kmq.access.certificate import utc
from kmq.broker import clock, stats
from kmq.broker.health import Finding, Verdict, judge, state_of
from kmq.broker.stats import AGENT, TIMED, Row, StatsPage, peek
from kmq.broker.supervisor import Supervision, taken
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
    """Return all links, in the order in which a message passes them; none if there is no FIFO."""
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


# --- status ----------------------------------------------------------------------------------------------------------

Latency = dict[str, float]  # p50, p99 in seconds; count
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
        """Return what JSON shows: when it was started in unix seconds, by the time of day of now."""
        age_s = (time.monotonic_ns() - self.begun) / 1e9
        shown = {name: value for name, value in vars(self).items() if name != "begun"}
        return shown | {"started": round(time.time() - age_s, 3) if self.begun else None}


def _latency(page: StatsPage) -> dict[str, Latency | None]:
    """Return p50 and p99 in seconds of what each histogram has measured since its process started."""
    found: dict[str, Latency | None] = {}
    for what in TIMED.values():
        snapshot = page.histogram(what).snapshot()
        p50, p99 = stats.quantile(snapshot, 0.5), stats.quantile(snapshot, 0.99)
        has_some = p50 is not None and p99 is not None
        found[what] = {"p50": p50 or 0.0, "p99": p99 or 0.0, "count": snapshot.count} if has_some else None
    return found


class BrokerStatus:
    """The whole broker at one moment."""

    def __init__(self, instance: str, verdict: Verdict, supervisor: str) -> None:
        """Of a broker that does not run; `collect` adds what a running broker has."""
        self.as_of, self.instance, self.verdict = time.time(), instance, verdict
        self.supervisor = supervisor  # up, killed, other or down
        self.stages: list[StageStatus] = []
        self.gateway: StageStatus | None = None
        self.agent: StageStatus | None = None
        self.backlog: dict[str, int] = {}
        self.links: list[LinkStatus] = []
        self.latency: dict[str, Latency | None] = dict.fromkeys(TIMED.values())
        self.clock = ""  # why the time of day is not trusted, and what to do; "": it is trusted

    @property
    def processes(self) -> list[StageStatus]:
        return [*self.stages, *filter(None, (self.gateway, self.agent))]

    @property
    def ready(self) -> bool:
        return self.verdict.ready


def collect(settings: Settings) -> BrokerStatus:
    """Return the status now, without rates."""
    page = peek(settings.instance)
    supervisor = Supervision(settings).word
    if page is None or not page.serves(settings.data):
        return BrokerStatus(settings.instance, _verdict(None, settings), supervisor)
    page = page.copy()  # a process that becomes ready meanwhile must not appear as ready here and as starting there
    status = BrokerStatus(settings.instance, _verdict(page, settings), supervisor)
    status.stages = [StageStatus(name, page.rows[name]) for name in STAGES]
    status.gateway, status.agent = (
        StageStatus(name, row) if (row := page.rows[name]).pid else None for name in ("gateway", AGENT)
    )
    status.links = look(settings)
    status.backlog = {"raw_bytes": sum(link.bytes for link in status.links if link.name in ("raw", received.NAME))}
    status.backlog |= {f"{name}_messages": layout.backlog(settings.instance, name) for name in layout.RINGS}
    status.latency, status.clock = _latency(page), _clock(page)
    return status


def _verdict(page: StatsPage | None, settings: Settings) -> Verdict:
    """Return the verdict. If the broker is down because another one has its name or its files, that is the reason."""
    verdict = judge(page, settings)
    is_down = verdict.against("durability")
    if is_down is None or is_down.code not in ("down", "stopped") or (found := taken(settings)) is None:
        return verdict
    processes = tuple(dict.fromkeys(name for reason in verdict.reasons for name in reason.processes))
    return Verdict([Finding("down", "broker", *found, processes)], [], [])


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
    before, at = collect(settings), time.monotonic()
    time.sleep(_SAMPLE_S)
    now, span = collect(settings), time.monotonic() - at
    for old, new in zip(before.stages, now.stages, strict=False):
        new.rate = max(0.0, (new.messages - old.messages) / span)
    return now


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
    lines += [pairs(links="backlog", **status.backlog), pairs(broker="ready" if verdict.ready else "not_ready")]
    lines.append(pairs(supervisor=status.supervisor))
    lines += [pairs(reason=r.code, about=r.about, why=r.why, advice=r.advice) for r in verdict.reasons]
    lines += [pairs(warning=w.code, about=w.about, why=w.why, advice=w.advice) for w in verdict.warnings]
    return "\n".join(lines)


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
        "latency": status.latency,
        "clock": status.clock or "trusted",
        "supervisor": status.supervisor,
    }
