"""What all connections together may keep in memory. Over that the largest are ended first."""

from collections.abc import Callable, Iterable

from kmq.config.values import MIB
from kmq.ingress.connection import Connection

PARTIAL_BYTES = 64 * MIB  # of all unfinished lines together
UNREAD_BYTES = 32 * MIB  # of all replies that producers have not read


class PartialBudget:
    """Bytes of unfinished lines."""

    def __init__(self) -> None:
        self.bytes = 0

    def exceeded_by(self, connections: Iterable[Connection]) -> list[Connection]:
        """Return the connections to end because unfinished lines take too much memory."""
        if self.bytes <= PARTIAL_BYTES:
            return []
        return _largest(connections, self.bytes - PARTIAL_BYTES, lambda connection: len(connection.partial))


class UnreadBudget:
    """Bytes of replies that wait for their producers."""

    def __init__(self) -> None:
        self.bytes = 0

    def follow(self, connection: Connection) -> None:
        """Count the pending replies of a connection anew."""
        replies = connection.replies
        self.bytes += len(replies.pending) - replies.counted
        replies.counted = len(replies.pending)

    def forget(self, connection: Connection) -> None:
        """Count the replies of a connection no longer: it has ended."""
        self.bytes -= connection.replies.counted
        connection.replies.counted = 0

    def exceeded_by(self, connections: Iterable[Connection]) -> list[Connection]:
        """Return the connections to break because unread replies take too much memory."""
        if self.bytes <= UNREAD_BYTES:
            return []
        return _largest(connections, self.bytes - UNREAD_BYTES, lambda connection: connection.replies.counted)


def _largest(connections: Iterable[Connection], excess: int, size: Callable[[Connection], int]) -> list[Connection]:
    """Return as few connections as possible that together have `excess` bytes, the largest first."""
    chosen: list[Connection] = []
    for connection in sorted(connections, key=size, reverse=True):
        chosen.append(connection)
        excess -= size(connection)
        if excess <= 0:
            break
    return chosen
