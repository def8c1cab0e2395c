"""Ports of ingress: lines (KMQ_PORT, KMQ_TLS_PORT), raw lines (KMQ_INTAKES) and questions (KMQ_ACK_PORT).

Producers are accepted up to KMQ_CONNECTIONS and the limit on open files. At most half of them may be at intakes, so
that intakes cannot shut out producers that get replies. More are turned away. On the ack port a client asks in one line
and gets one line, from durability's cursor in the stats page:

    GET_ACK <seq> [token=<token>]     ACK (durable), PENDING, or ERR and why; a token is needed if KMQ_TOKENS is set

Memory      The ack port has at most `most` connections, each with an unfinished question of at most MAX_QUESTION bytes.
            Replies are never kept: a connection whose kernel takes no more replies is closed.
Deadline    On the ack port KMQ_LINE_DEADLINE, from the connection or its last answer to the next complete question.
Full        On the ack port a new connection evicts the one that has been without an answer longest, so silent
            connections shut no client out.
"""

import contextlib
import select
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from kmq import files
from kmq.broker.ports import cannot_listen
from kmq.broker.stage import Stage
from kmq.broker.stats import Strangers
from kmq.errors import Stopped
from kmq.files import replace_file, with_room
from kmq.ingress.connection import Connection, ConnectionTable, Farewells, reset_on_close
from kmq.wire import foreign

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from ssl import SSLContext

    from kmq.access.tokens import Tokens
    from kmq.broker.tls import Certificates
    from kmq.config.intakes import IntakePort
    from kmq.ingress.intakes import RawPort


_BACKLOG = 1024
_DATAGRAM_BYTES = 8 << 20  # datagrams that the kernel may keep for us
_NO_DESCRIPTOR_S = 0.05  # how long to wait before the next attempt to accept


class Listener:
    """One port."""

    def __init__(
        self,
        sock: socket.socket,
        failed: Callable[[OSError], None],
        context: "SSLContext | None",
        raw: "RawPort | None" = None,
    ) -> None:
        """`raw`: the intake whose port it is."""
        self.sock, self.raw = sock, raw
        self.is_tls = context is not None
        self._failed, self._context = failed, context

    @property
    def port(self) -> int:
        number: int = self.sock.getsockname()[1]
        return number

    def accept(self) -> Iterator[tuple[socket.socket, str]]:
        """Yield each waiting connection and its peer. Keep or close it before the next one costs a descriptor."""
        for _ in range(_BACKLOG):
            try:
                sock, address = self.sock.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the peer has left meanwhile
            except OSError as err:  # no descriptor is free: the open connections continue
                self._failed(err)
                return
            sock.setblocking(False)
            yield sock, f"{address[0]}:{address[1]}"

    def connect(self, sock: socket.socket, peer: str) -> Connection | None:
        """Return the producer's connection over `sock`; None if the peer has left already."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is None:
            return Connection(sock, peer, None, self.raw)
        from kmq.broker import tls

        secure = tls.accept(self._context, sock)
        return Connection(secure, peer, secure, self.raw) if secure is not None else None


class Ports:
    """All ports, open from the start until the drain."""

    def __init__(self, stage: Stage, strangers: Strangers) -> None:
        self._stage, self._strangers = stage, strangers
        settings = stage.settings
        self.certificates: Certificates | None = None
        self.lines = self._open("ingress", "KMQ_PORT", settings.host, settings.port)
        self.questions = self._open("ack", "KMQ_ACK_PORT", settings.host, settings.ack_port)
        self.of_producers = [self.lines]
        context = None
        if settings.tls_cert or settings.tls_key or settings.tls_client_ca:
            context = self._tls_context()
            self.of_producers.append(self._open("tls", "KMQ_TLS_PORT", settings.tls_host, settings.tls_port, context))
            stage.log.info("tls_ready", port=self.of_producers[-1].port)
        self.raw = [self._open_intake(at, spec, context) for at, spec in enumerate(settings.intakes, 1)]

    def _tls_context(self) -> "SSLContext":
        from kmq.broker import tls  # only if TLS is used: ssl costs a stage memory and start-up time

        self.certificates = tls.certificates(self._stage.settings, self._stage.log, self._stage.row)
        assert self.certificates is not None
        return self.certificates.context()

    def _open(self, name: str, setting: str, host: str, port: int, context: "SSLContext | None" = None) -> Listener:
        listener = Listener(_listening(setting, host, port), self._accept_failed, context)
        self._write_port(name, listener.port)
        return listener

    def _open_intake(self, at: int, spec: "IntakePort", context: "SSLContext | None") -> "RawPort":
        """Open the intake at this place of KMQ_INTAKES; its port is written to KMQ_PIPES/intake<at>.port."""
        from kmq.config.intakes import TLS, UDP
        from kmq.ingress.intakes import RawPort

        settings = self._stage.settings
        is_tls, is_udp = spec.kind == TLS, spec.kind == UDP
        host = settings.tls_host if is_tls else settings.host
        sock = _listening(f"KMQ_INTAKES: {spec}", host, spec.number, is_udp)
        raw = RawPort(spec, settings.max_line, sock)
        if not is_udp:
            self.of_producers.append(Listener(sock, self._accept_failed, context if is_tls else None, raw))
        self._write_port(f"intake{at}", raw.port)
        self._stage.log.info("intake_ready", port=raw.port, kind=spec.kind, topic=spec.topic)
        return raw

    def _write_port(self, name: str, port: int) -> None:
        """Write the port to KMQ_PIPES/<name>.port, where clients look for it."""
        path, text = f"{self._stage.settings.pipes}/{name}.port", b"%d\n" % port

        def wait_for_room(path: str) -> None:
            if self._stage.stopping:
                raise Stopped("stopped before there was room to begin")
            self._stage.wait_for_room(path)

        with_room(path, wait_for_room, lambda: replace_file(path, text))

    def _accept_failed(self, err: OSError) -> None:
        self._strangers.note("accept_failed", "", err.strerror or str(err))
        self._stage.pause(_NO_DESCRIPTOR_S)


def _listening(setting: str, host: str, port: int, is_udp: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_DGRAM if is_udp else socket.SOCK_STREAM)
    if is_udp:  # SO_REUSEADDR would let two programs share the port; the kernel gives at most net.core.rmem_max
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _DATAGRAM_BYTES)
    else:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except OSError as err:
        server.close()
        raise cannot_listen(setting, host, port, err) from err
    if not is_udp:
        server.listen(_BACKLOG)
    server.setblocking(False)
    return server


# --- ack port --------------------------------------------------------------------------------------------------------

MAX_QUESTION = 256  # bytes of a line: a token is at most 108
_RECEIVE_BYTES = 4096
_MAX_DIGITS = 20  # more than any seq has
_UNAUTHORIZED = b"ERR unauthorized: say GET_ACK <seq> token=<token>, with one that `kmq token new` has made\n"
_USAGE = b"ERR expected: GET_ACK <seq>\n"


def most_askers(descriptors: int) -> int:
    """Return how many connections the ack port may have if the process may have this many descriptors."""
    return min(256, max(8, descriptors // 16))


def answer(question: bytes, durable_seq: int, is_token: Callable[[bytes], object] | None = None) -> bytes:
    """Return the reply to one line. `is_token` checks a token; None: no token is required."""
    verb, _, rest = question.strip().partition(b" ")
    number, _, shown = rest.partition(b" ")
    name, _, token = shown.strip().partition(b"=")
    if verb != b"GET_ACK" or not number.isdigit() or (shown and name != b"token"):
        return _USAGE
    if is_token is not None and not is_token(token):
        return _UNAUTHORIZED
    return b"ACK\n" if len(number) <= _MAX_DIGITS and 0 < int(number) <= durable_seq else b"PENDING\n"


class Askers:
    """The connections of the ack port."""

    def __init__(self, stage: Stage, poll: select.epoll, tokens: "Tokens | None", strangers: Strangers) -> None:
        """`poll`: where the connections are registered; the code that waits for it calls `serve`."""
        self.most = most_askers(stage.most_files)
        self._poll, self._deadline_s = poll, stage.settings.line_deadline
        self._is_token = tokens.check if tokens is not None else None
        self._row, self._durability, self._strangers = stage.row, stage.page.rows["durability"], strangers
        self._http_port, self._farewells = stage.settings.http_port, Farewells()
        self._unfinished: dict[int, bytes] = {}
        # Socket, peer, and since when it is without an answer; the longest first.
        self._waiting: OrderedDict[int, tuple[socket.socket, str, float]] = OrderedDict()

    def __contains__(self, fd: int) -> bool:
        return fd in self._waiting

    def accept(self, sock: socket.socket, peer: str) -> None:
        """Serve a new connection. If there are too many, evict another one."""
        if len(self._waiting) >= self.most:
            oldest, (_, evicted, _) = next(iter(self._waiting.items()))
            self._row.turned_away += 1
            self._strangers.note("asker_evicted", evicted, f"{self.most} are open on the ack port")
            self._close(oldest)
        fd = sock.fileno()
        self._waiting[fd], self._unfinished[fd] = (sock, peer, time.monotonic()), b""
        self._poll.register(fd, select.EPOLLIN)
        self._row.askers = len(self._waiting)

    def serve(self, fd: int) -> None:
        """Answer what has arrived on this connection."""
        sock, peer, _ = self._waiting[fd]
        with contextlib.suppress(OSError):  # it has left, or reads no replies: no reply may follow half a reply
            data = sock.recv(_RECEIVE_BYTES)
            *questions, rest = (self._unfinished[fd] + data).split(b"\n")
            if protocol := foreign.spoken(questions[0] if questions else rest, bool(questions)):
                self._strangers.cut_off(peer, foreign.reason(protocol, self._http_port))
                self._forget(fd)
                self._farewells.refuse(sock, foreign.reply(protocol, self._http_port))
                return
            self._unfinished[fd] = rest
            replies = [self._answer(question, peer) for question in questions]
            if replies:
                sock.sendall(b"".join(replies))
            if any(not reply.startswith(b"ERR") for reply in replies):
                self._waiting[fd] = (sock, peer, time.monotonic())
                self._waiting.move_to_end(fd)
            if data and len(rest) <= MAX_QUESTION:
                return
        self._close(fd)

    def _answer(self, question: bytes, peer: str) -> bytes:
        reply = answer(question, self._durability.seq, self._is_token)
        if reply is _UNAUTHORIZED:
            self._strangers.refuse(peer, "GET_ACK without a valid token")
        return reply

    def sweep(self) -> None:
        """Close the connections that have missed their deadline. Call about once a second."""
        latest = time.monotonic() - self._deadline_s
        for fd, (_, peer, since) in list(self._waiting.items()):
            if since > latest:
                break
            self._strangers.cut_off(peer, "no question on the ack port")
            self._close(fd)
        self._farewells.sweep()

    def _close(self, fd: int) -> None:
        self._forget(fd).close()

    def _forget(self, fd: int) -> socket.socket:
        sock, _, _ = self._waiting.pop(fd)
        del self._unfinished[fd]
        self._poll.unregister(fd)
        self._row.askers = len(self._waiting)
        return sock


# --- entrance --------------------------------------------------------------------------------------------------------

OWN_DESCRIPTORS = files.OWN + 8  # for our own files, and to refuse connections with


class Entrance:
    """The listeners for producers. New connections are entered in the table and in the epoll."""

    def __init__(self, stage: Stage, poll: select.epoll, table: ConnectionTable, strangers: Strangers) -> None:
        free = stage.most_files - OWN_DESCRIPTORS - most_askers(stage.most_files)
        self.max_connections = min(stage.settings.connections, max(1, free))
        self._networks = stage.settings.intakes_from
        self._poll, self._table, self._row, self._strangers = poll, table, stage.row, strangers
        self._farewells = Farewells()
        self._listeners: dict[int, Listener] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._listeners

    def open(self, listener: Listener) -> None:
        """Accept connections of this listener from now on."""
        fd = listener.sock.fileno()
        self._listeners[fd] = listener
        self._poll.register(fd, select.EPOLLIN)

    def close(self) -> None:
        """Accept the connections that wait already, perhaps since the way to the framer was full, and then no more."""
        for fd, listener in self._listeners.items():
            self.accept(fd)
            self._poll.unregister(fd)
            listener.sock.close()
        self._listeners.clear()

    def accept(self, fd: int) -> None:
        """Accept everything that waits at the listener with this descriptor."""
        listener = self._listeners[fd]
        raw, networks = listener.raw, self._networks
        for sock, peer in listener.accept():
            reset_on_close(sock)
            if raw is not None and networks and not self._is_welcome(raw, peer):
                sock.close()
                continue
            if full := self._is_full(raw):
                self._turn_away(sock, peer, full, listener.is_tls or raw is not None)
                continue
            connection = listener.connect(sock, peer)
            if connection is not None:
                if raw is not None:
                    raw.connections += 1
                self._table.add(connection)
                self._poll.register(connection.sock.fileno(), select.EPOLLIN)

    def _is_welcome(self, raw: "RawPort", peer: str) -> bool:
        """Return True if KMQ_INTAKES_FROM has the peer's address; else count it as refused."""
        from kmq.ingress.intakes import is_allowed

        if is_allowed(raw, self._networks, peer.rpartition(":")[0]):
            return True
        raw.refused += 1
        self._strangers.note("intake_refused", peer, f"{raw.spec}: KMQ_INTAKES_FROM does not have the address")
        return False

    def _is_full(self, raw: "RawPort | None") -> str:
        """Return why this port is full; "" if it is not. Intakes leave half of all to producers with replies."""
        if len(self._table) >= self.max_connections:
            return f"{self.max_connections} are open already (KMQ_CONNECTIONS, ulimit -n)"
        most = max(1, self.max_connections // 2)
        if raw is None or sum(each.raw.connections for each in self._listeners.values() if each.raw) < most:
            return ""
        return f"{most} are open at the intakes already (half of KMQ_CONNECTIONS, ulimit -n)"

    def _turn_away(self, sock: socket.socket, peer: str, reason: str, is_silent: bool) -> None:
        """`is_silent`: no reply. Over TLS it would cost the handshake that the limit is there to avoid."""
        self._row.turned_away += 1
        self._row.errs_limit += not is_silent
        self._strangers.note("connection_refused", peer, reason)
        if is_silent:
            sock.close()
        else:
            self._farewells.refuse(sock, f"!err 0 connections {reason}\n".encode())

    def dismiss(self, sock: socket.socket) -> None:
        """Close a connection in a moment. Closed at once, bytes that it still sends would discard our reply."""
        self._farewells.refuse(sock, b"")

    def sweep(self) -> None:
        """Close connections that were turned away. Call about once a second."""
        self._farewells.sweep()
