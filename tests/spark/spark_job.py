"""k8s/overlays/spark as it is applied, and its Job's driver as a process here: command, arguments, environment, mounted files."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from brokers import ROOT

OVERLAY = ROOT / "k8s" / "overlays" / "spark"

Document = dict[str, Any]  # of a manifest, or a part of one


@cache
def rendered(overlay: Path = OVERLAY) -> list[Document]:
    """The documents of an overlay."""
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def find(kind: str, name: str = "", overlay: Path = OVERLAY) -> Document:
    """The one document of that kind, and name where there are several."""
    (found,) = (each for each in rendered(overlay) if each["kind"] == kind and name in ("", each["metadata"]["name"]))
    return found


def properties() -> dict[str, str]:
    """spark.properties as pairs."""
    lines = find("ConfigMap")["data"]["spark.properties"].splitlines()
    return dict(line.split(None, 1) for line in lines if line and not line.startswith("#"))


class Here:
    """A container of the overlay as a process of this machine: its mounts are directories under `root`."""

    def __init__(self, root: Path, **places: str) -> None:
        """`places`: text of the manifests (_ for - and .) → what stands for it here."""
        self.root = root
        self.places = {"/opt/kmq/app": str(ROOT)}
        for path in ("/etc/spark", "/archive", "/scratch"):
            (root / path[1:]).mkdir(parents=True, exist_ok=True)
            self.places[path] = str(root / path[1:])
        for name, text in find("ConfigMap")["data"].items():
            (root / "etc/spark" / name).write_text(self(text))

    def __call__(self, text: str) -> str:
        """A text of the manifests with the paths that are meant here."""
        for path, here in self.places.items():
            text = re.sub(rf"{path}(?=[/\s\"']|$)", here, text)
        return text

    def environment(self, container: Document, fields: Mapping[str, str]) -> dict[str, str]:
        """Of a process for this container; `fields`: what the kubelet would put for a fieldRef."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KMQ_", "RB_", "SPARK_"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return kept | {"PATH": path, "HOME": str(self.root)} | self.variables(container, fields)

    def variables(self, container: Document, fields: Mapping[str, str]) -> dict[str, str]:
        """The container's own variables."""
        return {
            each["name"]: self(each["value"]) if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in container.get("env", ())
        }


def driver() -> Document:
    """The driver's container."""
    container: Document
    (container,) = find("Job")["spec"]["template"]["spec"]["containers"]
    return container


def arguments(here: Here, env: Mapping[str, str]) -> list[str]:
    """The driver's command line, its variables put in."""
    words = [*driver()["command"], *driver()["args"]]
    return [here(re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word)) for word in words]
