"""GROUP, and the commits of ASSIGN <group>: a session whose partitions a consumer group decides on.

Order       What the coordinator says is passed on in order: `!revoke` before the `!assign` of the same generation.
            Requests before `!revoked` are served before it counts, so a commit in front of it is always allowed.
Invariant   A partition is read from where its former owner has committed: it is opened when the assignment is passed
            on, and the former owner has given it up before. Nothing of a partition is sent behind its `!revoke`.
Silence     A connection that breaks does not end the member: whoever comes back under its name within the session
            timeout goes on with its partitions. `!leave` ends it at once.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.events import Assigned, Ended, Event, Partitions, Revoke
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import Commit
from kmq.gateway.groups.redelivery import Reader, Redelivery
from kmq.gateway.groups.terms import Client, Terms
from kmq.gateway.lines.connection import Connection
from kmq.gateway.lines.service import Service
from kmq.gateway.lines.session import AT_ONCE, Cursor, Session
from kmq.wire import replies, requests
from kmq.wire.refusals import known
from kmq.wire.requests import Position, TopicPartition


class GroupCommits:
    """The committed offsets of one group. `member` None: of a client that is none of its members."""

    def __init__(self, groups: Groups, group: str, member: str | None = None) -> None:
        self._groups, self._group, self.member = groups, group, member

    def committed(self, places: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        found = self._groups.committed(self._group)
        return {place: found[place].offset for place in places if place in found}

    async def commit(self, offsets: Sequence[tuple[TopicPartition, int]]) -> None:
        await self._groups.commit(self._group, self.member, {place: Commit(offset) for place, offset in offsets})


class MemberSession(Session):
    """A member of a group."""

    def __init__(
        self,
        service: Service,
        connection: Connection,
        groups: Groups,
        asked: requests.Group,
        redelivery: Redelivery | None = None,
    ) -> None:
        self._commits = GroupCommits(groups, asked.group, asked.member)
        reader = Reader(redelivery, asked.group, asked.member) if redelivery else None
        super().__init__(service, connection, self._commits, reader)
        self._groups, self._asked, self._member = groups, asked, asked.member
        self._events: deque[Event] = deque()
        self._has_event = asyncio.Event()
        self._unanswered: deque[int] = deque()  # generations of the `!revoke` that the client has not answered
        self._told = 0  # generation of the last `!assign`
        self._is_assigned = asyncio.Event()

    async def run(self) -> None:
        """Join, and serve the member until it leaves, is ended, or its connection ends."""
        asked = self._asked
        terms = Terms(asked.topics, asked.assignor, asked.session_s)
        client = Client(asked.member, self.connection.peer)
        try:
            await self._groups.join(asked.group, asked.member, client, terms, self._hear, is_anew=True)
            await super().run()
        finally:
            self._groups.stop_listening(asked.group, self._member, self._hear)

    # --- what the coordinator says -----------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        self._events.append(event)
        self._has_event.set()

    async def serve_beside(self) -> None:
        while True:
            await self._has_event.wait()
            self._has_event.clear()
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Ended):
                    raise RequestRefused(event.code, f"{known(event.code).text}; say GROUP again")
                if isinstance(event, Revoke):
                    await self._revoke(event)
                elif isinstance(event, Assigned):
                    await self._assign(event)

    async def _revoke(self, event: Revoke) -> None:
        for place in event.partitions:
            self.cursors.pop(TopicPartition(*place), None)
        self._changed.set()
        self._unanswered.append(event.generation)
        await self.say(replies.Revoke(tuple(TopicPartition(*place) for place in event.partitions)).encode())

    async def _assign(self, event: Assigned) -> None:
        cursors = await self._cursors(event.partitions)
        await self.assign(event.generation, cursors)
        self._told = event.generation
        self._is_assigned.set()
        if not self._unanswered:
            self._groups.sync(self._asked.group, self._member, event.generation)

    async def _cursors(self, partitions: Partitions) -> list[Cursor]:
        """Return the cursors of what is assigned: those that stay as they are, the others at the committed offsets.

        A cursor of a topic that was deleted does not stay: the topic that has its name now is another one.
        """
        places = [TopicPartition(*place) for place in partitions]
        known = [self.cursors[place] for place in places if place in self.cursors]
        kept = await self.service.run(lambda: {each.place: each for each in known if each.partition.is_current()})
        missing = [place for place in places if place not in kept]
        for at in range(0, len(missing), AT_ONCE):
            if at:
                self.beat(polled=False)  # the client waits for the gateway meanwhile, which may take seconds
            some: list[tuple[TopicPartition, Position | None]] = [(place, None) for place in missing[at : at + AT_ONCE]]
            kept |= {cursor.place: cursor for cursor in await self.open(some, may_be_gone=True)}
        return [kept[place] for place in places if place in kept]  # the coordinator will hear of what is gone

    # --- what the client says ----------------------------------------------------------------------------------------

    async def serve_lines(self) -> None:
        await self._is_assigned.wait()
        await super().serve_lines()

    def beat(self, polled: bool) -> None:
        self._groups.beat(self._asked.group, self._member, polled)

    def revoked(self) -> None:
        if not self._unanswered:
            return
        generation = self._unanswered.popleft()
        self._groups.revoked(self._asked.group, self._member, generation)
        # The assignment of this generation may not be written yet; then the one that was told is older, and fenced.
        if not self._unanswered and self._told > generation:
            self._groups.sync(self._asked.group, self._member, self._told)

    def leave(self) -> None:
        self._groups.leave(self._asked.group, self._member)
