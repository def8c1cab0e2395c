"""Every path of the API, declared once: the handlers are registered from it, parameters are read by it, and the
OpenAPI document is made from it (openapi.py).

A handler gets an HttpCall: its path and query are checked already. Its body is read by request.py.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.http.request import (
    BYTES,
    JSON,
    NDJSON,
    PATH_SCHEMAS,
    Handler,
    HttpCall,
    Operation,
    Parameter,
    Reply,
    Schema,
    answering,
    array,
    flag,
    number,
    ref,
    text,
)
from kmq.gateway.http.schema import TABLE_COLUMNS, check


def _op(
    route: str,
    name: str,
    summary: str,
    reply: Reply | Mapping[int, Reply],
    query: tuple[Parameter, ...] = (),
    body: str | None = None,
    body_types: tuple[str, ...] = (JSON,),
    errors: str = "",
) -> Operation:
    """Return an operation. `reply`: of 200, or by status; `body`: its schema; `errors`: codes besides COMMON."""
    method, _, path = route.partition(" ")
    replies = {200: reply} if isinstance(reply, Reply) else reply
    schema = None if body is None else ref(body)
    return Operation(method, path, name, summary, replies, query, schema, body_types, tuple(errors.split()))


# --- the console -----------------------------------------------------------------------------------------------------

_WHERE = (
    Parameter("partition", PATH_SCHEMAS["partition"]),
    Parameter("offset", number("from this offset on")),
    Parameter("seq", number("from the record with this number in the WAL on", least=1)),
    Parameter("before", number("only older ones: with lower numbers in the WAL", least=1)),
    Parameter("key", text("only messages with this key")),
    Parameter("value", text("only messages with this somewhere in their value, byte for byte")),
    Parameter("header", text("only messages with this header: its name, or name=value")),
    Parameter(
        "timestamp", text("from the first message with this timestamp or a later one: ms since the epoch, or RFC 3339")
    ),
    Parameter("from", text("earliest, or latest (default): the last messages", enum=["earliest", "latest"])),
    Parameter("limit", number("at most so many", least=1, most=500), 50),
)
_CHANGING = "bad_request too_large busy"
_READING = "unknown_topic unknown_partition"
CONSOLE = (
    _op(
        "GET /api/overview",
        "overview",
        "Show the broker: state, rates, topics, groups, events",
        Reply("as it is now", ref("Overview")),
    ),
    _op(
        "GET /api/overview/topics",
        "overviewTopics",
        "Show topics as a table: rates, records, size",
        Reply("a page of the table", ref("TopicTable")),
        query=(
            Parameter("contains", text("only topics with this in their name, in any case"), ""),
            Parameter("sort", text("the column (default: rate)", enum=TABLE_COLUMNS), "rate"),
            Parameter("order", text("asc, or desc (default)", enum=["asc", "desc"]), "desc"),
            Parameter("first", number("leave out so many"), 0),
            Parameter("limit", number("at most so many", least=1, most=500), 100),
        ),
        errors="too_many",
    ),
    _op("GET /api/history", "history", "Show an hour of the broker", Reply("series", ref("History"))),
    _op(
        "GET /api/events",
        "events",
        "Show what has happened",
        Reply("events that are kept", ref("Events")),
        query=(Parameter("after", number("only events with higher ids"), 0),),
    ),
    _op(
        "GET /api/topics/{topic}/messages",
        "messages",
        "Show messages: decoded, and as they are stored",
        Reply("messages in order of seq", ref("Messages")),
        query=_WHERE,
        errors=f"{_READING} not_found out_of_range too_many",
    ),
    _op(
        "GET /api/topics/{topic}/follow",
        "follow",
        "Follow a topic for 10 minutes: at most 4 lines and 200 messages a second, and their share",
        Reply("a line for what has arrived, or after 5 s", None, (NDJSON,)),
        query=(Parameter("partition", PATH_SCHEMAS["partition"]),),
        errors=f"{_READING} too_many stopping",
    ),
    _op(
        "GET /api/topics/{topic}/letters",
        "letters",
        "Show dead letters by reason",
        Reply("the newest letters", ref("Letters")),
        errors=f"{_READING} too_many",
    ),
    _op(
        "POST /api/topics/{topic}/replay",
        "replay",
        "Send dead letters back to the topics they came from, or only count them",
        Reply("what went back", ref("Replayed")),
        body="Replay",
        errors=f"{_READING} {_CHANGING} too_many not_answered",
    ),
    _op(
        "POST /api/groups/{group}/reset",
        "resetGroup",
        "Move the offsets of a group without members, or only say where to",
        Reply("from where to where", ref("Moved")),
        body="Reset",
        errors=f"{_READING} {_CHANGING} unknown_group group_not_empty out_of_range not_answered disk_full quota"
        " connections offsets_full stopping fenced",
    ),
    _op(
        "GET /api/groups/{group}/history",
        "groupHistory",
        "Show an hour of a group's lag",
        Reply("a series", ref("GroupHistory")),
        errors="unknown_group",
    ),
    _op(
        "GET /api/session",
        "session",
        "Show what this caller may do",
        Reply("role and name of the token", ref("Session")),
    ),
)
_FILE = {200: Reply("a file", None), 304: Reply("it has not changed", None)}
CONSOLE_PAGES = (
    _op("GET /", "console", "The console", _FILE),
    _op("GET /console/{file}", "consoleFile", "A file of the console", _FILE),
)


# --- topics, messages, groups ----------------------------------------------------------------------------------------

_FORMS = (
    "without it key and headers are text and the value is base64; text, base64: all three; json: the value is any JSON"
)
_FORMAT = Parameter("format", text(_FORMS, enum=["text", "base64", "json"]))
_SENT = text(
    f"{_FORMS}; raw: each line (NDJSON), or each item of a list, is a value", enum=["text", "base64", "json", "raw"]
)
_TOPIC = ref("Topic")


def _list(path: str, name: str, summary: str) -> Operation:
    internal = Parameter("internal", flag("with topics of KMQ itself, __…"), False)
    return _op(f"GET {path}", name, summary, Reply("all of them", array(ref("TopicSummary"))), (internal,))


ADMIN = (
    _op(
        "POST /api/admin/topics",
        "createTopic",
        "Declare a topic",
        {201: Reply("it is declared", _TOPIC), 200: Reply("an equal topic exists", _TOPIC)},
        body="NewTopic",
        errors="bad_request topic_exists too_many_topics too_large busy disk_full",
    ),
    _list("/api/admin/topics", "listTopics", "List topics by name"),
    _list("/api/topics", "topics", "List topics by name, as /api/admin/topics does"),
    _op(
        "GET /api/admin/topics/{topic}",
        "describeTopic",
        "Show a topic with its partitions",
        Reply("its options and sizes", _TOPIC),
        errors="unknown_topic",
    ),
    _op(
        "PATCH /api/admin/topics/{topic}",
        "changeTopic",
        "Change options of a topic; null: as the settings of the broker say",
        Reply("as it is now", _TOPIC),
        body="TopicChanges",
        errors="bad_request unknown_topic reserved_topic too_large busy",
    ),
    _op(
        "DELETE /api/admin/topics/{topic}",
        "deleteTopic",
        "Delete a topic and its messages for good",
        {204: Reply("its files are gone, and the name can be used again")},
        errors="unknown_topic reserved_topic",
    ),
)
_JOINING = (  # what a call of a member, or of a group, may be refused for
    "bad_request bad_name bad_topic bad_timeout unknown_assignor assignor_differs group_kind unknown_member fenced"
    " session_timeout poll_timeout rebalance_timeout too_many_groups too_many_members subscription_too_large unknown_topic"
    " unknown_partition stopping offsets_full"
)
_WRITING = (  # what a commit may be refused for besides
    "bad_request too_large busy not_answered disk_full quota not_enough_replicas no_leader connections drop_oldest offsets_full"
    " stopping too_many_topics"
)
MESSAGES = (
    _op(
        "POST /api/topics/{topic}/produce",
        "produce",
        "Store one message, or a batch",
        {
            200: Reply("on disk and in its partition", {"anyOf": [ref("Stored"), ref("Results")]}, (JSON, NDJSON)),
            202: Reply("acks=0: sent to the broker, nothing confirms it", ref("Accepted")),
        },
        query=(
            Parameter("format", _SENT),
            Parameter("key", text("of a body that is a value, or of many with format=raw")),
            Parameter("partition", number("of a body that is a value, or of many with format=raw")),
            Parameter("id", text("of a body that is one value")),
            Parameter("producer", text("the same as in the body, for NDJSON")),
            Parameter("acks", text("the same as in the body, for NDJSON", enum=["0", "1", "all"])),
        ),
        body="Produce",
        body_types=(JSON, NDJSON, *BYTES),
        errors="bad_request bad_topic reserved_topic unknown_topic unknown_partition bad_id id_reused id_too_old fenced"
        " drop_oldest too_long too_large too_many too_many_topics producers_full busy stopping connections not_answered"
        " stored_not_routed disk_full quota not_enough_replicas no_leader",
    ),
    _op(
        "GET /api/topics/{topic}/consume",
        "consume",
        "Read messages: of one partition from an offset on, or a group's next ones",
        Reply("messages in order, and where to continue", ref("Consumed"), (JSON, NDJSON)),
        query=(
            Parameter("group", PATH_SCHEMAS["group"]),
            Parameter("member", PATH_SCHEMAS["member"]),
            Parameter("autoCommit", flag("the next call commits this one's"), False),
            Parameter("partition", PATH_SCHEMAS["partition"]),
            Parameter("offset", number("read from this offset on")),
            Parameter(
                "timestamp",
                text("from the first message with this timestamp or a later one: ms since the epoch, or RFC 3339"),
            ),
            Parameter("from", text("earliest (default) or latest", enum=["earliest", "latest"])),
            Parameter("maxMessages", number("at most so many", least=1, most=10_000), 100),
            Parameter("maxBytes", number("about so many bytes, or one message", least=1, most=8 << 20), 1 << 20),
            Parameter("timeoutMs", number("wait so long for a first message", most=60_000), 0),
            _FORMAT,
        ),
        errors=f"{_JOINING} out_of_range too_many busy",
    ),
)
GROUPS = (
    _op(
        "POST /api/topics/{topic}/commit",
        "commit",
        "Commit the next offsets to read",
        Reply("on disk", ref("Offsets")),
        body="Commit",
        errors=f"{_JOINING} {_WRITING} out_of_range",
    ),
    _op(
        "POST /api/topics/{topic}/nack",
        "nack",
        "Give a message back: it is delivered again, and after maxDeliveries it is a dead letter",
        Reply("on disk", ref("Nacked")),
        body="Nack",
        errors=f"{_JOINING} {_WRITING} unknown_group kafka_owner out_of_range too_long",
    ),
    _op(
        "POST /api/topics/{topic}/seek",
        "seek",
        "Move the offsets of a group without members",
        Reply("the new offsets, on disk", ref("Offsets")),
        body="Seek",
        errors=f"{_JOINING} {_WRITING} group_not_empty out_of_range",
    ),
    _op("GET /api/groups", "listGroups", "List groups by name", Reply("all", array(ref("GroupSummary")))),
    _op(
        "GET /api/groups/{group}",
        "describeGroup",
        "Show a group: members, offsets, lag",
        Reply("the group", ref("Group")),
        errors="unknown_group",
    ),
    _op(
        "DELETE /api/groups/{group}",
        "deleteGroup",
        "Forget a group without members",
        {204: Reply("its offsets are gone")},
        errors=f"unknown_group group_not_empty {_WRITING}",
    ),
    _op(
        "POST /api/groups/{group}/members",
        "joinGroup",
        "Join a group",
        Reply("the member and what it may read", ref("Member")),
        body="JoinGroup",
        errors=f"{_JOINING} too_large busy",
    ),
    _op(
        "POST /api/groups/{group}/members/{member}/heartbeat",
        "heartbeat",
        "Give a sign of life, and learn of a new assignment",
        Reply("what the member may read", ref("Member")),
        body="Heartbeat",
        errors=f"{_JOINING} too_large busy",
    ),
    _op(
        "DELETE /api/groups/{group}/members/{member}",
        "leaveGroup",
        "Leave a group at once",
        {204: Reply("the member's partitions go to others")},
        errors=f"unknown_member {_WRITING}",
    ),
)
_ANY: Schema = {}
_TEXT: Schema = {"type": "string"}


def _log(
    path: str, name: str, summary: str, *query: Parameter, errors: str = "", reply: Reply | None = None
) -> Operation:
    return _op(f"GET /v1/{path}", name, summary, reply or Reply("", _ANY), query, errors=f"bad_request {errors}")


def _numbers(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, number("see docs/gateway.md")) for name in names)


_ONE = "logs/{topic}/{partition}"
FILES = (  # logs.py
    _log("broker", "broker", "The data directory: id, format"),
    _log(
        "topics",
        "topicFiles",
        "Topics with first and end offsets",
        Parameter("after", text("a name")),
        *_numbers("limit"),
    ),
    _log("ledger", "ledger", "What an audit needs"),
    _log(
        "logs",
        "logFiles",
        "First and end offset of every log",
        Parameter("topic", text("only of this topic; may be repeated")),
    ),
    _log(
        f"{_ONE}/offset",
        "findOffset",
        "The first record of a time (µs) or seq, or later",
        *_numbers("time", "seq"),
        errors="not_found",
    ),
    _log(
        f"{_ONE}/cuts",
        "cuts",
        "Offsets that cut a range into parts of about that size",
        *_numbers("bytes", "start", "end"),
        errors="not_found",
    ),
    _log(
        f"{_ONE}/rows",
        "logRows",
        "Which old records lie in KMQ_TIER: objects with offsets, seqs, times (µs), sizes and sha256",
        *_numbers("start", "end"),
        errors="not_found",
        reply=Reply("rows in force, in order", ref("LogRows")),
    ),
    _log(
        f"{_ONE}/records",
        "records",
        "The stored lines as they are",
        *_numbers("start", "end", "max_bytes"),
        errors="not_found too_many",
        reply=Reply("lines", _TEXT, ("text/plain",)),
    ),
)
_PAGE = Reply("a page", None)
_STATE = Reply("the state of the broker", _ANY)
_STATES = {200: _STATE, 503: _STATE}
_SHARD = Reply("the shard, as this broker knows it", _ANY)
PAGES = (  # server.py
    _op("GET /pages", "pages", "The list of pages", _PAGE),
    _op("GET /docs", "docs", "This API as a page", _PAGE),
    _op("GET /openapi.json", "openapi", "This document", Reply("OpenAPI 3.1", _ANY)),
    _op("GET /healthz", "health", "Is every stage alive?", _STATES),
    _op("GET /readyz", "readiness", "Would a message be stored?", _STATES),
    _op("GET /v1/cluster", "cluster", "Who leads the shard, and what this broker is in it", _SHARD, errors="not_found"),
    _op("GET /metrics", "metrics", "Metrics for Prometheus", Reply("metrics", _TEXT, ("text/plain",))),
)
OPERATIONS = (*ADMIN, *MESSAGES, *GROUPS, *CONSOLE, *FILES, *CONSOLE_PAGES, *PAGES)


def register(
    app: web.Application,
    operations: tuple[Operation, ...],
    handlers: Mapping[str, Handler],
    count: Callable[[str, str, float], None],
) -> None:
    """Register the handlers of these operations, each by the operation's name. `count` is told each outcome."""
    for operation in operations:
        app.router.add_route(operation.method, operation.path, _serving(operation, handlers[operation.name], count))


def _serving(
    operation: Operation, handler: Handler, count: Callable[[str, str, float], None]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def serve(request: web.Request) -> web.StreamResponse:
        begun = time.perf_counter()
        try:
            path = {name: _value(name, PATH_SCHEMAS[name], request.match_info[name]) for name in operation.path_names}
            response = await handler(HttpCall(request, path, read_query(operation, request)))
        except RequestRefused as refused:
            count(operation.name, refused.code, time.perf_counter() - begun)
            raise
        count(operation.name, "OK", time.perf_counter() - begun)
        return response

    return answering(serve)


def read_query(operation: Operation, request: web.Request) -> dict[str, Any]:
    """Return every parameter of a query, with defaults; None if one has neither. Raises RequestRefused."""
    parameters = {parameter.name: parameter for parameter in operation.query}
    values = {parameter.name: parameter.default for parameter in operation.query}
    for name, given in request.query.items():
        if name not in parameters:
            raise bad_field(name[:100], f"unknown parameter; expected {', '.join(parameters) or 'none'}")
        if len(request.query.getall(name)) > 1:
            raise bad_field(name, "is given twice")
        values[name] = _value(name, parameters[name].schema, given)
    return values


def _value(name: str, schema: Schema, given: str) -> Any:
    value: Any = given
    if schema.get("type") == "integer":
        if not (given.isascii() and given.isdigit() and len(given) <= 19):
            raise bad_field(name, f"must be a whole number of at least {schema['minimum']}")
        value = int(given)
    elif schema.get("type") == "boolean":
        if given not in ("true", "false"):
            raise bad_field(name, "must be true or false")
        value = given == "true"
    check(schema, value, name)
    return value
