"""G2, G3: SIGKILL at every line of every stage, one after the other, instead of at random moments.

One generation is the three stages' own `run`, one after the other, draining what waits. The first generation is killed
when it reaches a chosen line of our code for the nth time (a child process, so that no `finally` softens it); two more
generations then take what is left and what is new, and the checker judges. Everything lies in shared memory: no disk waits.

With acks, producers are among the writers that send some messages again, and in the end all of them, and every reply is
judged: said in order, at least once, never before the sync, and with the seq that the message has.
"""

import fcntl
import itertools
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
from typing import Any

import pytest
from fake_logger import FakeLogger

from chaos.checker import Stream, check
from chaos.load import Lines
from chaos.traces import TRACED, Point, few, read_all, traced
from kmq import files
from kmq.broker import stage as stage_module
from kmq.broker.stage import Stage
from kmq.config.settings import Settings, load
from kmq.config.values import PIPE_BUF
from kmq.files import point_symlink, replace_file
from kmq.framing import parser, recovery, topics
from kmq.links import layout, staging
from kmq.links.doorbell import Doorbell
from kmq.links.fifo import Sender
from kmq.links.received import Handover, ReceivedWriter
from kmq.links.ring import RingReader, RingWriter
from kmq.log import remnant, segment
from kmq.log.checkpoint import Checkpointer
from kmq.log.identity import open_data
from kmq.log.partition import PartitionLog
from kmq.log.wal import Wal
from kmq.router import topic_changes
from kmq.router.queues import Retention
from stages import durability, framer, router

RUNS = {"framer": framer.run, "durability": durability.run, "router": router.run}
READ_BYTES = 300  # of the FIFO at once, so that lines are cut and carried all the time
TURN_BYTES = 2000  # taken in a turn, so that some pieces are taken in several
BLOCK_LINES = 7  # in a block, so that most pieces are committed in several
PIPE_BYTES = 1 << 19  # holds what a generation is sent, and is not the size that marks a pipe as known to a framer
CHILD_S = 30  # a child takes some milliseconds
PREFIX = f"chaos-{(multiprocessing.parent_process() or multiprocessing.current_process()).pid}-"  # workers' names, too
LONGEST = 6000  # one line in some is longer than a FIFO write
BATCHES = [70, 25, 12]  # lines before each generation: what is carried later is shorter than what was before
SETTINGS: dict[str, dict[str, object]] = {
    "block": {"RB_SLOTS": 512},
    "drop_oldest": {"RB_SLOTS": 32, "RB_OVERFLOW_POLICY": "drop_oldest"},
    "acks": {"RB_SLOTS": 512, "RB_BYTES": 1 << 18},
    "lax": {"RB_SLOTS": 512, "KMQ_FSYNC": "never"},
}
SAME = {("router", "acks"), ("router", "lax"), ("framer", "lax")}  # as under block: it is nothing to them
CASES = [(victim, policy) for policy in SETTINGS for victim in RUNS if (victim, policy) not in SAME]


class Bench:
    """One directory, one instance, and the FIFO and the ring `received`, which we hold as ingress does, with lines in them."""

    RECEIVED_BYTES = 5 << 14  # what a generation is sent, and not much more

    def __init__(self, policy: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/dev/shm"))
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
        self.fifo, self.acks = self.open_fifo("raw"), self.open_fifo("acks")
        fcntl.fcntl(self.fifo, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.received = ReceivedWriter(self.root.name, self.ring_received(), "the test", FakeLogger())
        self.handover = Handover(self.fifo, self.received)
        self.wide()

    def ring_received(self) -> layout.Identity:
        """A small one: the framer takes the size that it finds."""
        return layout.make_identity(open_data(self.settings.data), 0, self.RECEIVED_BYTES, 0, "block")

    def open_fifo(self, name: str) -> int:
        os.mkfifo(self.root / "pipes" / name)
        return os.open(self.root / "pipes" / name, os.O_RDWR | os.O_NONBLOCK)

    def prepare(self) -> None:
        """What stands before the generation that is disturbed."""

    def wide(self) -> None:
        (self.root / "data/topics/wide").mkdir(parents=True)
        (self.root / "data/topics/wide/topic.toml").write_text("partitions = 3\n")

    def send(self, count: int) -> None:
        for n in range(self.sent, self.sent + count):
            line = self.lines.line(n) if n % 9 else self.long(n)
            if n // 20 % 2 and len(line) < PIPE_BUF:  # of a shell in the pod
                self.flush()
                os.write(self.fifo, line + b"\n")
            else:
                self.handover.put([line, b"\n"])
                if n % 20 == 15:
                    self.flush()
        self.flush()
        self.sent += count

    def overwrite(self) -> None:
        """Overwrite all that ingress may overwrite: what does not lie between tail and head."""
        ring = self.received
        at, end = ring.head, ring.cells[layout.TAIL] + ring.size
        while at < end:
            count = min(end - at, ring.size - at % ring.size)
            start = layout.BLOCKS + at % ring.size
            ring.mm[start : start + count] = b"?" * count
            at += count

    def flush(self) -> None:
        self.handover.flush()
        assert not self.handover.clogged, "the bench is too small"

    def long(self, n: int) -> bytes:
        """Now and then a line of several KiB; shorter as time goes on."""
        return self.lines.line(n) + b"x" * max(0, LONGEST - 60 * n)

    def streams(self) -> list[Stream]:
        return [Stream("w", lambda n: self.lines.line(n) if n % 9 else self.long(n), self.sent)]

    def judge_replies(self) -> None:
        """Nobody asked for any."""
        assert not read_all(self.acks)

    def judge_end(self, what: object) -> None: ...

    def generation(self, watch: Callable[[str], object] = lambda name: None) -> None:
        """The three stages, each until it has nothing left to do. Call in a child only."""
        for name, run in RUNS.items():
            stage = Stage(name, self.settings)
            stage.stopping, stage.deadline = True, 1e18  # drain, and take the time it takes
            watch(name)
            run(stage)
            sys.settrace(None)
            if name == "durability":
                self.look_into_durable(stage)

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
                parser.TURN_BYTES = TURN_BYTES
                framer.open_ring = open_narrow_ring  # type: ignore[assignment]
                framer._LAST_CHECKPOINT_S = (
                    0  # durability does not run at the same time, so there is nothing to wait for
                )
                # At every turn: what the clock decides, a run that is to be killed there may not reach.
                topics._DELETED_LOOK_S = framer._TICK_S = stage_module.LOOK_S = -1
                topics._REQUESTS_LOOK_S = topics._WAITING_S = -1
                topics._COARSE_NS = topic_changes._COARSE_NS = 1 << 62
                Doorbell.wait.__defaults__ = (0.0,)
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
        self.received.close()
        os.close(self.fifo)
        os.close(self.acks)
        for name in ("received", "framed", "durable"):
            layout.remove(self.settings.instance, name)
        Path(f"/dev/shm/{self.settings.instance}.stats").unlink(missing_ok=True)
        shutil.rmtree(self.root)


class Conversation:
    """An acknowledged connection, as ingress has it: the messages it sends, and the replies it takes."""

    def __init__(self, bench: "AckedBench", number: int, tag: bytes) -> None:
        name = b"1732190000.%d" % number
        self.bench, self.tag = bench, tag
        # What is a producer's comes as units of a door, whose own name is another one.
        self.unit_of = tag[2:] if tag[:1] == b"p" else b""
        self.sender = Sender(name, b"p=__door", reserved=True) if self.unit_of else Sender(name, tag)
        self.pieces: list[list[int]] = []
        self.ids: list[int] = []  # of message n, at n - 1; -1 of one that is refused
        self.told: list[bytes] = []

    def send(self, ids: list[int]) -> None:
        """These messages, as one piece."""
        lines = [self.bench.message(self.tag, id) if id >= 0 else b"no separator" for id in ids]
        self.bench.handover.put([line + b"\n" for line in lines], self.sender, len(ids), self.unit_of)
        self.bench.flush()
        self.ids += ids
        self.pieces.append(ids)

    def take(self, first: int, reply: bytes) -> None:
        """As ingress: what is said again is passed over, a hole may not be."""
        if first <= len(self.told):
            return
        assert first == len(self.told) + 1, f"no reply to message {len(self.told) + 1} before {reply!r}"
        kind, n, rest = reply.split(b" ", 2)
        for ahead in range(int(n) - first, -1, -1):
            self.told.append(b"%b %d" % (kind, int(rest) - ahead) if kind == b"!ack" else kind + b" " + rest)
        assert len(self.told) == int(n)


class AckedBench(Bench):
    """Beside the lines of nobody: a producer with increasing ids, and one with a window, who both send much of it twice."""

    TAGS = (b"p=me", b"w=s")
    RECEIVED_BYTES = 3 << 16

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        self.conversations: dict[bytes, Conversation] = {}
        self.next_id = 0
        self.talking = [self.connect(tag) for tag in self.TAGS]

    def connect(self, tag: bytes) -> Conversation:
        made = Conversation(self, len(self.conversations), tag)
        self.conversations[made.sender.name] = made
        return made

    def message(self, tag: bytes, id: int, stored: bool = False) -> bytes:
        text = b"%d" % id if tag[:1] == b"p" else b"s-%d" % id
        header = b";" + tag if stored else b""
        return b"jobs.%b|%d|%b%b|%b" % (tag[2:], id, text, header, b"y" * (LONGEST if id % 17 == 5 else id * 7 % 60))

    def prepare(self) -> None:
        """A generation that leaves a checkpoint, so that a start has to put the table together from all three places."""
        self.send(96)  # more than a later one: an empty ring begins anew, and holds what lies before where it was empty
        for work in (self.generation, self.checkpointed):
            assert self.child(work) == 0, self.log()
        assert (self.root / "data/producers.ckpt").exists()

    def checkpointed(self) -> None:
        framer._LAST_CHECKPOINT_S = CHILD_S
        stage = Stage("framer", self.settings)
        stage.stopping, stage.deadline = True, 1e18
        framer.run(stage)

    def send(self, count: int) -> None:
        """`count` lines of nobody, and about as many messages; of the last batch all that was ever sent, once more."""
        super().send(count // 2)
        for start in range(self.next_id, self.next_id + count // 2, 4):
            for talk in self.talking:
                again = [start - 2] * (start % 8 == 4)
                talk.send([start, start + 1, *again, -1, start + 2, start + 3])
        self.next_id += count // 2 + 3 & ~3
        super().send(count - count // 2)
        if count == BATCHES[-1]:
            for talk in [self.connect(tag) for tag in self.TAGS]:
                for first in range(0, self.next_id, 3):
                    talk.send(list(range(first, min(first + 3, self.next_id))))

    def streams(self) -> list[Stream]:
        p, w = self.TAGS
        return [
            *super().streams(),
            Stream("me", lambda n: self.message(p, n, stored=True), self.next_id),
            Stream("s", lambda n: self.message(w, n, stored=True), self.next_id),
        ]

    def judge_replies(self) -> None:
        """What has been said by now follows from what is on disk."""
        said = read_all(self.acks)
        if not said:
            return
        synced = self.synced_seq()
        for line in said.split(b"\n")[:-1]:
            name, first, reply = line.split(b" ", 2)
            kind, _, seq = reply.split(b" ", 2)
            assert kind == b"!err" or int(seq) <= synced, f"{line!r}: only seq {synced} is synced"
            self.conversations[name].take(int(first), reply)

    def synced_seq(self) -> int:
        words = memoryview((Path(layout.SHM) / f"{self.settings.instance}.framed").read_bytes()[: layout.BLOCKS]).cast(
            "Q"
        )
        return int(words[layout.CELLS // 8 + layout.SYNCED]) - 1

    def judge_end(self, what: object) -> None:
        """Everything has been answered, with the seq under which it is there."""
        seqs = {}
        for path in (self.root / "data/append").glob("*.log"):
            for line in path.read_bytes().splitlines():
                seq, _, _, _, id, _ = line.split(b"|", 5)
                seqs[id] = int(seq)
        for talk in self.conversations.values():
            assert len(talk.told) == len(talk.ids), f"killed at {what}: {talk.sender.name!r} waits for replies"
            known = set[int]()
            for id, reply in zip(talk.ids, talk.told, strict=True):
                stored_id = self.message(talk.tag, id, stored=True).split(b"|")[2]
                kind = b"!dup" if id in known or talk not in self.talking else b"!ack"
                expected = b"%b %d" % (kind, seqs[stored_id]) if id >= 0 else b"!err no_separator"
                assert reply == expected, f"killed at {what}: {stored_id!r}"
                known.add(id)
        for talk in self.talking:
            known = set[int]()
            for ids in talk.pieces:
                new = [id for id in ids if id >= 0 and id not in known]
                found = [seqs[self.message(talk.tag, id, stored=True).split(b"|")[2]] for id in new]
                assert found == list(range(found[0], found[0] + len(found))), f"killed at {what}: torn apart"
                known |= set(new)


def open_narrow_ring(stage: Stage) -> RingWriter:
    ring = recovery.open_ring(stage)
    ring.limits = ring.limits._replace(count=BLOCK_LINES)
    return ring


def make_bench(policy: str) -> Bench:
    return AckedBench(policy) if policy == "acks" else Bench(policy)


def points(policy: str, victim: str) -> list[Point]:
    """All points that an undisturbed generation passes."""
    bench = make_bench(policy)
    found: list[Point] = []

    def record() -> None:
        bench.generation(traced(victim, found.append))
        (bench.root / "points").write_text(json.dumps(found))

    try:
        bench.prepare()
        bench.send(BATCHES[0])
        assert bench.child(record) == 0, bench.log()
        return [Point(*each) for each in json.loads((bench.root / "points").read_text())]
    finally:
        bench.close()


def survives(policy: str, end: Callable[[Bench], Callable[[], object]], what: object) -> None:
    """A generation ends as `end` says; the next two must make everything good."""
    bench = make_bench(policy)
    with ExitStack() as stack:
        stack.callback(bench.close)
        bench.prepare()
        bench.send(BATCHES[0])
        assert bench.child(end(bench)) == -signal.SIGKILL, f"{what} was not reached\n{bench.log()}"
        bench.overwrite()
        bench.judge_replies()
        for count in BATCHES[1:]:
            bench.send(count)
            assert bench.child(bench.generation) == 0, f"killed at {what}\n{bench.log()}"
            bench.judge_replies()
        report = check(bench.root / "data", bench.streams())
        assert not report.counts, f"killed at {what}\n{report}\n{bench.log()}"
        bench.judge_end(what)
        if policy == "drop_oldest":
            assert report.dropped, "nothing was dropped: this did not show anything"


def kill_at(victim: str, point: Point) -> Callable[[Bench], Callable[[], object]]:
    def reached(here: Point) -> None:
        if here == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda bench: lambda: bench.generation(traced(victim, reached))


def survives_kill(policy: str, victim: str, point: Point) -> None:
    survives(policy, kill_at(victim, point), point)


@pytest.fixture(scope="module")
def processors() -> Iterator[ProcessPoolExecutor]:
    """A small process for each processor. Every round has a directory, a FIFO and rings of its own, and keeps one of them busy;
    forked by pytest itself, a child would cost several times what it does: the page tables of hundreds of MB.
    """
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("victim", "policy"), CASES)
def test_a_kill_at_a_random_line_loses_and_doubles_nothing(
    policy: str, victim: str, rng: random.Random, processors: ProcessPoolExecutor
) -> None:
    found = few(processors.submit(points, policy, victim).result())
    tried = rng.sample(found, len(found) // 8)  # all: the soak
    list(processors.map(partial(survives_kill, policy, victim), tried))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("victim", "policy"), CASES)
def test_soak_a_kill_at_any_line_at_any_time(
    policy: str, victim: str, rng: random.Random, processors: ProcessPoolExecutor
) -> None:
    found = processors.submit(points, policy, victim).result()
    list(processors.map(partial(survives_kill, policy, victim), rng.sample(found, min(len(found), 4000))))


def torn_write(nth: int, part: float) -> Callable[[Bench], Callable[[], object]]:
    """Die in the nth append to a file, when this part of it is written."""

    def run(bench: Bench) -> None:
        write, count = files.write_some, iter(range(1 << 30))

        def tear(fd: int, buffers: Any) -> int:
            if next(count) == nth:
                text = b"".join(buffers)
                os.write(fd, text[: int(len(text) * part)])
                os.kill(os.getpid(), signal.SIGKILL)
            return write(fd, buffers)

        files.write_some = tear
        bench.generation()

    return lambda bench: lambda: run(bench)


def appends(policy: str) -> int:
    """How many appends one generation makes."""
    bench = make_bench(policy)

    def record() -> None:
        write, count = files.write_some, 0

        def counted(fd: int, buffers: Any) -> int:
            nonlocal count
            count += 1
            return write(fd, buffers)

        files.write_some = counted
        bench.generation()
        (bench.root / "count").write_text(str(count))

    try:
        bench.prepare()
        bench.send(BATCHES[0])
        assert bench.child(record) == 0, bench.log()
        return int((bench.root / "count").read_text())
    finally:
        bench.close()


def survives_torn_write(policy: str, torn: tuple[int, float]) -> None:
    nth, part = torn
    survives(policy, torn_write(nth, part), f"append {nth}, {part:.0%} of it written")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", SETTINGS)
def test_a_kill_inside_any_write_leaves_nothing_torn(policy: str, processors: ProcessPoolExecutor) -> None:
    count = processors.submit(appends, policy).result()
    torn = itertools.product(range(count), (0.1, 0.5, 0.97))
    list(processors.map(partial(survives_torn_write, policy), torn))


class IdleBench(Bench):
    """A generation under wide limits, then under narrow ones, to which nothing comes: all it does is to seal and to retain."""

    def prepare(self) -> None:
        self.send(BATCHES[0])
        assert self.child(self.generation) == 0, self.log()
        self.settings.segment_bytes, self.settings.retention_bytes = 600, 500

    def generation(self, watch: Callable[[str], object] = lambda name: None) -> None:
        durability._NOTE_NS = router._TICK_NS = 0  # seal and retain at every turn
        framer._LAST_CHECKPOINT_S = CHILD_S  # the WAL is not free before the table is on disk
        Checkpointer.start = Checkpointer.run  # type: ignore[method-assign]  # where the trace sees it
        super().generation(watch)

    def held(self) -> dict[str, dict[int, bytes]]:
        """Each log's records without their time, by offset (of the WAL: by seq); what is there has no gap and is there once."""
        found: dict[str, dict[int, bytes]] = {}
        for path in sorted(self.root.glob("data/append/*.log")) + sorted(self.root.glob("data/topics/*/*/*.log")):
            log = found.setdefault(str(path.parent.relative_to(self.root)), {})
            for number, line in enumerate(path.read_bytes().splitlines(), start=int(path.stem)):
                assert number not in log and (not log or number - 1 in log), f"{path}: record {number}"
                seq, _, rest = line.split(b"|", 2)
                log[number] = seq + b"|" + rest
        return found


def whole(narrow: bool, end: Callable[[Bench], Callable[[], object]] | None = None) -> dict[str, dict[int, bytes]]:
    """What is there after a generation that ends as `end` says, one to which nothing comes, and one with messages."""
    bench = IdleBench("block")
    with ExitStack() as stack:
        stack.callback(bench.close)
        wide = bench.settings.segment_bytes, bench.settings.retention_bytes
        bench.prepare()
        if not narrow:
            bench.settings.segment_bytes, bench.settings.retention_bytes = wide
        if end is not None:
            assert bench.child(end(bench)) == -signal.SIGKILL, f"was not reached\n{bench.log()}"
        for count in (0, 12):
            bench.send(count)
            assert bench.child(bench.generation) == 0, bench.log()
            assert max(bench.held()["data/append"]) == BATCHES[0] + count, "the last record is not there"
        for word in ("unrecoverable", "queue_short", "failed"):
            assert f" event={word} " not in (bench.root / "log").read_text(), bench.log()
        return bench.held()


def idle_points(victim: str) -> list[Point]:
    """Each line that seals a segment to which nothing comes, or retains a log as a whole."""
    bench, found = IdleBench("block"), list[Point]()

    def record() -> None:
        bench.generation(traced(victim, found.append))
        (bench.root / "points").write_text(json.dumps(found))

    try:
        bench.prepare()
        assert bench.child(record) == 0, bench.log()
        reached = few([Point(*each) for each in json.loads((bench.root / "points").read_text())])
    finally:
        bench.close()
    return [point for point in reached if point.line in LINES_OF.get(point.file, ())]


def lines_of(*functions: Callable[..., object]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for function in functions:
        code = function.__code__  # type: ignore[attr-defined]
        name = next(code.co_filename[code.co_filename.rindex(part) :] for part in TRACED if part in code.co_filename)
        found.setdefault(name, set()).update(line for *_, line in code.co_lines() if line)
    return found


LINES_OF = lines_of(
    *(Wal.roll, Wal.retain, Wal._shrink_to_record, Wal._point_link, PartitionLog.roll, Retention._has_rolled),
    *(Retention.retire, Retention._retire_all, Checkpointer.run, segment.begin, segment.remove, point_symlink),
    *(remnant.lay_out, remnant.settle, replace_file),
)


def survives_idle(victim: str, expected: dict[str, dict[int, bytes]], point: Point) -> None:
    found = whole(narrow=True, end=kill_at(victim, point))
    for name, records in expected.items():
        assert found[name].items() <= records.items(), f"killed at {point}: {name} has other records"
        assert max(found[name]) == max(records), f"killed at {point}: {name} has lost its end"
    assert min(found["data/append"]) > 1, f"killed at {point}: nothing was retained"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", ["durability", "router"])
def test_a_kill_while_idle_logs_are_sealed_and_retained_costs_nothing(
    victim: str, rng: random.Random, processors: ProcessPoolExecutor
) -> None:
    expected = processors.submit(whole, narrow=False).result()
    found = processors.submit(idle_points, victim).result()
    assert {"/kmq/log/remnant.py", "/kmq/log/segment.py"} <= {point.file for point in found}
    tried = rng.sample(found, len(found) // 4)
    list(processors.map(partial(survives_idle, victim, expected), tried))


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["durability", "router"])
def test_soak_a_kill_at_any_line_while_idle_logs_are_sealed_and_retained(
    victim: str, processors: ProcessPoolExecutor
) -> None:
    expected = processors.submit(whole, narrow=False).result()
    found = processors.submit(idle_points, victim).result()
    list(processors.map(partial(survives_idle, victim, expected), found))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not list(Path("/dev/shm").glob(f"{PREFIX}*")), "a bench was not cleaned up"
