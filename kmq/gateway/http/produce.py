"""POST /api/topics/{topic}/produce: one message, {"messages": […]}, or a message a line (NDJSON).

A request with a wrong field is refused whole, and nothing of it is stored. What the broker then refuses of a batch is
an error in the results, unless it refused all for one reason that passes, such as a full disk: that is the answer.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from aiohttp import web

from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.core import Core
from kmq.gateway.core.producing import NewMessage, Outcome, Stored
from kmq.gateway.http.bodies import Bodies, parse_json
from kmq.gateway.http.errors import body_of
from kmq.gateway.http.message_json import load
from kmq.gateway.http.operation import JSON, NDJSON, Call
from kmq.gateway.http.schema import MOST_MESSAGES, SCHEMAS, check
from kmq.message.ids import MAX_ID_DIGITS

_SENDING = ("producer", "acks")


class Request(NamedTuple):
    """What a request asks to store. `shape`: how the answer is written: one, batch or lines."""

    messages: list[NewMessage]
    shape: str
    producer: str
    acks: bool


class Produce:
    """The handler."""

    def __init__(self, core: Core, bodies: Bodies) -> None:
        self._producing, self._bodies = core.producing, bodies
        self._sending: set[asyncio.Task[None]] = set()  # acks=0: what nobody waits for
        self.handlers = {"produce": self.produce}

    async def produce(self, call: Call) -> web.Response:
        topic = call.path["topic"]
        if call.query["acks"] == "0":
            return await self._unacknowledged(call, topic)
        async with self._bodies.read(call.request) as body:
            asked = await self._parse(call, body)
            if not asked.acks:
                return await self._send(topic, asked, len(body))
            outcomes = await self._producing.produce(topic, asked.messages, asked.producer)
        return _answer(topic, asked, outcomes)

    async def _unacknowledged(self, call: Call, topic: str) -> web.Response:
        async with self._bodies.read(call.request) as body:
            return await self._send(topic, await self._parse(call, body), len(body))

    async def _send(self, topic: str, asked: Request, nbytes: int) -> web.Response:
        """Answer at once; the messages count as held until the broker has replied."""
        self._bodies.take(nbytes)

        async def send() -> None:
            try:
                await self._producing.send(topic, asked.messages, asked.producer)
            except RequestRefused:
                pass  # acks=0: nobody asked to hear of it
            finally:
                self._bodies.held -= nbytes

        task = asyncio.get_running_loop().create_task(send())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return web.json_response({"accepted": len(asked.messages)}, status=202)

    async def close(self) -> None:
        """Wait for what nobody waits for."""
        await asyncio.gather(*self._sending)

    async def _parse(self, call: Call, body: bytes) -> Request:
        is_text = call.query["format"] == "text"
        given = {name: call.query[name] for name in _SENDING if call.query[name] is not None}
        if call.request.content_type == NDJSON:
            return _checked(await self._bodies.parse(body, lambda text: _lines(text, is_text)), "lines", given)
        value: Any = await self._bodies.parse(body, parse_json)
        if not isinstance(value, dict):
            raise bad_field("body", "must be an object")
        given |= {name: value[name] for name in _SENDING if name in value}
        if "messages" not in value:
            return _checked([load(value, is_text, more=_SENDING)], "one", given)
        for name in value:
            if name not in ("messages", *_SENDING):
                raise bad_field(name[:100], "unknown beside messages; put it into each message")
        if not isinstance(value["messages"], list) or not 1 <= len(value["messages"]) <= MOST_MESSAGES:
            raise bad_field("messages", f"must be a list of 1 to {MOST_MESSAGES} messages")
        messages = [load(item, is_text, f"messages[{n}]") for n, item in enumerate(value["messages"])]
        return _checked(messages, "batch", given)


def _lines(body: bytes, is_text: bool) -> list[NewMessage]:
    lines = [(number, line) for number, line in enumerate(body.split(b"\n"), 1) if line.strip()]
    if not 1 <= len(lines) <= MOST_MESSAGES:
        raise RequestRefused(
            "too_large" if lines else "bad_request", f"the body has {len(lines)} lines: must be 1 to {MOST_MESSAGES}"
        )
    try:  # as one list, which takes half of the time
        values = json.loads(b"[%b]" % b",".join(line for _, line in lines))
        messages = [load(value, is_text) for value in values]
        if len(messages) == len(lines) and all(line.strip()[:1] == b"{" for _, line in lines):
            return messages
    except (ValueError, RecursionError, RequestRefused):
        pass
    return [load(parse_json(line, f"line {number}: "), is_text, f"line[{number}]") for number, line in lines]


def _checked(messages: list[NewMessage], shape: str, given: dict[str, Any]) -> Request:
    """Return the request if its ids fit its producer. Raises RequestRefused."""
    for name in given:
        check(SCHEMAS["BatchProduce"]["properties"][name], given[name], name)
    producer = given.get("producer", "")
    for number, message in enumerate(messages):
        if producer and not _is_number(message.id):
            where = "id" if shape == "one" else f"messages[{number}].id"
            raise bad_field(where, f"must be a number of at most {MAX_ID_DIGITS} digits, rising, because of producer=")
    return Request(messages, shape, producer, str(given.get("acks", "1")) != "0")


def _is_number(id: str | None) -> bool:
    return id is not None and id.isascii() and id.isdigit() and len(id) <= MAX_ID_DIGITS


# --- answers ---------------------------------------------------------------------------------------------------------


def _answer(topic: str, asked: Request, outcomes: Sequence[Outcome]) -> web.Response:
    refused = [outcome for outcome in outcomes if isinstance(outcome, RequestRefused)]
    if len(refused) == len(outcomes):
        first = refused[0]
        if asked.shape == "one" or (first.refusal.is_retryable and {each.code for each in refused} == {first.code}):
            raise first
    head = f'{{"topic":{json.dumps(topic)},"partition":'
    results = [_result(head, outcome) for outcome in outcomes]
    if asked.shape == "one":
        return web.Response(text=results[0], content_type=JSON)
    if asked.shape == "lines":
        return web.Response(text="".join(f"{result}\n" for result in results), content_type=NDJSON)
    return web.Response(text=f'{{"results":[{",".join(results)}]}}', content_type=JSON)


def _result(head: str, outcome: Outcome) -> str:
    if not isinstance(outcome, Stored):
        return json.dumps({"error": body_of(outcome)})
    partition = "null" if outcome.partition is None else outcome.partition
    offset = "null" if outcome.offset is None else outcome.offset
    more = ',"duplicate":true' if outcome.is_duplicate else ""
    return f'{head}{partition},"offset":{offset},"timestamp":{outcome.timestamp_ms}{more}}}'
