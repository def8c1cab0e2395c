"""A session: one client of the line protocol that reads partitions: its fetches, commits and group membership.

    !fetch    → `!batch …` and lines of one partition

Pull        Each `!fetch` is answered by one `!batch` of one partition (kmq/gateway/groups/streaming.py).
Order       Requests are answered in order, with two exceptions. A fetch that waits for records delays no other request:
            later requests are answered before it, and later fetches after it. And no fetch delays a commit or
            `!revoked`: otherwise a commit would wait for the batch that the client has requested ahead. A line or a
            batch is written whole before the next one. Beats and fetches are served as they arrive, unless another
            request is before them.
Again       A redelivered message is a batch of its own, `!batch again`.
Silence     A connection that breaks does not end the member: a client that returns under its name within the session
            timeout continues with its partitions. `!leave` ends it at once.
Damage      answers one fetch, and its partition rests (kmq/gateway/core/fetching.py). After `!seek` it is reported
            again.
Memory      A batch is bytes of a file, or at most 64 KiB of text (connection.py).
"""

import asyncio
import time
from math import ceil

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.fetching import Cursor, Limit
from kmq.gateway.core.partitions import END
from kmq.gateway.core.partitions import Batch as StoredBatch
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import OffsetCommit
from kmq.gateway.groups.protocol import Client, MemberOptions, Revoke
from kmq.gateway.groups.reader import Reader
from kmq.gateway.groups.redelivery import DueMessage, Redelivery
from kmq.gateway.groups.streaming import Fetches, PendingFetch, Rebalances, serve_until_one_ends
from kmq.gateway.lines.connection import LineConnection
from kmq.gateway.lines.service import Service
from kmq.log.damage import DamageError
from kmq.log.rows import NotHereError
from kmq.wire import replies, requests
from kmq.wire.refusals import by_code
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
from kmq.wire.requests import BadLine

# Long waits without records end together, up to this much later: one wake-up of the event loop for many idle readers.
_LONG_S, _TOGETHER_S = 5.0, 0.25


class Session:
    """The partitions and requests of one connection: of a member of a group, or of a client that names them itself."""

    def __init__(
        self,
        service: Service,
        connection: LineConnection,
        groups: Groups,
        redelivery: Redelivery | None,
        request: requests.Group | requests.Assign,
    ) -> None:
        self.service, self.connection, self._groups, self._request = service, connection, groups, request
        self._member = request.member if isinstance(request, requests.Group) else None
        self.reader = Reader(service, groups, redelivery, request.group, self._member, "connection")
        self.fetches = Fetches(self.reader, self, "connection", refuses_revoked=True)
        self._rebalances = Rebalances(groups, self.reader, self)
        self.turn = asyncio.Lock()

    async def run(self) -> None:
        """Join, and serve requests until the client leaves, is ended or has gone, and its requests are answered."""
        request = self._request
        if isinstance(request, requests.Assign):
            await self.reader.assign(request.partitions)
            await self.send_assigned(0)
            self.connection.pending = 0
            return await serve_until_one_ends((self.fetches.serve(), self._serve_lines()))
        self.connection.pending = 0
        options = MemberOptions(request.topics, (request.assignor,), request.session_s, attempt=request.attempt)
        client = Client(request.member, self.connection.peer)
        try:
            await self._groups.join(
                request.group, request.member, client, options, self._rebalances.on_event, is_anew=True
            )
            if request.says_hand_outs:
                self.reader.says_hand_outs()
            await serve_until_one_ends((self.fetches.serve(), self._serve_lines()), self._forward_events())
        finally:
            self._groups.stop_listening(request.group, request.member, self._rebalances.on_event)

    async def _forward_events(self) -> None:
        ended = await self._rebalances.forward_events()
        raise RequestRefused(ended.code, f"{by_code(ended.code).text}; say GROUP again")

    async def say(self, line: bytes) -> None:
        """Write a line, after the line or batch that is being written."""
        async with self.turn:
            await self.connection.write(line)

    async def send_revoke(self, revoke: Revoke) -> None:
        await self.say(replies.Revoke(revoke.partitions).encode())

    async def send_assigned(self, generation: int) -> None:
        await self.say(Assigned(generation, tuple(self.reader.offsets())).encode())

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _serve_lines(self) -> None:
        """Serve requests until the client has sent its last."""
        if self._member is not None:
            await self._rebalances.has_assigned.wait()
        while (line := await self.connection.read_line(self._serve_at_once)) is not None:
            self._beat(line)
            try:
                request = requests.request(line)
            except BadLine as err:
                name = line.partition(b" ")[0].strip().decode("ascii", "replace").removeprefix("!")
                if name not in requests.REQUESTS:
                    raise
                await self.fetches.tried()
                await self.say(Failed(name, "bad_request", str(err)).encode())
                continue
            if isinstance(request, requests.Seek | requests.Offsets | requests.Nack) or request == requests.LEAVE:
                await self.fetches.tried()
            if request == requests.LEAVE:
                if self._member is not None:
                    self._rebalances.leave()
                break
            await self._serve(request)
        self.fetches.finish(at_once=self._rebalances.has_left)

    def _beat(self, line: bytes) -> None:
        if self._member is not None:
            self._groups.beat(self.reader.group, self._member, line.startswith(b"!fetch"))

    def _given(self, request: requests.Request) -> None:
        """Note the messages that the client gives to its program."""
        assert isinstance(request, requests.Given)
        self.reader.hand_out(request.offsets)

    def _serve_at_once(self, line: bytes) -> bool:
        """Serve a line as it arrives if it needs no wait: a beat, a fetch, or messages given to the program.

        A wrong line waits for its turn.
        """
        try:
            if line == b"!beat":
                self._beat(line)
                return True
            if line.startswith(b"!fetch "):
                fetch = _pending(requests.request(line))
                self._beat(line)
                self.fetches.put(fetch)
                return True
            if line.startswith(b"!given "):
                self._given(requests.request(line))
                self._beat(line)
                return True
        except (BadLine, RequestRefused):
            pass
        return False

    async def _serve(self, request: requests.Request) -> None:
        name = type(request).__name__.lower()
        try:
            if isinstance(request, requests.Fetch):
                fetch = _pending(request)
                try:
                    self.fetches.put(fetch)
                except RequestRefused:  # its answer comes after theirs; those with records make room
                    await self.fetches.tried()
                    self.fetches.put(fetch)
            elif isinstance(request, requests.Seek):
                await self.say(Sought(request.place, await self.reader.seek(*request)).encode())
            elif isinstance(request, requests.Offsets):
                await self._send_offsets(request)
            elif isinstance(request, requests.Commit):
                await self._commit(request)
            elif isinstance(request, requests.Nack):
                await self._nack(request)
            elif isinstance(request, requests.Given):
                self._given(request)
            elif request == requests.REVOKED:
                self._rebalances.revoked()
        except RequestRefused as err:
            if name not in requests.REQUESTS:
                raise  # `!revoked` has no answer, so its refusal ends the connection
            await self.say(Failed(name, err.code, str(err)).encode())
        except DamageError as err:
            of = f"{request.place}: " if isinstance(request, requests.Seek) else ""
            await self.say(Failed(name, "damaged", f"{of}{err}").encode())

    async def _send_offsets(self, request: requests.Offsets) -> None:
        cursors = self.reader.select(dict.fromkeys(request.partitions))
        committed = self.reader.committed([cursor.place for cursor in cursors])

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
        if damage is not None:  # its partition is left out; a fetch of only this partition reports it
            self.service.damaged(damage)
            if len(cursors) == 1:
                raise RequestRefused("damaged", f"{cursors[0].place}: {damage}")
        await self.say(answer.encode())

    async def _commit(self, request: requests.Commit) -> None:
        self._check_group()
        if request.is_again:
            await self.reader.done(request.offsets)
        else:
            rows = [(place, OffsetCommit(offset)) for place, offset in request.offsets]
            await self._groups.commit(self.reader.group, self._member, dict(rows))
        await self.say(Committed(*request).encode())

    async def _nack(self, request: requests.Nack) -> None:
        self._check_group()
        place, offset, delay_ms, reason = request
        given = await self.reader.nack(place, offset, reason, delay_ms / 1000)
        await self.say(Nacked(place, offset, given.deliveries, given.letter).encode())

    def _check_group(self) -> None:
        if not self.reader.group:
            text = "this connection names no group; say ASSIGN <group> … or GROUP <group> …"
            raise RequestRefused("bad_request", text)

    # --- answers to fetches ------------------------------------------------------------------------------------------

    def note_waiting(self, fetches: int) -> None:
        self.connection.pending = fetches

    async def send_nothing(self, fetch: PendingFetch) -> None:
        await self.say(NO_RECORDS.encode())

    async def refuse(self, fetch: PendingFetch, refused: RequestRefused) -> None:
        await self.say(Failed("fetch", refused.code, str(refused)).encode())

    async def write_again(self, fetch: PendingFetch, cursor: Cursor, again: DueMessage) -> None:
        message = again.message
        said = Batch(cursor.place, message.offset, 1, message.size, again.deliveries)
        await self.connection.write(said.encode() + message.line + b"\n")
        self.service.requests.count_sent(message.size)

    async def send_batch(self, fetch: PendingFetch, cursor: Cursor) -> bool:
        """Answer a fetch with records of this partition. Refuse it, once, if the partition has an error."""
        seen = cursor.partition.signature()
        if seen == cursor.seen or cursor.damage.is_resting:
            return False
        try:
            if cursor.waits_for_cold():
                return False
            async with self.service.reading(self.connection):
                if cursor.start is not None:
                    await self.service.run_now(cursor.locate)
                most = await self._skip(cursor) if cursor.skips else END
                most = most if cursor.most is None else min(most, cursor.most)
                batch = await self.service.run_now(_batch, cursor, fetch.limit.nbytes, most)
                self.reader.report_overtaken([cursor])
                if batch is None:
                    cursor.seen = seen
                    return False
                try:
                    async with self.turn:
                        if not self.reader.pass_turn(cursor):
                            return False
                        cursor.offset = batch.offset + batch.lines
                        self.reader.delivered({cursor: batch.offset})
                        said = Batch(cursor.place, batch.offset, batch.lines, batch.span.nbytes)
                        if self._request.hears_overtaken:
                            said = said._replace(overtaken=len(cursor.overtaken))
                        cursor.overtaken = range(0)
                        await self.connection.write(said.encode() + batch.text)
                        if batch.segment is not None:
                            await self.connection.send(batch.span)
                finally:
                    if batch.segment is not None:
                        self.service.release(batch.segment)
        except NotHereError as err:
            cursor.cold = self.service.cold.want(err)
            return False
        except (DamageError, RequestRefused) as err:
            code = err.code if isinstance(err, RequestRefused) else "damaged"
            if code not in ("damaged", "unknown_topic"):  # damaged or deleted: continue with the others
                raise
            if not self.reader.is_in_force(cursor) or not cursor.damage.is_new(err):
                return False
            raise RequestRefused(code, f"{cursor.place}: {err}") from err
        self.service.requests.count_sent(batch.span.nbytes)
        return True

    async def _skip(self, cursor: Cursor) -> int:
        """Move a cursor past skipped offsets. Returns how many follow before the next skipped one ends a batch."""
        cursor.overtake(await self.service.run(cursor.partition.first_left, cursor.offset))
        offset, skips = cursor.offset, cursor.skips
        while offset in skips:
            offset += 1
        cursor.offset = offset
        return min((skipped for skipped in skips if skipped > offset), default=END) - offset


def _batch(cursor: Cursor, max_bytes: int, most: int) -> StoredBatch | None:
    """Return the next records. Moves the cursor past records that were deleted before them, or before the end."""
    batch = cursor.partition.batch(cursor.offset, max_bytes, most)
    cursor.overtake(batch.offset if batch is not None else cursor.partition.first_left(cursor.offset))
    return batch


def _pending(request: requests.Request) -> PendingFetch:
    assert isinstance(request, requests.Fetch)
    wait_s = request.wait_ms / 1000
    limit, places = Limit(END, request.max_bytes, wait_s), dict.fromkeys(request.partitions)
    until = time.monotonic() + wait_s
    if wait_s >= _LONG_S:
        until = ceil(until / _TOGETHER_S) * _TOGETHER_S
    return PendingFetch(limit, places, until)
