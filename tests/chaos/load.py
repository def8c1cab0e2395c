"""Writers for chaos: what each sends follows from its name, so that the checker can say later what had to arrive."""

import contextlib
import errno
import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from chaos.checker import Stream

PIPE_BUF = 4096
RUN = 512  # lines in a row that share their routing key, then as many that do not: both paths of the broker
TOPICS = ["test.probe", "jobs.process.1", "jobs.notify.2", "random", "bar", "wide.k1", "wide.k2", "wide.k3", "wide"]


class Lines:
    """Endless lines `key|n|<name>-n|payload`; line(n) is always the same."""

    def __init__(self, name: str, longest: int = 2000) -> None:
        rng = random.Random(name)
        self.name = name
        self._keys = [topic.encode() for topic in TOPICS]
        sizes = [rng.randrange(4, 120) for _ in range(250)] + [rng.randrange(120, longest) for _ in range(4)]
        self._payloads = [rng.randbytes(size // 2 + 1).hex().encode()[:size] for size in sizes]
        self._id = name.encode()

    def line(self, n: int) -> bytes:
        key = self._keys[(n // RUN if n // RUN % 2 else n) % len(self._keys)]
        return b"%b|%d|%b-%d|%b" % (key, n, self._id, n, self._payloads[n % len(self._payloads)])

    def blocks(self, size: int) -> Iterator[tuple[int, bytes]]:
        """(how many lines, their text) for ever, at most `size` bytes each (or one line)."""
        n, block, length = 0, list[bytes](), 0
        while True:
            line = self.line(n) + b"\n"
            if block and length + len(line) > size:
                yield len(block), b"".join(block)
                block, length = [], 0
            block.append(line)
            length += len(line)
            n += 1


class Load(threading.Thread):
    """A writer that goes on, in bursts, until told to stop; `sent` lists what the checker has to find."""

    def __init__(self, seed: int, rest_s: float = 0.05) -> None:
        super().__init__(daemon=True)
        self.rng, self.rest_s = random.Random(seed), rest_s
        self.enough = threading.Event()
        self.blocked = threading.Event()  # somebody has pushed back
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as err:
            self.error = err

    def work(self) -> None:
        raise NotImplementedError

    def rest(self) -> None:
        """Between bursts, so that the links are sometimes full and sometimes empty."""
        self.enough.wait(self.rng.random() * self.rest_s)

    def finish(self) -> None:
        """Stop, and raise what went wrong."""
        self.enough.set()
        self.join(60)
        if self.error is not None:
            raise self.error
        assert not self.is_alive(), f"{self.name} is still blocked"


class FifoLoad(Load):
    """Writes straight into the FIFO, as any shell of the pod may: whole lines, one atomic write at a time.

    It holds the FIFO open for reading and writing, so the FIFO lives even while no stage does, and a write that has
    returned has reached it for good.
    """

    def __init__(self, pipes: Path, name: str, seed: int, rest_s: float = 0.05) -> None:
        super().__init__(seed, rest_s)
        self.lines, self.count = Lines(name), 0
        pipes.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipes / "raw")
        self.fd = os.open(pipes / "raw", os.O_RDWR | os.O_NONBLOCK)

    def work(self) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        burst = 0
        for count, text in self.lines.blocks(PIPE_BUF):
            while not self._write(text):
                self.blocked.set()
                poll.poll(50)
                if self.enough.is_set():
                    return
            self.count += count
            burst -= count
            if self.enough.is_set():
                return
            if burst < 0:
                self.rest()
                burst = self.rng.randrange(1, 10_000)

    def _write(self, text: bytes) -> bool:
        try:
            return os.write(self.fd, text) == len(text)  # all or nothing: at most PIPE_BUF
        except BlockingIOError:
            return False

    @property
    def sent(self) -> list[Stream]:
        return [Stream(self.lines.name, self.lines.line, self.count)]

    def finish(self) -> None:
        super().finish()
        os.close(self.fd)


def fill_up(pipes: Path, name: str) -> Stream:
    """Fill what a FIFO that blocks longer writes still has room for, so that it takes not even a control line."""
    stream, count = Stream(name, lambda n: b"jobs|0|%b-%d|" % (name.encode(), n), 0), 0
    fd = os.open(pipes / "raw", os.O_WRONLY | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while os.write(fd, stream.line(count) + b"\n"):
                count += 1
    finally:
        os.close(fd)
    return stream._replace(count=count)


class TcpLoad(Load):
    """One connection after the other to ingress: each is a stream of its own, cut off or closed in order."""

    def __init__(self, pipes: Path, name: str, seed: int, rest_s: float = 0.05, longest: int = 200_000) -> None:
        super().__init__(seed, rest_s)
        self.port_file, self.longest, self.prefix = pipes / "ingress.port", longest, name
        self.sent: list[Stream] = []
        self.broken = 0

    @property
    def count(self) -> int:
        return sum(stream.count for stream in self.sent)

    def work(self) -> None:
        while not self.enough.is_set():
            try:
                sock = socket.create_connection(("127.0.0.1", int(self.port_file.read_text())), timeout=5)
            except (OSError, ValueError):
                self.enough.wait(0.01)  # ingress is down at the moment
                continue
            with sock:
                self._converse(sock, Lines(f"{self.prefix}.{len(self.sent)}", self.longest))

    def _converse(self, sock: socket.socket, lines: Lines) -> None:
        """One connection: until it breaks, or for a random number of lines and an orderly end."""
        sock.settimeout(60)
        count, limit, mode = 0, self.rng.randrange(1, 40_000), "all"
        at = len(self.sent)
        self.sent.append(Stream(lines.name, lines.line, 0, "prefix"))
        try:
            for more, text in lines.blocks(1 << 16):
                count += more
                self.sent[at] = Stream(lines.name, lines.line, count, "prefix")
                sock.sendall(text)
                if count > limit or self.enough.is_set():
                    break
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):  # ingress closes its side when it has taken everything
                pass
        except OSError as err:
            if (
                not isinstance(err, ConnectionError) and err.errno != errno.ENOTCONN
            ):  # what shutdown says of a broken one
                raise
            mode = "prefix"
            self.broken += 1
        self.sent[at] = Stream(lines.name, lines.line, count, mode)
        self.rest()
