"""The consumer port: the first line of a connection, access, CONSUME, and the end of a connection.

    CONSUME orders follow    → `!ok …` and the stored lines of each partition, then `!batch …` for new ones

CONSUME     The stored lines of a topic, byte for byte as in the files. Lines that are there when the request arrives
            are sent partition by partition, each after `!ok`. With `follow` new records are sent as they are routed,
            each batch after `!batch`. `raw` leaves these lines out: then the bytes of one partition are what `cat`
            shows, up to the end of the last whole line.
Gap         If retention deletes records before the reader gets to them, a further `!ok` names the next offset.
Damage      Damage, a deleted topic, and the end of the gateway are reported by `!err`, even with `raw`. Damage of one
            partition is reported after the lines of the others. A follower of a whole topic continues: it gets one
            `!err consume damaged`, and the partition rests (kmq/gateway/core/fetching.py) until it can be read.
Limits      ports.py: connections, deadlines, unread bytes; service.py: simultaneous reads.
End         When the gateway stops, every connection that is not in the middle of a batch gets `!err stopping`.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.connection import drain
from kmq.gateway.core.fetching import Cursor
from kmq.gateway.core.partitions import END, MAX_BATCH
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.redelivery import Redelivery
from kmq.gateway.lines.connection import LineConnection, OtherProtocol, TooLong
from kmq.gateway.lines.service import Service
from kmq.gateway.lines.session import Session
from kmq.log.damage import DamageError
from kmq.log.rows import NotHereError
from kmq.wire.replies import Batch, Failed, Started
from kmq.wire.requests import (
    EARLIEST,
    MAX_OPENING,
    Assign,
    BadLine,
    Consume,
    Group,
    Opening,
    Position,
    further,
    opening,
)

# --- consume ---------------------------------------------------------------------------------------------------------

_WAIT_S = 5.0  # until a follower checks whether its topic has more partitions


class Consumption:
    """One CONSUME."""

    def __init__(self, service: Service, connection: LineConnection, request: Consume) -> None:
        self._service, self._connection, self._request = service, connection, request
        self._left = request.most or END  # lines

    async def run(self) -> None:
        """Serve the request to its end. Raises RequestRefused, and OSError if the client is gone."""
        request = self._request
        numbers = None if request.partition is None else [request.partition]
        cursors = await self._service.run(self._open, numbers, request.first)
        damaged: RequestRefused | None = None
        for cursor in cursors:
            try:
                await self._send_past(cursor)
            except DamageError as err:
                # The last partition is named, so that a consumer which asks how many there are sees them all.
                damaged = await self._report_damage(cursor, err) or damaged
        if damaged is not None:
            raise damaged
        if request.follow:
            await self._follow(cursors)

    async def _report_damage(self, cursor: Cursor, err: DamageError) -> RequestRefused | None:
        """Report damage once to a follower of a whole topic. Return the refusal that ends any other request."""
        if not self._request.follow or self._request.partition is not None:
            return RequestRefused("damaged", f"{cursor.place}: {err}")
        if cursor.damage.is_new(err):
            await self._connection.write(Failed("consume", "damaged", f"{cursor.place}: {err}").encode())
        return None

    def _open(self, numbers: Sequence[int] | None, start: Position) -> list[Cursor]:
        topic, partitions = self._request.topic, self._service.partitions
        opened = [
            partitions.open(topic, number)
            for number in (range(partitions.count(topic)) if numbers is None else numbers)
        ]
        cursors = [Cursor(partition, 0, start=start) for partition in opened]
        for cursor in cursors:
            with suppress(DamageError):
                cursor.locate()
        return cursors

    async def _begin(self, cursor: Cursor, offset: int) -> None:
        cursor.offset = offset
        if not self._request.raw:
            await self._connection.write(Started(cursor.place, offset).encode())

    async def _send_past(self, cursor: Cursor) -> None:
        """Send the lines that are there now."""
        await self._service.run(cursor.locate)
        await self._begin(cursor, cursor.offset)
        end = await self._service.run(cursor.partition.end)
        while self._left and cursor.offset < end:
            before, cold = cursor.offset, None
            async with self._service.reading(self._connection):
                try:
                    await self._send_range(cursor, min(end, before + self._left))
                except FileNotFoundError:  # a segment was deleted, or replaced by compaction: look again
                    continue
                except NotHereError as err:
                    cold = err
            if cold is not None:  # waits without a place among those that are sent records
                await self._wait_for_cold(cold)
                continue
            if cursor.offset == before:
                start = await self._service.run(cursor.partition.first_after, before)
                if start <= before:
                    return
                await self._begin(cursor, start)  # more was deleted than was asked for

    async def _wait_for_cold(self, err: NotHereError) -> None:
        """Wait until what lies in KMQ_TIER is here, however long that takes. Raises DamageError; ConnectionError."""
        while True:
            try:
                return await self._service.cold.wait(err)
            except RequestRefused:
                if self._connection.transport.is_closing():
                    raise ConnectionResetError("the client has gone") from None

    async def _send_range(self, cursor: Cursor, end: int) -> None:
        found = await self._service.run_now(cursor.partition.range, cursor.offset, end)
        try:
            if found.first_offset > cursor.offset:
                await self._begin(cursor, found.first_offset)
            while span := await self._service.run(cursor.partition.next_span, found):
                await self._connection.send(span)
                self._service.requests.count_sent(span.nbytes)
                self._left -= found.reached - cursor.offset
                cursor.offset = found.reached
        finally:
            self._service.release(found)

    # --- following ---------------------------------------------------------------------------------------------------

    async def _follow(self, cursors: list[Cursor]) -> None:
        """Send new lines, until the client goes or `max` lines were sent."""
        while self._left:
            has_sent = False
            for cursor in cursors:
                try:
                    has_sent |= await self._send_new(cursor)
                except DamageError as err:
                    if (damaged := await self._report_damage(cursor, err)) is not None:
                        raise damaged from err
            if not has_sent and self._left:
                looks = {cursor.partition.directory: cursor.has_news for cursor in cursors}
                if self._request.partition is None:
                    looks[os.path.dirname(cursors[0].partition.directory)] = partial(self._has_grown, len(cursors))
                await self._service.waking.news(looks, _WAIT_S)
                await self._add_partitions(cursors)

    async def _send_new(self, cursor: Cursor) -> bool:
        seen = cursor.partition.signature()
        if seen == cursor.seen or not self._left or cursor.damage.is_resting or cursor.waits_for_cold():
            return False
        async with self._service.reading(self._connection):
            try:
                if cursor.start is not None:
                    await self._service.run_now(cursor.locate)
                    await self._begin(cursor, cursor.offset)
                batch = await self._service.run_now(cursor.partition.batch, cursor.offset, MAX_BATCH, self._left)
            except NotHereError as err:
                cursor.cold = self._service.cold.want(err)
                return False
            if batch is None:
                cursor.seen = seen
                return False
            try:
                said = Batch(cursor.place, batch.offset, batch.lines, batch.span.nbytes)
                await self._connection.write((b"" if self._request.raw else said.encode()) + batch.text)
                if batch.segment is not None:
                    await self._connection.send(batch.span)
            finally:
                if batch.segment is not None:
                    self._service.release(batch.segment)
        self._service.requests.count_sent(batch.span.nbytes)
        self._left -= batch.lines
        cursor.offset = batch.offset + batch.lines
        return True

    def _has_grown(self, count: int) -> bool:
        return self._service.partitions.count(self._request.topic) > count

    async def _add_partitions(self, cursors: list[Cursor]) -> None:
        """Follow the topic's new partitions, from their first record on."""
        if self._request.partition is None:
            count = await self._service.run(self._service.partitions.count, self._request.topic)
            if count > len(cursors):
                cursors += await self._service.run(self._open, range(len(cursors), count), EARLIEST)


# --- door ------------------------------------------------------------------------------------------------------------

_STOPPING = Failed("", "stopping", "the gateway is stopping; connect again and go on at the next offset").encode()


class Lines:
    """The connections of the consumer port. An instance is a factory of protocols, as aiohttp's server is."""

    def __init__(self, service: Service, groups: Groups, redelivery: Redelivery | None = None) -> None:
        """`redelivery` None: no message can be given back or is delivered again."""
        self._service, self._groups, self._redelivery = service, groups, redelivery
        self._connections: set[LineConnection] = set()

    def __call__(self) -> LineConnection:
        return LineConnection(self._serve, self._connections)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def stop(self) -> None:
        """End all connections."""
        for connection in [*self._connections]:
            connection.end(_STOPPING)

    async def drain(self) -> None:
        """Wait a moment until the clients have read their last line."""
        await drain(self._connections)

    async def _serve(self, connection: LineConnection) -> None:
        verb, code = "none", "OK"
        try:
            line = await connection.read_line()
            if line is None:
                return
            request = opening(line)
            verb = type(request).__name__.upper()
            self._service.authorize(request.token, connection.peer, verb)
            connection.is_admitted = True
            if not isinstance(request, Consume):
                request = await _whole(connection, request, len(line))
            connection.pending = 1
            await self._handle(connection, request)
        except (BadLine, TooLong) as err:
            code = "bad_request"
            await connection.write(Failed("", code, str(err)).encode())
        except OtherProtocol as other:
            code = "bad_request"
            await self._service.dismiss(connection, str(other))
        except RequestRefused as err:
            code = err.code
            await connection.write(Failed("", code, str(err)).encode())
        except DamageError as err:
            code = "damaged"
            await connection.write(Failed("", code, str(err)).encode())
        except ConnectionError:
            code = "gone"
            raise
        finally:
            self._service.requests.count_egress(verb, code)

    async def _handle(self, connection: LineConnection, request: Opening) -> None:
        if isinstance(request, Consume):
            await Consumption(self._service, connection, request).run()
        else:
            await Session(self._service, connection, self._groups, self._redelivery, request).run()


async def _whole(connection: LineConnection, request: Group | Assign, nbytes: int) -> Group | Assign:
    """Return an opening request with all its lines. `nbytes`: of the first line. Raises BadLine, TooLong."""
    while request.more:
        line = await connection.read_line()
        if line is None:
            raise BadLine("more: the connection has ended before the next line")
        nbytes += len(line)
        if nbytes > MAX_OPENING:
            raise TooLong(f"the lines of {type(request).__name__.upper()} are over {MAX_OPENING} bytes together")
        request = further(request, line)
    return request
