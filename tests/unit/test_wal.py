"""The WAL: what is whole stays, what is torn goes, any range can be read back."""

import os
import pathlib
import random

import pytest
from made_up import FIRST_TS, no_room, stored, write_wal

from kmq.errors import CorruptError
from kmq.log import index, reader, segment, wal
from kmq.log.wal import Wal

LINES = [b"t.k|1|%d|%b" % (n, b"x" * (n % 90)) for n in range(1, 301)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (index, reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1024)


def path_of(data, first=1):
    return f"{data}/append/{segment.name(first)}"


def reopen(data):
    return Wal(data, no_room, 1 << 20)


def everything(data, low=1, high=1 << 40):
    return b"".join(wal.read(data, low, high))


def test_an_empty_wal_begins_before_seq_1(data):
    log = reopen(data)
    assert (log.last_seq, log.last_ts, log.size, log.cut_bytes) == (0, 0, 0, 0)
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
    assert (log.last_seq, log.size, log.cut_bytes) == (300 - lost, len(kept), damaged - len(kept))
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
