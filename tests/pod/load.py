"""Load on a pod from outside, and the verdict on what it left.

The writers and judges are those of tests/chaos; only where they connect to is another place. What a writer sends follows from
its name, and no name comes twice, so that one pod can serve several tests.
"""

import contextlib
import errno
import itertools
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from chaos.acked import AckedLoad, account
from chaos.checker import Stream, check
from chaos.load import Lines, TcpLoad
from chaos.producer_load import ProducerLoad
from chaos.producer_load import judge as judge_producers
from play import Pod
from waiting import PATIENCE_S, until

from kmq.broker import stats
from kmq.client.connection import ServerAddress
from kmq.config.settings import SHM, STAGES
from kmq.links import fifo, layout

NOBODY = (errno.ETIMEDOUT, errno.EHOSTUNREACH)  # what the kernel says of an address that nobody has
GONE_S = 20.0  # within it something of a pod's kernel answers, whatever its processes do
PORT = 5673  # lines in
KEEP_ALL = {"KMQ_RETENTION_BYTES": "none"}  # settings of a pod whose whole WAL is judged
_number = itertools.count(1)


def connect(pod: Pod) -> socket.socket:
    """To the port for lines. The address is asked for each time: a pod that was restarted has another.

    What was sent to the old one may be answered by nobody, not even by a reset: the pod's network can go before its
    processes do. Such a connection ends after `GONE_S` with one of `NOBODY`; else it would wait for a quarter of an hour.
    """
    sock = socket.create_connection((pod.ip, PORT), timeout=5)
    sock.settimeout(PATIENCE_S)  # of all of a sendall, however much it is
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GONE_S * 1000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    return sock


class PacedLines(Lines):
    """Some thousands a second: faults are tried here, not speed, and the judge looks at every line."""

    def blocks(self, size: int) -> Iterator[tuple[int, bytes]]:
        for block in super().blocks(size // 16):
            yield block
            time.sleep(0.02)


class PlainLoad(TcpLoad):
    """Lines that nobody acknowledges; long ones among them, which pass the FIFO in pieces."""

    def __init__(self, pod: Pod, name: str, seed: int) -> None:
        super().__init__(Path(), name, seed, longest=20_000)
        self.pod = pod

    def work(self) -> None:
        while not self.enough.is_set():
            try:
                sock = connect(self.pod)
            except OSError:
                self.enough.wait(0.01)
                continue
            try:
                with sock:
                    self._converse(sock, PacedLines(f"{self.prefix}.{len(self.sent)}", self.longest))
            except OSError as err:
                if err.errno not in NOBODY:
                    raise
                self.broken += 1


class AnsweredLoad(AckedLoad):
    """The acknowledged protocol by a client that shares no code with kmq."""

    def __init__(self, pod: Pod, name: str, seed: int) -> None:
        super().__init__(Path(), name, seed, window=100)
        self.pod = pod

    @property
    def count(self) -> int:
        return len(self.seqs)

    def work(self) -> None:
        while not self.is_finished:
            with contextlib.suppress(OSError), connect(self.pod) as sock:
                self._converse(sock)
            time.sleep(0.01)

    def _take(self, base: int, line: bytes) -> bool:
        self.rest()
        return super()._take(base, line)


class Traffic:
    """One writer of each kind, at a moderate pace, until finish()."""

    def __init__(self, pod: Pod, ports: Path, rng: random.Random) -> None:
        """`ports` is a directory where the one port can be written to, as a local broker does."""
        self.pod = pod
        (ports / "ingress.port").write_text(f"{PORT}\n")
        number = next(_number)
        self.plain = PlainLoad(pod, f"plain{number}", rng.randrange(1 << 30))
        self.answered = AnsweredLoad(pod, f"answered{number}", rng.randrange(1 << 30))
        self.producer = ProducerLoad(ports, f"producer{number}", rng.randrange(1 << 30), host=pod.ip)
        self.producer.rest_s = 0.3
        # A Service has a name that is looked up for each connection; here it is the pod that knows where it is.
        self.producer.producer._driver.address = lambda: ServerAddress(pod.ip, PORT)
        self.loads: tuple[TcpLoad | AnsweredLoad | ProducerLoad, ...] = (self.plain, self.answered, self.producer)
        for load in self.loads:
            load.start()

    def wait_flowing(self, count: int = 300) -> None:
        """Until every writer has got so many more messages through."""
        before = [load.count for load in self.loads]

        def flows() -> bool:
            for load in self.loads:
                if load.error is not None:
                    raise load.error
            return all(load.count >= base + count for load, base in zip(self.loads, before, strict=True))

        until(flows, f"{count} more of each than {before}", lambda: [load.count for load in self.loads])

    def fifo_is_lost(self) -> None:
        """All stages died at once: also of a connection that had ended in order the last lines may be missing."""
        self.plain.sent = [stream._replace(mode="prefix") for stream in self.plain.sent]

    def finish(self) -> None:
        """All is sent and, but for the plain lines, answered."""
        for load in self.loads:
            load.enough.set()
        for load in self.loads:
            load.finish()

    def judge(self, *others: Stream, finished: bool = True) -> None:
        """What was acknowledged is there once, where the broker said, and of the plain lines what their mode says."""
        data = self.pod.volume("data")
        judge_files(data)
        account(data, self.answered, plain=[*self.plain.sent, *others])
        if finished:
            judge_producers(data, [self.producer])


def judge_files(data: Path) -> None:
    """G3: seqs are contiguous; each record is in its queue once, in order. Nothing may be on its way."""
    report = check(data)
    if report.kinds == {"index"}:  # of a living broker: what was written last is indexed within a second
        until(lambda: not check(data).counts, instead=lambda: check(data))
    else:
        assert not report.counts, str(report)
    assert report.records, "the WAL is empty: this shows nothing"


@contextlib.contextmanager
def traffic_to(pod: Pod, rng: random.Random) -> Iterator[Traffic]:
    """Traffic that certainly ends; finish() and judge() are for the test to call."""
    with tempfile.TemporaryDirectory() as ports:
        traffic = Traffic(pod, Path(ports), rng)
        try:
            traffic.wait_flowing()
            yield traffic
        finally:
            for load in traffic.loads:
                load.enough.set()
            traffic.producer.producer.abort()


# --- looking into a pod from the host --------------------------------------------------------------------------------


def instance(pod: Pod) -> str:
    """The name under which the pod's shared memory is found from here."""
    return f"{os.path.relpath(pod.volume('shm'), SHM)}/kmq"


def rows(pod: Pod) -> dict[str, stats.Row]:
    """The stats page; nothing while there is none."""
    page = stats.peek(instance(pod))
    return page.rows if page else {}


def states(pod: Pod) -> dict[str, str]:
    return {name: row.state_name for name, row in rows(pod).items()}


def is_settled(pod: Pod) -> bool:
    """Whether all four are ready and what was in the links has reached the queues."""
    found = rows(pod)
    if any(found[name].state_name != "ready" or found[name].age_s > 1 for name in STAGES if found) or not found:
        return False
    seqs = {found[name].seq for name in STAGES[1:]}
    return len(seqs) == 1 and not waiting_bytes(pod) and not layout.backlog(instance(pod), "framed")


def waiting_bytes(pod: Pod) -> int:
    """In the FIFO. It is open for a moment only: a reader outside must not keep it alive."""
    fd = os.open(pod.volume("pipes") / "raw", os.O_RDONLY | os.O_NONBLOCK)
    try:
        return fifo.waiting_bytes(fd)
    finally:
        os.close(fd)


def settle(pod: Pod) -> None:
    until(lambda: is_settled(pod), "the links are empty", lambda: states(pod))
