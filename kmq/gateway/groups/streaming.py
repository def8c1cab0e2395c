"""Group members on a stream, as by lines and gRPC: their fetches, and the rebalances that are pushed to them.

    fetches = Fetches(reader, wire, …)                  the task that reads requests calls put | tried | finish; serve
                                                        beside
    rebalances = Rebalances(groups, reader, wire)       the coordinator calls on_event; forward_events beside;
                                                        revoked | leave
    await serve_until_one_ends(…)                       runs all of these

Pull        Only fetches are answered with messages: each fetch gets one batch of one partition. The partitions take
            turns. Fetches are answered in order, beside the stream's other requests. So a commit does not wait for the
            batch that was asked for before it. A request that must not pass a fetch awaits `tried`.
Again       A redelivered message is a batch of its own. A fetch that waits, or follows an empty answer, shows that the
            client is done with all it was given.
Doors       differ in what they send and what it may cost (Wire), and in what becomes of a fetch whose partition is
            revoked (`refuses_revoked`).
Leaving     A fetch that waits when its member leaves is answered at once and without messages, because messages taken
            then would be given to no other member. If the client has only ended its sending half, it is answered as
            always.
Invariant   `pass_turn` is called by the holder of the turn to write, so nothing of a partition is written after its
            revoke, or from before a seek. A revoke is passed on before the assignment of the same generation. Requests
            before the client's answer to a revoke are served before that answer counts, so a commit before it is
            allowed.
Memory      At most _MOST_FETCHES fetches that wait. One event for each kind that follows another, so at most a few
            while the client does not read.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.fetching import Cursor, Limit
from kmq.gateway.groups.group import NEVER
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.protocol import Assigned, Ended, Event, Revoke
from kmq.gateway.groups.reader import Reader
from kmq.gateway.groups.redelivery import DueMessage
from kmq.wire.requests import TopicPartition

# --- fetches ---------------------------------------------------------------------------------------------------------

_MOST_FETCHES = 64
_LOOK_AGAIN_S = 0.5  # until the next look at partitions that had to wait


class PendingFetch(NamedTuple):
    """A client's request. `places`: only these partitions; empty: all. `request_id`: of the door."""

    limit: Limit
    places: Collection[TopicPartition]
    until: float
    request_id: int = 0


class Wire(Protocol):
    """How a door writes to its client. Each method writes a whole answer before the next one writes."""

    turn: asyncio.Lock  # held while writing

    async def send_batch(self, fetch: PendingFetch, cursor: Cursor) -> bool:
        """Answer with new messages of a partition. Return False if there are none, or the cursor is not in force."""

    async def write_again(self, fetch: PendingFetch, cursor: Cursor, again: DueMessage) -> None:
        """Answer with a redelivered message. The caller has `turn`."""

    async def send_nothing(self, fetch: PendingFetch) -> None: ...

    async def refuse(self, fetch: PendingFetch, refused: RequestRefused) -> None: ...

    def note_waiting(self, fetches: int) -> None:
        """Note how many fetches wait."""

    async def send_revoke(self, revoke: Revoke) -> None: ...

    async def send_assigned(self, generation: int) -> None:
        """Tell the client its assignment: the reader's partitions."""


class Fetches:
    """The fetches of one stream, answered in order."""

    def __init__(self, reader: Reader, wire: Wire, stream: str, refuses_revoked: bool) -> None:
        """`stream`: what a refusal calls it. `refuses_revoked`: refuse a waiting fetch once a partition that it names
        was revoked. Otherwise it continues with its others, and is answered without messages if all were revoked."""
        self._reader, self._wire, self._stream, self._refuses_revoked = reader, wire, stream, refuses_revoked
        self._waiting: deque[PendingFetch | None] = deque()  # None: no fetch follows
        self._has_fetch, self._are_tried = asyncio.Event(), asyncio.Event()
        self._are_tried.set()
        self._held: frozenset[TopicPartition] = frozenset()  # partitions whose new records waited at the last turn
        self._was_empty = True  # the last answer
        self._is_ending = False

    def put(self, fetch: PendingFetch) -> None:
        """Let a fetch wait for its turn. Raises RequestRefused."""
        self._reader.select(fetch.places)
        if len(self._waiting) >= _MOST_FETCHES:
            raise RequestRefused("too_many", f"{_MOST_FETCHES} fetches of this {self._stream} wait already")
        if not self._waiting:
            self._are_tried.clear()
        self._waiting.append(fetch)
        self._wire.note_waiting(len(self._waiting))
        self._has_fetch.set()

    async def tried(self) -> None:
        """Wait until each fetch was answered, waits for messages, or queues after one that waits."""
        await self._are_tried.wait()

    def finish(self, at_once: bool = False) -> None:
        """Note that no more fetches follow. `at_once`: waiting fetches are answered now, without messages."""
        self._is_ending |= at_once
        self._waiting.append(None)
        self._has_fetch.set()
        if at_once:
            self._reader.changed.set()

    async def serve(self) -> None:
        """Answer waiting fetches, until the last one is answered."""
        try:
            with self._reader.watch(self._reader.changed):
                while True:
                    await self._has_fetch.wait()
                    self._has_fetch.clear()
                    while self._waiting:
                        fetch = self._waiting[0]
                        if fetch is None:
                            return
                        try:
                            await self._finish(fetch)
                        except RequestRefused as err:
                            await self._wire.refuse(fetch, err)
                        self._waiting.popleft()
                        self._wire.note_waiting(len(self._waiting))
                    self._are_tried.set()
        finally:
            self._reader.close()

    async def _finish(self, fetch: PendingFetch) -> None:
        """Answer a fetch as soon as there are messages, or its time is up."""
        while not self._is_ending:
            self._reader.changed.clear()
            if await self._answer(fetch):
                return
            if not await self._wait(fetch):
                break
        self._was_empty = True
        await self._wire.send_nothing(fetch)

    def _cursors(self, fetch: PendingFetch) -> list[Cursor]:
        if self._refuses_revoked:
            return self._reader.select(fetch.places)
        cursors = self._reader.cursors.items()
        return [cursor for place, cursor in cursors if not fetch.places or place in fetch.places]

    async def _answer(self, fetch: PendingFetch) -> bool:
        """Answer a fetch with messages of one partition. Return False if there are none.

        A fetch that waits may skip a quiet partition, because its next event wakes the fetch.
        """
        reader, cursors, is_patient = self._reader, self._cursors(fetch), fetch.limit.wait_s > 0
        turn = await reader.turn(cursors, Limit(1, fetch.limit.nbytes), is_patient or self._was_empty)
        self._held = frozenset()
        if len(turn.fresh) < len(cursors):
            self._held = frozenset({cursor.place for cursor in cursors} - {cursor.place for cursor in turn.fresh})
        for again in turn.again:
            return await self._answer_again(fetch, again)
        for cursor in turn.fresh:
            if is_patient and cursor.seen is not None and reader.waiter.is_quiet(cursor.partition.directory):
                continue
            try:
                if await self._wire.send_batch(fetch, cursor):
                    self._was_empty = False
                    return True
            except RequestRefused:
                reader.pass_turn(cursor)
                raise
        return False

    async def _answer_again(self, fetch: PendingFetch, again: DueMessage) -> bool:
        """Answer a fetch with a redelivered message. Return False if its partition was revoked meanwhile."""
        cursor = self._reader.cursors.get(again.place)
        async with self._wire.turn:
            if cursor is None or not self._reader.pass_turn(cursor):
                self._reader.requeue([again])
                return False
            if again.position != cursor.offset:
                cursor.move(again.position)
                self._reader.waiter.look_again(cursor.partition.directory)
            self._was_empty = False
            await self._wire.write_again(fetch, cursor, again)
        return True

    async def _wait(self, fetch: PendingFetch) -> bool:
        """Wait until there may be messages. Return False if the time is up, or no partition is left."""
        reader, left_s = self._reader, fetch.until - time.monotonic()
        cursors = self._cursors(fetch)
        if fetch.places and not cursors:
            return False
        if reader.changed.is_set():
            return True  # the batch was read for nothing: its cursor was replaced
        if left_s <= 0:
            return False
        self._are_tried.set()
        looks = {
            cursor.partition.directory: cursor.has_news
            for cursor in cursors
            if cursor.place not in self._held and not cursor.damage.is_resting
        }
        due_s = min(reader.wait_s(cursors), _LOOK_AGAIN_S if len(looks) < len(cursors) else NEVER)
        is_news = await reader.files.waking.next_news(reader.waiter, looks, min(left_s, due_s))
        return is_news or due_s < left_s


# --- rebalances ------------------------------------------------------------------------------------------------------


class Rebalances:
    """Forwards the coordinator's events to a member in order, and takes the client's answers."""

    def __init__(self, groups: Groups, reader: Reader, wire: Wire) -> None:
        self._groups, self._reader, self._wire = groups, reader, wire
        self._events: deque[Event] = deque()
        self._has_event = asyncio.Event()
        self._unanswered: deque[int] = deque()  # generations of the revokes that the client has not answered
        self._generation = 0  # generation of the last assignment
        self.has_left = False
        self.has_assigned = asyncio.Event()

    def on_event(self, event: Event) -> None:
        """Queue an event of the coordinator."""
        if self._events and isinstance(event, Assigned) and isinstance(self._events[-1], Assigned):
            self._events.pop()  # only the last one is in force
        self._events.append(event)
        self._has_event.set()

    async def forward_events(self) -> Ended:
        """Forward the coordinator's events, until one ends the member."""
        while True:
            await self._has_event.wait()
            self._has_event.clear()
            while self._events and not self.has_left:
                event = self._events.popleft()
                if isinstance(event, Ended):
                    return event
                if isinstance(event, Revoke):
                    self._reader.revoke(event.partitions)
                    self._unanswered.append(event.generation)
                    await self._wire.send_revoke(event)
                elif isinstance(event, Assigned):
                    await self._assign(event)

    async def _assign(self, event: Assigned) -> None:
        await self._reader.assign([(place, None) for place in event.partitions], may_be_gone=True)
        await self._wire.send_assigned(event.generation)
        self._generation = event.generation
        self.has_assigned.set()
        if not self._unanswered and not self.has_left:
            self._groups.sync(self._reader.group, self._reader.member, event.generation)

    def revoked(self) -> None:
        """Note that the client has given up what was revoked."""
        if not self._unanswered:
            return
        generation = self._unanswered.popleft()
        group, member = self._reader.group, self._reader.member
        self._groups.revoked(group, member, generation)
        # If the assignment of this generation is not written yet, the last one told is older, and would be fenced.
        if not self._unanswered and self._generation > generation:
            self._groups.sync(group, member, self._generation)

    def leave(self) -> None:
        """End the member: no more events are forwarded."""
        self.has_left = True
        self._groups.leave(self._reader.group, self._reader.member)
        self._reader.revoke([*self._reader.cursors])  # a turn that takes a message from now on gives it back


async def serve_until_one_ends(served: Iterable[Awaitable[Any]], *others: Awaitable[Any]) -> None:
    """Run all these until all of `served` have ended, or one of `others` has. An error of any ends them all."""
    beside, serving = ([asyncio.ensure_future(each) for each in some] for some in (others, served))
    all_served = asyncio.gather(*serving)
    try:
        await asyncio.wait((*beside, all_served), return_when=asyncio.FIRST_COMPLETED)
        for task in (*beside, all_served):
            if task.done():
                task.result()
    finally:
        for task in (*beside, *serving):
            task.cancel()
        await asyncio.gather(*beside, *serving, all_served, return_exceptions=True)
