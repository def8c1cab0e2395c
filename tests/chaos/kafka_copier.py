"""Copies topic `in` to topic `out` in transactions, until it is killed: `python -m chaos.kafka_copier <port> <id> <seed>`.

What a program is told to do that wants each message once: the offsets go with the records, and after a failure the
program begins anew. Now and then it changes its mind, aborts, and reads the same messages again.
"""

import random
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

GROUP, SOURCE, TARGET = "copiers", "in", "out"
PATIENCE_S = 60.0
_ABORTS = 0.1


def done(call: Callable[[float], None]) -> None:
    """Ask until it is done; raise what the client says not to ask again for."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call(10)
        except KafkaException as err:
            if not err.args[0].retriable() or time.monotonic() > deadline:
                raise


def places(messages: Iterable[Message]) -> dict[int, int]:
    """Partition → the offset of the last of these messages."""
    return {message.partition() or 0: message.offset() or 0 for message in messages}


def main(port: str, id: str, seed: str) -> None:
    rng = random.Random(seed)
    common = {
        "bootstrap.servers": f"127.0.0.1:{port}",
        "log_level": 0,
        "reconnect.backoff.ms": 20,
        "reconnect.backoff.max.ms": 200,
        "metadata.recovery.strategy": "none",
    }
    producer = Producer(common | {"transactional.id": id, "linger.ms": 0})
    done(producer.init_transactions)
    reader = {"group.id": GROUP, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    times = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 300, "isolation.level": "read_committed"}
    consumer = Consumer(common | reader | times)
    consumer.subscribe([SOURCE])
    while True:
        messages = [message for message in consumer.consume(rng.randint(1, 100), 0.2) if message.error() is None]
        if not messages:
            continue
        producer.begin_transaction()
        for message in messages:
            producer.produce(TARGET, message.value(), partition=message.partition() or 0)
        offsets = [TopicPartition(SOURCE, number, last + 1) for number, last in places(messages).items()]
        metadata = consumer.consumer_group_metadata()
        done(partial(producer.send_offsets_to_transaction, offsets, metadata))
        if rng.random() < _ABORTS:
            done(producer.abort_transaction)
            for number, offset in places(reversed(messages)).items():
                consumer.seek(TopicPartition(SOURCE, number, offset))
        else:
            done(producer.commit_transaction)


if __name__ == "__main__":
    main(*sys.argv[1:])
