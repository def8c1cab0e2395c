"""Option groupId: a stream commits its progress as the offsets of a consumer group, by the HTTP API of each gateway.

    .option("groupId", "etl")   → `kmq groups describe etl` shows the query's offsets and lag

A query never reads these offsets: its checkpoint says where it resumes. They are for people and monitoring, who see
the query's lag beside that of other groups (kmq groups describe, /metrics).

Invariant   Only offsets whose batch has finished are committed. A commit never fails or ends a query. A failed commit
            is warned of once; a later commit includes its offsets, because each commits everything that has changed.
Members     The query does not join the group. The gateway accepts commits of non-members only while a group has no
            members. Generation 0 marks such a commit, also where callers without a name are a member of their own.
Time        At most BUDGET_S for one call of `commit`, and no attempt for PAUSE_S after a failure.
Memory      Two numbers for each partition that was read.
Not covered Two queries with one groupId that read the same partitions: the last commit is shown. Their offsets are
            compared every LOOK_S, and a difference is warned of.
"""

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import quote

from kmq.errors import KmqError
from kmq.log.reader import WAL
from kmq.logfmt import Logger
from kmq.spark.connections import Access
from kmq.spark.source.brokers import Remote
from kmq.spark.source.plan import Key, Offsets
from kmq.wire.refusals import GONE, RETRYABLE

BUDGET_S = 3.0  # for one call: later offsets are committed by the next call
PAUSE_S = 5.0  # between a failure and the next attempt
LOOK_S = 30.0  # between two checks whether others commit to the same partitions
_HAS_MEMBERS = ("unknown_member", "fenced", "group_not_empty")


class _RefusedError(Exception):
    """A gateway refuses a commit. `code`: "" if it gives no code."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}" if code else text)
        self.code = code


class GroupOffsets:
    """The offsets of one group at the gateways of one source; a shard is one gateway, `a:8082,b:8082`.

    `is_second`: the source itself commits the same offsets, and warns of other users of the group.
    """

    def __init__(self, group: str, servers: Iterable[str], access: Access, is_second: bool = False) -> None:
        self._group, self._is_second = group, is_second
        self._servers = {*servers}
        self._access = replace(access, timeout_s=min(access.timeout_s, BUDGET_S))
        self._remotes: dict[str, Remote] = {}
        self._log = Logger("spark")
        self._committed: Offsets = {}
        self._next_look = 0.0
        self._not_before: dict[str, float] = {}  # by gateway: earliest next attempt after a failure
        self._problems: dict[str, str] = {}  # by gateway: the event that was warned of last

    def commit(self, offsets: Mapping[Key, int], is_last: bool = False) -> None:
        """Commit the next offsets to read. Never raises. `is_last`: no later call will come, so do not wait for it."""
        changed = {key: at for key, at in offsets.items() if key[1] != WAL and self._committed.get(key) != at}
        deadline = time.monotonic() + BUDGET_S
        for name in sorted({key[0] for key in changed}):
            if not self._servers.issuperset(name.split(",")):
                continue
            mine = {key: at for key, at in changed.items() if key[0] == name}
            if time.monotonic() < self._not_before.get(name, 0.0) and not is_last:
                continue
            remote = self._remotes.setdefault(name, Remote(name, self._access))
            try:
                self._commit_somewhere(remote, mine, offsets, deadline)
            except (_RefusedError, OSError, HTTPException, ValueError, KeyError, TypeError, KmqError) as error:
                self._failed(remote, error)
            else:
                self._problems.pop(name, None)

    def _commit_somewhere(
        self, remote: Remote, rows: Mapping[Key, int], offsets: Mapping[Key, int], deadline: float
    ) -> None:
        """Commit through the first address of the broker that accepts it."""
        for left in reversed(range(len(remote.addresses))):
            try:
                with closing(remote.connect()) as connection:
                    self._look(connection, remote, offsets)
                    return self._commit_at(connection, remote, rows, deadline)
            except (_RefusedError, OSError, HTTPException) as error:
                is_final = isinstance(error, _RefusedError) and error.code not in RETRYABLE
                if is_final or not left or time.monotonic() > deadline:
                    raise
                remote.turn()

    def _failed(self, remote: Remote, reason: Exception) -> None:
        """Warn of a failure, once until it changes, and do not ask the gateway for a while."""
        self._not_before[remote.name] = time.monotonic() + PAUSE_S
        has_members = isinstance(reason, _RefusedError) and reason.code in _HAS_MEMBERS
        event = "group_has_members" if has_members else "offsets_not_committed"
        if event == self._problems.get(remote.name):
            return
        self._problems[remote.name] = event
        at = {"group": self._group, "at": remote.describe()}
        if not has_members:
            said = str(reason) or type(reason).__name__
            effect = "the query goes on; its offsets go with a later batch"
            self._log.warn("offsets_not_committed", **at, reason=said, effect=effect)
        elif not self._is_second:
            effect = "the query goes on and does not commit; give it a groupId of its own"
            self._log.warn("group_has_members", **at, reason="only they may commit", effect=effect)

    def _commit_at(self, connection: HTTPConnection, remote: Remote, rows: Mapping[Key, int], deadline: float) -> None:
        """Commit topic by topic, because the API takes one topic a request."""
        for topic in sorted({key[1] for key in rows}):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all offsets were taken within {BUDGET_S:g} s")
            self._commit_topic(connection, remote, {key: at for key, at in rows.items() if key[1] == topic})

    def _commit_topic(self, connection: HTTPConnection, remote: Remote, rows: Mapping[Key, int]) -> None:
        """Commit the partitions of one topic. Partitions that no longer exist are skipped."""
        topic = next(iter(rows))[1]
        places = [{"partition": key[2], "offset": at, "metadata": "spark"} for key, at in rows.items()]
        body = {"group": self._group, "generation": 0, "offsets": places}
        try:
            self._ask(connection, remote, "POST", f"/api/topics/{quote(topic, safe='')}/commit", body)
        except _RefusedError as refused:
            if refused.code not in GONE:
                raise
            if len(rows) > 1:
                for key, at in rows.items():
                    self._commit_topic(connection, remote, {key: at})
                return
        self._committed.update(rows)

    def _look(self, connection: HTTPConnection, remote: Remote, offsets: Mapping[Key, int]) -> None:
        """Warn if the group's offsets are not those that this query has committed, or is about to commit."""
        now = time.monotonic()
        mine = {key: at for key, at in self._committed.items() if key[0] == remote.name}
        if self._is_second or not mine or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        found = self._ask(connection, remote, "GET", f"/api/groups/{quote(self._group, safe='')}")
        for row in found["partitions"]:
            key, at = (remote.name, row["topic"], row["partition"]), row["committed"]
            if key in mine and at not in (None, mine[key], offsets.get(key)):
                self._log.warn(
                    "group_shared",
                    group=self._group,
                    at=f"{row['topic']}/{row['partition']}",
                    reason=f"committed here {mine[key]}, found {at}: something else commits to this group",
                    effect="its lag is that of whoever came last; give each query a groupId of its own",
                )
                return

    def _ask(self, connection: HTTPConnection, remote: Remote, method: str, path: str, body: object = None) -> Any:
        headers = remote.authorization() | ({"Content-Type": "application/json"} if body is not None else {})
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        found = response.read()
        if response.status < 400:
            return json.loads(found)
        try:
            answer = json.loads(found)
            code, said = str(answer["code"]), str(answer["message"])
        except (ValueError, KeyError, TypeError):
            text = f"HTTP {response.status}; this is no gateway of KMQ, or one without groups"
            raise _RefusedError("", text) from None
        if code == "unknown_group":
            return {"partitions": []}
        raise _RefusedError(code, said)
