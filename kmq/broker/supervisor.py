"""Starts the stages, the gateway and the agent of a broker on one machine, and restarts those that die.

In a pod the kubelet does that. There is an agent only in a cluster (KMQ_CLUSTER, KMQ_CONSUL).

Owner       pipes/supervisor.owner: one supervisor per broker.
Invariant   A stage that ends is always restarted while the others run: at once the first time, then after a growing
            pause if it keeps dying young. An exit code that says that a restart cannot help (errors.py) stops the
            broker with that code. A gateway or agent with such a code stays down alone: messages are accepted without.
            A process that cannot be started (no memory, no free pid) is tried again after the same pauses. The
            supervisor never ends before its processes, whatever fails in it.
Stop        SIGTERM, Ctrl-C and a closed terminal mean the same: every process gets one SIGTERM, and the stages drain
            from the front by themselves. Each process has its own session, so that the signals of a terminal reach only
            the supervisor: a second signal would end a stage at once. A second Ctrl-C while they drain ends all
            processes by SIGKILL. Where a process had to be killed, the exit code is not 0.
Crash       A supervisor that is killed leaves its stages running; `kmq down` finds them by the stats page. The gateway
            and the agent end.
"""

import contextlib
import os
import signal
import sys
import time

from kmq.broker.data_directory import known_id
from kmq.broker.readiness import is_process
from kmq.broker.stats import AGENT, StatsPage
from kmq.config.settings import GRACE_S, STAGES, Settings, load
from kmq.errors import EXIT_FAILED, EXIT_NAMES, EXIT_OK, NO_RESTART, BusyError, KmqError, RetryError, of_os_error
from kmq.files import keep_others_out
from kmq.links import layout, received
from kmq.links.ownership import FileLock, describe
from kmq.log.identity import open_data
from kmq.logfmt import Logger

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
        self.due = 0.0  # when to start it, while pid is 0
        self.is_killed = False

    @property
    def is_given_up(self) -> bool:
        """Return True if it has ended with a code that no restart can help."""
        return self.due == _NEVER

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
        modules = {name: f"stages.{name}" for name in STAGES}
        if with_gateway:
            modules["gateway"] = "kmq.gateway"
        if settings.in_cluster:
            modules[AGENT] = "kmq.cluster.agent"
        self.children = [_Child(name, module, "--with", str(os.getpid())) for name, module in modules.items()]
        self.stopping_since = 0.0
        self.exit_code = EXIT_OK
        self.is_misplaced = False  # whether the lock file, or the stats page, is missing and could not be made again
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KMQ_", "RB_"))}
        self.environment = kept | settings.environment()

    def run(self) -> int:
        """Supervise until the end; returns the exit code."""
        settings = self.settings
        os.makedirs(settings.pipes, exist_ok=True)
        data_id = open_data(settings.data, known_id(settings))
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
        for name in {"gateway", AGENT} - {child.name for child in self.children}:
            if not is_process(page.rows[name].pid, name):
                page.rows[name].wipe()  # of one that was killed: nothing comes that would take over its row
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
        """Stop the broker in order after an error of the supervisor itself: nothing may run on without it."""
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
        now = time.monotonic()
        for child in self.children:
            if not child.pid and not self.stopping_since and child.due <= now:
                self._start(child, now)

    def _start(self, child: _Child, now: float) -> None:
        """Start the child. If the system lacks what a process needs, try again after a pause."""
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
                if child.is_given_up and not is_process(row.pid, child.name):  # else one runs that others have started
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
                else:
                    effect = "what the fleet says is not done here until the next start"
                    self.log.error("agent_not_restarted", code=code, how=how, effect=effect)
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
        """Remove rings that hold no messages: the stages make them again from the WAL.

        At the end, so that a clean stop leaves nothing in /dev/shm. At the start, because a ring that a crash left may
        be behind the WAL by now, if the directory was used under another instance name meanwhile, and would be refused.
        """
        names = layout.RINGS  # what lies in `received` is spoken of there, or in a FIFO that has no stage now
        if layout.is_drained(self.settings.instance, *names):
            # BusyError: a stage outlived its supervisor. The new stage will name it in an error and end.
            with contextlib.suppress(BusyError):
                for name in (*names, received.NAME):
                    layout.remove(self.settings.instance, name)


def main() -> int:
    """Run `python -m kmq.broker.supervisor [--no-gateway]`, which `kmq up` starts in the background."""
    keep_others_out()
    try:
        return Supervisor(load(), with_gateway="--no-gateway" not in sys.argv).run()
    except (KmqError, OSError) as err:
        error = of_os_error(err) if isinstance(err, OSError) else err
        Logger("supervisor").error("failed", exit_code=error.exit_code, reason=error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
