"""Request bodies within bounds: of one request, and of all requests together.

Memory      At most _ALL_BYTES of bodies are held, from the first byte until the request is answered. Large JSON is
            parsed one body at a time, because its values take many times the bytes of the text.
Deadline    A body must be whole within KMQ_LINE_DEADLINE.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from kmq.config.settings import Settings
from kmq.config.values import KIB, MIB
from kmq.gateway.core.broker import RequestRefused

T = TypeVar("T")
_MOST_BYTES = 8 * MIB  # of one body; more only if a single message may be longer
_ALL_BYTES = 48 * MIB
_SMALL_BYTES = 64 * KIB  # is parsed at once
_BASE64 = 2  # a message of KMQ_MAX_LINE as base64, with room for the rest


# Encoded bodies are refused. Decoded, a broken one would end the connection, and a small one could hold any memory.
RUNNER: dict[str, Any] = {"auto_decompress": False}


class Bodies:
    """All bodies that are held now."""

    def __init__(self, settings: Settings) -> None:
        self.most_bytes = max(_MOST_BYTES, _BASE64 * settings.max_line)
        self._all_bytes = max(_ALL_BYTES, 2 * self.most_bytes)
        self._deadline_s = settings.line_deadline
        self.held = 0
        self._parsing = asyncio.Lock()

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read a body, which counts as held while the block runs. Raises RequestRefused."""
        share = _Share(self)
        try:
            yield await self._read(request, share)
        finally:
            share.give_back()

    async def _read(self, request: web.Request, share: "_Share") -> bytes:
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise RequestRefused("bad_request", f"Content-Encoding {encoding[:40]}: unknown; send the body as it is")
        if (length := request.content_length or 0) > self.most_bytes:
            raise self._too_large()
        share.grow_to(length)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._deadline_s if self._deadline_s != float("inf") else None):
                async for chunk in request.content.iter_any():
                    size += len(chunk)
                    if size > self.most_bytes:
                        raise self._too_large()
                    share.grow_to(size)
                    chunks.append(chunk)
        except TimeoutError:
            raise RequestRefused("bad_request", "the body was not whole within KMQ_LINE_DEADLINE") from None
        return b"".join(chunks)

    def _too_large(self) -> RequestRefused:
        return RequestRefused("too_large", f"the body is over {self.most_bytes} bytes; send several requests")

    def take(self, nbytes: int) -> None:
        """Count bytes as held. Raises RequestRefused if there are too many."""
        if self.held + nbytes > self._all_bytes:
            raise RequestRefused("busy", "other requests hold the memory for bodies; send this one again")
        self.held += nbytes

    async def parse(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        """Return what `parse` makes of a body: of a large one in a thread, one at a time."""
        if len(body) <= _SMALL_BYTES:
            return parse(body)
        async with self._parsing:
            return await asyncio.to_thread(parse, body)


class _Share:
    """The bytes of one request."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._nbytes = bodies, 0

    def grow_to(self, nbytes: int) -> None:
        if nbytes > self._nbytes:
            self._bodies.take(nbytes - self._nbytes)
            self._nbytes = nbytes

    def give_back(self) -> None:
        self._bodies.held -= self._nbytes
        self._nbytes = 0


def parse_json(text: bytes, where: str = "") -> Any:
    """Return a JSON value; `where` begins the text of the error."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestRefused("bad_request", f"{where}not JSON that this gateway reads: nested too deeply") from None
    except ValueError as err:
        raise RequestRefused("bad_request", f"{where}not JSON: {err}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
