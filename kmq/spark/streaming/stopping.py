"""Ends a command on Spark at Ctrl-C or SIGTERM: in order, or by force after a deadline.

Owns        The handlers of both signals while the command runs.
Invariant   The process always ends at most STOP_S after the first signal, whatever Spark, its JVM or a planner is
            doing. What was begun is done again at the next start, as after a kill.
Cases       before the session exists      the process ends at once, and the JVM with it, because its stdin closes
            before the query is active     it is stopped as soon as it is active, and no other query is started
                                           (streams.stopping)
            while a stream runs            query.stop() is repeated, because the code that it interrupts may lose the
                                           interrupt
            in a job without a stream      its jobs are cancelled repeatedly, because another job may follow
            a second signal                the process ends at once
            No signal keeps its default action: the first process of a container has none, and would ignore the signal.
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

STOP_S = 60.0  # longest time from the first signal to the end
_CANCEL_S = 0.2  # between two attempts to cancel jobs and stop streams
_AGAIN_S = 5  # how long Spark waits for a stream to end before query.stop() is repeated


class Stop:
    """Ends streams, or else jobs, from the first signal on, so that the main thread returns from Spark.

    Another thread does this, because a call of Spark in the main thread occupies the main thread's connection.
    """

    def __init__(self) -> None:
        self.number = 0
        self._spark: SparkSession | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._stoppers: dict[str, threading.Thread] = {}  # by run
        streams.stopping.clear()
        self._handle()

    def begin(self, spark: "SparkSession") -> None:
        """Note that the session exists: from now on a signal ends it in order."""
        self._spark = spark
        self._handle()  # again, to replace Spark's own handler, which raises an exception anywhere

    def _handle(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.number or self._spark is None:
            _exit(number)
        self.number = number
        streams.stopping.set()
        # A thread of its own, because a call to the JVM may wait for ever.
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
                    self._request_stop(query)
                if not active:
                    self._spark.sparkContext.cancelAllJobs()

    def _request_stop(self, query: "StreamingQuery") -> None:
        """Stop a query in a thread, because query.stop() waits for its end."""
        stopper = self._stoppers.get(query.runId)
        if stopper is None or not stopper.is_alive():
            self._stoppers[query.runId] = threading.Thread(target=_stop, args=(query,), daemon=True)
            self._stoppers[query.runId].start()

    def _give_up(self) -> None:
        text = f"kmq: not stopped within {STOP_S:.0f} s; ended anyway; what was begun is done again at the next start"
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
        _exit(self.number)

    def done(self) -> None:
        """Note that the main thread has returned from Spark. After this the session may be closed.

        The time limit stays in force.
        """
        self._done.set()
        if self._thread:
            self._thread.join()
        self._spark = None  # nothing is left to stop in order: a signal ends the process at once


def _stop(query: "StreamingQuery") -> None:
    with contextlib.suppress(Exception):  # the thread that awaits the query gets its error
        query.stop()


def _exit(number: int) -> NoReturn:
    """End this process with the signal's exit code. Kill its JVM first, because a JVM that hangs would survive it."""
    with contextlib.suppress(Exception):
        from pyspark import SparkContext

        process = getattr(SparkContext._gateway, "proc", None)
        if process is not None:
            process.kill()
    os._exit(128 + number)
