"""`kmq status` and who else asks: one look says one thing."""

import os
import time

import pytest

from kmq.broker import status
from kmq.broker.stats import STATES, StatsPage
from kmq.log.identity import open_data
from kmq.settings import STAGES, load


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KMQ_INSTANCE", f"status-{os.getpid()}")
    settings = load()
    made = StatsPage(settings.instance, open_data(settings.data), settings.data)
    yield made
    os.unlink(made.path)


def begin(row, state):
    row.begin(0)
    row.state, row.heartbeat = STATES.index(state), time.monotonic_ns()


def test_a_gateway_that_gets_ready_during_a_look_is_not_ready_and_starting_at_once(page, monkeypatch):
    for name in STAGES:
        begin(page.rows[name], "ready")
    begin(page.rows["gateway"], "starting")

    def backlog(instance, name):
        page.rows["gateway"].state = STATES.index("ready")
        return 0

    monkeypatch.setattr(status.layout, "backlog", backlog)
    found = status.collect(load())
    assert found.gateway is not None
    assert found.ready == (found.gateway.state == "ready")
    later = status.collect(load())
    assert later.ready and later.gateway is not None and later.gateway.state == "ready"
