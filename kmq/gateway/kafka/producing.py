"""Produce and InitProducerId: batches of records become lines, and get the offsets that they have in their partitions.

Exactly     A batch of an idempotent producer has ids that rise over its sequences, their wrap-around and its epochs. The
once        dedupe table of the framer is the only memory: it survives kills, compaction and a change of leader. What the
            door knows of a name besides (`_Name`) is asked for, and forgotten when anything went wrong.
Order       The batches of a connection are judged and handed over in the order in which they came. A batch that follows a
            refused one is a gap, until the refused one was sent again: its client repeats in order. The framer may refuse a
            batch while the next one is on its way: so each says which id must be stored before it.
Offset      The base offset is that of the first record if the whole batch lies behind it without a gap: its first and its
            last record are looked up. Otherwise it is -1, which is unknown. It is never a wrong one.
Without     Batches without a producer id get ids of the door's own, so that a broken connection to ingress stores nothing
a pid       twice.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kmq.config.settings import Settings
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.core.finding import StoredPlace
from kmq.gateway.core.producing import ANSWER_S
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.bodies import UNKNOWN, Produced, ProducedPart, produce_response, read_produce
from kmq.gateway.kafka.cache import TailCache
from kmq.gateway.kafka.connection import Call, Connection, Handler
from kmq.gateway.kafka.records import BatchRefused, RecordBatch, RenderedLines, read_batches, render
from kmq.gateway.kafka.transaction import HeldBatch, TransactionRefused
from kmq.gateway.kafka.transactions import Transactions
from kmq.gateway.kafka.units import UNIT_BYTES, SeqRun, Units, split
from kmq.gateway.kafka.wire import BadRequest, ErrorCode, Fields, Key
from kmq.log.damage import DamageError
from kmq.logfmt import Logger
from kmq.message.record import parse_stored
from kmq.wire.requests import TopicPartition

_PER_LIFE = 10**6  # producer ids that one life of the gateway may give: 18 digits last for 10^6 epochs of a shard
_EPOCH_IDS, _SEQUENCES = 1 << 44, 1 << 31  # ids of one epoch; sequences before they begin again at 0
_NAMES = 20_000  # of which the door remembers how far they are
_OWN_NAMES = 16
_REPEATED_S = 300.0  # in which a client repeats a refused batch, or has given it up (delivery.timeout.ms is 2 minutes)
_AT_ONCE = 4  # batches that are rendered at a time
_SMALL = 4096, 1000  # compressed bytes and records of a batch that is rendered without a thread
_IN_THREAD = 128 << 10  # bytes of a batch that are worth a thread: the event loop must not stand still for them
_ACKS = (-1, 0, 1)


class _Name:
    """What is known of a producer in one partition."""

    __slots__ = ("last", "refused", "refused_at", "timestamp", "turn", "users")

    def __init__(self) -> None:
        self.last: int | None = None  # the last id that was handed over; 0: nothing is stored; None: to be asked for
        self.refused, self.refused_at = 0, 0.0  # the first id that was refused, and not sent again since; 0: none
        self.timestamp = -1  # the latest in its last batch
        self.turn = asyncio.Lock()
        self.users = 0

    def refuse(self, first_id: int) -> None:
        """Note that the batch that begins with this id was not stored, or may not have been."""
        is_same = self.refused and _epoch_of(self.refused) == _epoch_of(first_id)
        self.last, self.refused = None, min(self.refused, first_id) if is_same else first_id
        self.refused_at = time.monotonic()

    def is_gap(self, first_id: int) -> bool:
        """Return True for a batch behind one that was refused: its client repeats in order."""
        if not self.refused or time.monotonic() - self.refused_at > _REPEATED_S:
            return False
        is_behind = _epoch_of(self.refused) == _epoch_of(first_id) and first_id > self.refused
        return is_behind and (self.last or 0) < self.refused


class _Own:
    """One of the names under which batches without a producer id are sent."""

    __slots__ = ("last", "number", "turn")

    def __init__(self, number: int) -> None:
        self.number, self.last = number, 0
        self.turn = asyncio.Lock()  # its ids must reach ingress in the order in which they are given


class _Turn(NamedTuple):
    """What a connection has: the lock that keeps its batches in order, and its name for those without a producer id."""

    lock: asyncio.Lock
    own: _Own


class ProduceChapter:
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
        """`life`: a number that no other gateway of the broker or its shard has; 0: not known yet. `cache` serves consumers."""
        self._settings, self._core, self._life, self._cache, self._log = settings, core, life, cache, log
        self._units, self._transactions = units, transactions
        self._turns: dict[Connection, _Turn] = {}
        self._names: OrderedDict[tuple[int, int, int], _Name] = OrderedDict()  # the one used last at the end
        self._given = 0  # producer ids of this life
        self._rendering = asyncio.Semaphore(_AT_ONCE)
        self._own = [_Own(number) for number in range(_OWN_NAMES)]
        self._connected = 0  # connections that have produced
        self._finishing: set[asyncio.Task[Produced]] = set()  # also for connections that have ended meanwhile
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
        pid = self._known_life() * _PER_LIFE + self._given
        if self._given >= _PER_LIFE:
            raise RequestRefused("busy", f"{_PER_LIFE} producer ids were given in this life of the gateway")
        self._given += 1
        return pid

    async def _describe_producers(self, call: Call) -> Fields:
        """Say which producers have sent to a partition in this life of the gateway, and how far they are."""
        known: dict[tuple[int, int], list[Fields]] = {}
        for (pid, from_seq, number), name in self._names.items():
            if name.last:
                row = {"producer_id": pid, "producer_epoch": _epoch_of(name.last), "last_timestamp": name.timestamp}
                # A transaction that is open has nothing in the partition: no offset at which it begins.
                row |= {"last_sequence": (name.last - 1) % _SEQUENCES, "coordinator_epoch": -1}
                known.setdefault((from_seq, number), []).append(row | {"current_txn_start_offset": -1})

        def part(topic: str, number: int) -> Fields:
            code, text, found = ErrorCode.none, None, list[Fields]()
            try:
                count, from_seq = self._core.partitions.declared(topic)
                if not 0 <= number < count or from_seq is None:
                    raise RequestRefused("unknown_partition", f"{topic} has no partition {number}")
                found = known.get((from_seq, number), found)
            except RequestRefused as err:
                code, text = wire.code_of(err), str(err)
                call.errors.append(code)
            return {"partition_index": number, "error_code": code, "error_message": text, "active_producers": found}

        asked = [(topic.name, topic.partition_indexes) for topic in call.body.topics]
        return {"topics": [{"name": name, "partitions": [part(name, n) for n in numbers]} for name, numbers in asked]}

    # --- produce -----------------------------------------------------------------------------------------------------

    async def produce(self, call: Call) -> bytes | None:
        """Store what a request has. Returns the response; None if the client wants none."""
        parts, acks = read_produce(call.body, call.version)
        if acks not in _ACKS:
            return produce_response(call, parts, [Produced(ErrorCode.invalid_required_acks)] * len(parts))
        turn, until = self._turn(call.connection), asyncio.get_running_loop().time() + ANSWER_S
        async with turn.lock:
            later = [await self._begin(call, turn.own, part, until) for part in parts]
        # Shielded: what becomes of a batch is noted, also when its client has gone.
        produced = [each if isinstance(each, Produced) else await asyncio.shield(each) for each in later]
        call.errors.extend(found.code for found in produced if found.code)
        if acks:
            return produce_response(call, parts, produced)
        for found in produced:
            if found.code != ErrorCode.none:  # the one way to tell a client that waits for nothing
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
        """Judge a batch and hand its lines over. Returns why it is refused, or the task that waits for its offset."""
        try:
            if not call.may(Key.PRODUCE):
                return Produced(ErrorCode.topic_authorization_failed)
            count, from_seq = self._core.partitions.declared(part.topic)
            if part.topic.startswith("__"):
                return Produced(ErrorCode.invalid_topic_exception, text="topics of KMQ itself are not produced to")
            if not 0 <= part.partition < count or from_seq is None:
                return Produced(ErrorCode.unknown_topic_or_partition)
            batches = read_batches(part.records or b"")
            if len(batches) != 1:
                return Produced(ErrorCode.invalid_record, text=f"{len(batches)} batches, where there must be one")
            batch = batches[0]
            async with asyncio.timeout_at(until):
                if batch.is_transactional:
                    return await self._begin_held(part, batch, from_seq)
                if batch.producer_id < 0:
                    return await self._begin_own(own, part, batch, from_seq)
                if not self._is_ours(batch.producer_id):
                    return Produced(ErrorCode.unknown_producer_id, text=f"{batch.producer_id} was not given here")
                if self._transactions.is_transactional(batch.producer_id):
                    return Produced(ErrorCode.invalid_txn_state, text="its producer sends in transactions alone")
                return await self._begin_idempotent(part, batch, from_seq)
        except BatchRefused as err:
            return Produced(err.code, text=str(err), record=err.index)
        except TransactionRefused as err:
            return Produced(err.code, text=str(err))
        except RequestRefused as err:
            return Produced(wire.code_of(err), text=str(err))
        except TimeoutError:
            return Produced(ErrorCode.request_timed_out)

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
        """Return True if this gateway, or one before it, has given this producer id. Raises RequestRefused."""
        now, (life, number) = self._known_life(), divmod(pid, _PER_LIFE)
        return 0 < life < now or (life == now and number < self._given)

    def _known_life(self) -> int:
        if not (life := self._life()):
            raise RequestRefused("not_ready", "the gateway is starting")
        return life

    async def _begin_own(
        self, own: _Own, part: ProducedPart, batch: RecordBatch, from_seq: int
    ) -> "asyncio.Task[Produced]":
        """Hand over a batch without a producer id."""
        life = self._known_life()
        async with own.turn, self._rendering:
            await self._units.room()
            first_id = own.last + 1
            label = b"auto-k%d.%d" % (life, own.number)
            lines = await self._lines(part, batch, label, first_id)
            own.last += batch.record_count
            return self._hand_over(label, part, batch, from_seq, lines, None, first_id)

    async def _begin_held(
        self, part: ProducedPart, batch: RecordBatch, from_seq: int
    ) -> "Produced | asyncio.Task[Produced]":
        """Hand over a batch of a transaction, which is held back until it is committed."""
        held = await self._transactions.hold(batch.producer_id, batch.producer_epoch, (part.topic, part.partition))
        try:
            begun = await self._begin_idempotent(part, batch, from_seq, held)
        except BaseException:
            held.leave()
            raise
        if isinstance(begun, Produced):
            held.leave()
        else:
            begun.add_done_callback(lambda _: held.leave())
        return begun

    async def _begin_idempotent(
        self, part: ProducedPart, batch: RecordBatch, from_seq: int, held: HeldBatch | None = None
    ) -> "Produced | asyncio.Task[Produced]":
        """Hand over a batch of a producer, if it is the one that comes next, or was stored before."""
        label = b"k%d.%d.%d" % (batch.producer_id, from_seq, part.partition)
        name = self._name((batch.producer_id, from_seq, part.partition))
        name.users += 1
        first_id = 0
        try:
            async with name.turn:
                while True:
                    if name.last is None:
                        name.last = await self._units.last_id(label)
                    known = name.last, name.refused
                    first_id = _first_id(batch, name.last)
                    refused = _judge(batch, first_id, name)
                    if refused is not None:
                        return refused
                    async with self._rendering:
                        await self._units.room()
                        lines = await self._lines(part, batch, label, first_id, held)
                        if (name.last, name.refused) == known:  # no batch before it was refused meanwhile
                            after = min(name.last or 0, first_id - 1)
                            task = self._hand_over(label, part, batch, from_seq, lines, name, first_id, after, held)
                            break
                name.last, name.timestamp = max(known[0] or 0, first_id + batch.record_count - 1), batch.max_timestamp
                if first_id <= name.refused or _epoch_of(name.refused) < batch.producer_epoch:
                    name.refused = 0
                return task
        except BaseException:
            name.refuse(first_id or _first_id(batch, name.last or 0))
            raise
        finally:
            name.users -= 1

    def _name(self, key: tuple[int, int, int]) -> _Name:
        name = self._names.pop(key, None) or _Name()
        self._names[key] = name
        while len(self._names) > _NAMES and not next(iter(self._names.values())).users:
            self._names.popitem(last=False)
        return name

    def _hand_over(
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
        on_refused = (lambda: None) if name is None else partial(name.refuse, first_id)
        units = []
        for text, count in split(lines.text, batch.record_count, most):
            units.append(link.send(label, text, count, on_refused, after))
            first_id += count
            after = first_id - 1
        kept = from_seq if lines.is_exact else None
        task = asyncio.create_task(self._finish(part, batch, kept, units, name, held))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        if held is None:
            self._cache.expect(TopicPartition(part.topic, part.partition), task)
        return task

    async def _finish(
        self,
        part: ProducedPart,
        batch: RecordBatch,
        from_seq: int | None,
        units: "list[asyncio.Future[list[SeqRun]]]",
        name: _Name | None,
        held: HeldBatch | None,
    ) -> Produced:
        """Wait until the lines are durable and routed, and find where they are. `from_seq` None: the batch is not kept."""
        try:
            async with asyncio.timeout(ANSWER_S):
                runs = [run for unit in units for run in await asyncio.shield(unit)]
        except TimeoutError:  # the same batch again is answered by its ids
            if name is not None:
                name.last = None
            return Produced(ErrorCode.request_timed_out)
        except RequestRefused as err:
            if err.code == "id_reused":
                self._log.warn("kafka_id_reused", topic=part.topic, partition=part.partition, reason=str(err))
            return Produced(wire.code_of(err), text=str(err))
        if held is not None:
            held.stored(max(run.seq + run.lines - 1 for run in runs))
            return Produced()  # it has no offset before its transaction is committed
        try:
            offset, place = await self._offset(part, runs)
        except RequestRefused as err:
            return Produced(wire.code_of(err), text=str(err))
        if offset >= 0 and from_seq is not None and not any(run.is_duplicate for run in runs):
            last = offset + batch.record_count - 1
            self._cache.put(part.topic, part.partition, offset, last, bytes(batch.data), from_seq)
        return Produced(offset=offset, timestamp=self._timestamp(part.topic, place))

    def _timestamp(self, topic: str, place: StoredPlace | None) -> int:
        """Return the timestamp that the broker has given the first record, in milliseconds; -1 if it keeps its own."""
        found = None if place is None else parse_stored(place.line)
        return found[1] // 1000 if found and self._core.partitions.shows_receipt(topic) else -1

    async def _offset(self, part: ProducedPart, runs: list[SeqRun]) -> tuple[int, StoredPlace | None]:
        """Return the offset of the first line if all follow it without a gap, else -1. Raises RequestRefused."""
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


def _first_id(batch: RecordBatch, last: int) -> int:
    """Return the id of a batch's first record. `last`: the last one of its name, which says how often sequences began again."""
    epoch = batch.producer_epoch * _EPOCH_IDS
    wraps, sequence = 0, batch.base_sequence
    if last > epoch:
        wraps, known = divmod(last - epoch - 1, _SEQUENCES)
        if known - sequence > _SEQUENCES // 2:
            wraps += 1
        elif sequence - known > _SEQUENCES // 2 and wraps:
            wraps -= 1
    return epoch + wraps * _SEQUENCES + sequence + 1


def _epoch_of(id: int) -> int:
    return (id - 1) // _EPOCH_IDS


def _judge(batch: RecordBatch, first_id: int, name: _Name) -> Produced | None:
    """Return why a batch is not taken; None if it comes next, or may have been stored before."""
    last = name.last or 0
    if batch.producer_epoch < 0 or batch.base_sequence < 0:
        return Produced(ErrorCode.invalid_record, text="a producer id without epoch and sequence")
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
