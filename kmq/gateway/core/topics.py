"""Administration of topics for all doors: create, list, describe, change, delete, and delete the first records.

    await topics.create("orders", 8, {"retentionMs": 86400000})    → TopicState(orders, 8 partitions, …), True

Owner       the router makes every change (kmq/log/topic_changes.py). This module declares, requests and waits.
Invariant   A creation, change or deletion that returns is on disk. It is in force too, unless `from_seq` is None.
Crash       A request that is not carried out stays in topics/, and the router's next start carries it out.
Growth      Stored records stay where they are. New records of a key may go to another partition than its stored ones,
            so a topic whose records have keys grows only with `force` (kmq/log/topics.py).
Options     Typed clients name them as HTTP does; the Kafka protocol writes retention.ms for retentionMs. A number of -1
            is no limit. None removes the topic's own limit, so that the setting applies again.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from kmq.broker.admission import TOPIC_INODES, spare_inodes
from kmq.config.states import InForce
from kmq.config.values import FOREVER
from kmq.errors import ConfigError, KmqError
from kmq.gateway.core.broker import Broker, RequestRefused, bad_field, check_data
from kmq.log import bounds, reader, topic_changes, topics
from kmq.log.bounds import Bounds, PartitionSize
from kmq.log.segment import Limits
from kmq.log.topic_changes import TopicRequest
from kmq.log.topics import Declaration
from kmq.message import record

# --- options ---------------------------------------------------------------------------------------------------------

UNLIMITED = -1
Value = int | str | None


class Option(NamedTuple):
    """`limit`: its name in topic.toml. `text`: value → text there. `value`: what Limits holds → value for a client."""

    limit: str
    text: Callable[[Value], str]
    value: Callable[[float | str], int | str]


def _age_text(milliseconds: Value) -> str:
    return "never" if milliseconds == UNLIMITED else f"{milliseconds}ms"


def _age(seconds: float | str) -> int:
    return UNLIMITED if seconds == FOREVER else round(float(seconds) * 1000)


def _count_text(count: Value) -> str:
    return "none" if count == UNLIMITED else str(count)


def _count(count: float | str) -> int:
    return int(count) or UNLIMITED


OPTIONS = {
    "retentionMs": Option("retention_age", _age_text, _age),
    "retentionBytes": Option("retention_bytes", _count_text, _count),
    "segmentMs": Option("segment_age", _age_text, _age),
    "segmentBytes": Option("segment_bytes", str, int),
    "cleanupPolicy": Option("cleanup", str, str),
    "deleteRetentionMs": Option("delete_retention", _age_text, _age),
    "tier": Option("tier", str, str),
    "localRetentionMs": Option("local_retention_age", _age_text, _age),
    "localRetentionBytes": Option("local_retention_bytes", _count_text, _count),
    "maxDeliveries": Option("max_deliveries", _count_text, _count),
    "messageTimestampType": Option("message_timestamp_type", str, str),
    "kafkaSettings": Option("kafka_settings", str, str),
}


def limits_of(options: Mapping[str, Value]) -> dict[str, str]:
    """Return these options as texts of topic.toml; "" removes the topic's own. Raises RequestRefused."""
    limits = {}
    for name, value in options.items():
        option = OPTIONS[name]
        limits[option.limit] = "" if value is None else option.text(value)
        try:
            Limits().with_changes({option.limit: limits[option.limit]} if value is not None else {})
        except ConfigError as err:
            raise bad_field(name, str(err).partition(": ")[2]) from None
    return limits


def values_of(limits: Limits) -> dict[str, int | str]:
    """Return every option with its present value."""
    return {name: option.value(getattr(limits, option.limit)) for name, option in OPTIONS.items()}


async def declare_own(data: str, name: str, partitions: int, limits: dict[str, str]) -> None:
    """Declare a topic of the gateway itself, unless it exists. Raises RequestRefused."""
    if not os.path.isdir(f"{data}/topics/{name}"):
        try:
            await asyncio.to_thread(topics.declare, data, name, partitions, limits, own=True)
        except KmqError as err:
            raise RequestRefused("internal", str(err)) from err


# --- topics ----------------------------------------------------------------------------------------------------------

T = TypeVar("T")
_ADOPT_S = 5.0  # longest wait for the router to adopt a declaration or to carry out a request
_POLL_S = 0.01


class TopicState(NamedTuple):
    """A declared topic. `from_seq`: since when it is in force; None: not yet. `options`: present values of all.

    `own`: the names of options that the topic has set itself.
    """

    name: str
    partitions: int
    from_seq: int | None
    options: dict[str, int | str]
    partitioner: str
    own: frozenset[str]


class TopicAdmin:
    """The topics of one broker. Every method may raise RequestRefused."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._data = broker, broker.settings.data
        self._in_force = InForce(broker.settings)
        self._bounds = Bounds(self._data)  # for lists: what the files say, parsed once
        self._creating = asyncio.Lock()  # so that two equal requests at once are answered 201 and 200

    # --- reading -----------------------------------------------------------------------------------------------------

    async def names(self, internal: bool = False) -> list[str]:
        """Return the names of all topics in order; `internal`: with those of KMQ itself, which begin with __."""
        check_data(self._data)
        found = await asyncio.to_thread(topics.names, self._data)
        self._bounds.evict_except(found)
        return [name for name in found if internal or not name.startswith("__")]

    async def all(self, internal: bool = False) -> list[TopicState]:
        """Return all topics in order, without their sizes."""
        return await asyncio.to_thread(self.states, await self.names(internal))

    def states(self, names: Iterable[str]) -> list[TopicState]:
        """Return these topics, in this order. Looks at a file for each: call it in a thread.

        Only files that have changed are parsed, and equal limits once, because the console asks for all topics at each
        poll.
        """
        check_data(self._data)
        # Requests lie in the directory of all topics. Listing it for each topic would take 4 s for 2,000 topics.
        waiting: dict[str, list[TopicRequest]] = {}
        for request in topic_changes.waiting(self._data):
            waiting.setdefault(request.topic, []).append(request)
        self._in_force.changed()
        options: dict[tuple[tuple[str, str], ...], dict[str, int | str]] = {}  # by own limits, which many topics share
        found = []
        for name in names:
            declared = self._bounds.declaration(name)
            own = topic_changes.limits_to_be(self._data, name, dict(declared.limits), waiting.get(name, ()))
            limits = tuple(own.items())
            if limits not in options:
                options[limits] = self._options(own)
            found.append(_state(name, declared, options[limits], own))
        return found

    async def describe(self, name: str) -> TopicState:
        """Return one topic."""
        return await asyncio.to_thread(self._read, name)

    async def sizes(self, topic: TopicState) -> list[PartitionSize]:
        """Return offsets, bytes and segments of each partition."""
        return await asyncio.to_thread(bounds.measure, self._data, topic.name, topic.partitions)

    def _read(self, name: str) -> TopicState:
        if not self.exists(name):
            check_data(self._data)
            raise RequestRefused("unknown_topic", f"topic {name!r}: does not exist")
        declared = topics.read(self._data, name)
        self._in_force.changed()
        own = topic_changes.limits_to_be(self._data, name, dict(declared.limits))
        return _state(name, declared, self._options(own), own)

    def exists(self, name: str) -> bool:
        """Return True if there is a topic of this name; reads one directory entry."""
        return record.is_topic_name(name) and os.path.isdir(f"{self._data}/topics/{name}")

    def defaults(self) -> dict[str, int | str]:
        """Return every option of a topic that has set none itself."""
        self._in_force.changed()
        return self._options({})

    def _options(self, own: dict[str, str]) -> dict[str, int | str]:
        """Return every option of a topic with these limits of its own."""
        return values_of(Limits.of(self._in_force.settings).with_changes(own))

    # --- changing ----------------------------------------------------------------------------------------------------

    async def create(
        self,
        name: str,
        partitions: int,
        options: Mapping[str, Value],
        partitioner: str | None = None,
        patience_s: float = _ADOPT_S,
    ) -> tuple[TopicState, bool]:
        """Declare a topic and wait until it is in force. Returns it, and True unless an equal one existed.

        `partitioner`: None takes the default, and whatever an existing topic has. `patience_s`: longest wait.
        """
        limits = {limit: text for limit, text in limits_of(options).items() if text}
        if not record.is_topic(name):
            raise bad_field(
                "name", "must match [A-Za-z0-9_][A-Za-z0-9_.-]{0,199} and not begin with append, dropped or __"
            )
        _check_letters(name, limits)
        self._check_tier(name, limits, limits)
        if not 1 <= partitions <= topics.MAX_PARTITIONS:
            raise bad_field("partitions", f"must be between 1 and {topics.MAX_PARTITIONS}")
        if partitioner not in (None, *topics.PARTITIONERS):
            raise bad_field("partitioner", f"must be {' or '.join(topics.PARTITIONERS)}")
        async with self._creating:
            is_made = await asyncio.to_thread(self._declare, name, partitions, limits, partitioner)
        if is_made:
            is_in_force = await self._wait(lambda: topics.load(self._data, name)[1] is not None, patience_s)
            if is_in_force:  # otherwise a message that was sent before has created it
                chosen = partitioner or topics.DEFAULT_PARTITIONER
                await asyncio.to_thread(self._refuse_other, name, partitions, limits, chosen)
        return await self.describe(name), is_made

    def _declare(self, name: str, partitions: int, limits: dict[str, str], partitioner: str | None) -> bool:
        """Declare a topic; return False if an equal one exists. Raises RequestRefused if it differs."""
        if not self.exists(name):
            self._check_room(partitions)
            try:
                topics.declare(
                    self._data, name, partitions, limits, partitioner=partitioner or topics.DEFAULT_PARTITIONER
                )
                return True
            except ConfigError as err:
                if not self.exists(name):  # a message may have created it just now
                    raise RequestRefused("topic_exists", str(err)) from None
        self._refuse_other(name, partitions, limits, partitioner)
        return False

    def _refuse_other(self, name: str, partitions: int, limits: dict[str, str], partitioner: str | None) -> None:
        """Raise RequestRefused if the existing topic differs."""
        declared = topics.read(self._data, name)
        if declared.partitions != partitions:
            text = f"topic {name!r}: exists with {declared.partitions} partition(s)"
            raise RequestRefused("topic_exists", text, field="partitions")
        if partitioner not in (None, declared.partitioner):
            text = f"topic {name!r}: exists with partitioner {declared.partitioner}"
            raise RequestRefused("topic_exists", text, field="partitioner")
        own = topic_changes.limits_to_be(self._data, name, dict(declared.limits))
        for limit in sorted({*own, *limits}):
            if _parsed(limit, own.get(limit, "")) != _parsed(limit, limits.get(limit, "")):
                text = f"topic {name!r}: exists with {limit}={own.get(limit) or 'as the settings say'}"
                raise RequestRefused("topic_exists", text)

    def _check_room(self, partitions: int) -> None:
        settings = self._broker.settings
        if len({*topics.names(self._data)} - {topic_changes.TOPIC}) >= settings.max_topics:
            raise RequestRefused("too_many_topics", f"KMQ_MAX_TOPICS={settings.max_topics} topics exist already")
        self._check_inodes(partitions)

    def _check_inodes(self, partitions: int) -> None:
        if spare_inodes(self._data) < TOPIC_INODES * partitions:
            raise RequestRefused("disk_full", "the disk has no inodes left for so many partitions")

    async def change(
        self, name: str, options: Mapping[str, Value], partitions: int | None = None, force: bool = False
    ) -> TopicState:
        """Change options of a topic and wait until they are in force. `force`: also where keys would move."""
        _refuse_reserved(name, "changed")
        limits = limits_of(options)
        before = await self.describe(name)
        wanted = partitions or before.partitions
        if wanted != before.partitions:
            await asyncio.to_thread(self._check_growth, before, wanted, force)
        if limits:
            request = await asyncio.to_thread(self._ask_to_set, name, limits)
            await self._carried_out(request)
            own = (await asyncio.to_thread(topics.read, self._data, name)).limits
            if any(own.get(limit, "") != text for limit, text in limits.items()):
                raise RequestRefused(
                    "internal", f"topic {name!r}: was not changed; see event request_refused in the log"
                )
        if wanted != before.partitions:
            await self._grow(name, wanted)
        return await self.describe(name)

    def _check_growth(self, topic: TopicState, partitions: int, force: bool) -> None:
        try:
            topics.check_growth(self._data, topic.name, topic.partitions, partitions)
        except ConfigError as err:
            raise bad_field("partitions", str(err)) from None
        self._check_inodes(partitions - topic.partitions)
        if not force and topics.has_keys(self._data, topic.name, topic.partitions):
            raise bad_field(
                "partitions", f"topic {topic.name!r}: {topics.KEYED}; give force=true to do it nevertheless"
            )

    async def _grow(self, name: str, partitions: int) -> None:
        changes = {"partitions": str(partitions)}
        request = await asyncio.to_thread(topic_changes.submit, self._data, topic_changes.GROW, name, changes)
        await self._carried_out(request)
        if (await asyncio.to_thread(topics.load, self._data, name))[0] < partitions:
            raise RequestRefused("internal", f"topic {name!r}: has not grown; see event request_refused in the log")

    def _ask_to_set(self, name: str, limits: dict[str, str]) -> TopicRequest:
        own = topic_changes.limits_to_be(self._data, name, dict(topics.read(self._data, name).limits))
        topic_changes.apply(own, limits)
        self._check_tier(name, limits, own)
        try:
            Limits().with_changes(own)
        except ConfigError as err:
            raise RequestRefused("bad_request", str(err)) from None
        _check_letters(name, limits)
        return topic_changes.submit(self._data, topic_changes.SET, name, limits)

    def _check_tier(self, name: str, changes: Mapping[str, str], own: Mapping[str, str]) -> None:
        try:
            topics.check_tier(self._data, name, changes, own)
        except ConfigError as err:
            field = "cleanupPolicy" if str(err).startswith("cleanup") else "tier"
            raise bad_field(field, str(err).partition(": ")[2]) from None

    async def delete(self, name: str) -> None:
        """Delete a topic with its records, and wait until its files are gone."""
        _refuse_reserved(name, "deleted")
        before = await self.describe(name)
        request = await asyncio.to_thread(
            lambda: topic_changes.delete(self._data, name, topics.from_seq_of(self._data, name))
        )
        await self._carried_out(request)
        left = await asyncio.to_thread(lambda: self.exists(name) and topics.load(self._data, name))
        if left and left[1] == before.from_seq:  # otherwise a message has created it again
            raise RequestRefused("internal", f"topic {name!r}: was not deleted; see event request_refused in the log")

    async def delete_before(self, name: str, starts: Mapping[int, int], patience_s: float = _ADOPT_S) -> dict[int, int]:
        """Delete the records before these offsets; return the resulting first offset of each partition.

        It is lower than asked if the router is down or too slow, or has no room for a copy of the records after it.
        """
        _refuse_reserved(name, "truncated")
        topic = await self.describe(name)
        if topic.from_seq is None:
            raise RequestRefused("not_ready", f"topic {name!r}: is declared, and not in force yet")

        def firsts() -> dict[int, int]:
            return {number: reader.partition(self._data, name, number).first_offset for number in starts}

        def have_begun() -> bool:
            return all(first >= starts[number] for number, first in firsts().items())

        if not await asyncio.to_thread(have_begun):
            request = await asyncio.to_thread(topic_changes.begin_at, self._data, name, topic.from_seq, starts)
            await self._wait(lambda: not request.is_waiting and have_begun(), patience_s)
        return await asyncio.to_thread(firsts)

    # --- waiting for the router --------------------------------------------------------------------------------------

    async def _carried_out(self, request: TopicRequest) -> None:
        if not await self._wait(lambda: not request.is_waiting):
            text = "the request is on disk, and the router carries it out as soon as it can; see /readyz"
            raise RequestRefused("not_ready", text)

    async def _wait(self, is_done: Callable[[], bool], patience_s: float = _ADOPT_S) -> bool:
        """Wait for the router; return False if it is down or too slow."""
        deadline = time.monotonic() + patience_s
        while not await asyncio.to_thread(is_done):
            if time.monotonic() > deadline or not self._broker.verdict().ready:
                return False
            await asyncio.sleep(_POLL_S)
        return True


def _state(name: str, declared: Declaration, options: dict[str, int | str], own: dict[str, str]) -> TopicState:
    names = frozenset(name for name, option in OPTIONS.items() if option.limit in own)
    return TopicState(name, declared.partitions, declared.from_seq, options, declared.partitioner, names)


def _check_letters(name: str, limits: dict[str, str]) -> None:
    try:
        topics.check_letters(name, limits)
    except ConfigError as err:
        raise bad_field("maxDeliveries", str(err).partition(": ")[2]) from None


def _refuse_reserved(name: str, what: str) -> None:
    """Raise RequestRefused for a topic of KMQ itself: a retention of a second would delete all committed offsets."""
    if name.startswith("__"):
        raise RequestRefused("reserved_topic", f"topic {name!r}: belongs to KMQ itself and cannot be {what}")


def _parsed(limit: str, text: str) -> object:
    """Return the value of a limit's text; "" means the setting."""
    return getattr(Limits().with_changes({limit: text}), limit) if text else None
