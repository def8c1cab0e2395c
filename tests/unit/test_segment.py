"""When a log goes on in a new segment, and which old ones go."""

import os
import time

import pytest
from made_up import stored

from kmq.config.settings import load
from kmq.config.values import GIB
from kmq.errors import ConfigError
from kmq.log import segment
from kmq.log.segment import Limits, Segment
from kmq.message import record

NEVER = float("inf")
S = 1_000_000  # µs


@pytest.mark.parametrize(
    ("limits", "size", "age", "full"),
    [
        (Limits(1000), 999, 0, False),
        (Limits(1000), 1000, 0, True),
        (Limits(1000, 60), 1, 59 * S, False),
        (Limits(1000, 60), 1, 60 * S, True),
        (Limits(1000, 60), 0, 1 << 60, False),  # an empty one is as good as a new one
        (Limits(1000, NEVER), 1, 1 << 60, False),
    ],
)
def test_a_segment_is_full_by_size_or_by_the_age_of_its_first_record(limits, size, age, full):
    assert limits.is_full(size, 5 * S, 5 * S + age) is full


class Aged(Segment):
    """A segment of 100 bytes whose newest record came `age` seconds ago."""

    def __init__(self, age):
        super().__init__(0, "", 100)
        self.age = age

    def newest_ts(self):
        assert self.age is not None, "its age does not matter, and looking it up costs a read"
        return int((time.time() - self.age) * S)


@pytest.mark.parametrize(
    ("limits", "ages", "active", "count"),
    [
        (Limits(), [None, None], 50, 0),
        (Limits(retention_bytes=250), [None, None], 50, 0),
        (Limits(retention_bytes=249), [None, None], 50, 1),
        (Limits(retention_bytes=149), [None, None], 50, 2),
        (Limits(retention_bytes=1), [None, None], 50, 2),
        (Limits(retention_bytes=1), [], 50, 0),
        (Limits(retention_age=60), [90, 70, 50], 50, 2),
        (Limits(retention_age=60), [90, 50, 70], 50, 1),  # only from the front
        (Limits(retention_age=60), [50], 50, 0),
        (Limits(retention_age=60, retention_bytes=260), [90, 50, 50], 50, 1),
        (Limits(retention_age=60, retention_bytes=160), [90, 50, 50], 50, 2),
    ],
)
def test_the_oldest_sealed_segments_go_by_age_and_size(limits, ages, active, count):
    assert limits.expired([Aged(age) for age in ages], active, time.time(), 100) == count


def test_no_more_segments_are_looked_up_at_once_than_are_to_be_deleted():
    assert Limits(retention_age=60).expired([Aged(90), Aged(90), Aged(None)], 50, time.time(), 2) == 2


def test_the_age_of_a_segment_is_that_of_its_last_record_and_looked_up_once(tmp_path):
    path = tmp_path / segment.name(0)
    path.write_bytes(b"".join(stored([b"t|||x"] * 9)))
    [found] = segment.survey(str(tmp_path))
    expected = record.stamp(stored([b"t|||x"], 9)[0])[1]
    assert (found.size, found.newest_ts()) == (path.stat().st_size, expected)
    path.unlink()
    assert found.newest_ts() == expected


def test_limits_come_from_the_settings_and_a_topic_may_have_its_own():
    limits = Limits.of(load({"KMQ_SEGMENT_AGE": "1h", "KMQ_RETENTION_BYTES": "1 GiB"}, toml=""))
    assert (limits.segment_bytes, limits.segment_age) == (GIB, 3600)
    assert (limits.retention_age, limits.retention_bytes) == (NEVER, GIB)
    own = limits.with_changes({"segment_bytes": "65536", "retention_age": "2d", "retention_bytes": "none"})
    assert (own.segment_bytes, own.segment_age) == (65536, 3600)
    assert (own.retention_age, own.retention_bytes) == (2 * 86400, 0)
    assert limits.segment_bytes == GIB


@pytest.mark.parametrize(("name", "text"), [("segment_bytes", "1"), ("retention_age", "soon"), ("segment_age", "0s")])
def test_a_limit_that_is_none_is_refused_by_name(name, text):
    with pytest.raises(ConfigError, match=f"{name} = '{text}'"):
        Limits().with_changes({name: text})


def test_only_limits_may_be_a_topics_own():
    with pytest.raises(ConfigError, match="host: unknown limit; expected one of segment_bytes, segment_age"):
        Limits().with_changes({"host": "x"})


@pytest.mark.parametrize("data", [b"", b"x", b"x|y", b"17", b"17|now|t"])
def test_what_has_no_stamp_has_none(data):
    assert record.stamp(data) == (0, 0)


def test_a_stamp_is_seq_and_time():
    assert record.stamp(memoryview(b"17|1700000000.000003|t|||" + b"x" * 100)) == (17, 1_700_000_000 * S + 3)


def test_removed_segments_go_with_their_indexes_and_the_log_first(tmp_path, monkeypatch):
    for first in (0, 5, 9):
        (tmp_path / segment.name(first)).touch()
        (tmp_path / segment.name(first).replace(".log", ".idx")).touch()
    (tmp_path / segment.name(5).replace(".log", ".idx")).unlink()  # one that a kill left without
    order, unlink = [], os.unlink
    monkeypatch.setattr(segment.os, "unlink", lambda path: order.append(path[-5:]) or unlink(path))
    segment.remove(segment.survey(str(tmp_path))[:2])
    assert order == ["0.log", "0.idx", "5.log", "5.idx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [segment.name(9)[:-4] + ".idx", segment.name(9)]
