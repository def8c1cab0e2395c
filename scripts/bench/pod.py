"""A broker to measure: four stages in a directory of their own, as `kmq up` starts them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.sending import COMMAND, WAIT_S, Sending
from kmq.broker import status
from kmq.broker.stats import StatsPage, peek
from kmq.client.lines import read_port
from kmq.config.settings import Settings, load
from kmq.log import wal

PRIVATE = (
    "KMQ_INSTANCE",
    "KMQ_PORT",
    "KMQ_ACK_PORT",
    "KMQ_HTTP_PORT",
    "KMQ_GRPC_PORT",
    "KMQ_KAFKA_PORT",
    "KMQ_EGRESS_PORT",
    "KMQ_STATUS_PORT",
    "KMQ_DATA",
    "KMQ_PIPES",
)  # set here, whatever is in the environment


class Pod:
    """Four stages and their supervisor in `home`, as `kmq up` starts them; the gateway too, if it is to be measured."""

    def __init__(self, home: Path, gateway: bool = False) -> None:
        self.home, self._gateway = home, gateway
        self.environment = dict(os.environ) | {
            "KMQ_INSTANCE": f"bench{os.getpid()}",
            "KMQ_PORT": "0",
            "KMQ_ACK_PORT": "0",
            "KMQ_HTTP_PORT": "0",
            "KMQ_GRPC_PORT": "0",
            "KMQ_KAFKA_PORT": "0",
            "KMQ_EGRESS_PORT": "0",
            "KMQ_STATUS_PORT": "0",
            "KMQ_DATA": str(home / "data"),
            "KMQ_PIPES": str(home / "pipes"),
        }
        self.settings: Settings = load(self.environment)
        self.supervisor = 0
        self.began = 0.0  # when `kmq up` was called

    def up(self) -> float:
        """Start the broker. Return the seconds that `kmq up` took, until all stages were ready."""
        begin, self.began = time.monotonic(), time.time()
        self._kmq("up", "--gateway" if self._gateway else "--no-gateway")
        seconds = time.monotonic() - begin
        holder = (self.home / "pipes" / "supervisor.owner").read_text()
        self.supervisor = int(holder.split()[0].removeprefix("pid="))
        return seconds

    def down(self) -> None:
        if self.supervisor:
            self.supervisor = 0
            self._kmq("down")

    def kill(self) -> None:
        """SIGKILL everything at once; the supervisor first, so that it restarts nothing."""
        processes = [psutil.Process(pid) for pid in (self.supervisor, *self.pids().values())]
        for process in processes:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=WAIT_S)
        self.supervisor = 0

    def _kmq(self, *command: str) -> None:
        argv = [sys.executable, "-m", "kmq", *command]
        done = subprocess.run(argv, env=self.environment, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(done.returncode)

    def page(self) -> StatsPage:
        page = peek(self.settings.instance)
        assert page is not None
        return page

    def pids(self) -> dict[str, int]:
        return {stage.name: stage.pid for stage in status.collect(self.settings).stages}

    def declare(self, topic: str, partitions: int) -> None:
        """Declare a topic and wait until it is in force."""
        self._kmq("topics", "create", topic, "--partitions", str(partitions))

    def send(self, kind: str, *arguments: object) -> "Sending":
        return Sending(kind, f"127.0.0.1:{self.port}", *arguments)

    @property
    def port(self) -> int:
        return read_port(self.settings, "ingress", 0)

    def produce(self, kind: str, *arguments: float) -> dict[str, float]:
        """Run kmq.Producer in another process and return its measurements."""
        argv = [*COMMAND, "_produce", kind, str(self.port), *map(str, arguments)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=WAIT_S)
        if done.returncode:
            raise SystemExit("bench: the producer failed")
        figures: dict[str, float] = json.loads(done.stdout)
        return figures

    def log(self, topic: str = "test") -> Path:
        return self.home / "data" / f"{topic}.log"

    def wait_routed(self, seq: int) -> float:
        """Wait until all records up to `seq` are in their queues. Return the time of that."""
        router = self.page().rows["router"]
        wait_until(lambda: router.seq >= seq, 0.002)
        return time.monotonic()

    def settle(self) -> None:
        """Wait until all acknowledged records are routed."""
        self.wait_routed(self.last_seq())

    def last_seq(self) -> int:
        return wal.last_stored(self.settings.data)[0]

    def load(self, kind: str, *arguments: object) -> None:
        """Send and wait until everything is routed; nothing is measured."""
        before = self.last_seq()
        _, count = self.send(kind, *arguments).go().result()
        self.wait_routed(before + count)


@contextmanager
def pod(directory: Path, up: bool = True) -> Iterator[Pod]:
    """Yield a pod in a new directory, and remove everything of it after the block."""
    home = Path(tempfile.mkdtemp(prefix="pod-", dir=directory))
    with pod_in(home, up) as running:
        yield running
    shutil.rmtree(home)


@contextmanager
def pod_in(home: Path, up: bool = True) -> Iterator[Pod]:
    """Yield a pod in `home`, whose files stay."""
    running = Pod(home)
    try:
        if up:
            running.up()
        yield running
    finally:
        running.down()
        instance = running.settings.instance
        for left in Path("/dev/shm").glob(f"*{instance}.*"):
            left.unlink()


def wait_until(condition: Callable[[], bool], poll_s: float) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("bench: the broker did not get there in time")
        time.sleep(poll_s)
