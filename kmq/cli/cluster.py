"""What the commands of a cluster share: the queue that the settings name."""

from typing import TYPE_CHECKING

from kmq.errors import ConfigError, pip_install

if TYPE_CHECKING:
    from kmq.cluster.queue import BroadcastQueue


def open_queue() -> "BroadcastQueue":
    """Return the Broadcast Queue of this directory's settings. Raises ConfigError that says what is missing."""
    try:
        from kmq.cluster.queue import BroadcastQueue
    except ImportError as error:
        raise ConfigError(f"{error}; the Broadcast Queue needs: {pip_install('cluster')}") from error
    return BroadcastQueue()
