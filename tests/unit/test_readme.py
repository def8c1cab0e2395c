"""What the README says that the code knows better."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kmq import errors, record

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_every_exit_code_is_explained():
    text = re.search(r"Exit codes: (.*?)\n\n", README.read_text(), re.S)
    assert text and all(re.search(rf"\b{code}\b", text[1]) for code in errors.EXIT_NAMES)


def test_every_reason_for_dead_malformed_is_explained():
    lines = [b"", b"x", b"|a", b".a|", b"append|x", b"a|\0", b"!a|"]
    reasons = {record.refusal(line) for line in lines} | {"too_long", "no_newline"}
    assert len(reasons) == 9
    assert all(f"`{reason}`" in README.read_text() for reason in reasons)


def test_the_kustomization_of_your_own_renders(tmp_path):
    if not shutil.which("kubectl"):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("kubectl renders it, and there is none")
    block = re.search(r"```yaml\n(resources: .*?)```", README.read_text(), re.S)
    assert block
    mine = block[1].replace("../kmq", os.path.relpath(ROOT, tmp_path))
    (tmp_path / "kustomization.yaml").write_text(mine)
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "image: registry.example.com/kmq:0.1.0" in done.stdout and 'KMQ_MAX_TOPICS: "500"' in done.stdout
    assert "kind: ServiceMonitor" in done.stdout and "containerPort: 5443" in done.stdout
