"""Subscribe: a member of a consumer group, on one stream, and its fetches.

Pull        Nothing is sent that was not asked for: each fetch is answered by one batch of one partition. The partitions
            take turns.
Again       What was given back comes before new messages, one a batch (kmq/gateway/groups/redelivery.py). A fetch that
            waits, or follows an empty answer, says that the client has come back from all it was given.
Order       What the coordinator says is passed on in order: `revoke` before the `assigned` of the same generation.
            Requests before `revoked` are served before it counts, so a commit in front of it is always allowed.
            Fetches are answered in order. A response is written whole before the next one.
Invariant   A partition is read from where its former owner has committed: it is opened when the assignment is passed
            on, and the former owner has given it up before. After `revoke` no batch of that partition is sent. After
            `sought` none from before it is sent. Both put another cursor, or none, in the place of the cursor that is
            being read.
Silence     A stream that breaks does not end the member: whoever joins with its id within the session timeout goes on
            with its partitions. Only requests are signs of life, not the connection: a program that is stopped loses
            its partitions after its session timeout, and its stream ends. `leave` ends the member at once.
Memory      One event for each kind that follows another, so at most a few while the client does not read; one request
            of at most _MOST_REQUEST bytes; at most _MOST_FETCHES fetches that wait. One batch is read at a time, and
            released when it is written. A read reserves COPIES of what it may return, or of the longest message, before
            it begins. After that only what was found counts, until the client has taken it (core/answers.py).
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from kmq.config.values import KIB
from kmq.gateway.core.answers import COPIES
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Cursor, Fetching, Limit
from kmq.gateway.groups.events import Assigned, Ended, Event, Revoke
from kmq.gateway.groups.group import NEVER
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import Commit
from kmq.gateway.groups.redelivery import Reader, RedeliveredMessage, Redelivery, Turn
from kmq.gateway.groups.terms import Client, Resume, Terms
from kmq.gateway.grpc import values
from kmq.gateway.grpc.calls import Call, Calls
from kmq.gateway.grpc.schema import KMQ
from kmq.log.damage import DamageError
from kmq.message.message import Message
from kmq.wire.refusals import GONE, known
from kmq.wire.requests import Position, TopicPartition

# --- reading ---------------------------------------------------------------------------------------------------------

Shape = Callable[[list[Message]], tuple[Any, int]]  # messages → what is sent, and the bytes of their lines


class Reading:
    """The reads of all calls of kmq.v1, within the budget of all answers."""

    def __init__(self, fetching: Fetching, calls: Calls) -> None:
        self._fetching, self._longest, self._budget = fetching, calls.longest, fetching.answers

    async def read(self, call: Call, cursor: Cursor, limit: Limit, shape: Shape) -> tuple[int, Any]:
        """Read on from `cursor`. Returns how many messages there are, and what `shape` makes of them."""
        await self._budget.take(call, COPIES * max(self._longest, limit.nbytes))
        nbytes = 0
        try:
            count, (made, nbytes) = await self._fetching.read([cursor], limit, shape)
        finally:
            if nbytes:
                self._budget.settle(call, COPIES * nbytes)
            else:
                self._budget.release(call)
        return count, made

    def release(self, call: Call) -> None:
        """Note that the client has taken what was read for the call."""
        self._budget.release(call)


# --- fetches ---------------------------------------------------------------------------------------------------------

_MOST_FETCHES = 64
_LOOK_AGAIN_S = 0.5  # until partitions are looked at that had to wait
_MOST_WAIT_MS = 300_000
_Response, _Batch = KMQ.messages["SubscribeResponse"], KMQ.messages["Batch"]


class Out:
    """The responses of a stream, one after another."""

    def __init__(self, write: Callable[[Any], Awaitable[None]]) -> None:
        self._write = write
        self.turn = asyncio.Lock()

    async def say(self, request_id: int = 0, **response: Any) -> None:
        """Write a response, after the one that is being written."""
        async with self.turn:
            await self.write(request_id, **response)

    async def write(self, request_id: int, **response: Any) -> None:
        """Write a response. The caller has `turn`."""
        await self._write(_Response(request_id=request_id, **response))


class _Fetch(NamedTuple):
    request_id: int
    limit: Limit
    until: float
    places: Collection[TopicPartition]


class Deliveries:
    """The fetches of one subscription. `cursors`: the assigned partitions, in the order of their turns."""

    def __init__(self, core: Core, reading: Reading, call: Call, out: Out, reader: Reader | None) -> None:
        """`reader`: what the group says is to be read next; None: nothing comes again."""
        self._core, self._reading, self._call, self._out, self._reader = core, reading, call, out, reader
        self.cursors: dict[TopicPartition, Cursor] = {}
        self._waiting: deque[_Fetch | None] = deque()  # None: the last one is in front of it
        self._has_fetch, self._changed = asyncio.Event(), asyncio.Event()
        self._is_ending = False
        self._was_empty = True  # the last answer

    # --- the partitions ----------------------------------------------------------------------------------------------

    async def assign(self, places: Iterable[tuple[str, int]], committed: Mapping[tuple[str, int], int]) -> None:
        """Make these the partitions: those that stay go on, the others begin at their committed offsets.

        A cursor of a topic that was deleted does not stay: the topic that has its name now is another one.
        """
        known = dict(self.cursors)
        stay, opened = await self._core.fetching.run(self._open, [TopicPartition(*p) for p in places], known, committed)
        self.cursors = {place: cursor for place, cursor in self.cursors.items() if place in stay} | opened
        self._changed.set()

    def _open(
        self,
        places: Iterable[TopicPartition],
        known: Mapping[TopicPartition, Cursor],
        committed: Mapping[tuple[str, int], int],
    ) -> tuple[set[TopicPartition], dict[TopicPartition, Cursor]]:
        """Return the partitions that stay, and new cursors, in a thread.

        What is gone already is in neither: the coordinator will hear of it.
        """
        stay: set[TopicPartition] = set()
        opened: dict[TopicPartition, Cursor] = {}
        for place in places:
            if place in known and known[place].partition.is_current():
                stay.add(place)
                continue
            try:
                partition = self._core.partitions.open(*place)
                offset = partition.nearest(committed.get(place, 0))
            except DamageError:
                offset = committed.get(place, 0)  # the first fetch says what is damaged
            except RequestRefused as err:
                if err.code not in GONE:
                    raise
                continue
            opened[place] = Cursor(partition, offset)
        return stay, opened

    def revoke(self, places: Iterable[tuple[str, int]]) -> None:
        """Send nothing more of these partitions."""
        for place in places:
            self.cursors.pop(TopicPartition(*place), None)
        self._changed.set()

    async def seek(self, place: TopicPartition, position: Position) -> int:
        """Go on at that position. Returns its offset."""

        def located() -> Cursor:
            partition = self._core.partitions.open(*place)
            return Cursor(partition, partition.locate(position))

        self._check([place])
        cursor = await self._core.fetching.run(located)
        self._check([place])  # it may have been revoked meanwhile
        self.cursors[place] = cursor
        self._changed.set()
        return cursor.offset

    def _check(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            if place not in self.cursors:
                raise RequestRefused("unknown_partition", f"{place} is not assigned to this member")

    # --- fetches -----------------------------------------------------------------------------------------------------

    def ask(self, request_id: int, given: Any) -> None:
        """Let a FetchBatch wait for its turn. Raises RequestRefused."""
        limit, places = values.limit(given, _MOST_WAIT_MS), values.places(given.partitions)
        self._check(places)
        if len(self._waiting) >= _MOST_FETCHES:
            raise RequestRefused("too_many", f"{_MOST_FETCHES} fetches of this stream wait already")
        self._waiting.append(_Fetch(request_id, limit, time.monotonic() + limit.wait_s, {*places}))
        self._has_fetch.set()

    def finish(self, at_once: bool) -> None:
        """No fetch comes any more. `at_once`: those that wait are answered now, without messages."""
        self._is_ending |= at_once
        self._waiting.append(None)
        self._has_fetch.set()
        self._changed.set()

    async def serve(self) -> None:
        """Answer the fetches, until the last one is answered."""
        with self._reader.watch(self._changed) if self._reader else nullcontext():
            await self._serve()

    async def _serve(self) -> None:
        while True:
            await self._has_fetch.wait()
            while self._waiting:
                fetch = self._waiting[0]
                if fetch is None:
                    return
                try:
                    await self._answer(fetch)
                except RequestRefused as err:
                    await self._out.say(fetch.request_id, error=values.error(err))
                self._waiting.popleft()
            self._has_fetch.clear()

    async def _answer(self, fetch: _Fetch) -> None:
        while not self._is_ending:
            self._changed.clear()
            cursors = [cursor for place, cursor in self.cursors.items() if not fetch.places or place in fetch.places]
            if fetch.places and not cursors:
                break  # all of them were revoked
            turn = await self._turn(fetch, cursors)
            if turn.again and await self._deliver_again(fetch, turn.again[0]):
                return
            fresh = []
            for cursor in cursors:
                if (skips := turn.skips(_place(cursor))) is None or turn.again:
                    continue
                cursor.skips = skips
                fresh.append(cursor)
                if await self._deliver(fetch, cursor):
                    return
            if self._changed.is_set() or turn.again:
                continue  # what was read was not wanted any more
            if not await self._wait(fetch, cursors, fresh):
                break
        self._was_empty = True
        await self._out.say(fetch.request_id, batch=_Batch())

    async def _turn(self, fetch: _Fetch, cursors: Iterable[Cursor]) -> Turn:
        if self._reader is None or not self._reader.has_turns:
            return Turn([])
        positions: dict[tuple[str, int], int] = {_place(cursor): cursor.offset for cursor in cursors}
        is_idle = fetch.limit.wait_s > 0 or self._was_empty
        return await self._reader.turn(positions, Limit(1, fetch.limit.nbytes), is_idle)

    async def _wait(self, fetch: _Fetch, cursors: Sequence[Cursor], fresh: Sequence[Cursor]) -> bool:
        """Wait for news of those that are `fresh`, or until something is due. Return False if the time is up."""
        due_s = NEVER if len(fresh) == len(cursors) else _LOOK_AGAIN_S
        if self._reader is not None and self._reader.has_turns:
            due_s = min(due_s, self._reader.wait_s({_place(cursor): cursor.offset for cursor in cursors}))
        until = min(fetch.until, time.monotonic() + due_s)
        is_news = await self._core.fetching.wait(fresh, until, self._changed, lambda: False)
        return is_news or (until < fetch.until and not self._core.fetching.is_stopping)

    async def _deliver_again(self, fetch: _Fetch, again: RedeliveredMessage) -> bool:
        """Answer a fetch with a message that comes again. Return False if its partition was revoked meanwhile."""
        assert self._reader is not None
        place = TopicPartition(*again.place)
        cursor = self.cursors.get(place)
        async with self._out.turn:
            if cursor is None or not self._take_turn(place, cursor):
                self._reader.take_back([again])
                return False
            cursor.move(again.position)
            self._was_empty = False
            batch = _Batch(topic=place.topic, partition=place.partition, again=True)
            batch.next_offset, batch.end_offset = cursor.offset, max(cursor.end, cursor.offset)
            values.fill(batch.records, [again.message])
            batch.records[0].deliveries = again.deliveries
            await self._out.write(fetch.request_id, batch=batch)
        return True

    async def _deliver(self, fetch: _Fetch, cursor: Cursor) -> bool:
        """Answer a fetch with messages of this partition. Return False if there are none."""
        place = _place(cursor)
        if not cursor.has_news():
            return False

        def shape(found: list[Message]) -> tuple[Any, int]:
            batch = _Batch(topic=place.topic, partition=place.partition)
            batch.next_offset, batch.end_offset = cursor.offset, cursor.end
            return batch, values.fill(batch.records, found)

        try:
            count, batch = await self._reading.read(self._call, cursor, fetch.limit, shape)
        except RequestRefused:
            self._take_turn(place, cursor)
            raise
        try:
            if not count:
                return False
            async with self._out.turn:
                if not self._take_turn(place, cursor):
                    return False  # revoked or sought meanwhile, which has set _changed
                self._was_empty = False
                if self._reader is not None:
                    self._reader.read({place: cursor.offset})
                await self._out.write(fetch.request_id, batch=batch)
            return True
        finally:
            self._reading.release(self._call)

    def _take_turn(self, place: TopicPartition, cursor: Cursor) -> bool:
        """Let the other partitions go first at the next fetch. Return False if this cursor is not in force any more."""
        if self.cursors.get(place) is not cursor:
            return False
        self.cursors[place] = self.cursors.pop(place)
        return True


def _place(cursor: Cursor) -> TopicPartition:
    return TopicPartition(cursor.partition.topic, cursor.partition.number)


# --- subscription ----------------------------------------------------------------------------------------------------

_MOST_REQUEST = 64 * KIB
_Request = KMQ.request_of("Subscribe")
_TIMES = {"session_ms": "session_s", "rebalance_ms": "rebalance_s", "max_poll_ms": "max_poll_s"}


class Subscription:
    """One Subscribe. `write`: returns when the client has room for the response."""

    _reader: Reader | None  # both as soon as the member has joined
    _deliveries: Deliveries

    def __init__(
        self,
        core: Core,
        groups: Groups,
        redelivery: Redelivery | None,
        reading: Reading,
        call: Call,
        write: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._groups, self._call, self._redelivery = groups, call, redelivery
        self._core, self._reading, self._out = core, reading, Out(write)
        self._group = self._member = ""
        self._events: deque[Event] = deque()
        self._has_event, self._has_ended = asyncio.Event(), asyncio.Event()
        self._why_ended: RequestRefused | None = None
        self._has_left = False
        self._unanswered: deque[int] = deque()  # generations of `revoke` that the client has not answered
        self._told = 0  # generation of the last `assigned`

    def end(self, why: RequestRefused) -> None:
        """End the stream with this status."""
        self._why_ended = self._why_ended or why
        self._has_ended.set()

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Join, and serve the member until it leaves or is ended, or its stream ends."""
        first = await anext(requests, None)
        if first is None:
            raise RequestRefused("bad_request", "the stream ended before it began; the first request is join")
        await self._join(_parsed(first))
        served = asyncio.gather(self._deliveries.serve(), self._listen(requests))
        tasks: list[asyncio.Future[Any]] = [
            served,
            asyncio.ensure_future(self._follow()),
            asyncio.ensure_future(self._has_ended.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._why_ended is not None:
                raise self._why_ended
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._groups.stop_listening(self._group, self._member, self._hear)

    async def _join(self, request: Any) -> None:
        if request.WhichOneof("request") != "join":
            raise RequestRefused("bad_request", "the first request must be join")
        join = request.join
        if not join.topics:
            raise bad_field("join.topics", "must name a topic")
        times = {ours: getattr(join, name) / 1000 for name, ours in _TIMES.items() if getattr(join, name)}
        terms = Terms(tuple(sorted({*join.topics})), static_name=join.static_name or None)._replace(**times)
        if join.assignor:
            terms = terms._replace(assignor=join.assignor)
        resume = Resume(join.generation, values.places(join.owned) if join.generation else None)
        client = Client(join.client or join.member or "grpc", self._call.peer)
        self._group = join.group
        self._member = await self._groups.join(
            join.group, join.member or None, client, terms, self._hear, resume, is_anew=True
        )
        self._reader = Reader(self._redelivery, self._group, self._member) if self._redelivery else None
        self._deliveries = Deliveries(self._core, self._reading, self._call, self._out, self._reader)
        await self._out.say(request.request_id, joined={"member": self._member})

    # --- what the coordinator says -----------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        if isinstance(event, Ended):
            self.end(RequestRefused(event.code, f"{known(event.code).text}; join again"))
            return
        if self._events and isinstance(event, Assigned) and isinstance(self._events[-1], Assigned):
            self._events.pop()  # only the last one is in force
        self._events.append(event)
        self._has_event.set()

    async def _follow(self) -> None:
        """Pass on what the coordinator says."""
        while True:
            await self._has_event.wait()
            self._has_event.clear()
            while self._events and not self._has_left:
                event = self._events.popleft()
                if isinstance(event, Revoke):
                    await self._revoke(event)
                elif isinstance(event, Assigned):
                    await self._assign(event)

    async def _revoke(self, event: Revoke) -> None:
        self._deliveries.revoke(event.partitions)
        self._unanswered.append(event.generation)
        gone = {"generation": event.generation, "partitions": values.partitions(event.partitions)}
        await self._out.say(revoke=gone)

    async def _assign(self, event: Assigned) -> None:
        committed = {place: row.offset for place, row in self._groups.committed(self._group).items()}
        await self._deliveries.assign(event.partitions, committed)
        cursors = sorted(self._deliveries.cursors.items())
        rows = [
            {"topic": topic, "partition": number, "next_offset": cursor.offset} for (topic, number), cursor in cursors
        ]
        await self._out.say(assigned={"generation": event.generation, "partitions": rows})
        self._told = event.generation
        if not self._unanswered and not self._has_left:
            self._groups.sync(self._group, self._member, event.generation)

    # --- what the client says ----------------------------------------------------------------------------------------

    async def _listen(self, requests: AsyncIterator[bytes]) -> None:
        """Serve requests until the client leaves or has sent its last."""
        async for data in requests:
            request = _parsed(data)
            kind = request.WhichOneof("request")
            self._groups.beat(self._group, self._member, polled=kind == "fetch")
            if kind == "leave":
                self._has_left = True
                self._groups.leave(self._group, self._member)
                break
            try:
                await self._serve(kind, request)
            except RequestRefused as err:
                await self._out.say(request.request_id, error=values.error(err))
        self._deliveries.finish(at_once=self._has_left)

    async def _serve(self, kind: str | None, request: Any) -> None:
        if kind == "fetch":
            self._deliveries.ask(request.request_id, request.fetch)
        elif kind == "commit":
            await self._commit(request.commit)
            await self._out.say(request.request_id, committed={})
        elif kind == "nack":
            nack = request.nack
            place = TopicPartition(nack.topic, nack.partition)
            given = await self._required().nack(place, nack.offset, nack.reason, nack.delay_ms / 1000)
            await self._out.say(request.request_id, nacked={"deliveries": given.deliveries, "letter": given.letter})
        elif kind == "revoked":
            self._revoked()
        elif kind == "seek":
            place = TopicPartition(request.seek.topic, request.seek.partition)
            offset = await self._deliveries.seek(place, values.position(request.seek.to, "seek.to"))
            await self._out.say(request.request_id, sought={"next_offset": offset})
        elif kind != "heartbeat":
            text = "join comes once" if kind == "join" else "the request is empty, or of a newer kmq.proto"
            raise RequestRefused("bad_request", text)

    async def _commit(self, commit: Any) -> None:
        rows = {(row.topic, row.partition): Commit(row.next_offset, row.metadata) for row in commit.offsets}
        if not rows and not commit.again:
            raise bad_field("commit.offsets", "must name a partition")
        if rows:
            await self._groups.commit(self._group, self._member, rows)
        if commit.again:
            await self._required().done([((row.topic, row.partition), row.offset) for row in commit.again])

    def _required(self) -> Reader:
        assert self._reader is not None, "a gateway has one for each member"
        return self._reader

    def _revoked(self) -> None:
        if not self._unanswered:
            return
        generation = self._unanswered.popleft()
        self._groups.revoked(self._group, self._member, generation)
        # The assignment of this generation may not be written yet; then the one that was told is older, and fenced.
        if not self._unanswered and self._told > generation:
            self._groups.sync(self._group, self._member, self._told)


def _parsed(data: bytes) -> Any:
    if len(data) > _MOST_REQUEST:
        raise RequestRefused("too_large", f"a request of Subscribe is at most {_MOST_REQUEST} bytes")
    return values.parse(_Request, data)
