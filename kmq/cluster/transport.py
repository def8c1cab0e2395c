"""Carries out what consul.py asks for: over HTTP, to the first of several addresses that answers.

Invariant   A request that changes something is sent a second time only if the first one was surely not sent. Otherwise
            the caller is told that nobody knows (Unanswered), and decides.
"""

import asyncio
import ssl
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from kmq.cluster.consul import ConsulError, Pause, Request, Response, Steps, T, Unanswered
from kmq.errors import ConfigError, Stopped

_ANSWER_S = 4.0  # longest time for an answer that Consul does not hold back: then another address is asked
_CONNECT_S = 2.0
_WATCH_SLACK = 17 / 16  # Consul adds up to a sixteenth to the time of a watch


class Address(NamedTuple):
    """Where Consul is, and how to get in."""

    urls: Sequence[str]
    token: str = ""
    ca: str = ""  # file of a certificate authority; "": those of the system

    @classmethod
    def of(cls, text: str, token: str = "", ca: str = "") -> "Address":
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


class _Wire:
    """What both transports share: how a request is written, and which address is asked."""

    def __init__(self, address: Address) -> None:
        self._address, self._at = address, 0
        try:
            self._verify = ssl.create_default_context(cafile=address.ca or None)
        except OSError as error:
            raise ConfigError(f"KMQ_CONSUL_CA={address.ca}: {error}") from None

    def _options(self) -> dict[str, object]:
        headers = {"X-Consul-Token": self._address.token} if self._address.token else {}
        return {"verify": self._verify, "headers": headers, "trust_env": False}

    def _arguments(self, request: Request, at: int) -> dict[str, object]:
        return {
            "method": request.method,
            "url": self._address.urls[at] + request.path,
            "params": request.params,
            "content": request.body,
            "timeout": httpx.Timeout(_ANSWER_S + request.wait_s * _WATCH_SLACK, connect=_CONNECT_S),
        }

    def _may_ask_another(self, request: Request, at: int, error: httpx.HTTPError, tries: int) -> None:
        """Turn to the next address. Raises Unanswered if another try could do something twice, or there is none."""
        url = self._address.urls[at]
        if self._at == at:  # another thread may have left it already
            self._at = (at + 1) % len(self._address.urls)
        was_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        if tries >= len(self._address.urls) or (was_sent and request.method != "GET"):
            raise Unanswered(f"Consul at {url}: {str(error) or type(error).__name__}") from error


def _answer(response: httpx.Response) -> Response:
    return Response(
        response.status_code, {name.lower(): value for name, value in response.headers.items()}, response.content
    )


class Transport(_Wire):
    """For threads: several may use one."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._client = httpx.Client(**self._options())  # type: ignore[arg-type]

    def run(self, steps: Steps[T], stop: threading.Event | None = None) -> T:
        """Carry out these steps and return their result. Raises Stopped between two steps once `stop` is set."""
        try:
            asked = next(steps)
            while True:
                if stop is not None and stop.wait(asked.seconds if isinstance(asked, Pause) else 0):
                    raise Stopped("told to stop")
                try:
                    answer = None if stop and isinstance(asked, Pause) else self._carry_out(asked)
                except ConsulError as error:
                    asked = steps.throw(error)
                else:
                    asked = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def _carry_out(self, asked: Request | Pause) -> Response | None:
        if isinstance(asked, Pause):
            time.sleep(asked.seconds)
            return None
        tries = 0
        while True:
            at = self._at
            try:
                return _answer(self._client.request(**self._arguments(asked, at)))  # type: ignore[arg-type]
            except httpx.HTTPError as error:
                tries += 1
                self._may_ask_another(asked, at, error, tries)

    def close(self) -> None:
        self._client.close()


class AsyncTransport(_Wire):
    """For asyncio."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._client = httpx.AsyncClient(**self._options())  # type: ignore[arg-type]

    async def run(self, steps: Steps[T]) -> T:
        """Carry out these steps and return their result."""
        try:
            asked = next(steps)
            while True:
                try:
                    answer = await self._carry_out(asked)
                except ConsulError as error:
                    asked = steps.throw(error)
                else:
                    asked = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _carry_out(self, asked: Request | Pause) -> Response | None:
        if isinstance(asked, Pause):
            await asyncio.sleep(asked.seconds)
            return None
        tries = 0
        while True:
            at = self._at
            try:
                return _answer(await self._client.request(**self._arguments(asked, at)))  # type: ignore[arg-type]
            except httpx.HTTPError as error:
                tries += 1
                self._may_ask_another(asked, at, error, tries)

    async def close(self) -> None:
        await self._client.aclose()
