"""A session: the partitions that a client reads, its requests for batches, offsets and commits, and its group.

Pull        Nothing is sent that was not asked for: each `!fetch` is answered by one `!batch` of one partition. The
            partitions take turns.
Order       Requests are answered in order, except that a fetch that waits for records stops nobody: later requests are
            answered before it, and later fetches after it. A line or a batch is written whole before the next one.
            What the coordinator says is passed on in order: `!revoke` before the `!assign` of the same generation.
            Requests before `!revoked` are served before it counts, so a commit in front of it is always allowed.
Again       What was given back comes before new records, one message a batch (kmq/gateway/groups/redelivery.py). A
            fetch that waits, or that follows an empty answer, says that the client has come back from all it was given.
Invariant   After `!revoke` no batch of that partition is sent. After `!seek` none from before it is sent.
            A member reads a partition from where its former owner has committed: it is opened when the assignment is
            passed on, and the former owner has given it up before.
Silence     A connection that breaks does not end the member: whoever comes back under its name within the session
            timeout goes on with its partitions. `!leave` ends it at once.
Damage      answers one fetch, and its partition rests (kmq/gateway/core/fetching.py); after `!seek` it is said again.
Memory      At most _MOST_FETCHES fetches wait; a batch is bytes of a file (connection.py).
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.fetching import Damage, Limit, Waiter
from kmq.gateway.core.partitions import END, Partition, Signature, moment
from kmq.gateway.groups import events
from kmq.gateway.groups.events import Ended, Event, Partitions, Revoke
from kmq.gateway.groups.group import NEVER
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import Commit
from kmq.gateway.groups.redelivery import Reader, RedeliveredMessage, Redelivery, Turn
from kmq.gateway.groups.terms import Client, Terms
from kmq.gateway.lines.connection import Connection
from kmq.gateway.lines.service import Service
from kmq.log.damage import DamageError
from kmq.wire import replies, requests
from kmq.wire.refusals import GONE, known
from kmq.wire.replies import (
    NO_RECORDS,
    Assigned,
    Batch,
    Committed,
    Failed,
    Nacked,
    OffsetsReply,
    PartitionOffsets,
    Sought,
)
from kmq.wire.requests import BadLine, Position, TopicPartition

AT_ONCE = 500  # partitions opened in one turn of a thread, which others wait for: some hundred milliseconds
_MOST_FETCHES = 64
_LOOK_AGAIN_S = 0.5  # until partitions are looked at that had to wait


def _no_group() -> RequestRefused:
    return RequestRefused("bad_request", "this connection names no group; say ASSIGN <group> … or GROUP <group> …")


class Commits:
    """The committed offsets of the group that a session names, if any. `member` None: the client is no member of it."""

    def __init__(self, groups: Groups, group: str | None, member: str | None = None) -> None:
        self._groups, self._group, self._member = groups, group, member

    def committed(self, places: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the next offsets that are committed, of those of `places` that have one."""
        found = self._groups.committed(self._group) if self._group else {}
        return {place: found[place].offset for place in places if place in found}

    async def commit(self, offsets: Sequence[tuple[TopicPartition, int]]) -> None:
        """Return when these next offsets are durable. Raises RequestRefused."""
        if not self._group:
            raise _no_group()
        await self._groups.commit(self._group, self._member, {place: Commit(offset) for place, offset in offsets})


class Cursor:
    """Where one partition is read next. `version` changes with each seek."""

    def __init__(self, partition: Partition, offset: int) -> None:
        self.partition, self.offset, self.version = partition, offset, 0
        self.place = TopicPartition(partition.topic, partition.number)
        self.start: Position | None = None  # where to begin, if damage has hidden it until now
        self.seen: Signature | None = None  # when a read found nothing
        self.damage = Damage()

    def has_news(self) -> bool:
        return not self.damage.is_resting and self.partition.signature() != self.seen

    def move(self, offset: int) -> None:
        self.offset, self.start, self.seen, self.version = offset, None, None, self.version + 1
        self.damage = Damage()


class Session:
    """The partitions and requests of one connection. Subclasses say what a group does."""

    def __init__(
        self, service: Service, connection: Connection, commits: Commits, reader: Reader | None = None
    ) -> None:
        """`reader`: what the group says is to be read next; None without a group."""
        self.service, self.connection, self.commits, self.reader = service, connection, commits, reader
        self.cursors: dict[TopicPartition, Cursor] = {}  # in the order of their turns
        self._waiting: deque[tuple[requests.Fetch, float]] = deque()  # fetches, and until when they wait
        self._has_fetch, self._changed = asyncio.Event(), asyncio.Event()
        self._waiter = Waiter(self._changed)
        self._sending = asyncio.Lock()
        self._held: frozenset[TopicPartition] = frozenset()  # partitions whose new records waited at the last turn
        self._was_empty = True  # the last answer to a fetch

    # --- the partitions ----------------------------------------------------------------------------------------------

    async def open(
        self, places: Sequence[tuple[TopicPartition, Position | None]], may_be_gone: bool = False
    ) -> list[Cursor]:
        """Return cursors: at the position, else at the committed offset, else at the first record.

        `may_be_gone`: leave out partitions that do not exist.
        """
        committed = self.commits.committed([place for place, _ in places])

        def opened() -> list[Cursor]:
            found = []
            for place, position in places:
                try:
                    partition = self.service.partitions.open(*place)
                except RequestRefused as err:
                    if may_be_gone and err.code in GONE:
                        continue
                    raise
                cursor = Cursor(partition, committed.get(place, 0))
                try:
                    cursor.offset = partition.nearest(cursor.offset) if position is None else partition.locate(position)
                except DamageError:  # the first fetch says what is damaged
                    cursor.start = None if position is None else moment(position)
                    if position is not None and position.kind == "offset":
                        cursor.offset = position.value
                found.append(cursor)
            return found

        return await self.service.run(opened)

    async def open_all(self, places: Sequence[tuple[TopicPartition, Position | None]]) -> list[Cursor]:
        """Return the cursors of any number of partitions, as `open`. Others have their turn meanwhile."""
        parts = [places[at : at + AT_ONCE] for at in range(0, len(places), AT_ONCE)]
        return [cursor for part in parts for cursor in await self.open(part)]

    async def assign(self, generation: int, cursors: Iterable[Cursor]) -> None:
        """Make these the session's partitions, and tell the client. Cursors that stay are given again."""
        self.cursors = {cursor.place: cursor for cursor in cursors}
        for cursor in self.cursors.values():
            self._waiter.look_again(cursor.partition.directory)
        self._changed.set()
        rows = tuple((place, cursor.offset) for place, cursor in sorted(self.cursors.items()))
        await self.say(Assigned(generation, rows).encode())

    async def say(self, line: bytes) -> None:
        """Write a line, after the line or batch that is being written."""
        async with self._sending:
            await self.connection.write(line)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve requests until the client leaves or has gone, and everything it asked for was answered."""
        served = asyncio.gather(self._serve_fetches(), self.serve_lines())
        beside = asyncio.create_task(self.serve_beside())
        with self.reader.watch(self._changed) if self.reader else nullcontext():
            try:
                await asyncio.wait((served, beside), return_when=asyncio.FIRST_COMPLETED)
                for ended in (beside, served):
                    if ended.done():
                        ended.result()
            finally:
                served.cancel()
                beside.cancel()
                await asyncio.gather(served, beside, return_exceptions=True)
                self.service.waking.forget(self._waiter)
                if self.reader:
                    self.reader.close()

    async def serve_beside(self) -> None:
        """Do what goes on beside requests; it ends with them, and an error ends them."""
        await asyncio.Event().wait()

    async def serve_lines(self) -> None:
        """Serve requests until the client has sent its last."""
        while (line := await self.connection.read_line()) is not None:
            self.beat(line.startswith(b"!fetch"))
            try:
                request = requests.request(line)
            except BadLine as err:
                name = line.partition(b" ")[0].strip().decode("ascii", "replace").removeprefix("!")
                if name not in requests.REQUESTS:
                    raise
                await self.say(Failed(name, "bad_request", str(err)).encode())
                continue
            if request == requests.LEAVE:
                self.leave()
                break
            await self._serve(request)
        self._waiting.append((_LAST, 0.0))
        self._has_fetch.set()

    async def _serve(self, request: requests.Request) -> None:
        name = type(request).__name__.lower()
        try:
            if isinstance(request, requests.Fetch):
                await self._begin_fetch(request)
            elif isinstance(request, requests.Seek):
                await self._seek(request)
            elif isinstance(request, requests.Offsets):
                await self._tell_offsets(request)
            elif isinstance(request, requests.Commit):
                await self._commit(request)
            elif isinstance(request, requests.Nack):
                await self._nack(request)
            elif request == requests.REVOKED:
                self.revoked()
        except RequestRefused as err:
            if name not in requests.REQUESTS:
                raise  # nothing answers `!revoked`, so no `!err <request>` does: it ends the connection
            await self.say(Failed(name, err.code, str(err)).encode())
        except DamageError as err:
            of = f"{request.place}: " if isinstance(request, requests.Seek) else ""
            await self.say(Failed(name, "damaged", f"{of}{err}").encode())

    def beat(self, polled: bool) -> None:
        """Note a sign of life; `polled`: the client asks for records."""

    def leave(self) -> None:
        """Leave the group."""

    def revoked(self) -> None:
        """Note that the client has given up what it was asked to."""

    def _chosen(self, places: Sequence[TopicPartition]) -> list[Cursor]:
        """Return the cursors of these partitions, or all, in the order of their turns."""
        for place in places:
            if place not in self.cursors:
                raise RequestRefused("unknown_partition", f"{place} is not assigned to this connection")
        wanted = set(places)
        return [cursor for place, cursor in self.cursors.items() if not wanted or place in wanted]

    async def _seek(self, request: requests.Seek) -> None:
        (cursor,) = self._chosen([request.place])
        cursor.move(await self.service.run(cursor.partition.locate, request.position))
        self._waiter.look_again(cursor.partition.directory)
        self._changed.set()
        await self.say(Sought(cursor.place, cursor.offset).encode())

    async def _tell_offsets(self, request: requests.Offsets) -> None:
        cursors = self._chosen(request.partitions)
        committed = self.commits.committed([cursor.place for cursor in cursors])

        damage: DamageError | None = None

        def rows() -> list[PartitionOffsets]:
            nonlocal damage
            found = []
            for cursor in cursors:
                place, partition = cursor.place, cursor.partition
                try:
                    start, end = partition.start(), partition.end()
                    found.append(PartitionOffsets(place, start, end, cursor.offset, committed.get(place)))
                except DamageError as err:
                    damage = err
            return found

        answer = OffsetsReply(tuple(await self.service.run(rows)))
        if damage is not None:  # its partition is left out; who asks for it alone hears of it
            self.service.damaged(damage)
            if len(cursors) == 1:
                raise RequestRefused("damaged", f"{cursors[0].place}: {damage}")
        await self.say(answer.encode())

    async def _commit(self, request: requests.Commit) -> None:
        if not request.is_again:
            await self.commits.commit(request.offsets)
        elif self.reader is None:
            raise _no_group()
        else:
            await self.reader.done(request.offsets)
        await self.say(Committed(*request).encode())

    async def _nack(self, request: requests.Nack) -> None:
        if self.reader is None:
            raise _no_group()
        place, offset, delay_ms, reason = request
        given = await self.reader.nack(place, offset, reason, delay_ms / 1000)
        await self.say(Nacked(place, offset, given.deliveries, given.letter).encode())

    # --- fetching ----------------------------------------------------------------------------------------------------

    async def _begin_fetch(self, fetch: requests.Fetch) -> None:
        """Answer a fetch now, or let it wait for records or behind others that wait."""
        until = time.monotonic() + fetch.wait_ms / 1000
        cursors = self._chosen(fetch.partitions)
        if not self._waiting:
            if await self._answer_from(cursors, fetch):
                return
            if not fetch.wait_ms:
                return await self._say_nothing()
        if len(self._waiting) >= _MOST_FETCHES:
            raise RequestRefused("too_many", f"{_MOST_FETCHES} fetches of this connection wait already")
        self._waiting.append((fetch, until))
        self.connection.pending = len(self._waiting)
        self._has_fetch.set()

    async def _serve_fetches(self) -> None:
        """Answer the fetches that wait, in order, until the client has sent its last line."""
        while True:
            await self._has_fetch.wait()
            while self._waiting:
                fetch, until = self._waiting[0]
                if fetch is _LAST:
                    return
                try:
                    await self._finish_fetch(fetch, until)
                except RequestRefused as err:
                    await self.say(Failed("fetch", err.code, str(err)).encode())
                self._waiting.popleft()
                self.connection.pending = len(self._waiting)
            self._has_fetch.clear()

    async def _finish_fetch(self, fetch: requests.Fetch, until: float) -> None:
        """Answer a fetch as soon as there may be news. It was tried already, or waited behind another one."""
        while True:
            self._changed.clear()
            cursors = self._chosen(fetch.partitions)
            looks = {each.partition.directory: each.has_news for each in cursors if each.place not in self._held}
            due_s = _LOOK_AGAIN_S if self._held else NEVER  # without news
            if self.reader and self.reader.has_turns:
                due_s = min(due_s, self.reader.wait_s({cursor.place: cursor.offset for cursor in cursors}))
            left_s = until - time.monotonic()
            is_news = await self.service.waking.next_news(self._waiter, looks, min(left_s, due_s))
            if (is_news or due_s < left_s) and await self._answer_from(cursors, fetch):
                return
            if time.monotonic() >= until:
                return await self._say_nothing()

    async def _say_nothing(self) -> None:
        self._was_empty = True
        await self.say(NO_RECORDS.encode())

    async def _answer_from(self, cursors: Sequence[Cursor], fetch: requests.Fetch) -> bool:
        """Answer a fetch with records of one of these partitions. Return False if none has any.

        A fetch that waits may leave out a partition whose next event will wake it.
        """
        turn, is_patient = Turn([]), fetch.wait_ms > 0
        if self.reader and self.reader.has_turns:
            positions: dict[tuple[str, int], int] = {cursor.place: cursor.offset for cursor in cursors}
            turn = await self.reader.turn(positions, Limit(1, fetch.max_bytes), is_patient or self._was_empty)
        self._held = frozenset(cursor.place for cursor in cursors if turn.skips(cursor.place) is None)
        if turn.again:
            return await self._answer_again(turn.again[0])
        for cursor in cursors:
            skips = turn.skips(cursor.place)
            if skips is None:
                continue
            if is_patient and cursor.seen is not None and self._waiter.is_quiet(cursor.partition.directory):
                continue
            if await self._answer(cursor, fetch.max_bytes, skips):
                return True
        return False

    async def _answer_again(self, again: RedeliveredMessage) -> bool:
        """Answer a fetch with a message that comes again. Return False if its partition was revoked meanwhile."""
        message, deliveries, position = again
        cursor = self.cursors.get(TopicPartition(*again.place))
        async with self._sending:
            if cursor is None or self.cursors.get(cursor.place) is not cursor:
                assert self.reader is not None
                self.reader.take_back([again])
                return False
            self._take_turn(cursor)
            if position != cursor.offset:
                cursor.offset, cursor.seen = position, None
                self._waiter.look_again(cursor.partition.directory)
            self._was_empty = False
            said = Batch(cursor.place, message.offset, 1, message.size, deliveries)
            await self.connection.write(said.encode() + message.line + b"\n")
        self.service.requests.count_sent(message.size)
        return True

    async def _answer(self, cursor: Cursor, max_bytes: int, skips: frozenset[int] = frozenset()) -> bool:
        """Answer a fetch with records of this partition, or with what is wrong with it. Return False if there are none.

        `skips`: offsets that are left out; a batch ends in front of one.
        """
        seen, version = cursor.partition.signature(), cursor.version
        if seen == cursor.seen or cursor.damage.is_resting:
            return False
        try:
            async with self.service.reading(self.connection):
                if cursor.start is not None:
                    offset = await self.service.run(cursor.partition.locate, cursor.start)
                    if cursor.version == version:
                        cursor.offset, cursor.start = offset, None
                most = await self._pass_over(cursor, skips) if skips else END
                batch = await self.service.run(cursor.partition.batch, cursor.offset, max_bytes, most)
                if batch is None:
                    if cursor.version == version:  # else it was sought meanwhile, and is to be read anew
                        cursor.seen = seen
                    return False
                try:
                    async with self._sending:
                        if self.cursors.get(cursor.place) is not cursor or cursor.version != version:
                            return False  # revoked or sought meanwhile, which has set _changed
                        self._take_turn(cursor)
                        cursor.offset, self._was_empty = batch.next_offset, False
                        if self.reader:
                            self.reader.read({cursor.place: batch.next_offset})
                        said = Batch(cursor.place, batch.offset, batch.lines, batch.span.nbytes)
                        await self.connection.write(said.encode())
                        await self.connection.send(batch.span)
                finally:
                    self.service.release(batch)
        except DamageError as err:
            return await self._refuse_once(cursor, version, "damaged", err)
        except RequestRefused as err:
            if err.code != "unknown_topic":
                raise
            return await self._refuse_once(cursor, version, err.code, err)  # deleted, and the others are there
        self.service.requests.count_sent(batch.span.nbytes)
        return True

    async def _refuse_once(self, cursor: Cursor, version: int, code: str, err: Exception) -> bool:
        """Answer a fetch with what is wrong with a partition, which rests then. Return False if that was said before."""
        self._take_turn(cursor)
        if cursor.version != version or not cursor.damage.is_new(err):
            return False
        await self.say(Failed("fetch", code, f"{cursor.place}: {err}").encode())
        return True

    async def _pass_over(self, cursor: Cursor, skips: frozenset[int]) -> int:
        """Move a cursor over offsets that are left out. Returns how many follow up to the next one."""
        version = cursor.version
        offset = await self.service.run(cursor.partition.nearest, cursor.offset)
        while offset in skips:
            offset += 1
        if cursor.version == version:
            cursor.offset = offset
        return min((skipped for skipped in skips if skipped > offset), default=END) - offset

    def _take_turn(self, cursor: Cursor) -> None:
        """Let the other partitions go first at the next fetch."""
        if self.cursors.pop(cursor.place, None) is not None:
            self.cursors[cursor.place] = cursor


_LAST = requests.Fetch(0)  # no client can ask for it


# --- member of a group -----------------------------------------------------------------------------------------------


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
        reader = Reader(redelivery, asked.group, asked.member) if redelivery else None
        super().__init__(service, connection, Commits(groups, asked.group, asked.member), reader)
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
                elif isinstance(event, events.Assigned):
                    await self._assign(event)

    async def _revoke(self, event: Revoke) -> None:
        for place in event.partitions:
            self.cursors.pop(TopicPartition(*place), None)
        self._changed.set()
        self._unanswered.append(event.generation)
        await self.say(replies.Revoke(tuple(TopicPartition(*place) for place in event.partitions)).encode())

    async def _assign(self, event: events.Assigned) -> None:
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
