"""`kmq …`: finds the module of a command, and maps errors to one line on stderr and an exit code.

`kmq topics list` imports `kmq.cli.topics` and no other module of commands, because all of them together take half a
second of CPU. `kmq --help` and a word that is not in the table import all.
"""

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kmq import __version__
from kmq.cli.output import examples
from kmq.config import terminal
from kmq.errors import EXIT_SIGINT, ConfigError, KmqError, of_os_error
from kmq.files import keep_others_out

# First word of a command -> the module of kmq.cli whose `add_to(app)` adds it, in the order of `kmq --help`.
MODULES = {
    "up": "lifecycle",
    "down": "lifecycle",
    "gateway": "lifecycle",
    "status": "status",
    "clock": "status",
    "top": "top.command",
    "doctor": "doctor",
    "bundle": "bundle",
    "produce": "produce",
    "ship": "ship",
    "consume": "consume",
    "tail": "consume",
    "redrive": "deadletters",
    "verify": "logs",
    "sql": "spark",
    "audit": "spark",
    "config": "config",
    "topics": "topics",
    "groups": "groups",
    "kafka": "kafka",
    "dlq": "deadletters",
    "token": "tokens",
    "log": "logs",
    "bq": "bq",
    "fleet": "fleet",
    "cluster": "cluster",
    "tier": "tier",
    "restore": "restore",
    "pipeline": "spark",
}


class _Commands(TyperGroup):
    """The commands of `kmq`, each imported when its word is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all first words, in the order of `kmq --help`."""
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a word. For an unknown word import all into `commands`, and return None."""
        for word in [cmd_name] if cmd_name in MODULES else MODULES:
            if word not in self.commands:
                family = typer.Typer(rich_markup_mode="rich")
                import_module(f"kmq.cli.{MODULES[word]}").add_to(family)
                self.commands.update(typer.main.get_group(family).commands)
        return self.commands.get(cmd_name)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # inherited by all commands
    rich_markup_mode="rich",
    help="KMQ: a message broker inside one pod. Every message is a line in a text file.",
    epilog="Settings come from the environment (KMQ_DATA, KMQ_PORT, …), then ./kmq.toml, then defaults.\n\n"
    + examples(
        "kmq up", "kmq produce test.probe -m hello", "kmq status", "kmq --host 127.0.0.1 topics list", "kmq down"
    ),
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"kmq {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Option(
            "--url",
            help="Talk to a broker elsewhere, by its HTTP address: http://host:8082. For produce, ship, consume, tail, topics,"
            " groups, dlq, top; put it before the command.",
        ),
    ] = "",
    host: Annotated[str, typer.Option("--host", help="The same by its host: --url http://<host>:8082.")] = "",
    token: Annotated[
        str, typer.Option("--token", help="With --url or --host: a bearer token, or @<file> that holds one.")
    ] = "",
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if url or host or token:
        from kmq.cli import elsewhere

        elsewhere.choose(context.invoked_subcommand, url, host, token)
        context.call_on_close(elsewhere.forget)


def main() -> None:
    """Run a command. A KmqError, or a path of the wrong kind, becomes one line on stderr and an exit code."""
    terminal.open_streams()
    keep_others_out()
    try:
        try:
            app()
        except SystemExit as end:
            if end.code == EXIT_SIGINT:
                terminal.drop()
            raise
        finally:
            sys.stdout.flush()  # report a failure to write here; at interpreter exit it would be a traceback
    except KmqError as error:
        _fail(error)
    except OSError as error:
        cause = of_os_error(error)
        if not isinstance(cause, ConfigError):
            raise
        _fail(cause)


def _fail(error: KmqError) -> NoReturn:
    print(f"kmq: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
