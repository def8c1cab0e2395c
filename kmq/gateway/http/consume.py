"""GET /api/topics/{topic}/consume: messages of one partition, from an offset or a time on."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from aiohttp import web

from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import EARLIEST, Fetched, Limit
from kmq.gateway.core.refused import RequestRefused, bad_field
from kmq.gateway.http.message_json import Writer
from kmq.gateway.http.operations import JSON, NDJSON, Call

_WAITING = 256  # calls that wait for a message at the same time


class Consume:
    """The handler."""

    def __init__(self, core: Core) -> None:
        self._fetching, self._topics = core.fetching, core.topics
        self.waiting = 0  # calls with timeoutMs that are open
        self.handlers = {"consume": self.consume}

    async def consume(self, call: Call) -> web.Response:
        topic, query, request = call.path["topic"], call.query, call.request
        partition = await self._partition(topic, query["partition"])
        offset = await self._begin(topic, partition, query)
        limit = Limit(query["maxMessages"], query["maxBytes"], query["timeoutMs"] / 1000)

        def is_gone() -> bool:
            return request.transport is None or request.transport.is_closing()

        def shape(found: Fetched) -> web.Response:
            return _response(found, partition, query["format"] == "text", _wants_lines(request))

        with self._slot(limit):
            return await self._fetching.fetch(topic, partition, offset, limit, shape, is_gone)

    async def _partition(self, topic: str, asked: int | None) -> int:
        known = (await self._topics.describe(topic)).partitions
        if asked is None and known > 1:
            raise bad_field("partition", f"is missing; topic {topic!r} has {known} partitions")
        if asked is not None and asked >= known:
            text = f"topic {topic!r}: has the partitions 0 to {known - 1}"
            raise RequestRefused("unknown_partition", text, field="partition")
        return asked or 0

    async def _begin(self, topic: str, partition: int, query: Any) -> int:
        given = [name for name in ("offset", "timestamp", "from") if query[name] is not None]
        if len(given) > 1:
            raise bad_field(given[1], f"excludes {given[0]}; give one of offset, timestamp and from")
        if query["offset"] is not None:
            return int(query["offset"])
        if query["timestamp"] is not None:
            return await self._fetching.at_time(topic, partition, _micros(query["timestamp"]))
        return await self._fetching.begin(topic, partition, query["from"] or EARLIEST)

    @contextmanager
    def _slot(self, limit: Limit) -> Iterator[None]:
        """Count a call that may wait."""
        waits = limit.wait_s > 0
        if waits and self.waiting >= _WAITING:
            raise RequestRefused("too_many", f"{_WAITING} calls with timeoutMs wait already")
        self.waiting += waits
        try:
            yield
        finally:
            self.waiting -= waits


def _wants_lines(request: web.Request) -> bool:
    return NDJSON in request.headers.get("Accept", "")


def _response(found: Fetched, partition: int, is_text: bool, as_lines: bool) -> web.Response:
    headers = {"KMQ-Next-Offset": str(found.next_offset), "KMQ-End-Offset": str(found.end_offset)}
    dump = Writer(is_text).dump
    shown = [dump(message) for message in found.messages]
    if as_lines:
        return web.Response(text="".join(f"{each}\n" for each in shown), content_type=NDJSON, headers=headers)
    position = f'{{"partition":{partition},"offset":{found.next_offset},"endOffset":{found.end_offset}}}'
    text = f'{{"messages":[{",".join(shown)}],"positions":[{position}],"generation":null,"assignment":[]}}'
    return web.Response(text=text, content_type=JSON, headers=headers)


def _micros(text: str) -> int:
    """Return ms since the epoch, or an RFC 3339 time, in µs since the epoch. Raises RequestRefused."""
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return int(text) * 1000
    if re.fullmatch(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,6})?([Zz]|[+-]\d\d:\d\d)", text):
        try:
            return max(0, round(datetime.fromisoformat(text.upper().replace(" ", "T")).timestamp() * 1e6))
        except ValueError:
            pass
    raise bad_field("timestamp", "must be ms since the epoch, or a time such as 2026-01-31T12:00:00Z")
