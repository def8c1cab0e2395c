"""Who started this broker, and in which directory: `kmq up`, `down` and `status` look here before they act.

Invariant   A stage that our supervisor did not start is never told to stop: its starter (a kubelet, systemd, a shell)
            would start it again, or still need it.
Mechanism   A stage that our supervisor has started holds the supervisor's pid in its row of the stats page. The
            supervisor is found by its lock, or by that pid if KMQ_PIPES is not the directory that `kmq up` used.
"""

import contextlib
import os
import signal
import time
from typing import NamedTuple

from kmq.broker.data_directory import known_id
from kmq.broker.findings import is_in_pod
from kmq.broker.readiness import is_process
from kmq.broker.stats import StatsPage, peek
from kmq.config.settings import STAGES, Settings
from kmq.errors import EXIT_OK
from kmq.links.ownership import FileLock, describe, field, is_of_another_pod

# A supervisor has one of these words on its command line: `up` in the foreground, otherwise its module, by either name.
_SUPERVISORS = {b"up", b"kmq.broker.supervisor", b"kmq.supervisor"}
_PR_SET_PDEATHSIG = 1
_BEAT_S = 0.6  # a living stage writes a heartbeat more often than that
KILLED = (
    "no supervisor: it was killed; the stages run, but a stage that ends is not started again."
    " When it suits: kmq down, then kmq up"
)


class Process(NamedTuple):
    """A running stage."""

    name: str
    pid: int
    supervisor: int  # pid of the supervisor that has started it; 0: something else has
    is_visible: bool  # False: it runs in another container, and only its heartbeat shows that it lives

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class Supervision:
    """The running stages of a broker at one moment, and who started them."""

    def __init__(self, settings: Settings) -> None:
        page = peek(settings.instance)
        self.stages = _living(page) if page and page.serves(settings.data) else []
        lock = FileLock(f"{settings.pipes}/supervisor.owner")
        self.holder = (
            (lock.holder() or "starting") if lock.is_held() else ""
        )  # how it describes itself in the lock file
        self.supervisor = _pid(self.holder, self.stages)
        self.others = [stage for stage in self.stages if not stage.supervisor]
        is_supervised = self.holder or self.supervisor
        self.orphans = [stage for stage in self.stages if stage.supervisor and not is_supervised]

    @property
    def word(self) -> str:
        """Return one word for programs: up, killed, other (something else started the stages) or down."""
        if self.holder or self.supervisor:
            return "up"
        if self.orphans:
            return "killed"
        return "other" if self.others else "down"


def settled(settings: Settings) -> Supervision:
    """Return the supervision now. A stage that was killed a moment ago never counts as running."""
    supervision = Supervision(settings)
    if not all(stage.is_visible for stage in supervision.stages):
        time.sleep(_BEAT_S)
        supervision = Supervision(settings)
    return supervision


def _living(page: StatsPage) -> list[Process]:
    living = []
    for name in STAGES:
        row = page.rows[name]
        is_visible = is_process(row.pid, name)
        beats = row.pid and row.state_name != "stopped" and row.age_s <= _BEAT_S
        if is_visible or beats:
            living.append(Process(name, row.pid, row.supervisor, is_visible))
    return living


def _pid(holder: str, stages: list[Process]) -> int:
    """Return the pid of the supervisor; 0 if there is none, or none that is visible from here."""
    pids = [int(field(holder, "pid") or 0)] if holder else [stage.supervisor for stage in stages]
    return next(filter(is_supervisor, pids), 0)


def is_supervisor(pid: int) -> bool:
    """Return True if a supervisor of KMQ runs under this pid and is visible from here."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read().split(b"\0")
    except OSError:
        return False
    return not _SUPERVISORS.isdisjoint(arguments)


def end_with(pid: int) -> None:
    """Let the kernel kill this process when the process `pid`, which has started it, ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:  # the starter is gone already
        raise SystemExit(EXIT_OK)


def elsewhere(settings: Settings) -> str:
    """Return the data directory that this instance serves now if it differs from that of `settings`; else ""."""
    page = peek(settings.instance)
    if page is None or page.serves(settings.data) or not _living(page):
        return ""
    return page.directory


def is_data(path: str) -> bool:
    """Return True if a broker has ever been started, or a topic declared, in this data directory."""
    return os.path.isdir(f"{path}/append")


def taken(settings: Settings) -> tuple[str, str] | None:
    """Return what of these settings another broker has, and what to do; None if nothing."""
    other = elsewhere(settings)
    if other:
        advice = "cd to where it was started, or set KMQ_DATA; a second broker needs a KMQ_INSTANCE of its own"
        return f"instance {settings.instance} is up with its data in {other}", advice
    wal = FileLock(f"{settings.data}/append/.owner")
    with contextlib.suppress(OSError):  # another user's: not known
        holder = wal.holder() if wal.is_held() else ""
        if is_of_another_pod(holder, describe("", settings.data)):
            advice = f"wait until it has ended, or end it ({_end_of(field(holder, 'host'))}): one broker per directory"
            return f"KMQ_DATA={settings.data} is held by another pod or machine ({holder})", advice
        if field(holder, "instance") not in ("", None, settings.instance):
            advice = (
                f"set KMQ_INSTANCE={field(holder, 'instance')} to see it; a second broker needs a KMQ_DATA of its own"
            )
            return f"KMQ_DATA={settings.data} is held by another broker ({holder})", advice
    return None


def _end_of(host: str) -> str:
    return f"kubectl delete pod {host}" if is_in_pod() else "kmq down there"


def why_not_here(settings: Settings) -> str:
    """Return why `settings` may name the wrong directory; "" if nothing suggests it."""
    if found := taken(settings):
        return "; ".join(found)
    if not is_data(settings.data):
        directory = os.path.abspath(settings.data)
        if known_id(settings):
            return f"{directory} is not there, although its broker runs; put it back (kmq status says more)"
        return f"{directory} is no data directory; cd to where the broker was started, or set KMQ_DATA"
    return ""
