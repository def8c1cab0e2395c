"""What a command does while the broker takes nothing: it waits, and says on stderr what for.

Backpressure is the contract: a broker that has no room takes no more, and who waits loses nothing. Only silence is
wrong.
"""

import math
import re
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from kmq.errors import RetryError

STALL_S = 2.0  # nothing has moved for so long: whoever looks at the terminal should hear why
_T = TypeVar("_T")


def say(text: str) -> None:
    """A line for the user, beside what the command prints."""
    print(f"kmq: {text}", file=sys.stderr, flush=True)


def _gist(reason: str) -> str:
    """What a reason says, whatever its numbers: "for 3.1 s" is no news after "for 2.1 s"."""
    return re.sub(r"[\d.,]+", "#", reason)


class Patience:
    """Waits with the user: says the reason once, again only if it changes, and when messages move again."""

    def __init__(self, why: Callable[[], str], timeout_s: float = math.inf) -> None:
        """`why` is asked what keeps the broker; after `timeout_s` without progress a wait ends with RetryError."""
        self.timeout_s = timeout_s
        self._why = why
        self._moved = self._stalled = time.monotonic()
        self._reason = ""

    @property
    def tick_s(self) -> float:
        """How long one attempt may take."""
        return min(STALL_S, self.timeout_s)

    def until_done(self, attempt: Callable[[], _T]) -> _T:
        """Return the result of `attempt`, made again as often as it times out. Raises RetryError when the time is up."""
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
        """The broker has taken something."""
        if self._reason:
            say(f"the broker takes messages again, after {time.monotonic() - self._stalled:.0f} s")
            self._reason = ""
        self._moved = time.monotonic()

    def stalled(self) -> None:
        """Somebody has waited for a while. Raises RetryError when the time is up."""
        waited_s = time.monotonic() - self._moved
        if waited_s < self.tick_s:
            return  # for one message, while others move
        reason = self._why()
        if waited_s >= self.timeout_s:
            raise RetryError(f"the broker took nothing for {waited_s:.0f} s: {reason}; gave up, as --timeout says")
        if not self._reason:
            self._stalled = time.monotonic() - self.tick_s
        if _gist(reason) != _gist(self._reason):
            self._reason = reason
            say(f"waiting: the broker takes nothing: {reason}")
