"""Counts on the terminal while a long command works; nothing where stderr is a file or a pipe."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console

_REDRAW = 1024  # items between two updates, where each is small

_T = TypeVar("_T")


@contextmanager
def counting(text: str) -> Iterator[Callable[[float], None]]:
    """Show `text` while the block runs; its {task.completed} grows by what the yielded function is given."""
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
    """Yield `items` while their number is shown behind `verb`; `size` says how many an item counts for."""
    with counting(verb + " {task.completed:,.0f}") as advance:
        for number, item in enumerate(items, 1):
            yield item
            if size:
                advance(size(item))
            elif number % _REDRAW == 0:
                advance(_REDRAW)
