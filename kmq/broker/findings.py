"""One thing that is wrong with a broker: its code, what is seen, what to do, and the section that explains it.

Invariant   Every code has a section of its name in the runbook, docs/operations.md, so `section` never leads nowhere.
"""

import os

RUNBOOK = "docs/operations.md"
ERROR, WARNING = "error", "warning"  # not ready; ready, but an operator must act


class Finding:
    """One finding. `about`: the process or file; `why`: a sentence; `advice`: what to do; `processes`: whose it is."""

    __slots__ = ("about", "advice", "code", "processes", "severity", "why")

    def __init__(
        self, code: str, about: str, why: str, advice: str, processes: tuple[str, ...], severity: str = ERROR
    ) -> None:
        self.code, self.about, self.why, self.advice, self.processes = code, about, why, advice, processes
        self.severity = severity

    def __str__(self) -> str:
        return f"{self.code}: {self.why}"

    @property
    def section(self) -> str:
        """Return where the documents explain this code."""
        return f"{RUNBOOK}#{self.code}"

    def fields(self) -> dict[str, str]:
        """Return what JSON shows."""
        texts = {"about": self.about, "why": self.why, "advice": self.advice}
        return {"code": self.code, "severity": self.severity, **texts, "section": self.section}


# --- where to look ---------------------------------------------------------------------------------------------------


def is_in_pod() -> bool:
    """Return True if this process runs in a pod of Kubernetes, which sets this name in every container."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def log_of(process: str, supervisor: int = 0) -> str:
    """Return where the log of a process is. `supervisor`: who has started it; `kmq up` writes a file also in a pod."""
    if supervisor or not is_in_pod():
        return "KMQ_PIPES/kmq.log"
    return f"kubectl logs {os.uname().nodename} -c {process} --previous"


def of_repair() -> str:
    """Return how damaged files are healed."""
    if is_in_pod():
        return "by the Job of docs/kubernetes.md#repair-backup-restore"
    return "with: kmq down && kmq verify --repair && kmq up"


def of_kernel() -> str:
    """Return what shows the kernel's messages about this machine: who was killed for lack of memory, broken disks."""
    return f"kubectl describe pod {os.uname().nodename}" if is_in_pod() else "dmesg"
