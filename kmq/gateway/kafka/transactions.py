"""Transactions of Kafka producers: records of a transaction are held back, and written to their topics at the commit.

    Produce of orders/0 in transaction "pay"    → a line of `__transactions`
    EndTxn, commit                              → a state `commit` in `__transaction_state`, then the line in orders/0

Life        InitProducerId writes a state with the next epoch. AddPartitions and AddOffsets write nothing. Produce and
            TxnOffsetCommit write lines of `__transactions`. EndTxn writes the state `commit` with the offsets first…end
            of `__transactions` and the first id of the copies. Then it reads first…end, writes the lines of this key
            under the name `t<pid>` with ids copy, copy + 1, …, stores the offsets, and writes the state `empty` of the
            next n. An abort is one record, and raises n: the lines of the old key are never read again.
Invariant   The record `commit` decides, once it is durable. Before it no line of the transaction is in its topic; after
            it each line is there once. Until all copies are there its id waits, and after a start the groups whose
            offsets are in it.
            A line of an older epoch or n has another key: it is in no first…end, however late it arrives.
            Only the holder of the last epoch writes to a transaction or ends it.
Crash       Before the record: the transaction is open as it was, because its lines hold all of it, and its client
            continues. After it: the next life copies again from `copy`. Lines that are there are recognised by their
            ids (`!dup`), because the ids are the same in each life: each line of first…end with the key takes the next
            id, even a line that is not copied. An offset is not stored again if the group has committed since the
            decision. Lines that a former life has left in a socket are refused: the door's connection fences the older
            one before anything is read, and lines accepted before that are on disk and routed by then.
Pending     Offsets of an open or decided transaction: an OffsetFetch that asks for stable offsets is told to wait.
            After a start they are found in `__transactions`.
Offsets     A held record has no offset yet, and clients want one: librdkafka counts up from an unknown one (-1, 0, 1),
            and programs that keep the last offset fail when it falls. So the reply has the offset that the record gets
            if no other client writes to its partition until the commit: the partition's end when the transaction first
            wrote to it, plus the transaction's earlier records there. It is never above the record's offset: a reader
            that continues after it reads a record twice, but skips none. It never falls from one committed transaction
            to the next. Offsets of an aborted transaction are given again to the next one.
Left out    Records are left out, counted and logged if their topic was deleted since they were sent, or if they are
            longer than KMQ_MAX_LINE is now: otherwise such a commit would never end. If a later one is stored, that is
            final.
Memory      An entry for each transactional id, at most _MOST_IDS: the one that is idle the longest makes room for
            another. One for each pending offset, at most _MOST_OFFSETS of a transaction and _MOST_PENDING of all.
            READ_BYTES of each of _COPIES copies at a time.
No room     A commit waits for room. An abort of a transaction that has lines does not wait (transaction_writer.py),
            because it makes room. A start on a full disk, or with a ring that drops messages, only reads open and
            decided transactions, so that groups are served.
Shard       All of this is records of the WAL. The gateway of the next leader starts with them as after a kill.
Not covered A topic that is deleted while its records are copied may be created again, as with any producer.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any

from kmq.config.settings import Settings
from kmq.errors import KmqError, RetryError
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.core.producing import ANSWER_S
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import (
    CommittedOffset,
    Partition,
    RowKey,
    encode_payload,
    routing_key,
)
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.connection import ApiHandler, Call, Handler
from kmq.gateway.kafka.transaction import (
    REFUSALS,
    HeldBatch,
    Transaction,
    TransactionRefused,
    concurrent,
    fenced,
    refusal_code,
)
from kmq.gateway.kafka.transaction_log import (
    ABORT,
    COMMIT,
    EMPTY,
    HELD,
    PARTITIONS,
    STATES,
    held_routing_key,
    read_held,
    read_states,
)
from kmq.gateway.kafka.transaction_writer import TransactionWriter
from kmq.gateway.kafka.units import Units
from kmq.gateway.kafka.wire import ErrorCode, Fields, Key
from kmq.log import segment, topic_changes
from kmq.log.damage import DamageError
from kmq.logfmt import Logger
from kmq.message.text import make_routing_key

_MOST_EPOCH = 32_767
_MOST_TIMEOUT_MS = 15 * 60 * 1000
_MAX_ID = 200  # bytes of a transactional id
_MOST_IDS = 20_000
_MOST_OFFSETS = 10_000  # of a transaction
_MOST_PENDING = 100_000  # offsets of all transactions
_COPIES = 8  # at a time
_NOT_TAKEN = ("disk_full", "quota", "not_enough_replicas", "busy", "drop_oldest")  # while these last, groups are served
_IDLE_S = 7 * 86400.0  # after which an id is forgotten
_TURN_S, _TIDY_S, _REPORT_S = 0.5, 10.0, 60.0
_RETRY_S = 0.5  # between two tries to write a decided transaction
_LOOK_S = 0.05  # between two looks whether the offsets are loaded
_FENCED_FROM = 2  # version of AddPartitions, AddOffsets and EndTxn that knows PRODUCER_FENCED


class Transactions(ApiHandler):
    """All transactional ids of the broker. Closing a connection ends no transaction."""

    def __init__(self, settings: Settings, core: Core, groups: Groups, units: Units, log: Logger) -> None:
        self._settings, self._core, self._groups, self._log = settings, core, groups, log
        self._writer = TransactionWriter(settings, core, groups, units, log)
        self._transactions: dict[str, Transaction] = {}
        self._by_pid: dict[int, Transaction] = {}
        self._with_offsets: set[Transaction] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tidy_at = self._report_at = 0.0
        self._evicted = 0  # number of ids since the last log line
        self._resumed: list[Transaction] = []  # decided by former lives, and not finished yet
        self.recovered, self.may_serve_groups = asyncio.Event(), asyncio.Event()
        self._copying = asyncio.Semaphore(_COPIES)
        self.handlers: dict[Key, Handler] = {
            Key.ADD_PARTITIONS_TO_TXN: self._add_partitions,
            Key.ADD_OFFSETS_TO_TXN: self._add_offsets,
            Key.END_TXN: self._end_txn,
        }

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._writer.close()

    # --- the task ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Finish the transactions that former lives have decided, then enforce limits, until cancelled."""
        last_error = ""
        while not self.recovered.is_set():
            try:
                await self._recover()
                self.recovered.set()
                self.may_serve_groups.set()
            except (KmqError, DamageError, OSError) as err:
                if str(err) != last_error:
                    last_error = str(err)
                    groups = "" if self.may_serve_groups.is_set() else "groups and "
                    effect = f"{groups}transactions are not served; tried again"
                    self._log.error("kafka_transactions_not_read", reason=err, effect=effect)
                await asyncio.sleep(_RETRY_S)
        while True:
            await asyncio.sleep(_TURN_S)
            for txn in [txn for txn in self._transactions.values() if txn.is_late]:
                self._abort_soon(txn, "timeout")
            if time.monotonic() >= self._tidy_at:
                self._tidy_at = time.monotonic() + _TIDY_S
                await self._forget_idle()
                try:
                    await self._trim()
                    last_error = ""
                except (KmqError, OSError) as err:
                    if isinstance(err, RetryError) and str(err) != last_error:
                        last_error = str(err)
                        effect = "what transactions have held back stays on disk; tried again"
                        self._log.warn("kafka_transactions_kept", reason=err, effect=effect)
                with suppress(KmqError, OSError, TransactionRefused):
                    await self._writer.renew_states(self._transactions)
            self._report_evicted()

    async def _recover(self) -> None:
        while not self._groups.store.is_loaded:
            await asyncio.sleep(_LOOK_S)
        if not os.path.isdir(f"{self._settings.data}/topics/{STATES}"):
            return
        try:
            await self._writer.take_over()
        except RequestRefused as err:
            if err.code in _NOT_TAKEN and not self.may_serve_groups.is_set():  # reading needs no room
                await self._writer.settled()
                await self._restore()
                self.may_serve_groups.set()
            raise
        await self._restore()
        if self._resumed:
            self._log.info("kafka_transactions_resumed", count=len(self._resumed))
        for txn in self._resumed:
            self._start(self._resume(txn))

    async def _resume(self, txn: Transaction) -> None:
        async with txn.turn():
            await self._finish(txn)
            self._resumed.remove(txn)  # from now on its offsets are those of the next transaction
            self._note_incomplete()

    def _note_incomplete(self) -> None:
        """Let only those groups wait whose offsets are in transactions that former lives have decided."""
        self._groups.store.incomplete = {group for txn in self._resumed for group, _ in txn.offsets}

    async def _restore(self) -> None:
        """Read open transactions, and decided ones to resume."""
        data = self._settings.data
        states = await asyncio.to_thread(read_states, data)
        held = await asyncio.to_thread(read_held, data, [state.held_key for state in states.values()])
        self._resumed = []
        self._with_offsets.clear()
        for state in states.values():
            txn = self._transactions[state.id] = self._by_pid[state.pid] = Transaction(state.id, state)
            found = held.get(state.held_key)
            if found is not None:
                txn.first, txn.begun, txn.nbytes = found.first, time.monotonic(), found.nbytes
                txn.partitions, txn.first_ids, txn.last_seq = {*found.first_ids}, found.first_ids, state.seq
                self._hold_back(txn, found.offsets)
            if state.state == COMMIT:
                txn.first = state.first
                self._resumed.append(txn)
        self._note_incomplete()

    async def _trim(self) -> None:
        """Have the segments of `__transactions` deleted that lie before all open or decided transactions."""
        if not self._transactions:
            return
        # A transaction that begins from now on begins after these ends. One that is just beginning may need any offset.
        needed = {number: await asyncio.to_thread(self._end_of, number) for number in range(PARTITIONS)}
        for txn in self._transactions.values():
            if txn.opening:
                needed[txn.partition] = 0
            elif txn.first is not None:
                needed[txn.partition] = min(needed[txn.partition], txn.first)
        data = self._settings.data

        def submit() -> None:
            starts = {}
            for number, offset in needed.items():
                # Only at the beginning of a segment: elsewhere the router would have to copy the rest of one.
                firsts = [first for first, _ in segment.listing(f"{data}/topics/{HELD}/{number}") if first <= offset]
                if len(firsts) > 1:
                    starts[number] = firsts[-1]
            if starts:
                topic_changes.begin_at(data, HELD, None, starts)

        await asyncio.to_thread(submit)

    async def _forget_idle(self) -> None:
        before = time.monotonic() - _IDLE_S
        for txn in [txn for txn in self._transactions.values() if txn.touched < before and not txn.is_used]:
            with suppress(RequestRefused, TransactionRefused):
                await self._forget(txn, before)

    async def _evict(self) -> None:
        """Forget the id that is idle the longest. Raises RequestRefused."""
        idle = (txn for txn in self._transactions.values() if not (txn.is_used or txn.is_changing))
        txn = next(idle, None)
        if txn is None:
            raise RequestRefused("busy", f"{_MOST_IDS:,} transactional ids are known, and all are in use")
        await self._forget(txn)
        self._evicted += 1

    async def _forget(self, txn: Transaction, before: float = math.inf) -> None:
        """Forget an id, unless it is in use, or was used after `before`."""
        async with txn.turn():
            if txn.touched < before and not txn.is_used:
                with txn.ending():
                    await self._writer.write([(make_routing_key(STATES, txn.id), b"")])
                del self._transactions[txn.id]
                self._by_pid.pop(txn.pid, None)

    def _report_evicted(self) -> None:
        """Log, at most once a minute, how many ids were evicted."""
        if self._evicted and time.monotonic() >= self._report_at:
            effect = "those that were idle the longest; if their producers return, one transaction has to be aborted"
            self._log.warn("kafka_transactional_ids_evicted", count=self._evicted, most=_MOST_IDS, effect=effect)
            self._evicted, self._report_at = 0, time.monotonic() + _REPORT_S

    # --- what is asked -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        if not self.recovered.is_set():
            raise RequestRefused("not_ready", "the gateway finishes the transactions of its last life")

    def find(self, id: str | None, pid: int, epoch: int) -> Transaction:
        """Return the transaction that a request is for. Raises RequestRefused and TransactionRefused.

        `id`: None where only the producer id is known. Raises also while a decided transaction is being written.
        """
        txn = self._of_producer(id, pid, epoch)
        if txn.is_ending:
            raise concurrent(f"{txn.id}: what is decided is being written")
        return txn

    def _of_producer(self, id: str | None, pid: int, epoch: int) -> Transaction:
        self._admit()
        txn = self._by_pid.get(pid)
        if txn is None or id not in (None, txn.id):
            raise TransactionRefused(ErrorCode.invalid_producer_id_mapping, f"{id or ''}: producer id {pid} is not its")
        self._check_epoch(txn, epoch)
        return txn

    def _check_epoch(self, txn: Transaction, epoch: int) -> None:
        if epoch != txn.epoch:
            raise fenced(f"{txn.id}: epoch {epoch}, where {txn.epoch} is in force")

    def by_id(self) -> Mapping[str, Transaction]:
        """Return all transactional ids. Do not change them. Raises RequestRefused."""
        self._admit()
        return self._transactions

    def is_transactional(self, pid: int) -> bool:
        """Return True for a producer id of a transactional id."""
        return pid in self._by_pid

    async def init(self, call: Call, give_pid: Callable[[], int]) -> Fields:
        """Answer InitProducerId with a transactional id."""
        body = call.body
        timeout_ms = wire.milliseconds(body.transaction_timeout)
        expected = None
        if getattr(body, "producer_id", -1) >= 0:
            expected = body.producer_id, body.producer_epoch
        try:
            self._admit()
            if not 0 < len(body.transactional_id.encode()) <= _MAX_ID:
                text = f"a transactional id has 1 to {_MAX_ID} bytes"
                raise TransactionRefused(ErrorCode.invalid_request, text)
            if not 0 < timeout_ms <= _MOST_TIMEOUT_MS:
                text = f"transaction.timeout.ms={timeout_ms}: must be 1 to {_MOST_TIMEOUT_MS}"
                raise TransactionRefused(ErrorCode.invalid_transaction_timeout, text)
            work = self._init(body.transactional_id, timeout_ms, expected, give_pid)
            txn = await self._in_task(work)
        except REFUSALS as err:
            return {"error_code": refusal_code(call, err, 4)}
        return {"producer_id": txn.pid, "producer_epoch": txn.epoch}

    async def _init(
        self, id: str, timeout_ms: int, expected: tuple[int, int] | None, give_pid: Callable[[], int]
    ) -> Transaction:
        await self._writer.declare()
        while id not in self._transactions and len(self._transactions) >= _MOST_IDS:
            await self._evict()
        txn = self._transactions.setdefault(id, Transaction(id))
        async with txn.turn():
            if self._transactions.setdefault(id, txn) is not txn:
                raise concurrent(f"{id}: has just been forgotten")
            try:
                return await self._begin_epoch(txn, timeout_ms, expected, give_pid)
            except BaseException:
                if txn.pid < 0:  # the id has no state yet
                    del self._transactions[id]
                raise

    async def _begin_epoch(
        self, txn: Transaction, timeout_ms: int, expected: tuple[int, int] | None, give_pid: Callable[[], int]
    ) -> Transaction:
        """Give a producer the next epoch. An open transaction of the former epoch is aborted."""
        before = txn.last
        if expected is not None and before.pid >= 0:  # else the id was forgotten, and has no newer producer
            if before.pid != expected[0]:
                raise fenced(f"{txn.id}: has another producer id, so a newer producer has it")
            if before.former == expected[1]:
                return txn  # its reply was lost, or its transaction was aborted for it
            self._check_epoch(txn, expected[1])
        is_open = txn.first is not None
        former = None if expected is None else before.epoch
        state = txn.next_state(ABORT if is_open else EMPTY)
        state = state._replace(epoch=before.epoch + 1, timeout_ms=timeout_ms, former=former)
        if before.pid < 0 or state.epoch >= _MOST_EPOCH:
            state = state._replace(pid=give_pid(), epoch=0, copy=1, former=None)
        with txn.ending():
            await self._writer.write_state(txn, state)
        self._by_pid.pop(before.pid, None)
        self._by_pid[state.pid] = txn
        txn.outcome = state.state
        if is_open:
            reason = "a newer producer has its id" if expected is None else "its producer began anew"
            self._note_abort(txn, txn.nbytes, reason)
        self._close(txn)
        return txn

    async def _add_partitions(self, call: Call) -> Fields:
        body = call.body
        places = [(topic.name, number) for topic in body.v3_and_below_topics for number in topic.partitions]
        codes: dict[Partition, ErrorCode] = {}
        default = ErrorCode.none
        try:
            producer = body.v3_and_below_producer_id, body.v3_and_below_producer_epoch
            txn = self.find(body.v3_and_below_transactional_id, *producer)
            absent = [place for place in places if place[0].startswith("__")] + self._absent(places)
            codes = dict.fromkeys(absent, ErrorCode.unknown_topic_or_partition)
            if codes:
                default = ErrorCode.operation_not_attempted
            else:
                await self._begin(txn)
                txn.partitions.update(places)
        except REFUSALS as err:
            default = refusal_code(call, err, _FENCED_FROM)
        call.errors.extend(code for code in {default, *codes.values()} if code)

        def row(topic: str, number: int) -> Fields:
            return {"partition_index": number, "partition_error_code": codes.get((topic, number), default)}

        rows = [
            {"name": topic.name, "results_by_partition": [row(topic.name, number) for number in topic.partitions]}
            for topic in body.v3_and_below_topics
        ]
        return {"results_by_topic_v3_and_below": rows}

    def _absent(self, places: Iterable[Partition]) -> list[Partition]:
        """Return the partitions among these that do not exist."""
        counts = self._core.partitions.declared_of({topic for topic, _ in places})
        return [place for place in places if not (place[0] in counts and 0 <= place[1] < counts[place[0]][0])]

    async def _add_offsets(self, call: Call) -> Fields:
        body = call.body
        try:
            await self._begin(self.find(body.transactional_id, body.producer_id, body.producer_epoch))
        except REFUSALS as err:
            return {"error_code": refusal_code(call, err, _FENCED_FROM)}
        return {}

    async def _begin(self, txn: Transaction) -> None:
        """Open a transaction, unless it is open. Its lines will have offsets after the present end."""
        if txn.first is None:
            key = txn.key
            txn.opening += 1
            try:
                first = await asyncio.to_thread(self._end_of, txn.partition)
            finally:
                txn.opening -= 1
            if txn.is_ending or txn.key != key:
                raise concurrent(f"{txn.id}: the transaction before it has just ended")
            if txn.first is None:
                txn.first, txn.begun = first, time.monotonic()

    def _end_of(self, partition: int) -> int:
        try:
            return self._core.partitions.open(HELD, partition).end()
        except DamageError as err:
            raise RequestRefused("damaged", str(err)) from err

    # --- what is held back -------------------------------------------------------------------------------------------

    async def hold(self, pid: int, epoch: int, place: Partition) -> HeldBatch:
        """Let a batch into the transaction of its producer. Call `leave` on the result in any case.

        Raises RequestRefused and TransactionRefused.
        """
        held = await self._let_in(None, pid, epoch)
        held.transaction.partitions.add(place)
        return held

    async def placed(self, held: HeldBatch, place: Partition, first_id: int, last_id: int) -> HeldBatch:
        """Return a batch with its expected offset. `first_id`: of its first record; `last_id`: its producer's last."""
        txn = held.transaction
        if place not in txn.first_ids and first_id <= last_id:
            return held  # it was sent in an earlier transaction: its offset is unknown
        first = txn.first_ids.setdefault(place, first_id)
        if place not in txn.begins:
            with suppress(DamageError):
                txn.begins[place] = await asyncio.to_thread(lambda: self._core.partitions.open(*place).end())
        begin = txn.begins.get(place)
        return held if begin is None else held._replace(offset=begin + first_id - first)

    async def _let_in(self, id: str | None, pid: int, epoch: int) -> HeldBatch:
        """Let a batch or offsets into a transaction, and open it if needed. Abort a transaction that is too large."""
        txn = self._of_producer(id, pid, epoch)
        if txn.nbytes > self._settings.kafka_txn_bytes:
            self._abort_soon(txn, f"over KMQ_KAFKA_TXN_BYTES={self._settings.kafka_txn_bytes}")
            raise fenced(f"{txn.id}: the transaction has {txn.nbytes} bytes, over KMQ_KAFKA_TXN_BYTES; it is aborted")
        self.find(id, pid, epoch).enter()
        try:
            await self._begin(txn)
            self._check_epoch(txn, epoch)
        except BaseException:
            txn.leave()
            raise
        return HeldBatch(txn, held_routing_key(txn.partition, txn.key))

    async def hold_offsets(
        self,
        producer: tuple[str, int, int],
        group: str,
        rows: Mapping[Partition, CommittedOffset],
        check: Callable[[], None],
    ) -> None:
        """Put offsets into a transaction; durable when this returns. Raises RequestRefused and TransactionRefused.

        `producer`: transactional id, producer id and epoch. `check` raises RequestRefused if the member is fenced. It
        runs just before others are told to wait. Otherwise the partition's next reader could have read the offset in
        between.
        """
        for topic, number in self._absent(rows):
            raise RequestRefused("unknown_partition", f"{topic}/{number}: the topic has no such partition")
        self._groups.store.table.check_room(group, {RowKey(group, *place): row for place, row in rows.items()})
        held = await self._let_in(*producer)
        try:
            check()
            self._check_pending(held.transaction, len(rows))
            self._hold_back(held.transaction, ((group, place) for place in rows))
            lines = [
                (held.routing_key, b"%b|||%b" % (routing_key(RowKey(group, *place)), encode_payload(row)))
                for place, row in rows.items()
            ]
            held.handed_over(sum(len(payload) for _, payload in lines))
            async with asyncio.timeout(ANSWER_S):
                held.stored(await self._writer.write(lines))
        except TimeoutError:
            raise RequestRefused("not_answered", f"ingress has not answered within {ANSWER_S} s") from None
        finally:
            held.leave()

    def _check_pending(self, txn: Transaction, count: int) -> None:
        """Raise RequestRefused unless there is room for `count` more offsets."""
        if len(txn.offsets) + count > _MOST_OFFSETS:
            raise RequestRefused("offsets_full", f"{txn.id}: a transaction has at most {_MOST_OFFSETS:,} offsets")
        pending = sum(len(each.offsets) for each in self._with_offsets)
        if pending + count > _MOST_PENDING:
            raise RequestRefused("busy", f"transactions have {pending:,} offsets; at most {_MOST_PENDING:,} in all")

    def _hold_back(self, txn: Transaction, offsets: Iterable[tuple[str, Partition]]) -> None:
        txn.offsets.update(offsets)
        if txn.offsets:
            self._with_offsets.add(txn)

    def pending(self, group: str) -> set[Partition]:
        """Return the partitions for which an open or decided transaction has an offset of the group."""
        return {place for txn in self._with_offsets for name, place in txn.offsets if name == group}

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _end_txn(self, call: Call) -> Fields:
        body = call.body
        try:
            txn = self._of_producer(body.transactional_id, body.producer_id, body.producer_epoch)
            await self._in_task(self._end(txn, body.producer_epoch, is_commit=body.committed))
        except REFUSALS as err:
            return {"error_code": refusal_code(call, err, _FENCED_FROM)}
        return {}

    async def _end(self, txn: Transaction, epoch: int, *, is_commit: bool) -> None:
        """Decide a transaction, and finish it. A client that asks again waits for its first request."""
        async with txn.turn():
            self._check_epoch(txn, epoch)
            if txn.first is None:
                if txn.outcome == (ABORT if is_commit else COMMIT):
                    text = f"{txn.id}: its last transaction has ended in another way"
                    raise TransactionRefused(ErrorCode.invalid_txn_state, text)
                return
            with txn.ending():
                if not is_commit:
                    return await self._abort(txn, epoch)
                await self._decide(txn)
            await self._finish(txn)

    async def _decide(self, txn: Transaction) -> None:
        """Write that a transaction is committed, once all its lines are in its partition."""
        if txn.users:
            await txn.idle.wait()
        watermark = self._core.watermark
        await watermark.passed(max(txn.last_seq, watermark.durable))
        end = await asyncio.to_thread(self._end_of, txn.partition)
        await self._writer.write_state(txn, txn.next_state(COMMIT, txn.first or 0, end))

    async def _abort(self, txn: Transaction, epoch: int) -> None:
        frees = txn.last_seq > 0  # otherwise empty transactions could use up the reserve
        former = txn.last.former if epoch == txn.epoch else txn.epoch
        state = txn.next_state(ABORT)._replace(epoch=epoch, former=former)
        await self._writer.write_state(txn, state, frees=frees)
        txn.outcome = ABORT
        self._close(txn)

    def _abort_soon(self, txn: Transaction, reason: str) -> None:
        """Abort the transaction for the broker: its producer is fenced."""

        async def abort() -> None:
            async with txn.turn():
                if txn.key == key and txn.first is not None:
                    nbytes = txn.nbytes
                    with txn.ending():
                        await self._abort(txn, min(txn.epoch + 1, _MOST_EPOCH))
                    self._note_abort(txn, nbytes, reason)

        key = txn.key
        if not txn.is_changing:  # otherwise it is ending, or is aborted by a later call
            self._start(abort())

    def _note_abort(self, txn: Transaction, nbytes: int, reason: str) -> None:
        self._log.warn("kafka_transaction_aborted", id=txn.id, pid=txn.pid, bytes=nbytes, reason=reason)

    def _close(self, txn: Transaction) -> None:
        txn.close()
        txn.touched = time.monotonic()
        self._transactions[txn.id] = self._transactions.pop(txn.id)  # after those that have been idle longer
        self._with_offsets.discard(txn)

    # --- the copy ----------------------------------------------------------------------------------------------------

    async def _finish(self, txn: Transaction) -> None:
        """Copy a committed transaction to its topics, and retry until that works. Raises RequestRefused (stopping)."""
        last_error, decided = "", txn.last
        while True:
            try:
                async with self._copying:
                    copied = await self._writer.copy(decided)
                await self._writer.store_offsets(copied.offsets, decided.seq)
                ended = txn.next_state(EMPTY)._replace(number=decided.number + 1, copy=copied.next_id)
                await self._writer.write_state(txn, ended)
                break
            except (KmqError, DamageError, OSError, ValueError) as err:
                if isinstance(err, RequestRefused) and err.code == "stopping":
                    raise
                if str(err) != last_error:
                    last_error = str(err)
                    effect = "its producer waits; tried again"
                    self._log.warn("kafka_commit_waits", id=txn.id, pid=txn.pid, reason=err, effect=effect)
                await asyncio.sleep(_RETRY_S)
                with suppress(RequestRefused):
                    await self._writer.touch_name(decided.pid)
        reasons = "their topics were deleted since they were sent", "KMQ_MAX_LINE was lowered since they were sent"
        for count, why in zip((copied.deleted, copied.too_long), reasons, strict=True):
            if count:
                self._log.warn("kafka_transaction_dropped", id=txn.id, pid=txn.pid, records=count, effect=why)
        txn.outcome = COMMIT
        self._close(txn)
        await self._core.watermark.passed(copied.last_seq)  # a client that learns of the commit must find its records

    def _start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run this as a task that goes on if its client leaves."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have gone

    async def _in_task(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run this as a task that goes on if its client leaves, and wait ANSWER_S for it. Raises TimeoutError."""
        return await asyncio.wait_for(asyncio.shield(self._start(work)), ANSWER_S)
