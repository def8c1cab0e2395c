"""What the broker's own compactor plans: compared with a dictionary, with more keys than it holds, killed at any call."""

import asyncio
import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from compacting import compact, install, lay_out
from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room

from kmq.config.settings import load
from kmq.errors import BusyError
from kmq.gateway.core.compactor import Compactor, Throttle
from kmq.gateway.core.metrics import Requests
from kmq.gateway.core.partitions import Range
from kmq.gateway.lines.door import Consumption
from kmq.gateway.lines.service import Service
from kmq.log import compaction, identity, passes, reader, replaced, segment, topics
from kmq.log.passes import Clock, CompactedTopics
from kmq.log.replaced import Horizon, SyncedPartition, Tombstone, plan
from kmq.log.segment import COMPACT, Limits
from kmq.log.wal import Wal
from kmq.repair import verify
from kmq.router.queues import Queues
from kmq.wire.requests import Consume

TOPIC = "__t"
LIMITS = Limits(segment_bytes=4000)
NEVER = Horizon(0, 0)
pytestmark = pytest.mark.usefixtures("small_blocks")


def queues_of(data, high):
    queues = Queues(data, no_room, FakeLogger(), LIMITS)
    queues.recover(high)
    return queues


def made(data, lines, limits=None, wal_limits=None):
    """A directory whose topic holds these lines, all of it synced."""
    identity.open_data(data)
    topics.declare(data, TOPIC, 1, {"cleanup": COMPACT} | (limits or {}), own=True)
    wal, queues = Wal(data, no_room, 1 << 20, wal_limits or Limits(segment_bytes=1 << 20)), queues_of(data, 0)
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
    names = [b"k%d" % n for n in range(keys)] + [b"L" * 40 + b"%d" % n for n in range(3)]
    names += [b"", b"%00%7C%2E", b"a.@.b", b"\xff", b"\xfe", b"%FF"]
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
    return rest.removeprefix(b".@") if rest.startswith(b".@.") else rest


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
    return list(plan(SyncedPartition(data, TOPIC, 0, compaction.synced_ends(data)[TOPIC, 0]), horizon, 0))


@pytest.mark.parametrize(("most", "hashes", "window"), [(4, 16, 400), (5, 1 << 12, 200), (1000, 1, 1 << 20)])
def test_the_plan_is_that_of_a_dictionary_however_small_the_tables_are(data, monkeypatch, most, hashes, window):
    monkeypatch.setattr(replaced, "MAX_KEYS", most)
    monkeypatch.setattr(replaced, "_WINDOW", window)
    for name in ("_FILTER_BITS", "_FILTER_LEAST"):
        monkeypatch.setattr(replaced, name, max(4, hashes))
    found = planned(data)
    assert [offset for part in found for offset in part.offsets] == expected(data) != []
    lines = records(data)
    for part in found:
        offsets = list(part.offsets)
        assert part.nbytes == sum(len(lines[offset]) for offset in offsets) and part.count == len(offsets)
        assert part.segment.first < offsets[0] and offsets[-1] < part.segment.end - 1


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


def test_a_key_is_the_same_with_and_without_a_mark(tmp_path):
    head = [b".first|0|0|x", b".eu|0|1|old", b".@.eu|0|2|new", b".@0.eu|0|3|newer", b".@|0|4|no key", b".@|0|5|none"]
    head += [b".@.|0|6|empty key", b".@.|0|7|empty key again", b".|0|8|no key", b".|0|9|nor here", b".gone|0|10|x"]
    head += [b".@.gone|0|11|", b".is|0|12|", b".@.is|0|13;enc=b64|"]
    lines = [b"__t%b" % line for line in head] + [b"__t.k%d|0|%d|v" % (n, n) for n in range(200)]
    data = made(str(tmp_path / "d"), lines)
    for horizon in (NEVER, Horizon(FIRST_TS + 10**9, 10**6)):
        assert [offset for part in planned(data, horizon) for offset in part.offsets] == [1, 2, 6, 10, 12]


def test_a_clock_that_is_far_ahead_makes_no_tombstone_old(data):
    last_s = max(float(line.split(b"|", 2)[1]) for line in records(data).values())
    clock = passes.clock(data, 1e10, 60.0)
    assert clock.now_s == 1e10 and clock.trusted_s == pytest.approx(last_s + 60.0, abs=0.01)


def test_an_empty_value_is_no_tombstone(tmp_path):
    data = made(str(tmp_path / "d"), [b"__t.@.k%d|0|%d;enc=b64|" % (n, n) for n in range(300)])
    assert planned(data, Horizon(FIRST_TS + 10**9, 10**6)) == []


def test_a_topic_without_sealed_segments_has_nothing_to_go(tmp_path):
    assert planned(made(str(tmp_path / "d"), random_lines(1, 10))) == []


# --- the compactor ------------------------------------------------------------------------------------------------------


def test_a_compacted_topic_has_the_latest_of_each_key_at_its_offset_and_no_damage(data):
    before, gone = records(data), set(expected(data))
    assert compact(data) > 3
    assert records(data) == {offset: line for offset, line in before.items() if offset not in gone}
    assert compact(data) == 0
    assert list(verify.Verifier(data, is_live=False).findings()) == []


def test_a_segment_is_rewritten_only_if_it_is_worth_it(data):
    assert lay_out(data, min_dirty=1.0) == 0
    assert lay_out(data, min_dirty=0.5) > 3


def test_nothing_is_planned_while_segments_wait_to_be_installed(data):
    assert lay_out(data) > 3
    with pytest.raises(BusyError, match="has not installed"):
        lay_out(data)


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
        lay_out(data)
    assert records(data) == before
    install(data)
    assert records(data).items() <= before.items()
    compact(data)
    assert records(data) == {offset: line for offset, line in before.items() if offset not in gone}
    assert list(verify.Verifier(data, is_live=False).findings()) == []


# --- when a pass is due -------------------------------------------------------------------------------------------------

DAY_S = 86400
CLOCK = Clock(2e9, 2e9, 1)


def table(data):
    (found,) = CompactedTopics(data).found()
    return found


def is_due(data, clock=CLOCK, **changes):
    """Whether a pass is due, if the last one has left what the file says with these changes."""
    at = TOPIC, 0
    done = passes.read(data)[at]._replace(**changes)
    return passes.is_due(data, table(data), 0, done, compaction.synced_ends(data)[at], clock)


def test_a_pass_is_due_again_when_as_much_was_sealed_as_the_last_one_kept(data):
    assert passes.due(data, [table(data)], CLOCK) == [(table(data), 0)]
    compact(data)
    done = passes.read(data)[TOPIC, 0]
    assert done.end == sealed(data)[-1].end and 0 < done.bytes_left <= sum(map(len, records(data).values()))
    assert passes.due(data, [table(data)], CLOCK) == []
    second = sealed(data)[1]
    new = sum(os.path.getsize(segment.path(data)) for segment in sealed(data)[1:])
    assert is_due(data, end=second.first, bytes_left=new) and not is_due(data, end=second.first, bytes_left=new + 1)
    assert passes.due(data, [table(data)._replace(from_seq=7)], CLOCK) != []


@pytest.mark.parametrize("content", [b"", b"\xff", b"no|pass\n", b"__t|0|1|2|3|4|5\n"])
def test_a_damaged_list_of_passes_only_means_that_everything_is_compared_again(data, content):
    compact(data)
    with open(f"{compaction.outbox(data)}/.passes", "wb") as file:
        file.write(content)
    assert passes.due(data, [table(data)], CLOCK) != []
    assert compact(data) == 0 and passes.read(data)[TOPIC, 0].end == sealed(data)[-1].end


def test_a_pass_is_due_when_a_tombstone_may_go_but_once_in_its_time_only(data):
    compact(data)
    left = {"young": Tombstone(10**15, 50), "at": 10**9}
    on_time = Clock(10**9 + DAY_S, 10**9 + DAY_S + 1, 51)
    assert is_due(data, on_time, **left)
    assert not is_due(data, on_time, young=None)
    assert not is_due(data, on_time._replace(now_s=on_time.now_s - 1), **left)
    assert not is_due(data, on_time._replace(trusted_s=10**9 + DAY_S), **left)
    assert not is_due(data, on_time._replace(wal_first=50), **left)


@pytest.mark.parametrize(("kept_for", "goes"), [("0s", True), ("1h", True), ("2d", False), ("never", False)])
def test_a_tombstone_goes_after_the_delete_retention_of_its_topic(tmp_path, kept_for, goes):
    lines = [b"__t.@.k%d|0|%d|" % (n, n) for n in range(300)] + [b"__t|0|0|x"] * 300
    data = made(str(tmp_path / "d"), lines, {"delete_retention": kept_for}, Limits(segment_bytes=12_000))
    for _, path in segment.listing(f"{data}/append")[:-1]:
        os.unlink(path)  # as retention does
    assert reader.first_seq(data) > 300
    assert (compact(data) > 0) == goes
    assert (sum(key_of(line) != b"" for line in records(data).values()) < 150) == goes
    assert (passes.read(data)[TOPIC, 0].young is None) == goes


# --- beside others ------------------------------------------------------------------------------------------------------


def test_one_compactor_is_at_work_and_one_that_is_to_compact_now_waits_for_it(data):
    compactor = Compactor(data, FakeLogger(), Throttle(0), install_s=0)
    with ThreadPoolExecutor() as pool:
        with compaction.compactor(data):
            assert compaction.is_at_work(data)
            with pytest.raises(BusyError, match="compaction is held by pid="):
                compactor.run()
            waiting = pool.submit(lay_out, data)
            assert not waiting.done()
        assert waiting.result(60) > 3
    assert not compaction.is_at_work(data)


def test_without_room_for_a_copy_nothing_is_laid_out_and_the_pass_is_not_over(data):
    log = FakeLogger()
    compactor = Compactor(data, log, Throttle(0), lambda nbytes: False, install_s=0)
    assert compactor.run(min_dirty=0.01) == 0 and compactor.failures
    assert "no room" in str(log.of("not_compacted")[0]["reason"]) and passes.read(data) == {}


def test_a_topic_that_was_deleted_and_came_back_meanwhile_is_left_alone(data):
    def has_room(nbytes):
        with open(topics.toml_path(data, TOPIC), "r+") as file:
            text = file.read().replace("from_seq = 1", "from_seq = 7")
            file.seek(0)
            file.write(text)
        return True

    log = FakeLogger()
    assert table(data).from_seq == 1
    compactor = Compactor(data, log, Throttle(0), has_room, install_s=0)
    assert compactor.run(min_dirty=0.01) == 0 and len(compaction.waiting(data)) == 1 and passes.read(data) == {}
    assert not compactor.failures and not log.of("not_compacted")


def test_a_compactor_stops_when_the_router_does_not_install(data):
    with pytest.raises(BusyError, match="has not installed"):
        Compactor(data, FakeLogger(), Throttle(0), install_s=0.01).run()
    assert len(compaction.waiting(data)) == 1


def test_a_compactor_reads_and_works_no_more_than_it_may():
    now, cpu = [100.0], [5.0]
    pace = Throttle(1000, 0.25, lambda: now[0], lambda: cpu[0])
    pace.add(2000)
    assert pace.rest() == pytest.approx(2.0)
    now[0] += 9.0
    assert pace.rest() == 0
    pace.add(3000)
    assert pace.rest() == pytest.approx(2.0)  # three seconds; of the idle time only one counts
    now[0] += 2.0
    cpu[0] += 1.0
    now[0] += 1.0
    pace.add(10)
    assert pace.rest() == pytest.approx(3.0)  # a second of work in four
    free = Throttle(0, 0.25, lambda: now[0], lambda: cpu[0])
    free.add(1 << 40)
    assert free.rest() == 0


# --- readers ------------------------------------------------------------------------------------------------------------


class Sink:
    """The connection of a consumer that keeps what it is sent."""

    def __init__(self):
        self.text = b""

    async def send(self, span):
        self.text += os.pread(span.fd, span.nbytes, span.begin)


def test_a_consumer_gets_every_record_though_its_segment_is_swapped_just_then(data, monkeypatch):
    gone = set(expected(data))
    kept = {offset: line for offset, line in records(data).items() if offset not in gone}
    assert lay_out(data) > 3  # laid out: the first read meets the swap
    next_span = Range.next_span

    def swapped(selection):
        install(data)
        return next_span(selection)

    monkeypatch.setattr(Range, "next_span", swapped)
    settings = load({"KMQ_DATA": data, "KMQ_PIPES": data}, toml="")
    sink = Sink()

    async def consume():
        requests = Requests()
        service = Service(settings, None, None, None, requests)
        await Consumption(service, sink, Consume(TOPIC, raw=True)).run()
        service.close()

    asyncio.run(consume())
    assert {at: line for at, line in enumerate(sink.text.split(b"\n")[:-1]) if line} == kept
