"""`kmq …`: what a person types. Parses, calls one function, maps the result to text and an exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kmq import __version__, gateway, topic_commands
from kmq import redrive as redriving
from kmq import status as statuses
from kmq.client.lines import LineSender, format_message, read_port
from kmq.errors import EXIT_FAILED, EXIT_OK, BusyError, ConfigError, KmqError, RetryError, of_os_error
from kmq.helptext import examples as _examples
from kmq.links.fifo import open_fifo
from kmq.links.ownership import FileLock
from kmq.log import topics as declarations
from kmq.log.identity import open_data
from kmq.log.partition import end_offset
from kmq.log.segment import LIMITS
from kmq.settings import GRACE_S, STAGES, Settings, load
from kmq.spark import commands as spark_commands

_UP_S = 60.0  # longest wait for a pod to be ready: recovery of a long WAL included
_DOWN_S = GRACE_S + 5.0
_ADOPT_S = 5.0  # how long the router may take to adopt a declaration
_POLL_S = 0.02
_LOG_MODE = 0o640
_T = TypeVar("_T")


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
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
out = Console()
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
        bool, typer.Option("--foreground", "-f", help="Stay, log to stderr, end with Ctrl-C.")
    ] = False,
    with_gateway: Annotated[
        bool, typer.Option("--gateway/--no-gateway", help="gRPC and HTTP, where the extra is installed.")
    ] = True,
) -> None:
    """Start the broker: four stages and the gateway under a supervisor, in the background. Returns when all are ready."""
    settings = load()
    open_data(settings.data)  # a directory that cannot be written is said here, not in a log file
    os.close(open_fifo(settings.pipes, "raw"))
    if foreground:
        from kmq.supervisor import Supervisor

        raise typer.Exit(Supervisor(settings, with_gateway).run())
    holder = FileLock(f"{settings.pipes}/supervisor.owner")
    if holder.is_held():
        raise BusyError(f"this broker is up already ({holder.holder()}); see: kmq status")
    orphans = _living_stages(settings)
    if orphans:
        pids = ", ".join(map(str, orphans))
        raise BusyError(f"stages are still running without their supervisor (pid {pids}); stop them with: kmq down")
    wal = FileLock(f"{settings.data}/append/.owner")
    if wal.is_held():  # said here, before a half-started pod takes messages it cannot store
        raise BusyError(f"KMQ_DATA={settings.data} is held by {wal.holder()}: one broker per directory")
    log_path = Path(settings.pipes) / "kmq.log"
    begin = log_path.stat().st_size if log_path.exists() else 0
    launched = time.monotonic_ns()
    with _open_log(log_path) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kmq.supervisor", *([] if with_gateway else ["--no-gateway"])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    awaited = len(STAGES) + (with_gateway and gateway.is_installed())
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline:
        status = statuses.collect(settings)
        if status.ready and sum(process.started > launched for process in status.processes) == awaited:
            port = read_port(settings, "ingress", settings.port)
            print(f"kmq: up; lines in on {settings.host}:{port}, data in {settings.data}, log in {log_path}")
            if status.gateway:
                _say_gateway(settings, status.gateway, log_path, begin)
            return
        if process.poll() is not None:
            if process.returncode in (EXIT_OK, -signal.SIGTERM):
                raise RetryError("was told to stop (kmq down) before it was ready: nothing runs; start it with: kmq up")
            _say_errors(log_path, begin)
            raise typer.Exit(process.returncode if process.returncode > 0 else EXIT_FAILED)
        time.sleep(_POLL_S)
    raise KmqError(f"not ready after {_UP_S:.0f} s; it goes on starting. See: kmq status, {log_path}")


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


@app.command(epilog=_examples("kmq down"))
def down() -> None:
    """Stop the broker: stages drain from the front, nothing is left in the links."""
    settings = load()
    lock = FileLock(f"{settings.pipes}/supervisor.owner")
    if lock.is_held():
        fields = dict(part.partition("=")[::2] for part in lock.holder().split())
        pids = [int(fields["pid"])]
    else:  # the supervisor was killed: its stages may live
        pids = _living_stages(settings)
    if not pids:
        print("kmq: not up")
        return
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_S
    while time.monotonic() < deadline:
        if not any(_is_alive(pid) for pid in pids):
            print("kmq: down")
            return
        time.sleep(_POLL_S)
    raise KmqError(f"still running after {_DOWN_S:.0f} s: pid {', '.join(map(str, pids))}")


def _living_stages(settings: Settings) -> list[int]:
    return [s.pid for s in statuses.collect(settings).stages if statuses.is_stage(s.pid, s.name)]


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
    """Show each stage (pid, state, restarts, rate) and what waits in each link. Exit code 1 unless all are ready."""
    settings = load()
    if as_logfmt or as_json:
        found = statuses.collect(settings)
        if as_json:
            stages = [vars(stage) for stage in found.processes]
            print(json.dumps({"stages": stages, "backlog": found.backlog, "clock": found.clock or "trusted"}))
        else:
            print(statuses.logfmt(found))
    else:
        found = statuses.collect_with_rates(settings)
        _print_status(settings, found)
    raise typer.Exit(EXIT_OK if found.ready else EXIT_FAILED)


def _print_status(settings: Settings, found: statuses.Status) -> None:
    if not found.stages:
        print(f"kmq: instance {settings.instance} is down (data {settings.data})")
        return
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


# --- clock -------------------------------------------------------------------------------------------------------


@app.command("clock", epilog=_examples("kmq clock", "kmq clock --trust"))
def show_clock(
    trust: Annotated[bool, typer.Option("--trust", help="Say that the time of day is right now.")] = False,
) -> None:
    """Show whether the time of day is trusted. Exit code 1 where it is not.

    After a jump of more than a minute, or at a start more than a day after the last record, nothing is deleted or
    forgotten by age until the time of day has been steady for ten minutes.
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
        bool, typer.Option("--raw", help="stdin is whole lines: routing_key|producer_ts|id|payload")
    ] = False,
    acks: Annotated[
        bool, typer.Option("--acks", help="Wait until everything is on disk; retry over restarts.")
    ] = False,
    producer: Annotated[
        str,
        typer.Option(
            help="With acks, as this producer: the same lines given again are not stored again. --raw: ids are decimal."
        ),
    ] = "",
) -> None:
    """Send messages: one per -m, else one per line of stdin. Without --acks fire and forget: nobody says that it is stored."""
    settings = load()
    if raw == bool(routing_key):
        raise ConfigError("give a routing key, or --raw for lines that bring their own")
    if "|" in routing_key or "\n" in routing_key:
        raise ConfigError(f"routing key {routing_key!r}: must not hold | or a newline")
    if message:
        payloads: Iterable[bytes] = (os.fsencode(text) for text in message)
    else:
        payloads = _lines(sys.stdin.buffer)
    key = os.fsencode(routing_key)
    if acks or producer:
        from kmq.client import command

        numbered = (format_message(key, p, b"%d" % n) for n, p in enumerate(payloads, 1))
        lines = (payload + b"\n" for payload in payloads) if raw else numbered
        print(command.produce(_with_progress(lines, "sending"), producer, dedupe=bool(producer) or not raw))
        return
    lines = (payload + b"\n" for payload in payloads) if raw else (format_message(key, p) for p in payloads)
    with _line_sender(settings) as sender:
        for line in _with_progress(lines, "sending"):
            sender.send(line)
    print(f"sent {sender.sent}")


def _line_sender(settings: Settings) -> LineSender:
    token = ""
    if settings.tokens:
        from kmq import tokens

        token = tokens.local(settings)
    return LineSender(settings.host, read_port(settings, "ingress", settings.port), token)


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    for line in stream:
        yield line.removesuffix(b"\n")


def _with_progress(items: Iterable[_T], what: str) -> Iterator[_T]:
    """`items`, with a count on the terminal while they go by."""
    columns = (SpinnerColumn(), TextColumn(what + " {task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        for number, item in enumerate(items, 1):
            yield item
            if number % 1024 == 0:
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
    print(f"topic {name}: {partitions} partition(s), in force when the router has taken it up")


@topics_app.command("list", epilog=_examples("kmq topics list", "kmq topics list --logfmt"))
def list_topics(as_logfmt: Annotated[bool, typer.Option("--logfmt", help="One line per partition.")] = False) -> None:
    """List topics with their partitions, messages and bytes."""
    settings = load()
    open_data(settings.data)
    table = Table("topic", box=None, pad_edge=False, header_style="bold")
    for title in ("partition", "messages", "bytes", "in force from seq"):
        table.add_column(title, justify="right")
    for name, partitions, from_seq in declarations.listing(settings.data):
        for partition in range(partitions):
            messages, size = end_offset(settings.data, name, partition)
            if as_logfmt:
                print(f"topic={name} partition={partition} messages={messages} bytes={size} from_seq={from_seq or 0}")
            else:
                since = "pending" if from_seq is None else str(from_seq)
                table.add_row(name, str(partition), f"{messages:,}", f"{size:,}", since)
    if not as_logfmt:
        out.print(table)


topic_commands.add_to(topics_app)


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
def list_tokens() -> None:
    """List the names that have tokens, and how many. To take one away, delete its line in the file."""
    from kmq import tokens

    for name, hashes in tokens.read(_token_file()).items():
        print(f"name={name} tokens={len(hashes)}")


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
    found = redriving.Dropped(_data_to_read(), topic) if dropped else redriving.Queue(settings.data, topic)
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
    with _line_sender(settings) as sender:
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

    for line in islice(show.cat(_data_to_read(), log, from_seq, offset, since, until), count or None):
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


@log_app.command("stat", epilog=_examples("kmq log stat", "kmq log stat append --logfmt"))
def stat_log(
    log: Annotated[str, typer.Argument(help="append, <topic> or <topic>/<partition>; all without one.")] = "",
    as_logfmt: Annotated[bool, typer.Option("--logfmt", help="One line per log.")] = False,
) -> None:
    """Show what there is of each log: segments, first and last record, bytes, blocks, ages in seconds."""
    from kmq.log import show

    table = Table("log", box=None, pad_edge=False, header_style="bold")
    for title in ("segments", "first", "last", "bytes", "blocks", "oldest s", "newest s"):
        table.add_column(title, justify="right")
    for s in show.stat(_data_to_read(), log):
        if as_logfmt:
            print(
                f"log={s.name} segments={s.segments} first={s.first} last={s.end - 1} bytes={s.bytes}"
                f" blocks={s.blocks} oldest_s={s.oldest_s:.1f} newest_s={s.newest_s:.1f}"
            )
        else:
            numbers = (s.segments, s.first, s.end - 1, s.bytes, s.blocks)
            table.add_row(s.name, *(f"{n:,}" for n in numbers), f"{s.oldest_s:,.1f}", f"{s.newest_s:,.1f}")
    if not as_logfmt:
        out.print(table)


def _data_to_read() -> str:
    """The data directory, which a command that only reads does not make."""
    data = load().data
    if not os.path.isdir(f"{data}/append"):
        raise ConfigError(f"KMQ_DATA={data}: no data directory")
    return data


# --- verify ------------------------------------------------------------------------------------------------------


@app.command(epilog=_examples("kmq verify", "kmq verify append", "kmq verify --repair"))
def verify(
    only: Annotated[list[str] | None, typer.Argument(help="Topics, or append for the WAL; everything without.")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Heal what is found; the broker must be down.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object per finding and per healed file.")] = False,
) -> None:
    """Check every byte on disk, also of a running broker. Exit code 0: all good; 1: damage; 65: damage that cannot be healed.

    --repair rebuilds the WAL from the queues, queues from the WAL, indexes from the data, byte by byte the same. What no copy
    has any more goes to the directory quarantine and is named there by seq.
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
    """Entry point: KmqError, and a path that is of the wrong kind, become one line on stderr and an exit code."""
    try:
        app()
    except KmqError as error:
        _fail(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(RetryError.exit_code) from None
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
