"""What several unit tests need: a data directory, rings of their own."""

import itertools
import os

import pytest
from fake_logger import FakeLogger
from intake_wire import Wire
from received_ends import close_all

from kmq.links import layout, ring

_numbers = itertools.count()


@pytest.fixture
def data(tmp_path):
    """An empty data directory."""
    for name in ("append", "topics"):
        (tmp_path / name).mkdir()
    return str(tmp_path)


@pytest.fixture
def rings():
    """Makes (writer, reader) pairs of a ring; all of them are gone afterwards."""
    made = []

    def make(slots=64, nbytes=1 << 16, policy="block", extra=0, first_seq=1):
        instance = f"unit-{os.getpid()}-{next(_numbers)}"
        identity = layout.make_identity("unit", slots, nbytes, extra, policy)
        writer = ring.RingWriter(instance, "framed", identity, "the writer", lambda: (first_seq, 0), FakeLogger())
        made.append((instance, writer))
        reader = ring.RingReader.attach(instance, "framed", identity, "the reader")
        made.append((instance, reader))
        return writer, reader

    yield make
    for _, end in made:
        end.close()
    for instance in {instance for instance, _ in made}:
        layout.remove(instance, "framed")


@pytest.fixture
def wire(tmp_path):
    """An Intake and what reads from it."""
    made = Wire(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_way_is_left():
    """No ring `received` outlives its test."""
    yield
    close_all()
