"""A producer of the acknowledged protocol that shares no code with kmq: what it was told is what the files have to show."""

import random
import re
import select
import socket
import threading
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from chaos.checker import Stream
from chaos.load import TOPICS, Load

_REPLY = re.compile(rb"!(ack|dup) (\d+) (\d+)|!err (\d+) (\w+)(?: [^\n]*)?")


class AckedLoad(Load):
    """Sends 1, 2, 3, … with at most `window` of them unanswered; over every break it sends again what was not answered.

    `seqs[i]` is what it was told about message i + 1: durable, under this seq.
    """

    kind = b"producer"  # or window

    def __init__(self, pipes: Path, name: str, seed: int, window: int = 1000, longest: int = 400) -> None:
        super().__init__(seed)
        self.producer, self.window = name.encode(), window
        self.port_file = pipes / "ingress.port"
        rng = random.Random(name)
        self._payloads = [rng.randbytes(rng.randrange(2, longest) // 2).hex().encode() for _ in range(199)]
        self._keys = [topic.encode() for topic in TOPICS]
        self.seqs = array("Q")
        self.sent = 0  # the highest id that may have reached the broker
        self.codes: Counter[str] = Counter()  # of what was refused; `hello <code>`: a connection
        self.duplicates = self.attempts = self.connections = 0
        self._hearing, self._deaf_to = threading.Lock(), 0

    def line(self, number: int) -> bytes:
        payload = self._payloads[number % len(self._payloads)]
        return b"%b|%d|%d|%b" % (self._keys[number // 64 % len(self._keys)], number, number, payload)

    def stored(self, number: int) -> bytes:
        """As it stands in the WAL behind `seq|recv_ts|`."""
        key, ts, own, payload = self.line(number).split(b"|", 3)
        return b"%b|%b|%b;%b=%b|%b" % (key, ts, own, self.kind[:1], self.producer, payload)

    def hello(self) -> bytes:
        """What its hello says besides acks=1."""
        return b"%b=%b" % (self.kind, self.producer)

    def next_cut(self, last: int) -> int:
        """Up to which message, at least `last`, it sends in one go."""
        return last

    def text(self, first: int, last: int) -> bytes:
        """What it sends for these messages."""
        return b"".join([self.line(number) + b"\n" for number in range(first, last + 1)])

    @property
    def is_finished(self) -> bool:
        return self.enough.is_set() and len(self.seqs) == self.sent

    def has(self, count: int) -> bool:
        """Whether so many messages have been acknowledged; raises what ended the producer."""
        if self.error is not None:
            raise self.error
        return len(self.seqs) >= count

    def deafen(self) -> None:
        """From now on nothing is taken from the connection that there is: it has not been told what it did not hear."""
        with self._hearing:
            self._deaf_to = self.attempts

    def work(self) -> None:
        while not self.is_finished:
            try:
                port = int(self.port_file.read_text())
                with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
                    self._converse(sock)
            except (OSError, ValueError):
                pass  # broken, or nobody listens at the moment
            time.sleep(0.01)

    def _converse(self, sock: socket.socket) -> None:
        """One connection, until it breaks, refuses or everything has been answered."""
        self.attempts += 1
        sock.sendall(b"!hello acks=1 %b\n" % self.hello())
        greeting = b""
        while not greeting.endswith(b"\n"):
            data = sock.recv(4096)
            if not data:
                return
            greeting += data
        if not greeting.startswith(b"!ok "):
            self.codes[f"hello {greeting.split()[2].decode()}"] += 1
            return
        self.connections += 1
        sock.setblocking(False)
        base = upto = len(self.seqs)
        unsent, rest = b"", b""
        while not self.is_finished:
            if not unsent:
                last = min(upto + self.rng.randrange(1, 200), len(self.seqs) + self.window)
                last = max(upto, self.next_cut(last))
                last = min(last, self.sent) if self.enough.is_set() else last
                unsent = self.text(upto + 1, last)
                upto, self.sent = last, max(self.sent, last)
            readable, _, _ = select.select([sock], [sock] if unsent else [], [], 0.05)
            if unsent:
                try:
                    unsent = unsent[sock.send(unsent) :]
                except BlockingIOError:
                    self.blocked.set()
            if readable:
                data = sock.recv(1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                with self._hearing:
                    if self._deaf_to == self.attempts or not all(self._take(base, line) for line in lines):
                        return

    def _take(self, base: int, line: bytes) -> bool:
        """Learn from one reply; False when the connection is of no more use."""
        match = _REPLY.fullmatch(line)
        assert match, f"no reply: {line!r}"
        if match[4]:
            assert base + int(match[4]) == len(self.seqs) + 1, f"out of order: {line!r}"
            self.codes[match[5].decode()] += 1
            return False
        count, seq = base + int(match[2]) - len(self.seqs), int(match[3])
        assert count >= 1 and (count == 1 or match[1] == b"ack") and seq >= count, f"out of order: {line!r}"
        self.seqs.extend(range(seq - count + 1, seq + 1))
        self.duplicates += match[1] == b"dup"
        return True


def read_wal(data: Path) -> list[bytes]:
    """Its lines; what follows the last newline of a segment, or stands in for bytes that never came, is none."""
    lines: list[bytes] = []
    for path in sorted((data / "append").glob("*.log")):
        lines += [line for line in path.read_bytes().split(b"\n")[:-1] if line and 0 not in line]
    return lines


def account(data: Path, *loads: AckedLoad, plain: Sequence[Stream] = ()) -> None:
    """Every acknowledged message is in the WAL with its bytes under its seq, none of these producers' is there twice, and of
    the `plain` streams there is what their mode says, in order.
    """
    by_seq: dict[int, bytes] = {}
    times: Counter[bytes] = Counter()
    of_stream: defaultdict[bytes, list[bytes]] = defaultdict(list)
    producers = {load.producer for load in loads}
    streams = {stream.name.encode() for stream in plain}
    for line in read_wal(data):
        seq, _, rest = line.split(b"|", 2)
        by_seq[int(seq)] = rest
        own = rest.split(b"|", 3)[2]
        _, mark, producer = own.partition(b";p=")
        stream = b"" if mark else own.rpartition(b"-")[0]
        times[own] += producer in producers or stream in streams
        of_stream[stream].append(rest)
    twice = [own for own, count in times.items() if count > 1]
    assert not twice, f"stored twice: {len(twice)}, {twice[:5]}"
    for load in loads:
        lost = [(n, seq) for n, seq in enumerate(list(load.seqs), start=1) if by_seq.get(seq) != load.stored(n)]
        assert not lost, f"acknowledged and not there: {len(lost)} of {len(load.seqs)} (id, seq) {lost[:5]}"
    for sent in plain:
        there = of_stream[sent.name.encode()]
        assert there == [sent.line(n) for n in range(len(there))], f"{sent.name}: lost or out of order in between"
        assert sent.mode == "prefix" or len(there) == sent.count, f"{sent.name}: {len(there)} of {sent.count}"
