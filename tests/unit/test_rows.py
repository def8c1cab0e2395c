"""The file `tier` of a partition: what its lines say together, and what it says after a kill."""

import os

import pytest

from kmq.log import gaps, rows
from kmq.log.damage import DamageError
from kmq.log.gaps import Gap
from kmq.log.rows import TierRow

SHA = "ab" * 32


def row(base, following, commit=1):
    seqs, times = (base + 1, following), (1_714_500_000_000_100 + base, 1_714_500_000_000_100 + following)
    return TierRow(commit, base, following, seqs, times, 100 * (following - base), 10, SHA, 7, f"topics/t/1/0/{base}")


def add(base, following, commit=1):
    return f"{commit} add t/0 life=1 {row(base, following, commit).text()}"


def drop(before, why="retention"):
    return f"9 drop t/0 life=1 before={before} why={why}"


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "data" / "topics" / "t" / "0"
    path.mkdir(parents=True)
    return str(path)


def begun(directory, *lines):
    return rows.append(directory, rows.empty("ab", "t/0", 1), lines, is_new=True)


def test_rows_follow_one_another_and_a_row_that_does_not_is_refused(directory):
    found = begun(directory, add(0, 10), add(10, 25, 2))
    assert rows.of(directory).rows == found.rows == [row(0, 10), row(10, 25, 2)] and found.end == 25
    for wrong in (add(26, 30), add(20, 30), add(25, 30).replace("t/0", "t/1"), add(25, 30).replace("life=1", "life=2")):
        with pytest.raises(ValueError, match="does not follow"):
            rows.append(directory, found, [wrong], is_new=False)
    assert rows.of(directory).end == 25
    again = rows.append(directory, found, [add(10, 25, 2), add(25, 30, 3)], is_new=False)
    assert [each.base for each in again.rows] == [0, 10, 25] and again.last_seq == 30
    assert rows.of(directory).rows == again.rows


def test_readers_see_the_rows_below_the_first_segment_from_the_start_on(directory):
    found = begun(directory, add(0, 10), add(10, 20), add(20, 30))
    assert found.begin(25) == 0 and [each.base for each in found.cold(25)] == [0, 10, 20]
    assert [each.base for each in found.cold(20)] == [0, 10]
    assert found.begin(0) == 0 and not found.cold(0)
    assert found.begin(31) == 31 and not found.cold(31)  # a hole lies between
    started = rows.append(directory, found, ["start 12"], is_new=False)
    assert started.begin(25) == 12 and [each.base for each in started.cold(25)] == [10, 20]
    assert rows.append(directory, started, ["start 5"], is_new=False).start == 12
    assert rows.append(directory, started, ["start 40"], is_new=False).begin(25) == 40


def test_a_dropped_row_is_no_longer_in_force_and_a_later_drop_says_where_the_next_row_begins(directory):
    found = begun(directory, add(0, 10), add(10, 20), drop(15))
    assert [each.base for each in found.rows] == [10] and found.end == 20
    found = rows.append(directory, found, [drop(50, "start"), add(50, 60)], is_new=False)
    assert [each.base for each in rows.of(directory).rows] == [50] and found.end == 60 and found.before == 50


def test_a_row_may_begin_after_a_gap_and_no_row_is_lost_when_gaps_are_written(directory):
    found = begun(directory, add(0, 10), "start 3")
    gaps.write(directory, 1, [Gap(10, 1000)])
    assert gaps.read(directory) == (Gap(10, 1000),)
    found = rows.append(directory, rows.of(directory), [add(1000, 1010)], is_new=False)
    assert [each.base for each in found.cold(1010)] == [0, 1000] and found.cold(1000) == [row(0, 10)]
    assert rows.of(directory).start == 3 and gaps.read(directory) == (Gap(10, 1000),)


def test_the_file_is_written_anew_once_half_of_it_is_not_in_force(directory):
    found = begun(directory, add(0, 10))
    for at in range(10, 200, 10):
        found = rows.append(directory, found, [add(at, at + 10), drop(at)], is_new=False)
    with open(rows.path_of(directory), "rb") as file:
        content = file.read()
    assert content.count(b"\n") < 12 and rows.of(directory).rows == [row(190, 200)] == found.rows
    assert rows.of(directory).end == 200 and rows.of(directory).before == 190


def test_what_an_append_has_left_torn_is_not_there_and_goes_with_the_next_one(directory):
    found = begun(directory, add(0, 10))
    size = os.path.getsize(rows.path_of(directory))
    rows.append(directory, found, [add(10, 20)], is_new=False)
    whole = os.path.getsize(rows.path_of(directory))
    for cut in range(size, whole):
        os.truncate(rows.path_of(directory), cut)
        assert rows.of(directory).rows == [row(0, 10)]
        rows.append(directory, rows.of(directory), [add(10, 20)], is_new=False)
        assert rows.of(directory).rows == [row(0, 10), row(10, 20)]


def test_a_file_that_was_removed_is_written_again_with_the_next_line(directory):
    found = begun(directory, add(0, 10), "start 3")
    for harm in (os.unlink, lambda path: os.truncate(path, 0)):
        harm(rows.path_of(directory))
        found = rows.append(directory, found, [add(found.end, found.end + 5)], is_new=False)
        assert rows.of(directory).rows == found.rows and rows.of(directory).start == 3


def test_a_damaged_file_stops_readers_instead_of_moving_the_start(directory):
    begun(directory, add(0, 10))
    with open(rows.path_of(directory), "r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content.replace(b"base=0", b"base=x"))
    with pytest.raises(DamageError):
        rows.of(directory)


def test_the_bytes_before_an_offset_are_counted_by_shares():
    found = [row(0, 10), row(10, 20)]
    assert [rows.nbytes_before(found, end) for end in (0, 5, 10, 15, 30)] == [0, 500, 1000, 1500, 2000]
    assert [rows.holding(found, at) for at in (0, 9, 10, 20)] == [found[0], found[0], found[1], None]
