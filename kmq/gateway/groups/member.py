"""One member of a group: what it asked for, what it owns, and until when it may stay silent.

Invariant   `revoking` ⊆ `owned`. `generation`, the highest one that the member has shown to know, never falls.
"""

from collections.abc import Iterable

from kmq.gateway.groups.alarms import NEVER
from kmq.gateway.groups.events import MemberView, Partitions, TopicPartition
from kmq.gateway.groups.terms import Client, Terms


class Member:
    """All times are those of the caller's monotonic clock, in seconds."""

    __slots__ = (
        "beaten",
        "client",
        "generation",
        "id",
        "owned",
        "polled",
        "revoke_by",
        "revoking",
        "sync_by",
        "terms",
        "topics",
    )

    def __init__(self, id: str, client: Client, terms: Terms, generation: int, now: float) -> None:
        self.id, self.client, self.terms, self.generation = id, client, terms, generation
        self.topics = frozenset(terms.topics)
        self.beaten = self.polled = now
        self.owned: dict[TopicPartition, int] = {}  # → the generation in which it was given
        self.revoking: dict[TopicPartition, int] = {}  # → the generation in which it was asked for
        self.sync_by = self.revoke_by = NEVER

    @property
    def place(self) -> tuple[str, str]:
        """Where the member stands among the others, whoever joined first."""
        return self.terms.static_name or "", self.id

    def deadline(self) -> float:
        """Return when the member is overdue unless it gives a sign of life before."""
        return min(
            self.beaten + self.terms.session_s, self.polled + self.terms.max_poll_s, self.sync_by, self.revoke_by
        )

    def overdue(self, now: float) -> str:
        """Return the code with which the member ends at `now`; "" if it may stay."""
        if now >= self.beaten + self.terms.session_s:
            return "session_timeout"
        if now >= min(self.sync_by, self.revoke_by):
            return "rebalance_timeout"
        return "poll_timeout" if now >= self.polled + self.terms.max_poll_s else ""

    def ask(self, partitions: Iterable[TopicPartition], generation: int, now: float) -> None:
        """Note that `partitions` are to be given up. Asking again does not prolong the deadline."""
        self.revoking.update(dict.fromkeys(partitions, generation))
        self.revoke_by = min(self.revoke_by, now + self.terms.rebalance_s)

    def tell(self, now: float) -> None:
        """Note that the member was told of a new generation. Telling it of another one does not prolong the deadline."""
        self.sync_by = min(self.sync_by, now + self.terms.rebalance_s)

    def answer(self, generation: int, newest: int, now: float) -> None:
        """Note that the member knows `generation`, which may be older than the `newest` of the group."""
        self.generation = max(self.generation, generation)
        self.sync_by = NEVER if self.generation == newest else now + self.terms.rebalance_s

    def lose(self, partition: TopicPartition) -> None:
        """Take the partition away, whether it was asked for or not."""
        del self.owned[partition]
        self.revoking.pop(partition, None)
        if not self.revoking:
            self.revoke_by = NEVER

    def has_answered(self, newest: int) -> bool:
        """Return True if the member knows the newest generation and has nothing to give up."""
        return self.generation == newest and not self.revoking

    def assignment(self) -> Partitions:
        """Return what the member may read: what it owns and need not give up."""
        return tuple(sorted(self.owned.keys() - self.revoking.keys()))

    def view(self) -> MemberView:
        """Return the member as doors show it."""
        return MemberView(
            id=self.id,
            name=self.client.name,
            host=self.client.host,
            static_name=self.terms.static_name,
            topics=tuple(sorted(self.topics)),
            partitions=self.assignment(),
            revoking=tuple(sorted(self.revoking)),
        )
