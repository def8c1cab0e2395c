"""How the broker is, as its stats page and its disk say: alive, ready, and what was last made durable.

Health speaks of writes, not of processes: ready means that a message sent now would be on disk in a moment.
"""

import time
from typing import Any

from kmq.log.room import Room
from kmq.settings import STAGES, Settings
from kmq.stats import Row, StatsPage

_NO_ROOM = {
    "disk_full": "disk_full: the disk has no room for more",
    "quota": "quota: KMQ_DATA_QUOTA is reached",
}


class Broker:
    """Looks only."""

    def __init__(self, settings: Settings, page: StatsPage) -> None:
        self.settings, self.page = settings, page
        durability = page.rows["durability"]
        self._room = Room(settings, lambda: durability.bytes)

    def why_not_alive(self) -> str:
        """Which stage gives no sign of life; "" while all do."""
        for name in STAGES:
            silence = self.page.rows[name].silence()
            if silence:
                return f"{name} {silence}"
        return ""

    def why_not_ready(self) -> str:
        """What keeps a message that is sent now from the disk; "" when nothing does."""
        reason = self.why_not_alive()
        if reason:
            return reason
        for name in STAGES:
            state = self.page.rows[name].state_name
            if state != "ready":
                return f"{name} is {state.replace('_', ' ') or 'starting'}"
        refusal = self._room.refusal()
        return _NO_ROOM.get(refusal, refusal)

    def report(self, reason: str) -> dict[str, Any]:
        """What /healthz and /readyz say; `reason` is one of the above."""
        durability = self.page.rows["durability"]
        synced = durability.synced
        return {
            "ok": not reason,
            "reason": reason,
            "last_durable_seq": durability.seq,
            "last_durable_write": _utc(synced) if synced else None,
            "last_durable_write_age_s": round(time.time() - synced / 1e9, 3) if synced else None,
            "stages": {name: self._stage(self.page.rows[name]) for name in STAGES},
        }

    def _stage(self, row: Row) -> dict[str, Any]:
        return {"state": row.state_name or "down", "heartbeat_age_s": round(row.age_s, 3) if row.pid else None}


def _utc(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1_000_000:03d}Z"
