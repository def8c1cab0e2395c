"""The Spark image: the Job's pod and the executors it asks for, played by podman from the manifests; uid 10001, read-only root.

Needs root, podman and the image (scripts/pod-setup, make image, make image-spark). Of the pods only what podman or this
machine cannot do is changed: the host's network instead of pods' addresses, directories instead of claims and empty ones.
"""

import json
import os
import re
import shutil
import subprocess
from copy import deepcopy

import kube
import pyarrow.dataset as ds
import pytest
import spark_job
import yaml
from brokers import ROOT

COUNT = 300
PATIENCE_S = 900.0
ENV = {"CONTAINERS_CONF": str(ROOT / "build/containers.conf")} | os.environ
IMAGE = "localhost/kmq-spark:dev"


def podman(*words, check=True, **more):
    done = subprocess.run(["podman", *words], env=ENV, capture_output=True, text=True, timeout=PATIENCE_S, **more)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def has_image():
    return shutil.which("podman") and not subprocess.run(["podman", "image", "exists", IMAGE], env=ENV).returncode


pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.timeout(2 * PATIENCE_S)]


class Podman:
    """Plays pods; `places`: volume → directory of this machine, `texts`: what is put for words of the manifests."""

    def __init__(self, root, texts):
        self.root, self.texts, self.names = root, texts, []

    def play(self, pod, fields):
        """A pod as the manifest has it; its first container's name."""
        pod = deepcopy(pod)
        name, spec = pod["metadata"]["name"], pod["spec"]
        pod["metadata"] = {"name": name, "labels": pod["metadata"].get("labels", {})}
        spec["hostNetwork"] = True
        for each in ("serviceAccountName", "resources", "hostname"):
            spec.pop(each, None)
        (container,) = spec["containers"]
        container.pop("ports", None)  # of the host's network none are mapped
        container["imagePullPolicy"] = "Never"
        for each in container["env"]:
            if "valueFrom" in each:
                each["value"] = fields[each.pop("valueFrom")["fieldRef"]["fieldPath"]]
        if not any(
            each["name"] == "SPARK_LOCAL_IP" for each in container["env"]
        ):  # a host's network knows no pod's name
            container["env"].append({"name": "SPARK_LOCAL_IP", "value": fields["status.podIP"]})
        values = {each["name"]: each["value"] for each in container["env"]}
        container["args"] = [  # what Kubernetes puts in before a container starts
            re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word) for word in container["args"]
        ]
        for volume in spec["volumes"]:
            if "configMap" not in volume:
                is_shared = "persistentVolumeClaim" in volume
                path = self.root / (volume["name"] if is_shared else f"{name}-{volume['name']}")
                path.mkdir(exist_ok=True)
                os.chown(path, 10001, 10001)
                for kind in set(volume) - {"name"}:
                    del volume[kind]
                volume["hostPath"] = {"path": str(path), "type": "Directory"}
        text = yaml.safe_dump_all([spark_job.find("ConfigMap"), pod])
        for word, here in self.texts.items():
            text = text.replace(word, here)
        self.names.append(name)
        podman("kube", "play", "-", input=text)
        return f"{name}-{container['name']}"

    def remove(self, name):
        podman("pod", "rm", "--force", name, check=False)

    def close(self):
        for name in self.names:
            self.remove(name)


@pytest.mark.skipif(not has_image(), reason=f"no {IMAGE}: make image-spark makes it")
def test_driver_and_executors_run_in_the_image_as_the_manifests_say(broker, tmp_path):
    broker.gateway = True
    broker.up()
    broker.send_lines([b"orders.k%d|0|%d|payload %d" % (n % 7, n, n) for n in range(COUNT)])
    broker.wait_routed(COUNT)
    os.chmod(tmp_path, 0o755)
    served = f"127.0.0.1:{(broker.pipes / 'http.port').read_text().strip()}"
    machine = Podman(tmp_path, {"kmq-0.kmq-pods:8082": served})
    ran = []

    def start(pod):
        ip, name = pod["status"]["podIP"], pod["metadata"]["name"]
        shown = {key: pod[key] for key in ("apiVersion", "kind", "metadata", "spec") if key in pod}
        ran.append(
            machine.play({"apiVersion": "v1", "kind": "Pod"} | shown, {"status.podIP": ip, "metadata.name": name})
        )
        return lambda: (looked.append(look(ran[-1])), machine.remove(name))

    def look(container):
        (found,) = json.loads(podman("inspect", container))
        return found["Config"]["User"], found["HostConfig"]["ReadonlyRootfs"], found["EffectiveCaps"] or []

    looked = []
    try:
        with kube.ApiServer(start) as api:
            machine.texts["k8s://https://kubernetes.default.svc"] = f"k8s://{api.url}"
            template = spark_job.find("Job")["spec"]["template"]
            driver = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"kmq-archive-{os.getpid()}"}}
            driver |= {"spec": template["spec"]}
            name = api.put(deepcopy(driver))["metadata"]["name"]
            fields = {"status.podIP": "127.0.0.1", "metadata.name": name, "metadata.namespace": "default"}
            container = machine.play(driver, fields)
            code, logs = podman("wait", container).strip(), podman("logs", container)
            looked.append(look(container))
            assert code == "0", logs + "".join(podman("logs", each, check=False) for each in ran)
    finally:
        machine.close()
    assert looked == [("10001:10001", True, [])] * (1 + len(ran)) and len(ran) == 2
    table = ds.dataset(str(tmp_path / "archive/topics"), partitioning="hive").to_table()
    assert sorted(table["value_text"].to_pylist()) == sorted(f"payload {n}" for n in range(COUNT))
    assert {path.stat().st_uid for path in (tmp_path / "archive").rglob("*")} == {10001}
