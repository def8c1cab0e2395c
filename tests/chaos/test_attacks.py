"""Everything that has been tried against a broker from outside, one attack after the other in random order, while a producer
sends: what it was told is stored, once, under its seq.
"""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import comes

from chaos import attacks_ids, attacks_ports, attacks_topics
from chaos.acked import AckedLoad, account
from chaos.load import Load
from chaos.pod import STAGES, Pod, remove_shared_memory
from chaos.restores import CASES, SEGMENT_BYTES, Restore
from chaos.wall_clock import WallClock
from kmq.repair import heal

Make = Callable[..., Pod]
COUNT = 60
FEW_FILES = ["prlimit", "--nofile=200:200"]
MAX_TOPICS = 300
MORE = 1000  # messages that must be acknowledged after each attack


class Target:
    """A pod that is started again as a supervisor would do it, and the clock it goes by."""

    def __init__(self, pod: Pod, clock: WallClock, rng: random.Random) -> None:
        self.pod, self.clock, self.rng = pod, clock, rng

    def run(self) -> None:
        """Start what does not run, until all four are ready."""

        def are_ready() -> bool:
            for name in STAGES:
                if not self.pod.is_alive(name):
                    code = self.pod.processes[name].returncode if name in self.pod.processes else 0
                    assert code in (0, 75, -signal.SIGKILL), f"{name} ended with {code}\n{self.pod.tail()}"
                    self.pod.start(name, under=self.clock.under + FEW_FILES if name == "router" else self.clock.under)
            return all(self.pod.state(name) == "ready" for name in STAGES)

        self.pod.wait(are_ready, "all four are ready")
        if not self.pod.is_alive("gateway"):
            self.pod.start("gateway")
        self.pod.wait(lambda: (row := self.pod.row("gateway")) and row.state_name == "ready", "the gateway is ready")

    def wait_end(self, *names: str) -> None:
        """Until these have noticed what was taken from them, and ended."""
        self.pod.wait(lambda: not any(map(self.pod.is_alive, names)), f"the end of {names}")


def removes_shared_memory(target: Target) -> None:
    remove_shared_memory(target.pod.instance)
    target.wait_end("framer", "durability", "router")


def removes_rings_under_a_stopped_durability(target: Target) -> None:
    pod = target.pod
    pod.pause("durability")
    before = pod.seq("framer")
    comes(lambda: pod.seq("framer") > before, 1.0)
    remove_shared_memory(pod.instance)
    pod.kill("framer")
    pod.start("framer", under=target.clock.under)
    pod.wait(lambda: pod.state("framer") in ("waiting", "ready"), "the next framer")
    pod.resume("durability")
    target.wait_end("durability", "router")


def deletes_lock_files(target: Target) -> None:
    for path in target.pod.data.glob("*/.owner"):
        path.unlink()
    target.wait_end("durability", "router")


def loses_the_end_of_the_wal(target: Target) -> None:
    pod = target.pod
    pod.stop()
    for path in sorted((pod.data / "append").glob("*"))[-2:]:
        path.unlink()
    pod.start("framer", under=target.clock.under)
    assert pod.wait_exit("framer") == 65, pod.tail()
    heal.repair(str(pod.data))
    del pod.processes["framer"]


def misplaces_a_segment(target: Target) -> None:
    """Of what has two copies and can be put back whole; what a broker makes of it before the repair has a test of its own."""
    pod, rng = target.pod, target.rng
    pod.stop()
    case = rng.choice([name for name in CASES if "another broker" not in name])
    print(case)
    CASES[case](Restore(pod.data, pod.data, rng.choice(["along", "behind", "lost"])))
    heal.repair(str(pod.data))


def sets_the_clock(target: Target) -> None:
    pod = target.pod
    target.clock.set(target.rng.choice([-3600, 7200, 31 * 86400]))
    if target.rng.random() < 0.5:
        pod.kill(*target.rng.sample(STAGES, 2))
        target.run()
    beats = {name: row.heartbeat for name in STAGES if (row := pod.row(name))}
    for name, before in beats.items():
        pod.wait(lambda name=name, before=before: (row := pod.row(name)) and row.heartbeat > before, f"{name} lives")
    target.clock.set(0)


def makes_too_many_topics(target: Target) -> None:
    attacks_topics.flood_of_topics(target.pod, 10 * MAX_TOPICS, b"flood-%d" % target.rng.randrange(1 << 30))


def names_more_topics_than_files_may_be_open(target: Target) -> None:
    attacks_topics.a_topic_for_each_descriptor(target.pod, MAX_TOPICS)


def asks_nothing(target: Target) -> None:
    attacks_ports.silent_askers(target.pod)


def reads_no_replies(target: Target) -> None:
    attacks_ports.unread_refusals(target.pod)


def sends_garbage(target: Target) -> None:
    attacks_ports.malformed_lines(target.pod)


def sends_requests_that_are_none(target: Target) -> None:
    attacks_ports.malformed_requests(target.pod)


def finishes_no_request(target: Target) -> None:
    attacks_ports.idle_requests(target.pod)


def says_nothing_to_grpc(target: Target) -> None:
    attacks_ports.silent_connections(target.pod)


def watches_for_ever(target: Target) -> None:
    attacks_ports.bystanders(target.pod)


def finishes_no_call(target: Target) -> None:
    attacks_ports.unfinished_calls(target.pod)


def fills_the_table_of_names(target: Target) -> None:
    attacks_ids.unknown_name(target.pod, lines=20_000)


ATTACKS = (
    removes_shared_memory,
    removes_rings_under_a_stopped_durability,
    deletes_lock_files,
    loses_the_end_of_the_wal,
    misplaces_a_segment,
    sets_the_clock,
    makes_too_many_topics,
    names_more_topics_than_files_may_be_open,
    asks_nothing,
    reads_no_replies,
    sends_garbage,
    sends_requests_that_are_none,
    finishes_no_request,
    says_nothing_to_grpc,
    watches_for_ever,
    finishes_no_call,
    fills_the_table_of_names,
)


@pytest.mark.soak
def test_soak_attacks_in_random_order(
    make_pod: Make, loads: Callable[[Load], Load], rng: random.Random, tmp_path: Path
) -> None:
    pod = make_pod(KMQ_SEGMENT_BYTES=SEGMENT_BYTES, KMQ_RETENTION_AGE="1h", KMQ_MAX_TOPICS=MAX_TOPICS)
    load = AckedLoad(pod.pipes, "alice", seed=rng.randrange(1 << 30), window=50)  # a repair reads all there is
    loads(load)
    target = Target(pod, WallClock(tmp_path / "offset"), rng)
    target.run()
    pod.wait(lambda: load.has(15_000), "enough segments")
    started = time.monotonic()
    for number in range(COUNT):
        attack = rng.choice(ATTACKS)
        print(f"{number} {time.monotonic() - started:.0f} s {attack.__name__}", flush=True)
        attack(target)
        target.run()
        before = len(load.seqs)
        pod.wait(lambda before=before: load.has(before + MORE), f"acknowledgements after {attack.__name__}")
    load.finish()
    pod.settle()
    pod.stop()
    account(pod.data, load)
