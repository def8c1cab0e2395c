"""What the scenarios need beside a broker (tests/conftest.py)."""

import itertools

import pytest
from brokers import ROOT

_numbers = itertools.count()


@pytest.fixture(scope="session")
def scripts():
    """Where the scenario scripts are."""
    return ROOT / "scripts"


@pytest.fixture
def broker(new_broker):
    """One broker, not yet up, of the four stages alone: what most of these tests are about."""
    made = new_broker()
    made.gateway = False
    return made


@pytest.fixture
def peer(broker):
    """A client of Kafka that sends what the test says."""
    from kafka_peer import Peer  # the extra may be missing

    with Peer.of(broker.pipes) as made:
        yield made


@pytest.fixture
def topic(peer):
    """A topic of this test alone, as a client of Kafka makes it: with KMQ_KAFKA_PARTITIONS."""
    name = f"t{next(_numbers)}"
    assert peer.make_topic(name) > 0
    return name
