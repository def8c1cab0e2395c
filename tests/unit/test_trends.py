"""Trends: what the gateway judges from samples of the stats page, each from its rise to its end."""

import os
import time

import pytest

from kmq.broker.health import ALL_WARNINGS
from kmq.broker.stats import ADMISSIONS, STATES, TRENDS, StatsPage
from kmq.config.settings import STAGES, load
from kmq.config.values import GIB
from kmq.gateway.core import trends
from kmq.gateway.core.trends import LOOK_S, Trends
from kmq.log import passes
from kmq.log.identity import open_data
from kmq.log.passes import Pass

MINUTE = 12  # looks


class Seen:
    """A broker whose processes are all ready, and its gateway, which looks as time goes by."""

    def __init__(self):
        self.settings = load()
        self.page = StatsPage(self.settings.instance, open_data(self.settings.data), self.settings.data)
        self.rows = self.page.rows
        for name in (*STAGES, "gateway"):
            self.begin(name)
        self.now = 1000.0
        self.page.publish_trend("refused", 7)
        self.trends = Trends(self.page, self.settings)
        assert self.page.trends() == {}, "what another gateway has said is forgotten"

    def begin(self, name):
        row = self.rows[name]
        row.begin(0)
        row.state = STATES.index("ready")
        row.heartbeat = time.monotonic_ns() + 10**12  # ahead: however long a test takes, it lives

    def look(self, looks=1, each=lambda: None):
        """Look so many times; `each` is what happens before each look. Returns the trends after the last."""
        for _ in range(looks):
            each()
            self.now += LOOK_S
            self.trends.look(self.now)
        return self.page.trends()

    def add(self, process, **words):
        def more():
            for name, count in words.items():
                setattr(self.rows[process], name, getattr(self.rows[process], name) + count)

        return more


@pytest.fixture
def seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KMQ_INSTANCE", f"trends-{os.getpid()}")
    room = os.statvfs(tmp_path)
    monkeypatch.setattr(trends.os, "statvfs", lambda path: room)  # others use this disk, too
    made = Seen()
    yield made
    os.unlink(made.page.path)


RATES = {  # trend: the counters that rise, and by how much in each look
    "refused": [("ingress", {"refused": 1}), ("framer", {"refused": 1})],
    "errors": [("ingress", {"errs_format": 1, "errs_limit": 1}), ("ingress", {"errs_order": 2})],
    "unauthorized": [("ingress", {"unauthorized": 1}), ("gateway", {"unauthorized": 1})],
    "turned_away": [("ingress", {"turned_away": 1}), ("gateway", {"turned_away": 1})],
    "dropped": [("durability", {"dropped": 1}), ("router", {"dropped": 1})],
}


def test_every_trend_is_a_warning():
    assert {*TRENDS} <= {*ALL_WARNINGS}


@pytest.mark.parametrize("code", RATES)
def test_what_rises_is_said_within_a_minute_and_not_for_long_after_it_rises_no_more(seen, code):
    assert seen.look(3) == {}

    def more():
        for process, words in RATES[code]:
            seen.add(process, **words)()

    assert [*seen.look(MINUTE, more)] == [code]
    begin = seen.now
    while seen.look():
        assert seen.now - begin < (trends.DROPPED_S if code == "dropped" else trends.MINUTE_S) + 2 * trends.HOLD_S
    assert seen.look(3 * MINUTE) == {}


@pytest.mark.parametrize("code", ["refused", "errors"])
def test_what_is_little_beside_the_messages_is_no_trend(seen, code):
    seen.look()
    process, words = RATES[code][0]

    def more():
        seen.add(process, **words)()
        seen.add("framer", messages=100 * sum(words.values()))()

    assert seen.look(3 * MINUTE, more) == {}


@pytest.mark.parametrize("code", ["refused", "errors", "unauthorized", "turned_away"])
def test_a_few_in_a_minute_are_no_trend_nor_what_was_counted_before_this_gateway(seen, code):
    process, words = RATES[code][0]
    name = next(iter(words))
    setattr(seen.rows[process], name, 949)
    seen.look()
    for _ in range(5):
        assert seen.look(2, seen.add(process, **{name: 0})) == {}
        assert seen.look(1, seen.add(process, **{name: 1})) == {}


def test_a_process_that_is_started_again_counts_from_0(seen):
    seen.rows["framer"].refused = 1000
    seen.look()
    seen.begin("framer")
    assert seen.look(1, seen.add("framer", refused=3)) == {}
    assert seen.look(1, seen.add("framer", refused=4))["refused"] == (7, 0)


def test_errors_of_a_broker_that_is_not_ready_are_no_finding_of_their_own(seen):
    seen.look()
    seen.rows["framer"].state = STATES.index("starting")
    seen.look(MINUTE, seen.add("ingress", errs_limit=50))
    seen.rows["framer"].state = STATES.index("ready")
    assert seen.look(MINUTE) == {}
    seen.rows["ingress"].admission = ADMISSIONS.index("not_enough_replicas")
    assert seen.look(MINUTE, seen.add("ingress", errs_limit=50)) == {}, "it is ready, and a warning says why it refuses"


def test_a_broker_that_is_ready_by_turns_flaps_and_a_start_does_not(seen):
    turns = iter(("starting", "ready") * 4)

    def turn():
        seen.rows["router"].state = STATES.index(next(turns))

    seen.look()
    assert seen.look(6, turn) == {}
    assert seen.look(2, turn)["flapping"] == (8, 0)
    assert seen.look(15 * MINUTE + 1 + MINUTE) == {}


@pytest.mark.parametrize(
    ("code", "process", "slow_s"), [("slow_acks", "ingress", 1.1), ("slow_sync", "durability", 0.6)]
)
def test_times_that_are_slow_again_and_again_are_a_trend_and_one_bad_moment_is_none(seen, code, process, slow_s):
    times = seen.rows[process].times

    def observe():
        times.observe(slow_s)
        times.observe(slow_s / 3, 50)

    seen.look()
    assert seen.look(3, observe) == {}, "a restart of a stage"
    assert seen.look(1, observe) == {code: (4, 204)}
    assert seen.look(3 * MINUTE, lambda: times.observe(slow_s / 3, 50)) == {}

    def rarely():
        times.observe(slow_s)
        times.observe(slow_s / 3, 101)

    assert seen.look(2 * MINUTE, rarely) == {}


def test_a_quota_that_fills_is_foretold_and_not_when_it_fills_no_more_or_swings(seen):
    row = seen.rows["ingress"]
    row.quota_limit, row.quota_used = 100 * GIB, 60 * GIB
    assert seen.look(10 * MINUTE) == {}
    fills = seen.add("ingress", quota_used=GIB // MINUTE)  # 1 GiB a minute: full in 25 to 40
    looks = 0
    while "quota_fills" not in seen.look(1, fills):
        looks += 1
        assert looks < 6 * MINUTE
    left_s = seen.page.trends()["quota_fills"][0]
    assert 0.5 * 40 * 60 < left_s < 24 * 15 * 60
    assert seen.look(20 * MINUTE) == {}, "it fills no more"
    row.quota_used = 60 * GIB
    seen.look(60 * MINUTE)
    for _ in range(12):  # what is written, and what retention deletes
        assert seen.look(5 * MINUTE, seen.add("ingress", quota_used=GIB // 500)) == {}
        row.quota_used = 60 * GIB


def test_a_disk_that_fills_is_foretold_unless_half_of_it_is_free(seen, monkeypatch):
    class Disk:
        f_frsize, f_blocks, f_bavail = 1, 100 * GIB, 90 * GIB

    def fills():
        Disk.f_bavail -= GIB // MINUTE

    monkeypatch.setattr(trends.os, "statvfs", lambda path: Disk)
    assert seen.look(40 * MINUTE, fills) == {}
    assert 40 * 60 < seen.rows["gateway"].full_in < 60 * 60, "for those who know that it will go on"
    looks = seen.look(2 * MINUTE, fills)
    assert [*looks] == ["disk_fills"] and 30 * 60 < looks["disk_fills"][0] < 60 * 60
    Disk.f_bavail = 60 * GIB
    assert seen.look(MINUTE * 3) == {}


def test_the_compactor_is_behind_when_much_has_waited_for_a_day(seen, monkeypatch, tmp_path):
    waiting = tmp_path / "segment"
    waiting.write_bytes(b"")
    segment = type("Segment", (), {"first": 0, "path": lambda self, data: str(waiting)})()
    table = passes.CompactedTopic("t", 1, 1, 0.0)
    monkeypatch.setattr(passes.CompactedTopics, "found", lambda self: [table])
    monkeypatch.setattr(passes, "pending", lambda *_: ([segment], 2 * GIB))
    rows = {}
    monkeypatch.setattr(passes, "read", lambda data: rows)
    assert seen.look(2 * MINUTE) == {}, "a bulk load"
    os.utime(waiting, (time.time() - 90_000,) * 2)
    assert seen.look(MINUTE) == {"compactor_behind": (1, 2 * GIB)}
    rows["t", 0] = Pass(1, 0, 0, None, int(time.time()))
    assert seen.look(3 * MINUTE) == {}, "a pass was made"


def test_an_agent_that_is_behind_or_away_for_a_minute_is_a_trend(seen):
    row = seen.rows["agent"]
    assert seen.look(2 * MINUTE) == {}, "there is none"
    seen.begin("agent")
    row.newest, row.epoch = 8, 7
    assert seen.look(MINUTE) == {}
    assert seen.look(1)["agent_behind"][0] == 60
    row.epoch = 8
    assert seen.look(1) == {}
    row.state = STATES.index("starting")
    assert seen.look(MINUTE) == {}
    assert [*seen.look(1)] == ["agent_disconnected"]
    row.state = STATES.index("ready")
    assert seen.look(1) == {}
