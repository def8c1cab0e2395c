"""The volumes of a pod: directories of this machine."""

import os
import shutil
import subprocess
from pathlib import Path

from play.engine import PlayError
from play.manifest import Document, secret_values


class Volumes:
    """Volume by name: its directory, and whether it outlives the pod."""

    def __init__(self, home: Path, source: list[Document], given: dict[str, Path]) -> None:
        """`source`: the documents with Secrets and ConfigMaps. `given`: volumes of another pod that this pod shares."""
        self._home, self._source = home, source
        self.paths = dict(given)
        self._persistent = set(given)

    def clear(self) -> None:
        """Empty the volumes that do not outlive the pod."""
        for name, path in self.paths.items():
            if name not in self._persistent:
                _empty(path)

    def adapted(self, volume: Document, group: int) -> Document:
        """Create a directory for the volume on this machine, and return the volume as that directory."""
        name = volume["name"]
        path = self.paths.get(name) or self._home / name
        if name not in self.paths:
            self._make(path, volume, group)
            self.paths[name] = path
        return {"name": name, "hostPath": {"path": str(path), "type": "Directory"}}

    def _make(self, path: Path, volume: Document, group: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        empty = volume.get("emptyDir", {})
        if empty.get("medium") == "Memory":
            size = empty.get("sizeLimit", "64Mi").removesuffix("i").lower()
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", f"kmq-{volume['name']}", str(path)], check=True
            )
        if "persistentVolumeClaim" in volume:
            self._persistent.add(volume["name"])
        for kind, field in (("Secret", "secretName"), ("ConfigMap", "name")):
            what = volume.get(kind[0].lower() + kind[1:])
            if what:
                self._write_files(path, kind, what[field], what, group)
                self._persistent.add(volume["name"])
        os.chown(path, 0, group)
        path.chmod(0o2775)

    def _write_files(self, path: Path, kind: str, name: str, what: Document, group: int) -> None:
        texts = secret_values(self._source, name) if kind == "Secret" else self._map(name)
        if not texts and not what.get("optional"):
            raise PlayError(f"no {kind} {name} among the documents")
        for key, text in texts.items():
            (path / key).write_bytes(text)
            os.chown(path / key, 0, group)
            (path / key).chmod(int(what.get("defaultMode", 0o644)) | 0o040)

    def _map(self, name: str) -> dict[str, bytes]:
        maps = (d for d in self._source if d["kind"] == "ConfigMap" and d["metadata"]["name"] == name)
        return {key: text.encode() for document in maps for key, text in document.get("data", {}).items()}


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
