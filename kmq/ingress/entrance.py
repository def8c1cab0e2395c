"""Where producers come in: accepted up to KMQ_CONNECTIONS and the limit on open files, turned away beyond that."""

import select
import socket

from kmq import files
from kmq.broker.incidents import Strangers
from kmq.broker.stage import Stage
from kmq.ingress.askers import most_askers
from kmq.ingress.farewell import Farewells, reset_on_close
from kmq.ingress.ports import Listener
from kmq.ingress.table import ConnectionTable

_OWN_DESCRIPTORS = files.OWN + 8  # not for connections: our own, and some to refuse connections with


class Entrance:
    """The listeners for producers. New connections are entered in the table and in the epoll."""

    def __init__(self, stage: Stage, poll: select.epoll, table: ConnectionTable, strangers: Strangers) -> None:
        free = stage.most_files - _OWN_DESCRIPTORS - most_askers(stage.most_files)
        self.max_connections = min(stage.settings.connections, max(1, free))
        self._poll, self._table, self._row, self._strangers = poll, table, stage.row, strangers
        self._farewells = Farewells()
        self._listeners: dict[int, Listener] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._listeners

    def open(self, listener: Listener) -> None:
        """Accept connections of this listener from now on."""
        fd = listener.sock.fileno()
        self._listeners[fd] = listener
        self._poll.register(fd, select.EPOLLIN)

    def close(self) -> None:
        """Accept the connections that wait already, perhaps since the way to the framer was full, and no others."""
        for fd, listener in self._listeners.items():
            self.accept(fd)
            self._poll.unregister(fd)
            listener.sock.close()
        self._listeners.clear()

    def accept(self, fd: int) -> None:
        """Accept everything that waits at the listener with this descriptor."""
        listener = self._listeners[fd]
        for sock, peer in listener.accept():
            reset_on_close(sock)
            if len(self._table) >= self.max_connections:
                self._turn_away(sock, peer, listener.is_tls)
                continue
            connection = listener.connect(sock, peer)
            if connection is not None:
                self._table.add(connection)
                self._poll.register(connection.sock.fileno(), select.EPOLLIN)

    def _turn_away(self, sock: socket.socket, peer: str, is_tls: bool) -> None:
        reason = f"{self.max_connections} are open already (KMQ_CONNECTIONS, ulimit -n)"
        self._row.turned_away += 1
        self._row.errs_limit += not is_tls
        self._strangers.note("connection_refused", peer, reason)
        if is_tls:  # a reply would cost the handshake that the limit is there to avoid
            sock.close()
        else:
            self._farewells.refuse(sock, f"!err 0 connections {reason}\n".encode())

    def sweep(self) -> None:
        """Close connections that were turned away. Call about once a second."""
        self._farewells.sweep()
