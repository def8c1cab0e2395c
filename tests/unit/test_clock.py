"""The clock by which things age: it follows the time of day, but not where that jumps."""

import pytest
from fake_logger import FakeLogger
from stats_rows import row_of

from kmq.broker import clock
from kmq.broker.clock import GAP_S, JUMP_S, STEADY_S, AgeClock, off_by_s, steady_in_s, trust

NOON = 1_800_000_000.0
HOUR = 3600


class Times:
    """Both clocks of a machine."""

    def __init__(self):
        self.monotonic, self.off = 5000.0, NOON - 5000.0

    def monotonic_ns(self):
        return int(self.monotonic * 1e9)

    def time_ns(self):
        return int((self.monotonic + self.off) * 1e9)


@pytest.fixture
def times(monkeypatch):
    made = Times()
    monkeypatch.setattr(clock, "time", made)
    return made


@pytest.fixture
def row():
    return row_of("framer")


def age_clock(row, last_record_s=NOON, logger=None):
    return AgeClock(row, int(last_record_s * 1e6), logger or FakeLogger())


def test_a_clock_that_runs_evenly_is_followed(times, row):
    ages = age_clock(row)
    for second in range(100):
        times.monotonic += 1
        times.off += 0.4  # slewed by 0.4 s each time, 40 s in all
        assert ages.now_s() == pytest.approx(NOON + 1.4 * (second + 1))
    assert steady_in_s(row) == 0


@pytest.mark.parametrize("jump", [2 * HOUR, -2 * HOUR, JUMP_S + 1, -JUMP_S - 1, 31 * 86_400])
def test_a_clock_that_jumps_is_not_followed_until_it_has_been_steady(times, row, jump):
    logger = FakeLogger()
    ages = age_clock(row, logger=logger)
    times.off += jump
    assert ages.now_s() == pytest.approx(NOON) and off_by_s(row) == jump
    for _ in range(STEADY_S - 1):
        times.monotonic += 1
        assert ages.now_s() < NOON + STEADY_S
    assert steady_in_s(row) == 1
    times.monotonic += 1
    assert ages.now_s() == pytest.approx(NOON + STEADY_S + jump)
    assert logger.names == ["clock_not_trusted", "clock_trusted"] and off_by_s(row) == 0


def test_a_clock_that_was_ahead_for_a_moment_changes_nothing(times, row):
    ages = age_clock(row)
    times.off += 2 * HOUR
    ages.now_s()
    times.monotonic, times.off = times.monotonic + 3, times.off - 2 * HOUR
    assert ages.now_s() == pytest.approx(NOON + 3)
    times.monotonic += STEADY_S - 1
    assert ages.now_s() == pytest.approx(NOON + 2 + STEADY_S) and steady_in_s(row) == 1
    times.monotonic += 1
    assert ages.now_s() == pytest.approx(NOON + 3 + STEADY_S) and steady_in_s(row) == 0


@pytest.mark.parametrize(("after", "trusted"), [(GAP_S + HOUR, False), (GAP_S - HOUR, True), (-HOUR, True)])
def test_at_a_start_a_clock_far_beyond_the_last_record_is_not_trusted(times, row, after, trusted):
    ages = age_clock(row, NOON - after)
    assert ages.now_s() == pytest.approx(NOON if trusted else NOON - after)
    times.monotonic += STEADY_S
    assert ages.now_s() == pytest.approx(NOON + STEADY_S)


def test_a_directory_without_a_record_trusts_the_clock(times, row):
    assert age_clock(row, 0).now_s() == pytest.approx(NOON)


def test_a_process_that_is_started_again_knows_what_its_predecessor_knew(times, row):
    age_clock(row).now_s()
    times.off += 2 * HOUR
    assert age_clock(row).now_s() == pytest.approx(NOON), "it jumped while nobody looked"
    times.monotonic += STEADY_S / 2
    row.wipe()
    ages = age_clock(row)
    assert ages.now_s() == pytest.approx(NOON + STEADY_S / 2)
    times.monotonic += STEADY_S / 2
    assert ages.now_s() == pytest.approx(NOON + STEADY_S + 2 * HOUR), "counted from the jump, not from the start"


def test_an_operator_may_say_that_it_is_right(times, row):
    ages = age_clock(row)
    times.off += 2 * HOUR
    ages.now_s()
    times.monotonic += 5
    trust(row)
    assert ages.now_s() == pytest.approx(NOON + 5 + 2 * HOUR)
    times.off += 2 * HOUR
    assert ages.now_s() == pytest.approx(NOON + 5 + 2 * HOUR), "said of the clock as it was then"
