"""Reads of records for the calls of kmq.v1, within the budget of all answers.

Memory      A read reserves COPIES of what it may return, or of the longest message, before it begins. After that only
            what was found counts, until the client has taken it (kmq/gateway/core/answers.py).
"""

from collections.abc import Callable
from typing import Any

from kmq.gateway.core.answers import COPIES
from kmq.gateway.core.fetching import Cursor, Fetching, Limit
from kmq.gateway.grpc.calls import Call, Calls
from kmq.message.message import Message

Shape = Callable[[list[Message]], tuple[Any, int]]  # messages → what is sent, and the bytes of their lines


class Reading:
    """The reads of all calls."""

    def __init__(self, fetching: Fetching, calls: Calls) -> None:
        self._fetching, self._longest, self._budget = fetching, calls.longest, fetching.answers

    async def read(self, call: Call, cursor: Cursor, limit: Limit, shape: Shape) -> tuple[int, Any]:
        """Read on from `cursor`. Returns how many messages there are, and what `shape` makes of them."""
        await self._budget.take(call, COPIES * max(self._longest, limit.nbytes))
        nbytes = 0
        try:
            count, (made, nbytes) = await self._fetching.read([cursor], limit, shape)
        finally:
            if nbytes:
                self._budget.settle(call, COPIES * nbytes)
            else:
                self._budget.release(call)
        return count, made

    def release(self, call: Call) -> None:
        """Note that the client has taken what was read for the call."""
        self._budget.release(call)
