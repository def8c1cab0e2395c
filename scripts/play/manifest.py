"""Converts manifests of a cluster to a form that podman accepts."""

import base64
import copy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from play.engine import ROOT, PlayError

ADAPTATIONS = {
    "StatefulSet, Deployment": "their pod template becomes a Pod for each replica: podman has no controllers",
    "DaemonSet": "one pod: this machine is one node",
    "Services": "where there are several pods, their names lead to them by /etc/hosts; nothing is balanced",
    "volumeClaimTemplates, emptyDir": "a directory of the pod's own: podman's emptyDir is one volume for all pods of a name",
    "emptyDir medium Memory": "a tmpfs of the size that sizeLimit says",
    "fsGroup": "those directories are made with that group: podman has no fsGroup",
    "volumes of Secrets, ConfigMaps": "a directory with the files: podman keeps both by name, for all pods and after them",
    "variables from Secrets": "are written into the pod, for the same reason",
    "variables with the pod's name": "are written into the pod, too: podman's pod has another name",
    "initContainers with restartPolicy Always": "containers, in the same order: podman has no native sidecars",
    "probes, lifecycle": "run from outside, by Pod.probe and Kubelet: podman never runs them",
    "ports": "left out: podman would open them on this machine; the pod's own address has them",
    "names": "each pod gets one of its own, so that many can run side by side; its hostname is that of the StatefulSet",
    "docker.io/hashicorp/consul": "an image with Debian's Consul 1.8 (scripts/image consul): there is no registry",
}
STAND_INS = {"docker.io/hashicorp/consul": "localhost/kmq-consul:dev"}  # by scripts/image <what is behind kmq->
Document = dict[str, Any]
_CONTROLLERS = ("StatefulSet", "Deployment", "DaemonSet", "Job")


def render(overlay: str | Path) -> list[Document]:
    """Return the documents of a kustomization as `kubectl apply -k` would send them. `fleet` means
    k8s/overlays/fleet.
    """
    is_name = not (ROOT / overlay).is_dir() and (ROOT / "k8s/overlays" / overlay).is_dir()
    command = ["kubectl", "kustomize", f"k8s/overlays/{overlay}" if is_name else str(overlay)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise PlayError(f"{' '.join(command)}: {done.stderr.strip()}")
    documents: Iterator[Document] = yaml.safe_load_all(done.stdout)
    return [document for document in documents if document]


def pods_of(documents: list[Document]) -> list[Document]:
    """Return every pod that controllers would make, as a Pod; those of a StatefulSet have their names in a cluster."""
    alone = [document for document in documents if document["kind"] == "Pod"]
    return [*alone, *(pod for each in documents if each["kind"] in _CONTROLLERS for pod in _replicas(each))]


def _replicas(controller: Document) -> Iterator[Document]:
    spec, name, is_set = controller["spec"], controller["metadata"]["name"], controller["kind"] == "StatefulSet"
    count = int(spec.get("replicas", 1))
    for number in range(count):
        pod = copy.deepcopy(spec["template"])
        named = f"{name}-{number}" if is_set or count > 1 else name
        if is_set:
            pod["spec"] |= {"hostname": named, "subdomain": spec["serviceName"]}
        for claim in spec.get("volumeClaimTemplates", []):
            of = claim["metadata"]["name"]
            claimed = {"name": of, "persistentVolumeClaim": {"claimName": f"{of}-{named}"}}
            pod["spec"].setdefault("volumes", []).append(claimed)
        metadata = pod.get("metadata", {}) | {"name": named}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}


def names_of(pod: Document, documents: list[Document]) -> list[str]:
    """Return the names by which other pods reach it: Services that select it, and its own name below a headless one."""
    labels, spec = pod["metadata"].get("labels", {}), pod["spec"]
    selectors = {d["metadata"]["name"]: d["spec"].get("selector") for d in documents if d["kind"] == "Service"}
    found = [name for name, selector in selectors.items() if selector and selector.items() <= labels.items()]
    if spec.get("subdomain") in found:
        found.append(f"{spec['hostname']}.{spec['subdomain']}")
    return found


def with_settings(documents: list[Document], settings: dict[str, str]) -> list[Document]:
    """Return the documents with these settings in the ConfigMap from which the pod takes its environment."""
    documents = copy.deepcopy(documents)
    maps = [d for d in documents if d["kind"] == "ConfigMap" and "KMQ_DATA" in d.get("data", {})]
    if settings and len(maps) != 1:
        raise PlayError(f"{len(maps)} ConfigMaps hold KMQ_DATA: which one do the settings go to?")
    for document in maps:
        document["data"].update(settings)
    return documents


def is_sidecar(container: Document) -> bool:
    return container.get("restartPolicy") == "Always"


def containers_of(pod: Document) -> list[Document]:
    """Return the containers that keep running: native sidecars first, in their order of start."""
    spec = pod["spec"]
    return [*filter(is_sidecar, spec.get("initContainers", [])), *spec["containers"]]


def image_of(container: Document) -> str:
    """Return the image that is played: the container's own, or its substitute."""
    image = str(container["image"])
    return STAND_INS.get(image.rpartition(":")[0], image)


_NAMESPACE = "default"


def _environment(container: Document, documents: list[Document], pod: str) -> list[Document]:
    """Return `env` with the values of Secrets and the pod's name; without optional ones that do not exist."""
    found: list[Document] = []
    fields = {"metadata.name": pod, "metadata.namespace": _NAMESPACE}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        wanted = source.get("secretKeyRef")
        if (path := source.get("fieldRef", {}).get("fieldPath")) in fields:
            found.append({"name": variable["name"], "value": fields[path]})
        elif "value" in variable:
            text = variable["value"]
            for each in found:
                text = text.replace(f"$({each['name']})", each.get("value", ""))
            found.append({"name": variable["name"], "value": text})
        elif wanted is None:
            found.append(variable)
        elif (value := secret_values(documents, wanted["name"]).get(wanted["key"])) is not None:
            found.append({"name": variable["name"], "value": value.decode()})
        elif not wanted.get("optional"):
            raise PlayError(f"{variable['name']}: no key {wanted['key']} in a Secret {wanted['name']}")
    return found


def secret_values(documents: list[Document], name: str) -> dict[str, bytes]:
    """Return key → value of a Secret; {} if it does not exist."""
    for document in documents:
        if document["kind"] == "Secret" and document["metadata"]["name"] == name:
            encoded = {key: base64.b64decode(text) for key, text in document.get("data", {}).items()}
            return encoded | {key: text.encode() for key, text in document.get("stringData", {}).items()}
    return {}


def adapted(
    manifest: Document, documents: list[Document], name: str, restart_policy: str, volumes: list[Document]
) -> Document:
    """Return the pod that podman plays (see ADAPTATIONS). `documents`: all documents of the overlay."""
    pod = copy.deepcopy(manifest)
    spec = pod["spec"]
    pod["metadata"] = {"name": name, "labels": pod["metadata"].get("labels", {})}
    spec["containers"] = containers_of(pod)
    spec["initContainers"] = [c for c in spec.get("initContainers", []) if not is_sidecar(c)]
    for container in spec["containers"]:
        for field in ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "restartPolicy", "ports"):
            container.pop(field, None)
        container["image"] = image_of(container)
        if "env" in container:
            container["env"] = _environment(container, documents, manifest["metadata"]["name"])
    spec.pop("subdomain", None)
    spec["volumes"] = volumes
    spec["restartPolicy"] = restart_policy
    return pod
