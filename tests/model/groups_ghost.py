"""What consumer groups must do, told by a second, simple account: who reads what, and since when.

The ghost hears the same calls and events as the members and the doors. It knows no heap, no target and no assignor.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

Partition = tuple[str, int]


class Broken(AssertionError):
    """A promise is broken."""


def demand(holds: bool, why: str) -> None:
    if not holds:
        raise Broken(why)


class Key(NamedTuple):
    group: str
    member: str


class Seat:
    """One living member, as it sees itself."""

    def __init__(self, options: Any, generation: int, now: float) -> None:
        self.options, self.shown, self.told = options, generation, generation
        self.topics = set(options.topics)
        self.beaten = self.polled = now
        self.reads: dict[
            Partition, int
        ] = {}  # → since which generation; also what it was asked for and has not given up
        self.asked: dict[Partition, int] = {}
        self.changed, self.has_news = generation, True
        self.sync_since: float | None = None  # when it was first told what it has not answered
        self.revoke_since: float | None = None

    def overdue(self, now: float) -> set[str]:
        """The codes with which it may be ended now."""
        codes = set()
        if now >= self.beaten + self.options.session_s:
            codes.add("session_timeout")
        if now >= self.polled + self.options.max_poll_s:
            codes.add("poll_timeout")
        since = [time for time in (self.sync_since, self.revoke_since) if time is not None]
        if since and now >= min(since) + self.options.rebalance_s:
            codes.add("rebalance_timeout")
        return codes

    def answer(self, generation: int, newest: int, now: float) -> None:
        self.shown = max(self.shown, generation)
        self.sync_since = None if self.shown >= self.changed else now
        self.beaten = now

    def stop(self, partitions: Iterable[Partition]) -> None:
        for partition in list(partitions):
            self.reads.pop(partition, None)
            self.has_news |= self.asked.pop(partition, None) is None
        if not self.asked:
            self.revoke_since = None


class Ghost:
    """All groups through all lives of the gateway."""

    def __init__(self) -> None:
        self.seats: dict[Key, Seat] = {}
        self.partitions_of: dict[str, int] = {}
        self.newest: dict[str, int] = {}  # group → the highest generation that anybody was told
        self.owners: dict[tuple[str, Partition, int], str] = {}  # in which generation who was given what
        self.committed: dict[str, int] = {}  # group → the highest generation in its records
        self.active: dict[str, float] = {}  # group → when its last member ended, or its last commit
        self.retention_s = float("inf")
        self.forgettable: set[str] = set()  # also before that time

    def of(self, group: str) -> dict[str, Seat]:
        return {key.member: seat for key, seat in self.seats.items() if key.group == group}

    def exists(self, partition: Partition) -> bool:
        return 0 <= partition[1] < self.partitions_of.get(partition[0], 0)

    # --- what happens -------------------------------------------------------------------------------------------------

    def topics_changed(self, partitions_of: dict[str, int], again: set[str]) -> None:
        self.partitions_of = dict(partitions_of)
        for seat in self.seats.values():
            seat.stop([p for p in seat.reads if p[0] in again or not self.exists(p)])

    def hear(self, event: Any, now: float) -> None:
        """One event, at the time at which it is sent."""
        getattr(self, f"_{type(event).__name__.lower()}")(event, now)

    def _assigned(self, event: Any, now: float) -> None:
        seat = self.seats.get(Key(event.group, event.member))
        demand(seat is not None, f"{event}: nobody is this member")
        assert seat is not None
        demand(event.generation > seat.told, f"{event}: was told of generation {seat.told} before")
        demand(event.generation >= self.newest.get(event.group, 0), f"{event}: an old generation")
        self.newest[event.group] = event.generation
        kept = seat.reads.keys() - seat.asked.keys()
        demand(kept <= set(event.partitions), f"{event}: takes away {kept - set(event.partitions)} without asking")
        demand(not seat.asked.keys() & set(event.partitions), f"{event}: gives what it asks for")
        seat.has_news |= event.generation in seat.asked.values() or not kept >= set(event.partitions)
        for partition in event.partitions:
            demand(partition in kept or self.exists(partition), f"{event}: {partition} is not there")
            demand(partition[0] in seat.topics, f"{event}: {partition} was not subscribed to")
            owner = self.owners.setdefault((event.group, partition, event.generation), event.member)
            demand(owner == event.member, f"{event}: {partition} has two owners in this generation, also {owner}")
            if partition not in seat.reads:
                others = [name for name, other in self.of(event.group).items() if partition in other.reads]
                demand(not others, f"{event}: {others} still reads {partition}")
                seat.reads[partition] = event.generation
        seat.told = event.generation
        if seat.has_news:  # else there is nothing to answer
            seat.changed, seat.has_news = event.generation, False
            seat.sync_since = now if seat.sync_since is None else seat.sync_since

    def _revoke(self, event: Any, now: float) -> None:
        seat = self.seats.get(Key(event.group, event.member))
        demand(seat is not None, f"{event}: nobody is this member")
        assert seat is not None
        for partition in event.partitions:
            demand(partition in seat.reads, f"{event}: does not read {partition}")
            demand(partition not in seat.asked, f"{event}: asked twice for {partition}")
            seat.asked[partition] = event.generation
        seat.revoke_since = now if seat.revoke_since is None else seat.revoke_since

    def _ended(self, event: Any, now: float) -> None:
        seat = self.seats.pop(Key(event.group, event.member), None)
        demand(seat is not None, f"{event}: nobody is this member")
        assert seat is not None
        self.active[event.group] = now
        if event.code != "fenced":
            demand(event.code in seat.overdue(now), f"{event}: was not overdue")

    def _forgotten(self, event: Any, now: float) -> None:
        demand(not self.of(event.group), f"{event}: has members")
        is_old = now >= self.active[event.group] + self.retention_s
        demand(is_old or event.group in self.forgettable, f"{event}: nobody expects that")
        self.committed.pop(event.group, None)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def refusal(self, seat: Seat | None, generation: int | None, newest: int) -> str:
        """The code with which whatever a member says in this generation is refused; "" if it is heard."""
        if seat is None:
            return "unknown_member"
        return "" if generation is None or seat.shown <= generation <= newest else "fenced"

    def commit_refusal(
        self, group: str, member: str | None, generation: int | None, partitions: list[Partition], newest: int
    ) -> str:
        """The code with which a commit is refused; "" if it is allowed."""
        seat = self.seats.get(Key(group, member or ""))
        if member is None or (member == "-" and seat is None):
            is_old = generation not in (None, 0, newest)  # 0: of who never was a member
            refused = "unknown_member" if self.of(group) else "fenced" if is_old else ""
        else:
            refused = self.refusal(seat, generation, newest)
        if refused:
            return refused
        for partition in partitions:
            if not self.exists(partition):
                return "unknown_partition"
            if seat is not None:
                since = seat.reads.get(partition)
                if since is None or (newest if generation is None else generation) < since:
                    return "fenced"
        return ""

    def check_time(self, groups: Iterable[str], now: float) -> None:
        """After a tick nobody is there who is overdue, and no group that is to be forgotten."""
        for group in groups:
            is_old = now >= self.active[group] + self.retention_s
            demand(bool(self.of(group)) or not is_old, f"{group} is remembered at {now}")
        for key, seat in self.seats.items():
            demand(not seat.overdue(now), f"{key} is there at {now}, although {seat.overdue(now)}")

    def check_stable(self, group: str, is_level: bool) -> None:
        """A stable group reads every partition that it subscribes to, once, and has answered. `is_level`: evenly."""
        seats = self.of(group)
        topics = {topic for seat in seats.values() for topic in seat.topics}
        wanted = {(topic, number) for topic in topics for number in range(self.partitions_of.get(topic, 0))}
        reads = [partition for seat in seats.values() for partition in seat.reads]
        demand(len(reads) == len(set(reads)), f"{group}: read twice: {reads}")
        demand(set(reads) == wanted, f"{group}: reads {sorted(reads)}, and not {sorted(wanted)}")
        demand(not any(seat.asked for seat in seats.values()), f"{group}: stable, and something is asked for")
        newest = self.newest.get(group)
        demand(
            all(seat.shown >= seat.changed for seat in seats.values()), f"{group}: stable, and not all know {newest}"
        )
        loads = [len(seat.reads) for seat in seats.values()]
        if is_level and len({frozenset(seat.topics) for seat in seats.values()}) == 1:
            demand(max(loads) - min(loads) <= 1, f"{group}: uneven: {loads}")
