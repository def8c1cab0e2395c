"""Tells how far streaming queries are, for `kmq pipeline status`, from their checkpoints and from the brokers.

The checkpoint says what was read and when. The broker says what exists now, so the lag is also right for a query that
is down. The status that the query's listener wrote (listener.py) adds its name, rates and late rows. For a broker that
does not answer now it has the last known ends of the logs. Needs neither pyspark nor Java.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from rich.table import Table

from kmq.errors import KmqError, RetryError
from kmq.log import gaps, reader
from kmq.log.reader import WAL
from kmq.message import record
from kmq.spark.connections import PLAIN, Access, ReplacedError
from kmq.spark.source.broker import Broker
from kmq.spark.source.brokers import Directory, open_broker, recognised
from kmq.spark.source.plan import Key, least
from kmq.spark.streaming.checkpoint import Checkpoint, identities, offsets_of, positions

_ADDRESS = re.compile(r"https?://.*|[^/]+:\d+")
PATIENCE = "5s"  # for a broker that may be unreachable
_LINE_BYTES = 1 << 12  # read to learn when a record was received


class Sources(NamedTuple):
    """The brokers to ask; by default those that each checkpoint names."""

    paths: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    access: Access = PLAIN
    ask: bool = True  # False: no broker is asked, and no lag is known

    def open(self, name: str, identity: str, cwd: str) -> Broker:
        """Return the broker that a checkpoint calls `name`. Raises KmqError if it is unreachable or has another id.

        `identity`: "" for a broker that has not answered the query yet. `cwd`: the working directory of the query, for
        relative paths.
        """
        if not self.ask:
            raise KmqError(f"{name}: not asked (--offline)")
        servers = recognised(self.servers, self.access, waits=False)
        for given, is_path in (*((path, True) for path in self.paths), *((server, False) for server in servers)):
            broker = open_broker(given, is_path, self.access)
            with suppress(RetryError):  # another address may have it
                if broker.identity() == identity:
                    return broker
        is_path = not _ADDRESS.fullmatch(name)
        broker = Directory(name, os.path.join(cwd, name)) if is_path else open_broker(name, False, self.access)
        if (now := broker.identity()) != identity and identity:
            raise ReplacedError(name, identity, now)
        return broker


AS_NAMED = Sources()


def of(checkpoint: Checkpoint, sources: Sources = AS_NAMED) -> dict[str, Any]:
    """Return all that is known about a query, in the form of --json."""
    last, files = checkpoint.status(), checkpoint.size()
    batch, logged = checkpoint.committed()
    holder = checkpoint.holder()
    offsets, unfinished = offsets_of(logged), checkpoint.unfinished()
    partitions, brokers = _partitions(offsets, logged.sources if logged else (), sources, last)
    planned = {} if unfinished is None else offsets_of(checkpoint.logged(unfinished))
    waits_for = {key[0] for key, end in planned.items() if end != offsets.get(key)}
    problems = [
        each["why"]
        + ("" if each["lag"] is None else f"; its lag of {each['lag']:,} is as it was last seen")
        + (f"; batch {unfinished} needs it" if each["broker"] in waits_for else "")
        for each in brokers
        if each["why"]
    ]
    lags = [partition["lag"] for partition in partitions if partition["lag"] is not None]
    ages = [partition["oldest_unread_s"] for partition in partitions if partition["oldest_unread_s"] is not None]
    return {
        "query": last.get("name") or os.path.basename(checkpoint.table or checkpoint.path),
        "checkpoint": checkpoint.path,
        "table": checkpoint.table or None,
        "id": checkpoint.id(),
        "running": bool(holder),
        "holder": holder or None,
        "error": last.get("error") if not holder else None,
        "batch": batch if batch >= 0 else None,
        "unfinished_batch": unfinished,
        "seen_s": _rounded(checkpoint.seen_age_s()),
        "last_commit_s": _rounded(checkpoint.commit_age_s()),
        "lag": sum(lags) if lags else None,
        "oldest_unread_s": max(ages, default=None),
        "rows_per_s": last.get("rows_per_s") if holder else None,
        "late": last.get("late"),
        "watermark": last.get("watermark"),
        "has_state": checkpoint.has_state(),
        "files": files[0],
        "bytes": files[1],
        "brokers": brokers,
        "partitions": partitions,
        "problems": problems if sources.ask else [],
    }


def not_alive(each: Mapping[str, Any], limit_s: float) -> str:
    """Return why a query does not count as alive; "" if it runs and has reported in the last `limit_s` seconds."""
    if not each["running"]:
        return f"{each['query']}: is not running"
    seen = each["seen_s"]
    if seen is None:
        return f"{each['query']}: is running, but has never reported its status"
    return f"{each['query']}: is running, but last reported {seen:.0f} s ago" if seen > limit_s else ""


def _partitions(
    offsets: Mapping[Key, int], lines: Iterable[str], sources: Sources, last: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return an entry for each partition that was read or can be read, and one for each broker.

    `lines`: of the sources in the checkpoint. `last`: the status that the listener wrote.
    """
    ids = {name: identity for line in lines for name, identity in identities(line).items()}
    seen = ends_seen(last) if sources.ask else {}
    found, brokers = [], []
    for name, identity in ids.items():
        mine = {key: offset for key, offset in offsets.items() if key[0] == name}
        broker, state, why = None, "up", ""
        bounds: Mapping[tuple[str, int], tuple[int | None, int | None]]
        try:
            broker = sources.open(name, identity, str(last.get("cwd") or os.getcwd()))
            bounds = broker.bounds(sorted({topic for _, topic, _ in mine}))
        except KmqError as error:
            broker, state, why = None, "replaced" if isinstance(error, ReplacedError) else "unreachable", str(error)
            bounds = {key[1:]: (None, seen[key]) for key in mine.keys() & seen.keys()}
        keys = mine.keys() | {(name, *at) for at in bounds}
        parts = [
            _partition(key, mine.get(key, least(key[1])), *bounds.get(key[1:], (None, None)), broker)
            for key in sorted(keys)
        ]
        lags = [part["lag"] for part in parts if part["lag"] is not None]
        found += parts
        about = {"state": state, "why": why or None} if sources.ask else {"state": None, "why": None}
        brokers.append({"broker": name, "id": identity or None, **about, "lag": sum(lags) if lags else None})
    return found, brokers


def ends_seen(last: Mapping[str, Any]) -> dict[Key, int]:
    """Return where logs ended when a query last looked, from the status that its listener wrote."""
    return {key: end for each in last.get("sources", ()) for key, end in positions(each.get("latest")).items()}


def _partition(key: Key, offset: int, first: int | None, latest: int | None, broker: Broker | None) -> dict[str, Any]:
    found = broker.gaps.get(key[1:], ()) if broker else ()
    begin = max(offset, first or 0)
    lag = None if latest is None else max(0, latest - begin - gaps.count(found, begin, latest))
    return {
        **{"broker": key[0], "topic": key[1], "partition": key[2], "offset": offset, "first": first, "latest": latest},
        "lag": lag,
        "lost": max(0, first - offset) if first is not None else None,
        "oldest_unread_s": _age(broker, key, max(offset, first or 0)) if broker and lag else None,
    }


def _age(broker: Broker, key: Key, offset: int) -> float | None:
    """Return the seconds since the record at an offset was received; None if that is unknown."""
    _, topic, partition = key
    try:
        if isinstance(broker, Directory):
            log = reader.wal(broker.path) if topic == WAL else reader.partition(broker.path, topic, partition)
            lines = log.read(offset, _LINE_BYTES)[1]
        else:
            lines = next((lines for _, lines in broker.read(topic, partition, offset, offset + 1)), b"")
    except KmqError:
        return None
    stamps = (record.parse_stored(line) for line in lines.split(b"\n"))
    stamp = next((stamp for stamp in stamps if stamp), None)  # a record that compaction removed has no stamp
    return _rounded(max(0.0, time.time() - stamp[1] / 1e6)) if stamp else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


# --- for a terminal --------------------------------------------------------------------------------------------------


def as_table(found: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table with a line for each query."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("query", "source", "runs", "batch", "lag", "oldest unread", "last commit", "late", "files", "bytes")
    for number, title in enumerate((*columns, "checkpoint")):
        shown.add_column(title, justify="right" if 3 <= number < 10 else "left", overflow="fold")
    for each in found:
        topics = sorted({(part["broker"], part["topic"]) for part in each["partitions"]})
        shown.add_row(
            each["query"],
            " ".join(f"{broker}:{topic}" for broker, topic in topics[:3]) + (" …" if len(topics) > 3 else ""),
            "yes" if each["running"] else "failed" if each["error"] else "no",
            *(_number(each[name]) for name in ("batch", "lag")),
            *(_ago(each[name]) for name in ("oldest_unread_s", "last_commit_s")),
            *(_number(each[name]) for name in ("late", "files", "bytes")),
            os.path.relpath(each["checkpoint"])
            if len(os.path.relpath(each["checkpoint"])) < 60
            else each["checkpoint"],
        )
    return shown


def as_offsets(each: Mapping[str, Any]) -> Table:
    """Return a table of one query's partitions."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("broker", "topic", "partition", "offset", "latest", "lag", "oldest unread"):
        shown.add_column(title, justify="left" if title in ("broker", "topic") else "right", overflow="fold")
    for part in each["partitions"]:
        figures = (_number(part[name]) for name in ("partition", "offset", "latest", "lag"))
        shown.add_row(part["broker"], part["topic"], *figures, _ago(part["oldest_unread_s"]))
    return shown


def notes(each: Mapping[str, Any]) -> list[str]:
    """Return lines about problems that the table does not show."""
    lines = list(each["problems"])
    if each["unfinished_batch"] is not None and not each["running"]:
        lines.append(f"batch {each['unfinished_batch']} was begun and not finished: it is run again at the next start")
    lost = sum(part["lost"] or 0 for part in each["partitions"])
    if lost:
        lines.append(f"{lost:,} records between its offsets and the logs are lost (retention, or a deleted topic)")
    if each["late"]:
        lines.append(f"{each['late']:,} rows came later than the watermark in its last run, and are in no result")
    if each["error"]:
        lines.append(f"its last run failed: {each['error'].splitlines()[0][:200]}")
    return [f"{each['query']}: {line}" for line in lines]


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
