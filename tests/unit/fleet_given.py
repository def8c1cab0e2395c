"""What the tests of a fleet's states share: a message as the fleet says it, and a wait."""

import time
from collections.abc import Callable

from kmq.cluster import fleet
from kmq.cluster.publisher import Message

PATIENCE_S = 100.0


def said(key: str, value: str, epoch: int) -> Message:
    """Return the message of a state."""
    return Message.new(fleet.STATE, f"{key} {value}".encode())._replace(epoch=epoch)


def wait(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)
