"""Consumers of three Kafka libraries, without groups: each reads a partition from an offset on."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import aiokafka
import confluent_kafka
import kafka
from waiting import PATIENCE_S, attempts


class Received(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int


def by_confluent(port: int, topic: str, partition: int, offset: int, end: int, **settings: Any) -> list[Received]:
    """What librdkafka reads of a partition, up to the offset before `end`: its position says when that is."""
    options = {"bootstrap.servers": f"localhost:{port}", "group.id": "none", "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer(
        options | {"auto.offset.reset": "error", "enable.partition.eof": True, "check.crcs": True} | settings
    )
    found: list[Received] = []
    consumer.assign([confluent_kafka.TopicPartition(topic, partition, offset)])
    try:
        for _ in attempts("the end", lambda: f"{len(found)} records", every_s=0):
            for each in consumer.consume(1000, 0.2):
                message: Any = each
                error = message.error()
                if error is None:
                    stamp, headers = message.timestamp()[1], tuple(message.headers() or ())
                    found.append(Received(message.offset(), message.key(), message.value(), headers, stamp))
                elif error.code() != confluent_kafka.KafkaError._PARTITION_EOF:
                    raise confluent_kafka.KafkaException(error)
                elif message.offset() >= end:
                    return found
        raise AssertionError  # attempts() ends by an error
    finally:
        consumer.close()


def by_kafka_python(port: int, topic: str, partition: int, offset: int, end: int, **settings: Any) -> list[Received]:
    options = {"bootstrap_servers": f"localhost:{port}", "enable_auto_commit": False, "auto_offset_reset": "none"}
    consumer = kafka.KafkaConsumer(**options | settings)
    place = kafka.TopicPartition(topic, partition)
    found: list[Received] = []
    tries = attempts("the end", lambda: f"{len(found)} records", every_s=0)
    try:
        consumer.assign([place])
        consumer.seek(place, offset)
        while consumer.position(place) < end:
            next(tries)
            for messages in consumer.poll(200).values():
                found += [Received(m.offset, m.key, m.value, tuple(m.headers), m.timestamp) for m in messages]
        return found
    finally:
        consumer.close()


def by_aiokafka(port: int, topic: str, partition: int, offset: int, end: int, **settings: Any) -> list[Received]:
    async def read() -> list[Received]:
        options = {"bootstrap_servers": f"localhost:{port}", "enable_auto_commit": False, "auto_offset_reset": "none"}
        consumer = aiokafka.AIOKafkaConsumer(**options | settings)
        place, found = aiokafka.TopicPartition(topic, partition), []
        await consumer.start()
        try:
            consumer.assign([place])
            consumer.seek(place, offset)
            async with asyncio.timeout(PATIENCE_S):
                while await consumer.position(place) < end:
                    for messages in (await consumer.getmany(timeout_ms=200)).values():
                        found += [Received(m.offset, m.key, m.value, tuple(m.headers), m.timestamp) for m in messages]
            return found
        finally:
            await consumer.stop()

    return asyncio.run(read())


READERS: dict[str, Callable[..., list[Received]]] = {
    "confluent": by_confluent,
    "kafka-python": by_kafka_python,
    "aiokafka": by_aiokafka,
}
