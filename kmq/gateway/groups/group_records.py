"""Members and generation of a group as one record of `__consumer_offsets`, for the next leader of a shard.

    key      <group>..0                               the group percent-encoded, its dots too
    payload  members=1 {"generation": 7, "assignor": "range", …}     JSON in one line; 1: the version of this form

The empty payload is a tombstone: the group has no members. An older release skips these records and logs that once.

Invariant   A record is written before any commit of its generation, by the same connection. So a gateway that finds the
            commit of a generation also finds the owners of its partitions. A group that was not stable is restored with
            its members and owners, and begins another generation. Times are not kept: sessions begin anew at the next
            leader.
"""

import json
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kmq.gateway.groups.group import Group, Member
from kmq.gateway.groups.offset_table import TOPIC, decode_name, encode_name
from kmq.gateway.groups.protocol import Client, MemberOptions, Opaque, State
from kmq.message import routing
from kmq.wire.requests import TopicPartition

MAX_BYTES = 512 << 10  # of a payload; a larger group is not kept, and its members join again
_VERSION = b"members=1 "
_STORED = re.compile(
    rb"(?m)^(\d+)\|[^|\n]*\|%b\.(?:@\d*\.)?([A-Za-z0-9_~%%-]+)\.\.0\|[^|\n]*\|[^|\n]*\|(members=\d+ \{[^\n]*\}|)$"
    % TOPIC.encode()
)
_PLAIN = ("assignors", "session_s", "rebalance_s", "max_poll_s", "static_name", "pattern")


def routing_key(group: str) -> bytes:
    """Return the routing key of a group's record."""
    return routing.exact(TOPIC.encode(), f"{encode_name(group)}..0".encode())


def scan(lines: bytes) -> Iterator[tuple[int, str, bytes]]:
    """Yield (seq, group, payload) of the records among stored lines; b"" is a tombstone. Others are left out."""
    for seq, group, payload in _STORED.findall(lines):
        yield int(seq), decode_name(group.decode()), payload


def encode(group: Group) -> bytes:
    """Return the payload for a group; b"" if it has no members."""
    if not group.members:
        return b""
    state = {
        "generation": group.generation,
        "assignor": group.assignor,
        "is_stable": group.state is State.STABLE,
        "members": [_encode_member(member) for member in group.members.values()],
    }
    return _VERSION + json.dumps(state, separators=(",", ":")).encode()


def decode(payload: bytes) -> tuple[int, Callable[[Group], None]]:
    """Return the generation of a payload, and a function that puts its members and owners into a group without members.

    Sessions begin now. Raises ValueError, LookupError, TypeError.
    """
    if not payload.startswith(_VERSION):
        raise ValueError(f"{payload[:20]!r} is of a later release")
    state, now = json.loads(payload.removeprefix(_VERSION)), time.monotonic()
    members = [_decode_member(row, now) for row in state["members"]]
    generation, assignor, is_stable = int(state["generation"]), str(state["assignor"]), bool(state["is_stable"])
    return generation, lambda group: group.take_over(members, generation, assignor, is_stable)


def _encode_member(member: Member) -> dict[str, Any]:
    options = member.options
    row: dict[str, Any] = {"id": member.id, "client": [*member.client], "topics": sorted(member.topics)}
    row |= {name: getattr(options, name) for name in _PLAIN}
    row |= {"generation": member.generation, "changed": member.changed, "is_kafka": options.is_kafka}
    row["owned"] = [[*partition, since] for partition, since in member.owned.items()]
    if options.opaque is not None:
        metadata = {name: b64encode(data).decode() for name, data in options.opaque.metadata.items()}
        row |= {"opaque": [options.opaque.protocol_type, metadata], "handed_out": b64encode(member.handed_out).decode()}
    return row


def _decode_member(row: Mapping[str, Any], now: float) -> Member:
    fields = {name: row[name] for name in _PLAIN} | {"assignors": tuple(row["assignors"])}
    opaque = None
    if "opaque" in row:
        protocol_type, metadata = row["opaque"]
        opaque = Opaque(protocol_type, {name: b64decode(data) for name, data in metadata.items()})
    # An older release does not write it. Members by Kafka's older protocol are then unknown until they join again.
    is_kafka = bool(row.get("is_kafka", opaque is not None or row["pattern"] is not None))
    options = MemberOptions(tuple(row["topics"]), opaque=opaque, is_kafka=is_kafka, **fields)
    member = Member(row["id"], Client(*row["client"]), options, int(row["generation"]), now)
    member.changed, member.has_news = int(row["changed"]), False
    member.owned = {TopicPartition(topic, number): since for topic, number, since in row["owned"]}
    member.handed_out = b64decode(row.get("handed_out", ""))
    return member
