"""The gateway's ports and their connections, from accept to close: addresses, TLS, tokens, limits, deadlines, memory.

Ports       With certificates (kmq/broker/tls.py) HTTP and gRPC each listen on two ports, plaintext and TLS. With
            KMQ_TOKENS each call must carry `authorization: Bearer <token>` with a role for it, except health checks;
            access.py asks for it over HTTP.
Limits      At most _MOST connections on each port, _MOST_HTTP on those of HTTP, _MOST_CONSUMERS on a consumer's,
            _MOST_KAFKA on those of Kafka, and _HANDSHAKES more whose TLS handshake is unfinished (some 300 KiB each). At
            the limit a new connection evicts the one that has kept the gateway waiting longest: a handshake evicts a
            handshake, a connection evicts a connection without a request, or one whose client has closed its half and
            waits for records. Where there is none, the call over HTTP that has waited longest for messages is answered
            now, without any, and makes room: an honest client asks again. If all connections are being served, the new
            one is refused. A consumer that was admitted (its token was valid, if one is required) makes room only where
            all others were too: it is idle while it works.
Taken       A port that another program uses is left out, and the others serve. It is retried every few seconds.
Deadline    KMQ_LINE_DEADLINE limits a handshake, the time until the next request is whole, and the reading of a
            response.
Memory      Large answers have a budget of their own (core/answers.py). Unread bytes of other answers are at most
            _UNREAD_BYTES in all connections together. Above that the connection that holds most is closed.
"""

import asyncio
import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable
from secrets import token_hex
from ssl import SSLContext
from typing import Any, NamedTuple

import grpc
from aiohttp import web

from kmq import files
from kmq.access.tokens import Tokens
from kmq.broker.door import CONSUMERS, HTTP, OTHER, Door, FollowerDoors
from kmq.broker.ports import OPEN_AGAIN_S, cannot_listen, is_taken, listening, number_of
from kmq.broker.stats import Row, Strangers
from kmq.broker.tls import Certificates
from kmq.config.settings import Settings
from kmq.config.values import KIB, MIB
from kmq.files import replace_file
from kmq.gateway.access import unauthorized
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.connection import ClientConnection
from kmq.gateway.grpc.calls import CHECK, Bystanders, Calls, longest_message
from kmq.gateway.grpc.front import Front, Relay
from kmq.gateway.grpc.schema import refuse
from kmq.gateway.http.exchange import Exchange, HttpConnection, exchange
from kmq.logfmt import Logger

_MOST = 320  # more than the gRPC streams that may wait for the gateway, so that some connection can always be evicted
_MOST_HTTP = 1024  # calls that wait for messages among them
_MOST_CONSUMERS = 4096  # consumers that wait cost little
_MOST_KAFKA = 1000
_HANDSHAKES = 96
_UNREAD_BYTES = 32 * MIB
_BACKLOG = 1024
_CONSUMERS_S = 1.0
_BATCH = 64  # connections accepted in a row before the event loop continues
_PAUSE_S = 0.2  # after running out of descriptors, before the next accept
_LONGEST_HANDSHAKE_S = 60.0
_RESET = struct.pack("ii", 1, 0)


def _most_connections(settings: Settings, most: int) -> int:
    """Return how many connections one port of the gateway may have at most."""
    return max(1, min(most, settings.connections, files.claim() // 8))


class _Open:
    """An open connection."""

    def __init__(self, transport: Any, peer: str, door: socket.socket) -> None:
        self.transport, self.peer, self.door = transport, peer, door
        self.has_asked = False  # at least one whole request has arrived
        self.exchange: Exchange | None = None  # its last request, over HTTP


class Doors:
    """The connections of all ports. aiohttp handles those of HTTP; those of gRPC are relayed (grpc/front.py)."""

    def __init__(self, settings: Settings, strangers: Strangers) -> None:
        self._strangers, self._deadline_s = strangers, settings.line_deadline
        self._handshake_s = min(settings.line_deadline, _LONGEST_HANDSHAKE_S)
        self._most = _most_connections(settings, _MOST)
        self.closed: dict[str, Callable[[], int]] = {}  # ports that another program uses: name → what opens it
        self._open_at = 0.0  # when they are retried
        self._doors: dict[socket.socket, int] = {}  # listening socket → connections at most
        self._shaking: dict[asyncio.Task[None], str] = {}  # TLS handshakes: task → peer, the oldest first
        self._plain: dict[asyncio.Task[None], str] = {}  # accepted without TLS: these tasks end in a moment
        self._open: dict[Any, _Open] = {}  # by handler: aiohttp's, or the relay of a gRPC connection
        self._consumers: dict[Any, _Open] = {}  # by handler: ClientConnection. There are many, and few need a look
        self._served: set[Any] = set()  # handlers whose request is being served
        self._consumers_at = 0.0  # when consumers are looked at next
        self._waiting: dict[Any, float] = {}  # the other HTTP handlers → since when they have been seen idle

    @property
    def connections(self) -> int:
        return len(self._open) + len(self._consumers) + len(self._shaking)

    @property
    def middleware(self) -> Any:
        """Return the middleware that notes which connections are being served."""

        @web.middleware
        async def served(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
            if (connection := self._open.get(request.protocol)) is not None:
                connection.has_asked, connection.exchange = True, exchange()
            self._served.add(request.protocol)
            try:
                return await handler(request)
            finally:
                self._served.discard(request.protocol)
                self._waiting.pop(request.protocol, None)

        return served

    def serve(self, door: socket.socket, server: Any, context: SSLContext | None, most: int = 0) -> None:
        """Accept the connections of a listening socket. `most`: at a time; 0: _MOST."""
        self._doors[door] = most or self._most
        loop = asyncio.get_running_loop()
        loop.add_reader(door, self._accept, door, server, context)

    def open_closed(self, now: float) -> dict[str, int]:
        """Retry ports that another program used. Returns those that are open now, name → number."""
        if not self.closed or now < self._open_at:
            return {}
        self._open_at, opened = now + OPEN_AGAIN_S, dict[str, int]()
        for name, open_door in [*self.closed.items()]:
            with contextlib.suppress(OSError):
                opened[name] = open_door()
                del self.closed[name]
        return opened

    def close(self) -> None:
        """Accept no more connections; open connections stay."""
        for door in self._doors:
            asyncio.get_running_loop().remove_reader(door)
            door.close()
        self._doors.clear()
        self.closed.clear()
        for task in self._shaking:
            task.cancel()

    def reset_on_close(self) -> None:
        """Make the end of every open connection a reset, because an orderly end could look like a complete answer."""
        for connection in (*self._open.values(), *self._consumers.values()):
            sock = connection.transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

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
                    loop.call_later(_PAUSE_S, self._resume_accepting, door, server, context)
                return
            sock.setblocking(False)
            peer = f"{address[0]}:{address[1]}"
            if context and len(self._shaking) >= _HANDSHAKES:
                task = next(iter(self._shaking))
                self._strangers.turn_away(self._shaking.pop(task), f"{_HANDSHAKES} handshakes are unfinished")
                task.cancel()
            task = loop.create_task(self._establish(sock, peer, door, server, context))
            tasks = self._shaking if context else self._plain
            tasks[task] = peer
            task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._shaking.pop(task, None)
        self._plain.pop(task, None)

    def _resume_accepting(self, door: socket.socket, server: Any, context: SSLContext | None) -> None:
        if door in self._doors:
            asyncio.get_running_loop().add_reader(door, self._accept, door, server, context)

    async def _establish(
        self, sock: socket.socket, peer: str, door: socket.socket, server: Any, context: SSLContext | None
    ) -> None:
        """Finish the TLS handshake, if there is one, and admit the connection or turn it away."""
        patience = {"ssl_handshake_timeout": self._handshake_s} if context else {}
        try:
            transport, protocol = await asyncio.get_running_loop().connect_accepted_socket(
                server, sock, ssl=context, **patience
            )
        except ConnectionAbortedError as err:  # asyncio raises this when a handshake takes too long
            self._strangers.cut_off(peer, str(err))
        except OSError as err:
            self._strangers.note("tls_failed", peer, getattr(err, "reason", None) or err.strerror or type(err).__name__)
        else:
            handler = protocol.handler if isinstance(protocol, HttpConnection) else protocol
            beside = self._consumers if isinstance(handler, ClientConnection) else self._open
            if not self._has_room(door, beside):
                self._strangers.turn_away(
                    peer, f"{self._doors.get(door, 0)} are open already, and all are being served"
                )
                transport.abort()
            else:
                beside[handler] = _Open(transport, peer, door)

    def _has_room(self, door: socket.socket, beside: dict[Any, _Open]) -> bool:
        """Return True if that port may have one more connection; evict a slow one if necessary."""
        _forget_closing(beside)
        at_door = [handler for handler, connection in beside.items() if connection.door is door]
        most = self._doors.get(door, 0)
        if len(at_door) < most:
            return True
        slow = [handler for handler in at_door if self._waits_since(handler)]
        if slow:
            longest = min(slow, key=lambda handler: (_is_admitted(handler), self._waits_since(handler)))
            self._end(longest)
            self._strangers.turn_away(beside.pop(longest).peer, f"{most} are open, and this one is the slowest")
            return True
        return beside is self._open and self._has_poll_given_way(at_door, most)

    def _has_poll_given_way(self, at_door: list[Any], most: int) -> bool:
        """Answer the call that has waited longest for messages, to make room. Return False if none waits."""
        polls = {
            handler: exchange
            for handler in at_door
            if (exchange := self._open[handler].exchange) is not None and exchange.polls_since
        }
        if not polls:
            return False
        longest = min(polls, key=lambda handler: polls[handler].polls_since)
        polls[longest].give_way()
        self._strangers.turn_away(
            self._open.pop(longest).peer, f"{most} are open, and this call waits for messages longest: it is answered"
        )
        return True

    def _waits_since(self, handler: Any) -> float:
        """Return since when a client has kept the gateway waiting; 0 if the client waits for the gateway."""
        if isinstance(handler, (Relay, ClientConnection)):
            return handler.waits_since
        exchange = self._open[handler].exchange
        if exchange is not None and exchange.since:
            return exchange.since
        return 0.0 if handler in self._served else self._waiting.get(handler, time.monotonic())

    def _end(self, handler: Any) -> None:
        handler.force_close()
        if not isinstance(handler, ClientConnection):  # it does this itself, once its sendfile has ended
            self._open[handler].transport.abort()

    def sweep(self) -> None:
        """Close connections past their deadline or with too many unread bytes. Call several times a second.

        Consumers are looked at once a second.
        """
        now = time.monotonic()
        _forget_closing(self._open)
        swept = self._open
        if now >= self._consumers_at:
            swept = self._open | self._sweep_consumers(now)
        # grpc/calls.py takes care of gRPC's connections.
        over_http = [handler for handler in self._open if not isinstance(handler, Relay)]
        self._waiting = {
            handler: self._waiting.get(handler, now) for handler in over_http if handler not in self._served
        }
        for handler in over_http:
            if 0 < self._waits_since(handler) <= now - self._deadline_s:
                if not self._open[handler].has_asked:
                    self._strangers.cut_off(self._open[handler].peer, "no whole request within KMQ_LINE_DEADLINE")
                self._end(handler)
        unread = {handler: connection.transport.get_write_buffer_size() for handler, connection in swept.items()}
        over = sum(unread.values()) - _UNREAD_BYTES
        for handler in sorted(unread, key=lambda handler: unread[handler], reverse=True) if over > 0 else ():
            if over <= 0:
                break
            over -= unread[handler]
            self._strangers.cut_off(swept[handler].peer, f"{unread[handler]} bytes of responses are unread")
            with contextlib.suppress(OSError):
                self._end(handler)

    def _sweep_consumers(self, now: float) -> dict[Any, _Open]:
        """Close consumers past their deadline, and return those that may hold something.

        Called once a second: thousands may be connected.
        """
        self._consumers_at = now + _CONSUMERS_S
        found = {handler: connection for handler, connection in self._consumers.items() if handler.needs_look}
        for handler in _forget_closing(found):
            del self._consumers[handler]
        for handler, connection in found.items():
            late = handler.late(now - self._deadline_s)
            if late:
                self._strangers.cut_off(connection.peer, late)
                self._end(handler)
        return found


def _forget_closing(connections: dict[Any, _Open]) -> list[Any]:
    """Forget connections that are closing. Returns their handlers."""
    closing = [handler for handler, connection in connections.items() if connection.transport.is_closing()]
    for handler in closing:
        del connections[handler]
    return closing


def _is_admitted(handler: Any) -> bool:
    return isinstance(handler, ClientConnection) and handler.is_admitted


# --- listeners -------------------------------------------------------------------------------------------------------

_RPCS = 2048  # simultaneous calls, streams included
_LOOKAHEAD_BYTES = 16 * KIB  # of each call that gRPC receives before the gateway reads them
_RPCS_PER_CONNECTION = 1024
_GROWTH = 3  # a record as a message, against its line: an empty header is one byte there and two here
_KEEPALIVE_MS, _KEEPALIVE_ANSWER_MS = 30_000, 10_000  # otherwise a dead peer would keep its stream for ever
_LONGEST_IDLE_S = 3600.0  # of a connection without a call; the client reconnects by itself
_MIN_PING_MS = 10_000  # shortest time between two pings of a client, also on an idle connection


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a valid token, and those that the token's roles do not allow."""

    def __init__(self, tokens: Tokens, strangers: Strangers) -> None:
        self._tokens, self._strangers = tokens, strangers

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        shown = dict(details.invocation_metadata).get("authorization", "")
        holder = self._tokens.find_header(shown)
        if details.method == CHECK or (holder is not None and holder.may(details.method)):
            return await continuation(details)
        if holder is None:
            self._strangers.refuse("", "gRPC without a valid token", "" if shown else "token")
            return _refusing(unauthorized(shown))
        self._strangers.refuse("", f"{details.method}: the token of {holder.name} may not")
        return _refusing(RequestRefused("forbidden", holder.refusal(details.method)))


def _refusing(refused: RequestRefused) -> Any:
    """Return a handler that refuses. It is a stream for every method, because it answers before any request."""

    async def answer(requests: Any, context: Any) -> None:
        await refuse(context, refused)

    return grpc.stream_stream_rpc_method_handler(answer)


def grpc_server(
    settings: Settings, tokens: Tokens | None, strangers: Strangers, calls: Calls, services: Iterable[str]
) -> Any:
    """Return a gRPC server without ports or services. `services`: full names of those that will be added."""
    longest = longest_message(settings)
    handshake_ms = int(min(settings.line_deadline, _LONGEST_HANDSHAKE_S) * 1000)
    return grpc.aio.server(
        interceptors=(*([_Guard(tokens, strangers)] if tokens else []), Bystanders(calls, services)),
        maximum_concurrent_rpcs=_RPCS,
        options=(
            ("grpc.so_reuseport", 0),  # otherwise a second gateway would silently take half of the connections
            ("grpc.server_handshake_timeout_ms", handshake_ms),
            ("grpc.max_connection_idle_ms", int(min(settings.line_deadline, _LONGEST_IDLE_S) * 1000)),
            ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
            ("grpc.http2.bdp_probe", 0),  # otherwise gRPC would buffer more and more per call
            ("grpc.max_receive_message_length", longest),
            ("grpc.max_send_message_length", _GROWTH * longest),
            ("grpc.max_concurrent_streams", _RPCS_PER_CONNECTION),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_ANSWER_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
            ("grpc.keepalive_permit_without_calls", 1),
        ),
    )


class DoorServers(NamedTuple):
    """What serves the ports: gRPC's server, aiohttp's for HTTP and for metrics, factories of protocols for lines."""

    grpc: Any
    http: Any
    metrics: Any
    lines: Any
    status: Any
    kafka: Any = None  # None: that extra is not installed


def listen(
    servers: DoorServers, calls: Calls, doors: Doors, settings: Settings, certificates: Certificates | None
) -> dict[str, int]:
    """Open all ports. Returns name → port number of those that are open. Call inside the event loop.

    A port that another program uses is in `doors.closed`. Raises KmqError for an error of all ports, such as an
    address.
    """
    host, opened = settings.host, dict[str, int]()
    most, consumers = _most_connections(settings, _MOST_HTTP), _most_connections(settings, _MOST_CONSUMERS)

    def connection() -> HttpConnection:
        return HttpConnection(servers.http())

    def listen_at(name: str, host: str, server: Any, context: SSLContext | None = None, most: int = 0) -> None:
        opened.update(_listen_at(doors, settings, name, host, server, context, most))

    listen_at("grpc", host, _front(calls, servers.grpc.add_insecure_port))
    listen_at("http", host, connection, most=most)
    listen_at("egress", host, servers.lines, most=consumers)
    listen_at("status", host, servers.status, most=consumers)
    if servers.kafka is not None:
        listen_at("kafka", host, servers.kafka, most=_most_connections(settings, _MOST_KAFKA))
    if certificates is not None:
        credentials = _credentials(settings, certificates)
        front = _front(calls, lambda address: servers.grpc.add_secure_port(address, credentials))
        listen_at("grpcs", settings.tls_host, front)
        listen_at("https", settings.tls_host, connection, certificates.context(), most)
        listen_at("egress_tls", settings.tls_host, servers.lines, certificates.context(), consumers)
        if servers.kafka is not None:
            most_kafka = _most_connections(settings, _MOST_KAFKA)
            listen_at("kafka_tls", settings.tls_host, servers.kafka, certificates.context(), most_kafka)
    return opened | listen_metrics(servers.metrics, doors, settings)


def listen_metrics(server: Any, doors: Doors, settings: Settings) -> dict[str, int]:
    """Open the separate port for metrics and health, if the settings name one."""
    if not settings.own_host:
        return {}
    return _listen_at(doors, settings, "metrics", settings.own_host, server)


def _listen_at(
    doors: Doors,
    settings: Settings,
    name: str,
    host: str,
    server: Any,
    context: SSLContext | None = None,
    most: int = 0,
) -> dict[str, int]:
    """Return name → number of a port if it is open. Raises KmqError."""
    port, file = number_of(settings, name), f"{settings.pipes}/{name}.port"

    def serve(found: list[socket.socket]) -> int:  # a name may stand for several addresses
        number: int = found[0].getsockname()[1]
        try:
            replace_file(file, b"%d\n" % number)
        except OSError:  # a full disk is no fault of the port: it must be free for the next try
            for door in found:
                door.close()
            raise
        for door in found:
            doors.serve(door, server, context, most)
        return number

    try:
        found = listening(host, port)
    except OSError as err:
        if not is_taken(err):
            raise cannot_listen(f"KMQ_{name.upper()}_PORT", host, port, err) from err
    else:
        return {name: serve(found)}
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)  # of an earlier life: a client would find another program there
    doors.closed[name] = lambda: serve(listening(host, port))
    return {}


def follower_doors(
    settings: Settings, row: Row, log: Logger, leader: Callable[[], dict[str, str] | None], has_kafka: bool = False
) -> FollowerDoors:
    """Open the ports for clients, and pass connections on to the leader of the shard. Raises KmqError.

    A port that another program uses is in `closed` of what is returned.
    """
    speaks = {"http": HTTP, "egress": CONSUMERS, "status": OTHER, "grpc": OTHER} | (
        {"kafka": OTHER} if has_kafka else {}
    )
    names = [(name, settings.host) for name in speaks]
    if settings.tls_cert:
        names += [(name, settings.tls_host) for name in ("https", "grpcs", "egress_tls")]
        names += [("kafka_tls", settings.tls_host)] if has_kafka else []
    doors = [
        Door(name, f"KMQ_{name.upper()}_PORT", host, number_of(settings, name), speaks.get(name, OTHER), may_wait=True)
        for name, host in names
    ]
    most = max(1, min(settings.connections, _MOST_CONSUMERS, files.claim() // 4))
    found = FollowerDoors(doors, most, leader, row, log, dead_s=settings.session_ttl + settings.replica_lag)
    found.write_ports(settings.pipes)
    return found


def _front(calls: Calls, add_port: Callable[[str], int]) -> Front:
    """Make gRPC listen on a Unix socket with a secret name, and return the relay to that socket, which `calls` knows."""
    name = f"kmq-grpc-{token_hex(16)}"
    add_port(f"unix-abstract:{name}")
    calls.fronts.append(Front(name, calls.look))
    return calls.fronts[-1]


def _credentials(settings: Settings, certificates: Certificates) -> Any:
    """Return credentials for gRPC's own TLS, which asks for the files before each handshake."""

    def read(path: str) -> bytes | None:
        if not path:
            return None
        with open(path, "rb") as file:
            return file.read()

    def configuration() -> Any:
        pair = (read(settings.tls_key), read(settings.tls_cert))
        return grpc.ssl_server_certificate_configuration([pair], read(settings.tls_client_ca))

    used = certificates.latest

    def fetch() -> Any:
        nonlocal used
        certificates.renew()
        if certificates.latest is used:
            return None
        used = certificates.latest  # another port may have noticed the new files first
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, bool(settings.tls_client_ca))
