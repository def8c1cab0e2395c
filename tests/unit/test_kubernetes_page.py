"""What docs/kubernetes.md asks to paste into a kustomization of your own."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

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
