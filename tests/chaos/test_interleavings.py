"""The ring, one line at a time: at every line of one end, the other end runs. No luck is needed to meet a race.

Both ends live in this process; a trace function stops one of them in front of a chosen line and lets the other work.
What two processes on a weakly ordered machine could see beyond that is what the fences are for: the last tests look
that each stands where doorbell.py says.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from kmq.links import doorbell, layout
from kmq.links.layout import COUNTER, FLOOR, READER_SLEEPS, TAIL, WRITER_SLEEPS, Block, Framed, Stamp, make_identity
from kmq.links.ring import RingReader, RingWriter
from kmq.logfmt import Logger

SLOTS, RING_BYTES, BLOCK = 24, 4096, 4  # messages, bytes, messages in a block
_number = itertools.count()


class Ends:
    """Both ends of one ring, and what goes through it."""

    def __init__(self, policy: str) -> None:
        self.instance = f"chaos-{os.getpid()}-ring-{next(_number)}"
        identity = make_identity("id", SLOTS, RING_BYTES, 0, policy)
        self.writer = RingWriter(self.instance, "r", identity, "w", lambda: (1, 0), Logger("test"))
        reader = RingReader.attach(self.instance, "r", identity, "r")
        assert reader is not None
        self.reader = reader
        self.got: list[int] = []
        self.shown = 0  # the last seq that was appended when it was read last

    def block(self, first: int) -> bytes:
        """Lines that say which seq they are, of ever other lengths."""
        return b"".join(b"%d|" % seq + b"x" * (seq * 7 % 90) + b"\n" for seq in range(first, first + BLOCK))

    def write(self) -> bool:
        first = self.writer.last.next_seq
        data = self.block(first)
        if not self.writer.has_room(len(data), BLOCK):
            return False
        self.writer.append(Framed(data, Stamp(first, BLOCK, 0, 0)))
        return True

    def burst(self) -> None:
        """As much as fits; under drop_oldest more than the ring holds."""
        for _ in range(SLOTS // BLOCK * 2):
            if not self.write():
                return

    def read(self) -> None:
        """Take what is there and look at every byte."""
        blocks = self.reader.take()
        for block in blocks:
            self.judge(block)
        if blocks:
            self.reader.release(blocks[-1])

    def judge(self, block: Block) -> None:
        assert bytes(block.data) == self.block(block.first_seq), f"block {block.first_seq} is not what was written"
        if self.got and block.first_seq != self.got[-1] + 1:
            assert block.first_seq > self.got[-1], "the same block twice"
            assert self.reader.drops and self.reader.jumped, f"a gap before {block.first_seq} that nobody reports"
        self.got += range(block.first_seq, block.last_seq + 1)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        layout.remove(self.instance, "r")


@pytest.fixture
def make() -> Iterator[Callable[[str], Ends]]:
    made: list[Ends] = []

    def ends(policy: str) -> Ends:
        made.append(Ends(policy))
        return made[-1]

    yield ends
    for each in made:
        each.close()


def preempted(work: Callable[[], object], at: int, other: Callable[[], object]) -> bool:
    """Run `work`, and `other` in front of the line number `at` that it comes to; False when there are fewer lines."""
    seen = itertools.count()
    done = False

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal done
        if event == "line" and not done and next(seen) == at:
            done = True
            sys.settrace(None)
            other()
            sys.settrace(begin)
        return local

    def begin(frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename  # not in doorbell.py: two processes do not share its lock
        return local if name.endswith(("/links/ring.py", "/links/layout.py")) and not done else None

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        work()
    finally:
        sys.settrace(before)
    return done


@pytest.mark.parametrize("policy", ["block", "drop_oldest"])
@pytest.mark.parametrize("waiting", [0, 1, 3, 6])
def test_what_the_writer_does_in_the_middle_of_a_read_is_seen_whole_or_not_at_all(
    make: Callable[[str], Ends], policy: str, waiting: int
) -> None:
    for at in itertools.count():
        ends = make(policy)
        for _ in range(5):  # so that the ring has wrapped before
            ends.write()
            ends.read()
        for _ in range(waiting):
            ends.write()
        if not preempted(ends.read, at, ends.burst):
            return
        ends.read()
        ends.read()
        assert ends.got[-1] == ends.writer.last.next_seq - 1, f"the end is missing (line {at})"


@pytest.mark.parametrize("policy", ["block", "drop_oldest"])
@pytest.mark.parametrize("waiting", [0, 3, 6, 9])
def test_what_the_reader_does_in_the_middle_of_a_write_is_seen_whole_or_not_at_all(
    make: Callable[[str], Ends], policy: str, waiting: int
) -> None:
    for at in itertools.count():
        ends = make(policy)
        for _ in range(5):
            ends.write()
            ends.read()
        for _ in range(waiting):
            ends.write()
        if not preempted(lambda ends=ends: [ends.write() for _ in range(3)], at, ends.read):
            return
        ends.read()
        ends.read()
        assert ends.got[-1] == ends.writer.last.next_seq - 1, f"the end is missing (line {at})"


class Watched:
    """Cells that note every load and store."""

    def __init__(self, cells: memoryview, events: list[tuple[str, int]]) -> None:
        self._cells, self._events = cells, events

    def __getitem__(self, at: Any) -> Any:
        self._events.append(("load", at if isinstance(at, int) else at.start))
        return self._cells[at]

    def __setitem__(self, at: int, value: int) -> None:
        self._events.append(("store", at))
        self._cells[at] = value

    def release(self) -> None:
        self._cells.release()


class WatchedLock:
    """The lock that is the fence."""

    def __init__(self, events: list[tuple[str, int]]) -> None:
        self._events = events

    def acquire(self) -> None:
        self._events.append(("fence", 0))

    def release(self) -> None:
        pass


@pytest.fixture
def watched(make: Callable[[str], Ends], monkeypatch: pytest.MonkeyPatch) -> tuple[Ends, list[tuple[str, int]]]:
    ends, events = make("drop_oldest"), list[tuple[str, int]]()
    monkeypatch.setattr(doorbell, "_fence_lock", WatchedLock(events))
    ends.writer.cells = Watched(ends.writer.cells, events)  # type: ignore[assignment]
    ends.reader.cells = Watched(ends.reader.cells, events)  # type: ignore[assignment]
    return ends, events


def assert_fenced(events: list[tuple[str, int]], before: tuple[str, int], after: tuple[str, int]) -> None:
    """Between the first `before` and the next `after` there is a fence."""
    start = events.index(before)
    end = events.index(after, start + 1)
    assert ("fence", 0) in events[start:end], f"no fence between {before} and {after}: {events}"


def test_there_is_a_fence_wherever_a_store_must_be_seen_before_a_load(
    watched: tuple[Ends, list[tuple[str, int]]],
) -> None:
    ends, events = watched
    ends.write()
    assert_fenced(events, ("store", layout.RECORD[1] + 5), ("store", COUNTER))  # the record before its counter
    assert_fenced(events, ("store", COUNTER), ("load", READER_SLEEPS))  # or the reader sleeps on
    events.clear()
    ends.read()
    assert_fenced(events, ("load", FLOOR), ("load", FLOOR))  # the copy lies between the two looks
    assert_fenced(events, ("store", TAIL), ("load", WRITER_SLEEPS))  # or the writer sleeps on
    events.clear()
    ends.reader.wait()
    assert_fenced(events, ("store", READER_SLEEPS), ("load", COUNTER))
    events.clear()
    ends.burst()
    events.clear()
    ends.writer.wait_room(100, SLOTS)
    assert_fenced(events, ("store", WRITER_SLEEPS), ("load", TAIL))
    assert ("fence", 0) in events[events.index(("store", FLOOR)) :], (
        "a floor that is published after its bytes are gone"
    )
