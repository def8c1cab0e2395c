"""On which terms a member joins, and the bounds of all groups together."""

from collections.abc import Collection
from typing import NamedTuple

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.assignors import ASSIGNORS, DEFAULT
from kmq.message import record

SESSION_S = (6.0, 300.0)
REBALANCE_S = (1.0, 3600.0)
MAX_POLL_S = (1.0, 86400.0)
SHARED = "-"  # the one member that all HTTP callers of a group are that name no member
MAX_GENERATION = (1 << 31) - (1 << 20)  # above it a generation might no longer fit the 32 bits of other protocols


class Client(NamedTuple):
    """Who a member is, for people: the name its program gives itself, and the address it came from."""

    name: str
    host: str


class Terms(NamedTuple):
    """What a member asks for. Times in seconds.

    topics       names; a topic that is not there yet counts from the moment it is declared
    session_s    after so long without a sign of life the member is ended
    rebalance_s  after so long without an answer to Revoke or Assigned the member is ended
    max_poll_s   after so long without asking for records the member is ended, although it beats
    keeps_topics the topics that the member subscribes to already stay (each request of HTTP names only its own one)
    static_name  a newer member of this name takes the place, and the partitions, of the older one
    """

    topics: tuple[str, ...]
    assignor: str = DEFAULT
    session_s: float = 30.0
    rebalance_s: float = 60.0
    max_poll_s: float = 300.0
    static_name: str | None = None
    keeps_topics: bool = False


class Resume(NamedTuple):
    """What a member that comes back remembers: its last generation, and what it still reads (None: says nothing)."""

    generation: int = 0
    owned: Collection[tuple[str, int]] | None = None


class Limits(NamedTuple):
    """The bounds of the coordinator's memory and of the time that one rebalance takes.

    groups       all groups, with or without members
    members      of one group
    all_members  of all groups together; the first `own_members` of each group are admitted beyond it
    topics       in one member's subscription
    topic_bytes  names in one member's subscription
    all_topics   in the subscriptions of all members together; `own_topics` of each member are admitted beyond it
    partitions   that the subscriptions of one group may reach when a member joins
    name_bytes   of a group, a member, a client, each
    retention_s  a group without members and commits is forgotten after so long
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
    name_bytes: int = 200
    retention_s: float = 7 * 86400.0


def check_name(what: str, name: str, limits: Limits) -> None:
    """Raise RequestRefused (bad_name) unless `name` can name a group or a member (`what`)."""
    if not 1 <= len(name) <= limits.name_bytes or len(name.encode(errors="replace")) > limits.name_bytes:
        raise RequestRefused("bad_name", f"{what}: must be 1 to {limits.name_bytes} bytes")
    if not name.isprintable() or " " in name:
        raise RequestRefused("bad_name", f"{what}: must be printable and without spaces")


def check_terms(terms: Terms, limits: Limits) -> None:
    """Raise RequestRefused unless a member may join on these terms."""
    if terms.assignor not in ASSIGNORS:
        raise RequestRefused("unknown_assignor", f"unknown assignor; expected one of {', '.join(ASSIGNORS)}")
    for what, value, (low, high) in (
        ("session", terms.session_s, SESSION_S),
        ("rebalance timeout", terms.rebalance_s, REBALANCE_S),
        ("max.poll.interval", terms.max_poll_s, MAX_POLL_S),
    ):
        if not low <= value <= high:  # also for NaN
            raise RequestRefused("bad_timeout", f"{what}: must be {low:g} to {high:g} seconds")
    if terms.static_name is not None:
        check_name("static name", terms.static_name, limits)
    if len(terms.topics) > limits.topics:
        raise RequestRefused("subscription_too_large", f"topics: at most {limits.topics} for a member")
    if sum(map(len, terms.topics)) > limits.topic_bytes:
        raise RequestRefused("subscription_too_large", f"topics: at most {limits.topic_bytes} bytes of names")
    for topic in terms.topics:
        if not record.is_topic_name(topic):
            raise RequestRefused("bad_topic")


def check_resume(resume: Resume, limits: Limits) -> None:
    """Raise RequestRefused unless a member may say that of itself."""
    if not 0 <= resume.generation <= MAX_GENERATION:
        raise RequestRefused("bad_request", f"generation: must be 0 to {MAX_GENERATION}")
    if resume.owned is not None and len(resume.owned) > limits.partitions:
        raise RequestRefused("bad_request", f"owned partitions: at most {limits.partitions}")
