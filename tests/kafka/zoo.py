"""The clients: how each is started, and what each cannot do.

Those of Python are installed with the tests. scripts/kafka-clients fetches the others. A client that cannot be had is
skipped, and fails in CI.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import record_lines
from brokers import Broker
from kafka_peer import Peer
from nasty import LONG_ONES, SHORT
from record_lines import Row

ROOT = Path(__file__).resolve().parents[2]
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
EVERYTHING = SHORT | LONG_ONES
_FETCH_S = 840.0  # for what a client lacks
_RUN_S = 200.0
_LENGTH_FROM, _ATTRIBUTES_AT, _CODEC = 12, 22, 0x07  # in a batch


class Client(NamedTuple):
    """`program`: in clients/, of Python; "": scripts/kafka-clients says the command. `port`: whose address it is told.

    `codecs`: in which it writes and reads. `is_kept`: the broker keeps its batches as they came.
    `not_written`, `not_read`: names of records, and why this client itself is not able to do it.
    """

    name: str
    program: str = ""
    port: str = "kafka"
    codecs: tuple[str, ...] = CODECS
    is_kept: bool = True
    not_written: Mapping[str, str] = {}
    not_read: Mapping[str, str] = {}

    @property
    def is_kafka(self) -> bool:
        """Return True if it speaks Kafka's protocol, not one of KMQ's."""
        return len(self.codecs) > 1

    def records(self, codec: str) -> dict[str, Row]:
        """Return what it writes. Long values are sent once, as they are: every reader has all topics to read."""
        some = EVERYTHING if codec == "none" else SHORT
        return {name: row for name, row in some.items() if name not in self.not_written}

    def topic(self, codec: str) -> str:
        return f"{self.name}.{codec}"


_NO_TIME = dict.fromkeys(("time now", "time 1 ms", "time 0", "time latest"), "it gives no times")
_TIME_0 = {"time 0": "0 stands for the time now"}
_NO_NULL_HEADER = {"header null value": "it refuses a header without a value"}
_NO_EMPTY_NAME = {"header empty name": "it refuses a header without a name"}
_NANOSECONDS = {"time latest": "it counts nanoseconds in 64 bits from the first record of a batch, and they overflow"}

CLIENTS = {
    client.name: client
    for client in (
        Client(
            "kcat",
            not_written={
                **_NO_TIME,
                **_NO_EMPTY_NAME,
                "header binary": "a header is a word of the command, which holds no NUL",
                "header name of separators": "a header's name ends with the first =",
            },
        ),
        Client("librdkafka", "librdkafka.py", not_written=_TIME_0),
        Client("librdkafka-2.6", not_written=_TIME_0),
        Client("kafka-python", "kafka_python.py", not_written=_NO_NULL_HEADER),
        Client("aiokafka", "asyncio_client.py"),
        # Its codecs for lz4 and zstd are native code that has to be compiled against old releases of node.
        Client("kafkajs", codecs=("none", "gzip", "snappy"), not_written=_NO_NULL_HEADER),
        Client("java"),
        # This release does not say the latest time of a batch, so that its batches do not show what their lines show.
        Client("sarama", is_kept=False, not_written=_NANOSECONDS, not_read=_NANOSECONDS),
        Client("kmq", "kmq_lines.py", codecs=("none",), is_kept=False),
        Client("http", "http_api.py", "http", codecs=("none",), is_kept=False, not_written=_NO_EMPTY_NAME),
    )
}


@cache
def _command(name: str) -> list[str] | str:
    """Return the command that runs a client, or why there is none."""
    client = CLIENTS[name]
    if client.program:
        return [sys.executable, str(ROOT / "tests/kafka/clients" / client.program)]
    return _fetched(client.name)


def _fetched(name: str) -> list[str] | str:
    script, env = ROOT / "scripts/kafka-clients", os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([script, name], capture_output=True, text=True, timeout=_FETCH_S, env=env)
    return done.stdout.splitlines() if done.returncode == 0 else done.stderr.strip()[-500:]


def program(name: str) -> list[str]:
    """Return the command of a program that is no client of CLIENTS. Skip the test if it cannot be had, and fail it in CI."""
    found = _fetched(name)
    if isinstance(found, str):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{name}: {found}")
    return found


def has(client: Client) -> bool:
    return not isinstance(_command(client.name), str)


def need(client: Client, *, is_said: bool = False) -> None:
    """Skip the test if the client cannot be had. `is_said`: fail in CI; one test of each client does."""
    found = _command(client.name)
    if isinstance(found, str):
        (pytest.fail if is_said and os.environ.get("CI") == "true" else pytest.skip)(f"{client.name}: {found}")


class Done(NamedTuple):
    """What a client has printed. `error`: what it has said where it failed, else ""."""

    rows: list[Row]
    error: str


class Transactor:
    """A client's program that does one step after the other (record_lines.transact)."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def do(self, step: str, *words: str | Row) -> list[Row]:
        """Let it do a step. Returns what it prints of it. Raises StepFailed."""
        self.begin(step, *words)
        return self.end()

    def begin(self, step: str, *words: str | Row) -> None:
        """Let it begin with a step, and others do theirs meanwhile."""
        assert self._process.stdin is not None
        texts = [record_lines.write([word]).rstrip("\n") if isinstance(word, Row) else word for word in words]
        self._process.stdin.write("\t".join([step, *texts]) + "\n")
        self._process.stdin.flush()

    def end(self) -> list[Row]:
        """Wait until the step that was begun is done."""
        assert self._process.stdout is not None
        lines = []
        while "\t" in (line := self._process.stdout.readline()):
            lines.append(line)
        if line != "done\n":
            raise StepFailed(line)
        return [*record_lines.read(lines)]


class StepFailed(Exception):
    """A client has refused a step, and says why."""


class Zoo:
    """A broker, and what its clients have written and read. Everything is done once, when it is asked for first."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.written: dict[str, str] = {}  # client → its error
        self.times: dict[str, tuple[int, int]] = {}  # topic → ms before its first record and after its last
        self._read: dict[tuple[str, str], dict[str, list[Row]]] = {}
        self.errors: dict[tuple[str, str], str] = {}
        self.is_restarted = False

    def _program(self, client: Client, command: str) -> dict[str, Any]:
        """Return what starts its program, as arguments of subprocess."""
        found = _command(client.name)
        assert not isinstance(found, str)
        address = f"127.0.0.1:{(self.broker.pipes / f'{client.port}.port').read_text().strip()}"
        env = self.broker.env | {"PYTHONPATH": str(ROOT / "tests/kafka")}
        return {"args": [*found, command, address], "env": env, "text": True}

    def run(self, client: Client, command: str, topics: Mapping[str, object], rows: Iterable[Row] = ()) -> Done:
        program = self._program(client, command)
        program["args"] += [f"{topic}={value}" for topic, value in topics.items()]
        done = subprocess.run(**program, input=record_lines.write(rows), capture_output=True, timeout=_RUN_S)
        whole = done.stdout[: done.stdout.rfind("\n") + 1]
        return Done([*record_lines.read(whole.splitlines())], done.stderr[-2000:] if done.returncode else "")

    @contextmanager
    def transactor(self, client: Client) -> Iterator["Transactor"]:
        """Run a client's program for the steps of transactions."""
        with subprocess.Popen(
            **self._program(client, "transact"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            try:
                yield Transactor(process)
            finally:
                process.kill()

    # --- write -------------------------------------------------------------------------------------------------------

    def write_all(self) -> None:
        """Let every client write its topics."""
        for client in filter(has, CLIENTS.values()):
            if client.name not in self.written:
                self.written[client.name] = self._write(client)

    def _write(self, client: Client) -> str:
        topics = {client.topic(codec): codec for codec in client.codecs}
        if not client.is_kafka:  # Kafka's clients make a topic by naming it
            with Peer.of(self.broker.pipes) as peer:
                assert {peer.make_topic(topic) for topic in topics} == {len(record_lines.PARTITIONS)}
        begin = now()
        plain = client.topic("none")
        error = self.run(client, "produce", {plain: topics.pop(plain)}, client.records("none").values()).error
        if topics and not error:
            error = self.run(client, "produce", topics, client.records("gzip").values()).error
        self.times |= dict.fromkeys([plain, *topics], (begin, now()))
        return error

    def sent(self) -> dict[str, dict[str, Row]]:
        """Return the records that were sent to each topic, by their names."""
        writers = [CLIENTS[name] for name, error in self.written.items() if not error]
        return {client.topic(codec): client.records(codec) for client in writers for codec in client.codecs}

    # --- read --------------------------------------------------------------------------------------------------------

    def read(self, client: Client, source: str) -> dict[str, list[Row]]:
        """Return what a client reads, by topic. `source`: `memory`, batches as they came; `lines`, after a restart."""
        if (client.name, source) not in self._read:
            self.write_all()
            if source == "lines":
                self.restart()
            assert self.is_restarted == (source == "lines"), "nothing is in memory any more"
            topics = {
                topic: len(rows) for topic, rows in self.sent().items() if self._is_readable(client, topic, source)
            }
            done = self.run(client, "consume", topics)
            found: dict[str, list[Row]] = {topic: [] for topic in topics}
            for row in done.rows:
                found[row.topic].append(row)
            self._read[client.name, source], self.errors[client.name, source] = found, done.error
        return self._read[client.name, source]

    def _is_readable(self, client: Client, topic: str, source: str) -> bool:
        codec = topic.rpartition(".")[2]
        return source == "lines" or not client.is_kafka or codec in client.codecs

    def codecs(self, topic: str) -> set[str]:
        """Return the codecs of the batches that a consumer of a topic is sent now."""
        found = set()
        with Peer.of(self.broker.pipes) as peer:
            for partition in record_lines.PARTITIONS:
                row = peer.fetch(topic, partition, 0, partition_bytes=1 << 22)
                assert not row.error_code, row
                data, at = bytes(row.records or b""), 0
                while at < len(data):
                    found.add(CODECS[data[at + _ATTRIBUTES_AT] & _CODEC])
                    at += _LENGTH_FROM + int.from_bytes(data[at + 8 : at + _LENGTH_FROM])
        return found

    def restart(self) -> None:
        """Kill the gateway: another one knows of no batch, and has to read the lines."""
        if self.is_restarted:
            return
        self.is_restarted = True
        self.broker.kill("gateway")
        self.broker.wait(self.answers, "a gateway that answers")

    def answers(self) -> bool:
        try:
            with Peer.of(self.broker.pipes) as peer:
                return bool(peer.ask(18, 0).api_keys)
        except (OSError, AssertionError):
            return False


def now() -> int:
    return time.time_ns() // 1_000_000


# --- compared --------------------------------------------------------------------------------------------------------


def differences(
    sent: Mapping[str, Row], found: list[Row], client: Client, times: tuple[int, int]
) -> list[tuple[str, str, str, str]]:
    """Return name, field, sent and found of what is not byte for byte as it was sent, in order, at its offset."""
    found = sorted(found, key=lambda row: (row.partition, row.offset))
    ordered = sorted(sent.items(), key=lambda item: item[1].partition)
    wrong = [] if len(found) == len(sent) else [("all", "count", str(len(sent)), str(len(found)))]
    following = dict.fromkeys(record_lines.PARTITIONS, 0)
    for (name, row), read in zip(ordered, found, strict=False):
        wanted = _shown_by(client, row)._replace(topic=read.topic, offset=following[row.partition])
        following[row.partition] += 1
        if row.timestamp is None and times[0] <= (read.timestamp or 0) <= times[1]:
            wanted = wanted._replace(timestamp=read.timestamp)
        if name in client.not_read:
            continue
        for field, one, other in zip(Row._fields, wanted, read, strict=True):
            if one != other:
                wrong.append((name, field, repr(one)[:200], repr(other)[:200]))
    return wrong


def _shown_by(client: Client, row: Row) -> Row:
    """Return a record as a client shows it: kcat has one text for all headers, and ends a value before a NUL."""
    if client.name != "kcat" or not row.headers:
        return row
    texts = [(name.encode(), b"NULL" if value is None else value.partition(b"\0")[0]) for name, value in row.headers]
    pairs = [name + b"=" + text for name, text in texts]
    return row._replace(headers=(("", b",".join(pairs)),))
