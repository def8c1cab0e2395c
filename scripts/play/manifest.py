"""What a cluster takes, put in terms that podman takes."""

import copy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from play.engine import ROOT, PlayError

ADAPTATIONS = {
    "StatefulSet, Deployment": "their pod template becomes one Pod: podman has no controllers",
    "volumeClaimTemplates, emptyDir": "a directory of the pod's own: podman's emptyDir is one volume for all pods of a name",
    "emptyDir medium Memory": "a tmpfs of the size that sizeLimit says",
    "fsGroup": "those directories are made with that group: podman has no fsGroup",
    "volumes of Secrets, ConfigMaps": "a directory with the files: podman keeps both by name, for all pods and after them",
    "initContainers with restartPolicy Always": "containers, in the same order: podman has no native sidecars",
    "probes, lifecycle": "run from outside, by Pod.probe and Kubelet: podman never runs them",
    "ports": "left out: podman would open them on this machine; the pod's own address has them",
    "names": "the pod gets a name of its own, so that many can run side by side",
}
Document = dict[str, Any]


def render(overlay: str | Path) -> list[Document]:
    """The documents of a kustomization, as `kubectl apply -k` would send them."""
    command = ["kubectl", "kustomize", str(overlay)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise PlayError(f"{' '.join(command)}: {done.stderr.strip()}")
    documents: Iterator[Document] = yaml.safe_load_all(done.stdout)
    return [document for document in documents if document]


def template_of(documents: list[Document]) -> Document:
    """The one pod among them: a Pod, or the template of a controller, as a Pod."""
    for document in documents:
        if document["kind"] in ("StatefulSet", "Deployment", "Job"):
            pod = copy.deepcopy(document["spec"]["template"])
            for claim in document["spec"].get("volumeClaimTemplates", []):
                name = claim["metadata"]["name"]
                claimed = {"name": name, "persistentVolumeClaim": {"claimName": name}}
                pod["spec"].setdefault("volumes", []).append(claimed)
            return {"apiVersion": "v1", "kind": "Pod", "metadata": pod.get("metadata", {}), "spec": pod["spec"]}
    raise PlayError("no StatefulSet, Deployment or Job among the documents")


def with_settings(documents: list[Document], settings: dict[str, str]) -> list[Document]:
    """The same, with these settings in the ConfigMap that the pod takes its environment from."""
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
    """Those that stay: native sidecars first, as they start."""
    spec = pod["spec"]
    return [*filter(is_sidecar, spec.get("initContainers", [])), *spec["containers"]]


def adapted(manifest: Document, name: str, restart_policy: str, volumes: list[Document]) -> Document:
    """Return the pod that podman plays (see ADAPTATIONS)."""
    pod = copy.deepcopy(manifest)
    spec = pod["spec"]
    pod["metadata"] = {"name": name, "labels": pod["metadata"].get("labels", {})}
    spec["containers"] = containers_of(pod)
    spec["initContainers"] = [c for c in spec.get("initContainers", []) if not is_sidecar(c)]
    for container in spec["containers"]:
        for field in ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "restartPolicy", "ports"):
            container.pop(field, None)
    spec["volumes"] = volumes
    spec["restartPolicy"] = restart_policy
    return pod
