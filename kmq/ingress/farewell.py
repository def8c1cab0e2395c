"""How a connection ends: in order, or with a reset.

Invariant   A connection ends in order only if the FIFO speaks of every whole line that was read from it, or it was answered.
            Every other end is a reset, also if ingress is killed: SO_LINGER makes the kernel send one.
"""

import contextlib
import socket
import struct

from kmq.ingress.connection import Connection

_RESET, _ORDERLY = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
_KEPT = 16  # refused sockets that stay open for a moment


def reset_on_close(sock: socket.socket) -> None:
    """Make every end of this connection a reset, until `close_in_order`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def close_in_order(connection: Connection) -> None:
    """End a connection of whose whole lines the FIFO speaks."""
    if connection.tls is not None:
        connection.tls.say_end()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ORDERLY)
    connection.sock.close()


class Farewells:
    """Refused connections that were told why.

    Up to 16 of them stay open until the sweep after the next one. An immediate reset would discard the `!err` before
    the producer reads it.
    """

    def __init__(self) -> None:
        self._recent: list[socket.socket] = []  # since the last sweep
        self._older: list[socket.socket] = []

    def refuse(self, sock: socket.socket, reply: bytes) -> None:
        """Send `reply`, then reset the connection: an orderly end would say that its lines were handed over."""
        with contextlib.suppress(OSError):
            sock.send(reply)
        if len(self._recent) < _KEPT:
            self._recent.append(sock)
        else:
            sock.close()

    def sweep(self) -> None:
        """Close what was refused before the last sweep."""
        for sock in self._older:
            sock.close()
        self._older, self._recent = self._recent, []
