"""Why a port could not be opened, and which setting to change: one text for ingress, the gateway and `kmq doctor`."""

import errno
import os

from kmq.errors import ConfigError

_HOSTS = {  # setting of a port → setting of its address; every other port has KMQ_HOST
    "KMQ_METRICS_PORT": "KMQ_METRICS_HOST",
    **dict.fromkeys(("KMQ_TLS_PORT", "KMQ_EGRESS_TLS_PORT", "KMQ_HTTPS_PORT", "KMQ_GRPCS_PORT"), "KMQ_TLS_HOST"),
}


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
