"""How a command on Spark ends at Ctrl-C or SIGTERM: in order, or, after a deadline, anyway.

Owns        the handlers of both signals while the command runs.
Invariant   The process ends at most STOP_S after the first signal, whatever Spark, its JVM or a planner is busy with: what was
            begun is done again at the next start, as after a kill.
Cases       before the session is there    the process ends at once, and with it the JVM, whose stdin closes
            before the query is active     it is stopped as soon as it is, and no other is started (streams.stopping)
            while a stream runs            query.stop(), again and again: an interrupt can get lost in what it interrupts
            in a job without a stream      its jobs are cancelled, again and again: the next may follow
            a second signal                the process ends at once
            No signal is left to its default: the first process of a container has none, and would ignore it.
"""

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from kmq.spark.streaming import streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

STOP_S = 60.0  # from the first signal to the end, at most
_CANCEL_S = 0.2  # between two times that jobs are cancelled, and two looks at the streams
_AGAIN_S = 5  # that Spark waits for a stream to end before it may be told again


class Stop:
    """From the first signal on: ends the streams, or else the jobs, so that the main thread comes back from Spark.

    Not from the main thread: a call of Spark that has not returned yet keeps its connection.
    """

    def __init__(self) -> None:
        self.number = 0
        self._spark: SparkSession | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._told: dict[str, threading.Thread] = {}
        streams.stopping.clear()
        self._handle()

    def begin(self, spark: "SparkSession") -> None:
        """The session is there: from now on it is ended in order."""
        self._spark = spark
        self._handle()  # again, in place of Spark's own handler, which raises in the middle of anything

    def _handle(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: object) -> None:
        if self.number or self._spark is None:
            _exit(number)
        self.number = number
        streams.stopping.set()
        # Of its own: whatever asks the JVM may wait for ever.
        limit = threading.Timer(STOP_S, self._give_up)
        limit.daemon = True
        limit.start()
        self._thread = threading.Thread(target=self._end, daemon=True)
        self._thread.start()

    def _end(self) -> None:
        assert self._spark is not None
        with contextlib.suppress(Exception):
            self._spark.conf.set("spark.sql.streaming.stopTimeout", f"{_AGAIN_S}s")
        while not self._done.wait(_CANCEL_S):
            with contextlib.suppress(Exception):  # the JVM is ending
                active = self._spark.streams.active
                for query in active:
                    self._tell(query)
                if not active:
                    self._spark.sparkContext.cancelAllJobs()

    def _tell(self, query: "StreamingQuery") -> None:
        """Stop a query, in a thread: it waits for the query to end."""
        told = self._told.get(query.runId)
        if told is None or not told.is_alive():
            self._told[query.runId] = threading.Thread(target=_stop, args=(query,), daemon=True)
            self._told[query.runId].start()

    def _give_up(self) -> None:
        text = f"kmq: not stopped within {STOP_S:.0f} s; ended anyway; what was begun is done again at the next start"
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
        _exit(self.number)

    def done(self) -> None:
        """The main thread is back: the session may go when this has returned. The limit of time stays."""
        self._done.set()
        if self._thread:
            self._thread.join()
        self._spark = None  # a signal from now on has nothing left to stop in order


def _stop(query: "StreamingQuery") -> None:
    with contextlib.suppress(Exception):  # it says why it ended where it is awaited
        query.stop()


def _exit(number: int) -> NoReturn:
    """End this process as the signal would, and the JVM that it has started: one that hangs would outlive it."""
    with contextlib.suppress(Exception):
        from pyspark import SparkContext

        process = getattr(SparkContext._gateway, "proc", None)
        if process is not None:
            process.kill()
    os._exit(128 + number)
