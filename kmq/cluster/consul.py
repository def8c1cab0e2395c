"""The part of Consul's HTTP API that KMQ uses: requests, the meaning of the responses, and the connections.

Each function is a generator, a `Steps`: it yields a Request or a Pause, gets the Response, and returns its result.
Example: `read("kmq/dev/epoch")` yields `GET /v1/kv/kmq/dev/epoch?consistent=` and returns a KvEntry or None.
The transport carries the steps out over HTTP, at the first of several addresses that answers.
The tests carry them out in any order they like.

Invariant   A request that changes something is sent a second time only if the first one was surely not sent. Otherwise
            the caller gets Unanswered: the outcome is unknown, and the caller decides.
Errors      Conflict      a Txn was refused, and nothing was changed; `op_index` is the operation that refused it
            Unanswered    no answer, or an answer that leaves open whether the request was carried out
            ConsulError   any other refusal: asking again gets the same answer
"""

import asyncio
import base64
import binascii
import json
import os
import re
import ssl
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

import h11

from kmq.errors import EXIT_CONFIG, ConfigError, RetryError, Stopped, quotation

T = TypeVar("T")

MAX_OPERATIONS = 64  # of a Txn
LOCK_DELAY_S = 1  # after a session was lost its locks stay taken for so long: by then its last requests have arrived


class Request(NamedTuple):
    """A request to send. `wait_s`: how long Consul may hold the answer back."""

    method: str
    path: str
    params: Mapping[str, str] = {}
    body: bytes = b""
    wait_s: float = 0.0


class Pause(NamedTuple):
    """Wait for so many seconds."""

    seconds: float


class Response(NamedTuple):
    """An answer. The names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Steps = Generator[Request | Pause, Any, T]  # gets a Response for each Request, and None after a Pause


class ConsulError(RetryError):
    """Consul has refused a request. `status`: the HTTP status (403: the token is wrong); 0: there is no status."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status
        if status == 403:
            self.exit_code = EXIT_CONFIG


class Conflict(ConsulError):
    """A Txn changed nothing because the condition of operation `op_index` was not met."""

    def __init__(self, text: str, op_index: int) -> None:
        super().__init__(text, 409)
        self.op_index = op_index


class Unanswered(ConsulError):
    """The outcome of the request is unknown. It may have been carried out, or may still be."""


class KvEntry(NamedTuple):
    """A key and its value. `version` rises with each write; `session` holds the key's lock ("": not locked)."""

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
    """Return all entries under `prefix` when one has changed since `position`, at the latest after `wait_s`.

    With position 0 return at once. If the new position is below `position`, return it as 0: Consul was restored, so
    entries read before may be wrong.
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
    """Return the entries of the JSON array that `consul watch` gives its handler. Raises ValueError for other texts."""
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
    """Set a key if it still has this version; version 0: if it does not exist."""
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
    """Register a service `name` at this agent, with a check that fails unless `beat` is called within every `ttl_s`.

    It is a service and not a bare check because the agent forgets a service a minute after its check has failed.
    """
    check = {
        "CheckID": name,
        "TTL": f"{int(ttl_s * 1000)}ms",
        "Status": "passing",
        "DeregisterCriticalServiceAfter": "1m",
    }
    yield from _put("/v1/agent/service/register", {"ID": name, "Name": "kmq", "Check": check})


def deregister(name: str) -> Steps[None]:
    """Remove the service and its check."""
    yield from _put(f"/v1/agent/service/deregister/{name}")


def beat(name: str) -> Steps[None]:
    """Report that the owner of the check is alive. Raises ConsulError if this agent has no such check."""
    yield from _put(f"/v1/agent/check/pass/{name}")


def create_session(name: str, keeps_keys: bool = False) -> Steps[str]:
    """Return a new session that ends when the check `name`, or the agent's node, fails.

    Its locked keys are then deleted. With `keeps_keys` they are only unlocked, and stay with their values.
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
    """End a session and with it its locks."""
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
    """Raise the error that belongs to the status, if any."""
    if response.status < 300:
        return
    text = response.body.decode(errors="replace").strip()
    if response.status == 409:
        raise _conflict(text)
    if response.status >= 500:  # also "No cluster leader", and a leader deposed during the request
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

_ANSWER_S = 4.0  # longest wait for an answer that Consul does not hold back; then another address is asked
_CONNECT_S = 2.0
_EYEBALLS_S = 0.25  # then the next address of a host is tried too
_IDLE_S = 5.0  # a connection idle for longer is not used again: a firewall may have forgotten it
_WATCH_SLACK = 17 / 16  # Consul adds up to a sixteenth to the time of a watch


class ConsulAddress(NamedTuple):
    """Addresses of Consul, and the token and certificates for it."""

    urls: Sequence[str]
    token: str = ""
    ca: str = ""  # file of a certificate authority; "": the system's authorities

    @classmethod
    def of(cls, text: str, token: str = "", ca: str = "") -> "ConsulAddress":
        """Return the address that KMQ_CONSUL holds: `host:port` or a URL, several with commas."""
        urls = []
        for number, part in enumerate(filter(None, map(str.strip, text.split(","))), 1):
            url = part if "://" in part else f"http://{part}"
            what = f"KMQ_CONSUL={quotation(text, part)}" + (f": address {number}" if "@" in text else "")
            why = "must be host:port, http://… or https://…"
            if "@" in text:  # an error of _Url.of may name a part of it
                why += ", special characters of the login as %40"
            try:
                parsed = _Url.of(url)
            except ValueError as error:
                raise ConfigError(f"{what} {why}" if "@" in text else f"{what}: {error}") from None
            if parsed.scheme not in ("http", "https") or not parsed.host or not url.isprintable() or " " in url:
                raise ConfigError(f"{what} {why}")
            urls.append(url.rstrip("/"))
        if not urls:
            raise ConfigError("KMQ_CONSUL: must name at least one address, such as 127.0.0.1:8500")
        return cls(urls, token, ca)


class _Url(NamedTuple):
    """The parts of an address. `name`: for the header Host; `prefix`: of each path; `login`: for a proxy."""

    scheme: str
    host: str
    port: int
    name: str
    prefix: str
    login: str

    @classmethod
    def of(cls, url: str) -> "_Url":
        """Return the parts of an URL. Raises ValueError."""
        parts = urlsplit(url)
        port = parts.port if parts.port is not None else 443 if parts.scheme == "https" else 80
        coded, _, name = parts.netloc.rpartition("@")
        user = unquote(coded)
        if user and ":" not in user:
            user += ":"  # an empty password
        login = base64.b64encode(user.encode()).decode()
        return cls(
            parts.scheme, parts.hostname or "", port, name.encode("idna").decode(), quote(parts.path, "/%"), login
        )

    @property
    def shown(self) -> str:
        """Return the URL without its login."""
        return f"{self.scheme}://{self.name}{self.prefix}"


class _Connection(asyncio.Protocol):
    """One connection to Consul, with one request at a time. Not reused once a request has failed or was cancelled."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None  # None: not connected
        self._has_ended = False
        self._lost: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # of a request that is not answered
        self._idle_since = 0.0

    @property
    def is_usable(self) -> bool:
        """Return True if the connection is ready for a request, and not idle for longer than _IDLE_S."""
        is_ready = self._transport is not None and not self._has_ended and self._http.our_state is h11.IDLE
        return is_ready and time.monotonic() - self._idle_since < _IDLE_S

    async def ask(
        self, request: Request, target: str, headers: list[tuple[bytes, bytes]], silence_s: float
    ) -> Response:
        """Send a request and return the answer. Raises OSError and h11.ProtocolError."""
        http, loop, transport = self._http, asyncio.get_running_loop(), self._transport
        length = [(b"Content-Length", b"%d" % len(request.body))] if request.method != "GET" else []
        sent = [h11.Request(method=request.method, target=target, headers=[*headers, *length]), h11.Data(request.body)]
        parts = [http.send(event) or b"" for event in (*sent, h11.EndOfMessage())]
        if transport is not None:  # else `_more` raises the reason
            transport.write(b"".join(parts))
        status, found, body = 0, dict[str, str](), bytearray()
        async with asyncio.timeout(silence_s) as timer:
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    await self._more()
                    timer.reschedule(loop.time() + silence_s)
                elif isinstance(event, h11.Response):
                    status = event.status_code
                    found = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                elif isinstance(event, h11.Data):
                    body += event.data
        if http.our_state is http.their_state is h11.DONE and not http.trailing_data[0]:
            http.start_next_cycle()
            self._idle_since = time.monotonic()
        return Response(status, found, bytes(body))

    async def _more(self) -> None:
        """Wait until more of the answer has arrived."""
        if self._lost is not None:
            raise self._lost
        if self._has_ended:
            if self._http.their_state is h11.SEND_RESPONSE:
                raise ConnectionError("the connection was closed without an answer")
            return self._http.receive_data(b"")  # the end of the connection may be the end of an answer
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._idle_since = transport, time.monotonic()

    def data_received(self, data: bytes) -> None:
        if self._http.our_state is h11.IDLE:  # no request was sent
            return self.abort()
        self._http.receive_data(data)
        self._wake()

    def eof_received(self) -> None:
        self._has_ended = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self._lost, self._has_ended = None, error, True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


class Transport:
    """Carries steps out, in an event loop."""

    def __init__(self, address: ConsulAddress) -> None:
        self._at = 0
        self._urls = [_Url.of(url) for url in address.urls]
        try:
            self._tls = ssl.create_default_context(cafile=address.ca or None)
        except OSError as error:
            raise ConfigError(f"KMQ_CONSUL_CA={address.ca}: {error}") from None
        if not re.fullmatch("[!-~]*", address.token):  # h11's own error would show the token
            raise ConfigError(
                "KMQ_CONSUL_TOKEN: must be printable ASCII without blanks; leave out the line break at its end, if any"
            )
        self._token = [(b"X-Consul-Token", address.token.encode())] if address.token else []
        self._idle: list[tuple[int, _Connection]] = []  # idle connections, each with the index of its address
        self._has_closed = False

    async def run(self, steps: Steps[T], stop: threading.Event | None = None) -> T:
        """Carry out these steps and return their result. Raises Stopped between two steps once `stop` is set."""
        try:
            step = next(steps)
            while True:
                if stop is not None and stop.is_set():
                    raise Stopped("told to stop")
                try:
                    answer = await self.ask(step)
                except ConsulError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def ask(self, step: Request | Pause) -> Response | None:
        """Ask one address after the other. Raises Unanswered if all failed, or a retry could change something twice."""
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        left = len(self._urls)
        while True:
            at, was_sent = self._at, False
            try:
                connection = await self._connect(at)
                was_sent = True
                return await self._ask(connection, at, step)
            except (OSError, h11.ProtocolError) as error:
                if self._at == at:  # else another task has moved to the next address already
                    self._at = (at + 1) % len(self._urls)
                left -= 1
                if not left or (was_sent and step.method != "GET"):
                    raise Unanswered(f"Consul at {self._urls[at].shown}: {_reason(error)}") from error

    async def _connect(self, at: int) -> _Connection:
        """Return an idle or a new connection to this address. Raises OSError."""
        idle, self._idle = self._idle, []
        found = None
        for to, each in idle:
            if not each.is_usable:
                each.abort()
            elif found is None and to == at:
                found = each
            else:
                self._idle.append((to, each))
        if found is not None:
            return found
        url = self._urls[at]
        tls, connect = self._tls if url.scheme == "https" else None, asyncio.get_running_loop().create_connection
        # The race (happy eyeballs) is for names with several addresses. If it is cancelled, asyncio forgets a socket
        # that has just connected. So do not race for a plain address.
        delay = None if re.fullmatch(r"[\d.]+|.*:.*", url.host) else _EYEBALLS_S
        async with asyncio.timeout(_CONNECT_S if tls is None else 2 * _CONNECT_S):  # TCP, then TLS
            _, made = await connect(_Connection, url.host, url.port, ssl=tls, happy_eyeballs_delay=delay)
        return made

    async def _ask(self, connection: _Connection, at: int, request: Request) -> Response:
        url, query = self._urls[at], urlencode(request.params)
        target = f"{url.prefix}{quote(request.path)}{'?' if query else ''}{query}"
        login = [(b"Authorization", b"Basic " + url.login.encode())] if url.login else []
        headers = [(b"Host", url.name.encode()), *self._token, *login]
        try:
            found = await connection.ask(request, target, headers, _ANSWER_S + request.wait_s * _WATCH_SLACK)
        except BaseException:  # also if cancelled, because the answer may still come
            connection.abort()
            raise
        if connection.is_usable and not self._has_closed:
            self._idle.append((at, connection))
        else:
            connection.abort()
        return found

    async def close(self) -> None:
        """Close idle connections, and keep none open from now on. An abandoned iteration may still leave its place."""
        self._has_closed = True
        for _, connection in self._idle:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # so that the loop closes them


def _reason(error: Exception) -> str:
    """Return the reason of an error, in the system's words if possible: asyncio's text names each address tried."""
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        number = re.search(r"\[Errno ([0-9]+)\]", str(error))  # of several attempts too
        if number is not None:
            return f"[Errno {number[1]}] {os.strerror(int(number[1]))}"
        if isinstance(error, TimeoutError):
            return "timed out"
    return str(error) or type(error).__name__
