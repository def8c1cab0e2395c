"""Strangers at the ports: each attack asserts that others are served meanwhile and that memory and log stay bounded.

Each is a function of a target, a running `Pod` or `Broker`, and of its size; what it opened is closed when it returns. They may
be called in any order, again and again, on the same target. The sizes by default are those that brought a broker down.
"""

import contextlib
import re
import resource
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import psutil
from waiting import until

MIB = 1 << 20
PATIENCE_S = 60.0  # deadline of every wait: reached only by a bug
SWEEPS_PER_S = 2  # a log line an event and sweep; twice as many for sweeps that come early
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _WINDOW_UPDATE = 0, 1, 3, 4, 8  # frames of HTTP/2
_END_STREAM, _END_HEADERS = 1, 4
_MAX_STREAMS, _INITIAL_WINDOW = 3, 4  # settings
_BURST = 500  # calls that are begun at once: of more than a thousand gRPC forgets some
_FRAME_BYTES, _WINDOW, WIDE = 1 << 14, (1 << 16) - 1, (1 << 31) - 1
WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
PRODUCE, CONSUME_STREAM = "/podbus.v1.PodBus/Produce", "/podbus.v1.PodBus/ConsumeStream"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
EVENTS = 6  # kinds of events that one attack may cause


class Target(Protocol):
    """What an attack needs to know."""

    pipes: Path

    def log(self) -> str: ...


def pid_of(target: Any, process: str) -> int:
    return int(target.processes[process].pid if isinstance(target.processes, dict) else target.pids()[process])


def memory(target: Target, process: str) -> int:
    """Resident bytes of one of its processes."""
    return int(psutil.Process(pid_of(target, process)).memory_info().rss)


def connect(target: Target, port: str) -> socket.socket:
    number = int((target.pipes / f"{port}.port").read_text())
    return socket.create_connection(("127.0.0.1", number), timeout=PATIENCE_S)


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


class Http2:
    """A peer of the gRPC ports that sends what it likes and reads only when asked to."""

    def __init__(self, host: str, port: int, window: int = _WINDOW) -> None:
        """`window`: how much of each stream it says it would take."""
        self.sock = socket.create_connection((host, port), timeout=PATIENCE_S)
        try:
            self._begin(window)
        except BaseException:  # a server that has enough closes at once: nobody else would close ours
            self.sock.close()
            raise

    def _begin(self, window: int) -> None:
        self.sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, window))
        if window > _WINDOW:
            self.frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", window - _WINDOW))
        self.last = -1
        self.room = {0: _WINDOW}  # what the server would take: of the connection (0), of each stream
        self.first_room, self.most_streams = _WINDOW, 1 << 20
        self.over: set[int] = set()  # streams that the server has ended
        while self.take() != _SETTINGS:
            pass

    def __enter__(self) -> "Http2":
        return self

    def __exit__(self, *failure: object) -> None:
        self.sock.close()

    def frame(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        self.sock.sendall(struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body)

    def call(
        self, path: str, headers: Iterable[tuple[bytes, bytes]] = (), request: bytes = b"", end: bool = False
    ) -> int:
        """Begin a call: its stream. `request`: what is sent of its messages, framed as gRPC does."""
        self.last += 2
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"kmq")]
        fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers"), *headers]
        block = b"".join(b"\0" + b"".join(bytes([len(text)]) + text for text in pair) for pair in fields)
        self.frame(_HEADERS, _END_HEADERS, self.last, block)
        self.room[self.last] = self.first_room
        self.send(self.last, request)
        if end:
            self.frame(_DATA, _END_STREAM, self.last, b"")
        return self.last

    def send(self, stream: int, data: bytes) -> bytes:
        """As much of it as the server takes now; the rest."""
        while data and stream not in self.over and (room := min(_FRAME_BYTES, self.room[0], self.room[stream])) > 0:
            part, data = data[:room], data[room:]
            self.frame(_DATA, 0, stream, part)
            self.room[0] -= len(part)
            self.room[stream] -= len(part)
        return data

    def look(self) -> None:
        """Take what the server has said by now."""
        while select.select([self.sock], [], [], 0)[0]:
            self.take()

    def take(self) -> int:
        """Take one frame; its kind."""
        kind, flags, stream, body = self.read()
        if kind == _SETTINGS and not flags & 1:
            for name, value in struct.iter_unpack(">HI", body):
                if name == _INITIAL_WINDOW:
                    for known in self.room.keys() - {0}:
                        self.room[known] += value - self.first_room
                    self.first_room = value
                elif name == _MAX_STREAMS:
                    self.most_streams = value
            self.frame(_SETTINGS, 1, 0, b"")
        elif kind == _WINDOW_UPDATE:
            self.room[stream] += struct.unpack(">I", body)[0]
        elif kind == _RST_STREAM or (kind == _HEADERS and flags & _END_STREAM):
            self.over.add(stream)
        return kind

    def read(self) -> tuple[int, int, int, bytes]:
        """The next frame: kind, flags, stream, body."""
        head = self._exactly(9)
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        return kind, flags, stream, self._exactly(int.from_bytes(head[:3], "big"))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            if not more:
                raise ConnectionError("the connection is over")
            data += more
        return data

    def hear_of(self, stream: int) -> None:
        """Wait until a call is answered: its headers come, however little of a stream is taken."""
        kind, of = _SETTINGS, 0
        while (kind, of) != (_HEADERS, stream):
            kind, _, of, _ = self.read()

    def status(self, stream: int) -> int:
        """With which gRPC status a call ends; -1: its stream is reset."""
        while True:
            kind, flags, of, body = self.read()
            if kind == _SETTINGS and not flags & 1:
                self.frame(_SETTINGS, 1, 0, b"")
            if of == stream and kind == _RST_STREAM:
                return -1
            if of == stream and kind == _HEADERS and flags & _END_STREAM:
                found = re.search(rb"grpc-status.(\d+)", body)
                assert found, body
                return int(found[1])


@contextlib.contextmanager
def attack(target: Target) -> Iterator[ExitStack]:
    """With as many descriptors as there may be; what is opened on the stack is closed, and the log has stayed short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with ExitStack() as opened, short_log(target):
            yield opened
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def silent_askers(target: Target, count: int = 1000) -> None:
    """Connections on the ack port that ask nothing: neither producers nor those who ask are shut out."""
    with attack(target) as opened:
        for _ in range(count):
            opened.enter_context(connect(target, "ack"))
        seq = produce(target)
        assert ask(target, b"GET_ACK %d" % seq) == b"ACK\n"


def unread_refusals(target: Target, count: int = 29, most: int = 64 * MIB) -> None:
    """Fenced connections that send newlines and never read what becomes of them: `most` bytes in ingress."""
    begin = memory(target, "ingress")
    with attack(target) as opened:
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


def malformed_requests(target: Target, count: int = 151) -> None:
    """What is no HTTP, 28 KB each, on every port of the gateway."""
    shapes = (
        b"GET / HTTP/1.1\r\nAuthorization: Bearer secret\r\nx" + b"\xff\0" * 4000,
        b"\xff" * 28_000,
        b"GET " + b"/" * 28_000,
    )
    with short_log(target):
        for port in gateway_ports(target):
            for n in range(count):
                with connect(target, port) as sock, contextlib.suppress(OSError):
                    sock.sendall(shapes[n % 3] + b"\r\n\r\n")
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
        assert healthy(target)
    assert "secret" not in target.log()


def silent_handshakes(target: Target, count: int = 2000, most: int = 256 * MIB) -> None:
    """Connections to the HTTPS port that never say hello: `most` bytes in the gateway, and others are served over TLS."""
    with attack(target) as opened:
        for _ in range(count):
            opened.enter_context(connect(target, "https"))
        assert healthy(target, "https") and healthy(target)
        assert_small(target, most)


def idle_requests(target: Target, count: int = 2000, most: int = 256 * MIB) -> None:
    """Connections to the HTTP ports, with TLS where there is TLS, that never finish their request."""
    with attack(target) as opened:
        for port in ("http", "https"):
            if port not in gateway_ports(target):
                continue
            for _ in range(count // 2):
                with contextlib.suppress(OSError):  # turned away while it shook hands
                    sock = opened.enter_context(
                        secured(connect(target, port)) if port == "https" else connect(target, port)
                    )
                    sock.sendall(b"GET / HTTP/1.1\r\n")
            assert healthy(target, port)
        assert_small(target, most)


def http2(target: Target, window: int = _WINDOW) -> Http2:
    return Http2("127.0.0.1", int((target.pipes / "grpc.port").read_text()), window)


def framed(message: bytes, announced: int | None = None) -> bytes:
    """A message as gRPC sends it; `announced`: the length it says it has."""
    return struct.pack(">BI", 0, len(message) if announced is None else announced) + message


def record(name: str, size: int) -> bytes:
    """A ProduceRequest: message_id (1) and record (2), with lengths as varints."""
    payload = b"x" * size
    return b"\x0a" + _varint(len(name)) + name.encode() + b"\x12" + _varint(size) + payload


def _varint(number: int) -> bytes:
    low = bytes([number & 0x7F | (0x80 if number > 0x7F else 0)])
    return low if number <= 0x7F else low + _varint(number >> 7)


def called(target: Target, path: str, request: bytes) -> int:
    """The status of a call over a connection of its own, whose client reads all that comes."""
    with http2(target, WIDE) as peer:
        stream, rest = peer.call(path), framed(request)
        while rest:
            rest = peer.send(stream, rest)
            if rest:
                peer.take()
        peer.frame(_DATA, _END_STREAM, stream, b"")
        return peer.status(stream)


def assert_served(target: Target) -> None:
    """A call by somebody who comes now is answered, and health too."""
    assert called(target, PRODUCE, record(f"served-{time.monotonic_ns()}", 10)) == 0
    assert called(target, CHECK, b"") == 0


def open_streams(
    target: Target, opened: ExitStack, path: str, request: bytes, count: int, window: int = _WINDOW, each: int = 1 << 20
) -> list[Http2]:
    """So many calls, over as many connections as it takes where one has at most `each`."""
    peers: list[Http2] = []
    for _ in range(count):
        if not peers or peers[-1].last // 2 + 1 >= min(each, peers[-1].most_streams):
            with contextlib.suppress(OSError):
                peers.append(opened.enter_context(http2(target, window)))
        try:
            peers[-1].call(path, request=framed(request))
        except OSError:  # the server has had enough of it: another one
            peers[-1].most_streams = 0
    return peers


def settle(peers: list[Http2], pause_s: float) -> None:
    """Hear what the server says until it has said nothing for a while."""
    alive, quiet, end = list(peers), time.monotonic(), time.monotonic() + PATIENCE_S
    while time.monotonic() - quiet < pause_s and time.monotonic() < end:
        ready = select.select([peer.sock for peer in alive], [], [], 0.1)[0]
        for peer in [peer for peer in alive if peer.sock in ready]:
            quiet = time.monotonic()
            try:
                peer.look()
            except OSError:
                alive.remove(peer)


def silent_connections(target: Target, count: int = 2000, most: int = 256 * MIB) -> None:
    """Connections to the gRPC port that say nothing, or no more than that they speak HTTP/2."""
    with attack(target) as opened:
        for _ in range(count // 2):
            opened.enter_context(connect(target, "grpc"))
            with contextlib.suppress(OSError):
                opened.enter_context(http2(target))
        assert_served(target)
        assert_small(target, most)


def bystanders(
    target: Target,
    path: str = WATCH,
    count: int = 5000,
    most: int = 256 * MIB,
    are_refused: Callable[[], bool] = lambda: True,
    window: int = _WINDOW,
) -> None:
    """Streams that never end, of a service that anyone finds: those who produce are served. `are_refused`: waited for."""
    with attack(target) as opened:
        for part in range(0, count, _BURST):
            settle(open_streams(target, opened, path, b"", min(_BURST, count - part), window), 0.5)
        assert_served(target)
        assert_small(target, most)
        until(are_refused, "all refused")  # a loaded gateway has not looked at all of them yet


def unread_streams(
    target: Target, count: int = 300, size: int = MIB - 100_000, most: int = 256 * MIB, window: int = _WINDOW
) -> None:
    """ConsumeStreams that never read; the records are of `size` bytes."""
    for n in range(8):
        assert called(target, PRODUCE, record(f"unread-{size}-{n}", size * 3 // 4)) == 0
    with attack(target) as opened:
        open_streams(target, opened, CONSUME_STREAM, b"\x10\x01", count, window, each=1)
        assert_served(target)
        peak = 0
        for _ in range(20):
            assert_served(target)
            peak = max(peak, memory(target, "gateway"))
        print(f"event=unread_streams peak_mib={peak / MIB:.0f}")
        assert peak < most, f"{peak / MIB:.0f} MiB"
        assert called(target, CONSUME_STREAM, b"\x08\x01") == 0


def unfinished_calls(target: Target, count: int = 600, size: int = MIB - 1000, most: int = 256 * MIB) -> None:
    """Produce calls of which all but the last byte comes."""
    body = framed(record("unfinished", size - 40))[:-1]
    with attack(target) as opened:
        peers: list[Http2] = []
        left: dict[tuple[Http2, int], bytes] = {}
        for _ in range(count):
            if not peers or peers[-1].last // 2 + 1 >= min(8, peers[-1].most_streams):
                peers.append(opened.enter_context(http2(target)))
            left[peers[-1], peers[-1].call(PRODUCE)] = body
        peak, quiet = 0, time.monotonic()
        while left and time.monotonic() - quiet < 2.0:  # as long as more is taken
            for (peer, stream), data in list(left.items()):
                try:
                    peer.look()
                    rest = peer.send(stream, data)
                except OSError:  # the server has had enough of this one
                    rest = b""
                if len(rest) < len(data):
                    quiet = time.monotonic()
                left[peer, stream] = rest
                if stream in peer.over or not left[peer, stream]:
                    del left[peer, stream]
            peak = max(peak, memory(target, "gateway"))
        print(f"event=unfinished_calls peak_mib={peak / MIB:.0f}")
        assert_served(target)
        assert peak < most, f"{peak / MIB:.0f} MiB"


def stored(target: Target, topic: str, count: int, size: int) -> None:
    """So many records of that size, routed."""
    with connect(target, "ingress") as sock:
        sock.sendall(
            b"!hello acks=1\n" + b"".join(b"%s|1|%d|%s\n" % (topic.encode(), n, b"x" * size) for n in range(count))
        )
        while not (reply := line_of(sock)).startswith(b"!ack %d " % count):
            assert reply, "ingress has closed"
        seq = reply.split()[2]
    with connect(target, "egress") as sock:
        sock.sendall(b"CONSUME %s from=earliest follow\n" % topic.encode())
        file = sock.makefile("rb")
        while (line := file.readline()).partition(b"|")[0] != seq:
            assert line, "the gateway has closed"


def reads_all(target: Target, path: bytes) -> bool:
    """Whether somebody who comes now, and reads, is given 8 MiB."""
    with connect(target, "http") as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"GET %s HTTP/1.1\r\nHost: kmq\r\nConnection: close\r\n\r\n" % path)
        with sock.makefile("rb") as answer:
            return answer.readline().startswith(b"HTTP/1.1 200") and len(answer.read()) > 8 * MIB
    return False


def unread_answers(target: Target, count: int = 200, most: int = 256 * MIB) -> None:
    """Answers of 8 MiB over HTTP that nobody reads: others get theirs, and the memory is given back in the end."""
    stored(target, f"unread-{count}", 80, 100_000)
    path = b"/api/topics/unread-%d/consume?offset=0&maxBytes=8388608&maxMessages=1000" % count
    begin, peak = memory(target, "gateway"), 0
    with attack(target) as opened:
        for _ in range(count):
            sock = opened.enter_context(connect(target, "http"))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(b"GET %s HTTP/1.1\r\nHost: kmq\r\n\r\n" % path)
        for _ in range(5):  # on a busy machine an honest reader may be the slowest once, and asks again
            until(lambda: reads_all(target, path), "somebody who reads is served")
            peak = max(peak, memory(target, "gateway"))
    assert peak - begin < most, f"{begin / MIB:.0f} -> {peak / MIB:.0f} MiB"
    until(lambda: memory(target, "gateway") - begin < most / 3, "the memory is given back")
    print(f"event=unread_answers begin_mib={begin / MIB:.0f} peak_mib={peak / MIB:.0f}")


def unread_lines(target: Target, count: int = 512, most: int = 96 * MIB) -> None:
    """Consumers by lines that read nothing of records of 900 KB; others are sent theirs."""
    stored(target, f"long-{count}", 4, 900_000)
    begin, peak = memory(target, "gateway"), 0
    with attack(target) as opened:
        for _ in range(count):
            sock = opened.enter_context(connect(target, "egress"))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(b"CONSUME long-%d from=earliest\n" % count)
        for _ in range(20):
            with connect(target, "egress") as sock:
                sock.sendall(b"CONSUME long-%d from=earliest raw\n" % count)
                sock.shutdown(socket.SHUT_WR)
                with sock.makefile("rb") as lines:
                    assert len(lines.read()) > 4 * 900_000
            peak = max(peak, memory(target, "gateway"))
    assert peak - begin < most, f"{begin / MIB:.0f} -> {peak / MIB:.0f} MiB"
    print(f"event=unread_lines begin_mib={begin / MIB:.0f} peak_mib={peak / MIB:.0f}")


def assert_small(target: Target, most: int, process: str = "gateway") -> None:
    now = memory(target, process)
    print(f"event=attacked process={process} rss_mib={now / MIB:.0f}")
    assert now < most, f"{process} takes {now / MIB:.0f} MiB, at most {most / MIB:.0f}"


def secured(sock: socket.socket) -> socket.socket:
    """TLS over a connection, whoever answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return context.wrap_socket(sock)
    except OSError:
        sock.close()
        raise


def gateway_ports(target: Target) -> list[str]:
    return [port for port in ("http", "https", "grpc", "grpcs") if (target.pipes / f"{port}.port").exists()]


def healthy(target: Target, port: str = "http") -> bool:
    """Whether somebody who comes now is told how the broker is."""
    with connect(target, port) if port == "http" else secured(connect(target, port)) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: kmq\r\nConnection: close\r\n\r\n")
        return line_of(sock).startswith(b"HTTP/1.1 200 ")


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
