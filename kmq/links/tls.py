"""TLS for the listeners: a context that follows its certificate files, and a socket that an event loop can use like a plain one.

Reload      Certificates, key and client CA are read again when one of the files has changed, looked at on a handshake, at most
            once a second. New connections get the new ones, those that are open keep theirs. Files that do not fit together
            (one is written, the other is about to be) leave the old ones in force, and the log says so.
Truncation  An orderly end is a close_notify. A broker that is killed sends none, and a reset besides (ingress.py).
Not covered Revocation lists.
"""

import contextlib
import ssl
from typing import Any

from kmq.errors import ConfigError
from kmq.logfmt import Log
from kmq.settings import Settings
from kmq.watch import Watch

RECORD_BYTES = 1 << 14  # the most that one TLS record carries


class TlsSocket(ssl.SSLSocket):
    """The server's end of a connection. Non-blocking: where TLS waits for the network it raises BlockingIOError.

    Nothing that has arrived stays inside: epoll sees only what is in the kernel, so a record is always taken whole, and what
    the last read found at the end of the data is kept in `over`. The first read does the handshake.
    """

    over = False  # the peer's orderly end, or an error, came right behind the data
    wants_write = False  # TLS itself has something to send first
    failure = ""  # why TLS gave up

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Fill `buffer`, at least RECORD_BYTES long, with what has arrived."""
        count = 0
        self.wants_write = False
        with memoryview(buffer) as view:
            try:
                while len(view) - count >= RECORD_BYTES:
                    got = self.read(len(view) - count, view[count:])
                    if not got:
                        self.over = True
                        break
                    count += got  # type: ignore[operator]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:
                self.wants_write = isinstance(want, ssl.SSLWantWriteError)
                if not count:
                    raise BlockingIOError from None
            except OSError as err:
                self.over = True
                self.failure = getattr(err, "reason", None) or str(err)
                if not count:
                    raise
        return count

    def send(self, data: Any, flags: int = 0) -> int:
        """As of a plain socket. After BlockingIOError the same bytes must come again, more may follow them."""
        try:
            return super().send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    @property
    def is_shaking(self) -> bool:
        """Whether the handshake is not over."""
        return self.version() is None

    def say_end(self) -> None:
        """close_notify: the peer knows that nothing was cut off. Waits for nothing."""
        with contextlib.suppress(OSError, ValueError):
            self.unwrap()


class Certificates:
    """The files, and the context made of them last."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.settings, self.log = settings, log
        files = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self.watch = Watch(*filter(None, files))
        self.latest = make_context(settings)

    def renewed(self) -> bool:
        """Whether there are new ones, which are good. Call before a handshake."""
        if not self.watch.changed():
            return False
        try:
            self.latest = make_context(self.settings)
        except ConfigError as err:
            self.log.warn("certificates_kept", reason=err, effect="the old ones stay in force")
            return False
        self.log.info("certificates_reloaded", file=self.settings.tls_cert)
        return True

    def choose(self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        """Called by each handshake, also where the client names no server."""
        self.renewed()
        if context is not self.latest:
            connection.context = self.latest


def make_context(settings: Settings) -> ssl.SSLContext:
    """A server's context from the files as they are now. Raises ConfigError naming the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    # TLS 1.3 sends tickets after the handshake. A producer that never reads would leave them in its kernel, which then ends
    # the connection with a reset instead of an orderly end, and throws away what it has not sent yet.
    context.num_tickets = 0
    context.sslsocket_class = TlsSocket
    cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except OSError as err:
        raise ConfigError(f"KMQ_TLS_CERT={cert!r}, KMQ_TLS_KEY={key!r}: {_reason(err)}") from err
    if client_ca:
        try:
            context.load_verify_locations(client_ca)
        except OSError as err:
            raise ConfigError(f"KMQ_TLS_CLIENT_CA={client_ca!r}: {_reason(err)}") from err
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    """Without this OpenSSL would ask the terminal, and a broker would wait there for ever."""
    raise ConfigError("KMQ_TLS_KEY must not be encrypted: nobody is there to type the password")


def _reason(err: OSError) -> str:
    return getattr(err, "reason", None) or err.strerror or str(err)


def certificates(settings: Settings, log: Log) -> Certificates | None:
    """What the settings name; None where TLS is off. Raises ConfigError."""
    if not (settings.tls_cert or settings.tls_key or settings.tls_client_ca):
        return None
    if not (settings.tls_cert and settings.tls_key):
        raise ConfigError("KMQ_TLS_CERT and KMQ_TLS_KEY belong together: set both, or none and no KMQ_TLS_CLIENT_CA")
    return Certificates(settings, log)


def server_context(settings: Settings, log: Log) -> ssl.SSLContext | None:
    """The context of a TLS listener, which follows its files; None where TLS is off. Raises ConfigError."""
    found = certificates(settings, log)
    if found is None:
        return None
    context = found.latest
    context.sni_callback = found.choose
    return context


def accept(context: ssl.SSLContext, sock: Any) -> TlsSocket | None:
    """TLS over a connection that has just come in; None where it is gone already. The handshake is still to be done."""
    try:
        sock.getpeername()
        wrapped = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    except OSError:
        sock.close()
        return None
    assert isinstance(wrapped, TlsSocket)
    if wrapped._connected:  # type: ignore[attr-defined]
        return wrapped
    wrapped.close()
    return None
