"""`kmq ship`: the command. kmq/shipping/ does the work."""

import os
import threading
from typing import Annotated

import typer

from kmq.cli.elsewhere import elsewhere
from kmq.cli.output import examples, stop_on_signals
from kmq.cli.produce import obstacle, open_producer
from kmq.client.lines import Patience, say
from kmq.config.settings import Settings, load
from kmq.errors import EXIT_SIGINT, ConfigError, KmqError
from kmq.message import record
from kmq.shipping.finding import FollowedFiles
from kmq.shipping.process import Shipment, run
from kmq.wire import refusals


def ship(
    patterns: Annotated[
        list[str], typer.Argument(help="Files, or quoted patterns such as 'logs/**/*.log'.", show_default=False)
    ],
    topic: Annotated[str, typer.Option(help="Where the lines go.", show_default=False)],
    state: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="What was sent of each file, a line each; kept over restarts. \\[default: kmq-ship.<topic>.state]",
        ),
    ] = "",
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave out files of this name, or with a slash of this path, as '*.1'; may be given several times.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Send what is there, from the start of files not seen before, and end.")
    ] = False,
    from_start: Annotated[
        bool,
        typer.Option("--from-start", help="At the very first start, begin at the start of the files, not at the end."),
    ] = False,
) -> None:
    """Follow log files as tail -F does: each line becomes a message, once.

    Files may be renamed or cut by a log rotation, and new ones may appear.
    Ship and the broker may be killed at any moment: no line is lost, and none
    is stored twice. SIGTERM or Ctrl-C ends it, and the next start goes on
    where it was.
    """
    settings = load()
    if not record.is_topic(topic):
        reason = record.key_refusal(os.fsencode(topic)) or "bad_topic"
        raise ConfigError(f"--topic {topic!r}: {refusals.of_key(reason)}")
    path = os.path.abspath(state or f"kmq-ship.{topic}.state")
    stop = threading.Event()
    was_interrupted = stop_on_signals(stop)
    watched = FollowedFiles(patterns, {path, f"{path}.lock", f"{path}.new"}, say, exclude=exclude or [])
    patience, is_elsewhere = Patience(lambda: _obstacle(settings)), elsewhere() is not None
    work = Shipment(path, "", topic, 1, watched, once, stop, patience, open_producer, is_elsewhere)
    run(work, from_start or once)
    if once:
        _judge(work, was_interrupted())
    if watched.lost:
        raise KmqError(f"{watched.lost:,} bytes that were not read are lost; the lines above name their files")


def _obstacle(settings: Settings) -> str:
    if (there := elsewhere()) is None:
        return obstacle(settings)
    return f"{there.host}:{there.lines_in} does not answer, or has no room; see kmq status there"


def _judge(work: Shipment, was_interrupted: bool) -> None:
    """End --once with the right exit code."""
    files = [file for file in work.watched.files if not file.is_compressed]
    unsent = [file for file in files if file.size > file.offset and file.path not in work.watched.refused]
    left = sum(file.size - file.offset for file in unsent)
    if was_interrupted:
        raise typer.Exit(EXIT_SIGINT)
    if work.stop.is_set():
        raise KmqError(f"stopped before the end of the files: {left:,} bytes are not sent")
    if unsent:
        say(f"{unsent[0].path} ends without a newline; {left:,} bytes of {len(unsent):,} files wait for theirs")
    if work.watched.refused:
        raise KmqError(f"not all was sent: {len(work.watched.refused)} that the patterns match could not be read")
    if all(file.gone_at is not None for file in work.watched.files):
        raise KmqError("there is no file to send")


def add_to(app: typer.Typer) -> None:
    """Add this command to `kmq`."""
    app.command(
        epilog=examples(
            "kmq ship 'pipes/*.log' --topic own --once",
            "kmq ship /etc/hostname --topic notes --once --state notes.state",
        )
    )(ship)
