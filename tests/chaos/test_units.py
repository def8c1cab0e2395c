"""Units on real stages: their seqs follow one another beside busy writers, with full rings, and whatever is killed."""

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.acked import AckedLoad, account, read_wal
from chaos.by_hand import Client, message
from chaos.load import FifoLoad, Load, TcpLoad
from chaos.pod import STAGES, Pod
from kmq.log import topic_changes
from kmq.message.ids import FORGOTTEN

Make = Callable[..., Pod]
Start = Callable[[Load], Load]
ONE_BY_ONE = 8192  # that the framer looks at one by one in a turn (kmq/framing/parser.py)


def local_token(pipes: Path) -> str:
    return (pipes / "local.token").read_text().strip()


class Door(Client):
    """A connection of KMQ's own, by hand."""

    def __init__(self, pod: Pod, name: str = "__door") -> None:
        super().__init__(pod, f"producer={name} reserved=1 token={local_token(pod.pipes)}")

    def put(self, name: str, *lines: bytes) -> None:
        """Send a unit."""
        body = b"".join(line + b"\n" for line in lines)
        self.sock.sendall(f"!unit {len(lines)} {len(body)} p={name}\n".encode() + body)

    def unit(self, name: str, *lines: bytes) -> list[str]:
        """Send a unit; return the reply to each of its lines."""
        self.put(name, *lines)
        return self.told(len(lines))

    def last(self, name: str) -> int:
        self.put(name)
        word, id = self.replies.readline().split()
        assert word == b"!last"
        return int(id)


class UnitLoad(AckedLoad):
    """Sends its messages in units, which are the same whenever it sends them again."""

    SIZES = (1, 2, 40, 7, 300, 1, 120)

    def __init__(self, pipes: Path, name: str, seed: int) -> None:
        super().__init__(pipes, name, seed)
        self.pipes = pipes
        self.ends = [0]

    def hello(self) -> bytes:
        return b"producer=__door-%b reserved=1 token=%b" % (self.producer, local_token(self.pipes).encode())

    def next_cut(self, last: int) -> int:
        while self.ends[-1] < last:
            self.ends.append(self.ends[-1] + self.SIZES[len(self.ends) % len(self.SIZES)])
        return next(end for end in self.ends if end >= last)

    def text(self, first: int, last: int) -> bytes:
        parts = []
        self.next_cut(last)
        for start, end in zip(self.ends, self.ends[1:], strict=False):
            low, high = max(first, start + 1), min(last, end)
            if low <= high:
                body = super().text(low, high)
                parts.append(b"!unit %d %d p=%b\n%b" % (high - low + 1, len(body), self.producer, body))
        return b"".join(parts)

    def units(self) -> Iterator[list[int]]:
        """The seqs of each unit that was sent as a whole."""
        for start, end in zip(self.ends, self.ends[1:], strict=False):
            if end <= len(self.seqs):
                yield list(self.seqs[start:end])


def follow_one_another(seqs: list[int]) -> bool:
    return seqs == list(range(seqs[0], seqs[0] + len(seqs)))


def acked(replies: list[str]) -> list[int]:
    return [int(reply.removeprefix("ack ")) for reply in replies]


@pytest.fixture
def pod(make_pod: Make) -> Pod:
    made = make_pod()
    made.start()
    made.wait_ready()
    return made


@pytest.mark.timeout(900)
def test_units_of_two_doors_stay_together_beside_busy_writers_and_kills_of_each_stage(
    make_pod: Make, rng: random.Random, loads: Start
) -> None:
    """Exactly once by their ids. All stages die at once at the end, and the rings stay."""
    pod = make_pod(RB_SLOTS=256, KMQ_MAX_TOPICS=10_000)
    pod.start()
    pod.wait_ready()
    others: list[Load] = [TcpLoad(pod.pipes, f"t{n}", rng.randrange(1 << 30), 0.2, longest=500) for n in range(3)]
    others.append(FifoLoad(pod.pipes, "fifo", rng.randrange(1 << 30), 0.2))
    doors = [UnitLoad(pod.pipes, f"k{n}.1.0", rng.randrange(1 << 30)) for n in (1, 2)]
    for load in (*others, *doors):
        loads(load)
    for number, victims in enumerate([(), *((name,) for name in STAGES), ("framer",), ("ingress", "framer"), STAGES]):
        goals = [len(door.seqs) + 300 for door in doors]
        pod.wait(
            lambda goals=goals: all(door.has(goal) for door, goal in zip(doors, goals, strict=True)), "units are acked"
        )
        topic_changes.submit(str(pod.data), topic_changes.CREATE, f"made{number}", {"partitions": "1"})
        if victims:
            pod.kill(*victims)
            pod.start(*rng.sample(victims, len(victims)))
    for load in (*doors, *others):
        load.finish()
    pod.judge()
    account(pod.data, *doors)
    for door in doors:
        units = list(door.units())
        assert len(units) > 20 and all(map(follow_one_another, units))
    changes = sum(line.split(b"|", 3)[2] == b"__kmq.topic" for line in read_wal(pod.data))
    assert changes >= 8


def test_a_unit_whose_lines_are_looked_at_one_by_one_takes_turns_and_stays_together(pod: Pod, loads: Start) -> None:
    others = [loads(TcpLoad(pod.pipes, f"t{n}", n, longest=300)) for n in range(4)]
    count = 2 * ONE_BY_ONE + 1000
    lines = [b"bar|1|%d|" % id for id in range(1, count + 1)]  # the others write to this topic, too
    lines[ONE_BY_ONE // 2] = b"no separator"
    with Door(pod) as door:
        for name in ("k1", "k2"):
            told = door.unit(name, *lines)
            assert told[ONE_BY_ONE // 2] == "err no_separator"
            del told[ONE_BY_ONE // 2]
            assert follow_one_another(acked(told))
    for load in others:
        load.finish()
    pod.judge()
    queue = (pod.data / "bar.log").read_bytes().split(b"\n")
    for name in (b"k1", b"k2"):
        offsets = [offset for offset, line in enumerate(queue) if b";p=%b|" % name in line]
        assert follow_one_another(offsets) and len(offsets) == count - 1 < len(queue) // 2


def test_a_unit_in_a_full_ring_stays_together_also_if_the_framer_is_killed_in_its_middle(make_pod: Make) -> None:
    """A change of a topic waits at that moment: the next framer numbers it after the unit."""
    pod = make_pod(RB_SLOTS=32)
    pod.start()
    pod.wait_ready()
    with Door(pod) as door:
        assert door.unit("k1", message(1)) == ["ack 1"]
        pod.pause("durability", "router")
        count = 200
        door.put("k1", *map(message, range(2, count + 2)))
        pod.wait(lambda: pod.row("framer").waits_since > 0 and pod.seq("framer") > 8, "the ring is full")  # type: ignore[union-attr]
        framed = pod.seq("framer")
        assert framed < count
        topic_changes.submit(str(pod.data), topic_changes.CREATE, "made", {"partitions": "1"})
        pod.kill("framer")
        pod.resume("durability", "router")
        pod.start("framer")
        seqs = acked(door.told(count))
        assert seqs == list(range(2, count + 2))
        pod.wait(lambda: (pod.data / "topics/made/topic.toml").exists(), "the topic is made")
        assert door.unit("k1", message(count + 1), message(count + 2)) == [f"dup {count + 1}", f"ack {count + 3}"]
    pod.judge()


def test_with_a_stopped_router_units_of_all_sizes_wait_and_stay_together(make_pod: Make, loads: Start) -> None:
    pod = make_pod(RB_SLOTS=32)
    pod.start()
    pod.wait_ready()
    other = loads(TcpLoad(pod.pipes, "t", 1, longest=300))
    sizes = (1, 5, 33, 200, 3000)
    with Door(pod) as door:
        pod.pause("router")
        pod.wait(lambda: pod.row("framer").waits_since > 0, "the rings are full")  # type: ignore[union-attr]
        first = 1
        for size in sizes:
            door.put("k1", *map(message, range(first, first + size)))
            first += size
        pod.resume("router")
        for size in sizes:
            assert follow_one_another(acked(door.told(size)))
    other.finish()
    pod.judge()


def test_half_a_unit_dies_with_ingress_and_is_stored_when_it_comes_whole(pod: Pod) -> None:
    lines = [message(id) for id in range(1, 100)]
    body = b"".join(line + b"\n" for line in lines)
    for number, end in enumerate((pod.kill, pod.stop)):
        name = f"k{number}"
        with Door(pod) as door:
            assert door.last(name) == 0  # it is read
            door.sock.sendall(f"!unit {len(lines)} {len(body)} p={name}\n".encode() + body[: len(body) // 2])
            end("ingress")
            with contextlib.suppress(ConnectionError):
                assert door.replies.read() == b""
        pod.start("ingress")
        pod.wait_ready()
        with Door(pod) as door:
            assert door.last(name) == 0
            first = number * len(lines) + 1
            assert acked(door.unit(name, *lines)) == list(range(first, first + len(lines)))
    pod.judge()


def test_one_connection_sends_for_many_names_and_asks_for_their_last_ids(pod: Pod) -> None:
    names = [f"k{n}.1.0" for n in range(20)]
    with Door(pod) as door:
        assert door.last("k0.1.0") == 0
        for way in ("sent", "sent again", "after a kill of the framer"):
            for at, name in enumerate(names):
                word = "ack" if way == "sent" else "dup"
                assert door.unit(name, message(5), message(7)) == [f"{word} {2 * at + 1}", f"{word} {2 * at + 2}"], way
                assert door.last(name) == 7
            assert door.last("k20.1.0") == 0
            assert door.unit(names[0], message(6)) == ["err id_too_old"]
            if way == "sent again":
                pod.kill("framer")
                pod.start("framer")
                pod.wait_ready()
        assert door.send(message(1)) == ["ack 41"]  # its own name
        with Door(pod) as newer:  # the next life of the door
            assert door.unit(names[0], message(8)) == ["err fenced"]
            assert newer.unit(names[0], message(8)) == ["ack 42"] and newer.last("__door") == 1
    assert sum(b";p=k0.1.0|" in line for line in read_wal(pod.data)) == 3


def refused(sock: socket.socket, data: bytes) -> bytes:
    """What a connection that ends is told."""
    sock.sendall(data)
    told = b""
    while piece := sock.recv(1 << 16):
        told += piece
    return told


def test_what_is_no_unit_is_refused_by_name_and_the_connection_ends(make_pod: Make) -> None:
    pod = make_pod(KMQ_MAX_LINE="64 KiB", KMQ_LINE_DEADLINE="1s")
    pod.start()
    pod.wait_ready()
    lies = [
        (b"!unit 2 5\na|||\n", b"its 5 bytes are 1 lines"),
        (b"!unit 1 4\na|||\n", b"its 4 bytes are 0 lines"),
        (b"!unit 1 131073\n", b"131073 bytes: a unit has at most 131072"),
        (b"!unit one 5\na|||\n", b"expected: !unit <lines> <bytes> [p=<name> [after=<id>]]"),
        (b"!unit 1 6\na|||\n", b"the connection ended before the unit did"),  # within KMQ_LINE_DEADLINE
    ]
    for number, (lie, why) in enumerate(lies, start=1):
        with Door(pod) as door:
            assert door.unit("k1", b"a||%d|" % number) == [f"ack {number}"]
            told = refused(door.sock, lie)
            assert told.startswith(b"!err 2 bad_unit ") and why in told, lie
    with Client(pod, "producer=k1") as client:
        assert client.send(b"!unit 1 5 p=k1") == ["err control_byte"]
    pod.judge()


def test_a_full_part_of_kafka_producers_refuses_new_names_only_and_forgets_the_idle(make_pod: Make) -> None:
    pod = make_pod(KMQ_KAFKA_PRODUCERS=1, KMQ_PRODUCER_TTL="4s")  # longer than a busy machine takes between two replies
    pod.start()
    pod.wait_ready()
    first, second = "k1000001.1.0", "k1000002.1.0"
    with Door(pod) as door:
        assert door.unit(first, message(3)) == ["ack 1"] and door.last(first) == 3
        assert door.unit(second, message(1), message(2)) == ["err producers_full"] * 2
        assert door.unit("shop", message(1)) == ["ack 2"] and door.unit(first, message(3)) == ["dup 1"]
        pod.wait(lambda: door.unit(second, message(1)) == ["ack 3"], "the first name is forgotten")
        assert (door.last(first), door.last(second)) == (FORGOTTEN, 1)
    pod.judge()
