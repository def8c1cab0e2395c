"""`kmq produce`: send messages as blocks of lines, and report how many were sent or stored."""

import codecs
import itertools
import math
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kmq.access import tokens
from kmq.broker import status
from kmq.cli.elsewhere import elsewhere
from kmq.cli.output import counted, examples, grouped
from kmq.client.lines import STALL_S, LineSender, Patience, no_connection, read_port, say
from kmq.config.settings import Settings, load
from kmq.config.values import KIB
from kmq.errors import ConfigError, KmqError, RetryError
from kmq.message import record
from kmq.message.text import format_headers, format_message, make_routing_key
from kmq.sending.protocol import ERR, format_hello, read_greeting
from kmq.wire import refusals

if TYPE_CHECKING:
    from kmq.client.options import Choices
    from kmq.client.producer import Producer
    from kmq.sending.delivery import Delivery

_ASK_S = 1.0  # longest wait for the reply of ingress
_REPLY_S = 60.0  # longest wait for replies without --timeout
_BLOCK_BYTES = 64 * KIB
_JUDGED_BYTES = 64  # of stdin, to detect its encoding


class MessageOptions(NamedTuple):
    """The fields of each message besides its value."""

    key: Annotated[
        str | None, typer.Option("--key", help="The key of the messages, any text; the argument is then the topic.")
    ] = None
    header: Annotated[
        list[str] | None, typer.Option("--header", help="<name>=<value>, for each message; may be given several times.")
    ] = None
    tombstone: Annotated[
        bool, typer.Option("--tombstone", help="Send one message without a value: a compacted topic forgets the key.")
    ] = False


@grouped
def produce(
    routing_key: Annotated[str, typer.Argument(help="<topic> or <topic>.<key>; not with --raw.")] = "",
    message: Annotated[
        list[str] | None, typer.Option("--message", "-m", help="A payload; may be given several times.")
    ] = None,
    *,
    fields: MessageOptions,
    raw: Annotated[
        bool, typer.Option("--raw", help="Each line of stdin is a whole message: routing_key|producer_ts|id|payload")
    ] = False,
    acks: Annotated[
        bool,
        typer.Option("--acks", help="Wait until every message is on disk; send again after a broken connection."),
    ] = False,
    producer: Annotated[
        str,
        typer.Option(
            help="A producer name, which implies --acks: lines sent again under the same name are stored once."
            " With --raw the ids must be numbers."
        ),
    ] = "",
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="SECONDS",
            help="Give up when the broker has accepted nothing for this time. \\[default: never; 60 with --acks]",
        ),
    ] = None,
) -> None:
    """Send messages: one for each -m, or one for each line of stdin.

    Without --acks nothing confirms that a message was stored. While the
    broker accepts nothing, because its disk is full or a stage is stopped,
    the command waits and says why. To a broker elsewhere: kmq --host <host> produce …, always with acks.
    """
    settings = load()
    if raw == bool(routing_key):
        raise ConfigError("give a routing key, or --raw for lines with routing keys of their own")
    if raw and fields != MessageOptions():
        raise ConfigError("--key, --header and --tombstone are not for --raw, whose lines say all of that themselves")
    key, headers = _routing_key(routing_key, fields), _headers(fields.header or [])
    if fields.tombstone and message:
        raise ConfigError("--tombstone and -m exclude each other: a tombstone has no value")
    values = [None] if fields.tombstone else [os.fsencode(text) for text in message or []]
    acks = acks or bool(producer) or elsewhere() is not None
    patience = Patience(lambda: obstacle(settings), math.inf if acks or timeout is None else timeout)
    sender = _acknowledged(producer, bool(producer) or not raw, patience, timeout) if acks else None
    limit = sender.connect if sender is not None and elsewhere() else lambda: settings.max_line
    payloads: Iterable[Sequence[bytes | None]] = [values] if values else _read_blocks(sys.stdin.fileno(), limit)
    ids = map(b"%d".__mod__, itertools.count(1)) if acks else itertools.repeat(b"")
    blocks = _as_lines(payloads, key, headers, ids)
    shown = counted(blocks, "sending", len) if values or not sys.stdin.isatty() else blocks
    if sender is not None:
        print(_store(shown, sender, StoredTotals(patience), not raw))
    else:
        print(_send(shown, line_sender(settings, patience), settings.max_line))


def line_sender(settings: Settings, patience: Patience) -> LineSender:
    """Return a connection to the ingress of this broker, with a token if one is needed."""
    token = ""
    if settings.tokens:
        from kmq.access import tokens

        token = tokens.local(settings)
    return LineSender(settings.host, read_port(settings, "ingress", settings.port), token, patience)


# --- what to send ----------------------------------------------------------------------------------------------------


class LongLine(bytes):
    """The first bytes of a line of stdin that is over the limit. Its block holds no other line."""

    number: int
    length: int
    limit: int

    def __new__(cls, first: bytes, number: int, length: int, limit: int) -> "LongLine":
        line = super().__new__(cls, first)
        line.number, line.length, line.limit = number, length, limit
        return line

    def __str__(self) -> str:
        return f"line {self.number:,} has {self.length:,} bytes, and the limit is {self.limit:,} (KMQ_MAX_LINE)"

    def letter(self, head: bytes) -> "LongLine":
        """Return the dead letter for this line, which is sent after `head`."""
        first, room = head + self, self.limit - record.MALFORMED_OVERHEAD
        letter = record.malformed("too_long", first, len(head) + self.length, room) + b"\n"
        return LongLine(letter, self.number, self.length, self.limit)


def _read_blocks(fd: int, limit: Callable[[], int]) -> Iterator[list[bytes]]:
    """Yield the lines of `fd`, as many at a time as are available, so that a typed line is sent at once.

    Of a line over the limit only the first bytes are kept. `limit` is called only for lines longer than a block.
    """
    if os.isatty(fd):
        say("reading messages from the terminal, one per line; end with Ctrl-D")
    partial, length, number = bytearray(), 0, 1  # of a line whose newline has not arrived yet

    def line() -> bytes:
        if length > _BLOCK_BYTES and length > (most := limit()):
            return LongLine(bytes(partial[:most]), number, length, most)
        return bytes(partial)

    is_begun = False
    while data := os.read(fd, _BLOCK_BYTES):
        if not is_begun:
            _check_encoding(data)
            is_begun = True
        first, *others = data.split(b"\n")
        if length <= _BLOCK_BYTES or length <= limit():
            partial += first
        length += len(first)
        if not others:
            continue
        ended, rest = line(), others.pop()
        if isinstance(ended, LongLine):
            yield [ended]
        else:
            others.insert(0, ended)
            number -= 1
        if others:
            yield others
        partial, length, number = bytearray(rest), len(rest), number + 1 + len(others)
    if length:
        yield [line()]


def _check_encoding(data: bytes) -> None:
    """Judge the first bytes of stdin. Raises ConfigError for UTF-16 and UTF-32, whose lines do not end in one newline byte."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise ConfigError(
            "stdin: begins with the mark of UTF-16 or UTF-32, in which a newline is no line's end here;"
            " convert it: iconv -f UTF-16 -t UTF-8 <file> | kmq produce …"
        )
    if data.startswith(codecs.BOM_UTF8):
        say("stdin begins with a byte order mark (EF BB BF): it is sent as a part of the first line")
    elif len(start := data[:_JUDGED_BYTES]) >= _JUDGED_BYTES // 4 and 0 in start and _is_utf16(start):
        say(
            "stdin looks like UTF-16 without a mark: each NUL is sent as a part of its line; iconv -t UTF-8 converts it"
        )


def _is_utf16(start: bytes) -> bool:
    """Return True if every second byte is NUL and no other is, as in English text."""
    return any(not any(start[place::2]) and all(start[1 - place :: 2]) for place in (0, 1))


def _routing_key(given: str, fields: MessageOptions) -> bytes:
    """Return the routing key of the messages; b"" for whole lines. Raises ConfigError."""
    if given.partition(".")[0] == record.MALFORMED.partition(b".")[0].decode():
        say("topic dead is where the broker keeps lines that are no messages: these messages will stand among them")
    if fields.key is not None:
        try:
            return make_routing_key(given, os.fsencode(fields.key))
        except ValueError as err:
            raise ConfigError(f"with --key the argument is the topic; {err}") from None
    if fields.tombstone and "." not in given:
        raise ConfigError("--tombstone needs --key, the key that a compacted topic is to forget")
    found = os.fsencode(given)
    if found and (reason := record.key_refusal(found)):
        raise ConfigError(f"routing key {given!r}: {refusals.of_key(reason)}")
    return found


def _headers(given: list[str]) -> bytes:
    """Return the headers in the form of a line's field. Raises ConfigError."""
    pairs = []
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise ConfigError(f"--header {each!r}: must be <name>=<value>")
        pairs.append((name, os.fsencode(value)))
    return format_headers(pairs)


def _as_lines(
    payloads: Iterable[Sequence[bytes | None]], key: bytes, headers: bytes, ids: Iterator[bytes]
) -> Iterator[list[bytes]]:
    """Yield whole lines: the payloads under `key`, or without a key payloads that are whole messages already."""
    for block in payloads:
        if isinstance(block[0], LongLine):
            yield [block[0].letter(format_message(key, None, next(ids) + headers)[:-1] if key else b"")]
        elif key:
            yield [format_message(key, payload, next(ids) + headers) for payload in block]
        else:
            yield [(payload or b"") + b"\n" for payload in block]


# --- without and with replies ----------------------------------------------------------------------------------------


def _malformed(block: list[bytes], max_line: int) -> list[str]:
    """Return the faults of lines that are stored as dead letters, because nothing else reports them."""
    if isinstance(block[0], LongLine):
        return [str(block[0])]
    data = b"".join(block)
    if len(data) <= max_line and b".@" not in data and record.good_prefix(data) == len(data):
        return []
    reasons = ((line, record.refusal(line[:-1]) or ("too_long" if len(line) - 1 > max_line else "")) for line in block)
    return [f"{line[:80]!r}: {refusals.find(reason).text}" for line, reason in reasons if reason]


def _send(blocks: Iterable[list[bytes]], sender: LineSender, max_line: int) -> str:
    """Send whole lines without acknowledgement, each block as soon as it is available. Raises KmqError for dead letters."""
    malformed, first = 0, ""
    try:
        with sender:
            for block in blocks:
                wrong = _malformed(block, max_line)
                malformed, first = malformed + len(wrong), first or "".join(wrong[:1])
                for line in block:
                    sender.send(line)
                sender.flush()
    except KeyboardInterrupt:
        say(f"interrupted: {sender.outcome()}")
        raise
    except RetryError as err:
        raise RetryError(f"{err}; {sender.outcome()}") from err
    if malformed:
        text = f"{malformed} of them are no messages, so they went to dead.malformed; the first: {first}"
        raise KmqError(f"sent {sender.sent}; {text}")
    return f"sent {sender.sent}"


class StoredTotals:
    """The sum of all replies. `before`: messages that were stored when this command began."""

    def __init__(self, patience: Patience) -> None:
        self.given = self.count = self.before = self.refused = self.last_seq = 0
        self.error: KmqError | None = None  # the first error
        self._patience = patience

    def add(self, sender: "Producer", lines: Sequence[bytes], delivery: "Delivery") -> None:
        """Add the replies to `lines`. A producer with a generated name has no earlier messages.

        Lines that a broken connection had stored are duplicates too, but have higher ids than the last one at the
        start.
        """
        if delivery.answered:
            self._patience.moved()
        repeated = (lines[place].split(b"|", 3)[2].partition(b";")[0] for place, _ in delivery.duplicates if lines)
        before = sum(int(id) <= sender.last_id for id in repeated)
        self.error = self.error or delivery.error
        self.before += before
        self.refused += len(delivery.refused)
        self.count += delivery.answered - len(delivery.refused) - before
        self.last_seq = max([self.last_seq, delivery.seq, *(seq + count - 1 for _, seq, count in delivery.runs)])

    def refuse(self, line: LongLine) -> None:
        """Count a line that is not sent."""
        self.refused += 1
        self.error = self.error or KmqError(str(line))

    def __str__(self) -> str:
        before = f", {self.before:,} were stored before under this name" if self.before else ""
        return f"stored {self.count}{before}, last seq {self.last_seq}"

    def outcome(self) -> str:
        """Return str(self) with the number of messages that have no reply yet."""
        left = self.given - self.count - self.before - self.refused
        return f"{self}; {left} without a reply, which may or may not be stored"


def _store(blocks: Iterable[list[bytes]], sender: "Producer", stored: StoredTotals, is_numbered: bool) -> StoredTotals:
    """Send whole lines that have ids, and wait until they are stored. Raises KmqError naming the first refusal.

    `is_numbered`: the ids are line numbers, so the last id tells how many lines were sent under this name before.
    """
    from kmq.sending.failures import NotAnswered

    try:
        with sender:
            for block in _limited(blocks):
                stored.given += len(block)
                if isinstance(block[0], LongLine):
                    stored.refuse(block[0])
                    continue
                lines = block if sender.options.producer else ()
                sender.send_lines(b"".join(block), callback=partial(stored.add, sender, lines))
    except KeyboardInterrupt:
        say(f"interrupted: {stored.outcome()}")
        raise
    except NotAnswered as err:
        raise RetryError(f"{err}; {stored.outcome()}") from err
    if stored.error is not None:
        raise KmqError(f"{stored}; {stored.refused} refused, the first: {stored.error}")
    if stored.before and not stored.count:
        _check_repeat(stored, sender.last_id if is_numbered else 0)
    return stored


def _check_repeat(stored: StoredTotals, last_id: int) -> None:
    """Warn that no line was new. Raises KmqError if fewer lines were given than were sent under this name before.

    A file that is sent again after a crash has no fewer lines, and that is a success: all of it is stored. Fewer lines
    are other lines, and would be lost. If there are as many other lines, the broker detects them: it knows the contents
    of the last ids.
    """
    if stored.given < last_id:
        raise KmqError(
            f"{stored}; {last_id:,} lines were sent under this name before, and these are {stored.given:,}, so they are not"
            " the same again; new lines need another --producer"
        )
    say("not one line was new; new lines need another --producer")


def _acknowledged(producer: str, dedupe: bool, patience: Patience, timeout_s: float | None) -> "Producer":
    """Return the producer for --acks. A named one asks for the last id of its name."""
    return open_producer(
        {
            "producer": producer,
            "dedupe": dedupe,
            "timeout_s": _REPLY_S if timeout_s is None else timeout_s,
            "stall_s": STALL_S,
            "on_stall": say if elsewhere() else lambda _: patience.stalled(),
        }
    )


def open_producer(options: "Choices") -> "Producer":
    """Return a producer for the broker of this command: that of this directory, or one elsewhere."""
    from kmq.client.producer import Producer

    if (there := elsewhere()) is None:
        return Producer.local(**options)
    options |= {"token": there.token, "tls": there.tls}
    return Producer(there.host, there.lines_in, **options)


def _limited(blocks: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield the same lines in the same order, in blocks not much larger than `_BLOCK_BYTES`."""
    for lines in blocks:
        block: list[bytes] = []
        size = 0
        for line in lines:
            block.append(line)
            size += len(line)
            if size >= _BLOCK_BYTES:
                yield block
                block, size = [], 0
        if block:
            yield block


# --- why nothing is accepted -----------------------------------------------------------------------------------------
# As far as a producer can find out: from the stats page, or by connecting to ingress.


def obstacle(settings: Settings) -> str:
    """Return why the broker accepts no messages, as far as this process can see."""
    return (_is_here(settings.host) and _of_stages(settings)) or _of_greeting(settings)


def _is_here(host: str) -> bool:
    """Return True for an address of this machine: the stats page says nothing about a broker elsewhere."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True


def _of_stages(settings: Settings) -> str:
    try:
        found = status.collect(settings)
    except (OSError, KmqError):  # the stats page belongs to another user
        return ""
    reasons = found.verdict.reasons if found.stages else []  # without stages the page belongs to another broker
    return "; ".join(f"{reason}; {reason.advice}" for reason in reasons)


def _of_greeting(settings: Settings) -> str:
    """Return the reply of ingress to a new connection: the reason if ingress refuses messages."""
    where = settings.host
    try:
        port = read_port(settings, "ingress", settings.port)
        where = f"{settings.host}:{port}"
        token = tokens.local(settings) if settings.tokens else ""
        with socket.create_connection((settings.host, port), timeout=_ASK_S) as sock:
            sock.sendall(format_hello(token=token))
            verb, refusal = read_greeting(sock.recv(4096))
    except TimeoutError:
        return f"{where} does not answer: the disk there may be full, or a stage stopped; see kmq status there"
    except (OSError, KmqError) as err:
        return no_connection(where, err)
    if verb == ERR:
        return f"it refuses messages: {refusal}"
    return "it is up, but slow, or one of its stages is stopped; see kmq status there"


def add_to(app: typer.Typer) -> None:
    """Add this command to `kmq`."""
    app.command(
        epilog=examples(
            "kmq produce test.probe -m hello",
            "kmq produce notes.host < /etc/hostname",
            "printf 'test.probe|0|1|hi\\n' | kmq produce --raw",
            "seq 1 1000 | kmq produce invoices --producer import-7",
            "kmq produce users --key u7 --header source=crm -m 'Ada'",
            "kmq produce users --key u7 --tombstone",
        )
    )(produce)
