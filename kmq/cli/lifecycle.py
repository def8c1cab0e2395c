"""`kmq up|down|gateway`: start the broker of this directory, and stop it.

Not covered What the supervisor does when a process ends: kmq/broker/supervisor.py.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kmq import cluster, gateway, logfmt
from kmq.broker import status as statuses
from kmq.broker import supervisor
from kmq.broker.concerns import Finding
from kmq.broker.data_directory import known_id
from kmq.broker.health import LASTING, OF_SHARD, is_process
from kmq.broker.ports import number_of
from kmq.broker.stats import AGENT, REPLICA, TIER
from kmq.broker.status import BrokerStatus, StageStatus
from kmq.cli.output import examples
from kmq.client.lines import read_port
from kmq.config.settings import GRACE_S, STAGES, Settings, load
from kmq.errors import EXIT_FAILED, EXIT_OK, NO_RESTART, BusyError, ConfigError, KmqError, RetryError, pip_install
from kmq.links import layout
from kmq.links.fifo import open_fifo
from kmq.links.ownership import FileLock
from kmq.log.identity import open_data

_READY_S = 60.0  # longest wait for a broker to be ready, including recovery of a long WAL
_FULL_S = 1.0  # how long space must be lacking until a start is given up: a small volume may regain it in a moment
_POLL_S = 0.02
_DOWN_S = GRACE_S + 5.0
_MISSING = {
    "gateway": "no gRPC, no HTTP, no consumers",
    AGENT: "nothing that the fleet says is done here",
    REPLICA: "this broker is no member of its shard",
    TIER: "nothing is copied to KMQ_TIER",
}


# --- up --------------------------------------------------------------------------------------------------------------


def up(
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground",
            "-f",
            help="Stay in the foreground, log to stderr. Ctrl-C drains; a second Ctrl-C ends at once.",
        ),
    ] = False,
    with_gateway: Annotated[
        bool,
        typer.Option("--gateway/--no-gateway", help="Serve gRPC and HTTP, if the extra kmq\\[gateway] is installed."),
    ] = True,
    listen_addr: Annotated[
        str | None,
        typer.Option(
            "--listen-addr",
            help="With --foreground: \\[host]:port for gRPC, over KMQ_GRPC_PORT. Host: none, that of KMQ_HOST, or 0.0.0.0.",
        ),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", help="With --foreground: directory of the messages, over KMQ_DATA.")
    ] = None,
) -> None:
    """Start the broker in the background: four stages and the gateway, under a supervisor. Wait until all are ready."""
    if listen_addr is not None or data_dir is not None:
        _override(foreground, listen_addr, data_dir)
    settings = load()
    with_gateway = with_gateway and gateway.is_installed()
    if settings.in_cluster:
        _check_cluster(settings)
    if settings.tier and not settings.shard and not os.path.exists(f"{settings.data}/id"):
        from kmq.cli.restore import restore_if_empty

        restore_if_empty(settings, settings.tier)
    # Open both directories here: otherwise an error in one of them would appear only in the log file.
    open_data(settings.data, known_id(settings), settings.shard)
    os.close(open_fifo(settings.pipes, "raw"))
    _refuse_second_start(settings, foreground)
    if foreground:
        from kmq.broker.supervisor import Supervisor

        raise typer.Exit(Supervisor(settings, with_gateway).run())
    _refuse_shared_data(settings)
    startup = Startup(settings, with_gateway)
    _print_started(settings, startup, startup.wait())


def _override(foreground: bool, listen_addr: str | None, data_dir: str | None) -> None:
    """Let the options of the command line override the environment. Raises ConfigError that names the option."""
    if not foreground:
        raise ConfigError(
            "--listen-addr and --data-dir are for --foreground, because later commands would look elsewhere;"
            " set KMQ_HOST, KMQ_GRPC_PORT and KMQ_DATA"
        )
    if listen_addr is not None:
        host, colon, port = listen_addr.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65_535:
            raise ConfigError(
                f"--listen-addr={listen_addr}: must be [host]:port with a port up to 65535, such as :8080"
            )
        os.environ["KMQ_GRPC_PORT"] = port
        if host:
            os.environ["KMQ_HOST"] = _probed_host(listen_addr, host.removeprefix("[").removesuffix("]"))
    if data_dir is not None:
        if not data_dir:
            raise ConfigError("--data-dir=: is empty; give a directory, such as /data, or leave the option out")
        os.environ["KMQ_DATA"] = data_dir


def _probed_host(listen_addr: str, host: str) -> str:
    """Return the host if the probes reach it. Raises ConfigError for any other host.

    Probes and commands in the container have its environment and not its arguments, so they look at KMQ_HOST.
    """
    looked_at = load().host
    if host == looked_at or (host == "0.0.0.0" and ":" not in looked_at):  # 0.0.0.0 has no IPv6
        return host
    raise ConfigError(
        f"--listen-addr={listen_addr}: the probes look at KMQ_HOST={looked_at}, and would never find this broker;"
        f" leave the host out, or set KMQ_HOST={host} in env"
    )


def _check_cluster(settings: Settings) -> None:
    """Raise ConfigError if the agent could not even start."""
    if not cluster.is_installed():
        raise ConfigError(f"KMQ_CLUSTER and KMQ_CONSUL are set, and that needs: {pip_install('cluster')}")
    from kmq.cluster.queue import Place

    Place.of(settings)


def _refuse_second_start(settings: Settings, foreground: bool) -> None:
    """Raise BusyError if this broker runs already."""
    holder = FileLock(f"{settings.pipes}/supervisor.owner")
    if not foreground and holder.is_held():  # in the foreground the supervisor waits for an earlier one that is ending
        raise BusyError(f"this broker is up already ({holder.holder()}); see: kmq status")
    found = supervisor.settled(settings)
    if found.others:
        raise BusyError(f"this broker is up already: {_started_elsewhere(found)}; see: kmq status")
    if found.orphans:
        pids = ", ".join(str(stage.pid) for stage in found.orphans)
        raise BusyError(f"stages are still running without their supervisor (pid {pids}); stop them with: kmq down")


def _refuse_shared_data(settings: Settings) -> None:
    """Raise BusyError if another broker writes this WAL: else a half-started broker would accept lines it cannot
    store.
    """
    wal = FileLock(f"{settings.data}/append/.owner")
    if wal.is_held():
        raise BusyError(f"KMQ_DATA={settings.data} is held by {wal.holder()}: one broker per directory")


def _started_elsewhere(found: supervisor.Supervision) -> str:
    return (
        f"not started by kmq up: {', '.join(map(str, found.others))}; end them where they were started"
        " (in Kubernetes: kubectl scale statefulset <name> --replicas=0)"
    )


def _print_started(settings: Settings, startup: "Startup", status: BrokerStatus) -> None:
    """Print what is up. If a process is not, raise typer.Exit, with the exit code of a process that has ended for
    good.
    """
    lines_in = ""  # in a shard only the leader takes lines
    if status.stages[0].state == "ready":
        lines_in = f"lines in on {settings.host}:{read_port(settings, 'ingress', settings.port)}, "
    print(f"kmq: up; {lines_in}data in {settings.data}, log in {startup.log_path}")
    if status.gateway and status.gateway.state == "ready":
        open_doors = [
            f"{shown}{settings.host}:{read_port(settings, name, number_of(settings, name))}"
            for name, shown in (("grpc", "gRPC on "), ("http", "HTTP on http://"), ("kafka", "Kafka on "))
            if name not in status.closed and (name != "kafka" or settings.has_kafka())
        ]
        print(f"kmq: {', '.join(open_doors) or 'the gateway runs'}")
    if status.replica and status.role:
        print(f"kmq: shard {settings.shard}: {status.role}")
    for finding in (*_of_shard(status), *status.verdict.warnings):
        print(f"kmq: {finding}; {finding.advice}", file=sys.stderr)
    if ended := startup.ended(status):
        without = ", ".join(f"the {each.name} could not start: {_MISSING[each.name]}" for each in ended)
        startup.print_errors(f"kmq: {without}; the stages run; correct that, then: kmq down && kmq up")
        raise typer.Exit(ended[0].exit_code)


class Startup:
    """The supervisor's process, the number of processes it must bring up, and the log since its start."""

    def __init__(self, settings: Settings, with_gateway: bool) -> None:
        """Start the supervisor."""
        self.log_path = Path(settings.pipes) / logfmt.FILE
        self._settings = settings
        self._log_begin = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._expected = len(STAGES) + with_gateway + settings.in_cluster + bool(settings.shard) + bool(settings.tier)
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

    def wait(self) -> BrokerStatus:
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
        """Return how many this start has started or found running: a gateway may have been started by hand."""
        return sum(each.begun > self._launched or is_process(each.pid, each.name) for each in processes)

    def ended(self, status: BrokerStatus) -> list[StageStatus]:
        """Return the processes of this start that have ended for good while the stages run. If a stage ends, the
        broker ends.
        """
        others = [each for each in status.processes if each.name not in STAGES]
        return [each for each in others if each.begun > self._launched and each.exit_code in NO_RESTART]

    def _check_lasting(self, status: BrokerStatus) -> None:
        """Raise KmqError if all stages run, but are not ready for a reason that waiting does not end.

        The gateway may be missing: without space it cannot write its ports to files, and ends again and again.
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
        """Print the errors in the log since the start, or its last lines, then `summary`."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_begin if self._log_begin <= os.fstat(log.fileno()).st_size else 0)  # a new file since
            lines = [line.rstrip() for line in log.read().decode(errors="replace").splitlines()]
        for line in [line for line in lines if _IS_ERROR.search(line) or line.startswith("kmq: ")] or lines[-5:]:
            print(line, file=sys.stderr)
        print(f"{summary}; the whole log is in {self.log_path}", file=sys.stderr)


_IS_ERROR = re.compile(r'level=error|"level": "error"')


def _is_ready_but_for(status: BrokerStatus, ended: list[StageStatus]) -> bool:
    """Return True if only the end of these processes, or other brokers of the shard, keep the broker from being
    ready.
    """
    names, elsewhere = {each.name for each in ended}, _of_shard(status)
    return all(names.issuperset(reason.processes) or reason in elsewhere for reason in status.verdict.reasons)


def _of_shard(status: BrokerStatus) -> list[Finding]:
    """Return the reasons that depend on other brokers of the shard, not on this start."""
    return [reason for reason in status.verdict.reasons if reason.code in OF_SHARD]


def _open_log(path: Path) -> BinaryIO:
    """Open the log for appending. Set its mode, because an older release may have created it with another mode."""
    log = open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, logfmt.FILE_MODE), "ab")
    os.fchmod(log.fileno(), logfmt.FILE_MODE)
    return log


# --- down ------------------------------------------------------------------------------------------------------------


def down() -> None:
    """Stop the broker: stages drain from the front, nothing is left in the links.

    Exit code 0 also if the broker is down already; 1 if a process did not end in order, but had to be killed; 69 if
    something other than `kmq up` started the stages, which then continue to run; 78 if KMQ_DATA is not a data
    directory, or this instance runs with another one.
    """
    settings = load()
    pids = _to_stop(settings)
    if not pids:
        layout.remove_left_bells(settings.instance)
        if reason := supervisor.why_not_here(settings):
            raise ConfigError(f"not up: {reason}")
        print(f"kmq: not up (data in {os.path.abspath(settings.data)})")
        return
    running = [each.name for each in statuses.collect(settings).processes if is_process(each.pid, each.name)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # a process stopped with Ctrl-Z cannot handle SIGTERM
    deadline = time.monotonic() + _DOWN_S
    while time.monotonic() < deadline:
        if not any(_is_alive(pid) for pid in pids):
            layout.remove_left_bells(settings.instance)
            _print_down(settings, running)
            return
        time.sleep(_POLL_S)
    raise KmqError(f"still running after {_DOWN_S:.0f} s: pid {', '.join(map(str, pids))}")


def _print_down(settings: Settings, were_running: list[str]) -> None:
    """Say that the broker is down. Raises KmqError that names the processes that did not end in order."""
    print("kmq: down")
    ended = {each.name for each in statuses.collect(settings).processes if each.state == "stopped"}
    killed = [name for name in were_running if name not in ended]
    if killed:
        raise KmqError(
            f"not in order: {', '.join(killed)} had to be killed, or crashed. What was acknowledged is on disk; plain lines"
            " on their way to ingress may be lost. Why: event=stage_killed or event=stage_ended in KMQ_PIPES/kmq.log"
        )


def _to_stop(settings: Settings) -> list[int]:
    """Return the supervisor's pid, else the pids of the stages it left behind. Raises BusyError if others run."""
    found = supervisor.settled(settings)
    if found.others:
        raise BusyError(f"nothing was stopped: {_started_elsewhere(found)}")
    if found.holder and not found.supervisor:
        raise BusyError(f"the supervisor ({found.holder}) is not visible from here; run kmq down where it was started")
    return [found.supervisor] if found.supervisor else [stage.pid for stage in found.orphans]


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- gateway ---------------------------------------------------------------------------------------------------------


def run_gateway() -> None:
    """Run the gateway alone, in the foreground: gRPC and HTTP for a broker whose stages run elsewhere in the pod."""
    os.execv(sys.executable, [sys.executable, "-m", "kmq.gateway"])  # a fresh process has none of the CLI's modules


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.command(
        epilog=examples(
            "kmq up",
            "KMQ_INSTANCE=b KMQ_DATA=b/d KMQ_PIPES=b/p KMQ_PORT=0 KMQ_ACK_PORT=0 kmq up",
            "kmq up --foreground",
        )
    )(up)
    app.command(epilog=examples("kmq down"))(down)
    app.command("gateway", epilog=examples("kmq gateway", "KMQ_HTTP_PORT=80 KMQ_GRPC_PORT=50051 kmq gateway"))(
        run_gateway
    )
