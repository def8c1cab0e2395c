"""Messages whose replies are awaited, over raw sockets: one loop in a process of its own, no threads, all bytes made before.

The same loops serve the broker and its peer, so that only the bytes differ. Each kind reports the CPU that it took: near
one core, the generator limits the rate, not the broker.
"""

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable

from bench.lines import BLOCK, KEY, line
from bench.sending import Child

IN_FLIGHT = 64
BLOCKS_IN_FLIGHT = 40  # as many as bench/producing.py has
LINE_BYTES = 100
CLOSED = "bench: the connection was closed before the reply"


class Requests(Child):
    """A process that sends to `dialect` at `port` of this machine, in one of KINDS."""

    def __init__(self, dialect: str, kind: str, port: int, *arguments: float) -> None:
        super().__init__("_request", dialect, kind, port, *arguments)

    def result(self) -> dict[str, float]:
        found: dict[str, float] = json.loads(self.output())
        return found


# --- in the other process ------------------------------------------------------------------------------------------


class Kmq:
    """The acknowledged line protocol without ids. One instance reads the replies of one connection."""

    greeting = b"!hello acks=1\n"
    message = line(KEY, 0, LINE_BYTES)
    good = b"!ack "
    lines = 1  # of one reply

    def __init__(self) -> None:
        self._rest, self._answered = b"", 0
        self.replies = 0

    def feed(self, data: bytes) -> int:
        """Return how many more messages are answered. One reply may answer many of them."""
        if not data:
            raise SystemExit(CLOSED)
        *rows, self._rest = (self._rest + data).split(b"\n")
        if not rows:
            return 0
        if any(not row.startswith(self.good) for row in rows):
            raise SystemExit(f"bench: the broker said {rows[0]!r}")
        self.replies += len(rows)
        before, self._answered = self._answered, int(rows[-1].split()[1])
        return self._answered - before


class Redis:
    """XADD of the same payload to a stream, in RESP. One instance reads the replies of one connection."""

    greeting = b"*1\r\n$4\r\nPING\r\n"
    good = b"$"
    lines = 2
    payload = Kmq.message[Kmq.message.rindex(b"|") + 1 : -1]
    words = (b"XADD", KEY.encode(), b"*", b"p", payload)
    message = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)

    def __init__(self) -> None:
        self._rest = b""
        self.replies = 0

    def feed(self, data: bytes) -> int:
        """Return how many more messages are answered: each has a reply of two lines, its length and its id."""
        if not data:
            raise SystemExit(CLOSED)
        data = self._rest + data
        rows = data.split(b"\n")
        answered = (len(rows) - 1) // 2
        if any(not row.startswith(self.good) for row in rows[0 : 2 * answered : 2]):
            raise SystemExit(f"bench: Redis said {rows[0]!r}")
        self._rest = b"\n".join(rows[2 * answered :])
        self.replies += answered
        return answered


Dialect = type[Kmq] | type[Redis]
DIALECTS: dict[str, Dialect] = {"kmq": Kmq, "redis": Redis}


def request(dialect: str, kind: str, port: int, arguments: list[float]) -> None:
    """Connect, say ready, wait for a line, and measure; then print the measurements as JSON."""
    run = KINDS[kind](DIALECTS[dialect], port, *arguments)
    print("ready", flush=True)
    sys.stdin.readline()
    cpu, begin = time.process_time(), time.monotonic()
    found = run()
    found["cores"] = (time.process_time() - cpu) / (time.monotonic() - begin)
    print(json.dumps(found))


def _connect(dialect: Dialect, port: int, count: int = 1) -> list[socket.socket]:
    """Return connections that were greeted."""
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(dialect.greeting)
    for sock in socks:
        if not sock.recv(4096).startswith((b"!ok ", b"+PONG")):
            raise SystemExit("bench: a connection was refused")
    return socks


Run = Callable[[], dict[str, float]]


def _one(dialect: Dialect, port: int, seconds: float) -> Run:
    """One message in flight, on one connection."""
    (sock,) = _connect(dialect, port)
    send, receive, message, feed = sock.send, sock.recv, dialect.message, dialect().feed
    taken: list[float] = []

    def run() -> dict[str, float]:
        begin = time.monotonic()
        until, now = begin + seconds, begin
        while now < until:
            send(message)
            while not feed(receive(4096)):
                pass
            before, now = now, time.monotonic()
            taken.append(now - before)
        rate = len(taken) / (now - begin)
        taken.sort()
        return {"rate": rate} | {f"p{p}": taken[p * len(taken) // 100] * 1e6 for p in (50, 99)}

    return run


def _window(dialect: Dialect, port: int, seconds: float) -> Run:
    """IN_FLIGHT messages in flight, on one connection. After replies to n messages the next n are sent together."""
    (sock,) = _connect(dialect, port)
    send, receive, reader = sock.sendall, sock.recv, dialect()
    messages = [dialect.message * count for count in range(IN_FLIGHT + 1)]

    def run() -> dict[str, float]:
        begin = time.monotonic()
        until = begin + seconds
        sent, answered = IN_FLIGHT, 0
        send(messages[IN_FLIGHT])
        while answered < sent:
            count = reader.feed(receive(65536))
            answered += count
            if count and time.monotonic() < until:
                send(messages[count])
                sent += count
        return {"rate": sent / (time.monotonic() - begin), "count": sent, "replies": reader.replies}

    return run


def _flood(dialect: Dialect, port: int, nbytes: float, seconds: float) -> Run:
    """Blocks of lines, with a limited number of blocks in flight, on one connection, until the last reply."""
    (sock,) = _connect(dialect, port)
    per_block = BLOCK // int(nbytes)
    block = line(KEY, 0, int(nbytes)) * per_block
    limit, reader = BLOCKS_IN_FLIGHT * per_block, dialect()

    def run() -> dict[str, float]:
        begin = time.monotonic()
        until = begin + seconds
        sent = answered = 0
        while True:
            if sent - answered < limit and time.monotonic() < until:
                sock.sendall(block)
                sent += per_block
                flags = socket.MSG_DONTWAIT
            elif answered < sent:
                flags = socket.MsgFlag(0)
            else:
                return {"rate": sent / (time.monotonic() - begin), "count": sent, "replies": reader.replies}
            try:
                answered += reader.feed(sock.recv(65536, flags))
            except BlockingIOError:
                pass

    return run


def _connections(dialect: Dialect, port: int, count: float, seconds: float) -> Run:
    """One message in flight on each of many connections."""
    socks = _connect(dialect, port, int(count))
    epoll = select.epoll()
    for sock in socks:
        epoll.register(sock, select.EPOLLIN)
    poll, read, write = epoll.poll, os.read, os.write
    message, good, lines = dialect.message, dialect.good, dialect.lines

    def run() -> dict[str, float]:
        answered, begin = 0, time.monotonic()
        until = begin + seconds
        for sock in socks:
            sock.send(message)
        while time.monotonic() < until:
            events = poll(1.0, len(socks))
            for fd, _ in events:
                reply = read(fd, 4096)
                if reply.count(b"\n") != lines or not reply.startswith(good):
                    raise SystemExit(f"bench: not one whole reply: {reply!r}")
                write(fd, message)
            answered += len(events)
        return {"rate": answered / (time.monotonic() - begin)}

    return run


KINDS: dict[str, Callable[..., Run]] = {"one": _one, "window": _window, "flood": _flood, "connections": _connections}
