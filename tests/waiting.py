"""Waiting for a condition, never for a time.

    lines = until(lambda: broker.lines("t"), "a line of t", broker.log)

returns what the condition gave once that is true. After the deadline it fails with the words, and what was there instead.
"""

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

PATIENCE_S = 120.0  # deadline of every wait: reached only by a bug
T = TypeVar("T")


def attempts(
    what: str = "",
    instead: Callable[[], object] = str,
    *,
    seconds: float = PATIENCE_S,
    every_s: float | None = None,
    process: subprocess.Popen[Any] | None = None,
) -> Iterator[None]:
    """Yield until the caller leaves its loop. Fail if it is still in it after `seconds`, or `process` has ended.

    The pauses grow with the time that has passed: what comes at once is seen at once, and a long wait costs little.
    """
    __tracebackhide__ = True
    began = time.monotonic()
    while True:
        yield
        if process is not None and process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode} before: {what}\n{instead()}")
        if (waited := time.monotonic() - began) > seconds:
            raise AssertionError(f"not within {seconds:g} s: {what}\n{instead()}")
        time.sleep(min(max(waited / 20, 0.002), 0.05) if every_s is None else every_s)


def until(condition: Callable[[], T | None], what: str = "", instead: Callable[[], object] = str, **options: Any) -> T:
    """Return the first true value of `condition`. `options` are those of attempts()."""
    __tracebackhide__ = True
    tries = attempts(what, instead, **options)
    while not (found := condition()):
        next(tries)
    return found


def comes(condition: Callable[[], object], seconds: float, every_s: float = 0.005) -> bool:
    """Return whether `condition` becomes true in this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True


async def until_async(
    condition: Callable[[], T | None],
    what: str = "",
    instead: Callable[[], object] = str,
    *,
    seconds: float = PATIENCE_S,
) -> T:
    """Return the first true value of `condition`. Others run meanwhile."""
    __tracebackhide__ = True
    tries = attempts(what, instead, seconds=seconds, every_s=0)
    while not (found := condition()):
        next(tries)
        await asyncio.sleep(0.001)
    return found


def collect(count: int, more: Callable[[], Iterable[T]], instead: Callable[[], object] = str) -> list[T]:
    """Return what `more` gives in its calls, of which each may wait for some, once these are so many."""
    __tracebackhide__ = True
    found: list[T] = []
    tries = attempts(f"{count} of these", lambda: f"{found}\n{instead()}", every_s=0)
    while len(found) < count:
        next(tries)
        found += more()
    return found


@contextmanager
def meanwhile(*works: Callable[[], object], every_s: float = 0.0) -> Iterator[list[BaseException]]:
    """Do each again and again in a thread of its own, until it raises. That is in the list, and raised at the end."""
    over, raised = threading.Event(), list[BaseException]()

    def run(work: Callable[[], object]) -> None:
        try:
            while not over.wait(every_s):
                work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield raised
    finally:
        over.set()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]
