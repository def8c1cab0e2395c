"""What may happen to consumer groups, in any order: the machine that Hypothesis drives, with the ghost beside it."""

from collections.abc import Callable
from typing import Any

from groups_code import Code
from groups_stage import Stage
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

GROUPS = ("g", "h")
TOPICS = ("t", "u", "v")
ASSIGNORS = ("cooperative-sticky", "sticky", "range", "roundrobin")
RETENTION_S = 400.0
small = st.integers(0, 7)
group = st.sampled_from(["g", "g", "g", "h"])
topics = st.sampled_from([("t",), ("t", "u"), ("u",), ("t", "u", "v"), ("v",)])
deltas = st.sampled_from([None, None, 0, 0, -1, 1, -2])  # from the newest generation; None: the door vouches


def machine(code: Code) -> Callable[[], RuleBasedStateMachine]:
    """Return the machine that runs this code."""
    return type("Machine", (Machine,), {"code": code})


class Machine(RuleBasedStateMachine):
    """Rules take small numbers and pick the members that are there: a rule that finds nobody does nothing."""

    code: Code

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(self.code, retention_s=RETENTION_S)
        self.memories: list[tuple[str, str, int, list[Any], dict[str, Any]]] = []  # of members, of all lives
        self.lives = 0

    @initialize(first=st.sampled_from(ASSIGNORS), second=st.sampled_from(ASSIGNORS))
    def begin(self, first: str, second: str) -> None:
        self.assignors = {"g": first, "h": second}
        self.stage.topics(t=3, u=2)

    def pick(self, group: str, number: int) -> str | None:
        members = sorted(self.stage.ghost.of(group))
        return members[number % len(members)] if members else None

    def generation(self, group: str, delta: int | None) -> int | None:
        return None if delta is None else self.stage.generation(group) + delta

    # --- members ------------------------------------------------------------------------------------------------------

    @rule(
        group=group,
        topics=topics,
        session=st.sampled_from([6.0, 30.0]),
        rebalance=st.sampled_from([2.0, 20.0]),
        poll=st.sampled_from([8.0, 300.0]),
        static=st.sampled_from([None, None, None, None, "s1", "s2"]),
        also=st.sampled_from(ASSIGNORS),
        prefers=st.booleans(),
        then=st.sampled_from(["", "tick", "settle"]),
    )
    def join(
        self,
        group: str,
        topics: tuple[str, ...],
        session: float,
        rebalance: float,
        poll: float,
        static: str | None,
        also: str,
        prefers: bool,
        then: str,
    ) -> None:
        if len(self.stage.ghost.of(group)) < 5:
            options: dict[str, Any] = {
                "session_s": session,
                "rebalance_s": rebalance,
                "max_poll_s": poll,
                "static_name": static,
            }
            both = (also, self.assignors[group]) if prefers else (self.assignors[group], also)
            member = self.stage.join(*topics, group=group, assignors=both, **options)
            assert not member.startswith("!"), member
            if then == "tick":
                self.stage.forward(0.01)
            elif then == "settle":
                self.stage.settle(group)

    @rule(group=group, number=small, topics=topics, says=st.booleans(), keeps=st.booleans())
    def join_again(self, group: str, number: int, topics: tuple[str, ...], says: bool, keeps: bool) -> None:
        member = self.pick(group, number)
        if member is not None:
            seat = self.stage.ghost.of(group)[member]
            owned = sorted(seat.reads.keys() - seat.asked.keys())[number % 2 :] if says else None
            options = seat.options._replace(topics=topics, keeps_topics=keeps)._asdict()
            del options["topics"]
            again = self.stage.join(
                *topics, group=group, member=member, resume=self.code.protocol.Resume(owned=owned), **options
            )
            assert again == member

    @rule(group=group, number=small)
    def leave(self, group: str, number: int) -> None:
        member = self.pick(group, number)
        if member is not None and number < 3:
            assert self.stage.leave(member, group) == ""

    @rule(group=group, number=small, delta=deltas)
    def revoked(self, group: str, number: int, delta: int | None) -> None:
        member = self.pick(group, number)
        if member is not None:
            self.stage.revoked(member, self.generation(group, delta), group)

    @rule(group=group, number=small, delta=deltas)
    def sync(self, group: str, number: int, delta: int | None) -> None:
        member = self.pick(group, number)
        if member is not None:
            self.stage.sync(member, self.generation(group, delta), group)

    @rule(group=group, number=small, delta=deltas, polled=st.booleans())
    def beat(self, group: str, number: int, delta: int | None, polled: bool) -> None:
        member = self.pick(group, number)
        if member is not None:
            self.stage.beat(member, self.generation(group, delta), polled, group)

    @rule(
        group=group,
        number=st.integers(-1, 7),
        delta=deltas,
        what=st.sampled_from(["reads", "reads", "other", "any"]),
        topic=st.sampled_from(TOPICS),
        partition=st.integers(-1, 4),
    )
    def commit(self, group: str, number: int, delta: int | None, what: str, topic: str, partition: int) -> None:
        """By a member, or by nobody (-1): of what it reads, of what others read too, of anything."""
        member = self.pick(group, number) if number >= 0 else None
        seats = self.stage.ghost.of(group)
        partitions = sorted(seats[member].reads) if member is not None else []
        if what == "other":
            partitions += sorted({p for seat in seats.values() for p in seat.reads})[:1]
        elif what == "any":
            partitions.append((topic, partition))
        self.stage.commit(member, *partitions, generation=self.generation(group, delta), group=group)

    @rule(number=small, delta=deltas)
    def a_member_that_ended_still_speaks(self, number: int, delta: int | None) -> None:
        if self.memories:
            group, member, generation, reads, _ = self.memories[number % len(self.memories)]
            self.stage.commit(member, *reads, generation=generation, group=group)
            self.stage.beat(member, self.generation(group, delta), group=group)

    @rule(number=small)
    def a_member_comes_back(self, number: int) -> None:
        if self.memories:
            group, member, generation, reads, options = self.memories.pop(number % len(self.memories))
            resume = self.code.protocol.Resume(generation, reads)
            again = self.stage.join(
                *options["topics"], group=group, member=member, resume=resume, **_without(options, "topics")
            )
            assert again in (member, "!fenced"), again

    # --- the world ----------------------------------------------------------------------------------------------------

    @rule()
    def tick(self) -> None:
        self.stage.tick()

    @rule(
        seconds=st.sampled_from([0.001, 0.01, 0.5, 1.9, 5.0, 5.0, 7.0, 25.0, RETENTION_S + 1.0]),
        times=st.sampled_from([1, 1, 2, 3]),
        first=st.sampled_from(["", "beat", "poll", "settle", "settle"]),
    )
    def forward(self, seconds: float, times: int, first: str) -> None:
        """Let time go by, with signs of life of everybody in between, or without."""
        for _ in range(times):
            for key in list(self.stage.ghost.seats):
                if first in ("beat", "poll"):
                    self.stage.beat(key.member, polled=first == "poll", group=key.group)
            if first == "settle":
                for group in GROUPS:
                    self.stage.settle(group)
            self.stage.forward(seconds)

    @rule(group=group)
    def settle(self, group: str) -> None:
        self.stage.settle(group)

    @rule(topic=st.sampled_from(TOPICS), count=st.integers(0, 4), again=st.booleans())
    def change_topic(self, topic: str, count: int, again: bool) -> None:
        counts = {**self.stage.ghost.partitions_of, topic: count}
        self.stage.topics((topic,) if again else (), **{name: number for name, number in counts.items() if number})

    @rule(number=small)
    def restart(self, number: int) -> None:
        if number:
            return  # now and then
        for key, seat in self.stage.ghost.seats.items():
            options = seat.options._replace(topics=tuple(sorted(seat.topics)))._asdict()
            self.memories.append((*key, seat.told, sorted(seat.reads), options))
        del self.memories[:-8]
        self.lives += 1
        self.stage.restart(self.lives)

    @invariant()
    def everything_holds(self) -> None:
        self.stage.check()


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}
