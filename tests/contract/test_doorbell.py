"""Doorbells: a sleeper is woken, and the wake-up that is lost all the same costs no more than one wait.

They are System V semaphores, which anyone may remove, and of which the kernel has only so many.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import sysv_ipc
from fake_logger import FakeLogger

from kmq.errors import ConfigError
from kmq.links import doorbell, layout
from kmq.links.doorbell import WAIT_S, RemovedError
from kmq.links.ring import RingWriter

ROOM_S = 30.0  # what this machine's other work may add to a sleep


@pytest.fixture
def instance(instance):
    yield instance
    for each in doorbell.sets_of(instance):
        each.remove()


@pytest.fixture
def headers():
    """What the header of a ring says, newest last."""
    return []


WAITS = ("the C library's wait", "the package's wait")  # a wheel of sysv_ipc has only the first (scripts/setup)


@pytest.fixture(params=WAITS if sysv_ipc.SEMAPHORE_TIMEOUT_SUPPORTED else WAITS[:1])
def bell(request, instance, headers, monkeypatch):
    monkeypatch.setattr(sysv_ipc, "SEMAPHORE_TIMEOUT_SUPPORTED", request.param == WAITS[1])
    return doorbell.make(instance, headers.append).reader


def test_a_bell_rung_before_the_sleep_is_heard(bell):
    bell.ring(1)
    assert bell.wait()


def test_many_rings_wake_once(bell):
    for asleep_since in (1, 1, 2, 2, 3):
        bell.ring(asleep_since)
    assert bell.wait()
    assert not bell.wait(0.01)


def test_a_sleep_that_was_ended_is_not_ended_again(bell):
    bell.ring(1)
    assert bell.wait()
    bell.ring(1)
    assert not bell.wait(0.01)
    bell.ring(2)
    assert bell.wait()


def test_a_sleep_ends_by_itself(bell):
    began = time.monotonic()
    assert not bell.wait()
    assert WAIT_S * 0.9 <= time.monotonic() - began < WAIT_S + ROOM_S


def test_a_signal_ends_a_sleep_and_nothing_else(bell):
    """Its handler has run, and the stage looks what it asks for."""
    heard = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        assert not bell.wait(60)
        assert heard == [signal.SIGALRM] and time.monotonic() - began < 60
    finally:
        signal.signal(signal.SIGALRM, before)
    bell.ring(1)
    assert bell.wait()


def test_who_sleeps_on_a_bell_that_is_removed_hears_of_it_at_once(bell):
    timer = threading.Timer(0.1, bell.semaphore.remove)
    timer.start()
    began = time.monotonic()
    with pytest.raises(RemovedError, match=f"semaphore {bell.semaphore.id}: was removed"):
        bell.wait(60)
    assert time.monotonic() - began < 60
    timer.join()
    assert not bell.is_in_place()
    bell.ring(1)  # wakes nobody, and is no error: it is the sleeper's to say
    with pytest.raises(RemovedError):
        bell.wait()


def test_the_header_says_which_bells_are_a_rings(instance, headers):
    made = doorbell.make(instance, headers.append)
    found = doorbell.find(headers[-1])
    assert [each.semaphore.id for each in found] == [each.semaphore.id for each in made]
    assert f"ipc={os.stat('/proc/self/ns/ipc').st_ino} " in headers[-1]
    made.writer.semaphore.remove()
    other = sysv_ipc.Semaphore(made.writer.semaphore.key, sysv_ipc.IPC_CREX)  # the key is there, the id is another's
    assert doorbell.find(headers[-1]) is None
    other.remove()
    assert doorbell.find(headers[-1]) is None


def test_only_what_no_ring_names_is_removed_and_nothing_of_others(instance, headers):
    kept = doorbell.make(instance, headers.append)
    left = doorbell.make(instance, lambda text: None)
    foreign = sysv_ipc.Semaphore(None, sysv_ipc.IPC_CREX)
    others = doorbell.make(f"{instance}-other", lambda text: None)
    try:
        assert doorbell.remove_left(instance, lambda: headers[-1:]) == 2
        assert kept.are_in_place() and others.are_in_place() and foreign.value == 0
        assert not left.reader.is_in_place() and not left.writer.is_in_place()
    finally:
        foreign.remove()
        for each in others:
            each.semaphore.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a set to another user")
def test_what_another_user_has_left_is_that_users(instance):
    left = doorbell.make(instance, lambda text: None)
    left.writer.semaphore.uid = 65534
    assert doorbell.remove_left(instance, lambda: []) == 1
    assert left.writer.is_in_place() and not left.reader.is_in_place()


def test_a_key_is_in_the_header_before_there_is_a_set(instance):
    """Else whoever removes what is left over would remove what is being made."""
    there = []

    def announce(text):
        keys = {each.key for each in doorbell.sets_of(instance)}
        assert all(f"={key}:" in text for key in keys), "a set that no header has named"
        there.append(len(keys))

    doorbell.make(instance, announce)
    assert there == [0, 1, 2]


def in_a_small_namespace(command, *argv):
    """Run Python in an IPC namespace that may have one set of semaphores."""
    setup = f"import sys; open('/proc/sys/kernel/sem', 'w').write('250 32000 32 1'); {command}"
    return subprocess.run(
        ["unshare", "--ipc", sys.executable, "-c", setup, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def can_unshare():
    return shutil.which("unshare") and in_a_small_namespace("pass").returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs an IPC namespace of its own")
def test_a_limit_of_the_kernel_is_told_with_what_to_do(instance):
    done = in_a_small_namespace(
        "from kmq.links import doorbell; doorbell.make(sys.argv[1], lambda text: None)", instance
    )
    assert "the limit of the kernel is reached (kernel.sem = 250 32000 32 1)" in done.stderr
    assert "sysctl -w kernel.sem='250 32000 32 128'" in done.stderr and "ipcs -s" in done.stderr


@pytest.mark.skipif(not can_unshare(), reason="needs an IPC namespace of its own")
def test_a_reader_in_another_ipc_namespace_than_its_writer_says_so(instance):
    """Neither could ever wake the other. A ring whose writer is gone is waited for: its next one may be of our namespace."""
    attach = (
        "from kmq.links import layout; from kmq.links.ring import RingReader;"
        "print(RingReader.attach(sys.argv[1], 'framed', layout.make_identity('x', 64, 65536, 0, 'block'), 'it'))"
    )
    identity = layout.make_identity("x", 64, 65536, 0, "block")
    writer = RingWriter(instance, "framed", identity, "the writer", lambda: (1, 0), FakeLogger())
    done = in_a_small_namespace(attach, instance)
    assert f"its doorbells are in another IPC namespace (ipc:[{doorbell.namespace()}])" in done.stderr
    writer.close()
    assert in_a_small_namespace(attach, instance).stdout == "None\n"


@pytest.mark.parametrize(
    ("errno", "words"),
    [(28, "kernel.sem = "), (38, "must allow semget"), (1, "must allow semget")],
    ids=["the limit", "no semaphores", "not allowed"],
)
def test_a_kernel_that_gives_no_semaphores_is_told_with_what_to_do(instance, monkeypatch, errno, words):
    made = []

    def refuse(key, *args, real=sysv_ipc.Semaphore):
        if made:
            raise OSError(errno, os.strerror(errno))
        made.append(real(key, *args))
        return made[0]

    monkeypatch.setattr(sysv_ipc, "Semaphore", refuse)
    with pytest.raises(ConfigError, match=words):
        doorbell.make(instance, lambda text: None)
    monkeypatch.undo()
    assert not doorbell.sets_of(instance), "what was made before that is removed"


def test_wake_ups_are_not_lost_between_two_processes(start, tmp_path):
    """Each round is two wake-ups. A protocol without fences once lost one in 150; now and then a process is late by itself."""
    for process in (start("ping"), start("pong")):
        assert process.wait(120) == 0, process.communicate()[1]
    rounds, *lost = (int((tmp_path / f"out.{name}").read_text()) for name in ("rounds", "ping", "pong"))
    print(f"rounds={rounds} lost={sum(lost)}")
    assert rounds > 100 and sum(lost) <= max(2, rounds // 1000)
