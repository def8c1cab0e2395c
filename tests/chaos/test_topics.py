"""Topics that strangers make: their number, their inodes, and the time they take from others."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.acked import AckedLoad
from chaos.attacks_topics import a_topic_for_each_descriptor, ask, flood_of_topics
from chaos.load import FifoLoad, Load
from chaos.loopfs import few_inodes
from chaos.pod import PATIENCE_S, STAGES, Pod
from kmq.errors import EXIT_CONFIG
from kmq.log import topic_changes, topics

GROWING = ("wide", "jobs", "random")  # keys and none, with a longer name in between and without

Make = Callable[..., Pod]
Start = Callable[[Load], Load]


def names(pod: Pod) -> list[str]:
    """But the topic of the records of changes."""
    return [name for name in topics.names(str(pod.data)) if name != topic_changes.TOPIC]


def malformed(pod: Pod, reason: str) -> int:
    return sum(
        path.read_bytes().count(b";reason=%b;" % reason.encode()) for path in pod.data.glob("topics/dead/0/*.log")
    )


@pytest.mark.parametrize(
    ("limit", "flood"), [(40, 400), pytest.param(10_000, 20_000, marks=(pytest.mark.soak, pytest.mark.timeout(600)))]
)
def test_topics_over_the_limit_are_refused_and_the_others_go_on(make_pod: Make, limit: int, flood: int) -> None:
    pod = make_pod(KMQ_MAX_TOPICS=limit)
    pod.start()
    assert ask(pod, b"orders.1|0|1|x") == [b"!ack 1 1"]
    flood_of_topics(pod, flood)
    replies = ask(pod, b"orders.2|0|2|x", b"late|0|3|x", b"orders.3|0|4|x")
    assert [reply.split()[:2] for reply in replies] == [[b"!ack", b"1"], [b"!err", b"2"], [b"!ack", b"3"]]
    assert replies[1] == b"!err 2 too_many_topics"
    pod.wait(lambda: len(names(pod)) == limit, "they are made", 5 * PATIENCE_S)
    pod.settle()
    assert len(names(pod)) == limit
    assert malformed(pod, "too_many_topics") == flood - (limit - 2)  # dead and orders are the other two
    pod.kill("framer", "router")
    pod.start("framer", "router")
    flood_of_topics(pod, 20, b"again")
    pod.judge()
    assert len(names(pod)) == limit


def test_a_line_behind_a_flood_of_new_topics_is_routed_before_they_are_made(make_pod: Make) -> None:
    pod = make_pod()
    pod.start()
    assert ask(pod, b"known|0|1|x") == [b"!ack 1 1"]
    pod.settle()
    flood_of_topics(pod, 500, behind=b"known|0|2|y\n")
    pod.settle()
    routed = (pod.data / "known.log").stat().st_mtime_ns
    made_later = [path for path in pod.data.glob("topics/flood-*/topic.toml") if path.stat().st_mtime_ns > routed]
    assert len(made_later) > 250, "the first ones may have come in a write of their own"
    pod.judge()


def test_a_router_that_is_killed_while_topics_wait_to_be_made_loses_no_line(make_pod: Make) -> None:
    pod = make_pod()
    pod.start()
    flood_of_topics(pod, 400, behind=b"known|0|1|x\n")
    for count in (20, 100, 200):
        pod.wait(lambda count=count: len(names(pod)) >= count, "some are made")
        pod.kill("router")
        pod.start("router")
    pod.judge()
    assert len(names(pod)) == 401


def test_without_creation_only_declared_topics_are_taken(make_pod: Make) -> None:
    pod = make_pod(KMQ_AUTO_CREATE_TOPICS="off")
    pod.start()
    assert ask(pod, b"orders|0|1|x") == [b"!err 1 unknown_topic"]
    topics.declare(str(pod.data), "orders", 2)
    pod.wait(lambda: ask(pod, b"orders.key|0|1|x")[0].startswith(b"!ack 1 "), "what was declared is taken")
    flood_of_topics(pod, 10)
    pod.judge()
    assert names(pod) == ["dead", "orders"] and malformed(pod, "unknown_topic") == 10


@pytest.mark.root
def test_inodes_are_told_of_like_bytes_and_no_message_takes_the_last_ones(
    make_pod: Make, loads: Start, tmp_path: Path, cleanup: ExitStack
) -> None:
    disk = few_inodes(2000, tmp_path, cleanup)
    pod = make_pod(KMQ_DATA=disk.path / "data")
    pod.data = disk.path / "data"
    pod.start()
    acked = AckedLoad(pod.pipes, "acked", seed=1)
    loads(acked)
    pod.wait(lambda: acked.has(100), "it is served")
    flood_of_topics(pod, 2000)
    pod.wait(lambda: malformed(pod, "too_many_topics"), "inodes limit topics")
    had = len(acked.seqs)
    pod.wait(lambda: acked.has(had + 100), "known topics go on")
    assert disk.free() > 100 and not acked.codes and pod.state("router") == "ready"

    ballast = disk.fill(0)  # somebody else takes the rest
    pod.wait(lambda: acked.codes["disk_full"] and acked.codes["hello disk_full"], "its producer is told")
    shutil.rmtree(ballast)
    had = len(acked.seqs)
    pod.wait(lambda: acked.has(had + 100), "it goes on by itself")
    acked.finish()
    assert len(set(acked.seqs)) == len(acked.seqs) == acked.sent
    pod.judge()


def test_topics_that_grow_under_load_and_kills_keep_each_record_where_it_belongs(make_pod: Make, loads: Start) -> None:
    pod = make_pod()
    pod.start()
    pod.wait_ready()
    load = FifoLoad(pod.pipes, "w", seed=1)
    loads(load)
    for partitions in (2, 5):
        had = load.count
        pod.wait(lambda had=had: load.count > had + 500 and set(GROWING) <= set(names(pod)), "messages come")
        for topic in GROWING:
            topic_changes.submit(str(pod.data), topic_changes.GROW, topic, {"partitions": str(partitions)})
        pod.kill("router")
        pod.start("router")
        pod.wait(
            lambda count=partitions: all(topics.load(str(pod.data), name)[0] == count for name in GROWING), "they grow"
        )
    load.finish()
    pod.judge(load.sent)
    assert pod.events("topic_grown") and not pod.events("request_refused")


def start_with(pod: Pod, nofile: int, *stages: str) -> None:
    """Start stages that may have so many files open."""
    pod.start(*stages, under=("prlimit", f"--nofile={nofile}"))
    pod.wrapped.clear()  # prlimit becomes the stage


@pytest.mark.parametrize(("nofile", "count"), [(70, 120), pytest.param(200, 400, marks=pytest.mark.soak)])
def test_more_topics_than_descriptors_are_routed_and_a_restart_works(make_pod: Make, nofile: int, count: int) -> None:
    pod = make_pod()
    start_with(pod, nofile)
    a_topic_for_each_descriptor(pod, count)
    pod.settle()
    assert len(names(pod)) == count
    pod.kill(*STAGES)
    start_with(pod, nofile)
    a_topic_for_each_descriptor(pod, count)
    pod.judge()
    assert not pod.events("failed")


@pytest.mark.parametrize("stage", STAGES)
def test_too_few_descriptors_end_a_stage_at_once_with_advice(make_pod: Make, stage: str) -> None:
    pod = make_pod()
    start_with(pod, 30, stage)
    assert pod.wait_exit(stage) == EXIT_CONFIG
    assert "open files" in pod.log() and "ulimit -n" in pod.log()


def test_too_few_descriptors_end_the_gateway_at_once_with_advice(make_pod: Make) -> None:
    pod = make_pod()
    command = ["prlimit", "--nofile=100", sys.executable, "-m", "kmq.gateway"]
    environment = os.environ | {name: str(value) for name, value in pod.settings.items()}
    done = subprocess.run(command, env=environment, cwd=pod.root, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_CONFIG and "ulimit -n" in done.stderr
