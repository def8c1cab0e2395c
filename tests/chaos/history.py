"""What clients of a broker did and saw, one operation after the other, and how that is written to a file.

Each operation was asked for at `began` and answered at `ended` (seconds of the monotonic clock of this machine, which
its processes share). Its outcome is OK, FAIL (the broker refused, so it did not happen) or UNKNOWN (no answer came, so it
may have happened). A process writes an operation before it does what depends on it, so what a killed process did
not write was not acted upon.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

OK, FAIL, UNKNOWN = "ok", "fail", "unknown"

Place = tuple[str, int]  # topic, partition
Offsets = dict[Place, int]


class Produce(NamedTuple):
    """One message, its value unlike all others. `place` and `offset`: where the broker said that it lies; None: not said.

    `once`: it must not be stored twice, and the messages of one process stay in order. Without it the process sends again
    whatever was not answered. `began`: when it was sent, or later. `size`: of its payload, if that is known.
    """

    process: str
    value: str
    outcome: str
    place: Place | None = None
    offset: int | None = None
    once: bool = True
    began: float = 0.0
    size: int | None = None


class Answer(NamedTuple):
    """The broker said that the message lies in the WAL as `seq`: `began`: when the message was sent last."""

    process: str
    value: str
    seq: int
    began: float
    ended: float


class Ends(NamedTuple):
    """The broker said where a partition ends."""

    process: str
    place: Place
    end: int
    began: float
    ended: float


class Healed(NamedTuple):
    """Since `ended` nothing is broken any more: `what` was."""

    what: str
    ended: float


class Assigned(NamedTuple):
    """From now on the process reads `places`, and no others. It begins those of `fresh` anew, at what is committed.

    `goes_on`: or where it was, because the broker does not say which of the two it is.
    """

    process: str
    group: str
    generation: int | None
    places: tuple[Place, ...]
    fresh: tuple[Place, ...]
    began: float
    ended: float
    goes_on: bool = False


class Poll(NamedTuple):
    """The process was given `values`, which lie from offset `first` on. `group` "": a reader without one."""

    process: str
    group: str
    place: Place
    first: int
    values: tuple[str, ...]
    ended: float

    @property
    def end(self) -> int:
        return self.first + len(self.values)


class Again(NamedTuple):
    """The process was given a message that comes again, which moves its position nowhere."""

    process: str
    group: str
    place: Place
    offset: int
    value: str
    ended: float


class Nacked(NamedTuple):
    """The process gave a message back, and the broker has acknowledged that."""

    process: str
    group: str
    place: Place
    offset: int
    began: float
    ended: float


class Lost(NamedTuple):
    """An answer with `values` was on its way to the process, which has given it up and read nothing of it.

    `began`: when it was asked for. The process may be stopped before it notes this, and others be given the records.
    """

    process: str
    group: str
    place: Place
    first: int
    values: tuple[str, ...]
    began: float

    @property
    def end(self) -> int:
        return self.first + len(self.values)


class Commit(NamedTuple):
    """The process asked that its group goes on at these next offsets."""

    process: str
    group: str
    offsets: Offsets
    outcome: str
    began: float
    ended: float


class Committed(NamedTuple):
    """Somebody asked where the group goes on; a place without a commit is missing."""

    group: str
    offsets: Offsets
    began: float
    ended: float


class Owners(NamedTuple):
    """The broker said who has what in one generation: member, place."""

    group: str
    generation: int
    owners: tuple[tuple[str, Place], ...]


Operation = Produce | Answer | Ends | Healed | Assigned | Poll | Again | Nacked | Lost | Commit | Committed | Owners
_TYPES = {each.__name__: each for each in get_args(Operation)}


def encode(operation: Operation) -> str:
    """Return a line, without its newline."""
    return f"{type(operation).__name__} {tuple(operation)!r}"


def decode(line: str) -> Operation:
    name, _, fields = line.partition(" ")
    made: Operation = _TYPES[name](*ast.literal_eval(fields))
    return made


def read(path: Path) -> Iterator[Operation]:
    """The operations of a file; a last line without a newline was not written whole, and was not acted upon."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield decode(line)
