"""Intakes: ports where each raw line is a message of one topic (KMQ_INTAKES), for programs that can only send lines.

    a line                    app|||<line>
        one with a NUL, or empty  app||;enc=b64|<base64>    as typed clients write it: a message has no NUL, and an
        empty
                                                            payload would be null
        over KMQ_MAX_LINE         dead.malformed with reason=too_long, its length, the topic, and its first bytes; the
        no newline at the end     rest is skipped. With reason=no_newline: it may have been cut. The limit is of the
        message not a JSON value          dead.malformed with reason=not_json and the line, if the entry ends with
        `:json`

The head is put before all lines of a receive at once, here, so the framer and all later stages see ordinary messages.
A datagram is one or more lines. The last one may lack its newline, or end in NUL.

Framing     The first bytes of a connection say how its messages end: with a newline; after a count of octets (RFC
            6587), `<digits> <`; or in NUL, as those of Python's SysLogHandler and of GELF. See `framing_of`. A message
            with a newline in it, which only the latter two can have, is stored as base64.
Invariant   A line never names a topic: the head does, and ends before the line. A topic with a dot in its name
            has a mark (`app.web.@`), so that no other declared topic changes the meaning of the head.
            With KMQ_INTAKES_FROM, data from any other address is refused. Intakes never reply.
Memory      A receive is so small that its messages take at most _WRAPPED_BYTES even if it is all newlines. The
            datagrams of a turn have the same limit, except for the last one. A JSON line is checked by parsing it
            alone, which briefly takes up to about 30 times its bytes.
Not covered Datagrams: the kernel drops those that ingress does not read in time, and all while messages are refused.
            They are counted. The address of a datagram is the one that its sender claims. A first message that ends in
            NUL and begins neither as syslog nor as JSON waits for the next one, or the end. A first line of syslog or
            JSON with a NUL in it is taken to end there if no later byte has arrived yet.
"""

import os
import re
import socket
import struct
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from kmq.config.intakes import UDP, IntakePort, is_among
from kmq.config.settings import Settings
from kmq.config.values import KIB, MIB
from kmq.errors import ConfigError
from kmq.message import record

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from json import JSONDecoder

    from kmq.config.intakes import Network

_WRAPPED_BYTES = 2 * MIB
LEAST_BYTES = 16 * KIB  # of a receive: a TLS record fits (kmq/broker/tls.py)
_SO_MEMINFO, _DROPS = 55, 8  # socket(7); which of the numbers says how many datagrams were dropped
_MEMINFO = struct.Struct("9I")
_DATAGRAM = 64 * KIB
_TURN_DATAGRAMS, _TURN_BYTES = 512, 256 * KIB  # read in a turn
_MOST_LEVELS = 500  # of a JSON value: every Python parses so many, from about 1,000 (3.11) to 10,000 (3.13)
_MOST_ADDRESSES = 4096  # addresses that are remembered as allowed or not

Part = bytes | bytearray | memoryview


class RawPort:
    """One intake: the head of its lines, and its counters."""

    def __init__(self, spec: IntakePort, max_line: int, sock: socket.socket) -> None:
        topic = spec.topic.encode()
        self.spec, self.sock = spec, sock
        self.port: int = sock.getsockname()[1]
        self.head = topic + (b".@|||" if b"." in topic else b"|||")
        self.encoded = self.head[:-1] + b";enc=b64|"
        self.between = b"\n" + self.head
        self.nothing, self.empty = self.between + b"\n", b"\n" + self.encoded + b"\n"  # an empty line
        self.with_nul = re.compile(re.escape(self.between) + rb"([^\n\0]*+\0[^\n]*+)")
        self.max_message, self.max_line = max_line, max_line - len(self.head)
        self.json = _json_decoder() if spec.is_json else None
        longest = letter(self, "not_json", b"", 0) if self.json else self.encoded + b"\n"  # of an empty line
        self.receive_bytes = max(LEAST_BYTES, min(self.max_line, _WRAPPED_BYTES // len(longest)))
        self.lines = self.bytes = self.connections = self.refused = 0
        self.wrong = 0  # lines that became dead letters
        self.may_send: dict[str, bool] = {}  # address → whether it may send


def check_topics(settings: Settings) -> None:
    """Raise ConfigError for an intake of an undeclared topic, if messages may not create topics."""
    if settings.auto_create_topics == "on":
        return
    for spec in settings.intakes:
        if spec.topic != "dead" and not os.path.isdir(f"{settings.data}/topics/{spec.topic}"):
            raise ConfigError(
                f"KMQ_INTAKES: {spec}: there is no topic {spec.topic}, and KMQ_AUTO_CREATE_TOPICS is off; declare it first:"
                f" kmq topics create {spec.topic}"
            )


# --- lines -----------------------------------------------------------------------------------------------------------


def messages(raw: RawPort, parts: Sequence[Part], most: int) -> Iterator[list[Part]]:
    """Yield messages for whole lines, as pieces (`_cut`). Dead letters of lines that are not JSON come before them."""
    if raw.json is not None:
        parts, wrong = split_json(raw.json, parts)
        yield from _letters(raw, wrong, most)
    yield from _wrapped(raw, parts, most)


def _wrapped(raw: RawPort, parts: Sequence[Part], most: int) -> Iterator[list[Part]]:
    """Yield the messages of whole lines as pieces; count the lines."""
    lines = b"".join((b"\n", *parts))  # with a newline before each line and after the last
    text = lines[:-1].replace(b"\n", raw.between) + b"\n"
    raw.bytes += len(lines) - 1
    raw.lines += (len(text) - len(lines)) // len(raw.head)
    if text.rfind(raw.nothing) >= 0:  # found sooner from the end: its first byte is rarer than its last ones
        for _ in range(2):  # twice, because two matches in a row share the newline between them
            text = text.replace(raw.nothing, raw.empty)
    if 0 in lines:
        text = raw.with_nul.sub(partial(_encoded, raw), text)
    yield from _cut(text, 1, most)


def _cut(text: bytes, done: int, most: int) -> Iterator[list[Part]]:
    """Yield whole lines, from `done` on, as pieces of at most `most` bytes, or one line."""
    while done < len(text):
        end = len(text) if len(text) - done <= most else text.rfind(b"\n", done, done + most) + 1
        yield [memoryview(text)[done:end]]
        done = end


def _json_decoder() -> "JSONDecoder":
    """Return a decoder that also refuses NaN and the like, and integers of over 4,300 digits, as Python and HTTP do."""
    from json import JSONDecoder  # only if there is such an intake

    def refuse(name: str) -> None:
        raise ValueError(name)

    return JSONDecoder(parse_constant=refuse)


def split_json(decoder: "JSONDecoder", parts: Sequence[Part]) -> tuple[Sequence[Part], list[bytes]]:
    """Return the lines that are one JSON value each, and the lines that are not."""
    lines, decode, wrong = b"".join(parts)[:-1].split(b"\n"), decoder.raw_decode, []
    for at, line in enumerate(lines):
        try:
            text = line.decode().strip(" \t\r")
            if text and decode(text)[1] == len(text) and (len(text) <= 2 * _MOST_LEVELS or not _is_deep(line)):
                continue
        except (ValueError, RecursionError):
            pass
        wrong.append(at)
    if not wrong:
        return parts, []
    left_out = set(wrong)
    return [line + b"\n" for at, line in enumerate(lines) if at not in left_out], [lines[at] for at in wrong]


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _is_deep(value: bytes) -> bool:
    """Return True if a JSON value has more than _MOST_LEVELS levels."""
    if value.count(b"[") + value.count(b"{") <= _MOST_LEVELS:
        return False
    brackets = _STRING.sub(b"", value).translate(None, _NO_BRACKETS)
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0) > _MOST_LEVELS


def _letters(raw: RawPort, lines: list[bytes], most: int) -> Iterator[list[Part]]:
    """Yield the dead letters of lines that are not JSON, as pieces; count the lines."""
    raw.lines += len(lines)
    raw.wrong += len(lines)
    raw.bytes += sum(map(len, lines)) + len(lines)
    yield from _cut(b"".join([letter(raw, "not_json", line, len(line)) for line in lines]), 0, most)


def _encoded(raw: RawPort, match: "re.Match[bytes]") -> bytes:
    """Return the message of a line with a NUL. It has a newline at each end, which belongs to other lines."""
    line = match[1]
    payload = b2a_base64(line, newline=False)
    if len(raw.encoded) + len(payload) > raw.max_message:
        return b"\n" + letter(raw, "too_long", line, len(line))[:-1]
    return b"\n%b%b" % (raw.encoded, payload)


def letter(raw: RawPort, reason: str, line: bytes, length: int) -> bytes:
    """Return the message of topic `dead` that keeps the beginning of a line, with its newline."""
    topic = b";topic=" + raw.spec.topic.encode()
    return record.malformed(reason, line, length, raw.max_line, topic) + b"\n"


def dead_letter(raw: RawPort, reason: str, line: bytes, length: int) -> Iterator[list[Part]]:
    """Yield the dead letter of one line; count it."""
    raw.lines += 1
    raw.wrong += 1
    raw.bytes += length + 1
    yield [letter(raw, reason, line, length)]


# --- framing ---------------------------------------------------------------------------------------------------------

UNKNOWN, LINES, COUNTED, NULS = range(4)
_COUNT, _MAY_COUNT = re.compile(rb"([1-9]\d{0,8}) <"), re.compile(rb"[1-9]\d{0,8} ?")
_HEAD, _MAY_BE_HEAD = re.compile(rb"([1-9]\d{0,8}) "), re.compile(rb"[1-9]\d{0,8}")
_NEXT = re.compile(rb"\0[<{]")
_LINE = -1


def framing_of(start: bytes) -> int:
    """Return how the messages of a connection end, from all bytes sent so far. UNKNOWN: more bytes are needed.

    A NUL before the first newline may be part of a line. It ends a message if the connection begins as syslog or JSON,
    and either another one begins after it or no byte has come yet. Other connections need two NUL bytes and no newline.
    """
    if _COUNT.match(start):
        return COUNTED
    if _MAY_COUNT.fullmatch(start):
        return UNKNOWN
    is_shaped, has_newline = start[:1] in (b"<", b"{"), b"\n" in start
    if 0 in start:
        if is_shaped and (start.endswith(b"\0") or _NEXT.search(start)):
            return NULS
        if not has_newline and start.count(0) > 1 and start.endswith(b"\0"):
            return NULS
    return LINES if has_newline else UNKNOWN


class Frames:
    """Messages of a connection that are not lines: finds where each ends.

    COUNTED: `left` bytes of the message are still to come; 0: its count is next; _LINE: it has no count, and ends with
    a newline.
    """

    __slots__ = ("is_counted", "left", "length")

    def __init__(self, is_counted: bool) -> None:
        self.is_counted = is_counted
        self.left = 0
        self.length = 0  # of the unfinished message, with the bytes that are not kept

    def feed(self, partial: bytearray, data: bytes, most: int) -> list[tuple[bytes, int]]:
        """Return the messages that end in `data`, each cut to `most` + 1 bytes, with its length.

        `partial`: the kept bytes of the unfinished message.
        """
        found: list[tuple[bytes, int]] = []
        if self.is_counted:
            self._feed_counted(partial, data, most, found)
        else:
            *ends, rest = data.split(b"\0")
            for part in ends:
                self._append(partial, part, most)
                found.append(self._end(partial))
            self._append(partial, rest, most)
        return found

    def _feed_counted(self, partial: bytearray, data: bytes, most: int, found: list[tuple[bytes, int]]) -> None:
        at = 0
        while at < len(data):
            if not self.left:
                if not partial and data[at] in b"\n\r\0":  # after a count that does not include the end
                    at += 1
                    continue
                head = bytes(partial) + data[at : at + 11]
                if match := _HEAD.match(head):
                    at += match.end() - len(partial)
                    self.left, self.length = int(match[1]), 0
                    partial.clear()
                elif _MAY_BE_HEAD.fullmatch(head):
                    partial[:], self.length = head, len(head)
                    return
                else:
                    self.left = _LINE
            elif self.left == _LINE:
                newline = data.find(b"\n", at)
                stop = len(data) if newline < 0 else newline
                self._append(partial, data[at:stop], most)
                at = stop + 1
                if newline >= 0:
                    found.append(self._end(partial))
            else:
                part = data[at : at + self.left]
                at += len(part)
                self.left -= len(part)
                self._append(partial, part, most)
                if not self.left:
                    found.append(self._end(partial))

    def _append(self, partial: bytearray, part: bytes, most: int) -> None:
        partial += part[: max(0, most + 1 - len(partial))]
        self.length += len(part)

    def _end(self, partial: bytearray) -> tuple[bytes, int]:
        frame, length = bytes(partial), self.length
        partial.clear()
        self.left = self.length = 0
        if len(frame) == length:
            frame = trimmed(frame)
            length = len(frame)
        return frame, length


def trimmed(frame: bytes) -> bytes:
    """Return a frame without its end: NUL bytes, and one newline before or after them."""
    frame = frame.rstrip(b"\0")
    return frame[:-1].rstrip(b"\0") if frame.endswith(b"\n") else frame


def framed(raw: RawPort, frames: Iterable[tuple[bytes, int]], most: int) -> Iterator[list[Part]]:
    """Yield the stored messages for messages that are not lines, as pieces, in order. Each frame has its length."""
    lines: list[Part] = []
    for frame, length in frames:
        if length <= raw.max_line and b"\n" not in frame:
            lines.append(frame + b"\n")
            continue
        if lines:
            yield from messages(raw, lines, most)
            lines = []
        payload = b2a_base64(frame, newline=False)
        if length > raw.max_line or len(raw.encoded) + len(payload) > raw.max_message:
            yield from dead_letter(raw, "too_long", frame, length)
        elif raw.json is not None and split_json(raw.json, [frame.replace(b"\n", b" ") + b"\n"])[1]:
            yield from dead_letter(raw, "not_json", frame, length)
        else:
            raw.lines += 1
            raw.bytes += length + 1
            yield [b"%b%b\n" % (raw.encoded, payload)]
    if lines:
        yield from messages(raw, lines, most)


# --- datagrams -------------------------------------------------------------------------------------------------------


def is_allowed(raw: RawPort, networks: "tuple[Network, ...]", address: str) -> bool:
    """Return True if a peer with this address may send to the intake."""
    if not networks:
        return True
    allowed = raw.may_send.get(address)
    if allowed is None:
        if len(raw.may_send) >= _MOST_ADDRESSES:
            raw.may_send.clear()
        allowed = raw.may_send[address] = is_among(networks, address)
    return allowed


def read_datagrams(
    raw: RawPort, networks: "tuple[Network, ...]", refused: Callable[[str], None]
) -> tuple[list[bytes], list[bytes]]:
    """Return whole lines of some waiting datagrams, and those of the lines that are too long."""
    taken: list[bytes] = []
    too_long: list[bytes] = []
    nbytes, most = 0, min(_TURN_BYTES, raw.receive_bytes)
    for _ in range(_TURN_DATAGRAMS):
        try:
            data, address = raw.sock.recvfrom(_DATAGRAM)
        except OSError:  # no datagram waits, or an ICMP message caused an error
            break
        if not is_allowed(raw, networks, address[0]):
            raw.refused += 1
            refused(f"{address[0]}:{address[1]}")
            continue
        if not data.rstrip(b"\0"):
            continue
        text = trimmed(data) + b"\n"
        if len(text) > raw.max_line:
            lines = text[:-1].split(b"\n")
            too_long += [line for line in lines if len(line) > raw.max_line]
            text = b"".join(line + b"\n" for line in lines if len(line) <= raw.max_line)
        if text:
            taken.append(text)
        nbytes += len(text)
        if nbytes > most:
            break
    return taken, too_long


def dropped(raw: RawPort) -> int:
    """Return how many datagrams the kernel has dropped because they were not read in time."""
    if raw.spec.kind != UDP:
        return 0
    try:
        count: int = _MEMINFO.unpack(raw.sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size))[_DROPS]
    except (OSError, struct.error):  # a kernel before 4.12
        return 0
    return count


def counts(raw: RawPort) -> tuple[int, ...]:
    """Return the values of INTAKE_FIELDS (kmq/broker/stats.py)."""
    return raw.port, raw.lines, raw.bytes, raw.connections, dropped(raw), raw.refused
