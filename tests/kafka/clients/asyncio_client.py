"""aiokafka."""

import asyncio
import sys
from typing import Any

import record_lines
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from record_lines import PARTITIONS, PATIENCE_S, Row


async def produce(bootstrap: str, topics: dict[str, str]) -> None:
    rows = [*record_lines.read(sys.stdin)]
    for topic, codec in topics.items():
        compression = None if codec == "none" else codec
        settings = {"compression_type": compression, "max_request_size": 2_000_000, "linger_ms": 20}
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, **settings) as producer:
            sent = [
                await producer.send(topic, row.value, row.key, row.partition, row.timestamp, [*row.headers])
                for row in rows
            ]
            await asyncio.gather(*sent)


async def consume(bootstrap: str, topics: dict[str, str]) -> None:
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest"
    ) as consumer:
        consumer.assign([TopicPartition(topic, number) for topic in topics for number in PARTITIONS])
        wanted, rows = sum(map(int, topics.values())), 0
        while rows < wanted:
            for found in (await consumer.getmany(timeout_ms=1000)).values():
                rows += len(found)
                sys.stdout.write(record_lines.write(_row(each) for each in found))


def _row(found: Any) -> Row:
    return Row(
        *(found.partition, found.key, found.value, tuple(found.headers), found.timestamp, found.topic, found.offset)
    )


if __name__ == "__main__":
    asked = record_lines.asked()
    work = {"produce": produce, "consume": consume}[asked.command](asked.bootstrap, asked.topics)
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))
