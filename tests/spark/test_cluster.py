"""The same pipelines on clusters: executors that share nothing with the driver, over HTTP from two pods at once.

The driver is a process of its own (cluster_job.py): a JVM has one session at a time, and the other tests have theirs.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from brokers import environment
from waiting import until

from kmq.spark.sessions import Standalone

JOB = Path(__file__).with_name("cluster_job.py")
COUNT = 3000  # orders in each pod
DECLARED = 2  # topics in each pod: the first records
BAD = 3  # of them no JSON
PATIENCE_S = 600.0  # for two JVMs and their workers on a machine that others use too: reached only by a bug
pytestmark = pytest.mark.timeout(2 * PATIENCE_S)
ORDERS = [b'orders.k%d|%d|%d|{"n": %d}' % (n % 7, n, n, n) for n in range(COUNT - BAD)] + [
    b"orders.bad|0|0|no JSON"
] * BAD


@pytest.fixture
def pods(new_broker):
    """Two pods that are up, with orders in one partition of one and in three of the other."""
    made = [new_broker(), new_broker()]
    for number, pod in enumerate(made):
        pod.up()
        for topic, partitions in (("orders", 1 + 2 * number), ("orders.dlq", 1)):
            assert pod.kmq("topics", "create", topic, "--partitions", str(partitions)).returncode == 0
        pod.send_lines(ORDERS)
        pod.wait_routed(DECLARED + COUNT)
    return made


def address(pod, name):
    return f"127.0.0.1:{(pod.pipes / f'{name}.port').read_text().strip()}"


@pytest.fixture
def start(tmp_path):
    """A function that starts the driver; it is ended with the test."""
    drivers = []

    def run(master, pods, *gate):
        servers, lines = (",".join(address(pod, port) for pod in pods) for port in ("http", "ingress"))
        env = environment(SPARK_WORKER_DIR=tmp_path / "work", PYTHONUNBUFFERED=1)
        command = [sys.executable, str(JOB), master, servers, lines, str(tmp_path), *map(str, gate)]
        pipe = subprocess.PIPE
        drivers.append(subprocess.Popen(command, env=env, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True))
        return drivers[-1]

    yield run
    for driver in drivers:
        driver.kill()
        driver.communicate()


def finish(driver):
    """What its jobs came to, by name."""
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, out + err
    return {result.pop("job"): result for result in map(json.loads, out.splitlines())}


def check(results, pods):
    seqs = 2 * sum(range(DECLARED + 1, DECLARED + COUNT + 1))
    assert results["count"] == {"rows": 2 * COUNT, "records": 2 * COUNT, "seqs": seqs, "workers": 2}
    assert sorted(line.split(b"|", 5)[5] for line in pods[0].lines("copies")) == sorted(
        2 * [line.split(b"|", 3)[3] for line in ORDERS]
    )
    archived = results["archive"]
    assert (archived["rows"], archived["bad"]) == (2 * (COUNT - BAD), 2 * BAD)
    assert archived["table_rows"] == archived["table_records"] == 2 * (COUNT - BAD)
    assert [len(pod.lines("orders.dlq")) for pod in pods] == [BAD, BAD]
    assert results["audit"]["findings"] == {}


@pytest.mark.soak
def test_pipelines_are_right_on_a_local_cluster(pods, start):
    check(finish(start("local-cluster[2,1,512]", pods)), pods)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_pipelines_are_right_on_a_cluster_when_a_worker_is_killed_in_mid_job(pods, start, tmp_path, victim):
    gate = tmp_path / "gate"
    gate.mkdir()
    with Standalone(workers=2) as cluster:
        driver = start(cluster.url, pods, gate)
        until(lambda: len(list(gate.iterdir())) == 2 or driver.poll() is not None, "a task in each", seconds=PATIENCE_S)
        cluster.kill_worker(victim)
        (gate / "open").touch()
        results = finish(driver)
    check(results, pods)
    gated = results["gated"]
    assert gated == {"table_rows": 2 * COUNT, "table_records": 2 * COUNT, "table_seqs": results["count"]["seqs"]}
    assert len(list(gate.glob("task-*"))) > 4, "the killed worker's task ran again elsewhere"
