"""The relay in front of gRPC: every byte arrives, in order."""

import asyncio
import os
import socket
from typing import Any

from kmq.gateway.grpc.front import Front, Relay


class Server(asyncio.Protocol):
    """What gRPC is told."""

    def __init__(self) -> None:
        self.data, self.is_whole = b"", asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.data.endswith(b"late"):
            self.is_whole.set()


class Hasty(Relay):
    """Receives before gRPC knows of the connection, as asyncio of Python 3.11.2 has it even where reading was paused."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.data_received(b"early, ")


def test_what_comes_before_grpc_knows_of_the_connection_is_handed_over() -> None:
    async def relayed() -> bytes:
        loop, address, server = asyncio.get_running_loop(), f"kmq-test-{os.getpid()}", Server()
        listener = await loop.create_unix_server(lambda: server, path=f"\0{address}")
        ours, theirs = socket.socketpair()
        with theirs:
            relay = Hasty(Front(address))
            await loop.create_connection(lambda: relay, sock=ours)
            theirs.sendall(b"late")
            async with asyncio.timeout(60):
                await server.is_whole.wait()
            relay.force_close()
            listener.close()
        return server.data

    assert asyncio.run(relayed()) == b"early, late"
