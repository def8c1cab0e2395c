"""A broker that `kmq up` has started in the background and that is not ready yet.

Not covered What the supervisor does when a process ends: kmq/broker/supervisor.py.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import typer

from kmq.broker import status as statuses
from kmq.broker.health import LASTING, is_process
from kmq.broker.status import StageStatus, Status
from kmq.config.settings import STAGES, Settings
from kmq.errors import EXIT_FAILED, EXIT_OK, NO_RESTART, KmqError, RetryError

_READY_S = 60.0  # longest wait for a broker to be ready, including recovery of a long WAL
_FULL_S = 1.0  # how long space must be lacking until a start is given up: a small volume may regain it in a moment
_POLL_S = 0.02
_LOG_MODE = 0o640  # the user and the group of the broker, as for its FIFOs


class Startup:
    """The supervisor's process, the number of processes it must bring up, and the log since its start."""

    def __init__(self, settings: Settings, with_gateway: bool) -> None:
        """Start the supervisor."""
        self.log_path = Path(settings.pipes) / "kmq.log"
        self._settings = settings
        self._log_begin = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._expected = len(STAGES) + with_gateway + settings.in_cluster
        self._full_since = 0.0
        self._launched = time.monotonic_ns()
        with _open_log(self.log_path) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kmq.broker.supervisor", *([] if with_gateway else ["--no-gateway"])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> Status:
        """Return the status once all processes are ready. Raises KmqError or typer.Exit if they will not be."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            status = statuses.collect(self._settings)
            ended = self.ended(status)
            if self._started(status.processes) == self._expected and _is_ready_but_for(status, ended):
                return status
            self._check_lasting(status)
            self._check_supervisor()
            time.sleep(_POLL_S)
        missing = f"{self._started(status.processes)} of {self._expected} processes have begun"
        raise KmqError(
            f"not ready after {_READY_S:.0f} s: {status.verdict.first or missing}; the start continues in the background."
            f" See: kmq status, {self.log_path}"
        )

    def _started(self, processes: list[StageStatus]) -> int:
        """Return how many of them this start has brought up, or found running: a gateway may have been started by hand."""
        return sum(each.begun > self._launched or is_process(each.pid, each.name) for each in processes)

    def ended(self, status: Status) -> list[StageStatus]:
        """Return the processes of this start that have ended for good, while the stages run: with a stage the broker ends."""
        others = [each for each in status.processes if each.name not in STAGES]
        return [each for each in others if each.begun > self._launched and each.exit_code in NO_RESTART]

    def _check_lasting(self, status: Status) -> None:
        """Raise KmqError if all stages run, but are not ready for a reason that waiting does not end.

        The gateway may be missing: without space it cannot write where it listens, and ends again and again.
        """
        lasting = next((reason for reason in status.verdict.reasons if reason.code in LASTING), None)
        if not (lasting and self._started(status.stages) == len(STAGES)):
            self._full_since = 0.0
            return
        self._full_since = self._full_since or time.monotonic()
        if time.monotonic() - self._full_since > _FULL_S:
            raise KmqError(f"up, but not ready: {lasting}; {lasting.advice}")

    def _check_supervisor(self) -> None:
        """Raise RetryError or typer.Exit if the supervisor has ended."""
        code = self._process.poll()
        if code is None:
            return
        if code in (EXIT_OK, -signal.SIGTERM):
            raise RetryError("was told to stop (kmq down) before it was ready; nothing runs; start it with: kmq up")
        self.print_errors("kmq: could not start")
        raise typer.Exit(code if code > 0 else EXIT_FAILED)

    def print_errors(self, summary: str) -> None:
        """Print the errors that the log holds since the start, or its last lines, then `summary`."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_begin)
            lines = [line.rstrip() for line in log.read().decode(errors="replace").splitlines()]
        for line in [line for line in lines if "level=error" in line or line.startswith("kmq: ")] or lines[-5:]:
            print(line, file=sys.stderr)
        print(f"{summary}; the whole log is in {self.log_path}", file=sys.stderr)


def _is_ready_but_for(status: Status, ended: list[StageStatus]) -> bool:
    """Return True if nothing but the end of these processes keeps the broker from being ready."""
    names = {each.name for each in ended}
    return all(names.issuperset(reason.processes) for reason in status.verdict.reasons)


def _open_log(path: Path) -> BinaryIO:
    """Open the log for appending, with _LOG_MODE also if an older release made it with another mode."""
    log = open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _LOG_MODE), "ab")
    os.fchmod(log.fileno(), _LOG_MODE)
    return log
