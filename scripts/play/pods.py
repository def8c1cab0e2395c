"""All pods of an overlay: each replica of a StatefulSet or Deployment, in a network where names of Services lead to them."""

import itertools
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from play.engine import ROOT, PlayError, podman
from play.manifest import STAND_INS, Document, containers_of, image_of, names_of, pods_of, render
from play.network import Network, Place
from play.pod import PATIENCE_S, Pod

_numbers = itertools.count()


class Pods:
    """The pods by their names in a cluster, as a context manager: `with play_all("fleet") as pods: pods["kmq-0"]`."""

    def __init__(
        self, documents: list[Document], settings: dict[str, str] | None = None, restart_policy: str = "Always"
    ) -> None:
        manifests = pods_of(documents)
        self._images = {image_of(container) for pod in manifests for container in containers_of(pod)}
        self._network = Network(f"kmq-{os.getpid()}-network-{next(_numbers)}") if len(manifests) > 1 else None
        names: dict[str, list[int]] = {}
        for number, manifest in enumerate(manifests):
            for name in names_of(manifest, documents):
                names.setdefault(name, []).append(number)
        self._pods: dict[str, Pod] = {}
        for number in range(len(manifests)):
            place = Place(self._network, number, names) if self._network else None
            pod = Pod(documents, settings, restart_policy, number=number, place=place)
            self._pods[pod.role] = pod

    def __getitem__(self, name: str) -> Pod:
        return self._pods[name]

    @property
    def all(self) -> list[Pod]:
        return list(self._pods.values())

    def __enter__(self) -> "Pods":
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Play all pods at once; return when their containers have been started."""
        for image in self._images & {*STAND_INS.values()}:
            _make(image)
        if self._network:
            self._network.create()
        with ThreadPoolExecutor() as pool:
            list(pool.map(Pod.up, self.all))

    def down(self) -> None:
        """Remove everything of the pods."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(Pod.down, self.all))
        if self._network:
            self._network.remove()

    def begin_shard(self) -> None:
        """If the pods are brokers of a shard, begin it, as an operator does once; they are ready only after that."""
        brokers = [pod for pod in self.all if "replica" in pod.containers]
        command = ("kmq", "cluster", "init", "--brokers", ",".join(pod.role for pod in brokers))
        deadline = time.monotonic() + PATIENCE_S
        while brokers and (done := brokers[0].exec("replica", *command)).returncode:
            if time.monotonic() > deadline:
                raise PlayError(f"{' '.join(command)}: {done.stderr.strip()}\n{brokers[0].logs('replica')[-2000:]}")
            time.sleep(0.5)

    def wait_ready(self) -> None:
        """Wait until all readiness probes pass. Raises PlayError with the containers' output."""
        for pod in self.all:
            pod.wait_ready()


def _make(image: str) -> None:
    """Build an image that substitutes another one, unless it exists."""
    try:
        podman("image", "exists", image)
    except PlayError:
        name = image.partition("/kmq-")[2].partition(":")[0]
        command = f'eval "$(scripts/pod-setup)" && scripts/image {name}'
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise PlayError(f"scripts/image {name}: {done.stderr.strip()}") from None


def play_all(overlay: str | Path, *more: Document, restart_policy: str = "Always", **settings: str) -> Pods:
    """Return all pods of an overlay and further documents (Secrets, say), with other settings; not up yet."""
    return Pods([*render(overlay), *more], settings, restart_policy)
