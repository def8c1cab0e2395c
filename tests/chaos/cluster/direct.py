"""Clients that know the brokers of a shard by their addresses, without a Service before them: when each was answered.

    python -m chaos.cluster.direct SECONDS HOST [HOST …]

Each client does one thing after the other for SECONDS, and prints `<client> <monotonic time>` for every answer that it
gets. They begin at the first host.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from confluent_kafka import Producer as KafkaProducer

import kmq

TOPIC = "direct"
PAUSE_S = 0.1


def say(client: str) -> None:
    sys.stdout.write(f"{client} {time.monotonic():.3f}\n")
    sys.stdout.flush()


def produce(hosts: list[str], until: float) -> None:
    with kmq.Producer(",".join(f"{host}:5673" for host in hosts), timeout_s=until - time.monotonic()) as producer:
        while time.monotonic() < until:
            producer.send(TOPIC, b"x").result()
            say("producer")
            time.sleep(PAUSE_S)


def consume(hosts: list[str], until: float) -> None:
    with kmq.Consumer(TOPIC, host=",".join(f"{host}:5674" for host in hosts), group_id="g") as consumer:
        while time.monotonic() < until:
            if consumer.poll(timeout=0.2):
                with suppress(kmq.Refused):  # the next leader assigns anew
                    consumer.commit(timeout=until - time.monotonic())
                    say("consumer")


def kafka(hosts: list[str], until: float) -> None:
    options = {"bootstrap.servers": ",".join(f"{host}:9092" for host in hosts), "enable.idempotence": True}
    producer = KafkaProducer(options)

    def answered(error: object, _: object) -> None:
        if error is None:
            say("kafka")

    for number in itertools.count():
        if time.monotonic() >= until:
            break
        producer.produce(TOPIC, b"%d" % number, on_delivery=answered)
        producer.poll(PAUSE_S)


CLIENTS: tuple[Callable[[list[str], float], None], ...] = (produce, consume, kafka)


def main(seconds: str, *hosts: str) -> None:
    until = time.monotonic() + float(seconds)
    threads = [threading.Thread(target=client, args=(list(hosts), until), daemon=True) for client in CLIENTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + 1 - time.monotonic()))


if __name__ == "__main__":
    main(*sys.argv[1:])
