"""The connections of a writing task: they send whole lines that carry their ids, and the broker stores each line once.

The broker replies `!dup <n> <seq>` to an id that it has already. The task finds the stored record and compares it with
the row: in the WAL at that seq. Of an old id the broker no longer knows the seq. Then the record is searched by
producer and id, backwards from the end of the WAL, because a producer's ids rise. A record that retention has removed
from the WAL is searched in the same way in its topic's partitions. With several brokers each is searched, first the
broker that had the previous record: producer and id are unique.

Invariant   A row counts as stored only when the broker has acknowledged it (`!ack`), or when the record stored under
            the row's producer and id has the same content: topic, key, user's headers and payload, as in
            record.fingerprint. The task compares it in the broker's logs, byte by byte, or the broker compares it,
            which remembers checksums of a producer's last 4,096 ids. An id whose content differs, or that no log holds
            any more, never counts as the row's. `kmq.replay` decides what happens to such a row: stop ends the task,
            again stores the row under the producer's next name, trust counts the row as stored.
Again       The names of a producer are name, name:1, name:2 … A row belongs to the first name under which its id is
            free or has the same content. So a replay of a replay finds each row where the previous replay put it.
            Nothing is lost, whatever has changed in between.
Resent      Lines sent again after a broken connection may already be stored. Where the broker's logs cannot be read,
            such lines count as this task's own, because no other attempt has written in between.
Memory      _IN_FLIGHT_BYTES of lines for each open connection, one block of a log, and the records found in it.
"""

import logging
import re
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

from kmq.client.producer import Delivery
from kmq.config.values import MIB
from kmq.errors import EXIT_CONFIG, ConfigError, KmqError, RetryError
from kmq.log.reader import WAL
from kmq.message import record, routing
from kmq.message.ids import MAX_NAME, PRINTS
from kmq.message.routing import Topic
from kmq.message.text import decode_payload
from kmq.sending.failures import Fenced, NotAnswered, Refused
from kmq.spark.sink.targets import AGAIN, TRUST, WriteOptions, check, producer
from kmq.spark.source.broker import Broker

# --- stored records --------------------------------------------------------------------------------------------------

_GAP = 2000  # seqs: wanted records at most this far apart are read together, with all records between them
_STEP = 1 << 16  # records: the first step of a search backwards
_SETTLE_S = 10.0  # how long an acknowledged record may take to become readable
_TICK_S = 0.02
_NO_SEQ = 1 << 62


class Sent(NamedTuple):
    """A sent line whose id the broker had already; `seq` is that of the stored record, 0 if unknown."""

    id: int
    seq: int
    line: bytes


class StoredRecords:
    """The logs of the brokers that a task writes to."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = list(brokers)
        # (broker, topic, partition, producer) → (id, offset) of the record found last
        self._places: dict[tuple[str, str, int, str], tuple[int, int]] = {}

    def find(self, producer: str, sent: Sequence[Sent]) -> dict[int, bytes]:
        """Return {id: stored line} of the records that a log still holds."""
        search, deadline = _RecordSearch(producer.encode(), sent), time.monotonic() + _SETTLE_S
        while True:
            self._search(self._search_wal, search)
            if not search.missing or not search.is_ahead or time.monotonic() > deadline:
                break
            time.sleep(_TICK_S)
        self._search(self._search_topics, search)
        return search.found

    def _search(self, search_broker: Callable[[Broker, "_RecordSearch"], None], search: "_RecordSearch") -> None:
        """Search one broker after the other until nothing is missing; a broker with a match comes first next time."""
        search.is_ahead = False
        for broker in list(self._brokers):
            before = len(search.missing)
            if before:
                search_broker(broker, search)
            if len(search.missing) < before:
                self._brokers.remove(broker)
                self._brokers.insert(0, broker)

    def _search_wal(self, broker: Broker, search: "_RecordSearch") -> None:
        first, end = broker.bounds([WAL])[WAL, 0]
        search.is_ahead |= any(sent.seq >= end for sent in search.missing.values())
        for low, high in ranges(sorted(sent.seq for sent in search.missing.values() if first <= sent.seq < end)):
            for _, lines in broker.read(WAL, 0, low, high + 1):
                search.add_by_seq(lines)
        self._search_by_id(broker, WAL, 0, (first, end), search)

    def _search_topics(self, broker: Broker, search: "_RecordSearch") -> None:
        by_topic: dict[str, list[Sent]] = {}
        there, marks_from = broker.topics(), broker.marks_from()
        table = routing.table([Topic(name, found.partitions, 0) for name, found in there.items()], {}, marks_from)
        for sent in search.missing.values():
            route = routing.resolve(table, record.sent_fields(sent.line).routing_key, sent.seq or _NO_SEQ)
            by_topic.setdefault(route.topic.decode(errors="replace"), []).append(sent)
        bounds = broker.bounds([topic for topic in by_topic if topic in there])
        for (topic, partition), ends in bounds.items():
            wanted = [sent for sent in by_topic[topic] if sent.id in search.missing]
            seqs = sorted(sent.seq for sent in wanted if sent.seq)
            for low, high in ranges(seqs):
                start, end = (broker.offset_of_seq(topic, partition, seq) for seq in (low, high + 1))
                for _, lines in broker.read(topic, partition, start, end):
                    search.add_by_seq(lines)
            self._search_by_id(broker, topic, partition, ends, search)

    def _search_by_id(
        self, broker: Broker, topic: str, partition: int, ends: tuple[int, int], search: "_RecordSearch"
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
                    search.add(id, line)
                self._places[log] = id, record.seq_of(line) if topic == WAL else before

    def _offset_before(
        self, broker: Broker, topic: str, partition: int, ends: tuple[int, int], search: "_RecordSearch", id: int
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


class _RecordSearch:
    """The records that are searched, and those found so far."""

    def __init__(self, producer: bytes, sent: Sequence[Sent]) -> None:
        self.producer = producer
        self.missing = {line.id: line for line in sent}
        self.found: dict[int, bytes] = {}
        self.is_ahead = False  # an acknowledged record is not readable in the WAL yet
        self._ids = {b"%d" % line.seq: line.id for line in sent if line.seq}  # seq → id
        self._mark = b";p=" + producer

    def add(self, id: int, line: bytes) -> None:
        self.found[id] = line
        del self.missing[id]

    def add_by_seq(self, lines: bytes) -> None:
        """Add the lines that have a wanted seq and belong to this producer."""
        ids = self._ids
        for line in lines.split(b"\n"):
            id = ids.get(line[: line.find(b"|")])  # hot loop: record.seq_of, as it is stored
            if id is not None and id in self.missing and self._id_in(line) == id:
                self.add(id, line)

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
        """Return the id of a stored line, or -1 if the line belongs to another producer."""
        number, _, rest = record.fields(line).id.partition(b";p=")
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
    routing_key, _, id, payload = record.sent_fields(sent)
    _, _, stored_key, _, stored_id, stored_payload = record.fields(stored)
    if routing_key != stored_key and record.without_mark(routing_key) != record.without_mark(stored_key):
        return False
    headers, stored_headers = (field.partition(b";")[1:] for field in (id, stored_id))
    texts = [b"".join(parts) for parts in (headers, stored_headers)]
    if record.user_headers(texts[0]) != record.user_headers(texts[1]):
        return False
    encoded = [b";enc=" in text for text in texts]
    if encoded == [False, False]:
        return bool(payload == stored_payload)
    return decode_payload(texts[0], payload) == decode_payload(texts[1], stored_payload)


# --- sending ---------------------------------------------------------------------------------------------------------

_IN_FLIGHT_BYTES = 16 * MIB
_MAX_OPEN = 8  # simultaneous connections of a task whose rows have many producers
_SAY_S = 10.0
_FIRST_S = 1.0  # wait for a connection this long before the first check for a permanent fault
_TURNS_S = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # growing pauses of a fenced sender: two attempts never block each other
_MAX_NAMES = 20  # names of one producer whose rows are stored again
_TAKEN = ("id_reused", "id_too_old")  # codes of refusals: the id belongs to another row
_SHOWN_BYTES = 200  # of a line in an error
_SEQ = re.compile(r"as seq (\d+)")  # in the reason of a refusal
_ADVICE = (
    "rows were sent again that differ from the stored ones: the query, its source or its parallelism has changed, or"
    " two writes share a kmq.producer (each needs its own). kmq.replay=again stores rows that are not stored under new"
    " ids, so that rows may be there twice but none is lost; kmq.replay=trust compares ids only, and loses rows that"
    " have changed"
)
_NOT_COMPARABLE = (
    "it is stored already, and {:,} ids below the last one: the broker knows the content of the last {:,} only. Give"
    " option path, its data directory, or kmq.bootstrap.servers, its gateway, so that rows sent again are compared; two"
    " writes of one foreachBatch need a kmq.producer each; kmq.replay=trust compares ids only"
)


class ReplayError(KmqError):
    """The broker has a row's id, but the row stored under it differs or cannot be compared."""

    def __init__(self, producer: str, id: int, problem: str, row: int | None = None) -> None:
        """`row`: the row's place in its Spark partition, if known."""
        self.producer, self.id, self.problem = producer, id, problem
        where = "" if row is None else f"row {row} of this Spark partition, "
        super().__init__(f"{where}producer {producer}, id {id}: {problem}")


class Senders:
    """The producers of a task: one, or those named in column `producer`. The most recently used ones stay connected."""

    def __init__(self, options: WriteOptions, place: int | None) -> None:
        """`place` selects the broker for all producers; if None, a producer's name selects it."""
        self._options, self._place = options, place
        self._open: OrderedDict[str, RowSender] = OrderedDict()
        self._duplicates = 0

    def max_line(self, name: str) -> int:
        return self._sender(name).max_line

    def send(self, name: str, lines: bytes) -> None:
        self._sender(name).send(lines)

    def _sender(self, name: str) -> "RowSender":
        sender = self._open.get(name)
        if sender is None:
            if len(self._open) >= _MAX_OPEN:
                self._close(next(iter(self._open)))
            place = zlib.crc32(name.encode()) if self._place is None else self._place
            sender = self._open[name] = RowSender(name, self._options, place % len(self._options.brokers))
        self._open.move_to_end(name)
        return sender

    def _close(self, name: str) -> None:
        sender = self._open.pop(name)
        sender.finish()
        self._duplicates += sender.duplicates

    def finish(self) -> int:
        """Wait for all replies and return how many rows had been stored before."""
        for name in list(self._open):
            self._close(name)
        return self._duplicates

    def __enter__(self) -> "Senders":
        return self

    def __exit__(self, *_: object) -> None:
        for sender in self._open.values():
            sender.abort()


class NoPartition(KmqError):
    """A row names a partition that its topic does not have."""

    exit_code = EXIT_CONFIG

    def __init__(self, producer: str, line: bytes) -> None:
        self.producer, self.id, mark = producer, _id_of(line), record.marked(record.sent_fields(line).routing_key)
        assert mark is not None
        self.problem = (
            f"{mark.partition}: topic {mark.topic.decode()} has no such partition, says the broker (unknown_partition);"
            " how many it has, kmq topics list shows there"
        )
        super().__init__(f"the row with id {self.id} of producer {producer}, column partition: {self.problem}")


class RowSender:
    """One producer at one broker, or at any serving broker of a shard. It sends whole lines with ids, each stored
    once.
    """

    def __init__(self, name: str, options: WriteOptions, at: int = 0, turn: int = 0) -> None:
        """`at`: the index of the broker. `turn`: which of the producer's names; 0 is the name itself."""
        self._first_name, self._options, self._at, self._turn = name, options, at, turn
        self._name = _name_of_turn(name, turn)
        self._stored = StoredRecords(options.logs(at)) if options.has_logs else None
        self._unsent: deque[bytes] = deque()
        self._sent: deque[tuple[Delivery, bytes]] = deque()  # had no reply at the last check
        self._turns = iter(_TURNS_S)
        self._next: RowSender | None = None  # the sender under the next name, for rows that are stored again
        self.duplicates = 0
        self._connect()

    def send(self, lines: bytes) -> None:
        """Queue lines; wait while the broker applies back-pressure."""
        self._unsent.append(lines)
        self._send_queued(False)

    def finish(self) -> None:
        """Wait until all lines are stored, then close the connection."""
        try:
            self._send_queued(True)
            if self._next is not None:
                self._next.finish()
                self.duplicates += self._next.duplicates
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the connection now."""
        self.producer.abort()
        if self._next is not None:
            self._next.abort()

    def _connect(self) -> None:
        options, self._doors = self._options, self._options.doors(self._at)
        self.producer = producer(
            self._doors,
            options.access,
            producer=self._name,
            # The lines carry their own ids. Ask and wait for the last stored id only if the logs cannot be read.
            first_id=0 if self._stored or options.replay == TRUST else None,
            timeout_s=options.timeout_s,
            max_in_flight_bytes=_IN_FLIGHT_BYTES,
            stall_s=_SAY_S,
            on_stall=self._warn,
        )
        deadline, tick_s = time.monotonic() + options.timeout_s, _FIRST_S
        while True:
            try:
                self.max_line = self.producer.connect(max(0.0, min(tick_s, deadline - time.monotonic())))
                self._last_id = self.producer.last_id
                return
            except NotAnswered as err:
                tick_s = _SAY_S
                self._check_for_fault()
                if time.monotonic() >= deadline:
                    self.producer.abort()
                    raise self._failed(err) from err
                self._warn(str(err))
                options.recognise()  # the shard may not have been known when the query began
                if len(options.doors(self._at)) > len(self._doors):
                    self.producer.abort()
                    return self._connect()
            except Refused as err:
                self.producer.abort()
                raise self._failed(err) from err

    def _check_for_fault(self) -> None:
        """Raise ConfigError if the connection fails for a reason that waiting cannot fix."""
        try:
            check(self._doors[0], self._options.access, is_host_sure=True)
        except ConfigError as err:
            self.producer.abort()
            raise ConfigError(f"producer {self._name} at {err}") from err

    def _send_queued(self, until_stored: bool) -> None:
        while True:
            try:
                while self._unsent:
                    delivery = self.producer.send_lines(self._unsent[0])
                    delivery.seen = True  # this class handles the outcome itself
                    self._sent.append((delivery, self._unsent.popleft()))
                if until_stored:
                    self.producer.flush()
                while self._sent and self._sent[0][0].done:
                    delivery, lines = self._sent[0]
                    if delivery.answered < delivery.count:
                        self.producer.flush()  # raises its last error; lines without a reply stay for the next turn
                    self._sent.popleft()
                    self._settle(delivery, lines)
                return
            except Fenced as err:
                self._wait_for_turn(err)
            except (Refused, NotAnswered) as err:
                raise self._failed(err) from err

    def _wait_for_turn(self, err: Fenced) -> None:
        """Pause, then reconnect: another attempt of this task is writing.

        If the other attempt succeeds, Spark ends this one; an attempt left behind by a dead driver ends soon.
        """
        pause_s = next(self._turns, None)
        if pause_s is None:
            raise self._failed(err) from err
        self._warn(f"fenced: another attempt of this task, or a job of the same name; next turn in {pause_s:g} s")
        self.producer.abort()
        unanswered = []
        for delivery, lines in self._sent:
            self._settle(delivery, lines)
            if delivery.answered < delivery.count:
                unanswered.append(lines.split(b"\n", delivery.answered)[-1])
        self._sent.clear()
        self._unsent.extendleft(reversed(unanswered))
        time.sleep(pause_s)
        self._connect()

    # --- rows that had been stored before ----------------------------------------------------------------------------

    def _settle(self, delivery: Delivery, lines: bytes) -> None:
        """Check that each row with a reply is stored; if its record differs, store the row again or raise."""
        if not (delivery.duplicates or delivery.refused):
            return
        rows = lines.split(b"\n")
        self.duplicates += len(delivery.duplicates)
        problems: dict[int, str] = {}  # place of a row in `lines` → what is wrong
        if self._options.replay != TRUST:
            places = {_id_of(rows[place]): place for place, _ in delivery.duplicates}
            repeated = [Sent(_id_of(rows[place]), seq, rows[place]) for place, seq in delivery.duplicates]
            problems = {places[id]: problem for id, problem in self._compare(repeated)}
            self.duplicates -= len(problems)
        for place, refusal in delivery.refused.items():
            if refusal.code not in _TAKEN or self._options.replay == TRUST:
                raise refusal
            problems[place] = refusal.reason
        if not problems:
            return
        first = min(problems)
        why = self._refusal(delivery.refused[first], rows[first]) if first in delivery.refused else problems[first]
        if self._options.replay != AGAIN:
            raise ReplayError(self._name, _id_of(rows[first]), f"{why}; {_ADVICE}")
        self._store_again([rows[place] for place in sorted(problems)], why)

    def _compare(self, repeated: list[Sent]) -> list[tuple[int, str]]:
        """Return (id, problem) of each repeated row whose stored record differs or is not found."""
        if self._stored is None:
            for sent in repeated:
                if sent.id <= self._last_id - PRINTS:
                    raise ReplayError(self._name, sent.id, _NOT_COMPARABLE.format(self._last_id - sent.id, PRINTS))
            return []
        stored_lines = self._stored.find(self._name, repeated)
        problems = []
        for sent in repeated:
            stored = stored_lines.get(sent.id)
            if stored is None:
                seq = f" as seq {sent.seq}" if sent.seq else ""
                problems.append((sent.id, f"what is stored{seq} is in no log any more; came {_shown(sent.line)}"))
            elif not says_the_same(sent.line, stored):
                problems.append((sent.id, f"stored is {_shown(stored)}; came {_shown(sent.line)}"))
        return problems

    def _refusal(self, refusal: Refused, line: bytes) -> str:
        if refusal.code == "id_too_old":
            return f"ids above it are stored, and it is not known itself; came {_shown(line)}"
        id, seq = _id_of(line), _SEQ.search(refusal.reason)
        sent = Sent(id, int(seq[1]) if seq else 0, line)
        stored = self._stored.find(self._name, [sent]).get(id) if self._stored else None
        other = _shown(stored) if stored else f"something else as seq {sent.seq} (id_reused)"
        return f"stored is {other}; came {_shown(line)}"

    def _store_again(self, lines: list[bytes], why: str) -> None:
        if self._next is None:
            if self._turn + 1 >= _MAX_NAMES:
                raise ReplayError(
                    self._name, _id_of(lines[0]), f"{why}; and so it is under {_MAX_NAMES - 1} other names"
                )
            self._next = RowSender(self._first_name, self._options, self._at, self._turn + 1)
            self._warn(f"id {_id_of(lines[0])} is another row's: {why}; such rows are stored as {self._next._name}")
        self._next.send(b"\n".join(lines) + b"\n")

    def _failed(self, err: KmqError) -> KmqError:
        if isinstance(err, Refused) and err.code == "unknown_partition":
            return NoPartition(self._name, err.line)
        kind = RetryError if isinstance(err, (NotAnswered, Fenced)) else KmqError
        return kind(f"producer {self._name} at {self._addresses}: {err}")

    def _warn(self, text: str) -> None:
        log().warning("producer %s at %s: %s", self._name, self._addresses, text)

    @property
    def _addresses(self) -> str:
        return ",".join(map(str, self._doors))


def _name_of_turn(name: str, turn: int) -> str:
    if not turn:
        return name
    suffixed = f"{name}:{turn}"
    return suffixed if len(suffixed) <= MAX_NAME else f"{sha256(name.encode()).hexdigest()[:48]}:{turn}"


def _id_of(line: bytes) -> int:
    return int(record.sent_fields(line).id.partition(b";")[0])


def _shown(line: bytes) -> str:
    return repr(line[:_SHOWN_BYTES])[1:] + ("…" if len(line) > _SHOWN_BYTES else "")


def log() -> logging.Logger:
    return logging.getLogger("kmq.spark")
