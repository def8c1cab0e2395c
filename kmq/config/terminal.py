"""Where commands print to: a terminal, a file, or a pipe whose reader may leave early.

`kmq log cat append | head -1` is no failure: output after the reader has left is discarded, and the command ends with
the exit code of its own work. So the code never depends on how much fits into the pipe, not even under `pipefail`.
"""

import io
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TextIO, TypeVar

from kmq.errors import RetryError

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 10_000  # columns, more than any table has
_T = TypeVar("_T")


class _Out(io.FileIO):
    """A descriptor that accepts writes even when its reader has left."""

    is_over = False

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # any buffer of the layer above
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
    """Let stdout and stderr of this process outlive their readers."""
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
    """Discard output that is not printed yet: after Ctrl-C a command must not wait for a reader that reads nothing."""
    raw = _raw()
    if raw:
        raw.is_over = True


def _raw() -> _Out | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Out) else None


def is_read() -> bool:
    """Return False once the reader of stdout has left, or nothing can be written there any more."""
    raw = _raw()
    return raw is None or not raw.is_over


def when_left(act: Callable[[], None]) -> None:
    """Call `act` once the reader of stdout has left, from a thread: for a command that may print nothing for long."""

    def wait() -> None:
        poll = select.poll()
        poll.register(1, 0)  # errors alone
        poll.poll()
        act()

    threading.Thread(target=wait, name="kmq-stdout", daemon=True).start()


def while_read(items: Iterable[_T]) -> Iterator[_T]:
    """Yield `items` until the reader of stdout has left: for a command that only prints them."""
    for item in items:
        yield item
        if not is_read():
            return


def console() -> "Console":
    """Return a console as wide as the terminal; in a pipe or a file wide enough for any table."""
    from rich.console import Console

    made = Console()
    return made if made.is_terminal else Console(width=_WIDE)
