"""The line: its form as sent and as stored, and how a malformed line is stored.

    sent     routing_key|producer_ts|id|payload
    stored   seq|recv_ts|routing_key|producer_ts|id|payload

A routing key has one of two forms. In `<topic>[.<key>]` only the table of topics tells where the topic ends. In
`<topic>.@[<partition>][.<key>]` the mark tells it: `.@` with digits or nothing, then the end or a dot. The first mark
counts, and the topic is the text before it. Without a second dot there is no key; a dot at the end means an empty key.

Everything here is a pure function of bytes. The hot path checks a whole block at once (`good_prefix` returns how many
bytes are well-formed lines) and touches single lines only from the first malformed line on.
"""

import re
from binascii import b2a_base64
from collections import namedtuple
from zlib import crc32

from kmq.message.ids import MAX_ID_DIGITS

DLQ = ".dlq"  # suffix of a dead letter topic's name
MAX_TOPIC = 200  # bytes; with "-<partition>.log" after it a name still fits NAME_MAX (255)
MALFORMED = b"dead.malformed"
# Room that the header of a dead.malformed line takes beyond a payload of KMQ_MAX_LINE bytes.
MALFORMED_OVERHEAD = 256
# No line that begins with one of these is a message. `!` begins the control lines of the FIFO (kmq/links/fifo.py); `+`
# and `-` began the parts of long lines there.
CONTROL = b"!+-"

# The first label of a routing key. Every legal topic begins with one, so a key is legal exactly when this is:
# the text before the first dot is a topic name, and a longer declared topic was checked when it was declared.
_LABEL = rb"(?!append[.|]|dropped[.|]|__)[A-Za-z0-9_][A-Za-z0-9_-]{0,199}+"
_USER_HEADERS = rb"(?:;(?![pw]=)[^|;\n]*+)*+"  # not p= and w=, which only the framer and the Kafka door may add
_NUMBERED = re.compile(
    rb"(?m)^((%b(?:\.[^|\n]*+)?+)\|[^|\n]*+\|(\d{1,%d}))(%b)\|(.*+)\n" % (_LABEL, MAX_ID_DIGITS, _USER_HEADERS)
)
_LABEL_ONLY = re.compile(_LABEL + rb"[.|]")
# <topic>.log of append and dropped would replace the broker's own files.
_RESERVED_LABEL = re.compile(rb"(?:append|dropped)[.|]|__")
# Topics of KMQ itself, which only its own programs write: __consumer_offsets. `__append` is the WAL's name in lists;
# `__kmq` belongs to the framer alone (kmq/log/topic_changes.py).
_OWN_TOPIC = rb"__(?!append[.|]|kmq[.|])[A-Za-z0-9_-]{1,198}+"
_OWN_LABEL = re.compile(_OWN_TOPIC + rb"[.|]")
_TOPIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")

_NAME = rb"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}"
_MARK = re.compile(rb"\.@\d*+(?=\.|\Z)")
_MARKED = re.compile(rb"(?s)(" + _NAME + rb")\.@(\d*+)(?:\.(.*+))?+")
# Groups of a match, one per line: topic and partition if a mark follows a topic's name; if the mark follows anything
# else, the byte after the mark.
_MARKED_LINES = re.compile(rb"\n(?:(" + _NAME + rb")\.@(\d*+)[.|]|[^|\n]*?\.@\d*+([.|]))")
NO_PARTITION = 10**9  # stands for any number that large: Python reads no number of thousands of digits

# Last three digits of a sequence number: numbering a line costs two list slots instead of a format call.
_LOW = [b"%03d|" % i for i in range(1000)]

# What follows the key of a line that names its producer: time, id, producer, headers, payload.
_OWNED = rb"\|[^|\n]*+\|\d{1,%d}+;p=%%b%b\|.*+\n" % (MAX_ID_DIGITS, _USER_HEADERS)


class Shape:
    """The shape of well-formed lines whose routing keys begin in a given way."""

    def __init__(self, *heads: tuple[bytes, bytes]) -> None:
        """`heads`: pairs of a pattern for a key's start, up to a dot or the end, and bytes barred from the rest."""
        # Possessive quantifiers: without them a bad line makes the engine back into every good line before it.
        keys = [b"|".join(b"%b(?:\\.[^|\n%b%b]*+)?+" % (head, no, nul) for head, no in heads) for nul in (b"", b"\\0")]
        self._good = re.compile(rb"(?:(?:" + keys[0] + rb")\|[^|\n]*+\|[^|\n]*+\|.*+\n)*+")
        self._no_nul = re.compile(rb"(?:(?:" + keys[1] + rb")\|[^|\n\0]*+\|[^|\n\0]*+\|[^\n\0]*+\n)*+")
        first, others = (b"(?:%b)" % keys[0] + _OWNED % whose for whose in (b"([^|;\n]++)", rb"\1"))
        self._owned = re.compile(b"%b(?:%b)*+" % (first, others))

    def prefix(self, data: bytes) -> int:
        """Return how many bytes from the start of `data` are whole, well-formed lines as sent."""
        match = (self._no_nul if 0 in data else self._good).match(data)
        return match.end() if match else 0

    def fits(self, data: bytes, producer: bytes = b"") -> bool:
        """Return True if all of `data` is such lines. `producer`: each has its header and a decimal id, as stored."""
        if not producer:
            return self.prefix(data) == len(data)
        match = None if 0 in data else self._owned.fullmatch(data)
        return match is not None and match[1] == producer


any_shape = Shape((_LABEL, b""))
own_shape = Shape((_LABEL, b""), (_OWN_TOPIC, b""))  # with the topics of KMQ itself
good_prefix = any_shape.prefix


def count_lines(data: bytes | bytearray) -> int:
    """Return how many lines end in `data`.

    bytes.count looks at every byte, at 4 GB a second; bytes.replace finds the ends of lines, a tenth of that for lines of 1 KB.
    """
    return len(data) - len(data.replace(b"\n", b""))


def first_lines(data: bytes, count: int) -> bytes:
    """Return the first `count` lines of `data`. Only a newline ends a line: a payload may have carriage returns."""
    rest = data.split(b"\n", count)[count:]
    return data[: len(data) - len(rest[0])] if rest else data


def numbered(data: bytes) -> list[tuple[bytes, bytes, bytes, bytes, bytes]] | None:
    """Return (all up to the id, routing key, id, headers, payload) of whole lines; None unless all are good.

    Good are well-formed lines that have a decimal id, and no header that claims a producer or a window.
    One search instead of a check and two kinds of split: it takes two thirds of their time.
    """
    if 0 in data:
        return None
    fields = _NUMBERED.findall(data)
    return fields if len(fields) == count_lines(data) else None


def common_key(lines: list[bytes]) -> bytes:
    """Return the routing key that all `lines` share, or b"" if they differ.

    Exact: a line that sorts between two lines with the same start has that start too. In a block of many keys the last
    line seldom has the key of the first, so comparing these two usually settles it.
    """
    key = lines[0][: lines[0].index(b"|") + 1]
    if len(lines) == 1 or (lines[-1].startswith(key) and min(lines).startswith(key) and max(lines).startswith(key)):
        return key[:-1]
    return b""


class Marked(namedtuple("Marked", ("topic", "partition", "key"))):
    """The parts of a routing key with a mark: the topic, the partition or None, the key or None."""

    __slots__ = ()


def has_mark(routing_key: bytes) -> bool:
    """Return True if a routing key holds a mark, also if the text before it is no topic name."""
    return _MARK.search(routing_key) is not None


def marked(routing_key: bytes) -> Marked | None:
    """Return the parts of a routing key; None without a mark, or if the mark does not follow a topic name."""
    match = _MARKED.fullmatch(routing_key)
    if match is None:
        return None
    topic, digits, key = match.groups()
    return Marked(topic, partition_number(digits) if digits else None, key)


def partition_number(digits: bytes) -> int:
    """Return the partition that a mark names."""
    return min(int(digits), NO_PARTITION) if len(digits) <= 18 else NO_PARTITION


def marks(text: bytes) -> set[tuple[bytes, bytes]] | None:
    """Return (topic, digits) of the marks in whole lines; None if a mark does not follow a topic name."""
    if b"@" not in text or b".@" not in text:  # looking for one byte is ten times faster
        return set()
    found = set(_MARKED_LINES.findall(b"\n" + text[:-1]))
    return None if any(odd for *_, odd in found) else {(topic, digits) for topic, digits, _ in found}


def is_topic_name(name: str) -> bool:
    """Return True if a topic may have this name, including topics of KMQ itself."""
    return _TOPIC.fullmatch(name) is not None


def is_topic(name: str) -> bool:
    """Return True if `name` may be declared as a topic."""
    return _TOPIC.fullmatch(name) is not None and refusal(name.encode() + b"|||") == ""


def is_own_topic(name: str) -> bool:
    """Return True if `name` is a topic that KMQ writes for itself: reserved, and hidden from lists unless asked for."""
    return _OWN_LABEL.fullmatch(name.encode() + b"|") is not None


def refusal(line: bytes, reserved: bool = False) -> str:
    """Return why `line` (without newline) is not a message, as one word; "" if it is one.

    `reserved`: its sender may write to the topics of KMQ itself.
    """
    if not line:
        return "empty_line"
    if line[0] in CONTROL:
        return "control_byte"
    if 0 in line:
        return "nul"
    if b"|" not in line:
        return "no_separator"
    if line[:1] == b"|":
        return "empty_routing_key"
    is_own = reserved and _OWN_LABEL.match(line) is not None
    if not is_own and _RESERVED_LABEL.match(line):
        return "reserved_topic"
    if not is_own and not _LABEL_ONLY.match(line):
        return "bad_topic"
    if b".@" in line:
        routing_key = line[: line.index(b"|")]
        if has_mark(routing_key) and marked(routing_key) is None:
            return "bad_topic"
    return ""


def key_refusal(routing_key: bytes) -> str:
    """Return why a routing key is invalid, as one word; "" if it is valid."""
    return refusal(routing_key + b"|||") or ("separator" if b"|" in routing_key or b"\n" in routing_key else "")


def malformed(reason: str, original: bytes, length: int, max_line: int, headers: bytes = b"") -> bytes:
    """Return the `dead.malformed` line, as sent, that keeps a line which is not a message.

    `length` is the original's length in bytes, `original` may already be cut. The payload is at most `max_line`.
    `headers`: further headers, each with its semicolon.
    """
    if 0 in original or b"\n" in original:
        payload, encoding = b2a_base64(original[: max_line // 4 * 3], newline=False), b";enc=b64"
    else:
        payload, encoding = original[:max_line], b""
    return b"%b||;reason=%b;len=%d%b%b|%b" % (MALFORMED, reason.encode(), length, headers, encoding, payload)


def long_letter(topic: str, line: bytes, length: int, max_line: int) -> bytes:
    """Return the `dead.malformed` line for a line that is too long for `topic`. It is no longer than `max_line` itself."""
    return malformed("too_long", line, length, max_line - MALFORMED_OVERHEAD - len(topic), f";topic={topic}".encode())


def admit(line: bytes, max_line: int) -> bytes:
    """Return `line` as it will be stored: padded to four fields, or wrapped as dead.malformed."""
    reason = refusal(line)
    if not reason and len(line) > max_line + (MALFORMED_OVERHEAD if line.startswith(MALFORMED) else 0):
        reason = "too_long"
    if reason:
        return malformed(reason, line, len(line), max_line)
    return disclaim(padded(line))


def padded(line: bytes) -> bytes:
    """Return a message with all four fields."""
    missing = 3 - line.count(b"|")
    return line + b"|" * missing if missing > 0 else line


_OWN = re.compile(rb";(?=[pw]=)")
_OWN_LINE = re.compile(rb"(?m)^[^|\n]*\|[^|\n]*\|[^|\n]*;[pw]=")


def claims(text: bytes) -> bool:
    """Return True if an id in `text` has a header `;p=` (producer) or `;w=` (window), which only the framer may add."""
    return b";" in text and (b";p=" in text or b";w=" in text) and _OWN_LINE.search(text) is not None


def disclaim(line: bytes) -> bytes:
    """Return `line` with these headers made a part of the id, so that no reader trusts them."""
    if b";" not in line:
        return line
    fields = line.split(b"|", 3)
    if len(fields) > 2:
        fields[2] = _OWN.sub(b"%3B", fields[2])
    return b"|".join(fields)


_OWN_HEADER = re.compile(rb";(?:[^;=]|enc|reason|len)(?:=[^;]*)?(?=;|$)")


def without_mark(routing_key: bytes) -> bytes:
    """Return a routing key as fingerprints compare it: without the partition in its mark."""
    return _MARK.sub(b"", routing_key, count=1)


def user_headers(headers: bytes) -> bytes:
    """Return the headers that fingerprints compare: without those of KMQ itself."""
    return _OWN_HEADER.sub(b"", headers)


def fingerprint_start(routing_key: bytes, headers: bytes = b"") -> int:
    """Return the start of a fingerprint: crc32(payload, start) completes it. `headers`: `;name=value…` after the id."""
    if b".@" in routing_key:
        routing_key = without_mark(routing_key)
    if headers:
        headers = user_headers(headers)
    return crc32(b"%b|%b|" % (routing_key, headers))


def fingerprint(routing_key: bytes, headers: bytes, payload: bytes) -> int:
    """Return 32 bits of the content of a message: topic, key, the user's headers, payload.

    The fingerprint omits the sending time, the partition asked for, and the headers of KMQ itself, because a retry may
    differ in them.
    """
    return crc32(payload, fingerprint_start(routing_key, headers))


def fingerprints(lines: list[bytes]) -> list[int]:
    """Return 32 bits of each of these lines of the Kafka door: of all except the sending time, which may change."""
    if key := common_key(lines):
        start, at = crc32(key), len(key) + 1
        return [crc32(line[line.index(b"|", at) :], start) for line in lines]
    parts = (line.split(b"|", 2) for line in lines)
    return [crc32(b"|" + rest, crc32(key)) for key, _, rest in parts]


class Starts(dict[bytes, int]):
    """`routing key` or `routing key|headers` → fingerprint_start: a bounded cache, so that a message costs one call."""

    _SHORT, _COUNT = 128, 4096

    def __missing__(self, content: bytes) -> int:
        routing_key, _, headers = content.partition(b"|")
        start = fingerprint_start(routing_key, headers)
        if len(content) <= self._SHORT:
            if len(self) >= self._COUNT:
                self.clear()
            self[content] = start
        return start


def number(lines: list[bytes], seq: int, recv_ts: bytes) -> tuple[bytes, int]:
    """Return the stored form of `lines` (each without newline), numbered from `seq`, as one block of whole lines.

    Returns (block, added): `added` is how many bytes the numbers and times take, so that
    len(block) - added is what the lines took with their newlines.
    """
    if len(lines) == 1:  # one message in flight: a tenth of the code, which is not in the cache then
        head = b"%d|%b|" % (seq, recv_ts)
        return b"%b%b\n" % (head, lines[0]), len(head)
    stamp = recv_ts + b"|"
    parts: list[bytes] = []
    added = 0
    done, count = 0, len(lines)
    while done < count:
        high, low = divmod(seq + done, 1000)
        run = min(count - done, 1000 - low)
        quads = [stamp] * (4 * run)
        if high:
            head = b"\n%d" % high
            quads[0::4] = [head] * run
            quads[1::4] = _LOW[low : low + run]
            added += run * (len(head) + 3 + len(stamp))
        else:
            quads[0::4] = [b"\n"] * run
            quads[1::4] = [b"%d|" % n for n in range(low, low + run)]
            added += sum(map(len, quads[1::4])) + run * len(stamp)
        quads[3::4] = lines[done : done + run]
        parts += quads
        done += run
    parts[0] = parts[0][1:]  # every line but the first brings the newline of the one before it
    parts.append(b"\n")
    return b"".join(parts), added


# --- the fields of a line --------------------------------------------------------------------------------------------
# Hot loops cut out the field they need themselves, and say so: a named tuple of six fields costs half a microsecond.

STAMP_BYTES = 64  # a seq and a time are shorter


class Fields(namedtuple("Fields", ("seq", "recv_ts", "routing_key", "producer_ts", "id", "payload"))):
    """The fields of a stored line, as stored; the headers belong to `id`."""

    __slots__ = ()


class SentFields(namedtuple("SentFields", ("routing_key", "producer_ts", "id", "payload"))):
    """The fields of a line as it is sent; the headers belong to `id`."""

    __slots__ = ()


def fields(line: bytes) -> Fields:
    """Return the fields of a stored line, without newline. Raises ValueError if it is not a stored line."""
    found = line.split(b"|", 5)
    if len(found) < 6:
        raise ValueError(f"{line[:80]!r}: not a stored line")
    return Fields(*found)


def sent_fields(line: bytes) -> SentFields:
    """Return the fields of a line as it is sent; those that are missing at its end are empty."""
    return SentFields(*padded(line).split(b"|", 3))


def stamp(data: bytes | memoryview) -> tuple[int, int]:
    """Return (seq, recv_ts in µs) of the stored line that `data` begins with; (0, 0) if it begins with anything else."""
    found = bytes(data[:STAMP_BYTES]).split(b"|", 2)
    try:
        return int(found[0]), parse_ts(found[1])
    except (ValueError, IndexError):
        return 0, 0


def routing_key_of(line: bytes) -> bytes:
    """Return the routing key of a stored line."""
    return line.split(b"|", 3)[2]


def seq_of(line: bytes) -> int:
    """Return the seq of a stored line."""
    return int(line[: line.index(b"|")])


def format_ts(micros: int) -> bytes:
    """Return microseconds since the epoch as a recv_ts field: seconds with six decimals."""
    return b"%d.%06d" % divmod(micros, 1_000_000)


def parse_ts(field: bytes) -> int:
    """Return a recv_ts field as microseconds since the epoch."""
    seconds, _, micros = field.partition(b".")
    return int(seconds) * 1_000_000 + int(micros)


_STORED = re.compile(rb"(\d{1,19})\|(\d{1,12}\.\d{6})\|[^|\n\0]+\|[^|\n\0]*\|[^|\n\0]*\|[^\n\0]*")


def parse_stored(line: bytes) -> tuple[int, int] | None:
    """Return (seq, recv_ts in microseconds) of a stored line without its newline; None if it is not a stored line."""
    match = _STORED.fullmatch(line)
    return (int(match[1]), parse_ts(match[2])) if match else None
