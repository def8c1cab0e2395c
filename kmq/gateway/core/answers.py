"""The memory of answers that are being sent, over HTTP and gRPC together: one budget.

    await budget.reserve(holder, 5 * MIB); read; budget.settle(holder, 3 * MIB); send; budget.release(holder)

Invariant   A read of records reserves its share before it begins, and keeps what it found until the client has taken
            it. All shares together are at most the budget, or one answer if a single message is longer.
Eviction    When the budget is used up, the answer ends (with its connection) whose client has kept the gateway waiting
            longest. The new answer waits until enough bytes are free: in turn, for at most _LONGEST_WAIT_S.
Back        Free pages of the heap are returned to the system once a burst is over (`tidy`). Otherwise the C library
            keeps them: hundreds of MiB after a crowd of readers that left long ago.
Not covered Bytes that the kernel has taken for a client: its socket buffers are not memory of the gateway.
"""

import asyncio
import ctypes
import time
from collections.abc import Iterable
from contextlib import suppress
from contextvars import ContextVar
from typing import TypeVar

from kmq.broker.stats import Strangers
from kmq.config.values import MIB
from kmq.gateway.core.broker import RequestRefused

ANSWER_BYTES = 64 * MIB  # of all answers together
COPIES = 4  # of a record on its way out: line, value, message, and its bytes in the answer
PATIENCE_S = 0.1  # how long a client may keep the gateway waiting before another answer may evict its own
_BURST_BYTES = 16 * MIB  # held at once: then the heap is checked afterwards
_LOOK_S = 0.05  # between two looks for a client that has become slow
_LONGEST_WAIT_S = 5.0  # for bytes of a budget


class BudgetHolder:
    """The holder of a share of a budget: one answer, or one gRPC call."""

    def __init__(self) -> None:
        self.since = 0.0  # since when it waits for its client; 0: it does not wait
        self.why_ended = ""
        self._held: list[Budget] = []

    def has_waited(self, seconds: float) -> bool:
        """Return True if it has waited for its client for at least that time."""
        return self.since > 0 and time.monotonic() - self.since >= seconds

    def hold(self, budget: "Budget") -> None:
        """Note that it has a share of `budget`, which it must release at its end."""
        if budget not in self._held:
            self._held.append(budget)

    def end(self, why: str) -> None:
        """End it early, with its connection."""
        raise NotImplementedError

    def close(self) -> None:
        """Release all shares of budgets, because it is over."""
        while self._held:
            self._held.pop().release(self)


READER: ContextVar[BudgetHolder | None] = ContextVar(
    "reader", default=None
)  # the answer that this task makes, over HTTP


H = TypeVar("H", bound=BudgetHolder)


def longest_waiting(holders: Iterable[H], seconds: float) -> H | None:
    """Return the holder that has waited longest for its client; None if no holder has waited for `seconds`."""
    late = [holder for holder in holders if holder.has_waited(seconds) and not holder.why_ended]
    return min(late, key=lambda holder: holder.since, default=None)


class Budget:
    """A limit on the bytes that all answers, or all requests, hold together."""

    def __init__(self, most: int, patience_s: float = PATIENCE_S, strangers: Strangers | None = None) -> None:
        self.most, self.used, self._peak = most, 0, 0
        self._patience_s, self._strangers = patience_s, strangers
        self._held: dict[BudgetHolder, int] = {}
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    async def reserve(self, holder: BudgetHolder, nbytes: int) -> None:
        """Make `nbytes` the share of `holder`, waiting until they are free. Raises RequestRefused after _LONGEST_WAIT_S."""
        if self._turn.locked() or not self._fits(holder, nbytes):
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S), self._turn:
                    while not self._fits(holder, nbytes):
                        await self._make_room()
            except TimeoutError:
                raise RequestRefused("too_many", "too many answers are on their way to clients") from None
        self.settle(holder, nbytes)

    def _fits(self, holder: BudgetHolder, nbytes: int) -> bool:
        others = self.used - self._held.get(holder, 0)
        return not others or others + nbytes <= self.most

    async def _make_room(self) -> None:
        """Evict the slowest holder, or wait until a share is released."""
        slow = longest_waiting(self._held, self._patience_s)
        if slow is not None:
            if self._strangers is not None:
                self._strangers.turn_away("", f"an answer of {self._held[slow]} bytes, which its client does not read")
            slow.end("evicted: its client was slow, and other answers needed its memory")
            return self.release(slow)
        self._freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._freed.wait()

    def settle(self, holder: BudgetHolder, nbytes: int) -> None:
        """Set the share of `holder` to `nbytes`, without waiting."""
        before = self._held.get(holder, 0)
        self.used += nbytes - before
        self._peak = max(self._peak, self.used)
        self._held[holder] = nbytes
        holder.hold(self)
        if nbytes < before:
            self._freed.set()

    def release(self, holder: BudgetHolder) -> None:
        """Release the share of `holder`, if it has one."""
        self.used -= self._held.pop(holder, 0)
        self._freed.set()

    async def tidy(self) -> None:
        """Return memory to the system if a burst is over. Call it regularly."""
        if self._peak >= _BURST_BYTES and self.used < _BURST_BYTES:
            self._peak = self.used
            with suppress(AttributeError):  # a C library without it
                await asyncio.to_thread(ctypes.CDLL(None).malloc_trim, 0)
