"""Fixtures: a pod that is certainly cleaned up, and a source of randomness that says its seed."""

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.load import Load
from chaos.pod import Pod


@pytest.fixture
def rng() -> random.Random:
    """Random moments; CHAOS_SEED=<n> repeats a run as far as the scheduler lets it."""
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"CHAOS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_pod(tmp_path: Path, cleanup: ExitStack) -> Callable[..., Pod]:
    """Pods with private settings; make_pod(RB_SLOTS=16)."""
    made = 0

    def make(**settings: object) -> Pod:
        nonlocal made
        made += 1
        pod = Pod(tmp_path / f"pod{made}", **settings)
        cleanup.callback(pod.close)
        return pod

    return make


@pytest.fixture
def loads(cleanup: ExitStack) -> Callable[[Load], Load]:
    """Start a writer; it ends with the test, whatever happens."""

    def start(load: Load) -> Load:
        cleanup.callback(load.enough.set)
        load.start()
        return load

    return start


@pytest.fixture(scope="module")
def strace() -> str:
    """Return the path of strace, installed if that is possible; skip the test if it cannot trace (in CI: fail)."""
    if not shutil.which("strace") and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "-o", "DPkg::Lock::Timeout=100", "install", "-qq", "strace"], capture_output=True, timeout=120
        )
    found = shutil.which("strace")
    if found and subprocess.run([found, "-qq", "-e", "trace=none", "true"], capture_output=True).returncode == 0:
        return found
    reason = "strace is not there, or may not trace: fdatasync cannot be made to fail"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
