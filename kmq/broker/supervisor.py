"""Starts the stages, the gateway and the agent of a broker on one machine, and restarts those that die.

In a pod the kubelet does that. There is an agent only in a cluster (KMQ_CLUSTER, KMQ_CONSUL), and a replica
only in a shard (KMQ_SHARD). The process `tier` copies the WAL to KMQ_TIER.

Owner       pipes/supervisor.owner: one supervisor per broker.
Invariant   A stage that ends is always restarted while the others run: at once the first time, then after a growing
            pause if it keeps dying young. An exit code for which a restart cannot help (errors.py) stops the broker
            with that code. A gateway, agent, replica or tier with such a code stays down alone, because messages are accepted
            without it. A process that cannot be started (no memory, no free pid) is retried after the same pauses. The
            supervisor never ends before its processes, whatever fails in it.
Stop        SIGTERM, Ctrl-C and a closed terminal mean the same: every process gets one SIGTERM, and the stages drain
            from the front by themselves. Each process has its own session, so that the signals of a terminal reach only
            the supervisor: a second signal would end a stage at once. A second Ctrl-C while they drain kills all
            processes by SIGKILL. If a process had to be killed, the exit code is not 0.
            A stage that our supervisor did not start is never told to stop: its starter (a kubelet, systemd, a shell)
            would start it again, or still need it.
Found       by its lock. A stage that our supervisor has started also holds the supervisor's pid in its row of the stats
            page, so the supervisor is found even if KMQ_PIPES differs from the directory that `kmq up` used.
Crash       A supervisor that is killed leaves its stages running; `kmq down` finds them by the stats page. The gateway
            and the agent end.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from kmq.broker.concerns import is_in_pod
from kmq.broker.data_directory import AGAIN, known_id
from kmq.broker.health import is_process, is_supervisor
from kmq.broker.stats import AGENT, REPLICA, TIER, StatsPage, peek
from kmq.config.settings import GRACE_S, STAGES, Settings, load
from kmq.errors import (
    EXIT_FAILED,
    EXIT_NAMES,
    EXIT_OK,
    NO_RESTART,
    BusyError,
    KmqError,
    RetryError,
    Stopped,
    exit_code_of,
    of_os_error,
)
from kmq.files import keep_others_out
from kmq.links import layout, received
from kmq.links.ownership import FileLock, describe, field, is_of_another_pod
from kmq.log.identity import open_data
from kmq.logfmt import Logger, obey

_YOUNG_S = 1.0  # a stage that dies before this age waits before its next start
_PAUSE_S = (0.1, 5.0)  # first and longest wait
_NEVER = float("inf")
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Child:
    """One process under supervision. `command`: what follows `python -m`."""

    def __init__(self, name: str, *command: str) -> None:
        self.name, self.command = name, command
        self.pid = 0
        self.started = 0.0
        self.pause = 0.0
        self.due = 0.0  # when to start it, while pid is 0; _NEVER: no restart can help
        self.is_killed = False

    def back_off(self) -> None:
        """Wait longer than the last time before the next start."""
        self.pause = min(max(self.pause * 2, _PAUSE_S[0]), _PAUSE_S[1])
        self.due = time.monotonic() + self.pause


class Supervisor:
    """Runs the stages until it is told to stop, or until a stage ends with a code that no restart can help."""

    def __init__(self, settings: Settings, with_gateway: bool) -> None:
        """`with_gateway`: its extra must be installed."""
        self.settings = settings
        self.log = Logger("supervisor")
        obey(settings.log_format, settings.log_level, settings.log_bytes, settings.log_files)
        modules = {name: f"stages.{name}" for name in STAGES}
        if with_gateway:
            modules["gateway"] = "kmq.gateway"
        if settings.in_cluster:
            modules[AGENT] = "kmq.cluster.agent"
        if settings.shard:
            modules[REPLICA] = "kmq.replica"
        if settings.tier:
            modules[TIER] = "kmq.tier"
        self.children = [_Child(name, module, "--with", str(os.getpid())) for name, module in modules.items()]
        self.stopping_since = 0.0
        self.exit_code = EXIT_OK
        self.is_misplaced = False  # True if the lock file or the stats page was removed and could not be made again
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KMQ_", "RB_"))}
        self.environment = inherited | settings.environment()

    def run(self) -> int:
        """Supervise until the end; returns the exit code."""
        settings = self.settings
        os.makedirs(settings.pipes, exist_ok=True)
        data_id = open_data(settings.data, known_id(settings), settings.shard)
        owner = FileLock(f"{settings.pipes}/supervisor.owner")
        # Signals are blocked here and received by sigtimedwait, so that no signal is lost between a check and a wait.
        # Children get an empty mask. This comes before the lock: a process that finds the lock may signal at once.
        # A signal that was ignored when we were started (nohup) stays ignored.
        stops = {number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN}
        awaited = {signal.SIGCHLD, *stops}
        signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        owner.acquire("this broker", describe("supervisor", settings.data))
        page = StatsPage(settings.instance, data_id, settings.data)
        for row in page.rows.values():
            row.starts = row.exit_code = 0  # and with the starts the streak of restarts
        for name in {"gateway", AGENT, REPLICA, TIER} - {child.name for child in self.children}:
            if not is_process(page.rows[name].pid, name):
                page.rows[name].wipe()  # of a killed process: no successor takes over its row
        self._remove_drained_rings()
        while not self._all_gone():
            try:
                self._start_due()
                info = signal.sigtimedwait(awaited, self._next_wait())
                if info is not None and info.si_signo in stops:
                    self._on_stop(info.si_signo)
                self._reap(page)
                self._kill_overdue()
                self._keep_in_place(owner, page)
            except (KmqError, OSError, MemoryError) as err:
                self._give_up(err)
        if self.exit_code == EXIT_OK:
            self._remove_drained_rings()
        owner.release()
        self.log.info("stopped", exit_code=self.exit_code)
        return self.exit_code

    def _give_up(self, err: KmqError | OSError | MemoryError) -> None:
        """Stop the broker in order after an error of the supervisor itself: no process may run without it."""
        error = err if isinstance(err, KmqError) else of_os_error(err) if isinstance(err, OSError) else RetryError(err)
        if not self.stopping_since:
            self.log.error("failed", exit_code=error.exit_code, reason=error, effect="the broker stops")
            self._stop(error.exit_code)

    def _keep_in_place(self, owner: FileLock, page: StatsPage) -> None:
        """Make the lock file, by which `kmq down` finds the supervisor, and the stats page again if removed."""
        try:
            if not owner.is_in_place():
                again = FileLock(owner.path)
                again.acquire("this broker", describe("supervisor", self.settings.data))
                owner.replace(again)
            page.keep_in_place("gateway")  # the supervisor has no row; a running gateway writes its own row again
        except OSError as err:  # a full disk, say: the next turn tries again
            if not self.is_misplaced:
                self.log.warn(
                    "lock_file_missing", file=owner.path, reason=err, effect="it is made as soon as it can be"
                )
            self.is_misplaced = True
        else:
            self.is_misplaced = False

    def _all_gone(self) -> bool:
        return bool(self.stopping_since) and not any(child.pid for child in self.children)

    def _start_due(self) -> None:
        """Start the children that are due. If the system lacks what a process needs, try again after a pause."""
        now = time.monotonic()
        for child in self.children:
            if child.pid or self.stopping_since or child.due > now:
                continue
            argv = [sys.executable, "-m", *child.command]
            try:
                child.pid = os.posix_spawn(sys.executable, argv, self.environment, setsigmask=[], setsid=True)
                child.started = now
            except OSError as err:
                child.back_off()
                self.log.warn("start_failed", name=child.name, reason=err, restart_in_s=child.pause)

    def _next_wait(self) -> float:
        """Return how long to wait for a signal. While stopping nothing is due: the end of a child is a signal."""
        now = time.monotonic()
        due = [child.due - now for child in self.children if not child.pid and not self.stopping_since]
        return max(0.0, min([1.0, *due]))

    def _reap(self, page: StatsPage) -> None:
        for child in self.children:
            if not child.pid:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.pid = 0
                self._ended(child, os.waitstatus_to_exitcode(status))
                row = page.rows[child.name]
                # If a process of this name lives, something else has started it.
                if child.due == _NEVER and not is_process(row.pid, child.name):
                    row.end_of(pid, os.getpid(), os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        """Restart the child or stop the broker. `code`: the exit code, or minus the signal that ended the process."""
        how = EXIT_NAMES.get(code, "killed" if code < 0 else "crashed")
        if self.stopping_since:
            if code != EXIT_OK:
                self.log.warn("stage_ended", name=child.name, code=code, how=how)
            return
        if code in NO_RESTART:
            if child.name not in STAGES:
                if child.name == "gateway":
                    effect = "no gRPC, no HTTP until the next start"
                    self.log.error("gateway_not_restarted", code=code, how=how, effect=effect)
                elif child.name == AGENT:
                    effect = "what the fleet says is not done here until the next start"
                    self.log.error("agent_not_restarted", code=code, how=how, effect=effect)
                elif child.name == TIER:
                    effect = "nothing is copied to KMQ_TIER until the next start"
                    self.log.error("tier_not_restarted", code=code, how=how, effect=effect)
                else:
                    effect = "this broker is no member of its shard until the next start"
                    self.log.error("replica_not_restarted", code=code, how=how, effect=effect)
                child.due = _NEVER
                return
            self.log.error("stage_not_restarted", name=child.name, code=code, how=how, effect="the broker stops")
            self._stop(code)
            return
        if time.monotonic() - child.started < _YOUNG_S:
            child.back_off()
        else:
            child.pause = child.due = 0.0
        self.log.warn("stage_ended", name=child.name, code=code, how=how, restart_in_s=child.pause)

    def _on_stop(self, number: int) -> None:
        if not self.stopping_since:
            effect = "the stages drain; Ctrl-C again ends them at once, and plain lines on their way may be lost"
            self.log.info("stopping", signal=signal.Signals(number).name, effect=effect)
            self._stop(EXIT_OK)
        elif number == signal.SIGINT:
            self._kill("Ctrl-C a second time")

    def _stop(self, code: int) -> None:
        """Tell every process to stop, once: a second signal would end a stage at once."""
        if self.stopping_since:
            return
        self.stopping_since = time.monotonic()
        self.exit_code = code
        for child in self.children:
            if child.pid:
                os.kill(child.pid, signal.SIGTERM)

    def _kill_overdue(self) -> None:
        if self.stopping_since and time.monotonic() - self.stopping_since > GRACE_S:  # e.g. a stage under SIGSTOP
            self._kill("did not drain in time")

    def _kill(self, reason: str) -> None:
        """Kill what still runs, each process once: one that hangs in the kernel dies when it comes out of it."""
        for child in self.children:
            if child.pid and not child.is_killed:
                child.is_killed = True
                self.exit_code = self.exit_code or EXIT_FAILED
                self.log.warn("stage_killed", name=child.name, reason=reason)
                os.kill(child.pid, signal.SIGKILL)

    def _remove_drained_rings(self) -> None:
        """Remove rings that hold no messages: the stages make them again from the WAL; and in a shard the role page.

        At the end, so that a clean stop leaves nothing in /dev/shm. At the start, because a ring that a crash left may
        be behind the WAL by now, if the directory was used under another instance name meanwhile, and would be refused.
        """
        if self.settings.shard:
            from kmq.links import role

            role.remove(self.settings.instance)
        names = layout.RINGS  # bytes in `received` count there, or are named in a FIFO that has no stage now
        if layout.is_drained(self.settings.instance, *names):
            # BusyError: a stage outlived its supervisor. The new stage will name it in an error and end.
            with contextlib.suppress(BusyError):
                for name in (*names, received.NAME):
                    layout.remove(self.settings.instance, name)


# --- supervision -----------------------------------------------------------------------------------------------------
# Which supervisor started this broker, and in which directory: `kmq up`, `down` and `status` ask this before they act.

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
    """The running stages of a broker at one moment, and what started them."""

    def __init__(self, settings: Settings) -> None:
        page = peek(settings.instance)
        self.stages = _living(page) if page and page.serves(settings.data) else []
        lock = FileLock(f"{settings.pipes}/supervisor.owner")
        # How the supervisor describes itself in the lock file.
        self.holder = (lock.holder() or "starting") if lock.is_held() else ""
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
    """Return the present supervision. A stage killed a moment ago never counts as running."""
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
    """Return the pid of the supervisor; 0 if it does not run, or is not visible from here."""
    pids = [int(field(holder, "pid") or 0)] if holder else [stage.supervisor for stage in stages]
    return next(filter(is_supervisor, pids), 0)


def end_with(pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel end this process with the signal `by` when its parent `pid` ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != pid:  # the starter is gone already
        raise SystemExit(EXIT_OK)


def run_beside(name: str, module: str, work: Callable[[Logger, int], None], description: str, example: str) -> int:
    """Run a process beside the stages to its end and return its exit code. A log line always says why it has ended.

    `work` gets its logger, and the supervisor's pid or 0.
    """
    import argparse

    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description, epilog=f"example: {example}")
    parser.add_argument(
        "--with",
        dest="supervisor",
        type=int,
        default=0,
        metavar="PID",
        # It holds nothing that must outlive the supervisor, and its successor under the next supervisor needs its
        # ports.
        help=f"the process that started the {name}: when that process ends, the {name} ends too",
    )
    parser.add_argument(AGAIN, action="store_true", help=argparse.SUPPRESS)
    supervisor = parser.parse_args().supervisor
    keep_others_out()
    log = Logger(name)
    try:
        if supervisor:
            end_with(supervisor)
        work(log, supervisor)
        code, reason = EXIT_OK, "drained"
    except Stopped as err:
        code, reason = err.exit_code, str(err)
    except (KmqError, OSError) as err:
        code, reason = exit_code_of(err), str(of_os_error(err) if isinstance(err, OSError) else err)
        log.error("failed", exit_code=code, reason=reason)
    log.info("stopped", exit_code=code, reason=reason)
    return code


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
    """Return which of these settings' resources another broker uses, and what to do; None if all are free."""
    other = elsewhere(settings)
    if other:
        advice = "cd to where it was started, or set KMQ_DATA; a second broker needs a KMQ_INSTANCE of its own"
        return f"instance {settings.instance} is up with its data in {other}", advice
    wal = FileLock(f"{settings.data}/append/.owner")
    with contextlib.suppress(OSError):  # another user's: not known
        holder = wal.holder() if wal.is_held() else ""
        if is_of_another_pod(holder, describe("", settings.data)):
            end = f"kubectl delete pod {field(holder, 'host')}" if is_in_pod() else "kmq down there"
            advice = f"wait until it has ended, or end it ({end}): one broker per directory"
            return f"KMQ_DATA={settings.data} is held by another pod or machine ({holder})", advice
        if field(holder, "instance") not in ("", None, settings.instance):
            advice = (
                f"set KMQ_INSTANCE={field(holder, 'instance')} to see it; a second broker needs a KMQ_DATA of its own"
            )
            return f"KMQ_DATA={settings.data} is held by another broker ({holder})", advice
    return None


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


# --- running ---------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run `python -m kmq.broker.supervisor [--with PID] [--no-gateway]`, which `kmq up` starts in the background.

    --with: stop in order when the process PID ends, which has started this one.
    """
    keep_others_out()
    if "--with" in sys.argv:
        end_with(int(sys.argv[sys.argv.index("--with") + 1]), signal.SIGTERM)
    try:
        return Supervisor(load(), with_gateway="--no-gateway" not in sys.argv).run()
    except (KmqError, OSError) as err:
        error = of_os_error(err) if isinstance(err, OSError) else err
        Logger("supervisor").error("failed", exit_code=error.exit_code, reason=error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
