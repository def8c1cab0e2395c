"""What commands on Spark share: groups of options (output.py says how groups work), and the session and its end."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kmq.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmq.spark.streaming.streams import Progress


class From(NamedTuple):
    """Where to read: directories, or brokers over HTTP."""

    path: Annotated[
        str,
        typer.Option(
            "--path",
            help="Data directories, comma-separated; default: KMQ_DATA. For a batch also a copy in a store: s3://…, file:///….",
        ),
    ] = ""
    brokers: Annotated[str, typer.Option("--brokers", help="Read over HTTP instead: host:port[,host:port].")] = ""
    token_file: Annotated[str, typer.Option("--token-file", help="File with the bearer token for --brokers.")] = ""
    ca: Annotated[str, typer.Option("--ca", help="PEM file of the authorities to trust, for https:// and TLS.")] = ""
    cert: Annotated[str, typer.Option("--cert", help="PEM file of the client certificate to show.")] = ""
    key: Annotated[str, typer.Option("--key", help="PEM file of its key, if --cert holds none.")] = ""
    patience: Annotated[
        str,
        typer.Option(
            "--patience", help="How long to wait for a gateway that is down. \\[default: 30s]", show_default=False
        ),
    ] = ""

    def options(self) -> dict[str, str]:
        """Return the options of format("kmq"). Raises ConfigError if options contradict each other."""
        from kmq.config.settings import load
        from kmq.spark.paths import store_url

        if self.path and self.brokers:
            raise ConfigError("give --path or --brokers, not both")
        if self.brokers:
            patience = {"kmq.patience": self.patience} if self.patience else {}
            return {"kmq.bootstrap.servers": self.brokers} | self.connection() | patience
        if self.patience:
            raise ConfigError("--patience: applies to gateways only; give --brokers, or leave it out")
        settings = load()
        path = self.path or settings.data
        return {"path": path} | ({"tier": settings.tier} if settings.tier and not store_url(path) else {})

    def connection(self) -> dict[str, str]:
        """Return the options for token and TLS. Raises ConfigError if the token cannot be read."""
        return _connection(self.token_file, self.ca, self.cert, self.key)


class Unreachable(NamedTuple):
    """What a stream over several brokers does while one of them is unreachable."""

    on_unreachable: Annotated[
        str,
        typer.Option(
            "--on-unreachable",
            help="A broker that does not answer: fail, or hold: go on without it until it is back. \\[default: fail]",
            show_default=False,
        ),
    ] = ""

    def options(self) -> dict[str, str]:
        """Return the options of format("kmq")."""
        return {"onUnreachable": self.on_unreachable} if self.on_unreachable else {}


class Loss(NamedTuple):
    """What a pipeline does if records that it was to read are lost."""

    on_loss: Annotated[
        str,
        typer.Option(
            "--on-loss",
            help="Records that are gone before they were read: fail, or skip: go on, each range is named in the log."
            " \\[default: fail]",
            show_default=False,
        ),
    ] = ""

    def options(self) -> dict[str, str]:
        """Return the options of format("kmq"). Raises ConfigError."""
        if self.on_loss not in ("", "fail", "skip"):
            raise ConfigError(f"--on-loss {self.on_loss!r}: must be fail or skip")
        return {"failOnDataLoss": "false"} if self.on_loss == "skip" else {}


class TargetOptions(NamedTuple):
    """How to connect to the target: the broker that a pipeline writes to."""

    to_token_file: Annotated[
        str, typer.Option("--to-token-file", help="File with the bearer token for the target broker.")
    ] = ""
    to_ca: Annotated[
        str, typer.Option("--to-ca", help="PEM file of the authorities to trust, for a tls:// target.")
    ] = ""
    to_cert: Annotated[str, typer.Option("--to-cert", help="PEM file of the client certificate for the target.")] = ""
    to_key: Annotated[str, typer.Option("--to-key", help="PEM file of its key, if --to-cert holds none.")] = ""
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout", help="How long to wait for a target that does not answer. \\[default: 10m]", show_default=False
        ),
    ] = ""

    def options(self, like: From | None = None) -> dict[str, str]:
        """Return the options of format("kmq") for writing. Without --to-… options `like` gives token and TLS files."""
        own = _connection(self.to_token_file, self.to_ca, self.to_cert, self.to_key)
        timeout = {"kmq.timeout": self.timeout} if self.timeout else {}
        return (own or (like.connection() if like else {})) | timeout


class TopicOptions(NamedTuple):
    """The topics that a pipeline reads."""

    topics: Annotated[str, typer.Option("--topics", help="Topics, comma-separated; or --pattern.")] = ""
    pattern: Annotated[str, typer.Option("--pattern", help="A regular expression that whole topic names match.")] = ""

    def options(self, default: str = "") -> dict[str, str]:
        """Return the options of format("kmq"). `default`: the pattern if no option is given; "": that is an error."""
        if bool(self.topics) + bool(self.pattern) > 1 or not (self.topics or self.pattern or default):
            raise ConfigError("give --topics or --pattern")
        return {"subscribe": self.topics} if self.topics else {"subscribePattern": self.pattern or default}


class On(NamedTuple):
    """The Spark session that a command runs on."""

    master: Annotated[str, typer.Option("--master", help="Spark master; default: all cores of this machine.")] = ""
    conf: Annotated[
        list[str] | None, typer.Option("--conf", help="name=value for Spark; may be given several times.")
    ] = None
    py_files: Annotated[str, typer.Option("--py-files", help="Python files that executors need and lack.")] = ""
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Spark's own log and whole traces.")] = False

    def confs(self) -> dict[str, str]:
        """Return the settings of the Spark session. Raises ConfigError unless each --conf is name=value."""
        confs = dict(_pair(text) for text in self.conf or ())
        return confs | ({"spark.submit.pyFiles": self.py_files} if self.py_files else {})


def _token(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"--token-file {path!r}: {error.strerror}") from None


def _connection(token_file: str, ca: str, cert: str, key: str) -> dict[str, str]:
    from kmq.spark.connections import CA, CERTIFICATE, KEY

    given = {"kmq.token": _token(token_file) if token_file else "", CA: ca, CERTIFICATE: cert, KEY: key}
    return {name: text for name, text in given.items() if text}


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise ConfigError(f"--conf {text!r}: must be name=value")
    return name, value


# --- errors ----------------------------------------------------------------------------------------------------------

# Options of format("kmq") that commands set, as errors name them → the option of the command.
_OF_COMMANDS = {
    r"failOnDataLoss=false": "--on-loss skip",
    r"onUnreachable=hold": "--on-unreachable hold",
    r"onUnreachable=fail": "--on-unreachable fail",
    r"subscribePattern": "--pattern",
    r"subscribe(?==)": "--topics",
    r"kmq\.bootstrap\.servers": "--brokers",
    r"kmq\.patience": "--patience",
    r"option tier\b": "KMQ_TIER",
    r"kmq\.ssl\.ca\.location": "--ca",
    r"kmq\.ssl\.certificate\.location": "--cert",
    r"kmq\.ssl\.key\.location": "--key",
    r"kmq\.token\b": "--token-file",
    r"`path`": "--path",
    r"\bpath(?=='| ')": "--path",
}
_OPTION = re.compile("|".join(f"({option})" for option in _OF_COMMANDS))


def in_options_of_commands(text: str) -> str:
    """Return the text of an error, with the command's options in place of those of format("kmq")."""
    names = list(_OF_COMMANDS.values())
    return _OPTION.sub(lambda found: names[(found.lastindex or 1) - 1], text)


# --- session ---------------------------------------------------------------------------------------------------------

_HERE = On()


class Job(NamedTuple):
    """The session of one command, and its display of progress."""

    spark: "SparkSession"
    progress: "Progress"


@contextmanager
def running(name: str, on: On = _HERE, continuous: bool = False, conf: dict[str, str] | None = None) -> Iterator[Job]:
    """Yield a session with progress for one command, and stop it at the end of the block.

    `conf`: Spark settings that suit this command; `on` overrides them.
    Errors: an error of Spark becomes one line and an exit code.
    Signals: Ctrl-C and SIGTERM stop the streams and the session in order; unfinished work is done again at the next
    start. That is the normal end of a continuous run (exit code 0); any other run has not done its work (128 + signal).
    A second signal ends the process at once, and a minute ends it anyway (kmq/spark/streaming/streams.py).
    """
    from kmq.spark import failures, sessions
    from kmq.spark.streaming.streams import Progress, StopSignals

    confs = (conf or {}) | on.confs()
    spark = None
    stop = StopSignals()
    try:
        spark = sessions.session(on.master or None, f"kmq {name}", confs, "warn" if on.verbose else "fatal")
        stop.begin(spark)
        with Progress(spark, name) as progress:
            yield Job(spark, progress)
    except Exception as error:
        cause = None if on.verbose else failures.explain(error)
        if stop.number:
            pass  # the error only says that the stop cancelled a job
        elif cause is None:
            raise
        else:
            cause.args = (in_options_of_commands(str(cause)),)
            raise cause from error
    finally:
        stop.done()
        if spark:
            with suppress(Exception):  # a JVM that has ended needs no stop, and the cause is known already
                spark.stop()
    if stop.number:
        raise typer.Exit(EXIT_OK if continuous else 128 + stop.number)
