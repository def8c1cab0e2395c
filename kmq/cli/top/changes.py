"""Events that `kmq top` notices by itself: what differs between two looks. For a broker without a gateway.

Memory      At most _KEPT events.
"""

import time
from collections import deque
from typing import Any

from kmq.cli.top.snapshot import Document

_KEPT = 100


class Changes:
    """The events since this command was started, newest first."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._before: Document | None = None

    def see(self, status: Document) -> None:
        """Compare with the document of `kmq status` that was seen before."""
        before, self._before = self._before, status
        if before is None:
            return
        old = {stage["name"]: stage for stage in before["stages"]}
        for stage in status["stages"]:
            was = old.get(stage["name"])
            if was is not None:
                self._see_stage(was, stage)
        codes, now = ({(f["code"], f["about"]): f for f in each["findings"]} for each in (before, status))
        for key in now.keys() - codes.keys():
            self._add(
                "warning" if now[key]["severity"] == "warning" else "not_ready", now[key]["about"], _why(now[key])
            )
        for key in codes.keys() - now.keys():
            self._add("cleared", codes[key]["about"], key[0])
        if status["ready"] and not before["ready"]:
            self._add("ready", "broker", "messages are accepted again")

    def _see_stage(self, was: dict[str, Any], now: dict[str, Any]) -> None:
        name = now["name"]
        if now["restarts"] > was["restarts"]:
            self._add("restarted", name, f"restart {now['restarts']}, pid {now['pid']}")
        elif now["pid"] != was["pid"]:
            self._add("started", name, f"pid {now['pid']}")
        if now["state"] == "stopped" != was["state"]:
            self._add("stopped", name, "ended in order")
        for kind in ("refused", "dropped"):
            if now["pid"] == was["pid"] and now[kind] > was[kind]:
                self._add(kind, name, f"{now[kind] - was[kind]:,} messages")

    def _add(self, kind: str, about: str, text: str) -> None:
        self.events.appendleft({"at": time.time(), "kind": kind, "about": about, "text": text})


def _why(finding: dict[str, Any]) -> str:
    return f"{finding['code']}: {finding['why']}"
