"""Intakes: ports to which each raw line is a message of one topic (KMQ_INTAKES), for programs that only have lines.

    a line                    app|||<line>
    one with a NUL, or empty  app||;enc=b64|<base64>    as typed clients write it: a message has no NUL, and an empty
                                                        payload would be null
    over KMQ_MAX_LINE         dead.malformed with reason=too_long, its length, the topic, and its first bytes; the
    no newline at the end     rest is skipped. With reason=no_newline: it may have been cut. The limit is of the message
    no JSON value             dead.malformed with reason=not_json and the line, where the entry ends with `:json`

The head comes before all lines of a receive at once, here, so that the framer and everything after it see messages as
from any producer. A datagram is one or more lines, the last of which may lack its newline.

Invariant   What a line says never names a topic: the head does, and ends before the line. A topic with a dot in its name
            has a mark (`app.web.@`), so that no other declared topic changes what the head means.
            Where KMQ_INTAKES_FROM is set, nothing is taken from an address that it does not have. Nobody is answered.
Memory      A receive is so small that its messages take at most _WRAPPED_BYTES, if it is nothing but newlines. So is what
            a turn takes of the datagrams, but for the last of them. A line of JSON is checked by parsing it, alone, which
            takes up to some 30 times its bytes for a moment.
Not covered Datagrams: the kernel drops those that ingress does not read in time, and all while messages are refused. They
            are counted. The address of a datagram is what its sender says it is.
"""

import os
import re
import socket
import struct
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Sequence
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
_MOST_KNOWN = 4096  # addresses that are remembered as allowed or not

Part = bytes | bytearray | memoryview


class RawPort:
    """One intake: what goes before its lines, and what it has counted."""

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
        self.known: dict[str, bool] = {}  # address → whether it may send


def check_topics(settings: Settings) -> None:
    """Raise ConfigError for an intake of a topic that nobody has declared, if messages make no topics."""
    if settings.auto_create_topics == "on":
        return
    for spec in settings.intakes:
        if spec.topic != "dead" and not os.path.isdir(f"{settings.data}/topics/{spec.topic}"):
            raise ConfigError(
                f"KMQ_INTAKES: {spec}: there is no topic {spec.topic}, and KMQ_AUTO_CREATE_TOPICS is off; declare it first:"
                f" kmq topics create {spec.topic}"
            )


# --- lines -----------------------------------------------------------------------------------------------------------


def wrapped(raw: RawPort, parts: Sequence[Part], most: int) -> Iterator[list[Part]]:
    """Yield the messages of whole lines as pieces (`_cut`); count the lines."""
    lines = b"".join((b"\n", *parts))  # with a newline before each line and after the last
    text = lines[:-1].replace(b"\n", raw.between) + b"\n"
    raw.bytes += len(lines) - 1
    raw.lines += (len(text) - len(lines)) // len(raw.head)
    if text.rfind(raw.nothing) >= 0:  # found sooner from the end: its first byte is rarer than its last ones
        for _ in range(2):  # twice: of two that follow each other the newline between them belongs to one
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
    """Return what refuses NaN and its like too, and whole numbers of over 4,300 digits, as Python and so HTTP does."""
    from json import JSONDecoder  # only where there is such an intake

    def refuse(name: str) -> None:
        raise ValueError(name)

    return JSONDecoder(parse_constant=refuse)


def split_json(decoder: "JSONDecoder", parts: Sequence[Part]) -> tuple[Sequence[Part], list[bytes]]:
    """Return the whole lines that are one JSON value each, and the lines that are none."""
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


def letters(raw: RawPort, lines: list[bytes], most: int) -> Iterator[list[Part]]:
    """Yield the dead letters of lines that are no JSON value as pieces (`_cut`); count the lines."""
    raw.lines += len(lines)
    raw.bytes += sum(map(len, lines)) + len(lines)
    yield from _cut(b"".join([letter(raw, "not_json", line, len(line)) for line in lines]), 0, most)


def _encoded(raw: RawPort, match: "re.Match[bytes]") -> bytes:
    """Return the message of a line with a NUL, between newlines that belong to others."""
    line = match[1]
    payload = b2a_base64(line, newline=False)
    if len(raw.encoded) + len(payload) > raw.max_message:
        return b"\n" + letter(raw, "too_long", line, len(line))[:-1]
    return b"\n%b%b" % (raw.encoded, payload)


def letter(raw: RawPort, reason: str, line: bytes, length: int) -> bytes:
    """Return the message of topic `dead` that keeps the beginning of a line, with its newline."""
    topic = b";topic=" + raw.spec.topic.encode()
    return record.malformed(reason, line, length, raw.max_line, topic) + b"\n"


# --- datagrams -------------------------------------------------------------------------------------------------------


def is_allowed(raw: RawPort, networks: "tuple[Network, ...]", address: str) -> bool:
    """Return True if a peer with this address may send to the intake."""
    if not networks:
        return True
    allowed = raw.known.get(address)
    if allowed is None:
        if len(raw.known) >= _MOST_KNOWN:
            raw.known.clear()
        allowed = raw.known[address] = is_among(networks, address)
    return allowed


def read_datagrams(
    raw: RawPort, networks: "tuple[Network, ...]", refused: Callable[[str], None]
) -> tuple[list[bytes], list[bytes]]:
    """Return the whole lines of the datagrams that wait, some at a time, and the lines among them that are too long."""
    taken: list[bytes] = []
    too_long: list[bytes] = []
    nbytes, most = 0, min(_TURN_BYTES, raw.receive_bytes)
    for _ in range(_TURN_DATAGRAMS):
        try:
            data, address = raw.sock.recvfrom(_DATAGRAM)
        except OSError:  # none waits, or an error that somebody's ICMP has caused
            break
        if not is_allowed(raw, networks, address[0]):
            raw.refused += 1
            refused(f"{address[0]}:{address[1]}")
            continue
        if not data:
            continue
        text = data if data.endswith(b"\n") else data + b"\n"
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
