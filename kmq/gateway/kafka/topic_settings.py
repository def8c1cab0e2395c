"""Settings of topics as Kafka's clients write them, in both directions: options of a topic, and rows of DescribeConfigs.

    {"retention.ms": "-1", "compression.type": "lz4"}  ->  {"retentionMs": -1, "kafkaSettings": "compression.type=lz4"}

Set         A setting that KMQ has under another name is an option of the topic, and is read back as it was set.
No effect   A setting that cannot change what is stored or promised is accepted with any legal value, kept, read back,
            and documented as of no effect, because Connect, Debezium and MirrorMaker send such settings with their
            topics.
Refused     A setting that promises more than KMQ keeps, an illegal value, an unknown name.
Cleanup     In Kafka a compacted topic keeps its records for ever, unless its policy is `compact,delete`. In KMQ it does
            so if it has no retention of its own. So `compact` is refused with a retention, and `compact,delete` without
            one.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kmq.config.settings import SETTINGS, Settings
from kmq.config.values import KIB
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.topics import OPTIONS, UNLIMITED, TopicState, Value, limits_of

BOOLEAN, STRING, INT, _LONG, _DOUBLE, LIST = 1, 2, 3, 5, 6, 7  # types of a setting
OF_TOPIC, OF_BROKER, DEFAULT = 1, 4, 5  # where a value comes from
_FOREVER = (1 << 63) - 1  # for settings that do not know -1
_BOTH = "compact,delete"


class TopicSetting(NamedTuple):
    """A setting of a topic that can be changed. `wide`: the broker's setting of the same kind."""

    option: str
    kind: int
    wide: str
    has_minus: bool = False  # -1 is no limit; otherwise _FOREVER is


TOPIC_SETTINGS = {
    "cleanup.policy": TopicSetting("cleanupPolicy", LIST, "log.cleanup.policy"),
    "delete.retention.ms": TopicSetting("deleteRetentionMs", _LONG, "log.cleaner.delete.retention.ms"),
    "local.retention.bytes": TopicSetting("localRetentionBytes", _LONG, "log.local.retention.bytes", True),
    "local.retention.ms": TopicSetting("localRetentionMs", _LONG, "log.local.retention.ms", True),
    "message.timestamp.type": TopicSetting("messageTimestampType", STRING, "log.message.timestamp.type"),
    "remote.storage.enable": TopicSetting("tier", BOOLEAN, "log.remote.storage.enable"),
    "retention.bytes": TopicSetting("retentionBytes", _LONG, "log.retention.bytes", True),
    "retention.ms": TopicSetting("retentionMs", _LONG, "log.retention.ms", True),
    "segment.bytes": TopicSetting("segmentBytes", INT, "log.segment.bytes"),
    "segment.ms": TopicSetting("segmentMs", _LONG, "log.roll.ms"),
}
_LIMITS = {OPTIONS[option.option].limit for option in TOPIC_SETTINGS.values()}
ATTRIBUTES = {limit: limit for limit in _LIMITS} | {"tier": "tier_topics"}  # by limit: that of the broker's setting
STANDARD = {row.attribute: row.parse(row.default) for row in SETTINGS if row.attribute in ATTRIBUTES.values()}
_AS_TOTAL = -2  # of a local limit: that of the topic as a whole
_SWITCH = {"true": "on", "false": "off"}
_NO_EFFECT = "taken and kept, of no effect in KMQ"
_NUMBER = re.compile(r"-?\d{1,19}")
_LEGAL: dict[int, Callable[[str], bool]] = {  # by type of a setting
    BOOLEAN: lambda text: text in ("true", "false"),
    INT: lambda text: bool(_NUMBER.fullmatch(text)) and -2 <= int(text) < 1 << 31,
    _LONG: lambda text: bool(_NUMBER.fullmatch(text)) and -2 <= int(text) <= _FOREVER,
    _DOUBLE: lambda text: bool(re.fullmatch(r"0?\.\d{1,17}|[01](\.0{1,17})?", text)),  # a ratio
    STRING: lambda text: bool(re.fullmatch(r"[A-Za-z0-9.-]{1,40}", text)),
    LIST: lambda text: bool(re.fullmatch(r"\*|(\d+:\d+(,\d+:\d+)*)?", text)) and len(text) <= 1000,
}
# Settings with any legal value, because none of them changes what is stored or promised, and their types. A topic keeps
# them as its option `kafkaSettings`.
_STORED = {
    "compression.type": STRING,
    "compression.gzip.level": INT,
    "compression.lz4.level": INT,
    "compression.zstd.level": INT,
    "file.delete.delay.ms": _LONG,
    "flush.messages": _LONG,
    "flush.ms": _LONG,
    "follower.replication.throttled.replicas": LIST,
    "index.interval.bytes": INT,
    "leader.replication.throttled.replicas": LIST,
    "max.compaction.lag.ms": _LONG,
    "message.downconversion.enable": BOOLEAN,
    "message.format.version": STRING,
    "message.timestamp.after.max.ms": _LONG,
    "message.timestamp.before.max.ms": _LONG,
    "message.timestamp.difference.max.ms": _LONG,
    "min.cleanable.dirty.ratio": _DOUBLE,
    "min.insync.replicas": INT,  # up to the number of replicas
    "preallocate": BOOLEAN,
    "segment.index.bytes": INT,
    "segment.jitter.ms": _LONG,
}
_CODECS = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
# What is the same in every topic, unless it keeps another value. Data is synced before it is acknowledged, hence flush.messages.
FIXED = {
    "compression.type": (STRING, "producer"),
    "file.delete.delay.ms": (_LONG, "0"),
    "flush.messages": (_LONG, "1"),
    "flush.ms": (_LONG, str(_FOREVER)),
    "follower.replication.throttled.replicas": (LIST, ""),
    "index.interval.bytes": (INT, "4096"),
    "leader.replication.throttled.replicas": (LIST, ""),
    "max.compaction.lag.ms": (_LONG, str(_FOREVER)),
    "message.downconversion.enable": (BOOLEAN, "false"),
    "message.format.version": (STRING, "2.8-IV1"),
    "message.timestamp.after.max.ms": (_LONG, str(_FOREVER)),
    "message.timestamp.before.max.ms": (_LONG, str(_FOREVER)),
    "message.timestamp.difference.max.ms": (_LONG, str(_FOREVER)),
    "min.cleanable.dirty.ratio": (_DOUBLE, "0.5"),
    "min.compaction.lag.ms": (_LONG, "0"),
    "preallocate": (BOOLEAN, "false"),
    "segment.index.bytes": (INT, "10485760"),
    "segment.jitter.ms": (_LONG, "0"),
    "unclean.leader.election.enable": (BOOLEAN, "false"),
}
MOST_BYTES = "max.message.bytes"
Row = tuple[int, str]  # type, value


def longest_message(settings: Settings) -> int:
    """Return the size of a batch of one record that always fits into a line, even as base64."""
    return max(1, settings.max_line * 3 // 4 - 4 * KIB)


def value_of(name: str, options: Mapping[str, int | str], own: Iterable[str] = ()) -> str:
    """Return a setting in Kafka's form, given all options of a topic, and the names of the topic's own."""
    option = TOPIC_SETTINGS[name]
    value = options[option.option]
    if name.startswith("local.") and option.option not in own:
        return str(_AS_TOTAL)
    if option.kind == BOOLEAN:
        return next(text for text, setting in _SWITCH.items() if setting == value)
    if name == "cleanup.policy" and value == "compact":
        has_own = any(options[limit] != UNLIMITED for limit in _RETENTION if limit in own)
        return _BOTH if has_own else "compact"
    return str(_FOREVER) if value == UNLIMITED and not option.has_minus else str(value)


_RETENTION = ("retentionMs", "retentionBytes")


def options_of(
    changes: Mapping[str, str | None], fixed: Mapping[str, Row], before: TopicState | None = None
) -> dict[str, Value]:
    """Return changed settings as options; None: the topic's own value is removed. Raises RequestRefused."""
    options: dict[str, Value] = {}
    settings = {} if before is None else stored_settings(before.options)
    for name, text in changes.items():
        if name in TOPIC_SETTINGS:
            options[TOPIC_SETTINGS[name].option] = None if text is None else _parsed(name, text)
        elif text is None or text == fixed.get(name, (0, None))[1]:
            settings.pop(name, None)
        elif name in _STORED:
            settings[name] = _legal(name, text, fixed)
        elif name in fixed:
            raise bad_field(name, f"is always {fixed[name][1]!r}")
        else:
            raise bad_field(name, f"is not known here; there are {', '.join([*TOPIC_SETTINGS, *_STORED])}")
    text = ";".join(f"{name}={value}" for name, value in sorted(settings.items()))
    if text != ("" if before is None else before.options["kafkaSettings"]):
        options["kafkaSettings"] = text or None
    try:
        limits_of(options)
    except RequestRefused as err:
        name = next(name for name, option in TOPIC_SETTINGS.items() if option.option == err.fields["field"])
        raise bad_field(name, str(err).partition(": ")[2]) from None
    own = {} if before is None else {name: before.options[name] for name in before.own}
    own = {name: value for name, value in (own | options).items() if value is not None}
    policy = changes.get("cleanup.policy")
    if policy is None and before is not None and "cleanup.policy" not in changes:
        policy = value_of("cleanup.policy", before.options, before.own)
    if own.get("cleanupPolicy") == "compact":
        has_retention = any(own.get(limit, UNLIMITED) != UNLIMITED for limit in _RETENTION)
        if has_retention and "delete" not in str(policy):
            raise bad_field("cleanup.policy", f"compact with a retention deletes rows; say {_BOTH}, or no retention")
        if not has_retention and "delete" in str(policy):
            raise bad_field("cleanup.policy", f"{_BOTH} needs retention.ms or retention.bytes")
    return options


def stored_settings(options: Mapping[str, int | str]) -> dict[str, str]:
    """Return the settings of no effect that a topic keeps, given all its options."""
    pairs = (each.partition("=") for each in str(options["kafkaSettings"]).split(";"))
    return {name: value for name, _, value in pairs if name in _STORED}


def _legal(name: str, text: str, fixed: Mapping[str, Row]) -> str:
    """Return the value of a setting of no effect. Raises RequestRefused if Kafka refuses it, or it promises more."""
    kind, value = _STORED[name], text.strip()
    value = value.lower() if kind == BOOLEAN else value
    if not _LEGAL[kind](value) or (name == "compression.type" and value not in _CODECS):
        raise bad_field(name, f"{text[:80]!r} is no value that it can have")
    if name == "min.insync.replicas" and not 1 <= int(value) <= int(fixed[name][1]):
        raise bad_field(name, f"must be 1 to {fixed[name][1]}, which there are")
    return value


def _parsed(name: str, text: str) -> Value:
    option = TOPIC_SETTINGS[name]
    if option.kind == BOOLEAN:
        if text.strip().lower() not in _SWITCH:
            raise bad_field(name, f"{text[:80]!r} is neither true nor false")
        return _SWITCH[text.strip().lower()]
    if name.startswith("local.") and text.strip() == str(_AS_TOTAL):
        return None
    if name == "cleanup.policy":
        words = {word.strip() for word in text.split(",")}
        return "compact" if words == {"compact", "delete"} else text.strip()
    if option.kind == STRING:
        return text
    digits = text.strip()
    if not digits.removeprefix("-").isdecimal() or not (number := int(digits)) <= _FOREVER:
        raise bad_field(name, f"{text!r} is no number of at most {_FOREVER}")
    if number < 0 and not (option.has_minus and number == UNLIMITED):
        raise bad_field(name, "must not be negative")
    return UNLIMITED if number == _FOREVER else number


def setting(name: str, kind: int, value: str, source: int = DEFAULT, is_fixed: bool = True) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "read_only": is_fixed,
        "config_source": source,
        "synonyms": [{"name": name, "value": value, "source": source}],
        "config_type": kind,
    }


def stored_setting(name: str, value: str, standard: dict[str, Any] | None) -> dict[str, Any]:
    """Return a setting of no effect that a topic keeps. `standard`: its value otherwise."""
    row = setting(name, _STORED[name], value, OF_TOPIC, is_fixed=False)
    synonyms = [*row["synonyms"], *([] if standard is None else standard["synonyms"])]
    return row | {"synonyms": synonyms, "documentation": _NO_EFFECT}
