"""Messages for people: found by place, seq, key or time, or followed live, with the raw line beside the decoded value.

Invariant   A value or line over MOST_SHOWN bytes is cut, and the message says so. Damage never hides what is good in
            front of it: it is told beside the messages, with the place to go on at.
            What is left out of a message for its size makes it `truncated`, headers too.
Bounds      At most ANSWER_BYTES of JSON, or one message, and some _HELD_BYTES while it is made, of however many
            partitions. A search by key takes at most _SCANNED records of each partition, and _SCAN_S; a look without a
            key _READ_S. `next` says where to go on.
Following   shows a sample of what arrives, and how large a share of it the sample is: at most _LINES_S lines and
            _ROWS_S messages a second, however fast the topic grows. Records are counted by offsets and skipped by the
            index, so a topic of any speed costs the same. A slow reader gets fewer lines, and nothing is kept for it.
"""

import json
import time
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple

from kmq.config.values import KIB, MIB
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.finding import SeqFinder
from kmq.gateway.core.partitions import Partition, Partitions, Signature
from kmq.log.damage import DamageError
from kmq.message.message import Message
from kmq.wire.requests import Position

MOST_SHOWN = 64 * KIB
ANSWER_BYTES = 4 * MIB
_WINDOW = 16  # messages, of which each may have KMQ_MAX_LINE
_HELD_BYTES = 16 * MIB  # of messages that are found, until the answer is made
_CHUNK_BYTES = 256 * KIB
_SCANNED, _SCAN_S = 20_000, 1.0
_READ_S = 5.0
_HEADERS, _HEADER_BYTES = 100, 4 * KIB
_LATEST = Position("latest")


class Wanted(NamedTuple):
    """What is asked for. `at`: where to begin; `latest` means the last `limit` messages. `key`: only that key's."""

    partition: int | None
    at: Position
    seq: int | None
    key: bytes | None
    limit: int

    @property
    def is_tail(self) -> bool:
        """Return True if the last messages are wanted."""
        return self.at == _LATEST and self.seq is None


def shown(message: Message) -> dict[str, Any]:
    """Return a message as JSON shows it."""
    value, line, key = message.value, message.line, message.key
    text, encoding = _text(value)
    key_text, key_encoding = _text(key)
    headers, are_cut = _headers(message)
    return {
        "partition": message.partition,
        "offset": message.offset,
        "seq": message.seq,
        "timestamp": message.timestamp_ms,
        "key": key_text,
        "key_encoding": key_encoding,
        "value": text,
        "encoding": encoding,
        "headers": headers,
        "raw": _printable(line[:MOST_SHOWN]),
        "bytes": message.size,
        "truncated": len(line) > MOST_SHOWN or len(value or b"") > MOST_SHOWN or are_cut,
    }


def weight(row: dict[str, Any]) -> int:
    """Return how many bytes of JSON a shown message is: a control character is six, in whatever field it stands."""
    return len(json.dumps(row))


def _headers(message: Message) -> tuple[list[dict[str, Any]], bool]:
    """Return headers as JSON shows them, and True if some are cut or left out, which are not even decoded."""
    rows: list[dict[str, Any]] = []
    room, are_cut = MOST_SHOWN, False
    for name, content in message.each_header(_HEADER_BYTES):
        if room <= 0 or len(rows) == _HEADERS:
            return rows, True
        are_cut |= len(name) > _HEADER_BYTES or len(content or b"") > _HEADER_BYTES
        name, content = name[:_HEADER_BYTES], None if content is None else content[:_HEADER_BYTES]
        room -= len(name) + len(content or b"")
        rows.append({"name": name, "value": None if content is None else _printable(content)})
    return rows, are_cut


def _printable(content: bytes) -> str:
    """Return bytes as text; those that are not UTF-8 as \\xNN."""
    return content.decode(errors="backslashreplace")


def _text(content: bytes | None) -> tuple[str | None, str]:
    """Return (text, encoding): UTF-8 as it is, anything else as base64; both cut."""
    if content is None:
        return None, "text"
    cut = content[:MOST_SHOWN]
    for end in range(len(cut), max(-1, len(cut) - 4), -1) if len(content) > MOST_SHOWN else (len(cut),):
        try:  # a cut may go through a character
            return cut[:end].decode(), "text"
        except UnicodeDecodeError:
            continue
    return b64encode(cut[: MOST_SHOWN // 3 * 3]).decode(), "base64"


class _Read:
    """One partition that is read: what was found, and where to go on."""

    def __init__(self, partition: Partition, offset: int) -> None:
        self.partition, self.offset = partition, offset
        self.found: list[Message] = []
        self.damage: DamageError | None = None


def find_messages(partitions: Partitions, finder: SeqFinder, topic: str, wanted: Wanted) -> dict[str, Any]:
    """Return messages, ready for JSON. Reads files: call it in a thread. Raises RequestRefused."""
    until = time.monotonic() + (_READ_S if wanted.key is None else _SCAN_S)
    try:
        begun = _begin(partitions, finder, topic, wanted)
    except DamageError as err:
        return {"as_of": round(time.time(), 3), "messages": [], "next": [], "error": told(err)}
    found: list[Message] = []
    behind: dict[int, int] = {}  # partition → first offset that was found and is not shown

    def leave(out: Sequence[Message]) -> None:
        for message in () if wanted.is_tail else out:
            behind[message.partition] = min(message.offset, behind.get(message.partition, message.offset))

    room = max(_CHUNK_BYTES, _HELD_BYTES // max(1, len(begun)))
    look = _read_last if wanted.is_tail and wanted.key is None else _read
    for read in begun:
        if read is begun[0] or time.monotonic() < until:
            look(read, wanted, room, until)
            found, out = _held([*found, *read.found], wanted)
            read.found = []
            leave(out)
    rows, out = _rows(found, wanted)
    leave(out)
    damage = next((read.damage for read in begun if read.damage is not None), None)
    return {
        "as_of": round(time.time(), 3),
        "messages": rows,
        "next": [
            {"partition": read.partition.number, "offset": behind.get(read.partition.number, read.offset)}
            for read in begun
        ],
        "error": None if damage is None else told(damage),
    }


def _begin(partitions: Partitions, finder: SeqFinder, topic: str, wanted: Wanted) -> list[_Read]:
    count = partitions.count(topic)
    if wanted.seq is not None:
        place = finder.find(wanted.seq)
        if place is None or place.topic != topic:
            raise RequestRefused("not_found", f"seq {wanted.seq}: no record of topic {topic!r} has it, or any more")
        return [_Read(partitions.open(topic, place.partition), place.offset)]
    if wanted.partition is None and wanted.at.kind == "offset" and count > 1:
        raise bad_field("partition", f"is missing; topic {topic!r} has {count} partitions")
    numbers = range(count) if wanted.partition is None else (wanted.partition,)
    opened = [partitions.open(topic, number) for number in numbers]
    return [_Read(partition, _first(partition, wanted)) for partition in opened]


def _first(partition: Partition, wanted: Wanted) -> int:
    if wanted.at == _LATEST:
        back = wanted.limit if wanted.key is None else _SCANNED
        return max(partition.start(), partition.end() - back)
    return max(partition.locate(wanted.at), partition.start())


def _read(read: _Read, wanted: Wanted, room: int, until: float) -> None:
    """Read messages of one partition, until there are enough, or the bounds are reached."""
    last, size = read.offset + _SCANNED, 0
    try:
        for some, following in read.partition.chunks(read.offset, _CHUNK_BYTES):
            read.offset = following
            read.found += [message for message in some if wanted.key in (None, message.key)]
            size = sum(message.size for message in read.found)
            while wanted.is_tail and read.found and (len(read.found) > wanted.limit or size > room):
                size -= read.found.pop(0).size
            is_full = not wanted.is_tail and (len(read.found) >= wanted.limit or size >= room)
            if is_full or read.offset >= last or time.monotonic() > until:
                break
    except DamageError as err:
        read.damage, read.offset = err, max(read.offset + 1, err.next_offset)


def _read_last(read: _Read, wanted: Wanted, room: int, until: float) -> None:
    """Read the last messages of one partition, backwards in windows: the newest come first if they are large."""
    first, low, size = read.offset, read.partition.end(), 0
    read.offset, window = low, min(_WINDOW, wanted.limit)
    while low > first and len(read.found) < wanted.limit and size < room:
        high, low = low, max(first, low - window)
        read.found[:0] = _window(read, low, high)
        size = sum(message.size for message in read.found)
        window = max(1, min(wanted.limit, (room - size) * len(read.found) // max(1, size)))
        if time.monotonic() > until:
            break


def _window(read: _Read, low: int, high: int) -> list[Message]:
    """Return the messages with these offsets, except damaged ones."""
    at, found = low, list[Message]()
    while at < high:
        try:
            for some, following in read.partition.chunks(at, _CHUNK_BYTES):
                found += [message for message in some if message.offset < high]
                if (at := following) >= high:
                    break
            return found
        except DamageError as err:
            read.damage, at = err, max(at + 1, err.next_offset)
    return found


def _held(found: list[Message], wanted: Wanted) -> tuple[list[Message], list[Message]]:
    """Return messages in order of seq, and those left out: the newest are kept at the tail, else the oldest."""
    found.sort(key=lambda message: message.seq, reverse=wanted.is_tail)
    size = count = 0
    for message in found[: wanted.limit]:
        size += message.size
        if count and size > _HELD_BYTES:
            break
        count += 1
    kept, out = found[:count], found[count:]
    return (kept[::-1] if wanted.is_tail else kept), out


def _rows(found: list[Message], wanted: Wanted) -> tuple[list[dict[str, Any]], list[Message]]:
    """Return what an answer has room for, in order of seq, and the messages that are left out."""
    rows: list[dict[str, Any]] = []
    size = 0
    for message in found[::-1] if wanted.is_tail else found:
        row = shown(message)
        size += weight(row)
        if rows and size > ANSWER_BYTES:
            break
        rows.append(row)
    if wanted.is_tail:
        return rows[::-1], found[: -len(rows)]
    return rows, found[len(rows) :]


def told(damage: DamageError) -> dict[str, Any]:
    """Return damage as JSON shows it."""
    return {
        "code": "damaged",
        "message": str(damage),
        "first_offset": damage.first_offset,
        "next_offset": damage.next_offset,
    }


# --- following -------------------------------------------------------------------------------------------------------

_LINES_S, _ROWS_S = 4, 200
EVERY_S = 1 / _LINES_S
QUIET_S = 5.0  # a line without messages says that the stream lives
_ROWS = _ROWS_S // _LINES_S
_AT_ONCE = 256  # partitions that one turn looks at
_READ_BYTES = 256 * KIB
_LINE_BYTES = 1 * MIB


class _PartitionEnd:
    """Where one partition was seen last."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.signature: Signature | None = partition.signature()
        self.end = partition.end()


class Follower:
    """A topic that is followed. `look` in a thread, one at a time."""

    def __init__(self, partitions: Partitions, topic: str, only: int | None) -> None:
        """Begin at the end. `only`: one partition. Raises RequestRefused."""
        self._partitions, self._topic, self._only = partitions, topic, only
        numbers = range(partitions.count(topic)) if only is None else (only,)
        self._places = [_PartitionEnd(partitions.open(topic, number)) for number in numbers]
        self._turn = 0
        self.seen = self.shown = 0

    def look(self) -> dict[str, Any] | None:
        """Return the next line, ready for JSON; None if nothing has arrived. Raises RequestRefused."""
        new = [(place, count) for place in self._next_places() if (count := self._count(place))]
        total = sum(count for _, count in new)
        if not total:
            return None
        rows: list[dict[str, Any]] = []
        damage: DamageError | None = None
        for place, count in new:
            room = min(count, max(1, _ROWS * count // total), _ROWS - len(rows))
            if room <= 0:
                break
            try:
                rows += self._last(place, room)
            except DamageError as err:
                damage = err
        rows.sort(key=lambda row: int(row["seq"]))
        return self.line(total, _within(rows), damage)

    def line(
        self, seen: int = 0, rows: Sequence[dict[str, Any]] = (), damage: DamageError | None = None
    ) -> dict[str, Any]:
        """Return a line that shows these of `seen` messages."""
        self.seen += seen
        self.shown += len(rows)
        return {
            "as_of": round(time.time(), 3),
            "seen": seen,
            "shown": len(rows),
            "share": round(len(rows) / seen, 6) if seen else 1.0,
            "messages": [*rows],
            "error": None if damage is None else told(damage),
        }

    def _next_places(self) -> list[_PartitionEnd]:
        if self._only is None and self._turn == 0:  # the topic may have grown
            for number in range(len(self._places), self._partitions.count(self._topic)):
                grown = _PartitionEnd(self._partitions.open(self._topic, number))
                grown.end, grown.signature = 0, None
                self._places.append(grown)
        chosen = self._places[self._turn : self._turn + _AT_ONCE]
        self._turn = 0 if self._turn + _AT_ONCE >= len(self._places) else self._turn + _AT_ONCE
        return chosen

    def _count(self, place: _PartitionEnd) -> int:
        """Return how many messages a partition has got since the last look, and note them as seen."""
        place.partition.check()
        now = place.partition.signature()
        if now == place.signature:
            return 0
        before, place.end, place.signature = place.end, place.partition.end(), now
        return max(0, place.end - before)

    def _last(self, place: _PartitionEnd, count: int) -> list[dict[str, Any]]:
        found, _ = next(place.partition.chunks(place.end - count, _READ_BYTES), ([], 0))
        return [shown(message) for message in found[:count] if message.offset < place.end]


def _within(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return as many of the rows as a line may hold, the newest ones."""
    size, kept = 0, len(rows)
    while kept:
        size += weight(rows[kept - 1])
        if size > _LINE_BYTES and kept < len(rows):
            break
        kept -= 1
    return rows[kept:]
