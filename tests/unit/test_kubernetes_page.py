"""What the pages of Kubernetes ask to paste into a kustomization of your own."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import agreement
import pytest
import schemas
import yaml
from agreement import containers, of_kind, pods

from kmq import __version__

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/kubernetes.md"


def rendered(tmp_path, mine):
    if not shutil.which("kubectl"):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("kubectl renders it, and there is none")
    (tmp_path / "kustomization.yaml").write_text(mine.replace("../kmq", os.path.relpath(ROOT, tmp_path)))
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_ports_of_intakes_render(tmp_path):
    block = re.search(r"### Ports for raw lines\n.*?```yaml\n(.*?)```", PAGE.read_text(), re.S)
    assert block
    shown = rendered(tmp_path, f"resources: [../kmq/k8s/base]\n{block[1]}")
    assert "KMQ_INTAKES: 5140=app 5142/udp=net" in shown
    assert shown.count("port: 5140") == shown.count("port: 5142") == 2


def test_the_kustomization_of_your_own_renders(tmp_path):
    block = re.search(r"```yaml\n(resources: .*?)```", PAGE.read_text(), re.S)
    assert block
    shown = rendered(tmp_path, block[1])
    assert f"image: registry.example.com/kmq:{__version__}" in shown and 'KMQ_MAX_TOPICS: "500"' in shown
    assert "kind: ServiceMonitor" in shown and "containerPort: 5443" in shown


def pasted(page, begin):
    """The block of YAML of a page that begins so."""
    (found,) = [
        each for each in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S) if begin in each
    ]
    return found


def documents(tmp_path, mine):
    return [each for each in yaml.safe_load_all(rendered(tmp_path, mine)) if each]


def test_clients_of_another_namespace_are_let_in_beside_those_of_its_own(tmp_path):
    block = pasted("kubernetes.md", "namespaceSelector")
    (policy,) = of_kind(documents(tmp_path, f"resources: [../kmq/k8s/base]\n{block}"), "NetworkPolicy")
    own, other = policy["spec"]["ingress"][0]["from"]
    assert own["podSelector"] == other["podSelector"] and "namespaceSelector" not in own
    assert other["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}
    schemas.validate(policy, "1.32")


def test_clients_of_kafka_from_outside_come_by_a_port_of_a_node_and_are_told_it(tmp_path):
    (tmp_path / "outside.yaml").write_text(pasted("kubernetes.md", "type: NodePort"))
    block = pasted("kubernetes.md", "KMQ_KAFKA_ADVERTISE")
    found = documents(tmp_path, f"resources: [../kmq/k8s/base, outside.yaml]\n{block}")
    (pod,) = pods(found)
    (service,) = [each for each in of_kind(found, "Service") if each["metadata"]["name"] == "kmq-kafka"]
    [port] = service["spec"]["ports"]
    told = agreement.environment(found, agreement.named(pod, "gateway"))["KMQ_KAFKA_ADVERTISE"]
    assert told == f"node.example.com:{port['nodePort']}"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert agreement.ports_of(pod)[port["targetPort"]] == ("gateway", port["port"])
    (policy,) = of_kind(found, "NetworkPolicy")
    assert policy["spec"]["ingress"][-1]["ports"] == [{"protocol": "TCP", "port": "kafka"}]
    for each in (policy, service):
        schemas.validate(each, "1.32")


def test_a_repair_by_git_is_an_init_container_of_the_same_image(tmp_path):
    (pod,) = pods(documents(tmp_path, pasted("kubernetes-repair.md", "components/repair")))
    first, *others = containers(pod)
    assert (
        first["name"] == "repair" and first["image"] == others[0]["image"] == f"registry.example.com/kmq:{__version__}"
    )


def test_a_larger_claim_comes_with_the_settings_that_follow_from_it(tmp_path):
    found = documents(tmp_path, pasted("kubernetes-volume.md", "volumeClaimTemplates"))
    (workload,) = of_kind(found, "StatefulSet")
    assert agreement.claimed_bytes(found, workload) == 40 << 30
    assert list(agreement.the_disk_is_never_full(found)) == []
    (settings,) = of_kind(found, "ConfigMap")
    assert settings["data"]["KMQ_DATA_QUOTA"] == "34 GiB"


def test_a_claim_from_a_snapshot_is_the_one_that_the_broker_takes(tmp_path):
    claim = yaml.safe_load(pasted("kubernetes-backup.md", "dataSource"))
    schemas.validate(claim, "1.32")
    (workload,) = of_kind(documents(tmp_path, "resources: [../kmq/k8s/base]\n"), "StatefulSet")
    (template,) = workload["spec"]["volumeClaimTemplates"]
    source = claim["spec"].pop("dataSource")
    assert claim["spec"] == template["spec"] and claim["metadata"]["name"] == "data-kmq-0"
    assert (source["kind"], source["apiGroup"]) == ("VolumeSnapshot", "snapshot.storage.k8s.io")
