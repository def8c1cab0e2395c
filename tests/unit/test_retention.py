"""What retention takes is gone for good, what anybody needs stays, and what is lost beyond that is told, not invented."""

import errno
import os
import pathlib
import shutil
import time

import pytest
from fake_logger import FakeLogger
from made_up import no_room, stored, write_wal

from kmq import files
from kmq.framing.dedupe import DedupeTable
from kmq.links.layout import Block
from kmq.log import checkpoint, dedupe_file, dropped, index, partition, remnant, segment, topics, wal
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.message import record
from kmq.repair import verify
from kmq.router import queues, recovery
from kmq.router.queues import Queues

LINES = [b"t.k|1|%d|%b" % (n, b"x" * (n % 60)) for n in range(1, 401)]
KEEP = Limits(segment_bytes=1000, retention_bytes=4500)
NEVER = Limits(segment_bytes=1000)


BLOCK_BYTES = 256  # of the index, see small_blocks
pytestmark = pytest.mark.usefixtures("small_blocks")


def open_queues(data, high=400, limits=KEEP, log=None, wait_for_room=no_room, **given):
    made = Queues(data, wait_for_room, log or FakeLogger(), limits, **given)
    made.recover(high)
    return made


def route(made, lines, first_seq):
    for at in range(0, len(lines), 9):
        text = b"".join(stored(lines[at : at + 9], first_seq + at))
        made.route([Block(text, 0, [len(text), first_seq + at, len(lines[at : at + 9]), 0, 1, 0, 0])])


def settle(made):
    """A tick, and the checkpoint that it began."""
    made.tick()
    made.settle()


def segments_of(data, topic="t", number=0):
    return segment.survey(partition.directory_of(data, topic, number))


def content(data, topic="t", number=0):
    return b"".join(pathlib.Path(each.path).read_bytes() for each in segments_of(data, topic, number))


def retained(data, log=None):
    """400 messages of one topic, routed and retained; the WAL has them all."""
    write_wal(data, LINES).close()
    made = open_queues(data, 0, KEEP, log)
    route(made, LINES, 1)
    settle(made)
    return made


def test_whole_segments_go_oldest_first_and_offsets_stay(data):
    heard = FakeLogger()
    made = retained(data, heard)
    found = segments_of(data)
    first = found[0].first
    assert first > 0 and 3500 < sum(each.size for each in found) <= 4500
    assert content(data) == b"".join(stored(LINES)[first:])
    assert partition.end_offset(data, "t", 0) == (400, len(content(data)))
    told = heard.of("segment_deleted")
    assert [each["first_offset"] for each in told] == sorted(each["first_offset"] for each in told) and told
    assert told[-1]["first_offset"] < first
    names = os.listdir(partition.directory_of(data, "t", 0))
    assert len(names) == 2 * len(found), "an index was left behind"
    made.close()
    heard = FakeLogger()
    open_queues(data, log=heard).close()
    assert not heard.events and segments_of(data)[0].first == first


def test_a_tick_deletes_only_some_of_many_segments_that_are_due_at_once(data, monkeypatch):
    monkeypatch.setattr(queues, "AT_ONCE", 3)
    write_wal(data, LINES).close()
    heard = FakeLogger()
    made = open_queues(data, 0, KEEP, heard)
    route(made, LINES, 1)
    counts = []
    while not counts or counts[-1]:
        already = len(heard.of("segment_deleted"))
        settle(made)
        counts.append(len(heard.of("segment_deleted")) - already)
    assert counts[:3] == [3, 3, 3] and max(counts) == 3
    assert 3500 < sum(each.size for each in segments_of(data)) <= 4500
    made.close()


def test_a_tick_seals_only_some_of_many_logs_that_are_over_their_limits_at_once(data, monkeypatch):
    monkeypatch.setattr(queues, "AT_ONCE", 4)
    lines = [b"t%d.k|1||x" % (n % 10) for n in range(30)]
    write_wal(data, lines).close()
    made = open_queues(data, 0, NEVER)
    route(made, lines, 1)
    made.use_limits(Limits(segment_bytes=10))
    sealed = []
    for _ in range(3):
        made.retention.roll_over_if_due()
        sealed.append(sum(len(state.sealed) for state in made.logs.states.values()))
    assert sealed == [4, 8, 10]
    made.close()


def test_the_wal_deletes_only_some_of_many_segments_that_are_due_at_once(data):
    log = Wal(data, no_room, 1 << 20, Limits(segment_bytes=100))
    for at, line in enumerate(stored(LINES), start=1):
        log.append([(line, at, 1, at)])
    log.limits = Limits(segment_bytes=100, retention_bytes=1000)
    counts = []
    while not counts or counts[-1]:
        first = log_segments(data)[0].first
        counts.append(len(log.retain(lambda: 400, time.time())))
        assert not counts[-1] or log_segments(data)[0].first > first
    assert max(counts) == counts[0] == wal.RETIRED_AT_ONCE < sum(counts)
    assert sum(each.size for each in log_segments(data)) <= 1000
    log.close()


def log_segments(data):
    return segment.survey(f"{data}/append")


def test_the_checkpoint_says_so_before_they_are_deleted(data, monkeypatch):
    before = []

    def remove(segments):
        before.append((checkpoint.load(data)[1]["t", 0].start, segments[-1].first))

    write_wal(data, LINES).close()
    made = open_queues(data, 0)
    route(made, LINES, 1)
    monkeypatch.setattr(segment, "remove", remove)
    settle(made)
    [(start, last_gone)] = before
    assert last_gone < start
    # Killed here: the next start deletes them.
    monkeypatch.undo()
    assert segments_of(data)[0].first == 0
    made = open_queues(data)
    assert segments_of(data)[0].first == start and made.logs.states["t", 0].values()[0] == 400
    made.close()


def test_nothing_happens_where_nothing_is_due(data):
    made = retained(data)
    made.checkpoints.started_at = 1 << 62  # not due by time
    before = os.stat(f"{data}/router.ckpt").st_mtime_ns
    for _ in range(3):
        settle(made)
    assert os.stat(f"{data}/router.ckpt").st_mtime_ns == before
    made.close()


def test_the_active_segment_stays_while_it_is_within_its_limits(data):
    write_wal(data, LINES[:5]).close()
    made = open_queues(data, 0, Limits(segment_bytes=1 << 20, retention_bytes=1, retention_age=60))
    route(made, LINES[:5], 1)
    settle(made)
    made.close()
    assert content(data) == b"".join(stored(LINES[:5]))


def test_an_active_segment_larger_than_its_log_may_be_goes_while_the_disk_is_full(data):
    write_wal(data, LINES[:40]).close()
    lacks_room = []
    made = open_queues(data, 0, Limits(retention_bytes=150), lacks_room=lambda: bool(lacks_room))
    route(made, LINES[:40], 1)
    settle(made)
    assert content(data) == b"".join(stored(LINES[:40]))
    lacks_room.append(True)
    settle(made)
    assert content(data) == stored(LINES)[39] and not damage_of_queues(data)
    route(made, LINES[40:42], 41)
    settle(made)
    assert content(data).endswith(b"".join(stored(LINES)[40:42])), "what is small stays, full or not"
    made.close()


def damage_of_queues(data):
    found = verify.Verifier(data, is_live=False).findings()
    return [each for each in found if each.is_damage and each.path.startswith("topics/")]


IDLE = {"its size": (Limits(300, retention_bytes=1), 0.0), "its age": (Limits(1 << 20, retention_age=60), 3600.0)}


def idle(data, why, log=None):
    """40 messages of one topic under wide limits; the next start has narrow ones, and nothing comes."""
    write_wal(data, LINES[:40]).close()
    wide = open_queues(data, 0, Limits())
    route(wide, LINES[:40], 1)
    wide.close()
    limits, later_s = IDLE[why]
    return open_queues(data, 40, limits, log, now_s=lambda: time.time() + later_s)


@pytest.mark.parametrize("why", IDLE)
def test_of_a_log_over_its_limits_only_the_last_record_stays_though_nothing_comes(data, why):
    heard = FakeLogger()
    made = idle(data, why, heard)
    settle(made)
    assert [(each.first, each.size > 0) for each in segments_of(data)] == [(39, True), (40, False)]
    assert content(data) == stored(LINES)[39]
    assert [each["bytes"] for each in heard.of("segment_deleted")] == [sum(map(len, stored(LINES[:40])))]
    assert not damage_of_queues(data)
    before = os.stat(f"{data}/router.ckpt").st_mtime_ns
    made.retention.rolled_at = made.checkpoints.started_at = -(1 << 62)
    settle(made)
    assert os.stat(f"{data}/router.ckpt").st_mtime_ns == before, "what is as small as it can be is left alone"
    made.close()
    heard = FakeLogger()
    made = open_queues(data, 40, Limits(), heard)
    route(made, LINES[40:50], 41)
    made.close()
    assert content(data) == b"".join(stored(LINES)[39:50]) and not heard.events
    assert partition.end_offset(data, "t", 0)[0] == 50
    assert len(os.listdir(partition.directory_of(data, "t", 0))) == 4, "a log and an index, twice"


@pytest.mark.parametrize("step", ["laid out", "checkpoint", "removed", "named"])
@pytest.mark.parametrize("why", IDLE)
def test_a_kill_while_the_last_record_is_kept_leaves_every_record_at_its_offset_once(data, why, step, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*_, **__):
        raise Killed

    made = idle(data, why)
    monkeypatch.setattr(made.checkpoints.writer, "start", made.checkpoints.writer.run)  # here, not in a thread
    where = {
        "laid out": (made.checkpoints.writer, "start"),
        "checkpoint": (segment, "remove"),
        "removed": (remnant, "settle"),
        "named": (remnant, "sync_directory"),
    }
    monkeypatch.setattr(*where[step], kill)
    with pytest.raises(Killed):
        made.tick()
    monkeypatch.undo()
    heard = FakeLogger()
    again = open_queues(data, 40, Limits(), heard)
    assert not heard.of("unrecoverable") and not heard.of("queue_short")
    route(again, LINES[40:50], 41)
    again.close()
    first = segments_of(data)[0].first
    assert content(data) == b"".join(stored(LINES)[first:50]) and first in (0, 39)
    assert partition.end_offset(data, "t", 0)[0] == 50
    assert not damage_of_queues(data)


def test_a_log_that_has_no_room_to_be_sealed_goes_on_as_it_is_and_is_sealed_later(data, monkeypatch):
    heard = FakeLogger()
    made = idle(data, "its size", heard)

    def full(path, *args):
        if args == ("rb",):
            return open(path, *args)
        raise OSError(errno.ENOSPC, "No space left on device", path)

    for module, name in ((segment, "AppendFile"), (index, "AppendFile"), (files.os, "symlink"), (remnant, "open")):
        before = made.logs.states["t", 0].values()
        with monkeypatch.context() as patched:
            patched.setattr(module, name, full, raising=False)
            settle(made)
            assert made.logs.states["t", 0].values() == before and content(data) == b"".join(stored(LINES[:40])), name
    told = heard.of("roll_postponed")
    assert [each["queues"] for each in told] == [1], "once"
    settle(made)
    assert content(data) == stored(LINES)[39]
    made.close()


@pytest.mark.parametrize("names", [(b"t", b"u"), (b"u", b"t"), (b"new",)], ids=b"+".join)
def test_retention_goes_on_while_an_append_waits_and_a_kill_then_costs_nothing(data, names, monkeypatch, tmp_path):
    lines = LINES[:300] + [b"%b|||%d" % (name, n) for n in range(40) for name in names]
    write_wal(data, lines).close()
    made = open_queues(data, 0, NEVER)
    route(made, lines[:300], 1)
    made.close()
    image, real, refusals = str(tmp_path / "image"), files.write_some, iter([False, True])

    def full_once(fd, buffers):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/topics/" in path and path.endswith(".log") and next(refusals, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers)

    def waited(path):
        made.settle()
        assert segments_of(data)[0].first > 0, "retention has made room"
        shutil.copytree(data, image, symlinks=True)

    made = open_queues(data, 300, KEEP, wait_for_room=waited)
    assert segments_of(data)[0].first == 0
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_some", full_once)
        route(made, lines[300:], 301)
    made.close()
    made = open_queues(image, len(lines), KEEP)
    made.close()
    for name in map(bytes.decode, names):
        assert content(image, name) == content(data, name) and content(data, name).endswith(b"|39\n")
    assert not damage_of_queues(image) and not damage_of_queues(data)


def test_each_topic_has_its_own_limits(data):
    lines = [b"%b|||%d" % (name, n) for n in range(300) for name in (b"a", b"b")]
    write_wal(data, lines).close()
    topics.declare(data, "a", 1, {"retention_bytes": "none"})
    made = open_queues(data, 0)
    route(made, lines, 1)
    settle(made)
    assert segments_of(data, "a")[0].first == 0 and segments_of(data, "b")[0].first > 0
    made.close()


@pytest.mark.parametrize("lost", ["directory", "last", "first", "middle", "half of the last", "all but the first"])
@pytest.mark.parametrize("wal_first", [1, 131, 391])
def test_records_lost_after_retention_are_filled_from_the_wal_and_the_rest_reported(data, lost, wal_first):
    retained(data).close()
    before = {each.first: pathlib.Path(each.path).read_bytes() for each in segments_of(data)}
    start, whole = min(before), b"".join(before.values())
    cut_wal(data, wal_first)
    paths = [each.path for each in segments_of(data)]
    if lost == "directory":
        shutil.rmtree(f"{data}/topics/t")
    elif lost == "half of the last":
        os.truncate(paths[-1], os.path.getsize(paths[-1]) // 2)
    else:
        chosen = {"last": paths[-1:], "first": paths[:1], "middle": paths[1:2], "all but the first": paths[1:]}[lost]
        for path in chosen:
            os.unlink(path)
    heard = FakeLogger()
    made = open_queues(data, log=heard)
    records = {}
    for each in segments_of(data):
        with open(each.path, "rb") as file:
            records |= dict(enumerate(file, each.first))
    # Every record that is there stands at its own offset, and those that are not there are told.
    expected = dict(enumerate(stored(LINES)))
    assert all(expected[offset] == line for offset, line in records.items())
    told = {o for each in heard.of("unrecoverable") for o in range(each["first_offset"], each["last_offset"] + 1)}
    assert {offset for offset in range(start, 400) if offset not in records} == told
    assert all(offset < wal_first - 1 for offset in told)
    for each in heard.of("unrecoverable"):
        assert (each["first_seq"], each["last_seq"]) >= (1, each["last_offset"] + 1)
    if wal_first == 1:
        assert not told and content(data).endswith(whole)
    # And it goes on with the right offset.
    route(made, [b"t|||more"], 401)
    made.close()
    assert partition.end_offset(data, "t", 0)[0] == 401 and content(data).endswith(stored([b"t|||more"], 401)[0])
    heard = FakeLogger()
    open_queues(data, 401, log=heard).close()
    assert not heard.of("unrecoverable") and not heard.of("queue_short")


def cut_wal(data, first):
    """Leave the WAL with what comes from seq `first` on, as its retention does."""
    log = Wal(data, no_room, 1 << 20)
    text = b"".join(log_lines(data, first))
    log.close()
    for name in os.listdir(f"{data}/append"):
        os.unlink(f"{data}/append/{name}")
    pathlib.Path(f"{data}/append/{segment.name(first)}").write_bytes(text)
    log = Wal(data, no_room, 1 << 20)
    assert log.last_seq == 400
    log.close()


def log_lines(data, first):
    with open(f"{data}/append.log", "rb") as file:
        return [line for line in file if record.seq_of(line) >= first]


def test_a_lost_checkpoint_does_not_number_anew_what_retention_left(data):
    retained(data).close()
    before = content(data)
    cut_wal(data, 300)
    os.unlink(f"{data}/router.ckpt")
    heard = FakeLogger()
    made = open_queues(data, log=heard)
    assert content(data) == before and not heard.of("unrecoverable")
    made.close()


def test_without_checkpoint_and_queue_what_the_wal_no_longer_has_is_told(data):
    retained(data).close()
    cut_wal(data, 300)
    os.unlink(f"{data}/router.ckpt")
    shutil.rmtree(f"{data}/topics/t")
    heard = FakeLogger()
    open_queues(data, 400, NEVER, heard).close()
    assert [(each["first_seq"], each["last_seq"]) for each in heard.of("unrecoverable")] == [(1, 299)]
    assert content(data) == b"".join(stored(LINES)[299:])


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_topic_declared_midway_keeps_its_seq_when_its_directory_is_lost(data, partitions):
    lines = [b"a.b.k%d|||%d" % (n % 7, n) for n in range(300)]
    write_wal(data, lines).close()
    made = open_queues(data, 0, NEVER)
    route(made, lines[:100], 1)
    topics.declare(data, "a.b", partitions)
    made.adopt_declarations()
    route(made, lines[100:], 101)
    dropped.append(data, "durable", 301, 301, no_room)
    made.close()
    before = [content(data, "a.b", number) for number in range(partitions)]
    assert all(before)
    shutil.rmtree(f"{data}/topics/a.b")
    open_queues(data, 300, NEVER).close()
    assert topics.load(data, "a.b") == (partitions, 101)
    assert [content(data, "a.b", number) for number in range(partitions)] == before
    assert content(data, "a") == b"".join(stored(lines[:100]))


@pytest.mark.parametrize(
    ("router", "table", "free"), [(None, None, 0), (50, None, 0), (50, 40, 40), (50, 60, 50), (None, 60, 0)]
)
def test_the_wal_is_free_up_to_what_both_checkpoints_have_passed(data, router, table, free):
    if router is not None:
        pathlib.Path(f"{data}/router.ckpt").write_bytes(checkpoint.text(router, {}, []))
    if table is not None:
        pathlib.Path(dedupe_file.path(data)).write_bytes(b"".join(DedupeTable(1, 1, 1, 1, 1).snapshot(table).encode()))
    assert checkpoint.wal_is_free_up_to(data) == free


def test_under_a_lax_fsync_the_checkpoint_is_never_ahead_of_the_wal_on_disk(data, monkeypatch):
    write_wal(data, LINES).close()
    synced, fsync = [], os.fsync

    def note(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    made = Queues(data, no_room, FakeLogger(), NEVER, wal_is_synced=False)
    made.recover(400)
    monkeypatch.setattr(os, "fsync", note)
    made.close()
    log, saved = f"{data}/append/{segment.name(1)}", f"{data}/router.ckpt.new"
    assert log in synced and synced.index(log) < synced.index(saved)


def test_a_checkpoint_is_due_by_bytes_at_every_turn_not_once_a_second(data, monkeypatch):
    monkeypatch.setattr(recovery, "CHECKPOINT_BYTES", 2000)
    write_wal(data, LINES).close()
    made = open_queues(data, 0, NEVER)
    route(made, LINES[:200], 1)  # and no tick
    made.settle()
    assert checkpoint.routed_seq(data) > 9
    made.close()


def test_a_start_that_reads_all_again_because_of_kills_soon_writes_a_checkpoint(data, monkeypatch):
    write_wal(data, LINES).close()
    open_queues(data, len(LINES), NEVER)  # and is killed
    monkeypatch.setattr(recovery, "CHECKPOINT_BYTES", 2000)
    made = open_queues(data, len(LINES), NEVER)
    made.tick()
    made.settle()
    assert checkpoint.routed_seq(data) == len(LINES)
    made.close()


def test_a_checkpoint_that_waits_for_room_waits_only(data, monkeypatch):
    waits, real, refusals = [], checkpoint.replace_file, iter([True])
    made = Queues(data, waits.append, FakeLogger(), NEVER)
    made.recover(0)
    # it changes logs, which belong to another thread
    monkeypatch.setattr(made.retention, "make_room", lambda: waits.append("made room"))

    def full_once(path, content):
        if path.endswith("router.ckpt") and next(refusals, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(checkpoint, "replace_file", full_once)
    made.checkpoints.start()
    made.settle()
    assert waits == [f"{data}/router.ckpt"] and checkpoint.load(data)[0] == 0


def test_a_start_gives_no_index_to_segments_that_have_changed_places(data):
    """They have as many records, and the WAL has these no more: only the seqs of their neighbours say it."""
    lines = [b"other|1|%d|x" % n for n in range(100)] + [b"t.k|1||%040d" % n for n in range(300)]
    log = Wal(data, no_room, 1 << 20, Limits(segment_bytes=100))
    for at, line in enumerate(stored(lines), start=1):
        log.append([(line, at, 1, at)])
    made = open_queues(data, 0, NEVER)
    route(made, lines, 1)
    made.close()
    log.limits = Limits(segment_bytes=100, retention_bytes=1000)
    while log.retain(lambda: 400, time.time()):
        pass
    log.close()
    _, first, second, *_ = segments_of(data)
    bodies = [pathlib.Path(each.path).read_bytes() for each in (first, second)]
    assert bodies[0].count(b"\n") == bodies[1].count(b"\n")
    for each, body in zip((first, second), reversed(bodies), strict=True):
        pathlib.Path(each.path).write_bytes(body)
        os.unlink(segment.index_path(each.path))
    heard = FakeLogger()
    open_queues(data, 400, NEVER, heard).close()
    assert len(heard.of("damaged")) == 2
    assert not any(os.path.exists(segment.index_path(each.path)) for each in (first, second))


@pytest.mark.parametrize("where", ["queue", "WAL"])
def test_a_start_gives_no_index_to_a_segment_whose_other_copy_has_other_records(data, where):
    """Of another broker, say: as many records with the same seqs."""
    lines = [b"t.k|1||%040d" % n for n in range(100)]
    log = Wal(data, no_room, 1 << 20, NEVER)
    for at, line in enumerate(stored(lines), start=1):
        log.append([(line, at, 1, at)])
    log.close()
    made = open_queues(data, 0, NEVER)
    route(made, lines, 1)
    made.close()
    part = pathlib.Path((segments_of if where == "queue" else log_segments)(data)[1].path)
    part.write_bytes(part.read_bytes().replace(b"|0000", b"|9999"))
    os.unlink(segment.index_path(str(part)))
    if where == "queue":
        heard = FakeLogger()
        open_queues(data, 100, NEVER, heard).close()
        assert len(heard.of("damaged")) == 1
    else:
        log = Wal(data, no_room, 1 << 20, NEVER)
        assert len(log.misplaced) == 1 and not log.restored
        log.close()
    assert not os.path.exists(segment.index_path(str(part)))
