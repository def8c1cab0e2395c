"""k8s/Containerfile and Containerfile.spark, as they are read: tests/pod and tests/spark build them."""

import os
import re
import subprocess

import pytest
from brokers import ROOT

FILES = {name: (ROOT / "k8s" / name).read_text() for name in ("Containerfile", "Containerfile.spark")}
BROKER = FILES["Containerfile"]


def last_stage(text):
    return re.split(r"(?m)^FROM ", text)[-1]


def test_both_images_stand_on_one_base_that_is_named_in_one_line_each():
    bases = {tuple(re.findall(r"(?m)^ARG BASE=(\S+)$", text)) for text in FILES.values()}
    [(base,)] = bases
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+-slim(@sha256:[0-9a-f]{64})?", base)


@pytest.mark.parametrize("name", FILES)
def test_nothing_in_it_is_of_one_architecture(name):
    assert re.findall(r"(?i)amd64|x86|aarch64|arm64|--platform|TARGETARCH", FILES[name]) == []


def test_the_last_stage_of_the_broker_takes_three_trees_and_installs_nothing():
    stage = last_stage(BROKER)
    copied = dict(line.split()[2:] for line in re.findall(r"(?m)^COPY .*$", stage))
    assert copied == {"/opt/kmq/deps": "/opt/kmq/deps", "/root-files": "/", "/app": "/opt/kmq/app"}
    (run,) = re.findall(r"(?m)^RUN (.*)$", stage)
    assert re.fullmatch(r"echo '.*' >>/etc/passwd && echo '.*' >>/etc/group", run)


def test_the_home_of_the_user_is_not_the_volume():
    user = re.findall(r"kmq:x:10001:10001::([^:]*):", BROKER)
    assert user == ["/nonexistent"] and "KMQ_DATA=/data" in BROKER


TAG = "docker.io/library/python:3.13-slim"


@pytest.mark.parametrize(
    ("base", "labels", "is_named"),
    [
        (TAG, [f"base.name={TAG}"], True),
        (f"{TAG}@sha256:ab", [f"base.name={TAG}", "base.digest=sha256:ab"], False),
        ("localhost/kmq-base:bookworm", ["base.name=localhost/kmq-base:bookworm"], False),
    ],
)
def test_the_base_is_labelled_and_one_without_a_digest_is_named(base, labels, is_named):
    """The lines of scripts/image that do it, by bash itself."""
    script = (ROOT / "scripts/image").read_text()
    begin, end = script.index("label() {"), script.index("source=${SOURCE")
    lines = [line for line in script[begin:end].splitlines() if "git " not in line]
    command = "set -euo pipefail\noptions=()\nversion=1\n" + "\n".join(lines) + '\nprintf "%s\\n" "${options[@]}"'
    done = subprocess.run(
        ["bash", "-c", command], env={"BASE": base, "PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if ".base." in line]
    assert found == [f"org.opencontainers.image.{label}" for label in labels]
    assert ("is not pinned" in done.stderr) == is_named
