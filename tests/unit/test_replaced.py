"""What the broker's own compactor plans: compared with a dictionary, with more keys than it holds, killed at any call."""

import errno
import os
import random

import pytest
from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room

from kmq.errors import BusyError
from kmq.gateway.groups import compactor
from kmq.log import compaction, identity, reader, replaced, topics
from kmq.log.replaced import Horizon, plan
from kmq.log.segment import COMPACT, Limits
from kmq.log.wal import Wal
from kmq.repair import verify
from kmq.router.queues import Queues

TOPIC = "__t"
LIMITS = Limits(segment_bytes=4000)
NEVER = Horizon(0, 0)
pytestmark = pytest.mark.usefixtures("small_blocks")


def queues_of(data, high):
    queues = Queues(data, no_room, FakeLogger(), LIMITS)
    queues.recover(high, lambda: None)
    return queues


def made(data, lines):
    """A directory whose topic holds these lines, all of it synced."""
    identity.open_data(data)
    topics.declare(data, TOPIC, 1, {"cleanup": COMPACT}, own=True)
    wal, queues = Wal(data, no_room, 1 << 20, Limits(segment_bytes=1 << 20)), queues_of(data, 0)
    for at in range(0, len(lines), 50):
        part = block(lines[at : at + 50], at + 1)
        wal.append([(part.data, at + 1, part.count, FIRST_TS + at + 50)])
        wal.sync()
        queues.route([part])
    wal.close()
    queues.settle()
    queues.close()
    return data


def random_lines(seed, count=900, keys=30):
    rng = random.Random(seed)
    names = [b"k%d" % n for n in range(keys)] + [b"L" * 40 + b"%d" % n for n in range(3)] + [b""]
    lines = []
    for n in range(count):
        key = rng.choice(names)
        start = rng.choice([b"%b.@.%b", b"%b.%b"] if key else [b"%b.@.%b"]) % (TOPIC.encode(), key)
        start = rng.choice([start] * 9 + [TOPIC.encode()])  # no key
        lines.append(start + b"|0|%d|%b" % (n, b"v" * rng.choice([0, 1, 30, 90])))
    return lines


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return made(str(tmp_path_factory.mktemp("original")), random_lines(1))


@pytest.fixture
def data(original, tmp_path):
    import shutil

    return shutil.copytree(original, str(tmp_path / "data"), symlinks=True)


def records(data):
    found, offset, log = {}, 0, reader.partition(data, TOPIC, 0)
    while True:
        first, text = log.read(offset, 3000)
        if not text:
            return found
        found.update((at, line) for at, line in enumerate(text.split(b"\n")[:-1], first) if line)
        offset = first + text.count(b"\n")


def key_of(line):
    rest = line.split(b"|", 3)[2].removeprefix(TOPIC.encode())
    return rest.removeprefix(b".@") if rest.startswith(b".@") else rest


def expected(data, horizon=NEVER):
    """Offsets that may go, by brute force."""
    before = records(data)
    last, count = {}, {}
    for offset, line in before.items():
        if key_of(line):
            last[key_of(line)], count[key_of(line)] = offset, count.get(key_of(line), 0) + 1
    gone = {offset for offset, line in before.items() if key_of(line) and last[key_of(line)] > offset}
    for key, offset in last.items():
        seq, ts, *_ = line = before[offset].split(b"|", 5)
        is_old = int(float(ts) * 1e6) < horizon.before_us and int(seq) < horizon.wal_first
        if line[5] == b"" and count[key] == 1 and is_old:
            gone.add(offset)
    ends = {offset for segment in sealed(data) for offset in (segment.first, segment.end - 1)}
    inside = {offset for segment in sealed(data) for offset in range(segment.first, segment.end)}
    return sorted(gone & inside - ends)


def sealed(data):
    return compaction.sealed(data, TOPIC, 0, compaction.synced_ends(data)[TOPIC, 0])


def planned(data, horizon=NEVER):
    return plan(data, TOPIC, 0, compaction.synced_ends(data)[TOPIC, 0], horizon, 0)


@pytest.mark.parametrize("most", [1, 2, 5, 16, 1000])
def test_the_plan_is_that_of_a_dictionary_however_few_keys_are_held_at_once(data, monkeypatch, most):
    monkeypatch.setattr(replaced, "MAX_KEYS", most)
    found = planned(data)
    assert [offset for part in found for offset in part.offsets] == expected(data) != []
    lines = records(data)
    for part in found:
        assert part.nbytes == sum(len(lines[offset]) for offset in part.offsets)
        assert part.segment.first < part.offsets[0] and part.offsets[-1] < part.segment.end - 1


@pytest.mark.parametrize("seed", range(2, 6))
def test_the_plan_is_right_for_other_logs_too(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(replaced, "MAX_KEYS", 7)
    data = made(str(tmp_path / "d"), random_lines(seed, 400, 200))
    for horizon in (NEVER, Horizon(FIRST_TS + 10**9, 10**6)):
        assert [offset for part in planned(data, horizon) for offset in part.offsets] == expected(data, horizon)
    assert expected(data, horizon) != expected(data)


def test_a_tombstone_goes_only_when_it_is_old_and_the_last_of_its_key_and_of_the_wal(data):
    now_us = FIRST_TS + 10**9
    for horizon in (Horizon(now_us, 1), Horizon(0, 10**6)):
        assert [offset for part in planned(data, horizon) for offset in part.offsets] == expected(data)
    lonely = made(data + "-2", [b"__t.@.k%d|0|%d|" % (n % 300, n) for n in range(300)] + [b"__t|0|0|x" * 20] * 90)
    assert planned(lonely) == [] and planned(lonely, Horizon(now_us, 1)) == []
    horizon = Horizon(now_us, 200)
    gone = [offset for part in planned(lonely, horizon) for offset in part.offsets]
    assert gone == expected(lonely, horizon) and 100 < len(gone) < 200


def test_an_empty_value_is_no_tombstone(tmp_path):
    data = made(str(tmp_path / "d"), [b"__t.@.k%d|0|%d;enc=b64|" % (n, n) for n in range(300)])
    assert planned(data, Horizon(FIRST_TS + 10**9, 10**6)) == []


def test_a_topic_without_sealed_segments_has_nothing_to_go(tmp_path):
    assert planned(made(str(tmp_path / "d"), random_lines(1, 10))) == []


# --- the compactor ------------------------------------------------------------------------------------------------------


def compacted(data):
    """Lay out what is worth it, and let the router install it."""
    count = compactor.compact(data, TOPIC, FakeLogger(), min_dirty=0.01)
    compaction.settle(data)
    return count


def test_a_compacted_topic_has_the_latest_of_each_key_at_its_offset_and_no_damage(data):
    before, gone = records(data), set(expected(data))
    assert compacted(data) > 3
    assert records(data) == {offset: line for offset, line in before.items() if offset not in gone}
    assert compacted(data) == 0
    assert list(verify.Verifier(data, is_live=False).findings()) == []


def test_a_segment_is_rewritten_only_if_it_is_worth_it(data):
    assert compactor.compact(data, TOPIC, FakeLogger(), min_dirty=1.0) == 0
    assert compactor.compact(data, TOPIC, FakeLogger()) > 3


def test_nothing_is_planned_while_segments_wait_to_be_installed(data):
    first = compactor.compact(data, TOPIC, FakeLogger(), min_dirty=0.01)
    assert first > 3 and compactor.compact(data, TOPIC, FakeLogger(), min_dirty=0.01) == 0


def test_two_compactors_exclude_one_another(data, monkeypatch):
    monkeypatch.setattr("kmq.links.ownership.OWNER_WAIT_S", 0.01)
    with compaction.compactor(data), pytest.raises(BusyError):
        compactor.compact(data, TOPIC, FakeLogger())


class Killed(BaseException):
    """Nothing after it happens."""


@pytest.mark.parametrize("at", [n if n % 4 == 1 else pytest.param(n, marks=pytest.mark.soak) for n in range(1, 21)])
def test_a_kill_at_any_call_of_the_compactor_loses_nothing_and_the_next_run_does_the_rest(data, monkeypatch, at):
    before, gone, left = records(data), set(expected(data)), [at]

    def counted(call):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            if left[0] < 0:
                raise OSError(errno.EIO, "dead")  # what a `finally` does no longer reaches the disk
            return call(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch, pytest.raises((Killed, OSError)):
        for name in ("mkdir", "rename", "fsync", "rmdir", "unlink"):
            patch.setattr(os, name, counted(getattr(os, name)))
        compactor.compact(data, TOPIC, FakeLogger(), min_dirty=0.01)
    assert records(data) == before
    compaction.settle(data)
    assert records(data).items() <= before.items()
    compacted(data)
    assert records(data) == {offset: line for offset, line in before.items() if offset not in gone}
    assert list(verify.Verifier(data, is_live=False).findings()) == []
