"""G2, G3, G6: kills, stops and restarts at random moments under load; nothing that reached the FIFO is lost or doubled.

The FIFO is kept alive by the writer, so even a kill of all four stages at once may lose nothing here; the weaker promise,
when the FIFO dies with them, has tests of its own at the end.
"""

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.checker import Stream
from chaos.hurry import brisk
from chaos.kills import PAIRS, SMALL, blow, moment
from chaos.load import FifoLoad, Lines, Load, TcpLoad, fill_up
from chaos.pod import STAGES, Pod

AT_LEAST = 50_000  # messages of every run; most of them come while the blows fall
SINGLES = [(name,) for name in STAGES]

Make = Callable[..., Pod]
Start = Callable[[Load], Load]


@contextmanager
def under_load(pod: Pod, rng: random.Random, start: Start, longest: int = 200_000) -> Iterator[list[Load]]:
    """A started pod with one writer on the FIFO and two on TCP; afterwards the checker has found nothing."""
    loads = [start(FifoLoad(pod.pipes, "fifo", rng.randrange(1 << 30)))]
    pod.start()
    loads += [start(TcpLoad(pod.pipes, f"tcp{n}", rng.randrange(1 << 30), longest=longest)) for n in range(2)]
    declare(pod)
    pod.wait(lambda: all(load.count > 1000 for load in loads), "every writer got going")
    yield loads
    pod.wait(lambda: pod.seq("durability") >= AT_LEAST, f"{AT_LEAST} messages")
    for load in loads:
        load.finish()
    pod.judge([stream for load in loads for stream in load.sent])


def declare(pod: Pod, partitions: int = 3) -> None:
    """`wide` gets partitions, while messages for it arrive already: both sides of its from_seq are checked."""
    pod.wait_ready("router")
    directory = pod.data / "topics" / ".new-wide"
    if not (pod.data / "topics" / "wide").exists():
        directory.mkdir()
        (directory / "topic.toml").write_text(f'partitions = {partitions}\npartitioner = "murmur2"\n')
        try:
            directory.rename(pod.data / "topics" / "wide")
        except OSError:  # a message was faster: then it has one partition
            (directory / "topic.toml").unlink()
            directory.rmdir()


def storm(pod: Pod, rng: random.Random, start: Start, blows: list[tuple[str, ...]], **options: int) -> None:
    rng.shuffle(blows)
    with under_load(pod, rng, start, **options):
        for victims in blows:
            blow(pod, rng, victims)
        pod.wait_ready()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("victim", STAGES)
def test_killing_a_stage_loses_and_doubles_nothing(
    make_pod: Make, rng: random.Random, loads: Start, victim: str
) -> None:
    storm(make_pod(), rng, loads, [(victim,)] * 4)


def test_killing_pairs_and_all_four_loses_and_doubles_nothing(make_pod: Make, rng: random.Random, loads: Start) -> None:
    storm(make_pod(), rng, loads, [*PAIRS, STAGES, STAGES])


def test_killing_with_small_rings_loses_and_doubles_nothing(make_pod: Make, rng: random.Random, loads: Start) -> None:
    storm(make_pod(**SMALL), rng, loads, [*SINGLES, *SINGLES[1:], STAGES], longest=60_000)


def test_stopping_and_killing_loses_and_doubles_nothing(make_pod: Make, rng: random.Random, loads: Start) -> None:
    pauses_and_kills(make_pod(), rng, loads, 8)


def pauses_and_kills(pod: Pod, rng: random.Random, start: Start, rounds: int) -> None:
    """SIGSTOP one or two, kill another meanwhile, SIGCONT."""
    with under_load(pod, rng, start):
        for _ in range(rounds):
            paused = rng.sample(STAGES, rng.randrange(1, 3))
            moment(rng, 0.1)
            pod.pause(*paused)
            moment(rng, 0.4)
            if rng.random() < 0.6:
                blow_to = rng.choice([name for name in STAGES if name not in paused])
                pod.kill(blow_to)
                pod.start(blow_to)
                moment(rng, 0.2)
            if rng.random() < 0.3:
                pod.kill(*paused)  # a stopped process dies of SIGKILL too
                pod.start(*paused)
            else:
                pod.resume(*paused)
        pod.wait_ready()


def test_orderly_restarts_in_any_order_lose_and_double_nothing(
    make_pod: Make, rng: random.Random, loads: Start, tmp_path: Path
) -> None:
    """SIGTERM: a stage whose peers go on leaves its work in the links for the next one."""
    pod = make_pod(PYTHONPATH=brisk(tmp_path))
    with under_load(pod, rng, loads):
        for name in rng.sample(STAGES, 4):
            pod.signal(15, name)
            pod.kill(name) if rng.random() < 0.5 and pod.is_alive(name) else pod.wait_exit(name)
            moment(rng, 0.1)
            pod.start(name)
        pod.wait_ready()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("small", [False, True])
def test_soak_ten_kills_of_each_and_of_each_pair(make_pod: Make, rng: random.Random, loads: Start, small: bool) -> None:
    blows = [*SINGLES * 12, *PAIRS * 10, *[STAGES] * 10]
    storm(make_pod(**SMALL if small else {}), rng, loads, blows, longest=60_000)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_soak_stopping_and_killing(make_pod: Make, rng: random.Random, loads: Start) -> None:
    pauses_and_kills(make_pod(), rng, loads, 100)


# --- the weaker promise: the FIFO dies with the stages, and the rings may, too ----------------------------------------


def all_at_once(pod: Pod, rng: random.Random, start: Start, rounds: int, rings_too: bool) -> None:
    """Only what was not acked may be missing; what is there is whole, in order and there once."""
    pod.start()
    load = start(TcpLoad(pod.pipes, "tcp", rng.randrange(1 << 30)))
    for _ in range(rounds):
        pod.wait_ready()
        base = pod.seq("durability")
        pod.wait(lambda base=base: pod.seq("durability") > base + 2000, "messages become durable")
        moment(rng, 0.3)
        if rng.random() < 0.5:  # a backlog in all the links, the FIFO too
            pod.pause(rng.choice(STAGES[1:]))
            moment(rng, 0.3)
        acked = pod.seq("durability")
        pod.kill()
        cut = len(load.sent)  # also a connection that ended in order may have left its last lines in the links
        wal = acked_part(pod.data, acked)
        if rings_too:
            for ring in Path("/dev/shm").glob(f"{pod.instance}.*"):
                ring.unlink()
        pod.start(*rng.sample(STAGES, 4))
        pod.wait_ready()
        assert acked_part(pod.data, acked) == wal, f"acked records up to seq {acked} have changed"
    pod.wait(lambda: pod.seq("durability") >= AT_LEAST, f"{AT_LEAST} messages")
    load.finish()
    before = [Stream(stream.name, stream.line, stream.count, "prefix") for stream in load.sent[:cut]]
    pod.judge([*before, *load.sent[cut:]])


def acked_part(data: Path, seq: int) -> bytes:
    """The WAL up to record `seq`."""
    text = b"".join(path.read_bytes() for path in sorted((data / "append").glob("*.log")))
    end = text.index(b"\n%d|" % (seq + 1)) + 1 if b"\n%d|" % (seq + 1) in text else text.rindex(b"\n") + 1
    assert text[: end - 1].rpartition(b"\n")[2].startswith(b"%d|" % seq), f"the WAL ends before seq {seq}"
    return text[:end]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rings_too", [False, True], ids=["the rings stay", "the rings go too"])
def test_when_all_die_with_the_fifo_only_unacked_lines_are_lost(
    make_pod: Make, rng: random.Random, loads: Start, rings_too: bool
) -> None:
    all_at_once(make_pod(), rng, loads, 4, rings_too)


@pytest.mark.parametrize("first", ["ingress", "a shell"])
def test_a_line_cut_by_the_death_of_the_fifo_is_forgotten_whole(make_pod: Make, loads: Start, first: str) -> None:
    """The framer has read half a line when all die; whoever writes next must not be taken for the other half."""
    pod = make_pod(RB_SLOTS=1024)  # full long before one read of the FIFO is framed
    load = FifoLoad(pod.pipes, "cut", seed=1, rest_s=0)
    pod.start()
    pod.wait_ready()
    pod.pause("framer", "durability")
    loads(load)
    pod.wait(lambda: pod.fifo_bytes() > 512 << 10, "the FIFO fills")
    pod.resume("framer")
    pod.wait(lambda: pod.seq("framer") > 512, "the framer has read")
    load.finish()
    pod.kill()
    pod.start(*STAGES[1:])
    pod.wait_ready(*STAGES[1:])
    if first == "ingress":
        pod.start("ingress")
        pod.wait_ready()
    after = Lines("after")
    (pod.pipes / "raw").write_bytes(after.line(0) + b"\n")
    if first != "ingress":
        pod.start("ingress")
    report = pod.judge([load.sent[0]._replace(mode="prefix"), Stream("after", after.line, 1)])
    assert report.records < load.count, "nothing was lost with the FIFO: this run did not show anything"
    assert pod.events("unfinished_line_forgotten")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rings_too", [False, True], ids=["the rings stay", "the rings go too"])
def test_soak_all_four_with_the_fifo(make_pod: Make, rng: random.Random, loads: Start, rings_too: bool) -> None:
    all_at_once(make_pod(), rng, loads, 25, rings_too)


def test_a_killed_ingress_breaks_connections_and_never_seems_to_end_them_in_order(make_pod: Make, loads: Start) -> None:
    """The ring holds lines of which the full FIFO does not speak: their producer has sent all and waits for the orderly end."""
    pod = make_pod()
    filler = FifoLoad(pod.pipes, "filler", seed=1, rest_s=0)
    pod.start()
    pod.wait_ready()
    pod.pause("framer")
    loads(filler)
    pod.wait(filler.blocked.is_set, "the FIFO is nearly full")
    brim = fill_up(pod.pipes, "brim")
    filler.finish()
    lines = Lines("tcp")
    with socket.create_connection(("127.0.0.1", int((pod.pipes / "ingress.port").read_text())), timeout=10) as sock:
        sock.sendall(b"".join(lines.line(n) + b"\n" for n in range(100)))
        sock.shutdown(socket.SHUT_WR)
        pod.wait(lambda: pod.row("ingress").bytes > 0, "ingress has taken them")
        pod.kill("ingress")
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    pod.resume("framer")
    pod.start("ingress")
    pod.judge([*filler.sent, brim, Stream("tcp", lines.line, 100, "prefix")])
