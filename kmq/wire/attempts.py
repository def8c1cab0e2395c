"""Numbers a program's attempts to connect: `attempt=<run>.<number>` in a hello, in GROUP and in a Join.

A program that waits too long for the answer to its opening closes the connection and makes another one. The first
opening may still be under way, for example in the door of a follower. When it arrives it must not end the newer
connection.

Invariant   An opening never takes a name away from a later attempt of the same run. The owner of the names keeps the
            attempt with the connection or member that has the name, and refuses an earlier one (`fenced`) before it
            changes anything.
Not covered An opening that arrives while the name is free: it gets the name, and the next attempt takes it away.
            Openings without an attempt, or of another run: the last one has the name.
"""

import re
from collections import namedtuple

EXPECTED = "must be <run>.<number>, of at most 64 letters, digits, _ and -, and a number"
_ATTEMPT = re.compile(r"([A-Za-z0-9_-]{1,64})\.([0-9]{1,18})")


class Attempt(namedtuple("Attempt", ("run", "number"))):
    """A program numbers its attempts under `run`, a name that only this run of it has."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.run}.{self.number}"

    def next(self) -> "Attempt":
        return Attempt(self.run, self.number + 1)

    def is_before(self, other: "Attempt") -> bool:
        """Return True if `other` is a later attempt of the same run."""
        return bool(self.run == other.run and self.number < other.number)


def attempt_of(text: str) -> Attempt:
    """Parse `<run>.<number>`. Raises ValueError that says what is expected."""
    match = _ATTEMPT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:80]!r}: {EXPECTED}")
    return Attempt(match[1], int(match[2]))
