"""A process of a test that publishes or receives, and writes down what it was told, so that it can be killed anywhere.

    python bq_worker.py publish FILE NAME COUNT [BYTES]   COUNT messages with the payload `<name>:<n>`, filled up to BYTES
    python bq_worker.py receive FILE BROKER,…             as these brokers, each a thread, until it is killed

FILE gets one line for each fact, written with one call, so that SIGKILL takes nothing of it away. A line begins with the
time in seconds:

    publish   told <epoch> <payload> | unknown <payload> <error> | refused <payload> <error> | done
    receive   start <broker> | processed <broker> <epoch> <payload> | snapshot <broker> <epoch> | error <broker> <error>
    both      at <step>, where the step of STOP_AT is reached | failed <error>

`start` comes before each opening of a subscriber, so also after each error: what follows may have been processed before.

A step is `before:<name>[:<n>]` or `after:<name>[:<n>]`, at the n-th request of this name (step_of), or at the n-th item that
is processed. With STOP_AT in the environment the process kills itself there by the signal of STOP_BY (KILL or STOP); with
LOSE the answer of that request gets lost. ABSENT_S: see trimming.py. With HOLDS a publisher takes the lock for each message,
and gives it back.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

from kmq.cluster import consul
from kmq.cluster import publisher as trimming
from kmq.cluster.consul import ConsulError
from kmq.cluster.publisher import Deposed, Message
from kmq.cluster.queue import BroadcastQueue, Place
from kmq.cluster.subscriber import Snapshot
from kmq.config.settings import load
from kmq.errors import BusyError, KmqError

_AGAIN_S = 0.05  # after an error
# What a Txn with such an operation is called, the first that fits.
_TXNS = [
    ("set", "/bq/", "publish"),
    ("cas", "/bq-delivered/", "mark"),
    ("delete", "/bq/", "trim"),
    ("get-tree", "", "snapshot"),
    ("lock", "", "lock"),
    ("unlock", "", "unlock"),
]


class Facts:
    """The file. A line is in it when `write` returns."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *words: object) -> None:
        os.write(self._fd, f"{time.time():.6f} {' '.join(map(str, words))}\n".encode())


def step_of(asked: consul.Request) -> str:
    """Return the name of a request."""
    path = asked.path
    if path == "/v1/txn":
        return _name_of_txn([item["KV"] for item in json.loads(asked.body)])
    if path.startswith("/v1/kv/"):
        return "watch" if "recurse" in asked.params else "read"
    return path.split("/")[3] if "/session/" not in path else "session"


def _name_of_txn(operations: list[dict[str, str]]) -> str:
    for verb, prefix, name in _TXNS:
        if any(operation["Verb"] == verb and prefix in operation["Key"] for operation in operations):
            return name
    return "none"


class Steps:
    """Where this process is, and where it is to stop."""

    def __init__(self, facts: Facts, wanted: str, by: str) -> None:
        self._facts, self._by = facts, by
        self._wanted = wanted if wanted.count(":") == 2 else wanted + ":1"
        self._reached: Counter[str] = Counter()

    def reach(self, step: str) -> None:
        self._reached[step] += 1
        if f"{step}:{self._reached[step]}" == self._wanted:
            self._facts.write("at", self._wanted)
            if self._by == "LOSE":
                raise ConnectionResetError("the answer was lost")
            # To this thread: a signal to the process stops another one first, and this one goes on for a moment.
            signal.pthread_kill(threading.get_ident(), getattr(signal, f"SIG{self._by}"))

    def watch_requests(self) -> None:
        """Stop before or after a request that is no beat of the session. After: it was answered."""
        send = consul._Connection.ask

        async def stopping(connection: consul._Connection, asked: consul.Request, *rest: Any) -> consul.Response:
            name = step_of(asked)
            if name == "check":
                return await send(connection, asked, *rest)
            self.reach(f"before:{name}")
            response = await send(connection, asked, *rest)
            self.reach(f"after:{name}")
            return response

        consul._Connection.ask = stopping  # type: ignore[assignment, method-assign]


def publish(facts: Facts, name: str, count: int, size: int) -> None:
    with BroadcastQueue() as queue:
        for number in range(1, count + 1):
            payload = f"{name}:{number}"
            message = Message.new("number", payload.encode())
            if size:
                message = message._replace(payload=payload.encode().ljust(size - len(message.encode()) + len(payload)))
            while not publish_one(facts, queue, message, payload):
                payload += "+"
                message = message._replace(id=Message.new("number", b"").id, payload=payload.encode())


def publish_one(facts: Facts, queue: BroadcastQueue, message: Message, payload: str) -> bool:
    """Publish, and write down what we were told. Returns False if another one must take its place."""
    try:
        if os.environ.get("HOLDS"):
            epoch = queue.as_publisher(lambda publisher: publisher.publish(message), timeout=60)
        else:
            epoch = queue.publish_message(message, timeout=60)
        facts.write("told", epoch, payload)
        return True
    except (Deposed, BusyError) as error:
        facts.write("refused", payload, repr(str(error)))
    except ConsulError as error:
        facts.write("unknown", payload, repr(str(error)))
    time.sleep(_AGAIN_S)
    return False


def receive(facts: Facts, steps: Steps, broker: str) -> None:
    place = Place.of(load())._replace(broker=broker)
    with BroadcastQueue(place) as queue:
        while True:
            facts.write("start", broker)
            try:
                for item in queue.receive():
                    if isinstance(item, Snapshot):
                        facts.write("snapshot", broker, item.epoch)
                    else:
                        steps.reach("before:processing")
                        facts.write("processed", broker, item.epoch, item.payload.decode().rstrip())
                        steps.reach("after:processing")
            except (ConsulError, BusyError) as error:
                facts.write("error", broker, repr(str(error)))
            time.sleep(_AGAIN_S)


def main(role: str, path: str, names: str, count: str = "0", size: str = "0") -> None:
    facts = Facts(path)
    trimming.ABSENT_S = float(os.environ.get("ABSENT_S", trimming.ABSENT_S))
    steps = Steps(facts, os.environ.get("STOP_AT", ""), os.environ.get("STOP_BY", "KILL"))
    steps.watch_requests()
    try:
        if role == "publish":
            publish(facts, names, int(count), int(size))
            facts.write("done")
            return
        first, *others = names.split(",")
        for name in others:
            threading.Thread(target=receive, args=(facts, steps, name)).start()
        receive(facts, steps, first)
    except KmqError as error:
        facts.write("failed", repr(str(error)))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
