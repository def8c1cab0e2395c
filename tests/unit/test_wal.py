"""The WAL: what is whole stays, what is torn goes, any range can be read back."""

import errno
import os
import pathlib
import random
import shutil
import time
from types import SimpleNamespace

import pytest
from made_up import FIRST_TS, no_room, stored, write_wal

from kmq import files
from kmq.errors import CorruptError
from kmq.log import identity, index, reader, remnant, segment, wal
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from stages.durability import Durability

LINES = [b"t.k|1|%d|%b" % (n, b"x" * (n % 90)) for n in range(1, 301)]


pytestmark = pytest.mark.usefixtures("small_blocks")


def path_of(data, first=1):
    return f"{data}/append/{segment.name(first)}"


def reopen(data, limits=None, fsync=0.0):
    return Wal(data, no_room, 1 << 20, limits, fsync)


def append(log, low, high, group=10, ts=FIRST_TS):
    """Group commits of the messages low…high of LINES."""
    for at in range(low, high + 1, group):
        part = stored(LINES[at - 1 : min(high, at + group - 1)], at)
        log.append([(b"".join(part), at, len(part), ts + at + len(part))])
        log.commit()


def firsts(data):
    return [first for first, _ in segment.listing(f"{data}/append")]


def everything(data, low=1, high=1 << 40):
    return b"".join(wal.read(data, low, high))


def test_an_empty_wal_begins_before_seq_1(data):
    log = reopen(data)
    assert (log.last_seq, log.last_ts, os.path.getsize(log.path), log.cut_bytes) == (0, 0, 0, 0)
    assert os.readlink(f"{data}/append.log") == f"append/{segment.name(1)}"
    assert wal.last_stored(data) == (0, 0) and wal.first_seq(data) == 1
    log.close()


def test_what_was_appended_is_there_after_a_reopen(data):
    write_wal(data, LINES).close()
    log = reopen(data)
    assert (log.last_seq, log.last_ts, log.cut_bytes) == (300, FIRST_TS + 300, 0)
    assert wal.last_stored(data) == (300, FIRST_TS + 300)
    assert everything(data) == b"".join(stored(LINES))
    log.close()


@pytest.mark.parametrize(
    ("tail", "lost"),
    [
        (b"", 0),
        (b"301|17", 0),
        (b"301|1700000000.000301|t.k|1|301|torn", 0),
        (b"\0" * 5000, 0),
        (b"301|1700000000.0003\0\0\0\0", 0),
        (b"no record\n", 0),
        (b"\0\n301|1700000000.000301|t.k|1|301|behind a hole\n", 0),
        (-1, 1),
        (-3, 1),
        (-100, 2),
    ],
)
def test_a_damaged_end_is_cut_back_to_the_last_whole_record(data, tail, lost):
    write_wal(data, LINES).close()
    size = os.path.getsize(path_of(data))
    if isinstance(tail, int):
        os.unlink(segment.index_path(path_of(data)))  # what it speaks of is not cut: see the next test
        os.truncate(path_of(data), size + tail)
    else:
        with open(path_of(data), "ab") as file:
            file.write(tail)
    damaged = os.path.getsize(path_of(data))
    log = reopen(data)
    kept = b"".join(stored(LINES[: 300 - lost]))
    assert everything(data) == kept
    assert (log.last_seq, os.path.getsize(log.path), log.cut_bytes) == (300 - lost, len(kept), damaged - len(kept))
    again = stored(LINES[300 - lost :] + LINES[:1], 301 - lost)
    log.append([(b"".join(again), 301 - lost, lost + 1, FIRST_TS + 301)])
    log.sync()
    log.close()
    assert everything(data) == b"".join(stored(LINES + LINES[:1]))


@pytest.mark.parametrize("lines", [LINES, LINES * 20])
@pytest.mark.parametrize("how", ["cut a byte", "cut half", "cut all", "newline", "bit", "page"])
def test_damage_in_what_the_index_speaks_of_is_refused_and_nothing_is_cut(data, lines, how):
    write_wal(data, lines).close()
    text = pathlib.Path(path_of(data)).read_bytes()
    at = len(text) - 50
    damaged = {
        "cut a byte": text[:-1],
        "cut half": text[: len(text) // 2],
        "cut all": b"",
        "newline": text[: (end := text.index(b"\n", at))] + b"\0" + text[end + 1 :],
        "bit": text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :],
        "page": text[:-4096] + bytes(4096),
    }[how]
    pathlib.Path(path_of(data)).write_bytes(damaged)
    with pytest.raises(CorruptError, match=r"damaged at byte .* run kmq verify --repair"):
        reopen(data)
    assert pathlib.Path(path_of(data)).read_bytes() == damaged


def test_a_wal_that_ends_in_something_else_altogether_is_not_cut(data):
    write_wal(data, LINES).close()
    with open(path_of(data), "ab") as file:
        file.write(b"no record\n" * 1000)
    size = os.path.getsize(path_of(data))
    with pytest.raises(CorruptError, match="no good record in the last 4096 bytes"):
        Wal(data, no_room, 4096)
    assert os.path.getsize(path_of(data)) == size


@pytest.mark.parametrize("seq", [0, 1, 7, 150, 299, 300])
def test_cut_after_forgets_what_comes_later(data, seq):
    log = write_wal(data, LINES)
    log.cut_after(seq)
    assert (log.last_seq, everything(data)) == (seq, b"".join(stored(LINES[:seq])))
    rest = b"".join(stored(LINES[seq:], seq + 1))
    if rest:
        log.append([(rest, seq + 1, 300 - seq, FIRST_TS + 300)])
    log.close()
    assert everything(data) == b"".join(stored(LINES))
    assert reopen(data).last_seq == 300


def test_a_reader_beside_a_cut_never_sees_an_index_that_says_more_than_the_log(data, tmp_path_factory, monkeypatch):
    log, ftruncate, copy = write_wal(data, LINES), os.ftruncate, str(tmp_path_factory.mktemp("copy") / segment.name(1))
    ends = []

    def cut(fd, size):
        ftruncate(fd, size)
        shutil.copy(log.path, copy)
        shutil.copy(segment.index_path(log.path), segment.index_path(copy))
        ends.append((reader.indexed_end(copy, 1, by_seq=True), size))  # raises where it does

    log.note_open_block()
    monkeypatch.setattr(os, "ftruncate", cut)
    for seq in (297, 290, 151, 3):
        log.cut_after(seq)
    monkeypatch.undo()
    log.close()
    assert len(ends) == 4 and all(end <= size for end, size in ends)
    assert everything(data) == b"".join(stored(LINES[:3]))


def roll_every(data, count):
    log = reopen(data)
    for at in range(0, len(LINES), count):
        part = stored(LINES[at : at + count], at + 1)
        log.append([(b"".join(part), at + 1, len(part), FIRST_TS + at + len(part))])
        log.sync()
        log.roll()
    return log


def test_rolling_goes_on_in_a_new_segment_also_while_that_is_empty(data):
    log = roll_every(data, 100)
    assert [first for first, _ in segment.listing(f"{data}/append")] == [1, 101, 201, 301]
    assert os.readlink(f"{data}/append.log") == f"append/{segment.name(301)}"
    assert wal.last_stored(data) == (300, FIRST_TS + 300)
    log.close()
    again = reopen(data)
    assert (again.last_seq, again.path) == (300, path_of(data, 301))
    again.close()


def test_it_goes_on_in_a_new_segment_at_its_size_at_most_once_a_group(data):
    log = reopen(data, Limits(segment_bytes=3000))
    append(log, 1, 300)
    log.close()
    found = segment.survey(f"{data}/append")
    assert len(found) > 5 and all(3000 <= each.size < 3000 + 10 * 140 for each in found[:-1])
    assert all(index.is_whole(each.path) for each in found)
    assert os.path.realpath(f"{data}/append.log") == found[-1].path
    assert everything(data) == b"".join(stored(LINES))
    log = reopen(data, Limits(segment_bytes=1))
    log.append([(b"".join(stored(LINES[:200], 301)), 301, 200, FIRST_TS + 999)])
    assert firsts(data) == [*(each.first for each in found), 301]
    log.close()


def test_a_new_segment_begins_when_the_first_record_is_old_also_after_a_restart(data):
    limits = Limits(segment_age=60)
    log = reopen(data, limits)
    append(log, 1, 10)
    append(log, 11, 20, ts=FIRST_TS + 59_000_000)
    log.close()
    log = reopen(data, limits)
    append(log, 21, 30, ts=FIRST_TS + 61_000_000)
    append(log, 31, 40, ts=FIRST_TS + 62_000_000)
    log.close()
    assert firsts(data) == [1, 21]


def test_a_new_segment_has_its_name_on_disk_before_append_log_leads_to_it(data, monkeypatch):
    log = reopen(data, Limits(segment_bytes=1))
    append(log, 1, 10)
    steps = []
    for name in ("fsync", "fdatasync", "rename"):
        real = getattr(os, name)

        def note(*args, name=name, real=real):
            what = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else args[1]
            steps.append((name, os.path.relpath(what, data)))
            return real(*args)

        monkeypatch.setattr(os, name, note)
    append(log, 11, 20)
    log.close()
    old, new = f"append/{segment.name(1)}", f"append/{segment.name(11)}"
    assert steps == [
        ("fdatasync", old),
        ("fsync", segment.index_path(old)),
        ("fsync", "append"),
        ("rename", "append.log"),
        ("fsync", "."),
        ("fdatasync", new),
        ("fsync", segment.index_path(new)),
    ]


@pytest.mark.parametrize("state", ["no link", "link to the old one", "new one empty", "new one torn", "new one NUL"])
def test_a_kill_inside_a_roll_costs_nothing(data, state):
    limits = Limits(segment_bytes=1)
    log = reopen(data, Limits())
    append(log, 1, 20)
    if state == "no link":
        log.close()
        os.unlink(f"{data}/append.log")
    else:
        log.roll()
        log.close()
        tail = {"new one torn": b"21|17", "new one NUL": b"\0" * 99}.get(state, b"")
        pathlib.Path(path_of(data, 21)).write_bytes(tail)
    if state == "link to the old one":
        os.unlink(f"{data}/append.log")
        os.symlink(f"append/{segment.name(1)}", f"{data}/append.log")
    log = reopen(data, limits)
    assert (log.last_seq, log.last_ts) == (20, FIRST_TS + 20)
    assert os.path.realpath(f"{data}/append.log") == log.path
    append(log, 21, 300)
    log.close()
    assert everything(data) == b"".join(stored(LINES))


def test_an_empty_segment_whose_sync_failed_is_not_used_again(data):
    """The new one would have its name: another file takes it."""
    log = reopen(data)
    before = os.stat(log.path).st_ino
    with open(log.path):  # else the file system may give its number to the next file
        log.roll()
        assert firsts(data) == [1] and os.stat(log.path).st_ino != before
    append(log, 1, 10)
    log.close()
    assert everything(data) == b"".join(stored(LINES[:10]))


@pytest.mark.parametrize(
    ("limits", "free", "left"),
    [
        (Limits(100), 1000, [1, 101, 201, 301]),
        (Limits(100, retention_bytes=1), 1000, [300, 301]),  # the last record stays
        (Limits(100, retention_bytes=1), 299, [201, 301]),
        (Limits(100, retention_bytes=1), 200, [201, 301]),
        (Limits(100, retention_bytes=1), 199, [101, 201, 301]),
        (Limits(100, retention_bytes=1), 100, [101, 201, 301]),
        (Limits(100, retention_bytes=1), 99, [1, 101, 201, 301]),
        (Limits(100, retention_bytes=1), 0, [1, 101, 201, 301]),
        (Limits(100, retention_age=1), 1000, [300, 301]),
        (Limits(100, retention_age=1e10), 1000, [1, 101, 201, 301]),
    ],
)
def test_old_segments_go_but_not_what_somebody_needs(data, limits, free, left):
    roll_every(data, 100).close()
    log = reopen(data, limits)
    gone = log.retain(lambda: free, time.time())
    assert firsts(data) == left
    assert [each.first for each in gone] == [first for first in (1, 101, 201, 301) if first not in left]
    assert log.retain(lambda: free, time.time()) == []
    assert wal.first_seq(data) == left[0] and everything(data, left[0]) == b"".join(stored(LINES)[left[0] - 1 :])
    log.close()
    log = reopen(data, limits)
    assert (log.last_seq, log.last_ts) == (300, FIRST_TS + 300)
    log.append([(b"".join(stored(LINES[:9], 301)), 301, 9, FIRST_TS + 310)])
    log.commit()
    log.retain(lambda: 1000, time.time())
    nothing_is_due = free == 1000 and len(left) == 4
    assert firsts(data) == (left if nothing_is_due else [301])
    log.close()
    assert {int(name[:20]) for name in os.listdir(f"{data}/append")} == set(firsts(data))


@pytest.mark.parametrize(
    ("copied", "free", "nbytes", "left"),
    [
        (300, 300, 1, [101, 201, 301]),  # no more than is lacking
        (300, 300, 1 << 30, [201, 301]),  # the active segment is empty: the last record stays
        (200, 300, 1 << 30, [201, 301]),
        (199, 300, 1 << 30, [101, 201, 301]),
        (300, 199, 1 << 30, [101, 201, 301]),
        (0, 300, 1 << 30, [1, 101, 201, 301]),
        (300, 300, 0, [1, 101, 201, 301]),
    ],
)
def test_for_room_the_oldest_segments_go_that_the_store_has_and_nobody_needs(data, copied, free, nbytes, left):
    identity.open_data(data)
    roll_every(data, 100).close()
    log = reopen(data, Limits(100))
    assert firsts(data) == [1, 101, 201, 301] and log.make_room(lambda: free, 1 << 30) == []
    if copied:
        os.mkdir(f"{data}/tier")
        wal.note_copied(data, copied)
    gone = log.make_room(lambda: free, nbytes)
    assert firsts(data) == left and len(gone) == 4 - len(left)
    log.close()
    log = reopen(data)
    assert log.last_seq == 300 and everything(data, left[0]) == b"".join(stored(LINES)[left[0] - 1 :])
    log.close()


@pytest.mark.parametrize("url", ["", "file:///store"])
def test_durability_asks_for_a_shortage_only_where_there_is_a_store(data, url):
    job = Durability.__new__(Durability)  # without the links of a stage, which it does not need here
    row, asked = SimpleNamespace(state_name="ready"), []
    job.stage = SimpleNamespace(
        page=SimpleNamespace(rows={"router": row}), settings=SimpleNamespace(data=data, tier=url)
    )
    job.wal, job.clock = reopen(data), SimpleNamespace(now_s=time.time)
    job.admission = SimpleNamespace(shortage=lambda: asked.append(1) or 0)
    job._retain()
    assert len(asked) == bool(url)
    job.wal.close()


@pytest.mark.parametrize("step", ["remove", "settle", "sync_directory"])
def test_a_kill_while_the_last_record_is_kept_leaves_it_with_its_time_and_once(data, step, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    append(reopen(data), 1, 100)
    log = reopen(data, Limits(100, retention_bytes=1))
    assert not log.roll_if_over(time.time()) and firsts(data) == [1, 101]
    monkeypatch.setattr(segment if step == "remove" else remnant, step, kill)
    with pytest.raises(Killed):
        log.retain(lambda: 100, time.time())
    monkeypatch.undo()
    log = reopen(data)
    first = firsts(data)[0]
    assert (log.last_seq, log.last_ts) == (100, FIRST_TS + 100) and first == (1 if step == "remove" else 100)
    append(log, 101, 110)
    log.close()
    assert everything(data) == b"".join(stored(LINES)[first - 1 : 110])
    assert {int(name[:20]) for name in os.listdir(f"{data}/append")} == set(firsts(data))
    assert all(index.is_whole(path) for _, path in segment.listing(f"{data}/append"))


def test_an_active_segment_is_sealed_when_all_of_it_is_due_though_nothing_comes(data):
    log = reopen(data, Limits(retention_age=60))
    append(log, 1, 100)
    last_s = (FIRST_TS + 100) / 1e6
    assert not log.roll_if_over(last_s + 59.9) and firsts(data) == [1]
    assert not log.roll_if_over(last_s + 60.1) and firsts(data) == [1, 101]
    assert [each.first for each in log.retain(lambda: 100, last_s + 60.1)] == [1]
    assert everything(data) == stored(LINES)[99]
    log.close()


def test_an_active_segment_larger_than_its_log_may_be_is_sealed_only_without_room(data):
    log = reopen(data, Limits(retention_bytes=1000))
    append(log, 1, 100)
    assert not log.roll_if_over(time.time()) and firsts(data) == [1]
    assert not log.roll_if_over(time.time(), lacks_room=True) and firsts(data) == [1, 101]
    assert [each.first for each in log.retain(lambda: 100, time.time())] == [1]
    append(log, 101, 103)
    assert not log.roll_if_over(time.time(), lacks_room=True) and firsts(data) == [100, 101]
    log.close()
    assert everything(data) == b"".join(stored(LINES)[99:103])


def test_a_segment_that_has_no_room_to_be_sealed_goes_on_as_it_is(data, monkeypatch):
    append(reopen(data), 1, 100)
    log = reopen(data, Limits(100))

    def full(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    for where, name in ((segment, "AppendFile"), (index, "AppendFile"), (wal, "point_symlink")):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, full)
            assert log.roll_if_over(time.time()), name
        assert firsts(data) == [1] and os.path.realpath(f"{data}/append.log") == log.path == path_of(data)
    append(log, 101, 110)  # rolls: there is room again
    log.close()
    assert firsts(data) == [1, 101] and everything(data) == b"".join(stored(LINES)[:110])


def test_what_waits_for_room_lets_retention_make_it(data, monkeypatch):
    roll_every(data, 100).close()
    waited = []

    def wait_for_room(path):
        log.retain(lambda: 1000, time.time())
        waited.append(path)

    log = Wal(data, wait_for_room, 1 << 20, Limits(retention_bytes=1))
    real, refusals = files.write_some, iter([True])

    def full_once(fd, buffers):
        if next(refusals, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers)

    monkeypatch.setattr(files, "write_some", full_once)
    log.append([(b"".join(stored(LINES[:9], 301)), 301, 9, FIRST_TS + 310)])
    log.close()
    assert waited == [path_of(data, 301)] and firsts(data) == [300, 301]


def test_nobody_is_asked_while_nothing_is_due(data):
    log = roll_every(data, 100)
    assert log.retain(lambda: pytest.fail("that costs reads"), time.time()) == []
    log.close()


@pytest.fixture
def syncs(monkeypatch):
    """Paths of the files that were fdatasynced."""
    paths, fdatasync = [], os.fdatasync

    def note(fd):
        paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", note)
    return paths


@pytest.mark.parametrize(("fsync", "after_ten", "after_a_while"), [(0.0, 10, 10), (0.5, 0, 1), (float("inf"), 0, 0)])
def test_it_is_synced_as_often_as_the_setting_says(data, monkeypatch, syncs, fsync, after_ten, after_a_while):
    now = 1000.0
    monkeypatch.setattr(wal.time, "monotonic", lambda: now)
    log = reopen(data, None, fsync)
    append(log, 1, 100)
    assert (len(syncs), log.synced_seq) == (after_ten, 100 if after_ten else 0)
    now += 0.6
    log.commit()  # nothing new comes
    assert (len(syncs), log.synced_seq) == (after_a_while, 100 if after_a_while else 0)
    now += 0.6
    log.commit()
    assert len(syncs) == after_a_while, "there is nothing to sync"
    append(log, 101, 110)
    log.roll()
    assert log.synced_seq == 110 and syncs[-1] == path_of(data)
    append(log, 111, 120)
    log.close()
    assert log.synced_seq == 120 and syncs[-1] == path_of(data, 111)


def test_where_not_every_commit_is_synced_nuls_are_looked_for_far_behind_the_index(data):
    """After a power cut the disk may have the index and the end of the log, and not what is between."""
    log = reopen(data, None, float("inf"))
    append(log, 1, 300)
    log.close()
    with open(path_of(data), "r+b") as file:
        file.seek(3000)
        file.write(b"\0" * 100)
    log = Wal(data, no_room, 4096, None, float("inf"))
    log.close()
    text, lines = b"", stored(LINES)
    while len(text) + len(lines[0]) <= 3000:
        text += lines.pop(0)
    assert (log.last_seq, everything(data)) == (text.count(b"\n"), text)


@pytest.mark.parametrize("seq", [0, 1, 150, 300])
def test_rewriting_what_comes_after_a_seq_changes_no_byte(data, seq):
    log = write_wal(data, LINES)
    log.rewrite_after(seq)
    log.close()
    assert everything(data) == b"".join(stored(LINES))


@pytest.mark.parametrize("count", [50, 100, 300])
def test_any_range_is_read_whole_over_all_segments(data, count):
    roll_every(data, count).close()
    rng = random.Random(count)
    ranges = [(1, 300), (1, 1), (300, 300), (100, 101), (49, 52), (301, 400), (250, 999)]
    ranges += [tuple(sorted((rng.randrange(1, 301), rng.randrange(1, 301)))) for _ in range(60)]
    for low, high in ranges:
        blocks = list(wal.read(data, low, high))
        assert b"".join(blocks) == b"".join(stored(LINES[low - 1 : high], low)), (low, high)
        assert all(block.endswith(b"\n") for block in blocks)


def test_reading_a_range_does_not_need_the_index(data):
    roll_every(data, 100).close()
    for _, path in segment.listing(f"{data}/append"):
        pathlib.Path(segment.index_path(path)).unlink(missing_ok=True)
    assert everything(data, 90, 210) == b"".join(stored(LINES[89:210], 90))


def test_rewriting_the_tail_changes_no_byte(data, monkeypatch):
    monkeypatch.setattr(wal, "_READ_BYTES", 1000)
    log = write_wal(data, LINES)
    for nbytes in (0, 1, 999, 5000, 1 << 30):
        log.rewrite_tail(nbytes)
    log.close()
    assert everything(data) == b"".join(stored(LINES))
