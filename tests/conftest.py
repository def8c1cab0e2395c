"""For every kind of test. What is beside this file can be imported by all of them."""

import pytest


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    """A certificate authority (certificates.py)."""
    from certificates import Authority  # cryptography takes its time: only those who ask for it wait

    return Authority(tmp_path_factory.mktemp("authority"))
