"""The session that a command on Spark runs on, and how it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import typer

from kmq.cli.pipeline_options import On
from kmq.errors import EXIT_OK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmq.spark.streaming.progress import Progress

_HERE = On()


class Job(NamedTuple):
    """What a command gets to work with."""

    spark: "SparkSession"
    progress: "Progress"


@contextmanager
def running(name: str, on: On = _HERE, continuous: bool = False, conf: dict[str, str] | None = None) -> Iterator[Job]:
    """A session with progress for one command, stopped at its end; errors of Spark become one line and an exit code.

    Ctrl-C and SIGTERM stop the streams and the session in order, what is half done is done again at the next start. For a
    continuous run that is the way to end it (exit code 0), another has not done its work (128 + signal). Again: at once. After
    a minute the process ends anyway (kmq/spark/streaming/stopping.py).
    `conf`: what suits this command, where the user says nothing else.
    """
    from kmq.spark import failures, sessions
    from kmq.spark.streaming.progress import Progress
    from kmq.spark.streaming.stopping import Stop

    confs = (conf or {}) | on.confs()
    spark = None
    stop = Stop()
    try:
        spark = sessions.session(on.master or None, f"kmq {name}", confs, "warn" if on.verbose else "fatal")
        stop.begin(spark)
        with Progress(spark, name) as progress:
            yield Job(spark, progress)
    except Exception as error:
        cause = None if on.verbose else failures.explain(error)
        if stop.number:
            pass  # what was cancelled says so
        elif cause is None:
            raise
        else:
            raise cause from error
    finally:
        stop.done()
        if spark:
            spark.stop()
    if stop.number:
        raise typer.Exit(EXIT_OK if continuous else 128 + stop.number)
