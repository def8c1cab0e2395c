"""Transactional producers: a real client, and one that says what a test says. And what they leave."""

import os
from datetime import timedelta
from typing import Any

from brokers import ROOT, Broker
from confluent_kafka import Consumer, Producer
from kafka_batches import Sent, framed, records_of
from kafka_peer import Peer
from kio.schema.errors import ErrorCode

FAIL_POINTS = ROOT / "tests" / "chaos" / "fail_points"  # sitecustomize.py says what it does
INIT, ADD_PARTITIONS, ADD_OFFSETS, END, OFFSETS, FETCH_OFFSETS = 22, 24, 25, 26, 28, 9
TRANSACTIONAL = 16


def with_fail_points(broker: Broker, *limits: str) -> None:
    """Let tests kill the broker's processes at a point that they name in a file, and change its limits."""
    path = os.pathsep.join([str(FAIL_POINTS), *filter(None, [broker.env.get("PYTHONPATH")])])  # mutants.py has one
    fail_point = str(broker.root / "fail_point")
    broker.env |= {"PYTHONPATH": path, "FAIL_POINT": fail_point, "LIMITS": " ".join(limits)}


def metadata_of(group: str) -> Any:
    """What a consumer of a group says to a producer, of a group without members."""
    made = Consumer({"bootstrap.servers": "localhost:1", "group.id": group, "log_level": 0})
    try:
        return made.consumer_group_metadata()
    finally:
        made.close()


def address(broker: Broker) -> str:
    return f"localhost:{(broker.pipes / 'kafka.port').read_text().strip()}"


def producer(broker: Broker, id: str, **settings: Any) -> Producer:
    said = {"bootstrap.servers": address(broker), "transactional.id": id, "log_level": 0, "linger.ms": 0}
    said["metadata.recovery.strategy"] = "none"  # else 2.16 sends offsets to a handle that it has destroyed, for ever
    made = Producer(said | {name.replace("_", "."): value for name, value in settings.items()})
    made.init_transactions(30)
    return made


def stored(broker: Broker, topic: str, partition: int = 0) -> list[bytes]:
    """The payloads of a partition, in order."""
    files = sorted((broker.data / "topics" / topic / str(partition)).glob("*.log"))
    return [line.split(b"|", 5)[5] for file in files for line in file.read_bytes().splitlines() if line]


class Raw:
    """A transactional producer that says what a test says."""

    def __init__(self, peer: Peer, id: str, timeout_ms: int = 60_000) -> None:
        self.peer, self.id = peer, id
        found = self.init(timeout_ms)
        assert found.error_code == ErrorCode.none
        self.pid, self.epoch = found.producer_id, found.producer_epoch

    def init(self, timeout_ms: int = 60_000, pid: int = -1, epoch: int = -1, version: int = 4) -> Any:
        timeout = timedelta(milliseconds=timeout_ms)
        more = {"producer_id": pid, "producer_epoch": epoch} if version >= 3 else {}
        return self.peer.ask(INIT, version, transactional_id=self.id, transaction_timeout=timeout, **more)

    @property
    def who(self) -> dict[str, Any]:
        return {"transactional_id": self.id, "producer_id": self.pid, "producer_epoch": self.epoch}

    def add(self, topic: str, *partitions: int, version: int = 3) -> list[ErrorCode]:
        who = {f"v3_and_below_{name}": value for name, value in self.who.items()}
        topics = [{"name": topic, "partitions": partitions}]
        found = self.peer.ask(ADD_PARTITIONS, version, **who, v3_and_below_topics=topics)
        (row,) = found.results_by_topic_v3_and_below
        return [each.partition_error_code for each in row.results_by_partition]

    def send(
        self, topic: str, partition: int, values: list[bytes], sequence: int = 0, attributes: int = TRANSACTIONAL
    ) -> Any:
        rows = [Sent(1000 + n, None, value) for n, value in enumerate(values)]
        batch = framed(
            records_of(rows, 1000),
            len(rows),
            base=1000,
            latest=1000 + len(rows) - 1,
            producer=(self.pid, self.epoch, sequence),
            attributes=attributes,
        )
        return self.peer.produce(topic, partition, batch)

    def add_offsets(self, group: str) -> Any:
        return self.peer.ask(ADD_OFFSETS, 3, **self.who, group_id=group).error_code

    def commit_offsets(self, group: str, topic: str, offset: int, member: str = "", generation: int = -1) -> Any:
        row = {
            "partition_index": 0,
            "committed_offset": offset,
            "committed_leader_epoch": -1,
            "committed_metadata": "x",
        }
        topics = [{"name": topic, "partitions": [row]}]
        fences = {"generation_id": generation, "member_id": member, "group_instance_id": None}
        found = self.peer.ask(OFFSETS, 3, **self.who, group_id=group, topics=topics, **fences)
        return found.topics[0].partitions[0].error_code

    def end(self, committed: bool = True, version: int = 3) -> Any:
        return self.peer.ask(END, version, **self.who, committed=committed).error_code


def committed(peer: Peer, group: str, topic: str, stable: bool = True) -> tuple[ErrorCode, int]:
    asked = [{"name": topic, "partition_indexes": (0,)}]
    found = peer.ask(FETCH_OFFSETS, 7, group_id=group, topics=asked, require_stable=stable)
    if found.error_code:
        return found.error_code, -1
    row = found.topics[0].partitions[0]
    return row.error_code, row.committed_offset
