"""The stats page: its layout, what outlives a process, and a page of an older release."""

import os
import time

import pytest

from kmq.broker import stats
from kmq.broker.histogram import BOUNDS_S, BUCKETS, WORDS, Histogram, difference, quantile
from kmq.broker.stats import PROCESSES, STATES, TIMED, StatsPage, peek
from kmq.config.intakes import parse_intakes
from kmq.errors import BusyError
from kmq.links import role


@pytest.fixture
def instance():
    name = f"stats-{os.getpid()}"
    yield name
    if os.path.exists(f"/dev/shm/{name}.stats"):
        os.unlink(f"/dev/shm/{name}.stats")


def histogram():
    return Histogram(memoryview(bytearray(8 * WORDS)).cast("Q"))


def write_page_of_layout_2(instance, data, state, heartbeat):
    """What an older release leaves: number 7 of each row is `starts`, 17 `clock_offset`, 20 `askers` or a role."""
    page = bytearray(8192)
    text = f"kmq-stats2 data_id=abc directory={data}\n".encode()
    page[: len(text)] = text
    words = memoryview(page).cast("Q")
    for at in range(7):
        begin = 128 + 64 * at if at < 6 else 584
        row = words[begin : begin + 64]
        row[0], row[2], row[3], row[6], row[7], row[17] = 4_000_000 + at, heartbeat, STATES.index(state), 90 + at, 5, 77
        row[20], row[63] = 4, 9  # the last one is `exit_code`
    words[512] = words[648] = 3  # of the first histogram, and of the first intake
    with open(f"/dev/shm/{instance}.stats", "wb") as file:
        file.write(page)


@pytest.mark.parametrize("seconds, bucket", [(-1, 0), (0, 0), (64e-6, 0), (65e-6, 1), (128e-6, 1), (1, 14), (99, 20)])
def test_a_time_is_counted_in_the_first_bucket_that_reaches_it(seconds, bucket):
    made = histogram()
    made.observe(seconds, 3)
    seen = made.snapshot()
    assert [at for at, count in enumerate(seen.counts) if count] == [bucket] and len(seen.counts) == BUCKETS
    assert seen.count == 3 and seen.sum_s == pytest.approx(3 * max(0, seconds))
    assert bucket == BUCKETS - 1 or BOUNDS_S[bucket] >= seconds
    made.wipe()
    assert made.snapshot().counts == (0,) * BUCKETS


def test_quantiles_lie_in_the_bucket_of_the_time_they_stand_for():
    made = histogram()
    assert quantile(made.snapshot(), 0.5) is None
    made.observe(0.001, 98)
    made.observe(0.3, 2)
    assert BOUNDS_S[3] < (quantile(made.snapshot(), 0.5) or 0) <= BOUNDS_S[4]
    assert BOUNDS_S[12] < (quantile(made.snapshot(), 0.99) or 0) <= BOUNDS_S[13]
    made.observe(1000, 1000)
    assert quantile(made.snapshot(), 0.99) == BOUNDS_S[-1]


def test_a_difference_is_what_was_counted_in_between_also_over_a_restart():
    made = histogram()
    made.observe(1.0, 2)
    before = made.snapshot()
    made.observe(0.5)
    later = difference(made.snapshot(), before)
    assert later.count == 1 and later.sum_s == 0.5 and sum(later.counts) == 1
    made.wipe()
    made.observe(0.25)
    assert difference(made.snapshot(), before).sum_s == 0.25


def test_rows_and_histograms_never_overlap(instance, tmp_path):
    page = StatsPage(instance, "abc", str(tmp_path))
    for at, name in enumerate(PROCESSES):
        page.rows[name].copy_from([1000 + at] * stats._ROW)
    for at, what in enumerate(TIMED.values()):
        page.histogram(what).copy_from([2000 + at] * WORDS)
    for at, name in enumerate(PROCESSES):
        assert page.rows[name].words() == [1000 + at] * stats._ROW
    for at, what in enumerate(TIMED.values()):
        assert page.histogram(what).words() == [2000 + at] * WORDS
    assert page.serves(str(tmp_path)) and page.directory == str(tmp_path)
    assert os.path.getsize(page.path) == 8192


def test_the_notes_lie_between_the_trends_and_the_last_row_and_are_cut_to_what_fits(instance, tmp_path):
    page = StatsPage(instance, "abc", str(tmp_path))
    for name in PROCESSES:
        page.rows[name].copy_from([1000] * stats._ROW)
    for code in stats.TRENDS:
        page.publish_trend(code, 2000, 2001)
    page.write_note("tier", "é" * 200)
    page.write_note("gateway", "offsets 0 to 9")
    assert (page.note_of("tier"), page.note_of("gateway")) == ("é" * 127, "offsets 0 to 9")
    page.rows["gateway"].heartbeat = time.monotonic_ns()
    assert page.trends() == dict.fromkeys(stats.TRENDS, (2000, 2001))
    assert page.rows["tier"].words() == [1000] * stats._ROW
    page.write_note("tier", "")
    assert page.copy().note_of("tier") == "" and page.copy().note_of("gateway") == "offsets 0 to 9"


def test_the_row_of_the_replica_moves_nothing_of_an_older_page(instance, tmp_path):
    page = StatsPage(instance, "abc", str(tmp_path))
    places = [page.rows[name] for name in PROCESSES[:6]] + [page.histogram(what) for what in TIMED.values()]
    for at, place in enumerate([*places, page.rows["replica"]]):
        place.copy_from([1 + at])
    with open(page.path, "rb") as file:
        words = memoryview(file.read()).cast("Q")
    assert [words[128 + 64 * at] for at in range(6)] == [1, 2, 3, 4, 5, 6]
    assert [words[512 + 24 * at] for at in range(3)] == [7, 8, 9] and words[512 + 72] == 10


def test_the_roles_of_the_row_are_those_of_the_role_page():
    assert stats.ROLES[1:] == role.ROLES


@pytest.mark.parametrize("name", PROCESSES)
def test_each_name_is_a_word_of_its_own_in_the_row_of_its_process(instance, tmp_path, name):
    row = StatsPage(instance, "abc", str(tmp_path)).rows[name]
    for at, field in enumerate(row.fields):
        setattr(row, field, 1 + at)
    assert [getattr(row, field) for field in row.fields] == [*range(1, 1 + len(row.fields))]
    assert sorted(row.words()) == [0] * (64 - len(row.fields)) + [*range(1, 1 + len(row.fields))]


def test_a_word_of_another_process_is_an_error(instance, tmp_path):
    rows = StatsPage(instance, "abc", str(tmp_path)).rows
    rows["framer"].producers = 3
    with pytest.raises(AttributeError):
        rows["replica"].producers = 3
    with pytest.raises(AttributeError):
        print(rows["router"].isr)


def test_the_names_of_a_role_end_with_the_process(instance, tmp_path):
    row = StatsPage(instance, "abc", str(tmp_path)).rows["replica"]
    row.brokers = 3
    row.role, row.problem = stats.ROLES.index("leading"), stats.PROBLEMS.index("register_unreadable")
    assert (row.role_name, row.problem_name) == ("leading", "register_unreadable")
    row.wipe()
    assert (row.role_name, row.problem_name, row.brokers) == ("", "", 0)


def test_a_start_forgets_all_but_what_lasts_and_says_how_the_last_end_was(instance, tmp_path):
    row = StatsPage(instance, "abc", str(tmp_path)).rows["router"]
    row.begin(0)
    assert (row.starts, row.unclean, row.unclean_ends) == (1, 0, 0)
    row.state, row.messages = STATES.index("ready"), 9
    row.found_damage(2)
    assert row.times is not None
    row.times.observe(0.1)
    row.begin(0)
    assert (row.starts, row.unclean, row.unclean_ends, row.messages, row.damage) == (2, 1, 1, 0, 2)
    assert row.damage_at and row.times.snapshot().count == 0
    row.state = STATES.index("stopped")
    row.begin(0)
    assert (row.starts, row.unclean, row.unclean_ends) == (3, 0, 1)


@pytest.mark.parametrize("state, heartbeat", [("stopped", time.monotonic_ns()), ("ready", 1)])
def test_a_page_of_layout_2_is_carried_over(instance, tmp_path, state, heartbeat):
    write_page_of_layout_2(instance, tmp_path, state, heartbeat)
    page = StatsPage(instance, "abc", str(tmp_path))
    for at, name in enumerate(PROCESSES[:-1]):  # there was no process `tier`
        row = page.rows[name]
        assert (row.pid, row.seq, row.starts, row.clock_offset) == (4_000_000 + at, 90 + at, 5, 77)
        assert row.damage == row.unclean == 0 and row.exit_code == 9
    assert page.rows["ingress"].askers == 4 and page.rows["replica"].role == 0, "it was the word `askers`"
    assert page.histogram("ack").words()[0] == page.intakes(parse_intakes("5140=app"))[0]["port"] == 3
    assert page.identity().startswith("kmq-stats3 ") and page.serves(str(tmp_path))
    page.rows["router"].begin(0)
    row = StatsPage(instance, "abc", str(tmp_path)).rows["router"]
    assert (row.starts, row.unclean, row.clock_offset) == (6, int(state != "stopped"), 77)


def test_a_page_of_layout_2_of_another_directory_is_wiped(instance, tmp_path):
    write_page_of_layout_2(instance, "/elsewhere", "stopped", time.monotonic_ns())
    assert StatsPage(instance, "abc", str(tmp_path)).rows["router"].starts == 0


def test_a_page_of_layout_2_whose_processes_live_is_left_alone_but_can_be_read(instance, tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "OWNER_WAIT_S", 1e6)
    times = iter([0.0, 1e9])
    monkeypatch.setattr(stats, "time", type("T", (), {"monotonic": lambda: next(times), "monotonic_ns": lambda: 2}))
    write_page_of_layout_2(instance, tmp_path, "ready", 1)
    with pytest.raises(BusyError, match="processes of an older release"):
        StatsPage(instance, "abc", str(tmp_path))
    page = peek(instance)
    assert page is not None and page.serves(str(tmp_path)) and page.rows["durability"].seq == 92
    assert page.copy().rows["agent"].starts == 5


def test_a_removed_page_is_made_again_with_its_histograms(instance, tmp_path):
    first, second = (StatsPage(instance, "abc", str(tmp_path)) for _ in range(2))
    acks, syncs = first.histogram("ack"), second.histogram("sync")  # as a stage does, once at its start
    os.unlink(first.path)
    acks.observe(1)
    first.keep_in_place("ingress")
    syncs.observe(1, 4)
    second.keep_in_place("durability")
    acks.observe(1, 2)
    assert [first.histogram(what).snapshot().count for what in TIMED.values()] == [3, 4, 0]
