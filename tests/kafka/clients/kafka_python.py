"""kafka-python."""

import sys
import time
from typing import Any

import record_lines
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
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
        sent = [producer.send(topic, row.value, row.key, [*row.headers], row.partition, row.timestamp) for row in rows]
        for each in sent:
            each.get(PATIENCE_S)
        producer.close()


def consume(bootstrap: str, topics: dict[str, str]) -> None:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest")
    consumer.assign([TopicPartition(topic, number) for topic in topics for number in PARTITIONS])
    wanted, rows, until = sum(map(int, topics.values())), 0, time.monotonic() + PATIENCE_S
    while rows < wanted:
        assert time.monotonic() < until, f"{rows} of {wanted} read"
        for found in consumer.poll(timeout_ms=1000).values():
            rows += len(found)
            sys.stdout.write(record_lines.write(_row(each) for each in found))
    consumer.close()


def _row(found: Any) -> Row:
    return Row(
        *(found.partition, found.key, found.value, tuple(found.headers), found.timestamp, found.topic, found.offset)
    )


if __name__ == "__main__":
    asked = record_lines.asked()
    {"produce": produce, "consume": consume}[asked.command](asked.bootstrap, asked.topics)
