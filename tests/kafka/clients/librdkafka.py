"""librdkafka, by confluent-kafka. It runs with the Python that has the release it is about."""

import sys
import time
from collections.abc import Callable
from typing import Any

import record_lines
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition, libversion
from record_lines import PARTITIONS, PATIENCE_S, Row


def produce(bootstrap: str, topics: dict[str, str]) -> None:
    rows = [*record_lines.read(sys.stdin)]
    failed: list[str] = []
    for topic, codec in topics.items():
        settings = {"compression.type": codec, "message.max.bytes": 2_000_000, "linger.ms": 20}
        producer = Producer({"bootstrap.servers": bootstrap, **settings})
        for row in rows:
            _send(producer, row._replace(topic=topic), lambda error, _: failed.append(str(error)) if error else None)
        left = producer.flush(PATIENCE_S)
        assert not left and not failed, f"{topic}: {left} of {len(rows)} not delivered; {failed[:3]}"


def _send(producer: Producer, row: Row, hear: Callable[[Any, Any], None] | None = None) -> None:
    more: dict[str, Any] = {} if row.timestamp is None else {"timestamp": row.timestamp}
    place = row.topic, row.value, row.key, row.partition
    producer.produce(*place, on_delivery=hear, headers=[*row.headers], **more)


def consume(bootstrap: str, topics: dict[str, str]) -> None:
    settings: dict[str, Any] = {"group.id": "none", "enable.auto.commit": False, "check.crcs": True}
    consumer = Consumer({"bootstrap.servers": bootstrap, **settings})
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for topic in topics for number in PARTITIONS])
    wanted, rows, until = sum(map(int, topics.values())), 0, time.monotonic() + PATIENCE_S
    while rows < wanted:
        found = consumer.poll(1)
        assert time.monotonic() < until, f"{rows} of {wanted} read"
        if found is not None:
            assert found.error() is None, found.error()
            sys.stdout.write(record_lines.write([_row(found)]))
            rows += 1
    consumer.close()


class Steps:
    """Those of record_lines.transact."""

    def __init__(self, bootstrap: str) -> None:
        self._servers: dict[str, Any] = {"bootstrap.servers": bootstrap, "reconnect.backoff.max.ms": 500}
        if libversion()[1] >= 0x02100000:  # docs/kafka-transactions.md
            self._servers["metadata.recovery.strategy"] = "none"

    def init(self, id: str) -> None:
        settings = {"transactional.id": id, "compression.type": "lz4", "message.max.bytes": 2_000_000}
        self._producer = Producer(self._servers | settings)
        self._producer.init_transactions(PATIENCE_S)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, row: Row) -> None:
        _send(self._producer, row)

    def flush(self) -> None:
        assert not self._producer.flush(PATIENCE_S)

    def commit(self) -> None:
        self._producer.commit_transaction(PATIENCE_S)

    def abort(self) -> None:
        self._producer.abort_transaction(PATIENCE_S)

    def join(self, group: str, topic: str) -> None:
        settings = {"enable.auto.commit": False, "auto.offset.reset": "earliest", "heartbeat.interval.ms": 300}
        self._consumer = Consumer(self._servers | settings | {"group.id": group})
        # With a listener partitions are only taken away in a poll: not while a transaction has what was read of them.
        self._consumer.subscribe([topic], on_revoke=lambda *_: None)

    def poll(self) -> list[Row]:
        rows = [_row(found) for found in self._consumer.consume(10, 0.5) if not found.error()]
        self._offsets = record_lines.offsets_behind(rows)
        return rows

    def offsets(self) -> None:
        offsets = [TopicPartition(*place, offset) for place, offset in self._offsets.items()]
        self._producer.send_offsets_to_transaction(offsets, self._consumer.consumer_group_metadata(), PATIENCE_S)

    def leave(self) -> None:
        self._consumer.close()


def _row(found: Any) -> Row:
    headers = tuple(found.headers() or ())
    return Row(
        *(found.partition(), found.key(), found.value(), headers, found.timestamp()[1], found.topic(), found.offset())
    )


if __name__ == "__main__":
    asked = record_lines.asked()
    if asked.command == "transact":
        record_lines.transact(Steps(asked.bootstrap))
    else:
        {"produce": produce, "consume": consume}[asked.command](asked.bootstrap, asked.topics)
