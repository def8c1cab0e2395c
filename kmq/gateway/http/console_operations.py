"""The paths of the console, declared as operations.py declares all others."""

from kmq.gateway.http.operation import NDJSON, PATH_SCHEMAS, Operation, Parameter, Reply
from kmq.gateway.http.shapes import number, ref, text

_WHERE = (
    Parameter("partition", PATH_SCHEMAS["partition"]),
    Parameter("offset", number("from this offset on")),
    Parameter("seq", number("from the record with this number in the WAL on", least=1)),
    Parameter("key", text("only messages with this key")),
    Parameter("timestamp", text("from the first message received then: ms since the epoch, or RFC 3339")),
    Parameter("from", text("earliest, or latest (default): the last messages", enum=["earliest", "latest"])),
    Parameter("limit", number("at most so many", least=1, most=500), 50),
)
_CHANGING = ("bad_request", "too_large", "busy")
_READING = ("unknown_topic", "unknown_partition")
CONSOLE = (
    Operation(
        "GET",
        "/api/overview",
        "overview",
        "Show the broker: state, rates, topics, groups, events",
        {200: Reply("as it is now", ref("Overview"))},
    ),
    Operation("GET", "/api/history", "history", "Show an hour of the broker", {200: Reply("series", ref("History"))}),
    Operation(
        "GET",
        "/api/events",
        "events",
        "Show what has happened",
        {200: Reply("events that are kept", ref("Events"))},
        query=(Parameter("after", number("only events with higher ids"), 0),),
    ),
    Operation(
        "GET",
        "/api/topics/{topic}/messages",
        "messages",
        "Show messages: decoded, and as they are stored",
        {200: Reply("messages in order of seq", ref("Messages"))},
        query=_WHERE,
        errors=(*_READING, "not_found", "out_of_range", "too_many"),
    ),
    Operation(
        "GET",
        "/api/topics/{topic}/follow",
        "follow",
        "Follow a topic for 10 minutes: at most 4 lines and 200 messages a second, and their share",
        {200: Reply("a line for what has arrived, or after 5 s", None, (NDJSON,))},
        query=(Parameter("partition", PATH_SCHEMAS["partition"]),),
        errors=(*_READING, "too_many", "stopping"),
    ),
    Operation(
        "GET",
        "/api/topics/{topic}/letters",
        "letters",
        "Show dead letters by reason",
        {200: Reply("the newest letters", ref("Letters"))},
        errors=(*_READING, "too_many"),
    ),
    Operation(
        "POST",
        "/api/topics/{topic}/replay",
        "replay",
        "Send dead letters back to the topics they came from, or only count them",
        {200: Reply("what went back", ref("Replayed"))},
        body=ref("Replay"),
        errors=(*_READING, *_CHANGING, "too_many", "not_answered"),
    ),
    Operation(
        "POST",
        "/api/groups/{group}/reset",
        "resetGroup",
        "Move the offsets of a group without members, or only say where to",
        {200: Reply("from where to where", ref("Moved"))},
        body=ref("Reset"),
        errors=(
            *(*_READING, *_CHANGING, "unknown_group", "group_not_empty", "out_of_range", "not_answered", "disk_full"),
            *("quota", "connections", "offsets_full", "stopping", "fenced"),
        ),
    ),
    Operation(
        "GET",
        "/api/groups/{group}/history",
        "groupHistory",
        "Show an hour of a group's lag",
        {200: Reply("a series", ref("GroupHistory"))},
        errors=("unknown_group",),
    ),
    Operation(
        "GET",
        "/api/session",
        "session",
        "Show what this caller may do",
        {200: Reply("role and name of the token", ref("Session"))},
    ),
)
_FILE = {200: Reply("a file", None), 304: Reply("it has not changed", None)}
CONSOLE_PAGES = (
    Operation("GET", "/", "console", "The console", _FILE, is_api=False),
    Operation("GET", "/console/{file}", "consoleFile", "A file of the console", _FILE, is_api=False),
)
