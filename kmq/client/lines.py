"""The plain protocol, fire and forget: lines in blocks, and a user who is told what the sender waits for.

    sender.send(b"orders|||one\n")          # queued; sent in blocks, without a reply

Promise     close() returns only after ingress has received every byte and closed its side, so that no error on the way
            is missed. Messages are durable a moment later, but only the acknowledged protocol confirms that.
            Backpressure is the contract: a broker without space accepts nothing, and a sender that waits loses nothing.
            But a sender must not wait in silence.
"""

import contextlib
import math
import re
import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from kmq.config.settings import Settings
from kmq.config.values import MIB
from kmq.errors import ConfigError, KmqError, RetryError
from kmq.sending.protocol import OK, format_hello, read_greeting
from kmq.wire.refusals import RETRYABLE

STALL_S = 2.0  # how long nothing moves before the terminal says why
_BLOCK = MIB // 4  # bytes gathered before a send
_CONNECT_S = 5.0
_OF_INGRESS = ("ingress", "tls", "ack")  # listeners; every other one is the gateway's
_T = TypeVar("_T")


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


def no_connection(where: str, err: Exception) -> str:
    """Return the error text for a failed connection to `where`. A refusal by the broker is failures.Refused instead."""
    if isinstance(err, ConnectionRefusedError):
        return f"nothing listens on {where}; is the broker up?"
    return f"cannot connect to {where}: {getattr(err, 'strerror', None) or err or 'it does not answer'}"


class LineSender:
    """One connection of a fire-and-forget producer."""

    def __init__(self, host: str, port: int, token: str = "", patience: "Patience | None" = None) -> None:
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
            sock.sendall(format_hello(acks=0, token=self._token))
            verb, refusal = read_greeting(sock.recv(4096))
        except TimeoutError:
            sock.close()
            raise
        except OSError as err:
            sock.close()
            raise RetryError(f"the broker closed the connection: {err.strerror or err}") from err
        if verb == OK:
            return sock
        sock.close()
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


# --- waiting ---------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a line for the user on stderr."""
    print(f"kmq: {text}", file=sys.stderr, flush=True)


def _gist(reason: str) -> str:
    """Return a reason without its numbers: "for 3.1 s" is not printed again after "for 2.1 s"."""
    return re.sub(r"[\d.,]+", "#", reason)


class Patience:
    """Keeps the user informed of a wait: prints the reason, each change of it, and when messages move again."""

    def __init__(self, why: Callable[[], str], timeout_s: float = math.inf) -> None:
        """`why` returns what the broker waits for; `timeout_s` without progress ends a wait with RetryError."""
        self.timeout_s = timeout_s
        self._why = why
        self._moved = self._stalled = time.monotonic()
        self._reason = ""

    @property
    def tick_s(self) -> float:
        """Return how long one attempt may take."""
        return min(STALL_S, self.timeout_s)

    def until_done(self, attempt: Callable[[], _T]) -> _T:
        """Return the result of `attempt`, repeated while it times out. Raises RetryError when the time is up."""
        self._moved = time.monotonic()
        while True:
            try:
                result = attempt()
            except TimeoutError:
                self.stalled()
                continue
            self.moved()
            return result

    def moved(self) -> None:
        """Note that the broker has accepted something."""
        if self._reason:
            say(f"the broker accepts messages again, after {time.monotonic() - self._stalled:.0f} s")
            self._reason = ""
        self._moved = time.monotonic()

    def stalled(self) -> None:
        """Note that an attempt has timed out. Raises RetryError when the time is up."""
        waited_s = time.monotonic() - self._moved
        if waited_s < self.tick_s:
            return  # only this message waits, while others move
        reason = self._why()
        if waited_s >= self.timeout_s:
            raise RetryError(f"the broker accepted nothing for {waited_s:.0f} s: {reason}; gave up after --timeout")
        if not self._reason:
            self._stalled = time.monotonic() - self.tick_s
        if _gist(reason) != _gist(self._reason):
            self._reason = reason
            say(f"waiting: the broker accepts nothing: {reason}")
