"""Attackers of the doors of the gateway: the consumer port, the status port and HTTP get whatever bytes there are.

Each answer must be one that the door can give; what a broker says of bad input is judged here with the decoder of its
clients. The caller looks at what became of the broker.
"""

import contextlib
import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator

from kmq.wire import refusals, replies

LONGEST_S = {"egress": 0.3, "status": 0.3, "http": 0.05}  # a client that hears nothing for so long goes away
SPICE = [
    b"\0",
    b"\xff",
    b"!",
    b"@",
    b"/",
    b"-1",
    b"%",
    b"%00",
    b"\n",
    b"\r",
    b" ",
    b"=",
    b"9" * 30,
    b"x" * 300,
    b"token=",
]

SESSIONS = [
    [b"CONSUME orders raw max=3"],
    [b"CONSUME orders/0 from=earliest max=2", b"CONSUME orders"],
    [b"CONSUME spread from=2026-11-23T12:00:00Z max=9"],
    [b"ASSIGN orders/0@1 spread/3", b"!fetch 1000 wait=3 orders/0", b"!seek orders/0 latest", b"!offsets", b"!leave"],
    [b"ASSIGN attacked orders/0", b"!fetch 900", b"!commit orders/0 1 spread/0 2", b"!beat", b"!offsets orders/0"],
    [b"GROUP attacked member=m topics=orders,spread session=6s", b"!fetch 90", b"!commit orders/0 7", b"!leave"],
    [b"GROUP attacked member=n topics=orders assignor=range", b"!revoked", b"!revoked", b"!fetch 10 wait=2", b"!leave"],
]
QUESTIONS = [b"GET_STATUS 1", b"GET_STATUS 4000 attacked", b"GET_STATUS 17 attacked token=none"]
REQUESTS = [
    b"GET /api/groups HTTP/1.1\r\nHost: x\r\n\r\n",
    b'POST /api/topics/orders/produce HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{"value":"YQ"}',
    b'POST /api/topics/orders/commit HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"gro\r\n0\r\n\r\n',
]
Check = Callable[[bytes], None]


def spoiled(rng: random.Random, text: bytes) -> bytes:
    """The text with some bytes gone, doubled, or replaced."""
    at, length = rng.randrange(len(text) + 1), rng.randrange(1, 9)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + length :]
    if kind == 1:
        return text[:at] + text[at : at + length] * 2 + text[at + length :]
    return text[:at] + rng.choice(SPICE) + text[at + length :]


def inputs(rng: random.Random, good: list[bytes]) -> bytes:
    """Good input that is spoiled in a few places, or nothing that was ever meant."""
    text = b"\n".join(good) + b"\n"
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(3000))
    if kind == 1:
        return rng.choice([b"x", b"\0", b"!fetch 1 "]) * rng.randrange(60_000, 90_000)
    if kind == 2:
        return text + rng.choice([b"\n", b"!offsets\n", b"!beat\n", b"!fetch 1\n", *SPICE]) * rng.randrange(2000)
    for _ in range(rng.randrange(4)):
        text = spoiled(rng, text)
    return text


def exchange(rng: random.Random, door: str, port: int, text: bytes) -> bytes:
    """Send it, in pieces and perhaps not all of it, and return what comes back; some clients go away in the middle."""
    answer = bytearray()
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=LONGEST_S[door]) as sock:
        at = 0
        while at < len(text):
            at += sock.send(text[at : at + rng.choice([7, 4096, 1 << 20])])
            if rng.random() < 0.01:
                return b""
        if door != "http":  # there a client that closes its half is gone
            sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(1 << 16):
            answer += data
    return bytes(answer)


def check_lines(answer: bytes) -> None:
    """Every line with a `!` is a reply, every refusal has a code that is known, and a batch is as long as it says."""
    lines = answer.split(b"\n")[:-1]
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        if line.startswith(b"!"):
            reply = replies.reply(line)
            if isinstance(reply, replies.Failed):
                refusals.find(reply.code)
            elif isinstance(reply, replies.Batch):
                at += reply.lines
        else:
            assert not line or line.count(b"|") >= 5, line[:200]


def check_status(answer: bytes) -> None:
    for line in answer.split(b"\n")[:-1]:
        assert line in (b"PROCESSED", b"PENDING", b"UNKNOWN") or line.startswith(b"ERR "), line[:200]


def check_http(answer: bytes) -> None:
    if answer:
        status = int(answer.split(b" ", 2)[1])
        assert answer.startswith(b"HTTP/") and status != 500, answer[:300]


def attack(rng: random.Random, ports: dict[str, int], clients: int) -> Counter[str]:
    """Attack each door with so many clients in turn. Returns how many got an answer."""
    doors: dict[str, tuple[Callable[[], list[bytes]], Check]] = {
        "egress": (lambda: rng.choice(SESSIONS), check_lines),
        "status": (lambda: rng.sample(QUESTIONS, 2), check_status),
        "http": (lambda: [rng.choice(REQUESTS)], check_http),
    }
    answered: Counter[str] = Counter()
    for _ in range(clients):
        for door, (good, check) in doors.items():
            answer = exchange(rng, door, ports[door], inputs(rng, good()))
            check(answer)
            if answer:
                answered[door] += 1
    return answered


@contextlib.contextmanager
def hoard(ports: dict[str, int], clients: int) -> Iterator[None]:
    """So many clients at each door that ask for a megabyte of answers and read nothing, and leave half a line behind."""
    asked = {"egress": b"ASSIGN orders/0\n" + b"!offsets\n" * 40_000, "status": b"GET_STATUS 1\n" * 80_000}
    with contextlib.ExitStack() as stack:
        for _ in range(clients):
            for door, text in asked.items():
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", ports[door])))
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    sock.send(text)
                half = stack.enter_context(socket.create_connection(("127.0.0.1", ports[door])))
                half.sendall(b"x" * 60_000)
        yield


def seed_of_this_run() -> int:
    """CHAOS_SEED, or a new one; it is printed."""
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"CHAOS_SEED={seed}")
    return seed
