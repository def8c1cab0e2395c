"""The version is written once, in kmq/__init__.py; what else shows it agrees."""

import re
import tomllib
from pathlib import Path

import kmq

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"(?:newTag: |\bkmq:|\bkmq-)(\d+\.\d+\.\d+)")


def shown():
    """(path, version) of each tag or package of KMQ in manifests and documents."""
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "k8s").rglob("*")]
    for path in paths:
        if path.is_file():
            yield from ((str(path.relative_to(ROOT)), version) for version in SHOWN.findall(path.read_text()))


def test_the_package_takes_its_version_from_the_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["hatch"]["version"] == {"path": "kmq/__init__.py"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", kmq.__version__)


def test_manifests_and_documents_show_the_version_of_the_module():
    found = set(shown())
    assert {version for _, version in found} == {kmq.__version__}, found
    assert {"k8s/base/kustomization.yaml", "k8s/components/sidecar/kustomization.yaml"} <= {path for path, _ in found}
