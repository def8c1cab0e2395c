"""A broker for the tests of an application: real processes on ports of their own, removed after the tests.

    with kmq.testing.broker() as broker:                    # or in conftest.py: pytest_plugins = ["kmq.testing"]
        with broker.producer() as producer: ...             # and a test takes the fixture kmq_broker
        broker.reset()                                      # no topics, no groups

Invariant   Two test runs never meet: directory, ports and shared memory belong to one broker. Nothing stays behind: if
            the process that started a broker is killed (kill -9), the kernel tells the supervisor to stop it, and the
            next broker removes its stats page.
Not covered The disk: unless KMQ_FSYNC=always is set nothing is fsynced, which no test notices.
            A thread that starts a broker and ends: the kernel treats that like the end of the process.
            Ids: after a reset the broker still knows a named producer's last id, so the next id must be higher.
"""

import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from kmq.broker import status
from kmq.broker.health import is_process
from kmq.broker.stats import peek
from kmq.client.consumer import Consumer
from kmq.client.producer import Producer
from kmq.config.settings import GRACE_S, SHM, Settings, load
from kmq.errors import ConfigError, KmqError
from kmq.links import layout
from kmq.log.reader import wal

if TYPE_CHECKING:
    from kmq.client.consumer_options import ConsumerChoices
    from kmq.client.options import Choices

_START_S = 30.0  # a broker is up in about a second; this is for a busy machine
_POLL_S = 0.01
_PORTS = (
    "KMQ_PORT",
    "KMQ_EGRESS_PORT",
    "KMQ_ACK_PORT",
    "KMQ_STATUS_PORT",
    "KMQ_HTTP_PORT",
    "KMQ_GRPC_PORT",
    "KMQ_KAFKA_PORT",
)
_numbers = itertools.count()


class TestBroker:
    """A broker that runs while the block runs. `env`: its settings, for programs that a test starts."""

    __test__ = False  # pytest must not collect it

    def __init__(self, *, gateway: bool = True, **settings: object) -> None:
        """`settings`: such as KMQ_MAX_LINE="2 MiB"; ports are free ones.

        `gateway`: with consumers, HTTP and gRPC; needs `kmq[gateway]`. Without it a broker starts faster.
        """
        if unknown := [name for name in settings if not name.startswith(("KMQ_", "RB_"))]:
            raise TypeError(f"broker() got an unexpected argument {unknown[0]!r}; settings are named as KMQ_MAX_LINE")
        self.has_gateway = gateway
        self.root = Path(tempfile.mkdtemp(prefix="kmq-test-"))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KMQ_", "RB_"))}
        own = {"KMQ_DATA": f"{self.root}/data", "KMQ_PIPES": f"{self.root}/pipes", "KMQ_FSYNC": "never"}
        own["KMQ_INSTANCE"] = f"kmqtest-{os.getpid()}-{next(_numbers)}"
        self.env = inherited | dict.fromkeys(_PORTS, "0") | own | {name: str(value) for name, value in settings.items()}
        try:
            self.settings: Settings = load(self.env, toml="")
        except ConfigError:
            shutil.rmtree(self.root)
            raise
        self.data, self.log = Path(self.settings.data), Path(self.settings.pipes) / "kmq.log"

    def __enter__(self) -> Self:
        _remove_left()
        os.makedirs(self.settings.pipes)
        command = [sys.executable, "-m", "kmq.broker.supervisor", "--with", str(os.getpid())]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *([] if self.has_gateway else ["--no-gateway"])],
                env=self.env,
                cwd=self.root,  # there is no kmq.toml
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests only
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_S
        count = 4 + self.has_gateway
        while True:
            found = status.collect(self.settings)
            if found.ready and sum(each.state in ("ready", "following") for each in found.processes) == count:
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                why = found.verdict.first or "its processes have not begun"
                raise KmqError(f"the broker for tests did not start: {why}\n{self.log.read_text()[-2000:]}")
            time.sleep(_POLL_S)

    def _port(self, name: str) -> int:
        if name != "ingress" and not self.has_gateway:
            raise ConfigError(f"this broker has no port {name}: it was made with gateway=False")
        try:
            return int(Path(self.settings.pipes, f"{name}.port").read_text())
        except FileNotFoundError:
            raise ConfigError(f"this broker has no port {name}: see {self.log}") from None

    @property
    def port(self) -> int:
        """The port for producers of lines (KMQ_PORT)."""
        return self._port("ingress")

    @property
    def egress_port(self) -> int:
        """The port for consumers of lines (KMQ_EGRESS_PORT)."""
        return self._port("egress")

    @property
    def http(self) -> str:
        """The URL of the HTTP API."""
        return f"http://127.0.0.1:{self._port('http')}"

    @property
    def grpc(self) -> str:
        """The address of the gRPC API."""
        return f"127.0.0.1:{self._port('grpc')}"

    @property
    def kafka_port(self) -> int:
        """The port of the Kafka protocol; needs `kmq[kafka]`."""
        return self._port("kafka")

    def producer(self, **options: "Unpack[Choices]") -> Producer:
        """Return a kmq.Producer for this broker; a test closes it."""
        return Producer(port=self.port, **options)

    def consumer(self, *topics: str, **options: "Unpack[ConsumerChoices]") -> Consumer:
        """Return a kmq.Consumer for this broker; a test closes it. Its `run` sends dead letters to this broker, too."""
        consumer = Consumer(*topics, port=self.egress_port, **options)
        consumer._make_producer = lambda window: self.producer(window=window)
        return consumer

    def lines(self, topic: str) -> list[bytes]:
        """Return the stored lines of a topic, partition by partition, as `cat` shows them; all acknowledged ones are
        there.
        """
        self._wait_for_queues()
        paths = sorted(self.data.glob(f"topics/{topic}/*/*.log"))
        return [line for path in paths for line in path.read_bytes().split(b"\n") if line]

    def _wait_for_queues(self) -> None:
        """Wait until all records of the WAL were routed to their topics. The WAL has every acknowledged message."""
        wanted, deadline = wal(self.settings.data).end_offset() - 1, time.monotonic() + _START_S
        while (page := peek(self.settings.instance)) is not None and page.rows["router"].seq < wanted:
            if time.monotonic() > deadline:
                raise KmqError(f"the router of the broker for tests has not routed seq {wanted}; see {self.log}")
            time.sleep(_POLL_S)

    def reset(self) -> None:
        """Delete all topics and groups. Raises KmqError if a consumer of a group is still open."""
        self._wait_for_queues()  # else a record on its way would create its topic again
        connection = http.client.HTTPConnection("127.0.0.1", self._port("http"), timeout=_START_S)
        with contextlib.closing(connection):
            for kind, key in (("groups", "group"), ("admin/topics", "name")):
                for row in _call(connection, "GET", f"/api/{kind}"):
                    _call(connection, "DELETE", f"/api/{kind}/{row[key]}")

    def __exit__(self, *error: object) -> None:
        """Stop the broker and remove what is left of it."""
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:  # a test has stopped one of its processes
            self._process.kill()
            self._process.wait()
        for each in status.collect(self.settings).processes:
            while is_process(each.pid, each.name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
                time.sleep(_POLL_S)
        _remove_shm(self.settings.instance)
        shutil.rmtree(self.root, ignore_errors=True)


def _call(connection: http.client.HTTPConnection, method: str, path: str) -> Any:
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read()
    if response.status >= 400 and response.status != 404:
        raise KmqError(f"{method} {path}: {json.loads(body)['message']}")
    return json.loads(body) if body else None


def _remove_shm(instance: str) -> None:
    for path in Path(SHM).glob(f"{instance}.*"):
        path.unlink(missing_ok=True)
    layout.remove_left_bells(instance)


def _remove_left() -> None:
    """Remove the stats pages of ended brokers whose test run was killed."""
    for path in Path(SHM).glob("kmqtest-*.stats"):
        instance, run = path.stem, path.stem.split("-")[1]
        with contextlib.suppress(OSError):  # it belongs to another user
            page = peek(instance) if not os.path.exists(f"/proc/{run}") else None
            if page is not None and not any(is_process(row.pid, name) for name, row in page.rows.items()):
                _remove_shm(instance)


broker = TestBroker  # as a caller reads it: with kmq.testing.broker() as broker


# --- pytest -----------------------------------------------------------------------------------------------------------

with contextlib.suppress(ImportError):
    import pytest

    @pytest.fixture(scope="session")
    def kmq_session_broker() -> Iterator[TestBroker]:
        """One broker for all tests."""
        with broker() as made:
            yield made

    @pytest.fixture
    def kmq_broker(kmq_session_broker: TestBroker) -> TestBroker:
        """A broker without topics and groups."""
        kmq_session_broker.reset()
        return kmq_session_broker
