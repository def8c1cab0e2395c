"""`kmq ship`: each line of log files becomes a message, once, whatever is killed.

    look → plan → save the plan → send → all acknowledged → look …

Ids         One producer name for a state, made with it; ids are numbers that only rise. A round is planned before it is sent:
            which bytes of which files have which ids. So the broker's last id of the name says how much of the plan is
            stored, and nothing else has to be known. (A name for each file would take a place among KMQ_PRODUCERS with
            every rotation, and a connection.)
Invariant   A line is sent only after a state that has it in its plan is on disk, and the plan after it only when the
            round is acknowledged as a whole. So the ids on their way always belong to one plan, which is the state's.
Crash       Of ship: the next one asks for the last id (`last=?`, which fences the former connection and waits for what it
            has sent), skips so many lines of the plan, and plans anew. Of the broker: kmq.Producer sends the same lines
            with the same ids again. Of the machine: the state is replaced atomically and synced before a line is sent.
            A broker that does not know the name any more cannot say: then lines of one round may come twice, and ship
            says so. If it knows of later ids than the state, the state is an old copy: ship ends with 65.
Locking     `<state>.lock`, for as long as ship runs: a second one ends with 69 and names the holder.
Memory      A round of at most _ROUND_BYTES and the block that reaches it; ship_files.py bounds the rest.
Not covered A line that the broker refuses while it stores later ones of the same round, as when the topic is declared
            in that moment, or a broker starts anew with a smaller KMQ_MAX_LINE: it is named, and not sent again.
"""

import contextlib
import math
import os
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kmq.cli.elsewhere import elsewhere
from kmq.cli.output import examples, stop_on_signals
from kmq.cli.produce import obstacle, open_producer
from kmq.cli.ship_files import (
    LINGER_S,
    MOST_FILES,
    FileBlock,
    FollowedFiles,
    LogFile,
    ShipState,
    forget_ended,
    has_ended,
    is_away,
    load_state,
    look,
    make_ready,
    refuse,
    save_state,
)
from kmq.client.lines import STALL_S, Patience, say
from kmq.config.settings import Settings, load
from kmq.config.values import MIB
from kmq.errors import EXIT_SIGINT, ConfigError, CorruptError, KmqError, RetryError
from kmq.files import FULL
from kmq.links import ownership
from kmq.message import record
from kmq.message.text import make_routing_key
from kmq.wire import refusals

if TYPE_CHECKING:
    from kmq.client.producer import Producer

_LOOK_S = 0.25  # between two looks at the files; longer where a look takes long
_LOOK_SHARE = 20  # a look takes at most this part of the time
_TICK_S = 0.5  # longest wait before signals are noticed
_ROUND_BYTES = 4 * MIB
_ROUND_LINES = 50_000
_REPORT_S = 60.0  # between two lines on stderr; a terminal is redrawn with each round
_GRACE_S = 5.0  # how long it still sends once it is told to stop
_FIELDS = 64  # bytes of a line besides routing key and payload: time, id, header, separators


@dataclass
class Shipment:
    """One run: where its state is, what it follows, and what it has sent so far."""

    path: str  # of the state
    name: str
    topic: str
    next_id: int
    watched: FollowedFiles
    is_once: bool
    stop: threading.Event
    patience: Patience
    clock: Callable[[], float] = time.monotonic
    ends_at: float = math.inf
    max_line: int = MIB
    lines: int = 0
    bytes: int = 0
    too_long: int = 0
    with_nul: int = 0
    noted: set[tuple[str, int]] = field(default_factory=set)  # odd lines that were reported: what and file


def ship(
    patterns: Annotated[
        list[str], typer.Argument(help="Files, or quoted patterns such as 'logs/**/*.log'.", show_default=False)
    ],
    topic: Annotated[str, typer.Option(help="Where the lines go.", show_default=False)],
    state: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="What was sent of each file, a line each; kept over restarts. \\[default: kmq-ship.<topic>.state]",
        ),
    ] = "",
    once: Annotated[
        bool, typer.Option("--once", help="Send what is there, from the start of files not seen before, and end.")
    ] = False,
    from_start: Annotated[
        bool,
        typer.Option("--from-start", help="At the very first start, begin at the start of the files, not at the end."),
    ] = False,
) -> None:
    """Follow log files as tail -F does: each line becomes a message, once.

    Files may be renamed or cut by a log rotation, and new ones may appear.
    Ship and the broker may be killed at any moment: no line is lost, and none
    is stored twice. SIGTERM or Ctrl-C ends it, and the next start goes on
    where it was.
    """
    settings = load()
    if not record.is_topic(topic):
        reason = record.key_refusal(os.fsencode(topic)) or "bad_topic"
        raise ConfigError(f"--topic {topic!r}: {refusals.of_key(reason)}")
    path = os.path.abspath(state or f"kmq-ship.{topic}.state")
    stop = threading.Event()
    was_interrupted = stop_on_signals(stop)
    watched = FollowedFiles(patterns, {path, f"{path}.lock", f"{path}.new"}, say)
    work = Shipment(path, "", topic, 1, watched, once, stop, Patience(lambda: _obstacle(settings)))
    run(work, from_start or once)
    if once:
        _judge(work, was_interrupted())


def run(work: Shipment, from_start: bool) -> None:
    """Send until the end of --once, or until told to stop; print the totals."""
    with _locked(work.path):
        _begin(work, from_start)
        try:
            with _connected(work) as producer:
                if producer is not None:
                    _settle(work, producer.last_id)
                    with _progress(work.clock) as show:
                        _follow(work, producer, show)
                    _save(work)
        finally:
            for file in work.watched.files:
                file.close()
            print(_totals(work), flush=True)


def _obstacle(settings: Settings) -> str:
    if (there := elsewhere()) is None:
        return obstacle(settings)
    return f"{there.host}:{there.lines_in} does not answer, or has no room; see kmq status there"


def _judge(work: Shipment, was_interrupted: bool) -> None:
    """End --once with the right exit code."""
    unsent = [file for file in work.watched.files if file.size > file.offset and file.path not in work.watched.refused]
    left = sum(file.size - file.offset for file in unsent)
    if was_interrupted:
        raise typer.Exit(EXIT_SIGINT)
    if work.stop.is_set():
        raise KmqError(f"stopped before the end of the files: {left:,} bytes are not sent")
    if unsent:
        say(f"{unsent[0].path} ends without a newline; {left:,} bytes of {len(unsent):,} files wait for theirs")
    if work.watched.refused:
        raise KmqError(f"not all was sent: {len(work.watched.refused)} that the patterns match could not be read")
    if all(file.gone_at is not None for file in work.watched.files):
        raise KmqError("there is no file to send")


# --- the state -------------------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: str) -> Iterator[None]:
    lock = ownership.FileLock(f"{path}.lock")
    with _naming(path):
        lock.acquire(f"--state {path}", ownership.describe("ship", path))
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Let an error of a file that belongs to the state name the option."""
    try:
        yield
    except OSError as err:
        if err.errno in FULL:
            raise RetryError(f"--state {path}: {err.strerror}; make room") from err
        raise ConfigError(f"--state {path}: {err.strerror}") from err


def _save(work: Shipment) -> None:
    with _naming(work.path):
        save_state(work.path, ShipState(work.name, work.topic, work.next_id, work.watched.files))


def _begin(work: Shipment, from_start: bool) -> None:
    """Read the state, or make the first one: it says where files begin that are there now."""
    with _naming(work.path):
        known = load_state(work.path)
    if known is None:
        work.name = f"ship-{token_hex(8)}"
        for file in look(work.watched):
            if not from_start and make_ready(work.watched, file):
                file.start_at_end()
        _save(work)
        return
    if known.topic != work.topic:
        raise ConfigError(f"--state {work.path}: belongs to topic {known.topic}; give each topic a state of its own")
    work.name, work.next_id, work.watched.files[:] = known.name, known.next_id, known.files
    look(work.watched)


def _settle(work: Shipment, last_id: int) -> None:
    """Take those lines of the plan for stored whose ids the broker knows. Raises CorruptError for an old copy."""
    files, before = work.watched.files, work.next_id - 1
    stored, planned = last_id - before, sum(file.lines for file in files)
    if stored > planned:
        raise CorruptError(
            f"--state {work.path}: is an old copy, and nothing was sent: the broker has {stored - planned:,} lines more"
            f" of {work.name} than it accounts for; restore the newest, or remove it and begin anew"
        )
    if stored < 0:
        said = f"the broker knows {work.name} up to line {last_id:,} of {before:,}: it is another one, or was reset"
        say(f"{said}; {planned:,} lines may be stored twice" if planned else said)
    for file in files:
        here = min(max(stored, 0), file.lines)
        stored -= here
        is_ready = here == file.lines or make_ready(work.watched, file)
        if here and not is_ready and (file.path in work.watched.refused or is_away(file)):
            raise ConfigError(
                f"{file.path}: cannot be read, and a part of its lines was sent; mount its directory, or make it readable"
            )
        file.take_back(here)
    work.next_id = max(before, last_id) + 1  # ids only rise: another broker may know more of them


# --- sending ---------------------------------------------------------------------------------------------------------


@contextmanager
def _connected(work: Shipment) -> "Iterator[Producer | None]":
    """Yield a producer as soon as the broker answers it. None: told to stop before it did."""
    from kmq.client.failures import NotAnswered

    with contextlib.ExitStack() as stack:
        producer, answered = None, False
        while not (answered or work.stop.is_set()):
            try:
                if producer is None:
                    producer = open_producer(
                        {"producer": work.name, "stall_s": STALL_S, "on_stall": lambda _: work.patience.stalled()}
                    )
                    stack.callback(producer.abort)
                work.max_line = producer.connect(_TICK_S)
                work.patience.moved()
                answered = True
            except NotAnswered:
                work.patience.stalled()
            except ConfigError:  # the settings are good; what is missing is a file that the broker makes at its start
                if producer is not None or elsewhere() is not None:  # it has no files here
                    raise
                work.patience.stalled()
                work.stop.wait(_TICK_S)
        yield producer if answered else None


def _follow(work: Shipment, producer: "Producer", show: Callable[[str], None]) -> None:
    """Send what is there and what comes. Told to stop, send what is there by then, for at most _GRACE_S."""
    watched, look_at, is_saved, is_fresh = work.watched, 0.0, True, False
    before = work.clock(), 0
    while (began := work.clock()) < work.ends_at:
        if work.stop.is_set() and work.ends_at == math.inf:
            _end_soon(work)
            look_at = 0.0
        if began >= look_at:
            look(watched)
            count = len(watched.files)
            forget_ended(watched, 0.0 if work.is_once else LINGER_S)
            is_saved, is_fresh = is_saved and len(watched.files) == count, True
            look_at = began + max(_LOOK_S, _LOOK_SHARE * (work.clock() - began))
        if began - before[0] >= 1:
            show(f"{_totals(work)}, {(work.lines - before[1]) / (began - before[0]):,.0f} lines/s{_behind(work)}")
            before = began, work.lines
        work.max_line = producer.connect(_TICK_S)  # a broker that has started anew may have another
        if lines := _plan(work):
            is_saved = is_fresh = False
            _save(work)
            if not _send(work, producer, lines):
                return
            continue
        if not is_saved:
            _save(work)
            is_saved = True
        if not work.is_once and not work.stop.is_set():
            work.stop.wait(max(0.0, look_at - work.clock()))
        elif is_fresh and not any(file.has_more and file.path not in watched.refused for file in watched.files):
            return
        else:
            look_at = 0.0


def _end_soon(work: Shipment) -> None:
    """Note when the end is due. An application that ended before its sidecar has written its last lines just now."""
    if work.ends_at == math.inf:
        work.ends_at = work.clock() + (0.0 if work.is_once else _GRACE_S)


def _plan(work: Shipment) -> bytes:
    """Return the lines of the next round, as they are sent; b"" if there are none. Their files say what they are of."""
    watched, parts, size, count = work.watched, [], 0, 0
    longest = work.max_line - len(work.topic) - _FIELDS
    unfinished: set[str] = set()  # names that renamed files had which may have more lines
    watched.files.sort(key=lambda file: not file.was)  # the state names them in the order in which they are sent
    for file in watched.files:
        is_final = not work.is_once and file.unread > 0 and has_ended(file)
        waits = not file.was and file.path in unfinished
        if waits or not (file.has_more or is_final):
            continue
        try:
            block = file.read(longest, is_final) if make_ready(watched, file) else None
        except OSError as err:  # a failing disk, or a server that is away
            refuse(watched, file.path, f"is not read: {err.strerror}")
            block = None
        if file.has_more and file.path not in watched.refused:
            unfinished.add(file.was)
        if block is None:
            continue
        watched.refused.pop(file.path, None)
        parts.append(_format(work, file, block, work.next_id + count, longest))
        size, count = size + len(parts[-1]), count + file.lines
        if size >= _ROUND_BYTES or count >= _ROUND_LINES:
            break
    return b"".join(parts)


def _format(work: Shipment, file: LogFile, block: FileBlock, first_id: int, longest: int) -> bytes:
    """Return the messages of a block. A line that is too long becomes a dead letter with its first bytes."""
    stamp = b"%.6f" % time.time()
    head = b"%b|%b|" % (make_routing_key(work.topic), stamp)
    if max(map(len, block.lines)) <= longest and block.length is None:
        text = b"".join(
            [
                b"%b%d|%b\n" % (head, id, line) if line else b"%b%d;enc=b64|\n" % (head, id)  # without enc it is null
                for id, line in enumerate(block.lines, first_id)
            ]
        )
        if b"\0" not in text:
            return text
    rows = []
    for id, line in enumerate(block.lines, first_id):
        payload, header = line, b"" if line else b";enc=b64"
        if b"\0" in line:
            payload, header = b64encode(line), b";enc=b64"
            work.with_nul += 1
            _note(work, file, "has lines with NUL bytes, which are sent as base64 (enc=b64)")
        if block.length or len(payload) > longest:
            length = block.length or len(line)
            work.too_long += 1
            letter = record.long_letter(work.topic, line, length, work.max_line)
            rows.append(letter.replace(b"||", b"|%b|%d" % (stamp, id), 1) + b"\n")
            _note(work, file, f"has a line of {length:,} bytes, too long for KMQ_MAX_LINE: its start is a dead letter")
        else:
            rows.append(b"%b%d%b|%b\n" % (head, id, header, payload))
    return b"".join(rows)


def _note(work: Shipment, file: LogFile, what: str) -> None:
    """Report something odd, once for each file and kind."""
    kind = what[:12], file.inode
    if kind not in work.noted and len(work.noted) < MOST_FILES:
        work.noted.add(kind)
        say(f"{file.path} {what}")


def _send(work: Shipment, producer: "Producer", lines: bytes) -> bool:
    """Send a round and wait until it is stored. Returns False if told to stop before. Raises KmqError."""
    from kmq.client.failures import NotAnswered, Refused

    delivery = producer.send_lines(lines)
    while not delivery.done:
        try:
            delivery.result(_TICK_S)
        except NotAnswered:
            if work.stop.is_set():
                _end_soon(work)
            if work.clock() >= work.ends_at:
                return False
        except Refused as refused:
            kind = ConfigError if refused.code == "unknown_topic" else KmqError
            raise kind(_refusal(work, delivery.refused, refused)) from refused
    work.patience.moved()
    moved = [file for file in work.watched.files if file.lines]
    for file in moved:
        work.lines += file.lines
        work.bytes += file.end - file.offset
        work.next_id += file.lines
        file.offset, file.lines = file.end, 0
    # The next round begins with other files, where not all of them fit into one.
    work.watched.files[:] = [file for file in work.watched.files if file not in moved] + moved
    return True


def _refusal(work: Shipment, places: Iterable[int], refused: Exception) -> str:
    """Say which line was refused first, and what that means for the next start."""
    if not (wrong := sorted(places)):  # the whole connection
        return f"{refused}; what was sent is in {work.path}"
    at = wrong[0]
    for file in work.watched.files:
        if at < file.lines:
            break
        at -= file.lines
    total = sum(each.lines for each in work.watched.files)
    text = f"{file.path}, line {at + 1} after byte {file.offset:,}: {refused}; {len(wrong):,} lines refused"
    if wrong[0] + len(wrong) == total:
        return f"{text}; the next start sends them again"
    return f"{text}, and others after them stored, so they are not sent again"


# --- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(clock: Callable[[], float]) -> Iterator[Callable[[str], None]]:
    """Yield what shows a text: on a terminal in place of the last one, elsewhere a line a minute."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("", refresh_per_second=1) as status:
            yield status.update
        return
    said_at = [clock()]

    def report(text: str) -> None:
        if clock() - said_at[0] >= _REPORT_S:
            said_at[0] = clock()
            say(text)

    yield report


def _totals(work: Shipment) -> str:
    watched = work.watched
    odd = {
        "too long": work.too_long,
        "with NUL": work.with_nul,
        "files with new content": watched.truncated,
        "bytes lost": watched.lost,
    }
    counts = "".join(f", {count:,} {what}" for what, count in odd.items() if count)
    count = sum(file.gone_at is None for file in watched.files)
    return f"{count:,} files, sent {work.lines:,} lines, {work.bytes:,} bytes{counts}"


def _behind(work: Shipment) -> str:
    return f", {sum(max(0, file.size - file.offset) for file in work.watched.files):,} bytes behind"


def add_to(app: typer.Typer) -> None:
    """Add this command to `kmq`."""
    app.command(
        epilog=examples(
            "kmq ship 'pipes/*.log' --topic own --once",
            "kmq ship /etc/hostname --topic notes --once --state notes.state",
        )
    )(ship)
