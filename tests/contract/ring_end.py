"""One end of a ring in a process of its own: `python ring_end.py <role> <instance> <policy> <file>`.

writer      appends blocks until <file>.stop exists; content and size of a block follow from its first seq
reader      checks every block against that and says `next <first> <last>` of each in <file>, or `jumped <first> <last>` where the
            ring told it that blocks before this one were dropped. Ends when the writer is gone and nothing waits.
ping, pong  writer and reader of a ring that one block fills, so that every block needs two wake-ups. Both hesitate a little,
            so that one often goes to sleep just as it is woken, and say in <file>.<role> how many wake-ups were lost. pong ends
            when ping has.
holder      takes the writing end, says `held` and waits to be killed
contender   waits for <file>.go, tries once to take the writing end, says whether it has it, and waits to be killed
"""

import os
import random
import sys
import time

from fake_logger import FakeLogger

from kmq.errors import CorruptError
from kmq.links import layout
from kmq.links.doorbell import Doorbell
from kmq.links.layout import Framed, Stamp
from kmq.links.ownership import RingLock
from kmq.links.ring import RingReader, RingWriter

SLOTS, RING_BYTES = 512, 1 << 16
ROUNDS, ROUNDS_S = 10_000, 60.0  # whichever is reached first: on a busy machine each round waits for two turns to run
LOST_S = 2.0  # in place of WAIT_S: a peer that has its turn later than that is no lost wake-up, but a rare one


def identity(policy: str) -> layout.Identity:
    return layout.make_identity("contract", SLOTS, RING_BYTES, 0, policy)


def open_writer(instance: str, policy: str) -> RingWriter:
    return RingWriter(instance, "framed", identity(policy), f"pid={os.getpid()}", lambda: (1, 0), FakeLogger())


def lock_of(instance: str) -> RingLock:
    """The lock of the writing end of a ring that is there."""
    return RingLock(os.open(layout.shm_path(instance, "framed"), os.O_RDWR), layout.WRITER)


def wait_for_reader(instance: str, policy: str) -> RingReader:
    while (reader := RingReader.attach(instance, "framed", identity(policy), f"pid={os.getpid()}")) is None:
        time.sleep(0.001)
    return reader


def block_of(first: int) -> tuple[bytes, int]:
    """(data, count) of the block that begins with seq `first`."""
    rng = random.Random(first)
    count = rng.choice([1, 17, SLOTS // 4, SLOTS // 4])  # few blocks fill the ring: its ends meet all the time
    data = b"%d " % first * rng.choice([1, 50, 2000, 5000])
    return data[: RING_BYTES // 2 - layout.HEADER], count


def write(instance: str, policy: str, path: str) -> None:
    writer = open_writer(instance, policy)
    while not os.path.exists(f"{path}.stop"):
        for _ in range(50):
            first = writer.last.next_seq
            data, count = block_of(first)
            while not writer.has_room(len(data), count) and not writer.wait_room(len(data), count):
                pass
            writer.append(Framed(data, Stamp(first, count, 0, 0)))


def read(instance: str, policy: str, path: str) -> None:
    reader = wait_for_reader(instance, policy)
    out = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    size = os.fstat(out).st_size
    said = os.pread(out, 100, max(0, size - 100)).split(b"\n")  # a killed process' writes are whole
    last = int(said[-2].split()[2]) if size else 0
    while True:
        over = reader.writer_is_gone() and os.path.exists(f"{path}.stop")
        blocks = reader.take()
        for number, block in enumerate(blocks):
            if (bytes(block.data), block.count) != block_of(block.first_seq):
                raise CorruptError(f"block {block.first_seq} is not what was written")
            if block.last_seq <= last:
                continue  # released too late by the one before us
            jumped = number == 0 and reader.jumped
            os.write(out, b"%b %d %d\n" % (b"jumped" if jumped else b"next", block.first_seq, block.last_seq))
            last = block.last_seq
        if blocks:
            reader.release(blocks[-1])
        elif over:
            return
        else:
            reader.wait()


class Sleeps:
    """Watches a bell. A wake-up was lost where the time was over and what was waited for is there all the same.

    How long a round took does not tell: on a busy machine that is the other end's turn to run.
    """

    def __init__(self, bell: Doorbell) -> None:
        self._wait, self._timed_out, self.lost = bell.wait, False, 0
        bell.wait = self.wait  # type: ignore[assignment,method-assign]

    def wait(self) -> bool:
        self._timed_out = not self._wait(LOST_S)
        return not self._timed_out

    def over(self) -> None:
        """What was waited for is there."""
        self.lost += self._timed_out
        self._timed_out = False


def ping(instance: str, policy: str, path: str) -> None:
    writer = open_writer(instance, policy)
    sleeps = Sleeps(writer.writer_bell)
    rounds, until = 0, time.monotonic() + ROUNDS_S
    while rounds < ROUNDS and time.monotonic() < until:
        rounds += 1
        writer.append(Framed(b"ping", Stamp(writer.last.next_seq, SLOTS, 0, 0)))
        hesitate()
        while not writer.wait_room(4, SLOTS):
            pass
        sleeps.over()
    say(f"{path}.ping", sleeps.lost)
    say(f"{path}.rounds", rounds)


def pong(instance: str, policy: str, path: str) -> None:
    reader = wait_for_reader(instance, policy)
    sleeps = Sleeps(reader.reader_bell)
    is_over = False
    while not is_over:
        is_over = reader.writer_is_gone()
        if blocks := reader.take():
            sleeps.over()
            hesitate()
            reader.release(blocks[-1])
            is_over = False
        elif not is_over:
            reader.wait()
    say(f"{path}.pong", sleeps.lost)


def say(path: str, number: int) -> None:
    with open(path, "w") as file:
        file.write(str(number))


def hesitate() -> None:
    until = time.perf_counter_ns() + random.randrange(60_000)
    while time.perf_counter_ns() < until:
        pass


def hold(instance: str, policy: str, path: str) -> None:
    open_writer(instance, policy)
    print("held", flush=True)
    time.sleep(600)


def contend(instance: str, policy: str, path: str) -> None:
    while not os.path.exists(f"{path}.go"):
        time.sleep(0.001)
    print(lock_of(instance).try_acquire(), flush=True)
    time.sleep(600)


ROLES = {"writer": write, "reader": read, "ping": ping, "pong": pong, "holder": hold, "contender": contend}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
