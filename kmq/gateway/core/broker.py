"""The state of the broker from its stats page: alive, ready (readiness.py), and the last durable write."""

import time
from typing import Any

from kmq.broker.readiness import Reason, Verdict, judge, state_of
from kmq.broker.stats import Row, StatsPage
from kmq.config.settings import STAGES, Settings


class Broker:
    """The broker as its stats page shows it. Changes nothing."""

    def __init__(self, settings: Settings, page: StatsPage) -> None:
        self.settings, self.page = settings, page

    def verdict(self) -> Verdict:
        """Return the verdict: ready, or the reasons why not."""
        return judge(self.page, self.settings)

    def report(self, verdict: Verdict, reason: Reason | None) -> dict[str, Any]:
        """Return the body of /healthz and /readyz; `reason` says why the status is 503, None if it is 200."""
        durability = self.page.rows["durability"]
        synced = durability.synced
        return {
            "ok": reason is None,
            "reason": str(reason or ""),
            "code": reason.code if reason else "",
            "advice": reason.advice if reason else "",
            "reasons": [reason.fields() for reason in verdict.reasons],
            "warnings": [warning.fields() for warning in verdict.warnings],
            "findings": [finding.fields() for finding in verdict.findings],
            "last_durable_seq": durability.seq,
            "last_durable_write": _utc(synced) if synced else None,
            "last_durable_write_age_s": round(time.time() - synced / 1e9, 3) if synced else None,
            "stages": {name: _stage(name, self.page.rows[name]) for name in STAGES},
        }


def _stage(name: str, row: Row) -> dict[str, Any]:
    return {"state": state_of(name, row), "heartbeat_age_s": round(row.age_s, 3) if row.pid else None}


def _utc(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1_000_000:03d}Z"
