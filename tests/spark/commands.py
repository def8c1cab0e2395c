"""Commands of kmq that run beside a test."""

import os
import time
from collections.abc import Callable

PATIENCE_S = 240.0  # for a JVM to start on a machine that others use too: reached only by a bug


def clean_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("KMQ_", "RB_"))}


def wait(condition: Callable[[], object], what: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)
