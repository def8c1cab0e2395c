"""The Job of k8s/overlays/spark as it is applied, but for what only a cluster has: its driver, its arguments, its settings."""

import shutil
import signal
import subprocess
from pathlib import Path

import kube
import kubernetes_validate
import pyarrow.dataset as ds
import pytest
import spark_job
import yaml
from brokers import ROOT

from kmq.spark.sessions import Standalone

COUNT = 300
PATIENCE_S = 600.0  # for a cluster's JVMs on a machine that others use too: reached only by a bug
BROKER = "kmq-0.kmq-pods:8082"
POD = {"status.podIP": "127.0.0.1", "metadata.name": "kmq-archive-x", "metadata.namespace": "default"}
pytestmark = [
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.skipif(not shutil.which("kubectl"), reason="the overlay is rendered by kubectl"),
]


@pytest.fixture
def served(broker):
    """A broker with messages in two topics, over HTTP."""
    broker.gateway = True
    broker.up()
    assert broker.kmq("topics", "create", "orders", "--partitions", "3").returncode == 0
    broker.send_lines(
        [b"%b.k%d|0|%d|payload %d" % (b"orders" if n % 3 else b"jobs", n % 7, n, n) for n in range(COUNT)]
    )
    broker.wait_routed(1 + COUNT)  # the declaration, and they
    return broker


@pytest.fixture
def here(tmp_path, served, monkeypatch):
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")  # for JVMs that live for seconds
    made = spark_job.Here(tmp_path / "pod")
    made.places[BROKER] = f"127.0.0.1:{(served.pipes / 'http.port').read_text().strip()}"
    return made


def run(here, change):
    """The driver, its arguments through `change`; what it printed."""
    env = here.environment(spark_job.driver(), POD)
    command = change(spark_job.arguments(here, env))
    done = subprocess.run(command, env=env, cwd=here.root, capture_output=True, text=True, timeout=PATIENCE_S)
    return done


def check(here, served):
    """The table is where the manifest says, and has every message once."""
    found = ds.dataset(here("/archive/topics"), partitioning="hive").to_table().to_pylist()
    told = sorted((row["topic"], row["key"], row["id"], row["value_text"]) for row in found)
    sent = [("orders" if n % 3 else "jobs", f"k{n % 7}", str(n), f"payload {n}") for n in range(COUNT)]
    assert told == sorted(sent)
    assert {row["broker"] for row in found} == {here(BROKER)}


def of_kubernetes(word):
    return word.startswith(("--master=k8s:", "--conf=spark.kubernetes."))


@pytest.mark.sampled(0.5)
def test_the_job_archives_a_live_broker_on_a_standalone_cluster(here, served):
    with Standalone(workers=1, memory_mb=1024) as cluster:

        def on_it(words):
            return [words[0], f"--master={cluster.url}", *(word for word in words[1:] if not of_kubernetes(word))]

        done = run(here, on_it)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"archived {COUNT} rows in 1 batches" in done.stdout
        assert list((cluster.home / "work").glob("app-*/0")), "an executor of this cluster, and not the driver, did it"
    check(here, served)


def test_the_job_says_by_its_exit_code_that_starting_it_again_cannot_help(tmp_path):
    """`podFailurePolicy` acts on it: it has to come through spark-submit."""

    def wrong(words):
        at = [*(word for word in words if not of_kubernetes(word)), "--path=/data"]
        return [at[0], "--master=local[1]", *at[1:]]

    done = run(spark_job.Here(tmp_path), wrong)
    (rule,) = (
        rule for rule in spark_job.find("Job")["spec"]["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"
    )
    assert done.returncode in rule["onExitCodes"]["values"], done.stderr[-3000:]
    assert "kmq: give --path or --brokers, not both" in done.stdout  # both of Python's come out there


# --- with an API server that stands in for Kubernetes' ---------------------------------------------------------------


class Kubelet:
    """Runs executors' pods: the image's entry point, with what their pod says, as a process here."""

    def __init__(self, here):
        self.here, self.logs = here, []

    def start(self, pod):
        (container,) = pod["spec"]["containers"]
        env = self.here.environment(
            container, {"status.podIP": pod["status"]["podIP"], "metadata.name": pod["metadata"]["name"]}
        )
        env["SPARK_HOME"] = str(next(Path(ROOT, ".venv").glob("lib/*/site-packages/pyspark")))
        command = [str(ROOT / "k8s/spark-entrypoint"), *container["args"]]
        log = self.here.root / f"{pod['metadata']['name']}.log"
        self.logs.append(log)
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=env, cwd=self.here.root, stdout=file, stderr=file)

        def end():
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)

        return end


@pytest.mark.soak
def test_executors_get_the_rights_and_the_shape_of_the_manifests_by_the_api_server(here, served):
    kubelet = Kubelet(here)
    with kube.ApiServer(kubelet.start) as api:
        api.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": POD["metadata.name"]}, "spec": {}})

        def at_it(words):
            return [f"--master=k8s://{api.url}" if word.startswith("--master=k8s:") else word for word in words]

        done = run(here, at_it)
        logs = "\n".join(log.read_text()[-2000:] for log in kubelet.logs)
        assert done.returncode == 0, done.stderr[-3000:] + logs
        made, asked = api.made, api.asked
    check(here, served)
    (rule,) = spark_job.find("Role")["rules"]
    allowed = {(verb, resource) for resource in rule["resources"] for verb in rule["verbs"]}
    assert asked == allowed - {("delete", "pods")}, "the driver may do what it does, and no more"
    assert ("delete", "pods") in allowed, "of an executor that has failed: here none does"
    assert len(made) == int(spark_job.properties()["spark.executor.instances"])
    template = yaml.safe_load(spark_job.find("ConfigMap")["data"]["executor.yaml"])
    for pod in made:
        kubernetes_validate.validate(pod, "1.32", strict=True)
        assert holds(pod, template), "Spark adds to the template and changes nothing in it"
        (owner,) = pod["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("Pod", POD["metadata.name"])
        (container,) = pod["spec"]["containers"]
        assert container["image"] == spark_job.driver()["image"]
        assert container["resources"]["limits"]["memory"] == "1536Mi"


def holds(whole, part):
    """Whether everything in `part` is in `whole`."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            name in whole and holds(whole[name], each) for name, each in part.items()
        )
    if isinstance(part, list):
        return all(any(holds(each, wanted) for each in whole) for wanted in part)
    return whole == part
