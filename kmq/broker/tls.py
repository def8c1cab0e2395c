"""TLS for the listeners: a context that follows its certificate files, and a socket for an event loop.

Reload      Certificates, key and client CA are read again when one of the files has changed. Handshakes and look()
            check that, at most once a second. New connections use the new files; open connections keep the old ones. If
            the files do not fit together (only one is replaced yet), the old ones stay in force, and the log says so.
Expiry      The stats page shows how long the files in force are valid. The log warns from two weeks before the end.
Truncation  An orderly end is a close_notify. A killed broker sends a reset instead (kmq/ingress/connection.py).
Not covered Revocation lists.
"""

import contextlib
import ssl
import time
from typing import Any

from kmq.access import certificate
from kmq.access.certificate import Validity
from kmq.broker.health import certificate_reason, presented
from kmq.broker.stats import Row
from kmq.config.settings import Settings
from kmq.errors import ConfigError
from kmq.files import Watch
from kmq.logfmt import Logger

_WARN_AGAIN_S = 86_400.0
RECORD_BYTES = 1 << 14  # a TLS record carries at most this much


class TlsSocket(ssl.SSLSocket):
    """The server's end of a connection. Non-blocking: when TLS waits for the network it raises BlockingIOError.

    A TLS record is always read whole, because epoll sees only bytes in the kernel, not bytes that stay in OpenSSL.
    `over`: the read found the end of the stream after the data. The first read does the handshake.
    """

    over = False  # the peer's orderly end, or an error, came directly after the data
    wants_write = False  # TLS itself has something to send first
    failure = ""  # why TLS failed

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Fill `buffer`, which has at least RECORD_BYTES, with what has arrived."""
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
        """Send as a plain socket does. After BlockingIOError send the same bytes again; more bytes may follow them."""
        try:
            return super().send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    @property
    def is_shaking(self) -> bool:
        """Return True until the handshake is over."""
        return self.version() is None

    def say_end(self) -> None:
        """Send close_notify: the peer then knows that nothing was cut off. Does not wait for its reply."""
        with contextlib.suppress(OSError, ValueError):
            self.unwrap()


class Certificates:
    """The certificate files, and the context that was last made of them."""

    def __init__(self, settings: Settings, log: Logger, row: Row) -> None:
        """`row`: where the process publishes in the stats page how long the files are valid."""
        self.settings, self.log, self.row = settings, log, row
        files = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self.watch = Watch(*filter(None, files))
        self._adopt(make_context(settings))

    def context(self) -> ssl.SSLContext:
        """Return the context for a listener; it follows the files."""
        context = self.latest
        context.sni_callback = self._choose
        return context

    def renew(self) -> None:
        """Adopt files that have changed and are usable. Called before each handshake."""
        if not self.watch.changed():
            return
        try:
            context = make_context(self.settings)
        except ConfigError as err:
            self.log.warn("certificates_kept", reason=err, effect="the old ones stay in force")
            return
        self.log.info("certificates_reloaded", file=self.settings.tls_cert)
        self._adopt(context)

    def look(self) -> None:
        """Adopt new files and warn of expiring ones, also without connections. Call about once a second."""
        self.renew()
        self._publish()

    def _adopt(self, context: ssl.SSLContext) -> None:
        """Put a context in force, and read the dates of the files that it was made of."""
        self.latest = context
        self._chain: list[Validity] = []
        self._authorities: list[Validity] = []
        self._warned: dict[str, tuple[str, float]] = {}  # setting → code of the last warning, and when it was given
        try:
            self._chain = certificate.read(self.settings.tls_cert)
            if self.settings.tls_client_ca:
                self._authorities = certificate.read(self.settings.tls_client_ca)
        except (OSError, ValueError) as err:  # OpenSSL accepts them, so they stay in force
            self.log.warn("certificates_not_understood", reason=err, effect="no warning before they expire")
        self._publish()

    def _publish(self) -> None:
        """Publish in the stats page how long the files are valid. Log a warning once a day, and when it gets worse."""
        row, now, nothing = self.row, time.time(), Validity(0, 0)
        chain = certificate.of_chain(self._chain) if self._chain else nothing
        authorities = certificate.of_authorities(self._authorities, now) if self._authorities else nothing
        row.certificate_from, row.certificate_until = max(0, chain.not_before), max(0, chain.not_after)
        row.client_ca_until = max(0, authorities.not_after)
        for used in presented(self.log.stage, row, self.settings):
            code = used.validity.warning(now)
            last, warned_at = self._warned.get(used.setting, ("", 0.0))
            if code and (code != last or time.monotonic() - warned_at > _WARN_AGAIN_S):
                self._warned[used.setting] = code, time.monotonic()
                reason = certificate_reason(code, used, now)
                self.log.warn(code, file=used.path, effect=reason.why, advice=reason.advice)

    def _choose(self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        """Use the latest context. OpenSSL calls this in each handshake, also if the client names no server."""
        self.renew()
        if context is not self.latest:
            connection.context = self.latest


def make_context(settings: Settings) -> ssl.SSLContext:
    """Return a server's context from the files as they are now. Raises ConfigError, which names the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    # TLS 1.3 sends tickets after the handshake. A producer that never reads leaves them in its kernel, which then ends
    # the connection with a reset instead of in order, and discards what it has not sent yet.
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


def client_context(settings: Settings) -> ssl.SSLContext:
    """Return the context of this broker as a client of another broker of its shard, from the files as they are now.

    It shows KMQ_TLS_CERT. It trusts KMQ_TLS_CLIENT_CA; without it the certificates in KMQ_TLS_CERT, which may be the one
    that all brokers share, and the authorities of the system. The other broker's certificate must have the name by
    which it is called. Raises ConfigError, which names the file.
    """
    make_context(settings)  # raises an error that names the wrong file
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(settings.tls_cert, settings.tls_key, password=_no_password)
    context.load_verify_locations(settings.tls_client_ca or settings.tls_cert)
    if not settings.tls_client_ca:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_default_certs()
    return context


def _no_password() -> str:
    """Raise ConfigError. Without this function OpenSSL would ask the terminal, and a broker would wait for ever."""
    raise ConfigError("KMQ_TLS_KEY must not be encrypted: a broker has no terminal to ask for the password")


def _reason(err: OSError) -> str:
    return getattr(err, "reason", None) or err.strerror or str(err)


def certificates(settings: Settings, log: Logger, row: Row) -> Certificates | None:
    """Return the certificates that the settings name; None if TLS is off. Raises ConfigError."""
    if not (settings.tls_cert or settings.tls_key or settings.tls_client_ca):
        return None
    if not (settings.tls_cert and settings.tls_key):
        raise ConfigError("KMQ_TLS_CERT and KMQ_TLS_KEY belong together: set both, or neither and no KMQ_TLS_CLIENT_CA")
    return Certificates(settings, log, row)


def accept(context: ssl.SSLContext, sock: Any) -> TlsSocket | None:
    """Return TLS over a new connection, before its handshake; None if the connection is gone already."""
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
