"""The ports of ingress: lines (KMQ_PORT), lines over TLS (KMQ_TLS_PORT) and questions (KMQ_ACK_PORT)."""

import socket
from collections.abc import Callable, Iterator

from kmq.broker.incidents import Strangers
from kmq.broker.ports import cannot_listen
from kmq.broker.stage import Stage
from kmq.errors import Stopped
from kmq.files import replace_file, with_room
from kmq.ingress.connection import Connection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ssl import SSLContext

    from kmq.broker.tls import Certificates

_BACKLOG = 1024
_NO_DESCRIPTOR_S = 0.05  # how long to wait before the next attempt to accept


class Listener:
    """One port."""

    def __init__(self, sock: socket.socket, failed: Callable[[OSError], None], context: "SSLContext | None") -> None:
        self.sock = sock
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
                continue  # gone again before we looked
            except OSError as err:  # out of descriptors: the open connections go on
                self._failed(err)
                return
            sock.setblocking(False)
            yield sock, f"{address[0]}:{address[1]}"

    def connect(self, sock: socket.socket, peer: str) -> Connection | None:
        """Return the producer's connection over `sock`; None if it is gone already."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is None:
            return Connection(sock, peer)
        from kmq.broker import tls

        secure = tls.accept(self._context, sock)
        return Connection(secure, peer, secure) if secure is not None else None


class Ports:
    """All ports, open from the start until the drain."""

    def __init__(self, stage: Stage, strangers: Strangers) -> None:
        self._stage, self._strangers = stage, strangers
        settings = stage.settings
        self.certificates: Certificates | None = None
        self.lines = self._open("ingress", "KMQ_PORT", settings.host, settings.port)
        self.questions = self._open("ack", "KMQ_ACK_PORT", settings.host, settings.ack_port)
        self.of_producers = [self.lines]
        if settings.tls_cert or settings.tls_key or settings.tls_client_ca:
            self.of_producers.append(self._open_tls())

    def _open_tls(self) -> Listener:
        from kmq.broker import tls  # only if it is used: ssl costs a stage memory and start-up time

        settings = self._stage.settings
        self.certificates = tls.certificates(settings, self._stage.log, self._stage.row)
        assert self.certificates is not None
        context = self.certificates.context()
        listener = self._open("tls", "KMQ_TLS_PORT", settings.tls_host, settings.tls_port, context)
        self._stage.log.info("tls_ready", port=listener.port)
        return listener

    def _open(self, name: str, setting: str, host: str, port: int, context: "SSLContext | None" = None) -> Listener:
        listener = Listener(_listening(setting, host, port), self._accept_failed, context)
        self._publish(name, listener.port)
        return listener

    def _publish(self, name: str, port: int) -> None:
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


def _listening(setting: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except OSError as err:
        raise cannot_listen(setting, host, port, err) from err
    server.listen(_BACKLOG)
    server.setblocking(False)
    return server
