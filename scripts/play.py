"""Plays what k8s/ holds as a real pod on this machine, with podman, and does for it what the kubelet would do.

    scripts/play.py k8s/overlays/dev          a pod to play with; Ctrl-C, SIGTERM or SIGHUP ends it

No API server and no registry: the overlay is rendered, the StatefulSet's or Deployment's one pod is taken out of it, and what
podman's `kube play` does not know is put in terms it knows (`ADAPTATIONS`; each is made in a function that says so). What it
has is used as the manifest says: containers, commands, settings, ids, read-only roots, capabilities, seccomp, limits, one IPC,
network and process namespace. Probes run by `Pod.probe` and `Kubelet`.

Needs root (`scripts/pod-setup`); everything of a pod is removed with it. What a player that was killed has left is removed by the
next one.
"""

import argparse
import base64
import contextlib
import copy
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
HOME = Path("/var/tmp/kmq-pods")  # one directory per pod, for its volumes
PATIENCE_S = 60.0
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

ADAPTATIONS = {
    "StatefulSet, Deployment": "their pod template becomes one Pod: podman has no controllers",
    "volumeClaimTemplates, emptyDir": "a directory of the pod's own: podman's emptyDir is one volume for all pods of a name",
    "emptyDir medium Memory": "a tmpfs of the size that sizeLimit says",
    "fsGroup": "those directories are made with that group: podman has no fsGroup",
    "volumes of Secrets, ConfigMaps": "a directory with the files: podman keeps both by name, for all pods and after them",
    "initContainers with restartPolicy Always": "containers, in the same order: podman has no native sidecars",
    "probes, lifecycle": "run from outside, by Pod.probe and Kubelet: podman never runs them",
    "ports": "left out: podman would open them on this machine; the pod's own address has them",
    "names": "the pod gets a name of its own, so that many can run side by side",
}
_numbers = itertools.count()
Document = dict[str, Any]


class PlayError(Exception):
    """podman or kubectl refused; the text is theirs."""


def podman(*arguments: str, input: str | None = None, patience_s: float = 120.0) -> str:
    """Run podman and return what it prints. Raises PlayError with what it says."""
    done = _podman(*arguments, input=input, patience_s=patience_s)
    if done.returncode:
        raise PlayError(f"podman {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _podman(*arguments: str, input: str | None, patience_s: float) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"CONTAINERS_CONF": str(ROOT / "build" / "containers.conf")}
    return subprocess.run(
        ["podman", *arguments],
        env=env,
        input=input,
        stdin=None if input is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=patience_s,
        start_new_session=True,  # Ctrl-C in a terminal is for us: we remove what podman makes
    )


def _podman_to_the_end(*arguments: str, input: str) -> None:
    """As podman(), also if we are told to stop meanwhile: a podman killed half-way forgets what it has started."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(podman, *arguments, input=input).result()


def remove(name: str) -> None:
    """Remove a pod and all that is its own, whoever has played it."""
    for _ in range(3):  # a container that podman is just starting again is not taken away
        with contextlib.suppress(PlayError):
            podman("pod", "rm", "-f", "-t", "0", name)
        if not podman("pod", "ps", "-q", "--filter", f"name=^{name}$").strip():
            break
    else:
        raise PlayError(f"podman does not remove the pod {name}")
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for path in mounts:
        if path.startswith(f"{HOME / name}/"):
            subprocess.run(["umount", "-l", path], check=False)
    shutil.rmtree(HOME / name, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove the pods of players that were killed. A pod's name has the pid of its player."""
    for home in HOME.glob("kmq-*-*"):
        if not _is_there(int(home.name.split("-")[1])):
            print(f"play: removing {home.name}, whose player was killed", file=sys.stderr)
            remove(home.name)


def render(overlay: str | Path) -> list[Document]:
    """The documents of a kustomization, as `kubectl apply -k` would send them."""
    command = ["kubectl", "kustomize", str(overlay)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise PlayError(f"{' '.join(command)}: {done.stderr.strip()}")
    documents: Iterator[Document] = yaml.safe_load_all(done.stdout)
    return [document for document in documents if document]


# --- from what a cluster takes to what podman takes ----------------------------------------------------------------------


def template_of(documents: list[Document]) -> Document:
    """The one pod among them: a Pod, or the template of a controller, as a Pod."""
    for document in documents:
        if document["kind"] in ("StatefulSet", "Deployment", "Job"):
            pod = copy.deepcopy(document["spec"]["template"])
            for claim in document["spec"].get("volumeClaimTemplates", []):
                name = claim["metadata"]["name"]
                claimed = {"name": name, "persistentVolumeClaim": {"claimName": name}}
                pod["spec"].setdefault("volumes", []).append(claimed)
            return {"apiVersion": "v1", "kind": "Pod", "metadata": pod.get("metadata", {}), "spec": pod["spec"]}
    raise PlayError("no StatefulSet, Deployment or Job among the documents")


def with_settings(documents: list[Document], settings: dict[str, str]) -> list[Document]:
    """The same, with these settings in the ConfigMap that the pod takes its environment from."""
    documents = copy.deepcopy(documents)
    maps = [d for d in documents if d["kind"] == "ConfigMap" and "KMQ_DATA" in d.get("data", {})]
    if settings and len(maps) != 1:
        raise PlayError(f"{len(maps)} ConfigMaps hold KMQ_DATA: which one do the settings go to?")
    for document in maps:
        document["data"].update(settings)
    return documents


def _is_sidecar(container: Document) -> bool:
    return container.get("restartPolicy") == "Always"


def containers_of(pod: Document) -> list[Document]:
    """Those that stay: native sidecars first, as they start."""
    spec = pod["spec"]
    return [*filter(_is_sidecar, spec.get("initContainers", [])), *spec["containers"]]


class Pod:
    """One pod, as a context manager: `with Pod(documents) as pod`."""

    def __init__(
        self,
        documents: list[Document],
        settings: dict[str, str] | None = None,
        restart_policy: str = "Always",
        volumes: dict[str, Path] | None = None,
    ) -> None:
        """`volumes`: those of another pod that this one has too, by their names here, as two that name one claim."""
        self.name, self.restart_policy = f"kmq-{os.getpid()}-{next(_numbers)}", restart_policy
        self.home = HOME / self.name
        self.source = with_settings(documents, settings or {})
        self.manifest = template_of(self.source)  # as in the cluster: the probes are read from here
        self.specs = {c["name"]: c for c in containers_of(self.manifest)}
        self.containers = list(self.specs)
        self.ip = ""
        self._volumes: dict[str, Path] = dict(volumes or {})
        self._persistent = set(self._volumes)  # those that outlive the pod
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
        """Play it; returns when the containers have been started."""
        self.home.mkdir(parents=True, exist_ok=True)
        documents = [self._adapted(), *(d for d in self.source if d["kind"] == "ConfigMap")]
        _podman_to_the_end("kube", "play", "-", input=yaml.safe_dump_all(documents))
        self._find_ip()

    def _find_ip(self) -> None:
        infra = podman("pod", "inspect", "-f", "{{.InfraContainerID}}", self.name).strip()
        networks = json.loads(podman("inspect", "-f", "{{json .NetworkSettings.Networks}}", infra))
        self.ip = next(iter(networks.values()))["IPAddress"]

    def down(self) -> None:
        """Nothing of it is left."""
        remove(self.name)

    def restart(self) -> None:
        """As when the node has restarted: everything dies at once, what was in memory is gone, the claims are kept."""
        podman("pod", "kill", self.name)
        self.start()

    def start(self) -> None:
        """A pod that has ended, again: with what was on its claims."""
        for name, path in self._volumes.items():
            if name not in self._persistent:
                _empty(path)
        podman("pod", "start", self.name)
        self._find_ip()

    def terminate(self) -> dict[str, int]:
        """As the kubelet deletes a pod: SIGTERM to all at once, SIGKILL after the grace period; the exit codes.

        Only for a pod played with restart_policy "Never": podman starts again what ends after any signal but its own
        `stop`, and that one tells a container of a shared process namespace twice.
        """
        assert self.restart_policy == "Never", "podman would start again what ends"
        pids = [self.pid(container) for container in self.containers]
        names = [f"{self.name}-{container}" for container in self.containers]
        for number, patience_s in ((signal.SIGTERM, self.grace_s), (signal.SIGKILL, PATIENCE_S)):
            left = [pid for pid in pids if pid and _is_there(pid)]
            for pid in left:
                os.kill(pid, number)
            deadline = time.monotonic() + patience_s
            while any(map(_is_there, left)) and time.monotonic() < deadline:
                time.sleep(0.02)
        return dict(zip(self.containers, map(int, podman("wait", *names).split()), strict=True))

    def finish(self) -> tuple[int, str]:
        """Of a Job's pod: its exit code when it has ended, and what it said."""
        (container,) = self.containers
        return int(podman("wait", f"{self.name}-{container}")), self.logs(container)

    # --- looking and acting ----------------------------------------------------------------------------------------------

    def _inspect(self, container: str, template: str) -> str:
        return podman("inspect", "-f", template, f"{self.name}-{container}").strip()

    def pid(self, container: str) -> int:
        """Of the container's process, as this machine counts; 0 while it is down."""
        return int(self._inspect(container, "{{.State.Pid}}") or 0)

    def cgroup(self, container: str) -> str:
        """Its cgroup below the root of each controller."""
        return self._inspect(container, "{{.State.CgroupPath}}").lstrip("/")

    def restarts(self, container: str) -> int:
        return int(self._inspect(container, "{{.RestartCount}}"))

    def signal(self, container: str, number: int) -> None:
        """From outside, as the kernel or the kubelet does it: what dies is started again."""
        os.kill(self.pid(container), number)

    def exec(
        self, container: str, *command: str, input: str | None = None, patience_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as `kubectl exec`."""
        return _podman("exec", "-i", f"{self.name}-{container}", *command, input=input, patience_s=patience_s)

    def logs(self, container: str) -> str:
        """What it has said on stdout and stderr, in all its lives, as `kubectl logs`."""
        done = _podman("logs", f"{self.name}-{container}", input=None, patience_s=PATIENCE_S)
        return done.stdout + done.stderr

    def volume(self, name: str) -> Path:
        """Where the volume is on this machine."""
        return self._volumes[name]

    def port(self, name: str) -> int:
        """Number of the container port that has this name."""
        for container in self.specs.values():
            for port in container.get("ports", []):
                if port.get("name") == name:
                    return int(port["containerPort"])
        raise KeyError(name)

    # --- probes ------------------------------------------------------------------------------------------------------------

    def probe(self, container: str, kind: str) -> str:
        """Run the startup, liveness or readiness probe as the manifest has it: "" when it passes, else why not."""
        probe = self.specs[container].get(f"{kind}Probe")
        if probe is None:
            return ""
        timeout_s = float(probe.get("timeoutSeconds", 1))
        if "exec" in probe:
            return self._exec_probe(container, probe["exec"]["command"], timeout_s)
        if "httpGet" in probe:
            return self._http_probe(probe["httpGet"], timeout_s)
        if "tcpSocket" in probe:
            return self._tcp_probe(probe["tcpSocket"]["port"], timeout_s)
        raise PlayError(f"{container}: a {kind} probe of a kind that is not played here: {sorted(probe)}")

    def _exec_probe(self, container: str, command: list[str], timeout_s: float) -> str:
        try:  # podman's own start-up comes on top of what the kubelet would wait for
            done = self.exec(container, *command, patience_s=timeout_s + 10)
        except subprocess.TimeoutExpired:
            return f"no answer in {timeout_s} s"
        said = (done.stdout + done.stderr).strip()
        return "" if done.returncode == 0 else said or f"exit code {done.returncode}"

    def _http_probe(self, get: Document, timeout_s: float) -> str:
        scheme = get.get("scheme", "HTTP").lower()
        url = f"{scheme}://{self.ip}:{self._number(get['port'])}{get.get('path', '/')}"
        try:
            context = _unverified() if scheme == "https" else None  # as the kubelet: it does not ask for a name
            with urllib.request.urlopen(url, timeout=timeout_s, context=context) as answer:
                return "" if 200 <= answer.status < 400 else f"status {answer.status}"
        except urllib.error.HTTPError as err:
            return f"status {err.code}: {err.read().decode(errors='replace')[:300]}"
        except OSError as err:
            return str(err)

    def _tcp_probe(self, port: int | str, timeout_s: float) -> str:
        try:
            socket.create_connection((self.ip, self._number(port)), timeout_s).close()
        except OSError as err:
            return str(err)
        return ""

    def _number(self, port: int | str) -> int:
        return port if isinstance(port, int) else self.port(port)

    def is_ready(self) -> bool:
        return not any(self.probe(container, "readiness") for container in self.containers)

    def wait_ready(self, patience_s: float = PATIENCE_S) -> None:
        """Until all readiness probes pass. Raises PlayError with what the containers said."""
        deadline = time.monotonic() + patience_s
        while True:
            reasons = {c: reason for c in self.containers if (reason := self.probe(c, "readiness"))}
            if not reasons:
                return
            if time.monotonic() > deadline:
                said = "\n".join(f"--- {c}\n{self.logs(c)[-2000:]}" for c in self.containers)
                raise PlayError(f"{self.name} is not ready after {patience_s} s: {reasons}\n{said}")
            time.sleep(0.1)

    # --- adaptations (see ADAPTATIONS) ---------------------------------------------------------------------------------------

    def _adapted(self) -> Document:
        pod = copy.deepcopy(self.manifest)
        spec = pod["spec"]
        pod["metadata"] = {"name": self.name, "labels": pod["metadata"].get("labels", {})}
        spec["containers"] = containers_of(pod)
        spec["initContainers"] = [c for c in spec.get("initContainers", []) if not _is_sidecar(c)]
        for container in spec["containers"]:
            for name in ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "restartPolicy", "ports"):
                container.pop(name, None)
        group = int(spec.get("securityContext", {}).get("fsGroup", 0))
        spec["volumes"] = [self._adapted_volume(volume, group) for volume in spec.get("volumes", [])]
        spec["restartPolicy"] = self.restart_policy
        return pod

    def _adapted_volume(self, volume: Document, group: int) -> Document:
        name = volume["name"]
        path = self._volumes.get(name) or self.home / name
        if name not in self._volumes:
            self._make_volume(path, volume, group)
            self._volumes[name] = path
        return {"name": name, "hostPath": {"path": str(path), "type": "Directory"}}

    def _make_volume(self, path: Path, volume: Document, group: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        empty = volume.get("emptyDir", {})
        if empty.get("medium") == "Memory":
            size = empty.get("sizeLimit", "64Mi").removesuffix("i").lower()
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", f"kmq-{volume['name']}", str(path)], check=True
            )
        if "persistentVolumeClaim" in volume:
            self._persistent.add(volume["name"])
        for kind, field in (("Secret", "secretName"), ("ConfigMap", "name")):
            what = volume.get(kind[0].lower() + kind[1:])
            if what:
                self._write_files(path, kind, what[field], what, group)
                self._persistent.add(volume["name"])
        os.chown(path, 0, group)
        path.chmod(0o2775)

    def _write_files(self, path: Path, kind: str, name: str, what: Document, group: int) -> None:
        for document in self.source:
            if document["kind"] == kind and document["metadata"]["name"] == name:
                encoded = document.get("data", {}).items()
                texts = {key: base64.b64decode(v) if kind == "Secret" else v.encode() for key, v in encoded}
                texts |= {key: text.encode() for key, text in document.get("stringData", {}).items()}
                for key, text in texts.items():
                    (path / key).write_bytes(text)
                    os.chown(path / key, 0, group)
                    (path / key).chmod(int(what.get("defaultMode", 0o644)) | 0o040)
                return
        if not what.get("optional"):
            raise PlayError(f"no {kind} {name} among the documents")


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _unverified() -> Any:
    import ssl

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Kubelet(threading.Thread):
    """Runs the probes of a pod at the periods of its manifest, and kills the container whose liveness fails too often."""

    def __init__(self, pod: Pod) -> None:
        super().__init__(daemon=True)
        self.pod = pod
        self.events: list[str] = []
        self._over = threading.Event()

    def __enter__(self) -> "Kubelet":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        watches = [_Watch(self, container) for container in self.pod.containers]
        while not self._over.is_set():
            due = min(watches, key=lambda watch: watch.due)
            if not self._over.wait(max(0.0, due.due - time.monotonic())):
                try:
                    due.turn()
                except (PlayError, ProcessLookupError, subprocess.TimeoutExpired):
                    pass  # between two lives of the container


class _Watch:
    """One container: its startup probe until that has passed, then its liveness."""

    def __init__(self, kubelet: Kubelet, container: str) -> None:
        self.kubelet, self.container = kubelet, container
        self.pid = self.failures = 0
        self.started = False
        self.due = time.monotonic()

    def turn(self) -> None:
        pod, spec = self.kubelet.pod, self.kubelet.pod.specs[self.container]
        kind = "liveness" if self.started or "startupProbe" not in spec else "startup"
        probe = spec.get(f"{kind}Probe", {})
        self.due = time.monotonic() + float(probe.get("periodSeconds", 10))
        pid = pod.pid(self.container)
        if pid != self.pid:  # another life
            self.pid, self.started, self.failures = pid, False, 0
        reason = pod.probe(self.container, kind)
        if not reason:
            self.started, self.failures = True, 0
            return
        self.failures += 1
        self.kubelet.events.append(f"{self.container} {kind} failed: {reason}")
        if self.failures >= int(probe.get("failureThreshold", 3)):
            self._end(pid, float(probe.get("terminationGracePeriodSeconds", pod.grace_s)))

    def _end(self, pid: int, grace_s: float) -> None:
        self.kubelet.events.append(f"{self.container} killed")
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while _is_there(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.failures = 0


def play(
    overlay: str | Path,
    *more: Document,
    restart_policy: str = "Always",
    volumes: dict[str, Path] | None = None,
    **settings: str,
) -> Pod:
    """A pod from an overlay and further documents (Secrets, say), with other settings; not up yet."""
    return Pod([*render(overlay), *more], settings, restart_policy, volumes)


def _lines(pod: Pod) -> Iterator[str]:
    yield f"pod {pod.name} is ready; from this machine:"
    yield f"  printf 'test.probe|0|1|hi\\n' | socat - TCP:{pod.ip}:5673"
    yield f"  tail -F {pod.volume('data')}/test.log"
    yield f"  export CONTAINERS_CONF={ROOT}/build/containers.conf"
    yield f"  podman exec -it {pod.name}-{pod.containers[-1]} kmq status"
    yield f"  podman logs {pod.name}-framer"
    yield "Ctrl-C (SIGTERM, SIGHUP) removes it and its volumes."


def _stop_by_signals() -> None:
    """Let each of these end the program in order, once: what comes while the pod is removed must not stop that."""
    numbers = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup

    def stop(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, lambda number, frame: None)
        raise SystemExit(0 if number == signal.SIGINT else 128 + number)

    for number in numbers:
        signal.signal(number, stop)


def main() -> int:
    adapted = "\n".join(f"  {what}: {why}" for what, why in ADAPTATIONS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"adapted for podman:\n{adapted}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overlay", nargs="?", default="k8s/overlays/dev", help="directory with a kustomization")
    parser.add_argument("settings", nargs="*", help="NAME=VALUE, for the ConfigMap")
    arguments = parser.parse_args()
    settings = dict(text.split("=", 1) for text in arguments.settings)
    _stop_by_signals()
    try:
        remove_leftovers()
        with play(arguments.overlay, **settings) as pod, Kubelet(pod) as kubelet:
            pod.wait_ready()
            print(*_lines(pod), sep="\n", flush=True)
            said = 0
            while True:
                time.sleep(1)
                for event in kubelet.events[said:]:
                    print(event, flush=True)
                    said += 1
    except PlayError as err:
        print(f"play: {err}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
