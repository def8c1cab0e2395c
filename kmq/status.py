"""What `kmq status` shows: how each process is, and what waits in each link. Looks only; touches nothing."""

import os
import time

from kmq import clock
from kmq.links import fifo, layout
from kmq.logfmt import pairs
from kmq.settings import STAGES, Settings
from kmq.stats import Row, StatsPage, peek

_BEAT_S = 0.6  # a living stage writes a heartbeat more often than that
_STALE_S = 2.0  # without a heartbeat for this long a stage is stopped, hung or dead
_SAMPLE_S = 0.5  # rates are measured over this long


class StageStatus:
    """One line of the table."""

    def __init__(self, name: str, row: Row) -> None:
        self.name, self.pid = name, row.pid
        self.messages, self.bytes, self.seq = row.messages, row.bytes, row.seq
        self.restarts, self.refused, self.dropped, self.connections = (
            row.restarts,
            row.refused,
            row.dropped,
            row.connections,
        )
        self.started = row.started
        self.age_s = row.age_s
        self.state = self._state(row)
        self.rate = 0.0

    def _state(self, row: Row) -> str:
        if not row.pid:
            return "down"
        if row.state_name == "stopped":
            return "stopped"
        # Whether it is dead can only be told where its pid means something to us: not from another container.
        if row.age_s > _BEAT_S and not is_stage(row.pid, self.name):
            return "dead"
        return row.state_name if row.age_s <= _STALE_S else "silent"


class Status:
    """The whole broker at one moment."""

    def __init__(
        self, stages: list[StageStatus], backlog: dict[str, int], gateway: StageStatus | None = None, clock: str = ""
    ) -> None:
        self.stages, self.backlog = stages, backlog
        self.gateway = gateway  # None: this broker has none
        self.clock = clock  # why the time of day is not trusted, and what to do; "": it is

    @property
    def processes(self) -> list[StageStatus]:
        return [*self.stages, self.gateway] if self.gateway else self.stages

    @property
    def ready(self) -> bool:
        """Whether all stages are, and the gateway, unless it has ended in order: messages come and go without it."""
        stages = bool(self.stages) and all(stage.state == "ready" for stage in self.stages)
        return stages and (self.gateway is None or self.gateway.state in ("ready", "stopped"))


def is_stage(pid: int, name: str) -> bool:
    """Whether the process `pid` is that stage, or the gateway: a pid may have been given to somebody else since."""
    module = f"kmq.{name}" if name == "gateway" else f"stages.{name}"
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return module.encode() in file.read().split(b"\0")
    except OSError:
        return False


def collect(settings: Settings) -> Status:
    """How it is now, without rates."""
    page = peek(settings.instance)
    if page is None or not page.serves(settings.data):
        return Status([], {})
    stages = [StageStatus(name, page.rows[name]) for name in STAGES]
    row = page.rows["gateway"]
    gateway = StageStatus("gateway", row) if row.pid else None
    waiting = {"raw_bytes": 0}
    path = f"{settings.pipes}/raw"
    if os.path.exists(path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        waiting["raw_bytes"] = fifo.waiting_bytes(fd)
        os.close(fd)
    for name in ("framed", "durable"):
        waiting[f"{name}_messages"] = layout.backlog(settings.instance, name)
    return Status(stages, waiting, gateway, _clock(page))


def _clock(page: StatsPage) -> str:
    suspects = [page.rows[name] for name in STAGES if page.rows[name].clock_suspect]
    if not suspects:
        return ""
    row = max(suspects, key=clock.steady_in_s)
    off = clock.off_by_s(row)
    return (
        f"the time of day is {abs(off):,} s {'ahead' if off > 0 else 'behind'} of what it was: nothing is deleted or"
        f" forgotten by age until it has been steady for another {clock.steady_in_s(row)} s; {clock.ADVICE}"
    )


def trust_clock(settings: Settings) -> None:
    """Tell every stage that the time of day is right now."""
    page = peek(settings.instance)
    if page is not None and page.serves(settings.data):
        for name in STAGES:
            clock.trust(page.rows[name])


def collect_with_rates(settings: Settings) -> Status:
    """As collect, with messages per second measured over a moment."""
    before, at = collect(settings), time.monotonic()
    time.sleep(_SAMPLE_S)
    now, span = collect(settings), time.monotonic() - at
    for old, new in zip(before.stages, now.stages, strict=False):
        new.rate = max(0.0, (new.messages - old.messages) / span)
    return now


def logfmt(status: Status) -> str:
    """One line per process and one for the links: for scripts."""
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
    return "\n".join([*lines, pairs(links="backlog", **status.backlog)])
