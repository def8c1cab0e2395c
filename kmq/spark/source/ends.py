"""Where a query begins and ends: its options, and the offsets that they mean in the logs.

If several options are given for one end, the first of this list wins, as in Kafka's connector:
    <side>Timestamp            milliseconds since the epoch, for all partitions: the first record received then or later
    <side>OffsetsByTimestamp   {"orders": {"0": 1700000000000}}: the same per partition
    <side>Offsets              earliest, latest or {"orders": {"0": 23, "1": -2}, "jobs": "latest"} (-2 earliest, -1 latest)
<side> is starting or ending. The JSON is for every broker, or per broker: {"host:8082": {"orders": …}}.

Invariant   JSON always names each requested partition and no other. Otherwise a typing error would start a stream at
            the end of the intended partition and skip its records silently.
No match    A partition without a record at or after a starting time begins at its end, because recv_ts never goes back:
            its next record is the first one requested. A starting time in the future is an error.
            startingOffsetsByTimestampStrategy changes both: error (the default of Kafka's connector) or latest.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kmq.errors import ConfigError, quotation
from kmq.spark.connections import nearest
from kmq.spark.source.plan import Bounds, Key

EARLIEST, LATEST = -2, -1
STRATEGY = "startingOffsetsByTimestampStrategy"
_NAMED = 5  # partitions that an error names
_ALL, _EACH = -1, "*"  # of a topic whose JSON is a word: its partitions, as a number and in the table
_WORDS = {"earliest": EARLIEST, "latest": LATEST}

Table = dict[str, dict[str, dict[str, int]]]  # broker → topic → partition


@dataclass(frozen=True)
class End:
    """One end of a query. `option` is the option that decides; "" if none was given and the query's default applies."""

    option: str = ""
    everywhere: int | None = None
    table: Table | None = None
    by_broker: bool = False  # the JSON was given per broker
    is_time: bool = False  # values are milliseconds since the epoch

    def value(self, key: Key) -> int | None:
        """Return the option's value for a partition; None if it has none."""
        if self.table is None:
            return self.everywhere
        numbers = self.table.get(key[0], {}).get(key[1], {})
        return numbers.get(str(key[2]), numbers.get(_EACH))

    def named(self) -> Iterator[Key]:
        """Yield all partitions that the JSON names; _ALL for those of a topic as a whole."""
        for broker, topics in (self.table or {}).items():
            for topic, numbers in topics.items():
                yield from ((broker, topic, _ALL if number == _EACH else int(number)) for number in numbers)

    def says(self, key: Key) -> str:
        """Return, for errors, the option and its value for a partition."""
        return f"{self.option}={self.value(key)}"


# --- options ---------------------------------------------------------------------------------------------------------


def parse(options: Mapping[str, str], side: str, brokers: Sequence[str]) -> End:
    """Parse the end from options (names in lower case). Raises ConfigError, even for an overridden option."""
    found = []
    for name in (f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"):
        text = options.get(name.lower(), "").strip()
        if name.lower() not in options:
            continue
        if name.endswith("OffsetsByTimestamp"):
            found.append(_table(name, text, brokers, 0, is_time=True))
        else:
            found.append(_offsets(name, text, brokers) if name.endswith("Offsets") else _one_time(name, text))
    return found[0] if found else End()


def _one_time(name: str, text: str) -> End:
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"{name}={quotation(text)}: must be a whole number of milliseconds since the epoch")
    return End(name, everywhere=int(text), is_time=True)


def _offsets(name: str, text: str, brokers: Sequence[str]) -> End:
    word = text.lower()
    least = EARLIEST
    if name.startswith("ending"):
        least = LATEST
        if word == "earliest":
            raise ConfigError(f"{name}: earliest would read nothing; latest, or JSON")
    if word in ("earliest", "latest"):
        return End(name, everywhere=EARLIEST if word == "earliest" else LATEST)
    return _table(name, text, brokers, least, is_time=False)


def _table(name: str, text: str, brokers: Sequence[str], least: int, is_time: bool) -> End:
    table = parse_json(name, text)
    by_broker = any(isinstance(each, (dict, str)) for topics in _dicts(table) for each in topics.values())
    shape = f'{{"topic": {{"0": {1700000000000 if is_time else 23}}}}} or {{"broker": {{"topic": …}}}}'
    must_be = f"must be {'' if is_time else 'latest or ' if least == LATEST else 'earliest, latest or '}{shape}"
    for topics in table.values() if by_broker else [table]:
        words = {} if is_time else {word: value for word, value in _WORDS.items() if value >= least}
        if not isinstance(topics, dict) or not all(_is_shaped(each, least, words) for each in topics.values()):
            raise ConfigError(f"{name}={quotation(text)}: {must_be}" + (f", from {least} on" if not is_time else ""))
        topics |= {topic: {_EACH: words[word.lower()]} for topic, word in topics.items() if isinstance(word, str)}
    if by_broker:
        for broker in table:
            if broker not in brokers:
                raise ConfigError(
                    f"{name}: unknown broker {quotation(broker)} in this query{nearest(broker, brokers)};"
                    f" there are {', '.join(brokers)}"
                )
    return End(name, table=table if by_broker else dict.fromkeys(brokers, table), by_broker=by_broker, is_time=is_time)


def of_brokers(end: End, brokers: Sequence[str]) -> End:
    """Return the end with these brokers' names; a shard may be `a:8082,b:8082`. Raises ConfigError if JSON names it
    twice.
    """
    if end.table is None:
        return end
    table: Table = {}
    for broker in brokers:
        named = [name for name in (broker, *broker.split(",")) if name in end.table]
        if end.by_broker and len({*named}) > 1:
            raise ConfigError(f"{end.option}: {named[0]} and {named[1]} are one shard; name one of them")
        if named:
            table[broker] = end.table[named[0]]
    return replace(end, table=table)


def _dicts(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (each for each in table.values() if isinstance(each, dict))


def _is_shaped(numbers: Any, least: int, words: Mapping[str, int]) -> bool:
    if isinstance(numbers, str):
        return numbers.lower() in words
    return isinstance(numbers, dict) and all(
        number.isascii() and number.isdecimal() and str(int(number)) == number and type(value) is int and value >= least
        for number, value in numbers.items()
    )


def parse_json(name: str, text: str) -> dict[str, Any]:
    """Return the JSON object of an option. Raises ConfigError, also for a name that occurs twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice = next(key for key in table if [key for key, _ in pairs].count(key) > 1)
            raise ConfigError(f"{name}={quotation(text)}: names {quotation(twice)} twice")
        return table

    try:
        table = json.loads(text, object_pairs_hook=once)
    except ValueError as err:
        raise ConfigError(f"{name}={quotation(text)}: {err}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{name}={quotation(text)}: is a JSON object")
    return table


# --- offsets ---------------------------------------------------------------------------------------------------------


def resolve(
    end: End, bounds: Bounds, default: int, offsets_of_time: Callable[[Sequence[Key], int], dict[Key, int]]
) -> dict[Key, int]:
    """Return the offset of each partition. If a log grows during the lookup of a time, `bounds` grow too."""
    found = {}
    times: dict[int, list[Key]] = {}
    for key in bounds if end.is_time else ():
        if (millis := end.value(key)) is not None:
            times.setdefault(millis, []).append(key)
    at = {key: offset for millis, keys in times.items() for key, offset in offsets_of_time(keys, 1000 * millis).items()}
    for key, (first, stop) in bounds.items():
        value = end.value(key)
        if value is None:
            value = default
        elif end.is_time:
            value = at[key]
            bounds[key] = first, max(stop, value)
        found[key] = {EARLIEST: first, LATEST: stop}.get(value, value)
    return found


def check_named(end: End, bounds: Bounds, wants: Callable[[str, int | None], bool]) -> None:
    """Raise ConfigError if JSON names a partition that does not exist or was not requested."""
    there = set(bounds) if end.by_broker else {("", *key[1:]) for key in bounds}
    there |= {(*key[:2], _ALL) for key in there}
    for broker, topic, partition in end.named():
        if not wants(topic, None if partition == _ALL else partition):
            what = topic if partition == _ALL else f"{topic}/{partition}"
            raise ConfigError(f"{end.option}: {what} was not asked for; name what is read, and no more")
        if (broker if end.by_broker else "", topic, partition) not in there:
            numbers = sorted(
                {each[2] for each in bounds if each[1] == topic and (not end.by_broker or each[0] == broker)}
            )
            where = f" at {broker}" if end.by_broker else ""
            has = f"it has {', '.join(map(str, numbers))}" if numbers else "it does not exist"
            if partition == _ALL:
                raise ConfigError(f"{end.option}: there is no topic {topic!r}{where}")
            raise ConfigError(f"{end.option}: there is no partition {partition} of topic {topic!r}{where}; {has}")


def check_complete(end: End, bounds: Bounds) -> None:
    """Raise ConfigError if JSON lacks a requested partition, as Kafka's connector does."""
    if end.table is None:
        return
    left = [
        f"{broker} {topic}/{partition}"
        for broker, topic, partition in bounds
        if end.value((broker, topic, partition)) is None
    ]
    if left:
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        hint = "" if end.is_time else "; -2 is its first offset, -1 its end"
        raise ConfigError(
            f"{end.option}: says nothing of {', '.join(left[:_NAMED])}{more}: name every partition that is read{hint}"
        )


def check_matches(end: End, starts: Mapping[Key, int], bounds: Bounds, strategy: str) -> None:
    """Raise ConfigError if a partition has no record at or after its starting time and `strategy` forbids that."""
    if not end.is_time or strategy == "latest":
        return
    for key, start in starts.items():
        millis = end.value(key)
        if millis is None or start < bounds[key][1]:
            continue
        broker, topic, partition = key
        what = f"{end.says(key)}: {broker} {topic}/{partition} has no record of that time or later"
        if strategy == "error":
            raise ConfigError(f"{what}; {STRATEGY}=latest begins at its end")
        if millis > 1000 * time.time():
            raise ConfigError(f"{what}, which is in the future; {STRATEGY}=latest begins with the next record")


def check_order(start: End, end: End, starts: Mapping[Key, int], ends: Mapping[Key, int]) -> None:
    """Raise ConfigError if a query's options let it end before it begins."""
    for key, first in starts.items():
        low, high = start.value(key), end.value(key)
        times = start.is_time and end.is_time and low is not None and high is not None and low > high
        if times or (first > ends[key] and low not in (None, EARLIEST)):
            broker, topic, partition = key
            limit = end.says(key) if end.option else "the end of the log"
            raise ConfigError(
                f"{start.says(key)} is behind {limit}:"
                f" {broker} {topic}/{partition} would be read from {first} to {ends[key]}"
            )
