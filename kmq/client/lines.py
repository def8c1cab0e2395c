"""The plain protocol, fire and forget: lines in blocks.

Promise     close() returns only after ingress has received every byte and closed its side, so that no error on the way
            is missed. Messages are durable a moment later, but nothing confirms that: only the acknowledged protocol
            does.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from kmq.client.waiting import Patience
from kmq.config.settings import Settings
from kmq.config.values import MIB
from kmq.errors import ConfigError, KmqError, RetryError
from kmq.message.text import request_line
from kmq.wire.refusals import RETRYABLE

_T = TypeVar("_T")
_BLOCK = MIB // 4  # bytes gathered before a send
_CONNECT_S = 5.0
_OF_INGRESS = ("ingress", "tls", "ack")  # listeners; every other one is the gateway's


def read_port(settings: Settings, name: str, fixed: int) -> int:
    """Return the port of a listener: the setting, or if that is 0 the port that the stage wrote to its file."""
    if fixed:
        return fixed
    path = f"{settings.pipes}/{name}.port"
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        up = "up" if name in _OF_INGRESS else "up, with its gateway"
        raise ConfigError(f"{path}: no port there; is the broker {up}? (kmq status)") from None


# --- what an application gives ---------------------------------------------------------------------------------------


def no_connection(where: str, err: Exception) -> str:
    """Return the error text for a failed connection to `where`. A refusal by the broker is failures.Refused instead."""
    if isinstance(err, ConnectionRefusedError):
        return f"nothing listens on {where}; is the broker up?"
    return f"cannot connect to {where}: {getattr(err, 'strerror', None) or err or 'it does not answer'}"


class LineSender:
    """One connection of a fire-and-forget producer."""

    def __init__(self, host: str, port: int, token: str = "", patience: Patience | None = None) -> None:
        """`patience` tells the user what a blocked sender waits for; None: the sender waits in silence."""
        self._host, self._port, self._token = host, port, token
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._unsent = memoryview(b"")  # flushed, but not yet accepted by the kernel
        self.sent = 0
        self._tick_s = patience.tick_s if patience else None
        self._until_done = patience.until_done if patience else _once
        self._sock = self._until_done(self._connect)

    def _connect(self) -> socket.socket:
        """Connect, with a greeting if there is a token. Raises TimeoutError if another attempt may succeed."""
        where = (self._host, self._port)
        try:
            sock = socket.create_connection(where, timeout=_CONNECT_S)
        except OSError as err:
            raise RetryError(no_connection(f"{self._host}:{self._port}", err)) from err
        sock.settimeout(self._tick_s)
        if not self._token:
            return sock
        try:
            sock.sendall(request_line("!hello", "acks=0", f"token={self._token}"))
            reply = sock.recv(4096).decode(errors="replace").strip()
        except TimeoutError:
            sock.close()
            raise
        except OSError as err:
            sock.close()
            raise RetryError(f"the broker closed the connection: {err.strerror or err}") from err
        if reply.startswith("!ok"):
            return sock
        sock.close()
        refusal = reply.removeprefix("!err 0 ")
        if refusal.partition(" ")[0] not in RETRYABLE:
            raise KmqError(f"the broker refused the connection: {refusal}")
        if self._tick_s is None:
            raise RetryError(f"the broker refused the connection: {refusal}")
        time.sleep(self._tick_s)
        raise TimeoutError(refusal)

    def send(self, line: bytes) -> None:
        """Queue one line (with newline); blocks while the broker pushes back."""
        self._waiting.append(line)
        self._bytes += len(line)
        self.sent += 1
        if self._bytes >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Give all queued lines to the kernel; blocks while the broker pushes back."""
        self._unsent = memoryview(b"".join(self._waiting))
        self._waiting, self._bytes = [], 0
        try:
            while self._unsent:
                self._unsent = self._unsent[self._until_done(lambda: self._sock.send(self._unsent)) :]
        except OSError as err:
            raise self._broken(err) from err

    def outcome(self) -> str:
        """Return how many messages were handed over, for a user who has interrupted the sending."""
        left = bytes(self._unsent).count(b"\n") + len(self._waiting)
        return f"{self.sent - left} handed over, which nothing confirms; {left} not sent"

    def close(self) -> None:
        """Send all queued lines and wait until ingress has received everything."""
        self.flush()
        said = b""
        try:
            self._sock.shutdown(socket.SHUT_WR)
            while data := self._until_done(lambda: self._sock.recv(4096)):
                said = data
        except OSError as err:
            raise self._broken(err, said) from err
        finally:
            self._sock.close()

    def _broken(self, err: OSError, said: bytes = b"") -> RetryError:
        """Return the error to raise, with the last reply of the broker if there is one."""
        with contextlib.suppress(OSError):
            said = said or self._sock.recv(4096, socket.MSG_DONTWAIT)
        self._sock.close()
        reason = said.decode(errors="replace").strip() or err.strerror or str(err)
        return RetryError(f"the broker closed the connection: {reason}; lines sent last may be lost")

    def __enter__(self) -> "LineSender":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._sock.close()


def _once(attempt: Callable[[], _T]) -> _T:
    return attempt()
