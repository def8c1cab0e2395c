"""The gateway's TCP connections for gRPC: each is relayed byte by byte to gRPC, which listens on a secret socket.

gRPC for Python neither limits the number of its connections nor lets a server close one. A call whose client has
stopped holds its messages until its connection ends. Therefore the gateway accepts the connections itself: ports.py
counts them, and an evicted call takes its connection with it. TLS passes through unchanged: gRPC does the TLS itself.

Bound       When one side stops reading, the relay stops reading from the other side. So a connection holds two socket
            buffers and what asyncio keeps for one write: at most _HIGH_BYTES and one receive.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

_HIGH_BYTES = 1 << 16
_LINGER_S = 1.0  # how long a client has to read its last bytes and to close the connection itself
_LOOK_BYTES = 1 << 16  # received between two looks at a connection
_TRIES, _PAUSE_S = 50, 0.02  # to connect while the accept queue of gRPC's socket is full


class _End(asyncio.Protocol):
    """One end of a relayed connection. It passes everything it receives to the other end."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.other: _End | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=_HIGH_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        return False  # HTTP/2 has no half-closed connections

    def connection_lost(self, exc: Exception | None) -> None:
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            other.end()

    def end(self) -> None:
        """Close after writing what the other end had sent, because the other end is gone."""
        self.transport.close()


class _Inner(_End):
    """The end that is connected to gRPC."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on the last bytes of gRPC even if a failed write revealed the end: the client waits for its status."""
        with contextlib.suppress(OSError):
            while exc is not None and (data := self._sock.recv(_HIGH_BYTES)):
                self.data_received(data)
        super().connection_lost(exc)


class Relay(_End):
    """The client's end of a connection."""

    def __init__(self, front: "Front") -> None:
        super().__init__()
        self._front = front
        self.name = self.peer = ""
        self._early: list[bytes] | None = []  # received before the connection to gRPC was made; None: it is made
        self.calls: set[Any] = set()  # calls that are being served
        self.idle_since = time.monotonic()  # when its last call ended
        self.claimed = 0  # bytes that became whole requests, as far as calls.py counts them
        self._received = self._looked_at = 0

    @property
    def unclaimed(self) -> int:
        """Return the bytes that the client has sent, less `claimed`."""
        return self._received - self.claimed

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if address else ""
        self._front.join(self)

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on, or keep them until gRPC is connected: Python 3.11.2 reads once even if paused before."""
        self._received += len(data)
        if self._received - self._looked_at >= _LOOK_BYTES:
            self._looked_at = self._received
            self._front.look(self)
        if self._early is None:
            super().data_received(data)
        else:
            self._early.append(data)
            self.transport.pause_reading()

    def meet(self, inner: _End) -> None:
        """Join both ends: from now on each passes on what it receives."""
        self.other, inner.other = inner, self
        early, self._early = self._early or [], None
        for data in early:
            inner.transport.write(data)
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._front.leave(self)

    def end(self) -> None:
        """Close after gRPC has closed its end, once the client has had time to read.

        Closing at once would reset the connection if the client has just sent something. Then the client might lose its
        status.
        """
        if self.transport.is_closing():
            return
        self.transport.resume_reading()  # what the client still sends is discarded
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self.force_close)

    @property
    def waits_since(self) -> float:
        """Return since when the client has kept the gateway waiting; 0 if the client waits for the gateway."""
        return min((call.since for call in self.calls), default=self.idle_since)

    def force_close(self) -> None:
        """Close at once. Bytes in both directions may be lost."""
        if self.transport is not None:
            self.transport.abort()


class Front:
    """The relays to one socket of the gRPC server. An instance is a factory of protocols, as aiohttp's server is."""

    def __init__(self, address: str, look: Callable[[Relay], None] = lambda relay: None) -> None:
        """`look` is called for a connection each time it has received _LOOK_BYTES more."""
        self._address = address  # an abstract name
        self.look = look
        self._number = 0
        self._relays: dict[str, Relay] = {}  # by the name that gRPC knows them by
        self._joining: set[asyncio.Task[None]] = set()

    def __call__(self) -> Relay:
        return Relay(self)

    def find(self, peer: str) -> Relay | None:
        """Return the connection of a call by the peer name that gRPC reports for the call; None if it is gone."""
        return self._relays.get(peer.rpartition(":")[2])

    def join(self, relay: Relay) -> None:
        """Name a new connection, and start to connect it to gRPC."""
        self._number += 1
        relay.name = f"{self._address}-{self._number}"
        self._relays[relay.name] = relay
        task = asyncio.get_running_loop().create_task(self._connect(relay))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def leave(self, relay: Relay) -> None:
        self._relays.pop(relay.name, None)

    async def drain(self) -> None:
        """Wait until the clients have read their last bytes, at most _LINGER_S. Call when gRPC has stopped."""
        until = time.monotonic() + _LINGER_S
        while self._relays and time.monotonic() < until:
            await asyncio.sleep(_PAUSE_S)

    async def _connect(self, relay: Relay) -> None:
        loop = asyncio.get_running_loop()
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            inner.bind("\0" + relay.name)
            for _ in range(_TRIES):
                if not (busy := inner.connect_ex("\0" + self._address)):
                    break
                await asyncio.sleep(_PAUSE_S)
            if busy:
                raise OSError(busy, os.strerror(busy))
            _, end = await loop.create_unix_connection(lambda: _Inner(inner), sock=inner)
        except OSError:
            inner.close()
            relay.force_close()
            return
        if relay.transport.is_closing():
            end.transport.abort()
            return
        relay.meet(end)
