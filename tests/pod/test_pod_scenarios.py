"""The scenarios as a user of a cluster runs them: from outside, commands by exec, messages to the pod's address."""

import subprocess
from collections.abc import Callable

import pytest
from brokers import environment
from load import KEEP_ALL
from play import ROOT, Pod

STAGES = ("ingress", "framer", "durability", "router")
PATIENCE_S = 280.0  # of a whole scenario; reached only by a bug, or by a start of Spark on a very busy machine


@pytest.fixture(scope="module")
def pod(play_once: Callable[..., Pod]) -> Pod:
    """One pod, with the settings of the manifest but for retention, for all scenarios that can do with them."""
    return play_once(**KEEP_ALL)


@pytest.fixture(scope="module")
def dropping(play_once: Callable[..., Pod]) -> Pod:
    return play_once(RB_OVERFLOW_POLICY_DURABLE="drop_oldest", **KEEP_ALL)


def start(pod: Pod, number: str, **address: str) -> subprocess.CompletedProcess[str]:
    where = {"CONTAINERS_CONF": f"{ROOT}/build/containers.conf", "KMQ_POD": f"podman exec -i {pod.name}-gateway"}
    command = [ROOT / "scripts" / f"scenario-{number}"]
    return subprocess.run(
        command, env=environment(**(where | address)), capture_output=True, text=True, timeout=PATIENCE_S
    )


def rows(output: str) -> list[dict[str, str]]:
    return [dict(part.split("=", 1) for part in line.split()) for line in output.splitlines()]


def passed(pod: Pod, number: str) -> list[dict[str, str]]:
    """What a scenario said that has passed, and has left all stages ready."""
    done = start(pod, number, KMQ_HOST=pod.ip)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    said = rows(done.stdout)
    checks = [row["result"] for row in said if "check" in row]
    assert set(checks) == {"pass"} and said[-1]["checks"] == str(len(checks))
    assert pod.exec("gateway", "kmq", "status").returncode == 0
    return said


def wal(pod: Pod) -> list[int]:
    """The seqs in the WAL, read where the volume is."""
    paths = sorted((pod.volume("data") / "append").glob("*.log"))
    return [int(line.split(b"|", 1)[0]) for path in paths for line in path.read_bytes().splitlines()]


def test_scenario_1_all_stages_of_a_pod_killed_at_once_go_on_with_the_sequence(pod: Pod) -> None:
    before, last = [pod.pid(stage) for stage in STAGES], len(wal(pod))
    said = passed(pod, "1")
    assert not set(before) & {pod.pid(stage) for stage in STAGES}
    assert [row["payload"] for row in said if "seam_seq" in row] == ["batch1"] * 3 + ["batch2"] * 2
    assert wal(pod) == list(range(1, last + 1001))


def test_scenario_2_routes_what_comes_from_outside_the_pod(pod: Pod) -> None:
    passed(pod, "2")


def test_scenario_4_replays_dead_letters_inside_the_pod_and_by_spark_over_http(pod: Pod) -> None:
    said = passed(pod, "4")
    assert {row["check"] for row in said if "redrive" in row.get("check", "")} >= {"redrive", "redrive_by_spark"}


def test_scenario_5_loses_and_doubles_nothing_while_containers_are_killed(pod: Pod) -> None:
    blows = [row for row in passed(pod, "5") if row.get("event") == "killed"]
    assert len(blows) == 6 and all(row["sender_runs"] == "yes" for row in blows)
    seqs = wal(pod)
    assert seqs == list(range(1, len(seqs) + 1))


def test_scenario_3_block_holds_a_sender_outside_the_pod_up_and_memory_flat(pod: Pod) -> None:
    checks = {row["check"]: row["got"] for row in passed(pod, "3-block") if "check" in row}
    assert checks["sender_blocked"] == "yes"
    assert all(checks[f"memory_flat_{stage}"] == "yes" for stage in STAGES)


def test_scenario_3_names_every_loss_of_a_pod_that_drops(dropping: Pod) -> None:
    loss = next(row for row in passed(dropping, "3") if "loss_percent" in row)
    assert 59.0 <= float(loss["loss_percent"]) < 70.0


def test_a_scenario_that_needs_other_settings_names_them_and_touches_nothing(pod: Pod) -> None:
    before = len(wal(pod))
    done = start(pod, "3", KMQ_HOST=pod.ip)
    assert done.returncode == 78
    assert "needs=RB_OVERFLOW_POLICY_DURABLE=drop_oldest has=block" in done.stderr and "kmq-settings" in done.stderr
    assert len(wal(pod)) == before


def test_a_scenario_asks_where_the_pod_takes_messages(pod: Pod) -> None:
    done = start(pod, "2")
    assert done.returncode == 78
    assert "KMQ_HOST must say where podman exec" in done.stderr


def test_a_scenario_without_its_pod_says_so(pod: Pod) -> None:
    done = start(pod, "2", KMQ_HOST=pod.ip, KMQ_POD=f"podman exec -i {pod.name}-nobody")
    assert done.returncode == 75
    assert "no such container" in done.stderr
