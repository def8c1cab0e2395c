"""What one stranger can do with names of topics. Each attack returns when its lines are in; the caller judges the rest."""

import socket
import time
from collections.abc import Iterable

from waiting import PATIENCE_S

from chaos.pod import Pod

_DEADLINE_S = 2 * PATIENCE_S


def connect(pod: Pod) -> socket.socket:
    """To the port for lines, once there is one."""
    pod.wait_ready("ingress")
    port = int((pod.pipes / "ingress.port").read_text())
    return socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S)


def send_plain(pod: Pod, lines: Iterable[bytes]) -> None:
    """As a producer that just sends; back when ingress has passed all of them on."""
    with connect(pod) as sock:
        for line in lines:
            sock.sendall(line)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


def ask(pod: Pod, *lines: bytes) -> list[bytes]:
    """The replies to these messages on an acknowledged connection of their own."""
    with connect(pod) as sock:
        sock.sendall(b"!hello acks=1\n" + b"".join(line + b"\n" for line in lines))
        sock.shutdown(socket.SHUT_WR)
        heard, until = b"", time.monotonic() + _DEADLINE_S
        while (data := sock.recv(4096)) and time.monotonic() < until:
            heard += data
    return heard.splitlines()[1:]


def flood_of_topics(pod: Pod, count: int = 20_000, name: bytes = b"flood", behind: bytes = b"") -> None:
    """One plain producer, a line of its own for each of `count` topics, and the line `behind` them, all at once."""
    lines = [b"%b-%d|0|0|x\n" % (name, number) for number in range(count)]
    send_plain(pod, [b"".join(lines) + behind])


def a_topic_for_each_descriptor(pod: Pod, topics: int, rounds: int = 3) -> None:
    """More topics than the router may have files open, each named again and again."""
    for number in range(rounds):
        send_plain(pod, (b"many-%d|0|%d|x\n" % (topic, number) for topic in range(topics)))
