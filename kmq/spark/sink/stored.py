"""Find the records stored under a producer's ids, so that a row that is sent again is compared with its record.

A broker replies `!dup <n> <seq>` to an id that it has already, and the record is read from the WAL at that seq. Of an
old id the broker no longer knows the seq. Then the record is searched by producer and id, backwards from the end of the
WAL, because a producer's ids rise. A record that retention has removed from the WAL is searched in the same way in its
topic's partitions.

Invariant   A row counts as stored only if a record with this producer and this id has the same content: topic, key,
            user's headers and payload, as in the broker's own comparison (record.fingerprint), but byte by byte. If no
            log holds the record any more, the row never counts as stored.
Brokers     With several brokers each is searched, first the broker that had the previous record: producer and id are
            unique.
Memory      One block of lines, and the records found.
"""

import time
from base64 import b64decode
from binascii import Error
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kmq.log.reader import WAL
from kmq.message import record, routing
from kmq.message.routing import Topic
from kmq.spark.source.broker import Broker

_GAP = 2000  # seqs: wanted records at most this far apart are read together, with what lies between
_STEP = 1 << 16  # records: the first step of a search backwards
_SETTLE_S = 10.0  # how long an acknowledged record may take to become readable
_TICK_S = 0.02
_NO_SEQ = 1 << 62


class Sent(NamedTuple):
    """A line as sent whose id the broker has already; `seq` is that of the stored record, 0 if unknown."""

    id: int
    seq: int
    line: bytes


class Stored:
    """The logs of the brokers that a task writes to."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = list(brokers)
        # (broker, topic, partition, producer) → (id, offset) of the record found last
        self._places: dict[tuple[str, str, int, str], tuple[int, int]] = {}

    def find(self, producer: str, sent: Sequence[Sent]) -> dict[int, bytes]:
        """Return {id: stored line} of the records that a log still holds."""
        search, deadline = _Search(producer.encode(), sent), time.monotonic() + _SETTLE_S
        while True:
            self._search(self._search_wal, search)
            if not search.missing or not search.is_ahead or time.monotonic() > deadline:
                break
            time.sleep(_TICK_S)
        self._search(self._search_topics, search)
        return search.found

    def _search(self, search_broker: Callable[[Broker, "_Search"], None], search: "_Search") -> None:
        """Search one broker after the other until nothing is missing; a broker with a match comes first next time."""
        search.is_ahead = False
        for broker in list(self._brokers):
            before = len(search.missing)
            if before:
                search_broker(broker, search)
            if len(search.missing) < before:
                self._brokers.remove(broker)
                self._brokers.insert(0, broker)

    def _search_wal(self, broker: Broker, search: "_Search") -> None:
        first, end = broker.bounds([WAL])[WAL, 0]
        search.is_ahead |= any(sent.seq >= end for sent in search.missing.values())
        for low, high in ranges(sorted(sent.seq for sent in search.missing.values() if first <= sent.seq < end)):
            for _, lines in broker.read(WAL, 0, low, high + 1):
                search.take_seqs(lines)
        self._search_by_id(broker, WAL, 0, (first, end), search)

    def _search_topics(self, broker: Broker, search: "_Search") -> None:
        by_topic: dict[str, list[Sent]] = {}
        there, marks_from = broker.topics(), broker.marks_from()
        table = routing.table([Topic(name, found.partitions, 0) for name, found in there.items()], {}, marks_from)
        for sent in search.missing.values():
            route = routing.resolve(table, sent.line[: sent.line.index(b"|")], sent.seq or _NO_SEQ)
            by_topic.setdefault(route.topic.decode(errors="replace"), []).append(sent)
        bounds = broker.bounds([topic for topic in by_topic if topic in there])
        for (topic, partition), ends in bounds.items():
            wanted = [sent for sent in by_topic[topic] if sent.id in search.missing]
            seqs = sorted(sent.seq for sent in wanted if sent.seq)
            for low, high in ranges(seqs):
                start, end = (broker.offset_of_seq(topic, partition, seq) for seq in (low, high + 1))
                for _, lines in broker.read(topic, partition, start, end):
                    search.take_seqs(lines)
            self._search_by_id(broker, topic, partition, ends, search)

    def _search_by_id(
        self, broker: Broker, topic: str, partition: int, ends: tuple[int, int], search: "_Search"
    ) -> None:
        """Search records of unknown seq by id: forward from the last one found, or from `_offset_before`."""
        ids = [sent.id for sent in search.missing.values() if not sent.seq]
        if not ids:
            return
        log = broker.name, topic, partition, search.producer.decode()
        id, offset = self._places.get(log, (-1, 0))
        if not 0 <= id < min(ids) or offset < ends[0]:
            offset = self._offset_before(broker, topic, partition, ends, search, min(ids))
        last = max(ids)
        for start, lines in broker.read(topic, partition, offset, ends[1]):
            before, counted = start, 0
            for at, id, line in search.own(lines):
                before, counted = before + lines.count(b"\n", counted, at), at
                if id > last:
                    return
                if id in search.missing:
                    search.take(id, line)
                self._places[log] = id, record.seq_of(line) if topic == WAL else before

    def _offset_before(
        self, broker: Broker, topic: str, partition: int, ends: tuple[int, int], search: "_Search", id: int
    ) -> int:
        """Return an offset at or before the record with this id, if there is one; search backwards in growing steps."""
        first, end = ends
        step, low = _STEP, end
        while low > first:
            high, low = low, max(first, low - step)
            step *= 2
            for _, lines in broker.read(topic, partition, low, high):
                first_own = next(search.own(lines), None)
                if first_own is not None:
                    if first_own[1] <= id:
                        return low
                    break
        return first


class _Search:
    """The records that are searched, and those found so far."""

    def __init__(self, producer: bytes, sent: Sequence[Sent]) -> None:
        self.producer = producer
        self.missing = {line.id: line for line in sent}
        self.found: dict[int, bytes] = {}
        self.is_ahead = False  # an acknowledged record is not readable in the WAL yet
        self._ids = {b"%d" % line.seq: line.id for line in sent if line.seq}  # seq → id
        self._mark = b";p=" + producer

    def take(self, id: int, line: bytes) -> None:
        self.found[id] = line
        del self.missing[id]

    def take_seqs(self, lines: bytes) -> None:
        """Take the lines that have a wanted seq and are this producer's."""
        ids = self._ids
        for line in lines.split(b"\n"):
            id = ids.get(line[: line.find(b"|")])
            if id is not None and id in self.missing and self._id_in(line) == id:
                self.take(id, line)

    def own(self, lines: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield (place in `lines`, id, line) of each line of this producer."""
        at = lines.find(self._mark)
        while at >= 0:
            start, end = lines.rfind(b"\n", 0, at) + 1, lines.find(b"\n", at)
            line = lines[start:end]
            id = self._id_in(line)
            if id >= 0:
                yield start, id, line
            at = lines.find(self._mark, end)

    def _id_in(self, line: bytes) -> int:
        """Return the id of a stored line, or -1 if the line is another producer's."""
        field = line.split(b"|", 5)[4]
        number, _, rest = field.partition(b";p=")
        return int(number) if number.isdigit() and rest.partition(b";")[0] == self.producer else -1


def ranges(seqs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of the seqs that are read together."""
    at = 0
    for place in range(1, len(seqs) + 1):
        if place == len(seqs) or seqs[place] - seqs[place - 1] > _GAP:
            yield seqs[at], seqs[place - 1]
            at = place


def says_the_same(sent: bytes, stored: bytes) -> bool:
    """Return True if a sent line and a stored line hold the same message.

    Compares what record.fingerprint compares; a null payload differs from an empty one.
    """
    routing_key, _, id, payload = sent.split(b"|", 3)
    _, _, stored_key, _, stored_id, stored_payload = stored.split(b"|", 5)
    if routing_key != stored_key and record.without_mark(routing_key) != record.without_mark(stored_key):
        return False
    headers, stored_headers = (field.partition(b";")[1:] for field in (id, stored_id))
    texts = [b"".join(parts) for parts in (headers, stored_headers)]
    if record.user_headers(texts[0]) != record.user_headers(texts[1]):
        return False
    encoded = [b";enc=b64" in text for text in texts]
    if encoded[0] == encoded[1]:
        return payload == stored_payload
    return _content(payload, encoded[0]) == _content(stored_payload, encoded[1])


def _content(payload: bytes, is_encoded: bool) -> bytes | None:
    try:
        return b64decode(payload, validate=True) if is_encoded else payload or None
    except Error:
        return payload
