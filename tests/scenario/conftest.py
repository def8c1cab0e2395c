"""What the scenarios need beside a broker (tests/conftest.py)."""

import pytest
from brokers import ROOT


@pytest.fixture(scope="session")
def scripts():
    """Where the scenario scripts are."""
    return ROOT / "scripts"
