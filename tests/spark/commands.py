"""Commands of kmq that run beside a test."""

from collections.abc import Callable

from waiting import until

PATIENCE_S = 240.0  # for a JVM to start on a machine that others use too: reached only by a bug


def wait(condition: Callable[[], object], instead: Callable[[], object] = str) -> None:
    until(condition, instead=instead, seconds=PATIENCE_S)
