"""All commands of `kmq`, for tests that look at each of them."""

from collections.abc import Iterator
from typing import Any

import typer

from kmq.cli.app import app


def every_command(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (words after `kmq`, command) of each command and each group, and ((), kmq itself) first."""
    command = typer.main.get_command(app) if command is None else command
    yield words, command
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from every_command(command.get_command(None, name), (*words, name))


def is_group(command: Any) -> bool:
    """Return True for a word that has commands of its own: `kmq topics`."""
    return hasattr(command, "list_commands")
