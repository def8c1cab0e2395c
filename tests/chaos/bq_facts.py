"""A queue of a test: its processes (bq_worker.py), what they have written down, and what must be true of it.

What is true at every moment, whatever was killed, paused or cut:
- an epoch that a publisher was told holds its message, in what everybody receives; no message has two epochs
- a message that was refused is nowhere
- every subscriber gets the messages in order and without a gap; only after it was opened again may some come again
- no mark in Consul is beyond what its broker has processed
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from waiting import until

from chaos.consul_servers import ConsulServers
from kmq.cluster.presence import Keys
from kmq.cluster.publisher import Mark, Message

WORKER = Path(__file__).with_name("bq_worker.py")
DEADLINE_S = 120.0  # until something that goes on by itself has gone on; a busy machine needs a part of it


class Fact(NamedTuple):
    """One line. `words` begins with what happened."""

    ts: float
    words: list[str]


class Worker:
    """One process, in the namespace of a client."""

    def __init__(self, command: list[str], file: Path, environment: dict[str, str]) -> None:
        self.file = file
        self._facts: list[Fact] = []
        self._read = 0  # bytes
        with open(file.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=file.parent, stdout=log, stderr=log)

    def facts(self, *kinds: str) -> list[Fact]:
        """Return the lines of these kinds; without kinds all. A line that is being written does not count yet."""
        if self.file.exists():
            with open(self.file, "rb") as file:
                file.seek(self._read)
                new = file.read()
            lines = new[: new.rfind(b"\n") + 1]
            self._read += len(lines)
            for ts, *words in (line.split(" ") for line in lines.decode().splitlines()):
                self._facts.append(Fact(float(ts), words))
        return [fact for fact in self._facts if not kinds or fact.words[0] in kinds]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def said(self) -> str:
        return self.file.with_suffix(".log").read_text()[-2000:] + "".join(map(str, self.facts()[-5:]))


class Queue:
    """One cluster name in Consul, and everybody who uses it."""

    def __init__(self, servers: ConsulServers, root: Path, cluster: str) -> None:
        self.servers, self.root, self.keys = servers, root, Keys(cluster)
        self.workers: list[Worker] = []
        self.publishers: list[Worker] = []
        self.receivers: dict[str, Path] = {}  # broker → its file: all its processes append to one
        self._environment = {"PATH": os.environ["PATH"], "KMQ_CONSUL": servers.addresses, "KMQ_CLUSTER": cluster}

    def _start(self, client: int, file: str, *arguments: object, **environment: object) -> Worker:
        path = self.root / file
        command = [*self.servers.network.inside(self.servers.client(client)), sys.executable, str(WORKER)]
        role, *rest = map(str, arguments)
        values = {name: str(value) for name, value in environment.items()}
        self.workers.append(Worker([*command, role, str(path), *rest], path, self._environment | values))
        return self.workers[-1]

    def publisher(self, name: str, count: int, size: int = 0, client: int = 0, **environment: object) -> Worker:
        """Publish that many messages. The name is new: it is part of the messages."""
        worker = self._start(client, f"p-{name}", "publish", name, count, size, **environment)
        self.publishers.append(worker)
        return worker

    def receiver(self, *brokers: str, client: int = 1, **environment: object) -> Worker:
        """Receive as these brokers. Started again, it goes on in the same file."""
        file = f"r-{brokers[0]}"
        self.receivers |= dict.fromkeys(brokers, self.root / file)
        return self._start(client, file, "receive", ",".join(brokers), **environment)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, what: str, condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> float:
        """Wait until it is so; return how long that took, in seconds."""
        began = time.monotonic()
        until(condition, what, lambda: [worker.said() for worker in self.workers], seconds=deadline_s)
        return time.monotonic() - began

    def wait_told(self, worker: Worker, count: int) -> None:
        self.wait(f"{count} messages published", lambda: len(worker.facts("told")) >= count)

    def wait_done(self, *workers: Worker) -> None:
        for worker in workers or self.publishers:
            self.wait("all messages published", partial(worker.facts, "done"))
            assert worker.process.wait(DEADLINE_S) == 0, worker.said()

    def wait_processed(self, epoch: int, *brokers: str) -> None:
        for broker in brokers or self.receivers:
            self.wait(f"{broker} has {epoch}", partial(self._has_processed, broker, epoch))

    def _has_processed(self, broker: str, epoch: int) -> bool:
        return self.last_processed(broker) >= epoch

    def wait_subscribed(self) -> None:
        """Wait until all receivers have marked: from now on nothing is trimmed that they have not got."""
        self.wait("all have marked", lambda: self.marks().keys() >= self.receivers.keys())

    # --- what is there ------------------------------------------------------------------------------------------------

    def seen_by(self, broker: str) -> list[Fact]:
        """Return what this broker wrote."""
        reader = next(worker for worker in self.workers if worker.file == self.receivers[broker])
        return [fact for fact in reader.facts() if fact.words[1:2] == [broker]]

    def last_processed(self, broker: str) -> int:
        items = [int(fact.words[2]) for fact in self.seen_by(broker) if fact.words[0] in ("processed", "snapshot")]
        return max(items, default=0)

    def told(self) -> dict[int, str]:
        """Return what publishers were told: epoch → payload. None of them is there twice."""
        told = [fact.words for worker in self.publishers for fact in worker.facts("told")]
        twice = [epoch for epoch, times in Counter(words[1] for words in told).items() if times > 1]
        assert not twice, f"told to two publishers: {twice}"
        return {int(epoch): payload for _, epoch, payload in told}

    def present(self) -> set[str]:
        """Return the brokers whose session lives."""
        return set(self.servers.entries(self.keys.subscribers))

    def last_epoch(self) -> int:
        return int(self.servers.entries(self.keys.root).get("epoch", b"0"))

    def stored(self) -> dict[int, str]:
        """Return what lies in Consul: epoch → payload."""
        entries = self.servers.entries(self.keys.messages)
        return {int(key): Message.decode(value, int(key)).payload.decode().rstrip() for key, value in entries.items()}

    # --- judging ------------------------------------------------------------------------------------------------------

    def check(self, may_skip: bool = False) -> None:
        """Check all of this module's list. `may_skip`: a snapshot may take the place of messages."""
        found = self.stored()
        for broker in self.receivers:
            received = self._check_order(broker, may_skip)
            for epoch, payload in received.items():
                assert found.setdefault(epoch, payload) == payload, f"two messages under {epoch}"
        for epoch, payload in self.told().items():
            assert found.get(epoch, payload if may_skip else None) == payload, f"told {epoch}: {payload}"
        twice = [payload for payload, times in Counter(found.values()).items() if times > 1]
        assert not twice, f"published twice: {twice}"
        refused = {fact.words[1] for worker in self.publishers for fact in worker.facts("refused")}
        assert not refused & set(found.values()), "refused and yet published"
        self.check_marks()

    def _check_order(self, broker: str, may_skip: bool) -> dict[int, str]:
        received: dict[int, str] = {}
        highest, previous = 0, None  # None: just opened, so what comes next may have been there before
        for fact in self.seen_by(broker):
            kind, epoch = fact.words[0], int(fact.words[2]) if fact.words[2:] and fact.words[2].isdecimal() else 0
            if kind == "start":
                previous = None
            elif kind == "snapshot":
                assert may_skip or epoch <= highest or not received, f"{broker} skipped from {highest} to {epoch}"
                previous = epoch
            elif kind == "processed":
                fits = epoch <= highest + 1 if previous is None else epoch == previous + 1
                assert fits, f"{broker}: {epoch} after {previous}, highest {highest}"
                assert received.setdefault(epoch, fact.words[3]) == fact.words[3], f"{broker}: two messages {epoch}"
                previous = epoch
            highest = max(highest, epoch)
        return received

    def marks(self) -> dict[str, int]:
        entries = self.servers.entries(self.keys.delivered)
        return {broker: Mark.decode(value).epoch for broker, value in entries.items()}

    def check_marks(self) -> None:
        """Check that nobody is marked as being beyond what it has processed."""
        for broker, marked in self.marks().items():  # read first: a mark only follows what is in the file
            assert marked <= self.last_processed(broker), f"{broker} is marked {marked}"

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
