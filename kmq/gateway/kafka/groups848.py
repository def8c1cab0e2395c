"""Members of consumer groups by the newer protocol of Kafka's clients (KIP-848), in the groups that all doors share.

    ConsumerGroupHeartbeat, epoch 0, topics [orders]    → epoch 3, assignment: orders/0, orders/1

ConsumerGroupHeartbeat is the only request. Its answer has the member's assignment. There are no leaders.

Epoch       of a member: the newest generation of its group at its last answer. So a member that shows an epoch knows
            everything that it was asked for up to that generation.
Revoking    Partitions that a member must give up are missing in its next answer. They are given up when the member says
            that it reads none of them any more. What it says before that answer gives nothing up.
Assignors   The client's choice is a vote: `uniform` (sticky) or `range`. A member offers every assignor of the broker,
            so it shares a group with members of all doors that leave the assigning to the broker.
Pattern     of topics: letters, `.`, classes, groups, alternatives and few repetitions, because a match must be quick,
            whatever the names are. It is matched again when topics change. Topics above the limit are left out. An
            empty pattern matches nothing.
Static      A member that leaves for a while (-2) keeps its partitions until its session ends, or a newer member takes
            its name. While it is there no other member takes its name.
Crash       A new gateway of a shard knows the members of the former one (group_records.py), and restores each one at
            its first heartbeat. Elsewhere it knows none: they get UNKNOWN_MEMBER_ID, and join at the committed offsets.
Not covered Racks. If a message creates a topic that a pattern matches, the group has no offset there until the next
            heartbeat: a client that begins at the end misses the first records. What clients say of topics that they
            read and that were deleted and declared again meanwhile.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.assignors import ASSIGNORS, COOPERATIVE
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import Partition
from kmq.gateway.groups.protocol import (
    MAX_POLL_S,
    REBALANCE_S,
    Assigned,
    Client,
    Ended,
    Event,
    MemberOptions,
    MemberView,
    Partitions,
    Resume,
    State,
)
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.connection import ApiHandler, Call, Handler
from kmq.gateway.kafka.groups import code_of, group_named
from kmq.gateway.kafka.topic_ids import TopicIds
from kmq.gateway.kafka.wire import INVALID_REGULAR_EXPRESSION, ErrorCode, Fields, KafkaRefused, Key
from kmq.message import record

_BEAT_EVERY = timedelta(seconds=2)  # each step of a rebalance waits at most this long
_JOINED_S = 2.0  # longest wait of a member that joins for its partitions
_JOIN, _LEAVE, _LEAVE_FOR_A_WHILE = 0, -1, -2  # special values of an epoch
_ID_FROM = 1  # version from which on clients choose their ids
_UNIFORM, _RANGE = "uniform", "range"
_PREFERRED = {_UNIFORM: COOPERATIVE, _RANGE: "range"}
_CODES = {
    "fenced": ErrorCode.fenced_member_epoch,
    "unknown_assignor": ErrorCode.unsupported_assignor,
    "bad_request": ErrorCode.invalid_request,
    "bad_name": ErrorCode.invalid_request,
    "group_kind": ErrorCode.group_id_not_found,  # its members need a leader
}

# --- what members say -------------------------------------------------------------------------------------------------

_SAFE_PATTERN = re.compile(r"(?:[\w\-|()^$]|\\[.\-]|(?:\.|\[[\w.\-]+\])[*+?]?)*", re.ASCII)
_MAX_PATTERN, _MAX_WAYS = 500, 200_000  # ways to match a name, which takes 7 ms for each two of * or +
_WAYS = {"*": 200, "+": 200, "?": 3}  # a name has 200 bytes; an optional part costs more than one more byte


def pattern_of(text: str) -> re.Pattern[str] | None:
    """Return a pattern of topics; None if it is empty. Raises KafkaRefused if a match may take long."""
    if len(text) > _MAX_PATTERN or not _SAFE_PATTERN.fullmatch(text):
        allowed = "letters, ., [classes], (groups), |, and *, +, ? behind . and classes"
        raise KafkaRefused(INVALID_REGULAR_EXPRESSION, f"pattern of topics: may have {allowed}")
    if _ways(text) > _MAX_WAYS:
        raise KafkaRefused(
            INVALID_REGULAR_EXPRESSION, "pattern of topics: too many of *, + and | in groups; two in an alternative"
        )
    try:
        return re.compile(text) if text else None
    except re.error as err:
        raise KafkaRefused(INVALID_REGULAR_EXPRESSION, f"pattern of topics: {err}") from None


def _ways(text: str) -> int:
    """Return the most ways in which a safe pattern may be tried on a name. A group costs twice as much."""
    groups = [(0, 1)]  # open ones: ways of earlier alternatives, and of this one so far
    for char in text:
        before, ways = groups.pop()
        if char == "(":
            groups += [(before, ways), (0, 1)]
        elif char == "|":
            groups.append((before + ways, 1))
        elif char == ")" and groups:
            outer, factor = groups.pop()
            groups.append((outer, factor * (2 * (before + ways) if before else ways)))
        else:
            groups.append((before, ways * _WAYS.get(char, 1)))
    return sum(map(sum, groups))


class _Wanted(NamedTuple):
    """A member's wishes; each heartbeat may change some of them."""

    names: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    assignor: str = _UNIFORM
    rebalance_s: float = REBALANCE_S[1]
    static_name: str | None = None


def _changed(wanted: _Wanted, body: Any) -> _Wanted:
    """Return the wishes after a heartbeat. Fields that are null or -1 stay as before. Raises RequestRefused."""
    pattern = getattr(body, "subscribed_topic_regex", None)
    if body.subscribed_topic_names is not None:
        names = {name for name in body.subscribed_topic_names if record.is_topic_name(name)}
        wanted = wanted._replace(names=tuple(sorted(names)))
    if pattern is not None:
        wanted = wanted._replace(pattern=pattern_of(pattern))
    if body.server_assignor is not None:
        if body.server_assignor not in _PREFERRED:
            raise RequestRefused("unknown_assignor", f"assignor: there are {', '.join(_PREFERRED)}")
        wanted = wanted._replace(assignor=body.server_assignor)
    rebalance_s = wire.milliseconds(body.rebalance_timeout) / 1000
    if rebalance_s >= 0:
        wanted = wanted._replace(rebalance_s=min(max(rebalance_s, REBALANCE_S[0]), REBALANCE_S[1]))
    return wanted if body.instance_id is None else wanted._replace(static_name=body.instance_id)


def _options(wanted: _Wanted, topics: Iterable[str]) -> MemberOptions:
    """Return a member's wishes as options for the coordinator. `topics`: all there are."""
    pattern, preferred = wanted.pattern, _PREFERRED[wanted.assignor]
    matching = {name for name in topics if pattern and pattern.fullmatch(name) and not name.startswith("__")}
    return MemberOptions(
        tuple(sorted(matching.union(wanted.names))),
        assignors=(preferred, *(name for name in ASSIGNORS if name != preferred)),
        rebalance_s=wanted.rebalance_s,
        max_poll_s=MAX_POLL_S[1],  # the client enforces it itself
        static_name=wanted.static_name,
        pattern=pattern.pattern if pattern else "",
        is_kafka=True,
    )


def _wanted_before(options: MemberOptions) -> _Wanted:
    """Return the wishes of a member that a former leader of the shard had."""
    assignor = next(name for name, preferred in _PREFERRED.items() if preferred == options.assignors[0])
    pattern = pattern_of(options.pattern or "")
    names = () if pattern else options.topics
    return _Wanted(names, pattern, assignor, options.rebalance_s, options.static_name)


class _Member:
    """A member, and its last answer. `topics`: all that existed when its options were made."""

    def __init__(self, wanted: _Wanted, topics: Mapping[str, int], options: MemberOptions) -> None:
        self.wanted, self.topics, self.options = wanted, topics, options
        self.assignment: Partitions | None = None  # None: it may not know its assignment
        self.revoking: frozenset[Partition] = frozenset()  # partitions it was asked to give up in that answer
        self.has_left = False  # for a while
        self.wake, self.has_ended = asyncio.Event(), False

    def on_event(self, event: Event) -> None:
        self.has_ended |= isinstance(event, Ended)
        if isinstance(event, Ended | Assigned):
            self.wake.set()


# --- requests ---------------------------------------------------------------------------------------------------------


class ConsumerProtocol(ApiHandler):
    """The handlers of the newer protocol. A connection that ends does not end its member."""

    def __init__(self, groups: Groups, ids: TopicIds) -> None:
        self._groups, self._ids = groups, ids
        self._members: dict[tuple[str, str], _Member] = {}
        self._matching = asyncio.Lock()  # clients' patterns take one thread
        self.handlers: dict[Key, Handler] = {
            Key.CONSUMER_GROUP_HEARTBEAT: self._heartbeat,
            Key.CONSUMER_GROUP_DESCRIBE: self._describe,
        }

    def has(self, group: str, member: str) -> bool:
        """Return True if a member of a group speaks this protocol."""
        return (group, member) in self._members

    async def _heartbeat(self, call: Call) -> Fields:
        body = call.body
        group, id, epoch = body.group_id, body.member_id, body.member_epoch
        try:
            self._groups.ready()
            if epoch == _JOIN:
                id = await self._join(call)
                return self._answer(group, id, epoch)
            self._check_instance(group, id, body.instance_id)
            if epoch in (_LEAVE, _LEAVE_FOR_A_WHILE):
                self._leave(group, id, epoch)
                return _said(ErrorCode.none, id, epoch)
            await self._beat(call)
            return self._answer(group, id, epoch)
        except RequestRefused as err:
            return _said(code_of(err, _CODES), id, epoch) | {"error_message": str(err)}

    def _answer(self, group: str, id: str, epoch: int) -> Fields:
        """Return the answer to a member that has shown this epoch. A new epoch comes with the assignment."""
        member, found = self._member(group, id), self._groups.coordinator.assignment(group, id)
        member.revoking = frozenset(found.revoking)
        fields = _said(ErrorCode.none, id, found.generation)
        if found.generation != epoch or found.partitions != member.assignment:
            rows = self._by_topic(found.partitions)
            is_all = sum(len(row["partitions"]) for row in rows) == len(found.partitions)
            member.assignment = found.partitions if is_all else None
            fields["assignment"] = {"topic_partitions": rows}
        return fields

    def _by_topic(self, partitions: Partitions) -> list[Fields]:
        """Return partitions in the form of answers, without topics that have no id."""
        rows: list[Fields] = []
        for topic, found in groupby(partitions, lambda partition: partition.topic):
            if (id := self._id(topic)) is not None:
                rows.append({"topic_id": id, "topic_name": topic, "partitions": [each.partition for each in found]})
        return rows

    def _member(self, group: str, id: str) -> _Member:
        member = self._members.get((group, id))
        options = self._groups.coordinator.options(group, id) if member is None else None
        if options is not None and options.pattern is not None:  # it joined at a former leader of the shard
            member = _Member(_wanted_before(options), {}, options)
            self._groups.listen(group, id, self._listener((group, id), member))
            self._members[group, id] = member
        if member is None:
            raise RequestRefused("unknown_member", f"group {group} has no member {id}; join again")
        return member

    def _listener(self, key: tuple[str, str], member: _Member) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            member.on_event(event)
            if member.has_ended and self._members.get(key) is member:
                del self._members[key]

        return on_event

    def _check_instance(self, group: str, id: str, name: str | None) -> None:
        """Raise RequestRefused if a newer member has the static name that this one says. None: it says no name."""
        holder = None if name is None else self._groups.coordinator.static_member(group, name)
        if holder not in (None, id):
            raise KafkaRefused(ErrorCode.fenced_instance_id, f"a newer member of group {group} has the name {name}")

    # --- members ------------------------------------------------------------------------------------------------------

    async def _join(self, call: Call) -> str:
        """Let a member join. Returns its id when it has partitions, or need not wait for any."""
        body, groups, wanted = call.body, self._groups, _changed(_Wanted(), call.body)
        group, id = body.group_id, body.member_id
        if not id and call.version >= _ID_FROM:
            raise RequestRefused("bad_request", "a member has an id")
        if body.subscribed_topic_names is None and getattr(body, "subscribed_topic_regex", None) is None:
            raise RequestRefused("bad_request", "who joins names topics, or a pattern of them")
        name = wanted.static_name
        holder = None if name is None else groups.coordinator.static_member(group, name)
        if holder not in (None, id) and (existing := self._members.get((group, holder))) and not existing.has_left:
            raise KafkaRefused(ErrorCode.unreleased_instance_id, f"member {name} of group {group} has not left")
        id = id or groups.coordinator.new_id(call.header.client)
        # A member that joins reads nothing yet, or nothing any more.
        member = await self._enter(call, id, wanted, Resume(owned=(), takes_name=True))
        with groups.attending(group, id), suppress(TimeoutError):
            async with asyncio.timeout(_JOINED_S):
                await member.wake.wait()
        self._member(group, id)
        if not groups.coordinator.generation(group, id):
            raise RequestRefused("not_ready", f"group {group} has no generation yet")  # an epoch of 0 would mean a join
        return id

    async def _enter(self, call: Call, id: str, wanted: _Wanted, resume: Resume | None = None) -> _Member:
        """Let a member join, or change its options. If that is refused, the member stays as it was."""
        groups, key = self._groups, (call.body.group_id, id)
        topics = groups.partitions_of
        async with self._matching:
            options = await asyncio.to_thread(_options, wanted, topics)
        former = self._members.get(key)
        if former is not None and resume is None and options == former.options:
            former.wanted, former.topics = wanted, topics
            return former
        member = _Member(wanted, topics, options)
        on_event = self._listener(key, member)
        await groups.join(*key, Client(call.header.client, call.connection.peer), member.options, on_event, resume)
        if not member.has_ended:
            self._members[key] = member
        return member

    async def _beat(self, call: Call) -> None:
        """Handle a heartbeat of a known member. Raises RequestRefused (unknown_member, fenced …)."""
        body, groups = call.body, self._groups
        group, id, epoch = body.group_id, body.member_id, body.member_epoch
        member = self._member(group, id)
        groups.beat(group, id, polled=True, generation=epoch)
        wanted = _changed(member.wanted, body)
        if wanted != member.wanted or (wanted.pattern and member.topics is not groups.partitions_of):
            member = await self._ask_for(call, id, wanted, member)
        is_whole = body.subscribed_topic_names is not None or getattr(body, "subscribed_topic_regex", None) is not None
        if is_whole and body.topic_partitions is not None and wire.milliseconds(body.rebalance_timeout) >= 0:
            member.assignment = None  # its last answer was lost
        if member.revoking and body.topic_partitions is not None and not self._reads_revoking(member, body):
            groups.revoked(group, id, epoch)
        else:
            groups.sync(group, id, epoch)

    async def _ask_for(self, call: Call, id: str, wanted: _Wanted, former: _Member) -> _Member:
        """Change a member's options, or its topics to those that its pattern matches now."""
        topics = self._groups.partitions_of
        try:
            member = await self._enter(call, id, wanted)
        except RequestRefused:
            if wanted != former.wanted or former.has_ended:
                raise
            former.topics = topics  # new topics exceed the limit: it reads on without them
            return former
        if member is not former:
            member.assignment, member.revoking = former.assignment, former.revoking
        return member

    def _reads_revoking(self, member: _Member, body: Any) -> bool:
        """Return True if a member says that it still reads some of the partitions it was asked to give up."""
        said = {(each.topic_id, number) for each in body.topic_partitions for number in each.partitions}
        return any((id, number) in said for topic, number in member.revoking if (id := self._id(topic)) is not None)

    def _id(self, topic: str) -> UUID | None:
        """Return the id of a topic; None if it is not in force yet, or gone."""
        with suppress(RequestRefused):
            return self._ids.of(topic)
        return None

    def _leave(self, group: str, id: str, epoch: int) -> None:
        member = self._member(group, id)
        if epoch == _LEAVE or member.wanted.static_name is None:
            self._groups.leave(group, id)
        else:
            member.has_left = True

    # --- groups as people look after them -----------------------------------------------------------------------------

    async def _describe(self, call: Call) -> Fields:
        code = partial(code_of, instead=_CODES)
        groups = dict.fromkeys(call.body.group_ids)
        return {"groups": await call.each(groups, group_named, self._described, code, at_once=1)}

    async def _described(self, group: str) -> Fields:
        """Return a group that has members of this protocol. For other groups clients use DescribeGroups."""
        view = self._groups.describe(group)
        if view is None or not any(self.has(group, member.id) for member in view.members):
            raise RequestRefused("unknown_group", f"group {group} has no members of this protocol")
        return {
            "group_state": _STATES[view.state],
            "group_epoch": view.generation,
            "assignment_epoch": view.generation,
            "assignor_name": view.protocol,
            "members": [self._shown(group, view.generation, member) for member in view.members],
        }

    def _shown(self, group: str, generation: int, member: MemberView) -> Fields:
        state = self._members.get((group, member.id))
        assignment = {"topic_partitions": self._by_topic(member.partitions)}
        return {
            "member_id": member.id,
            "instance_id": member.static_name,
            "member_epoch": generation,
            "client_id": member.name,
            "client_host": member.host,
            "subscribed_topic_names": member.topics,
            "subscribed_topic_regex": state.wanted.pattern.pattern if state and state.wanted.pattern else None,
            "assignment": assignment,
            "target_assignment": assignment,
        }


_STATES = {
    State.EMPTY: "Empty",
    State.PREPARING: "Assigning",
    State.COMPLETING: "Reconciling",
    State.STABLE: "Stable",
    State.DEAD: "Dead",
}


def _said(code: ErrorCode, id: str, epoch: int) -> dict[str, Any]:
    return {"error_code": code, "member_id": id, "member_epoch": epoch, "heartbeat_interval": _BEAT_EVERY}
