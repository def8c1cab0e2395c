"""Messages that are sent together, and their outcomes: `producer.send("orders", b"one")` returns a Delivery."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from kmq.errors import KmqError
from kmq.sending.failures import Refused

_NONE: Mapping[int, Refused] = MappingProxyType({})  # shared by all messages that are not refused
_Row = TypeVar("_Row")


class Delivery:
    """Messages sent together, one or a list, and their outcomes.

    seq         seq of the message, or of the first stored message of a list; 0: stored too long ago for the broker to
                know the seq
    runs        for a list: (place in the list, seq of that message, length of the run of consecutive seqs), in order
    refused     for a list: place → Refused
    duplicates  (place, seq) of each message that had been stored before, in order
    error       why the delivery failed: the first refusal, or NotAnswered
    """

    __slots__ = (
        "answered",
        "callback",
        "count",
        "data",
        "done",
        "duplicates",
        "error",
        "is_provisional",
        "lines",
        "may_be_stored",
        "missing",
        "refused",
        "runs",
        "seen",
        "seq",
        "since",
        "size",
    )

    data: bytes
    count: int  # messages
    missing: int  # messages of a list in parts that have no outcome yet
    size: int  # bytes
    since: float  # when it was queued, on the monotonic clock

    def __init__(self, callback: "Callable[[Delivery], object] | None" = None) -> None:
        self.callback = callback
        self.answered = 0
        self.lines: list[bytes] | None = None  # the lines of `data`, once `line` was called
        self.done = self.seen = False  # seen: its error was raised, or given to the callback
        self.is_provisional = False  # its ids count from 1 until the broker has told the last id it knows
        self.may_be_stored = False  # it was sent on a connection that broke, or the user chose its id
        self.seq = -1
        self.error: KmqError | None = None
        self.runs: Sequence[tuple[int, int, int]] = ()
        self.refused: Mapping[int, Refused] = _NONE
        self.duplicates: Sequence[tuple[int, int]] = ()

    def line(self, place: int) -> bytes:
        """Return the message at `place` as it was sent."""
        if not self.data:
            return b""
        if self.lines is None:  # split once: many messages of a list may be refused
            self.lines = self.data.split(b"\n")
        return self.lines[place]

    def rest(self) -> bytes:
        """Return the lines that have no reply yet."""
        return self.data.split(b"\n", self.answered)[-1]

    def stored(self, count: int, seq: int) -> None:
        """Note that the next `count` messages are stored, from `seq` on."""
        if self.seq < 0:
            self.seq = seq
        if self.count > 1:
            runs = self.runs if isinstance(self.runs, list) else []
            runs.append((self.answered, seq, count))
            self.runs = runs
        self.answered += count

    def repeated(self, seq: int) -> None:
        """Note that the next message had been stored before, as `seq`."""
        duplicates = self.duplicates if isinstance(self.duplicates, list) else []
        duplicates.append((self.answered, seq))
        self.duplicates = duplicates

    def refuse(self, error: Refused) -> None:
        """Note that the next message is refused."""
        refused = self.refused if isinstance(self.refused, dict) else {}
        refused[self.answered] = error
        self.refused = refused
        if self.error is None:
            self.error = error
        self.answered += 1

    def forget(self) -> None:
        """Forget all replies."""
        self.answered, self.seq, self.error = 0, -1, None
        self.runs, self.duplicates, self.refused = (), (), _NONE

    @property
    def seqs(self) -> list[int]:
        """Return the seq of each message; 0 if it is not known, or the message was refused."""
        if self.count == 1:
            return [max(self.seq, 0)]
        seqs = [0] * self.count
        for place, seq, count in self.runs:
            if seq:
                seqs[place : place + count] = range(seq, seq + count)
        return seqs


class Part(Delivery):
    """Some messages of a list that is too long to be in flight as a whole. Their outcomes are added to the `whole`
    list.
    """

    __slots__ = ("at", "whole")

    def __init__(self, whole: Delivery, at: int) -> None:
        """`at`: the place of the first of them in the list."""
        super().__init__(_joins)
        self.whole, self.at, self.may_be_stored = whole, at, whole.may_be_stored

    def join(self) -> bool:
        """Add these outcomes to those of the list. Returns True if all of the list is done."""
        whole, at = self.whole, self.at
        runs = self.runs or ([(0, self.seq, 1)] if self.seq >= 0 else ())
        whole.seq = self.seq if whole.seq < 0 else whole.seq
        whole.runs = _extended(whole.runs, [(at + place, seq, count) for place, seq, count in runs])
        whole.duplicates = _extended(whole.duplicates, [(at + place, seq) for place, seq in self.duplicates])
        if self.refused:
            whole.refused = {**whole.refused, **{at + place: error for place, error in self.refused.items()}}
        whole.error = whole.error or self.error
        whole.answered += self.answered
        whole.missing -= self.count
        return not whole.missing


def _joins(_: Delivery) -> None:
    """Stand for a callback: the outcome of a part goes to its list."""


def _extended(rows: Sequence[_Row], more: list[_Row]) -> list[_Row]:
    extended = rows if isinstance(rows, list) else []
    extended += more
    return extended


def in_parts(whole: Delivery, count: int, most: int) -> Iterator[tuple[Delivery, int, int]]:
    """Yield the deliveries to queue for a list of `count` messages, each with its first and its end place in the list.

    That is `whole` itself, or parts of at most `most` messages.
    """
    if count <= most:
        yield whole, 0, count
        return
    whole.data, whole.count, whole.missing = b"", count, count
    for at in range(0, count, most):
        yield Part(whole, at), at, min(count, at + most)
