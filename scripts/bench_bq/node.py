"""The processes that the benchmark starts: nodes that receive, or only watch.

python scripts/bench_bq _receive BROKER,…    as these brokers, each a thread; prints `<broker> <epoch> <time>` for each
                                             item that was processed
python scripts/bench_bq _watch BROKER,…      the same watch, without session and marks
"""

import sys
import threading
import time
from collections.abc import Callable

from kmq.cluster import consul
from kmq.cluster.queue import WAIT_S, BroadcastQueue, Place
from kmq.config.settings import load


def receive(broker: str) -> None:
    place = Place.of(load())._replace(broker=broker)
    with BroadcastQueue(place) as queue:
        for item in queue.receive():
            sys.stdout.write(f"{broker} {item.epoch} {time.time():.6f}\n")
            sys.stdout.flush()


def watch(broker: str) -> None:
    queue, position = BroadcastQueue(), 0
    while True:
        watched = queue.run(consul.watch(queue.keys.messages, position, WAIT_S))
        position = watched.position
        epoch = max((queue.keys.epoch_of(entry.key) or 0 for entry in watched.entries), default=0)
        sys.stdout.write(f"{broker} {epoch} {time.time():.6f}\n")
        sys.stdout.flush()


ROLES: dict[str, Callable[[str], None]] = {"_receive": receive, "_watch": watch}


def run(role: str, brokers: str) -> None:
    """Run each broker in a thread, until this process is killed."""
    threads = [threading.Thread(target=ROLES[role], args=(broker,)) for broker in brokers.split(",")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
