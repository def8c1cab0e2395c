"""What all commands share: examples in help texts, groups of options, access to the broker, and counts on the
terminal.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, Signature, signature
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints, is_typeddict

import typer

from kmq.config import terminal
from kmq.config.settings import load
from kmq.config.values import parse_duration
from kmq.errors import ConfigError, KmqError, pip_install
from kmq.spark.pipelines.options import PipelineOption, declared

if TYPE_CHECKING:
    from rich.table import Table

    from kmq.cluster.queue import BroadcastQueue

_REDRAW = 1024  # items between two updates if each item counts as one

_T = TypeVar("_T")


def examples(*lines: str) -> str:
    """Return the end of a help text: commands to paste, each at most 74 columns wide, to fit a terminal of 80."""
    return "\b\nExamples:\n\n" + "\n\n".join(f"    {line}" for line in lines)


# --- options ---------------------------------------------------------------------------------------------------------
# Options of one purpose are one value: a parameter of a NamedTuple type becomes one option per field. So does a
# parameter of a TypedDict that declares the options of a pipeline (kmq/spark/pipelines/options.py).


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer in which the fields of each group are options."""
    hints = get_type_hints(function)
    groups: dict[str, Any] = {n: kind for n, kind in hints.items() if hasattr(kind, "_fields") or is_typeddict(kind)}

    @wraps(function)
    def command(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field: parse(given.pop(field)) for field, parse in _fields(group).items()})
        function(**given)

    flat = [option for parameter in signature(function).parameters.values() for option in _options(parameter, groups)]
    command.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in flat}
    return command


def _fields(group: Any) -> dict[str, Callable[[Any], Any]]:
    """Return the fields of a group that are options of a command, each with a function that makes its value."""
    if not is_typeddict(group):
        return dict.fromkeys(group._fields, lambda given: given)
    return {name: option.parse or (lambda given: given) for name, (_, option) in declared(group).items() if option.flag}


def _options(parameter: Parameter, groups: dict[str, Any]) -> list[Parameter]:
    """Return the options that replace a parameter: the fields of a group, or the parameter itself.

    The parameter's default gives the fields their defaults.
    """
    options, default = [parameter], parameter.default
    if group := groups.get(parameter.name):
        if is_typeddict(group):
            options = [_typed(name, *each) for name, each in declared(group).items() if each[1].flag]
        else:
            options = list(signature(group).parameters.values())
            default = default if default is Parameter.empty else default._asdict()
        if default is not Parameter.empty:
            options = [each.replace(default=default.get(each.name, each.default)) for each in options]
    return [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]


def _typed(name: str, kind: Any, option: PipelineOption) -> Parameter:
    """Return an option of a pipeline as an option of a command."""
    shown = typer.Option(option.flag, help=option.help, min=option.min)
    if option.parse is None:
        return Parameter(name, Parameter.KEYWORD_ONLY, default=option.default, annotation=Annotated[kind, shown])
    text = ",".join(option.default)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=text, annotation=Annotated[str, shown])


def seconds(option: str, text: str) -> float:
    """Return a duration in seconds. Raises ConfigError, which names the option."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from None


# --- what commands open ----------------------------------------------------------------------------------------------


def existing_data() -> str:
    """Return KMQ_DATA. Raises ConfigError unless it is a data directory: a command that reads never creates one."""
    from kmq.broker import supervisor

    settings = load()
    if not supervisor.is_data(settings.data):
        raise ConfigError(supervisor.why_not_here(settings))
    return settings.data


def open_queue() -> "BroadcastQueue":
    """Return the Broadcast Queue of this directory's settings. Raises ConfigError if a setting is missing."""
    try:
        from kmq.cluster.queue import BroadcastQueue
    except ImportError as error:
        raise ConfigError(f"{error}; the Broadcast Queue needs: {pip_install('cluster')}") from error
    return BroadcastQueue()


def confirm(what: str, to_do: str, question: str, refusal: type[KmqError] = ConfigError) -> None:
    """Ask before something is done for good. Raises `refusal` without a terminal, and Abort for a no."""
    if not sys.stdin.isatty():
        raise refusal(f"{what}: there is no terminal to ask on; give --yes to {to_do}")
    typer.confirm(f"{what}. {question}", abort=True)


def is_wanted(what: str, dry_run: bool, yes: bool) -> bool:
    """Return True if the action is wanted: `yes` was given, or the user confirms it on the terminal."""
    if dry_run:
        print(f"{what}; nothing was changed")
        return False
    if not yes:
        confirm(what, "do it", "Go on?")
    return True


# --- signals ---------------------------------------------------------------------------------------------------------


def stop_on_signals(stop: threading.Event) -> Callable[[], bool]:
    """Let the first SIGINT or SIGTERM set `stop`, and the second have its default effect. The result tells whether
    the first was SIGINT.
    """
    got: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        got.append(number)
        # In a thread of its own: the signal may have interrupted the holder of the event's lock, the thread that waits.
        threading.Thread(target=stop.set).start()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return lambda: got[:1] == [signal.SIGINT]


# --- tables ----------------------------------------------------------------------------------------------------------


def table(*columns: str) -> "Table":
    """Return a table without borders. A title that begins with > is that of a column of numbers, aligned to the
    right.
    """
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns:
        made.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left")
    return made


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str | float | None]], markup: bool = False) -> None:
    """Print a table. In a cell a number is written 12,345, and None is blank. `markup`: [red] in a text is a colour."""
    shown = table(*columns)
    for row in rows:
        shown.add_row(*(f"{cell:,}" if isinstance(cell, int | float) else cell for cell in row))
    terminal.console().print(shown, markup=markup)


# --- progress --------------------------------------------------------------------------------------------------------
# Counts on the terminal while a long command works. If stderr is a file or a pipe, nothing is shown.


@contextmanager
def counting(text: str) -> Iterator[Callable[[float], None]]:
    """Show `text` while the block runs. Yields a function that adds its argument to the text's {task.completed}."""
    from rich.console import Console

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
    """Yield `items`, and show `verb` with their number. `size` returns how much an item counts; None: one."""
    with counting(verb + " {task.completed:,.0f}") as advance:
        for number, item in enumerate(items, 1):
            yield item
            if size:
                advance(size(item))
            elif number % _REDRAW == 0:
                advance(_REDRAW)
