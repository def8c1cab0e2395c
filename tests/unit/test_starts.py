"""The start of a partition, moved by a record: what lies before it is gone for every reader, and no crash or rebuild
brings it back. docs/decisions/starts.md"""

import errno
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room, stored

from kmq.log import checkpoint, identity, reader, remnant, segment, topic_changes
from kmq.log.index import IndexWriter
from kmq.log.partition import PartitionLog
from kmq.log.segment import Limits
from kmq.log.topic_changes import TopicChange
from kmq.log.wal import Wal
from kmq.message import record
from kmq.repair import heal, verify
from kmq.router import queues, recovery
from kmq.router.queues import Queues, Retention
from kmq.router.topic_changes import TopicChanges

BLOCK_BYTES = 128  # of the index
SMALL = Limits(segment_bytes=600)
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def data(tmp_path):
    identity.open_data(str(tmp_path / "data"))
    text = identity.format_text(1, 1)
    (tmp_path / "data/format").write_text(f"{text}\n")
    return str(tmp_path / "data")


def lines(count, since=0, topic=b"t"):
    return [b"%b.k|1|%d|%b" % (topic, n, b"x" * (n % 40)) for n in range(since, since + count)]


def start(offset, incarnation=1, number=0):
    """The record, as sent, by which partition `number` of `t` begins with `offset`."""
    change = TopicChange(topic_changes.START, "t", incarnation, {str(number): str(offset)}, f"{offset}-1")
    return topic_changes.encode(change, b"1.000000")


class Router:
    """A data directory whose WAL has these lines, as sent, and its router."""

    def __init__(self, data, sent, limits=SMALL):
        self.data, self.sent, self.limits, self.log = data, sent, limits, FakeLogger()
        wal = Wal(data, no_room, 1 << 20, SMALL)
        for at in range(wal.last_seq, len(sent)):
            [line] = stored(sent[at : at + 1], at + 1)
            wal.append([(line, at + 1, 1, FIRST_TS + at + 1)])
        wal.sync()
        wal.close()

    def up(self, high=0, wait=no_room, **given):
        """Recover up to a seq, as if the WAL ended there for now."""
        self.queues = Queues(self.data, wait, self.log, self.limits, are_recorded=True, **given)
        self.queues.recover(high)
        return self

    def route(self, first, last):
        """Route the records first…last as a router gets them: of a change each in a block of its own."""
        at = first
        while at <= last:
            end = at + 1
            while not is_start(self.sent[at - 1]) and end <= last and end < at + 6 and not is_start(self.sent[end - 1]):
                end += 1
            self.queues.route([block(self.sent[at - 1 : end - 1], at)])
            at = end
        return self

    def tick(self):
        self.queues.tick()
        self.queues.settle()

    def down(self):
        self.queues.close()
        return self

    def again(self, **given):
        """Start on what there is, and stop."""
        self.log = FakeLogger()
        return self.up(len(self.sent), **given).down()


def is_start(line):
    return line.startswith(topic_changes.START_KEY)


def files(data, topic="t"):
    where = Path(data, f"topics/{topic}/0")
    return {path.name: path.read_bytes() for path in where.iterdir()}


def content(data, topic="t"):
    return b"".join(text for name, text in sorted(files(data, topic).items()) if name.endswith(".log"))


def texts(sent, first=0):
    """What the queue of `t` has of the lines `sent`, from offset `first` on."""
    numbered = stored(sent)
    return [line for line, asked in zip(numbered, sent, strict=True) if not is_start(asked)][first:]


def assert_whole(data, sent, first):
    """The queue begins with this offset, for readers from any offset, with an index that verify accepts."""
    wanted = texts(sent, first)
    assert content(data) == b"".join(wanted)
    log = reader.partition(data, "t", 0)
    assert (log.first_offset, log.end_offset()) == (first, first + len(wanted))
    for offset in (0, first, first + 1, first + len(wanted) // 2, first + len(wanted) - 1):
        found = b"".join(text for _, text in reader.partition(data, "t", 0).chunks(offset))
        assert found == b"".join(wanted[max(0, offset - first) :]), offset
    names = files(data)
    assert all(name[-4:] in (".log", ".idx") for name in names) and len(names) == 2 * len(log.segments())
    assert list(verify.Verifier(data, is_live=False).findings()) == []


def rebuilt(router, *gone):
    """A copy of the directory without these, after a start."""
    again = f"{router.data}-again"
    shutil.rmtree(again, ignore_errors=True)
    shutil.copytree(router.data, again, symlinks=True)
    for name in gone:
        path = Path(again, name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    Path(again, "topics").mkdir(exist_ok=True)
    Router(again, router.sent, router.limits).again()
    return again


# --- what a start deletes --------------------------------------------------------------------------------------------


def test_a_log_begins_with_any_offset_that_is_asked_for_and_everybody_sees_the_same(tmp_path):
    for offset in (0, 1, 16, 17, 18, 28, 33, 45, 58, 59, 60, 61):  # 17, 29, 39 and 55 begin segments
        data = str(tmp_path / f"data{offset}")
        identity.open_data(data)
        Path(data, "format").write_text(f"{identity.format_text(1, 1)}\n")
        sent = [*lines(60), start(offset), *lines(30, 60)]
        router = Router(data, sent).up().route(1, 91).down()
        first = min(offset, 60)
        assert_whole(data, sent, first)
        router.again()
        assert not router.log.events, "a start has nothing to mend"
        before = files(data)
        for gone in ((), ("topics/t/0",), ("router.ckpt",), ("topics", "router.ckpt")):
            assert files(rebuilt(router, *gone)) == before, (offset, gone)
        shutil.rmtree(data)


def test_an_empty_log_goes_on_where_it_ended_without_a_checkpoint_too(data):
    sent = [*lines(50), start(50)]
    router = Router(data, sent).up().route(1, 51).down()
    assert_whole(data, sent, 50)
    assert [*files(data)] and checkpoint.load(data)[1]["t", 0].values() == (50, 50, 0, 50)
    for gone in ((), ("router.ckpt",), ("topics/t/0",), ("topics/t/0", "router.ckpt")):
        again = rebuilt(router, *gone)
        more = [*sent, *lines(20, 50)]
        Router(again, more).up(51).route(52, 71).down()
        assert_whole(again, more, 50)


def test_records_behind_an_empty_start_come_back_with_their_offsets_whatever_is_lost(data):
    sent = [*lines(50), start(50), *lines(2, 50)]
    Router(data, sent).up().route(1, 53).down()
    path = Path(reader.partition(data, "t", 0).segments()[0][1])
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], b"\0" * 300):
        path.write_bytes(damaged)
        Router(data, sent).again()
        assert_whole(data, sent, 50)
    for mend in ("router", "repair", "repair without a checkpoint"):
        path.write_bytes(b"?" + whole[1:])
        if mend == "router":
            router = Router(data, sent).up(53)
            router.queues.logs.use(router.queues.logs.log_of(router.queues.in_force.table[b"t"], 0))
            assert router.log.of("queue_healed")
            router.down()
        else:
            if mend != "repair":
                os.unlink(f"{data}/router.ckpt")
            heal.repair(data)
        assert_whole(data, sent, 50)


def test_a_repair_brings_nothing_back_that_lies_before_the_start(data):
    for offset, more in ((20, 20), (60, 0), (60, 20)):
        shutil.rmtree(f"{data}/topics")
        Path(data, "topics").mkdir()
        sent = [*lines(60), start(offset), *lines(more, 60)]
        for path in (*Path(data, "append").iterdir(), *Path(data).glob("*.ckpt"), *Path(data).glob("*.log")):
            path.unlink()
        Router(data, sent).up().route(1, len(sent)).down()
        before = files(data)
        for gone in ([], ["router.ckpt"]):
            for name in gone:
                os.unlink(f"{data}/{name}")
            heal.repair(data)
            assert files(data) == before, (offset, gone)


@pytest.mark.parametrize("gone", ["", "index", "router.ckpt"], ids=["whole", "index", "checkpoint"])
@pytest.mark.parametrize("offset", [60, 55], ids=["end", "segment"])
def test_a_repair_behind_a_start_writes_what_the_wal_has_or_nothing(tmp_path, data, offset, gone):
    """The WAL has lost its front, but has records before the start. The last checkpoint was that of the start."""
    sent = [*lines(60), start(offset), *lines(4, 60)]
    router = Router(data, sent).up().route(1, 61)
    router.queues.settle()
    router.route(62, 65).queues.logs.note_open_blocks()
    here = str(tmp_path / "here")
    shutil.copytree(data, here, symlinks=True)
    router.down()
    wal = [path for _, path in reader.wal(here).segments()]
    for path in [path for path in wal if int(os.path.basename(path)[:20]) < 40]:
        segment.remove([segment.Segment(0, path, 0)])
    [(first, path)] = reader.partition(here, "t", 0).segments()
    whole = Path(path).read_bytes()
    assert first == offset and whole == b"".join(texts(sent, offset))
    Path(path).write_bytes(b"?" + whole[1:] if gone == "index" else b"?" * len(whole))
    if gone:
        os.unlink(segment.index_path(path) if gone == "index" else f"{here}/{gone}")
    healed = heal.repair(here)
    if (
        gone == "router.ckpt" and offset == 55
    ):  # the record of the start does not say which of its records came before it
        assert [each.what for each in healed if each.path.startswith("topics/t/")] == [
            "not healed: neither router.ckpt nor a start says which record of the WAL is its first"
        ]
        assert Path(path).read_bytes() == b"?" * len(whole)
    else:
        assert Path(path).read_bytes() == whole


def test_a_record_is_for_one_life_of_its_topic_and_for_partitions_that_it_has(data):
    delete = topic_changes.encode(TopicChange(topic_changes.DELETE, "t", 1, {}, "d-1"), b"1.000000")
    bad = [
        start(9, number=1),
        start(3, incarnation=7),
        start(5).replace(b"0=5", b"0=x"),
        start(5).replace(b"t ", b"u "),
    ]
    sent = [*lines(10), *bad]
    router = Router(data, sent).up().route(1, 14).down()
    assert len(router.log.of("request_refused")) == 4
    assert content(data) == b"".join(texts(sent))
    more = [*sent, start(4), delete, *lines(4)]
    router = Router(data, more).up(14)
    router.queues.replay(15, 20)
    router.down()
    assert reader.partition(data, "t", 0).first_offset == 10
    os.unlink(f"{data}/router.ckpt")
    assert content(rebuilt(router)) == content(data)


def test_a_start_above_the_end_is_the_end_also_in_a_replay_that_knows_later_records(data):
    sent = [*lines(30), start(45), *lines(30, 30)]
    router = Router(data, sent).up().route(1, 61).down()
    assert_whole(data, sent, 30)
    before = files(data)
    os.unlink(f"{data}/router.ckpt")
    router.again()
    assert files(data) == before


def test_a_replay_from_an_older_checkpoint_ends_with_the_same_start(data):
    sent = [*lines(60), start(33), *lines(30, 60)]
    router = Router(data, sent).up().route(1, 40)
    router.queues.checkpoints.start()
    router.queues.settle()
    older = Path(data, "router.ckpt").read_bytes()
    router.route(41, 91).down()
    before = files(data)
    Path(data, "router.ckpt").write_bytes(older)
    router.again()
    assert files(data) == before
    assert_whole(data, sent, 33)


def test_the_first_start_raises_the_format_and_a_later_one_says_nothing(data):
    sent = [*lines(40), start(10), start(20)]
    router = Router(data, sent).up().route(1, 42).down()
    assert identity.version(data)[0] == identity.STARTED
    assert [told["to"] for told in router.log.of("format_raised")] == [identity.STARTED]
    assert [told["offset"] for told in router.log.of("start_moved")] == [10, 20]
    os.unlink(f"{data}/format")
    heal.repair(data)
    assert identity.version(data)[0] == identity.STARTED, "the records say which it was"


# --- what stands in its way ------------------------------------------------------------------------------------------


def full(*_):
    raise OSError(errno.ENOSPC, "full")


def cannot(*_):
    raise OSError(errno.EOPNOTSUPP, "not supported")


def test_without_room_for_the_copy_only_whole_segments_go_and_a_tick_does_the_rest(data, monkeypatch):
    sent = [*lines(60), start(33)]
    router = Router(data, sent).up().route(1, 60)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        router.route(61, 61)
        router.queues.settle()
        first = reader.partition(data, "t", 0).first_offset
        assert 0 < first < 33
        assert content(data) == b"".join(texts(sent, first))
        assert not [name for name in files(data) if "kept" in name]
        patch.setattr(queues, "ROLL_NS", 0)
        router.tick()
        assert reader.partition(data, "t", 0).first_offset == first
    router.tick()
    assert reader.partition(data, "t", 0).first_offset == first, "it is tried again after some seconds"
    monkeypatch.setattr(queues, "ROLL_NS", 0)
    router.tick()
    [told] = router.log.of("start_postponed")
    assert (told["topic"], told["partition"], told["offset"]) == ("t", 0, 33)
    router.down()
    assert_whole(data, sent, 33)


def test_what_was_postponed_is_made_up_by_the_next_start_of_the_router(data, monkeypatch):
    sent = [*lines(60), start(33), *lines(30, 60)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        router = Router(data, sent).up().route(1, 91).down()
    assert 0 < reader.partition(data, "t", 0).first_offset < 33
    router.again()
    assert_whole(data, sent, 33)


def test_starts_that_a_release_before_them_has_passed_over_are_made_up_after_the_upgrade(data, monkeypatch):
    sent = [*lines(60), start(33), start(1 << 40), *lines(30, 60), start(45), *lines(5, 90)]
    with monkeypatch.context() as patch:
        patch.setattr(TopicChanges, "_start", lambda self, change: None)
        router = Router(data, sent).up().route(1, 98).down()
    assert len(content(data).splitlines()) == 95
    assert identity.version(data)[0] < identity.STARTED
    router.again()
    assert_whole(data, sent, 60)
    assert identity.version(data)[0] == identity.STARTED


def test_a_request_by_hand_beyond_the_end_hides_no_later_start(data, monkeypatch):
    sent = [*lines(30), start(1 << 40), *lines(30, 30), start(60)]
    router = Router(data, sent).up().route(1, 62).down()
    os.unlink(f"{data}/router.ckpt")
    router.again()
    assert_whole(data, sent, 60)
    more = [*sent, *lines(30, 60), start(75)]
    with monkeypatch.context() as patch:
        patch.setattr(TopicChanges, "_start", lambda self, change: None)
        router = Router(data, more).up(62).route(63, 93).down()
    router.again()
    assert_whole(data, more, 75)


def test_what_is_owed_ends_with_its_topic(data, monkeypatch):
    delete = topic_changes.encode(TopicChange(topic_changes.DELETE, "t", 1, {}, "d-1"), b"1.000000")
    sent = [*lines(60), start(33), delete, *lines(40)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        router = Router(data, sent).up().route(1, 61)
        router.queues.replay(62, 102)
    monkeypatch.setattr(queues, "ROLL_NS", 0)
    router.tick()
    router.down()
    assert reader.partition(data, "t", 0).first_offset == 60
    router.again()
    assert reader.partition(data, "t", 0).first_offset == 60


def test_a_start_while_a_checkpoint_is_written_does_not_wait_for_it(data, monkeypatch):
    sent = [*lines(60), start(33), *lines(30, 60), start(90), *lines(10, 90)]
    router, may_fill, fill = Router(data, sent).up().route(1, 60), threading.Event(), remnant.Remnant.fill
    monkeypatch.setattr(remnant.Remnant, "fill", lambda copy: may_fill.wait(30) and fill(copy))
    router.route(61, 102)
    assert router.queues.checkpoints.is_busy
    assert reader.partition(data, "t", 0).end_offset() == 100, "the records behind it are routed meanwhile"
    may_fill.set()
    router.down()
    assert_whole(data, sent, 90)


def test_a_copy_leaves_the_room_that_the_broker_needs_for_what_it_accepts(data):
    sent, asked, room = [*lines(60), *lines(60, topic=b"u")], [], [0]

    def has_room(nbytes):
        asked.append(nbytes)
        return nbytes <= room[0]

    router = Router(data, sent).up(has_room=has_room).route(1, 120)
    t, u = (router.queues.logs.log_of(router.queues.in_force.table[name], 0) for name in (b"t", b"u"))
    router.queues.retention.begin_at([(t, 33)])
    router.queues.settle()
    assert len(router.log.of("start_postponed")) == 1
    room[0] = asked[0]
    router.queues.retention.begin_at([(t, 33), (u, 33)])
    router.queues.settle()
    assert [each["topic"] for each in router.log.of("start_postponed")] == ["t", "u"]
    router.queues.retention.begin_at([(u, 33)])
    assert asked[2] == asked[1] + asked[3], "beside the copy that was made at the same time"
    router.down()
    assert_whole(data, sent[:60], 33)
    assert content(data, "u") == b"".join(stored(sent)[93:])


def test_where_no_room_can_be_reserved_the_copy_waits_for_it_or_is_not_begun(data, monkeypatch):
    sent = [*lines(60), start(20), start(33)]
    waited, copy = [], os.sendfile

    def send(*arguments):
        if not waited:
            full()
        return copy(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    router = Router(data, sent).up(wait=waited.append).route(1, 60)
    with monkeypatch.context() as patch:
        patch.setattr(os, "sendfile", send)
        router.route(61, 61)
        router.queues.settle()
    assert [os.path.basename(path) for path in waited] == [segment.name(20)]
    assert content(data) == b"".join(texts(sent, 20))
    disk = os.statvfs(data)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result([*disk[:4], 0, *disk[5:]]))
        router.route(62, 62)
        router.queues.settle()
    assert [told["offset"] for told in router.log.of("start_postponed")] == [33]
    router.again()
    assert_whole(data, sent, 33)


def test_damage_where_a_log_ended_by_then_leaves_the_log_as_it_is(data, monkeypatch):
    sent = [*lines(60), start(1 << 40), *lines(40, 60)]
    router = Router(data, sent).up().route(1, 60)
    router.queues.checkpoints.start()
    router.queues.settle()
    older = Path(data, "router.ckpt").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(TopicChanges, "_start", lambda self, change: None)
        router.route(61, 101).down()
    Path(data, "router.ckpt").write_bytes(older)
    inside = Path([path for first, path in reader.partition(data, "t", 0).segments() if first <= 60][-1])
    whole, heard = inside.read_bytes(), []
    inside.write_bytes(b"?" * len(whole[:-200]) + whole[-200:])
    router.again(damaged=heard.append)
    assert heard and router.log.of("damaged")
    assert reader.partition(data, "t", 0).first_offset == 0
    inside.write_bytes(whole)
    router.again()
    assert_whole(data, sent, 60)


def test_of_a_damaged_segment_nothing_is_copied_and_what_lies_before_it_goes(data):
    heard = []
    sent = [*lines(60), start(33)]
    router = Router(data, sent).up(damaged=heard.append).route(1, 60)
    inside = [(first, path) for first, path in reader.partition(data, "t", 0).segments() if first < 33][-1]
    text = bytearray(Path(inside[1]).read_bytes())
    text[len(text) // 2 :] = b"?" * len(text[len(text) // 2 :])
    Path(inside[1]).write_bytes(text)
    router.route(61, 61)
    router.queues.settle()
    assert len(heard) == 1 and reader.partition(data, "t", 0).first_offset == inside[0]
    router.down()


def test_a_start_at_a_record_that_compaction_removed_is_at_the_next_one_that_is_left(data):
    sent = [*lines(40), start(12)]
    Router(data, sent).up().route(1, 40).down()
    first, path = reader.partition(data, "t", 0).segments()[0]
    rows = Path(path).read_bytes().split(b"\n")
    assert first == 0 and len(rows) > 16
    rows[10:15] = [b""] * 5
    Path(path).write_bytes(b"\n".join(rows))
    os.unlink(segment.index_path(path))
    IndexWriter.complete(path, 0, no_room)
    os.unlink(f"{data}/router.ckpt")
    Router(data, sent).up(40).route(41, 41).down()
    assert reader.partition(data, "t", 0).first_offset == 15
    assert content(data) == b"".join(texts(sent, 15))


def test_what_makes_room_while_a_log_is_opened_leaves_the_copies_of_other_logs(data, monkeypatch):
    sent = [*lines(60), *lines(60, topic=b"u"), *lines(400, topic=b"v")]
    router = Router(data, sent)
    router.up(wait=lambda path: router.queues.settle(), most_open=1).route(1, 520)
    router.queues.settle()
    t, u = (router.queues.logs.log_of(router.queues.in_force.table[name], 0) for name in (b"t", b"u"))
    point_link, full = PartitionLog._point_link, [u]

    def point(log, path):
        if log in full:
            full.remove(log)
            raise OSError(errno.ENOSPC, "full")
        point_link(log, path)

    monkeypatch.setattr(PartitionLog, "_point_link", point)
    router.queues.use_limits(Limits(segment_bytes=600, retention_bytes=6000))  # of `v` some segments are due
    router.queues.retention.begin_at([(t, 33), (u, 58)])
    router.down()
    assert not full and reader.partition(data, "v", 0).first_offset > 0
    assert_whole(data, sent[:60], 33)
    assert reader.partition(data, "u", 0).first_offset == 58
    router.again()
    assert_whole(data, sent[:60], 33)
    assert content(data, "u") == b"".join(stored(sent)[118:120])


# --- kills -----------------------------------------------------------------------------------------------------------

_TRACED = (
    *(remnant.lay_out_rest, remnant.Remnant.fill, remnant.settle, checkpoint.Checkpointer.run, segment.remove),
    *(Retention.begin_at, Retention.begin_owed, Retention._retire_before, recovery._settle),
)


def killed(work, at):
    """Do `work` in a child that is killed before the `at`th line of what a start does; return whether it came to it."""
    codes = {each.__code__ for each in _TRACED}
    reached = 0

    def local(frame, event, arg):
        nonlocal reached
        if event == "line":
            reached += 1
            if reached == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return local

    def begin(frame, event, arg):
        return local if frame.f_code in codes else None

    pid = os.fork()
    if not pid:
        code = 1
        try:
            sys.settrace(begin)
            threading.settrace(begin)
            work()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"line {at}: ended with {status}"
    return status != 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", [n if n == 3 else pytest.param(n, marks=pytest.mark.soak) for n in range(1, 9)])
@pytest.mark.parametrize("offset", [33, 60], ids=["inside", "end"])
def test_a_kill_at_any_line_of_a_start_loses_nothing_and_brings_nothing_back(tmp_path, data, offset, part):
    """Every eighth line; the soak has the others."""
    sent = [*lines(60), start(offset), *lines(10, 60)]
    Router(data, sent).up().route(1, 60).down()
    at, is_killed = part - 8, True
    while is_killed:
        at += 8
        here = str(tmp_path / f"kill{at}")
        shutil.copytree(data, here, symlinks=True)
        is_killed = killed(lambda: Router(here, sent).up(60).route(61, 71).down(), at)  # noqa: B023
        held = b"".join(text for _, text in reader.partition(here, "t", 0).chunks(offset))
        assert b"".join(texts(sent, offset)).startswith(held) and len(held.splitlines()) >= 60 - offset, at
        found = [each for each in verify.Verifier(here, is_live=False).findings() if each.is_damage]
        assert not [each for each in found if each.path.startswith("topics/t/")], at
        if at // 8 % 2:  # killed again, in the start after it
            killed(lambda: Router(here, sent).again(), 1 + at % 7)  # noqa: B023
        Router(here, sent).again()
        assert_whole(here, sent, offset)
        shutil.rmtree(here)
    assert at > 50, "it came to the lines"


@pytest.mark.parametrize("name", ["notes.kept", "notes.log.kept", f"{7:020d}.kept", f"{7:019d}.log.kept", ".kept"])
def test_a_misplaced_file_that_is_called_like_a_copy_stops_nobody(data, name):
    sent = [*lines(40), start(33)]
    router = Router(data, sent).up().route(1, 40).down()
    stray = Path(data, "topics/t/0", name)
    stray.write_text("of somebody\n")
    router.up(41).down()
    assert stray.read_text() == "of somebody\n"
    stray.unlink()
    assert_whole(data, sent, 33)


def test_a_reader_in_the_middle_of_what_is_copied_never_misses_a_record(data, monkeypatch):
    sent = [*lines(60), start(33)]
    router = Router(data, sent).up().route(1, 60)
    log, seen = reader.partition(data, "t", 0), []

    def looked(*arguments):
        seen.append(b"".join(text for _, text in log.chunks(35)))
        return remove(*arguments)

    remove = segment.remove
    monkeypatch.setattr(segment, "remove", looked)
    router.route(61, 61).down()
    assert seen and set(seen) == {b"".join(texts(sent, 35))}


def test_a_record_says_what_it_was_written_with():
    line = b"21|1732190000.000001|%b\n" % start(17, 5, 3)
    assert line == b"21|1732190000.000001|__kmq.start|1.000000|;request=17-1|t incarnation=5 3=17\n"
    change = topic_changes.decode(line)
    assert (change.verb, change.topic, change.incarnation, change.starts) == ("start", "t", 5, {3: 17})
    assert record.fields(line)[2] == topic_changes.START_KEY
    as_topic = line.replace(b"__kmq.start", b"__kmq.topic")
    for bad in (as_topic, as_topic.replace(b"|t inc", b"|start t inc")):
        with pytest.raises(ValueError, match="is no change"):
            topic_changes.decode(bad)
