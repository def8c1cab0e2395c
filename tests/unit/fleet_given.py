"""What the tests of a fleet's states share: a message as the fleet says it."""

from kmq.cluster import fleet
from kmq.cluster.publisher import Message


def said(key: str, value: str, epoch: int) -> Message:
    """Return the message of a state."""
    return Message.new(fleet.STATE, f"{key} {value}".encode())._replace(epoch=epoch)
