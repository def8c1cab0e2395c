"""The address to which the gateway sends records: the ingress of its own broker, in a shard only in its epoch.

The hello of each connection names the epoch: `epoch=8`. A broker that was deposed passes connections to its port on to
the leader of a later epoch, which refuses this hello: no_leader. Otherwise a gateway that has not noticed the change
would send again under the name of a producer that is active at the new leader, and fence it.
"""

from kmq.access import local_token
from kmq.client.connection import ServerAddress, local_address
from kmq.client.lines import read_port
from kmq.config.settings import Settings

_epoch: int | None = None  # of this process, which serves in one epoch and is restarted for the next


def serve_in(epoch: int) -> None:
    """Send through the ingress of this epoch only, from the next connection on."""
    global _epoch
    _epoch = epoch


def own_address() -> ServerAddress:
    """Return the present address of ingress, for messages of clients."""
    return local_address()._replace(epoch=_epoch)


def reserved_address(settings: Settings) -> ServerAddress:
    """Return the same for KMQ's own records, with the token that allows them."""
    port = read_port(settings, "ingress", settings.port)
    return ServerAddress(settings.host, port, local_token.read(settings), epoch=_epoch)
