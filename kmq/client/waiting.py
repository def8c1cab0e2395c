"""What a command does while the broker accepts nothing: it waits, and says on stderr what it waits for.

Backpressure is the contract: a broker without space accepts nothing, and a sender that waits loses nothing. But a
sender must not wait in silence.
"""

import math
import re
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from kmq.errors import RetryError

STALL_S = 2.0  # how long nothing moves before the terminal says why
_T = TypeVar("_T")


def say(text: str) -> None:
    """Print a line for the user on stderr."""
    print(f"kmq: {text}", file=sys.stderr, flush=True)


def _gist(reason: str) -> str:
    """Return a reason without its numbers, because "for 3.1 s" is no news after "for 2.1 s"."""
    return re.sub(r"[\d.,]+", "#", reason)


class Patience:
    """Keeps the user informed of a wait: prints the reason, each change of it, and when messages move again."""

    def __init__(self, why: Callable[[], str], timeout_s: float = math.inf) -> None:
        """`why` returns what the broker waits for; `timeout_s` without progress ends a wait with RetryError."""
        self.timeout_s = timeout_s
        self._why = why
        self._moved = self._stalled = time.monotonic()
        self._reason = ""

    @property
    def tick_s(self) -> float:
        """Return how long one attempt may take."""
        return min(STALL_S, self.timeout_s)

    def until_done(self, attempt: Callable[[], _T]) -> _T:
        """Return the result of `attempt`, repeated while it times out. Raises RetryError when the time is up."""
        self._moved = time.monotonic()
        while True:
            try:
                result = attempt()
            except TimeoutError:
                self.stalled()
                continue
            self.moved()
            return result

    def moved(self) -> None:
        """Note that the broker has accepted something."""
        if self._reason:
            say(f"the broker accepts messages again, after {time.monotonic() - self._stalled:.0f} s")
            self._reason = ""
        self._moved = time.monotonic()

    def stalled(self) -> None:
        """Note that an attempt has timed out. Raises RetryError when the time is up."""
        waited_s = time.monotonic() - self._moved
        if waited_s < self.tick_s:
            return  # only this message waits, while others move
        reason = self._why()
        if waited_s >= self.timeout_s:
            raise RetryError(f"the broker accepted nothing for {waited_s:.0f} s: {reason}; gave up after --timeout")
        if not self._reason:
            self._stalled = time.monotonic() - self.tick_s
        if _gist(reason) != _gist(self._reason):
            self._reason = reason
            say(f"waiting: the broker accepts nothing: {reason}")
