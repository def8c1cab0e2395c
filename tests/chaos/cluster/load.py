"""Clients of a shard that know nothing of leaders: they connect to one address, and send again what has no answer.

What they were told is a history (chaos/history.py). Members of groups and other doors are those of chaos/member.py and
chaos/senders.py.
"""

import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from line_client import LineClient
from waiting import until

from chaos.cluster.judge import Replica
from chaos.crowd import Crowd
from chaos.history import FAIL, OK, Answer, Ends, Operation, Place, Poll, Produce
from chaos.member import value_of
from chaos.senders import Sender
from kmq.wire import replies

PATIENCE_S = 60.0
AGAIN = {b"disk_full", b"quota", b"stopping", b"busy", b"connections", b"not_enough_replicas", b"no_leader"}
NEVER = (b"fenced", b"unauthorized", b"forbidden")  # each sender has a name of its own, and no tokens are required
_BEYOND = re.compile(rb"!err out_of_range ([^/]+)/(\d+): offset \d+ is beyond first=\d+ end=(\d+)")
NUMBERED = {"ids": b" producer=%b", "window": b" window=%b", "lines": b""}  # kind → words of its hello

TOPIC, PARTITIONS = "orders", 3
GROUPS: dict[str, tuple[str, ...]] = {
    "red": ("lines", "lines"),
    "blue": ("consumer", "http"),
}  # group → the doors of its members
TESTS = Path(__file__).resolve().parents[2]

Message = tuple[int, str, bytes, bytes]  # number, value, key, payload


class Numbered(Sender):
    """Port 5673 with acks, one connection until it breaks. Every seq that it is told is in `answers`.

    `kind`: "ids" rise under a producer's name, those of a "window" are remembered for a while, "lines" have none, so that
    they may be stored twice when they are sent again.
    """

    def __init__(self, name: str, topic: str, pipes: Path, seed: int, kind: str) -> None:
        super().__init__(name, topic, pipes, seed)
        self.kind, self.rest_s = kind, 0.1
        self.answers: list[Answer] = []
        self.wrong: list[str] = []  # replies that nobody may have had, whatever befell the shard: NEVER
        self._attempts = itertools.count(1)
        self._pending: deque[Message] = deque()  # sent or to be sent, and not answered

    @property
    def history(self) -> list[Produce]:
        return [each._replace(once=self.kind != "lines") for each in super().history]

    def work(self) -> None:
        while self._pending or not self.enough.is_set():
            try:
                with LineClient(self.port("ingress")) as client:
                    self._converse(client)
            except (OSError, ValueError, AssertionError):
                pass  # the broker is away, or has ended this connection
            time.sleep(self.rng.random() * self.rest_s)

    def _converse(self, client: LineClient) -> None:
        hello = NUMBERED[self.kind]
        words = hello % self.process.encode() if hello else b""
        if self.kind == "ids":  # a hello may come late, through a door that waited for a leader
            words += b" attempt=%b.%d" % (self.process.encode(), next(self._attempts))
        client.send_raw(b"!hello acks=1%b\n" % words)
        greeting = client.line()
        if not greeting.startswith(b"!ok "):
            return self._note(greeting)
        answered = 0  # lines of this connection
        while self._pending or not self.enough.is_set():
            if not self.enough.is_set() and (answered or not self._pending):
                self._pending.extend(self.burst())
            batch, began = list(self._pending), time.monotonic()
            client.send_raw(b"".join(map(self._line, batch)))
            upto = answered + len(batch)
            while answered < upto:
                answered = self._take(client.line(), answered, began)
            self.rest()

    def _line(self, message: Message) -> bytes:
        number, _, key, payload = message
        own = b"" if self.kind == "lines" else b"%d" % number
        return b"%b|0|%b|%b\n" % (self.routing_key(key), own, payload)

    def _take(self, line: bytes, answered: int, began: float) -> int:
        """Note one reply; return how many lines of this connection are answered."""
        word, number, *more = line.split(b" ")
        count = int(number) - answered
        if word == b"!err":
            self._note(line)
            assert more[0] not in AGAIN and count == 1, line
            self.tell(self._pending.popleft()[1], FAIL)
            return int(number)
        assert word in (b"!ack", b"!dup") and 0 < count <= len(self._pending), line
        seq, now = int(more[0]), time.monotonic()
        for n in range(count):
            value = self._pending.popleft()[1]
            self.tell(value, OK)
            if seq:  # `!dup <n> 0`: stored so long ago that the seq is not known
                self.answers.append(Answer(self.process, value, seq - count + 1 + n, began, now))
        return int(number)

    def _note(self, line: bytes) -> None:
        """Keep a refusal that is a fault. Raises AssertionError: what was sent is not refused for good by it."""
        if line.split(b" ")[2:3] and line.split(b" ")[2] in NEVER:
            self.wrong.append(f"{time.monotonic():.1f} {self.process}: {line.decode(errors='replace').strip()}")
            raise AssertionError(line)

    def abandon(self) -> None:
        super().abandon()
        self._pending.clear()


class Plain(Sender):
    """Port 5673 without acks: each connection is a process of its own, for nothing orders one behind another."""

    def __init__(self, name: str, topic: str, pipes: Path, seed: int) -> None:
        super().__init__(name, topic, pipes, seed)
        self._connections: dict[str, str] = {}  # value → connection
        self._count = 0

    @property
    def history(self) -> list[Produce]:
        return [each._replace(process=self._connections[each.value]) for each in super().history]

    def work(self) -> None:
        while not self.enough.is_set():
            self._count += 1
            burst = self.burst()
            self._connections |= dict.fromkeys((value for _, value, _, _ in burst), f"{self.process}.{self._count}")
            lines = [b"%b|0|%d|%b\n" % (self.routing_key(key), n, payload) for n, _, key, payload in burst]
            try:
                with LineClient(self.port("ingress")) as client:
                    client.send_raw(b"".join(lines))
                    client.end()
                    client.rest()
            except (OSError, ValueError):
                pass
            self.rest()


class Reader(threading.Thread):
    """Reads partitions by port 5674, each record once: whoever serves it next goes on where it is."""

    def __init__(self, name: str, topic: str, partitions: int, pipes: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self.process, self._topic, self._pipes = name, topic, pipes
        self._next: dict[Place, int] = {(topic, n): 0 for n in range(partitions)}
        self._rng, self.enough = random.Random(seed), threading.Event()
        self.history: list[Operation] = []

    def run(self) -> None:
        while not self.enough.is_set():
            try:
                with LineClient(int((self._pipes / "egress.port").read_text())) as client:
                    self._read(client)
            except (OSError, ValueError, AssertionError):
                self.enough.wait(0.1)  # the broker is away, or has ended this connection

    def _read(self, client: LineClient) -> None:
        """Until the connection breaks, or for a while: then another broker's turn comes."""
        began = time.monotonic()
        places = " ".join(f"{topic}/{n}@{offset}" for (topic, n), offset in self._next.items())
        client.send(f"ASSIGN {places}")
        line = client.line()
        if match := _BEYOND.match(line):
            self._note_end((match[1].decode(), int(match[2])), int(match[3]), began)
        if not isinstance(replies.reply(line), replies.Assigned):
            return
        until = time.monotonic() + self._rng.random() * 5
        while time.monotonic() < until and not self.enough.is_set():
            self._ask_for_ends(client)
            place, first, lines = client.fetch(self._rng.choice([3000, 50_000]), wait_ms=100)
            if place is None:
                continue
            values = tuple(value_of(line.split(b"|", 5)[5]) for line in lines.splitlines())
            poll = Poll(self.process, "", (place.topic, place.partition), first, values, time.monotonic())
            self.history.append(poll)
            self._next[poll.place] = poll.end

    def _ask_for_ends(self, client: LineClient) -> None:
        began = time.monotonic()
        client.send("!offsets")
        reply = client.reply()
        assert isinstance(reply, replies.OffsetsReply), reply
        for row in reply.rows:
            self._note_end((row.place.topic, row.place.partition), row.end, began)

    def _note_end(self, place: Place, end: int, began: float) -> None:
        self.history.append(Ends(self.process, place, end, began, time.monotonic()))

    @property
    def next(self) -> dict[Place, int]:
        """Where it goes on in each partition."""
        return dict(self._next)

    def finish(self) -> None:
        self.enough.set()
        self.join(PATIENCE_S)


class Clients:
    """All of the load, behind one address: senders of every kind, readers, and groups whose members are processes."""

    def __init__(self, root: Path, namespace: str, brokers: Sequence[str], rng: random.Random) -> None:
        self.root, self.pipes = root, root / "pipes"
        self.pipes.mkdir(parents=True)
        words = [sys.executable, "-m", "chaos.cluster.service", namespace, str(self.pipes), *brokers]
        env = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
        with (root / "service.log").open("ab") as log:
            self._service = subprocess.Popen(words, env=env, cwd=root, stderr=log)
        self._wait((self.pipes / "grpc.port").exists, "the service")
        seeds = iter(lambda: rng.randrange(1 << 30), -1)
        each = [(kind, f"{kind}-{n}") for kind in NUMBERED for n in (1, 2)]
        self.numbered = [Numbered(name, TOPIC, self.pipes, next(seeds), kind) for kind, name in each]
        self.plain = Plain("plain", TOPIC, self.pipes, next(seeds))
        self.readers = [Reader(f"reader-{n}", TOPIC, PARTITIONS, self.pipes, next(seeds)) for n in (1, 2)]
        self.crowd = Crowd(self, TOPIC, GROUPS, 6.0, rng)
        for load in (*self.numbered, self.plain, *self.readers):
            load.start()
        self.crowd.join_all()

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        until(condition, what, (self.root / "service.log").read_text)

    def acked_since(self, began: float) -> bool:
        """Whether a message that was sent since then is acknowledged."""
        return any(each.answers and each.answers[-1].began >= began for each in self.numbered)

    def first_ack_since(self, began: float) -> float:
        """When a message that was sent since then was first acknowledged."""
        return min(each.ended for sender in self.numbered for each in [*sender.answers] if each.began >= began)

    def longest_pause(self, began: float) -> float:
        """The longest time since then in which nothing was acknowledged."""
        answers = [each.ended for sender in self.numbered for each in [*sender.answers] if each.ended >= began]
        moments = sorted([began, *answers, time.monotonic()])
        return max(after - before for before, after in itertools.pairwise(moments))

    def wrong(self) -> list[str]:
        """Replies that are faults by themselves: fenced by itself, or without rights that nobody asks for."""
        return [each for sender in self.numbered for each in sender.wrong]

    def finish_writing(self) -> None:
        """Send no more, and wait until all that was sent with acks is answered."""
        for sender in (*self.numbered, self.plain):
            sender.finish()

    def finish_reading(self, load: Callable[[], Replica]) -> None:
        """Wait until each reader has come to the end of the topic's partitions; then groups commit no more either."""
        for reader in self.readers:
            self._wait(lambda reader=reader: reader.next == _ends(load()), f"{reader.process} at the end")  # type: ignore[misc]
            reader.finish()
        self.crowd.finish()

    def history(self) -> list[Operation]:
        """What all of them were told, once they have finished."""
        made: list[Operation] = [each for sender in (*self.numbered, self.plain) for each in sender.history]
        made += [each for sender in self.numbered for each in sender.answers]
        return [*made, *(each for reader in self.readers for each in reader.history), *self.crowd.history()]

    def close(self) -> None:
        for sender in (*self.numbered, self.plain):
            sender.abandon()
        for reader in self.readers:
            reader.enough.set()
        self.crowd.close()
        self._service.kill()
        self._service.wait()


def _ends(replica: Replica) -> dict[Place, int]:
    return {(TOPIC, n): len(replica.logs.get((TOPIC, n), ())) for n in range(PARTITIONS)}
