"""JSON schemas of what the console shows. schema.py takes them in; the check of a value is there."""

from typing import Any

from kmq.gateway.console.events import KINDS
from kmq.gateway.http.shapes import Schema, array, number, or_null, record, ref, text

_MS_OR_S = "unix time in seconds"


def decimal(help: str) -> dict[str, Any]:
    """Return the schema of a number that need not be whole."""
    return {"type": "number", "description": help}


def by_name(schema: Schema, help: str) -> dict[str, Any]:
    """Return the schema of an object whose names are not known beforehand."""
    return {"type": "object", "additionalProperties": schema, "description": help}


AS_OF = decimal(f"when this was so, {_MS_OR_S}")
_OR_NULL = or_null(decimal("a number"))
_ENCODING = text("text, or base64 if it is not UTF-8", enum=["text", "base64"])
_DAMAGE = {"anyOf": [ref("Damage"), {"type": "null", "description": "null"}]}
_ROLES = ["none", "produce", "consume", "admin"]

CONSOLE_SCHEMAS: dict[str, Schema] = {
    "Session": record(
        ["role", "roles", "name", "writable", "instance", "version"],
        role=text("the most that this caller may do; none: no token is required here", enum=_ROLES),
        roles=array(text("a role of the token", enum=_ROLES[1:])),
        name=text("the token's name; empty without one"),
        writable={"type": "boolean", "description": "true: replay and reset are allowed"},
        instance=text("KMQ_INSTANCE of the broker"),
        version=text("of KMQ"),
    ),
    "Overview": record(
        [
            *("as_of", "status", "rates", "latency", "topics", "topics_total"),
            *("groups", "groups_total", "events"),
        ],
        as_of=AS_OF,
        status={"type": "object", "description": "the document of `kmq status --json` of the same moment"},
        rates=by_name(ref("Rate"), "by stage, over the last seconds"),
        latency=by_name(ref("Latency"), "ack, sync and routed, over the last 10 s; null: nothing was measured"),
        topics=array(ref("TopicRate"), description="the 20 with the highest rate"),
        topics_total=number("how many there are"),
        groups=array(ref("GroupLag"), description="the 20 with the largest lag"),
        groups_total=or_null(number("how many there are; null: the committed offsets are not loaded yet")),
        events=array(ref("Event"), description="the newest 50, oldest first"),
    ),
    "History": record(
        ["as_of", "step", "times_from", "series"],
        as_of=AS_OF,
        step=decimal("seconds between two numbers"),
        times_from=decimal("unix time of the first number, in seconds"),
        series=by_name(array(_OR_NULL), "by name; null: not measured"),
    ),
    "GroupHistory": record(
        ["as_of", "step", "times_from", "lag"],
        as_of=AS_OF,
        step=decimal("seconds between two numbers"),
        times_from=decimal("unix time of the first number, in seconds"),
        lag=array(_OR_NULL, description="messages that were not committed; null: not measured"),
    ),
    "Events": record(["as_of", "events"], as_of=AS_OF, events=array(ref("Event"), description="oldest first")),
    "Rate": record(["messages", "bytes"], messages=decimal("messages in a second"), bytes=decimal("bytes in a second")),
    "Latency": {
        **or_null(
            record(
                ["p50", "p99", "count"],
                p50=or_null(decimal("seconds")),
                p99=or_null(decimal("seconds")),
                count=number("how many were measured"),
            )
        ),
    },
    "TopicRate": record(
        ["topic", "rate", "bytes_rate", "records", "bytes", "partitions"],
        topic=text("a topic"),
        rate=decimal("messages in a second"),
        bytes_rate=decimal("bytes in a second, by the mean size of its records"),
        records=number("from the first to the end offsets"),
        bytes=number("on disk"),
        partitions=number("how many"),
    ),
    "GroupLag": record(
        ["group", "state", "members", "lag", "lag_seconds"],
        group=text("a group"),
        state=text("what it waits for"),
        members=number("how many"),
        lag=number("messages that are not committed"),
        lag_seconds=or_null(decimal("since the oldest of them was received; null: not known")),
    ),
    "Messages": record(
        ["as_of", "messages", "next", "error"],
        as_of=AS_OF,
        messages=array(ref("ShownMessage")),
        next=array(ref("Offset"), description="where to go on in each partition"),
        error=_DAMAGE,
    ),
    "ShownMessage": record(
        [
            *("partition", "offset", "seq", "timestamp", "key", "key_encoding", "value", "encoding"),
            *("headers", "raw", "bytes", "truncated"),
        ],
        partition=number("its number"),
        offset=number("in the partition"),
        seq=number("in the WAL"),
        timestamp=number("when the message was made, in ms since the epoch"),
        key=or_null(text("as key_encoding says; null: none")),
        key_encoding=_ENCODING,
        value=or_null(text("as encoding says; null: none")),
        encoding=_ENCODING,
        headers=array(ref("ShownHeader"), maxItems=100),
        raw=text("the stored line; bytes that are not UTF-8 as \\xNN"),
        bytes=number("of the stored line"),
        truncated={
            "type": "boolean",
            "description": "true: too large to be shown whole: value, raw or headers are cut",
        },
    ),
    "ShownHeader": record(["name", "value"], name=text("its name"), value=or_null(text("null: none"))),
    "Damage": record(
        ["code", "message", "first_offset", "next_offset"],
        code=text("damaged"),
        message=text("which file, and where"),
        first_offset=number("the first record that cannot be read"),
        next_offset=number("the next record that may be good"),
    ),
    "Letters": record(
        ["as_of", "topic", "groups", "total", "more", "error"],
        as_of=AS_OF,
        topic=text("the topic of the letters"),
        groups=array(ref("Letter"), description="the most frequent reason first"),
        total=number("letters that were looked at"),
        more={"type": "boolean", "description": "true: there are older ones"},
        error=_DAMAGE,
    ),
    "Letter": record(
        ["reason", "count", "first_at", "last_at", "examples"],
        reason=text("the last error"),
        count=number("letters with this reason"),
        first_at=decimal("when the first was received, in unix seconds"),
        last_at=decimal("when the last was received, in unix seconds"),
        examples=array(ref("ShownMessage"), maxItems=5),
    ),
    "Replay": record(
        filter={"anyOf": [text("a filter"), array(text("a filter"), maxItems=20)]},
        rate=number("messages a second; 0: no limit", most=1_000_000),
        max=number("at most so many letters that have not gone back, the oldest first", least=1, most=100_000),
        dryRun={"type": "boolean", "description": "true (default): only count"},
    ),
    "Replayed": record(
        ["dryRun", "topic", "repeated", "stayed", "strangers", "complete"],
        dryRun={"type": "boolean", "description": "true: nothing was sent"},
        topic=text("the topic of the letters"),
        would_replay=number("letters that would go back"),
        replayed=number("letters that went back now"),
        repeated=number("letters that had gone back before; they are not in the other numbers"),
        stayed=by_name(number("how many"), "letters that stay, by reason"),
        strangers=number("records that are no letters"),
        complete={
            "type": "boolean",
            "description": "false: limit or time left letters out; the same replay goes on with them",
        },
    ),
    "Reset": record(
        ["topic", "to"],
        topic=text("a topic", minLength=1, maxLength=200),
        to={"anyOf": [text("earliest or latest", enum=["earliest", "latest"]), ref("SeekTime"), ref("Offsets")]},
        dryRun={"type": "boolean", "description": "true (default): only say what would change"},
    ),
    "Moved": record(
        ["dryRun", "partitions"],
        dryRun={"type": "boolean", "description": "true: nothing was moved"},
        partitions=array(ref("Move")),
    ),
    "Move": record(
        ["partition", "from", "to"],
        **{
            "partition": number("its number"),
            "from": or_null(number("the offset that was committed; null: none")),
            "to": number("the new offset"),
        },
    ),
    "Event": record(
        ["id", "at", "kind", "about", "text"],
        id=number("rises"),
        at=decimal(_MS_OR_S),
        kind=text("what kind of event", enum=[*KINDS]),
        about=text("the process, topic, group or code that it is about"),
        text=text("one sentence"),
    ),
}
