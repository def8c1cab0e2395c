"""kmq.Producer and kmq.Consumer, over lines, at the broker of the environment."""

import sys

import record_lines
from record_lines import PARTITIONS, PATIENCE_S, Row

import kmq


def produce(topics: dict[str, str]) -> None:
    rows = [*record_lines.read(sys.stdin)]
    with kmq.Producer.local() as producer:
        for topic in topics:
            for row in rows:
                timestamp = None if row.timestamp is None else row.timestamp / 1000
                producer.send(topic, row.value, row.key, partition=row.partition, headers=row.headers, ts=timestamp)
        producer.flush(PATIENCE_S)


def consume(topics: dict[str, str]) -> None:
    wanted, rows = sum(map(int, topics.values())), 0
    with kmq.Consumer.local() as consumer:
        consumer.assign(*((topic, number) for topic in topics for number in PARTITIONS), start="earliest")
        while rows < wanted:
            found = consumer.poll(timeout=PATIENCE_S)
            assert found, f"{rows} of {wanted} read"
            rows += len(found)
            sys.stdout.write(record_lines.write(map(_row, found)))


def _row(found: kmq.Message) -> Row:
    place = found.topic, found.offset
    return Row(found.partition, found.key, found.value, tuple(found.headers), found.timestamp_ms, *place)


if __name__ == "__main__":
    asked = record_lines.asked()
    {"produce": produce, "consume": consume}[asked.command](asked.topics)
