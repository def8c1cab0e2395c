"""One address for all brokers of a shard, as a Service of Kubernetes is one: each connection goes to any broker.

    python -m chaos.cluster.service NAMESPACE PORTS BROKER [BROKER …]

It listens on 127.0.0.1 of the host's network, so that any client can use it, and connects within the network NAMESPACE,
so that cuts concern it. PORTS is a directory: for each door it gets a file `<door>.port`, as a broker's pipes/ has them.
A broker that takes no connection within a second is passed over. A connection is ended if its client has sent something
and no byte came back within some seconds, as load balancers do; a cut network says nothing by itself.
"""

import asyncio
import ctypes
import os
import socket
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

DOORS = {"ingress": 5673, "egress": 5674, "http": 8082, "grpc": 8080}
CONNECT_S, SILENCE_S = 1.0, 8.0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET

Way = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def enter(namespace: str) -> None:
    """From now on this thread's new sockets are of that network; those that it has stay where they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


class Splice:
    """A connection of a client, and that to a broker. `asked`: when the client sent what nobody has answered yet."""

    def __init__(self) -> None:
        self.asked: float | None = None

    async def run(self, to_broker: Way, to_client: Way) -> None:
        """Copy both ways until both have ended."""
        await asyncio.gather(self._copy(*to_broker, is_client=True), self._copy(*to_client, is_client=False))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_client: bool) -> None:
        while data := await source.read(1 << 16):
            if not is_client:
                self.asked = None
            elif self.asked is None:
                self.asked = time.monotonic()
            sink.write(data)
            await sink.drain()
        sink.write_eof()

    async def watch(self) -> None:
        while self.asked is None or time.monotonic() < self.asked + SILENCE_S:
            await asyncio.sleep(0.5)
        raise TimeoutError


class Service:
    def __init__(self, brokers: list[str]) -> None:
        self._brokers, self._turn = brokers, count()

    async def _connect(self, port: int) -> Way:
        turn = next(self._turn)
        for n in range(len(self._brokers)):
            broker = self._brokers[(turn + n) % len(self._brokers)]
            with suppress(OSError):
                return await asyncio.wait_for(asyncio.open_connection(broker, port), CONNECT_S)
        raise ConnectionError

    async def serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers, tasks = [writer], list[asyncio.Task[None]]()
        try:
            upstream, other = await self._connect(port)
            writers.append(other)
            splice = Splice()
            both = splice.run((reader, other), (upstream, writer))
            tasks = [asyncio.create_task(both), asyncio.create_task(splice.watch())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        except (OSError, TimeoutError):
            pass
        finally:
            for task in tasks:
                task.cancel()
            for each in writers:
                each.transport.abort() if tasks and not tasks[0].done() else each.close()


async def run(sockets: dict[str, socket.socket], ports: Path, service: Service) -> None:
    servers = []
    for name, sock in sockets.items():

        async def on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = DOORS[name]) -> None:
            await service.serve(port, reader, writer)

        servers.append(await asyncio.start_server(on, sock=sock))
        temporary = ports / f"{name}.new"
        temporary.write_text(f"{sock.getsockname()[1]}\n")
        os.rename(temporary, ports / f"{name}.port")
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main(namespace: str, ports: str, *brokers: str) -> None:
    sockets = {name: socket.create_server(("127.0.0.1", 0), backlog=256) for name in DOORS}
    enter(namespace)
    asyncio.run(run(sockets, Path(ports), Service(list(brokers))))


if __name__ == "__main__":
    main(*sys.argv[1:])
