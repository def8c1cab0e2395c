"""`kmq …`: what a person types. Parses, calls one function, maps the result to text and an exit code."""

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kmq import __version__, gateway, terminal
from kmq.broker import status as statuses
from kmq.broker import supervision
from kmq.broker.readiness import ROOM
from kmq.cli import checkpoints as checkpoints  # adds its commands to pipeline_app
from kmq.cli import pipelines as spark_commands
from kmq.cli import produce as producing
from kmq.cli import topics
from kmq.cli.helptext import examples as _examples
from kmq.cli.obstacle import obstacle
from kmq.client.lines import LineSender, format_message, read_port
from kmq.client.waiting import Patience
from kmq.deadletters import redrive as redriving
from kmq.errors import EXIT_FAILED, EXIT_OK, EXIT_SIGINT, BusyError, ConfigError, KmqError, RetryError, of_os_error
from kmq.links.fifo import open_fifo
from kmq.links.ownership import FileLock
from kmq.log import topics as declarations
from kmq.log.identity import open_data
from kmq.log.partition import end_offset
from kmq.log.segment import LIMITS
from kmq.logfmt import pairs
from kmq.settings import GRACE_S, STAGES, Settings, load

_UP_S = 60.0  # longest wait for a pod to be ready: recovery of a long WAL included
_FULL_S = 1.0  # lack of room that lasts for so long is said: what is small may find room in a moment
_DOWN_S = GRACE_S + 5.0
_ADOPT_S = 5.0  # how long the router may take to adopt a declaration
_POLL_S = 0.02
_LOG_MODE = 0o640
_T = TypeVar("_T")


app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # of all commands below, too
    rich_markup_mode="rich",
    help="KMQ: a message broker inside one pod, whose every message is a line in a text file.",
    epilog="Settings come from the environment (KMQ_DATA, KMQ_PORT, …), then ./kmq.toml, then defaults.\n\n"
    + _examples("kmq up", "kmq produce test.probe -m hello", "kmq status", "kmq down"),
)
topics_app = typer.Typer(
    no_args_is_help=True,
    help="Declare topics, list them, change their limits.",
    epilog=_examples("kmq topics create orders --partitions 4", "kmq topics list"),
)
app.add_typer(topics_app, name="topics")
token_app = typer.Typer(
    no_args_is_help=True,
    help="Bearer tokens of producers and consumers, in the file KMQ_TOKENS.",
    epilog=_examples("KMQ_TOKENS=tokens kmq token new orders", "KMQ_TOKENS=tokens kmq token list"),
)
app.add_typer(token_app, name="token")
log_app = typer.Typer(
    no_args_is_help=True,
    help="Read the WAL and the queues: lines, places, sizes. Nothing is changed; the broker may run.",
    epilog=_examples("kmq log stat", "kmq log cat append --count 3", "kmq log find append --seq 1"),
)
app.add_typer(log_app, name="log")
app.add_typer(spark_commands.pipeline_app, name="pipeline")
out = terminal.console()
err = Console(stderr=True)


def _version(asked: bool) -> None:
    if asked:
        print(f"kmq {__version__}")
        raise typer.Exit


@app.callback()
def _everything(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Which release this is, and end.")
    ] = False,
) -> None:
    pass


# --- up, down ----------------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "kmq up",
        "KMQ_INSTANCE=b KMQ_DATA=b/d KMQ_PIPES=b/p KMQ_PORT=0 KMQ_ACK_PORT=0 kmq up",
        "kmq up --foreground",
    )
)
def up(
    foreground: Annotated[
        bool, typer.Option("--foreground", "-f", help="Stay, log to stderr. Ctrl-C drains; again: ends at once.")
    ] = False,
    with_gateway: Annotated[
        bool, typer.Option("--gateway/--no-gateway", help="gRPC and HTTP, where the extra is installed.")
    ] = True,
) -> None:
    """Start the broker: four stages and the gateway under a supervisor, in the background. Returns when all are ready."""
    settings = load()
    with_gateway = with_gateway and gateway.is_installed()
    open_data(settings.data)  # a directory that cannot be written is said here, not in a log file
    os.close(open_fifo(settings.pipes, "raw"))
    holder = FileLock(f"{settings.pipes}/supervisor.owner")
    if not foreground and holder.is_held():  # else a supervisor that ends just now is waited for
        raise BusyError(f"this broker is up already ({holder.holder()}); see: kmq status")
    _refuse_to_share(supervision.settled(settings))
    if foreground:
        from kmq.broker.supervisor import Supervisor

        raise typer.Exit(Supervisor(settings, with_gateway).run())
    wal = FileLock(f"{settings.data}/append/.owner")
    if wal.is_held():  # said here, before a half-started pod takes messages it cannot store
        raise BusyError(f"KMQ_DATA={settings.data} is held by {wal.holder()}: one broker per directory")
    if settings.unused:
        names = ", ".join(settings.unused)
        print(f"kmq: {names}: does nothing yet, nobody listens there; leave it out", file=sys.stderr)
    log_path = Path(settings.pipes) / "kmq.log"
    begin = log_path.stat().st_size if log_path.exists() else 0
    launched = time.monotonic_ns()
    with _open_log(log_path) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kmq.broker.supervisor", *([] if with_gateway else ["--no-gateway"])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    awaited = len(STAGES) + with_gateway
    deadline = time.monotonic() + _UP_S
    full_since = 0.0  # a start that finds no room waits for it as long as it takes
    while time.monotonic() < deadline:
        status = statuses.collect(settings)
        is_started = sum(process.started > launched for process in status.processes) == awaited
        if status.ready and is_started:
            port = read_port(settings, "ingress", settings.port)
            print(f"kmq: up; lines in on {settings.host}:{port}, data in {settings.data}, log in {log_path}")
            if status.gateway:
                _say_gateway(settings, status.gateway, log_path, begin)
            _say_warnings(status)
            return
        no_room = next((reason for reason in status.verdict.reasons if reason.code in ROOM), None)
        if not (is_started and no_room):
            full_since = 0.0
        elif time.monotonic() - (full_since := full_since or time.monotonic()) > _FULL_S:
            raise KmqError(f"up, but not ready: {no_room}; {no_room.advice}")
        if process.poll() is not None:
            if process.returncode in (EXIT_OK, -signal.SIGTERM):
                raise RetryError("was told to stop (kmq down) before it was ready: nothing runs; start it with: kmq up")
            _say_errors(log_path, begin)
            raise typer.Exit(process.returncode if process.returncode > 0 else EXIT_FAILED)
        time.sleep(_POLL_S)
    raise KmqError(
        f"not ready after {_UP_S:.0f} s: {status.verdict.first}; it goes on starting. See: kmq status, {log_path}"
    )


def _say_warnings(status: statuses.Status) -> None:
    for warning in status.verdict.warnings:
        print(f"kmq: {warning}; {warning.advice}", file=sys.stderr)


def _open_log(path: Path) -> BinaryIO:
    """For the user and the group of the broker only, like its FIFOs; also one that an older release has made."""
    log = open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _LOG_MODE), "ab")
    os.fchmod(log.fileno(), _LOG_MODE)
    return log


def _say_gateway(settings: Settings, process: statuses.StageStatus, log_path: Path, begin: int) -> None:
    """Where it listens; or why it does not, which stops nobody from sending lines."""
    if process.state == "ready":
        grpc, http = read_port(settings, "grpc", settings.grpc_port), read_port(settings, "http", settings.http_port)
        print(f"kmq: gRPC on {settings.host}:{grpc}, HTTP on http://{settings.host}:{http}")
    else:
        _say_errors(log_path, begin, "kmq: the gateway could not start: no gRPC, no HTTP")


def _say_errors(log_path: Path, begin: int, what: str = "kmq: could not start") -> None:
    """What the log says went wrong since `begin`."""
    with log_path.open("rb") as log:
        log.seek(begin)
        lines = [line.rstrip() for line in log.read().decode(errors="replace").splitlines()]
    for line in [line for line in lines if "level=error" in line or line.startswith("kmq: ")] or lines[-5:]:
        print(line, file=sys.stderr)
    print(f"{what}; the whole log is in {log_path}", file=sys.stderr)


def _refuse_to_share(found: supervision.Supervision) -> None:
    if found.others:
        raise BusyError(f"this broker is up already: {_not_ours(found)}; see: kmq status")
    if found.orphans:
        pids = ", ".join(str(stage.pid) for stage in found.orphans)
        raise BusyError(f"stages are still running without their supervisor (pid {pids}); stop them with: kmq down")


def _not_ours(found: supervision.Supervision) -> str:
    return (
        f"not started by kmq up: {', '.join(map(str, found.others))}; end them where they were started"
        " (in Kubernetes: kubectl scale statefulset <name> --replicas=0)"
    )


@app.command(epilog=_examples("kmq down"))
def down() -> None:
    """Stop the broker: stages drain from the front, nothing is left in the links.

    Exit code 0 also where it is down already; 69 where something else than `kmq up` started its stages, which are left alone; 78
    where KMQ_DATA is no data directory, or not the one that this instance is up with.
    """
    settings = load()
    found = supervision.settled(settings)
    if found.others:
        raise BusyError(f"nothing was stopped: {_not_ours(found)}")
    if found.holder and not found.supervisor:
        raise BusyError(f"its supervisor ({found.holder}) cannot be seen from here; say kmq down where it runs")
    pids = [found.supervisor] if found.supervisor else [stage.pid for stage in found.orphans]
    if not pids:
        if reason := supervision.why_not_here(settings):
            raise ConfigError(f"not up: {reason}")
        print(f"kmq: not up (data in {os.path.abspath(settings.data)})")
        return
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # to one that Ctrl-Z has stopped
    deadline = time.monotonic() + _DOWN_S
    while time.monotonic() < deadline:
        if not any(_is_alive(pid) for pid in pids):
            print("kmq: down")
            return
        time.sleep(_POLL_S)
    raise KmqError(f"still running after {_DOWN_S:.0f} s: pid {', '.join(map(str, pids))}")


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- status ------------------------------------------------------------------------------------------------------


@app.command(epilog=_examples("kmq status", "kmq status --logfmt | awk '$1 == \"stage=router\"'", "kmq status --json"))
def status(
    as_logfmt: Annotated[bool, typer.Option("--logfmt", help="One line per stage, for scripts; no rates.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs; no rates.")] = False,
) -> None:
    """Show each stage (pid, state, restarts, rate), what waits in each link, and what is wrong.

    Exit code 1 unless the broker is ready: while messages are refused too. What it says is what /readyz says.
    """
    settings = load()
    if as_logfmt or as_json:
        found = statuses.collect(settings)
        print(json.dumps(statuses.as_json(found)) if as_json else statuses.logfmt(found))
    else:
        found = statuses.collect_with_rates(settings)
        _print_status(settings, found)
    raise typer.Exit(EXIT_OK if found.ready else EXIT_FAILED)


def _print_status(settings: Settings, found: statuses.Status) -> None:
    if found.stages:
        _print_stages(found)
    if found.supervisor == "killed":
        out.print(supervision.KILLED, style="yellow", highlight=False, soft_wrap=True)
    elif found.supervisor == "down":
        where = f"data in {os.path.abspath(settings.data)}, pipes in {os.path.abspath(settings.pipes)}"
        print(f"kmq: instance {settings.instance} is down ({where})")
        if reason := supervision.why_not_here(settings):
            print(f"kmq: {reason}")


def _print_stages(found: statuses.Status) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("stage", "pid", "state", "restarts", "msg/s", "messages", "last seq", "waits before it"):
        table.add_column(title, justify="left" if title in ("stage", "state", "waits before it") else "right")
    before = {
        "ingress": f"{found.stages[0].connections} producers",
        "framer": f"raw {found.backlog['raw_bytes']:,} B",
        "durability": f"framed {found.backlog['framed_messages']:,} msg",
        "router": f"durable {found.backlog['durable_messages']:,} msg",
    }
    for s in found.processes:
        colour = {"ready": "green", "draining": "yellow", "recovering": "yellow"}.get(s.state, "red")
        # ingress passes blocks on and looks into none: the framer counts
        counts = (f"{s.rate:,.0f}", f"{s.messages:,}", f"{s.seq:,}") if s.name in STAGES[1:] else ("", "", "")
        cells = (f"{s.restarts}", *counts, before.get(s.name, ""))
        table.add_row(s.name, str(s.pid), f"[{colour}]{s.state}[/]", *cells)
    out.print(table)
    if found.clock:
        out.print(found.clock, style="yellow", highlight=False, soft_wrap=True)
    refused, dropped = sum(s.refused for s in found.stages), sum(s.dropped for s in found.stages)
    if refused or dropped:
        out.print(f"refused at ingress: {refused:,}   dropped (see dropped.log): {dropped:,}", highlight=False)
    for reason in found.verdict.reasons:
        out.print(f"not ready: {reason}; {reason.advice}", style="red", highlight=False, markup=False, soft_wrap=True)
    for warning in found.verdict.warnings:
        out.print(f"{warning}; {warning.advice}", style="yellow", highlight=False, markup=False, soft_wrap=True)


# --- clock -------------------------------------------------------------------------------------------------------


@app.command("clock", epilog=_examples("kmq clock", "kmq clock --trust"))
def show_clock(
    trust: Annotated[bool, typer.Option("--trust", help="Say that the time of day is right now.")] = False,
) -> None:
    """Show whether the time of day is trusted. Exit code 1 where it is not.

    After a jump of more than a minute, or at a start more than a day after
    the last record, nothing is deleted or forgotten by age until the time of
    day has been steady for ten minutes.
    """
    found = statuses.collect(load())
    if not found.stages:
        raise KmqError("the broker is down: no process watches the time of day")
    if trust:
        statuses.trust_clock(load())
    elif found.clock:
        print(found.clock)
        raise typer.Exit(EXIT_FAILED)
    print("the time of day is trusted")


# --- gateway -----------------------------------------------------------------------------------------------------


@app.command("gateway", epilog=_examples("kmq gateway", "KMQ_HTTP_PORT=80 KMQ_GRPC_PORT=50051 kmq gateway"))
def run_gateway() -> None:
    """Run the gateway alone, in the foreground: gRPC and HTTP for a broker whose stages run elsewhere in the pod."""
    os.execv(sys.executable, [sys.executable, "-m", "kmq.gateway"])  # in a process that has not loaded what we need


# --- produce -----------------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "kmq produce test.probe -m hello",
        "kmq produce notes.host < /etc/hostname",
        "printf 'test.probe|0|1|hi\\n' | kmq produce --raw",
        "seq 1 1000 | kmq produce invoices --producer import-7",
    )
)
def produce(
    routing_key: Annotated[str, typer.Argument(help="<topic> or <topic>.<key>; not with --raw.")] = "",
    message: Annotated[list[str] | None, typer.Option("--message", "-m", help="A payload; may be given again.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Each line of stdin is a whole message: routing_key|producer_ts|id|payload")
    ] = False,
    acks: Annotated[
        bool, typer.Option("--acks", help="Wait until every message is on disk; send again after a broken connection.")
    ] = False,
    producer: Annotated[
        str,
        typer.Option(
            help="A name for --acks: the same lines sent again under it are stored once. With --raw the ids must be numbers."
        ),
    ] = "",
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="SECONDS",
            help="Give up when the broker has taken nothing for so long. \\[default: never; 60 with --acks]",
        ),
    ] = None,
) -> None:
    """Send messages: one for each -m, or one for each line of stdin.

    Without --acks nothing confirms that a message was stored. While the
    broker takes nothing, because its disk is full or a stage is stopped, the
    command waits and says why.
    """
    settings = load()
    if raw == bool(routing_key):
        raise ConfigError("give a routing key, or --raw for lines that bring their own")
    if "|" in routing_key or "\n" in routing_key:
        raise ConfigError(f"routing key {routing_key!r}: must not hold | or a newline")

    payloads = [[os.fsencode(text) for text in message]] if message else producing.read_blocks(sys.stdin.fileno())
    acks = acks or bool(producer)
    ids = map(b"%d".__mod__, itertools.count(1)) if acks else itertools.repeat(b"")
    blocks = _as_lines(payloads, os.fsencode(routing_key), ids)
    shown = _with_progress(blocks, "sending", len) if message or not sys.stdin.isatty() else blocks
    patience = Patience(lambda: obstacle(settings), math.inf if acks or timeout is None else timeout)
    if acks:
        print(producing.produce(shown, producer, bool(producer) or not raw, patience, timeout))
    else:
        print(producing.send(shown, _line_sender(settings, patience)))


def _as_lines(payloads: Iterable[list[bytes]], key: bytes, ids: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Whole lines: the payloads under `key`, or as they are where that is empty."""
    for block in payloads:
        if key:
            yield [format_message(key, payload, next(ids)) for payload in block]
        else:
            yield [payload + b"\n" for payload in block]


def _line_sender(settings: Settings, patience: Patience) -> LineSender:
    token = ""
    if settings.tokens:
        from kmq import tokens

        token = tokens.local(settings)
    return LineSender(settings.host, read_port(settings, "ingress", settings.port), token, patience)


def _with_progress(items: Iterable[_T], what: str, count: Callable[[_T], int] | None = None) -> Iterator[_T]:
    """`items`, with a count on the terminal while they go by."""
    columns = (SpinnerColumn(), TextColumn(what + " {task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        for number, item in enumerate(items, 1):
            yield item
            if count:
                progress.advance(task, count(item))
            elif number % 1024 == 0:
                progress.update(task, completed=number)


# --- topics ------------------------------------------------------------------------------------------------------


@topics_app.command(
    "create",
    epilog=_examples(
        "kmq topics create orders --partitions 4",
        "kmq topics create jobs.eu",
        "kmq topics create audit --set retention_age=30d",
    ),
)
def create(
    name: Annotated[str, typer.Argument(help="[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")],
    partitions: Annotated[int, typer.Option("--partitions", "-p", help="1 to 1024; fixed for the topic's life.")] = 1,
    own: Annotated[
        list[str] | None, typer.Option("--set", help=f"{', '.join(LIMITS)}: a limit in place of the setting.")
    ] = None,
) -> None:
    """Declare a topic. It is in force from the next message that is routed on."""
    settings = load()
    open_data(settings.data)
    limits = {limit: text for limit, _, text in (pair.partition("=") for pair in own or ())}
    declarations.declare(settings.data, name, partitions, limits)
    deadline = time.monotonic() + _ADOPT_S
    while statuses.collect(settings).ready and time.monotonic() < deadline:
        from_seq = declarations.load(settings.data, name)[1]
        if from_seq is not None:
            print(f"topic {name}: {partitions} partition(s), in force from seq {from_seq}")
            return
        time.sleep(_POLL_S)
    where = os.path.abspath(settings.data)
    print(f"topic {name}: {partitions} partition(s), declared in {where}, in force when the router has taken it up")


@topics_app.command("list", epilog=_examples("kmq topics list", "kmq topics list --logfmt", "kmq topics list --json"))
def list_topics(
    as_logfmt: Annotated[bool, typer.Option("--logfmt", help="One line per partition.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; see above.")] = False,
) -> None:
    """List topics with their partitions, messages and bytes.

    --json: {"topics": [{"topic", "partition", "messages", "bytes",
    "from_seq"}, …]}, one object per partition. from_seq is null until the
    router has taken up the declaration.
    """
    data = _data_to_read()
    rows = [
        {"topic": name, "partition": partition, "messages": messages, "bytes": size, "from_seq": from_seq}
        for name, partitions, from_seq in declarations.listing(data)
        for partition in range(partitions)
        for messages, size in [end_offset(data, name, partition)]
    ]
    if as_json:
        print(json.dumps({"topics": rows}))
    elif as_logfmt:
        for row in rows:
            print(pairs(**row | {"from_seq": row["from_seq"] or 0}))
    else:
        table = Table("topic", box=None, pad_edge=False, header_style="bold")
        for title in ("partition", "messages", "bytes", "in force from seq"):
            table.add_column(title, justify="right")
        for row in rows:
            since = "pending" if row["from_seq"] is None else str(row["from_seq"])
            table.add_row(str(row["topic"]), str(row["partition"]), f"{row['messages']:,}", f"{row['bytes']:,}", since)
        out.print(table)


topics.add_to(topics_app)


# --- token -------------------------------------------------------------------------------------------------------


def _token_file() -> str:
    settings = load()
    if not settings.tokens:
        raise ConfigError("KMQ_TOKENS is not set: it names the file of hashed tokens")
    return settings.tokens


@token_app.command("new", epilog=_examples("KMQ_TOKENS=tokens kmq token new orders"))
def new_token(
    name: Annotated[str, typer.Argument(help="Whose it is: A-Z a-z 0-9 _ -. A name may have several tokens.")],
) -> None:
    """Make a token and print it, this once: the file keeps its hash. In force within a second or two."""
    from kmq import tokens

    print(tokens.new(_token_file(), name))


@token_app.command("list", epilog=_examples("KMQ_TOKENS=tokens kmq token list"))
def list_tokens(
    as_json: Annotated[bool, typer.Option("--json", help='{"tokens": [{"name", "tokens"}, …]}')] = False,
) -> None:
    """List the names that have tokens, and how many. To take one away, delete its line in the file."""
    from kmq import tokens

    rows = [{"name": name, "tokens": len(hashes)} for name, hashes in tokens.read(_token_file()).items()]
    if as_json:
        print(json.dumps({"tokens": rows}))
    else:
        for row in rows:
            print(pairs(**row))


# --- redrive -----------------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "kmq redrive dead --to 'test.recovered_{key}' --dry-run",
        "kmq redrive dead --to 'test.recovered_{key}' --key 'letter_*' --from-seq 1",
        "kmq redrive dead --to 'test.{key}' --idempotent --rate 1000",
        "kmq redrive --dropped --dry-run",
    )
)
def redrive(
    topic: Annotated[str, typer.Argument(help="The queue to read, e.g. dead. It is not touched.")] = "",
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="New routing key; may use {routing_key}, {topic}, {key}. With --dropped the old one, without it.",
        ),
    ] = None,
    key: Annotated[str, typer.Option("--key", help="Only records whose key matches this glob.")] = "*",
    from_seq: Annotated[int, typer.Option("--from-seq", help="Only records with this seq or a later one.")] = 1,
    dropped: Annotated[
        bool,
        typer.Option(
            "--dropped", help="From the WAL what drop_oldest took from the queue, or from all; implies --idempotent."
        ),
    ] = False,
    idempotent: Annotated[
        bool,
        typer.Option("--idempotent", help="The same redrive again stores nothing twice; waits until all is on disk."),
    ] = False,
    name: Annotated[
        str, typer.Option("--name", help="Of an idempotent redrive: under another name it stores again.")
    ] = "",
    rate: Annotated[float, typer.Option("--rate", min=0, help="At most so many messages a second; 0: no limit.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent; send nothing.")] = False,
) -> None:
    """Send the records of a queue through the broker again, under new routing keys, as new messages.

    See `kmq pipeline run redrive` for many brokers, selection and new keys by SQL.
    """
    settings = load()
    if not (topic or dropped) or (to is None and not dropped):
        raise ConfigError("give the topic to read and --to, the new routing key; or --dropped")
    template = "{routing_key}" if to is None else to
    # As of now: what is sent may end in this very queue.
    data = _data_to_read()
    found = redriving.Dropped(data, topic) if dropped else redriving.Queue(data, topic)
    what = f"of what was dropped{f' of {topic}' if topic else ''}" if dropped else f"of {topic}"

    def chosen() -> Iterator[tuple[redriving.Record, bytes]]:
        return redriving.select(found.records(), template, key, from_seq)

    if isinstance(found, redriving.Dropped):
        _say_what_is_gone(found)
    total = 0
    for each, new in chosen():  # a bad new key is found before any is sent
        total += 1
        if dry_run:
            old = each.line.split(b"|", 3)[2]
            print(f"{old.decode(errors='replace')} -> {new.decode(errors='replace')}")
    if dry_run:
        print(f"would redrive {total} {what}")
        return
    pace = redriving.Pace(rate)
    if idempotent or dropped:
        from kmq.client.producer import Producer

        which = (name, template, key, str(from_seq))
        pairs = redriving.numbered(chosen(), settings.data, *which)
        before = redriving.send(
            _with_progress(pairs, "redriving"), lambda who: Producer.local(producer=who, first_id=0), pace
        )
        print(f"redriven {total} {what}" + (f"; {before} of them were stored before" if before else ""))
        return
    lines = (redriving.as_sent(each.line, new) for each, new in chosen())
    with _line_sender(settings, Patience(lambda: obstacle(settings))) as sender:
        for block in redriving.blocks(_with_progress(lines, "redriving"), pace):
            sender.send(block)
            if rate:
                sender.flush()
    print(f"redriven {total} {what}")


def _say_what_is_gone(found: redriving.Dropped) -> None:
    if found.never_stored:
        print(f"kmq: {found.never_stored} were dropped by ring framed, before the WAL: gone for good", file=sys.stderr)
    if found.retired:
        print(f"kmq: {found.retired} are no longer in the WAL: retention took them", file=sys.stderr)


# --- log ---------------------------------------------------------------------------------------------------------


_LOG = typer.Argument(help="append (the WAL), <topic> or <topic>/<partition>.")
_OFFSET = typer.Option("--offset", help="This offset, or a later one; of one partition.")


@log_app.command("cat", epilog=_examples("kmq log cat append --count 3", "kmq log cat test --since 10m"))
def cat_log(
    log: Annotated[str, _LOG] = "append",
    from_seq: Annotated[int, typer.Option("--from-seq", help="From this seq on.")] = 0,
    offset: Annotated[int | None, _OFFSET] = None,
    since: Annotated[str, typer.Option("--since", help="Received then or later: 10m (ago), or a time.")] = "",
    until: Annotated[str, typer.Option("--until", help="Received before then.")] = "",
    count: Annotated[int, typer.Option("--count", "-n", help="At most so many; 0: all.")] = 0,
) -> None:
    """Print stored lines, each checked against the index. Damaged ones are never printed: an error says where they are."""
    from itertools import islice

    from kmq.log import show

    lines = islice(show.cat(_data_to_read(), log, from_seq, offset, since, until), count or None)
    for line in terminal.while_read(lines):
        sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


@log_app.command("find", epilog=_examples("kmq log find append --seq 1", "kmq log find test --time 10m"))
def find_log(
    log: Annotated[str, _LOG] = "append",
    seq: Annotated[int | None, typer.Option("--seq", help="This seq, or the next one there is.")] = None,
    offset: Annotated[int | None, _OFFSET] = None,
    at: Annotated[str, typer.Option("--time", help="The first received then or later: 10m (ago), or a time.")] = "",
) -> None:
    """Print where a record is: file, byte, offset and the line. A few small reads, however long the log is."""
    from kmq.log import show

    if (seq is not None) + (offset is not None) + bool(at) != 1:
        raise ConfigError("give one of --seq, --offset, --time")
    places = list(show.find(_data_to_read(), log, seq, offset, at))
    for place in places:
        name = "seq" if place.name == "append" else "offset"
        text = place.line.decode(errors="replace")
        print(f"log={place.name} file={place.path} byte={place.byte} {name}={place.offset}\n{text}")
    raise typer.Exit(EXIT_OK if places else EXIT_FAILED)


@log_app.command("stat", epilog=_examples("kmq log stat", "kmq log stat append --logfmt", "kmq log stat --json"))
def stat_log(
    log: Annotated[str, typer.Argument(help="append, <topic> or <topic>/<partition>; all without one.")] = "",
    as_logfmt: Annotated[bool, typer.Option("--logfmt", help="One line per log.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; see above.")] = False,
) -> None:
    """Show what there is of each log: segments, first and last record, bytes, blocks, ages in seconds.

    --json: {"logs": [{"log", "segments", "first", "last", "bytes", "blocks",
    "oldest_s", "newest_s"}, …]}. first and last are seqs of the WAL, offsets
    of a partition. A log without records has last = first - 1 and ages of -1.
    """
    from kmq.log import show

    rows = [
        {
            "log": s.name,
            "segments": s.segments,
            "first": s.first,
            "last": s.end - 1,
            "bytes": s.bytes,
            "blocks": s.blocks,
        }
        | {"oldest_s": round(s.oldest_s, 1), "newest_s": round(s.newest_s, 1)}
        for s in show.stat(_data_to_read(), log)
    ]
    if as_json:
        print(json.dumps({"logs": rows}))
    elif as_logfmt:
        for row in rows:
            print(pairs(**row))
    else:
        table = Table("log", box=None, pad_edge=False, header_style="bold")
        for title in ("segments", "first", "last", "bytes", "blocks", "oldest s", "newest s"):
            table.add_column(title, justify="right")
        for name, *numbers in map(dict.values, rows):
            table.add_row(str(name), *(f"{number:,}" for number in numbers))
        out.print(table)


def _data_to_read() -> str:
    """The data directory, which a command that only reads does not make."""
    settings = load()
    if not supervision.is_data(settings.data):
        raise ConfigError(supervision.why_not_here(settings))
    return settings.data


# --- verify ------------------------------------------------------------------------------------------------------


@app.command(epilog=_examples("kmq verify", "kmq verify append", "kmq verify --repair"))
def verify(
    only: Annotated[list[str] | None, typer.Argument(help="Topics, or append for the WAL; everything without.")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Heal what is found; the broker must be down.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object per finding and per healed file.")] = False,
) -> None:
    """Check every byte on disk, also of a running broker. Exit code 0: all good; 1: damage; 65: damage that cannot be healed.

    --repair rebuilds the WAL from the queues, queues from the WAL, indexes
    from the data, byte by byte the same. What no copy has any more goes to
    the directory quarantine and is named there by seq.
    """
    from kmq.repair import check

    data = _data_to_read()
    columns = (SpinnerColumn(), TextColumn("checked {task.completed:,.0f} MB"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        code = check.run(data, only or [], repair, as_json, lambda nbytes: progress.advance(task, nbytes / 1e6))
    raise typer.Exit(code)


# --- sql, pipeline: on Spark -------------------------------------------------------------------------------------


app.command(
    epilog=_examples(
        'kmq sql "select topic, count(*) from all_topics group by topic"',
        'kmq sql "select max(recv_ts), max(length(value)) from append"',
        """kmq sql "select get_json_object(value_text, '$.user') from test" """.strip(),
        "kmq sql",
    )
)(spark_commands.sql)
app.command("audit", epilog=_examples("kmq audit", "kmq audit --path data --report audit.html"))(spark_commands.audit)


def main() -> None:
    """Run a command. KmqError, and a path that is of the wrong kind, become one line on stderr and an exit code."""
    terminal.open_streams()
    try:
        try:
            app()
        except SystemExit as end:
            if end.code == EXIT_SIGINT:
                terminal.drop()
            raise
        finally:
            sys.stdout.flush()  # here, where it can still be said that it failed
    except KmqError as error:
        _fail(error)
    except OSError as err:
        wrong = of_os_error(err)
        if not isinstance(wrong, ConfigError):
            raise
        _fail(wrong)


def _fail(error: KmqError) -> NoReturn:
    print(f"kmq: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code) from None


__all__ = ["STAGES", "main"]

if __name__ == "__main__":
    main()
