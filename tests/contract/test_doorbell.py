"""Doorbells: a sleeper is woken, and the wake-up that is lost all the same costs no more than one wait."""

import os
import time

import pytest
from ring_end import ROUNDS

from kmq.links.doorbell import WAIT_S, Doorbell

ROOM_S = 5.0  # what this machine's other work may add to a sleep


@pytest.fixture
def bell():
    name = f"/contract-{os.getpid()}.bell"
    yield Doorbell(name)
    Doorbell.remove(name)


def test_a_bell_rung_before_the_sleep_is_heard(bell):
    bell.ring()
    assert bell.wait()


def test_many_rings_wake_once(bell):
    for _ in range(5):
        bell.ring()
    assert bell.wait()
    assert not bell.wait(0.01)


def test_a_sleep_ends_by_itself(bell):
    began = time.monotonic()
    assert not bell.wait()
    assert WAIT_S * 0.9 <= time.monotonic() - began < WAIT_S + ROOM_S


def test_removing_a_bell_twice_is_no_error(bell):
    Doorbell.remove(bell.name)
    Doorbell.remove(bell.name)


def test_wake_ups_are_not_lost_between_two_processes(start, tmp_path):
    """Each round is two wake-ups. One lost in 150, as a protocol without fences once showed, would be dozens."""
    for process in (start("ping"), start("pong")):
        assert process.wait(120) == 0, process.communicate()[1]
    lost = [int((tmp_path / f"out.{role}").read_text()) for role in ("ping", "pong")]
    print(f"rounds={ROUNDS} lost={sum(lost)}")
    assert sum(lost) <= ROUNDS // 1000
