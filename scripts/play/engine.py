"""podman: its commands, and how everything of a pod is removed."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = Path("/var/tmp/kmq-pods")  # one directory per pod, for its volumes


class PlayError(Exception):
    """podman or kubectl failed; the text is theirs."""


def podman(*arguments: str, input: str | None = None, patience_s: float = 120.0) -> str:
    """Run podman and return its output. Raises PlayError with its error output."""
    done = run_podman(*arguments, input=input, patience_s=patience_s)
    if done.returncode:
        raise PlayError(f"podman {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def run_podman(*arguments: str, input: str | None, patience_s: float) -> subprocess.CompletedProcess[str]:
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
        start_new_session=True,  # Ctrl-C in a terminal is for this process, which removes what podman makes
    )


def podman_to_the_end(*arguments: str, input: str) -> None:
    """Run podman() to its end, even after a signal to stop: a podman killed half-way forgets what it has started."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(podman, *arguments, input=input).result()


def inspect(container: str, template: str) -> str:
    """Return what podman knows of a container."""
    return podman("inspect", "-f", template, container).strip()


def address_of(pod: str) -> str:
    """Return the IP address of a pod."""
    infra = podman("pod", "inspect", "-f", "{{.InfraContainerID}}", pod).strip()
    networks = json.loads(inspect(infra, "{{json .NetworkSettings.Networks}}"))
    return str(next(iter(networks.values()))["IPAddress"])


def is_there(pid: int) -> bool:
    """Return True while a process lives."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def remove(name: str) -> None:
    """Remove a pod and everything that belongs to it, whoever has played it."""
    for _ in range(3):  # podman does not remove a container that it is just restarting
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
    """Remove the pods and networks of players that were killed. Their names have the pid of the player."""
    for home in HOME.glob("kmq-*-*"):
        if not is_there(int(home.name.split("-")[1])):
            print(f"play: removing {home.name}, whose player was killed", file=sys.stderr)
            remove(home.name)
    for name in podman("network", "ls", "--format", "{{.Name}}").split():
        found = re.fullmatch(r"kmq-([0-9]+)-network-[0-9]+", name)
        if found and not is_there(int(found[1])):
            with contextlib.suppress(PlayError):
                podman("network", "rm", "-f", "-t", "0", name)
