"""`kmq status` and who else asks: one look says one thing."""

import io
import os
import time

import pytest
from rich.console import Console

import kmq
from kmq.broker import status
from kmq.broker.stats import ROLES, STATES, TIER_PROBLEMS, StatsPage
from kmq.cli import status as shown_status
from kmq.config import terminal
from kmq.config.settings import STAGES, load
from kmq.links import layout
from kmq.links.fifo import open_fifo
from kmq.log.identity import open_data


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
    row.state = STATES.index(state)
    row.heartbeat = time.monotonic_ns() + 10**12  # ahead: however long a test takes, it lives


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


def test_the_table_fits_a_terminal_of_80_columns_while_the_disk_is_full(page, monkeypatch):
    for name in STAGES:
        begin(page.rows[name], "disk_full")
        page.rows[name].messages = page.rows[name].seq = 24_286
    begin(page.rows["gateway"], "ready")
    monkeypatch.setattr(status.layout, "backlog", lambda instance, name: 2_330)
    out = io.StringIO()
    monkeypatch.setattr(terminal, "console", lambda: Console(file=out, width=80))
    found = status.collect(load())
    shown_status.show_table(found)
    assert "durable 2,330 msg" in out.getvalue() and len(out.getvalue().splitlines()) == 6


def test_the_document_says_when_who_what_waits_and_what_is_wrong(page):
    for name in STAGES:
        begin(page.rows[name], "ready")
    page.rows["router"].heartbeat = 1
    page.histogram("sync").observe(0.001, n=99)
    page.histogram("sync").observe(1.5)
    settings = load()
    ring = layout.make_file(layout.shm_path(settings.instance, "framed"), 8192)
    try:
        os.pwrite(ring, b"kmq-ring layout=3 data_id=0 slots=100 bytes=1000 extra=0 policy=block", 0)
        for cell, value in ((layout.RECORD[0], 900), (layout.RECORD[0] + 1, 95), (layout.TAIL, 400)):
            os.pwrite(ring, value.to_bytes(8, "little"), layout.CELLS + cell * 8)
        open_fifo(settings.pipes, "raw")
        before = time.time()
        found = status.as_json(status.collect(settings))
    finally:
        os.close(ring)
        os.unlink(layout.shm_path(settings.instance, "framed"))
    assert before <= found["as_of"] <= time.time()
    assert (found["instance"], found["version"]) == (settings.instance, kmq.__version__)
    raw, received, framed, durable = found["links"]
    assert [link["name"] for link in (raw, received, durable)] == ["raw", "received", "durable"]
    assert raw["bytes"] == raw["fill"] == 0 and raw["capacity"] > 0 and raw["messages"] is None
    assert framed == {"name": "framed", "bytes": 500, "capacity": 1000, "messages": 95, "fill": 0.95}
    assert durable == {"name": "durable", "bytes": 0, "capacity": 0, "messages": 0, "fill": 0.0}
    assert found["latency"]["ack"] is None and found["latency"]["routed"] is None
    sync = found["latency"]["sync"]
    assert sync["count"] == 100 and 0.0005 < sync["p50"] <= 0.001024 and sync["p99"] < 2.2
    (finding,) = found["findings"]
    assert {name: finding[name] for name in ("code", "severity", "about", "section")} == {
        "code": "dead",
        "severity": "error",
        "about": "router",
        "section": "docs/operations.md#dead",
    }
    assert finding in found["reasons"] and found["warnings"] == []


def test_what_comes_while_the_process_of_the_copy_is_silent_or_has_ended_is_behind(page):
    for name in (*STAGES, "tier"):
        begin(page.rows[name], "ready")
    row, page.rows["durability"].seq = page.rows["tier"], 5000
    row.seq, row.heartbeat = 3000, time.monotonic_ns() - 90 * 10**9
    copy = status.as_json(status.collect(load()))["copy"]
    assert copy["behind"] == 2000 and 80 < copy["age_s"] < 300
    row.heartbeat = time.monotonic_ns()
    assert status.as_json(status.collect(load()))["copy"]["behind"] == 0  # it will say so itself
    row.end(0)
    assert status.as_json(status.collect(load()))["copy"]["behind"] == 2000
    page.rows["replica"].begin(0)
    page.rows["replica"].role = ROLES.index("following")
    assert status.as_json(status.collect(load()))["copy"]["behind"] == 0  # the leader makes the copy


def test_how_far_the_copy_is_behind_is_said_in_the_table_and_in_the_document(page, monkeypatch):
    for name in (*STAGES, "tier"):
        begin(page.rows[name], "ready")
    row, page.rows["durability"].seq = page.rows["tier"], 5000
    row.seq, row.oldest = 3000, int(time.time()) - 30
    found = status.collect(load())
    copy = status.as_json(found)["copy"]
    assert (copy["seq"], copy["behind"], copy["problem"]) == (3000, 2000, "") and 29 < copy["age_s"] < 300
    out = io.StringIO()
    monkeypatch.setattr(terminal, "console", lambda: Console(file=out, width=160))
    shown_status.show_table(found)
    assert "copied to seq 3,000, 2,000 msg behind" in out.getvalue()
    assert "copy=tier seq=3000 behind=2000" in status.logfmt(found)
    assert "of topics" not in out.getvalue()
    row.oldest, row.standing = 0, TIER_PROBLEMS.index("fenced")
    row.rows, row.row_bytes, row.behind_bytes = 4, 7 << 20, 5 << 20
    assert status.as_json(status.collect(load()))["copy"] == {
        "seq": 3000,
        "behind": 0,
        "age_s": 0.0,
        "problem": "fenced",
        "objects": 4,
        "bytes": 7 << 20,
        "behind_bytes": 5 << 20,
    }
    out.truncate(0)
    shown_status.show_table(status.collect(load()))
    assert "7 MiB of topics, 5 MiB behind" in out.getvalue()


def test_a_broker_that_is_down_has_the_same_document(page):
    os.unlink(page.path)
    found = status.as_json(status.collect(load()))
    open(page.path, "w").close()
    assert (found["links"], [finding["code"] for finding in found["findings"]]) == ([], ["down"])
    assert found["latency"] == {"ack": None, "sync": None, "routed": None} and found["copy"] is None
