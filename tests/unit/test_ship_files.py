"""The files that `kmq ship` follows, without a broker: what would take many files, or half a minute, with one."""

import errno
import glob
import os
import threading
import time
from zlib import crc32

import pytest

from kmq.shipping import files, finding, process
from kmq.shipping.finding import LINGER_S, FollowedFiles, forget_ended, has_ended, hold, look, make_ready
from kmq.shipping.process import Shipment, _begin, _plan, _save, _settle
from kmq.shipping.state import ShipState, load_state, save_state

LONGEST = 1000


@pytest.fixture
def watched(tmp_path):
    said = []
    made = FollowedFiles([f"{tmp_path}/*.log"], set(), said.append)
    made.said = said
    yield made
    for file in made.files:
        file.close()


def drain(watched, is_final=False):
    """Everything that can be read now, and taken for stored: [(name, line)]."""
    found, more = [], True
    look(watched)
    forget_ended(watched)
    while more:
        more = False
        for file in watched.files:
            if (file.has_more or is_final) and make_ready(watched, file) and (block := file.read(LONGEST, is_final)):
                found += [(os.path.basename(file.path), line) for line in block.lines]
                file.take_back(len(block.lines))
                more = True
            assert sum(each.fd >= 0 for each in watched.files) <= finding.MOST_OPEN
    return found


def test_many_files_are_followed_with_few_descriptors(watched, tmp_path, monkeypatch):
    monkeypatch.setattr(finding, "MOST_OPEN", 3)
    names = [f"{number}.log" for number in range(10)]
    for turn in (b"1\n", b"2\n"):
        for name in names:
            with (tmp_path / name).open("ab") as file:
                file.write(turn)
        assert sorted(drain(watched)) == sorted((name, turn[:-1]) for name in names)
    closed = [file for file in watched.files if file.fd < 0]
    assert len(closed) == 7
    for file in closed:  # grown, renamed and replaced between two looks
        with open(file.path, "ab") as log:
            log.write(b"last\n")
        os.rename(file.path, f"{file.path}.1")
        with open(file.path, "wb") as log:
            log.write(b"first\n")
    expected = [(os.path.basename(file.path), line) for file in closed for line in (b"last", b"first")]
    assert sorted(drain(watched)) == sorted(expected)
    assert watched.lost == 0


def test_a_renamed_file_that_ends_without_a_newline_is_sent_whole_in_the_end(watched, tmp_path):
    (tmp_path / "a.log").write_bytes(b"one\nhalf")
    assert drain(watched) == [("a.log", b"one")]
    (tmp_path / "a.log").rename(tmp_path / "a.log.1")
    assert drain(watched) == []
    [file] = watched.files
    assert has_ended(file, 0.0) and not has_ended(file)
    forget_ended(watched, 0.0)
    assert watched.files == [file]  # not before all of it is read
    assert drain(watched, is_final=True) == [("a.log", b"half")]
    with (tmp_path / "a.log.1").open("ab") as file:
        file.write(b" and more\n")  # of a writer that was only slow
    assert drain(watched) == [("a.log", b" and more")]
    forget_ended(watched, 0.0)
    assert len(watched.files) == 1  # as long as it is there, somebody may write to it
    (tmp_path / "a.log.1").unlink()
    forget_ended(watched, 0.0)
    assert watched.files == [] and watched.said == []


def test_a_renamed_file_that_a_pattern_still_has_ends_without_growth_and_stays_known(watched, tmp_path):
    watched.patterns[:] = [f"{tmp_path}/a.log*"]
    (tmp_path / "a.log").write_bytes(b"one\nhalf")
    assert drain(watched) == [("a.log", b"one")]
    (tmp_path / "a.log").rename(tmp_path / "a.log.1")
    (tmp_path / "a.log").write_bytes(b"new\nhalf")
    assert drain(watched) == [("a.log", b"new")]
    renamed, new = watched.files
    assert has_ended(renamed, 0.0) and not has_ended(renamed) and not has_ended(new, 0.0)
    forget_ended(watched, 0.0)
    assert renamed.read(LONGEST, is_final=True).lines == [b"half"]
    renamed.take_back(1)
    for step in (0.0, LINGER_S):
        forget_ended(watched, step)
        assert drain(watched) == [] and watched.files == [renamed, new]


def test_a_deleted_file_is_forgotten_and_one_whose_directory_is_away_is_not(watched, tmp_path):
    watched.patterns[:] = [f"{tmp_path}/*/*.log"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.log").write_bytes(b"1\n")
    assert len(drain(watched)) == 2
    (tmp_path / "a" / "a.log").unlink()
    (tmp_path / "b").rename(tmp_path.parent / f"{tmp_path.name}-away")
    assert drain(watched) == []
    forget_ended(watched, 0.0)
    assert [os.path.basename(file.path) for file in watched.files] == ["b.log"]
    (tmp_path.parent / f"{tmp_path.name}-away").rename(tmp_path / "b")
    with (tmp_path / "b" / "b.log").open("ab") as log:
        log.write(b"2\n")
    assert drain(watched) == [("b.log", b"2")]


@pytest.mark.parametrize("name", ["a.log", "b.log", "a.log.1"])
def test_a_file_goes_on_under_any_name_after_its_device_got_another_number(watched, tmp_path, name):
    (tmp_path / "a.log").write_bytes(b"one\n")
    assert drain(watched) == [("a.log", b"one")]
    [file] = watched.files
    file.close()
    file.device += 1
    (tmp_path / "a.log").rename(tmp_path / name)
    with (tmp_path / name).open("ab") as log:
        log.write(b"two\n")
    assert [line for _, line in drain(watched)] == [b"two"]
    assert watched.said == []


def test_a_file_that_patterns_leave_out_is_known_after_its_device_got_another_number(watched, tmp_path):
    (tmp_path / "a.log").write_bytes(b"one\n")
    assert drain(watched) == [("a.log", b"one")]
    watched.files[0].close()
    watched.files[0].device += 1
    (tmp_path / "b.log").touch()
    patterns = watched.patterns[:]
    for watched.patterns[:] in ([f"{tmp_path}/b.log"], patterns):
        assert drain(watched) == []
    assert watched.said == []


def shipment(watched, tmp_path):
    made = FollowedFiles([f"{tmp_path}/logs/*"], set(), watched.report, watched.files)
    return Shipment(f"{tmp_path}/state", "", "app", 1, made, False, threading.Event(), None, None)


def test_lines_of_a_renamed_file_are_settled_in_the_order_in_which_they_were_sent(watched, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.log").write_bytes(b"a1\na2\n")
    (logs / "b.log").write_bytes(b"b1\nb2\n")
    work = shipment(watched, tmp_path)
    _begin(work, from_start=True)
    work.watched.files.sort(key=lambda file: file.path, reverse=True)
    (logs / "a.log").rename(logs / "a.log.1")
    look(work.watched)
    first, second, *rest = [line.split(b"|")[3] for line in _plan(work).splitlines()]
    _save(work)
    again = shipment(FollowedFiles([], set(), watched.report), tmp_path)
    _begin(again, from_start=False)
    _settle(again, 2)  # ship was killed, and the broker has the first two
    assert [line.split(b"|")[3] for line in _plan(again).splitlines()] == rest
    assert {first, second, *rest} == {b"a1", b"a2", b"b1", b"b2"}
    for file in again.watched.files:
        file.close()


@pytest.mark.parametrize("new", [b"new 1\nnew 2\nnew 3\n", b"old 1\nold 2\nold 3\n"], ids=["new", "grown"])
def test_a_state_of_an_earlier_release_has_a_checksum_of_the_first_line(watched, tmp_path, new):
    path, state = tmp_path / "a.log", tmp_path / "state"
    path.write_bytes(new)
    found = os.stat(path)
    head = b"kmq-ship 1 name=ship-aa topic=t next=3\n"
    known = b"file=%x:%x:%08x" % (found.st_dev, found.st_ino, crc32(b"old 1"))
    row = b"offset=12 end=12 lines=0 %b path=%b\n" % (known, os.fsencode(path))
    state.write_bytes(head + row + b"crc32=%08x\n" % crc32(head + row))
    saved = load_state(str(state))
    save_state(str(state), saved)  # as at a start that does not come to read it
    watched.files[:] = load_state(str(state)).files
    lines = [("a.log", line) for line in new.splitlines()]
    assert drain(watched) == (lines if new[:3] == b"new" else lines[2:])


def test_a_file_that_is_cut_off_while_it_is_read_is_read_from_its_start(watched, tmp_path, monkeypatch):
    """Like copytruncate, whose application writes on at once."""
    path, pread = tmp_path / "a.log", os.pread
    path.write_bytes(b"old 1\nold 2\n")

    def cut_off(fd, count, offset):
        data = pread(fd, count, offset)
        if count == files._BLOCK and data == b"old 1\nold 2\n":
            path.write_bytes(b"old 1\nnew 2\nnew 3\n")
        return data

    monkeypatch.setattr(os, "pread", cut_off)
    sent = drain(watched)
    sent += drain(watched)
    assert [line for _, line in sent] == [b"old 1", b"old 2", b"old 1", b"new 2", b"new 3"]


def test_a_file_with_new_content_was_not_renamed(watched, tmp_path):
    (tmp_path / "a.log").write_bytes(b"one\n")
    drain(watched)
    (tmp_path / "a.log").rename(tmp_path / "b.log")
    look(watched)
    (tmp_path / "b.log").write_bytes(b"two\nhalf")
    assert drain(watched) == [("b.log", b"two")]
    assert not has_ended(watched.files[0], linger_s=0.0)


def test_new_content_is_noticed_by_its_first_line_and_by_the_byte_before_the_offset(watched, tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"same\nabc\n")
    assert len(drain(watched)) == 2
    for content in (b"same\nabcdefghi\n", b"else\nabc\nx\n"):
        log.write_bytes(content)
        assert drain(watched) == [("a.log", line) for line in content.splitlines()]
    assert watched.truncated == 2 and len(watched.said) == 2


@pytest.mark.parametrize("new", [b"cccc\ndddd\n", b"aaaa\ndddd\n"], ids=["all", "same first line"])
def test_new_content_of_the_same_size_is_noticed_also_at_the_same_time_of_change(watched, tmp_path, new):
    log = tmp_path / "a.log"
    log.write_bytes(b"aaaa\nbbbb\n")
    now = time.time_ns() + 3600 * 10**9  # as near as a write can be, on however slow a machine
    os.utime(log, ns=(now, now))
    assert len(drain(watched)) == 2
    log.write_bytes(new)
    os.utime(log, ns=(now, now))  # two writes within a tick of the clock of the file system
    assert drain(watched) == [("a.log", line) for line in new.splitlines()]
    for later in (now, now + 10**9, now - 10**12):  # touched
        os.utime(log, ns=(later, later))
        assert drain(watched) == []
    log.write_bytes(b"aaaa\nbbbb\n")
    assert len(drain(watched)) == 2


def test_a_file_that_does_not_change_is_not_opened_again(watched, tmp_path):
    (tmp_path / "a.log").write_bytes(b"one\nhalf")
    os.utime(tmp_path / "a.log", (1, 1))
    assert drain(watched) == [("a.log", b"one")]
    look(watched)
    [file] = watched.files
    assert not file.has_more


def test_a_long_line_that_was_cut_off_does_not_hide_the_lines_that_come_instead(watched, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK", 4096)
    log = tmp_path / "a.log"
    log.write_bytes(b"h\n" + b"x" * 50_000)
    assert drain(watched) == [("a.log", b"h")]
    os.truncate(log, 2)
    assert drain(watched) == []
    with log.open("ab") as file:
        file.write(b"y" * 9_000 + b"\n" + b"z\n" * 30_000)
    assert drain(watched) == [("a.log", b"y" * LONGEST), *[("a.log", b"z")] * 30_000]


def test_the_end_of_a_long_line_is_looked_for_once(watched, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK", 4096)
    monkeypatch.setattr(files, "_SCAN_BLOCKS", 2)
    with (tmp_path / "a.log").open("ab", buffering=0) as log:
        log.write(b"x" * 50_000)
        look(watched)
        [file] = watched.files
        assert make_ready(watched, file)
        reads = 0
        while file.has_more:
            assert file.read(LONGEST, False) is None
            reads += 1
        assert reads > 5
        log.write(b"\nnext\n")
        file.see(os.stat(file.path))
        block = file.read(LONGEST, False)
        assert (block.lines, file.end, block.length) == ([b"x" * LONGEST], 50_001, 50_000)


def test_a_long_line_without_a_newline_at_the_end_of_a_renamed_file_is_sent_and_the_file_let_go(
    watched, tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "_BLOCK", 4096)
    (tmp_path / "a.log").write_bytes(b"one\n" + b"x" * 50_000)
    assert drain(watched) == [("a.log", b"one")]
    (tmp_path / "a.log").rename(tmp_path / "a.log.1")
    assert drain(watched) == []
    assert drain(watched, is_final=True) == [("a.log", b"x" * LONGEST)]
    (tmp_path / "a.log.1").unlink()
    forget_ended(watched, 0.0)
    assert watched.files == [] and watched.said == []


def test_a_block_is_larger_than_others_only_for_one_line_that_is(watched, tmp_path):
    """As with a KMQ_MAX_LINE of many MiB, which is no reason to hold so much of short lines."""
    block = files._BLOCK
    lines = [*[b"x" * 1000] * 3000, b"y" * 3 * block, b"z"]
    (tmp_path / "a.log").write_bytes(b"\n".join([*lines, b""]))
    look(watched)
    [file] = watched.files
    assert make_ready(watched, file)
    found = []
    while part := file.read(8 * block, False):
        assert file.end - file.offset <= block or part.lines[0] == lines[-2]
        found += part.lines
        file.take_back(len(part.lines))
    assert found == lines


@pytest.mark.parametrize(
    "pattern", ["**/*.log", "**", "**/d/**", "*/**/*.log", "d/**/e/*.log", "**/.h/*.log", "d/**.log"]
)
def test_two_asterisks_find_what_glob_finds_and_follow_no_link_to_a_directory(watched, tmp_path, monkeypatch, pattern):
    for folder in (".", "d", "d/e", "d/e/e", "f/d", ".h", "d/.h"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "a.log").write_bytes(b"1\n")
    expected = {path for path in glob.glob(f"{tmp_path}/{pattern}", recursive=True) if os.path.isfile(path)}
    for link in ("d/up", "d/e/up", "d/e/again"):  # without an end, and each level doubles the paths
        (tmp_path / link).symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for patterns in ([f"{tmp_path}/{pattern}"], [pattern]):
        watched.patterns[:], watched.files[:] = patterns, []
        look(watched)
        assert {file.path for file in watched.files} == expected
        assert len(watched.files) == len(expected) > 0


def test_the_state_is_no_log_under_any_name(watched, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "linked").symlink_to("logs")
    (tmp_path / "logs" / "a.log").write_bytes(b"the state\n")
    (tmp_path / "logs" / "b.log").symlink_to("a.log")
    watched.not_these.add(str(tmp_path / "logs" / "a.log"))
    watched.patterns[:] = [f"{tmp_path}/linked/*.log", f"{tmp_path}/logs/*.log"]
    assert drain(watched) == []


def test_a_pattern_that_is_a_path_is_that_path_and_one_without_files_is_named_once(watched, tmp_path):
    (tmp_path / "a[1].log").write_bytes(b"1\n")
    watched.patterns[:] = [f"{tmp_path}/a[1].log", f"{tmp_path}/*.txt"]
    assert drain(watched) == [("a[1].log", b"1")]
    (tmp_path / "a[1].log").unlink()
    look(watched)
    assert watched.said == [f"no file matches {tmp_path}/*.txt"]


def test_more_files_than_may_be_followed_are_named(watched, tmp_path, monkeypatch):
    monkeypatch.setattr(finding, "MOST_FILES", 2)
    for name in "abc":
        (tmp_path / f"{name}.log").write_bytes(b"1\n")
    assert len(drain(watched)) == 2
    assert watched.said == [f"{path} is not followed: 2 files are already" for path in watched.refused]


def test_a_state_keeps_names_of_every_kind(watched, tmp_path):
    names = [b"a b.log", b"100%0A.log", b"two\nlines.log", b"\xff path=x.log"]
    for name in names:
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as log:
            log.write(b"1\n")
    drain(watched)
    state = ShipState("ship-1", "app", 5, watched.files)
    path = f"{tmp_path}/state"
    save_state(path, state)
    again = load_state(path)
    assert again[:3] == state[:3]
    rows = [
        [(f.path, f.device, f.inode, f.offset, f.end, f.lines, f.mark) for f in each.files] for each in (state, again)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == len(names)


# --- held and let go ---------------------------------------------------------------------------------------------------


def test_what_is_written_to_a_renamed_file_after_a_long_silence_is_read(watched, tmp_path):
    with (tmp_path / "a.log").open("ab", buffering=0) as log:
        log.write(b"1\n")
        assert drain(watched) == [("a.log", b"1")]
        (tmp_path / "a.log").rename(tmp_path / "a.log.1")
        (tmp_path / "a.log").write_bytes(b"2\n")
        assert drain(watched) == [("a.log", b"2")]
        forget_ended(watched, 0.0)
        log.write(b"3\n")
        (tmp_path / "a.log.1").rename(tmp_path / "a.log.2")
        assert drain(watched) == [("a.log", b"3")]
        for file in watched.files:  # as for want of descriptors
            file.close()
        log.write(b"4\n")
        (tmp_path / "a.log.2").rename(tmp_path / "a.log.3")
        assert drain(watched) == [("a.log", b"4")]
    assert watched.said == []


def test_a_deleted_file_is_held_as_long_as_its_writer_has_it(watched, tmp_path):
    with (tmp_path / "a.log").open("ab", buffering=0) as log:
        log.write(b"1\n")
        assert drain(watched) == [("a.log", b"1")]
        (tmp_path / "a.log").unlink()
        assert drain(watched) == []
        forget_ended(watched, 0.0)
        log.write(b"2\n")
        assert drain(watched) == [("a.log", b"2")]
    forget_ended(watched, 0.0)
    assert watched.files == [] and watched.lost == 0


def test_descriptors_are_few_while_nothing_is_sent_and_what_is_lost_for_want_of_them_is_named(
    watched, tmp_path, monkeypatch
):
    monkeypatch.setattr(finding, "MOST_OPEN", 3)
    (tmp_path / "other").touch()  # an empty directory may be the place of a volume
    for number in range(6):
        (tmp_path / f"{number}.log").write_bytes(b"12\n")
    for _ in range(2):
        look(watched)
        forget_ended(watched)
        hold(watched)
        assert sum(file.fd >= 0 for file in watched.files) == 3
    for number in range(6):
        (tmp_path / f"{number}.log").unlink()
    assert len(drain(watched)) == 3
    assert watched.lost == 9
    assert sum("is gone: 3 bytes after byte 0 are lost" in said for said in watched.said) == 3


def test_a_writer_of_a_deleted_file_that_is_let_go_for_another_is_named(watched, tmp_path, monkeypatch):
    monkeypatch.setattr(finding, "MOST_OPEN", 1)
    with (tmp_path / "a.log").open("ab", buffering=0) as log:
        log.write(b"1\n")
        assert drain(watched) == [("a.log", b"1")]
        (tmp_path / "a.log").unlink()
        assert drain(watched) == []
        (tmp_path / "b.log").write_bytes(b"2\n")
        assert drain(watched) == [("b.log", b"2")]
    assert watched.let_go == 1 and "is let go for another file" in watched.said[0]


def test_a_state_of_the_release_before_goes_on_and_is_written_anew(watched, tmp_path):
    path, state = tmp_path / "a.log", tmp_path / "state"
    path.write_bytes(b"1\n2\n3\n")
    found = os.stat(path)
    head = b"kmq-ship 1 name=ship-aa topic=t next=3\n"
    mark = crc32(b"1\n2\n" * 2)
    row = b"offset=4 end=4 lines=0 mark=%08x file=%x:%x: path=%b\n"
    row %= mark, found.st_dev, found.st_ino, os.fsencode(path)
    state.write_bytes(head + row + b"crc32=%08x\n" % crc32(head + row))
    save_state(str(state), load_state(str(state)))
    assert state.read_bytes().startswith(b"kmq-ship 2 ")
    watched.files[:] = load_state(str(state)).files
    path.rename(tmp_path / "a.old")
    assert drain(watched) == [("a.log", b"3")]


def test_a_full_disk_under_the_state_is_waited_for_while_files_are_looked_at(watched, tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    work = shipment(watched, tmp_path)
    _begin(work, from_start=True)
    full = [True, True]

    def save(path, state, real=save_state):
        if full:
            full.pop()
            (tmp_path / "logs" / f"{len(full)}.log").write_bytes(b"1\n")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, state)

    monkeypatch.setattr(process, "save_state", save)
    assert process._save_plan(work)
    assert len(load_state(work.path).files) == 2
    for file in work.watched.files:
        file.close()
