"""The processes that read: each prints what it has measured, as JSON."""

import asyncio
import importlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import kmq


def iterate(port: str, topic: str, count: str) -> None:
    """`for message in consumer`, and the value of each message."""
    left, nbytes = int(count), 0
    with kmq.Consumer(topic, port=int(port), group_id=f"iterate-{time.time()}") as consumer:
        consumer.connect()
        begin, cpu = time.monotonic(), time.process_time()
        for message in consumer:
            nbytes += len(message.value or b"")
            left -= 1
            if not left:
                break
        _print(begin, cpu, int(count), nbytes)


def poll(port: str, topic: str, count: str) -> None:
    """Lists of messages, and the value of each message."""
    left, nbytes = int(count), 0
    with kmq.Consumer(topic, port=int(port), group_id=f"poll-{time.time()}", max_poll_records=5000) as consumer:
        consumer.connect()
        begin, cpu = time.monotonic(), time.process_time()
        while left > 0:
            for message in consumer.poll():
                nbytes += len(message.value or b"")
                left -= 1
        _print(begin, cpu, int(count), nbytes)


def commit(port: str, topic: str, count: str) -> None:
    """Lists of at most 500 messages, and the value of each message; each list is committed before the next one."""
    left, nbytes = int(count), 0
    with kmq.Consumer(topic, port=int(port), group_id=f"commit-{time.time()}", auto_commit=False) as consumer:
        consumer.connect()
        begin, cpu = time.monotonic(), time.process_time()
        while left > 0:
            for message in consumer.poll(500):
                nbytes += len(message.value or b"")
                left -= 1
            consumer.commit()
        _print(begin, cpu, int(count), nbytes)


def redis_fill(port: str, topic: str, count: str) -> None:
    """A stream of messages, and a group that has read none of them. The topic's name has their size after a colon."""
    server = _redis(port)
    begin, cpu, nbytes = time.monotonic(), time.process_time(), int(topic.rpartition(":")[2])
    for at in range(0, int(count), 1000):
        pipe = server.pipeline(transaction=False)
        for _ in range(min(1000, int(count) - at)):
            pipe.xadd(topic, {"value": b"x" * nbytes})
        pipe.execute()
    _print(begin, cpu, int(count), int(count) * nbytes)


def redis_commit(port: str, topic: str, count: str) -> None:
    """Do the same as `commit`, with Redis Streams."""
    server, group, left, nbytes = _redis(port), f"commit-{time.time()}", int(count), 0
    server.xgroup_create(topic, group, id="0")
    begin, cpu = time.monotonic(), time.process_time()
    while left > 0:
        ((_, messages),) = server.xreadgroup(group, "member", {topic: ">"}, count=500)
        for _, fields in messages:
            nbytes += len(fields[b"value"])
            left -= 1
        server.xack(topic, group, *[number for number, _ in messages])
    _print(begin, cpu, int(count), nbytes)


def _redis(port: str) -> Any:
    return importlib.import_module("redis").from_url(f"redis://127.0.0.1:{port}?protocol=2")


def by_asyncio(port: str, topic: str, count: str) -> None:
    async def read() -> None:
        left, nbytes = int(count), 0
        async with kmq.AsyncConsumer(topic, port=int(port)) as consumer:
            await consumer.connect()
            begin, cpu = time.monotonic(), time.process_time()
            async for message in consumer:
                nbytes += len(message.value or b"")
                left -= 1
                if not left:
                    break
            _print(begin, cpu, int(count), nbytes)

    asyncio.run(read())


def lines(port: str, topic: str, count: str) -> None:
    """CONSUME: the stored lines as they arrive, into one buffer."""
    buffer = bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", int(port))) as sock:
        begin, cpu, nbytes = time.monotonic(), time.process_time(), 0
        sock.sendall(f"CONSUME {topic} raw\n".encode())
        sock.shutdown(socket.SHUT_WR)
        while taken := sock.recv_into(buffer):
            nbytes += taken
        _print(begin, cpu, int(count), nbytes)


def wait(port: str, topic: str, count: str) -> None:
    """Milliseconds from the producer's clock, in the message, to the arrival at the application."""
    taken = []
    with kmq.Consumer(topic, port=int(port), start="latest") as consumer:
        consumer.connect()
        print("ready", flush=True)
        for message in consumer:
            taken.append((time.time() - message.timestamp) * 1000)
            if len(taken) == int(count):
                break
    taken.sort()
    print(json.dumps({"p50": taken[len(taken) // 2], "p99": taken[len(taken) * 99 // 100], "max": taken[-1]}))


def follow(port: str, topic: str, count: str) -> None:
    """A member that reads while messages arrive, and commits every second."""
    left, commit_at = int(count), time.monotonic()
    with kmq.Consumer(topic, port=int(port), group_id="followers", max_poll_records=5000) as consumer:
        consumer.connect()
        print("ready", flush=True)
        while left > 0:
            left -= len(consumer.poll())
            if time.monotonic() > commit_at + 1:
                consumer.commit_async()
                commit_at = time.monotonic()
        end = time.monotonic()
        consumer.commit()
    print(json.dumps({"end": end}))


def fill(port: str, topic: str, count: str, nbytes: str) -> None:
    """Send lists of messages, acknowledged, as fast as possible."""
    payloads = [b"x" * int(nbytes)] * 200
    with kmq.Producer(port=int(port), max_in_flight=20_000) as producer:
        producer.connect()
        print("ready", flush=True)
        begin = time.monotonic()
        for _ in range(0, int(count), len(payloads)):
            producer.send_many(topic, payloads)
        producer.flush()
        end = time.monotonic()
    print(json.dumps({"begin": begin, "seconds": end - begin}))


def pace(port: str, topic: str, rate: str, seconds: str) -> None:
    """Send single messages at an even pace."""
    with kmq.Producer(port=int(port)) as producer:
        producer.connect()
        print("ready", flush=True)
        begin, sent, count = time.monotonic(), 0, int(rate) * int(seconds)
        while sent < count:
            due = min(count, int((time.monotonic() - begin) * int(rate)))
            for _ in range(due - sent):
                producer.send(topic, b"x" * 100)
            sent = max(sent, due)
            time.sleep(0.001)
        taken = time.monotonic() - begin
        producer.flush()
    print(json.dumps({"rate": count / taken}))


def idle(port: str, topic: str, count: str, seconds: str) -> None:
    """Members, ten to a group, that wait for records as kmq.Consumer does in a loop over its messages."""

    async def member(number: int) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(b"GROUP idle%d member=m%d topics=%b\n" % (number // 10, number, topic.encode()))
        await reader.readline()
        tasks.extend(map(asyncio.create_task, (wait(reader, writer), beat(writer))))
        return writer

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"!fetch 100000 wait=27000\n")
        while line := await reader.readline():
            if line.startswith(b"!revoke"):
                writer.write(b"!revoked\n")
            elif line.startswith(b"!batch"):
                writer.write(b"!fetch 100000 wait=27000\n")

    async def beat(writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(10)
            writer.write(b"!beat\n")

    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        writers = [await member(number) for number in range(int(count))]
        print("ready", flush=True)
        await asyncio.sleep(float(seconds))
        for writer in writers:
            writer.close()
        for task in tasks:
            task.cancel()

    asyncio.run(run())
    print("{}")


def _print(begin: float, cpu: float, count: int, nbytes: int) -> None:
    seconds, used = time.monotonic() - begin, time.process_time() - cpu
    print(json.dumps({"count": count, "nbytes": nbytes, "seconds": seconds, "cpu": used}))


ROLES: dict[str, Callable[..., None]] = {
    "_iterate": iterate,
    "_poll": poll,
    "_commit": commit,
    "_redis": redis_commit,
    "_redis_fill": redis_fill,
    "_async": by_asyncio,
    "_lines": lines,
    "_wait": wait,
    "_follow": follow,
    "_fill": fill,
    "_pace": pace,
    "_idle": idle,
}


def run(role: str, *arguments: str) -> None:
    ROLES[role](*arguments)
