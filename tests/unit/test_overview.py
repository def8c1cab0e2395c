"""The broker at a glance: rates and latencies of the last seconds; events and history, bounded and in order."""

import os
import sys
import threading
import time

import pytest

from kmq.broker import status
from kmq.broker.overview import Events
from kmq.broker.stats import ADMISSIONS, STATES, StatsPage
from kmq.broker.status import StagePace
from kmq.cli.elsewhere import of_directory
from kmq.cli.top import readers
from kmq.cli.top.readers import LocalReader
from kmq.config.intakes import parse_intakes
from kmq.config.settings import STAGES, load
from kmq.gateway.console.overview import STEP_S, History
from kmq.log.identity import open_data


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_strangers_do_not_push_out_what_operators_must_see():
    clock = Clock()
    events = Events(clock)
    events.add("restarted", "router", "router was started again")
    events.add("changed", "orders", "deleted")
    for _ in range(10_000):
        clock.now += 61
        events.count("refused", "unauthorized", 1000, "1.2.3.4", "x" * 1000)
    kinds = [event.kind for event in events.after()]
    assert kinds[:2] == ["restarted", "changed"] and kinds.count("refused") == 100
    assert all(len(event.text) <= 300 for event in events.after())


def test_what_strangers_cause_is_one_event_a_minute_with_a_count():
    clock = Clock()
    events = Events(clock)
    for _ in range(50):
        clock.now += 1
        events.count("refused", "unauthorized", 2, "1.2.3.4:5", "no token")
    assert [event.text for event in events.after()] == ["2 times: last 1.2.3.4:5: no token"]
    clock.now += 60
    events.sweep()
    assert [event.text for event in events.after()][1:] == ["98 times: last 1.2.3.4:5: no token"]


def test_ids_rise_over_classes_and_gateways():
    clock = Clock()
    events = Events(clock)
    for kind in ("ready", "rolled", "changed", "ready"):
        events.add(kind, "x", "y")
    ids = [event.id for event in events.after()]
    assert ids == sorted(ids) and [event.id for event in events.newest(2)] == ids[-2:]
    assert [event.id for event in events.after(ids[1])] == ids[2:]
    clock.now += 1
    later = Events(clock)
    later.add("ready", "x", "y")
    assert later.after()[0].id > ids[-1]


def test_a_step_that_nobody_measured_is_null():
    history = History(now=0.0)
    history.put({"rate.router": 1.0}, {"g": 5.0}, now=0.0)
    history.put({"rate.router": 4.0}, {"g": 6.0}, now=3 * STEP_S)
    assert history.document()["series"]["rate.router"] == [1.0, None, None, 4.0]
    assert history.document()["series"]["ack.p99"] == [None] * 4
    assert history.of_group("g")["lag"] == [5.0, None, None, 6.0]


def test_an_hour_is_kept_and_no_more():
    history = History(now=0.0)
    for step in range(2000):
        history.put({"rate.router": float(step)}, {f"g{step}": 1.0}, now=step * STEP_S)
    rates = history.document()["series"]["rate.router"]
    assert len(rates) == 720 and rates[0] == 1280.0 and rates[-1] == 1999.0
    assert history.of_group("g0")["lag"][0] is None and history.of_group("g500")["lag"] == []


def test_after_a_long_gap_nothing_old_is_shown():
    history = History(now=0.0)
    history.put({"rate.router": 7.0}, {}, now=0.0)
    history.put({"rate.router": 8.0}, {}, now=5000 * STEP_S)
    assert history.document()["series"]["rate.router"] == [None] * 719 + [8.0]


def test_events_of_several_threads_have_ids_of_their_own_and_can_be_read_meanwhile():
    events, failures = Events(), []

    def work(step):
        try:
            for _ in range(2000):
                step()
        except Exception as err:
            failures.append(err)

    steps = [lambda: events.add("changed", "a", "b")] * 2 + [lambda: events.add("rolled", "a", "b")]
    steps += [events.after, lambda: events.newest(50)]
    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    ids = [event.id for event in events.after()]
    assert not failures and ids == sorted(set(ids)), failures


# --- rates, latencies and what has changed ---------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The stats page of a broker that is ready, with nothing moved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KMQ_INSTANCE", f"overview-{os.getpid()}")
    settings = load()
    made = StatsPage(settings.instance, open_data(settings.data), settings.data)
    for name in STAGES:
        made.rows[name].begin(0)
        made.rows[name].state = STATES.index("ready")
    yield made
    os.unlink(made.path)


def sampled(pace, page, at, monkeypatch, messages=None):
    monkeypatch.setattr(status.time, "monotonic", lambda: at)
    if messages is not None:
        page.rows["router"].messages = messages
    pace.add(page)
    return pace.rates(2.0).get("router", {}).get("messages")


def test_a_rate_is_that_of_the_last_seconds_and_begins_again_with_its_process(page, monkeypatch):
    pace = StagePace()
    assert sampled(pace, page, 0.0, monkeypatch, 0) is None
    shown = [sampled(pace, page, step / 4, monkeypatch, step * 100) for step in range(1, 40)]
    assert shown[-1] == pytest.approx(400)
    later = [sampled(pace, page, 10 + step / 4, monkeypatch, 3900) for step in range(12)]
    assert later[-1] == 0
    page.rows["router"].started += 1
    assert sampled(pace, page, 14.75, monkeypatch, 5000) == 2500, "all that the new process has moved"
    assert sampled(pace, page, 16.75, monkeypatch, 5020) == 10
    pace.add(None)
    assert pace.rates(2.0) == {} and sampled(pace, page, 17.0, monkeypatch) is None, "the broker was down"


def test_an_intake_has_its_rates_and_begins_again_with_ingress(page, monkeypatch):
    pace, specs = StagePace(), parse_intakes("0=app 0/udp=net")

    def look(at, lines, nbytes):
        monkeypatch.setattr(status.time, "monotonic", lambda: at)
        page.publish_intakes([(5140, lines, nbytes, 1, 0, 2), (5141, 0, 0, 0, 3, 0)])
        pace.add(page, specs)
        app, net = pace.intakes(2.0)
        assert (net["port"], net["kind"], net["dropped"], net["lines"]) == (5141, "udp", 3, 0)
        return app["rate"], app["bytes_rate"]

    assert pace.intakes(2.0) == []
    assert look(0.0, 100, 1000) == (None, None)
    assert look(2.0, 300, 5000) == (100.0, 2000.0)
    assert look(4.0, 50, 400) == (25.0, 200.0), "all that the new ingress has taken"
    pace.add(None)
    assert pace.intakes(2.0) == []


def test_times_are_those_of_the_last_ten_seconds(page, monkeypatch):
    pace, ack = StagePace(), page.histogram("ack")
    ack.observe(9.0)
    sampled(pace, page, 0.0, monkeypatch)
    assert pace.latency() == {"ack": None, "sync": None, "routed": None}
    ack.observe(0.001, n=100)
    shown = [sampled(pace, page, float(second), monkeypatch) or pace.latency()["ack"] for second in range(1, 12)]
    assert shown[0]["count"] == 100 and 0.0005 < shown[0]["p50"] <= shown[0]["p99"] <= 0.00103
    assert shown[8] and shown[10] is None


def test_what_differs_between_two_looks_is_an_event_with_and_without_a_gateway(page, monkeypatch):
    reader, now = LocalReader(load()), [time.monotonic()]
    monkeypatch.setattr(readers.time, "monotonic", lambda: now[0])
    row = page.rows["router"]

    def looked():
        for name in STAGES:
            page.rows[name].heartbeat = time.monotonic_ns() + 10**12  # ahead: however long a test takes, it lives
        now[0] += 2.0
        return [event["kind"] for event in reader.look()["events"]]

    assert looked() == [] and looked() == []
    row.starts, row.pid = row.starts + 1, row.pid
    page.rows["ingress"].admission = ADMISSIONS.index("quota")
    assert looked() == ["restarted", "not_ready"]
    page.rows["ingress"].admission = 0
    row.dropped += 5
    looked()
    shown = looked()
    assert sorted(shown[2:]) == ["dropped", "ready"]
    events = reader.look()["events"]
    assert "5 messages" in [event["text"] for event in events] and len({event["id"] for event in events}) == 4
    for number in range(500):
        page.rows["ingress"].admission = ADMISSIONS.index("quota") * (number % 2)
        looked()
    assert len(looked()) <= 100


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:8099"), ("127.0.0.1", "http://127.0.0.1:8099")])
def test_the_gateway_of_this_directory_has_a_url_whatever_its_address(host, url, monkeypatch):
    monkeypatch.setenv("KMQ_HOST", host)
    monkeypatch.setenv("KMQ_HTTP_PORT", "8099")
    gateway = of_directory(load())
    assert (gateway.url, gateway.host, gateway.token) == (url, host, "")
