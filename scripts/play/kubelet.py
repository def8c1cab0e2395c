"""Runs the probes of a pod, and kills containers that fail them."""

import contextlib
import os
import signal
import subprocess
import threading
import time

from play.engine import PlayError, is_there
from play.pod import Pod


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
                    pass  # between two runs of the container


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
        if pid != self.pid:  # the container was restarted
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
        while is_there(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.failures = 0
