"""The benchmark of the Kafka door: librdkafka produces and consumes at the same time, beside acknowledged lines.

    python scripts/bench_kafka.py [PART …] [--only PART] [--quick] [--json FILE] [--dir DIR]

CPU is that of all four stages, and of the gateway, for one message; lines are measured in the same run, in turns. The
client's processes share the two cores. A producer with `enable.idempotence` spins while five of its requests wait for
their answers, so it takes most of a core from what is measured; it has rows of its own.
"""

import argparse
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path[0] = str(Path(__file__).resolve().parent)

from bench_consumers.parts import pod_with_gateway  # noqa: E402

from bench.pod import Pod  # noqa: E402
from bench.report import Figure, Measure, run  # noqa: E402
from bench.sending import WAIT_S  # noqa: E402
from bench.throughput import Sums, run_lines  # noqa: E402
from kmq.client.lines import read_port  # noqa: E402

TEXT = b"2026-11-27T21:32:27 host app[17]: user 4711 logged in from 10.0.0.7; all is well "
BINARY = bytes(range(256))


class Workload(NamedTuple):
    """What is produced: bytes of a value, whether it is text, options of the client."""

    name: str
    nbytes: int
    is_text: bool = True
    options: str = ""

    @property
    def value(self) -> bytes:
        unit = TEXT if self.is_text else BINARY
        return (unit * (self.nbytes // len(unit) + 1))[: self.nbytes]


SMALL, LARGE = Workload("100 B", 100), Workload("1 KB", 1000)
COMPRESSED, RAW = (
    Workload("1 KB, lz4", 1000, options="compression.type=lz4"),
    Workload("1 KB, binary", 1000, is_text=False),
)
_ONCE = "enable.idempotence=true"
IDEMPOTENT = Workload("100 B, idempotent", 100, options=_ONCE), Workload("1 KB, idempotent", 1000, options=_ONCE)
RATES = {SMALL: "≥ 230000", LARGE: "≥ 90000", COMPRESSED: "≥ 90000", RAW: "≥ 50000"} | dict.fromkeys(IDEMPOTENT, "")
_TRANSACTION = 1000  # records
_PACE, _SETTLE_S = 10_000, 1.0  # records a second, and how long before they are measured
DOOR = {SMALL: "≤ 0.8", LARGE: "≤ 0.7"}  # its CPU, of that of the stages


class Bench:
    def __init__(self, running: Pod, quick: bool) -> None:
        self.running, self.rounds, self.seconds = running, 1 if quick else 3, 3 if quick else 8
        self.kafka = read_port(running.settings, "kafka", 0)
        self.gateway = psutil.Process(running.page().rows["gateway"].pid)
        self.topics = 0

    def topic(self) -> str:
        self.topics += 1
        return f"kafka{self.topics}"

    def gateway_cpu(self) -> float:
        return float(sum(self.gateway.cpu_times()[:2]))

    def client(self, role: str, topic: str, load: Workload, count: float) -> "subprocess.Popen[str]":
        argv = [sys.executable, __file__, role, str(self.kafka), topic, str(load.nbytes), str(int(load.is_text))]
        return subprocess.Popen([*argv, str(count), load.options], stdout=subprocess.PIPE, text=True)


def _result(client: "subprocess.Popen[str]") -> dict[str, float]:
    told, _ = client.communicate(timeout=WAIT_S)
    if client.returncode:
        raise SystemExit("bench: the client failed")
    found: dict[str, float] = json.loads(told)
    return found


def _both(bench: Bench, load: Workload) -> tuple[float, float, float]:
    """Produce for some seconds while a consumer reads, until it has read the last message."""
    topic = bench.topic()
    consumer = bench.client("consume", topic, load, 0)
    assert consumer.stdout is not None and consumer.stdout.readline() == "ready\n"
    begin = time.monotonic()
    produced = _result(bench.client("produce", topic, load, bench.seconds))
    consumed = _result(consumer)
    return produced["count"], time.monotonic() - begin, produced["cpu"] + consumed["cpu"]


def throughput(bench: Bench) -> Iterator[Figure]:
    """Rates, and the CPU of stages and door, beside acknowledged lines of the same size."""
    for load, rate in RATES.items():
        lines, kafka, door = Sums(), Sums(), 0.0
        for _ in range(bench.rounds):
            if load.is_text and not load.options:
                lines.add(bench.running, partial(run_lines, bench.running, load.nbytes, bench.seconds))
            before = bench.gateway_cpu()
            kafka.add(bench.running, partial(_both, bench, load))
            door += bench.gateway_cpu() - before
        yield Figure("throughput", f"{load.name}, produced and consumed", kafka.rate, "msg/s", rate)
        yield Figure("throughput", f"{load.name}: CPU of the stages", kafka.per_million, "µs", note=kafka.each())
        if lines.count:
            ratio = kafka.per_million / lines.per_million
            yield Figure("throughput", f"{load.name}: stages / acked lines", ratio, "x", "≤ 1.1")
        door_us = door / kafka.count * 1e6
        clients = f"the clients took {kafka.sender / kafka.count * 1e6:.2f}"
        yield Figure("throughput", f"{load.name}: CPU of the door", door_us, "µs", note=clients)
        yield Figure("throughput", f"{load.name}: door / stages", door_us / kafka.per_million, "x", DOOR.get(load, ""))


def transactions(bench: Bench) -> Iterator[Figure]:
    """How fast a producer sends in transactions, beside a producer that is only idempotent. No consumer reads."""
    for load, bar in ((SMALL, "≥ 0.4"), (LARGE, "")):
        sums, door = (Sums(), Sums()), [0.0, 0.0]
        for _ in range(bench.rounds):
            for turn, options in enumerate((_ONCE, "transactional.id=bench")):
                before, sent = bench.gateway_cpu(), load._replace(options=options)
                sums[turn].add(bench.running, partial(_produced, bench, sent))
                door[turn] += bench.gateway_cpu() - before
        names = f"{load.name}, idempotent", f"{load.name}, {_TRANSACTION:,} records a transaction"
        for name, each, used in zip(names, sums, door, strict=True):
            note = f"µs of a record: {each.each()}, door {used / each.count * 1e6:.2f}"
            yield Figure("transactions", name, each.rate, "msg/s", note=note)
        yield Figure(
            "transactions", f"{load.name}: in transactions / idempotent", sums[1].rate / sums[0].rate, "x", bar
        )


def _produced(bench: Bench, load: Workload) -> tuple[float, float, float]:
    """Produce for some seconds, until the last record is delivered."""
    found = _result(bench.client("produce", bench.topic(), load, bench.seconds))
    return found["count"], found["seconds"], found["cpu"]


def catchup(bench: Bench) -> Iterator[Figure]:
    """How fast a consumer reads what was stored by lines."""
    for load, unit, bar in ((SMALL, "msg/s", "≥ 300000"), (LARGE, "MB/s", "≥ 150")):
        topic, count = f"stored{load.nbytes}", 200_000 if load is LARGE else 1_000_000
        text = b"%b|||%b\n" % (topic.encode(), load.value)
        argv = [sys.executable, "-m", "kmq", "produce", "--raw", "--acks"]
        subprocess.run(argv, env=bench.running.environment, input=text * count, stdout=subprocess.DEVNULL, check=True)
        bench.running.settle()
        before = bench.gateway_cpu()
        consumer = bench.client("consume", topic, load, count)
        found = _result(consumer)
        door = (bench.gateway_cpu() - before) / count * 1e6
        amount = count if unit == "msg/s" else count * load.nbytes / 1e6
        note = f"the door took {door:.2f} µs a message, the client {found['cpu'] / count * 1e6:.2f}"
        yield Figure("catchup", f"{load.name}, stored by lines", amount / found["seconds"], unit, bar, note)


def delay(bench: Bench) -> Iterator[Figure]:
    """How long a record takes from produce() to poll(), at 10,000 a second."""
    topic = bench.topic()
    consumer = bench.client("listen", topic, SMALL, 0)
    assert consumer.stdout is not None and consumer.stdout.readline() == "ready\n"
    _result(bench.client("pace", topic, SMALL, bench.seconds + _SETTLE_S))
    found = _result(consumer)
    for name, bar in (("p50", ""), ("p99", "≤ 10")):
        yield Figure("delay", f"produced to consumed, {_PACE:,} msg/s, {name}", found[name] * 1e3, "ms", bar)


def idle(bench: Bench) -> Iterator[Figure]:
    """The cost of 1,000 connections with a waiting fetch."""
    topic = bench.topic()
    count = int(_result(bench.client("produce", topic, SMALL, 0.1))["count"])
    memory = bench.gateway.memory_full_info().pss
    request = _waiting_fetch(topic, count)
    peers = [socket.create_connection(("127.0.0.1", bench.kafka)) for _ in range(1000)]
    for peer in peers:
        peer.sendall(request)
    time.sleep(3)
    before, begin = bench.gateway_cpu(), time.monotonic()
    time.sleep(10)
    used = (bench.gateway_cpu() - before) / (time.monotonic() - begin)
    grown = (bench.gateway.memory_full_info().pss - memory) / 1000 / 1024
    for peer in peers:
        peer.close()
    yield Figure("idle", "1,000 connections with a waiting fetch", used * 100, "% of a core", "< 2")
    yield Figure("idle", "memory of one", grown, "KiB", "< 40")


def _waiting_fetch(topic: str, end: int) -> bytes:
    """Return a Fetch, version 4, that waits 60 s for records after the end."""
    name = topic.encode()
    body = struct.pack(">hhih", 1, 4, 1, -1) + struct.pack(">iiiib", -1, 60_000, 1, 1 << 20, 0)
    body += struct.pack(">ih", 1, len(name)) + name + struct.pack(">iiqi", 1, 0, end, 1 << 20)
    return struct.pack(">i", len(body)) + body


PARTS = {"throughput": throughput, "transactions": transactions, "catchup": catchup, "delay": delay, "idle": idle}


# --- the clients, in processes of their own --------------------------------------------------------------------------


def _paced(servers: dict[str, str], topic: str, nbytes: int, seconds: float) -> None:
    """Produce records that contain their send time, at _PACE."""
    from confluent_kafka import Producer

    producer = Producer(servers | {"enable.idempotence": True, "linger.ms": 1})
    begin, count = time.time(), 0
    while (now := time.time()) < begin + seconds:
        while count < (now - begin) * _PACE:
            producer.produce(topic, (b"%020.9f" % time.time()).ljust(nbytes), partition=0)
            count += 1
        producer.poll(0)
        time.sleep(0.001)
    producer.produce(topic, b"end", partition=0)
    producer.flush(60)
    print(json.dumps({"count": count}))


def _listening(servers: dict[str, str], topic: str) -> None:
    """Print the age of such records on arrival, without those of the first _SETTLE_S."""
    from confluent_kafka import Consumer, Producer, TopicPartition

    consumer = Consumer(servers | {"group.id": "bench"})
    Producer(servers).list_topics(topic, 30)  # makes it
    consumer.assign([TopicPartition(topic, 0, 0)])
    print("ready", flush=True)
    ages: list[float] = []
    while True:
        message = consumer.poll(1)
        if message is None or message.error():
            continue
        if message.value() == b"end":
            break
        ages.append(time.time() - float(message.value() or 0))
    ages = sorted(ages[int(_PACE * _SETTLE_S) :])
    print(json.dumps({"p50": ages[len(ages) // 2], "p99": ages[len(ages) * 99 // 100]}))


def _client(role: str, port: str, topic: str, nbytes: str, is_text: str, amount: str, options: str) -> None:
    from confluent_kafka import Consumer, Producer, TopicPartition

    servers = {"bootstrap.servers": f"127.0.0.1:{port}"} | dict(each.split("=") for each in options.split())
    if role == "pace":
        return _paced(servers, topic, int(nbytes), float(amount))
    if role == "listen":
        return _listening(servers, topic)
    value = Workload("", int(nbytes), bool(int(is_text))).value
    cpu = time.process_time()
    if role == "produce":
        producer = Producer(servers | {"linger.ms": 5, "queue.buffering.max.messages": 200_000})
        is_transactional = "transactional.id" in servers
        if is_transactional:
            producer.init_transactions(60)
        begin, count, failed = time.monotonic(), 0, 0

        def hear(error: object, message: object) -> None:
            nonlocal failed
            failed += error is not None

        while time.monotonic() < begin + float(amount):
            if is_transactional:
                producer.begin_transaction()
            for _ in range(_TRANSACTION):
                try:
                    producer.produce(topic, value, partition=0, on_delivery=hear)
                    count += 1
                except BufferError:
                    producer.poll(0.05)
            if is_transactional:
                producer.commit_transaction(60)
            producer.poll(0)
        if not is_transactional:
            producer.produce(topic, b"end", partition=0)
            count += 1
        if producer.flush(60) or failed:
            raise SystemExit("not all was delivered")
        seconds = time.monotonic() - begin
        print(json.dumps({"count": count, "seconds": seconds, "cpu": time.process_time() - cpu}))
    else:
        most = int(float(amount))
        consumer = Consumer(servers | {"group.id": "bench", "enable.auto.commit": False, "fetch.wait.max.ms": 100})
        if not most:
            Producer(servers).list_topics(topic, 30)  # makes it
        consumer.assign([TopicPartition(topic, 0, 0)])
        if not most:
            print("ready", flush=True)
        begin, count, is_over = time.monotonic(), 0, False
        while not is_over:
            some = [message for message in consumer.consume(5000, 0.2) if not message.error()]
            count += len(some)
            is_over = count >= most if most else bool(some) and some[-1].value() == b"end"
        print(json.dumps({"count": count, "seconds": time.monotonic() - begin, "cpu": time.process_time() - cpu}))


@contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Measure]:
    with pod_with_gateway(options.dir) as running:
        bench = Bench(running, options.quick)
        yield lambda part: PARTS[part](bench)


def main() -> int:
    if sys.argv[1:2] in (["produce"], ["consume"], ["pace"], ["listen"]):
        _client(*sys.argv[1:])
        return 0
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="scripts/bench_kafka.py",
        description=summary,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return run(parser, tuple(PARTS), "one turn of 3 s each", prepare)


if __name__ == "__main__":
    sys.exit(main())
