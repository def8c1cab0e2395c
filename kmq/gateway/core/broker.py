"""The state of the broker from its stats page (alive, ready, the last durable write), and how a request is refused.

A refusal has a code. Each door looks up the status of the code in kmq/wire/refusals.py.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from kmq.broker.concerns import Finding
from kmq.broker.door import known_shard
from kmq.broker.health import LIFELESS, Verdict, judge, state_of
from kmq.broker.stats import REPLICA, Row, StatsPage
from kmq.config.settings import STAGES, Settings
from kmq.errors import KmqError
from kmq.sending.failures import NotAnswered, Refused
from kmq.wire import refusals
from kmq.wire.refusals import Refusal


class Broker:
    """The broker as its stats page shows it. Changes nothing."""

    def __init__(self, settings: Settings, page: StatsPage) -> None:
        self.settings, self.page = settings, page

    def verdict(self) -> Verdict:
        """Return the verdict: ready, or the reasons why not."""
        return judge(self.page, self.settings)

    def report(self, verdict: Verdict, reason: Finding | None) -> dict[str, Any]:
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

    def shard(self) -> dict[str, Any]:
        """Return the body of /v1/cluster. Raises RequestRefused without a shard.

        The other brokers' state is as of `as_of`, when the replica last read it from Consul. This broker's state is
        current.
        """
        settings, row = self.settings, self.page.rows[REPLICA]
        if not settings.shard:
            raise RequestRefused("not_found", "this broker is of no shard: KMQ_SHARD is not set")
        shard = known_shard(settings.pipes)
        state = state_of(REPLICA, row)
        brokers = {
            name: each and each | {"role": _ROLES.get(each["role"], each["role"])}
            for name, each in shard.get("brokers", {}).items()
        }
        return {
            "shard": settings.shard,
            "broker": shard.get("broker", settings.broker),
            "role": _ROLES.get(row.role_name, row.role_name) or "waiting",
            "leader": shard.get("leader"),
            "isr": shard.get("isr", []),
            "epoch": row.epoch,
            "version": row.version,
            "min_insync": shard.get("min_insync", 0),
            "hw": row.seq,
            "end": row.last,
            "problem": f"replica_{state}" if state in LIFELESS else row.problem_name or shard.get("problem", ""),
            "as_of": shard.get("as_of"),
            "brokers": brokers,
        }


_ROLES = {"following": "follower", "leading": "leader"}  # a process follows; a broker is a follower


def _stage(name: str, row: Row) -> dict[str, Any]:
    return {"state": state_of(name, row), "heartbeat_age_s": round(row.age_s, 3) if row.pid else None}


def _utc(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1_000_000:03d}Z"


# --- refusals --------------------------------------------------------------------------------------------------------

_MEANING = {"too_long": "with its id, and as base64 unless it is printable text, the record is over KMQ_MAX_LINE bytes"}


class RequestRefused(KmqError):
    """A request is refused. `code` is a code of kmq/wire/refusals.py, or an unknown code from a newer broker.

    `fields`: further values for a program: `field` (which field is wrong), `seq`, `first` and `end`.
    """

    def __init__(self, code: str, text: str = "", **fields: str | int) -> None:
        self.code, self.fields = code, fields
        super().__init__(text or refusals.find(code).text)

    @property
    def refusal(self) -> Refusal:
        return refusals.find(self.code)


def bad_field(field: str, what: str) -> RequestRefused:
    """Return the refusal of one field: `what` says what is wrong and what it must be."""
    return RequestRefused("bad_field", f"{field}: {what}", field=field)


def check_data(data: str) -> None:
    """Raise RequestRefused if all topics are missing: then a missing topic is no proof that it was deleted."""
    if not os.path.isdir(f"{data}/topics"):
        raise RequestRefused("not_ready", "the data directory is missing; kmq status says what to do")


def refusal_of(err: KmqError, meaning: Mapping[str, str] = _MEANING) -> RequestRefused:
    """Return the refusal for a message that the gateway could not deliver. `meaning`: of codes that come without text."""
    if isinstance(err, Refused):
        return RequestRefused(err.code, err.reason.partition(" ")[2] or meaning.get(err.code, ""))
    return RequestRefused("not_answered" if isinstance(err, NotAnswered) else "stopping", str(err))
