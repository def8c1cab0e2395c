"""The options of format("kmq"), named as in Spark's Kafka source. An error names the wrong option.

path                     data directories, comma-separated, each may be a glob: pods/*/data; batch: also the copy of a broker in
                         a store, as of its last commit: s3://bucket/kmq, file:///mnt/nfs/kmq; …/<lineage> if it has several
kmq.bootstrap.servers    or brokers over HTTP: host:8082,host:8082 (the gateways); the addresses of one shard are one broker
kmq.token, kmq.ssl.*, kmq.timeout, kmq.patience
                         how to connect to them: kmq/spark/connections.py
tier                     where old records come from that only KMQ_TIER has: broker (default), or the URL of that store: tasks get
                         its objects themselves, with their own credentials; with a data directory the URL is needed
subscribe                topics, comma-separated; __append is the WAL
subscribePattern         or topics by a regular expression (of the whole name; KMQ's own topics, __*, only if it begins
                         so)
assign                   or partitions: {"orders": [0, 1]}
startingOffsets          earliest, latest or {"orders": {"0": 23, "1": -2}, "jobs": "latest"} (-2 earliest, -1 latest),
                         for every broker, or {"host:8082": {"orders": …}} per broker; default: earliest in a batch,
                         latest in a stream
startingOffsetsByTimestamp, startingTimestamp
                         by time, in milliseconds since the epoch; see kmq/spark/source/ends.py, also for what JSON must
                         name
startingOffsetsByTimestampStrategy
                         if no record is of that time or later: error, or latest; default: latest, unless the time is in
                         the future
endingOffsets, endingOffsetsByTimestamp, endingTimestamp
                         batch only: where it ends, in the same way; default: latest
maxOffsetsPerTrigger     stream: maximum records in a micro-batch, which ends at one recv_ts over all partitions
maxBytesPerTrigger       stream: approximate bytes in a micro-batch, which ends at one recv_ts over all partitions; with
                         a unit: 64m
minOffsetsPerTrigger     stream: a micro-batch waits for at least this many records, but at most maxTriggerDelay
maxTriggerDelay          how long minOffsetsPerTrigger may keep records waiting: 90s, 15m (default), 1h
minPartitions            minimum tasks, if there are as many records
maxRecordsPerPartition   maximum records in a task
pushFilters              batch: true: filters of the query on offset, recv_ts, topic and partition become ranges. For a
                         DataFrame that one query reads once: Spark applies them to its later queries too; default: false
onUnreachable            stream: fail: stop if a broker does not answer for kmq.patience (default); hold: its offsets
                         stay where they are, the other brokers go on, and it goes on when it is back
failOnDataLoss           true: stop if records that were to be read are lost (default); false: skip them
groupId                  stream: the consumer group whose offsets show how far the query is; kmq/spark/source/group.py
includeHeaders           true: column headers is array<struct<key:string,value:binary>>, as in Kafka's connector, null
                         without headers; false: map<string,string> (default)
includeOrigin            true: columns origin_broker, origin_topic, origin_partition, origin_offset, from which the sink
                         makes ids
"""

import glob
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from kmq.config import values
from kmq.config.values import parse_bytes, parse_duration
from kmq.errors import ConfigError, quotation
from kmq.log.reader import WAL
from kmq.logfmt import Logger
from kmq.message import record
from kmq.spark import connections
from kmq.spark.connections import Access, check_logins, check_options
from kmq.spark.paths import directory_here, scheme, store_url
from kmq.spark.source import ends
from kmq.spark.source.brokers import recognised

MAX_TRIGGER_DELAY_S = 900.0
MAX_GROUP = 200  # bytes of a group's name
_BROKER = "broker"  # of option tier
Number = TypeVar("Number", int, float)
OPTIONS = (
    *(
        "path",
        "paths",
        "kmq.bootstrap.servers",
        *connections.OPTIONS,
        "tier",
        "subscribe",
        "subscribePattern",
        "assign",
    ),
    *("startingOffsets", "startingOffsetsByTimestamp", "startingTimestamp", ends.STRATEGY),
    *("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp", "maxOffsetsPerTrigger", "maxBytesPerTrigger"),
    *("minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "maxRecordsPerPartition", "failOnDataLoss"),
    *("onUnreachable", "pushFilters", "groupId", "includeHeaders", "includeOrigin"),
)
_STREAM_ONLY = (
    "groupId",
    "onUnreachable",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
)
_BATCH_ONLY = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
# Names of the options elsewhere.
_ELSEWHERE = {
    "topic": "subscribe",
    "topics": "subscribe",
    "brokers": "kmq.bootstrap.servers",
    "kmq.producers": "kmq.bootstrap.servers",
    "kafka.group.id": "groupId",
    "group.id": "groupId",
    "groupidprefix": "groupId",
    "kafka.ssl.truststore.location": "kmq.ssl.ca.location",
    "kafka.ssl.keystore.location": "kmq.ssl.certificate.location and kmq.ssl.key.location",
}
# They have no effect without a connection; a token does, because it is also used to write back to the broker.
_CONNECTING = [*(name for name in connections.OPTIONS if name != "kmq.token"), "onUnreachable"]
_ONLY_A_STREAM = {"groupId": "commits offsets", "onUnreachable": "goes on without a broker"}


class ReadOptions:
    """The read options, checked; a ConfigError names the wrong option."""

    cores = 0  # cores of the session that reads, set by the format; 0: not known

    def __init__(self, given: Mapping[str, str]) -> None:
        options = {name.lower(): text for name, text in given.items()}
        check_options(given, OPTIONS, "reader", _ELSEWHERE)
        self._given = options
        self.servers, self.paths = places(options)
        if self.paths and (vain := [name for name in _CONNECTING if name.lower() in options]):
            raise ConfigError(
                f"{vain[0]}: `path` is read without a connection; give kmq.bootstrap.servers, or leave the option out"
            )
        self.access = Access.of(options)
        if bool(self.servers) == bool(self.paths):
            raise ConfigError(
                "give `path` (data directories) or `kmq.bootstrap.servers` (host:port of gateways), one of them"
            )
        named = self.servers or self.paths
        if len(set(named)) < len(named):
            raise ConfigError(f"{'path' if self.paths else 'kmq.bootstrap.servers'}: names a broker twice")
        self.tier = self._tier_url()
        self._check_topics()
        self.start = ends.parse(options, "starting", named)
        self.end = ends.parse(options, "ending", named)
        self._ends = self.start, self.end
        self._brokers: list[str] | None = None
        self.time_strategy = options.get(ends.STRATEGY.lower(), "").strip().lower()
        if self.time_strategy not in ("", "error", "latest"):
            raise ConfigError(f"{ends.STRATEGY}={self.time_strategy!r}: must be error or latest")
        self._limits()
        self.holds = options.get("onunreachable", "fail").strip().lower() == "hold"
        if not self.holds and options.get("onunreachable", "fail").strip().lower() != "fail":
            raise ConfigError(f"onUnreachable={options['onunreachable']!r}: must be fail or hold")
        self.fail_on_data_loss = self._flag("failOnDataLoss", True)
        self.push_filters = self._flag("pushFilters", False)
        self.group_id = self._group()
        self.include_headers = self._flag("includeHeaders", False)
        self.include_origin = self._flag("includeOrigin", False)

    def _tier_url(self) -> str:
        """Return the URL of the store that tasks read themselves; "" without one."""
        text = self._given.get("tier", _BROKER).strip()
        if text.lower() == _BROKER:
            return ""
        if self.paths and all(map(scheme, self.paths)):
            raise ConfigError("tier: `path` is a store itself, which is read without a broker; leave it out")
        return _store_url("tier", text, "broker, or ")

    def _limits(self) -> None:
        """Parse the limits of a micro-batch and a task; 0 is no limit."""
        self.max_offsets = self._number("maxOffsetsPerTrigger", 1)
        self.min_offsets = self._number("minOffsetsPerTrigger", 1)
        self.max_bytes = self._parsed("maxBytesPerTrigger", parse_bytes, 0)
        self.max_trigger_delay_s = self._parsed("maxTriggerDelay", parse_duration, MAX_TRIGGER_DELAY_S)
        self.min_partitions = self._number("minPartitions", 1)
        self.max_records_per_partition = self._number("maxRecordsPerPartition", 1)
        if self.max_offsets and self.min_offsets > self.max_offsets:
            raise ConfigError(
                f"minOffsetsPerTrigger={self.min_offsets}: must be at most maxOffsetsPerTrigger={self.max_offsets}"
            )
        if "maxtriggerdelay" in self._given and not self.min_offsets:
            raise ConfigError("maxTriggerDelay: there is nothing to wait for without minOffsetsPerTrigger; give both")

    def _group(self) -> str:
        """Return the consumer group whose offsets show the query's progress; "" without a group."""
        name = self._given.get("groupid")
        if name is None:
            return ""
        if not 1 <= len(name.encode()) <= MAX_GROUP or "/" in name or " " in name or not name.isprintable():
            raise ConfigError(f"groupId={name[:80]!r}: must be 1 to {MAX_GROUP} printable bytes without space and /")
        if self.paths:
            raise ConfigError(
                f"groupId={name!r}: offsets are committed by a gateway, and `path` is read without one; give"
                " kmq.bootstrap.servers instead of path, or leave groupId out"
            )
        if WAL in self.topics:
            raise ConfigError(f"groupId={name!r}: {WAL} is no topic, so groups have no offsets of it; subscribe topics")
        return name

    @property
    def token(self) -> str:
        return self.access.token

    @property
    def brokers(self) -> list[str]:
        """Return the names of the brokers as given; the addresses of one shard are one name, `a:8082,b:8082`.

        With several gateways the first call asks them. Raises RetryError if one of them stays silent; with
        onUnreachable=hold a silent gateway counts as a broker of its own until it answers.
        """
        if self._brokers is None:
            self.name_brokers(recognised(self.servers, self.access, not self.holds) if self.servers else self.paths)
            assert self._brokers is not None
        return self._brokers

    def name_brokers(self, names: list[str]) -> None:
        """Set the names of the brokers, because it is known by now which addresses belong to one shard."""
        self._brokers = names
        self.start, self.end = (ends.of_brokers(end, names) for end in self._ends)

    def _check_topics(self) -> None:
        choices = [name for name in ("subscribe", "subscribePattern", "assign") if name.lower() in self._given]
        if len(choices) != 1:
            given = f", not {' and '.join(choices)}" if choices else ""
            raise ConfigError(f"give one of subscribe, subscribePattern, assign{given}")
        self.topics = _list(self._given, "subscribe")
        self.pattern: re.Pattern[str] | None = None
        self.assigned: dict[str, list[int]] = {}
        if choices == ["subscribePattern"]:
            text = self._given["subscribepattern"]
            if not text:
                raise ConfigError("subscribePattern='': matches no topic; .* takes them all")
            try:
                self.pattern = re.compile(text)
            except re.error as err:
                raise ConfigError(f"subscribePattern={text!r}: {err}") from None
        if choices == ["assign"]:
            self.assigned = _assigned(self._given["assign"])
            self.topics = list(self.assigned)
        for topic in self.topics:
            if not record.is_topic_name(topic):
                raise ConfigError(
                    f"{choices[0]}: {topic!r} is no topic name; subscribePattern takes a regular expression"
                )

    def check_schema(self, names: Collection[str]) -> None:
        """Raise ConfigError if the user's schema lacks a column that an option requests."""
        from kmq.spark.source import columns  # here: it needs numpy, and kmq pipeline status must work without

        for option, is_on, needed in (
            ("includeOrigin", self.include_origin, columns.ORIGIN),
            ("includeHeaders", self.include_headers, ("headers",)),
        ):
            lacking = [name for name in needed if name not in names] if is_on else []
            if lacking:
                raise ConfigError(f"{option}: the schema given lacks {', '.join(lacking)}; a schema says what there is")

    def check_batch(self) -> None:
        """Warn of options that have no effect in a batch, as Kafka's connector does."""
        self.holds = False
        for name in _STREAM_ONLY:
            if name.lower() in self._given:
                what = _ONLY_A_STREAM.get(name, "has triggers")
                Logger("spark").warn("option_without_effect", option=name, effect=f"only a stream {what}")

    def check_stream(self) -> None:
        """Raise ConfigError for options that only a batch has."""
        for name in _BATCH_ONLY:
            if name.lower() in self._given:
                raise ConfigError(f"{name}={self._given[name.lower()][:80]!r}: a stream has no end; spark.read has one")
        for path in filter(scheme, self.paths):
            raise ConfigError(
                f"path={quotation(path, is_path=True)}: a copy is as of its last commit, and spark.read reads it; a stream"
                " needs a data directory, or kmq.bootstrap.servers"
            )
        if self.push_filters:
            raise ConfigError("pushFilters='true': a stream reads what its checkpoint says; leave it out")

    def wants(self, topic: str, partition: int | None = None) -> bool:
        """Return True if a topic, or this partition of it, was requested."""
        if self.pattern is not None:
            own = topic.startswith("__") and not self.pattern.pattern.startswith("__")
            return not own and self.pattern.fullmatch(topic) is not None
        return topic in self.topics and (partition is None or partition in self.assigned.get(topic, [partition]))

    def _flag(self, name: str, default: bool) -> bool:
        text = self._given.get(name.lower(), str(default)).strip().lower()
        if text not in ("true", "false"):
            raise ConfigError(f"{name}={self._given[name.lower()]!r}: must be true or false")
        return text == "true"

    def _number(self, name: str, least: int) -> int:
        """Return the number given, or 0."""
        text = self._given.get(name.lower())
        if text is None:
            return 0
        if not re.fullmatch(r"\s*[0-9]+\s*", text) or int(text) < least:
            raise ConfigError(f"{name}={text!r}: must be a whole number of at least {least}")
        return int(text)

    def _parsed(self, name: str, parse: Callable[[str], Number], default: Number) -> Number:
        """Parse the text given, which must be over 0; return the default without a text."""
        text = self._given.get(name.lower())
        if text is None:
            return default
        try:
            value = parse(text)
        except ValueError as err:
            raise ConfigError(f"{name}={text!r}: {err}") from None
        if not value:
            raise ConfigError(f"{name}={text!r}: must be over 0")
        return value


def _assigned(text: str) -> dict[str, list[int]]:
    table = ends.parse_json("assign", text)
    for topic, numbers in table.items():
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ConfigError(f'assign={text[:80]!r}: must be {{"topic": [0, 1], …}}')
        if not numbers:
            raise ConfigError(f"assign: names no partition of {topic!r}")
        if len(set(numbers)) < len(numbers):
            raise ConfigError(f"assign: names a partition of {topic!r} twice")
    if not table:
        raise ConfigError(f'assign={text!r}: names no topic; {{"topic": [0, 1], …}}')
    return table


def places(options: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the gateways and data directories in `options`, whose names are in lower case."""
    paths = [path for part in _paths(options) for path in _expand(part)]
    check_logins([options.get("kmq.bootstrap.servers", "")])
    return _list(options, "kmq.bootstrap.servers"), paths


def _list(options: Mapping[str, str], name: str) -> list[str]:
    """Return the comma-separated parts of an option, [] without it."""
    text = options.get(name)
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{name}={quotation(text, is_path=True)}: there is an empty name in it")
    if len(set(parts)) < len(parts):
        twice = next(part for part in parts if parts.count(part) > 1)
        raise ConfigError(f"{name}={quotation(text, is_path=True)}: names {quotation(twice, is_path=True)} twice")
    return parts


def _store_url(option: str, text: str, also: str = "") -> str:
    try:
        return values.store_url(text)
    except ValueError:
        wanted = f"{also}the URL of a store without a login: s3://<bucket>/<prefix>, file:///<directory>"
        raise ConfigError(
            f"{option}={quotation(text, is_path=True)}: must be {wanted}; credentials are those of the environment"
        ) from None


def _paths(options: Mapping[str, str]) -> list[str]:
    """Return the directories of `path` and of `paths`; Spark passes load([a, b]) as `paths`."""
    text = options.get("paths")
    if text is None:
        return _list(options, "path")
    try:
        paths = json.loads(text)
    except ValueError:
        paths = None
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(f"paths={quotation(text, is_path=True)}: must be a JSON list of data directories")
    return [*_list(options, "path"), *paths]


def _expand(path: str) -> list[str]:
    if url := store_url(path):
        return [_store_url("path", url)]
    path = directory_here(path, "path")
    if not glob.has_magic(path):
        return [path]
    matches = sorted(glob.glob(path))
    directories = [match for match in matches if os.path.isdir(f"{match}/append")]
    if not directories:
        what = (
            f"; {matches[0]} is none" + (f", nor are {len(matches) - 1} more" if matches[1:] else "") if matches else ""
        )
        raise ConfigError(f"path={quotation(path, is_path=True)}: matches no data directory{what}")
    return directories
