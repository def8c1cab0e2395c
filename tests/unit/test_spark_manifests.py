"""k8s/overlays/spark holds together: with itself, with the image, the broker's manifests, and what Spark and kmq know."""

import copy
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import schemas
import yaml
from agreement import selects
from brokers import ROOT

from kmq.config.settings import load

sys.path.append(str(ROOT / "tests" / "spark"))

from brokers import environment
from spark_job import driver, find, properties, rendered

CONTAINERFILE = (ROOT / "k8s/Containerfile.spark").read_text()
pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="the overlay is rendered by kubectl")


def executor():
    """The pod that executors are made from, with what Spark adds that no pod is without."""
    pod = yaml.safe_load(find("ConfigMap")["data"]["executor.yaml"])
    pod["metadata"]["name"] = "executor"
    pod["spec"]["containers"][0]["image"] = driver()["image"]
    return pod


def pods():
    """The specs of both kinds of pods, with their labels."""
    template = find("Job")["spec"]["template"]
    return [(each["metadata"]["labels"], each["spec"]) for each in (template, executor())]


@pytest.mark.parametrize("version", ["1.29", "1.32"])
def test_every_document_is_of_its_schema(version):
    documents = [*rendered(), executor()]
    assert {each["kind"] for each in documents} >= {"Job", "Role", "NetworkPolicy", "PersistentVolumeClaim", "Pod"}
    for each in documents:
        schemas.validate(each, version)


def test_the_nightly_archive_is_the_same_job_by_the_clock():
    nightly = ROOT / "k8s/overlays/spark-nightly"
    cron, job = find("CronJob", overlay=nightly), copy.deepcopy(find("Job")["spec"])
    del job["ttlSecondsAfterFinished"]  # a CronJob keeps the last ones by itself
    assert cron["spec"]["jobTemplate"]["spec"] == job
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"
    schemas.validate(cron, "1.32")
    assert {each["kind"] for each in rendered(nightly)} ^ {each["kind"] for each in rendered()} == {"Job", "CronJob"}


def test_a_field_that_is_none_would_be_found():
    pod = copy.deepcopy(executor())
    pod["spec"]["containers"][0]["securityContext"]["readonlyRootFilesystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        schemas.validate(pod, "1.32")


def test_driver_and_executors_meet_the_restricted_standard_and_write_to_volumes_only():
    for labels, spec in pods():
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] and pod["seccompProfile"]["type"] == "RuntimeDefault"
        assert {pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"]} == {10001}
        assert f"USER {pod['runAsUser']}:{pod['runAsGroup']}" in CONTAINERFILE
        assert not spec["enableServiceLinks"]  # KMQ_* of a Service would be taken for settings
        assert spec.get("automountServiceAccountToken") is (None if "driver" in labels.values() else False)
        for container in spec["containers"]:
            own = container["securityContext"]
            assert not own["allowPrivilegeEscalation"] and own["capabilities"] == {"drop": ["ALL"]}
            assert own["readOnlyRootFilesystem"]
            assert {"/tmp", "/archive", "/scratch"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in spec["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()


def test_both_mount_the_claim_that_is_made_and_the_table_is_on_it():
    claim = find("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]  # executors write, the driver moves
    for _, spec in pods():
        (mount,) = (each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "archive")
        (volume,) = (each for each in spec["volumes"] if each["name"] == "archive")
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (to,) = (word for word in driver()["args"] if word.startswith("--to="))
        assert to.startswith(f"--to={mount['mountPath']}/")


def test_executors_run_the_drivers_image_and_are_of_the_shape_that_is_mounted():
    env = {each["name"]: each for each in driver()["env"]}
    assert env["IMAGE"]["value"] == driver()["image"]
    words = " ".join(driver()["args"])
    assert set(re.findall(r"\$\((\w+)\)", words)) <= env.keys()
    (mount,) = (each for each in driver()["volumeMounts"] if each["name"] == "spark")
    assert f"--properties-file={mount['mountPath']}/spark.properties" in driver()["args"]
    assert properties()["spark.kubernetes.executor.podTemplateFile"] == f"{mount['mountPath']}/executor.yaml"
    (scratch,) = (each for each in driver()["env"] if each["name"] == "SPARK_LOCAL_DIRS")
    assert scratch["value"] in {each["mountPath"] for each in driver()["volumeMounts"]}


def test_files_that_are_named_in_the_image_are_those_of_kmq():
    text = " ".join([*driver()["args"], *properties().values()])
    named = set(re.findall(r"/opt/kmq/app/(\S+)", text))
    assert named == {"kmq/spark/submit.py", "kmq/spark/log4j2.properties"}
    assert all((ROOT / path).is_file() for path in named)
    assert "PYTHONPATH=/opt/kmq/app:" in CONTAINERFILE


def test_what_the_driver_is_told_to_run_is_a_command_of_kmq():
    """Its arguments are read by kmq itself: a wrong one is a usage error (2), all of them with --help behind them are none."""
    words = driver()["args"]
    (at,) = (number for number, word in enumerate(words) if word.endswith("submit.py"))
    command = [sys.executable, str(ROOT / "kmq/spark/submit.py"), *words[at + 1 :]]
    for more, code in (["--help"], 0), (["--no-such-option"], 2):
        assert subprocess.run([*command, *more], env=environment(), capture_output=True, timeout=60).returncode == code


def matches(peer, labels):
    return selects(peer["podSelector"], labels)


def test_the_network_policy_allows_spark_itself_and_the_broker_and_no_more():
    policy, own = find("NetworkPolicy", "kmq-spark")["spec"], properties()
    ports = {int(text) for name, text in own.items() if re.search(r"ort$", name) and name.startswith("spark.")}
    assert ports == {7078, 7079}
    (ingress,) = policy["ingress"]
    assert {each["port"] for each in ingress["ports"]} == ports
    for labels, _ in pods():
        assert matches(policy, labels) and matches(ingress["from"][0], labels)
    (brokers,) = (word for word in driver()["args"] if word.startswith("--brokers="))
    host, port = brokers.partition("=")[2].split(":")
    assert int(port) == load({}).http_port
    broker = {each["kind"]: each for each in rendered(ROOT / "k8s/base") if each["kind"] != "Service"}
    service = host.split(".")[1]
    assert broker["StatefulSet"]["spec"]["serviceName"] == service
    template = broker["StatefulSet"]["spec"]["template"]
    (to_broker,) = (
        rule
        for rule in policy["egress"]
        if any(matches(to, template["metadata"]["labels"]) for to in rule.get("to", ()))
    )
    assert {"port": int(port)} in to_broker["ports"]
    names = {p["name"]: p["containerPort"] for c in template["spec"]["containers"] for p in c.get("ports", ())}
    for labels, _ in pods():
        assert any(
            matches(source, labels) and int(port) in {names.get(each["port"], each["port"]) for each in rule["ports"]}
            for rule in broker["NetworkPolicy"]["spec"]["ingress"]
            for source in rule["from"]
            if "podSelector" in source
        ), "the broker lets them in"


@cache
def words_of_spark():
    """Every text in Spark's own classes; names of settings are whole texts there."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    text = b""
    for jar in [*jars.glob("spark-core_*.jar"), *jars.glob("spark-kubernetes_*.jar")]:
        with zipfile.ZipFile(jar) as classes:
            text += b"".join(
                classes.read(name) for name in classes.namelist() if re.search(r"(onfig|package)[^/]*\.class$", name)
            )
    return text


def is_known(name):
    """As a constant in a class file: its length in two bytes, then the name."""
    return len(name).to_bytes(2, "big") + name.encode() in words_of_spark()


def test_every_setting_is_one_that_this_spark_has():
    given = {word.split("=")[1] for word in driver()["args"] if word.startswith("--conf=")}
    unknown = sorted(name for name in given | properties().keys() if not is_known(name))
    assert unknown == []
    assert not is_known("spark.kubernetes.executor.podTemplatefile")


def test_the_driver_may_handle_pods_and_nothing_else():
    (rule,) = find("Role")["rules"]
    assert (rule["apiGroups"], rule["resources"]) == ([""], ["pods"])
    binding, account = find("RoleBinding"), find("ServiceAccount")["metadata"]["name"]
    assert [each["name"] for each in binding["subjects"]] == [account]
    assert find("Job")["spec"]["template"]["spec"]["serviceAccountName"] == account
    assert binding["roleRef"]["name"] == find("Role")["metadata"]["name"]


def test_the_entry_point_starts_executors_and_drivers_as_spark_says_and_any_command(tmp_path):
    for name in ("java", "spark-submit"):
        (tmp_path / name).write_text(f"#!/bin/bash\nprintf '%s\\n' {name} \"$@\"\n")
        (tmp_path / name).chmod(0o755)

    def entry(*words, **variables):
        """What it executes, a word a line."""
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | {f"SPARK_{name}": text for name, text in variables.items()}
        command = [str(ROOT / "k8s/spark-entrypoint"), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()

    said = {"DRIVER_URL": "spark://d", "APPLICATION_ID": "a", "EXECUTOR_ID": "7", "EXECUTOR_CORES": "2", "HOME": "/s"}
    said |= {
        "EXECUTOR_MEMORY": "1g",
        "RESOURCE_PROFILE_ID": "0",
        "EXECUTOR_POD_IP": "10.0.0.7",
        "EXECUTOR_POD_NAME": "x",
    }
    options = [f"-Dn={n} {n}" for n in range(11)]
    words = entry("executor", **said, **{f"JAVA_OPT_{n}": text for n, text in enumerate(options)})
    assert words[:16] == ["java", *options, "-Xms1g", "-Xmx1g", "-cp", "/s/jars/*"]
    assert dict(zip(words[-14::2], words[-13::2], strict=True)) == {
        "--driver-url": "spark://d",
        "--app-id": "a",
        "--executor-id": "7",
        "--cores": "2",
        "--resourceProfileId": "0",
        "--hostname": "10.0.0.7",
        "--podName": "x",
    }
    bound = ["--deploy-mode", "client", "--conf", "spark.driver.bindAddress=10.0.0.1"]
    assert entry("driver", "--class", "a b", DRIVER_BIND_ADDRESS="10.0.0.1") == [
        "spark-submit",
        *bound,
        "--class",
        "a b",
    ]
    assert entry("printf", "%s", "a  b") == ["a  b"]
