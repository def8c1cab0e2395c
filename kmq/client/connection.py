"""What every client needs for a connection: the broker's address, and the socket."""

import contextlib
import itertools
import logging
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kmq.client.lines import no_connection, read_port
from kmq.client.producer_core import ProducerCore
from kmq.config.settings import Settings, load
from kmq.config.values import KIB
from kmq.errors import ConfigError, KmqError, RetryError, quotation
from kmq.sending.failures import Refused

CONNECT_S = 5.0  # to connect and be greeted
# host, host:port, [IPv6], [IPv6]:port, or an IPv6 address alone.
_HOST = re.compile(
    r"(?:\[(?P<ip6>[^\s\[\]]+)\]|(?P<name>[^\s\[\]:]+))(?::(?P<port>\d{1,5}))?|(?P<only>[^\s\[\]:]*(?::[^\s\[\]:]*){2,})"
)
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ServerAddress(NamedTuple):
    """The address of the next connection. `among`: for errors, all addresses of a client that has several.

    `epoch`: the broker must be the leader of its shard in this epoch (kmq/ingress/hello.py).
    """

    host: str
    port: int
    token: str = ""
    among: str = ""
    epoch: int | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" + (f" (one of {self.among})" if self.among else "")


Address = Callable[[], ServerAddress]  # called before each connection


def address_of(host: str, port: int | Callable[[], int]) -> Address:
    """Return the address of a broker, or of a shard that `host` names as `a:5673,b:5673`: each call returns the next.

    `port` is the one of a host without a port; a function is called before each connection. Raises ConfigError.
    """
    found = list(read_hosts(host))
    among = host if len(found) > 1 else ""
    turns = itertools.cycle(found)

    def turn() -> ServerAddress:
        name, own = next(turns)
        return ServerAddress(name, own or (port() if callable(port) else port), "", among)

    return turn


def read_hosts(text: str) -> Iterator[tuple[str, int | None]]:
    """Yield (host, port) of each entry of a comma-separated list; port None if the entry has no port. Raises
    ConfigError.
    """
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        port = match["port"] if match is not None else None
        if match is None or "@" in text or (port is not None and not 0 < int(port) < 1 << 16):
            raise ConfigError(
                f"host={quotation(text, part.strip())} must be a host, or host:port with a port of 1 to 65535"
            )
        yield match["ip6"] or match["only"] or match["name"], int(port) if port else None


def local_address() -> ServerAddress:
    """Return where the broker of this directory's settings listens, and the token for programs of its pod.

    Call it for each connection: after a restart the port may be another one.
    """
    settings = load()
    return ServerAddress(settings.host, read_port(settings, "ingress", settings.port), _local_token(settings))


def local_consumer_address() -> ServerAddress:
    """Return the same for the port for consumers."""
    settings = load()
    return ServerAddress(settings.host, read_port(settings, "egress", settings.egress_port), _local_token(settings))


def _local_token(settings: Settings) -> str:
    if not settings.tokens:
        return ""
    from kmq.access import tokens

    return tokens.local(settings)


def keep_alive(sock: socket.socket) -> None:
    """Set a socket to send small writes at once, and to notice a host that is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def logger() -> logging.Logger:
    return logging.getLogger("kmq.producer")


def open_socket(
    host: str, port: int, tls: ssl.SSLContext | None, server_hostname: str | None, timeout_s: float = CONNECT_S
) -> socket.socket:
    """Connect, with TLS if there is a context. Raises OSError."""
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.create_connection((host, port), timeout=timeout_s))
        keep_alive(sock)
        if tls is not None:
            sock = undo.enter_context(tls.wrap_socket(sock, server_hostname=server_hostname or host))
        undo.pop_all()
    return sock


class Greeted(NamedTuple):
    """A new connection, and the broker's reply to hello."""

    sock: socket.socket
    greeting: bytes


def dial(address: Address, core: ProducerCore) -> Greeted:
    """Connect and say hello. Raises RetryError with the reason why there is no connection."""
    options = core.options
    where = "the broker"
    with contextlib.ExitStack() as undo:
        try:
            server = address()
            where, core.has_others = str(server), bool(server.among)
            sock = undo.enter_context(open_socket(server.host, server.port, options.tls, options.server_hostname))
            sock.sendall(core.hello(server.token, server.epoch))
            greeting = b""
            while not core.is_greeting(greeting):
                data = sock.recv(4 * KIB)
                if not data:
                    raise ConnectionResetError("closed without a word")
                greeting += data
        except (OSError, KmqError) as err:
            raise RetryError(no_connection(where, err)) from err
        undo.pop_all()
    return Greeted(sock, greeting)


class Channel:
    """The socket between a blocking client and the broker, while there is one. Callers hold the client's lock.

    `poll` waits without the lock. Everything else returns at once, except `linger`.
    """

    def __init__(
        self, receive: Callable[[bytes], None], take: Callable[[float], bytes], read_bytes: int = 16 * KIB
    ) -> None:
        """`receive` processes bytes, or raises Refused. `take` returns what to write now, given the time.

        Replies to a producer are short, and a buffer that malloc has to map for each read costs 20 µs. So `read_bytes`
        is small unless batches are read.
        """
        self._receive, self._take, self._read_bytes = receive, take, read_bytes
        self.attempts = 0  # to connect, since the broker last replied
        self._sock: socket.socket | None = None
        self._epoll = select.epoll()
        self._out = memoryview(b"")  # taken from the core, not yet accepted by the kernel
        self._wants_room = False

    @property
    def is_open(self) -> bool:
        return self._sock is not None

    def open(self, sock: socket.socket) -> None:
        """Use this connection from now on."""
        sock.setblocking(False)
        self._sock = sock
        self._epoll.register(sock, select.EPOLLIN)

    def poll(self, timeout_s: float) -> bool:
        """Return True once the socket has bytes to read or room to write, False after that time."""
        return bool(self._epoll.poll(timeout_s))

    def read(self) -> str:
        """Process all replies received. Returns why the connection must be replaced, "" if it is fine."""
        sock, most = self._sock, self._read_bytes
        assert sock is not None
        try:
            while True:
                data = sock.recv(most)
                if not data:
                    raise ConnectionResetError("the broker closed the connection")
                self._receive(data)
                self.attempts = 0
                if len(data) < most and not isinstance(sock, ssl.SSLSocket):
                    return ""
        except _WOULD_BLOCK:
            return ""
        except (OSError, Refused) as err:
            return str(err)

    def write(self) -> str:
        """Write what should be sent now, as far as the kernel accepts it. Returns the same as `read`."""
        sock = self._sock
        if sock is None:
            return ""
        try:
            while self._out or (taken := self._take(time.monotonic())):
                if not self._out:
                    self._out = memoryview(taken)
                self._out = self._out[sock.send(self._out) :]
        except _WOULD_BLOCK:
            pass
        except OSError as err:
            return str(err)
        if bool(self._out) != self._wants_room:
            self._wants_room = not self._wants_room
            self._epoll.modify(sock, select.EPOLLIN | (select.EPOLLOUT if self._wants_room else 0))
        return ""

    @property
    def has_output(self) -> bool:
        """Return True if the kernel has not accepted all that was taken."""
        return bool(self._out)

    def drop(self) -> None:
        """Close the connection."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(self._sock)
            self._sock.close()
            self._sock = None
        self._out, self._wants_room = memoryview(b""), False

    def linger(self, timeout_s: float) -> None:
        """Wait until the broker has taken what was written: a connection cut off at once might lose it."""
        sock = self._sock
        if sock is None:
            return
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(timeout_s)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and sock.recv(self._read_bytes):
                pass

    def close(self) -> None:
        """Release all resources. No thread may poll any more."""
        self._epoll.close()
