"""Spark as the tests have it: one local session for all of them.

Data directories without a broker: made_data.py. A broker that is up: the fixtures `broker` and `new_broker`.
"""

import warnings

import pytest


@pytest.fixture(scope="session")
def spark():
    """The session, as `kmq pipeline` makes it."""
    from kmq.spark.sessions import session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = session("local[2]", "tests")
    yield made
    made.stop()
