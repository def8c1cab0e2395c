"""How far Spark is: a line that lives on a terminal, logfmt every few seconds elsewhere. Both on stderr.

Asks Spark, a few times a second, which stages run and how many of their tasks are done, and what each streaming query did in
its last batch. The job itself knows nothing of it.
"""

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kmq.logfmt import Log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_S = 0.3  # between two looks: a few py4j calls of a millisecond each
_SAY_S = 5.0  # between two lines where there is no terminal


class Progress:
    """Shows the jobs and streams of a session while the `with` block runs."""

    def __init__(self, spark: "SparkSession", name: str = "spark", console: Console | None = None) -> None:
        self.spark, self.name = spark, name
        self.console = console or Console(stderr=True)
        self._log = Log(name)
        self._what = ""
        self._begin = time.monotonic()
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._run, daemon=True)

    def describe(self, what: str) -> None:
        """What is being done now, in a few words: `reading the WAL`."""
        self._what = what
        if not self.console.is_terminal:
            self._log.info("step", what=what)

    def print(self, *objects: Any) -> None:
        """Print on stderr without disturbing the live line."""
        self.console.print(*objects, highlight=False)

    def __enter__(self) -> "Progress":
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._watch.join()

    def _run(self) -> None:
        """The watching thread. What goes wrong while looking (a session that ends) is no fault of the job."""
        while not self._stop.wait(_LOOK_S):
            pass
