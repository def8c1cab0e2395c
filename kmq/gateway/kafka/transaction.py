"""A transactional id in memory, and the transaction that is open under it.

    async with txn.turn(): with txn.ending(): write the next state

Turn        Changes of an id's state are made one after the other. At most _MOST_WAITING requests wait for their turn.
            Another request gets CONCURRENT_TRANSACTIONS, and its client retries.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.offset_table import Partition
from kmq.gateway.kafka.connection import Call
from kmq.gateway.kafka.transaction_log import COMMIT, EMPTY, TransactionState, partition_of
from kmq.gateway.kafka.wire import ErrorCode

_MOST_WAITING = 10


class TransactionRefused(Exception):
    """A request of a transactional producer is refused."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def fenced(text: str) -> TransactionRefused:
    return TransactionRefused(ErrorCode.invalid_producer_epoch, text)


def concurrent(text: str) -> TransactionRefused:
    return TransactionRefused(ErrorCode.concurrent_transactions, text)


REFUSALS = (RequestRefused, TransactionRefused, TimeoutError)


def refusal_code(call: Call, err: Exception, fenced_from: int = 0) -> ErrorCode:
    """Return the error code for a refusal. `fenced_from`: the version that knows PRODUCER_FENCED."""
    if isinstance(err, RequestRefused):
        is_loading = err.code == "not_ready"
        return ErrorCode.coordinator_load_in_progress if is_loading else ErrorCode.coordinator_not_available
    if isinstance(err, TimeoutError):
        return ErrorCode.concurrent_transactions
    assert isinstance(err, TransactionRefused)
    is_fenced = err.code == ErrorCode.invalid_producer_epoch and call.version >= fenced_from
    return ErrorCode.producer_fenced if is_fenced else err.code


class Transaction:
    """A transactional id and its open transaction, if it has one. Its lines in `__transactions` say whether it has."""

    def __init__(self, id: str, last: TransactionState | None = None) -> None:
        self.id, self.partition = id, partition_of(id)
        # The state that was written last. A new id has a state without a producer id, which is not on disk.
        self.last = last or TransactionState(id, -1, -1, 0, EMPTY, self.partition, 0, 0, 1, 0)
        self.outcome = EMPTY  # of the last transaction in this life of the gateway
        self.touched = time.monotonic() - (max(0.0, time.time() - last.seconds) if last else 0.0)
        self._is_closing = False  # a state that ends the transaction is being written
        self.opening = 0  # requests that look up where it will begin
        self.users = 0  # batches and offsets being written
        self.idle = asyncio.Event()
        self._turn, self._waiting = asyncio.Lock(), 0
        self.close()

    def close(self) -> None:
        """Note that no transaction is open any more."""
        self.first: int | None = None  # offset in `__transactions` at or before its first line; None: not open
        self.begun, self.nbytes, self.last_seq = 0.0, 0, 0
        self.partitions: set[Partition] = set()
        self.first_ids: dict[Partition, int] = {}  # of the first record for each partition
        self.begins: dict[Partition, int] = {}  # the offset of that record if no other client writes there
        self.offsets: set[tuple[str, Partition]] = set()

    @property
    def pid(self) -> int:
        return self.last.pid

    @property
    def epoch(self) -> int:
        return self.last.epoch

    @property
    def key(self) -> bytes:
        return self.last.held_key

    @property
    def is_late(self) -> bool:
        return self.first is not None and time.monotonic() - self.begun > self.last.timeout_ms / 1000

    @property
    def is_ending(self) -> bool:
        """Return True while the end of a transaction is being written, or its copies."""
        return self._is_closing or self.last.state == COMMIT

    @property
    def is_used(self) -> bool:
        """Return True if a transaction is open, decided or about to begin."""
        return self.first is not None or self.is_ending or bool(self.opening or self.users)

    def next_state(self, state: str, first: int = 0, end: int = 0) -> TransactionState:
        return self.last._replace(number=self.last.open_number, state=state, first=first, end=end)

    @property
    def is_changing(self) -> bool:
        """Return True while a request has the turn."""
        return self._turn.locked()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Take the turn for a change of state. Raises TransactionRefused if too many requests wait for it."""
        if self._waiting >= _MOST_WAITING:
            raise concurrent(f"{self.id}: {_MOST_WAITING} requests wait for the one before them")
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Begin no transaction while a state is written that ends the open one."""
        self._is_closing = True
        try:
            yield
        finally:
            self._is_closing = False

    def enter(self) -> None:
        self.users += 1
        self.idle.clear()

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self.idle.set()


class HeldBatch(NamedTuple):
    """A batch, or offsets, on the way into a transaction. `routing_key`: of its lines.

    `offset`: of the batch's first record if no other client writes to its partition before the commit; -1: unknown.
    """

    transaction: Transaction
    routing_key: bytes
    offset: int = -1

    def handed_over(self, nbytes: int) -> None:
        self.transaction.nbytes += nbytes

    def stored(self, seq: int) -> None:
        self.transaction.last_seq = max(self.transaction.last_seq, seq)

    def leave(self) -> None:
        self.transaction.leave()
