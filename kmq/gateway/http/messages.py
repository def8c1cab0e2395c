"""Messages over HTTP: as JSON, consumed from a partition, produced to a topic.

Forms       Without format= the key and header values are text and the value is base64. format=text and format=base64
            use one of these for all three. With format=json the value is any JSON. Every byte and every null is
            returned as it was given: what a form cannot show is base64 (or text, if it is only not JSON), and
            `keyEncoding`, `encoding` or the header's `encoding` says so. Requests may use the same fields. Headers are
            an object, or a list where an object cannot hold them: a name twice, a null, bytes.
Consume     GET /api/topics/{topic}/consume: messages of one partition, from an offset or a time on; with group= those
            of a member (groups.py).
Produce     POST /api/topics/{topic}/produce: one message, {"messages": […]}, or a message a line (NDJSON). A body of
            bytes or plain text is one value; with format=raw each line, or each item of a JSON list, is one.
            A request with a wrong field is refused whole, and nothing of it is stored. If the broker then refuses
            messages of a batch, the results have the errors, unless it refused all for one temporary reason, such as a
            full disk: then that is the answer. A client that sends lists with format=raw reads no results (log
            shippers). So any refusal is its answer, a temporary one first, so that it sends again. A value that is only
            too long is not refused: it goes to the dead letters, as at an intake.
"""

import json
import re
import secrets
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from aiohttp import web

from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Cursor, Limit
from kmq.gateway.core.producing import NewMessage, Outcome, Stored
from kmq.gateway.groups.redelivery import DueMessage
from kmq.gateway.http.exchange import exchange
from kmq.gateway.http.request import BYTES, JSON, NDJSON, Bodies, HttpCall, body_of, parse_json, refuse_constant
from kmq.gateway.http.schema import MOST_MESSAGES, SCHEMAS, check
from kmq.message.ids import MAX_ID_DIGITS
from kmq.message.message import Header, Message
from kmq.message.text import Headers
from kmq.wire.requests import Position

# --- messages out -----------------------------------------------------------------------------------------------------

Shown = tuple[str, str]  # as JSON, and its encoding if that differs from the form's
Show = Callable[[bytes | None], Shown]


def _base64(value: bytes | None) -> Shown:
    return ("null" if value is None else f'"{b2a_base64(value, newline=False).decode()}"'), ""


def _text(value: bytes | None) -> Shown:
    try:
        return ("null" if value is None else quoted(value.decode())), ""
    except UnicodeDecodeError:
        return _base64(value)[0], "base64"


def _json(value: bytes | None) -> Shown:
    if value is None:
        return "null", ""
    try:
        text = value.decode()
        is_shown = json.loads(text, parse_constant=refuse_constant) is not None
    except (ValueError, RecursionError):
        is_shown = False
    if not is_shown:  # not JSON, or the text null, which is not the null of a message without a value
        shown, encoding = _text(value)
        return shown, encoding or "text"
    return (_SPACE.sub(lambda found: found[1] or "", text) if "\n" in text or "\r" in text else text), ""


_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|[ \t\r\n]+')
_SHOW: Mapping[str | None, Show] = {None: _base64, "base64": _base64, "text": _text, "json": _json}  # a value, by form


def writer(form: str | None) -> Callable[..., str]:
    """Return a function that writes the messages of one answer as JSON objects, each on one line.

    Its arguments are a message and its number of deliveries; 0: it was not given back. Keys, headers and times repeat,
    and making them takes most of the time, so those of one answer are cached.
    """
    show, show_value = _base64 if form == "base64" else _text, _SHOW[form]
    keys: dict[bytes, str] = {}  # by routing key
    tails: dict[bytes, str] = {}  # headers, by what follows the id in its field
    times: dict[bytes, int] = {}  # by the producer's time, if there is one

    def dump(message: Message, deliveries: int = 0) -> str:
        _, _, routing_key, time, id, _ = message.fields
        key = keys.get(routing_key)
        if key is None:
            key = _with_encoding("keyEncoding", show(message.key))
            if not message.marks_from > 1:  # else a mark is a mark only from some seq on
                keys[routing_key] = key
        tail = id.partition(b";")[2]
        headers = tails.get(tail)
        if headers is None:
            headers = tails[tail] = _shown(message.headers, show)
        stamp = times.get(time)
        if stamp is None:
            stamp = message.timestamp_ms
            if time.replace(b".", b"", 1).isdigit():
                times[time] = stamp
        value = _with_encoding("encoding", show_value(message.value))
        more = f',"deliveries":{deliveries}' if deliveries else ""
        return (
            f'{{"partition":{message.partition},"offset":{message.offset},"key":{key},'
            f'"value":{value},"headers":{headers},"timestamp":{stamp}{more}}}'
        )

    return dump


def _shown(headers: Sequence[Header], show: Show) -> str:
    shown = [(quoted(name), show(value)) for name, value in headers]
    is_object = all(text != "null" and not encoding for _, (text, encoding) in shown)
    if is_object and len({name for name, _ in shown}) == len(shown):
        return f"{{{','.join(f'{name}:{text}' for name, (text, _) in shown)}}}"
    pairs = (f'{{"name":{name},"value":{_with_encoding("encoding", value)}}}' for name, value in shown)
    return f"[{','.join(pairs)}]"


def _with_encoding(name: str, shown: Shown) -> str:
    return f'{shown[0]},"{name}":"{shown[1]}"' if shown[1] else shown[0]


# --- messages in ------------------------------------------------------------------------------------------------------

_NEW = SCHEMAS["NewMessage"]
_NAMES = frozenset(_NEW["properties"])
_HEADERS = SCHEMAS["HeaderList"]


def load(item: object, form: str | None, where: str = "", more: Iterable[str] = ()) -> NewMessage:
    """Return the message in a JSON value. `more`: names that the object may have besides. Raises RequestRefused."""
    if item.__class__ is dict and len(item) == 1:
        value = item.get("value", 0)
        if value.__class__ is str or (form == "json" and "value" in item):
            return NewMessage(None, _READ[form or "base64"](value, f"{where}.value" if where else "value"))
    if isinstance(item, KeyError):
        raise bad_field(f"{where}.{item.args[0]}" if where else item.args[0], "is given twice")
    if isinstance(item, dict) and "records" in item and "value" not in item:
        shape = '{"messages": [{"key": "k", "value": "v"}]}'
        raise bad_field(f"{where}.records" if where else "records", f"is the form of Kafka's REST proxy; here: {shape}")
    if not isinstance(item, dict) or not (item.keys() <= _NAMES and "value" in item):
        item = {name: value for name, value in item.items() if name not in more} if isinstance(item, dict) else item
        check(_NEW, item, where)
    assert isinstance(item, dict)
    path = f"{where}." if where else ""
    for name, value in item.items():
        if name not in ("key", "value", "headers"):
            check(_NEW["properties"][name], value, path + name)
    return _message(item, form, path)


def _message(item: Mapping[str, Any], form: str | None, path: str) -> NewMessage:
    text = "base64" if form == "base64" else "text"  # of the key and of header values
    timestamp = item.get("timestamp")
    id = item.get("id")
    return NewMessage(
        _READ[item.get("keyEncoding", text)](item.get("key"), f"{path}key"),
        _READ[item.get("encoding", form or "base64")](item["value"], f"{path}value"),
        _read_headers(item.get("headers", ()), text, f"{path}headers"),
        item.get("partition"),
        None if id is None else _utf8(id, f"{path}id"),
        None if timestamp is None else timestamp / 1000,
    )


def _read_headers(headers: object, form: str, where: str) -> Headers:
    if isinstance(headers, KeyError):
        raise bad_field(f"{where}.{headers.args[0]}", "is given twice; a list can have it twice")
    if isinstance(headers, dict):
        for name, value in headers.items():
            if value is None:
                raise bad_field(f"{where}.{name[:100]}", 'must be string; null: [{"name": …, "value": null}]')
        headers = [{"name": name, "value": value} for name, value in headers.items()]
    elif headers != ():
        check(_HEADERS, headers, where)
    found = []
    for place, header in enumerate(headers):  # type: ignore[arg-type, var-annotated]
        at = f"{where}[{place}]."
        if not header["name"]:
            raise bad_field(f"{at}name", "must not be empty")
        read = _READ[header.get("encoding", form)]
        found.append((_utf8(header["name"], f"{at}name"), read(header.get("value"), f"{at}value")))
    if len(found) > _HEADERS["maxItems"]:
        raise bad_field(where, f"must have 0 to {_HEADERS['maxItems']} items")
    return found


def _read_base64(value: object, where: str) -> bytes | None:
    if not isinstance(value, str):
        _check_none(value, where)
        return None
    try:
        return a2b_base64(value, strict_mode=bool(value))
    except (Base64Error, ValueError) as err:
        raise bad_field(where, f"must be base64, or add ?format=text for text: {err}") from None


def _read_text(value: object, where: str) -> bytes | None:
    if not isinstance(value, str):
        _check_none(value, where)
        return None
    return _utf8(value, where).encode()


def _check_none(value: object, where: str) -> None:
    if value is not None:
        raise bad_field(where, "must be string or null")


def _read_json(value: object, where: str) -> bytes | None:
    return None if value is None else _compact(value, where)


_READ = {"base64": _read_base64, "text": _read_text, "json": _read_json}

# In a JSON value a number with a fraction keeps its digits. The parse makes it bytes, which no field accepts as text.
# It is written as text after a word that no client can know, and then the quotes are removed.
_NUMBER = secrets.token_hex(16)
_NUMBERS = re.compile(f'"{_NUMBER}([^"]*)"')


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | KeyError:
    """Return a JSON object. For a repeated name return (not raise) an error, because the caller knows the place."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    names = [name for name, _ in pairs]
    return KeyError(next(name for name in found if names.count(name) > 1)[:100])


def parse_values(text: bytes, where: str = "") -> Any:
    """Return a JSON value that holds values to be stored as JSON. Raises RequestRefused."""
    return parse_json(text, where, "value", parse_float=str.encode, object_pairs_hook=_object)


def _compact(value: object, where: str) -> bytes:
    def write(found: bytes | KeyError) -> str:
        if isinstance(found, bytes):
            return f"{_NUMBER}{found.decode()}"
        raise bad_field(where, f"has {found.args[0]!r} twice in one object")

    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=write)
    return _utf8(_NUMBERS.sub(r"\1", text) if _NUMBER in text else text, where).encode()


def _utf8(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad_field(where, "must be text that UTF-8 can write: it holds half a surrogate pair") from None
    return value


# --- where a call begins, and its answer ------------------------------------------------------------------------------

_NO_GROUP = '"generation":null,"assignment":[]'


def response(
    call: HttpCall,
    found: list[Message],
    cursors: Sequence[Cursor],
    more: str = _NO_GROUP,
    again: Sequence[DueMessage] = (),
) -> web.Response:
    """Return the answer to a call. `more`: generation and assignment, as JSON without braces. `again` comes first."""
    dump = writer(call.query["format"])
    shown = [dump(each.message, each.deliveries) for each in again]
    shown += [dump(message) for message in found]
    if NDJSON in call.request.headers.get("Accept", ""):
        headers = {}
        if len(cursors) == 1:
            headers = {"KMQ-Next-Offset": str(cursors[0].offset), "KMQ-End-Offset": str(cursors[0].end)}
        if overtaken := sum(len(cursor.overtaken) for cursor in cursors):
            headers["KMQ-Overtaken"] = str(overtaken)
        return web.Response(text="".join(f"{each}\n" for each in shown), content_type=NDJSON, headers=headers)
    places = (
        f'{{"partition":{cursor.partition.number},"offset":{cursor.offset},"endOffset":{cursor.end}'
        + (f',"overtaken":{len(cursor.overtaken)}}}' if cursor.overtaken else "}")
        for cursor in cursors
    )
    text = f'{{"messages":[{",".join(shown)}],"positions":[{",".join(places)}],{more}}}'
    return web.Response(text=text, content_type=JSON)


def position(query: Mapping[str, Any], otherwise: str) -> Position:
    """Return where to begin. `otherwise`: if the query does not say it. Raises RequestRefused."""
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
_IN_QUERY = ("key", "partition", "id")


class ProduceRequest(NamedTuple):
    """A request to store messages. `shape`: of the answer: one, batch or lines.

    `is_raw`: the client does not read the results in an answer.
    """

    messages: list[NewMessage]
    shape: str
    producer: str
    acks: bool
    is_raw: bool = False


class MessageCalls:
    """The handlers. `by_group` answers calls that name a group."""

    def __init__(self, core: Core, bodies: Bodies, by_group: Callable[[HttpCall], Awaitable[web.Response]]) -> None:
        self._fetching, self._producing, self._topics = core.fetching, core.producing, core.topics
        self._bodies, self._by_group = bodies, by_group
        self.handlers = {"consume": self.consume, "produce": self.produce}

    async def consume(self, call: HttpCall) -> web.Response:
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

    async def _partition(self, topic: str, number: int | None) -> int:
        count = (await self._topics.describe(topic)).partitions
        if number is None and count > 1:
            raise bad_field("partition", f"is missing; topic {topic!r} has {count} partitions")
        if number is not None and number >= count:
            text = f"topic {topic!r}: has the partitions 0 to {count - 1}"
            raise RequestRefused("unknown_partition", text, field="partition")
        return number or 0

    async def produce(self, call: HttpCall) -> web.Response:
        topic = call.path["topic"]
        async with self._bodies.read(call.request) as body:
            request = await self._parse(call, body)
            if not request.acks or call.query["acks"] == "0":
                return self._send(topic, request, len(body))
            outcomes = await self._producing.produce(topic, request.messages, request.producer)
            if request.is_raw and (long := _too_long(request.messages, outcomes)):
                await self._producing.write_dead_letters(topic, long)
        return _answer(topic, request, outcomes)

    def _send(self, topic: str, request: ProduceRequest, nbytes: int) -> web.Response:
        """Answer at once; the messages count as held until the broker has replied."""
        self._bodies.reserve(nbytes)
        self._producing.send(topic, request.messages, request.producer, partial(self._bodies.release, nbytes))
        return web.json_response({"accepted": len(request.messages)}, status=202)

    async def _parse(self, call: HttpCall, body: bytes) -> ProduceRequest:
        form, kind = call.query["format"], call.request.headers.get("Content-Type") and call.request.content_type
        given = {name: call.query[name] for name in _SENDING if call.query[name] is not None}
        if kind in BYTES or (form == "raw" and kind not in (JSON, NDJSON)):  # a body without a type was always JSON
            return _checked([_of_query(call)._replace(value=body)], "one", given)
        if form == "raw":
            shape, read = ("lines", _raw_lines) if kind == NDJSON else ("batch", _raw_items)
            values = await self._bodies.parse(body, read)
            message = _of_query(call, is_one=False)
            return _checked([message._replace(value=value) for value in values], shape, given)._replace(is_raw=True)
        for name in _IN_QUERY:
            if call.query[name] is not None:
                raise bad_field(name, "belongs into the message; in the query it is for bodies that are values")
        parse = parse_values if form == "json" else parse_json
        if kind == NDJSON:
            return _checked(await self._bodies.parse(body, lambda text: _lines(text, form, parse)), "lines", given)
        value: Any = await self._bodies.parse(body, parse)
        if not isinstance(value, dict):
            if isinstance(value, KeyError):
                raise bad_field(value.args[0], "is given twice")
            raise bad_field("body", "must be an object; a list of values is taken with ?format=raw")
        given |= {name: value[name] for name in _SENDING if name in value}
        if "messages" not in value:
            return _checked([load(value, form, more=_SENDING)], "one", given)
        for name in value:
            if name not in ("messages", *_SENDING):
                raise bad_field(name[:100], "unknown beside messages; put it into each message")
        if not isinstance(value["messages"], list) or not 1 <= len(value["messages"]) <= MOST_MESSAGES:
            raise bad_field("messages", f"must be a list of 1 to {MOST_MESSAGES} messages")
        messages = [load(item, form, f"messages[{n}]") for n, item in enumerate(value["messages"])]
        return _checked(messages, "batch", given)


def _of_query(call: HttpCall, is_one: bool = True) -> NewMessage:
    """Return a message whose value is the body. Its key, partition and id are in the query."""
    query = call.query
    if query["id"] is not None and not is_one:
        raise bad_field("id", "is for a body that is one value; this one holds many")
    read = _READ["base64" if query["format"] == "base64" else "text"]
    return NewMessage(read(query["key"], "key"), None, (), query["partition"], query["id"])


def _raw_lines(body: bytes) -> list[bytes]:
    lines = [line for line in body.split(b"\n") if line]
    _check_lines(lines)
    return lines


def _check_lines(lines: Sequence[object]) -> None:
    if not 1 <= len(lines) <= MOST_MESSAGES:
        code = "too_large" if lines else "bad_request"
        raise RequestRefused(code, f"the body has {len(lines)} lines: must be 1 to {MOST_MESSAGES}")


def _raw_items(body: bytes) -> list[bytes]:
    items = parse_values(body)
    if not isinstance(items, list) or not 1 <= len(items) <= MOST_MESSAGES:
        raise bad_field("body", f"must be a list of 1 to {MOST_MESSAGES} values, each of which is stored as JSON")
    return [_compact(item, f"body[{place}]") for place, item in enumerate(items)]


def _lines(body: bytes, form: str | None, parse: Callable[..., Any]) -> list[NewMessage]:
    lines = [(number, line) for number, line in enumerate(body.split(b"\n"), 1) if line.strip()]
    _check_lines(lines)
    try:  # as one list, which takes half of the time
        values = parse(b"[%b]" % b",".join(line for _, line in lines))
        messages = [load(value, form) for value in values]
        if len(messages) == len(lines) and all(line.strip()[:1] == b"{" for _, line in lines):
            return messages
    except RequestRefused:
        pass
    return [load(parse(line, f"line {number}: "), form, f"line[{number}]") for number, line in lines]


def _checked(messages: list[NewMessage], shape: str, given: dict[str, Any]) -> ProduceRequest:
    """Return the request if its ids match its producer. Raises RequestRefused."""
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


def _too_long(messages: Sequence[NewMessage], outcomes: Sequence[Outcome]) -> list[bytes]:
    """Return the values that are too long for a message. Raises any other refusal, a temporary one first."""
    refused = [
        (each, message.value)
        for each, message in zip(outcomes, messages, strict=True)
        if isinstance(each, RequestRefused)
    ]
    others = [each for each, _ in refused if each.code != "too_long"]
    if others:
        raise next((each for each in others if each.refusal.is_retryable), others[0])
    return [value or b"" for _, value in refused]


def _answer(topic: str, request: ProduceRequest, outcomes: Sequence[Outcome]) -> web.Response:
    refused = [outcome for outcome in outcomes if isinstance(outcome, RequestRefused)]
    if len(refused) == len(outcomes):
        first = refused[0]
        if request.shape == "one" or (first.refusal.is_retryable and {each.code for each in refused} == {first.code}):
            raise first
    head = f'{{"topic":{json.dumps(topic)},"partition":'
    results = [_result(head, outcome) for outcome in outcomes]
    if request.shape == "one":
        return web.Response(text=results[0], content_type=JSON)
    if request.shape == "lines":
        return web.Response(text="".join(f"{result}\n" for result in results), content_type=NDJSON)
    return web.Response(text=f'{{"results":[{",".join(results)}]}}', content_type=JSON)


def _result(head: str, outcome: Outcome) -> str:
    if not isinstance(outcome, Stored):
        return json.dumps({"error": body_of(outcome)})
    partition = "null" if outcome.partition is None else outcome.partition
    offset = "null" if outcome.offset is None else outcome.offset
    more = ',"duplicate":true' if outcome.is_duplicate else ""
    return f'{head}{partition},"offset":{offset},"timestamp":{outcome.timestamp_ms}{more}}}'
