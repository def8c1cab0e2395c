"""The plain line protocol from the sender's side: fire and forget, in blocks.

Promise     close() returns only after ingress has taken every byte and closed its side, so an error on the way is seen. What
            ingress took is durable a moment later, but nobody says so: that is the acknowledged protocol's job.
"""

import socket
import time
from base64 import b64encode
from urllib.parse import quote

from kmq.errors import ConfigError, KmqError, RetryError
from kmq.settings import MIB, Settings

_BLOCK = MIB // 4  # bytes gathered before a send
_CONNECT_S = 5.0
_KEY_SAFE = "".join(chr(c) for c in range(33, 127) if chr(c) not in "%|;")


def read_port(settings: Settings, name: str, fixed: int) -> int:
    """The port a listener has: the setting, or what the stage wrote where the setting is 0."""
    if fixed:
        return fixed
    path = f"{settings.pipes}/{name}.port"
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        raise ConfigError(f"{path}: no port there; is the broker up? (kmq status)") from None


def percent_encode(text: str) -> str:
    """A key or id in the form that fits between the bars: no `|`, `;`, `%`, space or control byte."""
    return quote(text, safe=_KEY_SAFE)


def format_message(routing_key: bytes, payload: bytes, id: bytes = b"", ts: float | None = None) -> bytes:
    """One line as sent, with its newline. A payload with a NUL or a newline goes as base64, marked `enc=b64`."""
    if b"\0" in payload or b"\n" in payload:
        payload, id = b64encode(payload), id + b";enc=b64"
    stamp = b"%.6f" % (time.time() if ts is None else ts)
    return b"%b|%b|%b|%b\n" % (routing_key, stamp, id, payload)


class LineSender:
    """One connection of a fire-and-forget producer."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._sock = socket.create_connection((host, port), timeout=_CONNECT_S)
        except OSError as err:
            raise RetryError(f"cannot connect to {host}:{port}: {err.strerror or err}; is the broker up?") from err
        self._sock.settimeout(None)
        self._waiting: list[bytes] = []
        self._bytes = 0
        self.sent = 0

    def send(self, line: bytes) -> None:
        """Queue one line (with newline); blocks while the broker pushes back."""
        self._waiting.append(line)
        self._bytes += len(line)
        self.sent += 1
        if self._bytes >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Hand everything queued to the kernel."""
        data, self._waiting, self._bytes = b"".join(self._waiting), [], 0
        try:
            self._sock.sendall(data)
        except OSError as err:
            raise RetryError(f"the broker closed the connection: {err.strerror}; lines sent last may be lost") from err

    def close(self) -> None:
        """Send what is queued and wait until ingress has taken it all."""
        self.flush()
        try:
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv(4096):
                pass
        except OSError as err:
            raise RetryError(f"the broker closed the connection: {err.strerror}; lines sent last may be lost") from err
        finally:
            self._sock.close()

    def __enter__(self) -> "LineSender":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._sock.close()


__all__ = ["KmqError", "LineSender", "format_message", "percent_encode", "read_port"]
