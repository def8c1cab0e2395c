"""Every port the gateway listens on is opened here: one place for addresses, limits, TLS and tokens.

With certificates (tls.py) HTTP and gRPC each listen on two ports, plaintext and TLS. With KMQ_TOKENS each call must carry
`authorization: Bearer <token>` with a role for it, except health checks; access.py asks for it over HTTP.
"""

from collections.abc import Awaitable, Callable, Iterable
from secrets import token_hex
from ssl import SSLContext
from typing import Any

import grpc

from kmq.access.tokens import Tokens
from kmq.broker.incidents import Strangers
from kmq.broker.ports import cannot_listen
from kmq.broker.tls import Certificates
from kmq.config.settings import Settings
from kmq.config.values import KIB
from kmq.files import replace_file
from kmq.gateway.access import UNAUTHORIZED
from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.doors import Doors, listening, most_consumers, most_over_http
from kmq.gateway.grpc.calls import CHECK, Bystanders, Calls, longest_message
from kmq.gateway.grpc.front import Front
from kmq.gateway.grpc.statuses import refuse
from kmq.gateway.http.exchange import HttpConnection

_RPCS = 2048  # simultaneous calls, streams included
_UNREAD_BYTES = 16 * KIB  # of each call that gRPC receives before the gateway reads them
_RPCS_PER_CONNECTION = 1024
_GROWTH = 3  # a record as a message, against its line: an empty header is one byte there and two here
_KEEPALIVE_MS, _KEEPALIVE_ANSWER_MS = 30_000, 10_000  # otherwise a dead peer would keep its stream for ever
_LONGEST_HANDSHAKE_S = 60.0
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
            return _refusing(RequestRefused("unauthorized", UNAUTHORIZED))
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
            ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
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


def listen_grpc(
    server: Any, calls: Calls, doors: Doors, settings: Settings, certificates: Certificates | None
) -> dict[str, int]:
    """Open the ports of gRPC's `server`. Returns name → port number. Call inside the event loop."""
    calls.front = _front(calls, server.add_insecure_port)
    ports = {"grpc": _open(calls.front, doors, "KMQ_GRPC_PORT", settings.host, settings.grpc_port)}
    if certificates is not None:
        credentials = _credentials(settings, certificates)
        calls.tls_front = _front(calls, lambda address: server.add_secure_port(address, credentials))
        ports["grpcs"] = _open(calls.tls_front, doors, "KMQ_GRPCS_PORT", settings.tls_host, settings.grpcs_port)
    return _write_ports(settings, ports)


def _front(calls: Calls, add_port: Callable[[str], int]) -> Front:
    """Make gRPC listen on a Unix socket with a secret name, and return the relay to that socket."""
    name = f"kmq-grpc-{token_hex(16)}"
    add_port(f"unix-abstract:{name}")
    return Front(name, calls.look)


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


def listen_http(server: Any, doors: Doors, settings: Settings, certificates: Certificates | None) -> dict[str, int]:
    """Open the ports of aiohttp's `server`. Returns name → port number. Call inside the event loop."""
    most = most_over_http(settings)

    def connection() -> HttpConnection:
        return HttpConnection(server())

    ports = {"http": _open(connection, doors, "KMQ_HTTP_PORT", settings.host, settings.http_port, most=most)}
    if certificates is not None:
        place, context = (settings.tls_host, settings.https_port), certificates.context()
        ports["https"] = _open(connection, doors, "KMQ_HTTPS_PORT", *place, context, most)
    return _write_ports(settings, ports)


def listen_lines(
    lines: Any, status: Any, doors: Doors, settings: Settings, certificates: Certificates | None
) -> dict[str, int]:
    """Open the consumer port and the status port. Returns name → port number, as listen_http does."""
    host, most = settings.host, most_consumers(settings)
    ports = {
        "egress": _open(lines, doors, "KMQ_EGRESS_PORT", host, settings.egress_port, most=most),
        "status": _open(status, doors, "KMQ_STATUS_PORT", host, settings.status_port, most=most),
    }
    if certificates is not None:
        place, context = (settings.tls_host, settings.egress_tls_port), certificates.context()
        ports["egress_tls"] = _open(lines, doors, "KMQ_EGRESS_TLS_PORT", *place, context, most)
    return _write_ports(settings, ports)


def listen_metrics(server: Any, doors: Doors, settings: Settings) -> dict[str, int]:
    """Open the port for metrics if KMQ_METRICS_HOST is set. Returns name → port number, as listen_http does."""
    if not settings.metrics_host:
        return {}
    number = _open(server, doors, "KMQ_METRICS_PORT", settings.metrics_host, settings.metrics_port)
    return _write_ports(settings, {"metrics": number})


def _open(
    server: Any, doors: Doors, setting: str, host: str, port: int, context: SSLContext | None = None, most: int = 0
) -> int:
    try:
        opened = listening(host, port)  # a name may stand for several addresses
    except OSError as err:
        raise cannot_listen(setting, host, port, err) from err
    for door in opened:
        doors.serve(door, server, context, most)
    number: int = opened[0].getsockname()[1]
    return number


def _write_ports(settings: Settings, ports: dict[str, int]) -> dict[str, int]:
    for name, port in ports.items():
        replace_file(f"{settings.pipes}/{name}.port", b"%d\n" % port)
    return ports
