"""Topics that messages have named and the router has not made yet, with the lines that wait for them.

Making a topic takes six inodes and some milliseconds. Thousands of new topics would keep the lines of all other topics
waiting. So lines of existing topics go first, and a few newcomers are made at a time.

Invariant   A topic's lines are in its newcomer or in its log, never in both, in order. All records before `first_seq`
            of the oldest newcomer are in their logs; no checkpoint covers more.
Crash       Waiting lines are in memory only. The next start reads them from the WAL, like everything after the
            checkpoint.
Memory      At most MOST_BYTES of waiting lines; beyond that, all topics are made before anything else is routed.
"""

from kmq.config.values import MIB

AT_ONCE = 16  # topics made between two reads of the ring
MOST_BYTES = 8 * MIB


class Newcomer:
    """A topic to be made, and its waiting lines."""

    __slots__ = ("first_seq", "lines", "name")

    def __init__(self, name: bytes, first_seq: int) -> None:
        self.name, self.first_seq = name, first_seq
        self.lines: list[bytes] = []


class Newcomers:
    """All newcomers, in the order of their first messages."""

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
        """Return True if so many bytes wait that all newcomers must be made now."""
        return self._nbytes > MOST_BYTES

    def named(self, name: bytes, seq: int) -> Newcomer:
        """Return the newcomer of this name; make it if it is new, with `seq` as its first record."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = Newcomer(name, seq)
        return found

    def add(self, newcomer: Newcomer, lines: list[bytes]) -> None:
        """Add lines that wait for a newcomer."""
        newcomer.lines += lines
        self._nbytes += sum(map(len, lines))

    def remove(self, newcomer: Newcomer) -> bytes:
        """Remove a newcomer whose topic is made; return its lines as one text."""
        del self._by_name[newcomer.name]
        self._nbytes -= sum(map(len, newcomer.lines))
        return b"\n".join([*newcomer.lines, b""])
