"""TLS for the listeners: a context that follows its certificate files, and a socket that an event loop can use like a plain one.

Reload      Certificates, key and client CA are read again when one of the files has changed, looked at on a handshake and by
            look(), at most once a second. New connections get the new ones, those that are open keep theirs. Files that do
            not fit together (one is written, the other is about to be) leave the old ones in force, and the log says so.
Expiry      How long what is in force is valid stands in the stats page, and the log warns from two weeks before the end on.
Truncation  An orderly end is a close_notify. A broker that is killed sends none, and a reset besides (ingress.py).
Not covered Revocation lists.
"""

import contextlib
import ssl
import time
from typing import Any

from kmq import certificate
from kmq.broker.readiness import certificate_reason, presented
from kmq.broker.stats import Row
from kmq.certificate import Validity
from kmq.errors import ConfigError
from kmq.logfmt import Log
from kmq.settings import Settings
from kmq.watch import Watch

_WARN_AGAIN_S = 86_400.0
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

    def __init__(self, settings: Settings, log: Log, row: Row) -> None:
        """`row`: of the stats page, where the process says how long they are valid."""
        self.settings, self.log, self.row = settings, log, row
        files = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self.watch = Watch(*filter(None, files))
        self._take(make_context(settings))

    def context(self) -> ssl.SSLContext:
        """The context of a listener, which follows the files."""
        context = self.latest
        context.sni_callback = self._choose
        return context

    def renew(self) -> None:
        """Take up files that have changed and are good. Called before each handshake."""
        if not self.watch.changed():
            return
        try:
            context = make_context(self.settings)
        except ConfigError as err:
            self.log.warn("certificates_kept", reason=err, effect="the old ones stay in force")
            return
        self.log.info("certificates_reloaded", file=self.settings.tls_cert)
        self._take(context)

    def look(self) -> None:
        """Call every second or so: also where nobody connects, new files are taken up, and old ones are warned of."""
        self.renew()
        self._publish()

    def _take(self, context: ssl.SSLContext) -> None:
        """From now on this is in force, and the files are those that it was made of."""
        self.latest = context
        self._chain: list[Validity] = []
        self._authorities: list[Validity] = []
        self._warned: dict[str, tuple[str, float]] = {}  # setting → code, and when it was said
        try:
            self._chain = certificate.read(self.settings.tls_cert)
            if self.settings.tls_client_ca:
                self._authorities = certificate.read(self.settings.tls_client_ca)
        except (OSError, ValueError) as err:  # OpenSSL has taken them: they serve
            self.log.warn("certificates_not_understood", reason=err, effect="nobody is warned before they expire")
        self._publish()

    def _publish(self) -> None:
        """Say in the stats page how long they are valid; in the log once a day, and when it becomes worse."""
        row, now, nothing = self.row, time.time(), Validity(0, 0)
        chain = certificate.of_chain(self._chain) if self._chain else nothing
        authorities = certificate.of_authorities(self._authorities, now) if self._authorities else nothing
        row.certificate_from, row.certificate_until = max(0, chain.not_before), max(0, chain.not_after)
        row.client_ca_until = max(0, authorities.not_after)
        for used in presented(self.log.stage, row, self.settings):
            code = used.validity.warning(now)
            said, said_at = self._warned.get(used.setting, ("", 0.0))
            if code and (code != said or time.monotonic() - said_at > _WARN_AGAIN_S):
                self._warned[used.setting] = code, time.monotonic()
                reason = certificate_reason(code, used, now)
                self.log.warn(code, file=used.path, effect=reason.why, advice=reason.advice)

    def _choose(self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        """Called by each handshake, also where the client names no server."""
        self.renew()
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


def certificates(settings: Settings, log: Log, row: Row) -> Certificates | None:
    """What the settings name; None where TLS is off. Raises ConfigError."""
    if not (settings.tls_cert or settings.tls_key or settings.tls_client_ca):
        return None
    if not (settings.tls_cert and settings.tls_key):
        raise ConfigError("KMQ_TLS_CERT and KMQ_TLS_KEY belong together: set both, or none and no KMQ_TLS_CLIENT_CA")
    return Certificates(settings, log, row)


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
