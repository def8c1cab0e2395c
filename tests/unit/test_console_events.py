"""Events and history of the console: bounded, in order, and strangers push nothing out."""

import sys
import threading

from kmq.gateway.console.overview import STEP_S, Events, History


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
        events.refused("unauthorized", 1000, "1.2.3.4", "x" * 1000)
    kinds = [event.kind for event in events.after()]
    assert kinds[:2] == ["restarted", "changed"] and kinds.count("refused") == 100
    assert all(len(event.text) <= 300 for event in events.after())


def test_what_strangers_cause_is_one_event_a_minute_with_a_count():
    clock = Clock()
    events = Events(clock)
    for _ in range(50):
        clock.now += 1
        events.refused("unauthorized", 2, "1.2.3.4:5", "no token")
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
