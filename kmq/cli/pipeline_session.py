"""The session that a command on Spark runs on, and how it ends."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import typer

from kmq.cli.pipeline_options import On
from kmq.errors import EXIT_OK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmq.spark.streaming.progress import Progress

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
    A second signal ends the process at once, and a minute ends it anyway (kmq/spark/streaming/stopping.py).
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
            pass  # the error only says that the stop cancelled a job
        elif cause is None:
            raise
        else:
            raise cause from error
    finally:
        stop.done()
        if spark:
            with suppress(Exception):  # a JVM that has ended has nothing left to stop, and the cause is known already
                spark.stop()
    if stop.number:
        raise typer.Exit(EXIT_OK if continuous else 128 + stop.number)
