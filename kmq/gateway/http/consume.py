"""GET /api/topics/{topic}/consume: messages of one partition, from an offset or a time on."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from aiohttp import web

from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Cursor, Limit
from kmq.gateway.groups.redelivery import Again
from kmq.gateway.http.exchange import exchange
from kmq.gateway.http.message_json import Writer
from kmq.gateway.http.operation import JSON, NDJSON, Call
from kmq.message.message import Message
from kmq.wire.requests import Position

_NO_GROUP = '"generation":null,"assignment":[]'


class Consume:
    """The handler."""

    def __init__(self, core: Core) -> None:
        self._fetching, self._topics = core.fetching, core.topics
        self.by_group: Callable[[Call], Awaitable[web.Response]] | None = None  # groups.py sets it
        self.handlers = {"consume": self.consume}

    async def consume(self, call: Call) -> web.Response:
        topic, query = call.path["topic"], call.query
        if query["group"] is not None and self.by_group is not None:
            return await self.by_group(call)
        if query["member"] is not None or query["autoCommit"]:
            raise bad_field("group", "is missing; member= and autoCommit= need it")
        number = await self._partition(topic, query["partition"])
        cursor = await self._fetching.open(topic, number, _position(query))
        limit = Limit(query["maxMessages"], query["maxBytes"], query["timeoutMs"] / 1000)

        def shape(found: list[Message]) -> web.Response:
            return response(call, found, [cursor])

        current = exchange()
        with current.polling(limit.wait_s):
            return await self._fetching.fetch([cursor], limit, shape, current.interrupt, lambda: current.is_over)

    async def _partition(self, topic: str, asked: int | None) -> int:
        known = (await self._topics.describe(topic)).partitions
        if asked is None and known > 1:
            raise bad_field("partition", f"is missing; topic {topic!r} has {known} partitions")
        if asked is not None and asked >= known:
            text = f"topic {topic!r}: has the partitions 0 to {known - 1}"
            raise RequestRefused("unknown_partition", text, field="partition")
        return asked or 0


def response(
    call: Call, found: list[Message], cursors: Sequence[Cursor], more: str = _NO_GROUP, again: Sequence[Again] = ()
) -> web.Response:
    """Return the answer to a call. `more`: generation and assignment, as JSON without braces. `again` comes first."""
    dump = Writer(call.query["format"] == "text").dump
    shown = [dump(each.message, each.deliveries) for each in again]
    shown += [dump(message) for message in found]
    if NDJSON in call.request.headers.get("Accept", ""):
        headers = {}
        if len(cursors) == 1:
            headers = {"KMQ-Next-Offset": str(cursors[0].offset), "KMQ-End-Offset": str(cursors[0].end)}
        return web.Response(text="".join(f"{each}\n" for each in shown), content_type=NDJSON, headers=headers)
    places = (
        f'{{"partition":{cursor.partition.number},"offset":{cursor.offset},"endOffset":{cursor.end}}}'
        for cursor in cursors
    )
    text = f'{{"messages":[{",".join(shown)}],"positions":[{",".join(places)}],{more}}}'
    return web.Response(text=text, content_type=JSON)


def _position(query: Mapping[str, Any]) -> Position:
    given = [name for name in ("offset", "timestamp", "from") if query[name] is not None]
    if len(given) > 1:
        raise bad_field(given[1], f"excludes {given[0]}; give one of offset, timestamp and from")
    if query["offset"] is not None:
        return Position("offset", query["offset"])
    if query["timestamp"] is not None:
        return Position("time", micros(query["timestamp"]))
    return Position(query["from"] or "earliest")


def micros(text: str, field: str = "timestamp") -> int:
    """Return ms since the epoch, or an RFC 3339 time, in µs since the epoch. Raises RequestRefused."""
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return int(text) * 1000
    if re.fullmatch(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,6})?([Zz]|[+-]\d\d:\d\d)", text):
        try:
            return max(0, round(datetime.fromisoformat(text.upper().replace(" ", "T")).timestamp() * 1e6))
        except ValueError:
            pass
    raise bad_field(field, "must be ms since the epoch, or a time such as 2026-01-31T12:00:00Z")
