"""What a ready broker is warned of: each concern from the words of the stats page, and none of an ordinary broker."""

import os
import re
import socket
import time
from pathlib import Path

import pytest
from command_tree import every_command
from test_docs import anchors

from kmq.broker import concerns, damage, health, stage, stats
from kmq.broker.clock import STEADY_S
from kmq.broker.stats import ADMISSIONS, PROBLEMS, ROLES, STATES, StatsPage
from kmq.config.settings import STAGES, load, table
from kmq.config.values import GIB, MIB
from kmq.log.damage import DamageError
from kmq.log.identity import open_data

ROOT = Path(__file__).parents[2]
S = 1_000_000_000
LIFE_S = 60


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page of a broker whose processes are all ready."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KMQ_INSTANCE", f"concerns-{os.getpid()}")
    for module in (concerns, stats):  # a machine may have been up for some minutes only
        monkeypatch.setattr(module, "RESTARTED_S", LIFE_S)
    settings = load()
    made = StatsPage(settings.instance, open_data(settings.data), settings.data)
    for name in (*STAGES, "gateway"):
        begin(made.rows[name])
    yield made
    os.unlink(made.path)


def begin(row):
    row.begin(0)
    row.state = STATES.index("ready")
    row.heartbeat = time.monotonic_ns() + 10**12  # ahead: however long a test takes, it lives


def found(page):
    return {finding.code: finding for finding in health.judge(page, load()).findings}


def ago(seconds):
    return time.monotonic_ns() - int(seconds * S)


def date(seconds):
    """A time of day so many seconds before it is put into a page: that may be long after this file was read."""
    return lambda: int(time.time()) - seconds


def set_words(row, **words):
    for name, value in words.items():
        setattr(row, name, value() if callable(value) else value)


LOOPING = {"restart_streak": 3}
FULL = {"disk_size": 100 * GIB, "inodes_total": 1 << 20, "disk_free": 50 * GIB, "inodes_free": 1 << 19}
CASES = {  # code: (process, words that raise it, words that just do not)
    "damage_found": ("gateway", {"damage": 1, "damage_at": 100}, {"damage": 0}),
    "oom_killed": ("durability", {"oom_kills": 1, "oom_at": date(3000)}, {"oom_kills": 1, "oom_at": date(4000)}),
    "tokens_missing": ("ingress", {"tokens_missing": 1}, {"tokens_missing": 0}),
    "restarting": ("router", LOOPING, {"restart_streak": 2}),
    "unclean_end": ("framer", {"unclean": 1}, {"unclean": 0}),
    "disk_low": ("ingress", FULL | {"disk_free": 2 * GIB - 1}, FULL | {"disk_free": 2 * GIB}),
    "inodes_low": ("ingress", FULL | {"inodes_free": 19_999}, FULL | {"inodes_free": 20_000}),
    "quota_low": (
        "ingress",
        {"quota_limit": 100 * MIB, "quota_used": 95 * MIB},
        {"quota_limit": 100 * MIB, "quota_used": 95 * MIB - 1},
    ),
    "clock_behind": ("framer", {"clock_behind": 60}, {"clock_behind": 59}),
    "door_closed": ("gateway", {"doors_closed": 1 << 4}, {"doors_closed": 0}),
    "group_crashing": ("gateway", {"groups": 3, "groups_crashing": 1}, {"groups_crashing": 0}),
    "letter_refused": ("gateway", {"letters_refused": 1}, {"letters_refused": 0}),
    "nacked_waiting": ("gateway", {"nacked_waiting": 1}, {"nacked_waiting": 0}),
    "group_stalled": (
        "gateway",
        {"groups": 3, "groups_stalled": 1, "group_stalled_lag": 7},
        {"groups": 3, "groups_stalled": 0},
    ),
    "kafka_misdirected": ("gateway", {"kafka_misdirected": 1}, {"kafka_misdirected": 0}),
}
CASES["not_enough_replicas"] = ("ingress", {"admission": ADMISSIONS.index("not_enough_replicas")}, {"admission": 0})
LIVING = {"pid": 1, "heartbeat": lambda: time.monotonic_ns() + 10**12}
CASES["tier_refused"] = ("tier", LIVING | {"standing": stats.TIER_PROBLEMS.index("refused")}, {"standing": 0})
CASES["tier_behind"] = (
    "tier",
    LIVING | {"oldest": date(400)},
    {"oldest": date(300)},
)
CASES["agent_ended"] = ("agent", {"pid": 1, "state": STATES.index("stopped"), "exit_code": 78}, {"exit_code": 0})
TIMED = {  # the same with words that hold a moment: (process, seconds ago that raise it, and that do not, other words)
    "slow_sync": ("durability", {"slow_sync_at": 30}, {"slow_sync_at": 90}, {"slow_syncs": 4}),
    "link_stuck": ("framer", {"waits_since": 11}, {"waits_since": 5}, {}),
    "link_full": ("durability", {"full_since": 70, "waited_at": 1}, {"full_since": 70, "waited_at": 30}, {}),
    "consul_lost": (
        "agent",
        {"waits_since": 11},
        {"waits_since": 5},
        {"pid": 1, "state": STATES.index("waiting"), "exit_code": 0, "heartbeat": time.monotonic_ns},
    ),
    "clock_suspect": ("router", {"clock_suspect": 1}, {}, {"clock_offset": 1 << 62}),
    "hw_stands": ("replica", {"behind_since": 11}, {"behind_since": 5}, {}),
    "isr_small": ("replica", {"small_since": 61}, {"small_since": 50}, {}),
    "tier_reads_fail": ("gateway", {"tier_failing_since": 70}, {"tier_failing_since": 30}, {}),
    "tier_cache_full": ("gateway", {"cache_full_since": 70}, {"cache_full_since": 30}, {}),
}
AWAY = {"pid": 1, "state": STATES.index("starting"), "heartbeat": time.monotonic_ns}
LEADING = {"pid": 1, "state": STATES.index("ready"), "role": ROLES.index("leading"), "version": 3, "in_isr": 1}
for code in ("hw_stands", "isr_small"):
    TIMED[code][3].update(LEADING | {"isr": 2, "brokers": 3, "min_insync": 2, "heartbeat": time.monotonic_ns})


def test_an_ordinary_broker_has_no_finding(page):
    assert found(page) == {}


def test_in_a_pod_no_finding_names_what_a_pod_does_not_have(page, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for process, words, _ in CASES.values():
        set_words(page.rows[process], **words)
    for process, moments, _, others in TIMED.values():
        set_words(page.rows[process], **others, **{name: ago(seconds) for name, seconds in moments.items()})
    shown = {each.code: each.advice for each in health.judge(page, load()).findings}
    assert {*shown} >= {"damage_found", "oom_killed", "restarting", "unclean_end", "consul_lost"}
    page.rows["gateway"].state = STATES.index("recovering")
    page.rows["gateway"].failing = 1  # it cannot read the committed offsets
    page.rows["router"].state = STATES.index("draining")
    shown |= {each.code: each.advice for each in health.judge(page, load()).reasons}
    assert {*shown} >= {"offsets_unreadable", "draining"}
    page.rows["durability"].end(75)
    page.rows["gateway"].end(78)
    shown |= {f"{each.code} {each.about}": each.advice for each in health.judge(page, load()).reasons}
    shown |= {"down": health.judge(None, load()).reasons[0].advice}
    pod = socket.gethostname()
    assert f"kubectl logs {pod} -c gateway --previous" in shown["stopped gateway"]
    assert f"kubectl describe pod {pod}" in shown["oom_killed"] and "kubectl logs" in shown["down"]
    for code, advice in shown.items():
        absent = [word for word in ("kmq.log", "dmesg", "apt-get", "kmq up", "kmq down") if word in advice]
        assert not absent or code == "slow_sync", (code, advice)


def test_every_concern_has_its_case():
    rest = {"follower_slow", "tier_fenced", "tier_ahead", "tier_damaged"}  # which have tests of their own
    assert {*CASES, *TIMED, *stats.TRENDS} == {*concerns.CONCERNS} - rest


@pytest.mark.parametrize("problem", stats.TIER_PROBLEMS[1:])
def test_each_reason_why_nothing_is_copied_is_a_finding_while_its_process_runs(page, problem):
    set_words(page.rows["tier"], **LIVING, standing=stats.TIER_PROBLEMS.index(problem))
    assert {*found(page)} == {f"tier_{problem}"}
    page.rows["tier"].heartbeat = ago(60)
    assert {*found(page)} == {"tier_behind"}


@pytest.fixture
def soon(monkeypatch):
    """A machine may have been up for some minutes only."""
    monkeypatch.setattr(concerns, "TIER_BEHIND_S", 0)  # beside KMQ_TIER_EVERY, a minute
    monkeypatch.setattr(concerns, "TIER_DUE_S", 100)


def test_old_records_that_wait_are_behind_by_their_share_of_the_local_limits_or_after_an_hour(page, soon):
    row = page.rows["tier"]
    set_words(row, **LIVING, behind_bytes=60 * MIB, local_limit=100 * MIB, due_since=ago(50))
    assert found(page) == {}, "a turn later they are due no more"
    row.due_since = ago(70)
    assert "60 MiB of old records have waited on this disk for KMQ_TIER for 70 s" in found(page)["tier_behind"].why
    row.behind_bytes = 50 * MIB
    assert found(page) == {}
    row.due_since = ago(110)
    assert "KMQ_TIER_RATE" in found(page)["tier_behind"].advice
    row.behind_bytes = 0
    assert found(page) == {}


def test_while_the_store_is_away_it_is_said_when_the_disk_will_be_full(page, soon):
    row = page.rows["tier"]
    set_words(row, **LIVING, oldest=date(7200), behind_bytes=60 * MIB, due_since=ago(110), failing_since=ago(130))
    finding = found(page)["tier_behind"]
    assert "no record of the last 2 hours" in finding.why and "60 MiB" in finding.why
    assert "not answered for 2 min" in finding.why and "full" not in finding.why
    page.rows["gateway"].full_in = 5 * 3600
    assert found(page)["tier_behind"].why.endswith("the disk, or KMQ_DATA_QUOTA, is full in 5 hours")


def test_damage_in_the_store_is_said_with_its_topic_and_offsets(page):
    set_words(page.rows["tier"], **LIVING, standing=stats.TIER_PROBLEMS.index("damaged"))
    page.write_note("tier", "damaged: 3 objects are missing, such as offsets 0 to 511 of orders/3")
    assert found(page)["tier_damaged"].why.endswith(": 3 objects are missing, such as offsets 0 to 511 of orders/3")
    page.rows["tier"].standing = 0
    page.rows["gateway"].tier_damaged = 2
    page.write_note("gateway", "offsets 512 to 1000 of orders/3: is missing")
    finding = found(page)["tier_damaged"]
    assert "2 objects" in finding.why and "offsets 512 to 1000 of orders/3" in finding.why


@pytest.mark.parametrize("code", stats.TRENDS)
def test_a_trend_is_a_finding_while_the_gateway_that_says_so_runs(page, code):
    set_words(page.rows["agent"], **AWAY if code.startswith("agent_") else {})
    assert found(page) == {}
    page.publish_trend(code, 70_000, 90_000)
    finding = found(page)[code]
    figures = "19 hours" if code in ("disk_fills", "quota_fills") or code.startswith("agent_") else "70,000"
    assert [*found(page)] == [code] and figures in finding.why
    page.rows["gateway"].heartbeat = ago(60)
    assert code not in found(page), "nobody knows any more"
    page.rows["gateway"].heartbeat = time.monotonic_ns()
    page.rows["gateway"].end(0)
    assert found(page) == {}, "a gateway that has ended in order is none"


def test_what_the_page_says_of_the_agent_is_said_once(page):
    set_words(page.rows["agent"], pid=1, state=STATES.index("stopped"), exit_code=78)
    for code in ("agent_behind", "agent_disconnected"):
        page.publish_trend(code, 90)
    assert [*found(page)] == ["agent_ended"]


def test_a_slow_follower_is_named_with_what_it_costs_and_whether_acknowledgements_wait(page):
    set_words(page.rows["replica"], **TIMED["isr_small"][3])

    def publish(**slow):
        quick = {"connected": 1, "in_isr": 1, "ack_delay_us": 4_000}
        page.publish_followers([("b", quick), ("c", {"connected": 1, "ack_delay_us": 1_600_000} | slow)])

    publish(in_isr=1)
    assert found(page) == {}
    publish(in_isr=1, slow_since=ago(1))
    finding = found(page)["follower_slow"]
    assert "broker c takes 1.6 s" in finding.why and "the quickest of the others 4.0 ms" in finding.why
    assert "acknowledgements wait for it" in finding.why and "fewer than 2" in finding.why
    publish(in_isr=0, slow_since=ago(1))
    page.rows["replica"].small_since = ago(61)
    assert "no acknowledgement waits" in found(page)["follower_slow"].why
    assert "out of it: c" in found(page)["isr_small"].why
    page.publish_followers([])
    assert page.followers() == [] and "follower_slow" not in found(page)


@pytest.mark.parametrize("code", CASES)
def test_a_concern_is_raised_by_its_words_and_by_nothing_less(page, code):
    process, raising, harmless = CASES[code]
    set_words(page.rows[process], **raising)
    assert [*found(page)] == [code]
    set_words(page.rows[process], **harmless)
    assert found(page) == {}


@pytest.mark.parametrize("code", TIMED)
def test_a_concern_about_a_time_is_raised_within_it_and_not_beyond(page, code):
    process, raising, harmless, others = TIMED[code]
    set_words(page.rows[process], **others, **{name: ago(seconds) for name, seconds in raising.items()})
    assert [*found(page)] == [code]
    begin(page.rows[process])
    page.rows[process].clock_suspect = page.rows[process].restart_streak = page.rows[process].unclean = 0
    set_words(page.rows[process], **others, **{name: ago(seconds) for name, seconds in harmless.items()})
    assert found(page) == {}


@pytest.mark.parametrize("code", ["restarting", "unclean_end"])
def test_a_process_that_lives_for_long_is_no_concern_any_more(page, code):
    process, raising, _ = CASES[code]
    set_words(page.rows[process], **raising, started=ago(LIFE_S + 1))
    assert found(page) == {}


def test_restarts_count_in_a_row_and_begin_anew_with_kmq_up_or_after_a_long_life(page):
    row = page.rows["router"]
    for streak in (1, 2, 3):
        begin(row)
        assert row.restart_streak == streak
    row.started = ago(LIFE_S + 1)
    begin(row)
    assert row.restart_streak == 0
    begin(row)
    row.starts = 0  # as `kmq up` does
    begin(row)
    assert row.restart_streak == 0


def test_a_small_disk_is_low_at_a_fifth_and_what_is_not_counted_is_never_low(page):
    row = page.rows["ingress"]
    set_words(row, disk_size=100 * MIB, disk_free=20 * MIB - 1, inodes_total=0, inodes_free=0)
    assert [*found(page)] == ["disk_low"]
    row.disk_free = 20 * MIB
    assert found(page) == {}


def test_a_disk_on_which_messages_are_refused_already_is_not_said_to_be_so_soon(page):
    ingress = page.rows["ingress"]
    set_words(ingress, disk_size=GIB, disk_free=1, inodes_total=10, inodes_free=1)
    assert all("will be refused soon" in found(page)[code].why for code in ("disk_low", "inodes_low"))
    ingress.admission = ADMISSIONS.index("disk_full")
    assert all("are refused" in found(page)[code].why for code in ("disk_low", "inodes_low"))


def test_a_waiting_writer_that_is_silent_itself_says_nothing_of_its_ring(page):
    row = page.rows["framer"]
    set_words(row, waits_since=ago(30), heartbeat=ago(20))
    assert [*found(page)] in (["dead"], ["silent"])


def test_reasons_come_first_then_warnings_with_causes_before_consequences(page):
    for process, raising, _ in CASES.values():
        set_words(page.rows[process], **raising)
    page.rows["ingress"].disk_free = 1
    page.rows["durability"].heartbeat = ago(60)
    codes = [*found(page)]
    assert codes[0] == "dead" and codes[1:] == [code for code in concerns.CONCERNS if code in CASES]
    severities = [finding.severity for finding in found(page).values()]
    assert severities == ["error"] + ["warning"] * len(CASES)


def test_the_time_that_a_clock_must_be_steady_is_in_the_sentence(page):
    set_words(page.rows["router"], clock_suspect=ago(0), clock_offset=1 << 62)
    finding = found(page)["clock_suspect"]
    assert re.search(rf"for another {STEADY_S}? ?\d* ?s", finding.why) and "kmq clock --trust" in finding.advice


# --- what is said is real ------------------------------------------------------------------------------------------


def raised(page):
    """Every finding of this file."""
    for code, (process, raising, _) in CASES.items():
        set_words(page.rows[process], **raising)
        yield found(page)[code]
    for code, (process, raising, _, others) in TIMED.items():
        set_words(page.rows[process], **others, **{name: ago(seconds) for name, seconds in raising.items()})
        yield found(page)[code]
    page.rows["agent"].wipe()
    page.rows["durability"].slow_syncs = 0
    for code in stats.TRENDS:
        if code == "agent_disconnected":
            page.publish_trend("agent_behind")
        page.publish_trend(code, 1)
        yield found(page)[code]


def test_every_advice_names_commands_settings_and_a_section_that_are_there(page):
    known = {("kmq", *words) for words, _ in every_command()}
    for finding in raised(page):
        path, _, anchor = finding.section.partition("#")
        assert anchor == finding.code and anchor in anchors((ROOT / path).read_text()), finding.section
        assert set(re.findall(r"\b(?:KMQ|RB)_\w+", f"{finding.why} {finding.advice}")) <= settings_there(), finding.code
        for words in re.findall(r"\bkmq ((?:[a-z-]+ ?)+)", finding.advice):
            names = ("kmq", *words.split())
            assert any(names[:n] in known for n in (2, 3)), finding.advice
        assert len(finding.advice) > 10 and "\n" not in finding.advice + finding.why


def settings_there():
    return set(re.findall(r"`((?:KMQ|RB)_\w+)`", table()))


def test_every_code_has_its_section():
    sections = anchors((ROOT / "docs/operations.md").read_text())
    assert {*health.REASONS, *health.ALL_WARNINGS} <= sections
    assert {*concerns.CONCERNS, *health.WARNINGS} == {*health.ALL_WARNINGS}


# --- damage that `kmq verify` has found ------------------------------------------------------------------------------


def test_damage_found_by_a_check_is_a_finding_until_a_complete_check_finds_none(page):
    damage.report(load(), 2, is_complete=False)
    assert "2 damaged blocks or files" in found(page)["damage_found"].why
    page.rows["router"].found_damage()
    damage.report(load(), 0, is_complete=False)
    assert "3 damaged blocks or files" in found(page)["damage_found"].why
    damage.report(load(), 0, is_complete=True)
    assert found(page) == {}


def test_a_check_of_another_directory_or_without_a_page_tells_nobody(page, monkeypatch):
    monkeypatch.setenv("KMQ_DATA", "another")
    damage.report(load(), 1, is_complete=True)
    monkeypatch.delenv("KMQ_DATA")
    assert found(page) == {}
    monkeypatch.setenv("KMQ_INSTANCE", f"nobody-{os.getpid()}")
    damage.report(load(), 1, is_complete=True)


def test_a_damaged_place_is_counted_once_until_a_check_finds_nothing(page):
    reader = damage.Damaged(page.rows["gateway"])
    for byte in (10, 10, 20, 10):
        reader.note(DamageError("/data/t/0/0.log", byte, byte + 5, 0, 1, "wrong checksum"))
    assert "2 damaged blocks" in found(page)["damage_found"].why
    damage.report(load(), 0, is_complete=True)
    reader.note(DamageError("/data/t/0/0.log", 10, 15, 0, 1, "wrong checksum"))
    assert "1 damaged block or file was found" in found(page)["damage_found"].why


# --- what stages tell of their delays ----------------------------------------------------------------------------


def test_slow_syncs_are_those_of_the_last_sixteen(page):
    row = page.rows["durability"]
    syncs = stage.SlowSyncs(row)
    for seconds in (1.1, 0.01, 2.0, 1.0):
        syncs.observe(seconds)
    assert row.slow_syncs == 2 and ago(60) < row.slow_sync_at <= ago(0)
    for _ in range(14):
        syncs.observe(0.001)
    assert row.slow_syncs == 1
    syncs.observe(0.001)
    assert row.slow_syncs == 0


class NarrowRing:
    """Has room after a look."""

    def __init__(self, look):
        self.look = look

    def wait_for_room(self, nbytes, count, check):
        check()
        self.look()


def test_a_wait_for_room_is_in_the_page_while_it_lasts_and_close_waits_are_one(page):
    row, seen = page.rows["framer"], []

    def check():
        seen.append("beat")

    ring = NarrowRing(lambda: seen.append((row.waits_since, row.full_since)))
    stage.wait_for_ring(row, check, ring, 100, 1)
    stage.wait_for_ring(row, check, ring, 100, 1)
    (first, since), (second, still) = [entry for entry in seen if entry != "beat"]
    assert first == since == still < second, "the second began within two seconds of the first"
    assert row.waits_since == 0 and row.waited_at > second
    row.waited_at -= 3 * S
    stage.wait_for_ring(row, check, ring, 100, 1)
    assert row.full_since > second, "three seconds with room in between"


# --- a shard ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def shard(page, monkeypatch):
    """The page of a broker of a shard, whose stages and gateway are ready."""
    consul = {"KMQ_SHARD": "s", "KMQ_CLUSTER": "dev", "KMQ_CONSUL": "127.0.0.1:8500", "KMQ_BROKER": "a"}
    consul["KMQ_REPLICA_SECRET"] = "secret"
    for name, value in consul.items():
        monkeypatch.setenv(name, value)
    begin(page.rows["replica"])
    return page


def set_role(page, role, stages="ready", **words):
    set_words(page.rows["replica"], role=ROLES.index(role), epoch=2, **words)
    for name in ("ingress", "framer"):
        page.rows[name].state = STATES.index(stages)


def test_a_leader_is_ready_when_its_doors_are_open_and_not_before(shard):
    set_role(shard, "starting", "following", version=3, in_isr=1)
    assert [*found(shard)] == ["starting"] and found(shard)["starting"].about == "replica"
    set_role(shard, "leading")
    assert found(shard) == {}


def test_a_leader_that_hears_too_few_is_ready_unless_it_would_not_hear_of_a_successor(shard):
    set_role(shard, "leading", version=3, in_isr=1)
    shard.rows["ingress"].admission = ADMISSIONS.index("not_enough_replicas")
    assert health.judge(shard, load()).ready and [*found(shard)] == ["not_enough_replicas"]
    shard.rows["replica"].state = STATES.index("waiting")  # for Consul
    [reason] = health.judge(shard, load()).reasons
    assert reason.code == "no_leader" and "another broker may lead by now" in reason.why


def test_a_follower_is_ready_in_the_isr_only(shard):
    set_role(shard, "following", "following", version=3, in_isr=1)
    assert found(shard) == {} and health.state_of("framer", shard.rows["framer"]) == "following"
    shard.rows["replica"].in_isr = 0
    assert [*found(shard)] == ["replica_behind"]
    verdict = health.judge(shard, load())
    assert verdict.against("replica") is not None and verdict.against("router") is None and verdict.lifeless is None


def test_a_follower_without_a_connection_to_its_leader_is_unready_and_says_so(shard):
    set_role(shard, "waiting", "following", version=3, in_isr=1)
    assert [*found(shard)] == ["no_leader"]
    assert "no connection to its leader" in found(shard)["no_leader"].why
    assert "network" in found(shard)["no_leader"].advice


def test_without_a_leader_each_stage_that_waits_is_unready_for_one_reason_and_alive(shard):
    set_role(shard, "waiting", "unled")
    assert [*found(shard)] == ["no_leader"] and "is not begun" in found(shard)["no_leader"].why
    set_role(shard, "following", "unled", version=3)
    verdict = health.judge(shard, load())
    assert [reason.code for reason in verdict.reasons] == ["no_leader"] and verdict.lifeless is None
    assert "no living leader of the shard s" in verdict.reasons[0].why
    assert {*verdict.reasons[0].processes} == {"ingress", "framer", "replica"}


@pytest.mark.parametrize("problem", PROBLEMS[1:])
def test_a_wrong_register_is_the_reason_whatever_follows_from_it(shard, problem):
    set_role(shard, "following", "unled", version=3, problem=PROBLEMS.index(problem))
    assert [*found(shard)] == [problem]


def test_a_replica_that_has_ended_or_does_not_begin_is_a_reason_and_consul_s_absence_is_none(shard):
    set_role(shard, "following", version=3, in_isr=1)
    row = shard.rows["replica"]
    row.state = STATES.index("waiting")
    assert found(shard) == {}
    row.waits_since = ago(11)
    assert [*found(shard)] == ["consul_lost"] and found(shard)["consul_lost"].about == "replica"
    row.waits_since, row.state = 0, STATES.index("starting")
    assert [*found(shard)] == ["starting"]
    row.end(65)
    assert [*found(shard)] == ["stopped"] and "replica has ended with exit code 65" in found(shard)["stopped"].why
    shard.rows["router"].state = STATES.index("unled")
    assert [*found(shard)] == ["stopped", "no_leader"] and "the replica does not run" in found(shard)["no_leader"].why
    shard.rows["router"].state = STATES.index("ready")
    row.wipe()
    assert [*found(shard)] == ["down"]


@pytest.mark.parametrize("code", ["consul_lost", "agent_ended"])
def test_a_broker_that_accepts_nothing_is_not_said_to_accept_because_its_agent_is_away(page, code):
    process, words = CASES[code][:2] if code in CASES else (TIMED[code][0], TIMED[code][3] | {"waits_since": ago(11)})
    set_words(page.rows[process], **words)
    page.rows["ingress"].admission = ADMISSIONS.index("disk_full")
    shown = found(page)
    assert "disk_full" in shown and "accepted" not in shown[code].why + shown[code].advice


def test_without_a_shard_nothing_is_said_of_a_replica(page):
    page.rows["replica"].end(65)
    assert found(page) == {}
