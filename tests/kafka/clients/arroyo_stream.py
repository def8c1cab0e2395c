"""A stream processor of arroyo at its default settings: `arroyo_stream.py <address> <group> <in> <out> <count>`.

It writes each record behind the word `seen`, and ends in order when so many are stored.
"""

import sys
from collections.abc import Mapping
from itertools import count

from arroyo.backends.kafka import (
    KafkaConsumer,
    KafkaPayload,
    KafkaProducer,
    build_kafka_consumer_configuration,
    build_kafka_producer_configuration,
)
from arroyo.processing import StreamProcessor
from arroyo.processing.strategies import (
    CommitOffsets,
    ProcessingStrategy,
    ProcessingStrategyFactory,
    Produce,
    RunTask,
)
from arroyo.types import Commit, Message, Partition, Topic


class Factory(ProcessingStrategyFactory[KafkaPayload]):  # type: ignore[misc]
    def __init__(self, producer: KafkaProducer, topic: Topic, limit: int) -> None:
        self._producer, self._topic, self._limit, self._numbers = producer, topic, limit, count(1)
        self.processor: StreamProcessor[KafkaPayload] | None = None

    def create_with_partitions(
        self, commit: Commit, partitions: Mapping[Partition, int]
    ) -> ProcessingStrategy[KafkaPayload]:
        stored = RunTask(self._count, CommitOffsets(commit))
        return RunTask(_mark, Produce(self._producer, self._topic, stored))

    def _count(self, message: Message[KafkaPayload]) -> KafkaPayload:
        if next(self._numbers) == self._limit:
            assert self.processor is not None
            self.processor.signal_shutdown()
        return message.payload


def _mark(message: Message[KafkaPayload]) -> KafkaPayload:
    payload = message.payload
    return KafkaPayload(payload.key, b"seen " + payload.value, payload.headers)


def main() -> None:
    address, group, source, target, limit = sys.argv[1:]
    producer = KafkaProducer(build_kafka_producer_configuration({}, [address]))
    consumer = KafkaConsumer(build_kafka_consumer_configuration({}, group, bootstrap_servers=[address]))
    factory = Factory(producer, Topic(target), int(limit))
    factory.processor = StreamProcessor(consumer, Topic(source), factory)
    factory.processor.run()
    producer.close().result()


main()
