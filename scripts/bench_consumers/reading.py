"""The processes that read: each prints what it has measured, as JSON."""

import asyncio
import json
import socket
import time

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
    """CONSUME: the stored lines as they come, into one buffer."""
    buffer = bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", int(port))) as sock:
        begin, cpu, nbytes = time.monotonic(), time.process_time(), 0
        sock.sendall(f"CONSUME {topic} raw\n".encode())
        sock.shutdown(socket.SHUT_WR)
        while taken := sock.recv_into(buffer):
            nbytes += taken
        _print(begin, cpu, int(count), nbytes)


def wait(port: str, topic: str, count: str) -> None:
    """Milliseconds from the producer's clock, in the message, to the message in the application."""
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


def _print(begin: float, cpu: float, count: int, nbytes: int) -> None:
    seconds, used = time.monotonic() - begin, time.process_time() - cpu
    print(json.dumps({"count": count, "nbytes": nbytes, "seconds": seconds, "cpu": used}))


ROLES = {"_iterate": iterate, "_poll": poll, "_async": by_asyncio, "_lines": lines, "_wait": wait}


def run(role: str, *arguments: str) -> None:
    ROLES[role](*arguments)
