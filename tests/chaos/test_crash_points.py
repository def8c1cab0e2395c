"""G2, G3: SIGKILL at every line of every stage, one after the other, instead of at random moments.

One generation is the three stages' own `run`, one after the other, draining what waits. The first generation is killed
when it reaches a chosen line of our code for the nth time (a child process, so that no `finally` softens it); two more
generations then take what is left and what is new, and the checker judges. Everything lies in shared memory: no disk waits.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from chaos.checker import Stream, check
from chaos.load import Lines
from kmq.links import layout, staging
from kmq.links.fifo import pieces
from kmq.links.ring import RingReader
from kmq.log.disk import AppendFile
from kmq.settings import Settings, load
from kmq.stage import Stage
from stages import durability, framer, router

TRACED = ("/kmq/links/", "/kmq/log/", "/kmq/framing.py", "/stages/")
RUNS = {"framer": framer.run, "durability": durability.run, "router": router.run}
READ_BYTES = 700  # of the FIFO at once, so that lines are cut and carried all the time
CHILD_S = 30  # a child takes some milliseconds
LONGEST = 6000  # one line in some is longer than a FIFO write
BATCHES = [70, 25, 12]  # lines before each generation: what is carried later is shorter than what was before
SETTINGS: dict[str, dict[str, object]] = {
    "block": {"RB_SLOTS": 512},
    "drop_oldest": {"RB_SLOTS": 32, "RB_OVERFLOW_POLICY": "drop_oldest"},
}


class Point(NamedTuple):
    """The nth time that a line is reached."""

    file: str
    line: int
    nth: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} (time {self.nth})"


class Bench:
    """One directory, one instance and a FIFO that we hold open, with lines waiting in it."""

    def __init__(self, policy: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix=f"chaos-{os.getpid()}-", dir="/dev/shm"))
        self.lines = Lines("w", LONGEST)
        self.sent = 0
        environ = {
            "KMQ_DATA": self.root / "data",
            "KMQ_PIPES": self.root / "pipes",
            "KMQ_INSTANCE": self.root.name,
            "RB_BYTES": 1 << 17,
            "KMQ_MAX_LINE": 1 << 15,
            "KMQ_PORT": 0,
        } | SETTINGS[policy]
        self.settings: Settings = load({name: str(value) for name, value in environ.items()}, toml="")
        os.mkdir(self.root / "pipes")
        os.mkfifo(self.root / "pipes/raw")
        self.fifo = os.open(self.root / "pipes/raw", os.O_RDWR | os.O_NONBLOCK)
        self.wide()

    def wide(self) -> None:
        (self.root / "data/topics/wide").mkdir(parents=True)
        (self.root / "data/topics/wide/topic.toml").write_text("partitions = 3\n")

    def send(self, count: int) -> None:
        for n in range(self.sent, self.sent + count):
            line = self.lines.line(n) if n % 9 else self.long(n)
            text = line + b"\n" if len(line) < 4096 else pieces(line)
            for at in range(0, len(text), 4096):  # pieces are cut to fit one write each
                os.write(self.fifo, text[at : at + 4096])
        self.sent += count

    def long(self, n: int) -> bytes:
        """Now and then a line of several KiB, which the framer has to carry; shorter as time goes on."""
        return self.lines.line(n) + b"x" * max(0, LONGEST - 60 * n)

    def stream(self) -> Stream:
        return Stream("w", lambda n: self.lines.line(n) if n % 9 else self.long(n), self.sent)

    def generation(self, watch: Callable[[str], object] = lambda name: None) -> None:
        """The three stages, each until it has nothing left to do. Call in a child only."""
        for name, run in RUNS.items():
            stage = Stage(name, self.settings)
            stage.stopping, stage._deadline = True, 1e18  # drain, and take the time it takes
            watch(name)
            run(stage)
            sys.settrace(None)
            if name == "durability":
                self.look_into_durable(stage)

    def more(self, count: int) -> None:
        """Send some more, and a generation that nothing disturbs."""
        self.send(count)
        self.generation()

    def look_into_durable(self, stage: Stage) -> None:
        """What the router is shown is in order and there once: it would pass over a repetition, so we look ourselves."""
        ring = RingReader.attach(self.settings.instance, "durable", stage.ring_identity("durable"), stage.who)
        assert ring is not None
        last = 0
        while blocks := ring.take():
            for block in blocks:
                assert block.first_seq > last, f"durable holds seq {block.first_seq} after {last}"
                last = block.last_seq
            del block, blocks  # they point into the ring, which closes
        ring.close()

    def child(self, work: Callable[[], object]) -> int:
        """Run `work` in a child; its exit code, or minus the signal that ended it."""
        pid = os.fork()
        if pid == 0:
            code = 1
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_S)  # a child that hangs ends, and says so by the signal
            try:
                log = os.open(self.root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 2)
                staging.READ_BYTES = READ_BYTES
                work()
                code = 0
            except BaseException:
                import traceback

                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def log(self) -> str:
        return "\n".join((self.root / "log").read_text(errors="replace").splitlines()[-30:])

    def close(self) -> None:
        os.close(self.fifo)
        for name in ("framed", "durable"):
            layout.remove(self.settings.instance, name)
        Path(f"/dev/shm/{self.settings.instance}.stats").unlink(missing_ok=True)
        shutil.rmtree(self.root)


def traced(victim: str, reached: Callable[[Point], None]) -> Callable[[str], None]:
    """A `watch` that calls `reached` for every line of our code that the victim comes to."""
    counts: Counter[tuple[str, int]] = Counter()
    wanted: dict[Any, str] = {}

    def local(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            place = wanted[frame.f_code], frame.f_lineno
            counts[place] += 1
            reached(Point(*place, counts[place]))
        return local

    def begin(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code not in wanted:
            name = code.co_filename
            wanted[code] = next((name[name.rindex(part) :] for part in TRACED if part in name), "")
        return local if wanted[code] else None

    return lambda name: sys.settrace(begin if name == victim else None)


def points(policy: str, victim: str) -> list[Point]:
    """All points that an undisturbed generation passes."""
    bench = Bench(policy)
    found: list[Point] = []

    def record() -> None:
        bench.generation(traced(victim, found.append))
        (bench.root / "points").write_text(json.dumps(found))

    try:
        bench.send(BATCHES[0])
        assert bench.child(record) == 0, bench.log()
        return [Point(*each) for each in json.loads((bench.root / "points").read_text())]
    finally:
        bench.close()


def survives(policy: str, end: Callable[[Bench], Callable[[], object]], what: object) -> None:
    """The first generation ends as `end` says; the next two must make everything good."""
    bench = Bench(policy)
    with ExitStack() as stack:
        stack.callback(bench.close)
        bench.send(BATCHES[0])
        assert bench.child(end(bench)) == -signal.SIGKILL, f"{what} was not reached\n{bench.log()}"
        assert bench.child(lambda: [bench.more(count) for count in BATCHES[1:]]) == 0, (
            f"killed at {what}\n{bench.log()}"
        )
        bench.sent = sum(BATCHES)
        report = check(bench.root / "data", [bench.stream()])
        assert not report.counts, f"killed at {what}\n{report}\n{bench.log()}"
        if policy == "drop_oldest":
            assert report.dropped, "nothing was dropped: this did not show anything"


def kill_at(victim: str, point: Point) -> Callable[[Bench], Callable[[], object]]:
    def reached(here: Point) -> None:
        if here == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda bench: lambda: bench.generation(traced(victim, reached))


def few(found: list[Point]) -> list[Point]:
    """Every line once, at the second time where there is one: by then there is something to lose."""
    last = {(point.file, point.line): point for point in found if point.nth <= 2}
    return list(last.values())


@pytest.mark.parametrize("policy", SETTINGS)
@pytest.mark.parametrize("victim", RUNS)
def test_a_kill_at_any_line_loses_and_doubles_nothing(policy: str, victim: str, rng: random.Random) -> None:
    found = few(points(policy, victim))
    for point in found if policy == "block" else rng.sample(found, len(found) // 3):
        survives(policy, kill_at(victim, point), point)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", SETTINGS)
@pytest.mark.parametrize("victim", RUNS)
def test_soak_a_kill_at_any_line_at_any_time(policy: str, victim: str, rng: random.Random) -> None:
    found = points(policy, victim)
    for point in rng.sample(found, min(len(found), 4000)):
        survives(policy, kill_at(victim, point), point)


def torn_write(nth: int, part: float) -> Callable[[Bench], Callable[[], object]]:
    """Die in the nth append to a file, when this part of it is written."""

    def run(bench: Bench) -> None:
        write, count = AppendFile._write, iter(range(1 << 30))

        def tear(self: AppendFile, buffers: Any) -> int:
            if next(count) == nth:
                text = b"".join(buffers)
                os.write(self.fd, text[: int(len(text) * part)])
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, buffers)

        AppendFile._write = tear  # type: ignore[method-assign]
        bench.generation()

    return lambda bench: lambda: run(bench)


def appends(policy: str) -> int:
    """How many appends one generation makes."""
    bench = Bench(policy)

    def record() -> None:
        write, count = AppendFile._write, 0

        def counted(self: AppendFile, buffers: Any) -> int:
            nonlocal count
            count += 1
            return write(self, buffers)

        AppendFile._write = counted  # type: ignore[method-assign]
        bench.generation()
        (bench.root / "count").write_text(str(count))

    try:
        bench.send(BATCHES[0])
        assert bench.child(record) == 0, bench.log()
        return int((bench.root / "count").read_text())
    finally:
        bench.close()


@pytest.mark.parametrize("policy", SETTINGS)
def test_a_kill_inside_any_write_leaves_nothing_torn(policy: str) -> None:
    for nth in range(appends(policy)):
        for part in (0.1, 0.5, 0.97):
            survives(policy, torn_write(nth, part), f"append {nth}, {part:.0%} of it written")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not list(Path("/dev/shm").glob(f"chaos-{os.getpid()}-*")), "a bench was not cleaned up"
