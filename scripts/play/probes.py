"""The probes of a pod, run as the kubelet runs them."""

import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from play.manifest import Document

Exec = Callable[[list[str], float], "subprocess.CompletedProcess[str]"]  # runs a command in the container


def exec_probe(run: Exec, command: list[str], timeout_s: float) -> str:
    """Return "" if the command succeeds, else why not."""
    try:  # podman's own start-up time is added to the kubelet's timeout
        done = run(command, timeout_s + 10)
    except subprocess.TimeoutExpired:
        return f"no answer in {timeout_s} s"
    said = (done.stdout + done.stderr).strip()
    return "" if done.returncode == 0 else said or f"exit code {done.returncode}"


def http_probe(ip: str, port: int, get: Document, timeout_s: float) -> str:
    """Return "" if a GET succeeds, else why not."""
    scheme = get.get("scheme", "HTTP").lower()
    url = f"{scheme}://{ip}:{port}{get.get('path', '/')}"
    try:
        context = _unverified() if scheme == "https" else None  # the kubelet does not compare names either
        with urllib.request.urlopen(url, timeout=timeout_s, context=context) as answer:
            return "" if 200 <= answer.status < 400 else f"status {answer.status}"
    except urllib.error.HTTPError as err:
        return f"status {err.code}: {err.read().decode(errors='replace')[:300]}"
    except OSError as err:
        return str(err)


def tcp_probe(ip: str, port: int, timeout_s: float) -> str:
    """Return "" if a connection opens, else why not."""
    try:
        socket.create_connection((ip, port), timeout_s).close()
    except OSError as err:
        return str(err)
    return ""


def _unverified() -> Any:
    import ssl

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
