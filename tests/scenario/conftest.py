"""What the scenarios need beside a broker (tests/conftest.py)."""

import pytest
from brokers import ROOT


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
