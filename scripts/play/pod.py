"""One pod: how it starts, lives and ends, and what tests can do with it."""

import contextlib
import itertools
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from play.engine import HOME, PlayError, address_of, inspect, is_there, podman, podman_to_the_end, remove, run_podman
from play.manifest import Document, adapted, containers_of, pods_of, render, with_settings
from play.network import Place
from play.probes import Exec, exec_probe, http_probe, tcp_probe
from play.volumes import Volumes

PATIENCE_S = 60.0
_numbers = itertools.count()


class Pod:
    """One pod, as a context manager: `with Pod(documents) as pod`."""

    def __init__(
        self,
        documents: list[Document],
        settings: dict[str, str] | None = None,
        restart_policy: str = "Always",
        volumes: dict[str, Path] | None = None,
        number: int = 0,
        place: Place | None = None,
    ) -> None:
        """`volumes`: volumes of another pod that this one shares, by their names here, as when both name one claim.

        `number`: which pod of the documents. `place`: its place in a network; without it podman's default network.
        """
        self.name, self.restart_policy = f"kmq-{os.getpid()}-{next(_numbers)}", restart_policy
        self.home = HOME / self.name
        self.source = with_settings(documents, settings or {})
        self.manifest = _one_of(self.source, number)  # as in the cluster: the probes are read from here
        self.role = str(self.manifest["metadata"]["name"])  # its name in a cluster
        self.specs = {c["name"]: c for c in containers_of(self.manifest)}
        self.containers = list(self.specs)
        self.ip = ""
        self._place = place
        self._volumes = Volumes(self.home, self.source, volumes or {})
        self.grace_s = float(self.manifest["spec"].get("terminationGracePeriodSeconds", 30))

    def __enter__(self) -> "Pod":
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    # --- the life of the pod -------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Play the pod; return when its containers have been started."""
        self.home.mkdir(parents=True, exist_ok=True)
        spec = self.manifest["spec"]
        group = int(spec.get("securityContext", {}).get("fsGroup", 0))
        volumes = [self._volumes.adapted(volume, group) for volume in spec.get("volumes", [])]
        pod = adapted(self.manifest, self.source, self.name, self.restart_policy, volumes)
        documents = [pod, *(d for d in self.source if d["kind"] == "ConfigMap")]
        options = []
        if self._place is not None:
            options = ["--network", self._place.option]
            pod["spec"]["hostAliases"] = self._place.hosts
        podman_to_the_end("kube", "play", *options, "-", input=yaml.safe_dump_all(documents))
        self.ip = address_of(self.name)

    def down(self) -> None:
        """Remove everything of the pod."""
        remove(self.name)

    def restart(self) -> None:
        """Act like a restart of the node: all processes die, memory is lost, the claims are kept."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """Act like the loss of the node: all processes die at once."""
        podman("pod", "kill", self.name)

    def start(self) -> None:
        """Start an ended pod again, with the content of its claims."""
        self._volumes.clear()
        podman("pod", "start", self.name)
        self.ip = address_of(self.name)

    def terminate(self) -> dict[str, int]:
        """Delete the pod like the kubelet: preStop and SIGTERM to all at once, SIGKILL after the grace period. Return
        exit codes.

        Only for a pod played with restart_policy "Never": podman restarts containers that end after any signal except
        its own
        `stop`, and that one signals a container of a shared process namespace twice.
        """
        assert self.restart_policy == "Never", "podman would start again what ends"
        pids = {container: pid for container in self.containers if (pid := self.pid(container))}
        names = [f"{self.name}-{container}" for container in self.containers]
        deadline = time.monotonic() + self.grace_s
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._terminate, pids, pids.values()))
        while any(map(is_there, pids.values())) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in filter(is_there, pids.values()):
            os.kill(pid, signal.SIGKILL)
        while any(map(is_there, pids.values())) and time.monotonic() < deadline + PATIENCE_S:
            time.sleep(0.02)
        return dict(zip(self.containers, map(int, podman("wait", *names).split()), strict=True))

    def _terminate(self, container: str, pid: int) -> None:
        """Run the preStop of a container to its end, for the grace period at most, and send SIGTERM to its process."""
        command = self.specs[container].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if command:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.exec(container, *command, patience_s=self.grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    def finish(self) -> tuple[int, str]:
        """Wait for the end of a Job's pod. Return its exit code and its output."""
        (container,) = self.containers
        return int(podman("wait", f"{self.name}-{container}")), self.logs(container)

    # --- looking and acting ----------------------------------------------------------------------------------------------

    def pid(self, container: str) -> int:
        """Return the pid of the container's process on this machine; 0 while it is down."""
        return int(inspect(f"{self.name}-{container}", "{{.State.Pid}}") or 0)

    def cgroup(self, container: str) -> str:
        """Return the container's cgroup below the root of each controller."""
        return inspect(f"{self.name}-{container}", "{{.State.CgroupPath}}").lstrip("/")

    def restarts(self, container: str) -> int:
        return int(inspect(f"{self.name}-{container}", "{{.RestartCount}}"))

    def signal(self, container: str, number: int) -> None:
        """Send a signal from outside, like the kernel or the kubelet. A container that dies is restarted."""
        os.kill(self.pid(container), number)

    def exec(
        self, container: str, *command: str, input: str | None = None, patience_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as `kubectl exec`."""
        return run_podman("exec", "-i", f"{self.name}-{container}", *command, input=input, patience_s=patience_s)

    def logs(self, container: str) -> str:
        """Return its output on stdout and stderr, over all restarts, as `kubectl logs`."""
        done = run_podman("logs", f"{self.name}-{container}", input=None, patience_s=PATIENCE_S)
        return done.stdout + done.stderr

    def volume(self, name: str) -> Path:
        """Return the directory of the volume on this machine."""
        return self._volumes.paths[name]

    def port(self, port: int | str) -> int:
        """Return the number of the container port with this name; a number is returned as it is."""
        if isinstance(port, int):
            return port
        declared = [found for container in self.specs.values() for found in container.get("ports", [])]
        return {str(found["name"]): int(found["containerPort"]) for found in declared if "name" in found}[port]

    # --- probes ------------------------------------------------------------------------------------------------------------

    def probe(self, container: str, kind: str) -> str:
        """Run the startup, liveness or readiness probe of the manifest. Return "" if it passes, else why not."""
        probe = self.specs[container].get(f"{kind}Probe")
        if probe is None:
            return ""
        timeout_s = float(probe.get("timeoutSeconds", 1))
        if "exec" in probe:
            run: Exec = lambda command, patience_s: self.exec(container, *command, patience_s=patience_s)  # noqa: E731
            return exec_probe(run, probe["exec"]["command"], timeout_s)
        if "httpGet" in probe:
            return http_probe(self.ip, self.port(probe["httpGet"]["port"]), probe["httpGet"], timeout_s)
        if "tcpSocket" in probe:
            return tcp_probe(self.ip, self.port(probe["tcpSocket"]["port"]), timeout_s)
        raise PlayError(f"{container}: a {kind} probe of a kind that is not played here: {sorted(probe)}")

    def wait_ready(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all readiness probes pass. Raises PlayError with the containers' output."""
        deadline = time.monotonic() + patience_s
        while True:
            reasons = {c: reason for c in self.containers if (reason := self.probe(c, "readiness"))}
            if not reasons:
                return
            if time.monotonic() > deadline:
                said = "\n".join(f"--- {c}\n{self.logs(c)[-2000:]}" for c in self.containers)
                raise PlayError(f"{self.name} is not ready after {patience_s} s: {reasons}\n{said}")
            time.sleep(0.1)


def _one_of(documents: list[Document], number: int) -> Document:
    pods = pods_of(documents)
    if len(pods) <= number:
        raise PlayError("no StatefulSet, Deployment or Job among the documents")
    return pods[number]


def play(
    overlay: str | Path,
    *more: Document,
    restart_policy: str = "Always",
    volumes: dict[str, Path] | None = None,
    **settings: str,
) -> Pod:
    """Return a pod from an overlay and further documents (Secrets, say), with other settings; not up yet."""
    return Pod([*render(overlay), *more], settings, restart_policy, volumes)
