"""Consumer groups by Kafka's protocol, in the groups that all doors share (kmq/gateway/groups).

    JoinGroup with assignors [range] and topics [orders]    → generation 1, no leader
    SyncGroup of generation 1                               → assignment: orders/0, orders/1

Kinds       A client that offers one of the broker's assignors is a member of kind `kmq`: the broker assigns, as to
            members of all doors. Others are of kind `kafka`: Connect, schema registries, assignors of their own. One of
            them leads, and the broker keeps bytes that it does not understand. A group is of one kind while it has
            members.
JoinGroup   is answered when no step of the group is due that would make its member join again. In kind `kmq` the answer
            names no leader and no members, so every client is a follower.
SyncGroup   returns the member's assignment in the generation that JoinGroup named. In kind `kafka` it waits for the
            leader's assignment.
Heartbeat   REBALANCE_IN_PROGRESS if the member was given or asked for something since the generation that it knows.
            Then it joins again, and says what it still reads: with an eager assignor nothing. Revoked partitions that
            it does not name are given up. Other partitions stay its own, so joining again moves nothing by itself.
            A member whose assignment stays continues in its generation: restarting a static member disturbs no other.
Commits     are fenced by generation, member and instance. In a group without members every client may commit.
Loading     Until the offsets are loaded: COORDINATOR_LOAD_IN_PROGRESS, where the version has a field for it. SyncGroup
            is told to join again instead, and a heartbeat gets no error, as from Apache's broker, because clients die
            of it.
Invariant   No answer comes from offsets that are not loaded. No client is sent an error that Apache's broker does not
            send to that request.
Silence     The end of a connection does not end a member; its session timeout does. A member that waits for an answer
            beats.
Not covered A given-back message (nack) is delivered again only to members at other doors. So while a Kafka member owns
            a partition nothing is given back there (kafka_owner), and waiting messages are lag and a warning
            (nacked_waiting).
"""

import asyncio
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.admin import GroupAdmin
from kmq.gateway.groups.assignors import ASSIGNORS, COOPERATIVE
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import CommittedOffset, Partition
from kmq.gateway.groups.offsets import MAX_METADATA, OffsetCommit
from kmq.gateway.groups.protocol import (
    MAX_POLL_S,
    REBALANCE_S,
    Assignment,
    Client,
    Ended,
    Event,
    GroupLimits,
    MemberOptions,
    MemberView,
    Opaque,
    Resume,
    State,
)
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.connection import ApiHandler, Call, Handler
from kmq.gateway.kafka.transaction import TransactionRefused
from kmq.gateway.kafka.transactions import Transactions
from kmq.gateway.kafka.wire import BadRequest, ErrorCode, Fields, KafkaRefused, Key
from kmq.message import record
from kmq.wire.requests import TopicPartition

# --- what members say of themselves -----------------------------------------------------------------------------------
# The metadata of an assignor of protocol type `consumer`: a version, the topics, bytes of the assignor's own; from
# version 1 on also the partitions that the member still reads, then fields of later versions.

_CONSUMER = "consumer"
_MAX_METADATA = GroupLimits().opaque
_ALIASES = {"RoundRobinAssigner": "roundrobin"}  # kafkajs' only one
_SHORT, _INT = struct.Struct(">h"), struct.Struct(">i")


class MemberMetadata(NamedTuple):
    """The topics that a member wants, and the partitions it says it still reads."""

    topics: tuple[str, ...]
    owned: frozenset[Partition]


def read_metadata(metadata: bytes) -> MemberMetadata:
    """Return a member's metadata. Raises BadRequest if not even the topics can be read.

    Fields after the topics are read as far as possible: some clients say version 1 and end before its fields. Topic
    names that are not valid are left out, because Kafka's clients may subscribe to any name.
    """
    reader = wire.Reader(memoryview(metadata), 0, False)
    (version,) = reader.unpack(_SHORT)
    topics = [reader.text() for _ in range(reader.count())]
    owned: set[Partition] = set()
    try:
        reader.blob()
        for _ in range(reader.count() if version >= 1 else 0):
            topic = reader.text()
            owned.update((topic or "", *reader.unpack(_INT)) for _ in range(reader.count()))
    except BadRequest:
        owned.clear()
    names = sorted({topic for topic in topics if topic and record.is_topic_name(topic)})
    return MemberMetadata(tuple(names), frozenset(owned))


def metadata_bytes(topics: Iterable[str]) -> bytes:
    """Return metadata as other clients read it, whatever door the member uses."""
    names = [*topics]
    writer = wire.Writer(is_flexible=False)
    writer.pack(">hi", 0, len(names))
    for name in names:
        writer.text(name)
    writer.pack(">i", -1)
    return writer.body()


def assignment_bytes(partitions: Iterable[TopicPartition]) -> bytes:
    """Return an assignment as clients of protocol type `consumer` read it."""
    numbers: dict[str, list[int]] = {}
    for topic, number in partitions:
        numbers.setdefault(topic, []).append(number)
    writer = wire.Writer(is_flexible=False)
    writer.pack(">hi", 0, len(numbers))
    for topic, each in numbers.items():
        writer.text(topic)
        writer.pack(f">i{len(each)}i", len(each), *each)
    writer.pack(">i", -1)
    return writer.body()


# --- errors -----------------------------------------------------------------------------------------------------------

_NO_ROOM = ("not_answered", "stopping", "disk_full", "quota", "not_enough_replicas")
_CODES = {
    "not_ready": ErrorCode.coordinator_load_in_progress,
    "busy": ErrorCode.coordinator_load_in_progress,
    **dict.fromkeys(_NO_ROOM, ErrorCode.coordinator_not_available),
    "no_leader": ErrorCode.not_coordinator,
    "forbidden": ErrorCode.group_authorization_failed,
    "bad_name": ErrorCode.invalid_group_id,
    "bad_timeout": ErrorCode.invalid_session_timeout,
    "unknown_assignor": ErrorCode.inconsistent_group_protocol,
    "assignor_differs": ErrorCode.inconsistent_group_protocol,
    "group_kind": ErrorCode.inconsistent_group_protocol,
    "too_many_groups": ErrorCode.group_max_size_reached,
    "too_many_members": ErrorCode.group_max_size_reached,
    "subscription_too_large": ErrorCode.group_max_size_reached,
    "unknown_group": ErrorCode.group_id_not_found,
    "group_not_empty": ErrorCode.non_empty_group,
    "unknown_member": ErrorCode.unknown_member_id,
    "fenced": ErrorCode.illegal_generation,
    "unknown_topic": ErrorCode.unknown_topic_or_partition,
    "unknown_partition": ErrorCode.unknown_topic_or_partition,
    # For this code clients give up the commit. They neither repeat it nor join again.
    "out_of_range": ErrorCode.invalid_commit_offset_size,
    "bad_request": ErrorCode.invalid_commit_offset_size,
    "offsets_full": ErrorCode.invalid_commit_offset_size,
}
# Different codes in JoinGroup, which names no generation and commits nothing, and in SyncGroup, where clients know
# fewer.
_JOIN_CODES = {"bad_request": ErrorCode.inconsistent_group_protocol, "fenced": ErrorCode.unknown_member_id}
_SYNC_CODES = {
    "not_ready": ErrorCode.rebalance_in_progress,
    "rebalance_timeout": ErrorCode.rebalance_in_progress,
    "subscription_too_large": ErrorCode.unknown_server_error,
}
_EPOCH_CODES = {"fenced": ErrorCode.stale_member_epoch}  # of members that have an epoch (groups848.py): commit again
_OF_A_MEMBER = (ErrorCode.none, ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id)  # if several leave at once
_OF_ONE = ("fenced", "unknown_partition", "out_of_range", "bad_request")  # may concern one partition of several


def code_of(refused: RequestRefused, instead: Mapping[str, ErrorCode] | None = None) -> ErrorCode:
    """Return the error code for a refusal. `instead`: codes that differ from the usual ones."""
    return wire.code_of(refused, _CODES | dict(instead or {}))


# --- requests ---------------------------------------------------------------------------------------------------------


class Waiting:
    """A member that waits for an answer."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.ended = ""  # the code with which its member ended

    def on_event(self, event: Event) -> None:
        if isinstance(event, Ended):
            self.ended = event.code
        self.wake.set()


class KafkaGroups(ApiHandler):
    """The handlers of group requests. The end of a connection does not end its member."""

    def __init__(
        self, groups: Groups, admin: GroupAdmin, transactions: Transactions, has_epoch: Callable[[str, str], bool]
    ) -> None:
        """`has_epoch`: does a member of a group speak the protocol of groups848.py?"""
        self._groups, self._admin, self._transactions, self._has_epoch = groups, admin, transactions, has_epoch
        self.handlers: dict[Key, Handler] = {
            Key.JOIN_GROUP: self._join_group,
            Key.SYNC_GROUP: self._sync_group,
            Key.HEARTBEAT: self._heartbeat,
            Key.LEAVE_GROUP: self._leave_group,
            Key.OFFSET_COMMIT: self._offset_commit,
            Key.OFFSET_FETCH: self._offset_fetch,
            Key.TXN_OFFSET_COMMIT: self._txn_offset_commit,
            Key.DESCRIBE_GROUPS: self._describe_groups,
            Key.LIST_GROUPS: self._list_groups,
            Key.DELETE_GROUPS: self._delete_groups,
            Key.OFFSET_DELETE: self._offset_delete,
        }

    # --- members ------------------------------------------------------------------------------------------------------

    async def _join_group(self, call: Call) -> Fields:
        body = call.body
        try:
            self._groups.ready()
            if call.version >= 4 and not body.member_id and _instance(body) is None:
                # Told before the join, so that a client which misses the answer leaves no member behind.
                id = self._groups.coordinator.new_id(call.header.client)
                return {"error_code": ErrorCode.member_id_required, "protocol_name": "", "member_id": id}
            return await self._join(call)
        except RequestRefused as err:
            is_static = err.code == "fenced" and _instance(body) is not None
            refused = KafkaRefused(ErrorCode.fenced_instance_id, str(err)) if is_static else err
            code = code_of(refused, _JOIN_CODES)
            return {"error_code": code, "protocol_name": "", "member_id": body.member_id}

    async def _join(self, call: Call) -> Fields:
        body, groups = call.body, self._groups
        group, member = body.group_id, body.member_id or None
        request = _read_join_request(body, bool(groups.coordinator.protocol_type(group)))
        client = Client(call.header.client, call.connection.peer)
        is_known = groups.coordinator.generation(group, member) is not None
        waiting = Waiting()
        # A known member says in `_assigned` which partitions it gives up.
        resume = Resume(owned=None if is_known else request.owned)
        id = await groups.join(group, member, client, request.options, waiting.on_event, resume)
        try:
            with groups.attending(group, id):
                found = await self._assigned(group, id, request.owned, waiting)
        finally:
            groups.stop_listening(group, id, waiting.on_event)
        return {
            "generation_id": found.generation,
            "protocol_type": body.protocol_type,
            "protocol_name": request.names[found.protocol],
            "leader": found.leader or "",
            "member_id": id,
            "members": self._led(group) if found.leader == id else (),
        }

    def _led(self, group: str) -> list[Fields]:
        """Return the members of a group of kind `kafka` with their metadata, for the leader."""
        view = self._groups.describe(group)
        rows = [(member, _shown(member, view.protocol)) for member in view.members] if view else []
        return [
            {"member_id": member.id, "group_instance_id": member.static_name, "metadata": shown["member_metadata"]}
            for member, shown in rows
        ]

    async def _assigned(self, group: str, member: str, owned: frozenset[Partition], waiting: Waiting) -> Assignment:
        """Return a new member's assignment, once no step is due that would change it.

        A member that still reads revoked partitions must learn of that first, and joins again when it has given them
        up. Raises RequestRefused (unknown_member) if the member ends meanwhile.
        """
        while not waiting.ended:
            waiting.wake.clear()
            found = self._groups.coordinator.assignment(group, member)
            if found.revoking and owned.isdisjoint(found.revoking):
                self._groups.revoked(group, member)
            elif not found.is_due:
                return found
            else:
                self._groups.sync(group, member)  # others must not have to wait for this member
                await waiting.wake.wait()
        code = "fenced" if waiting.ended == "fenced" else "unknown_member"
        raise RequestRefused(code, f"group {group}: member {member} has ended")

    async def _sync_group(self, call: Call) -> Fields:
        body = call.body
        group, member, generation = body.group_id, body.member_id, body.generation_id
        try:
            found = self._beat(call)
            if generation < found.changed:
                return {"error_code": ErrorCode.rebalance_in_progress}
            self._groups.sync(group, member, generation)
            assignment = await self._handed_out(call, found) if found.leader else assignment_bytes(found.partitions)
        except RequestRefused as err:
            return {"error_code": code_of(err, _SYNC_CODES)}
        return {
            "protocol_type": getattr(body, "protocol_type", None),
            "protocol_name": getattr(body, "protocol_name", None),
            "assignment": assignment,
        }

    async def _handed_out(self, call: Call, found: Assignment) -> bytes:
        """Return the leader's assignment for a member of a group of kind `kafka`, once it is there.

        Raises RequestRefused: rebalance_timeout if another generation begins before, unknown_member if the member ends.
        """
        body, groups, waiting = call.body, self._groups, Waiting()
        group, member, generation = body.group_id, body.member_id, body.generation_id
        groups.listen(group, member, waiting.on_event)
        try:
            if found.leader == member:
                given = {each.member_id: bytes(each.assignment) for each in body.assignments}
                groups.hand_out(group, member, generation, given)
            with groups.attending(group, member):
                while not waiting.ended:
                    waiting.wake.clear()
                    found = groups.coordinator.assignment(group, member)
                    if found.changed > generation:
                        raise RequestRefused("rebalance_timeout", "another generation has begun")
                    if found.handed_out is not None:
                        return found.handed_out
                    await waiting.wake.wait()
        finally:
            groups.stop_listening(group, member, waiting.on_event)
        raise RequestRefused("unknown_member", f"group {group}: member {member} has ended")

    async def _heartbeat(self, call: Call) -> Fields:
        try:
            found = self._beat(call)
        except RequestRefused as err:
            return {"error_code": ErrorCode.none if err.code == "not_ready" else code_of(err)}
        is_over = call.body.generation_id < found.changed or bool(found.revoking)
        return {"error_code": ErrorCode.rebalance_in_progress if is_over else ErrorCode.none}

    def _beat(self, call: Call) -> Assignment:
        """Note a sign of life, and return the member's assignment. Raises RequestRefused (unknown_member, fenced …)."""
        self._groups.ready()
        group, member = call.body.group_id, call.body.member_id
        self._check_instance(group, member, _instance(call.body))
        self._groups.beat(group, member, polled=True, generation=call.body.generation_id)
        return self._groups.coordinator.assignment(group, member)

    def _check_instance(self, group: str, member: str, name: str | None) -> None:
        """Raise RequestRefused unless `member` has the static name that it says. None: it says no name."""
        if name is None:
            return
        holder = self._groups.coordinator.static_member(group, name)
        if holder is None:
            raise RequestRefused("unknown_member", f"group {group} has no member {name}")
        if holder != member:
            raise KafkaRefused(ErrorCode.fenced_instance_id, f"a newer member of group {group} has the name {name}")

    async def _leave_group(self, call: Call) -> Fields:
        body = call.body
        rows = []
        for each in [body] if call.version < 3 else body.members:
            code, name, member = ErrorCode.none, _instance(each), each.member_id
            try:
                self._groups.ready()
                if name is not None and not member:  # from an operator, who knows no ids
                    member = self._groups.coordinator.static_member(body.group_id, name) or ""
                self._check_instance(body.group_id, member, name)
                self._groups.leave(body.group_id, member)
            except RequestRefused as err:
                code = code_of(err)
                call.errors.append(code)
            rows.append({"member_id": each.member_id, "group_instance_id": name, "error_code": code})
        codes = [row["error_code"] for row in rows]
        of_all = next((code for code in codes if call.version < 3 or code not in _OF_A_MEMBER), ErrorCode.none)
        return {"error_code": of_all, "members": rows}

    # --- offsets ------------------------------------------------------------------------------------------------------

    async def _offset_commit(self, call: Call) -> Fields:
        rows, codes = self._offsets_to_commit(call)
        return self._committed(call, codes | await self._commit(call, rows))

    async def _txn_offset_commit(self, call: Call) -> Fields:
        """Put offsets into a transaction, which commits them. They are fenced now, like other commits."""
        rows, codes = self._offsets_to_commit(call)
        return self._committed(call, codes | dict.fromkeys(rows, await self._hold_back(call, rows)))

    async def _hold_back(self, call: Call, rows: Mapping[Partition, OffsetCommit]) -> ErrorCode:
        body, groups = call.body, self._groups
        group, member, generation = body.group_id, getattr(body, "member_id", ""), getattr(body, "generation_id", -1)
        producer = body.transactional_id, body.producer_id, body.producer_epoch

        def check() -> None:
            self._check_instance(group, member, _instance(body))
            if member or generation >= 0:  # otherwise an old client, which names only its producer
                groups.coordinator.check_commit(group, member, generation, tuple(rows), time.monotonic())

        try:
            self._groups.ready()
            self._transactions.find(*producer)
            groups.store.check(group, member, rows)
            held = {place: row.by(member, max(0, generation), round(time.time(), 3)) for place, row in rows.items()}
            await self._transactions.hold_offsets(producer, group, held, check)
        except TransactionRefused as err:
            is_busy = err.code == ErrorCode.concurrent_transactions  # a code that clients do not expect here
            return ErrorCode.coordinator_load_in_progress if is_busy else err.code
        except RequestRefused as err:
            return code_of(err)
        return ErrorCode.none

    def _offsets_to_commit(self, call: Call) -> tuple[dict[Partition, OffsetCommit], dict[Partition, ErrorCode]]:
        """Return the offsets of a commit request, and codes for those that are refused."""
        rows, codes = dict[Partition, OffsetCommit](), dict[Partition, ErrorCode]()
        for topic, each in ((named.name, each) for named in call.body.topics for each in named.partitions):
            at, metadata = (topic, each.partition_index), each.committed_metadata or ""
            if len(metadata.encode()) > MAX_METADATA:
                codes[at] = ErrorCode.offset_metadata_too_large
                continue
            epoch = getattr(each, "committed_leader_epoch", -1)
            rows[at] = OffsetCommit(each.committed_offset, metadata, epoch if epoch >= 0 else None)
        return rows, codes

    def _committed(self, call: Call, codes: Mapping[Partition, ErrorCode]) -> Fields:
        """Return the response to a commit. A partition without a code was committed."""
        call.errors.extend(filter(None, codes.values()))

        def row(topic: str, number: int) -> Fields:
            return {"partition_index": number, "error_code": codes.get((topic, number), ErrorCode.none)}

        found = [(topic.name, [each.partition_index for each in topic.partitions]) for topic in call.body.topics]
        return {"topics": [{"name": name, "partitions": [row(name, n) for n in numbers]} for name, numbers in found]}

    async def _commit(self, call: Call, rows: Mapping[Partition, OffsetCommit]) -> dict[Partition, ErrorCode]:
        """Commit, and return codes of partitions that failed. A partition refused alone does not stop the others."""
        body, groups = call.body, self._groups
        group, member, generation = body.group_id, body.member_id, body.generation_id_or_member_epoch
        by = (None, None) if generation < 0 and not member else (member, generation)  # it assigns itself
        instead = _EPOCH_CODES if self._has_epoch(group, member) else None

        async def one(place: Partition) -> ErrorCode:
            try:
                await groups.commit(group, by[0], {place: rows[place]}, by[1], may_exceed=True)
            except RequestRefused as err:
                return code_of(err, instead)
            return ErrorCode.none

        try:
            self._groups.ready()
            if by[0] is not None:
                self._check_instance(group, member, _instance(body))
            await groups.check_commit(group, by[0], by[1], ())
            try:
                await groups.commit(group, by[0], rows, by[1], may_exceed=True)
            except RequestRefused as err:
                if err.code not in _OF_ONE:
                    raise
                return dict(zip(rows, await asyncio.gather(*map(one, rows)), strict=True))
        except RequestRefused as err:
            return dict.fromkeys(rows, code_of(err, instead))
        return {}

    async def _offset_fetch(self, call: Call) -> Fields:
        if call.version < 8:
            return self._offsets(call, call.body.group_id, call.body.topics)
        topics_of = {each.group_id: each.topics for each in call.body.groups}
        return {"groups": [self._offsets(call, group, topics) for group, topics in topics_of.items()]}

    def _offsets(self, call: Call, group: str, topic_rows: Iterable[Any] | None) -> Fields:
        """Return a group's committed offsets, in some topics or in all of them."""
        code = ErrorCode.none
        committed: Mapping[Partition, CommittedOffset] = {}
        try:
            self._groups.store.check_complete(group)
            committed = self._groups.committed(group)
        except RequestRefused as err:
            code = code_of(err)
            call.errors.append(code)
        wanted: dict[str, list[int]] = {}
        if topic_rows is None:
            for topic, number in sorted(committed):
                wanted.setdefault(topic, []).append(number)
        elif code == ErrorCode.none or call.version < 2:  # older versions have no other field for an error
            wanted = {topic.name: topic.partition_indexes for topic in topic_rows}

        is_stable = code == ErrorCode.none and getattr(call.body, "require_stable", False)
        pending = self._transactions.pending(group) if is_stable else ()  # their outcome is not decided yet

        def row(topic: str, number: int) -> Fields:
            found = committed.get((topic, number))
            return {
                "partition_index": number,
                "committed_offset": self._groups.resume_at((topic, number), found.offset) if found else -1,
                "committed_leader_epoch": -1 if found is None or found.leader_epoch is None else found.leader_epoch,
                "metadata": found.metadata if found else "",
                "error_code": ErrorCode.unstable_offset_commit if (topic, number) in pending else code,
            }

        topics = [{"name": name, "partitions": [row(name, n) for n in numbers]} for name, numbers in wanted.items()]
        return {"group_id": group, "topics": topics, "error_code": code}

    # --- groups as people look after them -----------------------------------------------------------------------------

    async def _describe_groups(self, call: Call) -> Fields:
        # Each group once, however often a request names it, and one by one: it may have thousands of members.
        groups = dict.fromkeys(call.body.groups)
        return {"groups": await call.each(groups, group_named, self._described, code_of, at_once=1)}

    async def _described(self, group: str) -> Fields:
        view = self._groups.describe(group)
        if view is None:
            return {"group_state": _STATES[State.DEAD]}
        members = [
            {
                "member_id": member.id,
                "group_instance_id": member.static_name,
                "client_id": member.name,
                "client_host": member.host,
                **_shown(member, view.protocol),
            }
            for member in view.members
        ]
        return {
            "group_state": _STATES[view.state],
            "protocol_type": view.protocol_type or _CONSUMER,
            "protocol_data": view.protocol,
            "members": members,
        }

    async def _list_groups(self, call: Call) -> Fields:
        try:
            coordinator = self._groups.ready()
        except RequestRefused as err:
            return {"error_code": code_of(err)}
        rows, wanted = [], getattr(call.body, "states_filter", ())
        for group in coordinator.groups():
            state, protocol_type = _STATES[coordinator.state(group)], coordinator.protocol_type(group) or _CONSUMER
            if not wanted or state in wanted:
                rows.append({"group_id": group, "protocol_type": protocol_type, "group_state": state})
        return {"groups": rows}

    async def _delete_groups(self, call: Call) -> Fields:
        names = dict.fromkeys(call.body.groups_names)
        return {"results": await call.each(names, group_named, self._admin.delete, code_of)}

    async def _offset_delete(self, call: Call) -> Fields:
        rows = [(topic.name, [each.partition_index for each in topic.partitions]) for topic in call.body.topics]
        try:
            places = {(name, number) for name, numbers in rows for number in numbers}
            refused = await self._admin.forget(call.body.group_id, places)
        except RequestRefused as err:
            return {"error_code": code_of(err)}

        def row(name: str, number: int) -> Fields:
            code = ErrorCode.group_subscribed_to_topic if (name, number) in refused else ErrorCode.none
            return {"partition_index": number, "error_code": code}

        topics = [{"name": name, "partitions": [row(name, number) for number in numbers]} for name, numbers in rows]
        return {"topics": topics}


_STATES = {
    State.EMPTY: "Empty",
    State.PREPARING: "PreparingRebalance",
    State.COMPLETING: "CompletingRebalance",
    State.STABLE: "Stable",
    State.DEAD: "Dead",
}


def group_named(group: str) -> dict[str, Any]:
    """Return the fields that name a group in answers."""
    return {"group_id": group}


def _instance(body: Any) -> str | None:
    """Return the static name that a member says; None if there is none, or the version has no field for it."""
    name: str | None = getattr(body, "group_instance_id", None)
    return name


class _JoinRequest(NamedTuple):
    """A JoinGroup. `names`: assignor → the client's name for it. `owned`: partitions it still reads, as it says."""

    options: MemberOptions
    names: Mapping[str, str]
    owned: frozenset[Partition]


def _read_join_request(body: Any, is_opaque: bool) -> _JoinRequest:
    """Return a client's JoinGroup request. `is_opaque`: the group is of kind `kafka`.

    The client becomes a member of kind `kmq` if it offers one of the broker's assignors. Raises RequestRefused if it
    offers nothing, or metadata that cannot be read.
    """
    if not body.protocols or not body.protocol_type:
        raise RequestRefused("unknown_assignor", "no protocol is offered")
    if max(len(each.metadata) for each in body.protocols) > _MAX_METADATA:
        raise RequestRefused("subscription_too_large", f"metadata: at most {_MAX_METADATA} bytes")
    metadata: dict[str, bytes] = {}
    names: dict[str, str] = {}
    for each in body.protocols:
        metadata.setdefault(each.name, bytes(each.metadata))
        assignor = _ALIASES.get(each.name, each.name)
        if body.protocol_type == _CONSUMER and assignor in ASSIGNORS:
            names.setdefault(assignor, each.name)
    session_s = wire.milliseconds(body.session_timeout) / 1000
    rebalance_s = max(0, wire.milliseconds(getattr(body, "rebalance_timeout", None))) / 1000 or session_s
    options = MemberOptions(
        (),
        session_s=session_s,
        rebalance_s=min(max(rebalance_s, REBALANCE_S[0]), REBALANCE_S[1]),
        max_poll_s=MAX_POLL_S[1],  # the client enforces it itself
        static_name=_instance(body),
        is_kafka=True,
    )
    if is_opaque or not names:
        options = options._replace(assignors=tuple(metadata), opaque=Opaque(body.protocol_type, metadata))
        return _JoinRequest(options, {name: name for name in metadata}, frozenset())
    try:
        topics, _ = read_metadata(metadata[next(iter(names.values()))])
        _, owned = read_metadata(metadata[names[COOPERATIVE]]) if COOPERATIVE in names else ((), frozenset[Partition]())
    except BadRequest as err:
        raise RequestRefused("unknown_assignor", f"metadata: {err}") from None
    return _JoinRequest(options._replace(topics=topics, assignors=tuple(names)), names, owned)


def _shown(member: MemberView, protocol: str) -> dict[str, bytes]:
    """Return a member's metadata and assignment, as other clients read them."""
    if member.opaque is not None:
        said, assignment = member.opaque.metadata.get(protocol, b""), member.handed_out
    else:
        said, assignment = metadata_bytes(member.topics), assignment_bytes(member.partitions)
    return {"member_metadata": said, "member_assignment": assignment}
