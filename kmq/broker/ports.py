"""Why a port could not be opened, and which setting to change: one text for ingress, the gateway and `kmq doctor`."""

import errno
import os

from kmq.errors import ConfigError

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

    from kmq.config.settings import Settings
    from kmq.logfmt import Logger

_HOSTS = {  # setting of a port → setting of its address; every other port has KMQ_HOST
    "KMQ_METRICS_PORT": "KMQ_METRICS_HOST",
    **dict.fromkeys(("KMQ_TLS_PORT", "KMQ_EGRESS_TLS_PORT", "KMQ_HTTPS_PORT", "KMQ_GRPCS_PORT"), "KMQ_TLS_HOST"),
    "KMQ_KAFKA_TLS_PORT": "KMQ_TLS_HOST",
}
BACKLOG = 1024
OPEN_AGAIN_S = 2.0  # between two tries to open a port that another program uses
# The gateway's ports. One bit of `doors_closed` of its row each, so a new one is appended.
GATEWAY_DOORS = ("grpc", "http", "egress", "status", "kafka", "grpcs", "https", "egress_tls", "kafka_tls", "metrics")
_TAKEN = (errno.EADDRINUSE, errno.EACCES)  # used by another process, or only for root: the other ports may still serve


def is_taken(err: OSError) -> bool:
    """Return True if the port is not available; otherwise its address is wrong."""
    return err.errno in _TAKEN


def say_closed(log: "Logger", setting: str, port: int) -> None:
    """Log that another program uses a port."""
    log.warn("door_closed", setting=setting, port=port, effect="the other ports serve; it is tried again")


def say_opened(log: "Logger", setting: str, port: int) -> None:
    """Log that a port is open that another program had used."""
    log.info("door_opened", setting=setting, port=port)


def number_of(settings: "Settings", name: str) -> int:
    """Return the port of a door of the gateway, as the settings say; 0: any."""
    number: int = settings.kafka_number if name == "kafka" else getattr(settings, f"{name}_port")
    return number


def mask_of(closed: "Iterable[str]") -> int:
    """Return these doors of the gateway as the stats page shows them."""
    return sum(1 << GATEWAY_DOORS.index(name) for name in closed)


def closed_doors(mask: int) -> list[str]:
    """Return the names of the gateway's doors that could not be opened."""
    return [name for at, name in enumerate(GATEWAY_DOORS) if mask >> at & 1]


def listening(host: str, port: int) -> "list[socket.socket]":
    """Return sockets that listen there, one for each address of the host. Raises OSError."""
    import socket  # kmq.probe, which starts every few seconds, loads this module and opens no port

    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    opened: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            opened.append(sock := socket.socket(family, kind, protocol))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
            sock.setblocking(False)
    except OSError:
        for sock in opened:
            sock.close()
        raise
    return opened


def wrong_host(setting: str, err: OSError) -> str:
    """Return the setting of the address if the address is wrong; else ""."""
    is_name = (err.errno or 0) <= 0  # the numbers of getaddrinfo
    return _HOSTS.get(setting, "KMQ_HOST") if err.errno == errno.EADDRNOTAVAIL or is_name else ""


def cannot_listen(setting: str, host: str, port: int, err: OSError) -> ConfigError:
    """Return the error for a port that could not be opened."""
    reason = os.strerror(err.errno) if err.errno and err.errno > 0 else err.strerror or str(err)
    address = wrong_host(setting, err)
    advice = (
        f"correct {address}: this machine has no such address"
        if address
        else f"stop what uses it or set {setting} (0: any free port)"
    )
    return ConfigError(f"{setting}={port}: cannot listen on {host}:{port}: {reason}; {advice}")
