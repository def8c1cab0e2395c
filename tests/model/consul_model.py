"""A Consul of one server, simulated at the level of Request and Response: what KMQ uses of it, nothing more.

It answers as Consul 1.8 does (tests/contract/test_consul_model.py compares the two). It has no time of its own, and a
blocking query returns at once; `would_block` tells whether the real one would have held it back.

`answer` carries out one request. What it wrote is in `journal` until the next one, so that a test can judge each write.
"""

import base64
import copy
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from kmq.cluster.consul import Response

MAX_OPERATIONS, MAX_BYTES = 64, 512 * 1024


class Asked(Protocol):
    """A request of kmq.cluster.consul, or of a mutated copy of it."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def params(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes: ...


class Pair(NamedTuple):
    """A key's value and what Consul keeps beside it."""

    value: bytes
    created: int
    modified: int
    locked: int = 0
    session: str = ""


class Session(NamedTuple):
    """Who may lock. It ends with its checks; the keys that it has locked are deleted or released then."""

    delay_s: float
    checks: tuple[str, ...]
    keeps_keys: bool


class Write(NamedTuple):
    """One write of a request. None: the key was not there, or is not there any more."""

    key: str
    before: Pair | None
    after: Pair | None


class Refused(Exception):
    """An operation of a Txn did not find what it expects."""


class State:
    """What a snapshot holds."""

    def __init__(self) -> None:
        self.pairs: dict[str, Pair] = {}
        self.graves: dict[str, int] = {}  # deleted keys, and when
        self.sessions: dict[str, Session] = {}
        self.last_write = 0


class ConsulModel:
    """`clock` says the time in seconds, for the lock-delay."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.state = State()
        self.index = 10
        self.checks: set[str] = set()  # of the agent
        self.unknown_checks: set[str] = set()  # of those, which the servers have not heard of yet
        self.delays: dict[str, float] = {}  # by key: until when nobody gets the lock
        self.journal: list[Write] = []
        self._named = 0

    # --- what happens to a Consul -------------------------------------------------------------------------------------

    def snapshot(self) -> State:
        return copy.deepcopy(self.state)

    def restore(self, state: State) -> None:
        """As `consul snapshot restore`: what is there is old, the next write gets a number never given before."""
        self.state = copy.deepcopy(state)
        self.delays.clear()

    def end_session(self, session: str) -> None:
        """As if its check had failed, or somebody had destroyed it: its locks are deleted, or released."""
        ended = self.state.sessions.pop(session, None)
        if ended is None:
            return
        self.index += 1
        for key, pair in list(self.state.pairs.items()):
            if pair.session == session:
                self._write(key, pair._replace(session="", modified=self.index) if ended.keeps_keys else None)
                if ended.delay_s:
                    self.delays[key] = self._clock() + ended.delay_s

    # --- requests -----------------------------------------------------------------------------------------------------

    def answer(self, asked: Asked) -> Response:
        """Carry out a request."""
        self.journal = []
        path = unquote(asked.path)
        if path.startswith("/v1/kv/") and asked.method == "GET":
            return self._read(path.removeprefix("/v1/kv/"), asked.params)
        if path == "/v1/txn":
            return self._txn(asked.body)
        if path == "/v1/session/create":
            return self._create(json.loads(asked.body))
        verb, _, name = path.rpartition("/")
        if verb == "/v1/session/info":
            found = self.state.sessions.get(name)
            return _json([{"ID": name, "LockDelay": int(found.delay_s * 1e9)}] if found else [])
        if verb == "/v1/session/destroy":
            self.end_session(name)
            return _json(True)
        return self._agent(path, name, asked.body)

    def _agent(self, path: str, name: str, body: bytes) -> Response:
        if path == "/v1/agent/service/register":
            self.checks.add(json.loads(body)["Check"]["CheckID"])
            return Response(200, {}, b"")
        if path.startswith("/v1/agent/check/pass/"):
            known = name in self.checks
            return Response(200, {}, b"") if known else _text(500, f'CheckID "{name}" does not have associated TTL')
        if path.startswith("/v1/agent/service/deregister/"):
            self.checks.discard(name)
            for session in [key for key, one in self.state.sessions.items() if name in one.checks]:
                self.end_session(session)
            return Response(200, {}, b"")
        raise AssertionError(f"the model knows no {path}")

    def _create(self, body: dict[str, Any]) -> Response:
        checks = tuple(check["ID"] for check in body["ServiceChecks"])
        missing = [check for check in checks if check not in self.checks or check in self.unknown_checks]
        if missing:
            return _text(500, f"Missing check '{missing[0]}' registration")
        self.index += 1
        self._named += 1
        name = f"{self._named:08x}-0000-4000-8000-000000000000"
        self.state.sessions[name] = Session(
            float(body["LockDelay"].removesuffix("s")), checks, body["Behavior"] == "release"
        )
        return _json({"ID": name})

    # --- keys ---------------------------------------------------------------------------------------------------------

    def position(self, prefix: str) -> int:
        """Return X-Consul-Index of a query of this prefix."""
        state = self.state
        there = [pair.modified for key, pair in state.pairs.items() if key.startswith(prefix)]
        gone = [index for key, index in state.graves.items() if key.startswith(prefix)]
        return max(there + gone, default=0) or state.last_write or 1

    def would_block(self, asked: Asked) -> bool:
        """Return True if the real Consul would hold the answer to this request back."""
        index = int(asked.params.get("index", "0"))
        return index > 0 and self.position(unquote(asked.path).removeprefix("/v1/kv/")) <= index

    def _read(self, key: str, params: Mapping[str, str]) -> Response:
        pairs = self.state.pairs
        if "recurse" in params:
            found, position = sorted(name for name in pairs if name.startswith(key)), self.position(key)
        else:
            found = [key] if key in pairs else []
            position = pairs[key].modified if key in pairs else self.state.last_write or 1
        headers = {"x-consul-index": str(position)}
        if not found:
            return Response(404, headers, b"")
        return _json([_entry(name, pairs[name]) for name in found], headers)

    def _write(self, key: str, pair: Pair | None) -> None:
        pairs, before = self.state.pairs, self.state.pairs.get(key)
        self.journal.append(Write(key, before, pair))
        self.state.last_write = self.index
        if pair is not None:
            pairs[key] = pair
            self.state.graves.pop(key, None)
        elif pairs.pop(key, None) is not None:
            self.state.graves[key] = self.index

    # --- Txn ----------------------------------------------------------------------------------------------------------

    def _txn(self, body: bytes) -> Response:
        if len(body) > MAX_BYTES:
            return _text(413, f"Request body too large, max allowed is {MAX_BYTES} bytes")
        operations = [item["KV"] for item in json.loads(body)]
        if len(operations) > MAX_OPERATIONS:
            return _text(413, f"Transaction contains too many operations ({len(operations)} > {MAX_OPERATIONS})")
        held_back = [
            (at, f'failed to lock key "{fields["Key"]}" due to lock delay')
            for at, fields in enumerate(operations)
            if fields["Verb"] == "lock" and self.delays.get(fields["Key"], 0.0) > self._clock()
        ]
        if held_back:
            return _conflict(held_back)
        before = self.state
        self.state = copy.copy(before)
        self.state.pairs, self.state.graves = dict(before.pairs), dict(before.graves)
        self.index += 1
        results: list[dict[str, Any]] = []
        errors = []
        for at, fields in enumerate(operations):
            try:
                results += [{"KV": entry} for entry in self._operation(fields)]
            except Refused as refused:
                errors.append((at, str(refused)))
        if errors:
            self.state, self.journal = before, []
            return _conflict(errors)
        return _json({"Results": results, "Errors": None})

    def _operation(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        verb, key = fields["Verb"], fields["Key"]
        pairs = self.state.pairs
        found = pairs.get(key)
        if verb == "get-tree":
            return [_entry(name, pairs[name]) for name in sorted(pairs) if name.startswith(key)]
        if verb == "get":
            if found is None:
                raise Refused(f'key "{key}" doesn\'t exist')
            return [_entry(key, found)]
        if verb == "check-not-exists":
            if found is not None:
                raise Refused(f'key "{key}" exists')
            return []
        if verb == "check-session":
            return [self._check_session(key, found, fields["Session"])]
        if verb == "check-index":
            if found is None or found.modified != fields["Index"]:
                raise Refused(f'current modify index of key "{key}" differs')
            return [_entry(key, found) | {"Value": None}]
        if verb in ("delete", "delete-cas"):
            if verb == "delete-cas" and found is not None and found.modified != fields["Index"]:
                raise Refused(f'failed to delete key "{key}", index is stale')
            if found is not None:
                self._write(key, None)
            return []
        return [self._set(verb, key, found, fields)]

    def _check_session(self, key: str, found: Pair | None, session: str) -> dict[str, Any]:
        if found is None:
            raise Refused(f'failed to check session, key "{key}" doesn\'t exist')
        if found.session != session:
            raise Refused(f'failed session check for key "{key}", current session "{found.session}" != "{session}"')
        return _entry(key, found) | {"Value": None}

    def _set(self, verb: str, key: str, found: Pair | None, fields: dict[str, Any]) -> dict[str, Any]:
        value, session = base64.b64decode(fields.get("Value") or ""), fields.get("Session", "")
        created = found.created if found is not None else self.index
        locked, holder = 0, found.session if found is not None else ""
        if verb == "cas" and fields.get("Index", 0) != (found.modified if found is not None else 0):
            raise Refused(f'failed to set key "{key}", index is stale')
        if verb == "lock":
            if session not in self.state.sessions:
                raise Refused(f'invalid session "{session}"')
            if holder and holder != session:
                raise Refused(f'failed to lock key "{key}", lock is already held')
            locked = found.locked if found is not None else 0
            locked, holder = locked + (holder != session), session
        if verb == "unlock":
            if found is None or holder != session:
                raise Refused(f'failed to unlock key "{key}", lock isn\'t held, or is held by another session')
            locked, holder = found.locked, ""
        pair = Pair(value, created, self.index, locked, holder)
        if found is not None and found._replace(created=0, modified=0) == pair._replace(created=0, modified=0):
            pair = found  # nothing to write
        else:
            self._write(key, pair)
        return _entry(key, pair) | {"Value": None}


def _entry(key: str, pair: Pair) -> dict[str, Any]:
    value = base64.b64encode(pair.value).decode() if pair.value else None
    entry = {"LockIndex": pair.locked, "Key": key, "Flags": 0, "Value": value}
    if pair.session:
        entry["Session"] = pair.session
    return entry | {"CreateIndex": pair.created, "ModifyIndex": pair.modified}


def _json(body: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(200, headers or {}, json.dumps(body).encode())


def _text(status: int, text: str) -> Response:
    return Response(status, {}, text.encode())


def _conflict(errors: list[tuple[int, str]]) -> Response:
    body = {"Results": None, "Errors": [{"OpIndex": at, "What": what} for at, what in errors]}
    return Response(409, {}, json.dumps(body).encode())
