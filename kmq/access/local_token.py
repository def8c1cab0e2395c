"""KMQ_PIPES/local.token: the secret by which a program of this pod is recognised. It exists while a broker is up.

With it a hello may say `reserved=1` and write to the topics of KMQ itself (`__…`); with KMQ_TOKENS it is also the token
of the pod's own programs.

Owner       ingress or the gateway makes the file, whichever is first: whole, with mode 0640, or not at all. It never
            changes; a removed file is made again at the next start.
Protects    from clients that reach a port but not the directory: producers over TCP and TLS, clients of HTTP and gRPC.
            It does not protect from programs of the pod. A program that may read it may also write to the FIFO `raw`
            beside it, and could forge control lines of ingress there.
Light       Ingress and framer must stay small, so unlike kmq/access/tokens.py this module loads neither hashlib nor
            hmac.
"""

import contextlib
import os
from _operator import _compare_digest as is_equal  # hmac.compare_digest, without OpenSSL in every stage

from kmq.config.settings import Settings
from kmq.errors import ConfigError

LOCAL = "local"  # the name of this token; no other token may have it


def path(settings: Settings) -> str:
    return f"{settings.pipes}/local.token"


def read(settings: Settings) -> str:
    """Return the token. Raises ConfigError if no broker has made it."""
    try:
        with open(path(settings), encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or "is not text"
        raise ConfigError(f"{path(settings)}: {reason}; is the broker up? (kmq status)") from err


def make(settings: Settings) -> None:
    """Create the token atomically, unless it exists: a start on a full disk writes nothing."""
    if os.path.exists(path(settings)):
        return
    making = f"{path(settings)}.{os.urandom(8).hex()}"  # not the pid: in containers of their own several have the same
    with open(os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "w", encoding="ascii") as file:
        file.write(f"{LOCAL}.{os.urandom(32).hex()}\n")
    with contextlib.suppress(FileExistsError):
        os.link(making, path(settings))
    os.unlink(making)


class LocalToken:
    """The token of this pod. It is made if it is missing, and read again when a connection shows another one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        make(settings)
        self._token = read(settings).encode()

    def matches(self, token: bytes) -> bool:
        """Return True if this is the token. A wrong token costs one read of the file."""
        if is_equal(token, self._token):
            return True
        with contextlib.suppress(ConfigError):
            self._token = read(self._settings).encode()
        return is_equal(token, self._token)
