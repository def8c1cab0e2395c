"""The part of Consul's HTTP API that KMQ uses: what is asked, what the answers mean, and how both are sent.

Each function is a generator, a `Steps`: it yields a Request or a Pause, gets the Response, and returns its result.
The transport carries the steps out over HTTP, at the first of several addresses that answers.
The tests carry them out in any order they like.

Invariant   A request that changes something is sent a second time only if the first one was surely not sent. Otherwise
            the caller is told that nobody knows (Unanswered), and decides.
Errors      Conflict      a Txn was refused, and `op_index` says which operation refused it: nothing was changed
            Unanswered    no answer, or one that does not tell whether the request was carried out
            ConsulError   any other refusal: asking again gets the same answer
"""

import asyncio
import base64
import binascii
import json
import os
import ssl
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import httpx

from kmq.errors import EXIT_CONFIG, ConfigError, RetryError, Stopped

if find_spec("sniffio") is None:
    sys.modules["sniffio"] = None  # type: ignore[assignment]  # httpcore looks for it in each request, on all of the path

T = TypeVar("T")

MAX_OPERATIONS = 64  # of a Txn
LOCK_DELAY_S = 1  # after a session was lost nobody gets its locks for so long: what it has sent has arrived by then


class Request(NamedTuple):
    """What to send. `wait_s`: how long Consul may hold the answer back."""

    method: str
    path: str
    params: Mapping[str, str] = {}
    body: bytes = b""
    wait_s: float = 0.0


class Pause(NamedTuple):
    """Do nothing for so many seconds."""

    seconds: float


class Response(NamedTuple):
    """What came back. The names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Steps = Generator[Request | Pause, Any, T]  # it is sent a Response for each Request, and None after a Pause


class ConsulError(RetryError):
    """Consul has refused a request. `status` is that of HTTP; 0: there was none; 403: the token is wrong."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status
        if status == 403:
            self.exit_code = EXIT_CONFIG


class Conflict(ConsulError):
    """A Txn changed nothing because operation `op_index` did not find what it expects."""

    def __init__(self, text: str, op_index: int) -> None:
        super().__init__(text, 409)
        self.op_index = op_index


class Unanswered(ConsulError):
    """Nobody knows whether the request was carried out, or it may still be."""


class KvEntry(NamedTuple):
    """A key and its value. `version` rises with each write; `session` holds the key's lock, "": nobody does."""

    key: str
    value: bytes
    version: int
    session: str


class Watched(NamedTuple):
    """All entries under a prefix. Give `position` to the next `watch`."""

    entries: list[KvEntry]
    position: int


# --- reading ---------------------------------------------------------------------------------------------------------


def read(key: str) -> Steps[KvEntry | None]:
    """Return the entry as Consul's leader has it now, confirmed by a majority; None if there is no such key."""
    response = yield Request("GET", f"/v1/kv/{key}", {"consistent": ""})
    entries = _entries(response)
    return entries[0] if entries else None


def watch(prefix: str, position: int, wait_s: float) -> Steps[Watched]:
    """Return everything under `prefix` when something there has changed since `position`, at the latest after `wait_s`.

    From position 0 it returns at once. A position that went backwards is returned as 0: Consul was restored, so what
    was read before says nothing.
    """
    millis = max(1, int(wait_s * 1000))  # Consul takes 0 for its default, which is five minutes
    params = {"recurse": "", "index": str(position), "wait": f"{millis}ms"}
    response = yield Request("GET", f"/v1/kv/{prefix}", params, wait_s=wait_s)
    entries = _entries(response)
    now = int(response.headers.get("x-consul-index", "0"))
    return Watched(entries, now if now >= position else 0)


def _entries(response: Response) -> list[KvEntry]:
    if response.status == 404:
        if "x-consul-index" not in response.headers:  # Consul sends it with 404 too
            text = " ".join(response.body.decode(errors="replace").split())[:80]
            raise ConsulError(f"what answers at KMQ_CONSUL is no Consul: 404 {text!r}; name its HTTP address", 404)
        return []
    return [_entry(item) for item in _json(response)]


def _entry(item: dict[str, Any]) -> KvEntry:
    value = binascii.a2b_base64(item["Value"] or "", strict_mode=True)
    return KvEntry(item["Key"], value, item["ModifyIndex"], item.get("Session", ""))


def given_entries(text: bytes) -> list[KvEntry]:
    """Return the entries of the JSON array that `consul watch` gives its handler. Raises ValueError if it is none."""
    try:
        return [_entry(item) for item in json.loads(text) or []]
    except (KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise ValueError(f"not what consul watch -type=keyprefix prints: {error!r}") from None


# --- one Txn ---------------------------------------------------------------------------------------------------------


class KvOperation(NamedTuple):
    """One operation of a Txn."""

    verb: str
    key: str
    value: bytes = b""
    version: int = 0
    session: str = ""


def check_session(key: str, session: str) -> KvOperation:
    """Refuse the Txn unless this session holds the key's lock."""
    return KvOperation("check-session", key, session=session)


def cas(key: str, value: bytes, version: int) -> KvOperation:
    """Set a key that still has this version; with 0, a key that is not there."""
    return KvOperation("cas", key, value, version)


def txn(operations: Sequence[KvOperation]) -> Steps[list[KvEntry]]:
    """Carry out all operations, or none. Returns the entries that were read or written."""
    body = json.dumps([{"KV": _fields(operation)} for operation in operations]).encode()
    response = yield Request("PUT", "/v1/txn", body=body)
    return [_entry(result["KV"]) for result in _json(response)["Results"] or []]


def _fields(operation: KvOperation) -> dict[str, object]:
    fields: dict[str, object] = {"Verb": operation.verb, "Key": operation.key}
    if operation.verb in ("set", "cas", "lock", "unlock"):
        fields["Value"] = base64.b64encode(operation.value).decode()
    if operation.verb in ("cas", "delete-cas", "check-index"):
        fields["Index"] = operation.version
    if operation.session:
        fields["Session"] = operation.session
    return fields


# --- sessions --------------------------------------------------------------------------------------------------------


def register(name: str, ttl_s: float) -> Steps[None]:
    """Give this agent a service `name` with a check that fails unless `beat` is called within every `ttl_s`.

    A service and not a bare check, because the agent forgets it a minute after the check has failed.
    """
    check = {
        "CheckID": name,
        "TTL": f"{int(ttl_s * 1000)}ms",
        "Status": "passing",
        "DeregisterCriticalServiceAfter": "1m",
    }
    yield from _put("/v1/agent/service/register", {"ID": name, "Name": "kmq", "Check": check})


def deregister(name: str) -> Steps[None]:
    """Take the service and its check away again."""
    yield from _put(f"/v1/agent/service/deregister/{name}")


def beat(name: str) -> Steps[None]:
    """Say that the owner of the check is alive. Raises ConsulError if this agent has no such check."""
    yield from _put(f"/v1/agent/check/pass/{name}")


def create_session(name: str, keeps_keys: bool = False) -> Steps[str]:
    """Return a new session that ends when the check `name`, or the agent's node, fails.

    Its locks are then deleted; with `keeps_keys` they are given back, and the keys stay with their values.
    """
    body = {
        "Name": name,
        "LockDelay": f"{LOCK_DELAY_S}s",
        "Behavior": "release" if keeps_keys else "delete",
        "NodeChecks": ["serfHealth"],
        "ServiceChecks": [{"ID": name}],
    }
    response = yield Request("PUT", "/v1/session/create", body=json.dumps(body).encode())
    return str(_json(response)["ID"])


def has_session(session: str) -> Steps[bool]:
    """Return True if there is such a session."""
    response = yield Request("GET", f"/v1/session/info/{session}", {"consistent": ""})
    return bool(_json(response))


def destroy_session(session: str) -> Steps[None]:
    """End a session: its locks are given back."""
    yield from _put(f"/v1/session/destroy/{session}")


def _put(path: str, body: object = None) -> Steps[None]:
    response = yield Request("PUT", path, body=json.dumps(body).encode() if body is not None else b"")
    _check(response)


# --- answers ---------------------------------------------------------------------------------------------------------


def _json(response: Response) -> Any:
    _check(response)
    try:
        return json.loads(response.body)
    except ValueError:
        raise Unanswered(f"Consul answered something that is not JSON: {response.body[:80]!r}") from None


def _check(response: Response) -> None:
    """Raise what the status says."""
    if response.status < 300:
        return
    text = response.body.decode(errors="replace").strip()
    if response.status == 409:
        raise _conflict(text)
    if response.status >= 500:  # also "No cluster leader", and a leader that lost its office while it was at work
        raise Unanswered(f"Consul: {text or response.status}", response.status)
    if response.status == 403:
        text = f"{text or 'forbidden'}; KMQ_CONSUL_TOKEN must be a token that may do this"
    raise ConsulError(f"Consul: {text or response.status}", response.status)


def _conflict(text: str) -> ConsulError:
    try:
        errors = json.loads(text)["Errors"]
        first = min(errors, key=lambda error: int(error["OpIndex"]))
        return Conflict(f"Consul: {first['What']}", int(first["OpIndex"]))
    except (ValueError, KeyError, TypeError):
        return ConsulError(f"Consul: {text or 409}", 409)


# --- transport -------------------------------------------------------------------------------------------------------

_ANSWER_S = 4.0  # longest time for an answer that Consul does not hold back: then another address is asked
_CONNECT_S = 2.0
_WATCH_SLACK = 17 / 16  # Consul adds up to a sixteenth to the time of a watch


class ConsulAddress(NamedTuple):
    """Where Consul is, and how to get in."""

    urls: Sequence[str]
    token: str = ""
    ca: str = ""  # file of a certificate authority; "": those of the system

    @classmethod
    def of(cls, text: str, token: str = "", ca: str = "") -> "ConsulAddress":
        """Return the address that KMQ_CONSUL holds: `host:port` or a URL, several with commas."""
        urls = []
        for part in filter(None, map(str.strip, text.split(","))):
            url = part if "://" in part else f"http://{part}"
            try:
                parsed = httpx.URL(url)
            except httpx.InvalidURL as error:
                raise ConfigError(f"KMQ_CONSUL={text!r}: {part!r}: {error}") from None
            if parsed.scheme not in ("http", "https") or not parsed.host:
                raise ConfigError(f"KMQ_CONSUL={text!r}: {part!r} must be host:port, http://… or https://…")
            urls.append(url.rstrip("/"))
        if not urls:
            raise ConfigError("KMQ_CONSUL: must name at least one address, such as 127.0.0.1:8500")
        return cls(urls, token, ca)


class Transport:
    """Carries steps out, in an event loop."""

    def __init__(self, address: ConsulAddress) -> None:
        self._address, self._at = address, 0
        try:
            verify = ssl.create_default_context(cafile=address.ca or None)
        except OSError as error:
            raise ConfigError(f"KMQ_CONSUL_CA={address.ca}: {error}") from None
        headers = {"X-Consul-Token": address.token} if address.token else {}
        self._client = httpx.AsyncClient(verify=verify, headers=headers, trust_env=False)

    async def run(self, steps: Steps[T], stop: threading.Event | None = None) -> T:
        """Carry out these steps and return their result. Raises Stopped between two steps once `stop` is set."""
        try:
            asked = next(steps)
            while True:
                if stop is not None and stop.is_set():
                    raise Stopped("told to stop")
                try:
                    answer = await self.ask(asked)
                except ConsulError as error:
                    asked = steps.throw(error)
                else:
                    asked = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def ask(self, asked: Request | Pause) -> Response | None:
        """Ask one address after the other. Raises Unanswered if another try could do something twice."""
        if isinstance(asked, Pause):
            await asyncio.sleep(asked.seconds)
            return None
        timeout = httpx.Timeout(_ANSWER_S + asked.wait_s * _WATCH_SLACK, connect=_CONNECT_S)
        left = len(self._address.urls)
        while True:
            at = self._at
            url = self._address.urls[at]
            try:
                response = await self._client.request(
                    asked.method, url + asked.path, params=asked.params, content=asked.body, timeout=timeout
                )
            except httpx.HTTPError as error:
                if self._at == at:  # another task may have left it already
                    self._at = (at + 1) % len(self._address.urls)
                left -= 1
                was_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if not left or (was_sent and asked.method != "GET"):
                    raise Unanswered(f"Consul at {url}: {_reason(error)}") from error
            else:
                headers = {name.lower(): value for name, value in response.headers.items()}
                return Response(response.status_code, headers, response.content)

    async def close(self) -> None:
        await self._client.aclose()


def _reason(error: httpx.HTTPError) -> str:
    """Return what has failed, in the system's words if it has any: asyncio only says that all attempts have failed."""
    if isinstance(error, httpx.TimeoutException):
        return "timed out"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConsulError):  # of an earlier request, whose error is handled
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0 and not isinstance(cause, ssl.SSLError):
            return f"[Errno {cause.errno}] {os.strerror(cause.errno)}"
        cause = cause.exceptions[-1] if isinstance(cause, BaseExceptionGroup) else cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
