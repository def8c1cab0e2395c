"""A request over HTTP: what its operation declares, its body, its errors, and who sent it.

Bodies      At most _ALL_BYTES are held, from the first byte until the request is answered. Large JSON is parsed one
            body at a time, because its values take many times the bytes of the text. A body must be whole within
            KMQ_LINE_DEADLINE.
Errors      {"code", "message"} and the status of the code; `field` names a wrong field of the request. A Spark source
            of an older release reads `error`, so errors of /v1 say the same text there too.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from kmq.access.roles import ADMIN, CONSUME, PRODUCE
from kmq.config.settings import Settings
from kmq.config.values import KIB, MIB
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.groups.offset_table import MAX_OFFSET
from kmq.gateway.http.exchange import WebHandler, time_limit
from kmq.log.damage import DamageError
from kmq.log.rows import NotHereError

# --- shapes ----------------------------------------------------------------------------------------------------------
# Short words for JSON schemas: what operations.py and schema.py are written in.

Schema = Mapping[str, Any]
REF = "#/components/schemas/"


def ref(name: str) -> Schema:
    return {"$ref": REF + name}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def record(required: Sequence[str] | None = None, /, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has these properties and no others. `required`: by default all of them."""
    shape: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    names = [*properties] if required is None else [*required]
    return shape | ({"required": names} if names else {})


def text(help: str, **more: Any) -> Schema:
    return {"type": "string", "description": help, **more}


def number(help: str, least: int = 0, most: int = MAX_OFFSET, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, "description": help, **more}


def flag(help: str) -> Schema:
    return {"type": "boolean", "description": help}


def or_null(schema: Schema) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


# --- operation -------------------------------------------------------------------------------------------------------

JSON, NDJSON = "application/json", "application/x-ndjson"
BYTES = ("application/octet-stream", "text/plain")  # a body that is one value
# Codes that any operation may answer.
COMMON = ("bad_field", "unauthorized", "forbidden", "cross_site", "not_ready", "internal", "damaged")


class Parameter(NamedTuple):
    """A query parameter. `default`: None if there is none."""

    name: str
    schema: Schema
    default: Any = None


class Reply(NamedTuple):
    """What a status other than an error means; `schema`: None without a body."""

    help: str
    schema: Schema | None = None
    types: tuple[str, ...] = (JSON,)


class HttpCall(NamedTuple):
    """A request whose parameters are checked."""

    request: web.Request
    path: Mapping[str, Any]
    query: Mapping[str, Any]


class Operation(NamedTuple):
    """One method of one path. `name` is its operationId; `errors` are codes besides COMMON."""

    method: str
    path: str
    name: str
    summary: str
    replies: Mapping[int, Reply]
    query: tuple[Parameter, ...] = ()
    body: Schema | None = None
    body_types: tuple[str, ...] = (JSON,)
    errors: tuple[str, ...] = ()

    @property
    def path_names(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)


Handler = Callable[[HttpCall], Awaitable[web.StreamResponse]]

PATH_SCHEMAS: dict[str, Schema] = {
    "topic": text("name of a topic", minLength=1, maxLength=200),
    "partition": number("number of a partition"),
    "group": text("name of a group", minLength=1, maxLength=200),
    "member": text("name of a member", minLength=1, maxLength=200),
    "file": text("name of a file", minLength=1, maxLength=200),
}


# --- bodies ----------------------------------------------------------------------------------------------------------

T = TypeVar("T")
_MOST_BYTES = 8 * MIB  # of one body; more only if a single message may be longer
_ALL_BYTES = 48 * MIB
_SMALL_BYTES = 64 * KIB  # is parsed at once
_BASE64 = 2  # a message of KMQ_MAX_LINE as base64, with room for the rest


# Encoded bodies are refused. Decoded, a broken one would end the connection, and a small one could hold any memory.
RUNNER: dict[str, Any] = {"auto_decompress": False}


class Bodies:
    """All request bodies that are held now."""

    def __init__(self, settings: Settings) -> None:
        self.most_bytes = max(_MOST_BYTES, _BASE64 * settings.max_line)
        self._all_bytes = max(_ALL_BYTES, 2 * self.most_bytes)
        self._deadline_s = settings.line_deadline
        self.held = 0
        self._parsing = asyncio.Lock()

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read a body, which counts as held while the block runs. Raises RequestRefused."""
        share = 0

        def grow_to(nbytes: int) -> None:
            nonlocal share
            if nbytes > share:
                self.reserve(nbytes - share)
                share = nbytes

        try:
            yield await self._read(request, grow_to)
        finally:
            self.release(share)

    async def _read(self, request: web.Request, grow_to: Callable[[int], None]) -> bytes:
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise RequestRefused("bad_request", f"Content-Encoding {encoding[:40]}: unknown; send the body as it is")
        if (length := request.content_length or 0) > self.most_bytes:
            raise self._too_large()
        grow_to(length)
        chunks: list[bytes] = []
        size = 0
        try:
            async with time_limit(self._deadline_s):
                async for chunk in request.content.iter_any():
                    size += len(chunk)
                    if size > self.most_bytes:
                        raise self._too_large()
                    grow_to(size)
                    chunks.append(chunk)
        except TimeoutError:
            raise RequestRefused("bad_request", "the body was not whole within KMQ_LINE_DEADLINE") from None
        return b"".join(chunks)

    def _too_large(self) -> RequestRefused:
        return RequestRefused("too_large", f"the body is over {self.most_bytes} bytes; send several requests")

    def reserve(self, nbytes: int) -> None:
        """Count bytes as held. Raises RequestRefused if there are too many."""
        if self.held + nbytes > self._all_bytes:
            raise RequestRefused("busy", "other requests hold the memory for bodies; send this one again")
        self.held += nbytes

    def release(self, nbytes: int) -> None:
        self.held -= nbytes

    async def parse(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        """Return what `parse` makes of a body: of a large one in a thread, one at a time."""
        if len(body) <= _SMALL_BYTES:
            return parse(body)
        async with self._parsing:
            return await asyncio.to_thread(parse, body)


def parse_json(text: bytes, where: str = "", deep: str = "", **hooks: Any) -> Any:
    """Return a JSON value; `where` begins the text of the error.

    `deep`: the field to name where values are nested too deeply. `hooks`: of json.loads.
    """
    try:
        return json.loads(text, parse_constant=refuse_constant, **hooks)
    except RecursionError:
        if deep:
            raise bad_field(deep, f"{where}nested too deeply: at most some 900 levels") from None
        raise RequestRefused("bad_request", f"{where}not JSON that this gateway reads: nested too deeply") from None
    except ValueError as err:
        raise RequestRefused("bad_request", f"{where}not JSON: {err}") from None


def refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python's parser accepts."""
    raise ValueError(f"{name} is no number of JSON")


# --- errors ----------------------------------------------------------------------------------------------------------

_RETRY_AFTER_S = 1  # a broker that refuses for lack of room looks again several times a second


def body_of(refused: RequestRefused) -> dict[str, Any]:
    """Return an error as a value for JSON."""
    return {"code": refused.code, "message": str(refused), **refused.fields}


def response_of(request: web.Request, refused: RequestRefused, **headers: str) -> web.Response:
    """Return the response that refuses a request."""
    body, row = body_of(refused), refused.refusal
    if request.path.startswith("/v1/"):
        body["error"] = body["message"]
    if row.is_retryable:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    return web.json_response(body, status=row.http, headers=headers)


def answering(handler: WebHandler) -> WebHandler:
    """Return `handler` with its refusals turned into responses."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestRefused as refused:
            return response_of(request, refused)
        except DamageError as err:
            return response_of(request, damaged(err))
        except NotHereError as err:
            return response_of(request, RequestRefused("cold", str(err)))

    return answer


def damaged(err: DamageError) -> RequestRefused:
    """Return the refusal of a request that needs damaged bytes."""
    fields = ("path", "byte", "end", "first_offset", "next_offset", "what")
    return RequestRefused("damaged", str(err), **{name: getattr(err, name) for name in fields})


@web.middleware
async def refuse_unknown_paths(request: web.Request, handler: WebHandler) -> web.StreamResponse:
    """Answer paths and methods without a route in the form of every other error."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as err:
        allowed = ", ".join(sorted(err.allowed_methods))
        refused = RequestRefused("method_not_allowed", f"{request.method}: expected {allowed}")
        return response_of(request, refused, Allow=allowed)
    except web.HTTPNotFound:
        return response_of(request, RequestRefused("not_found", f"{request.path}: unknown path; see /docs"))
    except web.HTTPRequestEntityTooLarge as err:
        return response_of(request, RequestRefused("too_large", str(err.text)))
    except web.HTTPException:
        raise
    except Exception:
        logging.getLogger(__name__).exception("%s %s", request.method, request.path)
        return response_of(request, RequestRefused("internal"))


# --- caller ----------------------------------------------------------------------------------------------------------


class Caller:
    """The sender of a request. kmq/gateway/access.py identifies it before the handlers run.

    `name`: of the token, "" without one; `may_change`: replay and reset are allowed. A handler sets `is_dry_run` when
    it changes nothing.
    """

    __slots__ = ("is_dry_run", "may_change", "name", "roles")

    def __init__(self, name: str, roles: frozenset[str], may_change: bool) -> None:
        self.name, self.roles, self.may_change = name, roles, may_change
        self.is_dry_run = False

    def session(self) -> dict[str, Any]:
        """Return what this caller may do, as JSON shows it."""
        role = next((role for role in (ADMIN, CONSUME, PRODUCE) if role in self.roles), "none")
        return {"role": role, "roles": sorted(self.roles), "name": self.name, "writable": self.may_change}


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)  # of the request that this task serves


def caller() -> Caller:
    """Return the sender of the request. If access control is off, return a read-only caller."""
    return CALLER.get() or Caller("", frozenset(), may_change=False)
