"""The ports of the gateway: each connection from accept to its end, how many there are, and which of them keep us waiting.

Limits      On each port _MOST connections, and _HANDSHAKES more whose TLS handshake is not over (each costs some 300 KiB).
            Beyond that the newcomer evicts the one that has kept us waiting for longest: a handshake evicts a handshake, a
            connection evicts one without a request. A newcomer is refused only if all of them are being served.
Deadline    KMQ_LINE_DEADLINE: for a handshake, for the next request to be whole, for a response to be read.
Memory      Responses that clients have not read hold at most _UNREAD_BYTES in all connections together; beyond that the
            connection that holds most is closed.
"""

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import Any

from aiohttp import web

from kmq import descriptors
from kmq.broker.incidents import Strangers
from kmq.gateway.grpc.front import Relay
from kmq.settings import MIB, Settings

_MOST = 320  # more than the streams of gRPC that may wait for us, so that a newcomer always finds one that does not
_HANDSHAKES = 96
_UNREAD_BYTES = 32 * MIB
_BACKLOG = 1024
_BATCH = 64  # connections that are accepted before others have their turn
_PAUSE_S = 0.2  # out of descriptors: before it is tried again
_LONGEST_HANDSHAKE_S = 60.0


def listening(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen there, one for each address of the host. Raises OSError."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    opened: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            opened.append(sock := socket.socket(family, kind, protocol))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
    except OSError:
        for sock in opened:
            sock.close()
        raise
    return opened


def most_connections(settings: Settings) -> int:
    """How many connections one port of the gateway may have."""
    return max(1, min(_MOST, settings.connections, descriptors.claim() // 8))


class _Open:
    """An open connection."""

    def __init__(self, transport: Any, peer: str, door: socket.socket) -> None:
        self.transport, self.peer, self.door = transport, peer, door
        self.has_asked = False  # a whole request at least once


class Doors:
    """The connections of all ports: those of HTTP have aiohttp's handlers, those of gRPC are relayed (front.py)."""

    def __init__(self, settings: Settings, strangers: Strangers) -> None:
        self._strangers, self._deadline_s = strangers, settings.line_deadline
        self._handshake_s = min(settings.line_deadline, _LONGEST_HANDSHAKE_S)
        self._most = most_connections(settings)
        self._doors: list[socket.socket] = []
        self._shaking: dict[asyncio.Task[None], str] = {}  # the oldest first; whose
        self._plain: dict[asyncio.Task[None], str] = {}  # without TLS: they are over in a moment
        self._open: dict[Any, _Open] = {}  # by aiohttp's handler
        self._served: set[Any] = set()  # handlers whose request is being worked on: they wait for us
        self._waiting: dict[Any, float] = {}  # the others, and since when we have seen them so

    @property
    def connections(self) -> int:
        return len(self._open) + len(self._shaking)

    @property
    def middleware(self) -> Any:
        """Tells which connections are being served."""

        @web.middleware
        async def served(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
            if request.protocol in self._open:
                self._open[request.protocol].has_asked = True
            self._served.add(request.protocol)
            try:
                return await handler(request)
            finally:
                self._served.discard(request.protocol)
                self._waiting.pop(request.protocol, None)

        return served

    def serve(self, door: socket.socket, server: Any, context: SSLContext | None) -> None:
        """Accept the connections of a listening socket."""
        self._doors.append(door)
        loop = asyncio.get_running_loop()
        loop.add_reader(door, self._accept, door, server, context)

    def close(self) -> None:
        """Accept no more connections; those that are open stay."""
        for door in self._doors:
            asyncio.get_running_loop().remove_reader(door)
            door.close()
        self._doors.clear()
        for task in self._shaking:
            task.cancel()

    def _accept(self, door: socket.socket, server: Any, context: SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_BATCH):
            try:
                sock, address = door.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as err:
                if err.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._strangers.note("accept_failed", "", os.strerror(err.errno))
                    loop.remove_reader(door)
                    loop.call_later(_PAUSE_S, self._again, door, server, context)
                return
            sock.setblocking(False)
            peer = f"{address[0]}:{address[1]}"
            if context and len(self._shaking) >= _HANDSHAKES:
                task = next(iter(self._shaking))
                self._strangers.turn_away(self._shaking.pop(task), f"{_HANDSHAKES} handshakes are not over")
                task.cancel()
            task = loop.create_task(self._take(sock, peer, door, server, context))
            tasks = self._shaking if context else self._plain
            tasks[task] = peer
            task.add_done_callback(self._is_over)

    def _is_over(self, task: "asyncio.Task[None]") -> None:
        self._shaking.pop(task, None)
        self._plain.pop(task, None)

    def _again(self, door: socket.socket, server: Any, context: SSLContext | None) -> None:
        if door in self._doors:
            asyncio.get_running_loop().add_reader(door, self._accept, door, server, context)

    async def _take(
        self, sock: socket.socket, peer: str, door: socket.socket, server: Any, context: SSLContext | None
    ) -> None:
        """From accept to the end of the handshake."""
        patience = {"ssl_handshake_timeout": self._handshake_s} if context else {}
        try:
            transport, handler = await asyncio.get_running_loop().connect_accepted_socket(
                server, sock, ssl=context, **patience
            )
        except ConnectionAbortedError as err:  # what asyncio says of a handshake that takes too long
            self._strangers.cut_off(peer, str(err))
        except OSError as err:
            self._strangers.note("tls_failed", peer, getattr(err, "reason", None) or err.strerror or type(err).__name__)
        else:
            if not self._has_room(door):
                self._strangers.turn_away(peer, f"{self._most} are open already and all are being served")
                transport.abort()
            else:
                self._open[handler] = _Open(transport, peer, door)

    def _has_room(self, door: socket.socket) -> bool:
        """Return True if that port may have one more connection; evict one that keeps us waiting if that is needed."""
        for handler in [handler for handler, it in self._open.items() if it.transport.is_closing()]:
            del self._open[handler]
        here = [handler for handler, it in self._open.items() if it.door is door]
        if len(here) < self._most:
            return True
        slow = [handler for handler in here if self._waits_since(handler)]
        if slow:
            longest = min(slow, key=self._waits_since)
            self._end(longest)
            self._strangers.turn_away(self._open.pop(longest).peer, f"{self._most} are open, and it keeps us waiting")
        return bool(slow)

    def _waits_since(self, handler: Any) -> float:
        """Return since when a connection has kept us waiting; 0 if it waits for us."""
        if isinstance(handler, Relay):
            return handler.waits_since
        return 0.0 if handler in self._served else self._waiting.get(handler, time.monotonic())

    def _end(self, handler: Any) -> None:
        handler.force_close()
        self._open[handler].transport.abort()

    def sweep(self) -> None:
        """Close connections past their deadline, and those that read too little. Call some times a second."""
        now = time.monotonic()
        self._open = {handler: it for handler, it in self._open.items() if not it.transport.is_closing()}
        asked = [handler for handler in self._open if not isinstance(handler, Relay)]  # gRPC has deadlines of its own
        self._waiting = {it: self._waiting.get(it, now) for it in asked if it not in self._served}
        for handler, since in self._waiting.items():
            if now - since >= self._deadline_s:
                if not self._open[handler].has_asked:
                    self._strangers.cut_off(self._open[handler].peer, "no whole request within KMQ_LINE_DEADLINE")
                self._end(handler)
        unread = {handler: it.transport.get_write_buffer_size() for handler, it in self._open.items()}
        over = sum(unread.values()) - _UNREAD_BYTES
        for handler in sorted(unread, key=lambda handler: unread[handler], reverse=True):
            if over <= 0:
                break
            over -= unread[handler]
            self._strangers.cut_off(self._open[handler].peer, f"{unread[handler]} bytes of responses are not read")
            with contextlib.suppress(OSError):
                self._end(handler)
