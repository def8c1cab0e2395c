"""`make shard-demo`: its three faults cost no acknowledged message; and where no Consul can be had it says so, once."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_fault_of_the_demo_is_survived():
    done = subprocess.run([sys.executable, "scripts/shard_demo.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    acked, stored = re.findall(r"(?m)^acked +([\d,]+), stored ([\d,]+), twice 0$", done.stdout)[0]
    assert acked == stored and int(acked.replace(",", "")) > 1000, done.stdout
    assert "the same bytes on all three" in done.stdout
    assert all(text in done.stdout for text in ("kill -9 of", "is cut off", "is wiped", "has all of it again"))


def test_without_a_consul_the_demo_ends_at_once_with_the_reason(tmp_path):
    """A copy of the two scripts, so that no Consul of this checkout is found, and a PATH without apt."""
    for name in ("shard_demo.py", "consul-setup"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "bin").mkdir()
    for name in ("bash", "env", "dirname", "mkdir", "flock"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    environment = os.environ | {"PATH": str(tmp_path / "bin"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "scripts" / "shard_demo.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78 and done.stdout == ""
    (said,) = done.stderr.splitlines()
    assert said.startswith("shard-demo: a shard needs a Consul: consul-setup: there is no consul on PATH"), said
