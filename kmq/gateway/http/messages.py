"""Messages over HTTP: as JSON, consumed from a partition, produced to a topic.

JSON        Keys, values and header values are base64, or UTF-8 text with format=text. Every byte and every null comes
            back as it was given. What is no UTF-8 is base64 with format=text too; such a message says so in a field of
            its own, `encoding`.
Consume     GET /api/topics/{topic}/consume: messages of one partition, from an offset or a time on; with group= those
            of a member (groups.py).
Produce     POST /api/topics/{topic}/produce: one message, {"messages": […]}, or a message a line (NDJSON).
            A request with a wrong field is refused whole, and nothing of it is stored. What the broker then refuses of
            a batch is an error in the results, unless it refused all for one reason that passes, such as a full disk:
            that is the answer.
"""

import asyncio
import json
import re
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from aiohttp import web

from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Cursor, Limit
from kmq.gateway.core.producing import NewMessage, Outcome, Stored
from kmq.gateway.groups.redelivery import DueMessage
from kmq.gateway.http.exchange import exchange
from kmq.gateway.http.request import JSON, NDJSON, Bodies, Call, body_of, parse_json
from kmq.gateway.http.schema import MOST_MESSAGES, SCHEMAS, check
from kmq.message.ids import MAX_ID_DIGITS
from kmq.message.message import Header, Message
from kmq.wire.requests import Position

# --- messages out -----------------------------------------------------------------------------------------------------

Show = Callable[[bytes | None], str]


def _base64(value: bytes | None) -> str:
    return "null" if value is None else f'"{b2a_base64(value, newline=False).decode()}"'


def _text(value: bytes | None) -> str:
    return "null" if value is None else quoted(value.decode())


class Writer:
    """Writes messages of one partition as JSON objects, each on one line.

    Keys, headers and times come again and again, and making them takes most of the time. Those of one answer are kept.
    """

    def __init__(self, is_text: bool) -> None:
        self._is_text = is_text
        self._keys: dict[bytes, str] = {}  # by routing key
        self._headers: dict[bytes, str] = {}  # by what follows the id in its field
        self._times: dict[bytes, int] = {}  # by the producer's time, where that is one

    def dump(self, message: Message, deliveries: int = 0) -> str:
        """Return one message. `deliveries`: how often it was delivered; 0: it was not given back."""
        more = f',"deliveries":{deliveries}' if deliveries else ""
        if self._is_text:
            try:
                return self._dump(message, _text, more)
            except UnicodeDecodeError:
                return Writer(is_text=False)._dump(message, _base64, f',"encoding":"base64"{more}')
        return self._dump(message, _base64, more)

    def _dump(self, message: Message, show: Show, more: str) -> str:
        _, _, routing_key, time, id, _ = message.fields
        key = self._keys.get(routing_key)
        if key is None:
            key = show(message.key)
            if not message.marks_from > 1:  # else a mark is a mark only from some seq on
                self._keys[routing_key] = key
        tail = id.partition(b";")[2]
        headers = self._headers.get(tail)
        if headers is None:
            headers = self._headers[tail] = _shown(message.headers, show)
        stamp = self._times.get(time)
        if stamp is None:
            stamp = message.timestamp_ms
            if time.replace(b".", b"", 1).isdigit():
                self._times[time] = stamp
        return (
            f'{{"partition":{message.partition},"offset":{message.offset},"key":{key},'
            f'"value":{show(message.value)},"headers":{headers},"timestamp":{stamp}{more}}}'
        )


def _shown(headers: Sequence[Header], show: Show) -> str:
    pairs = (f'{{"name":{quoted(name)},"value":{show(value)}}}' for name, value in headers)
    return f"[{','.join(pairs)}]"


# --- messages in ------------------------------------------------------------------------------------------------------

_NEW = SCHEMAS["NewMessage"]
_NAMES = frozenset(_NEW["properties"])


def load(item: object, is_text: bool, where: str = "", more: Iterable[str] = ()) -> NewMessage:
    """Return the message in a JSON value. `more`: names that the object may have besides. Raises RequestRefused."""
    if item.__class__ is dict and len(item) == 1:
        value = item.get("value", 0)
        if value.__class__ is str:
            read = _read_text if is_text else _read_base64
            return NewMessage(None, read(value, f"{where}.value" if where else "value"))
    if not isinstance(item, dict) or not (item.keys() <= _NAMES and "value" in item):
        item = {name: value for name, value in item.items() if name not in more} if isinstance(item, dict) else item
        check(_NEW, item, where)
    assert isinstance(item, dict)
    path = f"{where}." if where else ""
    for name, value in item.items():
        if name in ("key", "value"):
            if value is not None and not isinstance(value, str):
                raise bad_field(path + name, "must be string or null")
        else:
            check(_NEW["properties"][name], value, path + name)
    return _message(item, is_text and "encoding" not in item, path)


def _message(item: Mapping[str, Any], is_text: bool, path: str) -> NewMessage:
    read = _read_text if is_text else _read_base64
    headers: list[tuple[str, bytes | None]] = []
    for place, header in enumerate(item.get("headers", ())):
        at = f"{path}headers[{place}]."
        headers.append((_utf8(header["name"], f"{at}name"), read(header.get("value"), f"{at}value")))
    timestamp = item.get("timestamp")
    id = item.get("id")
    return NewMessage(
        read(item.get("key"), f"{path}key"),
        read(item["value"], f"{path}value"),
        headers,
        item.get("partition"),
        None if id is None else _utf8(id, f"{path}id"),
        None if timestamp is None else timestamp / 1000,
    )


def _read_base64(value: str | None, where: str) -> bytes | None:
    if value is None:
        return None
    try:
        return a2b_base64(value, strict_mode=bool(value))
    except (Base64Error, ValueError) as err:
        raise bad_field(where, f"must be base64, or add ?format=text for text: {err}") from None


def _read_text(value: str | None, where: str) -> bytes | None:
    return None if value is None else _utf8(value, where).encode()


def _utf8(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad_field(where, "must be text that UTF-8 can write: it holds half a surrogate pair") from None
    return value


# --- where a call begins, and its answer ------------------------------------------------------------------------------

_NO_GROUP = '"generation":null,"assignment":[]'


def response(
    call: Call,
    found: list[Message],
    cursors: Sequence[Cursor],
    more: str = _NO_GROUP,
    again: Sequence[DueMessage] = (),
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


def position(query: Mapping[str, Any], otherwise: str) -> Position:
    """Return where to begin; `otherwise`: if the query does not say it. Raises RequestRefused."""
    names = [name for name in ("offset", "seq", "timestamp", "from") if name in query]
    given = [name for name in names if query[name] is not None]
    if len(given) > 1:
        raise bad_field(given[1], f"excludes {given[0]}; give one of {', '.join(names[:-1])} and from")
    if query["offset"] is not None:
        return Position("offset", query["offset"])
    if query["timestamp"] is not None:
        return Position("time", micros(query["timestamp"]))
    return Position(query["from"] or otherwise)


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


# --- handlers ---------------------------------------------------------------------------------------------------------

_SENDING = ("producer", "acks")


class ProduceRequest(NamedTuple):
    """What a request asks to store. `shape`: how the answer is written: one, batch or lines."""

    messages: list[NewMessage]
    shape: str
    producer: str
    acks: bool


class MessageCalls:
    """The handlers. `by_group` answers calls that name a group."""

    def __init__(self, core: Core, bodies: Bodies, by_group: Callable[[Call], Awaitable[web.Response]]) -> None:
        self._fetching, self._producing, self._topics = core.fetching, core.producing, core.topics
        self._bodies, self._by_group = bodies, by_group
        self._sending: set[asyncio.Task[None]] = set()  # acks=0: what nobody waits for
        self.handlers = {"consume": self.consume, "produce": self.produce}

    async def close(self) -> None:
        """Wait for what nobody waits for."""
        await asyncio.gather(*self._sending)

    async def consume(self, call: Call) -> web.Response:
        topic, query = call.path["topic"], call.query
        if query["group"] is not None:
            return await self._by_group(call)
        if query["member"] is not None or query["autoCommit"]:
            raise bad_field("group", "is missing; member= and autoCommit= need it")
        number = await self._partition(topic, query["partition"])
        cursor = await self._fetching.open(topic, number, position(query, "earliest"))
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

    async def produce(self, call: Call) -> web.Response:
        topic = call.path["topic"]
        async with self._bodies.read(call.request) as body:
            asked = await self._parse(call, body)
            if not asked.acks or call.query["acks"] == "0":
                return self._send(topic, asked, len(body))
            outcomes = await self._producing.produce(topic, asked.messages, asked.producer)
        return _answer(topic, asked, outcomes)

    def _send(self, topic: str, asked: ProduceRequest, nbytes: int) -> web.Response:
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

    async def _parse(self, call: Call, body: bytes) -> ProduceRequest:
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


def _checked(messages: list[NewMessage], shape: str, given: dict[str, Any]) -> ProduceRequest:
    """Return the request if its ids fit its producer. Raises RequestRefused."""
    for name in given:
        check(SCHEMAS["BatchProduce"]["properties"][name], given[name], name)
    producer = given.get("producer", "")
    for number, message in enumerate(messages):
        if producer and not _is_number(message.id):
            where = "id" if shape == "one" else f"messages[{number}].id"
            raise bad_field(where, f"must be a number of at most {MAX_ID_DIGITS} digits, rising, because of producer=")
    return ProduceRequest(messages, shape, producer, str(given.get("acks", "1")) != "0")


def _is_number(id: str | None) -> bool:
    return id is not None and id.isascii() and id.isdigit() and len(id) <= MAX_ID_DIGITS


def _answer(topic: str, asked: ProduceRequest, outcomes: Sequence[Outcome]) -> web.Response:
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
