"""The ring `received` as the framer sees it: which control lines speak of it, and what of it is framed.

Invariant   `done` is what the record of the ring `framed` says. A control line is obeyed only if it names the ring that
            lies here and bytes that ingress has put there; any other writer of the FIFO may have made it up. Bytes
            before `done` are never looked at: ingress may have overwritten them. Nothing is framed from there either,
            so a control line that speaks of them does nothing.
Removed     Whoever notices first writes the ring again (holdings.py). Until then a control line may speak of a ring
            that is not here, or of bytes that only the new file has. It must not pass for a made-up one, because its
            lines would be lost: we wait for the ring, or end and begin anew with the new file.
"""

from collections.abc import Callable

from kmq.errors import RetryError
from kmq.links.layout import NOTHING_RECEIVED, Received
from kmq.links.raw import CONTROL
from kmq.links.received import ReceivedReader


def _nothing() -> None:
    return None


class Source:
    """The text of control lines."""

    def __init__(
        self,
        attach: Callable[[], ReceivedReader | None] = _nothing,
        done: Received = NOTHING_RECEIVED,
        wait: Callable[[], None] = _nothing,
    ) -> None:
        """`attach` returns the ring, None while ingress has not made it. `done`: of the last commit.

        `wait` waits for the ring if a living ingress will make it, or write it again.
        """
        self._attach, self._wait = attach, wait
        self._ring: ReceivedReader | None = None
        self.done = done
        self.begin()

    def begin(self, text: bytes = b"") -> int:
        """Begin a batch of `text`, read before; return up to which position the lines of the ring are framed.

        Ingress makes the ring before it writes a line about it. So the ring is looked for here and not in the middle of
        a batch, where a new ring would change the position under it.
        """
        if self._ring is None and not self._look() and (text.startswith(CONTROL) or b"\n" + CONTROL in text):
            self._wait()
            self._look()
        position: int = self.done.position
        return position

    def _look(self) -> bool:
        ring = self._ring = self._attach()
        if ring is not None:
            self.committed(Received(ring.birth, self.done.position if ring.birth == self.done.birth else 0))
        return ring is not None

    def has(self, birth: int, start: int, end: int) -> bool:
        """Return True if whole lines lie between these positions of the ring with this birth, or did and are framed.

        Raises RetryError if they do not, and another file has the ring's name by now: they may lie there.
        """
        ring = self._ring
        if ring is None:
            return False
        if (
            ring.birth == birth
            and ring.holds(start, end)
            and (end <= self.done.position or self._ends_line(start, end))
        ):
            return True
        if not ring.is_in_place():
            raise RetryError(f"{ring.path}: was removed, or replaced; read again")
        return False

    def _ends_line(self, start: int, end: int) -> bool:
        return start == end or self.text(end - 1, end) == b"\n"

    def text(self, start: int, end: int) -> bytes:
        """Return the text between two positions that are there."""
        assert self._ring is not None
        return self._ring.text(start, end)

    def committed(self, done: Received) -> None:
        """Give back the room of what is framed. Call after the commit in the ring `framed`."""
        self.done = done
        if self._ring is not None:
            self._ring.release(done.position)
