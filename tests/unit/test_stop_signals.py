"""Signals that end a command: the handler runs in the thread that waits for the event, and must not wait for it."""

import signal
import subprocess
import sys

import pytest
from waiting import PATIENCE_S

COMMAND = """
import signal, threading
from kmq.cli.output import stop_on_signals

stop = threading.Event()
was_interrupted = stop_on_signals(stop)
with stop._cond:  # as Event.wait does for a moment
    signal.raise_signal(signal.{name})
assert stop.wait(60)
print(was_interrupted())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_while_the_event_is_locked_sets_it(number):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(name=number.name)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == f"{number is signal.SIGINT}\n", done
