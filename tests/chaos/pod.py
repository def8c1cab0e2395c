"""A pod for tests: the four stages as real processes, started and ended one by one, with no supervisor between.

Everything is private: instance, data, pipes, ports. `close` kills what lives and removes what is left in /dev/shm.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from fcntl import ioctl
from functools import partial
from pathlib import Path
from termios import FIONREAD

import sysv_ipc
from brokers import FREE_PORTS, environment
from waiting import PATIENCE_S, until

from chaos.checker import Report, Stream, check
from kmq.broker import stats
from kmq.errors import BusyError
from kmq.links import doorbell, layout

STAGES = ("ingress", "framer", "durability", "router")
RINGS = ("received", "framed", "durable")
_number = itertools.count()


class Pod:
    def __init__(self, root: Path, **settings: object) -> None:
        self.root, self.data, self.pipes = root, root / "data", root / "pipes"
        self.instance = f"chaos-{os.getpid()}-{next(_number)}"
        self.log_path = root / "log"
        root.mkdir(parents=True, exist_ok=True)
        self.settings: dict[str, object] = {
            **FREE_PORTS,
            "KMQ_INSTANCE": self.instance,
            "KMQ_DATA": self.data,
            "KMQ_PIPES": self.pipes,
        } | settings
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.wrapped: set[str] = set()

    # --- processes -----------------------------------------------------------------------------------------------

    def start(self, *names: str, under: Sequence[str] = ()) -> None:
        """Start these stages, in this order, without waiting; `under` is a command that runs them (strace)."""
        env = environment(**self.settings)
        for name in names or STAGES:
            assert not self.is_alive(name), f"{name} runs already"
            with self.log_path.open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [*under, sys.executable, "-m", f"stages.{name}" if name in STAGES else f"kmq.{name}"],
                    env=env,
                    cwd=self.root,
                    stdin=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,
                )
            (self.wrapped.add if under else self.wrapped.discard)(name)

    def is_alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is None

    def signal(self, number: int, *names: str) -> None:
        for name in names or STAGES:
            assert self.is_alive(name), f"{name} has ended by itself: {self.processes[name].returncode}\n{self.tail()}"
            self.processes[name].send_signal(number)

    def kill(self, *names: str) -> None:
        """SIGKILL them all, then wait until they are gone; they must have been alive."""
        self.signal(signal.SIGKILL, *names)
        for name in names or STAGES:
            self.processes[name].wait(PATIENCE_S)

    def pause(self, *names: str) -> None:
        self.signal(signal.SIGSTOP, *names)

    def resume(self, *names: str) -> None:
        self.signal(signal.SIGCONT, *names)

    def stop(self, *names: str) -> None:
        """SIGTERM; they must drain and exit 0."""
        names = names or STAGES
        self.signal(signal.SIGTERM, *names)
        codes = {name: self.processes[name].wait(PATIENCE_S) for name in names}
        assert not any(codes.values()), f"{codes}\n{self.tail()}"

    def wait_exit(self, name: str) -> int:
        return self.processes[name].wait(PATIENCE_S)

    def close(self) -> None:
        """Nothing of this pod is left, whatever happened."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a group: what runs under strace would outlive it
        for process in self.processes.values():
            process.wait(PATIENCE_S)
        self.wait(self._removes_rings, "the end of those that hold the rings")  # what ran under strace ends after it
        Path(f"/dev/shm/{self.instance}.stats").unlink(missing_ok=True)
        print(self.tail())  # pytest shows it where the test failed

    def _removes_rings(self) -> bool:
        try:
            for name in RINGS:
                layout.remove(self.instance, name)
        except BusyError:
            return False
        return True

    # --- looking -------------------------------------------------------------------------------------------------

    def row(self, name: str) -> stats.Row | None:
        """The stage's row in the stats page, None while the process that runs has not written it."""
        page = stats.peek(self.instance)
        if page is None or not self.is_alive(name):
            return None
        row = page.rows[name]
        return row if name in self.wrapped or row.pid == self.processes[name].pid else None

    def state(self, name: str) -> str:
        row = self.row(name)
        return row.state_name if row else ""

    def seq(self, name: str) -> int:
        row = self.row(name)
        return row.seq if row else -1

    def seq_left(self, name: str) -> int:
        """What the stats page says of a stage that has ended."""
        page = stats.peek(self.instance)
        assert page is not None
        return page.rows[name].seq

    def wait(self, condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        """Look often, because what comes next is often a kill at this moment."""
        until(condition, what, self.tail, seconds=patience_s, every_s=0.005)

    def wait_ready(self, *names: str) -> None:
        def ready(name: str) -> bool:
            code = self.processes[name].poll()
            assert code is None, f"{name} ended with {code}\n{self.tail()}"
            return self.state(name) == "ready"

        for name in names or STAGES:
            self.wait(partial(ready, name), f"{name} is ready")

    def settle(self) -> None:
        """All four are ready, and what is in the links has reached the queues."""
        self.wait_ready()
        self.wait(self._is_settled, "the links are empty")

    def _is_settled(self) -> bool:
        """In the order in which a line passes them, so that none is overlooked: FIFO, staging and rings, and who has it then."""
        if self.fifo_bytes() or not layout.is_drained(self.instance, *RINGS):
            return False
        return len({self.seq(name) for name in STAGES[1:]}) == 1

    def fifo_bytes(self) -> int:
        fd = os.open(self.pipes / "raw", os.O_RDONLY | os.O_NONBLOCK)
        try:
            waiting = array("i", [0])
            ioctl(fd, FIONREAD, waiting)
            return waiting[0]
        finally:
            os.close(fd)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def events(self, event: str) -> list[str]:
        return [line for line in self.log().splitlines() if f" event={event} " in f"{line} "]

    # --- the end -------------------------------------------------------------------------------------------------

    def judge(self, sent: Iterable[Stream] = ()) -> Report:
        """Let everything arrive, stop in order, and have the checker look at what is on disk."""
        self.settle()
        self.stop()
        report = check(self.data, sent)
        assert not report.counts, f"{report}\n{self.tail()}"
        return report


SHM = Path("/dev/shm")


def remove_shared_memory(instance: str, but: str = "") -> None:
    """Remove all that lies there under the names of this instance, but one ring if it is named."""
    for path in SHM.glob(f"{instance}.*"):
        if path.name != f"{instance}.{but}":
            path.unlink()


def remove_bells(instance: str, *names: str) -> None:
    """Remove doorbells of this instance, as `ipcrm -s` does: all, or "<ring> <end>"."""
    semaphores = doorbell.sets_of(instance)
    for ring, end in map(str.split, names):
        with open(SHM / f"{instance}.{ring}", "rb") as file:
            bells = doorbell.find(layout.read_text(file.fileno(), layout.BELLS))
        semaphores = [getattr(bells, end).semaphore]
    for semaphore in semaphores:
        with contextlib.suppress(sysv_ipc.ExistentialError):
            semaphore.remove()
