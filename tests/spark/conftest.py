"""Brokers for the tests of Spark.

Data directories without a broker: made_data.py. A broker that is up: the fixtures `broker` and `new_broker`.
"""

from pathlib import Path

import fixed_port
import pytest
from fronts import Fleet


def pytest_collection_modifyitems(items):
    """All of this folder needs Java."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("java")


@pytest.fixture
def broker(new_broker):
    """One broker, not yet up, of the four stages alone. What is asked over HTTP sets `gateway`."""
    made = new_broker()
    made.gateway = False
    return made


@pytest.fixture
def up(broker):
    """That broker, up, at an address that stays."""
    fixed_port.up(broker)
    return broker


@pytest.fixture
def fleet(new_broker):
    made = []

    def make(count):
        made.append(Fleet(new_broker, count))
        return made[-1]

    yield make
    for each in made:
        for front in each.fronts:
            front.close()
