"""The image by itself."""

import json
import os
import re
import subprocess
import tomllib
from datetime import datetime

import play as player
import pytest

import kmq
from kmq.gateway.http.server import DOCS

ROOT = player.ROOT
# On top of the base image: what a node pulls for KMQ.
LARGEST_MIB = int(re.findall(r"at most (\d+) MiB on top", (player.ROOT / "docs/kubernetes.md").read_text())[0])
TOOLS = (
    "pip",
    "cc",
    "gcc",
    "c++",
    "clang",
    "ld",
    "as",
    "make",
    "git",
)  # that nobody has installed, and a base may not bring


def inspect(image: str) -> dict:
    return json.loads(player.podman("inspect", image))[0]


def test_the_image_runs_as_nobody_in_particular_and_is_small(image):
    found = inspect(image)
    assert found["Config"]["User"] == "10001:10001"
    base = inspect(
        subprocess.run([ROOT / "scripts" / "pod-setup"], capture_output=True, text=True)
        .stdout.split("BASE=")[1]
        .strip()
    )
    assert found["RootFS"]["Layers"][: len(base["RootFS"]["Layers"])] == base["RootFS"]["Layers"]
    assert found["Size"] - base["Size"] < LARGEST_MIB << 20
    listed = player.podman("run", "--rm", "--network=none", image, "ls", "/opt/kmq/deps").split()
    assert {"grpc", "h11"} <= set(listed) and not {"pip", "setuptools", "pyspark"} & set(listed)


def test_of_the_checkout_the_image_has_the_packages_and_nothing_else(image):
    script = f"echo HOME=$HOME; for tool in {' '.join(TOOLS)}; do command -v $tool; done; find /opt/kmq/app -type f"
    listed = player.podman("run", "--rm", "--network=none", image, "sh", "-c", script).split()
    assert listed[0] == "HOME=/nonexistent", "what a tool keeps for its user is not the broker's data"
    assert [path for path in listed if path.rpartition("/")[2] in TOOLS] == []
    files = [path for path in listed if path.startswith("/opt/kmq/app/")]
    assert {path.split("/")[4] for path in files if ".dist-info/" not in path} == {
        "bin",
        "kmq",
        "pyspark_kmq",
        "stages",
    }
    console = {f"/opt/kmq/app/kmq/gateway/console/docs/{path.name}" for path in DOCS.iterdir()}  # it serves the runbook
    assert {path for path in files if re.search(r"/tests?/|/docs/|\.(c|h|so|md)$|/test_", path)} == console


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python -m kmq.cluster.agent", "KMQ_CONSUL and KMQ_CLUSTER not set"),
        ("kmq fleet status", "KMQ_CONSUL and KMQ_CLUSTER not set"),
        ("kmq bq status", "KMQ_CONSUL and KMQ_CLUSTER not set"),
    ],
)
def test_the_image_holds_what_a_fleet_needs(image, command, said):
    options = ["--rm", "--network=none", "--read-only", "--cap-drop=all", "--volume=/data", "--volume=/pipes"]
    with pytest.raises(player.PlayError, match=said):
        player.podman("run", *options, image, *command.split())


def test_labels_say_which_version_of_what_it_is(image):
    found = {
        name.removeprefix("org.opencontainers.image."): text
        for name, text in inspect(image)["Config"]["Labels"].items()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (found["version"], found["licenses"]) == (kmq.__version__, project["license"]["text"])
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    base = (
        subprocess.run([ROOT / "scripts" / "pod-setup"], capture_output=True, text=True)
        .stdout.split("BASE=")[1]
        .strip()
    )
    assert found["base.name"] == base and "base.digest" not in found, "made here: no registry has a digest of it"
    assert found["revision"] == revision.strip() and datetime.fromisoformat(found["created"])
    assert found.get("source", "https://").startswith(("https://", "http://")) and "@" not in found.get("source", "")


def test_the_sbom_beside_the_image_names_all_that_is_in_it(image):
    sbom = json.loads((ROOT / "build/kmq.cdx.json").read_text())
    listed = {(each["purl"].partition("/")[0], each["name"], each["version"]) for each in sbom["components"]}
    script = r"""
import importlib.metadata, platform, subprocess
for each in importlib.metadata.distributions(path=["/opt/kmq/app", "/opt/kmq/deps"]):
    print("pkg:pypi", each.metadata["Name"], each.version)
print("pkg:generic", "cpython", platform.python_version())
print(subprocess.check_output(["dpkg-query", "-W", "-f", "pkg:deb ${Package} ${Version}\n"], text=True))
"""
    installed = player.podman("run", "--rm", "--network=none", image, "python", "-c", script)
    assert listed == {tuple(line.split()) for line in installed.splitlines() if line}
    wheels = {path.name.partition("-")[0].lower() for path in ROOT.glob("build/image/*/*.whl")}
    assert wheels == {name.replace("-", "_").lower() for kind, name, _ in listed if kind == "pkg:pypi"}


def test_one_container_is_a_whole_broker_with_a_read_only_root(image):
    """What `podman run` of the image gives: the supervisor, and its drain at SIGTERM."""
    options = ["--network=none", "--read-only", "--cap-drop=all", "--volume=/data", "--volume=/pipes"]
    name = f"kmq-alone-{os.getpid()}"
    player.podman("run", "-d", f"--name={name}", *options, image)
    try:
        probe = [
            "exec",
            name,
            "sh",
            "-c",
            "until kmq status >/dev/null 2>&1; do sleep 0.1; done; echo 'a.b|0|1|hi' >/pipes/raw",
        ]
        player.podman(*probe)
        read = ["exec", name, "sh", "-c", "until grep -h hi /data/a.log 2>/dev/null; do sleep 0.1; done"]
        assert player.podman(*read).startswith("1|")
        player.podman("stop", "-t", "20", name)
        assert inspect(name)["State"]["ExitCode"] == 0
    finally:
        player.podman("rm", "-f", "-v", "-t", "0", name)


@pytest.mark.soak
def test_the_same_files_give_the_same_layers(image):
    def layers(tag: str) -> list[str]:
        setup = subprocess.run([ROOT / "scripts" / "pod-setup"], capture_output=True, text=True, check=True)
        env = os.environ | dict(pair.split("=", 1) for pair in setup.stdout.split()[1:]) | {"NO_CACHE": "1"}
        subprocess.run([ROOT / "scripts" / "image", "broker", tag], env=env, check=True, capture_output=True)
        try:
            return inspect(tag)["RootFS"]["Layers"]
        finally:
            player.podman("rmi", "-f", tag)

    assert layers("localhost/kmq:again") == inspect(image)["RootFS"]["Layers"]
