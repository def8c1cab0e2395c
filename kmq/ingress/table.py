"""The open connections of producers: by descriptor, by the name that their replies carry, and by producer name."""

from collections.abc import Iterator

from kmq.ingress.connection import Connection
from kmq.links.raw import Sender


class ConnectionTable:
    """All connections that are not over. Iterating over the table gives every connection once."""

    def __init__(self) -> None:
        self._by_fd: dict[int, Connection] = {}
        self._by_sender: dict[bytes, Connection] = {}
        self._by_producer: dict[bytes, Connection] = {}

    def __len__(self) -> int:
        return len(self._by_fd)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._by_fd.values())

    def add(self, connection: Connection) -> None:
        """Enter a new connection, which nobody has named yet."""
        self._by_fd[connection.sock.fileno()] = connection

    def give_name(self, connection: Connection, sender: Sender, producer: bytes) -> None:
        """Make the connection known by the name of its replies, and by that of its producer unless that is b""."""
        connection.sender, connection.producer = sender, producer
        self._by_sender[sender.name] = connection
        if producer:
            self._by_producer[producer] = connection

    def remove(self, connection: Connection) -> None:
        """Forget the connection under all its names. Its socket must still be open."""
        del self._by_fd[connection.sock.fileno()]
        if connection.sender is not None:
            del self._by_sender[connection.sender.name]
            if self._by_producer.get(connection.producer) is connection:
                del self._by_producer[connection.producer]

    def at(self, fd: int) -> Connection | None:
        """Return the connection with this descriptor."""
        return self._by_fd.get(fd)

    def of_sender(self, name: bytes) -> Connection | None:
        """Return the connection whose replies carry this name; None if it has ended, or was an earlier ingress's."""
        return self._by_sender.get(name)

    def take_producer(self, producer: bytes) -> Connection | None:
        """Take the producer name away from the connection that has it, and return that connection."""
        connection = self._by_producer.pop(producer, None)
        if connection is not None:
            connection.producer = b""
        return connection

    @property
    def unanswered(self) -> int:
        """Messages that were received and have no reply yet."""
        return sum(each.replies.taken - each.replies.answered for each in self._by_sender.values())

    @property
    def owes_replies(self) -> bool:
        """Return True if a connection waits for a reply to a message, or for its last id."""
        every = (connection.replies for connection in self._by_sender.values())
        return any(replies.answered < replies.taken or replies.asks_last for replies in every)
