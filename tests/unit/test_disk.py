"""The few things KMQ does to files: whole or not at all, on a disk that is full or breaks at any write."""

import errno
import os

import pytest
from made_up import no_room

from kmq import files
from kmq.errors import RetryError
from kmq.files import AppendFile, find_nul, find_tail, point_symlink, replace_file, with_room
from kmq.message import record

GOOD = [b"%d|1700000000.000001|t|||x" % n for n in range(1, 4)]
TEXT = b"\n".join(GOOD) + b"\n"


def is_good(line):
    return record.parse_stored(line) is not None


@pytest.mark.parametrize(
    ("content", "survivors"),
    [
        (b"", 0),
        (TEXT, 3),
        (TEXT + b"4|17000", 3),
        (TEXT + b"4|1700000000.000001|t|||torn", 3),
        (TEXT + b"\0" * 10, 3),
        (TEXT + b"\0" * 700_000, 3),
        (TEXT + b"4|17\0\0\0", 3),
        (TEXT + b"4|17\0\0\0\n", 3),
        (TEXT + b"\0\0\n\0\n", 3),
        (TEXT[:-1], 2),
        (TEXT + b"no record\n", 3),
        (TEXT + b"no record\nnor this\n\n\n", 3),
        (TEXT + b"x" * 600_000 + b"\n", 3),
        (TEXT + b"x" * 600_000, 3),
        (b"torn", 0),
        (b"\0" * 300_000, 0),
        (b"no record\n", 0),
        (GOOD[0] + b"y" * 900_000 + b"\n" + b"\0" * 300_000, 1),
        (b"\n".join(GOOD * 20_000) + b"\ntorn", 60_000),
    ],
    ids=lambda value: f"{len(value)}-{value[-12:]}" if isinstance(value, bytes) else str(value),
)
def test_find_tail_ends_at_the_last_whole_good_line(tmp_path, monkeypatch, content, survivors):
    if len(content) < 1000:
        monkeypatch.setattr(files, "_CHUNK", 7)  # many steps back also in a short file
    path = tmp_path / "log"
    path.write_bytes(content)
    good = content.split(b"\n")[:survivors]
    size = sum(len(line) + 1 for line in good)
    with path.open("rb") as file:
        tail = find_tail(file.fileno(), len(content), is_good)
    assert (tail.size, tail.last, tail.cut) == (size, good[-1] if good else b"", len(content) - size)


def test_find_tail_does_not_look_below_its_floor(tmp_path):
    path = tmp_path / "log"
    floor = len(GOOD[0]) + 1
    path.write_bytes(GOOD[0] + b"\nbad\nworse")
    with path.open("rb") as file:
        tail = find_tail(file.fileno(), floor + 9, is_good, floor)
    assert (tail.size, tail.last, tail.cut) == (floor, b"", 9)


def test_find_nul(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK", 4)
    path = tmp_path / "log"
    path.write_bytes(b"0123456789\0b\0")
    with path.open("rb") as file:
        assert find_nul(file.fileno(), 0, 13) == 10
        assert find_nul(file.fileno(), 11, 13) == 12
        assert find_nul(file.fileno(), 0, 10) == -1


class FaultyDisk:
    """os.write and os.writev with room for `room` bytes: a write that finds less is short, one that finds none fails."""

    def __init__(self, monkeypatch, room, error=errno.ENOSPC):
        self.room, self.error = room, error
        self._write, self._ftruncate = os.write, os.ftruncate
        monkeypatch.setattr(files.os, "write", self.write)
        monkeypatch.setattr(files.os, "writev", lambda fd, buffers: self.write(fd, b"".join(buffers)))
        monkeypatch.setattr(files.os, "ftruncate", self.ftruncate)

    def write(self, fd, data):
        taken = min(self.room, len(data))
        if not taken:
            raise OSError(self.error, os.strerror(self.error))
        self.room -= taken
        return self._write(fd, bytes(data)[:taken])

    def ftruncate(self, fd, size):
        self.room += os.fstat(fd).st_size - size
        self._ftruncate(fd, size)


@pytest.mark.parametrize("room", range(0, 12))
@pytest.mark.parametrize("buffers", [[b"second line\n"], [b"second", b" line\n"]])
def test_an_append_on_a_full_disk_waits_for_room_and_is_whole(tmp_path, monkeypatch, room, buffers):
    waits = []

    def wait(path):
        assert file_path.read_bytes() == b"first\n"  # nothing torn meanwhile, and nothing kept of the try
        waits.append(path)
        if len(waits) == 3:
            faulty.room += 100

    file_path = tmp_path / "log"
    file = AppendFile(str(file_path), wait)
    file.append([b"first\n"], 6)
    faulty = FaultyDisk(monkeypatch, room)
    file.append(buffers, 12)
    assert waits == [str(file_path)] * 3
    assert file_path.read_bytes() == b"first\nsecond line\n" and file.size == 18


@pytest.mark.parametrize("room", [0, 5])
def test_an_append_that_fails_for_another_reason_leaves_nothing_and_ends_the_process(tmp_path, monkeypatch, room):
    file = AppendFile(str(tmp_path / "log"), lambda path: setattr(faulty, "room", 0))
    file.append([b"first\n"], 6)
    faulty = FaultyDisk(monkeypatch, room, errno.EIO)  # a short write says no reason; the next one does
    with pytest.raises(RetryError, match="write failed: Input/output error"):
        file.append([b"second\n"], 7)
    assert (tmp_path / "log").read_bytes() == b"first\n" and file.size == 6


def test_a_disk_that_cannot_even_cut_a_failed_append_off_is_named_all_the_same(tmp_path, monkeypatch):
    file = AppendFile(str(tmp_path / "log"), no_room)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "write", fail)
    monkeypatch.setattr(files.os, "ftruncate", fail)
    with pytest.raises(RetryError, match="log: write failed: Input/output error"):
        file.append([b"first\n"], 6)


def test_more_buffers_than_one_writev_takes(tmp_path):
    file = AppendFile(str(tmp_path / "log"), no_room)
    lines = [b"%d\n" % n for n in range(5000)]
    file.append(lines, sum(map(len, lines)))
    assert (tmp_path / "log").read_bytes() == b"".join(lines)


def test_a_failed_sync_is_never_tried_again(tmp_path, monkeypatch):
    calls = []

    def fdatasync(fd):
        calls.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "fdatasync", fdatasync)
    file = AppendFile(str(tmp_path / "log"), no_room)
    with pytest.raises(RetryError, match="fdatasync failed"):
        file.sync()
    assert len(calls) == 1


def test_an_append_file_notices_what_others_do_to_it(tmp_path):
    path = tmp_path / "log"
    file = AppendFile(str(path), no_room)
    file.append([b"first\n"], 6)
    assert not file.moved_under_us() and not file.is_unlinked()
    os.truncate(path, 3)
    assert file.moved_under_us()
    path.unlink()
    assert file.is_unlinked()


def test_replace_file_on_a_full_disk_keeps_the_old_content_until_there_is_room(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    fsync, waits = os.fsync, []

    def full(fd):
        if len(waits) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    def wait(making):
        assert path.read_bytes() == b"old"
        waits.append(making)

    monkeypatch.setattr(files.os, "fsync", full)
    with_room(str(path), wait, lambda: replace_file(str(path), b"new"))
    assert path.read_bytes() == b"new" and waits == [str(path)] * 2
    assert os.listdir(tmp_path) == ["file"]


def test_with_room_waits_for_nothing_else(tmp_path):
    def action():
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        with_room("path", no_room, action)


def test_point_symlink_replaces_what_is_there_also_after_a_crash_in_the_middle(tmp_path):
    link = tmp_path / "t.log"
    (tmp_path / "t.log.new").symlink_to("left over")
    for target in ("a", "b", "b"):
        point_symlink(str(link), target)
        assert os.readlink(link) == target
