"""At most one living process holds each end; a dead one holds nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from chaos.loopfs import disk_of
from ring_end import block_of, identity, lock_of, open_writer
from waiting import until

from kmq.errors import BusyError
from kmq.links import ownership
from kmq.links.layout import Framed, Stamp
from kmq.links.ownership import FileLock, describe, is_of_another_pod
from kmq.links.ring import RingReader

WAIT_S = 0.3  # in place of the 2 s that a stage waits for who holds what it needs


def held(start):
    process = start("holder")
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_waits_and_then_names_the_holder(start, instance, monkeypatch):
    monkeypatch.setattr(ownership, "OWNER_WAIT_S", WAIT_S)
    process = held(start)
    began = time.monotonic()
    with pytest.raises(BusyError, match=rf"ring {instance}\.framed \(writer\) is held by pid={process.pid}$"):
        open_writer(instance, "block")
    assert time.monotonic() - began >= WAIT_S


def test_a_lock_is_free_at_once_when_its_holder_is_killed(start, instance):
    process = held(start)
    lock = lock_of(instance)
    assert lock.is_held() and not lock.try_acquire()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert lock.try_acquire()
    lock.release()
    assert not lock.is_held()


def test_a_writer_that_waits_gets_the_ring_when_the_holder_dies(start, instance):
    process = held(start)
    subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {process.pid}"]).wait()
    writer = open_writer(instance, "block")
    assert not writer.created
    writer.lock.release()


def test_looking_at_a_held_lock_does_not_free_it(start, instance):
    held(start)
    for _ in range(3):
        assert lock_of(instance).is_held()
        assert not lock_of(instance).try_acquire()


def test_of_many_that_try_at_once_exactly_one_gets_it(start, instance, tmp_path):
    open_writer(instance, "block").lock.release()
    contenders = [start("contender") for _ in range(6)]
    (tmp_path / "out.go").touch()
    answers = [process.stdout.readline() for process in contenders]
    assert sorted(answers) == ["False\n"] * 5 + ["True\n"]
    assert lock_of(instance).is_held()


def test_a_reader_exits_and_the_ring_remains(start, instance, tmp_path):
    writer = open_writer(instance, "block")
    data, count = block_of(1)
    writer.append(Framed(data, Stamp(1, count, 0, 0)))
    (tmp_path / "out.stop").touch()
    process = start("reader")
    until(lambda: writer.first_waiting_seq() == 1 + count, "the reader has released the block")
    writer.lock.release()
    assert process.wait(30) == 0, process.communicate()[1]
    assert os.path.exists(writer.path)
    again = open_writer(instance, "block")
    assert not again.created and again.last.next_seq == 1 + count
    again.append(Framed(b"later", Stamp(1 + count, 1, 0, 0)))
    reader = RingReader.attach(instance, "framed", identity("block"), "another")
    assert [bytes(block.data) for block in reader.take()] == [b"later"]
    for end in (again, reader):
        end.lock.release()


HOLD_FILE = """
import sys, time
from kmq.links.ownership import FileLock, describe, is_of_another_pod
FileLock(sys.argv[1]).acquire("the WAL", describe("durability", "."))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def file_holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_FILE, f"{tmp_path}/.owner"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_owner_of_a_directory_waits_and_then_names_the_holder(file_holder, tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "OWNER_WAIT_S", WAIT_S)
    lock = FileLock(f"{tmp_path}/.owner")
    with pytest.raises(
        BusyError, match=rf"the WAL is held by pid={file_holder.pid} host=\S+ stage=durability pod=\S+ data=/"
    ):
        lock.acquire("the WAL", describe("another", "."))
    assert lock.is_held() and f"pid={file_holder.pid} " in lock.holder()


@pytest.mark.root
def test_a_lock_is_taken_again_on_a_full_disk_and_gives_no_room_away(tmp_path, monkeypatch):
    """Others write there too: what is given back is theirs, and a text that is to be written then has no room."""
    with ExitStack() as cleanup:
        disk = disk_of("ext4", 16 << 20, tmp_path, cleanup)
        lock, truncate = FileLock(f"{disk.path}/.owner"), os.ftruncate
        lock.acquire("the WAL", "a holder with a long name")
        lock.release()
        disk.fill(0)
        monkeypatch.setattr(os, "ftruncate", lambda fd, size: (truncate(fd, size), os.fsync(fd), disk.fill(0)))
        lock.acquire("the WAL", "the next")
        assert lock.holder() == "the next"
        lock.release()


def test_a_pod_of_the_same_name_is_another_one():
    """A StatefulSet names the pod that replaces another as that one."""
    ours = describe("framer", "a b")
    theirs = re.sub(r"pod=\S+", "pod=0badf00d-2e-1", ours)
    assert not is_of_another_pod(describe("durability", "a b"), ours) and not is_of_another_pod("", ours)
    assert theirs != ours and is_of_another_pod(theirs, ours)
    before = re.sub(r" pod=\S+", "", ours)  # as a release before wrote it
    assert not is_of_another_pod(before, ours)
    assert is_of_another_pod(re.sub(r"host=\S+", "host=kmq-1", before), ours)


def test_a_directory_is_free_at_once_when_its_owner_is_killed(file_holder, tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "OWNER_WAIT_S", 0.0)  # who finds it held has no patience
    file_holder.kill()
    file_holder.wait()
    lock = FileLock(f"{tmp_path}/.owner")
    assert not lock.is_held()
    lock.acquire("the WAL", "the next")
    assert lock.holder() == "the next" and lock.is_held()
    lock.release()
    assert not lock.is_held()
