"""What a broker has stored under a producer's ids, so that a row that comes again is compared with it.

A broker answers `!dup <n> <seq>` to an id that it has. The record is looked for in the WAL at that seq; without a seq (the broker
knows an old id, not its place) by producer and id, from the end of the WAL backwards, because a producer's ids rise. What
the retention of the WAL has taken is looked for in the partitions of its topic in the same way.

Invariant   A row counts as stored only if a record with this producer and this id says the same: topic, key, the user's headers
            and payload, as in the broker's own comparison (record.fingerprint), but byte by byte. A record that no log holds
            any more says nothing.
Brokers     Of several each is asked, and the one that had the record before first: producer and id tell whose it is.
Memory      One block of lines, and those that are asked for.
"""

import time
from base64 import b64decode
from binascii import Error
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kmq import record, routing
from kmq.spark.source.broker import Broker
from kmq.spark.source.options import WAL

_GAP = 2000  # seqs between two that are wanted: what lies there is read with them
_STEP = 1 << 16  # records: the first step of a search backwards
_SETTLE_S = 10.0  # how long a record that was acknowledged may take to be seen
_TICK_S = 0.02
_NO_SEQ = 1 << 62


class Sent(NamedTuple):
    """A line as sent whose id the broker has: as which seq, or 0."""

    id: int
    seq: int
    line: bytes


class Stored:
    """The logs of the brokers that a task writes to."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = list(brokers)
        self._places: dict[
            tuple[str, str, int, str], tuple[int, int]
        ] = {}  # a log and a producer → (id, offset) found last

    def find(self, producer: str, sent: Sequence[Sent]) -> dict[int, bytes]:
        """id → stored line, of those that a log still holds."""
        search, deadline = _Search(producer.encode(), sent), time.monotonic() + _SETTLE_S
        while True:
            self._look(self._in_wal, search)
            if not search.missing or not search.is_ahead or time.monotonic() > deadline:
                break
            time.sleep(_TICK_S)
        self._look(self._in_topics, search)
        return search.found

    def _look(self, look: Callable[[Broker, "_Search"], None], search: "_Search") -> None:
        """In one broker after the other, until nothing is missing; the one that has something is the first from now on."""
        search.is_ahead = False
        for broker in list(self._brokers):
            before = len(search.missing)
            if before:
                look(broker, search)
            if len(search.missing) < before:
                self._brokers.remove(broker)
                self._brokers.insert(0, broker)

    def _in_wal(self, broker: Broker, search: "_Search") -> None:
        first, end = broker.bounds([WAL])[WAL, 0]
        search.is_ahead |= any(each.seq >= end for each in search.missing.values())
        for low, high in _ranges(sorted(each.seq for each in search.missing.values() if first <= each.seq < end)):
            for _, lines in broker.read(WAL, 0, low, high + 1):
                search.take_seqs(lines)
        self._by_id(broker, WAL, 0, (first, end), search)

    def _in_topics(self, broker: Broker, search: "_Search") -> None:
        by_topic: dict[str, list[Sent]] = {}
        partitions, marks_from = broker.topics(), broker.marks_from()
        table = routing.table([(name, count, 0) for name, count in partitions.items()], {}, marks_from)
        for each in search.missing.values():
            route = routing.resolve(table, each.line[: each.line.index(b"|")], each.seq or _NO_SEQ)
            by_topic.setdefault(route.topic.decode(errors="replace"), []).append(each)
        bounds = broker.bounds([topic for topic in by_topic if topic in partitions])
        for (topic, partition), ends in bounds.items():
            wanted = [each for each in by_topic[topic] if each.id in search.missing]
            seqs = sorted(each.seq for each in wanted if each.seq)
            for low, high in _ranges(seqs):
                start, end = (broker.offset_of_seq(topic, partition, seq) for seq in (low, high + 1))
                for _, lines in broker.read(topic, partition, start, end):
                    search.take_seqs(lines)
            self._by_id(broker, topic, partition, ends, search)

    def _by_id(self, broker: Broker, topic: str, partition: int, ends: tuple[int, int], search: "_Search") -> None:
        """Those whose seq is not known: forward from the last that was found, or from where the search backwards leads."""
        ids = [each.id for each in search.missing.values() if not each.seq]
        if not ids:
            return
        log = broker.name, topic, partition, search.producer.decode()
        id, offset = self._places.get(log, (-1, 0))
        if not 0 <= id < min(ids) or offset < ends[0]:
            offset = self._before(broker, topic, partition, ends, search, min(ids))
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

    def _before(
        self, broker: Broker, topic: str, partition: int, ends: tuple[int, int], search: "_Search", id: int
    ) -> int:
        """An offset behind which this id is, if it is there at all; steps back from the end are ever longer."""
        first, end = ends
        step, low = _STEP, end
        while low > first:
            high, low = low, max(first, low - step)
            step *= 2
            for _, lines in broker.read(topic, partition, low, high):
                found = next(search.own(lines), None)
                if found is not None:
                    if found[1] <= id:
                        return low
                    break
        return first


class _Search:
    """What is looked for, and what has been found."""

    def __init__(self, producer: bytes, sent: Sequence[Sent]) -> None:
        self.producer = producer
        self.missing = {each.id: each for each in sent}
        self.found: dict[int, bytes] = {}
        self.is_ahead = False  # the WAL does not yet show all that has been acknowledged
        self._ids = {b"%d" % each.seq: each.id for each in sent if each.seq}  # by seq
        self._mark = b";p=" + producer

    def take(self, id: int, line: bytes) -> None:
        self.found[id] = line
        del self.missing[id]

    def take_seqs(self, lines: bytes) -> None:
        """The lines of seqs that are wanted, where they are this producer's."""
        ids = self._ids
        for line in lines.split(b"\n"):
            id = ids.get(line[: line.find(b"|")])
            if id is not None and id in self.missing and self._id_in(line) == id:
                self.take(id, line)

    def own(self, lines: bytes) -> Iterator[tuple[int, int, bytes]]:
        """(place, id, line) of those that are this producer's."""
        at = lines.find(self._mark)
        while at >= 0:
            start, end = lines.rfind(b"\n", 0, at) + 1, lines.find(b"\n", at)
            line = lines[start:end]
            id = self._id_in(line)
            if id >= 0:
                yield start, id, line
            at = lines.find(self._mark, end)

    def _id_in(self, line: bytes) -> int:
        """The id of a stored line; -1 where it is not this producer's."""
        field = line.split(b"|", 5)[4]
        number, _, rest = field.partition(b";p=")
        return int(number) if number.isdigit() and rest.partition(b";")[0] == self.producer else -1


def _ranges(seqs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of seqs that are read together."""
    at = 0
    for place in range(1, len(seqs) + 1):
        if place == len(seqs) or seqs[place] - seqs[place - 1] > _GAP:
            yield seqs[at], seqs[place - 1]
            at = place


def says_the_same(sent: bytes, stored: bytes) -> bool:
    """Whether a line as sent is the message of a stored line: what record.fingerprint compares, and null apart from empty."""
    routing_key, _, id, payload = sent.split(b"|", 3)
    _, _, stored_key, _, stored_id, stored_payload = stored.split(b"|", 5)
    if routing_key != stored_key and record.without_mark(routing_key) != record.without_mark(stored_key):
        return False
    headers, stored_headers = (field.partition(b";")[1:] for field in (id, stored_id))
    texts = [b"".join(each) for each in (headers, stored_headers)]
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
