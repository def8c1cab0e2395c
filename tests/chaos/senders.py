"""Writers over every door that takes messages; `history` is what each was told. A new door is a class in SENDERS."""

import contextlib
import itertools
import json
import random
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import grpc
from grpc_client import Client

import kmq
from chaos.history import FAIL, OK, UNKNOWN, Place, Produce
from chaos.load import Load

PATIENCE_S = 60.0
KEYS = [b"", b"", b"a", b"b", b"eu", b"eu.de"]
Told = tuple[str, Place | None, int | None]  # outcome, and where it lies if that was said


class Sender(Load):
    """Sends bursts of values that nobody else sends, to one topic, until told to stop."""

    def __init__(self, name: str, topic: str, pipes: Path, seed: int) -> None:
        super().__init__(seed, rest_s=0.2)
        self.process, self.topic, self.pipes = name, topic, pipes
        self._numbers = itertools.count(1)
        self._told: dict[str, Told] = {}
        self._began: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self.sent: list[str] = []

    @property
    def history(self) -> list[Produce]:
        """All that it has sent; to be asked when it has finished."""
        told = [(value, *self._told.get(value, (UNKNOWN, None, None))) for value in self.sent]
        return [Produce(self.process, *each, began=self._began[each[0]], size=self._sizes[each[0]]) for each in told]

    def port(self, name: str) -> int:
        return int((self.pipes / f"{name}.port").read_text() or 0)

    def burst(self) -> list[tuple[int, str, bytes, bytes]]:
        """Number, value, key and payload of the next messages."""
        made = []
        for number in itertools.islice(self._numbers, self.rng.randrange(1, 30)):
            value = f"{self.process}-{number}"
            self._began[value] = time.monotonic()
            filler = b"x" * self.rng.choice([0, 40, 40, 900])
            payload = b"%b %b" % (value.encode(), filler)
            self._sizes[value] = len(payload)
            made.append((number, value, self.rng.choice(KEYS), payload))
        self.sent += [value for _, value, _, _ in made]
        return made

    def abandon(self) -> None:
        """Stop, whatever has become of the broker."""
        self.enough.set()

    def tell(self, value: str, outcome: str, place: Place | None = None, offset: int | None = None) -> None:
        self._told[value] = outcome, place, offset

    def routing_key(self, key: bytes) -> bytes:
        return b"%b.%b" % (self.topic.encode(), key) if key else self.topic.encode()


class ByProducer(Sender):
    """kmq.Producer."""

    def abandon(self) -> None:
        super().abandon()
        if self._producer is not None:
            self._producer.abort()

    _producer: kmq.Producer | None = None

    def work(self) -> None:
        waiting: list[tuple[str, kmq.Delivery]] = []
        with kmq.Producer(port=lambda: self.port("ingress"), timeout_s=PATIENCE_S) as producer:
            self._producer = producer
            while not self.enough.is_set():
                for _, value, key, payload in self.burst():
                    waiting.append((value, producer.send(self.topic, payload, key=key or None)))
                self.rest()
        for value, delivery in waiting:
            self.tell(value, FAIL if delivery.error else OK)


class ByAckedLines(Sender):
    """Port 5673 by hand, with acks. What was not answered is sent again under the same ids."""

    def work(self) -> None:
        while not self.enough.is_set():
            burst = self.burst()
            lines = [b"%b|0|%d|%b\n" % (self.routing_key(key), n, payload) for n, _, key, payload in burst]
            while not self._send(b"".join(lines), len(lines)):
                self.rest()
            for _, value, _, _ in burst:
                self.tell(value, OK)
            self.rest()

    def _send(self, text: bytes, count: int) -> bool:
        """Whether all of it was acknowledged."""
        try:
            with socket.create_connection(("127.0.0.1", self.port("ingress")), timeout=PATIENCE_S) as sock:
                sock.sendall(b"!hello acks=1 producer=%b\n%b" % (self.process.encode(), text))
                with sock.makefile("rb") as replies:
                    if not replies.readline().startswith(b"!ok "):
                        return False
                    answered = 0
                    while answered < count:
                        word, number, *_ = [*replies.readline().split(b" "), b"", b""]
                        if word not in (b"!ack", b"!dup"):
                            return False
                        answered = int(number)
        except (OSError, ValueError):
            return False
        return True


class ByPlainLines(Sender):
    """Port 5673 without acks: nobody says what became of a line, and it is never sent again."""

    def work(self) -> None:
        while not self.enough.is_set():
            lines = [b"%b|0|%d|%b\n" % (self.routing_key(key), n, payload) for n, _, key, payload in self.burst()]
            try:
                with socket.create_connection(("127.0.0.1", self.port("ingress")), timeout=PATIENCE_S) as sock:
                    sock.sendall(b"".join(lines))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
            except (OSError, ValueError):
                pass
            self.rest()


class ByHttp(Sender):
    """The HTTP API, with a producer and ids: what was not answered is sent again."""

    def work(self) -> None:
        while not self.enough.is_set():
            left = {value: self._message(n, key, payload) for n, value, key, payload in self.burst()}
            while left:
                self._send(left)
                self.rest()

    def _send(self, left: dict[str, dict[str, str]]) -> None:
        """Send what is left; forget what is stored."""
        try:
            with contextlib.closing(HTTPConnection("127.0.0.1", self.port("http"), timeout=PATIENCE_S)) as connection:
                for value in list(self._answered(connection, left)):
                    del left[value]
        except (OSError, ValueError, HTTPException):
            pass

    def _message(self, number: int, key: bytes, payload: bytes) -> dict[str, str]:
        key_too = {"key": key.decode()} if key else {}
        return {"id": str(number), "value": payload.decode(), **key_too}

    def _answered(self, connection: HTTPConnection, left: dict[str, dict[str, str]]) -> Iterator[str]:
        """Send what is left, in one of two forms; yield the values that are stored, or refused for good."""
        target = f"/api/topics/{self.topic}/produce?format=text"
        if self.rng.random() < 0.5:
            body = json.dumps({"producer": self.process, "messages": list(left.values())}).encode()
            connection.request("POST", target, body)
        else:
            body = "".join(f"{json.dumps(message)}\n" for message in left.values()).encode()
            headers = {"Content-Type": "application/x-ndjson"}
            connection.request("POST", f"{target}&producer={self.process}", body, headers)
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            return
        rows = json.loads(text)["results"] if text.startswith(b'{"results"') else map(json.loads, text.splitlines())
        for value, row in list(zip(left, rows, strict=True)):
            if "error" not in row:
                place = None if row["offset"] is None else (row["topic"], row["partition"])
                self.tell(value, OK, place, row["offset"])
                yield value


class ByGrpc(Sender):
    """`kmq.v1`, with a producer and ids: what was not answered is sent again."""

    def work(self) -> None:
        while not self.enough.is_set():
            left = {value: self._message(n, key, payload) for n, value, key, payload in self.burst()}
            while left:
                with contextlib.suppress(grpc.RpcError, ValueError, OSError):
                    self._send(left)
                self.rest()

    def _message(self, number: int, key: bytes, payload: bytes) -> dict[str, Any]:
        return {"id": str(number), "key": key or None, "value": payload}

    def _send(self, left: dict[str, dict[str, Any]]) -> None:
        """Send what is left; forget what is stored."""
        with Client(self.port("grpc")) as client:
            client.waits = False  # the port is another one after each start of the gateway
            results = client.produce(self.topic, *left.values(), producer=self.process)
        for value, result in list(zip(left, results, strict=True)):
            if result.WhichOneof("outcome") == "stored":
                stored = result.stored
                is_placed = stored.HasField("offset")
                place = (stored.topic, stored.partition) if is_placed else None
                self.tell(value, OK, place, stored.offset if is_placed else None)
                del left[value]


SENDERS = {"producer": ByProducer, "acked": ByAckedLines, "plain": ByPlainLines, "http": ByHttp, "grpc": ByGrpc}


def start_senders(topic: str, pipes: Path, rng: random.Random) -> list[Sender]:
    """One for each door, started."""
    senders = [made(f"{name}-sender", topic, pipes, rng.randrange(1 << 30)) for name, made in SENDERS.items()]
    for sender in senders:
        sender.start()
    return senders
