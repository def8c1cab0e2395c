"""Where commands print to: a terminal, a file, or a pipe whose reader may leave early.

`kmq log cat append | head -1` is no failure: what is printed after the reader has left goes nowhere, and the command ends with
the exit code of its own work. So the code is the same however much the pipe had room for, `pipefail` or not.
"""

import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

from rich.console import Console

from kmq.errors import RetryError

_WIDE = 10_000  # columns: more than any table has
_T = TypeVar("_T")


class _Out(io.FileIO):
    """A descriptor that may be written to whether or not anyone reads what is written."""

    is_over = False

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # whatever buffer the layer above has
        if not self.is_over:
            try:
                return super().write(data)
            except BrokenPipeError:
                self.is_over = True
            except OSError as err:
                self.is_over = True
                raise RetryError(f"{'stdout' if self.fileno() == 1 else 'stderr'}: {err.strerror}") from err
        return len(data)


def open_streams() -> None:
    """Make stdout and stderr such ones for the rest of this process."""
    sys.stdout, sys.stderr = _opened(sys.stdout), _opened(sys.stderr)


def _opened(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed by the shell, with >&-
        return open(os.devnull, "w")
    raw = _Out(stream.fileno(), "w", closefd=False)
    is_lined = stream.fileno() == 2 or stream.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=is_lined
    )


def drop() -> None:
    """Forget what is not printed yet: after Ctrl-C nobody waits for whoever does not read it."""
    raw = _raw()
    if raw:
        raw.is_over = True


def _raw() -> _Out | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Out) else None


def while_read(items: Iterable[_T]) -> Iterator[_T]:
    """`items`, until whoever reads stdout has left: for a command that does nothing but print them."""
    raw = _raw()
    for item in items:
        yield item
        if raw and raw.is_over:
            return


def console() -> Console:
    """For tables: as wide as the terminal; in a pipe or a file as wide as the table, so that nothing is cut or wrapped."""
    made = Console()
    return made if made.is_terminal else Console(width=_WIDE)
