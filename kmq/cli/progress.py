"""Counts on the terminal while a long command works. If stderr is a file or a pipe, nothing is shown."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console

_REDRAW = 1024  # items between two updates if each item counts as one

_T = TypeVar("_T")


@contextmanager
def counting(text: str) -> Iterator[Callable[[float], None]]:
    """Show `text` while the block runs. Yields a function that adds its argument to the text's {task.completed}."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda amount: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn(text), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda amount: progress.advance(task, amount)


def counted(items: Iterable[_T], verb: str, size: Callable[[_T], int] | None = None) -> Iterator[_T]:
    """Yield `items`, and show `verb` with their number. `size` returns how many an item counts for; None: one."""
    with counting(verb + " {task.completed:,.0f}") as advance:
        for number, item in enumerate(items, 1):
            yield item
            if size:
                advance(size(item))
            elif number % _REDRAW == 0:
                advance(_REDRAW)
