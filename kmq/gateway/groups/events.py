"""What the coordinator wants its doors to send, and what it shows of a group. Values only.

for event in coordinator.take_events(): …      Revoke | Assigned | Ended | Forgotten, in the order to send them
"""

from enum import Enum
from typing import NamedTuple

from kmq.wire.requests import TopicPartition

Partitions = tuple[TopicPartition, ...]  # in the order of topics and numbers


class State(Enum):
    """What a group waits for.

    state       the group has…
    EMPTY       no members
    PREPARING   members or topics that the present target does not know yet, or (eager) partitions that all must give up
    COMPLETING  a target, and members that have not answered, or partitions that are on the way to their new owner
    STABLE      every partition with the owner that the target names, and every member has said so
    DEAD        been forgotten, or was never there
    """

    EMPTY = "empty"
    PREPARING = "preparing"
    COMPLETING = "completing"
    STABLE = "stable"
    DEAD = "dead"


class Revoke(NamedTuple):
    """The member must stop reading `partitions`, commit, and answer `revoked`. Until then it still owns them."""

    group: str
    member: str
    generation: int
    partitions: Partitions


class Assigned(NamedTuple):
    """From now on the member reads exactly `partitions`. The answer is `sync`, or `revoked` after a Revoke."""

    group: str
    member: str
    generation: int
    partitions: Partitions


class Ended(NamedTuple):
    """The member is none any more. `code`: fenced | session_timeout | poll_timeout | rebalance_timeout."""

    group: str
    member: str
    code: str


class Forgotten(NamedTuple):
    """The group is gone: its committed offsets are to be forgotten too."""

    group: str


Event = Revoke | Assigned | Ended | Forgotten


class Assignment(NamedTuple):
    """What a member may read now, and of which generation that is."""

    generation: int
    partitions: Partitions


class MemberView(NamedTuple):
    """One row of `describe`. `revoking`: owned still, to be given up."""

    id: str
    name: str
    host: str
    static_name: str | None
    topics: tuple[str, ...]
    partitions: Partitions
    revoking: Partitions


class GroupView(NamedTuple):
    """What a door shows of a group.

    protocol    the assignor in force, "" as long as there was no member
    left        when the last of its members left, by the coordinator's clock; -inf if it had none in this life
    """

    name: str
    state: State
    generation: int
    protocol: str
    members: tuple[MemberView, ...]
    left: float = float("-inf")
