"""Idempotence that survives restarts: whatever is killed, a message that is sent again is stored once, and told its first seq."""

import itertools
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from chaos import attacks_ids
from chaos.acked import AckedLoad, account, read_wal
from chaos.by_hand import Client, message
from chaos.hurry import brisk
from chaos.in_place_of_ingress import hand_over
from chaos.load import Load
from chaos.pod import STAGES, Pod
from kmq.links.fifo import Sender

Make = Callable[..., Pod]
Start = Callable[[Load], Load]
AT_LEAST = 3000  # messages of each producer
CHUNK = 1000  # messages on the way at a time
FRAMER_MIB = 72
BLOWS: list[tuple[str, ...]] = [
    ("framer",),
    ("framer",),
    ("framer", "durability"),
    ("ingress", "framer"),
    STAGES,
    STAGES,
]


class WindowLoad(AckedLoad):
    """The same with arbitrary ids."""

    kind = b"window"

    def line(self, number: int) -> bytes:
        key, ts, own, payload = super().line(number).split(b"|", 3)
        return b"|".join([key, ts, b"%x-%b" % (int(own) * 7919 % (1 << 32), own), payload])


def send_again(pod: Pod, load: AckedLoad) -> None:
    """All that `load` was told about: each is a duplicate of what it was told."""
    with Client(pod, f"{load.kind.decode()}={load.producer.decode()}") as client:
        for at in range(0, len(load.seqs), CHUNK):
            known = load.seqs[at : at + CHUNK]
            told = client.send(*(load.line(number) for number in range(at + 1, at + 1 + len(known))))
            assert told == [f"dup {seq}" for seq in known]


def blow(pod: Pod, rng: random.Random, victims: tuple[str, ...], rings_too: bool) -> None:
    pod.kill(*victims)
    if rings_too and len(victims) == len(STAGES):
        for ring in Path("/dev/shm").glob(f"{pod.instance}.*"):
            ring.unlink()
    pod.start(*rng.sample(victims, len(victims)))


def storm(pod: Pod, rng: random.Random, start: Start, blows: list[tuple[str, ...]], rings_too: bool) -> None:
    """Some producers go on over kills, and in the end send everything again, over one more kill of the framer."""
    pod.start()
    pod.wait_ready()
    loads: list[AckedLoad] = [AckedLoad(pod.pipes, f"p{n}", rng.randrange(1 << 30)) for n in range(3)]
    loads.append(WindowLoad(pod.pipes, "w0", rng.randrange(1 << 30)))
    for load in loads:
        start(load)
    for victims in rng.sample(blows, len(blows)):
        before = [len(load.seqs) for load in loads]
        pod.wait(
            lambda before=before: all(load.has(count + 200) for load, count in zip(loads, before, strict=True)),
            "each producer is told something",
        )
        time.sleep(rng.random() * 0.05)  # the instant of the blow is what this tries
        blow(pod, rng, victims, rings_too)
    pod.wait(lambda: all(load.has(AT_LEAST) for load in loads), f"{AT_LEAST} messages of each")
    for load in loads:
        load.finish()
    pod.wait_ready()
    for load in loads:
        send_again(pod, load)
    blow(pod, rng, ("framer",), rings_too)
    pod.wait_ready()
    for load in loads:
        send_again(pod, load)
    account(pod.data, *loads)
    pod.judge()


@pytest.mark.parametrize("rings_too", [False, True], ids=["the rings stay", "the rings go too"])
def test_what_is_sent_again_over_kills_is_stored_once_and_told_its_first_seq(
    make_pod: Make, rng: random.Random, loads: Start, rings_too: bool
) -> None:
    storm(make_pod(), rng, loads, BLOWS, rings_too)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rings_too", [False, True], ids=["the rings stay", "the rings go too"])
def test_soak_sent_again_over_many_kills(make_pod: Make, rng: random.Random, loads: Start, rings_too: bool) -> None:
    pairs = list(itertools.combinations(STAGES, 2))
    storm(make_pod(), rng, loads, [*BLOWS, *pairs, *[(name,) for name in STAGES]] * 5, rings_too)


# --- one kill at a time -------------------------------------------------------------------------------------------------


@pytest.fixture
def pod(make_pod: Make, tmp_path: Path) -> Iterator[Pod]:
    made = make_pod(PYTHONPATH=brisk(tmp_path))
    made.start()
    made.wait_ready()
    yield made


def restart(pod: Pod, *victims: str) -> None:
    pod.kill(*victims)
    pod.start(*victims or STAGES)
    pod.wait_ready()


def last_id(pod: Pod, name: str) -> int:
    """What a program that starts anew under this name is told."""
    with Client(pod, f"producer={name} last=?") as client:
        word, id = client.replies.readline().split()
        assert word == b"!last"
        return int(id)


def restarts(pod: Pod) -> Iterator[str]:
    """Every kind of them, one after the other."""
    for way in ("framer killed", "all killed", "rings gone", "framer stopped", "all stopped"):
        victims = ("framer",) if way.startswith("framer") else STAGES
        pod.stop(*victims) if way.endswith("stopped") else pod.kill(*victims)
        if way == "rings gone":
            for ring in Path("/dev/shm").glob(f"{pod.instance}.*"):
                ring.unlink()
        pod.start(*victims)
        pod.wait_ready()
        yield way


@pytest.mark.parametrize("hello", ["producer=me", "window=me"])
def test_a_duplicate_is_told_its_first_seq_after_every_kind_of_restart(pod: Pod, hello: str) -> None:
    """And one that has other content than before is refused: it is no retry, and would be lost without a word."""
    lines = [message(id) for id in (1, 2, 5, 6, 9)]
    others = [line + b", another" for line in lines]
    with Client(pod, hello) as client:
        seqs = [reply.removeprefix("ack ") for reply in client.send(*lines)]
        assert client.send(*others) == ["err id_reused"] * len(others)
    for way in restarts(pod):
        with Client(pod, hello) as client:
            assert client.send(*lines) == [f"dup {seq}" for seq in seqs], way
            assert client.send(*others) == ["err id_reused"] * len(others), way
            assert client.send(lines[0]) == [f"dup {seqs[0]}"], way  # the connection goes on
        assert last_id(pod, "me") == (9 if hello == "producer=me" else 0), way
    assert len(read_wal(pod.data)) == len(lines)


def test_a_newer_connection_of_a_producer_ends_the_older_ones_word(pod: Pod) -> None:
    with Client(pod, "producer=me") as older, Client(pod, "producer=you") as other:
        assert older.send(message(1)) == ["ack 1"]
        with Client(pod, "producer=me") as newer:
            assert older.send(message(2), message(3)) == ["err fenced", "err fenced"]
            assert newer.send(message(1), message(2)) == ["dup 1", "ack 2"]
            assert other.send(message(1)) == ["ack 3"]
            assert older.send(message(4)) == ["err fenced"]
    with Client(pod, "producer=me") as again:
        assert again.send(message(3)) == ["ack 4"]


def test_an_id_that_was_passed_over_is_refused_also_after_a_kill(pod: Pod) -> None:
    for _ in range(2):
        with Client(pod, "producer=me") as client:
            client.send(message(1), message(5))
            assert client.send(message(3), message(0)) == ["err id_too_old"] * 2
            assert client.send(message(5)) == ["dup 2"]
        restart(pod, "framer")


def test_a_full_table_refuses_new_producers_also_after_a_kill_and_serves_known_ones(make_pod: Make) -> None:
    pod = make_pod(KMQ_PRODUCERS=2)
    pod.start()
    pod.wait_ready()
    for name in ("a", "b"):
        with Client(pod, f"producer={name}") as client:
            client.send(message(1))
    for _ in range(2):
        with Client(pod, "producer=c") as client:
            assert client.send(message(1), message(2)) == ["err producers_full"] * 2
        with Client(pod, "producer=a") as client:
            assert client.send(message(1)) == ["dup 1"]
        assert pod.row("framer").producers == 2  # type: ignore[union-attr]
        restart(pod, "framer")


def test_a_control_line_cut_by_the_death_of_the_fifo_is_forgotten(make_pod: Make) -> None:
    """The framer has read half a control line when all die: its producer sends the messages again, and nothing else is stored."""
    pod = make_pod()
    pod.start()
    pod.wait_ready()
    (pod.pipes / "raw").write_bytes(b"!c 1.1 1 3 1732190000000")
    pod.wait(lambda: pod.fifo_bytes() == 0, "the framer has read")
    pod.kill()
    pod.start()
    pod.wait_ready()
    with Client(pod, "producer=cut") as client:
        assert client.send(message(1), message(2), message(3)) == ["ack 1", "ack 2", "ack 3"]
    assert pod.events("unfinished_line_forgotten")


def test_an_idle_producer_is_forgotten_and_its_place_given_to_another(make_pod: Make) -> None:
    pod = make_pod(KMQ_PRODUCERS=1, KMQ_PRODUCER_TTL="4s")  # longer than a busy machine takes between two replies
    pod.start()
    pod.wait_ready()
    with Client(pod, "producer=a") as other, Client(pod, "producer=b") as client:
        assert other.send(message(1), message(1)) == ["ack 1", "dup 1"]
        assert client.send(message(1)) == ["err producers_full"]
        pod.wait(lambda: client.send(message(1)) == ["ack 2"], "a is forgotten")
    with Client(pod, "producer=a") as client:
        pod.wait(lambda: client.send(message(1)) == ["ack 3"], "b is forgotten, and a is new")


def test_a_window_remembers_so_many_ids_also_after_a_kill(make_pod: Make) -> None:
    pod = make_pod(KMQ_DEDUPE_COUNT=100)
    pod.start()
    pod.wait_ready()
    with Client(pod, "window=me") as client:
        assert client.send(*map(message, range(150))) == [f"ack {seq}" for seq in range(1, 151)]
    restart(pod, "framer")
    with Client(pod, "window=me") as client:
        assert client.send(*map(message, range(50, 150))) == [f"dup {seq}" for seq in range(51, 151)]
        assert client.send(*map(message, range(50))) == [f"ack {seq}" for seq in range(151, 201)]
        assert client.send(message(99), message(149)) == ["ack 201", "dup 150"]  # the oldest have gone for the youngest
    assert pod.row("framer").remembered == 100  # type: ignore[union-attr]


def test_a_window_remembers_for_so_long_also_after_a_kill(make_pod: Make) -> None:
    pod = make_pod(KMQ_DEDUPE_AGE="1s")
    pod.start()
    pod.wait_ready()
    with Client(pod, "window=me") as client:
        assert client.send(message("x"), message("x")) == ["ack 1", "dup 1"]
    restart(pod, "framer")
    with Client(pod, "window=me") as client:
        pod.wait(lambda: client.send(message("x")) == ["ack 2"], "x is forgotten")


# --- strangers ---------------------------------------------------------------------------------------------------------


def test_lines_of_an_unknown_name_beside_a_full_table_silence_nobody(make_pod: Make) -> None:
    """53 KB of them: the framer looked through all names for each line, 72 s without a heartbeat."""
    pod = make_pod()
    pod.start()
    pod.wait_ready()
    attacks_ids.unknown_name(pod)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_soak_strangers_ids(make_pod: Make) -> None:
    pod = make_pod()
    pod.start()
    pod.wait_ready()
    attacks_ids.attack(pod)


# --- a large table -----------------------------------------------------------------------------------------------------


def in_pieces(tag: str, count: int, size: int, ids: Iterable[str]) -> Iterator[tuple[Sender, bytes, int]]:
    """`count` pieces, each the next `size` ids of a connection of its own; `tag` gets its number."""
    ids = iter(ids)
    for n in range(count):
        lines = b"".join(message(id) + b"\n" for id in itertools.islice(ids, size))
        yield Sender(b"1.%d" % n, tag.format(n).encode()), lines, size


def cpu_s(pod: Pod, name: str) -> float:
    """What a stage has used of the processor so far."""
    fields = Path(f"/proc/{pod.processes[name].pid}/stat").read_text().split()
    return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")


def test_framer_start_costs_less_than_framing_with_many_producers_and_ids(pod: Pod) -> None:
    """From a checkpoint, and from the WAL alone; the framer stays small."""
    names = in_pieces("p=producer-{}", 10_000, 20, (str(2 * n) for n in itertools.count()))  # each a run of its own
    window = in_pieces("w=podbus", 2_500, 40, (f"{n:032x}" for n in itertools.count()))
    hand_over(pod, itertools.chain(names, window))
    pod.wait(lambda: pod.seq("durability") == 300_000, "all is stored")
    took = {"framing": cpu_s(pod, "framer")}
    for way in ("killed", "stopped"):
        row = pod.row("framer")
        assert row is not None and (row.producers, row.remembered) == (10_000, 100_000)
        pod.kill("framer") if way == "killed" else pod.stop("framer")
        pod.start("framer")
        pod.wait_ready("framer")
        took[way] = cpu_s(pod, "framer")
        with Client(pod, "producer=producer-9999") as client:
            assert client.send(message(2 * 199_999)) == ["dup 200000"]
        with Client(pod, "window=podbus") as client:
            assert client.send(message(f"{99_999:032x}")) == ["dup 300000"]
    status = Path(f"/proc/{pod.processes['framer'].pid}/status").read_text()
    mib = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
    print(*(f"event=cpu of={way} s={seconds:.2f}" for way, seconds in took.items()), f"framer_mib={mib:.0f}")
    assert max(took["killed"], took["stopped"]) < 2 * took["framing"] and mib < FRAMER_MIB
