"""A member of a group as a process of its own, which can be killed and stopped. It writes a history of what it sees.

    python -m chaos.member DOOR NAME GROUP TOPIC PIPES HISTORY SESSION_S

SIGTERM ends it in order. It reads, commits now and then, and gives up what it is asked to. A new door is a
function in DOORS.
"""

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from grpc_client import Client, Stream
from line_client import LineClient

import kmq
from chaos.diary import At, Diary, Row
from chaos.history import Offsets, Place
from kmq.wire import replies

PATIENCE_S = 60.0
_LEAST_SESSION_MS = 6000  # that a client of Kafka may ask for
_FETCH, _COMMIT, _NACK = 1, 2, 3  # ids of requests over gRPC


class Task(NamedTuple):
    """What a member has been told to do."""

    name: str
    group: str
    topic: str
    pipes: Path
    session_s: float
    diary: Diary
    rng: random.Random
    enough: threading.Event

    def port(self, name: str) -> int:
        return int((self.pipes / f"{name}.port").read_text() or 0)

    def wants_to_commit(self) -> bool:
        """Now and then, and always after a long sleep: a commit of somebody whose session has ended."""
        return self.diary.gap_s > self.session_s / 2 or self.rng.random() < 0.3

    def delay_s(self) -> float:
        """Of a message that is given back."""
        return self.rng.choice([0.0, 0.1])


def value_of(payload: bytes | None) -> str:
    return (payload or b"").decode().partition(" ")[0]


# --- kmq.Consumer ----------------------------------------------------------------------------------------------------


def _options(task: Task) -> dict[str, Any]:
    return {
        "port": lambda: task.port("egress"),
        "group_id": task.group,
        "member": task.name,
        "session_s": task.session_s,
        "fetch_max_bytes": task.rng.choice([3000, 50_000]),
        "max_poll_records": task.rng.choice([20, 500]),
    }


class _Callbacks:
    """What a consumer tells its application, for the diary."""

    def __init__(self, task: Task) -> None:
        self.diary, self.asked_at = task.diary, 0.0

    def on_assign(self, places: Iterable[Place]) -> None:
        new = _plain(places)
        kept = [place for place in self.diary.places if place not in new]
        self.diary.assigned(None, [*kept, *new], new, self.asked_at)

    def on_lost(self, places: Iterable[Place]) -> None:
        self.diary.give_up(_plain(places))


def _plain(places: Iterable[Place]) -> list[Place]:
    return [(topic, number) for topic, number in places]


def _note(diary: Diary, messages: Iterable[kmq.Message]) -> None:
    rows: dict[bool, list[Row]] = {True: [], False: []}  # whether they come again
    for each in messages:
        rows[each.deliveries > 1].append(((each.topic, each.partition), each.offset, value_of(each.value)))
    diary.polled(rows[False], rows[True])


def _message(messages: Iterable[kmq.Message], at: At) -> kmq.Message:
    return next(each for each in messages if ((each.topic, each.partition), each.offset) == at)


def by_latest(task: Task) -> None:
    by_consumer(task, start="latest")


def by_consumer(task: Task, start: str = "earliest") -> None:
    diary, told = task.diary, _Callbacks(task)

    def commit(offsets: Offsets) -> None:
        if offsets:
            began = diary.asks_to_commit(offsets)
            with contextlib.suppress(kmq.KmqError):
                consumer.commit(offsets)
                diary.has_committed(offsets, began)

    def on_revoke(places: Iterable[Place]) -> None:
        commit(diary.due(_plain(places)))
        told.on_lost(places)

    hooks = {"on_assign": told.on_assign, "on_revoke": on_revoke, "on_lost": told.on_lost, "start": start}
    with kmq.Consumer(task.topic, **_options(task) | hooks) as consumer:
        while not task.enough.is_set():
            began = time.monotonic()
            messages = consumer.poll(timeout=0.1)
            told.asked_at = began
            _note(diary, messages)
            for at in diary.take_nacks():
                began = time.monotonic()
                with contextlib.suppress(kmq.KmqError):
                    consumer.nack(_message(messages, at), delay=task.delay_s())
                    diary.nacked(at, began)
            for at in diary.take_again():  # if it is not on disk when this member ends, it comes once more
                consumer.commit_async(_message(messages, at))
            if not messages or task.wants_to_commit():
                commit(diary.due())


def by_asyncio(task: Task) -> None:
    diary, told = task.diary, _Callbacks(task)

    async def run() -> None:
        async def commit(offsets: Offsets) -> None:
            if offsets:
                began = diary.asks_to_commit(offsets)
                with contextlib.suppress(kmq.KmqError):
                    await consumer.commit(offsets)
                    diary.has_committed(offsets, began)

        async def on_revoke(places: Iterable[Place]) -> None:
            await commit(diary.due(_plain(places)))
            told.on_lost(places)

        async with kmq.AsyncConsumer(
            task.topic, on_assign=told.on_assign, on_revoke=on_revoke, on_lost=told.on_lost, **_options(task)
        ) as consumer:
            while not task.enough.is_set():
                began = time.monotonic()
                messages = await consumer.poll(timeout=0.1)
                told.asked_at = began
                _note(diary, messages)
                for at in diary.take_nacks():
                    began = time.monotonic()
                    with contextlib.suppress(kmq.KmqError):
                        await consumer.nack(_message(messages, at), delay=task.delay_s())
                        diary.nacked(at, began)
                again = [consumer.commit(_message(messages, at)) for at in diary.take_again()]
                await asyncio.gather(*again, return_exceptions=True)
                if not messages or task.wants_to_commit():
                    await commit(diary.due())

    asyncio.run(run())


# --- lines, by hand --------------------------------------------------------------------------------------------------


class _Lines:
    """One connection of a member that speaks the protocol itself."""

    def __init__(self, task: Task, client: LineClient) -> None:
        self._task, self._diary, self._client = task, task.diary, client
        self._waiting: deque[tuple[Offsets, float]] = deque()  # commits; those of messages that came again are empty
        self._nacks: deque[tuple[At, float]] = deque()
        self._answered = time.monotonic()  # when the last request was sent that has been answered
        client.send(f"GROUP {task.group} member={task.name} topics={task.topic} session={int(task.session_s * 1000)}ms")
        self._hear(replies.Assigned)

    def _hear(self, *wanted: type) -> Any:
        """Take replies up to one of these types."""
        while True:
            reply = self._client.reply()
            if isinstance(reply, replies.Assigned):
                self._assigned(reply)
            elif isinstance(reply, replies.Revoke):
                self._revoke(_plain(reply.partitions))
            elif isinstance(reply, replies.Committed):
                self._diary.has_committed(*self._waiting.popleft())
            elif isinstance(reply, replies.Nacked):
                self._diary.nacked(*self._nacks.popleft())
            elif isinstance(reply, replies.Failed):
                assert reply.request in ("commit", "nack"), reply
                (self._nacks if reply.request == "nack" else self._waiting).popleft()
            if isinstance(reply, wanted):
                return reply

    def _assigned(self, reply: replies.Assigned) -> None:
        places = _plain(place for place, _ in reply.offsets)
        fresh = [place for place in places if place not in self._diary.places]
        self._diary.assigned(reply.generation, places, fresh, self._answered)

    def _revoke(self, places: list[Place]) -> None:
        self.commit(self._diary.due(places))
        self._diary.give_up(places)
        self._client.send("!revoked")

    def commit(self, offsets: Offsets) -> None:
        if offsets:
            self._waiting.append((offsets, self._diary.asks_to_commit(offsets)))
            self._client.send("!commit " + " ".join(f"{t}/{number} {n}" for (t, number), n in offsets.items()))

    def read(self) -> bool:
        """Return whether there was something."""
        asked = time.monotonic()
        self._client.send(f"!fetch {self._task.rng.choice([3000, 50_000])} wait=100")
        batch = self._hear(replies.Batch)
        self._answered = asked
        if batch.place is None:
            return False
        lines = self._client.read(batch.nbytes).splitlines()
        place = batch.place.topic, batch.place.partition
        rows = [(place, n, value_of(line.split(b"|", 5)[5])) for n, line in enumerate(lines, batch.offset)]
        self._diary.polled(*(([], rows) if batch.deliveries else (rows, [])))
        for at in self._diary.take_nacks():
            self._nacks.append((at, time.monotonic()))
            (topic, number), offset = at
            self._client.send(f"!nack {topic}/{number} {offset} delay={self._task.delay_s() * 1000:.0f}")
        for (topic, number), offset in self._diary.take_again():
            self._waiting.append(({}, time.monotonic()))
            self._client.send(f"!commit again {topic}/{number} {offset}")
        return True

    def settle_commits(self) -> None:
        while self._waiting or self._nacks:
            self._hear(replies.Committed, replies.Nacked, replies.Failed)

    def leave(self) -> None:
        self.settle_commits()
        self._client.send("!leave")
        self._client.rest()


def by_lines(task: Task) -> None:
    while not task.enough.is_set():
        try:
            with LineClient(task.port("egress")) as client:
                session = _Lines(task, client)
                while not task.enough.is_set():
                    if not session.read() or task.wants_to_commit():
                        session.commit(task.diary.due())
                        session.settle_commits()
                session.leave()
        except (OSError, ValueError, AssertionError):
            task.enough.wait(0.05)  # the gateway is away, or has ended this member
        task.diary.give_up(task.diary.places)


# --- HTTP ------------------------------------------------------------------------------------------------------------


class _Http:
    def __init__(self, task: Task) -> None:
        self._task, self._diary = task, task.diary
        self._connection = HTTPConnection("127.0.0.1", task.port("http"), timeout=PATIENCE_S)
        self._members = f"/api/groups/{task.group}/members"
        self._seen = 0.0
        self._left: socket.socket | None = None  # an answer that nobody reads is on its way there

    def _join(self) -> None:
        """Join with a session as short as that of the others: who joins by consuming has a longer one."""
        task = self._task
        terms = {"member": task.name, "topics": [task.topic], "sessionMs": int(task.session_s * 1000)}
        status, answer = self._call("POST", self._members, terms)
        if status != 200:
            raise ConnectionError(answer)
        self._diary.generation = None  # what comes next begins at the committed offsets

    def _call(self, method: str, target: str, body: Any = None) -> tuple[int, Any]:
        self._connection.request(method, target, None if body is None else json.dumps(body).encode())
        response = self._connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None

    def read(self) -> bool:
        """Return whether there was something."""
        task, began = self._task, time.monotonic()
        if began > self._seen + task.session_s / 2:
            self._join()
        status, answer = self._call("GET", self._consume())
        self._seen = time.monotonic()
        if status != 200:
            raise ConnectionError(answer)
        self._take(answer, began)
        return bool(answer["messages"])

    def _consume(self) -> str:
        task = self._task
        terms = f"group={task.group}&member={task.name}&format=text&timeoutMs=100"
        return f"/api/topics/{task.topic}/consume?{terms}&maxMessages={task.rng.choice([50, 300])}"

    def _take(self, answer: Any, began: float, is_read: bool = True) -> None:
        """Note an answer; `is_read`: else it is given up."""
        places = [(row["topic"], row["partition"]) for row in answer["assignment"]]
        shown = {(self._task.topic, row["partition"]): row["offset"] for row in answer["positions"]}
        if answer["generation"] != self._diary.generation or tuple(places) != self._diary.places:
            before = dict(self._diary.next)
            self._diary.assigned(answer["generation"], places, places, began, goes_on=True)
            # Where it goes on, what it was given before is still to be committed.
            goes_on = [place for place, offset in shown.items() if before.get(place) == offset]
            self._diary.next.update({place: before[place] for place in goes_on if place in self._diary.places})
        rows: dict[bool, list[Row]] = {True: [], False: []}  # whether they come again
        for row in answer["messages"]:
            place = self._task.topic, row["partition"]
            rows["deliveries" in row].append((place, row["offset"], row["value"].partition(" ")[0]))
        if is_read:
            self._diary.polled(rows[False], rows[True])
            for place, _ in self._diary.take_again():  # a commit of the position that was shown with it is one of it
                self._diary.next.setdefault(place, shown[place])
            for place, offset in self._diary.take_nacks():
                self._nack(place, offset)
        else:
            self._diary.lost([*rows[True], *rows[False]], began)

    def _nack(self, place: Place, offset: int) -> None:
        began, delay_ms = time.monotonic(), round(self._task.delay_s() * 1000)
        asked = {"partition": place[1], "offset": offset, "delayMs": delay_ms, "reason": "chaos"}
        who = {"group": self._task.group, "member": self._task.name, "generation": self._diary.generation}
        status, answer = self._call("POST", f"/api/topics/{self._task.topic}/nack", asked | who)
        if status == 200:
            self._diary.nacked((place, offset), began)
        elif status != 409:
            raise ConnectionError(answer)

    def leave_an_answer(self) -> None:
        """Ask, look at the answer without taking it, and let it hang for a while; or end the one that hangs."""
        if self._left is not None:
            self._left.close()  # with bytes that nobody has read, so it is reset
            self._left = None
            return
        began, port = time.monotonic(), self._task.port("http")
        if began > self._seen + self._task.session_s / 2:
            return  # it may have to join again first
        self._left = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._left.sendall(f"GET {self._consume()} HTTP/1.1\r\nHost: kmq\r\n\r\n".encode())
        head, text, size = b"", b"", -1
        while len(text) != size:
            found = self._left.recv(1 << 20, socket.MSG_PEEK)
            head, _, text = found.partition(b"\r\n\r\n")
            if not found or time.monotonic() > began + PATIENCE_S:
                raise ConnectionError("no whole answer")
            size = int(re.findall(rb"(?i)content-length: (\d+)", head)[0]) if text else -1
        self._seen = time.monotonic()
        if b" 200 " in head.partition(b"\r\n")[0]:
            self._take(json.loads(text), began, is_read=False)

    def commit(self, offsets: Offsets) -> None:
        if not offsets:
            return
        task, began = self._task, self._diary.asks_to_commit(offsets)
        rows = [{"partition": number, "offset": offset} for (_, number), offset in offsets.items()]
        asked = {"group": task.group, "member": task.name, "generation": self._diary.generation, "offsets": rows}
        status, answer = self._call("POST", f"/api/topics/{task.topic}/commit", asked)
        if status == 200:
            self._diary.has_committed(offsets, began)
        elif status != 409:
            raise ConnectionError(answer)

    def leave(self) -> None:
        self._call("DELETE", f"{self._members}/{self._task.name}")

    def close(self) -> None:
        self._connection.close()
        if self._left is not None:
            self._left.close()


def by_torn_http(task: Task) -> None:
    by_http(task, is_torn=True)


def by_http(task: Task, is_torn: bool = False) -> None:
    while not task.enough.is_set():
        with contextlib.suppress(OSError, ValueError, HTTPException), contextlib.closing(_Http(task)) as session:
            while not task.enough.is_set():
                if is_torn and task.rng.random() < 0.2:
                    session.leave_an_answer()
                if not session.read() or task.wants_to_commit():
                    session.commit(task.diary.due())
            session.leave()
        task.enough.wait(0.05)


# --- kmq.v1 ----------------------------------------------------------------------------------------------------------


class _Grpc:
    """One stream of a member."""

    def __init__(self, task: Task, stream: Stream) -> None:
        self._task, self._diary, self._stream = task, task.diary, stream
        self._waiting: deque[tuple[Offsets, float]] = deque()  # commits; those of messages that came again are empty
        self._nacks: deque[tuple[At, float]] = deque()
        self._answered = time.monotonic()  # when the last request was sent that has been answered
        stream.send(
            "join", group=task.group, topics=[task.topic], member=task.name, session_ms=int(task.session_s * 1000)
        )
        self._hear("assigned")

    def _hear(self, wanted: str) -> Any:
        """Take responses up to one of this kind."""
        while True:
            response = self._stream.read()
            kind = response.WhichOneof("response")
            if kind == "assigned":
                places = list(self._stream.assigned)
                fresh = [place for place in places if place not in self._diary.places]
                self._diary.assigned(self._stream.generation, places, fresh, self._answered)
            elif kind == "revoke":
                self._revoke([(row.topic, number) for row in response.revoke.partitions for number in row.partitions])
            elif kind == "committed":
                self._diary.has_committed(*self._waiting.popleft())
            elif kind == "nacked":
                self._diary.nacked(*self._nacks.popleft())
            elif kind == "error":
                if response.request_id not in (_COMMIT, _NACK):
                    raise ConnectionError(response.error)
                (self._nacks if response.request_id == _NACK else self._waiting).popleft()
            if kind == wanted:
                return getattr(response, kind)

    def _revoke(self, places: list[Place]) -> None:
        self.commit(self._diary.due(places))
        self._diary.give_up(places)
        self._stream.send("revoked")

    def commit(self, offsets: Offsets) -> None:
        if offsets:
            self._waiting.append((offsets, self._diary.asks_to_commit(offsets)))
            rows = [{"topic": t, "partition": number, "next_offset": n} for (t, number), n in offsets.items()]
            self._stream.send("commit", _COMMIT, offsets=rows)

    def read(self) -> bool:
        """Return whether there was something."""
        asked = time.monotonic()
        self._stream.send("fetch", _FETCH, max_records=self._task.rng.choice([50, 300]), wait_ms=100)
        batch = self._hear("batch")
        self._answered = asked
        place = batch.topic, batch.partition
        rows: dict[bool, list[Row]] = {True: [], False: []}  # whether they come again
        for record in batch.records:
            rows[record.deliveries > 0].append((place, record.offset, value_of(record.value)))
        self._diary.polled(rows[False], rows[True])
        for at in self._diary.take_nacks():
            self._nacks.append((at, time.monotonic()))
            (topic, number), offset = at
            fields = {"topic": topic, "partition": number, "offset": offset}
            self._stream.send("nack", _NACK, **fields, delay_ms=round(self._task.delay_s() * 1000), reason="chaos")
        if again := self._diary.take_again():
            self._waiting.append(({}, time.monotonic()))
            messages = [{"topic": topic, "partition": number, "offset": n} for (topic, number), n in again]
            self._stream.send("commit", _COMMIT, again=messages)
        return bool(batch.records)

    def leave(self) -> None:
        self._stream.send("leave")
        self._stream.status()


def by_grpc(task: Task) -> None:
    while not task.enough.is_set():
        try:
            with Client(task.port("grpc")) as client:
                client.waits = False  # the port is another one after each start of the gateway
                with client.subscribe() as stream:
                    session = _Grpc(task, stream)
                    while not task.enough.is_set():
                        if not session.read() or task.wants_to_commit():
                            session.commit(task.diary.due())
                    session.leave()
        except (grpc.RpcError, StopIteration, OSError, ValueError):
            task.enough.wait(0.05)  # the gateway is away, or has ended this member
        task.diary.give_up(task.diary.places)


# --- Kafka -----------------------------------------------------------------------------------------------------------


def _row(message: Message) -> Row:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None and partition is not None and offset is not None, "a message that was read has them"
    return (topic, partition), offset, value_of(message.value())


def by_kafka(task: Task) -> None:
    """librdkafka. It says nothing of generations, and is not given what a member at another door has given back."""
    diary, asked_at = task.diary, time.monotonic()

    def places_of(partitions: Iterable[TopicPartition]) -> list[Place]:
        return [(each.topic, each.partition) for each in partitions]

    def commit(offsets: Offsets) -> None:
        if offsets:
            began = diary.asks_to_commit(offsets)
            with contextlib.suppress(KafkaException):
                wanted = [TopicPartition(topic, number, offset) for (topic, number), offset in offsets.items()]
                answered = consumer.commit(offsets=wanted, asynchronous=False)
                if not any(each.error for each in answered):
                    diary.has_committed(offsets, began)

    def on_assign(_: Consumer, partitions: list[TopicPartition]) -> None:
        new = places_of(partitions)
        kept = [place for place in diary.places if place not in new]
        diary.assigned(None, [*kept, *new], new, asked_at)

    def on_revoke(_: Consumer, partitions: list[TopicPartition]) -> None:
        commit(diary.due(places_of(partitions)))
        diary.give_up(places_of(partitions))

    def on_lost(_: Consumer, partitions: list[TopicPartition]) -> None:
        diary.give_up(places_of(partitions))

    consumer = Consumer(
        {
            "bootstrap.servers": f"127.0.0.1:{task.port('kafka')}",
            "group.id": task.group,
            "client.id": task.name,
            "session.timeout.ms": max(_LEAST_SESSION_MS, int(task.session_s * 1000)),
            "heartbeat.interval.ms": 300,
            "partition.assignment.strategy": "cooperative-sticky",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.message.max.bytes": task.rng.choice([3000, 50_000]),
            "topic.metadata.refresh.interval.ms": 1000,
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }
    )
    consumer.subscribe([task.topic], on_assign=on_assign, on_revoke=on_revoke, on_lost=on_lost)
    while not task.enough.is_set():
        began = time.monotonic()
        some = [each for each in consumer.consume(task.rng.choice([20, 500]), 0.1) if each.error() is None]
        asked_at = began
        diary.polled([_row(each) for each in some])
        diary.take_nacks()  # nobody can give anything back here
        if not some or task.wants_to_commit():
            commit(diary.due())
    commit(diary.due())
    consumer.close()


DOORS: dict[str, Callable[[Task], None]] = {
    "consumer": by_consumer,
    "asyncio": by_asyncio,
    "lines": by_lines,
    "http": by_http,
    "grpc": by_grpc,
    "kafka": by_kafka,
    "latest": by_latest,
    "torn": by_torn_http,
}


def main(door: str, name: str, group: str, topic: str, pipes: str, history: str, session_s: str) -> None:
    enough = threading.Event()
    # In a thread of its own: a handler that runs while this one holds the lock of `enough` would wait for ever.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=enough.set).start())
    diary = Diary(Path(history), name, group)
    DOORS[door](Task(name, group, topic, Path(pipes), float(session_s), diary, random.Random(name), enough))


if __name__ == "__main__":
    main(*sys.argv[1:])
