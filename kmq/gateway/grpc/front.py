"""In front of gRPC: each TCP connection of a client, relayed byte by byte to gRPC, which listens where nobody else finds it.

gRPC for Python does not bound its connections, a server of it cannot break one, and a call that its client does not go on with
holds its messages until its connection ends. So the connections are ours: doors.py counts them, and a call that has to give way
takes its connection with it. TLS passes through: gRPC does its own.

Bound       A side that takes nothing stops the reading of the other one: a connection holds two socket buffers and what asyncio
            keeps for one write, at most _HIGH_BYTES and one receive.
"""

import asyncio
import contextlib
import os
import socket
import time
from typing import Any

_HIGH_BYTES = 1 << 16
_LINGER_S = 1.0  # for a client to take its last bytes and to go by itself
_TRIES, _PAUSE_S = 50, 0.02  # while gRPC has as many connections to accept as the kernel keeps for it


class _End(asyncio.Protocol):
    """One end; what it receives goes to the other one."""

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
        """The other end is over: hand over what came from it."""
        self.transport.close()


class _Inner(_End):
    """The end that gRPC knows."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock

    def connection_lost(self, exc: Exception | None) -> None:
        """Take what gRPC said last, where it was a write that found the connection over: a client waits for its status."""
        with contextlib.suppress(OSError):
            while exc is not None and (data := self._sock.recv(_HIGH_BYTES)):
                self.data_received(data)
        super().connection_lost(exc)


class Relay(_End):
    """The client's end of a connection."""

    def __init__(self, front: "Front") -> None:
        super().__init__()
        self._front = front
        self.name = ""
        self._early: list[bytes] | None = []  # received before gRPC knows of the connection
        self.calls: set[Any] = set()  # that are being served
        self.idle_since = time.monotonic()  # without a call

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._front.join(self)

    def data_received(self, data: bytes) -> None:
        """Keep what comes too early, at most one receive. Python 3.11.2 reads once even if it was paused before that."""
        if self._early is None:
            super().data_received(data)
        else:
            self._early.append(data)
            self.transport.pause_reading()

    def meet(self, inner: _End) -> None:
        """gRPC knows of the connection: from now on the two hand over what they receive."""
        self.other, inner.other = inner, self
        early, self._early = self._early or [], None
        for data in early:
            inner.transport.write(data)
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._front.leave(self)

    def end(self) -> None:
        """gRPC is done with it. Not at once: that is a reset where the client has just sent something, and overtakes a status."""
        if self.transport.is_closing():
            return
        self.transport.resume_reading()  # and nobody takes it
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self.force_close)

    @property
    def waits_since(self) -> float:
        """Since when it has kept us waiting; 0 where it waits for us."""
        return min((call.since for call in self.calls), default=self.idle_since)

    def force_close(self) -> None:
        """End it now, whatever is on the way."""
        if self.transport is not None:
            self.transport.abort()


class Front:
    """Relays to the gRPC server behind one socket; `Front()` is a factory of protocols, as aiohttp's server is."""

    def __init__(self, address: str) -> None:
        self._address = address  # an abstract name
        self._number = 0
        self._relays: dict[str, Relay] = {}  # by the name that gRPC knows them by
        self._joining: set[asyncio.Task[None]] = set()

    def __call__(self) -> Relay:
        return Relay(self)

    def find(self, peer: str) -> Relay | None:
        """The connection of a call, by what gRPC calls its peer."""
        return self._relays.get(peer.rpartition(":")[2])

    def join(self, relay: Relay) -> None:
        """Connect it with gRPC."""
        self._number += 1
        relay.name = f"{self._address}-{self._number}"
        self._relays[relay.name] = relay
        task = asyncio.get_running_loop().create_task(self._connect(relay))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def leave(self, relay: Relay) -> None:
        self._relays.pop(relay.name, None)

    async def drain(self) -> None:
        """Call when gRPC has stopped: wait for the clients to take their last bytes, and no longer than they may."""
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
