"""Consume, transform, produce in transactions while copiers, gateway and stages are killed: each record once, in order."""

import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from consuls import free_ports

from chaos.kafka_copier import GROUP, SOURCE, TARGET, Copier
from chaos.pod import STAGES, Pod
from kmq.gateway.groups import group_records
from kmq.gateway.groups.offset_table import RowKey, read_log
from kmq.logfmt import Logger
from kmq.message.message import Message

PARTITIONS, COPIERS = 3, 2
RECORDS = 4000  # of each partition
STEP = 300  # records that are copied between two kills


def stored(data: Path, topic: str, partition: int) -> list[bytes]:
    """The values of a partition by offset."""
    files = sorted((data / "topics" / topic / str(partition)).glob("*.log"))
    lines = [line for file in files for line in file.read_bytes().split(b"\n")[:-1]]
    return [Message(topic, partition, n, line).value or b"" for n, line in enumerate(lines)]


def send(pod: Pod, lines: bytes) -> None:
    """Over plain TCP; returns when the broker has taken them all."""
    with socket.create_connection(("127.0.0.1", int((pod.pipes / "ingress.port").read_text()))) as sock:
        sock.sendall(lines)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


@pytest.mark.sampled(0.5)
@pytest.mark.timeout(600)
def test_each_record_is_copied_once_in_order_whatever_is_killed(
    make_pod: Callable[..., Pod], rng: random.Random, cleanup: ExitStack
) -> None:
    (port,) = free_ports(1)
    pod = make_pod(KMQ_KAFKA_PORT=port)
    everything = (*STAGES, "gateway")
    pod.start(*everything)
    pod.wait_ready(*everything)
    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
    for made in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in (SOURCE, TARGET)]).values():
        made.result(60)
    sent = {number: [b"%d-%d" % (number, n) for n in range(RECORDS)] for number in range(PARTITIONS)}
    lines = (b"%b.@%d|||%b\n" % (SOURCE.encode(), number, value) for number in sent for value in sent[number])
    send(pod, b"".join(lines))
    copiers = [
        Copier(f"127.0.0.1:{port}", f"copier-{number}", random.Random(rng.random())) for number in range(COPIERS)
    ]
    for copier in copiers:
        cleanup.callback(copier.close)

    def copied() -> int:
        return sum(len(stored(pod.data, TARGET, number)) for number in range(PARTITIONS))

    kills = [("copier",), ("gateway",), *((name,) for name in STAGES), ("copier", "gateway"), everything]
    for victims in rng.sample(kills, len(kills)):
        goal = copied() + STEP
        pod.wait(lambda goal=goal: copied() >= goal, f"{STEP} more records")
        time.sleep(rng.uniform(0, 0.1))  # the moment is what is tried
        if "copier" in victims:
            rng.choice(copiers).kill()
        if own := [name for name in victims if name != "copier"]:
            pod.kill(*own)
            pod.start(*own)
            pod.wait_ready(*own)
    pod.wait(lambda: copied() >= PARTITIONS * RECORDS, "all records")
    for number in range(PARTITIONS):
        assert stored(pod.data, TARGET, number) == sent[number]

    def offsets() -> list[int]:
        rows = dict(read_log(str(pod.data), Logger("test"), group_records.scan)[0])
        return [getattr(rows.get(RowKey(GROUP, SOURCE, number)), "offset", -1) for number in range(PARTITIONS)]

    pod.wait(lambda: offsets() == [RECORDS] * PARTITIONS, "all offsets")
    assert sum(copier.starts for copier in copiers) > COPIERS
