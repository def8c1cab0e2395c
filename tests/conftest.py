"""For every kind of test. What is beside this file can be imported by all of them."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from brokers import Broker

from kmq.errors import ConfigError
from kmq.spark.sessions import find_java

if TYPE_CHECKING:
    from certificates import Authority


def pytest_configure() -> None:
    """Signals that whoever started us ignores would be ignored by all that tests start: a background job has no Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: None)  # a handler is not inherited, SIG_IGN is


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


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> "Authority":
    """A certificate authority (certificates.py)."""
    from certificates import Authority  # cryptography takes its time: only those who ask for it wait

    return Authority(tmp_path_factory.mktemp("authority"))


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
