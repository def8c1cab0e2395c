"""`kmq …`: puts the commands together, and maps errors to one line on stderr and an exit code.

Each family of commands is a function `add_to(app)`, and one entry in FAMILIES below. All of
their modules are imported for every command, so what only one command needs is imported inside its function.
"""

import sys
from typing import Annotated, NoReturn

import typer

from kmq import __version__
from kmq.cli import (
    bq,
    bundle,
    cluster,
    config,
    consume,
    deadletters,
    doctor,
    fleet,
    groups,
    kafka,
    lifecycle,
    logs,
    produce,
    ship,
    spark,
    status,
    tokens,
    topics,
)
from kmq.cli.elsewhere import choose
from kmq.cli.output import examples
from kmq.cli.top import command
from kmq.config import terminal
from kmq.errors import EXIT_SIGINT, ConfigError, KmqError, of_os_error
from kmq.files import keep_others_out

# The order in `kmq --help`, except that groups of commands (kmq topics …) come after single commands.
FAMILIES = (
    lifecycle.add_to,
    status.add_to,
    command.add_to,
    doctor.add_to,
    bundle.add_to,
    config.add_to,
    produce.add_to,
    ship.add_to,
    consume.add_to,
    deadletters.add_redrive_to,
    topics.add_to,
    groups.add_to,
    kafka.add_to,
    deadletters.add_to,
    tokens.add_to,
    logs.add_to,
    bq.add_to,
    fleet.add_to,
    cluster.add_to,
    spark.add_to,
)

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # inherited by all commands
    rich_markup_mode="rich",
    help="KMQ: a message broker inside one pod. Every message is a line in a text file.",
    epilog="Settings come from the environment (KMQ_DATA, KMQ_PORT, …), then ./kmq.toml, then defaults.\n\n"
    + examples(
        "kmq up", "kmq produce test.probe -m hello", "kmq status", "kmq --host 127.0.0.1 topics list", "kmq down"
    ),
)


def _print_version(asked: bool) -> None:
    if asked:
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
    choose(context.invoked_subcommand, url, host, token)


for add_to in FAMILIES:
    add_to(app)


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
            sys.stdout.flush()  # a failure to write is reported here; at interpreter exit it would be a traceback
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
