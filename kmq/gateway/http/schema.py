"""JSON schemas of the API, and the check of a value against one. The OpenAPI document shows these very schemas.

`check` knows the words that the schemas here use: type, enum, minimum, maximum, minLength, maxLength, pattern,
properties, required, additionalProperties, items, minItems, maxItems, anyOf, $ref.
"""

import re
from typing import Any

from kmq.broker.overview import KINDS
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.groups.assignors import ASSIGNORS
from kmq.gateway.http.request import (
    PATH_SCHEMAS,
    REF,
    Bodies,
    HttpCall,
    Schema,
    array,
    flag,
    number,
    or_null,
    parse_json,
    record,
    ref,
    text,
)
from kmq.log.topics import MAX_PARTITIONS, PARTITIONERS
from kmq.message.ids import MAX_WINDOW_ID, NAME_PATTERN

# --- schemas of the console ------------------------------------------------------------------------------------------

_MS_OR_S = "unix time in seconds"


def decimal(help: str) -> dict[str, Any]:
    """Return the schema of a number that need not be whole."""
    return {"type": "number", "description": help}


def by_name(schema: Schema, help: str) -> dict[str, Any]:
    """Return the schema of an object whose names are not known beforehand."""
    return {"type": "object", "additionalProperties": schema, "description": help}


AS_OF = decimal(f"when this was so, {_MS_OR_S}")
_OR_NULL = or_null(decimal("a number"))
_SERIES: dict[str, Schema] = {
    "as_of": AS_OF,
    "step": decimal("seconds between two numbers"),
    "times_from": decimal("unix time of the first number, in seconds"),
}
_SHOWN_ENCODING = text("text, or base64 if it is not UTF-8", enum=["text", "base64"])
_DAMAGE = {"anyOf": [ref("Damage"), {"type": "null", "description": "null"}]}
TABLE_COLUMNS = ["topic", "partitions", "rate", "bytes_rate", "records", "bytes", "retentionMs", "cleanupPolicy"]
_ROLES = ["none", "produce", "consume", "admin"]

CONSOLE_SCHEMAS: dict[str, Schema] = {
    "Session": record(
        role=text("the most that this caller may do; none: no token is required here", enum=_ROLES),
        roles=array(text("a role of the token", enum=_ROLES[1:])),
        name=text("the token's name; empty without one"),
        writable=flag("true: replay and reset are allowed"),
        instance=text("KMQ_INSTANCE of the broker"),
        version=text("of KMQ"),
    ),
    "Overview": record(
        as_of=AS_OF,
        status={"type": "object", "description": "the document of `kmq status --json` of the same moment"},
        rates=by_name(ref("Rate"), "by stage, over the last seconds"),
        latency=by_name(ref("Latency"), "ack, sync and routed, over the last 10 s; null: nothing was measured"),
        intakes=array(ref("IntakeRate"), description="those of KMQ_INTAKES, in their order"),
        topics=array(ref("TopicRate"), description="the 20 with the highest rate"),
        topics_total=number("how many there are"),
        groups=array(ref("GroupLag"), description="the 20 with the largest lag"),
        groups_total=or_null(number("how many there are; null: the committed offsets are not loaded yet")),
        events=array(ref("Event"), description="the newest 50, oldest first"),
    ),
    "History": record(**_SERIES, series=by_name(array(_OR_NULL), "by name; null: not measured")),
    "GroupHistory": record(
        **_SERIES, lag=array(_OR_NULL, description="messages that were not committed; null: not measured")
    ),
    "Events": record(as_of=AS_OF, events=array(ref("Event"), description="oldest first")),
    "Rate": record(messages=decimal("messages in a second"), bytes=decimal("bytes in a second")),
    "Latency": or_null(
        record(p50=or_null(decimal("seconds")), p99=or_null(decimal("seconds")), count=number("how many were measured"))
    ),
    "IntakeRate": record(
        port=number("where it takes lines; 0: not open yet"),
        kind=text("tcp, tls or udp"),
        topic=text("whose messages the lines become"),
        lines=number("taken since ingress started"),
        bytes=number("of these lines"),
        connections=number("open now"),
        dropped=number("datagrams that the kernel has dropped unread"),
        refused=number("connections and datagrams from addresses that KMQ_INTAKES_FROM does not have"),
        rate=or_null(decimal("lines in a second; null: not known yet")),
        bytes_rate=or_null(decimal("bytes in a second; null: not known yet")),
    ),
    "TopicRate": record(
        topic=text("a topic"),
        rate=decimal("messages in a second"),
        bytes_rate=decimal("bytes in a second, by the mean size of its records"),
        records=number("from the first to the end offsets"),
        bytes=number("on disk"),
        partitions=number("how many"),
    ),
    "TopicTable": record(
        as_of=AS_OF,
        total=number("topics that there are"),
        found=number("topics that have `contains` in their name"),
        topics=array(ref("TopicRow"), description="those of this page, in the order of the column"),
    ),
    "TopicRow": record(
        topic=text("a topic"),
        rate=or_null(decimal("messages in a second; null: not measured yet")),
        bytes_rate=or_null(decimal("bytes in a second, by the mean size of its records; null: not measured yet")),
        records=or_null(number("from the first to the end offsets; null: not looked at yet")),
        bytes=or_null(number("on disk; null: not looked at yet")),
        partitions=or_null(number("how many; null: not looked at yet")),
        retentionMs=number("age in ms at which messages are deleted; -1: no limit", least=-1),
        cleanupPolicy=text("delete or compact"),
    ),
    "GroupLag": record(
        group=text("a group"),
        state=text("what it waits for"),
        members=number("how many"),
        lag=number("messages that are not committed, or were given back"),
        lag_seconds=or_null(decimal("since the oldest of them was received; null: not known")),
        as_of=AS_OF,
    ),
    "Messages": record(
        as_of=AS_OF,
        messages=array(ref("ShownMessage")),
        next=array(ref("Offset"), description="where to go on in each partition"),
        before=or_null(number("of the last messages: older ones have lower seqs; null: there are none")),
        looked=number("records that were looked at, counted from where it began; `of` the last ones: from the end"),
        of=number("records that there are from there on; of the last ones: all"),
        error=_DAMAGE,
    ),
    "ShownMessage": record(
        partition=number("its number"),
        offset=number("in the partition"),
        seq=number("in the WAL"),
        timestamp=number("when the message was made, in ms since the epoch"),
        key=or_null(text("as key_encoding says; null: none")),
        key_encoding=_SHOWN_ENCODING,
        value=or_null(text("as encoding says; null: none")),
        encoding=_SHOWN_ENCODING,
        headers=array(ref("ShownHeader"), maxItems=100),
        raw=text("the stored line; bytes that are not UTF-8 as \\xNN"),
        bytes=number("of the stored line"),
        truncated=flag("true: too large to be shown whole: value, raw or headers are cut"),
    ),
    "ShownHeader": record(name=text("its name"), value=or_null(text("null: none"))),
    "Damage": record(
        code=text("damaged"),
        message=text("which file, and where"),
        first_offset=number("the first record that cannot be read"),
        next_offset=number("the next record that may be good"),
    ),
    "Letters": record(
        as_of=AS_OF,
        topic=text("the topic of the letters"),
        groups=array(ref("Letter"), description="the most frequent reason first"),
        total=number("letters that were looked at"),
        more=flag("true: there are older ones"),
        error=_DAMAGE,
    ),
    "Letter": record(
        reason=text("the last error"),
        count=number("letters with this reason"),
        first_at=decimal("when the first was received, in unix seconds"),
        last_at=decimal("when the last was received, in unix seconds"),
        examples=array(ref("ShownMessage"), maxItems=5),
    ),
    "Replay": record(
        [],
        filter={"anyOf": [text("a filter"), array(text("a filter"), maxItems=20)]},
        rate=number("messages a second; 0: no limit", most=1_000_000),
        max=number("at most so many letters that have not gone back, the oldest first", least=1, most=100_000),
        dryRun=flag("true (default): only count"),
    ),
    "Replayed": record(
        ["dryRun", "topic", "repeated", "stayed", "strangers", "complete"],
        dryRun=flag("true: nothing was sent"),
        topic=text("the topic of the letters"),
        would_replay=number("letters that would go back"),
        replayed=number("letters that went back now"),
        repeated=number("letters that had gone back before; they are not in the other numbers"),
        stayed=by_name(number("how many"), "letters that stay, by reason"),
        strangers=number("records that are no letters"),
        complete=flag("false: limit or time left letters out; the same replay goes on with them"),
    ),
    "Reset": record(
        ["topic", "to"],
        topic=text("a topic", minLength=1, maxLength=200),
        to={"anyOf": [text("earliest or latest", enum=["earliest", "latest"]), ref("SeekTime"), ref("Offsets")]},
        dryRun=flag("true (default): only say what would change"),
    ),
    "Moved": record(dryRun=flag("true: nothing was moved"), partitions=array(ref("Move"))),
    "Move": record(
        **{
            "partition": number("its number"),
            "from": or_null(number("the offset that was committed; null: none")),
            "to": number("the new offset"),
        }
    ),
    "Event": record(
        id=number("rises"),
        at=decimal(_MS_OR_S),
        kind=text("what kind of event", enum=[*KINDS]),
        about=text("the process, topic, group or code that it is about"),
        text=text("one sentence"),
    ),
}


# --- schemas ---------------------------------------------------------------------------------------------------------

MOST_MESSAGES = 10_000  # in one request


def _limit(help: str) -> dict[str, Any]:
    return number(f"{help}; -1: no limit", least=-1)  # type: ignore[return-value]


_PARTITIONS = number("how many partitions", least=1, most=MAX_PARTITIONS)
_TIMESTAMPS = text(
    "the time of a message for Kafka's consumers: CreateTime: the producer's; LogAppendTime: when it was received",
    enum=["CreateTime", "LogAppendTime"],
)
_CLEANUP = text("delete, or compact: only the latest message of each key has to stay", enum=["delete", "compact"])
_TIER = text("on: old messages go to the store KMQ_TIER; off: not", enum=["on", "off"])
_OPTIONS: dict[str, Schema] = {
    "retentionMs": _limit("age in ms at which messages are deleted"),
    "retentionBytes": _limit("bytes of a partition beyond which the oldest messages are deleted"),
    "segmentMs": _limit("age in ms at which a partition begins a new file"),
    "segmentBytes": number("bytes at which a partition begins a new file", least=1),
    "cleanupPolicy": _CLEANUP,
    "deleteRetentionMs": _limit("age in ms up to which compaction keeps a message without a value"),
    "tier": _TIER,
    "localRetentionMs": _limit("with tier=on: age in ms at which messages leave the disk; default: as retentionMs"),
    "localRetentionBytes": _limit("with tier=on: bytes of a partition on the disk; default: as retentionBytes"),
    "maxDeliveries": _limit("deliveries after which a message that is given back becomes a dead letter"),
    "messageTimestampType": _TIMESTAMPS,
    "kafkaSettings": text("settings that Kafka's clients gave the topic, of no effect here: name=value;name=value"),
}
_PARTITIONER = text("how a key decides on the partition; new topics: murmur2", enum=[*PARTITIONERS])
_CHANGES = {name: or_null(schema) for name, schema in _OPTIONS.items()}
for _name in ("cleanupPolicy", "messageTimestampType", "tier"):
    _CHANGES[_name]["enum"] = [*_OPTIONS[_name]["enum"], None]
_OFFSET = number("position in the partition, from 0, for ever the same")
_BYTES = {"type": ["string", "null"], "description": "text, or base64 with format=base64; null: none"}
_VALUE = {"description": "base64, text with format=text, any JSON with format=json; null: none"}
_SUMMARY = {
    "name": text("the topic"),
    "fromSeq": or_null(number("the WAL's number from which on the topic is in force; null: not yet")),
    "replicationFactor": number("brokers that keep each message", least=1, most=5),
    "partitioner": _PARTITIONER,
    "cleanupPolicy": _CLEANUP,
    **_OPTIONS,
}
_ENCODING = text("how this one is written, whatever format= says", enum=["base64", "text"])
_MESSAGE: dict[str, Schema] = {
    "key": _BYTES,
    "value": _VALUE,
    "headers": {"anyOf": [ref("HeaderMap"), ref("HeaderList")]},
    "partition": number("0 to partitions-1; without it the key decides, and without a key the message is spread"),
    "timestamp": number("when the message was made, in ms since the epoch; default: now", most=999_999_999_999_999),
    "id": text("recognises a repetition; with producer= a rising number", minLength=1, maxLength=MAX_WINDOW_ID),
    "encoding": _ENCODING,
    "keyEncoding": _ENCODING,
}
_SEND: dict[str, Schema] = {
    "producer": text("a name whose ids rise: each is stored exactly once", pattern=f"^{NAME_PATTERN}$"),
    "acks": {  # not one enum: generators of clients refuse one of texts and numbers
        "anyOf": [number("0 or 1", most=1), text("0, 1 or all", enum=["0", "1", "all"])],
        "description": "0: answer 202 at once; 1 and all: when the message is on disk and in its partition",
    },
}

_GROUP, _MEMBER = PATH_SCHEMAS["group"], PATH_SCHEMAS["member"]
_GENERATION = number("the group's, as the member was told it", most=(1 << 31) - 1)
_METADATA = text("kept with the offset; at most 1,024 bytes", maxLength=1024)
_DELIVERIES = number("of a message that was given back: how often the group was given it", least=1)
_WHERE = text("earliest or latest", enum=["earliest", "latest"])
_GROUP_HEAD: dict[str, Schema] = {
    "group": _GROUP,
    "state": text("what it waits for", enum=["empty", "preparing", "completing", "stable", "dead"]),
    "generation": _GENERATION,
    "protocol": text("its assignor; empty before the first member"),
}

SCHEMAS: dict[str, Schema] = {
    "Error": {
        "type": "object",
        "required": ["code", "message"],
        "properties": {
            "code": text("one of the refusal codes of KMQ"),
            "message": text("what is wrong and what to do"),
            "field": text("the field or parameter that is wrong"),
            "seq": number("stored_not_routed: the message's number in the WAL"),
            "first": number("out_of_range: the first offset of the partition"),
            "end": number("out_of_range: the offset of its next message"),
        },
    },
    "NewTopic": record(
        ["name"],
        name=text("letters, digits, _ . - and no . or - in front", minLength=1, maxLength=200),
        partitions=_PARTITIONS,
        partitioner=_PARTITIONER,
        replicationFactor=number("1, or in a shard the number of its brokers", least=1, most=32767),
        **_OPTIONS,
    ),
    "TopicChanges": record(
        [], partitions=_PARTITIONS, force=flag("also where keys would move to other partitions"), **_CHANGES
    ),
    "Partition": record(
        ["partition", "startOffset", "endOffset", "bytes", "segments"],
        partition=number("its number"),
        startOffset=number("of the first message that is still there"),
        endOffset=number("of the next message"),
        bytes=number("on disk"),
        segments=number("files"),
        gaps=array(array(number("offset"), minItems=2, maxItems=2), description="[first, to]: offsets no message has"),
        localStartOffset=number("of the first message on the disk; only where KMQ_TIER has had messages"),
        tierEndOffset=number("of the first message that KMQ_TIER does not have"),
        tierObjects=number("in KMQ_TIER"),
        tierBytes=number("of messages in these objects; some of them may be on the disk, too"),
    ),
    "TopicSummary": record(**_SUMMARY, partitions=_PARTITIONS),
    "Topic": record(**_SUMMARY, partitions=array(ref("Partition"))),
    "Header": record(["name"], name=text("any text but the empty one", minLength=1), value=_BYTES, encoding=_ENCODING),
    "HeaderMap": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "an object of texts",
    },
    "HeaderList": array(ref("Header"), maxItems=1000, description="a list of objects with name and value"),
    "NewMessage": record(["value"], **_MESSAGE),
    "Message": record(
        ["partition", "offset", "key", "value", "headers", "timestamp"],
        partition=_MESSAGE["partition"],
        offset=_OFFSET,
        key=_BYTES,
        value=_VALUE,
        headers=_MESSAGE["headers"],
        timestamp=number("when the message was made, in ms since the epoch"),
        encoding=_ENCODING,
        keyEncoding=_ENCODING,
        deliveries=_DELIVERIES,
    ),
    "SingleProduce": record(["value"], **_MESSAGE, **_SEND),
    "BatchProduce": record(
        ["messages"], messages=array(ref("NewMessage"), minItems=1, maxItems=MOST_MESSAGES), **_SEND
    ),
    "Produce": {"anyOf": [ref("SingleProduce"), ref("BatchProduce")]},
    "Stored": record(
        ["topic", "partition", "offset", "timestamp"],
        topic=text("the topic"),
        partition=or_null(number("null: a repetition of a message that is gone")),
        offset=or_null(_OFFSET),
        timestamp=number("in ms since the epoch"),
        duplicate=flag("true: this id had been stored before, there"),
    ),
    "Failed": record(error=ref("Error")),
    "Result": {"anyOf": [ref("Stored"), ref("Failed")]},
    "Results": record(results=array(ref("Result"))),
    "Accepted": record(accepted=number("messages sent, without confirmation")),
    "Position": record(
        ["partition", "offset", "endOffset"],
        partition=number("its number"),
        offset=number("the next to read"),
        endOffset=number("of the partition's next message"),
        overtaken=number(
            "messages that were deleted before the group had read them, since its last answer; absent: none"
        ),
    ),
    "Consumed": record(
        ["messages", "positions"],
        messages=array(ref("Message")),
        positions=array(ref("Position")),
        generation=or_null(number("of the group; null without one")),
        assignment=array(ref("TopicPartition")),
    ),
    "TopicPartition": record(topic=text("a topic"), partition=number("its number")),
    "Offset": record(["partition", "offset"], partition=number("its number"), offset=_OFFSET, metadata=_METADATA),
    "Offsets": record(offsets=array(ref("Offset"))),
    "Commit": record(
        ["group", "offsets"],
        group=_GROUP,
        member=_MEMBER,
        generation=_GENERATION,
        offsets=array(ref("Offset"), minItems=1, maxItems=MAX_PARTITIONS),
    ),
    "Nack": record(
        ["group", "partition", "offset"],
        group=_GROUP,
        member=_MEMBER,
        generation=_GENERATION,
        partition=number("its number"),
        offset=_OFFSET,
        reason=text("why; a dead letter has it as `error`", maxLength=250),
        delayMs=number("deliver it again after so long, not at once", most=604_800_000),
    ),
    "Nacked": record(
        partition=number("its number"),
        offset=_OFFSET,
        deliveries=_DELIVERIES,
        notBefore=or_null(number("when it may be delivered again, in ms since the epoch; null: never")),
        deadLetter=or_null(text("the topic that it was put aside in, after maxDeliveries; null: it comes again")),
    ),
    "Seek": record(group=_GROUP, to={"anyOf": [_WHERE, ref("SeekTime"), ref("Offsets")]}),
    "SeekTime": {
        **record(timestamp={"anyOf": [number("ms since the epoch"), text("RFC 3339")]}),
        "description": "the first message with that timestamp or a later one",
    },
    "JoinGroup": record(
        ["topics"],
        member=_MEMBER,
        topics=array(text("a topic", minLength=1, maxLength=200), minItems=1, maxItems=1000),
        assignor=text("how partitions are shared; all members agree on one", enum=[*ASSIGNORS]),
        sessionMs=number("the member is ended after so long without a request", least=6_000, most=300_000),
    ),
    "Heartbeat": record(generation=_GENERATION),
    "Member": record(member=_MEMBER, generation=_GENERATION, assignment=array(ref("TopicPartition"))),
    "GroupSummary": record(
        **_GROUP_HEAD, members=number("how many"), committed=number("partitions in which it has committed")
    ),
    "Group": record(**_GROUP_HEAD, members=array(ref("GroupMember")), partitions=array(ref("GroupPartition"))),
    "GroupMember": record(
        id=_MEMBER,
        client=text("the name that its program gave"),
        host=text("where it came from"),
        assignment=array(ref("TopicPartition")),
    ),
    "GroupPartition": record(
        topic=text("a topic"),
        partition=number("its number"),
        committed=or_null(number("the next offset to read; null: nothing is committed")),
        end=number("of the partition's next message"),
        lag=number("messages that are not committed, or were given back before the committed offset"),
        lagSeconds={"type": "number", "description": "since the first of them was received"},
        nacked=number("messages that were given back, and wait to be delivered again or committed"),
        overtaken=number("messages that were deleted before the group had read them, since the gateway's start"),
    ),
    "LogRows": record(
        life=number("the seq with which the topic began"),
        first_offset=number("with which the log begins for readers"),
        local_offset=number("the first one that the broker has on its disk"),
        end_offset=number("of the next record"),
        rows=array(ref("LogRow")),
    ),
    "LogRow": record(
        base=number("the first offset"),
        next=number("the offset after the last one"),
        first_seq=number("of the first record"),
        last_seq=number("of the last record"),
        first_ts=number("when the first record was received, µs since the epoch"),
        last_ts=number("the same of the last record"),
        bytes=number("of lines"),
        size=number("of the object, in bytes"),
        sha256=text("of the object"),
        last_crc32=number("of its last line"),
        key=text("of the object, below the prefix of KMQ_TIER; it begins with the lineage"),
        commit=number("that made the row"),
    ),
    **CONSOLE_SCHEMAS,
}


# --- check -----------------------------------------------------------------------------------------------------------


def resolve(schema: Schema) -> Schema:
    """Return the schema to which a reference points."""
    return SCHEMAS[schema["$ref"].removeprefix(REF)] if "$ref" in schema else schema


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def check(schema: Schema, value: object, where: str = "") -> None:
    """Raise RequestRefused (bad_field) if `value` does not fit. `where`: its path, such as messages[3].value."""
    schema = resolve(schema)
    if "anyOf" in schema:
        if not any(_fits(choice, value) for choice in schema["anyOf"]):
            choices = (resolve(choice).get("description", "offsets") for choice in schema["anyOf"])
            raise bad_field(where, f"must be {' or '.join(choices)}")
        return
    allowed = schema.get("type")
    if allowed is not None:
        names = [allowed] if isinstance(allowed, str) else allowed
        if not any(
            isinstance(value, _TYPES[name]) and (name == "boolean") == isinstance(value, bool) for name in names
        ):
            raise bad_field(where or "body", f"must be {' or '.join(names)}")
    if "enum" in schema and not any(value == each and type(value) is type(each) for each in schema["enum"]):
        raise bad_field(where, f"must be one of {', '.join(str(each) for each in schema['enum'])}")
    if isinstance(value, str):
        _check_text(schema, value, where)
    elif isinstance(value, int) and "minimum" in schema and not schema["minimum"] <= value <= schema["maximum"]:
        raise bad_field(where, f"must be between {schema['minimum']} and {schema['maximum']}")
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            raise bad_field(where, f"must have {schema.get('minItems', 0)} to {schema['maxItems']} items")
        for place, item in enumerate(value):
            check(schema.get("items", {}), item, f"{where}[{place}]")
    elif isinstance(value, dict):
        _check_object(schema, value, where)


async def read_body(bodies: Bodies, call: HttpCall, name: str) -> dict[str, Any]:
    """Return the body of a request, checked against the schema `name`. Raises RequestRefused."""
    async with bodies.read(call.request) as text:
        body: dict[str, Any] = await bodies.parse(text, parse_json)
    check(SCHEMAS[name], body)
    return body


def _fits(schema: Schema, value: object) -> bool:
    try:
        check(schema, value)
    except RequestRefused:
        return False
    return True


def _check_text(schema: Schema, value: str, where: str) -> None:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        most = schema.get("maxLength", "any number of")
        raise bad_field(where, f"must have {schema.get('minLength', 0)} to {most} characters")
    if "pattern" in schema and not re.search(schema["pattern"].replace("$", r"\Z"), value):
        raise bad_field(where, f"must match {schema['pattern']}")


def _check_object(schema: Schema, value: dict[str, object], where: str) -> None:
    path = f"{where}." if where else ""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            raise bad_field(path + name, "is missing")
    others: Any = schema.get("additionalProperties", {})
    for name, item in value.items():
        if name not in properties and others is False:
            raise bad_field(path + name[:100], f"unknown; expected {', '.join(properties)}")
        check(properties.get(name, others), item, path + name[:100])
