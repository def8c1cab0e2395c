"""Addresses of gateways that stay over restarts, because the test owns them: what comes is passed on to a broker."""

import socket
import threading
from contextlib import suppress

from brokers import Broker


class Front:
    """Pass connections on to the gateway of `broker`, whatever its port is; None: every connection ends at once.

    `is_mute`: connections are taken, and nothing is ever answered, as by a host whose network is gone.
    """

    def __init__(self, broker: Broker | None = None) -> None:
        self.broker, self.is_mute = broker, False
        self._open: set[socket.socket] = set()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.name = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                taken = self._socket.accept()[0]
                self._open.add(taken)
                if not self.is_mute:
                    threading.Thread(target=self._pass_on, args=(taken,), daemon=True).start()

    def _pass_on(self, taken: socket.socket) -> None:
        with taken, suppress(OSError, ValueError):
            if self.broker is None:
                return
            port = int((self.broker.pipes / "http.port").read_text())
            with socket.create_connection(("127.0.0.1", port)) as gateway:
                self._open.add(gateway)
                threading.Thread(target=self._copy, args=(taken, gateway), daemon=True).start()
                self._copy(gateway, taken)

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End all connections."""
        for each in [*self._open]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.cut()
