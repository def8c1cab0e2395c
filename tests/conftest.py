"""For every kind of test. What is beside this file can be imported by all of them."""

import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from brokers import Broker
from lanes import pytest_runtestloop  # noqa: F401 - a hook
from sampling import pytest_collection_modifyitems, pytest_report_header  # noqa: F401 - hooks

from kmq.errors import ConfigError
from kmq.log import index, segment_reader
from kmq.spark.sessions import find_java

if TYPE_CHECKING:
    from certificates import Authority
    from consuls import Consul
    from pyspark.sql import SparkSession

_LEFT_OPEN = 64  # a library's threads and a session of Spark have a few dozen


def pytest_configure() -> None:
    """Signals that whoever started us ignores would be ignored by all that tests start: a background job has no Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: None)  # a handler is not inherited, SIG_IGN is


def pytest_collection() -> None:
    """Modules, syntax trees and tests that a collection makes live to the end of the run."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave them out of each garbage collection, or each would walk 9,000 tests. A fork then copies fewer pages, too."""
    gc.collect()
    gc.freeze()
    gc.enable()


@cache
def _java_missing() -> str:
    """What Spark wants, where there is no Java for it."""
    try:
        find_java()
    except ConfigError as error:
        return str(error)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs Java where there is none, and say so; in CI that is a failure."""
    if item.get_closest_marker("java") and _java_missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(_java_missing())


def _open_files() -> dict[str, str]:
    files = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            files[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # that of the listing itself
            pass
    return files


@pytest.fixture(scope="module", autouse=True)
def _files_are_closed() -> Iterator[None]:
    """A test file leaves few files open. Thousands of tests run in one process, and select() takes 1,024."""
    before = _open_files()
    yield
    if len(_open_files()) > len(before) + _LEFT_OPEN:
        gc.collect()
        now = _open_files()
        new = sorted(name for number, name in now.items() if number not in before)
        assert len(now) <= len(before) + _LEFT_OPEN, f"{len(new)} files are left open, among them {new[:20]}"


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> "Authority":
    """A certificate authority (certificates.py)."""
    from certificates import Authority  # cryptography takes its time: only those who ask for it wait

    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def consul(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Consul]":
    """A Consul for development (consuls.py). Its cluster names are for the tests to choose, each its own."""
    from consuls import Consul

    agent = Consul(tmp_path_factory.mktemp("consul") / "log")
    yield agent
    agent.close()


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """A session of Spark, as `kmq pipeline` makes it: one for all tests, which are marked `java`."""
    from kmq.spark.sessions import session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Small data for half a minute: a JVM that optimises its code takes more time than it gives back.
        made = session("local[2]", "tests", {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"})
    yield made
    made.stop()


@pytest.fixture
def new_broker(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """A function that makes brokers, each with an instance and directories of its own, or on another's `data`."""
    brokers: list[Broker] = []

    def make(data: Path | None = None) -> Broker:
        brokers.append(Broker(tmp_path / f"b{len(brokers)}", data))
        return brokers[-1]

    yield make
    for broker in brokers:
        broker.close()


@pytest.fixture
def broker(new_broker: Callable[..., Broker]) -> Broker:
    """One broker, not yet up."""
    return new_broker()


@pytest.fixture(scope="module")
def small_blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small blocks of an index, so that a small log has many: 1 KiB, or what the test file names `BLOCK_BYTES`."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (index, segment_reader):
            patch.setattr(module, "BLOCK_BYTES", getattr(request.module, "BLOCK_BYTES", 1024))
        yield
