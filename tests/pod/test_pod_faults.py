"""A real pod under faults: what is killed, stopped, starved, doubled or sent garbage comes back, and G1 to G3 hold.

Two pods serve all tests: `pod`, which is hit under load, and `small`, on a disk of its own that can be filled.
"""

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import play as player
import pytest
from chaos.checker import Stream
from chaos.load import PIPE_BUF, Lines
from load import KEEP_ALL, Traffic, connect, instance, judge_files, rows, settle, states, traffic_to
from play import Kubelet, Pod
from waiting import meanwhile, until

import kmq
from kmq.config.settings import STAGES
from kmq.errors import EXIT_BUSY
from kmq.links import layout

DEV = "k8s/overlays/dev"
Play = Callable[..., Pod]
UID = "10001"
# What Kubernetes would inject for a Service named kmq (the manifest's enableServiceLinks: false spares us that).
SERVICE_LINKS = {
    "KMQ_SERVICE_HOST": "10.96.7.3",
    "KMQ_SERVICE_PORT_LINES": "5673",
    "KMQ_PORT": "tcp://10.96.7.3:5673",
    "KMQ_PORT_5673_TCP": "tcp://10.96.7.3:5673",
    "KMQ_PORT_5673_TCP_ADDR": "10.96.7.3",
}
DISK_BYTES = 64 << 20
SOAK = partial(pytest.param, marks=pytest.mark.soak)


@pytest.fixture
def rng() -> random.Random:
    """Random moments; CHAOS_SEED=<n> repeats a run as far as the scheduler lets it."""
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"CHAOS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def pod(play_once: Play) -> Pod:
    return play_once(**SERVICE_LINKS, **KEEP_ALL)


@pytest.fixture(scope="module")
def small(image: str) -> Iterator[Pod]:
    """Its data lies on a file system that holds DISK_BYTES. What ends in it stays so."""
    pod = player.play(DEV, restart_policy="Never", **KEEP_ALL)
    try:
        with tmpfs(pod.home / "data", DISK_BYTES), pod:
            pod.wait_ready()
            yield pod
    finally:
        pod.down()  # the rest: what is mounted cannot be removed


@contextlib.contextmanager
def tmpfs(path: Path, nbytes: int) -> Iterator[None]:
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "kmq-test", str(path)], check=True)
    try:
        yield
    finally:
        if os.path.ismount(path):  # the end of a pod removes what is mounted in its home
            subprocess.run(["umount", "-l", str(path)], check=True)


# --- what the processes may do -----------------------------------------------------------------------------------------


def privileges(pid: int) -> set[str]:
    """What a process has that it should not have, by the names of /proc/<pid>/status."""
    text = Path(f"/proc/{pid}/status").read_text()
    status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    found = {name for name in ("Uid", "Gid", "Groups") if not set(status[name].split()) <= {UID}}
    found |= {name for name in status if name.startswith("Cap") and int(status[name], 16)}
    found |= {name for name, wanted in (("NoNewPrivs", "1"), ("Seccomp", "2")) if status[name].strip() != wanted}
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    if any(fields[4] == "/" and "ro" not in fields[5].split(",") for fields in mounts):
        found.add("writable root")
    return found


def space_of(pod: Pod) -> int:
    """The pod's process namespace."""
    return os.stat(f"/proc/{pod.pid('ingress')}/ns/pid").st_ino


def processes(space: int) -> dict[int, str]:
    """All in a pod's namespace but the one that holds it, which is the player's: pid here → command."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(entry / "ns/pid").st_ino == space:
                inner = re.search(r"^NSpid:.*\t(\d+)$", (entry / "status").read_text(), re.M)
                if inner and inner[1] != "1":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def test_every_process_is_without_privileges(pod: Pod) -> None:
    assert {"Uid", "Gid", "CapEff", "Seccomp", "NoNewPrivs", "writable root"} <= privileges(os.getpid()), "it sees them"
    found = processes(space_of(pod))
    assert {pod.pid(container) for container in pod.containers} <= set(found)
    assert not {command: what for pid, command in found.items() if (what := privileges(pid))}


def test_no_container_can_write_outside_its_volumes(pod: Pod) -> None:
    places = ["/x", "/tmp/x", "/var/tmp/x", "/opt/kmq/x", "/run/x"]
    for container in pod.containers:
        script = "for place; do echo >$place && echo $place is writable; done; echo >/data/x && rm /data/x && echo done"
        answer = pod.exec(container, "sh", "-c", script, "sh", *places)
        assert answer.stdout == "done\n", answer
        assert answer.stderr.count("Read-only file system") == len(places), answer.stderr


def test_what_a_service_named_kmq_injects_is_passed_over(pod: Pod) -> None:
    """The pod runs with it all the time."""
    for container in STAGES:
        line = next(line for line in pod.logs(container).splitlines() if "event=service_links_ignored" in line)
        assert all(name in line for name in SERVICE_LINKS), line


# --- killed and stopped ------------------------------------------------------------------------------------------------


def kill(pod: Pod, *victims: str) -> None:
    """SIGKILL them at once; they are started again, once, and are ready."""
    before = {name: (pod.pid(name), pod.restarts(name)) for name in victims}
    started = {name: rows(pod)[name].started for name in victims}
    for pid, _ in before.values():
        os.kill(pid, signal.SIGKILL)

    def is_back(name: str) -> bool:
        row = rows(pod)[name]
        return row.started != started[name] and row.state_name == "ready"

    until(lambda: all(map(is_back, victims)), f"{victims} come back", lambda: states(pod))
    for name, (pid, restarts) in before.items():
        assert pod.restarts(name) == restarts + 1
        assert pod.pid(name) != pid


@pytest.mark.parametrize("rounds", [1, SOAK(8)])
def test_killing_each_two_and_all_under_load_loses_and_doubles_nothing(
    pod: Pod, rng: random.Random, rounds: int
) -> None:
    with traffic_to(pod, rng) as traffic:
        for _ in range(rounds):
            for victims in [*zip(pod.containers, strict=True), tuple(rng.sample(STAGES, 2)), tuple(pod.containers)]:
                traffic.wait_flowing()
                kill(pod, *victims)
        traffic.fifo_is_lost()  # with all its holders
        traffic.wait_flowing()
        traffic.finish()
    pod.wait_ready()
    settle(pod)
    traffic.judge()


@contextlib.contextmanager
def stopped(pod: Pod, container: str) -> Iterator[None]:
    pod.signal(container, signal.SIGSTOP)
    try:
        yield
    finally:
        pod.signal(container, signal.SIGCONT)


def breaks(traffic: Traffic) -> tuple[int, ...]:
    """How often each writer has lost its connection or was refused."""
    answered = traffic.answered
    return traffic.plain.broken, answered.attempts, sum(answered.codes.values()), traffic.producer.producer.connections


@pytest.mark.parametrize("victim", ["durability", *map(SOAK, ("ingress", "framer", "router"))])
def test_a_stopped_stage_fails_its_own_liveness_and_recovers(pod: Pod, rng: random.Random, victim: str) -> None:
    before = pod.pid(victim), pod.restarts(victim)
    with traffic_to(pod, rng) as traffic:
        unbroken = breaks(traffic)
        with stopped(pod, victim):
            until(lambda: pod.probe(victim, "liveness"), f"liveness of {victim} fails")
            assert pod.probe(victim, "readiness")
            assert pod.probe("gateway", "readiness"), "the whole broker is not"
            others = [container for container in pod.containers if container != victim]
            until(lambda: not any(pod.probe(container, "liveness") for container in others), "liveness of all others")
            if victim in ("framer", "durability"):
                count = traffic.answered.count
                assert traffic.answered.sent > count, "nothing waits: this shows nothing"
                assert traffic.producer.producer.unanswered
                assert traffic.answered.count == count, "somebody acknowledges"
        pod.wait_ready()
        traffic.wait_flowing()
        assert breaks(traffic) == unbroken, "producers wait, and are not refused"
        traffic.finish()
    settle(pod)
    traffic.judge()
    assert (pod.pid(victim), pod.restarts(victim)) == before


@pytest.mark.parametrize("victim", ["framer", *map(SOAK, ("ingress", "durability", "router"))])
def test_the_kubelet_replaces_a_stopped_stage_and_only_that(pod: Pod, rng: random.Random, victim: str) -> None:
    before = {name: pod.restarts(name) for name in pod.containers}
    row = rows(pod)[victim]
    started = row.started
    with traffic_to(pod, rng) as traffic, Kubelet(pod) as kubelet:
        pod.signal(victim, signal.SIGSTOP)
        until(lambda: row.started != started, f"{victim} is replaced", lambda: kubelet.events)
        pod.wait_ready()
        traffic.wait_flowing()
        traffic.finish()
    settle(pod)
    traffic.judge()
    assert any(event.startswith(f"{victim} liveness failed: {victim} has given no sign") for event in kubelet.events)
    assert [event for event in kubelet.events if event.endswith("killed")] == [f"{victim} killed"]
    assert {name: pod.restarts(name) for name in pod.containers} == before | {victim: before[victim] + 1}


@contextlib.contextmanager
def slow_motion(pid: int) -> Iterator[None]:
    """A process runs for 2 ms in 100, so that there is time to look at what it does for a moment only."""

    def run() -> None:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.002)
        os.kill(pid, signal.SIGSTOP)

    os.kill(pid, signal.SIGSTOP)
    try:
        with meanwhile(run, every_s=0.1):
            yield
    finally:
        os.kill(pid, signal.SIGCONT)


# --- the whole pod -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, SOAK(8)])
def test_restarting_the_whole_pod_under_load_keeps_all_that_was_acknowledged(
    pod: Pod, rng: random.Random, rounds: int
) -> None:
    """What was in memory is gone: rings, semaphores, FIFOs. What is on the volume says how to go on."""
    with traffic_to(pod, rng) as traffic:
        for _ in range(rounds):
            traffic.wait_flowing()
            pod.restart()
            traffic.fifo_is_lost()
            pod.wait_ready()
        traffic.wait_flowing()
        traffic.finish()
    settle(pod)
    traffic.judge()


# --- a pod beside it ---------------------------------------------------------------------------------------------------------


def fingerprint(pod: Pod) -> dict[str, object]:
    """Everything of an idle pod that another could touch: files, shared memory, semaphores, processes."""
    found: dict[str, object] = {name: (pod.pid(name), pod.restarts(name)) for name in pod.containers}
    for volume in ("data", "pipes", "shm"):
        for path in pod.volume(volume).rglob("*"):
            status = path.lstat()
            found[str(path)] = status.st_ino, status.st_size, status.st_uid, volume == "shm" or status.st_mtime_ns
    found |= {f"{name} row": (row.started, row.seq, row.messages) for name, row in rows(pod).items()}
    for ring in ("framed", "durable"):
        text = (pod.volume("shm") / f"kmq.{ring}").read_bytes()[: layout.CELLS]
        found[ring] = text  # what it is, who writes and who reads it
    return found


def test_two_pods_of_one_instance_name_do_not_touch_each_other(pod: Pod, small: Pod, rng: random.Random) -> None:
    settle(small)
    before = fingerprint(small)
    assert len(before) > 20
    with traffic_to(pod, rng) as traffic:
        kill(pod, *STAGES)
        traffic.fifo_is_lost()
        pod.wait_ready()
        traffic.wait_flowing()
        traffic.finish()
    assert fingerprint(small) == before
    spaces = {
        name: {os.stat(f"/proc/{each.pid('router')}/ns/{name}").st_ino for each in (pod, small)}
        for name in ("ipc", "pid", "net")
    }
    assert all(len(each) == 2 for each in spaces.values()), spaces
    settle(pod)
    traffic.judge()
    with kmq.Producer(small.ip) as producer:
        assert producer.send("test", b"and it works").result() > 0


def greeting(pod: Pod) -> bytes:
    """What a producer is told that comes now. (One that is there may have a full window on the way, and nothing to ask.)"""
    with connect(pod) as sock, sock.makefile("rb") as replies:
        sock.sendall(b"!hello acks=1\n")
        return replies.readline()


def test_a_full_disk_pauses_writing_says_so_and_resumes_by_itself(small: Pod, rng: random.Random) -> None:
    """Producers outside are refused or wait; what a shell of the pod writes comes as far as the disk, and waits there."""
    data = small.volume("data")
    with traffic_to(small, rng) as traffic:
        ballast = data / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        shell = Lines("shell")
        count = 0
        for more, text in itertools.islice(shell.blocks(PIPE_BUF), 20):
            (small.volume("pipes") / "raw").write_bytes(text)
            count += more
        until(lambda: states(small)["durability"] == "disk_full", "the disk is full", lambda: states(small))
        assert greeting(small).startswith(b"!err 0 disk_full "), "who wants to be told is not let wait"
        assert "event=disk_full" in small.logs("durability")
        assert small.probe("gateway", "readiness"), "no Service leads here now"
        assert not {name: why for name in small.containers if (why := small.probe(name, "liveness"))}
        ballast.unlink()
        small.wait_ready()
        assert greeting(small).startswith(b"!ok ")
        traffic.wait_flowing()
        traffic.finish()
    settle(small)
    traffic.judge(Stream("shell", shell.line, count))


def test_an_orderly_end_under_load_leaves_nothing_on_the_way(small: Pod, rng: random.Random) -> None:
    """All are told at once; the links are empty when the last has ended, and the next start finds everything."""
    with traffic_to(small, rng) as traffic:
        began = time.monotonic()
        codes = small.terminate()
        took_s = time.monotonic() - began
        assert codes == dict.fromkeys(small.containers, 0)
        assert took_s < small.grace_s, took_s
        assert not layout.backlog(instance(small), "framed") + layout.backlog(instance(small), "durable")
        traffic.judge(finished=False)
        small.restart()
        small.wait_ready()
        traffic.wait_flowing()
        traffic.finish()
    settle(small)
    traffic.judge()


def test_garbage_becomes_dead_letters_and_stops_nobody(small: Pod, rng: random.Random) -> None:
    before = {name: small.pid(name) for name in small.containers}
    long = 5 << 20
    noise = rng.randbytes(300_000)
    for garbage in (
        noise,
        b"x|" * (long // 2) + b"\n",
        b"nul.s|0|1|" + bytes(10_000) + b"\n",
        b"\n\n!c 1.1 1 9\n+9999\n",
    ):
        with connect(small) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)
    with connect(small) as sock:
        sock.sendall(b"good.one|0|good-1|still here\n")
    data = small.volume("data")
    until(lambda: (data / "good.log").exists(), "a message after the garbage arrives")
    settle(small)
    *records, _ = (data / "dead.log").read_bytes().split(b"\n")
    reasons = Counter(re.search(rb";reason=(\w+);len=(\d+)", record).groups() for record in records)
    assert reasons[b"too_long", b"%d" % long] == 1
    assert {b"nul", b"too_long", b"no_separator", b"empty_line", b"control_byte"} <= {
        reason for reason, _ in reasons
    }, reasons
    judge_files(data)
    assert {name: small.pid(name) for name in small.containers} == before
    assert not {name: why for name in small.containers if (why := small.probe(name, "liveness"))}


def test_a_recovering_stage_is_alive_and_not_ready(pod: Pod) -> None:
    """The router, whose checkpoint and one of whose queues are gone: it reads the whole WAL again."""
    before = rows(pod)["router"].seq
    with connect(pod) as sock:
        sock.sendall(b"".join(b"again.k|0|again-%d|%060d\n" % (n, n) for n in range(100_000)))
    until(lambda: rows(pod)["router"].seq >= before + 100_000, "all have arrived", lambda: states(pod))
    settle(pod)
    data, space, row = pod.volume("data"), space_of(pod), rows(pod)["router"]
    old, restarts = pod.pid("router"), pod.restarts("router")

    def next_life() -> list[int]:
        return [pid for pid, command in processes(space).items() if "stages.router" in command and pid != old]

    os.kill(old, signal.SIGSTOP)
    (data / "router.ckpt").unlink(missing_ok=True)
    for path in (data / "topics/again/0").iterdir():
        path.unlink()
    os.kill(old, signal.SIGKILL)
    until(next_life, "the router is started again")
    (pid,) = next_life()
    until(lambda: row.started and row.state_name == "recovering", "it recovers", every_s=0.001)
    with slow_motion(pid):
        said = "recovering: router is recovering; wait: its log says how far it is"
        assert pod.probe("router", "readiness") == said
        assert not pod.probe("router", "liveness")
        assert row.state_name == "recovering", "it was done before we had looked"
    pod.wait_ready()
    settle(pod)
    judge_files(data)
    assert pod.restarts("router") == restarts + 1


def test_a_second_pod_on_the_same_volume_refuses_until_the_first_is_gone(pod: Pod, rng: random.Random) -> None:
    """As when a pod is replaced while its node does not answer. The last test of this pod."""
    second = player.play(DEV, **KEEP_ALL)
    second.home.mkdir(parents=True)
    (second.home / "data").symlink_to(pod.volume("data"))
    host = pod.exec("durability", "hostname").stdout.strip()
    with traffic_to(pod, rng) as traffic, second:
        for stage in ("durability", "router"):
            until(lambda stage=stage: second.restarts(stage), f"{stage} of the second has ended")
            said = second.logs(stage)
            assert re.search(
                rf"event=stopped exit_code={EXIT_BUSY} .*is held by pid=\d+ host={host} stage={stage}", said
            ), said
        assert re.search(rf"event=waiting .*the WAL, held by pid=\d+ host={host}", second.logs("framer"))
        assert not {name: why for name in ("ingress", "framer") if (why := second.probe(name, "liveness"))}
        assert all(second.probe(name, "readiness") for name in (*STAGES[1:], "gateway"))
        producer = kmq.Producer(second.ip)
        with pytest.raises(kmq.NotAnswered):
            producer.send("test", b"to the wrong one").result(timeout=1)
        producer.abort()
        traffic.wait_flowing()
        player.podman("pod", "kill", pod.name)
        traffic.fifo_is_lost()
        pod.ip = second.ip  # as a Service, which leads to the one that is ready
        second.wait_ready()
        traffic.wait_flowing()
        traffic.finish()
        settle(second)
    traffic.judge()
