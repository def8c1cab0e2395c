"""Topics that messages have named and the router has not made yet, with the lines that wait for them.

To make a topic takes six inodes and some milliseconds: thousands of them would keep the lines of all others waiting. So
these go first, and a few newcomers are made at a time.

Invariant   A topic's lines are in its newcomer or in its log, never in both, in order. All records before `first_seq`
            of the oldest newcomer are in their logs; no checkpoint says more.
Crash       What waits is in memory only. It is in the WAL too, from which the next start reads all behind the
            checkpoint.
Memory      The lines that wait: MOST_BYTES; with more, all topics are made before anything else is routed.
"""

from kmq.settings import MIB

AT_ONCE = 16  # made between two looks at the ring
MOST_BYTES = 8 * MIB


class Newcomer:
    """One topic to be made."""

    __slots__ = ("first_seq", "lines", "name")

    def __init__(self, name: bytes, first_seq: int) -> None:
        self.name, self.first_seq = name, first_seq
        self.lines: list[bytes] = []


class Newcomers:
    """All of them, in the order of their first messages."""

    def __init__(self) -> None:
        self._by_name: dict[bytes, Newcomer] = {}
        self._nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._by_name

    @property
    def oldest(self) -> Newcomer | None:
        return next(iter(self._by_name.values()), None)

    @property
    def is_too_much(self) -> bool:
        """Whether so many bytes wait that all have to be made now."""
        return self._nbytes > MOST_BYTES

    def named(self, name: bytes, seq: int) -> Newcomer:
        """The newcomer of this name; record `seq` is its first one where it is not there yet."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = Newcomer(name, seq)
        return found

    def add(self, newcomer: Newcomer, lines: list[bytes]) -> None:
        """These lines wait for it."""
        newcomer.lines += lines
        self._nbytes += sum(map(len, lines))

    def remove(self, newcomer: Newcomer) -> bytes:
        """It is made: returns its lines as one text."""
        del self._by_name[newcomer.name]
        self._nbytes -= sum(map(len, newcomer.lines))
        return b"\n".join([*newcomer.lines, b""])
