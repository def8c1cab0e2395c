"""Idempotent Kafka producers while stages and gateway are killed, connections are cut, and others write beside them."""

import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import confluent_kafka
import pytest
from kafka_batches import Sent, framed, records_of
from kafka_peer import Peer
from kio.schema.errors import ErrorCode

from chaos.cutting_proxy import CuttingProxy
from chaos.load import Load, TcpLoad
from chaos.pod import STAGES, Pod
from kmq.message.message import Message

CODECS = ("none", "gzip", "lz4", "zstd")
PARTITIONS = 2
TOPIC = "orders"


class KafkaLoad:
    """A real client that counts in each partition, and keeps the offsets that it is told."""

    def __init__(self, port: int, name: str, codec: str, rng: random.Random) -> None:
        self.name, self.rng = name, rng
        self.sent: dict[int, list[bytes]] = defaultdict(list)
        self.told: dict[tuple[int, bytes], int] = {}
        self.failed: list[str] = []
        self.enough = threading.Event()
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": f"127.0.0.1:{port}",
                "enable.idempotence": True,
                "max.in.flight.requests.per.connection": 5,
                "compression.type": codec,
                "linger.ms": 2,
                "batch.num.messages": 200,
                "message.timeout.ms": 240_000,
                "retry.backoff.ms": 20,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
                "socket.timeout.ms": 10_000,
                "log_level": 0,
            }
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for number in itertools.count():
            if self.enough.is_set():
                return
            partition, value = number % PARTITIONS, b"%b-%d" % (self.name.encode(), number)
            if number % 7 == 0:
                value += b"\0" * self.rng.randrange(1, 300)  # base64 in its line
            self._producer.produce(TOPIC, value, partition=partition, on_delivery=self._hear)
            self.sent[partition].append(value)
            self._producer.poll(0)
            if number % 50 == 0:
                self._producer.poll(self.rng.uniform(0, 0.01))
                while len(self._producer) > 1_500:
                    self._producer.poll(0.05)

    def _hear(self, error: object, message: confluent_kafka.Message) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            self.told[message.partition(), message.value()] = message.offset()

    def finish(self) -> None:
        self.enough.set()
        self._thread.join(60)
        assert self._producer.flush(240) == 0, f"{self.name}: not all is delivered"
        assert not self.failed, (self.name, len(self.failed), self.failed[:3])


def stored(data: Path, partition: int) -> list[bytes]:
    """The values of a partition by offset."""
    files = sorted((data / "topics" / TOPIC / str(partition)).glob("*.log"))
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    return [Message(TOPIC, partition, n, line).value or b"" for n, line in enumerate(lines)]


@pytest.mark.sampled(0.5)
@pytest.mark.timeout(900)
def test_each_record_is_stored_once_in_order_where_its_client_is_told_it_is(
    make_pod: Callable[..., Pod], rng: random.Random, loads: Callable[[Load], Load], cleanup: ExitStack
) -> None:
    pod = make_pod(RB_SLOTS=256, KMQ_KAFKA_PARTITIONS=PARTITIONS)
    pod.start()
    pod.wait_ready()
    proxy = CuttingProxy(lambda: int((pod.pipes / "kafka.port").read_text()), rng, odds=0.05)
    cleanup.callback(proxy.close)
    pod.settings["KMQ_KAFKA_ADVERTISE"] = f"127.0.0.1:{proxy.port}"
    pod.start("gateway")
    pod.wait_ready("gateway")
    clients = [KafkaLoad(proxy.port, name, codec, rng) for name, codec in zip("abcd", CODECS, strict=True)]
    cleanup.callback(lambda: [client.enough.set() for client in clients])
    pod.wait(lambda: all(client.told for client in clients), "every client is answered")
    shell = loads(TcpLoad(pod.pipes, f"{TOPIC}.@{rng.randrange(PARTITIONS)}", rng.randrange(1 << 30), 0.2))
    deaths = [(name,) for name in (*STAGES, "gateway")] + [("gateway", "router"), (*STAGES, "gateway")]
    for victims in rng.sample(deaths, len(deaths)):
        goals = [len(client.told) + 300 for client in clients]
        pod.wait(
            lambda goals=goals: all(len(c.told) >= goal for c, goal in zip(clients, goals, strict=True)),
            "records are acked",
        )
        time.sleep(rng.uniform(0, 0.2))  # the moment is what is tried
        pod.kill(*victims)
        pod.start(*victims)
        pod.wait_ready(*victims)
    proxy.odds = 0.0
    for client in clients:
        client.finish()
    shell.finish()
    assert proxy.cuts > 5
    pod.settle()
    unknown = total = 0
    for partition in range(PARTITIONS):
        found = stored(pod.data, partition)
        for client in clients:
            mine = [value for value in found if value.startswith(b"%b-" % client.name.encode())]
            assert mine == client.sent[partition]
            for value in mine:
                offset = client.told[partition, value]
                total, unknown = total + 1, unknown + (offset < 0)
                assert offset < 0 or found[offset] == value, (client.name, partition, value[:20], offset)
    assert total > 4 * 300 * len(deaths) and unknown < total / 2


def test_a_batch_behind_one_that_the_framer_has_refused_is_not_stored_before_it(make_pod: Callable[..., Pod]) -> None:
    """The name of the producer was forgotten, and another one has its place until that is idle, too."""
    pod = make_pod(KMQ_KAFKA_PRODUCERS=1, KMQ_PRODUCER_TTL="1s", KMQ_KAFKA_PARTITIONS=1)
    pod.start(*STAGES, "gateway")
    pod.wait_ready(*STAGES, "gateway")
    idle_at = 0.0

    def be_idle() -> None:
        nonlocal idle_at
        idle_at = time.time() + 3
        pod.wait(lambda: time.time() > idle_at, "the name is idle for longer than KMQ_PRODUCER_TTL")

    with Peer.of(pod.pipes) as one, Peer.of(pod.pipes) as other:
        assert one.make_topic(TOPIC) == 1
        pids = [
            each.ask(22, 1, transactional_id=None, transaction_timeout=timedelta(0)).producer_id
            for each in (one, other)
        ]

        def batch(sequence: int, pid: int = pids[0]) -> bytes:
            rows = [Sent(1000, None, b"%d" % sequence)]
            return framed(records_of(rows, 1000), 1, base=1000, latest=1000, producer=(pid, 0, sequence))

        def codes() -> list[ErrorCode]:
            return [one.read_produced().error_code for _ in range(2)]

        assert one.produce(TOPIC, 0, batch(0)).error_code == ErrorCode.none
        be_idle()
        assert other.produce(TOPIC, 0, batch(0, pids[1])).error_code == ErrorCode.none
        pod.pause("durability")  # so the door does not hear of it
        looked = pod.row("framer").refused
        one.send_batch(TOPIC, 0, batch(1))
        pod.wait(lambda: pod.row("framer").refused > looked, "the framer refuses the first batch")
        be_idle()
        seq = pod.seq("framer")
        one.send_batch(TOPIC, 0, batch(2))
        pod.wait(lambda: pod.row("framer").refused > looked + 1 or pod.seq("framer") > seq, "it takes the second one")
        pod.resume("durability")
        assert codes() == [ErrorCode.not_leader_or_follower] * 2
        for sequence in (1, 2):
            one.send_batch(TOPIC, 0, batch(sequence))
        assert codes() == [ErrorCode.none] * 2
    pod.settle()
    assert stored(pod.data, 0) == [b"0", b"0", b"1", b"2"]  # of one, of the other, and what one sent again
