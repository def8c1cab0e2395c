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


def test_the_kustomization_of_your_own_renders(tmp_path):
    if not shutil.which("kubectl"):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("kubectl renders it, and there is none")
    block = re.search(r"```yaml\n(resources: .*?)```", PAGE.read_text(), re.S)
    assert block
    mine = block[1].replace("../kmq", os.path.relpath(ROOT, tmp_path))
    (tmp_path / "kustomization.yaml").write_text(mine)
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"image: registry.example.com/kmq:{__version__}" in done.stdout and 'KMQ_MAX_TOPICS: "500"' in done.stdout
    assert "kind: ServiceMonitor" in done.stdout and "containerPort: 5443" in done.stdout
