"""kafka-python."""

import sys
import time
from typing import Any

import record_lines
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata
from record_lines import PARTITIONS, PATIENCE_S, Row


def produce(bootstrap: str, topics: dict[str, str]) -> None:
    rows = [*record_lines.read(sys.stdin)]
    for topic, codec in topics.items():
        producer = KafkaProducer(
            bootstrap_servers=bootstrap,
            compression_type=None if codec == "none" else codec,
            max_request_size=2_000_000,
            linger_ms=20,
        )
        sent = [_send(producer, row._replace(topic=topic)) for row in rows]
        for each in sent:
            each.get(PATIENCE_S)
        producer.close()


def _send(producer: KafkaProducer, row: Row) -> Any:
    return producer.send(row.topic, row.value, row.key, [*row.headers], row.partition, row.timestamp)


def _consumer(bootstrap: str, **settings: Any) -> KafkaConsumer:
    settings |= {"enable_auto_commit": False, "auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    return KafkaConsumer(bootstrap_servers=bootstrap, **settings)


def consume(bootstrap: str, topics: dict[str, str]) -> None:
    consumer = _consumer(bootstrap)
    consumer.assign([TopicPartition(topic, number) for topic in topics for number in PARTITIONS])
    wanted, rows, until = sum(map(int, topics.values())), 0, time.monotonic() + PATIENCE_S
    while rows < wanted:
        assert time.monotonic() < until, f"{rows} of {wanted} read"
        for found in consumer.poll(timeout_ms=1000).values():
            rows += len(found)
            sys.stdout.write(record_lines.write(_row(each) for each in found))
    consumer.close()


class Steps:
    """Those of record_lines.transact."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    def init(self, id: str) -> None:
        settings = {"transactional_id": id, "compression_type": "lz4", "max_request_size": 2_000_000}
        self._producer = KafkaProducer(bootstrap_servers=self._bootstrap, **settings)
        self._producer.init_transactions()

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, row: Row) -> None:
        _send(self._producer, row)

    def flush(self) -> None:
        self._producer.flush(PATIENCE_S)

    def commit(self) -> None:
        self._producer.commit_transaction()

    def abort(self) -> None:
        self._producer.abort_transaction()

    def join(self, group: str, topic: str) -> None:
        self._consumer = _consumer(self._bootstrap, group_id=group, heartbeat_interval_ms=300)
        self._consumer.subscribe([topic])

    def poll(self) -> list[Row]:
        polled = self._consumer.poll(timeout_ms=500, max_records=10)
        rows = [_row(each) for found in polled.values() for each in found]
        self._offsets = record_lines.offsets_behind(rows)
        return rows

    def offsets(self) -> None:
        offsets = {TopicPartition(*place): OffsetAndMetadata(to, "", -1) for place, to in self._offsets.items()}
        self._producer.send_offsets_to_transaction(offsets, self._consumer.group_metadata())

    def leave(self) -> None:
        self._consumer.close()


def _row(found: Any) -> Row:
    return Row(
        *(found.partition, found.key, found.value, tuple(found.headers), found.timestamp, found.topic, found.offset)
    )


if __name__ == "__main__":
    asked = record_lines.asked()
    if asked.command == "transact":
        record_lines.transact(Steps(asked.bootstrap))
    else:
        {"produce": produce, "consume": consume}[asked.command](asked.bootstrap, asked.topics)
