"""Copies topic `in` to topic `out` in transactions, until it is killed: `python -m chaos.kafka_copier <servers> <id> <seed>`.

What a program is told to do that wants each message once: the offsets go with the records, and after a failure the
program begins anew. Now and then it changes its mind, aborts, and reads the same messages again.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

GROUP, SOURCE, TARGET = "copiers", "in", "out"
PATIENCE_S = 60.0
_ABORTS = 0.1


class Copier:
    """A copier that is started again whenever it ends, as a pod would be."""

    def __init__(self, servers: str, id: str, rng: random.Random) -> None:
        self._command = [sys.executable, "-m", "chaos.kafka_copier", servers, id]
        self._rng, self._is_over = rng, threading.Event()
        self.starts = 0
        self.process = self._start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _start(self) -> "subprocess.Popen[bytes]":
        self.starts += 1
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        return subprocess.Popen([*self._command, str(self._rng.randrange(1 << 30))], env=env, stderr=subprocess.DEVNULL)

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.process.wait()
            if not self._is_over.is_set():
                self.process = self._start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self._is_over.set()
        self.process.kill()
        self._thread.join(60)
        self.process.kill()


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


def main(servers: str, id: str, seed: str) -> None:
    rng = random.Random(seed)
    common = {
        "bootstrap.servers": servers,
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
