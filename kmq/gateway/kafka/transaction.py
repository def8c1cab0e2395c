"""A transactional id in memory, and the transaction that is open under it.

Turn        What changes the state of an id is done one after the other. At most _MOST_WAITING requests wait for that; who
            comes then is told CONCURRENT_TRANSACTIONS, and asks again.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.offset_table import Partition
from kmq.gateway.kafka.connection import Call
from kmq.gateway.kafka.transaction_log import ABORT, COMMIT, EMPTY, TransactionState, partition_of
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
    """Return the error that says why a request is refused. `fenced_from`: the version that knows PRODUCER_FENCED."""
    if isinstance(err, RequestRefused):
        is_loading = err.code == "not_ready"
        return ErrorCode.coordinator_load_in_progress if is_loading else ErrorCode.coordinator_not_available
    if isinstance(err, TimeoutError):
        return ErrorCode.concurrent_transactions
    assert isinstance(err, TransactionRefused)
    is_fenced = err.code == ErrorCode.invalid_producer_epoch and call.version >= fenced_from
    return ErrorCode.producer_fenced if is_fenced else err.code


class Transaction:
    """A transactional id and the transaction that is open, if there is one."""

    def __init__(self, id: str) -> None:
        self.id, self.pid, self.epoch, self.number, self.copy, self.timeout_ms = id, -1, -1, 0, 1, 0
        self.partition = partition_of(id)
        self.former: int | None = None  # an epoch whose holder may ask for the next one again
        self.outcome = EMPTY  # of the last transaction
        self.touched = time.monotonic()
        self.state_seq = 0  # of its last state
        self.is_ending = False
        self.opening = 0  # requests that look where it will begin
        self.users = 0  # batches and offsets on their way
        self.idle = asyncio.Event()
        self._turn, self._waiting = asyncio.Lock(), 0
        self.close()

    @staticmethod
    def restored(state: TransactionState) -> "Transaction":
        """Return the id as its last state says. Whether a transaction is open under it, its lines say."""
        txn = Transaction(state.id)
        txn.pid, txn.epoch, txn.copy, txn.timeout_ms = state.pid, state.epoch, state.copy, state.timeout_ms
        txn.number = state.number + (state.state == ABORT)
        txn.touched = time.monotonic() - max(0.0, time.time() - state.seconds)
        txn.former, txn.state_seq = state.former, state.seq
        return txn

    def close(self) -> None:
        """There is no open transaction any more."""
        self.first: int | None = None  # an offset of `__transactions` before which it has no line; None: it is not open
        self.begun, self.nbytes, self.last_seq = 0.0, 0, 0
        self.partitions: set[Partition] = set()
        self.offsets: set[tuple[str, Partition]] = set()

    @property
    def key(self) -> bytes:
        return b"%d-%d-%d" % (self.pid, self.epoch, self.number)

    @property
    def is_late(self) -> bool:
        return self.first is not None and time.monotonic() - self.begun > self.timeout_ms / 1000

    @property
    def is_used(self) -> bool:
        """Return True if a transaction is open, decided or about to begin."""
        return self.first is not None or self.is_ending or bool(self.opening or self.users)

    def state(self, state: str, end: int = 0) -> TransactionState:
        first = self.first or 0 if state == COMMIT else 0
        numbers = self.partition, first, end, self.copy, self.timeout_ms, self.former
        return TransactionState(self.id, self.pid, self.epoch, self.number, state, *numbers)

    @property
    def is_changing(self) -> bool:
        """Return True while somebody has the turn."""
        return self._turn.locked()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Have the turn of what changes the state. Raises TransactionRefused if too many wait for it."""
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

    def enter(self) -> None:
        self.users += 1
        self.idle.clear()

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self.idle.set()


class HeldBatch(NamedTuple):
    """A batch on its way into a transaction. `routing_key`: of its lines."""

    transaction: Transaction
    routing_key: bytes

    def handed_over(self, nbytes: int) -> None:
        self.transaction.nbytes += nbytes

    def stored(self, seq: int) -> None:
        self.transaction.last_seq = max(self.transaction.last_seq, seq)

    def leave(self) -> None:
        self.transaction.leave()
