"""Real pods: the image is built once per session, each pod is played from the manifests that users apply."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import play as player  # noqa: E402

Play = Callable[..., player.Pod]
SETUP_S = 1800.0  # packages come from a registry that may be slow


def pytest_report_header() -> list[str]:
    return ["pods: adapted for podman", *(f"  {what}: {why}" for what, why in player.ADAPTATIONS.items())]


def unable(why: str) -> None:
    """In CI a pod test that does not run is a failure."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test has to wait for podman and the image: minutes on a fresh machine, which are not the test's."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(300, func_only=True))


@pytest.fixture(scope="session")
def image() -> str:
    """The image of this checkout, as `make image` builds it."""
    setup = subprocess.run([ROOT / "scripts" / "pod-setup"], capture_output=True, text=True, timeout=SETUP_S)
    if setup.returncode == os.EX_CONFIG:
        unable(setup.stderr.strip())
    assert setup.returncode == 0, setup.stderr
    env = os.environ | dict(pair.split("=", 1) for pair in setup.stdout.split()[1:])
    built = subprocess.run(
        [ROOT / "scripts" / "image", "broker"], env=env, capture_output=True, text=True, timeout=SETUP_S
    )
    assert built.returncode == 0, built.stderr
    return built.stdout.strip()


def _player(stack: ExitStack) -> Play:
    def make(
        overlay: str = "k8s/overlays/dev", *more: player.Document, ready: bool = True, **settings: Any
    ) -> player.Pod:
        pod = stack.enter_context(player.play(overlay, *more, **settings))
        if ready:
            pod.wait_ready()
        return pod

    return make


@pytest.fixture
def play(image: str) -> Iterator[Play]:
    """`play("k8s/overlays/dev", RB_SLOTS="64")`: a pod that is up and ready, gone after the test."""
    with ExitStack() as stack:
        yield _player(stack)


@pytest.fixture(scope="module")
def play_once(image: str) -> Iterator[Play]:
    """The same, for pods that the tests of a module share."""
    with ExitStack() as stack:
        yield _player(stack)


@pytest.fixture(scope="module")
def play_all_once(image: str) -> Iterator[Callable[..., player.Pods]]:
    """`play_all_once("fleet")`: all pods of an overlay, up and ready."""
    with ExitStack() as stack:

        def make(overlay: str | Path, *more: player.Document, **settings: Any) -> player.Pods:
            pods = stack.enter_context(player.play_all(overlay, *more, **settings))
            pods.begin_shard()
            pods.wait_ready()
            return pods

        yield make
