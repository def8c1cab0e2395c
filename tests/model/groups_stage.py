"""A coordinator with a clock that the test moves, members that answer when they are told to, and the ghost beside it."""

from collections.abc import Callable
from typing import Any

from groups_code import Code
from groups_ghost import Ghost, Key, Partition, Seat, demand

Call = Callable[[], object]


class Stage:
    """Calls are those of the coordinator; each is heard by the ghost too. A refused call returns its code."""

    def __init__(self, code: Code, life: int = 0, **limits: Any) -> None:
        self.code, self.ghost = code, Ghost()
        self.limits = code.protocol.GroupLimits(**limits)
        self.ghost.retention_s = self.limits.retention_s
        self.now = 1000.0
        self.due = float("inf")
        self.begin(life)

    def begin(self, life: int) -> None:
        """A new life of the gateway: members and assignments are gone, what was committed is not."""
        self.coordinator = self.code.coordinator.Coordinator(self.limits, f"{life}.", life)
        self.ghost.seats.clear()
        for group, generation in list(self.ghost.committed.items()):
            self.restore(group, generation)
        self.coordinator.topics_changed(self.ghost.partitions_of, self.now)

    def restore(self, group: str, generation: int, idle_s: float = 0.0, wait_s: float = 0.0) -> None:
        self.coordinator.restore(group, generation, self.now, idle_s, wait_s)
        self.ghost.active[group] = self.now - idle_s
        self.ghost.committed[group] = generation

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, call: Call) -> str:
        """Carry out one call, and hear what it caused. Returns the code of its refusal, which must leave no trace."""
        before = [self.coordinator.describe(group) for group in self.coordinator.groups()]
        try:
            call()
        except self.code.coordinator.RequestRefused as refused:
            after = [self.coordinator.describe(group) for group in self.coordinator.groups()]
            demand(before == after, f"refused with {refused.code}, and yet changed")
            demand(not self.coordinator.take_events(), f"refused with {refused.code}, and yet an event")
            return str(refused.code)
        return ""

    def listen(self) -> list[Any]:
        """Hear what was caused, and return it."""
        events: list[Any] = self.coordinator.take_events()
        for event in events:
            self.ghost.hear(event, self.now)
        return events

    def topics(self, again: tuple[str, ...] = (), **partitions_of: int) -> None:
        self.ghost.topics_changed(partitions_of, set(again))
        self.coordinator.topics_changed(partitions_of, self.now, again)
        self.listen()

    def join(
        self,
        *topics: str,
        group: str = "g",
        member: str | None = None,
        resume: Any = None,
        **options: Any,
    ) -> str:
        """Returns the id of the member, or `!` and the code of the refusal."""
        resume = resume or self.code.protocol.Resume()
        asked = self.code.protocol.MemberOptions(topics or ("t",), **options)
        client = self.code.protocol.Client("py", "10.0.0.1")
        ids: list[str] = []
        refused = self.call(lambda: ids.append(self.coordinator.join(group, member, client, asked, self.now, resume)))
        if refused:
            return f"!{refused}"
        key = Key(group, ids[0])
        self.ghost.active[group] = self.now
        seat = self.ghost.seats.get(key)
        if seat is None:
            self.ghost.seats[key] = Seat(asked, self.generation(group), self.now)
        else:
            kept = seat.topics if asked.keeps_topics else set()
            seat.options, seat.topics = asked, {*asked.topics, *kept}
            seat.beaten = seat.polled = self.now
            if resume.owned is not None:
                seat.stop([p for p in seat.reads if p not in resume.owned])
        self.listen()
        return ids[0]

    def leave(self, member: str, group: str = "g") -> str:
        if self.ghost.seats.pop(Key(group, member), None):
            self.ghost.active[group] = self.now
        refused = self.call(lambda: self.coordinator.leave(group, member, self.now))
        self.listen()
        return refused

    def beat(self, member: str, generation: int | None = None, polled: bool = False, group: str = "g") -> str:
        return self._say(group, member, generation, lambda seat: self._beat(seat, polled), "beat", polled)

    def sync(self, member: str, generation: int | None = None, group: str = "g") -> str:
        return self._say(group, member, generation, lambda seat: None, "sync")

    def revoked(self, member: str, generation: int | None = None, group: str = "g") -> str:
        newest = self.generation(group)
        asked_until = newest if generation is None else generation

        def stop(seat: Seat) -> None:
            seat.stop([p for p, asked in seat.asked.items() if asked <= asked_until])
            if seat.asked:
                seat.revoke_since = self.now

        return self._say(group, member, generation, stop, "revoked")

    def _beat(self, seat: Seat, polled: bool) -> None:
        seat.beaten = self.now
        if polled:
            seat.polled = self.now

    def _say(
        self, group: str, member: str, generation: int | None, note: Callable[[Seat], None], name: str, *more: Any
    ) -> str:
        seat, newest = self.ghost.seats.get(Key(group, member)), self.generation(group)
        expected = self.ghost.refusal(seat, generation, newest)
        method = getattr(self.coordinator, name)
        refused = self.call(lambda: method(group, member, generation, self.now, *more))
        demand(refused == expected, f"{name} of {member} in {generation}: {refused!r}, and not {expected!r}")
        if seat is not None and not refused:
            note(seat)
            if name != "beat":
                seat.answer(newest if generation is None else generation, newest, self.now)
        self.listen()
        return refused

    def commit(
        self, member: str | None, *partitions: Partition, generation: int | None = None, group: str = "g"
    ) -> str:
        """Ask for a commit, and carry it out if it is allowed."""
        expected = self.ghost.commit_refusal(group, member, generation, list(partitions), self.generation(group))
        refused = self.call(lambda: self.coordinator.check_commit(group, member, generation, partitions, self.now))
        demand(refused == expected, f"commit of {partitions} by {member}: {refused!r}, and not {expected!r}")
        if not refused:
            self.ghost.active[group] = self.now
            seat = self.ghost.seats.get(Key(group, member or ""))
            if seat is not None:
                seat.beaten = self.now
            self.coordinator.committed(group, self.now)
            spoken = self.generation(group) if generation is None else generation
            self.ghost.committed[group] = max(self.ghost.committed.get(group, 0), spoken)
        self.listen()
        return refused

    def restart(self, life: int) -> None:
        """The gateway is killed and starts again."""
        self.begin(life)
        self.listen()

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> list[Any]:
        """Do what is due now. Returns what was caused."""
        events: list[Any] = []
        self.due = self.now
        while self.due <= self.now:
            self.due = self.coordinator.tick(self.now)
            events += self.listen()
        self.ghost.check_time(self.coordinator.groups(), self.now)
        self.check()
        return events

    def forward(self, seconds: float) -> list[Any]:
        """Let time go by, with a tick at each moment that a tick named; just before it nothing happens."""
        target = self.now + seconds
        events = self.tick()
        while self.due <= target:
            demand(self.due > self.now, f"due at {self.due}, and it is {self.now}: it would never end")
            early = self.due - 0.000_1
            if early > self.now:
                self.coordinator.tick(early)
                demand(not self.coordinator.take_events(), f"something happens before {self.due}")
            self.now = self.due
            events += self.tick()
        self.now = target
        return events + self.tick()

    def settle(self, group: str = "g") -> None:
        """Everybody answers all that is asked, until the group is stable: soon."""
        for _ in range(6):
            for member in self.ghost.of(group):
                self.revoked(member, group=group)
                self.beat(member, polled=True, group=group)
            if not self.ghost.of(group) or self.state(group) == "stable":
                break
            self.forward(0.02)
        demand(self.state(group) in ("stable", "empty", "dead"), f"{group} is still {self.state(group)}")
        self.check()

    def stay(self, seconds: float, *members: str, group: str = "g") -> None:
        """Let time go by while these members beat and poll."""
        end = self.now + seconds
        while self.now < end:
            for member in members:
                self.beat(member, polled=True, group=group)
            self.forward(min(3.0, end - self.now))

    # --- views --------------------------------------------------------------------------------------------------------

    def state(self, group: str = "g") -> str:
        return str(self.coordinator.state(group).value)

    def protocol(self, group: str = "g") -> str:
        return str(self.coordinator.describe(group).protocol)

    def generation(self, group: str = "g") -> int:
        view = self.coordinator.describe(group)
        return view.generation if view else 0

    def reads(self, member: str, group: str = "g") -> list[Partition]:
        """What the member reads as the coordinator has it."""
        return [tuple(partition) for partition in self.coordinator.assignment(group, member).partitions]

    def check(self) -> None:
        """What must hold at every moment."""
        for group in self.coordinator.groups():
            view = self.coordinator.describe(group)
            seats = self.ghost.of(group)
            demand({row.id for row in view.members} == set(seats), f"{view}: members are {sorted(seats)}")
            demand(bool(seats) == (view.state.value not in ("empty", "dead")), f"{view}: {len(seats)} members")
            for row in view.members:
                seat = seats[row.id]
                demand(set(row.partitions) == seat.reads.keys() - seat.asked.keys(), f"{row}: reads {seat.reads}")
                demand(set(row.revoking) == seat.asked.keys(), f"{row}: was asked for {seat.asked}")
            if view.state.value == "stable":
                self.ghost.check_stable(group, is_level=view.protocol != "range")


Story = Callable[[Stage], None]


def bounded(**limits: float) -> Callable[[Story], Story]:
    """A story with these bounds instead of the usual ones."""

    def note(story: Story) -> Story:
        story.limits = limits  # type: ignore[attr-defined]
        return story

    return note


def tell(story: Story, code: Code) -> None:
    """Tell a story; what must hold at every moment is looked at again at its end. Raises Broken."""
    stage = Stage(code, **getattr(story, "limits", {}))
    stage.topics(t=4, u=2)
    story(stage)
    stage.tick()
    stage.check()
