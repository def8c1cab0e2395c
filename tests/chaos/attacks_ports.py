"""Strangers at the ports: each attack asserts that others are served meanwhile and that memory and log stay bounded.

Each is a function of a target, a running `Pod` or `Broker`, and of its size; what it opened is closed when it returns. They may
be called in any order, again and again, on the same target. The sizes by default are those that brought a broker down.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import psutil

MIB = 1 << 20
PATIENCE_S = 60.0  # deadline of every wait: reached only by a bug
SWEEPS_PER_S = 2  # a log line an event and sweep; twice as many for sweeps that come early
EVENTS = 6  # kinds of events that one attack may cause


class Target(Protocol):
    """What an attack needs to know."""

    pipes: Path

    def log(self) -> str: ...


def pid_of(target: Any, process: str) -> int:
    return target.processes[process].pid if isinstance(target.processes, dict) else target.pids()[process]


def memory(target: Target, process: str) -> int:
    """Resident bytes of one of its processes."""
    return psutil.Process(pid_of(target, process)).memory_info().rss


def connect(target: Target, port: str) -> socket.socket:
    number = int((target.pipes / f"{port}.port").read_text())
    return socket.create_connection(("127.0.0.1", number), timeout=PATIENCE_S)


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


def line_of(sock: socket.socket) -> bytes:
    """One line, or what came before the end."""
    line = b""
    while not line.endswith(b"\n") and (byte := sock.recv(1)):
        line += byte
    return line


def ask(target: Target, question: bytes) -> bytes:
    """The reply on the ack port, over a connection of its own."""
    with connect(target, "ack") as sock:
        sock.sendall(question + b"\n")
        return line_of(sock)


def produce(target: Target, token: str = "") -> int:
    """The seq of an acknowledged message of a producer that comes now."""
    with connect(target, "ingress") as sock:
        shown = f" token={token}" if token else ""
        sock.sendall(f"!hello acks=1{shown}\ntest.attacked|1|1|x\n".encode())
        assert line_of(sock).startswith(b"!ok")
        reply = line_of(sock)
        assert reply.startswith(b"!ack 1 "), reply
        return int(reply.split()[2])


@contextlib.contextmanager
def short_log(target: Target, longest: int = 1024) -> Iterator[None]:
    """However often strangers do a thing, the log has one short line of it a sweep."""
    before, begin = len(target.log()), time.monotonic()
    yield
    said = target.log()[before:].splitlines()
    most = EVENTS * (SWEEPS_PER_S * (time.monotonic() - begin) + 2)
    assert len(said) <= most, f"{len(said)} lines, at most {most:.0f}\n" + "\n".join(said[-20:])
    assert all(len(line) <= longest for line in said), max(said, key=len)


def silent_askers(target: Target, count: int = 1000) -> None:
    """Connections on the ack port that ask nothing: neither producers nor those who ask are shut out."""
    with ExitStack() as opened, short_log(target):
        for _ in range(count):
            opened.enter_context(connect(target, "ack"))
        seq = produce(target)
        assert ask(target, b"GET_ACK %d" % seq) == b"ACK\n"


def unread_refusals(target: Target, count: int = 29, most: int = 64 * MIB) -> None:
    """Fenced connections that send newlines and never read what becomes of them: `most` bytes in ingress."""
    begin = memory(target, "ingress")
    with ExitStack() as opened, short_log(target):
        greedy = []
        for _ in range(count):  # each fences the one before it
            sock = opened.enter_context(connect(target, "ingress"))
            sock.sendall(b"!hello acks=1 producer=greedy\n")
            assert line_of(sock).startswith(b"!ok")
            sock.setblocking(False)
            greedy.append(sock)
        peak, sent = begin, 1
        while sent:
            sent = 0
            for sock in greedy:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sent += sock.send(b"\n" * MIB)
            produce(target)
            peak = max(peak, memory(target, "ingress"))
        assert peak - begin < most, f"{begin / MIB:.0f} -> {peak / MIB:.0f} MiB"
        print(f"event=unread_refusals begin_mib={begin / MIB:.0f} peak_mib={peak / MIB:.0f}")


def malformed_lines(target: Target, count: int = 151) -> None:
    """What is no request, 28 KB each, on the ports of ingress."""
    junk = b"\xff\x16\x03" * 9500 + b"\n"
    with short_log(target):
        for port in ("ack", "ingress"):
            for start in (b"", b"!hello ", b"GET_ACK "):
                for _ in range(count // 6 + 1):
                    with connect(target, port) as sock, contextlib.suppress(ConnectionError):
                        sock.sendall(start + junk)
        produce(target)
