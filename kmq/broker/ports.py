"""Why a port could not be opened, and which setting to change: one text for ingress, the gateway and `kmq doctor`."""

import errno
import os
import socket

from kmq.errors import ConfigError

_HOSTS = {  # setting of a port → setting of its address; every other port has KMQ_HOST
    "KMQ_METRICS_PORT": "KMQ_METRICS_HOST",
    **dict.fromkeys(("KMQ_TLS_PORT", "KMQ_EGRESS_TLS_PORT", "KMQ_HTTPS_PORT", "KMQ_GRPCS_PORT"), "KMQ_TLS_HOST"),
    "KMQ_KAFKA_TLS_PORT": "KMQ_TLS_HOST",
}
BACKLOG = 1024


def listening(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen there, one for each address of the host. Raises OSError."""
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
    """Return the setting of the address if the address is what is wrong; else ""."""
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
