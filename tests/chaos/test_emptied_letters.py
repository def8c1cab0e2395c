"""Dead letters that are emptied while their group is set back and the broker is killed: each failure has its letter, once.

round   some messages are sent, some of them bad; the queue of letters is emptied, or not; the group is set back, or not;
        workers at one door handle all that there is, while stages and gateway are killed
then    the letters are exactly the bad messages that were handled since the queue was emptied
"""

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from api_client import Api
from brokers import STAGES, Broker
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from waiting import PATIENCE_S, until

import kmq

TOPIC, LETTERS, GROUP, PARTITIONS = "jobs", "jobs.dlq", "workers", 3
QUICK = kmq.Backoff(first=0.01, longest=0.02)
Place = tuple[int, int]  # partition, offset


class Trial:
    def __init__(self, root: Path, rng: random.Random, cleanup: ExitStack) -> None:
        self.rng, self.broker, self.numbers = rng, Broker(root), itertools.count()
        cleanup.callback(self.broker.close)
        self.broker.up(KMQ_CONSOLE="write")
        self.bad: set[Place] = set()  # all that fail
        self.due: set[Place] = set()  # those that have to have a letter
        self.done: Counter[str] = Counter()
        made = self.ask("POST", "/api/admin/topics", {"name": TOPIC, "partitions": PARTITIONS, "maxDeliveries": 2})
        assert made["name"] == TOPIC

    # --- the broker ----------------------------------------------------------------------------------------------

    def port(self, name: str) -> int:
        return int((self.broker.pipes / f"{name}.port").read_text())

    def ask(self, method: str, target: str, body: Any = None) -> Any:
        """Ask until it is answered with 2xx; what only a kill can cause is asked again."""
        answers: list[Any] = []

        def is_done() -> bool:
            try:
                with closing(Api(self.port("http"))) as api:
                    answer = api.call(method, target, body)
            except (OSError, ValueError, HTTPException):
                return False
            assert answer.status in (200, 201, 204, 404, 409, 429, 503), answer
            answers.append(answer.value)
            return answer.status < 300 or answer.status == 404

        until(is_done, f"an answer to {method} {target} {body}", lambda: (answers[-1:], self.broker.log()[-1500:]))
        return answers[-1]

    def kill(self) -> None:
        names = self.rng.sample([*STAGES, "gateway"], self.rng.choice([1, 1, 2]))
        self.broker.kill(*names)
        self.done["kill"] += 1

    # --- one round -----------------------------------------------------------------------------------------------

    def round(self) -> None:
        self.send()
        if self.rng.random() < 0.5:
            self.empty()
        begin = self.committed()
        if begin and self.rng.random() < 0.5:
            begin = self.set_back()
        self.due |= {(partition, offset) for partition, offset in self.bad if offset >= begin.get(partition, 0)}
        worker = self.rng.choice([self.work_by_run, self.work_over_http])
        with self.killing():
            worker()
        self.done[worker.__name__] += 1
        self.judge()

    def send(self) -> None:
        with kmq.Producer(port=lambda: self.port("ingress"), timeout_s=PATIENCE_S) as producer:
            for _ in range(self.rng.randrange(1, 120)):
                partition, is_bad = self.rng.randrange(PARTITIONS), self.rng.random() < 0.2
                value = b"%s %d" % (b"bad" if is_bad else b"good", next(self.numbers))
                producer.send(TOPIC, value, partition=partition)
            producer.flush()
        ends = self.ends()
        self.bad = {place for place, value in self.read(TOPIC, ends) if value.startswith(b"bad")}

    def ends(self) -> dict[int, int]:
        """Where the partitions end, once everything sent is there."""
        self.broker.wait_routed(len({line.split(b"|")[0] for line in self.broker.wal()}))
        return self.ends_of(TOPIC)

    def ends_of(self, topic: str) -> dict[int, int]:
        found = self.ask("GET", f"/api/admin/topics/{topic}").get("partitions", [])
        return {row["partition"]: row["endOffset"] for row in found}

    def empty(self) -> None:
        """Delete all letters: the topic, or its records, by command or by Kafka."""
        how = self.rng.choice(["deleted", "truncated", "by kafka"])
        if not (ends := self.ends_of(LETTERS)):
            return
        if how == "deleted":
            self.ask("DELETE", f"/api/admin/topics/{LETTERS}")
        elif how == "truncated":
            done = self.broker.kmq("topics", "truncate", LETTERS, "--before", "end", "--yes")
            assert done.returncode == 0, done.stderr
        else:
            admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{self.port('kafka')}"})
            before = [TopicPartition(LETTERS, n, end) for n, end in ends.items()]
            until(lambda: self.are_deleted(admin, before), "the letters deleted", self.broker.log)
        self.due.clear()
        self.done[how] += 1

    def are_deleted(self, admin: AdminClient, before: list[TopicPartition]) -> bool:
        """A stage that is not back yet is no answer."""
        with contextlib.suppress(KafkaException):
            return all(asked.result() for asked in admin.delete_records(before, request_timeout=5).values())
        return False

    def set_back(self) -> dict[int, int]:
        """Where the group begins then."""
        way = self.rng.choice(["seek", "reset", "command"])
        if way == "command":
            words = ["groups", "reset", GROUP, "--topic", TOPIC, "--to", "earliest"]
            until(
                lambda: self.broker.kmq(*words).returncode == 0, "the group set back", lambda: self.broker.kmq(*words)
            )
        elif way == "seek":
            self.ask("POST", f"/api/topics/{TOPIC}/seek", {"group": GROUP, "to": "earliest"})
        else:
            self.ask("POST", f"/api/groups/{GROUP}/reset", {"topic": TOPIC, "to": "earliest", "dryRun": False})
        self.done[way] += 1
        return {}

    def committed(self) -> dict[int, int]:
        rows = self.ask("GET", f"/api/groups/{GROUP}").get("partitions", [])
        return {row["partition"]: row["committed"] for row in rows if row["committed"] is not None}

    @contextlib.contextmanager
    def killing(self) -> Iterator[None]:
        """Kill processes now and then, for as long as a round of a few hundred messages takes."""
        enough, began = threading.Event(), time.monotonic()

        def kill() -> None:
            while not enough.wait(self.rng.uniform(0.0, 1.5)) and time.monotonic() < began + 10:
                self.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield
        finally:
            enough.set()
            thread.join()

    # --- workers -------------------------------------------------------------------------------------------------

    def is_done(self) -> bool:
        rows = self.ask("GET", f"/api/groups/{GROUP}").get("partitions", [])
        return len(rows) == PARTITIONS and all(row["lag"] == 0 and row["nacked"] == 0 for row in rows)

    def work_by_run(self) -> None:
        stop = threading.Event()

        def handle(message: kmq.Message) -> None:
            if message.value and message.value.startswith(b"bad"):
                raise ValueError("no such address")

        def made(window: str) -> kmq.Producer:
            return kmq.Producer(port=lambda: self.port("ingress"), window=window)

        def work() -> None:
            with kmq.Consumer(TOPIC, port=lambda: self.port("egress"), group_id=GROUP, session_s=6) as consumer:
                consumer.run(handle, max_retries=1, backoff=QUICK, producer=made, stop=stop)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            until(lambda: self.is_done() or not thread.is_alive(), "all of it done", self.broker.log)
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        assert self.is_done()

    def work_over_http(self) -> None:
        member = f"m{next(self.numbers)}"
        terms = f"group={GROUP}&member={member}&format=text&timeoutMs=100&maxMessages=20"

        def turn() -> bool:
            found = self.ask("GET", f"/api/topics/{TOPIC}/consume?{terms}")
            for each in found["messages"]:
                if each["value"].startswith("bad"):
                    place = {"group": GROUP, "member": member, "partition": each["partition"], "offset": each["offset"]}
                    self._tell(f"/api/topics/{TOPIC}/nack", place | {"generation": found["generation"], "reason": "no"})
            offsets = [{"partition": row["partition"], "offset": row["offset"]} for row in found["positions"]]
            if found["messages"]:
                asked = {"group": GROUP, "member": member, "generation": found["generation"], "offsets": offsets}
                self._tell(f"/api/topics/{TOPIC}/commit", asked)
            return not found["messages"] and self.is_done()

        until(turn, "all of it done", self.broker.log)
        self.ask("DELETE", f"/api/groups/{GROUP}/members/{member}")

    def _tell(self, target: str, body: Any) -> None:
        """Say it once: after a refusal or a kill the messages come again."""
        with contextlib.suppress(OSError, ValueError, HTTPException), closing(Api(self.port("http"))) as api:
            answer = api.call("POST", target, body)
            assert answer.status in (200, 404, 409, 416, 429, 503), answer

    # --- letters -------------------------------------------------------------------------------------------------

    def read(self, topic: str, ends: dict[int, int]) -> list[tuple[Place, bytes]]:
        found: list[tuple[Place, bytes]] = []
        with kmq.Consumer(topic, port=lambda: self.port("egress"), start="earliest") as consumer:

            def is_read() -> bool:
                came = consumer.poll(500, timeout=0.2)
                found.extend(((each.partition, each.offset), each.value or b"") for each in came)
                return len(found) == sum(ends.values())

            until(is_read, f"the records of {topic}", lambda: (found, ends))
        return found

    def letters(self) -> list[Place]:
        found = self.ask("GET", f"/api/topics/{LETTERS}/consume?from=earliest&format=text&maxMessages=10000")
        headers = [each["headers"] for each in found.get("messages", [])]
        return [(int(each["origin_partition"]), int(each["origin_offset"])) for each in headers]

    def judge(self) -> None:
        found: list[Place] = []

        def is_right() -> bool:
            found[:] = self.letters()
            return sorted(found) == sorted(self.due)

        seen = f"after {dict(self.done)}"
        until(is_right, f"the letters of {sorted(self.due)} {seen}", lambda: (sorted(found), self.broker.log()[-3000:]))


def test_each_failure_has_its_letter_whatever_is_emptied_set_back_and_killed(
    tmp_path: Path, rng: random.Random, cleanup: ExitStack
) -> None:
    trial = Trial(tmp_path / "b", rng, cleanup)
    for _ in range(3):
        trial.round()
    print(dict(trial.done))


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("minutes", [15])
def test_soak_each_failure_has_its_letter(tmp_path: Path, rng: random.Random, cleanup: ExitStack, minutes: int) -> None:
    trial, began = Trial(tmp_path / "b", rng, cleanup), time.monotonic()
    while time.monotonic() < began + 60 * minutes:
        trial.round()
    print(dict(trial.done))
