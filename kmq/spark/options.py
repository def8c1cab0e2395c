"""The options of format("kmq"), named as in Spark's Kafka source. What is wrong with one is said with its name.

path                     data directories, comma-separated, each may be a glob: pods/*/data
kmq.bootstrap.servers    or brokers over HTTP: host:8082,host:8082 (the gateways)
kmq.token                bearer token for these, where they ask for one
subscribe                topics, comma-separated; __append is the WAL
subscribePattern         or topics by a regular expression (of the whole name; those of KMQ's own, __*, only if it names them)
assign                   or partitions: {"orders": [0, 1]}
startingOffsets          earliest, latest or {"orders": {"0": 23, "1": -2}} (-2 earliest, -1 latest), for every broker, or
                         {"host:8082": {"orders": …}} for each; default: earliest in a batch, latest in a stream
endingOffsets            batch only; latest, or the same as JSON
startingTimestamp        milliseconds since the epoch, in place of startingOffsets
maxOffsetsPerTrigger     stream: at most so many records in a micro-batch, in proportion to what each partition has
maxBytesPerTrigger       stream: at most about so many bytes, the same from each partition that has any; with a unit: 64m
minPartitions            at least so many tasks, where there are as many records
failOnDataLoss           true: stop where records that were to be read are gone (default); false: go on behind them
"""

import glob
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from kmq.errors import ConfigError
from kmq.log.reader import WAL as WAL

EARLIEST, LATEST = -2, -1
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_READ = (
    *("path", "kmq.bootstrap.servers", "kmq.token", "subscribe", "subscribePattern", "assign"),
    *("startingOffsets", "endingOffsets", "startingTimestamp", "maxOffsetsPerTrigger", "maxBytesPerTrigger"),
    *("minPartitions", "failOnDataLoss"),
)
NAMES = {name.lower(): name for name in _READ}


class Options:
    """The read options, checked; ConfigError names what is wrong."""

    def __init__(self, given: Mapping[str, str]) -> None:
        options = {name.lower(): text for name, text in given.items()}
        for name in options:
            if name.startswith("kmq.") and name not in NAMES:
                raise ConfigError(f"{name}: is none of the options of a reader: {', '.join(_READ)}")
        self._given = options
        self.token = options.get("kmq.token", "")
        self.servers = _list(options.get("kmq.bootstrap.servers", ""))
        self.paths = [path for part in _list(options.get("path", "")) for path in _expand(part)]
        if bool(self.servers) == bool(self.paths):
            raise ConfigError(
                "give `path` (data directories) or `kmq.bootstrap.servers` (host:port of gateways), one of them"
            )
        if len(set(self.brokers)) < len(self.brokers):
            raise ConfigError(f"{'path' if self.paths else 'kmq.bootstrap.servers'}: names a broker twice")
        self._topics_asked()
        self.starting = self._offsets("startingOffsets")
        self.ending = self._offsets("endingOffsets")
        if self.ending == EARLIEST:
            raise ConfigError("endingOffsets: earliest would read nothing; latest, or JSON")
        self.starting_micros = 1000 * self._number("startingTimestamp", 0) or None
        if self.starting_micros and self.starting is not None:
            raise ConfigError("give startingOffsets or startingTimestamp, one of them")
        self.max_offsets = self._number("maxOffsetsPerTrigger", 1)
        self.max_bytes = self._number("maxBytesPerTrigger", 1)
        self.min_partitions = self._number("minPartitions", 1)
        fail = options.get("failondataloss", "true").lower()
        if fail not in ("true", "false"):
            raise ConfigError(f"failOnDataLoss={fail!r}: is true or false")
        self.fail_on_data_loss = fail == "true"

    @property
    def brokers(self) -> list[str]:
        """Their names, as given."""
        return self.servers or self.paths

    def _topics_asked(self) -> None:
        asked = [name for name in ("subscribe", "subscribePattern", "assign") if self._given.get(name.lower())]
        if len(asked) != 1:
            raise ConfigError("give one of subscribe, subscribePattern, assign" + (f", not {asked}" if asked else ""))
        self.topics = _list(self._given.get("subscribe", ""))
        self.pattern: re.Pattern[str] | None = None
        self.assigned: dict[str, list[int]] = {}
        if asked == ["subscribePattern"]:
            try:
                self.pattern = re.compile(self._given["subscribepattern"])
            except re.error as err:
                raise ConfigError(f"subscribePattern={self._given['subscribepattern']!r}: {err}") from None
        if asked == ["assign"]:
            table = _json("assign", self._given["assign"])
            if not all(
                isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in table.values()
            ):
                raise ConfigError('assign: is {"topic": [0, 1], …}')
            self.assigned, self.topics = table, list(table)

    def wants(self, topic: str, partition: int | None = None) -> bool:
        """Whether a topic, or one of its partitions, was asked for."""
        if self.pattern is not None:
            own = topic.startswith("__") and not self.pattern.pattern.startswith("__")
            return not own and self.pattern.fullmatch(topic) is not None
        return topic in self.topics and (partition is None or partition in self.assigned.get(topic, [partition]))

    def _offsets(self, name: str) -> int | dict[str, Any] | None:
        """EARLIEST, LATEST, a table by topic or by broker, or None where nothing was said."""
        text = self._given.get(name.lower())
        if text is None:
            return None
        if text in ("earliest", "latest"):
            return EARLIEST if text == "earliest" else LATEST
        table = _json(name, text)
        by_broker = all(key in self.brokers for key in table) and bool(table)
        for topics in table.values() if by_broker else [table]:
            shaped = isinstance(topics, dict) and all(isinstance(each, dict) for each in topics.values())
            if not shaped or not all(
                type(n) is int and n >= EARLIEST for each in topics.values() for n in each.values()
            ):
                raise ConfigError(
                    f'{name}: is earliest, latest, {{"topic": {{"0": 23}}}} or {{"broker": {{"topic": …}}}}'
                )
        return table if by_broker else dict.fromkeys(self.brokers, table)

    def _number(self, name: str, least: int) -> int:
        """The number given, 0 without one."""
        text = self._given.get(name.lower())
        if text is None:
            return 0
        match = re.fullmatch(r"(\d+)([kmg]?)b?", text.strip().lower())
        if not match or int(match[1]) < least:
            raise ConfigError(f"{name}={text!r}: is a whole number of at least {least}")
        return int(match[1]) * _UNITS[match[2]]


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _expand(path: str) -> list[str]:
    path = path.removeprefix("file://")
    if not glob.has_magic(path):
        return [path]
    found = sorted(each for each in glob.glob(path) if os.path.isdir(f"{each}/append"))
    if not found:
        raise ConfigError(f"path={path!r}: matches no data directory")
    return found


def _json(name: str, text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except ValueError as err:
        raise ConfigError(f"{name}={text[:80]!r}: {err}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{name}={text[:80]!r}: is a JSON object")
    return table
