"""Twins: a small file of rows that lies twice, each copy closed by its crc.

    data/deletions and data/topics/.deletions      the same bytes
        orders|1|9001|1714500000.000100|512,498
        crc32|<crc32 of the lines above>

Invariant   The first copy counts. If it is missing or damaged, the second one does. A reader of both never takes a damaged
            copy for an empty one.
Crash       The copies are replaced one after the other, each atomically, so at least one is whole at any time.
"""

import zlib
from collections.abc import Callable

from kmq.errors import CorruptError

TYPE_CHECKING = False  # a stage does not load `typing`
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")
Names = tuple[str, str]  # of both copies, below the data directory


def seal(body: bytes) -> bytes:
    """Return the content of a file with these lines."""
    return b"%bcrc32|%d\n" % (body, zlib.crc32(body))


def read(data: str, names: Names, parse: "Callable[[list[str]], T]", advice: str) -> "T":
    """Return what `parse` makes of the lines of a whole copy, without the crc; of no lines if there is no copy.

    `parse` raises ValueError for lines that it does not understand. Raises CorruptError with `advice` if there is no
    whole copy, but a damaged one.
    """
    damaged = []
    for name in names:
        content = _content(f"{data}/{name}")
        try:
            if content is not None:
                return parse(_unsealed(content))
        except ValueError as err:
            damaged.append(f"{data}/{name}: {err}")
    if damaged:
        raise CorruptError(f"{damaged[0]}; {advice}")
    return parse([])


def faults(data: str, names: Names, parse: Callable[[list[str]], object]) -> dict[str, str]:
    """Return which of the copies is wrong, and why."""
    contents = {name: _content(f"{data}/{name}") for name in names}
    found = {}
    for name, content in contents.items():
        try:
            if content is not None:
                parse(_unsealed(content))
        except ValueError as err:
            found[name] = str(err)
    first, second = names
    if not found and contents[first] != contents[second]:
        name = first if contents[first] is None else second
        found[name] = "is missing" if contents[name] is None else f"differs from {first}"
    return found


def _unsealed(content: bytes) -> list[str]:
    body = content[: content.rfind(b"\n", 0, -1) + 1]
    if content != seal(body):
        raise ValueError("its crc does not match")
    return body.decode("ascii").splitlines()


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
