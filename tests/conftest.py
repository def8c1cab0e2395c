"""For every kind of test. What is beside this file can be imported by all of them."""

import os
import signal
from functools import cache
from pathlib import Path

import pytest
from brokers import Broker

from kmq.errors import ConfigError
from kmq.spark.sessions import find_java


def pytest_configure():
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


def pytest_runtest_setup(item):
    """Skip what needs Java where there is none, and say so; in CI that is a failure."""
    if item.get_closest_marker("java") and _java_missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(_java_missing())


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    """A certificate authority (certificates.py)."""
    from certificates import Authority  # cryptography takes its time: only those who ask for it wait

    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def new_broker(tmp_path):
    """A function that makes brokers, each with an instance and directories of its own, or on another's `data`."""
    brokers = []

    def make(data: Path | None = None) -> Broker:
        brokers.append(Broker(tmp_path / f"b{len(brokers)}", data))
        return brokers[-1]

    yield make
    for broker in brokers:
        broker.close()


@pytest.fixture
def broker(new_broker):
    """One broker, not yet up."""
    return new_broker()
