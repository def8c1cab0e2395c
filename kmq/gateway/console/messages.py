"""Messages for people: the newest, from a place on, searched, or followed live, with the line beside the decoded value.

Invariant   A value or line over MOST_SHOWN bytes is cut, and the message says so. Damage never hides good messages
            before it: it is reported beside the messages, with the place at which to continue.
            If any part of a message is left out for its size, even headers, the message is `truncated`.
            Each request for the newest messages shows some or moves on, however late it is: `before` falls, even past a
            gap left by compaction, which has no seq to continue at.
Bounds      At most ANSWER_BYTES of JSON, or one message, and about _HELD_BYTES while it is made, whatever the number of
            partitions and the size of messages. Backwards also one window of about _WINDOW_BYTES. A search
            takes _SCAN_S and about _SCANNED records: backwards in all, forwards of each partition. Without a search it
            takes _READ_S. The answer says how many records were looked at, of how many, and where to continue: `before`
            a seq, or at the `next` offsets.
Following   shows a sample of new messages, and its share of all: at most _LINES_S lines and _ROWS_S messages a second,
            however fast the topic grows. Records are counted by offsets and skipped by the index, so a topic of any
            speed costs the same. A slow reader gets fewer lines, and nothing is kept for it.
"""

import json
import time
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from heapq import heapify, heappop, heapreplace
from typing import Any, NamedTuple

from kmq.config.values import KIB, MIB
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.finding import SeqFinder
from kmq.gateway.core.partitions import Partition, Partitions, Signature
from kmq.log import gaps
from kmq.log.damage import DamageError
from kmq.message.message import Message
from kmq.wire.requests import Position

MOST_SHOWN = 64 * KIB
ANSWER_BYTES = 4 * MIB
_WINDOW, _GROWTH = 16, 8  # records of the first window of a partition, and by how much the next one is larger
_MOST_WINDOW, _MOST_GAP, _WINDOW_BYTES = 8192, 1 << 20, 1 * MIB  # a gap: offsets that compaction has emptied
_HELD_BYTES = 16 * MIB  # of messages that are found, until the answer is made
_CHUNK_BYTES = 256 * KIB
_SCANNED, _SCAN_S = 100_000, 1.0
_READ_S = 5.0
_HEADERS, _HEADER_BYTES = 100, 4 * KIB
_LATEST, _ANY_SEQ = Position("latest"), 1 << 63


class Wanted(NamedTuple):
    """A request. `at`: where to begin; `latest` means the last `limit` messages, of those with seqs below `before`.

    `key`, `value` and `header` are a search: only that key; values that contain this; a header's name, and its value
    unless that is None.
    """

    partition: int | None
    at: Position
    seq: int | None
    key: bytes | None
    limit: int
    before: int | None = None
    value: bytes | None = None
    header: tuple[str, bytes | None] | None = None

    @property
    def is_tail(self) -> bool:
        """Return True if the last messages are wanted."""
        return self.at == _LATEST and self.seq is None

    @property
    def is_search(self) -> bool:
        return (self.key, self.value, self.header) != (None, None, None)

    def accepts(self, message: Message) -> bool:
        """Return True if the message matches the search."""
        if self.key is not None and message.key != self.key:
            return False
        if self.value is not None and self.value not in (message.value or b""):
            return False
        if self.header is None:
            return True
        wanted, content = self.header
        return any(name == wanted and content in (None, value) for name, value in message.each_header())


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
    """Return the size of a shown message in bytes of JSON. A control character is six bytes, in whatever field."""
    return len(json.dumps(row))


def _headers(message: Message) -> tuple[list[dict[str, Any]], bool]:
    """Return headers for JSON, and True if some are cut or left out. Those left out are not decoded."""
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
        try:  # a cut may split a character
            return cut[:end].decode(), "text"
        except UnicodeDecodeError:
            continue
    return b64encode(cut[: MOST_SHOWN // 3 * 3]).decode(), "base64"


class _Read:
    """A partition being read. `offset`: where to continue; backwards, the lowest offset looked at.

    `below`: backwards, records not looked at have lower seqs than this.
    """

    def __init__(self, partition: Partition, offset: int, end: int, below: int = 0) -> None:
        self.partition, self.offset, self.begin, self.end, self.below = partition, offset, offset, end, below
        self.first, self.window = partition.start(), _WINDOW
        self.damage: DamageError | None = None


def find_messages(partitions: Partitions, finder: SeqFinder, topic: str, wanted: Wanted) -> dict[str, Any]:
    """Return messages, ready for JSON. Reads files: call it in a thread. Raises RequestRefused."""
    try:
        begun = _begin(partitions, finder, topic, wanted)
    except DamageError as err:
        return _answer([], [], [], None, 0, 0) | {"error": damage_json(err)}
    return (_newest if wanted.is_tail else _onward)(begun, wanted)


def _answer(
    rows: list[dict[str, Any]], begun: list[_Read], offsets: list[int], before: int | None, looked: int, of: int
) -> dict[str, Any]:
    damage = next((read.damage for read in begun if read.damage is not None), None)
    places = zip(begun, offsets, strict=True)
    return {
        "as_of": round(time.time(), 3),
        "messages": rows,
        "next": [{"partition": read.partition.number, "offset": offset} for read, offset in places],
        "before": before,
        "looked": looked,
        "of": of,
        "error": None if damage is None else damage_json(damage),
    }


def _begin(partitions: Partitions, finder: SeqFinder, topic: str, wanted: Wanted) -> list[_Read]:
    count = partitions.count(topic)
    if wanted.seq is not None:
        place = finder.find(wanted.seq)
        if place is None or place.topic != topic:
            raise RequestRefused("not_found", f"seq {wanted.seq}: no record of topic {topic!r} has it, or any more")
        partition = partitions.open(topic, place.partition)
        return [_Read(partition, place.offset, partition.end())]
    if wanted.partition is None and wanted.at.kind == "offset" and count > 1:
        raise bad_field("partition", f"is missing; topic {topic!r} has {count} partitions")
    numbers = range(count) if wanted.partition is None else (wanted.partition,)
    opened = [partitions.open(topic, number) for number in numbers]
    if wanted.is_tail:
        return [_last(partition, wanted.before) for partition in opened]
    firsts = [max(partition.locate(wanted.at), partition.start()) for partition in opened]
    return [_Read(partition, first, partition.end()) for partition, first in zip(opened, firsts, strict=True)]


# --- newest first ----------------------------------------------------------------------------------------------------
# A partition is read backwards in windows. The next window is always of the partition that may have the newest record
# not looked at, so shown records are never older than those left. Records below `reached`, the newest seq that is left
# in any partition, are not shown: the next request finds them again.


def _last(partition: Partition, before: int | None) -> _Read:
    """Begin at the end of a partition, or at the first record with the seq `before` or a later one."""
    end = partition.end()
    offset = end if before is None else min(end, partition.locate(Position("seq", before)))
    below = _ANY_SEQ if before is None else before
    with suppress(DamageError):  # reported by the first window
        found, _ = next(partition.chunks(max(0, gaps.before(partition.gaps(), offset) - 1), 1), ([], 0))
        if found and found[0].offset < offset:
            below = found[0].seq + 1
    return _Read(partition, offset, end, below)


def _newest(begun: list[_Read], wanted: Wanted) -> dict[str, Any]:
    """Return the last messages in order of seq, and the seq before which to continue."""
    began = time.monotonic()
    left = [(-read.below, number) for number, read in enumerate(begun) if read.offset > read.first]
    heapify(left)
    top = -left[0][0] if left else 0
    newest: list[Message] = []
    floor = count = 0  # there is no room for anything older than `floor`
    is_cut = False
    # Each partition gets a window before the search ends. An interrupted round is less than half of the search.
    scanned = min(_MOST_WINDOW, _SCANNED // (2 * len(begun)))
    most = max(_WINDOW, scanned if wanted.is_search else wanted.limit)
    while left and (below := -left[0][0]) > floor:
        is_late = time.monotonic() - began > (_SCAN_S if wanted.is_search else _READ_S)
        if (is_late or (wanted.is_search and count >= _SCANNED)) and below < top:  # each answer moves on
            break
        read = begun[left[0][1]]
        at = read.offset
        found = newest + _window(read, wanted, most)
        count += at - read.offset
        newest = _held([message for message in found if message.seq >= floor], wanted.limit, newest_first=True)
        is_cut |= len(newest) < len(found)
        if is_cut or len(newest) == wanted.limit:
            floor = newest[-1].seq
        if read.offset > read.first:
            heapreplace(left, (-read.below, left[0][1]))
        else:
            heappop(left)
    reached = -left[0][0] if left else 0
    newest = [message for message in newest if message.seq >= reached]
    rows = _rows(newest)
    is_cut |= len(rows) < len(newest)
    if rows and (floor or is_cut):
        reached = max(reached, int(rows[-1]["seq"]))
    looked = sum(_looked(read, reached if wanted.is_search else 0) for read in begun)
    of = sum(_records(read, read.first, read.end) for read in begun)
    return _answer(rows[::-1], begun, [read.end for read in begun], reached if left or is_cut else None, looked, of)


def _looked(read: _Read, reached: int) -> int:
    """Return how many records were looked at, without those below `reached`, which the next request looks at again."""
    offset = max(read.offset, read.first)
    if read.below < reached:
        with suppress(DamageError):
            offset = max(offset, read.partition.locate(Position("seq", reached)))
    return max(0, _records(read, offset, read.end))


def _records(read: _Read, start: int, end: int) -> int:
    """Return how many of the offsets start…end-1 lie in no gap."""
    return end - start - gaps.count(read.partition.gaps(), start, end)


def _window(read: _Read, wanted: Wanted, most: int) -> list[Message]:
    """Return matching records before `read.offset`, without damaged ones, and move there.

    At most `most` records, or a gap, and about _WINDOW_BYTES of one segment.
    """
    high = gaps.before(read.partition.gaps(), read.offset)
    start = high - _WINDOW
    with suppress(DamageError):
        start = read.partition.back(high, _WINDOW_BYTES)
    low = max(read.first, high - read.window, start)
    read.offset, at = low, low
    found: list[Message] = []
    count = 0
    while at < high:
        try:
            for some, following in read.partition.chunks(at, min(_CHUNK_BYTES, (high - low) * KIB)):
                some = [message for message in some if message.offset < high]
                if some:
                    read.below = min(read.below, some[0].seq)
                count += len(some)
                found += filter(wanted.accepts, some)
                if (at := following) >= high:
                    break
            break
        except DamageError as err:
            read.damage, at = err, max(at + 1, err.next_offset)
    if not count:  # a gap, which has no seq to continue at; or retention deleted the records
        read.first = min(read.end, max(read.first, read.partition.start()))
    read.window = min(_GROWTH * read.window, most if count else _MOST_GAP)
    return found


# --- onward ----------------------------------------------------------------------------------------------------------


def _onward(begun: list[_Read], wanted: Wanted) -> dict[str, Any]:
    """Return the next messages in order of seq, and where to continue in each partition."""
    until = time.monotonic() + (_SCAN_S if wanted.is_search else _READ_S)
    found: list[Message] = []
    left_out: dict[int, int] = {}  # partition → first offset that was found but not shown
    room = max(_CHUNK_BYTES, _HELD_BYTES // max(1, len(begun)))

    def leave(out: Sequence[Message]) -> None:
        for message in out:
            left_out[message.partition] = min(message.offset, left_out.get(message.partition, message.offset))

    for read in begun:
        if read is begun[0] or time.monotonic() < until:
            some = [*found, *_read(read, wanted, room, until)]
            found = _held(some, wanted.limit)
            leave(some[len(found) :])
    rows = _rows(found)
    leave(found[len(rows) :])
    offsets = [left_out.get(read.partition.number, read.offset) for read in begun]
    looked = sum(_records(read, read.begin, offset) for read, offset in zip(begun, offsets, strict=True))
    of = sum(_records(read, read.begin, max(read.end, read.offset)) for read in begun)
    return _answer(rows, begun, offsets, None, looked, of)


def _read(read: _Read, wanted: Wanted, room: int, until: float) -> list[Message]:
    """Return messages of one partition, until there are enough, or the bounds are reached."""
    last, size, found = read.offset + _SCANNED, 0, list[Message]()
    try:
        for some, following in read.partition.chunks(read.offset, _CHUNK_BYTES):
            read.offset = following
            found += filter(wanted.accepts, some)
            size = sum(message.size for message in found)
            is_full = len(found) >= wanted.limit or size >= room
            if is_full or read.offset >= last or time.monotonic() > until:
                break
    except DamageError as err:
        read.damage, read.offset = err, max(read.offset + 1, err.next_offset)
    return found


# --- answers ---------------------------------------------------------------------------------------------------------


def _held(found: list[Message], limit: int, newest_first: bool = False) -> list[Message]:
    """Sort messages by seq, and return as many from the front as there is room for: at least one."""
    found.sort(key=lambda message: message.seq, reverse=newest_first)
    size = count = 0
    for message in found[:limit]:
        size += message.size
        if count and size > _HELD_BYTES:
            break
        count += 1
    return found[:count]


def _rows(found: list[Message]) -> list[dict[str, Any]]:
    """Return the first messages as JSON shows them, as many as an answer has room for."""
    rows: list[dict[str, Any]] = []
    size = 0
    for message in found:
        row = shown(message)
        size += weight(row)
        if rows and size > ANSWER_BYTES:
            break
        rows.append(row)
    return rows


def damage_json(damage: DamageError) -> dict[str, Any]:
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
    """The last known end of one partition."""

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
        """Return a line that shows some of `seen` messages."""
        self.seen += seen
        self.shown += len(rows)
        return {
            "as_of": round(time.time(), 3),
            "seen": seen,
            "shown": len(rows),
            "share": round(len(rows) / seen, 6) if seen else 1.0,
            "messages": [*rows],
            "error": None if damage is None else damage_json(damage),
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
        """Return how many new messages a partition has since the last look, and note them as seen."""
        place.partition.check()
        now = place.partition.signature()
        if now == place.signature:
            return 0
        before, place.end, place.signature = place.partition.passed(place.end), place.partition.end(), now
        return max(0, place.end - before)

    def _last(self, place: _PartitionEnd, count: int) -> list[dict[str, Any]]:
        found, _ = next(place.partition.chunks(place.end - count, _READ_BYTES), ([], 0))
        return [shown(message) for message in found[:count] if message.offset < place.end]


def _within(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return as many of the rows as a line may hold, the newest ones."""
    size, first = 0, len(rows)
    while first:
        size += weight(rows[first - 1])
        if size > _LINE_BYTES and first < len(rows):
            break
        first -= 1
    return rows[first:]
