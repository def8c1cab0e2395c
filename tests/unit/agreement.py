"""What manifests must agree on, with the code and with each other. Each check yields what is wrong, in words.

`documents` are a rendered kustomization; what is said of a pod is said of every pod template among them.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from kmq.config import settings, values
from kmq.config.settings import DRAIN_S, GRACE_S, SETTINGS, SHM, STAGES, Settings
from kmq.config.values import MIB
from kmq.errors import ConfigError
from kmq.framing.dedupe import CHECKPOINT_BYTES
from kmq.links import layout
from kmq.links.staging import area_bytes
from kmq.probe import LIVE_S

Document = dict[str, Any]
Check = Callable[[list[Document]], Iterator[str]]

AGENT = "agent"
REPLICA = "replica"
TIER = "tier"
PROCESSES = (*STAGES, "gateway")  # of every broker
MODULES = {"gateway": "kmq.gateway", AGENT: "kmq.cluster.agent", REPLICA: "kmq.replica", TIER: "kmq.tier"} | {
    name: f"stages.{name}" for name in STAGES
}
# Port name in the manifests → whose it is, its setting, and the setting of the address it listens on.
PORTS = {
    "lines": ("ingress", "port", "host"),
    "acks": ("ingress", "ack_port", "host"),
    "http": ("gateway", "http_port", "host"),
    "grpc": ("gateway", "grpc_port", "host"),
    "egress": ("gateway", "egress_port", "host"),
    "status": ("gateway", "status_port", "host"),
    "kafka": ("gateway", "kafka_number", "host"),
    "kafka-tls": ("gateway", "kafka_tls_port", "tls_host"),
    "egress-tls": ("gateway", "egress_tls_port", "tls_host"),
    "lines-tls": ("ingress", "tls_port", "tls_host"),
    "https": ("gateway", "https_port", "tls_host"),
    "grpcs": ("gateway", "grpcs_port", "tls_host"),
    "kmq-metrics": ("gateway", "metrics_port", "metrics_host"),
    "replica": ("replica", "replica_port", "host"),
}
SIDECAR = "kmq-"  # what containers, volumes and ports of ours begin with in a pod that is not ours
_PAGE = 4096
_SMALL_FILES = 16 * _PAGE  # the stats page and the semaphores
_PROCESS_BYTES = 48 * MIB  # a stage with all its tables, well counted
_QUOTA_SHARE = 0.85  # of a claim; ext4 leaves 88 % of 1 GiB, 92 % of 20 GiB to whoever is not root
_BUSY_PARTITIONS = 12  # at their limit at once, as base/settings.env promises
_ON_THE_WAY = 64 * MIB  # refusing begins so long before the quota, well counted (kmq/broker/admission.py)
_UNCHECKED_WAL = 4 * CHECKPOINT_BYTES  # the WAL keeps what no checkpoint speaks of, whatever retention says


# --- finding one's way -----------------------------------------------------------------------------------------------


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def workloads(documents: list[Document]) -> list[Document]:
    nested = [document["spec"]["jobTemplate"] for document in of_kind(documents, "CronJob")]
    return [*of_kind(documents, "StatefulSet", "Deployment", "DaemonSet", "Job"), *nested]


def pods(documents: list[Document]) -> list[Document]:
    """Every pod template, and pods without a controller."""
    return [*(workload["spec"]["template"] for workload in workloads(documents)), *of_kind(documents, "Pod")]


def containers(pod: Document) -> list[Document]:
    """In the order in which they start."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def brokers(documents: list[Document]) -> Iterator[tuple[Document, Document]]:
    """Pods that run stages, with the workload they are of."""
    for workload in workloads(documents):
        pod = workload["spec"]["template"]
        if any(role(container) in STAGES for container in containers(pod)):
            yield pod, workload


def role(container: Document) -> str:
    """Which process it is: its name, beside an application without the prefix."""
    return str(container["name"]).removeprefix(SIDECAR)


def processes(pod: Document) -> tuple[str, ...]:
    """The processes of ours in this pod: one of a fleet, of a shard, or with a copy has one more."""
    found = {role(container) for container in containers(pod)}
    return (*PROCESSES, *(name for name in (AGENT, REPLICA, TIER) if name in found))


def is_beside(pod: Document) -> bool:
    """Whether the broker is beside an application, in a pod that is not ours."""
    return any(container["name"].startswith(SIDECAR) for container in containers(pod))


def named(pod: Document, name: str) -> Document:
    return next(container for container in containers(pod) if role(container) == name)


def environment(documents: list[Document], container: Document) -> dict[str, str]:
    """What the kubelet gives the container, but for service links. Raises KeyError for a ConfigMap that is not there."""
    maps = {document["metadata"]["name"]: document["data"] for document in of_kind(documents, "ConfigMap")}
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]
    return found | {each["name"]: each.get("value", "") for each in container.get("env", [])}


def settings_of(documents: list[Document], container: Document) -> Settings:
    return settings.load(environment(documents, container), "/nonexistent.toml")


def ports_of(pod: Document) -> dict[str, tuple[str, int]]:
    """Port name → container, number; of ours."""
    return {
        port["name"]: (role(container), port["containerPort"])
        for container in containers(pod)
        for port in container.get("ports", [])
        if role(container) in (*PROCESSES, REPLICA)
    }


def bytes_of(quantity: str) -> int:
    """Of `64Mi` or a plain number, the only kinds used here."""
    return values.parse_bytes(f"{quantity}B")


def probes(container: Document) -> dict[str, Document]:
    return {key: probe for key, probe in container.items() if key.endswith("Probe")}


# --- the checks ------------------------------------------------------------------------------------------------------


def settings_are_good(documents: list[Document]) -> Iterator[str]:
    """Every process of ours would start: no unknown name, no value out of its limits."""
    known = {row.env for row in SETTINGS}
    for pod in pods(documents):
        for container in containers(pod):
            try:
                given = environment(documents, container)
                if settings.load(given, "/nonexistent.toml").ignored:
                    yield f"{container['name']}: an address is given as a setting"
            except KeyError as err:
                yield f"{container['name']}: no ConfigMap {err}"
            except ConfigError as err:
                yield f"{container['name']}: {err}"
    for document in of_kind(documents, "ConfigMap"):
        for name in document["data"]:
            if name.startswith(("KMQ_", "RB_")) and name not in known:
                yield f"{document['metadata']['name']}: unknown setting {name}"


def ports_are_those_of_the_settings(documents: list[Document]) -> Iterator[str]:
    """Numbers are the settings' and the defaults, in the container that listens there, on an address others can reach."""
    defaults = settings.load({}, "/nonexistent.toml")
    for pod, _ in brokers(documents):
        for name, (container, number) in ports_of(pod).items():
            owner, port, host = PORTS[name]
            found = settings_of(documents, named(pod, owner))
            host = "tls_host" if name == REPLICA and found.tls_cert else host
            if container != owner:
                yield f"port {name} is of {owner}, not of {container}"
            if not number == getattr(found, port) == getattr(defaults, port):
                yield f"port {name}: {number}, in the settings {getattr(found, port)}"
            if getattr(found, host).startswith("127."):
                yield f"port {name} can be reached from the pod itself only"
            if host == "tls_host" and not found.tls_cert:
                yield f"port {name}: there is no certificate, so nobody listens there"


def leads_elsewhere(documents: list[Document], service: Document) -> bool:
    """Whether a Service is of another workload here, to whose ports it leads: the Consul of an overlay."""
    ours = [pod for pod, _ in brokers(documents)]
    for pod in [pod for pod in pods(documents) if pod not in ours]:
        if service["spec"]["selector"].items() <= pod["metadata"].get("labels", {}).items():
            names = {port["name"] for container in containers(pod) for port in container.get("ports", [])}
            return {port["targetPort"] for port in service["spec"]["ports"]} <= names
    return False


def services_lead_to_the_ports(documents: list[Document]) -> Iterator[str]:
    """Services, policies, monitors and probes name ports that the pod has; clients reach all but those of a shard."""
    for pod, workload in brokers(documents):
        labels, ports = pod["metadata"]["labels"], ports_of(pod)
        if not workload["spec"]["selector"]["matchLabels"].items() <= labels.items():
            yield "the workload does not select its own pods"
        if REPLICA not in processes(pod):
            ports.pop("kmq-metrics", None)  # a PodMonitor finds it without a Service
        own = {"kmq-metrics", "replica"} & set(ports)  # of each broker by itself
        selecting = [s for s in of_kind(documents, "Service") if s["spec"]["selector"].items() <= labels.items()]
        governing = [s for s in selecting if s["metadata"]["name"] == workload["spec"].get("serviceName")]
        if workload["kind"] == "StatefulSet" and not any(s["spec"].get("clusterIP") == "None" for s in governing):
            yield "no headless Service gives the pods their names"
        for service in of_kind(documents, "Service"):
            if leads_elsewhere(documents, service):
                continue
            if service not in selecting:
                yield f"Service {service['metadata']['name']} selects nothing"
            for port in service["spec"].get("ports", []):
                if (port["name"], port["port"]) != (port["targetPort"], ports.get(port["targetPort"], ("", 0))[1]):
                    yield f"Service {service['metadata']['name']}: port {port['name']} leads nowhere"
            wanted = set(ports) if service in governing or is_beside(pod) else set(ports) - own
            if {port["name"] for port in service["spec"].get("ports", [])} != wanted:
                yield f"Service {service['metadata']['name']} has not the ports of the pod"
        for policy in of_kind(documents, "NetworkPolicy", "PodDisruptionBudget"):
            selector = policy["spec"].get("podSelector") or policy["spec"]["selector"]
            if not selector["matchLabels"].items() <= labels.items():
                yield f"{policy['kind']} {policy['metadata']['name']} selects nothing"
        for container in containers(pod):
            for kind, probe in probes(container).items():
                if "httpGet" in probe and ports.get(probe["httpGet"]["port"], ("",))[0] != role(container):
                    yield f"{kind} of {container['name']}: no port {probe['httpGet']['port']}"


def policy_lets_in_whom_it_should(documents: list[Document]) -> Iterator[str]:
    """Clients to every port, monitoring to HTTP alone, nobody else; the broker calls nobody, an agent Consul and DNS.

    The pods of a shard reach all ports of each other, and nobody else reaches 5677.
    """
    clients = {"matchExpressions": [{"key": "kmq-client", "operator": "In", "values": ["true"]}]}
    monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    for pod, _ in brokers(documents):
        ports = set(ports_of(pod))
        shard = [{"podSelector": {"matchLabels": pod["metadata"]["labels"]}}]
        is_shard = REPLICA in processes(pod)
        wanted = [
            (ports - {"kmq-metrics", "replica"} if is_shard else ports, [{"podSelector": clients}]),
            (
                {"kmq-metrics" if is_shard else "https" if "https" in ports else "http"},
                [{"namespaceSelector": {"matchLabels": monitoring}}],
            ),
            *([(set(), shard)] if is_shard else []),
        ]
        for policy in of_kind(documents, "NetworkPolicy"):
            spec = policy["spec"]
            allowed = [({port["port"] for port in rule.get("ports", [])}, rule.get("from")) for rule in spec["ingress"]]
            if allowed != wanted:
                yield f"lets in {allowed}"
            out = [sorted({port["port"] for port in rule.get("ports", [])}) for rule in spec.get("egress", [])]
            named_out: list[list[int]] = [[]] * is_shard + [[53, 8500, 8501]] * (is_shard or AGENT in processes(pod))
            named_out += [[53, 443]] * (TIER in processes(pod))
            peers = [rule.get("to") for rule in spec.get("egress", []) if not rule.get("ports")]
            if (
                sorted(spec["policyTypes"]) != ["Egress", "Ingress"]
                or sorted(out) != sorted(named_out)
                or peers != [shard] * is_shard
            ):
                yield "the broker may call out"


def monitor_finds_one_target_a_broker(documents: list[Document]) -> Iterator[str]:
    for monitor in of_kind(documents, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        found = [s for s in of_kind(documents, "Service") if wanted.items() <= s["metadata"]["labels"].items()]
        if len(found) != 1 or not found[0]["spec"].get("publishNotReadyAddresses"):
            yield f"the monitor selects {[s['metadata']['name'] for s in found]}"
        for endpoint in monitor["spec"]["endpoints"]:
            if endpoint["port"] not in {p["name"] for s in found for p in s["spec"]["ports"]}:
                yield f"the monitor asks on {endpoint['port']}, which is no port"
            if (endpoint["port"] == "https") != (endpoint.get("scheme") == "https") or (
                endpoint["port"] == "https" and "tlsConfig" not in endpoint
            ):
                yield "the monitor does not speak TLS where the port does"
            for pod, _ in brokers(documents):
                if settings_of(documents, named(pod, "gateway")).tokens and "authorization" not in endpoint:
                    yield "the monitor shows no token"


def a_tls_secret_is_enough(documents: list[Document]) -> Iterator[str]:
    """`kubectl create secret tls` gives a certificate and its key. The CA of clients is asked for by whoever wants those."""
    for monitor in of_kind(documents, "ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            tls = endpoint.get("tlsConfig", {})
            if tls and tls.get("ca") != {"secret": {"name": "kmq-tls", "key": "tls.crt"}}:
                yield f"the monitor trusts {tls.get('ca')}"
            for pod, _ in brokers(documents):
                has_ca = settings_of(documents, named(pod, "gateway")).tls_client_ca
                if has_ca and REPLICA not in processes(pod) and not {"cert", "keySecret"} <= set(tls):
                    yield "the monitor shows no certificate"
    for pod, _ in brokers(documents):
        found = settings_of(documents, named(pod, "gateway"))
        if {found.tls_cert, found.tls_key} - {"", "/tls/tls.crt", "/tls/tls.key"}:
            yield f"{found.tls_cert} and {found.tls_key} are not in the Secret"


def sidecars_are_monitored(documents: list[Document]) -> Iterator[str]:
    """A PodMonitor finds every broker beside an application, on its only port that is open; messages stay inside."""
    for pod, _ in brokers(documents):
        for monitor in of_kind(documents, "PodMonitor"):
            wanted = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
            if not monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items():
                yield "the monitor does not select the pod"
            if wanted != set(ports_of(pod)):
                yield f"the monitor asks on {wanted}, the pod has {set(ports_of(pod))}"
        if is_beside(pod) and not settings_of(documents, named(pod, "gateway")).host.startswith("127."):
            yield "messages can be read from outside"


def volumes_are_where_the_settings_say(documents: list[Document]) -> Iterator[str]:
    """/data, /pipes and /dev/shm in every process of ours, the same ones; files of Secrets where they are read."""
    for pod, workload in brokers(documents):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        claimed = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        claimed |= {name for name, volume in volumes.items() if "persistentVolumeClaim" in volume}
        ours = SIDECAR if is_beside(pod) else ""
        for name in processes(pod):
            container, found = named(pod, name), settings_of(documents, named(pod, name))
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            places = (mounts.get(found.data), mounts.get(found.pipes), mounts.get(SHM))
            if places != tuple(ours + volume for volume in ("data", "pipes", "shm")):
                yield f"{name}: {mounts} are not KMQ_DATA, KMQ_PIPES and {SHM}"
            users = dict.fromkeys((found.tls_cert, found.tls_key, found.tls_client_ca), ("ingress", "gateway", REPLICA))
            for path, by in (users | {found.tokens: ("ingress", "gateway")}).items():
                mounted = volumes.get(mounts.get(path.rpartition("/")[0], ""), {})
                if path and name in by and "secret" not in mounted:
                    yield f"{name}: nobody brings {path}"
            secret = volumes.get(mounts.get(found.replica_secret.rpartition("/")[0], ""), {})
            if found.shard and (name == REPLICA) != ("secret" in secret):
                yield f"{name}: KMQ_REPLICA_SECRET is the replica's alone"
        if f"{ours}data" not in claimed:
            yield "data does not outlive the pod"
        shm = volumes[f"{ours}shm"].get("emptyDir", {})
        if "emptyDir" not in volumes[f"{ours}pipes"] or shm.get("medium") != "Memory":
            yield "pipes and shm are not the pod's own, or shm is not in memory"


def memory_holds_the_rings(documents: list[Document]) -> Iterator[str]:
    """The memory volume, and the limit of whoever touches a ring first, which the ring is charged to."""
    for pod, _ in brokers(documents):
        found = settings_of(documents, named(pod, "framer"))
        rings = [
            layout.make_identity("0" * 32, found.ring_slots, found.ring_bytes, extra, "drop_oldest").file_bytes
            for extra in (2 * area_bytes(found.max_line), 0)
        ]
        needed = sum(-(-size // _PAGE) * _PAGE for size in rings) + _SMALL_FILES
        shm = next(volume for volume in pod["spec"]["volumes"] if role(volume) == "shm")
        if bytes_of(shm["emptyDir"].get("sizeLimit", "0")) < needed:
            yield f"shm: the rings need {needed} bytes"
        for name in STAGES:
            if bytes_of(named(pod, name)["resources"]["limits"]["memory"]) < needed + _PROCESS_BYTES:
                yield f"{name}: its limit of memory does not hold the rings and the process"


def claimed_bytes(documents: list[Document], workload: Document) -> int:
    """Of the claim that KMQ_DATA lies on."""
    claims = {claim["metadata"]["name"]: claim for claim in of_kind(documents, "PersistentVolumeClaim")}
    volumes = {
        role(volume): claims.get(volume.get("persistentVolumeClaim", {}).get("claimName"))
        for volume in workload["spec"]["template"]["spec"]["volumes"]
    }
    volumes |= {role(claim["metadata"]): claim for claim in workload["spec"].get("volumeClaimTemplates", [])}
    claim = volumes.get("data")
    return bytes_of(claim["spec"]["resources"]["requests"]["storage"]) if claim else 0


def the_disk_is_never_full(documents: list[Document]) -> Iterator[str]:
    """Producers are refused before the claim is full, and retention keeps so many busy partitions away from that."""
    for pod, workload in brokers(documents):
        found, size = settings_of(documents, named(pod, "durability")), claimed_bytes(documents, workload)
        if not 0 < found.data_quota <= _QUOTA_SHARE * size:
            yield f"KMQ_DATA_QUOTA={found.data_quota} is not below {_QUOTA_SHARE} of the claim of {size} bytes"
        if not 0 < 4 * found.segment_bytes <= found.retention_bytes:
            yield f"KMQ_SEGMENT_BYTES={found.segment_bytes} is more than a quarter of KMQ_RETENTION_BYTES"
        wal = max(found.retention_bytes, _UNCHECKED_WAL) + found.segment_bytes
        if wal + _BUSY_PARTITIONS * found.retention_bytes + _ON_THE_WAY > found.data_quota:
            yield f"KMQ_RETENTION_BYTES={found.retention_bytes}: {_BUSY_PARTITIONS} partitions pass the quota"
        if found.retention_age == float("inf") or found.segment_age > found.retention_age:
            yield "what is old stays for ever"


def resources_are_said(documents: list[Document]) -> Iterator[str]:
    """Requests of both, a limit of memory, none of CPU."""
    for pod in pods(documents):
        for container in containers(pod):
            resources = container.get("resources", {})
            if set(resources.get("requests", {})) < {"cpu", "memory"}:
                yield f"{container['name']} requests nothing"
            if "memory" not in resources.get("limits", {}):
                yield f"{container['name']} may take all the memory"


def containers_are_the_processes(documents: list[Document]) -> Iterator[str]:
    """Each runs what its name says, all out of one image. Native sidecars start from the back and end from the front."""
    for pod, _ in brokers(documents):
        images = {named(pod, name)["image"] for name in processes(pod)}
        if len(images) != 1 or not all(":" in image.rpartition("/")[2] for image in images):
            yield f"not one image of a version: {sorted(images)}"
        sidecars = [c for c in pod["spec"].get("initContainers", []) if role(c) in PROCESSES]
        names = [c["name"] for c in pod["spec"]["containers"]]
        if sidecars:
            if [*map(role, sidecars)] != ["gateway", *reversed(STAGES)]:
                yield f"sidecars start as {[*map(role, sidecars)]}"
            if any(c.get("restartPolicy") != "Always" for c in sidecars):
                yield "an init container is no sidecar"
        elif names != [*processes(pod)]:
            yield f"containers are {names}"
        for name in processes(pod):
            if named(pod, name)["command"] != ["python", "-m", MODULES[name]]:
                yield f"{name} runs {named(pod, name)['command']}"


def probes_ask_their_own_process(documents: list[Document]) -> Iterator[str]:
    """Startup and liveness of each; a silence of two to three LIVE_S kills, and the dead are not waited for."""
    for pod, _ in brokers(documents):
        for name in processes(pod):
            container = named(pod, name)
            for kind, word in (("startupProbe", "live"), ("livenessProbe", "live"), ("readinessProbe", "ready")):
                probe = container.get(kind, {})
                if kind == "readinessProbe" and ("httpGet" in probe or not probe):
                    continue
                if probe.get("exec", {}).get("command") != ["python", "-m", "kmq.probe", word, name]:
                    yield f"{kind} of {name} asks {probe}"
            liveness, startup = container.get("livenessProbe", {}), container.get("startupProbe", {})
            if (liveness.get("periodSeconds"), liveness.get("failureThreshold")) != (LIVE_S, 2):
                yield f"{name} is not killed after 20 to 30 s of silence"
            if not 0 < liveness.get("terminationGracePeriodSeconds", GRACE_S) <= 2:
                yield f"{name} is waited for when it hangs"
            if startup.get("periodSeconds", 10) > 2 or startup.get("failureThreshold", 3) < 60:
                yield f"{name} has no time to start"
        readiness = named(pod, "gateway").get("readinessProbe", {})
        if readiness.get("httpGet", {}).get("path", "/readyz") != "/readyz" or not readiness:
            yield "nobody asks whether the broker is ready"


def the_drain_is_waited_for(documents: list[Document]) -> Iterator[str]:
    """All at once in a pod of our own; one after the other as sidecars, after the application."""
    for pod, _ in brokers(documents):
        grace_s = pod["spec"].get("terminationGracePeriodSeconds")
        if any(c.get("restartPolicy") == "Always" for c in pod["spec"].get("initContainers", [])):
            if (grace_s or 0) < GRACE_S + DRAIN_S * len(STAGES):
                yield f"{grace_s} s are not enough for the stages one after the other"
        elif grace_s != GRACE_S and REPLICA not in processes(pod):
            yield f"the grace period is {grace_s}, GRACE_S is {GRACE_S}"


def pods_are_restricted(documents: list[Document]) -> Iterator[str]:
    """The Pod Security Standard `restricted`, one uid for everybody, and a root that cannot be written."""
    for_all = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    for_each = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    ids = {"runAsUser": 10001, "runAsGroup": 10001}
    for pod in pods(documents):
        spec = pod["spec"]
        of_pod = spec.get("securityContext", {})
        if not for_all.items() <= of_pod.items() or "fsGroup" not in of_pod:
            yield f"the pod: {of_pod}"
        for container in containers(pod):
            own = container.get("securityContext", {})
            if {key: value for key, value in (for_all | own).items() if key not in ids} != for_all | for_each:
                yield f"{container['name']}: {own}"
            if role(container) in MODULES and not ids.items() <= (of_pod | own).items():
                yield f"{container['name']} runs as {of_pod | own}"
            if any("hostPort" in port for port in container.get("ports", [])):
                yield f"{container['name']} takes a port of the node"
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.get(name):
                yield f"the pod has {name}"
        allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected", "downwardAPI"}
        for volume in spec.get("volumes", []):
            if set(volume) - {"name"} - allowed:
                yield f"volume {volume['name']} is of a kind that restricted forbids"


def pods_keep_to_themselves(documents: list[Document]) -> Iterator[str]:
    """No token of the API server, no service links; stages see each other's pids."""
    for pod, _ in brokers(documents):
        spec = pod["spec"]
        if spec.get("automountServiceAccountToken") is not False:
            yield "the pod has a token of the API server"
        if spec.get("enableServiceLinks") is not False:
            yield "the pod is given service links"
        if spec.get("shareProcessNamespace") is not True:
            yield "a pid means another process in each container"


def addresses_in_arguments_are_ports(documents: list[Document]) -> Iterator[str]:
    """`127.0.0.1:<port>` in a command is one that a process of the pod listens on."""
    for pod, _ in brokers(documents):
        found = settings_of(documents, named(pod, "gateway"))
        for container in containers(pod):
            for number in re.findall(r"127\.0\.0\.1:(\d+)", " ".join(container.get("command", []))):
                if int(number) not in (found.port, found.grpc_port, found.http_port):
                    yield f"{container['name']}: nobody listens on {number}"


def a_shard_survives_its_upgrade(documents: list[Document]) -> Iterator[str]:
    """A leader hands over within the grace period; replicas find each other before they are ready; one ends at a time."""
    for pod, workload in brokers(documents):
        if REPLICA not in processes(pod):
            continue
        spec, replica = workload["spec"], named(pod, REPLICA)
        if (spec["replicas"], spec["podManagementPolicy"]) not in ((3, "Parallel"), (5, "Parallel")):
            yield f"{spec['replicas']} replicas, {spec['podManagementPolicy']}"
        command = replica.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        timeout = values.parse_duration(command[-1]) if command[-2:-1] == ["--timeout"] else float("inf")
        grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
        if command[:4] != ["kmq", "cluster", "resign", "--wait"] or grace_s != GRACE_S + timeout:
            yield f"preStop does not hand over within the grace period: {command}"
        governing = [s for s in of_kind(documents, "Service") if s["metadata"]["name"] == spec["serviceName"]]
        if not all(s["spec"].get("publishNotReadyAddresses") for s in governing):
            yield "a replica is found only once it is ready, and is ready only once it was found"
        given = environment(documents, replica)
        host = given.get("KMQ_ADVERTISE", "").replace("$(PODS_SERVICE)", given.get("PODS_SERVICE", ""))
        if host != f"$(POD_NAME).{spec['serviceName']}":
            yield "a replica is not reached by its pod's name"
        budgets = [each["spec"].get("maxUnavailable") for each in of_kind(documents, "PodDisruptionBudget")]
        if budgets != [1]:
            yield f"{budgets} pods may be evicted at once"


def clients_of_kafka_are_told_a_name_that_stays(documents: list[Document]) -> Iterator[str]:
    """The pod's name, whatever its address is after a restart, with the number of the Service's port."""
    for pod, workload in brokers(documents):
        ports = ports_of(pod)
        if not {"kafka", "kafka-tls"} & ports.keys():
            continue
        gateway = named(pod, "gateway")
        given = environment(documents, gateway)
        told = settings_of(documents, gateway).kafka_advertise or {}
        wanted = f"$(POD_NAME).{workload['spec'].get('serviceName')}.$(POD_NAMESPACE)"
        for name, is_tls in (("kafka", False), ("kafka-tls", True)):
            host, port = told.get(is_tls, ("", 0))
            if name in ports and (host.replace("$(PODS_SERVICE)", given.get("PODS_SERVICE", "")), port) != (
                wanted,
                ports[name][1],
            ):
                yield f"clients of port {name} are told {host}:{port}"


def labels_are_the_recommended_ones(documents: list[Document]) -> Iterator[str]:
    """Every object of ours says what it is, of which broker, and that it is of KMQ; of others' workloads nothing is asked."""
    wanted = {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "part-of")}
    for document in documents:
        metadata = document["metadata"]
        missing = wanted - metadata.get("labels", {}).keys()
        if "kmq" in metadata["name"] and missing:
            yield f"{document['kind']} {metadata['name']} lacks {', '.join(sorted(missing))}"


def brokers_are_spread(documents: list[Document]) -> Iterator[str]:
    """Over zones and nodes, each broker's pods among themselves, and none waits for a balance."""
    for pod, workload in brokers(documents):
        spread = pod["spec"].get("topologySpreadConstraints", [])
        if not is_beside(pod) and {each["topologyKey"] for each in spread} != {
            "topology.kubernetes.io/zone",
            "kubernetes.io/hostname",
        }:
            yield "the brokers may all be in one zone or on one node"
        for each in spread:
            if each["whenUnsatisfiable"] != "ScheduleAnyway":
                yield "a broker waits for a node of its own"
            if each["labelSelector"]["matchLabels"] != workload["spec"]["selector"]["matchLabels"]:
                yield "pods of another broker count too"


CHECKS: tuple[Check, ...] = (
    settings_are_good,
    ports_are_those_of_the_settings,
    services_lead_to_the_ports,
    policy_lets_in_whom_it_should,
    monitor_finds_one_target_a_broker,
    a_tls_secret_is_enough,
    sidecars_are_monitored,
    volumes_are_where_the_settings_say,
    memory_holds_the_rings,
    the_disk_is_never_full,
    resources_are_said,
    containers_are_the_processes,
    probes_ask_their_own_process,
    the_drain_is_waited_for,
    pods_are_restricted,
    pods_keep_to_themselves,
    addresses_in_arguments_are_ports,
    a_shard_survives_its_upgrade,
    clients_of_kafka_are_told_a_name_that_stays,
    labels_are_the_recommended_ones,
    brokers_are_spread,
)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """As the API server reads a selector."""
    one_of = {each["key"]: each["values"] for each in selector.get("matchExpressions", [])}
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(key) in values for key, values in one_of.items()
    )
