"""`kmq bundle`: everything that a bug report needs, in one file, without payloads and without secrets."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, TextIO

import typer

from kmq.cli import bundle_parts as parts
from kmq.cli import config
from kmq.cli.helptext import examples
from kmq.cli.progress import counting
from kmq.config.settings import Settings, load
from kmq.config.values import parse_duration
from kmq.errors import ConfigError

_MODE = 0o600


def bundle(
    file: Annotated[
        str, typer.Argument(help="Where to write it; -: stdout; default: kmq-bundle-<time>.tar.gz in this directory.")
    ] = "",
    with_verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check the files on disk, too (kmq verify).")
    ] = True,
    verify_for: Annotated[str, typer.Option("--verify-for", help="How long that may take, e.g. 10m.")] = "60s",
) -> None:
    """Pack what a bug report needs into one tar.gz: status, findings, settings, log tails, numbers, sizes.

    It holds no payloads, tokens or keys. Its MANIFEST says what is in it, what
    is not, and why. It works with the broker down, or hanging, and changes nothing.
    In a pod: kubectl exec <pod> -c router -- kmq bundle - > bundle.tar.gz
    """
    try:
        limit_s = parse_duration(verify_for)
    except ValueError as error:
        raise ConfigError(f"--verify-for {verify_for!r}: {error}") from None
    verify_s = limit_s if with_verify else 0.0
    if file == "-":
        if sys.stdout.isatty():
            raise ConfigError("a bundle is no text for a terminal; write it to a file: kmq bundle - > bundle.tar.gz")
        packed = collect(verify_s)
        size = sys.stdout.buffer.write(packed.archive())
        sys.stdout.flush()
        _report(packed, "standard output", size, sys.stderr)
        return
    path = Path(file or time.strftime("kmq-bundle-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime()))
    out = _create(path)
    try:
        with open(out, "wb") as target:
            packed = collect(verify_s)
            size = target.write(packed.archive())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    _report(packed, str(path), size, sys.stdout)


def _report(packed: parts.Bundle, where: str, size: int, stream: TextIO) -> None:
    print(f"{where}: {len(packed.files)} files, {size:,} bytes", file=stream)
    for name, why in packed.left.items():
        print(f"left out, or cut: {name}: {why}", file=stream)


def _create(path: Path) -> int:
    """Return a descriptor of the new file. Raises ConfigError if it exists, or cannot be made."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    except OSError as error:
        advice = "choose another file, or write to standard output: kmq bundle - > bundle.tar.gz"
        raise ConfigError(f"{path}: {error.strerror}; {advice}") from error


def collect(verify_s: float) -> parts.Bundle:
    """Return the bundle. `verify_s`: how long verify may take; 0: it is left out."""
    shown = config.collect()
    made = parts.Bundle(shown.secrets)
    made.add("config.json", json.dumps(shown.as_json(), indent=1) + "\n", "kmq config show --json")
    made.attempt("versions.json", parts.versions, "versions of KMQ, Python, system and packages")
    with counting("asking the broker"):
        _of_commands(made)
    try:
        settings = load()
    except ConfigError as error:
        made.leave("log/, metrics.txt, data", f"the settings are wrong: {error}")
    else:
        with counting("collecting logs and numbers"):
            _of_directories(made, settings)
    if verify_s:
        with counting("checking the files on disk"):
            parts.kmq(made, "verify.txt", "kmq verify", "verify", deadline_s=verify_s)
    else:
        made.leave("verify.txt", "--no-verify")
    return made


def _of_commands(made: parts.Bundle) -> None:
    parts.kmq(made, "status.json", "kmq status --json, with findings", "status", "--json")
    parts.kmq(made, "status.txt", "kmq status", "status")
    parts.kmq(made, "doctor.json", "kmq doctor --json", "doctor", "--json")
    parts.kmq(made, "log-stat.json", "kmq log stat --json", "log", "stat", "--json")
    parts.kmq(made, "topics.json", "kmq topics list --json", "topics", "list", "--all", "--json")
    parts.oom(made)


def _of_directories(made: parts.Bundle, settings: Settings) -> None:
    parts.logs(made, settings.pipes)
    made.attempt("stats-page.json", lambda: parts.stats_page(settings), "the words of the stats page")
    made.attempt("metrics.txt", lambda: parts.metrics(settings), "/metrics of the gateway")
    if "metrics.txt" in made.files:
        parts.kmq(made, "groups.json", "kmq groups list --json", "groups", "list", "--json")
    else:
        made.leave("groups.json", "not asked for, because the gateway has given no metrics")
    parts.declarations(made, settings.data)
    parts.listing(made, "data.txt", settings.data)
    parts.listing(made, "pipes.txt", settings.pipes)


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.command(epilog=examples("kmq bundle", "kmq bundle report.tar.gz --no-verify", "kmq bundle - > report.tar.gz"))(
        bundle
    )
