"""librdkafka, by confluent-kafka. It runs with the Python that has the release it is about."""

import sys
import time
from typing import Any

import record_lines
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from record_lines import PARTITIONS, PATIENCE_S, Row


def produce(bootstrap: str, topics: dict[str, str]) -> None:
    rows = [*record_lines.read(sys.stdin)]
    failed: list[str] = []
    for topic, codec in topics.items():
        settings = {"compression.type": codec, "message.max.bytes": 2_000_000, "linger.ms": 20}
        producer = Producer({"bootstrap.servers": bootstrap, **settings})
        for row in rows:
            more: dict[str, Any] = {} if row.timestamp is None else {"timestamp": row.timestamp}
            producer.produce(
                *(topic, row.value, row.key, row.partition),
                on_delivery=lambda error, _: failed.append(str(error)) if error else None,
                headers=[*row.headers],
                **more,
            )
        left = producer.flush(PATIENCE_S)
        assert not left and not failed, f"{topic}: {left} of {len(rows)} not delivered; {failed[:3]}"


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


def _row(found: Any) -> Row:
    headers = tuple(found.headers() or ())
    return Row(
        *(found.partition(), found.key(), found.value(), headers, found.timestamp()[1], found.topic(), found.offset())
    )


if __name__ == "__main__":
    asked = record_lines.asked()
    {"produce": produce, "consume": consume}[asked.command](asked.bootstrap, asked.topics)
