"""G2 at ingress' end of the ring `received`: SIGKILL at every line of the hand-over, and of the framer in the middle of it.

Ingress is played: lines of a plain and of an acknowledged connection go into a ring so small that it is full again and
again. Then the framer and the others take what there is, and ingress goes on. It is killed when it reaches a chosen
line of our code for the nth time. What the FIFO speaks of by then has to be stored, once and in order, and nothing else
of this ingress. The next one must be able to put as much as any before it.
"""

import fcntl
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from fake_logger import FakeLogger

from chaos.load import Lines
from chaos.traces import Point, few, read_all, traced
from kmq.broker.stage import Stage
from kmq.config.settings import load
from kmq.framing import parser
from kmq.links import layout, received
from kmq.links.doorbell import Doorbell
from kmq.links.fifo import LINES, MESSAGES, Sender
from kmq.links.received import Handover, ReceivedReader, ReceivedWriter
from kmq.log.identity import open_data
from stages import durability, framer

RING_BYTES = 1 << 13
PIPE_BYTES = 4096  # a page: a flush with many control lines is written in parts
PROMPTLY, LATE = 2000, 1 << 20  # put so much, and it is announced at once; late: only when the ring is full
TURN_BYTES = 900  # taken in a turn: most pieces are taken in several
COUNT = 120  # lines of each ingress
CHILD_S = 30
PREFIX = f"handover-{(multiprocessing.parent_process() or multiprocessing.current_process()).pid}-"


def spoken_of(line: bytes) -> tuple[int, int]:
    """Return from where to where a control line says that lines lie."""
    match = LINES.fullmatch(line)
    if match:
        return int(match[2]), int(match[3])
    match = MESSAGES.fullmatch(line)
    return (int(match[5]), int(match[6])) if match else (0, 0)


def lines_between(ring: ReceivedReader, start: int, stop: int) -> list[bytes]:
    assert ring.holds(start, stop), "the FIFO speaks of what is not there"
    return ring.text(start, stop).split(b"\n")[:-1]


class Bench:
    """A directory, an instance, and the FIFOs, which we hold open."""

    def __init__(self, prompt_bytes: int) -> None:
        self.prompt_bytes = prompt_bytes
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/dev/shm"))
        environ = {
            "KMQ_DATA": self.root / "data",
            "KMQ_PIPES": self.root / "pipes",
            "KMQ_INSTANCE": self.root.name,
            "KMQ_FSYNC": "never",
            "RB_BYTES": 1 << 19,  # all fits, so nothing is dropped; and no ring is begun anew while its reader is away
            "RB_OVERFLOW_POLICY": "drop_oldest",
            "KMQ_MAX_LINE": 1 << 15,
        }
        self.settings = load({name: str(value) for name, value in environ.items()}, toml="")
        self.identity = layout.make_identity(open_data(self.settings.data), 0, RING_BYTES, 0, "block")
        os.mkdir(self.root / "pipes")
        self.fifo, self.acks = self.open_fifo("raw"), self.open_fifo("acks")
        fcntl.fcntl(self.fifo, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def open_fifo(self, name: str) -> int:
        os.mkfifo(self.root / "pipes" / name)
        return os.open(self.root / "pipes" / name, os.O_RDWR | os.O_NONBLOCK)

    def run(self, work: Callable[[], object]) -> int:
        """Run `work` in a child; its exit code, or minus the signal that ended it."""
        pid = os.fork()
        if pid == 0:
            code = 1
            signal.alarm(CHILD_S)
            try:
                os.dup2(os.open(self.root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                sys.settrace(None)
                framer._LAST_CHECKPOINT_S, Doorbell.wait.__defaults__ = 0, (0.0,)
                parser.TURN_BYTES, received._PROMPT_BYTES = TURN_BYTES, self.prompt_bytes
                fcntl.fcntl(self.fifo, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # a framer enlarges it
                work()
                code = 0
            except BaseException:
                import traceback

                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def line(self, lines: Lines, n: int) -> bytes:
        """Line n; if announced late, as long as any: a ring full of such lines has no room for another one."""
        line = lines.line(n)
        return line[:999].ljust(999, b"x") if self.prompt_bytes == LATE else line

    def ingress(self, name: str, watch: Callable[[str], object] = lambda name: None) -> None:
        """Put COUNT lines, and let the others take them whenever there is no room. Call in a child only."""
        watch("ingress")
        ring = ReceivedWriter(self.settings.instance, self.identity, "the test", FakeLogger())
        end, lines = Handover(self.fifo, ring), Lines(name, 1500)
        sender, asker = Sender(b"1.1"), Sender(b"1.2", b"p=me")
        end.say_free()
        for n in range(COUNT):
            line = self.line(lines, n)
            end.put([line[:9], line[9:] + b"\n"], sender if n // 20 % 2 else None, 1)
            if n % 7 == 0:
                end.say(asker.question(0))
            if n % 11 == 5 and self.prompt_bytes == PROMPTLY:
                end.flush()
            while end.clogged:
                end.flush()
                assert self.run(self.take) == 0, self.log()
                end.flush()
        end.flush()
        ring.close()
        sys.settrace(None)

    def take(self, watch: Callable[[str], object] = lambda name: None) -> None:
        """The framer and durability take all that the FIFO has."""
        for name, run in (("framer", framer.run), ("durability", durability.run)):
            stage = Stage(name, self.settings)
            stage.stopping, stage.deadline = True, 1e18
            watch(name)
            run(stage)
            sys.settrace(None)

    def announced(self) -> list[bytes]:
        """The lines that the FIFO speaks of and that wait in the ring; the FIFO stays as it is."""
        text = read_all(self.fifo)
        assert os.write(self.fifo, text) == len(text) if text else True
        end = ReceivedReader.attach(self.settings.instance, self.identity.data_id, "the test", self.acks)
        if end is None:
            return []
        try:
            return [
                line
                for start, stop in map(spoken_of, text.splitlines(True))
                for line in lines_between(end, start, stop)
            ]
        finally:
            end.close()

    def stored(self) -> list[bytes]:
        text = b"".join(path.read_bytes() for path in sorted((self.root / "data/append").glob("*.log")))
        lines = [line.split(b"|", 2) for line in text.splitlines()]
        assert [int(seq) for seq, *_ in lines] == list(range(1, len(lines) + 1))
        return [line for *_, line in lines]

    def log(self) -> str:
        return "\n".join((self.root / "log").read_text(errors="replace").splitlines()[-30:])

    def close(self) -> None:
        os.close(self.fifo)
        os.close(self.acks)
        for name in ("received", "framed", "durable"):
            layout.remove(self.settings.instance, name)
        Path(f"/dev/shm/{self.settings.instance}.stats").unlink(missing_ok=True)
        shutil.rmtree(self.root)


def points(prompt_bytes: int) -> list[Point]:
    """All points that an undisturbed ingress passes."""
    bench, found = Bench(prompt_bytes), list[Point]()

    def record() -> None:
        bench.ingress("one", traced("ingress", found.append))
        (bench.root / "points").write_text(json.dumps(found))

    try:
        assert bench.run(record) == 0, bench.log()
        return [Point(*each) for each in json.loads((bench.root / "points").read_text())]
    finally:
        bench.close()


def survives(prompt_bytes: int, nth: tuple[int, Point]) -> None:
    number, point = nth

    def reached(here: Point) -> None:
        if here == point:
            os.kill(os.getpid(), signal.SIGKILL)

    bench = Bench(prompt_bytes)
    with ExitStack() as stack:
        stack.callback(bench.close)
        killed = bench.run(lambda: bench.ingress("one", traced("ingress", reached)))
        assert killed == -signal.SIGKILL, f"{point} was not reached\n{bench.log()}"
        expected = bench.stored() + bench.announced()
        if number % 2:  # else the next ingress is there first
            assert bench.run(bench.take) == 0, f"killed at {point}\n{bench.log()}"
            assert bench.stored() == expected, f"killed at {point}"
        two = Lines("two", 1500)
        expected += [bench.line(two, n) for n in range(COUNT)]
        for work in (lambda: bench.ingress("two"), bench.take):
            assert bench.run(work) == 0, f"killed at {point}\n{bench.log()}"
        assert bench.stored() == expected, f"killed at {point}"


@pytest.fixture(scope="module")
def processors() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def hand_over_points(found: list[Point]) -> list[Point]:
    return [point for point in found if point.file.rpartition("/")[2] in ("received.py", "fifo.py")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("prompt_bytes", [PROMPTLY, LATE], ids=["promptly", "late"])
def test_a_kill_at_any_line_of_the_hand_over_loses_and_doubles_nothing(
    prompt_bytes: int, rng: random.Random, processors: ProcessPoolExecutor
) -> None:
    found = hand_over_points(processors.submit(points, prompt_bytes).result())
    once = few(found)
    if prompt_bytes == LATE:  # the first time: from then on a ring is never full of what nobody speaks of
        once = [point._replace(nth=1) for point in once]
    assert {"/kmq/links/fifo.py", "/kmq/links/received.py"} <= {point.file for point in once}
    tried = [*rng.sample(once, len(once) // 2), *rng.sample(found, 8)]  # all: the soak
    list(processors.map(partial(survives, prompt_bytes), enumerate(tried)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("prompt_bytes", [PROMPTLY, LATE], ids=["promptly", "late"])
def test_soak_a_kill_at_any_line_of_the_hand_over_at_any_time(
    prompt_bytes: int, rng: random.Random, processors: ProcessPoolExecutor
) -> None:
    found = hand_over_points(processors.submit(points, prompt_bytes).result())
    tried = [*few(found), *rng.sample(found, min(len(found), 2000))]
    list(processors.map(partial(survives, prompt_bytes), enumerate(tried)))
