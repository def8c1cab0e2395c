"""Compaction swaps sealed segments: whatever is killed between whichever two calls, and whoever reads meanwhile."""

import bisect
import json
import os
import pathlib
import random
import shutil

import pytest
from compacting import install
from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room, stored
from waiting import attempts, meanwhile

from kmq.errors import BusyError, ConfigError, CorruptError
from kmq.log import compaction, identity, index, reader, segment, topics
from kmq.log.compaction import Sealed
from kmq.log.damage import DamageError
from kmq.log.index import IndexWriter
from kmq.log.segment import COMPACT, Limits
from kmq.log.segment_reader import SegmentReader
from kmq.log.wal import Wal
from kmq.repair import heal, verify
from kmq.router.queues import Queues

COUNT, KEYS = 1200, 25
LIMITS = Limits(segment_bytes=6000)
CALLS = ("unlink", "rename", "fsync", "rmdir")  # of os: what the swap does to a directory


pytestmark = pytest.mark.usefixtures("small_blocks")


def start(data, high):
    queues = Queues(data, no_room, FakeLogger(), LIMITS)
    queues.recover(high)
    return queues


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A directory as a broker leaves it: topic users, to be compacted, of many segments; all of it in the WAL."""
    data = str(tmp_path_factory.mktemp("original"))
    identity.open_data(data)
    topics.declare(data, "users", 1, {"cleanup": COMPACT})
    rng = random.Random(1)
    lines = [b"users.%d|0|%d|%b" % (rng.randrange(KEYS), n, b"v" * rng.randrange(60)) for n in range(COUNT)]
    wal, queues = Wal(data, no_room, 1 << 20, LIMITS), start(data, 0)
    for at in range(0, COUNT, 50):
        made = block(lines[at : at + 50], at + 1)
        wal.append([(made.data, at + 1, made.count, FIRST_TS + at + 50)])
        wal.sync()
        queues.route([made])
    wal.close()
    queues.close()
    return data


@pytest.fixture
def data(original, tmp_path):
    return shutil.copytree(original, str(tmp_path / "data"), symlinks=True)


def records(data):
    """{offset: line} of what a reader is given, checked; its offsets follow one another."""
    log, offset, found = reader.partition(data, "users", 0), 0, {}
    while True:
        first, text = log.read(offset, 3000)
        assert first == offset
        if not text:
            return found
        for at, line in enumerate(text.split(b"\n")[:-1], first):
            if line:
                found[at] = line
        offset += text.count(b"\n")


def plan(data):
    """(sealed segments, {segment's first: offsets to go}, {offset: line} of what stays)."""
    before = records(data)
    sealed = compaction.sealed(data, "users", 0, compaction.synced_ends(data)["users", 0])
    last = {line.split(b"|")[2]: offset for offset, line in before.items()}
    replaced = [offset for offset, line in before.items() if last[line.split(b"|")[2]] > offset]
    gone = {}
    for each in sealed:
        low, high = bisect.bisect(replaced, each.first), bisect.bisect_left(replaced, each.end - 1)
        gone[each.first] = replaced[low:high]
    away = {offset for offsets in gone.values() for offset in offsets}
    return sealed, gone, {offset: line for offset, line in before.items() if offset not in away}


def lay_out(data):
    """Everything that can go, waiting for the owner; what has to stay, and what comes of each segment."""
    sealed, gone, kept = plan(data)
    with compaction.compactor(data) as where:
        for each in sealed:
            compaction.lay_out(data, each, gone[each.first], where)
    return sealed, kept


def findings(data):
    return [str(each) for each in verify.Verifier(data, is_live=False).findings()]


def state(queues):
    return queues.logs.states["users", 0]


def bytes_of(data):
    return sum(each.size for each in segment.survey(f"{data}/topics/users/0"))


# --- what is laid out ------------------------------------------------------------------------------------------------


def test_records_go_but_the_first_and_the_last_of_a_segment_never(data):
    (which, *_), _, _ = plan(data)
    before = records(data)
    with compaction.compactor(data) as where:
        saved = compaction.lay_out(data, which, range(which.first, which.end), where)
    with open(f"{which.outbox_path(data)}/log", "rb") as file:
        lines = file.read().split(b"\n")[:-1]
    assert len(lines) == which.end - which.first and saved > 4000
    assert {n: line for n, line in enumerate(lines, which.first) if line} == {
        n: before[n] for n in (which.first, which.end - 1)
    }
    assert records(data) == before  # nobody has installed it


def test_a_damaged_segment_is_not_laid_out(data):
    (which, *_), gone, _ = plan(data)
    with open(which.path(data), "r+b") as file:
        file.seek(3000)
        file.write(b"\xff")
    with compaction.compactor(data) as where, pytest.raises(DamageError):
        compaction.lay_out(data, which, gone[which.first], where)
    assert compaction.waiting(data) == [] and os.listdir(compaction.outbox(data)) == [".owner"]


def test_a_segment_that_does_not_reach_the_next_one_is_not_laid_out(data):
    (which, *_), gone, _ = plan(data)
    longer = Sealed("users", 0, which.first, which.end + 1)
    with compaction.compactor(data) as where, pytest.raises(CorruptError, match="the next segment begins with"):
        compaction.lay_out(data, longer, gone[which.first], where)


def test_what_a_dead_compactor_was_making_goes(data):
    left = f"{compaction.outbox(data)}/.new-of-one-who-was-killed"
    os.makedirs(f"{left}/half")
    with compaction.compactor(data):
        assert not os.path.exists(left) and compaction.waiting(data) == []


def test_two_compactors_of_a_directory_exclude_each_other(data):
    busy = pytest.raises(BusyError, match="compaction is held by pid=")
    with compaction.compactor(data), busy, compaction.compactor(data):
        pass


def test_what_else_lies_there_stops_nobody(data):
    with compaction.compactor(data):
        pathlib.Path(f"{compaction.outbox(data)}/.wanted").touch()  # a lock of earlier releases
        for name in ("notes", "users-0-1", "users-0-1-x", ".users-0-0-9"):
            os.mkdir(f"{compaction.outbox(data)}/{name}")
    assert compaction.waiting(data) == []


def test_a_compactor_that_fails_leaves_nothing(data):
    with pytest.raises(KeyError), compaction.compactor(data) as where:
        raise KeyError(where)
    assert os.listdir(compaction.outbox(data)) == [".owner"]


# --- installing ------------------------------------------------------------------------------------------------------


def test_what_is_installed_makes_the_log_shorter_and_a_start_finds_it_whole(data):
    before = bytes_of(data)
    _, kept = lay_out(data)
    install(data)
    assert records(data) == kept and findings(data) == [] and bytes_of(data) < 0.7 * before
    again = start(data, COUNT)
    assert (state(again).end_offset, state(again).last_seq, state(again).size) == (COUNT, COUNT, bytes_of(data))
    again.close()
    assert records(data) == kept and findings(data) == []


def test_the_router_installs_at_its_tick_and_checkpoints_at_once(data):
    queues = start(data, COUNT)
    _, kept = lay_out(data)
    queues.tick()
    queues.settle()
    assert compaction.waiting(data) == [] and records(data) == kept
    assert state(queues).size == bytes_of(data)
    again = start(data, COUNT)  # killed: the checkpoint alone says
    assert state(again).values() == state(queues).values() and "users" not in str(again.logs.unsynced)


def test_the_router_waits_with_a_sealed_segment_that_is_not_on_disk_until_it_is(data):
    queues = start(data, COUNT)
    lay_out(data)
    queues.route([block([b"users.x|0|0|%b" % (b"y" * 7000)] * 2, COUNT + 1)])
    assert queues.logs.log_of(queues.in_force.table[b"users"], 0).unsynced
    queues.tick()
    assert compaction.waiting(data)
    queues.settle()
    queues.tick()
    queues.settle()
    assert compaction.waiting(data) == []
    again = start(data, COUNT + 2)
    assert state(again).values() == state(queues).values()


def test_what_retention_or_a_rebuild_has_changed_meanwhile_is_discarded(data):
    sealed, _ = lay_out(data)
    other = Sealed("users", 0, sealed[1].first, sealed[1].end + 1)
    os.rename(sealed[1].outbox_path(data), other.outbox_path(data))
    queues = start(data, COUNT)
    state(queues).retire(1)
    untouched = pathlib.Path(sealed[1].path(data)).read_bytes()
    queues.tick()
    queues.settle()
    assert compaction.waiting(data) == []
    assert os.path.exists(sealed[0].path(data)) and pathlib.Path(sealed[1].path(data)).read_bytes() == untouched
    assert findings(data) == []


def test_a_topic_that_is_not_declared_so_is_never_touched(data):
    _, _ = lay_out(data)
    path = topics.toml_path(data, "users")
    text = pathlib.Path(path).read_text()
    pathlib.Path(path).write_text(text.replace('cleanup = "compact"\n', ""))
    before = records(data)
    start(data, COUNT).tick()
    assert records(data) == before and compaction.waiting(data) == [] and len(before) == COUNT


# --- crashes ---------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing after it happens."""


class Power:
    """Dies at the nth call that changes a directory: before it, or after it."""

    def __init__(self, patch, at):
        self.left = at
        for name in CALLS:
            patch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, call):
        def wrapped(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                raise Killed
            result = call(*args, **kwargs)
            return result

        return wrapped


@pytest.mark.parametrize("at", range(1, 14))
def test_a_kill_at_every_step_of_the_swap_loses_nothing_and_is_finished_later(data, monkeypatch, at):
    _, kept = lay_out(data)
    queues = start(data, COUNT)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        Power(patch, at)
        queues.tick()
    assert kept.items() <= records(data).items()  # readers, before anybody has started again
    queues = start(data, COUNT)
    assert (state(queues).end_offset, state(queues).last_seq) == (COUNT, COUNT)
    assert kept.items() <= records(data).items()
    queues.route([block([b"users.new|0|0|after"], COUNT + 1)])
    queues.tick()
    queues.settle()
    queues.close()
    assert compaction.waiting(data) == []
    after = records(data)
    assert {offset: line for offset, line in after.items() if offset < COUNT} == kept and COUNT in after
    write_end(data)
    assert findings(data) == []


def write_end(data):
    """The WAL has the message that was routed, too."""
    path = segment.listing(f"{data}/append")[-1][1]
    with open(path, "ab") as file:
        file.write(stored([b"users.new|0|0|after"], COUNT + 1)[0])
    fd = os.open(path, os.O_RDONLY)
    writer = IndexWriter(segment.index_path(path), no_room, by_seq=True)
    writer.resume(fd, os.path.getsize(path), segment.listing(f"{data}/append")[-1][0])
    os.close(fd)


def test_a_kill_before_the_index_is_renamed_is_healed_by_a_start_alone(data):
    (which, *_), _ = lay_out(data)
    os.unlink(segment.index_path(which.path(data)))
    os.rename(f"{which.outbox_path(data)}/log", which.path(data))
    start(data, COUNT)
    assert index.is_whole(which.path(data))
    install(data)
    assert findings(data) == []


# --- readers ---------------------------------------------------------------------------------------------------------


def test_readers_between_any_two_steps_of_the_swap_see_every_kept_record_once(data, monkeypatch):
    _, kept = lay_out(data)
    looked = []

    def look_first(call):
        def wrapped(*args, **kwargs):
            with monkeypatch.context() as inner:
                for name, real in calls.items():
                    inner.setattr(os, name, real)
                looked.append(len(records(data)))
                assert kept.items() <= records(data).items()
            return call(*args, **kwargs)

        return wrapped

    calls = {name: getattr(os, name) for name in CALLS}
    with monkeypatch.context() as patch:
        for name, real in calls.items():
            patch.setattr(os, name, look_first(real))
        install(data)
    assert looked[0] == COUNT and looked[-1] == len(kept) and len(set(looked)) > 5


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_swap_between_the_two_opens_of_a_reader_is_noticed(data, monkeypatch, steps):
    """The worst moment: the index is open, the log is not."""
    (which, *_), kept = lay_out(data)
    real, todo = os.open, [which]

    def swap_in_between(path, *args, **kwargs):
        if path == which.path(data) and todo:
            todo.pop()
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", real)
                Power(patch, steps)
                try:
                    compaction.install(data, which)
                except Killed:
                    pass
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", swap_in_between)
    assert kept.items() <= records(data).items() and not todo


def test_a_reader_that_holds_a_segment_reads_it_to_its_end(data):
    (which, *_), _ = lay_out(data)
    before = pathlib.Path(which.path(data)).read_bytes()
    with SegmentReader(which.path(data), which.first, False, True) as held:
        install(data)
        assert b"".join(checked.lines for checked in held.checked_lines(which.first)) == before


def test_readers_in_a_loop_while_segments_are_swapped_again_and_again(data):
    """Threads of the same process, in real time; a few seconds."""
    sealed, gone, kept = plan(data)
    rounds, swaps = [0, 0], 0
    originals = {each.first: pathlib.Path(each.path(data)).read_bytes() for each in sealed}

    def read(number):
        assert kept.items() <= records(data).items()
        rounds[number] += 1

    with meanwhile(lambda: read(0), lambda: read(1)) as failed:
        tries = attempts("8 swaps, and 4 rounds of both", lambda: (swaps, rounds), every_s=0)
        while (swaps < 8 or min(rounds) < 4) and not failed:
            next(tries)
            with compaction.compactor(data) as where:
                for each in sealed:
                    compaction.lay_out(data, each, gone[each.first], where)
            install(data)
            assert originals[sealed[0].first] != pathlib.Path(sealed[0].path(data)).read_bytes()
            swaps += 1


# --- what else reads the files ---------------------------------------------------------------------------------------


def test_lookups_by_seq_and_by_time_find_the_next_record_that_is_left(data):
    lay_out(data)
    install(data)
    kept = sorted(records(data))
    log = reader.partition(data, "users", 0)
    for offset in range(0, COUNT, 13):
        following = kept[bisect.bisect_left(kept, offset)]
        assert log.offset_of_seq(offset + 1) == following
        assert log.offset_of_time(FIRST_TS + offset + 1) == following


def test_an_index_is_made_of_a_log_with_long_runs_of_bare_newlines(tmp_path):
    path = str(tmp_path / segment.name(0))
    text = stored([b"t.k|0|0|a"])[0] + b"\n" * 5000 + stored([b"t.k|0|0|b"], 5002)[0]
    pathlib.Path(path).write_bytes(text)
    IndexWriter.complete(path, 0, no_room)
    assert index.is_whole(path)
    with SegmentReader(path, 0, False, True) as held:
        assert b"".join(checked.lines for checked in held.checked_lines(0)) == text
    (tmp_path / segment.name(5002)).touch()
    log = reader.LogReader(str(tmp_path), by_seq=False)
    assert log.read(3000)[0] == 3000 and log.offset_of_seq(2) == 5001


@pytest.mark.parametrize("lost", ["file", "end", "index"])
def test_a_lost_or_cut_compacted_segment_comes_back_from_the_wal_at_its_offsets(data, lost):
    before = records(data)
    _, kept = lay_out(data)
    install(data)
    start(data, COUNT).close()
    (_, _), (_, path), *_ = segment.listing(f"{data}/topics/users/0")
    if lost == "file":
        os.unlink(path)
    elif lost == "end":
        os.truncate(path, os.path.getsize(path) // 2)
    else:
        os.unlink(segment.index_path(path))
    queues = start(data, COUNT)
    assert state(queues).end_offset == COUNT
    queues.close()
    if lost == "index":
        heal.repair(data)
    after = records(data)
    assert kept.items() <= after.items() <= before.items() and findings(data) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_block_of_a_compacted_segment_is_healed_from_the_wal(data, seed):
    before = records(data)
    _, kept = lay_out(data)
    install(data)
    rng = random.Random(seed)
    _, path = rng.choice(segment.listing(f"{data}/topics/users/0")[:-1])
    at = rng.randrange(os.path.getsize(path) - 64)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\0" * 40)
    assert findings(data)
    done = heal.repair(data)
    assert not any(each.lost for each in done)
    after = records(data)
    assert kept.items() <= after.items() <= before.items() and findings(data) == []


def bare_at_the_end_of_a_block(data):
    """The first segment compacted so that a bare newline ends its first block; where the second begins."""
    (which, *_), _, _ = plan(data)
    with open(which.path(data), "rb") as file:
        sizes = [len(line) + 1 for line in file.read().split(b"\n")[:-1]]
    count = next(n for n in range(len(sizes)) if 1024 - 60 < sum(sizes[:n]) < 1024)  # a line has at most 120 bytes
    with compaction.compactor(data) as where:
        compaction.lay_out(data, which, range(which.first + count, which.first + count + 60), where)
    install(data)
    start(data, COUNT).close()
    position = index.read_entries(segment.index_path(which.path(data)), 1 << 62)[1].position
    assert pathlib.Path(which.path(data)).read_bytes()[position - 2 : position + 1] == b"\n\n\n"
    return which, position


def test_a_block_behind_records_that_compaction_took_is_healed_at_its_offsets(data):
    """The WAL has those as well, with seqs between the last record before the damage and the first one of it."""
    before = records(data)
    which, position = bare_at_the_end_of_a_block(data)
    kept = records(data)
    with open(which.path(data), "r+b") as file:
        file.seek(position + 200)
        file.write(b"\0" * 20)
    assert findings(data)
    assert not any(each.lost for each in heal.repair(data))
    assert kept.items() <= records(data).items() <= before.items() and findings(data) == []


def test_compacted_records_are_no_loss_when_a_flipped_bit_is_healed_without_the_wal(data):
    which, position = bare_at_the_end_of_a_block(data)
    kept = records(data)
    for _, path in segment.listing(f"{data}/append")[:-1]:
        os.unlink(path)
        os.unlink(segment.index_path(path))
    text = bytearray(pathlib.Path(which.path(data)).read_bytes())
    text[position + 200] ^= 4
    pathlib.Path(which.path(data)).write_bytes(text)
    assert findings(data)
    assert [each.lost for each in heal.repair(data)] == [[]]
    assert records(data) == kept


# --- declaring -------------------------------------------------------------------------------------------------------


def test_cleanup_is_declared_kept_and_checked(data):
    with pytest.raises(ConfigError, match="cleanup = 'compacted': must be delete or compact"):
        topics.declare(data, "other", 1, {"cleanup": "compacted"})
    assert topics.is_compacted(data, "users")
    topics.declare(data, "plain", 1)
    assert not topics.is_compacted(data, "plain")
    assert start(data, COUNT).in_force.limits_of("users").cleanup == COMPACT


def test_retention_takes_from_a_compacted_topic_only_by_limits_of_its_own():
    few = Limits(retention_bytes=1, retention_age=1.0)
    assert few.with_changes({"cleanup": "compact"}).retention_bytes == 0
    assert few.with_changes({"cleanup": "compact"}).retention_age == float("inf")
    own = few.with_changes({"cleanup": "compact", "retention_bytes": "1 MiB"})
    assert (own.retention_bytes, own.retention_age) == (1 << 20, float("inf"))
    assert few.with_changes({"cleanup": "delete"}).retention_bytes == 1


def test_a_repaired_declaration_is_still_compacted(data):
    path = pathlib.Path(topics.toml_path(data, "users"))
    path.write_text(path.read_text().replace("partitions = 1", "partitions = \x00"))
    os.unlink(f"{data}/router.ckpt")
    heal.repair(data)
    assert topics.is_compacted(data, "users")


def test_an_unreadable_checkpoint_means_that_nothing_may_be_compacted(data):
    pathlib.Path(f"{data}/router.ckpt").write_bytes(b"1\n")
    assert compaction.synced_ends(data) == {} and json.dumps(findings(data))
