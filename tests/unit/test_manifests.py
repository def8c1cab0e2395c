"""The manifests: an API server would take them, and they agree with the code (agreement.py has the checks).

Every overlay, and the base with every combination of components, as `kubectl apply -k` would send them.
"""

import contextlib
import copy
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import agreement
import jsonschema
import kubernetes_validate
import pytest
import schemas
import yaml
from agreement import containers, named, of_kind, pods, selects
from brokers import environment
from command_tree import every_command
from waiting import until

from kmq import __version__, probe
from kmq.config import settings
from kmq.config.settings import STAGES
from kmq.links import layout

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
COMPONENTS = ("monitoring", "tls", "client-ca", "tokens")  # in the order in which they are listed
OVERLAYS = sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml"))
COMBINATIONS = [
    combination
    for count in range(len(COMPONENTS) + 1)
    for combination in itertools.combinations(COMPONENTS, count)
    if "client-ca" not in combination or "tls" in combination
]
# A broker beside an application; what that is lies in WORKLOADS.
MORE_BESIDE = ("", "+sidecar-monitoring", "+sidecar-fleet", "+sidecar-monitoring+alerts+sidecar-fleet")
BESIDE = [f"{kind}+sidecar{more}" for kind in ("Deployment", "StatefulSet") for more in MORE_BESIDE]
BESIDE += ["Deployment+ship", "StatefulSet+ship", "StatefulSet+ship+sidecar"]
FLEETS = ["base+fleet", "base+monitoring+tls+client-ca+tokens+fleet", "base+fleet+monitoring+tokens"]
SHARDS = ["base+shard", "base+monitoring+tokens+shard", "base+tls+shard", "base+monitoring+tls+client-ca+tokens+shard"]
SHARDS += ["base+tier+shard"]
BROKERS = [*("+".join(("base", *each)) for each in COMBINATIONS), *FLEETS, *SHARDS, "base+tls+tokens+repair"]
RENDERED = [*(f"overlays/{name}" for name in OVERLAYS), *BROKERS, *BESIDE]
# Native sidecars; and a rule of podFailurePolicy may be about exit codes alone, says the schema of that version first.
SINCE = dict.fromkeys(
    ("overlays/sidecar", "overlays/ship", "overlays/spark", "overlays/spark-nightly", "overlays/spark-stream", *BESIDE),
    (1, 29),
)
# From the oldest that knows every field of the base (unhealthyPodEvictionPolicy) to the newest that kubernetes-validate has.
NEWEST = (1, int(kubernetes_validate.latest_version().split(".")[1]))
VERSIONS = [*((1, minor) for minor in range(27, NEWEST[1], 2)), NEWEST]

# A custom resource, so no schema of Kubernetes' own has it: the part of the Prometheus operator's that is used here.
SERVICE_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "endpoints"],
            "properties": {
                "selector": {"type": "object", "properties": {"matchLabels": {"type": "object"}}},
                "endpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["port"],
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"},
                            "scheme": {"enum": ["http", "https"]},
                            "tlsConfig": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {
                                    "serverName": {"type": "string"},
                                    "ca": {"type": "object", "required": ["secret"]},
                                    "cert": {"type": "object", "required": ["secret"]},
                                    "keySecret": {"type": "object", "required": ["name", "key"]},
                                },
                            },
                            "authorization": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {
                                    "type": {"type": "string"},
                                    "credentials": {"type": "object", "required": ["name", "key"]},
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}

POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "podMetricsEndpoints"],
            "properties": {
                "selector": {"type": "object", "properties": {"matchLabels": {"type": "object"}}},
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {name: {"type": "string"} for name in ("port", "path", "interval")},
                    },
                },
            },
        },
    },
}
MONITORS = {
    kind: jsonschema.Draft202012Validator(schema)
    for kind, schema in (
        ("ServiceMonitor", SERVICE_MONITOR),
        ("PodMonitor", POD_MONITOR),
        ("PrometheusRule", schemas.PROMETHEUS_RULE),
    )
}


def kustomize(path):
    done = subprocess.run(["kubectl", "kustomize", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]


def overlay(path, components=(), of="base", **more):
    """`path`, made an overlay of the base, as a user would write one; or of a file beside it."""
    there = os.path.relpath(K8S, path.resolve())
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{there}/base" if of == "base" else of],
        "components": [f"{there}/components/{component}" for component in components],
    }
    (path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization | more))
    return path


def application(kind):
    """Somebody's workload with its own ids, init container and port, and what the component asks for."""
    labels = {"app": "shop"}
    own = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    resources = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    common = {"image": "shop:7", "securityContext": own, "resources": resources}
    ids = {"runAsUser": 2000, "runAsGroup": 2000, "fsGroup": 2000}
    pod = {
        "terminationGracePeriodSeconds": 60,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}} | ids,
        "initContainers": [{"name": "migrate"} | common],
        "containers": [{"name": "shop", "ports": [{"name": "http", "containerPort": 8080}]} | common],
        "volumes": [{"name": "logs", "emptyDir": {"sizeLimit": "1Gi"}}],
    }
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}}
    more = []
    if kind == "StatefulSet":
        spec |= {"serviceName": "shop", "volumeClaimTemplates": [{"metadata": {"name": "kmq-data"}, "spec": claim}]}
        service = {"clusterIP": "None", "selector": labels}
        more = [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "shop"}, "spec": service}]
    else:
        pod["volumes"] += [{"name": "kmq-data", "persistentVolumeClaim": {"claimName": "shop"}}]
        more = [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shop"}, "spec": claim}]
    spec["template"] = {"metadata": {"labels": labels}, "spec": pod}
    metadata = {"name": "shop", "labels": labels | {"kmq-sidecar": "true", "kmq-ship": "true"}}
    with_broker = {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": spec}
    return [with_broker, *more]


@pytest.fixture(scope="session")
def render(tmp_path_factory):
    """A function from one of RENDERED to its documents, which are the caller's own."""
    if shutil.which("kubectl") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("kubectl renders the manifests, and there is none")
    kept = {}

    def documents(name):
        if name not in kept:
            kept[name] = pickle.dumps(kustomize(K8S / name) if "+" not in name else combined(name))
        return pickle.loads(kept[name])  # a quick copy

    def combined(name):
        path = tmp_path_factory.mktemp("overlay")
        first, *components = name.split("+")
        if first == "base":
            return kustomize(overlay(path, components))
        (path / "workload.yaml").write_text(yaml.safe_dump_all(application(first)))
        return kustomize(overlay(path, components, of="workload.yaml"))

    return documents


@pytest.fixture(params=RENDERED)
def documents(request, render):
    return render(request.param)


# --- an API server would take them -----------------------------------------------------------------------------------


INVALID = (kubernetes_validate.ValidationError, jsonschema.ValidationError)


def is_known(document, version):
    """Raises what is wrong with it."""
    if document["kind"] in MONITORS:
        MONITORS[document["kind"]].validate(document)
    else:
        schemas.validate(document, f"{version[0]}.{version[1]}")


@pytest.fixture(scope="session")
def good():
    """(document, version) that were found to be so: most documents come again with every combination."""
    return set()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: f"{version[0]}.{version[1]}")
def test_every_document_is_one_that_this_version_knows(render, good, version):
    for name in RENDERED:
        if version < SINCE.get(name, VERSIONS[0]):
            continue
        for document in render(name):
            key = json.dumps(document, sort_keys=True), version
            if key not in good:
                try:
                    is_known(document, version)
                except INVALID as err:
                    pytest.fail(f"{name}: {document['kind']} {document['metadata']['name']}: {err.message}")
                good.add(key)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("StatefulSet", lambda spec: spec.update(replica=2)),
        ("StatefulSet", lambda spec: spec.update(replicas="2")),
        ("StatefulSet", lambda spec: spec["template"]["spec"]["containers"][0].update(readynessProbe={})),
        ("PodDisruptionBudget", lambda spec: spec.update(maxUnavailable=[1])),
        ("NetworkPolicy", lambda spec: spec["ingress"][0].update(form=[])),
        ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(intervall="1s")),
        ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(interval="15")),
        ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].update({"for": "1"})),
        ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].update(anotations={})),
    ],
)
def test_a_misspelt_field_or_a_wrong_type_is_noticed(render, kind, change):
    (document,) = of_kind(render("base+monitoring"), kind)
    is_known(document, NEWEST)
    change(document["spec"])
    with pytest.raises(INVALID):
        is_known(document, NEWEST)


def test_the_sidecars_are_none_before_kubernetes_has_them(render):
    (workload,) = of_kind(render("overlays/sidecar"), "StatefulSet")
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolicy"):
        is_known(workload, (1, 27))


# --- they agree ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", agreement.CHECKS, ids=lambda check: check.__name__)
def test_all_agree(documents, check):
    assert list(check(documents)) == []


def of(kind, change):
    """A change of the `spec` (of a ConfigMap with settings: the data) of all documents of a kind."""

    def changed(documents):
        found = [each for each in of_kind(documents, kind) if each["metadata"]["name"] != "kmq-dashboard"]
        assert found
        for document in found:
            change(document.get("spec") or document["data"])

    return changed


def pod(change):
    return lambda documents: [change(each["spec"]) for each in pods(documents)]


def container(name, change):
    return lambda documents: [change(named(each, name)) for each in pods(documents)]


def volume(name, change):
    return pod(lambda spec: [change(each) for each in spec["volumes"] if each["name"] == name])


def claim_of(spec, storage):
    spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] = storage


ALL = "base+monitoring+tls+client-ca+tokens"
SHARD = "overlays/cluster"
SIDECAR, BOTH = "overlays/sidecar", "StatefulSet+sidecar+sidecar-monitoring"
BREAKS = {
    agreement.settings_are_good: [
        ("base", of("ConfigMap", lambda data: data.update(KMQ_DTAA="/data")), "KMQ_DTAA"),
        ("base", of("ConfigMap", lambda data: data.update(RB_BYTES="1 MiB")), "RB_BYTES"),
        ("base", of("ConfigMap", lambda d: d.update(KMQ_PORT="tcp://1:1")), "an address"),
        (
            "base",
            container("router", lambda c: c["envFrom"][0]["configMapRef"].update(name="kmq-setting")),
            "router: no ConfigMap 'kmq-setting'",
        ),
        (
            "base",
            container("router", lambda c: c.update(env=[{"name": "RB_SLOT", "value": "8"}])),
            "router: environment: unknown setting RB_SLOT",
        ),
    ],
    agreement.ports_are_those_of_the_settings: [
        (
            "base",
            container("ingress", lambda c: c["ports"][0].update(containerPort=5674)),
            "port lines: 5674, in the settings 5673",
        ),
        ("base", of("ConfigMap", lambda data: data.update(KMQ_HTTP_PORT="80")), "port http: 8082, in the settings 80"),
        (
            "base",
            container("framer", lambda c: c.update(ports=[{"name": "lines", "containerPort": 5673}])),
            "of ingress",
        ),
        (
            "base",
            of("ConfigMap", lambda data: data.pop("KMQ_HOST")),
            "port lines can be reached from the pod itself only",
        ),
        (
            ALL,
            of("ConfigMap", lambda data: (data.pop("KMQ_TLS_CERT"), data.pop("KMQ_TLS_KEY"))),
            "port https: there is no certificate",
        ),
    ],
    agreement.services_lead_to_the_ports: [
        (
            "base",
            of("Service", lambda spec: spec["ports"][2].update(targetPort="htpp")),
            "Service kmq: port http leads nowhere",
        ),
        ("base", of("Service", lambda spec: spec["ports"].pop()), "Service kmq has not the ports of the pod"),
        ("base", of("Service", lambda spec: spec["selector"].update(tier="x")), "Service kmq selects nothing"),
        ("base", of("StatefulSet", lambda spec: spec.update(serviceName="kmq")), "no headless Service"),
        (
            "base",
            of("StatefulSet", lambda spec: spec["selector"]["matchLabels"].update(tier="x")),
            "does not select its own pods",
        ),
        (
            "base",
            of("NetworkPolicy", lambda spec: spec["podSelector"]["matchLabels"].update(tier="x")),
            "NetworkPolicy kmq selects nothing",
        ),
        (
            "base",
            of("PodDisruptionBudget", lambda spec: spec["selector"]["matchLabels"].update(tier="x")),
            "PodDisruptionBudget kmq selects nothing",
        ),
        (
            "base",
            container("gateway", lambda c: c["readinessProbe"]["httpGet"].update(port="lines")),
            "readinessProbe of gateway: no port lines",
        ),
    ],
    agreement.clients_of_kafka_are_told_a_name_that_stays: [
        ("base", container("gateway", lambda c: c["env"].pop()), "clients of port kafka are told :0"),
        (
            ALL,
            container("gateway", lambda c: c["env"][3].update(value="kmq:9092")),
            "clients of port kafka-tls are told :0",
        ),
        (
            "base",
            container("gateway", lambda c: c["env"][2].update(value="kmq")),
            "clients of port kafka are told $(POD_NAME).$(PODS_SERVICE).$(POD_NAMESPACE):9092",
        ),
    ],
    agreement.policy_lets_in_whom_it_should: [
        ("base", of("NetworkPolicy", lambda spec: spec["ingress"].append({})), "lets in"),
        (ALL, of("NetworkPolicy", lambda spec: spec["ingress"][0]["ports"].append({"port": "lines"})), "lets in"),
        ("base", of("NetworkPolicy", lambda spec: spec["policyTypes"].remove("Egress")), "may call out"),
        ("base", of("NetworkPolicy", lambda spec: spec["egress"].append({})), "may call out"),
        (SHARD, of("NetworkPolicy", lambda spec: spec["ingress"][0]["ports"].append({"port": "replica"})), "lets in"),
        (SHARD, of("NetworkPolicy", lambda spec: spec["ingress"].pop()), "lets in"),
        (SHARD, of("NetworkPolicy", lambda spec: spec["egress"][0].pop("to")), "may call out"),
    ],
    agreement.monitor_finds_one_target_a_broker: [
        (
            ALL,
            of("ServiceMonitor", lambda spec: spec["selector"]["matchLabels"].pop("app.kubernetes.io/component")),
            "the monitor selects ['kmq', 'kmq-pods']",
        ),
        (ALL, of("ServiceMonitor", lambda spec: spec["endpoints"][0].update(port="http")), "the monitor asks on http"),
        (ALL, of("ServiceMonitor", lambda spec: spec["endpoints"][0].pop("scheme")), "does not speak TLS"),
        (ALL, of("ServiceMonitor", lambda spec: spec["endpoints"][0].pop("authorization")), "shows no token"),
    ],
    agreement.a_tls_secret_is_enough: [
        (
            ALL,
            of("ServiceMonitor", lambda spec: spec["endpoints"][0]["tlsConfig"]["ca"]["secret"].update(key="ca.crt")),
            "the monitor trusts",
        ),
        (ALL, of("ServiceMonitor", lambda spec: spec["endpoints"][0]["tlsConfig"].pop("cert")), "no certificate"),
        (ALL, of("ConfigMap", lambda data: data.update(KMQ_TLS_CERT="/tls/cert.pem")), "not in the Secret"),
    ],
    agreement.sidecars_are_monitored: [
        (BOTH, of("PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].update(port="http")), "asks on {'http'}"),
        (BOTH, of("PodMonitor", lambda spec: spec["selector"]["matchLabels"].update(app="x")), "does not select"),
        (BOTH, of("ConfigMap", lambda data: data.update(KMQ_HOST="0.0.0.0")), "can be read from outside"),
    ],
    agreement.volumes_are_where_the_settings_say: [
        ("base", container("durability", lambda c: c["volumeMounts"][0].update(mountPath="/date")), "durability: "),
        ("base", of("ConfigMap", lambda data: data.update(KMQ_PIPES="/run/pipes")), "ingress: "),
        (
            ALL,
            container(
                "gateway", lambda c: c["volumeMounts"].remove({"name": "tls", "mountPath": "/tls", "readOnly": True})
            ),
            "gateway: nobody brings /tls/tls.crt",
        ),
        (
            "base+tls+shard",
            container(
                "replica", lambda c: c["volumeMounts"].remove({"name": "tls", "mountPath": "/tls", "readOnly": True})
            ),
            "replica: nobody brings /tls/tls.crt",
        ),
        ("base", of("StatefulSet", lambda spec: spec.update(volumeClaimTemplates=[])), "data does not outlive"),
        ("base", volume("shm", lambda each: each["emptyDir"].pop("medium")), "not in memory"),
    ],
    agreement.memory_holds_the_rings: [
        ("base", of("ConfigMap", lambda data: data.update(RB_BYTES="32 MiB")), "shm: the rings need"),
        ("base", of("ConfigMap", lambda data: data.update(RB_BYTES="128 MiB")), "framer: its limit of memory"),
        ("base", volume("shm", lambda each: each["emptyDir"].update(sizeLimit="8Mi")), "shm: the rings need"),
    ],
    agreement.the_disk_is_never_full: [
        ("base", of("ConfigMap", lambda data: data.pop("KMQ_DATA_QUOTA")), "KMQ_DATA_QUOTA=0 is not below"),
        ("overlays/dev", of("ConfigMap", lambda data: data.update(KMQ_DATA_QUOTA="17 GiB")), "is not below 0.85"),
        ("base", of("StatefulSet", lambda spec: claim_of(spec, "10Gi")), "of the claim of 10737418240 bytes"),
        ("base", of("ConfigMap", lambda data: data.pop("KMQ_RETENTION_BYTES")), "KMQ_SEGMENT_BYTES=268435456 is more"),
        (
            "base",
            of("ConfigMap", lambda data: data.update(KMQ_RETENTION_BYTES="2 GiB")),
            "12 partitions pass the quota",
        ),
        ("base", of("ConfigMap", lambda data: data.pop("KMQ_RETENTION_AGE")), "for ever"),
    ],
    agreement.resources_are_said: [
        ("base", container("router", lambda c: c["resources"].pop("limits")), "router may take all"),
        (
            SIDECAR,
            container("application", lambda c: c["resources"]["requests"].pop("cpu")),
            "application requests nothing",
        ),
    ],
    agreement.containers_are_the_processes: [
        ("base", pod(lambda spec: spec["containers"].reverse()), "containers are ['gateway', 'router'"),
        (SIDECAR, pod(lambda spec: spec["initContainers"].reverse()), "sidecars start as ['ingress'"),
        (SIDECAR, container("router", lambda c: c.pop("restartPolicy")), "no sidecar"),
        ("base", container("framer", lambda c: c.update(command=["python", "-m", "stages.router"])), "framer runs"),
        ("base+fleet", container("agent", lambda c: c.update(image="kmq")), "not one image"),
        ("base", pod(lambda spec: [c.update(image="kmq") for c in spec["containers"]]), "of a version"),
    ],
    agreement.probes_ask_their_own_process: [
        (
            "base",
            container("framer", lambda c: c["livenessProbe"]["exec"].update(command=["true"])),
            "livenessProbe of framer asks",
        ),
        (
            SIDECAR,
            container("router", lambda c: c["startupProbe"]["exec"]["command"].__setitem__(-1, "framer")),
            "startupProbe of router asks",
        ),
        ("base", container("framer", lambda c: c["livenessProbe"].update(periodSeconds=30)), "framer is not killed"),
        (
            "base",
            container("framer", lambda c: c["livenessProbe"].pop("terminationGracePeriodSeconds")),
            "framer is waited for",
        ),
        ("base", container("framer", lambda c: c["startupProbe"].pop("failureThreshold")), "framer has no time"),
        (
            "base",
            container("gateway", lambda c: c["readinessProbe"]["httpGet"].update(path="/healthz")),
            "whether the broker is ready",
        ),
    ],
    agreement.the_drain_is_waited_for: [
        ("base", pod(lambda spec: spec.update(terminationGracePeriodSeconds=10)), "the grace period is 10"),
        (SIDECAR, pod(lambda spec: spec.pop("terminationGracePeriodSeconds")), "None s are not enough"),
    ],
    agreement.pods_are_restricted: [
        ("base", pod(lambda spec: spec["securityContext"].pop("runAsNonRoot")), "the pod"),
        ("base", pod(lambda spec: spec["securityContext"].update(runAsUser=0)), "router runs as"),
        (BOTH, container("router", lambda c: c["securityContext"].pop("runAsUser")), "router runs as"),
        (
            "base",
            container("router", lambda c: c["securityContext"].update(seccompProfile={"type": "Unconfined"})),
            "router: ",
        ),
        (SIDECAR, container("consumer", lambda c: c["securityContext"].pop("readOnlyRootFilesystem")), "consumer: "),
        (
            "base",
            container("router", lambda c: c["securityContext"]["capabilities"].update(add=["SYS_PTRACE"])),
            "router: ",
        ),
        ("base", pod(lambda spec: spec.update(hostNetwork=True)), "hostNetwork"),
        ("base", container("ingress", lambda c: c["ports"][0].update(hostPort=5673)), "a port of the node"),
        ("base", volume("pipes", lambda each: each.update(hostPath={"path": "/pipes"})), "volume pipes"),
    ],
    agreement.pods_keep_to_themselves: [
        ("base", pod(lambda spec: spec.pop("automountServiceAccountToken")), "a token of the API server"),
        (SIDECAR, pod(lambda spec: spec.update(enableServiceLinks=True)), "service links"),
        ("base", pod(lambda spec: spec.pop("shareProcessNamespace")), "a pid means"),
    ],
    agreement.a_shard_survives_its_upgrade: [
        (SHARD, of("StatefulSet", lambda spec: spec.update(replicas=2)), "2 replicas"),
        (SHARD, of("StatefulSet", lambda spec: spec.update(podManagementPolicy="OrderedReady")), "OrderedReady"),
        (SHARD, container("replica", lambda c: c.pop("lifecycle")), "preStop does not hand over"),
        (
            SHARD,
            container("replica", lambda c: c["lifecycle"]["preStop"]["exec"]["command"].append("60s")),
            "preStop does not hand over",
        ),
        (SHARD, of("Service", lambda spec: spec.pop("publishNotReadyAddresses", None)), "only once it is ready"),
        (SHARD, container("replica", lambda c: c.pop("env")), "not reached by its pod's name"),
        (SHARD, of("PodDisruptionBudget", lambda spec: spec.update(maxUnavailable=2)), "may be evicted"),
    ],
    agreement.labels_are_the_recommended_ones: [
        ("base", lambda documents: documents[0]["metadata"]["labels"].pop("app.kubernetes.io/part-of"), "part-of"),
        ("overlays/fleet", lambda documents: documents[-1]["metadata"].pop("labels"), "lacks app.kubernetes.io/comp"),
    ],
    agreement.brokers_are_spread: [
        ("base", pod(lambda spec: spec.pop("topologySpreadConstraints")), "may all be in one zone"),
        (
            SHARD,
            pod(lambda spec: spec["topologySpreadConstraints"][0].update(whenUnsatisfiable="DoNotSchedule")),
            "waits for a node",
        ),
        (
            "base",
            pod(lambda spec: spec["topologySpreadConstraints"][1]["labelSelector"]["matchLabels"].popitem()),
            "of another broker",
        ),
    ],
    agreement.addresses_in_arguments_are_ports: [
        (SIDECAR, of("ConfigMap", lambda data: data.update(KMQ_GRPC_PORT="8081")), "consumer: nobody listens on 8080"),
    ],
}


@pytest.mark.parametrize(
    ("check", "name", "change", "said"), [(check, *row) for check, rows in BREAKS.items() for row in rows]
)
def test_a_manifest_that_is_wrong_in_one_place_is_noticed(render, check, name, change, said):
    documents = render(name)
    change(documents)
    found = list(check(documents))
    assert any(said in finding for finding in found), found


def test_every_check_has_been_seen_to_fail():
    assert set(BREAKS) == set(agreement.CHECKS)


def test_the_base_runs_the_version_of_this_checkout(render):
    version = __version__
    (workload,) = of_kind(render("base"), "StatefulSet")
    assert {container["image"] for container in workload["spec"]["template"]["spec"]["containers"]} == {
        f"kmq:{version}"
    }


def test_the_maintenance_jobs_work_on_the_claims_of_the_base(render):
    """The restored claim is the one that the StatefulSet makes, and takes."""
    (workload,) = of_kind(render("base"), "StatefulSet")
    (template,) = workload["spec"]["volumeClaimTemplates"]
    data = f"{template['metadata']['name']}-{workload['metadata']['name']}-0"
    made = {name: yaml.safe_load((K8S / f"overlays/{name}/claim.yaml").read_text()) for name in ("backup", "restore")}
    assert made["restore"]["spec"] == template["spec"] and made["restore"]["metadata"]["name"] == data
    for claim in made.values():
        schemas.validate(claim, ".".join(map(str, NEWEST)))
    for name, claims in (("repair", {data}), ("backup", {data, "kmq-backup"}), ("restore", {data, "kmq-backup"})):
        (job,) = of_kind(render(f"overlays/{name}"), "Job")
        volumes = job["spec"]["template"]["spec"]["volumes"]
        assert {volume["persistentVolumeClaim"]["claimName"] for volume in volumes} == claims
    assert made["backup"]["metadata"]["name"] == "kmq-backup"


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_the_sidecar_component_leaves_what_is_yours_alone(tmp_path, kind):
    before = application(kind)
    other = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "other"}, "spec": before[0]["spec"]}
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump_all([*before, other]))
    after = {
        d["metadata"]["name"]: d
        for d in kustomize(overlay(tmp_path, ["sidecar"], of="workload.yaml"))
        if d["kind"] == kind
    }
    assert after["other"] == other
    (old, new) = (each["spec"]["template"]["spec"] for each in (before[0], after["shop"]))
    assert new["containers"] == old["containers"]
    assert new["initContainers"][-1:] == old["initContainers"]
    changed = {key for key in new if new[key] != old.get(key)}
    assert changed == {"initContainers", "volumes", "shareProcessNamespace"}
    version = __version__
    assert {c["image"] for c in new["initContainers"][:-1]} == {f"kmq:{version}"}


@pytest.mark.parametrize("kind", ["DaemonSet", "Job", "CronJob", "Pod"])
@pytest.mark.parametrize("component", ["sidecar", "ship"])
def test_a_component_that_cannot_go_into_a_workload_says_so(tmp_path, component, kind):
    workload = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "shop", "labels": {f"kmq-{component}": "true"}}}
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump(workload | {"spec": {}}))
    with pytest.raises(AssertionError, match=f"kmq-{component} goes into a Deployment or a StatefulSet"):
        kustomize(overlay(tmp_path, [component], of="workload.yaml"))


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_the_ship_component_adds_one_container_and_its_command_is_one(tmp_path, kind):
    before = application(kind)
    other = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "other"}, "spec": before[0]["spec"]}
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump_all([*before, other]))
    documents = kustomize(overlay(tmp_path, ["ship"], of="workload.yaml"))
    after = {d["metadata"]["name"]: d for d in of_kind(documents, kind)}
    assert after["other"] == other
    (old, new) = (each["spec"]["template"]["spec"] for each in (before[0], after["shop"]))
    assert {key for key in new if new[key] != old.get(key)} == {"initContainers"}
    ship, *others = new["initContainers"]
    assert (others, ship["image"], ship["restartPolicy"]) == (old["initContainers"], f"kmq:{__version__}", "Always")
    given = dict(every_command())["ship",].make_context("kmq ship", list(ship["command"][2:])).params
    (mount,) = ship["volumeMounts"]
    for path in (given["state"], *given["patterns"]):
        assert path.startswith(f"{mount['mountPath']}/")


def test_ship_ends_before_the_broker_in_its_pod_and_after_the_application(render):
    (workload,) = of_kind(render("StatefulSet+ship+sidecar"), "StatefulSet")
    names = [c["name"] for c in workload["spec"]["template"]["spec"]["initContainers"]]
    assert names == ["kmq-gateway", "kmq-router", "kmq-durability", "kmq-framer", "kmq-ingress", "kmq-ship", "migrate"]


def test_the_agent_beside_an_application_is_a_container_behind_it(render):
    """`kubectl exec` finds the application, which does not wait for the agent either."""
    for name, ours in (("StatefulSet+sidecar+sidecar-fleet", ["kmq-agent"]), ("StatefulSet+sidecar", [])):
        (workload,) = of_kind(render(name), "StatefulSet")
        spec = workload["spec"]["template"]["spec"]
        assert [c["name"] for c in spec["containers"]] == ["shop", *ours]
        assert "kmq-agent" not in [c["name"] for c in spec["initContainers"]]
    documents = render("StatefulSet+sidecar+sidecar-fleet")
    (agent,) = [c for c in containers(pods(documents)[0]) if c["name"] == "kmq-agent"]
    assert agent["image"] == f"kmq:{__version__}"
    assert agreement.environment(documents, agent)["KMQ_CLUSTER"] == "kmq"
    of_broker = next(c for c in containers(pods(render("base+fleet"))[0]) if c["name"] == "agent")
    for field in ("command", "env", "resources", "startupProbe", "livenessProbe"):
        assert agent[field] == of_broker[field]


def test_an_overlay_names_its_cluster_and_the_agent_alone_knows_consul(render):
    documents = render("overlays/fleet")
    broker = next(each for each in pods(documents) if len(containers(each)) > 1)
    found = {c["name"]: agreement.environment(documents, c) for c in containers(broker)}
    assert {env["KMQ_CLUSTER"] for env in found.values()} == {"dev"}
    assert [name for name, env in found.items() if "KMQ_CONSUL" in env] == ["agent"]


def test_a_shard_with_a_copy_reaches_consul_and_the_store(render):
    [policy] = [
        each
        for each in render("base+tier+shard")
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "kmq"
    ]
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())}
    assert {443, 8500, 53} <= ports and any("to" in rule for rule in policy["spec"]["egress"])


def test_the_replicas_of_a_shard_are_on_nodes_of_their_own(render):
    (broker,) = [pod for pod, _ in agreement.brokers(render(SHARD))]
    (term,) = broker["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert selects(term["labelSelector"], broker["metadata"]["labels"])
    (dev,) = [pod for pod, _ in agreement.brokers(render("overlays/cluster-dev"))]
    assert "affinity" not in dev["spec"]


def test_an_upgrade_is_another_image_and_nothing_else(render, tmp_path):
    """So that nothing stands in its way that cannot be changed, as labels of a volumeClaimTemplate."""
    after = kustomize(overlay(tmp_path, images=[{"name": "kmq", "newTag": "9.9.9"}]))
    assert json.dumps(after).count("9.9.9") == len(agreement.PROCESSES)
    (before,) = {container["image"] for each in pods(render("base")) for container in each["spec"]["containers"]}
    assert json.loads(json.dumps(after).replace("kmq:9.9.9", before)) == render("base")


def test_other_settings_are_another_revision_of_the_pod(render):
    """By the name of their ConfigMap: so a change restarts the broker, and a rollback has the old ones."""
    base, dev = (of_kind(render(name), "ConfigMap")[0] for name in ("base", "overlays/dev"))
    assert base["data"] != dev["data"] and base["metadata"]["name"] != dev["metadata"]["name"]
    assert base["metadata"]["name"].startswith("kmq-settings-")


# --- two brokers in one namespace --------------------------------------------------------------------------------------


def selections(documents):
    """(who, selector, whether it is one of Services) for everything that selects."""
    for document in documents:
        who, spec = f"{document['kind']} {document['metadata']['name']}", document.get("spec", {})
        if document["kind"] == "Service":
            yield who, {"matchLabels": spec["selector"]}, False
        elif document["kind"] == "NetworkPolicy":
            yield who, spec["podSelector"], False
        elif "selector" in spec:
            yield who, spec["selector"], document["kind"] == "ServiceMonitor"


@pytest.fixture(scope="session")
def neighbours(tmp_path_factory):
    """The broker as it is, and one as docs/kubernetes.md makes a second: a namePrefix and an instance of its own."""
    second = {"pairs": {"app.kubernetes.io/instance": "b"}, "includeSelectors": True}
    more = ({}, {"namePrefix": "b-", "labels": [second]})
    components = (*COMPONENTS, "shard")
    return [kustomize(overlay(tmp_path_factory.mktemp("broker"), components, **each)) for each in more]


def test_both_brokers_of_the_page_render_and_are_two(render, tmp_path):
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.S)
    mine = [block for block in blocks if "k8s/base" in block]
    found = []
    for number, block in enumerate(mine):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "kustomization.yaml").write_text(
            block.replace("../kmq/k8s", os.path.relpath(K8S, directory.resolve()))
        )
        found.append(kustomize(directory))
    first, second = found
    for documents, instance in ((first, "kmq"), (second, "b")):
        (workload,) = of_kind(documents, "StatefulSet")
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == instance
        assert {c["image"] for c in containers(pods(documents)[0])} == {f"registry.example.com/kmq:{__version__}"}
    assert of_kind(first, "ServiceMonitor")
    assert not {d["metadata"]["name"] for d in first} & {d["metadata"]["name"] for d in second}


def test_two_brokers_in_one_namespace_select_their_own_pods_only(neighbours):
    for ours, theirs in itertools.permutations(neighbours):
        for who, selector, is_of_services in selections(ours):
            own, other = (of_kind(each, "Service") if is_of_services else pods(each) for each in (ours, theirs))
            assert any(selects(selector, each["metadata"]["labels"]) for each in own), who
            assert not [each["metadata"] for each in other if selects(selector, each["metadata"]["labels"])], who
    kinds = {who.split()[0] for who, *_ in selections(neighbours[0])}
    assert kinds == {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor"}


def test_names_follow_the_prefix_of_a_second_broker(neighbours):
    first, second = neighbours
    assert not {(d["kind"], d["metadata"]["name"]) for d in first} & {
        (d["kind"], d["metadata"]["name"]) for d in second
    }
    for documents, prefix in ((first, ""), (second, "b-")):
        (workload,) = of_kind(documents, "StatefulSet")
        assert workload["spec"]["serviceName"] == f"{prefix}kmq-pods"
        assert workload["spec"]["template"]["spec"]["serviceAccountName"] == f"{prefix}kmq"
        assert [*agreement.settings_are_good(documents)] == []  # each container finds its ConfigMap
        assert [*agreement.a_shard_survives_its_upgrade(documents)] == []  # each replica is found by its name
        assert [*agreement.policy_lets_in_whom_it_should(documents)] == []
        assert [*agreement.clients_of_kafka_are_told_a_name_that_stays(documents)] == []


def test_a_monitor_asks_for_the_certificate_of_the_service_with_its_prefix(tmp_path):
    documents = kustomize(overlay(tmp_path, ("monitoring", "tls"), namePrefix="b-"))
    (monitor,) = of_kind(documents, "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["tlsConfig"]["serverName"] == "b-kmq"


def test_clients_of_a_second_broker_need_no_label_of_its_own(neighbours):
    (policy,) = of_kind(neighbours[1], "NetworkPolicy")
    assert selects(policy["spec"]["ingress"][0]["from"][0]["podSelector"], {"kmq-client": "true"})


# --- what a Service named kmq injects --------------------------------------------------------------------------------


def service_links(services):
    """The variables that a kubelet gives every pod of the namespace for these Services (pkg/kubelet/envvars)."""
    found = {}
    for number, service in enumerate(services, 7):
        if service["spec"].get("clusterIP") == "None":
            continue
        ip, ports = f"10.96.0.{number}", service["spec"]["ports"]
        prefix = service["metadata"]["name"].upper().replace("-", "_")
        found |= {f"{prefix}_SERVICE_HOST": ip, f"{prefix}_SERVICE_PORT": str(ports[0]["port"])}
        found[f"{prefix}_PORT"] = f"tcp://{ip}:{ports[0]['port']}"
        for port in ports:
            link = f"{prefix}_PORT_{port['port']}_TCP"
            found[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(port["port"])
            found |= {link: f"tcp://{ip}:{port['port']}", f"{link}_PROTO": "tcp"}
            found |= {f"{link}_PORT": str(port["port"]), f"{link}_ADDR": ip}
    return found


@pytest.fixture
def links(render):
    """Of the Services rendered, and of more that somebody may give the names of our settings: kmq-http, kmq-grpc, …"""
    services = of_kind(render("base"), "Service")
    more = [copy.deepcopy(services[0]) for _ in range(4)]
    for service, name in zip(more, ("kmq-http", "kmq-grpc", "kmq-ack", "kmq-tls"), strict=True):
        service["metadata"]["name"] = name
    return service_links([*services, *more])


def test_the_services_inject_what_looks_like_settings(links):
    clashing = {row.env for row in settings.SETTINGS} & set(links)
    assert clashing == {"KMQ_PORT", "KMQ_HTTP_PORT", "KMQ_GRPC_PORT", "KMQ_ACK_PORT", "KMQ_TLS_PORT"}


def test_what_the_pod_says_wins_over_what_a_service_injects(render, links):
    """As in the kubelet, the container's own environment comes over the links."""
    (given,) = (document["data"] for document in of_kind(render("base"), "ConfigMap"))
    found = settings.load(links | given, "/nonexistent.toml")
    assert (found.port, found.ack_port, found.http_port, found.grpc_port) == (5673, 5675, 8082, 8080)
    assert set(found.ignored) == set(links) - set(given)


def test_every_stage_starts_with_the_variables_that_a_service_named_kmq_injects(links, tmp_path):
    """Ports come from kmq.toml, for the links are where they would be."""
    instance = f"unit-links-{os.getpid()}"
    ours = {"KMQ_INSTANCE": instance, "KMQ_DATA": f"{tmp_path}/data", "KMQ_PIPES": f"{tmp_path}/pipes"}
    (tmp_path / "kmq.toml").write_text("KMQ_PORT = 0\nKMQ_ACK_PORT = 0\n")
    env = environment(**links, **ours, PYTHONPATH=ROOT)
    found = settings.load(links | ours, str(tmp_path / "kmq.toml"))
    logs = {name: (tmp_path / f"{name}.log").open("w+b") for name in STAGES}
    with contextlib.ExitStack() as stack:
        for log in logs.values():
            stack.enter_context(log)
        stages = {
            name: subprocess.Popen([sys.executable, "-m", f"stages.{name}"], env=env, cwd=tmp_path, stderr=logs[name])
            for name in STAGES
        }
        try:
            for name, stage in stages.items():
                until(lambda name=name: not probe.reason("ready", name, found), f"{name} is ready", process=stage)
        finally:
            for stage in stages.values():
                stage.terminate()
            codes = {name: stage.wait(30) for name, stage in stages.items()}
            for ring in ("framed", "durable"):
                layout.remove(instance, ring)
            for page in ("received", "stats"):
                os.unlink(f"{settings.SHM}/{instance}.{page}")
    assert codes == dict.fromkeys(STAGES, 0)
    for name in STAGES:
        said = (tmp_path / f"{name}.log").read_text()
        assert said.count("event=service_links_ignored") == 1 and f"names={','.join(sorted(links))}" in said
