"""Every port the gateway listens on is opened here: one place for addresses, limits and, later, TLS."""

import os
from typing import Any

import grpc
from aiohttp import web

from kmq.errors import ConfigError
from kmq.log.disk import replace_file
from kmq.settings import KIB, Settings

_ENVELOPE = 64 * KIB  # of a gRPC message around the record: the id, and gRPC's own framing
_RPCS = 4096  # requests at a time, streams included
_RPCS_PER_CONNECTION = 1024
_KEEPALIVE_MS, _KEEPALIVE_ANSWER_MS = 30_000, 10_000  # a peer that is gone must not keep its stream for ever
_MIN_PING_MS = 10_000  # clients may ping so often, also while nothing is going on


def grpc_server(settings: Settings) -> Any:
    """A server without a port, to add services to."""
    longest = settings.max_line + _ENVELOPE
    return grpc.aio.server(
        maximum_concurrent_rpcs=_RPCS,
        options=(
            ("grpc.so_reuseport", 0),  # or a second gateway would share the port, and half of the clients, in silence
            ("grpc.max_receive_message_length", longest),
            ("grpc.max_send_message_length", longest),
            ("grpc.max_concurrent_streams", _RPCS_PER_CONNECTION),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_ANSWER_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
            ("grpc.keepalive_permit_without_calls", 1),
        ),
    )


def listen_grpc(server: Any, settings: Settings) -> int:
    """Open its port; which one."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        port: int = server.add_insecure_port(f"{host}:{settings.grpc_port}")
    except RuntimeError:  # it does not say why, and the reason is nearly always this one
        raise _refused("KMQ_GRPC_PORT", settings.host, settings.grpc_port, "Address already in use") from None
    _write_port(settings, "grpc", port)
    return port


async def listen_http(runner: web.AppRunner, settings: Settings) -> int:
    """Open its port; which one."""
    site = web.TCPSite(runner, settings.host, settings.http_port, reuse_port=False)
    try:
        await site.start()
    except OSError as err:
        reason = os.strerror(err.errno) if err.errno else str(err)
        raise _refused("KMQ_HTTP_PORT", settings.host, settings.http_port, reason) from err
    port: int = runner.addresses[0][1]
    _write_port(settings, "http", port)
    return port


def _refused(setting: str, host: str, port: int, reason: str) -> ConfigError:
    return ConfigError(
        f"{setting}={port}: cannot listen on {host}:{port}: {reason};"
        f" stop what uses it or set {setting} (0: any free port)"
    )


def _write_port(settings: Settings, name: str, port: int) -> None:
    replace_file(f"{settings.pipes}/{name}.port", b"%d\n" % port)
