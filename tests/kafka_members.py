"""Members of groups that are real clients of Kafka, each a process of its own: tests kill and stop them.

    python kafka_members.py LIBRARY PORT GROUP TOPIC [setting=value …]        confluent | kafka-python | aiokafka
    $(scripts/kafka-clients java-member) PORT GROUP TOPIC [setting=value …]      Apache's own client

    ← assigned 0 1 2            what it reads now, after each change; settings are those of the library
    ← lost 3 4                  what was taken from it without its consent
    ← message <partition> <offset> <value>
    ← done <command> [result] | failed <command> <error>
    → commit <partition> <offset> | committed <partition> | close

Java        scripts/kafka-clients fetches Apache's client. Where it cannot be had tests with Java are skipped; in CI the test in
            tests/kafka that it can be had fails.
"""

import asyncio
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S, until

PYTHON = ("confluent", "kafka-python", "aiokafka")


@cache
def _java() -> list[str]:
    """Return the command of a member that is Apache's client; none where it cannot be had."""
    script, env = Path(__file__).parents[1] / "scripts/kafka-clients", os.environ | {"PYTHON": sys.executable}
    return subprocess.run([script, "java-member"], stdout=subprocess.PIPE, text=True, env=env).stdout.splitlines()


def has_java() -> bool:
    return bool(_java())


# --- in tests ---------------------------------------------------------------------------------------------------------


class Member:
    """A client that runs. `assigned`: what it reads now; None before its first assignment."""

    def __init__(self, library: str, port: int, group: str, topic: str, **settings: object) -> None:
        self.name, self.group = f"{library} of {group}", group
        self.assigned: set[int] | None = None
        self.assignments: list[set[int]] = []
        self.lost: list[int] = []
        self.messages: list[tuple[int, int, str]] = []
        self._answers: queue.Queue[str] = queue.Queue()
        self._said: list[str] = []
        named = [f"{name}={value}" for name, value in settings.items()]
        begin = [sys.executable, __file__, library]
        if library == "java":
            begin = [*_java()[:1], "-Xmx128m", *_java()[1:]]
        self.process = subprocess.Popen(
            [*begin, str(port), group, topic, *named],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, rest = line.rstrip("\n").partition(" ")
            self._said.append(line)
            if word == "assigned":
                self.assigned = set(map(int, rest.split()))
                self.assignments.append(self.assigned)
            elif word == "lost":
                self.lost += map(int, rest.split())
            elif word == "message":
                partition, offset, value = rest.split(" ", 2)
                self.messages.append((int(partition), int(offset), value))
            elif word in ("done", "failed"):
                self._answers.put(line.strip())

    def ask(self, command: str) -> str:
        """Say a command, and return its result. Raises AssertionError with what the client says where it failed."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        try:
            answer = self._answers.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"{self}: no answer to {command}") from None
        word, _, rest = answer.partition(" ")
        assert word == "done", f"{self.name}: {answer}"
        return rest.removeprefix(command.split()[0]).strip()

    def await_assigned(self, *partitions: int) -> None:
        until(lambda: self.assigned == set(partitions), f"it reads {partitions}", lambda: self)

    def close(self) -> None:
        """Leave the group."""
        self.ask("close")
        self.process.wait(PATIENCE_S)
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __str__(self) -> str:
        return f"{self.name} reads {self.assigned}; it said at last\n{''.join(self._said[-30:])}"


def await_shared(members: list[Member], partitions: int) -> None:
    """Wait until the members read all partitions of their topic between them, each once, and evenly."""

    def is_shared() -> bool:
        parts = [each.assigned for each in members]
        some = [part for part in parts if part is not None]
        assert all(each.process.poll() is None for each in members), "\n".join(map(str, members))
        together = sorted(number for part in some for number in part)
        return len(some) == len(members) and together == list(range(partitions)) and _spread(some) <= 1

    until(is_shared, f"{partitions} partitions, shared", lambda: "\n".join(map(str, members)))


def _spread(parts: list[set[int]]) -> int:
    return max(map(len, parts)) - min(map(len, parts))


# --- the clients ------------------------------------------------------------------------------------------------------


def say(*words: object) -> None:
    print(*words, flush=True)


def settings_of(words: list[str]) -> dict[str, Any]:
    """Return settings as libraries take them: numbers and booleans are no text."""
    plain: dict[str, Any] = {"true": True, "false": False}
    named = (word.split("=", 1) for word in words)
    return {name: plain.get(value, int(value) if value.isdigit() else value) for name, value in named}


def say_messages(messages: Iterable[Any]) -> None:
    for each in messages:
        say("message", each.partition, each.offset, (each.value or b"").decode())


def say_assigned(assignment: Iterable[Any], before: list[int] | None) -> list[int] | None:
    """Say which partitions there are now, if they are others than before; return them. None: there were none yet."""
    now = sorted(each.partition for each in assignment)
    if now == before or not (now or before is not None):
        return before
    say("assigned", *now)
    return now


def commands(put: Callable[[list[str]], object]) -> None:
    """Read commands until stdin ends, which is the end of the test."""
    for line in sys.stdin:
        put(line.split())
    os._exit(1)


def run_confluent(port: str, group: str, topic: str, settings: dict[str, Any]) -> None:
    from confluent_kafka import Consumer, TopicPartition

    waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=commands, args=(waiting.put,), daemon=True).start()
    consumer = Consumer({"bootstrap.servers": f"localhost:{port}", "group.id": group, **settings})
    consumer.subscribe([topic], on_lost=lambda _, lost: say("lost", *[each.partition for each in lost]))
    before: list[int] | None = None
    while True:
        message = consumer.poll(0.05)
        now = sorted(each.partition for each in consumer.assignment())
        if now != before and (now or before is not None):
            before = now
            say("assigned", *now)
        if message is not None and message.error() is None:
            say("message", message.partition(), message.offset(), (message.value() or b"").decode())
        elif message is not None:
            say("error", message.error())
        if waiting.empty():
            continue
        word, *rest = waiting.get()
        try:
            if word == "commit":
                row = TopicPartition(topic, int(rest[0]), int(rest[1]))
                [done] = consumer.commit(offsets=[row], asynchronous=False)
                say("failed commit", done.error) if done.error else say("done commit", done.offset)
            elif word == "committed":
                [found] = consumer.committed([TopicPartition(topic, int(rest[0]))], timeout=10)
                say("done committed", found.offset)
            elif word == "close":
                consumer.close()
                say("done close")
                return
        except Exception as err:
            say("failed", word, err)


def run_kafka_python(port: str, group: str, topic: str, settings: dict[str, Any]) -> None:
    from kafka import KafkaConsumer
    from kafka.coordinator.assignors.range import RangePartitionAssignor
    from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
    from kafka.structs import OffsetAndMetadata, TopicPartition

    class Own(RangePartitionAssignor):  # type: ignore[misc]
        name = "own"

    known = {each.name: each for each in (RangePartitionAssignor, RoundRobinPartitionAssignor, Own)}
    settings["partition_assignment_strategy"] = [known[name] for name in settings.pop("assignors").split(",")]
    waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=commands, args=(waiting.put,), daemon=True).start()
    consumer = KafkaConsumer(topic, bootstrap_servers=f"localhost:{port}", group_id=group, **settings)
    before: list[int] | None = None
    while True:
        for messages in consumer.poll(timeout_ms=50).values():
            say_messages(messages)
        before = say_assigned(consumer.assignment(), before)
        if waiting.empty():
            continue
        word, *rest = waiting.get()
        try:
            if word == "commit":
                consumer.commit({TopicPartition(topic, int(rest[0])): OffsetAndMetadata(int(rest[1]), "", -1)})
                say("done commit", rest[1])
            elif word == "committed":
                say("done committed", consumer.committed(TopicPartition(topic, int(rest[0]))))
            elif word == "close":
                consumer.close(autocommit=False)
                say("done close")
                return
        except Exception as err:
            say("failed", word, repr(err))


def run_aiokafka(port: str, group: str, topic: str, settings: dict[str, Any]) -> None:
    asyncio.run(_aiokafka(port, group, topic, settings))


async def _aiokafka(port: str, group: str, topic: str, settings: dict[str, Any]) -> None:
    from aiokafka import AIOKafkaConsumer, TopicPartition
    from aiokafka.coordinator.assignors.range import RangePartitionAssignor
    from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor

    known = {"range": RangePartitionAssignor, "roundrobin": RoundRobinPartitionAssignor}
    settings["partition_assignment_strategy"] = [known[name] for name in settings.pop("assignors").split(",")]
    waiting: asyncio.Queue[list[str]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    put = lambda words: loop.call_soon_threadsafe(waiting.put_nowait, words)  # noqa: E731
    threading.Thread(target=commands, args=(put,), daemon=True).start()
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=f"localhost:{port}", group_id=group, **settings)
    await consumer.start()
    before: list[int] | None = None
    while True:
        for messages in (await consumer.getmany(timeout_ms=50)).values():
            say_messages(messages)
        before = say_assigned(consumer.assignment(), before)
        if waiting.empty():
            continue
        word, *rest = waiting.get_nowait()
        try:
            if word == "commit":
                await consumer.commit({TopicPartition(topic, int(rest[0])): int(rest[1])})
                say("done commit", rest[1])
            elif word == "committed":
                say("done committed", await consumer.committed(TopicPartition(topic, int(rest[0]))))
            elif word == "close":
                await consumer.stop()
                say("done close")
                return
        except Exception as err:
            say("failed", word, repr(err))


def main() -> None:
    library, port, group, topic, *words = sys.argv[1:]
    run = {"confluent": run_confluent, "kafka-python": run_kafka_python, "aiokafka": run_aiokafka}[library]
    run(port, group, topic, settings_of(words))


if __name__ == "__main__":
    main()
