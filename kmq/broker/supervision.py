"""Who runs this broker, and from which directory: what `kmq up`, `down` and `status` look at before they act or speak.

Invariant   A stage that our supervisor did not start is never told to stop: what started it (a kubelet, systemd, a shell) would
            start it again, or miss it.
Mechanism   A stage that our supervisor has started says so in its row of the stats page, by the supervisor's pid. The supervisor
            is found by its lock, or by that pid where KMQ_PIPES is another directory than it was for `kmq up`.
"""

import os
import time
from typing import NamedTuple

from kmq.broker.readiness import is_process
from kmq.broker.stats import StatsPage, peek
from kmq.links.layout import field
from kmq.links.ownership import FileLock
from kmq.settings import STAGES, Settings

# Words of the command line of a supervisor: `up` in the foreground, and the module; older releases had it elsewhere.
_SUPERVISORS = {b"up", b"kmq.broker.supervisor", b"kmq.supervisor"}
_BEAT_S = 0.6  # a living stage writes a heartbeat more often than that
KILLED = (
    "no supervisor: it was killed; the stages go on, but nothing starts one again that ends."
    " When it suits: kmq down, then kmq up"
)


class Process(NamedTuple):
    """A stage that lives."""

    name: str
    pid: int
    supervisor: int  # pid of the supervisor that has started it; 0: something else has
    is_visible: bool  # else it is in another container, which the heartbeat tells

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class Supervision:
    """What lives of a broker at one moment, and who started it."""

    def __init__(self, settings: Settings) -> None:
        page = peek(settings.instance)
        self.stages = _living(page) if page and page.serves(settings.data) else []
        lock = FileLock(f"{settings.pipes}/supervisor.owner")
        self.holder = (lock.holder() or "starting") if lock.is_held() else ""  # what it says of itself
        self.supervisor = _pid(self.holder, self.stages)
        self.others = [stage for stage in self.stages if not stage.supervisor]
        is_supervised = self.holder or self.supervisor
        self.orphans = [stage for stage in self.stages if stage.supervisor and not is_supervised]

    @property
    def word(self) -> str:
        """For programs: up, killed, other (something else started the stages) or down."""
        if self.holder or self.supervisor:
            return "up"
        if self.orphans:
            return "killed"
        return "other" if self.others else "down"


def settled(settings: Settings) -> Supervision:
    """As it is now, where no stage is taken for alive that was killed a moment ago."""
    found = Supervision(settings)
    if not all(stage.is_visible for stage in found.stages):
        time.sleep(_BEAT_S)
        found = Supervision(settings)
    return found


def _living(page: StatsPage) -> list[Process]:
    found = []
    for name in STAGES:
        row = page.rows[name]
        is_visible = is_process(row.pid, name)
        beats = row.pid and row.state_name != "stopped" and row.age_s <= _BEAT_S
        if is_visible or beats:
            found.append(Process(name, row.pid, row.supervisor, is_visible))
    return found


def _pid(holder: str, stages: list[Process]) -> int:
    """The pid of the supervisor; 0 where there is none, or none that can be seen from here."""
    pids = [int(field(holder, "pid") or 0)] if holder else [stage.supervisor for stage in stages]
    return next(filter(_is_supervisor, pids), 0)


def _is_supervisor(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read().split(b"\0")
    except OSError:
        return False
    return not _SUPERVISORS.isdisjoint(arguments)


def elsewhere(settings: Settings) -> str:
    """The data directory that this instance serves now, where it is another one than that of `settings`; else ""."""
    page = peek(settings.instance)
    if page is None or page.serves(settings.data) or not _living(page):
        return ""
    return page.identity().partition(" data=")[2]


def is_data(path: str) -> bool:
    """Return True if a broker has ever been started, or a topic declared, in this data directory."""
    return os.path.isdir(f"{path}/append")


def why_not_here(settings: Settings) -> str:
    """What speaks against `settings` looking at the right directory; "" for nothing."""
    there = elsewhere(settings)
    if there:
        return (
            f"instance {settings.instance} is up with its data in {there}; cd to where it was started, or set KMQ_DATA"
        )
    if not is_data(settings.data):
        here = os.path.abspath(settings.data)
        return f"{here} is no data directory; cd to where the broker was started, or set KMQ_DATA"
    return ""
