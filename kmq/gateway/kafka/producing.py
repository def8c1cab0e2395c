"""Produce and InitProducerId: batches of records become lines, and the reply has their offset in the partition.

    Produce of orders/0, a batch of 3 records    → PRODUCE response: error 0, base_offset 17

Exactly     A batch of an idempotent producer has ids that rise with its sequences, their wrap-around and its epochs.
once        The dedupe table of the framer is the only memory: it survives kills, compaction and a change of leader. What
            the door also remembers of a producer (`_Name`) was asked for there, and is forgotten when anything fails.
Order       The batches of a connection are judged and handed over in the order in which they came. A batch after a
            refused one is a gap until the refused one was sent again, because its client repeats in order. Each refusal
            is noted, even one before the topic or its partition is known. The framer may refuse a batch while the next
            one is being sent. So each batch says which id must be stored before it.
First       A producer whose name is unknown begins with sequence 0. Another first sequence is a gap. Otherwise the
            client would take its reply as proof that the refused sequence 0 is stored. It is accepted in two cases. The
            framer may have forgotten the name: it remembers the highest producer id of all names that it forgot. Or the
            partition begins after offset 0: its topic may have had an earlier life, in which the name was another.
Unsure      A client that is told of a gap begins a new epoch, and sends all unanswered batches again under it. So while
            an earlier batch may be stored without its client knowing, the reply is not a gap but "send again".
Offset      The base offset is that of the first record, if the whole batch follows it without a gap: the first and the
            last record are looked up. Otherwise it is -1, unknown. It is never wrong.
Without     Batches without a producer id get ids of the door's own, so that a broken connection to ingress stores
a pid       nothing twice.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from kmq.config.settings import Settings
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.core.finding import StoredPlace
from kmq.gateway.core.producing import ANSWER_S
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.bodies import UNKNOWN, Produced, ProducedPart, produce_response, read_produce
from kmq.gateway.kafka.cache import TailCache
from kmq.gateway.kafka.connection import Call, Connection, Handler
from kmq.gateway.kafka.records import BatchRefused, RecordBatch, RenderedLines, read_batches, read_producer, render
from kmq.gateway.kafka.transaction import HeldBatch, TransactionRefused
from kmq.gateway.kafka.transactions import Transactions
from kmq.gateway.kafka.units import UNIT_BYTES, SeqRun, Units, split
from kmq.gateway.kafka.wire import BadRequest, ErrorCode, Fields, Key
from kmq.log.damage import DamageError
from kmq.logfmt import Logger
from kmq.message.ids import PIDS_PER_LIFE
from kmq.message.record import parse_stored
from kmq.wire.requests import TopicPartition

_EPOCH_IDS, _SEQUENCES = 1 << 44, 1 << 31  # ids of one epoch; sequences before they begin again at 0
_NAMES = 20_000  # producers that the door remembers
_OWN_NAMES = 16
_REPEATED_S = 300.0  # in which a client repeats a refused batch or gives it up (delivery.timeout.ms is 2 minutes)
_MOST_UNSURE = 100  # batches of a name; clients send 5 without replies
_AT_ONCE = 4  # batches that are rendered at a time
_SMALL = 4096, 1000  # compressed bytes and records of a batch that is rendered without a thread
_IN_THREAD = 128 << 10  # bytes of a batch that go to a thread, because they would block the event loop
_ACKS = (-1, 0, 1)


class _Name:
    """One producer in one partition: what the door knows of its ids. The framer knows it only as a name."""

    __slots__ = (*("finishing", "from_seq", "last", "refused", "refused_at", "timestamp", "turn", "unsure", "users"),)

    def __init__(self) -> None:
        self.from_seq = 0  # the life of the topic that `last` belongs to
        # The last id that was handed over. 0: nothing is stored; FORGOTTEN: perhaps something is; None: ask the framer.
        self.last: int | None = None
        self.refused, self.refused_at = 0, 0.0  # the lowest id refused and not repeated since; 0: no refusal
        # First ids of batches that may be stored although the client does not know it, and when they were sent.
        self.unsure: dict[int, float] = {}
        self.finishing: dict[asyncio.Task[Produced], None] = {}  # batches that wait for their offsets
        self.timestamp = -1  # the highest in its last batch
        self.turn = asyncio.Lock()
        self.users = 0

    def last_stored_id(self) -> int:
        """Return the last stored id, as far as it is known; 0: no id."""
        return max(0, self.last or 0)

    def begin(self, from_seq: int) -> None:
        """If the topic was deleted and declared again, forget the last id, so that it is asked for."""
        if self.from_seq != from_seq:
            self.from_seq, self.last = from_seq, None

    def refuse(self, first_id: int) -> None:
        """Note that the batch beginning with this id was not stored, or may not have been."""
        is_same = self.refused and _epoch_of(self.refused) == _epoch_of(first_id)
        self.last, self.refused = None, min(self.refused, first_id) if is_same else first_id
        self.refused_at = time.monotonic()

    def is_gap(self, first_id: int) -> bool:
        """Return True for a batch that follows a refused one: its client repeats in order."""
        if not self.has_refused():
            return False
        is_behind = _epoch_of(self.refused) == _epoch_of(first_id) and first_id > self.refused
        return is_behind and self.last_stored_id() < self.refused

    def has_refused(self) -> bool:
        """Return True if a batch was refused that its client may send again."""
        return bool(self.refused) and time.monotonic() - self.refused_at <= _REPEATED_S

    def doubt(self, first_id: int) -> None:
        """Note that the batch beginning with this id may be stored, and that its client does not know."""
        if len(self.unsure) >= _MOST_UNSURE:
            del self.unsure[max(self.unsure)]  # the client sends in order, so lower ids are settled first
        self.unsure[first_id] = time.monotonic()

    def settle(self, first_id: int) -> None:
        """Note that the client is told that this batch is stored."""
        self.unsure.pop(first_id, None)

    def is_unsure(self, first_id: int) -> bool:
        """Return True for a batch that follows one which may be stored without its client knowing."""
        since, epoch = time.monotonic() - _REPEATED_S, _epoch_of(first_id)
        self.unsure = {id: at for id, at in self.unsure.items() if at > since and _epoch_of(id) >= epoch}
        return any(id < first_id and (self.last is None or id <= self.last_stored_id()) for id in self.unsure)


class _Own:
    """One of the names under which batches without a producer id are sent."""

    __slots__ = ("last", "number", "turn")

    def __init__(self, number: int) -> None:
        self.number, self.last = number, 0
        self.turn = asyncio.Lock()  # its ids must reach ingress in their order


class _Turn(NamedTuple):
    """Of a connection: the lock that keeps its batches in order, and its name for those without a producer id."""

    lock: asyncio.Lock
    own: _Own


class ProduceHandler:
    """Produce requests of all connections."""

    def __init__(
        self,
        settings: Settings,
        core: Core,
        life: Callable[[], int],
        cache: TailCache,
        units: Units,
        transactions: Transactions,
        log: Logger,
    ) -> None:
        """`life`: a number that no other gateway of the broker or shard has; 0: not known yet. `cache`: for fetches."""
        self._settings, self._core, self._life, self._cache, self._log = settings, core, life, cache, log
        self._units, self._transactions = units, transactions
        self._turns: dict[Connection, _Turn] = {}
        self._names: OrderedDict[tuple[int, str, int], _Name] = OrderedDict()  # least recently used first
        self._evicted_at = -_REPEATED_S  # when a name with a refusal was evicted
        self._given = 0  # number of producer ids given in this life
        self._rendering = asyncio.Semaphore(_AT_ONCE)
        self._own = [_Own(number) for number in range(_OWN_NAMES)]
        self._connected = 0  # connections that have produced
        self._finishing: set[asyncio.Task[Produced]] = set()  # also of connections that have ended
        self.handlers: dict[Key, Handler] = {
            Key.PRODUCE: self.produce,
            Key.INIT_PRODUCER_ID: self._init_producer_id,
            Key.DESCRIBE_PRODUCERS: self._describe_producers,
        }

    async def close(self) -> None:
        await self._units.close()

    # --- producer ids ------------------------------------------------------------------------------------------------

    async def _init_producer_id(self, call: Call) -> Fields:
        if call.body.transactional_id is not None:
            return await self._transactions.init(call, self._give_pid)
        try:
            return {"error_code": ErrorCode.none, "producer_id": self._give_pid(), "producer_epoch": 0}
        except RequestRefused as err:
            is_loading = err.code == "not_ready"
            code = ErrorCode.coordinator_load_in_progress if is_loading else ErrorCode.coordinator_not_available
            return {"error_code": code, "producer_id": UNKNOWN, "producer_epoch": UNKNOWN}

    def _give_pid(self) -> int:
        """Return a producer id that was never given. Raises RequestRefused."""
        pid = self._own_life() * PIDS_PER_LIFE + self._given
        if self._given >= PIDS_PER_LIFE:
            raise RequestRefused("busy", f"{PIDS_PER_LIFE} producer ids were given in this life of the gateway")
        self._given += 1
        return pid

    async def _describe_producers(self, call: Call) -> Fields:
        """Answer DescribeProducers: producers of a partition in this life of the gateway, with their last sequence."""
        producers: dict[tuple[int, int], list[Fields]] = {}
        for (pid, _, number), name in self._names.items():
            from_seq = name.from_seq
            if name.last and name.last_stored_id():
                row = {"producer_id": pid, "producer_epoch": _epoch_of(name.last), "last_timestamp": name.timestamp}
                # Records of an open transaction are not in the partition yet, so there is no offset at which it begins.
                row |= {"last_sequence": (name.last - 1) % _SEQUENCES, "coordinator_epoch": -1}
                producers.setdefault((from_seq, number), []).append(row | {"current_txn_start_offset": -1})

        def part(topic: str, number: int) -> Fields:
            code, text, found = ErrorCode.none, None, list[Fields]()
            try:
                count, from_seq = self._core.partitions.declared(topic)
                if not 0 <= number < count or from_seq is None:
                    raise RequestRefused("unknown_partition", f"{topic} has no partition {number}")
                found = producers.get((from_seq, number), found)
            except RequestRefused as err:
                code, text = wire.code_of(err), str(err)
                call.errors.append(code)
            return {"partition_index": number, "error_code": code, "error_message": text, "active_producers": found}

        wanted = [(topic.name, topic.partition_indexes) for topic in call.body.topics]
        return {"topics": [{"name": name, "partitions": [part(name, n) for n in numbers]} for name, numbers in wanted]}

    # --- produce -----------------------------------------------------------------------------------------------------

    async def produce(self, call: Call) -> bytes | None:
        """Store the batches of a request. Returns the response; None if the client wants none."""
        parts, acks = read_produce(call.body, call.version)
        if acks not in _ACKS:
            return produce_response(call, parts, [Produced(ErrorCode.invalid_required_acks)] * len(parts))
        turn, until = self._turn(call.connection), asyncio.get_running_loop().time() + ANSWER_S
        async with turn.lock:
            later = [await self._begin(call, turn.own, part, until) for part in parts]
        # Shielded, so that the outcome of a batch is noted even if its client has gone.
        produced = [each if isinstance(each, Produced) else await asyncio.shield(each) for each in later]
        call.errors.extend(found.code for found in produced if found.code)
        if acks:
            return produce_response(call, parts, produced)
        for found in produced:
            if found.code != ErrorCode.none:  # the only way to report a refusal to a client that awaits no reply
                raise BadRequest(f"a batch with acks=0 was refused: {found.code.name} {found.text or ''}")
        return None

    def _turn(self, connection: Connection) -> _Turn:
        if connection not in self._turns:
            self._connected += 1
            self._turns[connection] = _Turn(asyncio.Lock(), self._own[self._connected % _OWN_NAMES])
        return self._turns[connection]

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._turns.pop(connection, None)

    async def _begin(
        self, call: Call, own: _Own, part: ProducedPart, until: float
    ) -> "Produced | asyncio.Task[Produced]":
        """Judge a batch and hand over its lines. Returns its refusal, or the task that waits for its offset."""
        if not call.may(Key.PRODUCE):
            return Produced(ErrorCode.topic_authorization_failed)
        begun: Produced | asyncio.Task[Produced] | None = None
        name = self._name(part)
        try:
            async with asyncio.timeout_at(until):
                begun = await self._admit(own, part, name)
            return begun
        except BatchRefused as err:
            return Produced(err.code, text=str(err), record=err.index)
        except TransactionRefused as err:
            return Produced(err.code, text=str(err))
        except RequestRefused as err:
            return Produced(wire.code_of(err), text=str(err))
        except TimeoutError:
            return Produced(ErrorCode.request_timed_out)
        finally:
            if name is not None:
                name.users -= 1
                if begun is None:
                    _note_refused(name, part)

    async def _admit(self, own: _Own, part: ProducedPart, name: _Name | None) -> "Produced | asyncio.Task[Produced]":
        """Judge a batch and hand over its lines. Raises refusals that need no knowledge of earlier batches."""
        count, from_seq = self._core.partitions.declared(part.topic)
        if part.topic.startswith("__"):
            raise BatchRefused(ErrorCode.invalid_topic_exception, "topics of KMQ itself are not produced to")
        if not 0 <= part.partition < count or from_seq is None:
            text = f"{part.topic} has no partition {part.partition} yet"
            raise BatchRefused(ErrorCode.unknown_topic_or_partition, text)
        batches = read_batches(part.records or b"")
        if len(batches) != 1:
            raise BatchRefused(ErrorCode.invalid_record, f"{len(batches)} batches, where there must be one")
        batch = batches[0]
        if batch.is_transactional:
            return await self._begin_held(part, batch, from_seq, name)
        if batch.producer_id < 0:
            return await self._begin_own(own, part, batch, from_seq)
        if name is None or not self._is_ours(batch.producer_id):
            raise BatchRefused(ErrorCode.unknown_producer_id, f"{batch.producer_id} was not given here")
        if self._transactions.is_transactional(batch.producer_id):
            raise BatchRefused(ErrorCode.invalid_txn_state, "its producer sends in transactions alone")
        return await self._begin_idempotent(part, batch, from_seq, name)

    async def _lines(
        self, part: ProducedPart, batch: RecordBatch, label: bytes, first_id: int, held: HeldBatch | None = None
    ) -> RenderedLines:
        requires_key = self._core.partitions.is_compacted(part.topic)
        key = b"" if held is None else held.routing_key

        def work() -> RenderedLines:
            most = self._settings.max_line
            where = part.topic, part.partition
            return render(batch, *where, label, first_id, most, requires_key=requires_key, held=key)

        nbytes, records = _SMALL
        is_small = len(batch.data) <= (nbytes if batch.codec else _IN_THREAD) and batch.record_count <= records
        return work() if is_small else await asyncio.to_thread(work)

    def _is_ours(self, pid: int) -> bool:
        """Return True if this gateway, or an earlier life, has given this producer id. Raises RequestRefused."""
        now, (life, number) = self._own_life(), divmod(pid, PIDS_PER_LIFE)
        return 0 < life < now or (life == now and number < self._given)

    def _own_life(self) -> int:
        if not (life := self._life()):
            raise RequestRefused("not_ready", "the gateway is starting")
        return life

    async def _begin_own(
        self, own: _Own, part: ProducedPart, batch: RecordBatch, from_seq: int
    ) -> "asyncio.Task[Produced]":
        """Hand over a batch without a producer id."""
        life = self._own_life()
        async with own.turn, self._rendering:
            await self._units.room()
            first_id = own.last + 1
            label = b"auto-k%d.%d" % (life, own.number)
            lines = await self._lines(part, batch, label, first_id)
            own.last += batch.record_count
            return self._send_lines(label, part, batch, from_seq, lines, None, first_id)

    async def _begin_held(
        self, part: ProducedPart, batch: RecordBatch, from_seq: int, name: _Name | None
    ) -> "Produced | asyncio.Task[Produced]":
        """Hand over a batch of a transaction, which is held back until it is committed."""
        if name is None:
            raise BatchRefused(ErrorCode.invalid_producer_id_mapping, f"{batch.producer_id} was not given here")
        held = await self._transactions.hold(batch.producer_id, batch.producer_epoch, (part.topic, part.partition))
        try:
            begun = await self._begin_idempotent(part, batch, from_seq, name, held)
        except BaseException:
            held.leave()
            raise
        if isinstance(begun, Produced):
            held.leave()
        else:
            begun.add_done_callback(lambda _: held.leave())
        return begun

    async def _begin_idempotent(
        self, part: ProducedPart, batch: RecordBatch, from_seq: int, name: _Name, held: HeldBatch | None = None
    ) -> "Produced | asyncio.Task[Produced]":
        """Hand over a batch of a producer, if it is the next one, or may be stored already."""
        label = b"k%d.%d.%d" % (batch.producer_id, from_seq, part.partition)
        async with name.turn:
            name.begin(from_seq)
            while True:
                if name.last is None:
                    name.last = await self._units.last_id(label)
                before = name.last, name.refused
                first_id = _first_id(batch.producer_epoch, batch.base_sequence, name.last_stored_id())
                refused = _judge(batch, first_id, name) or await self._judge_first(part, batch, name)
                if refused is not None:
                    is_gap = refused.code == ErrorCode.out_of_order_sequence_number
                    gap = _gap_of(name, first_id, refused, {*name.finishing}) if is_gap else None
                    return refused if gap is None else self._in_task(gap, name)
                if held is not None:
                    place = part.topic, part.partition
                    held = await self._transactions.placed(held, place, first_id, name.last_stored_id())
                async with self._rendering:
                    await self._units.room()
                    lines = await self._lines(part, batch, label, first_id, held)
                    if (name.last, name.refused) == before:  # no earlier batch was refused meanwhile
                        after = min(name.last_stored_id(), first_id - 1)
                        task = self._send_lines(label, part, batch, from_seq, lines, name, first_id, after, held)
                        break
            name.last, name.timestamp = (
                max(name.last_stored_id(), first_id + batch.record_count - 1),
                batch.max_timestamp,
            )
            if first_id <= name.refused or _epoch_of(name.refused) < batch.producer_epoch:
                name.refused = 0
            return task

    async def _judge_first(self, part: ProducedPart, batch: RecordBatch, name: _Name) -> Produced | None:
        """Return the refusal of a producer's first known batch; None if no earlier record can be missing."""
        if name.last != 0 or not batch.base_sequence:
            return None
        try:
            start = await asyncio.to_thread(self._core.partitions.open(part.topic, part.partition).start)
        except DamageError as err:
            raise RequestRefused("damaged", str(err)) from err
        if start and time.monotonic() - self._evicted_at > _REPEATED_S:
            return None
        return _gap(batch, "its producer has stored nothing here")

    def _name(self, part: ProducedPart) -> _Name | None:
        """Return the state of a batch's producer, or None without one. The caller must take 1 off its `users`."""
        producer = read_producer(part.records or b"")
        if producer is None:
            return None
        with suppress(RequestRefused):  # while the gateway starts, its life is not known yet
            if not self._is_ours(producer.id):
                return None
        key = producer.id, part.topic, part.partition
        name = self._names.pop(key, None) or _Name()
        self._names[key] = name
        name.users += 1
        while len(self._names) > _NAMES and not next(iter(self._names.values())).users:
            _, evicted = self._names.popitem(last=False)
            if evicted.has_refused():
                self._evicted_at = time.monotonic()
        return name

    def _send_lines(
        self,
        label: bytes,
        part: ProducedPart,
        batch: RecordBatch,
        from_seq: int,
        lines: RenderedLines,
        name: _Name | None,
        first_id: int,
        after: int = 0,
        held: HeldBatch | None = None,
    ) -> "asyncio.Task[Produced]":
        """Send the lines to ingress. `after`: the id of the name that must be stored before them."""
        link, most = self._units, self._settings.max_line + UNIT_BYTES
        if held is not None:
            held.handed_over(len(lines.text))
        on_refused = (lambda _: None) if name is None else partial(_note_lost, name, first_id)
        units = []
        for text, count in split(lines.text, batch.record_count, most):
            units.append(link.send(label, text, count, on_refused, after))
            first_id += count
            after = first_id - 1
        exact_from = from_seq if lines.is_exact else None
        finish = self._finish(part, batch, exact_from, units, held)
        if name is not None:
            finish = _settled(finish, units, name, first_id - batch.record_count)
        task = self._in_task(finish, name)
        if held is None:
            self._cache.expect(TopicPartition(part.topic, part.partition), task)
        return task

    def _in_task(self, work: Coroutine[Any, Any, Produced], name: _Name | None) -> "asyncio.Task[Produced]":
        """Run this as a task that goes on if the client leaves."""
        task = asyncio.create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        if name is not None:
            name.finishing[task] = None
            task.add_done_callback(name.finishing.pop)
        return task

    async def _finish(
        self,
        part: ProducedPart,
        batch: RecordBatch,
        from_seq: int | None,
        units: "list[asyncio.Future[list[SeqRun]]]",
        held: HeldBatch | None,
    ) -> Produced:
        """Wait until the lines are durable and routed, and find their offset. `from_seq` None: do not cache it."""
        try:
            async with asyncio.timeout(ANSWER_S):
                runs = [run for unit in units for run in await asyncio.shield(unit)]
        except TimeoutError:  # if the client repeats the batch, its ids are recognised
            return Produced(ErrorCode.request_timed_out)
        except RequestRefused as err:
            if err.code == "id_reused":
                self._log.warn("kafka_id_reused", topic=part.topic, partition=part.partition, reason=str(err))
            return Produced(wire.code_of(err), text=str(err))
        if held is not None:
            held.stored(max(run.seq + run.lines - 1 for run in runs))
            return Produced(offset=held.offset)
        try:
            offset, place = await self._offset(part, runs)
        except RequestRefused as err:
            return Produced(wire.code_of(err), text=str(err))
        if offset >= 0 and from_seq is not None and not any(run.is_duplicate for run in runs):
            last = offset + batch.record_count - 1
            self._cache.put(part.topic, part.partition, offset, last, bytes(batch.data), from_seq)
        return Produced(offset=offset, timestamp=self._timestamp(part.topic, place))

    def _timestamp(self, topic: str, place: StoredPlace | None) -> int:
        """Return the broker's timestamp of the first record, in milliseconds; -1 if the producer's is kept."""
        found = None if place is None else parse_stored(place.line)
        return found[1] // 1000 if found and self._core.partitions.shows_receipt(topic) else -1

    async def _offset(self, part: ProducedPart, runs: list[SeqRun]) -> tuple[int, StoredPlace | None]:
        """Return the offset of the first line if all lines follow it without a gap, else -1. Raises RequestRefused."""
        first, last = runs[0].seq, runs[-1].seq + runs[-1].lines - 1
        if not all(run.seq for run in runs):
            return UNKNOWN, None
        key = b"%b.@%d" % (part.topic.encode(), part.partition)
        try:
            places = await self._core.producing.places(part.topic, [(key, first), (key, last)])
        except DamageError as err:
            raise RequestRefused("damaged", str(err)) from err
        if last > self._core.watermark.routed:
            raise RequestRefused("stored_not_routed", f"seq {last} is on disk, but not in its partition yet")
        begin, end = places.get(first), places.get(last)
        if begin is None or end is None or (begin.partition, end.partition) != (part.partition,) * 2:
            return UNKNOWN, begin
        count = sum(run.lines for run in runs)
        return (begin.offset if end.offset - begin.offset == count - 1 else UNKNOWN), begin


# --- ids -------------------------------------------------------------------------------------------------------------


def _first_id(epoch: int, base_sequence: int, last: int) -> int:
    """Return the id of a batch's first record. `last`: the producer's last id, which tells how often they wrapped."""
    before = epoch * _EPOCH_IDS
    wraps, sequence = 0, base_sequence
    if last > before:
        wraps, expected = divmod(last - before - 1, _SEQUENCES)
        if expected - sequence > _SEQUENCES // 2:
            wraps += 1
        elif sequence - expected > _SEQUENCES // 2 and wraps:
            wraps -= 1
    return before + wraps * _SEQUENCES + sequence + 1


def _epoch_of(id: int) -> int:
    return (id - 1) // _EPOCH_IDS


# --- judgement -------------------------------------------------------------------------------------------------------


def _judge(batch: RecordBatch, first_id: int, name: _Name) -> Produced | None:
    """Return the refusal of a batch; None if it is the next one, or may be stored already."""
    last = name.last_stored_id()
    epoch = _epoch_of(last)
    if last and batch.producer_epoch < epoch:
        return Produced(ErrorCode.invalid_producer_epoch, text=f"epoch {batch.producer_epoch}, where {epoch} is known")
    if name.is_gap(first_id):
        return _gap(batch, "a batch before it was refused")
    if not last:
        return None
    if batch.producer_epoch > epoch:
        return None if not batch.base_sequence else _gap(batch, "a new epoch begins with sequence 0")
    return _gap(batch, "records before it are missing") if first_id > last + 1 else None


def _gap(batch: RecordBatch, why: str) -> Produced:
    return Produced(ErrorCode.out_of_order_sequence_number, text=f"sequence {batch.base_sequence}: {why}")


async def _gap_of(name: _Name, first_id: int, gap: Produced, before: "set[asyncio.Task[Produced]]") -> Produced:
    """Return the reply to a batch that follows a gap, once the outcome of earlier batches is known."""
    if before:
        await asyncio.wait(before)
    if name.is_unsure(first_id):
        return Produced(ErrorCode.request_timed_out, text="an earlier batch may be stored; send both again, in order")
    return gap


async def _settled(
    finish: Coroutine[Any, Any, Produced], units: "list[asyncio.Future[list[SeqRun]]]", name: _Name, first_id: int
) -> Produced:
    """Return the outcome of a producer's batch, and note what its client is told."""
    produced = await finish
    if produced.code == ErrorCode.none:
        name.settle(first_id)
    elif not all(unit.done() and unit.exception() for unit in units):
        name.last = None
        name.doubt(first_id)
    return produced


def _note_refused(name: _Name, part: ProducedPart) -> None:
    """Note that a batch was refused before it was handed over."""
    producer = read_producer(part.records or b"")
    if producer is not None:
        first_id = _first_id(producer.epoch, producer.sequence, name.last_stored_id())
        if name.last is None or first_id <= name.last_stored_id():
            name.doubt(first_id)
        name.refuse(first_id)


def _note_lost(name: _Name, first_id: int, may_be_stored: bool) -> None:
    """Note that a batch was refused after it was handed over."""
    if may_be_stored:
        name.doubt(first_id)
    name.refuse(first_id)
