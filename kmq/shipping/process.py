"""The process of `kmq ship`: it sends each line of the followed log files once, as a message, whatever is killed.

The line `user 17 logged in` of /var/log/app.log becomes `app|1760000000.123456|4711|user 17 logged in`. 4711 is its id.

    look at the files → plan → save the plan → send → all acknowledged → look …

Looking     New, renamed and deleted files are found, held open (finding.py) and saved in the state, also while sending
            waits for the broker. Bytes that are lost nevertheless are counted and reported, and the exit code is not 0.
Ids         A state has one producer name, made with it. Ids are numbers that only rise. A round (the lines sent
            together) is planned before it is sent: which bytes of which files have which ids. So the broker's last id
            of the name tells how much of the plan is stored. (A name for each file would need a connection for each
            file, and an entry among KMQ_PRODUCERS with every rotation.)
Invariant   A line is sent only after a state with the line in its plan is on disk. The next plan is saved only after
            the whole round is acknowledged. So unacknowledged ids always belong to one plan: the one in the state.
Crash       Of ship: the next run asks for the last id (`last=?`, which fences the old connection and waits for the
            lines it has sent), skips that many lines of the plan, and plans anew. Of the broker: kmq.Producer sends the
            same lines again with the same ids. Of the machine: the state is replaced atomically and synced before a
            line is sent. If the broker has forgotten the name, lines of one round may be stored twice, and ship says
            so. If the broker has later ids than the state accounts for, the state is an old copy: ship ends with 65.
Locking     `<state>.lock` is held while ship runs. A second ship ends with 69 and names the holder.
Memory      A round has at most _ROUND_BYTES plus the block that reaches that limit. finding.py bounds the rest.
Not covered The broker refuses a line but stores later lines of the same round, for example because the topic is
            declared at that moment, or a broker restarts with a smaller KMQ_MAX_LINE. The line is reported and not sent
            again.
"""

import contextlib
import math
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING

from rich.console import Console

from kmq.client.lines import STALL_S, Patience, say
from kmq.config.values import MIB
from kmq.errors import ConfigError, CorruptError, KmqError, RetryError
from kmq.message import record
from kmq.message.text import make_routing_key
from kmq.shipping.files import FileBlock, LogFile
from kmq.shipping.finding import (
    LINGER_S,
    MOST_FILES,
    FollowedFiles,
    count_unread,
    forget_ended,
    has_ended,
    hold,
    is_away,
    look,
    make_ready,
    refuse,
)
from kmq.shipping.state import ShipState, load_state, locked, naming, save_state

if TYPE_CHECKING:
    from kmq.client.options import Choices
    from kmq.client.producer import Producer

_LOOK_S = 0.25  # between two looks at the files; longer if a look takes long
_LOOK_SHARE = 20  # a look takes at most 1/20 of the time
_TICK_S = 0.5  # longest wait before signals are noticed
_ROUND_BYTES = 4 * MIB
_ROUND_LINES = 50_000
_REPORT_S = 60.0  # between two reports on stderr; a terminal is redrawn with each round
_GROWTH_S = 5.0  # while sending waits, file sizes in the state are at most this old
_GRACE_S = 5.0  # how long ship goes on sending after it was told to stop
_FIELDS = 64  # bytes of a line besides topic and payload: time, id, header, separators


@dataclass
class Shipment:
    """One run of ship: its state file, the files that it follows, and counts of what it has sent."""

    path: str  # of the state
    name: str
    topic: str
    next_id: int
    watched: FollowedFiles
    is_once: bool
    stop: threading.Event
    patience: Patience
    open_producer: "Callable[[Choices], Producer]"
    is_elsewhere: bool = False  # the broker has another data directory than this command
    clock: Callable[[], float] = time.monotonic
    ends_at: float = math.inf
    look_at: float = 0.0  # when the files are looked at next
    saved: int = -1  # value of `watched.changes` at the last save
    saved_at: float = 0.0
    saved_size: int = 0  # sum of all file sizes in the saved state
    max_line: int = MIB
    lines: int = 0
    bytes: int = 0
    too_long: int = 0
    with_nul: int = 0
    nuls_skipped: int = 0
    noted: set[tuple[str, int]] = field(default_factory=set)  # (kind, inode) of odd lines that were reported


def run(work: Shipment, from_start: bool) -> None:
    """Send lines until all are sent (--once) or `stop` is set, then print the totals."""
    with locked(work.path):
        _begin(work, from_start)
        try:
            with _connected(work) as producer:
                if producer is not None:
                    _settle(work, producer.last_id)
                    with _progress(work.clock) as show:
                        _follow(work, producer, show)
                _save(work)
        finally:
            count_unread(work.watched)
            for file in work.watched.files:
                file.close()
            print(_totals(work), flush=True)


# --- the state -------------------------------------------------------------------------------------------------------


def _save(work: Shipment) -> None:
    with naming(work.path):
        save_state(work.path, ShipState(work.name, work.topic, work.next_id, work.watched.files))
    work.saved, work.saved_at, work.saved_size = work.watched.changes, work.clock(), _size(work)


def _size(work: Shipment) -> int:
    return sum(file.size for file in work.watched.files)


def _save_plan(work: Shipment) -> bool:
    """Save the planned round. If the disk is full, wait for space. Return False if told to stop first."""
    while True:
        try:
            _save(work)
            return True
        except RetryError as full:
            if work.is_once:
                raise
            _note(work, work.path, 0, f"waits for room: {full}")
        work.stop.wait(_LOOK_S)
        if work.stop.is_set():
            _end_soon(work)
        if work.clock() >= work.ends_at:
            return False
        _look(work, work.clock())


def _look(work: Shipment, now: float) -> bool:
    """Look at the files if it is time, and open those with unread bytes. Return False if it is not time."""
    if now < work.look_at:
        return False
    look(work.watched)
    forget_ended(work.watched, 0.0 if work.is_once else LINGER_S)
    hold(work.watched)
    work.look_at = now + max(_LOOK_S, _LOOK_SHARE * (work.clock() - now))
    return True


def _look_meanwhile(work: Shipment) -> None:
    """Look at the files while sending waits, and save files that are new, renamed, gone or larger in the state."""
    if not _look(work, work.clock()):
        return
    is_older = work.clock() - work.saved_at >= _GROWTH_S and work.saved_size != _size(work)
    if is_older or work.saved != work.watched.changes:
        with contextlib.suppress(RetryError):  # disk full: the state on disk still has the current plan
            _save(work)


def _begin(work: Shipment, from_start: bool) -> None:
    """Read the state, or make the first one. The first state says where the files that exist now begin."""
    with naming(work.path):
        state = load_state(work.path)
    if state is None:
        work.name = f"ship-{token_hex(8)}"
        for file in look(work.watched):
            if not from_start and make_ready(work.watched, file):
                file.start_at_end()
        _save(work)
        return
    if state.topic != work.topic:
        raise ConfigError(f"--state {work.path}: belongs to topic {state.topic}; give each topic a state of its own")
    work.name, work.next_id, work.watched.files[:] = state.name, state.next_id, state.files
    look(work.watched)
    hold(work.watched)


def _settle(work: Shipment, last_id: int) -> None:
    """Mark the lines of the plan as stored whose ids the broker knows. Raises CorruptError if the state is an old
    copy.
    """
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
    for file in list(files):
        here = min(max(stored, 0), file.lines)
        stored -= here
        is_ready = here == file.lines or make_ready(work.watched, file)
        if here and not is_ready and (file.path in work.watched.refused or is_away(file)):
            raise ConfigError(
                f"{file.path}: cannot be read, and a part of its lines was sent; mount its directory, or make it readable"
            )
        file.take_back(here)
    work.next_id = max(before, last_id) + 1  # ids only rise: another broker may know later ones


# --- sending ---------------------------------------------------------------------------------------------------------


@contextmanager
def _connected(work: Shipment) -> "Iterator[Producer | None]":
    """Yield a producer as soon as the broker answers. Yield None if told to stop before that."""
    from kmq.sending.failures import NotAnswered

    with contextlib.ExitStack() as stack:
        producer, answered = None, False
        while not (answered or work.stop.is_set()):
            try:
                if producer is None:
                    producer = work.open_producer(
                        {"producer": work.name, "stall_s": STALL_S, "on_stall": lambda _: work.patience.stalled()}
                    )
                    stack.callback(producer.abort)
                work.max_line = producer.connect(_TICK_S)
                work.patience.moved()
                answered = True
            except NotAnswered:
                work.patience.stalled()
                _look_meanwhile(work)
            except ConfigError:  # the settings are right, but a file that the broker writes when it starts is missing
                if producer is not None or work.is_elsewhere:  # a broker elsewhere has no files here
                    raise
                work.patience.stalled()
                work.stop.wait(_TICK_S)
                _look_meanwhile(work)
        yield producer if answered else None


def _follow(work: Shipment, producer: "Producer", show: Callable[[str], None]) -> None:
    """Send lines as they arrive. When told to stop, send what is there by then, for at most _GRACE_S."""
    watched, is_fresh, before = work.watched, False, (work.clock(), 0)
    while (began := work.clock()) < work.ends_at:
        if work.stop.is_set() and work.ends_at == math.inf:
            _end_soon(work)
            work.look_at = 0.0
        is_fresh |= _look(work, began)
        if began - before[0] >= 1:
            show(f"{_totals(work)}, {(work.lines - before[1]) / (began - before[0]):,.0f} lines/s{_behind(work)}")
            before = began, work.lines
        work.max_line = producer.connect(_TICK_S)  # a restarted broker may have another limit
        if lines := _plan(work):
            is_fresh = False
            watched.changes += 1  # the plan is new, so the state has to be saved again
            if not _save_plan(work) or not _send(work, producer, lines):
                return
            watched.changes += 1
            continue
        if work.saved != watched.changes and not _save_plan(work):
            return
        if not work.is_once and not work.stop.is_set():
            work.stop.wait(max(0.0, work.look_at - work.clock()))
        elif is_fresh and not any(file.has_more and file.path not in watched.refused for file in watched.files):
            return
        else:
            work.look_at = 0.0


def _end_soon(work: Shipment) -> None:
    """Set the time to end. The grace is for an application that ended before its sidecar and has just written its
    last lines.
    """
    if work.ends_at == math.inf:
        work.ends_at = work.clock() + (0.0 if work.is_once else _GRACE_S)


def _plan(work: Shipment) -> bytes:
    """Return the lines of the next round as they are sent, or b"". Each file notes which of its bytes are in the
    round.
    """
    watched, parts, size, count = work.watched, [], 0, 0
    longest = work.max_line - len(work.topic) - _FIELDS
    unfinished: set[str] = set()  # origins with an older file that may have more lines
    first: dict[str, int] = {}
    for at, file in enumerate(watched.files):
        first.setdefault(file.origin, at)
    # The state lists the files in the order of sending. After a rotation, older files of the same origin come first.
    watched.files.sort(key=lambda file: (first[file.origin], file.born))
    for file in watched.files:
        is_final = not work.is_once and file.unread > 0 and has_ended(file)
        if file.origin in unfinished or not (file.has_more or is_final):
            continue
        try:
            block = file.read(longest, is_final) if make_ready(watched, file) else None
        except OSError as err:  # a failing disk, or an unreachable file server
            refuse(watched, file.path, f"is not read: {err.strerror}")
            block = None
        if file.has_more and file.path not in watched.refused:
            unfinished.add(file.origin)
        if file.skipped:
            work.nuls_skipped += file.skipped
            _note(
                work,
                file.path,
                file.inode,
                f"begins with {file.skipped:,} NUL bytes of a writer without O_APPEND: skipped",
            )
            file.skipped = 0
        if block is None:
            continue
        watched.refused.pop(file.path, None)
        parts.append(_format(work, file, block, work.next_id + count, longest))
        size, count = size + len(parts[-1]), count + file.lines
        if size >= _ROUND_BYTES or count >= _ROUND_LINES:
            break
    return b"".join(parts)


def _format(work: Shipment, file: LogFile, block: FileBlock, first_id: int, longest: int) -> bytes:
    """Return the messages of a block. A line that is too long becomes a dead letter with the first bytes of the
    line.
    """
    stamp = b"%.6f" % time.time()
    head = b"%b|%b|" % (make_routing_key(work.topic), stamp)
    if max(map(len, block.lines)) <= longest and block.length is None:
        text = b"".join(
            [
                b"%b%d|%b\n" % (head, id, line) if line else b"%b%d;enc=b64|\n" % (head, id)  # empty without enc: null
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
            _note(work, file.path, file.inode, "has lines with NUL bytes, which are sent as base64 (enc=b64)")
        if block.length or len(payload) > longest:
            length = block.length or len(line)
            work.too_long += 1
            letter = record.long_letter(work.topic, line, length, work.max_line)
            rows.append(letter.replace(b"||", b"|%b|%d" % (stamp, id), 1) + b"\n")
            _note(
                work,
                file.path,
                file.inode,
                f"has a line of {length:,} bytes, too long for KMQ_MAX_LINE: its start is a dead letter",
            )
        else:
            rows.append(b"%b%d%b|%b\n" % (head, id, header, payload))
    return b"".join(rows)


def _note(work: Shipment, path: str, inode: int, what: str) -> None:
    """Report something odd, once for each file and kind."""
    kind = what[:12], inode
    if kind not in work.noted and len(work.noted) < MOST_FILES:
        work.noted.add(kind)
        say(f"{path} {what}")


def _send(work: Shipment, producer: "Producer", lines: bytes) -> bool:
    """Send a round and wait until it is stored. Return False if told to stop before that. Raises KmqError."""
    from kmq.sending.failures import NotAnswered, Refused

    delivery = producer.send_lines(lines)
    while not delivery.done:
        try:
            delivery.result(_TICK_S)
        except NotAnswered:
            _look_meanwhile(work)
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
    # If not all files fit into one round, the next round begins with the other files.
    work.watched.files[:] = [file for file in work.watched.files if file not in moved] + moved
    return True


def _refusal(work: Shipment, places: Iterable[int], refused: Exception) -> str:
    """Return a text that names the first refused line, and says whether the next start sends it again."""
    if not (wrong := sorted(places)):  # no line: the whole connection was refused
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
    """Yield a function that shows a progress text: on a terminal it replaces the last text, else it prints once a
    minute.
    """
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
        "NUL bytes skipped": work.nuls_skipped,
        "compressed files left out": len(watched.compressed),
        "deleted files let go": watched.let_go,
        "bytes lost": watched.lost,
    }
    counts = "".join(f", {count:,} {what}" for what, count in odd.items() if count)
    count = sum(file.gone_at is None for file in watched.files)
    return f"{count:,} files, sent {work.lines:,} lines, {work.bytes:,} bytes{counts}"


def _behind(work: Shipment) -> str:
    left = sum(max(0, file.size - file.offset) for file in work.watched.files if not file.is_compressed)
    return f", {left:,} bytes behind"
