"""Addresses of gateways that stay over restarts, because the test owns them: what comes is passed on to a broker."""

import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from brokers import Broker
from pyspark.sql.types import StringType, StructField, StructType

from kmq.spark.source.options import ReadOptions
from kmq.spark.source.stream_reader import StreamReader

SCHEMA = StructType([StructField("id", StringType())])


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


class Fleet:
    """Brokers, each behind an address that stays."""

    def __init__(self, new_broker: Callable[[], Broker], count: int) -> None:
        self.brokers = [new_broker() for _ in range(count)]
        self.fronts = [Front() for _ in range(count)]
        self.sent = 0
        for number in range(count):
            self.up(number)

    @property
    def names(self) -> list[str]:
        return [front.name for front in self.fronts]

    def up(self, number: int) -> None:
        self.brokers[number].up()
        self.fronts[number].broker = self.brokers[number]

    def part(self, number: int) -> None:
        """Let nobody reach a broker, although it is up."""
        self.fronts[number].broker = None
        self.fronts[number].cut()

    def kill(self, number: int) -> None:
        self.fronts[number].broker = None
        self.brokers[number].kill_all()  # as a pod goes: all of it
        for path in Path("/dev/shm").glob(f"{self.brokers[number].instance}.*"):
            path.unlink()  # else a broker that was alive a moment ago would wait for its own volume
        self.fronts[number].cut()

    def replace(self, number: int) -> tuple[str, str]:
        """The broker comes back with a fresh volume. Return its data id before and now."""
        data = self.brokers[number].data
        before = (data / "id").read_text().strip()
        shutil.rmtree(data)
        self.up(number)
        return before, (data / "id").read_text().strip()

    def send(self, number: int, count: int = 10) -> list[str]:
        """Send orders, and return their ids when they are in their topic."""
        broker = self.brokers[number]
        before = len(broker.lines("orders"))
        ids = [str(n) for n in range(self.sent, self.sent + count)]
        self.sent += count
        broker.send_lines([b"orders.k|0|%b|x" % each.encode() for each in ids])
        broker.wait(lambda: len(broker.lines("orders")) == before + count, "the orders")
        return ids

    def options(self, **given: str) -> dict[str, str]:
        found = {"kmq.bootstrap.servers": ",".join(self.names), "subscribe": "orders", "startingOffsets": "earliest"}
        return found | {"onUnreachable": "hold"} | given

    def stream(self, **given: str) -> StreamReader:
        return StreamReader(SCHEMA, ReadOptions(self.options(**given)))
