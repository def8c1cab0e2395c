"""What others find by its name is deleted while the broker runs: rings, bells, the stats page, lock files.

`rm /dev/shm/<instance>.*` and `ipcrm -s <id>` do it, and so does systemd's RemoveIPC when the user who started the broker
logs out: it takes the semaphores first, then the shared memory.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from brokers import Broker
from waiting import attempts

from chaos.acked import AckedLoad, account
from chaos.load import FifoLoad, Load, TcpLoad
from chaos.pod import RINGS, SHM, STAGES, Pod, remove_bells, remove_shared_memory
from kmq.config.settings import load
from kmq.links import doorbell, layout
from kmq.links.ring import RingWriter
from kmq.links.staging import area_bytes
from kmq.logfmt import Logger
from kmq.message import record

EX_CORRUPT, EX_BUSY, EX_TEMPFAIL = 65, 69, 75
Make = Callable[..., Pod]
Start = Callable[[Load], Load]


def until_all_run_again(pod: Pod) -> None:
    """Restart what ends, until all four are ready and find each other."""

    def are_ready() -> bool:
        for name in STAGES:
            if not pod.is_alive(name):
                assert pod.processes[name].returncode in (EX_TEMPFAIL, -signal.SIGKILL), pod.tail()
                pod.start(name)
        works = (pod.state(name) == "ready" and not holds_removed_memory(pod, name) for name in STAGES)
        return all(works) and all(map(pod.is_alive, STAGES))

    pod.wait(are_ready, "all four are ready again")


def holds_removed_memory(pod: Pod, name: str) -> bool:
    """Whether this stage has not noticed yet that shared memory was removed: it will end for that."""
    maps = Path(f"/proc/{pod.processes[name].pid}/maps").read_text().splitlines()
    mapped = {int(line.split()[4]) for line in maps if f"/{pod.instance}." in line}
    with os.scandir(SHM) as entries:  # which says the number without asking for the file again: it may be gone by then
        named = {entry.inode() for entry in entries if entry.name.startswith(f"{pod.instance}.")}
    return not mapped <= named


def send_some(pod: Pod, cleanup: ExitStack, name: str, count: int) -> socket.socket:
    """`count` messages over an acknowledged connection, which stays open for the replies."""
    port = int((pod.pipes / "ingress.port").read_text())
    sock = cleanup.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
    sock.sendall(b"!hello acks=1\n")
    assert sock.recv(100).startswith(b"!ok ")
    sock.sendall("".join(f"test.{name}|0|{name}-{n}|x\n" for n in range(count)).encode())
    return sock


def replies(sock: socket.socket, count: int) -> list[bytes]:
    """The replies to `count` messages, or those that came before the connection broke."""
    lines, rest, told = list[bytes](), b"", 0
    while told < count and (data := sock.recv(1 << 16)):
        *more, rest = (rest + data).split(b"\n")
        lines += more
        told = int(lines[-1].split()[1]) if lines else 0
    return lines


def acked(lines: list[bytes]) -> list[int]:
    """The seqs that `!ack` lines speak of."""
    seqs, before = list[int](), 0
    for verb, n, seq, *_ in map(bytes.split, lines):
        if verb == b"!ack":
            seqs += range(int(seq) - (int(n) - before) + 1, int(seq) + 1)
        before = int(n)
    return seqs


def stored(pod: Pod) -> dict[int, bytes]:
    lines = b"".join(path.read_bytes() for path in sorted((pod.data / "append").glob("*.log"))).splitlines()
    return {int(line.split(b"|", 1)[0]): line for line in lines}


def slow_down(pod: Pod, cleanup: ExitStack, strace: str, name: str, inject: str) -> None:
    """From now on, until it ends, a stage's system calls are delayed."""
    pid = pod.processes[name].pid
    tracer = subprocess.Popen([strace, "-f", "-qq", "-o", "/dev/null", "-e", f"inject={inject}", "-p", str(pid)])
    cleanup.callback(tracer.wait)
    cleanup.callback(tracer.terminate)
    status = Path(f"/proc/{pid}/status")
    pod.wait(lambda: f"TracerPid:\t{tracer.pid}\n" in status.read_text(), "strace is attached")


@pytest.mark.parametrize("halted", ["stopped", "in a slow fsync"])
def test_no_ring_is_made_while_durability_lives_on_one_that_was_removed(
    make_pod: Make, cleanup: ExitStack, strace: str, halted: str
) -> None:
    """Durability has 200 messages unsynced, the ring's name goes, and the framer with it: its successor must not number anew."""
    pod = make_pod()
    pod.start()
    pod.wait_ready()
    first = send_some(pod, cleanup, "first", 100)
    assert acked(replies(first, 100)) == list(range(1, 101))
    if halted == "stopped":
        pod.pause("durability")
    else:
        slow_down(pod, cleanup, strace, "durability", "fdatasync:delay_enter=3000000")
    second = send_some(pod, cleanup, "second", 200)
    pod.wait(lambda: pod.seq("framer") == 300, "300 are numbered")
    remove_shared_memory(pod.instance, but="received")  # with that, ingress would end, and its connections
    pod.kill("framer")
    pod.start("framer")
    third = send_some(pod, cleanup, "third", 1000)
    pod.wait(lambda: pod.state("framer") == "waiting", "the new framer waits for durability to leave")
    if halted == "stopped":
        pod.resume("durability")
    until_all_run_again(pod)
    told = [acked(replies(sock, count)) for sock, count in ((second, 200), (third, 1000))]
    pod.settle()
    there = stored(pod)
    for name, seqs in zip((b"|second-", b"|third-"), told, strict=True):
        lost = [seq for seq in seqs if name not in there.get(seq, b"")]
        assert not lost, (
            f"acknowledged, and not stored under its seq: {len(lost)} of {len(seqs)} {lost[:3]}\n{pod.tail()}"
        )
    pod.judge()


def ring_from(pod: Pod, first_seq: int, lines: list[bytes]) -> RingWriter:
    """A ring `framed` of this broker, made by hand: as it would be if another framer had numbered these lines from there on."""
    settings = load({name: str(value) for name, value in pod.settings.items()}, toml="")
    identity = layout.make_identity(
        (pod.data / "id").read_text().strip(),
        settings.ring_slots,
        settings.ring_bytes,
        2 * area_bytes(settings.max_line),
        settings.policy,
    )
    ring = RingWriter(pod.instance, "framed", identity, "the test", lambda: (first_seq, 0), Logger("test"))
    block, _ = record.number(lines, first_seq, record.format_ts(time.time_ns() // 1000))
    reply = b"1.1 1 !ack %d %d\n" % (len(lines), first_seq + len(lines) - 1)
    ring.append(layout.Framed(block, layout.Stamp(first_seq, len(lines), 0, 0), reply))
    return ring


@pytest.mark.parametrize(("first_seq", "count"), [(101, 1000), (280, 100)])
def test_a_block_that_differs_from_the_wal_is_not_acknowledged(
    make_pod: Make, cleanup: ExitStack, first_seq: int, count: int
) -> None:
    pod = make_pod()
    pod.start()
    pod.wait_ready()
    assert acked(replies(send_some(pod, cleanup, "first", 300), 300)) == list(range(1, 301))
    pod.stop()
    remove_shared_memory(pod.instance)
    ring = ring_from(pod, first_seq, [b"test|0|%d|other" % n for n in range(count)])
    acks = os.open(pod.pipes / "acks", os.O_RDWR | os.O_NONBLOCK)
    cleanup.callback(os.close, acks)
    pod.start("durability")
    assert pod.wait_exit("durability") == EX_CORRUPT
    ring.close()
    assert "kmq verify --repair" in pod.tail()
    assert len(stored(pod)) == 300
    with pytest.raises(BlockingIOError):
        os.read(acks, 100)


WHAT = ["rings", "everything", "bells", "framed reader", "durable writer", "received", "framed", "durable", "stats"]


@pytest.mark.parametrize("what", WHAT)
def test_removed_shared_memory_costs_no_message(make_pod: Make, loads: Start, what: str) -> None:
    """With all alive: who notices ends, its ring gets its name again, and what was on the way arrives once."""
    pod = make_pod()
    acked_load = AckedLoad(pod.pipes, "alice", seed=1)
    fifo_load = FifoLoad(pod.pipes, "fifo", seed=2)
    tcp_load = TcpLoad(pod.pipes, "tcp", seed=3)
    loads(acked_load), loads(fifo_load), loads(tcp_load)
    pod.start()
    pod.wait_ready()
    pod.wait(lambda: acked_load.has(2000) and min(fifo_load.count, tcp_load.count) > 2000, "some messages")
    if what in ("everything", "bells", "framed reader", "durable writer"):
        assert len(doorbell.sets_of(pod.instance)) == 4
        remove_bells(pod.instance, *([what] if " " in what else []))
    if what == "everything":
        remove_shared_memory(pod.instance)
    for kind in RINGS if what == "rings" else {what} & {"received", "framed", "durable", "stats"}:
        (SHM / f"{pod.instance}.{kind}").unlink()
    affected = {
        "durable": {"durability", "router"},
        "framed": {"framer", "durability"},
        "received": {"ingress", "framer"},
        "bells": {"framer", "durability", "router"},
        "framed reader": {"framer", "durability"},
        "durable writer": {"durability", "router"},
    }
    ended = affected.get(what, set(STAGES))
    if what == "stats":
        pod.wait(lambda: all(pod.state(name) == "ready" for name in STAGES), "all say how they are again")
    else:
        pod.wait(lambda: not any(map(pod.is_alive, ended)), "the end of those that use what was removed")
        until_all_run_again(pod)
    before = len(acked_load.seqs)
    pod.wait(lambda: acked_load.has(before + 2000), "acknowledgements go on")
    acked_load.finish()
    fifo_load.finish()
    tcp_load.finish()
    pod.settle()
    pod.stop()
    account(pod.data, acked_load, plain=fifo_load.sent + tcp_load.sent)
    strange = [line for line in stored(pod).values() if b"|dead." in line]
    assert not strange, "what the FIFO said of lines is stored in place of them"


def test_the_ring_survives_where_the_framer_was_killed_first(make_pod: Make, cleanup: ExitStack) -> None:
    """What was staged and framed is then only in the ring, which durability alone still has: it gives it its name again."""
    pod = make_pod()
    pod.start()
    pod.wait_ready()
    pod.pause("durability")
    sock = send_some(pod, cleanup, "late", 500)
    pod.wait(lambda: pod.seq("framer") == 500, "all are numbered")
    pod.kill("framer")
    remove_shared_memory(pod.instance, but="received")  # so that ingress stays to pass the replies on
    pod.resume("durability")
    until_all_run_again(pod)
    assert acked(replies(sock, 500)) == list(range(1, 501))
    assert pod.judge().records == 500


@pytest.mark.parametrize("killed", [True, False], ids=["framer killed", "framer alive"])
@pytest.mark.parametrize("slow", ["ingress", "framer"])
def test_lines_in_a_removed_ring_that_the_fifo_speaks_of_are_stored(
    make_pod: Make, cleanup: ExitStack, slow: str, killed: bool
) -> None:
    """Whoever notices late: what the FIFO says of the ring is never stored in place of the lines."""
    pod = make_pod()
    pod.start()
    pod.wait_ready()
    assert acked(replies(send_some(pod, cleanup, "first", 100), 100)) == list(range(1, 101))
    pod.pause("framer")
    send_some(pod, cleanup, "second", 200)
    pod.wait(lambda: pod.fifo_bytes() > 0, "the FIFO speaks of them")
    if slow == "ingress":
        pod.pause("ingress")
    (SHM / f"{pod.instance}.received").unlink()
    if slow == "framer":
        assert pod.wait_exit("ingress") == EX_TEMPFAIL
        pod.start("ingress")
        pod.wait_ready("ingress")
        send_some(pod, cleanup, "third", 300)
        pod.wait(lambda: pod.fifo_bytes() > 100, "the FIFO speaks of them")
    if killed:
        pod.kill("framer")
        pod.start("framer")
    else:
        pod.resume("framer")
        assert pod.wait_exit("framer") == EX_TEMPFAIL
        pod.start("framer")
    if slow == "ingress":
        pod.wait(
            lambda: pod.state("framer") == "waiting" or pod.seq("framer") > 100, "the framer has come to the lines"
        )
        pod.resume("ingress")
        assert pod.wait_exit("ingress") == EX_TEMPFAIL
    until_all_run_again(pod)
    pod.settle()
    names = [b"|%b-%d|" % (name, n) for name, count in ((b"second", 200), (b"third", 300)) for n in range(count)]
    expected = names[: 200 if slow == "ingress" else 500]
    found = [seq for seq, line in stored(pod).items() if any(name in line for name in expected)]
    assert found == list(range(101, 101 + len(expected))), f"{len(found)} of {len(expected)} lines\n{pod.tail()}"
    assert pod.judge().records == 100 + len(expected)


def test_of_two_brokers_that_got_a_half_of_one_directory_the_one_with_the_wal_goes_on(make_pod: Make) -> None:
    """Their lock files were deleted, or both were killed: a router that kept its half would stop the other broker too."""
    one = make_pod()
    two = make_pod(KMQ_DATA=one.data)
    two.start("router")
    two.wait(lambda: two.state("router") == "waiting", "the router of the second broker has topics/")
    one.start("ingress", "framer", "durability")
    assert two.wait_exit("router") == EX_BUSY
    assert "one broker per directory" in two.tail()
    one.start("router")
    one.wait_ready()


def ask_to_store(broker: Broker, payload: str) -> bool:
    """Whether this broker says that it has stored one more message."""
    try:
        port = int((broker.pipes / "ingress.port").read_text())
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock, sock.makefile("rb") as replies:
            sock.sendall(f"!hello acks=1\ntest|0||{payload}\n".encode())
            return replies.readline().startswith(b"!ok ") and replies.readline().startswith(b"!ack 1 ")
    except OSError:
        return False


def test_of_two_brokers_on_one_directory_whose_lock_files_were_deleted_one_goes_on(
    new_broker: Callable[..., Broker],
) -> None:
    """Who comes has to make the lock files anew, and waits until who was there has noticed and ended."""
    one = new_broker()
    two = new_broker(one.data)
    one.gateway = two.gateway = False
    one.up()
    told = [payload for n in range(20) if ask_to_store(one, payload := f"before-{n}")]
    for path in one.data.glob("*/.owner"):
        path.unlink()
    two.kmq("up", "--no-gateway")  # refused, if the first has made its lock files again by then
    # The first may have ended for what was deleted, and not be back yet.
    for n, _ in enumerate(attempts("one of the two goes on", lambda: f"{one.log()}\n{two.log()}")):
        told += [payload for broker in (one, two) if ask_to_store(broker, payload := f"{broker.instance}-{n}")]
        if len(told) >= 40:
            break
    for broker in (one, two):
        broker.kmq("down")
    seqs = [int(line.split(b"|", 1)[0]) for line in one.wal()]
    assert seqs == list(range(1, len(seqs) + 1)), "two brokers have written here"
    assert set(told) <= {line.rsplit(b"|", 1)[1].decode() for line in one.wal()}
