"""A TCP proxy whose connections are cut when a test wants it: before the request arrives, or before the response does."""

import contextlib
import random
import select
import socket
import threading
from collections.abc import Callable

_READ = 1 << 16


class CuttingProxy:
    """Passes on to wherever `port` says the server is now. `odds`: of a cut for each piece that passes."""

    def __init__(self, port: Callable[[], int], rng: random.Random, odds: float = 0.0) -> None:
        self._server_port, self._rng, self.odds = port, rng, odds
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.cuts = 0
        self._over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client, self._connect() as server:
            other = {client: server, server: client}
            while not self._over.is_set():
                for source in select.select([client, server], [], [], 0.2)[0]:
                    data = source.recv(_READ)
                    if not data:
                        return
                    if self._rng.random() < self.odds:
                        self.cuts += 1
                        if source is client:  # all but the last bytes of the request arrive, or none of them
                            server.sendall(data[: -self._rng.choice((1, 8, len(data)))])
                        return
                    other[source].sendall(data)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._server_port()), 10)
