"""The values that members and the coordinator exchange: options of a join, events for members, and their limits.

for event in coordinator.take_events(): …      Revoke | Assigned | Ended | Forgotten, in the order to send them
"""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import NamedTuple

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.assignors import ASSIGNORS, DEFAULT
from kmq.message import record
from kmq.wire.attempts import Attempt
from kmq.wire.requests import TopicPartition

# --- joining ---------------------------------------------------------------------------------------------------------

SESSION_S = (6.0, 1800.0)
REBALANCE_S = (1.0, 86400.0)
MAX_POLL_S = (1.0, 86400.0)
MAX_PROTOCOLS = 16  # that a member of kind `kafka` offers
SHARED = "-"  # the one member that stands for all HTTP callers of a group that name no member
MAX_GENERATION = (1 << 31) - (1 << 20)  # a higher generation might not fit the 32 bits of other protocols


class Client(NamedTuple):
    """A member as people see it: the name its program gives itself, and the address it came from."""

    name: str
    host: str


class Opaque(NamedTuple):
    """What members of a group of kind `kafka` say, which only they understand. They have no topics.

    protocol_type   the same for all members of a group: `consumer`, `connect`, `sr`
    metadata        bytes for each of the protocols that a member offers
    """

    protocol_type: str
    metadata: Mapping[str, bytes]

    @property
    def size(self) -> int:
        return len(self.protocol_type) + sum(len(name) + len(data) for name, data in self.metadata.items())


class MemberOptions(NamedTuple):
    """What a member asks for. Times in seconds.

    topics       names; a topic that does not exist yet counts from the moment it is declared
    assignors    the preferred one first; the group uses one that all its members offer, by their votes
    session_s    without a sign of life for so long the member is ended
    rebalance_s  without an answer to Revoke or Assigned for so long the member is ended
    max_poll_s   without asking for records for so long the member is ended, although it beats
    keeps_topics keep the topics that the member subscribes to already (each HTTP request names only its own)
    static_name  a newer member of this name takes the place, and the partitions, of the older one
    attempt      which connection of a program asks; an earlier one of the same run, which arrives late, is refused
    opaque       makes it a member of kind `kafka`: one of the members assigns, and `assignors` are names of their own
    pattern      for KIP-848: the pattern that its topics match, "" without one; None: another protocol
    is_kafka     it came through the Kafka door, which redelivers no given-back messages
    """

    topics: tuple[str, ...]
    assignors: tuple[str, ...] = (DEFAULT,)
    session_s: float = 30.0
    rebalance_s: float = 60.0
    max_poll_s: float = 300.0
    static_name: str | None = None
    keeps_topics: bool = False
    opaque: Opaque | None = None
    attempt: Attempt | None = None
    pattern: str | None = None
    is_kafka: bool = False


class Resume(NamedTuple):
    """What a returning member remembers: its last generation, and the partitions it still reads (None: not said).

    `takes_name`: it has chosen its id, and takes its static name from any other member.
    """

    generation: int = 0
    owned: Collection[tuple[str, int]] | None = None
    takes_name: bool = False


class GroupLimits(NamedTuple):
    """Limits of the coordinator's memory and of the time that one rebalance takes.

    groups       all groups, with or without members
    members      of one group
    all_members  of all groups together; the first `own_members` of each group are admitted above it
    topics       in one member's subscription
    topic_bytes  names in one member's subscription
    all_topics   in the subscriptions of all members together; `own_topics` of each member are admitted above it
    partitions   that the subscriptions of one group may reach when a member joins
    opaque       bytes of a member of kind `kafka`: of its metadata, and of its assignment by the leader
    all_opaque   of all such members together
    name_bytes   of a group, a member, a client, each
    retention_s  a group without members and commits is forgotten after this time
    """

    groups: int = 10_000
    members: int = 2_000
    all_members: int = 20_000
    own_members: int = 4
    topics: int = 1_000
    topic_bytes: int = 204_800
    all_topics: int = 200_000
    own_topics: int = 10
    partitions: int = 10_000
    opaque: int = 256 << 10
    all_opaque: int = 32 << 20
    name_bytes: int = 200
    retention_s: float = 7 * 86400.0


def check_name(what: str, name: str, limits: GroupLimits) -> None:
    """Raise RequestRefused (bad_name) unless `name` can name a group or a member (`what`)."""
    if not 1 <= len(name) <= limits.name_bytes or len(name.encode(errors="replace")) > limits.name_bytes:
        raise RequestRefused("bad_name", f"{what}: must be 1 to {limits.name_bytes} bytes")
    if not name.isprintable() or " " in name:
        raise RequestRefused("bad_name", f"{what}: must be printable and without spaces")


def check_options(options: MemberOptions, limits: GroupLimits) -> None:
    """Raise RequestRefused unless a member may join with these options."""
    if not options.assignors or not (options.opaque or ASSIGNORS.keys() >= {*options.assignors}):
        raise RequestRefused("unknown_assignor", f"unknown assignor; expected one of {', '.join(ASSIGNORS)}")
    if options.opaque is not None:
        _check_opaque(options.opaque, limits)
    for what, value, (low, high) in (
        ("session", options.session_s, SESSION_S),
        ("rebalance timeout", options.rebalance_s, REBALANCE_S),
        ("max.poll.interval", options.max_poll_s, MAX_POLL_S),
    ):
        if not low <= value <= high:  # also for NaN
            raise RequestRefused("bad_timeout", f"{what}: must be {low:g} to {high:g} seconds")
    if options.static_name is not None:
        check_name("static name", options.static_name, limits)
    if len(options.topics) > limits.topics:
        raise RequestRefused("subscription_too_large", f"topics: at most {limits.topics} for a member")
    if sum(map(len, options.topics)) > limits.topic_bytes:
        raise RequestRefused("subscription_too_large", f"topics: at most {limits.topic_bytes} bytes of names")
    for topic in options.topics:
        if not record.is_topic_name(topic):
            raise RequestRefused("bad_topic")


def _check_opaque(opaque: Opaque, limits: GroupLimits) -> None:
    for name in (opaque.protocol_type, *opaque.metadata):
        check_name("protocol", name, limits)
    if len(opaque.metadata) > MAX_PROTOCOLS or opaque.size > limits.opaque:
        text = f"metadata: at most {MAX_PROTOCOLS} protocols and {limits.opaque} bytes for a member"
        raise RequestRefused("subscription_too_large", text)


def check_resume(resume: Resume, limits: GroupLimits) -> None:
    """Raise RequestRefused unless a member may resume with these values."""
    if not 0 <= resume.generation <= MAX_GENERATION:
        raise RequestRefused("bad_request", f"generation: must be 0 to {MAX_GENERATION}")
    if resume.owned is not None and len(resume.owned) > limits.partitions:
        raise RequestRefused("bad_request", f"owned partitions: at most {limits.partitions}")


# --- events and views ------------------------------------------------------------------------------------------------

Partitions = tuple[TopicPartition, ...]  # in the order of topics and numbers


class State(Enum):
    """What a group waits for.

    state       the group has…
    EMPTY       no members
    PREPARING   members or topics that the target does not include yet, or (eager) partitions that all must give up
    COMPLETING  a target, and members that have not answered, or partitions on the way to their new owner
    STABLE      every partition with the owner that the target names, and every member knows its partitions
    DEAD        been forgotten, or never existed
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
    """From now on the member reads exactly `partitions`. The answer is `sync`, or `revoked` after a Revoke.

    A member whose assignment has not changed need not answer.
    """

    group: str
    member: str
    generation: int
    partitions: Partitions


class HandedOut(NamedTuple):
    """The leader of a group of kind `kafka` has assigned: the member's part is ready in this generation."""

    group: str
    member: str
    generation: int


class Ended(NamedTuple):
    """The member has ended. `code`: fenced | session_timeout | poll_timeout | rebalance_timeout, or unknown_member: it
    has left, or a client has said so for it.
    """

    group: str
    member: str
    code: str


class Forgotten(NamedTuple):
    """The group is gone: its committed offsets must be forgotten, too."""

    group: str


Event = Revoke | Assigned | HandedOut | Ended | Forgotten


class Assignment(NamedTuple):
    """What a member may read now, in which generation, and by which assignor.

    `changed`: the generation in which it was last given or asked for something. `revoking`: partitions that it also
    owns, and must give up. `is_due`: the next generation is only a matter of time. In a group of kind `kafka`, `leader`
    assigns, and `handed_out` is the member's assignment in this generation, if there is one yet.
    """

    generation: int
    partitions: Partitions
    changed: int
    revoking: Partitions
    is_due: bool
    protocol: str
    leader: str | None
    handed_out: bytes | None


class MemberView(NamedTuple):
    """One row of `describe`. `revoking`: still owned, but to be given up."""

    id: str
    name: str
    host: str
    static_name: str | None
    topics: tuple[str, ...]
    partitions: Partitions
    revoking: Partitions
    opaque: Opaque | None
    handed_out: bytes


class GroupView(NamedTuple):
    """A group as doors show it.

    protocol    the assignor in force, "" until there was a member
    protocol_type  of a group of kind `kafka`; "" if the broker assigns
    leader      the member that assigns, in a group of kind `kafka`
    left        when its last member left, by the coordinator's clock; -inf if it had none in this life
    """

    name: str
    state: State
    generation: int
    protocol: str
    members: tuple[MemberView, ...]
    protocol_type: str = ""
    leader: str | None = None
    left: float = float("-inf")
