"""Which member owns which partition of a group, and which one it is meant for.

Invariants  1. A partition has at most one owner. Only `give` adds owners, and only to partitions that nobody owns; the
            group calls it only after it has raised the generation. Everything else only takes owners away. So within
            one generation a partition never has two owners.
            2. An owner is taken away only by `release`: the member said `revoked`, joined again without the partition,
            left, was ended, was replaced under its static name, or the partition is gone. Being asked takes nothing
            away. So a new owner begins only after the old one has stopped, or can no longer commit.
Memory      Two entries for each partition of the subscribed topics.
"""

from collections.abc import Callable, Iterable

from kmq.gateway.groups.events import TopicPartition
from kmq.gateway.groups.member import Member

Exists = Callable[[TopicPartition], bool]


class Ownership:
    """Owners and target. `members` is the group's own dict: every owner is in it."""

    __slots__ = ("_members", "has_free", "owners", "revoking", "target")

    def __init__(self, members: dict[str, Member]) -> None:
        self._members = members
        self.owners: dict[TopicPartition, str] = {}
        self.target: dict[TopicPartition, str] = {}  # who is to own it, once it is free
        self.has_free = False  # a partition of the target has no owner
        self.revoking: set[str] = set()  # members that were asked to give something up

    def release(self, member: Member, partitions: Iterable[TopicPartition]) -> None:
        """Take `partitions` away from the member, which reads them no more, or is none any more."""
        for partition in partitions:
            member.lose(partition)
            del self.owners[partition]
            self.has_free |= partition in self.target
        if not member.revoking:
            self.revoking.discard(member.id)

    def drop_gone(self, exists: Exists) -> None:
        """Take away what is there no more."""
        for partition, owner in list(self.owners.items()):
            if not exists(partition):
                self.release(self._members[owner], [partition])
        self.target = {partition: owner for partition, owner in self.target.items() if exists(partition)}

    def prefer(self, partitions: Iterable[TopicPartition], member: str) -> None:
        """Let the next target prefer `member` for those of `partitions` that are meant for nobody else."""
        for partition in partitions:
            self.target.setdefault(partition, member)

    def rename(self, old: str, new: str) -> None:
        """Mean for `new` what was meant for `old`, which owns nothing any more."""
        for partition, member in self.target.items():
            if member == old:
                self.target[partition] = new
                self.has_free = True

    def clear(self) -> None:
        """The last member is gone: nothing is meant for anybody."""
        self.target, self.has_free = {}, False

    def prior(self) -> dict[str, list[TopicPartition]]:
        """Return what each member has as an assignor sees it: what is meant for it, else what it owns."""
        had = self.owners | {p: member for p, member in self.target.items() if member in self._members}
        prior: dict[str, list[TopicPartition]] = {member: [] for member in self._members}
        for partition, member in had.items():
            prior[member].append(partition)
        return prior

    def ask(self, is_all: bool, generation: int, now: float) -> dict[str, list[TopicPartition]]:
        """Ask owners to give up all that they own, or what is meant for another. Returns what was not asked before."""
        asked: dict[str, list[TopicPartition]] = {}
        for partition, owner in self.owners.items():
            if (is_all or self.target.get(partition) != owner) and partition not in self._members[owner].revoking:
                asked.setdefault(owner, []).append(partition)
        for owner, partitions in asked.items():
            self._members[owner].ask(partitions, generation, now)
            self.revoking.add(owner)
        return asked

    def give(self, generation: int) -> None:
        """Give what nobody owns to the members that it is meant for, from `generation` on."""
        for partition, member in self.target.items():
            if partition not in self.owners:
                self.owners[partition] = member
                self._members[member].owned[partition] = generation
        self.has_free = False
