"""A producer of lines in a process of its own, so that the benchmark measures only the broker."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from bench.lines import BLOCK, KEY, blocks, json_line, line

WAIT_S = 300.0  # longest wait for anything
COMMAND = [sys.executable, str(Path(__file__).parent)]  # this package again, as another process


class Child:
    """This package in another process. When the object exists the process is ready; go() lets it send."""

    def __init__(self, role: str, *arguments: object) -> None:
        argv = [*COMMAND, role, *map(str, arguments)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit("bench: the producer could not start")

    def go(self) -> Self:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self

    def output(self) -> str:
        """Wait for the end of the process; return what it printed."""
        output, _ = self._process.communicate(timeout=WAIT_S)
        if self._process.returncode:
            raise SystemExit("bench: the producer failed")
        return output


class Sending(Child):
    """A producer without acknowledgements."""

    def __init__(self, kind: str, address: str, *arguments: object) -> None:
        super().__init__("_send", kind, address, *arguments)

    def result(self) -> tuple[float, int]:
        """Return (time of the first byte sent, number of messages)."""
        begin, count = self.output().split()
        return float(begin), int(count)


# --- in the other process ------------------------------------------------------------------------------------------


def send(kind: str, address: str, arguments: list[str]) -> None:
    """Connect, say ready, wait for a line, send, close; then print the time of the first byte and the number of
    messages.
    """
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    send: Callable[[], int]
    if kind in ("count", "json"):
        keys, count, nbytes = arguments[0].split(","), int(arguments[1]), int(arguments[2])
        ready_made = blocks(keys, count, nbytes, line if kind == "count" else json_line)
        send = lambda: _send_all(sock, ready_made, count)  # noqa: E731
    elif kind == "seconds":
        keys, seconds, nbytes = arguments[0].split(","), float(arguments[1]), int(arguments[2])
        per_block = BLOCK // nbytes // len(keys) * len(keys)
        block = blocks(keys, per_block, nbytes)[0]
        send = lambda: _send_for(sock, block, per_block, seconds)  # noqa: E731
    elif kind == "endless":
        per_block = BLOCK // int(arguments[1])
        block = blocks([arguments[0]], per_block, int(arguments[1]))[0]
        send = lambda: _send_until_reset(sock, block, per_block)  # noqa: E731
    elif kind == "topics":
        count = int(arguments[0])
        ready_made = [b"".join(line(f"t{n:05}.k", n, 36) for n in range(count))]
        send = lambda: _send_all(sock, ready_made, count)  # noqa: E731
    else:
        rate, seconds = int(arguments[0]), float(arguments[1])
        send = lambda: _send_paced(sock, rate, seconds)  # noqa: E731
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    count = send()
    if kind != "endless":
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    print(begin, count, flush=True)


def _send_all(sock: socket.socket, ready_made: list[bytes], count: int) -> int:
    for block in ready_made:
        sock.sendall(block)
    return count


def _send_for(sock: socket.socket, block: bytes, per_block: int, seconds: float) -> int:
    until, sent = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        sock.sendall(block)
        sent += per_block
    return sent


def _send_until_reset(sock: socket.socket, block: bytes, per_block: int) -> int:
    """Send until the broker is killed."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while True:
            sock.sendall(block)
            sent += per_block
    return sent


def _send_paced(sock: socket.socket, rate: int, seconds: float) -> int:
    """Send `rate` messages of 100 bytes a second, one by one or those of a millisecond together. Each has its send
    time.
    """
    step = max(1, rate // 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    begin, total = time.monotonic(), int(rate * seconds)
    payload = "x" * (100 - len(f"{KEY}|1700000000.000000||\n"))
    for sent in range(0, total, step):
        wait = begin + sent / rate - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        sock.sendall(f"{KEY}|{time.time():.6f}||{payload}\n".encode() * step)
    return total
