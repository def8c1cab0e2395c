"""`make dist`: the wheel in an environment without a checkout, where a broker runs; what the sdist holds; the extras."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from brokers import ROOT, Broker

from kmq.gateway.http.server import DOCS


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist)."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run([ROOT / "scripts" / "dist", out], capture_output=True, text=True, timeout=280)
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        pytest.skip("hatchling cannot be had here")
    assert done.returncode == 0, done.stderr
    sdist, wheel = sorted(map(Path, done.stdout.split()), key=lambda path: path.suffix)
    assert f"pip install '{wheel}[gateway]'" in done.stderr
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A broker whose `kmq` is the wheel's, with what it depends on from the environment of the tests."""
    root = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True, timeout=120)
    python = root / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, built[0]], check=True, timeout=120)
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    (site / "dependencies.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # an editable install there is not followed
    made = Broker(root / "broker")
    made.env = {name: value for name, value in made.env.items() if name != "PYTHONPATH"}
    made.env["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    yield made
    made.close()


def test_a_broker_of_the_wheel_stores_messages_and_gives_them_out(installed):
    where = installed.run("python", "-c", "import kmq, stages; print(kmq.__file__, stages.__file__)").stdout
    assert str(ROOT) not in where and where.count("site-packages") == 2
    installed.up()
    assert installed.kmq("produce", "test.probe", "-m", "hello", "--acks").stdout == "stored 1, last seq 1\n"
    assert installed.kmq("consume", "test").stdout == "hello\n"
    checks = installed.kmq("doctor")
    assert checks.returncode in (0, 1) and "Traceback" not in checks.stderr and "disk: " in checks.stdout
    assert installed.get("/readyz")[0] == installed.get("/")[0] == installed.get("/console/operations.md")[0] == 200
    installed.down()


def test_the_wheel_has_the_extras_and_no_tests(built):
    wheel = zipfile.ZipFile(built[0])
    assert {name.partition("/")[0] for name in wheel.namelist() if "dist-info" not in name} == {
        "kmq",
        "stages",
        "pyspark_kmq",
    }
    documents = {name for name in wheel.namelist() if name.endswith(".md") and "dist-info" not in name}
    assert documents == {f"kmq/gateway/console/docs/{path.name}" for path in DOCS.iterdir()}
    page = wheel.read("kmq/gateway/console/docs/operations.md")
    assert page == (ROOT / "docs/operations.md").read_bytes(), "the file, and not the link that the checkout has"
    [metadata] = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    extras = {
        line.removeprefix("Provides-Extra: ") for line in metadata.splitlines() if line.startswith("Provides-Extra: ")
    }
    assert extras == set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_the_sdist_has_what_builds_the_same_wheel(built):
    names = {name.partition("/")[2] for name in tarfile.open(built[1]).getnames()}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "kmq/__init__.py",
        "kmq/gateway/kmq.proto",
        "stages/ingress.py",
    } <= names
    assert not any(name.startswith((".venv", "data/", "build/", ".ci")) for name in names)
