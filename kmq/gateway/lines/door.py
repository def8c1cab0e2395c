"""The consumer port: what the first line of a connection asks for, who may ask, CONSUME, and how a connection ends.

CONSUME     The stored lines of a topic, byte for byte as the files have them. What is there when the request arrives
            comes partition after partition, each after `!ok`. With `follow` new records come as they are routed, each
            batch after `!batch`. `raw` leaves these lines out: then the bytes of one partition are what `cat` gives, up
            to the end of the last whole line.
Gap         Records that retention deletes in front of the reader are left out; a further `!ok` names the next offset.
Damage      Damage, a deleted topic, and the end of the gateway are told by `!err`, with `raw` too. Damage of one
            partition is told after what there is of the others. A follower of a whole topic goes on: it is told once by
            `!err consume damaged`, and the partition rests (kmq/gateway/core/fetching.py) until it can be read.
Limits      ports.py: connections, deadlines, unread bytes; service.py: simultaneous reads.
End         When the gateway stops, every connection that is not in the middle of a batch gets `!err stopping`.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.fetching import Damage
from kmq.gateway.core.partitions import END, MAX_BATCH, Partition, Signature, moment
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.redelivery import Reader, Redelivery
from kmq.gateway.lines.connection import Connection, TooLong
from kmq.gateway.lines.service import Service
from kmq.gateway.lines.session import Commits, MemberSession, Session
from kmq.log.damage import DamageError
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
    TopicPartition,
    further,
    opening,
)

# --- consume ---------------------------------------------------------------------------------------------------------

_WAIT_S = 5.0  # until a follower looks whether its topic has more partitions


class _Reader:
    """Where one partition is read next."""

    def __init__(self, partition: Partition, start: Position) -> None:
        self.partition, self.offset = partition, 0
        self.start: Position | None = start  # None: `offset` is known
        self.place = TopicPartition(partition.topic, partition.number)
        self.seen: Signature | None = None  # when a read found nothing
        self.damage = Damage()

    def locate(self) -> None:
        """Find where to begin, if that is not known. Raises DamageError."""
        if (start := self.start) is not None:
            self.start = moment(start)
            self.offset, self.start = self.partition.locate(start), None

    def has_news(self) -> bool:
        return not self.damage.is_resting and self.partition.signature() != self.seen


class Consumption:
    """One CONSUME."""

    def __init__(self, service: Service, connection: Connection, asked: Consume) -> None:
        self._service, self._connection, self._asked = service, connection, asked
        self._left = asked.most or END  # lines

    async def run(self) -> None:
        """Serve the request to its end. Raises RequestRefused, and OSError if the client is gone."""
        asked = self._asked
        numbers = None if asked.partition is None else [asked.partition]
        readers = await self._service.run(self._open, numbers, asked.first)
        damaged: RequestRefused | None = None
        for reader in readers:
            try:
                await self._send_past(reader)
            except DamageError as err:
                # The last one is named: so a consumer that asks how many partitions there are sees them all.
                damaged = await self._tell(reader, err) or damaged
        if damaged is not None:
            raise damaged
        if asked.follow:
            await self._follow(readers)

    async def _tell(self, reader: _Reader, err: DamageError) -> RequestRefused | None:
        """Tell a follower of other partitions, too, of damage, once. Return how a request ends that goes on with none."""
        if not self._asked.follow or self._asked.partition is not None:
            return RequestRefused("damaged", f"{reader.place}: {err}")
        if reader.damage.is_new(err):
            await self._connection.write(Failed("consume", "damaged", f"{reader.place}: {err}").encode())
        return None

    def _open(self, numbers: Sequence[int] | None, start: Position) -> list[_Reader]:
        topic, partitions = self._asked.topic, self._service.partitions
        opened = [
            partitions.open(topic, number)
            for number in (range(partitions.count(topic)) if numbers is None else numbers)
        ]
        readers = [_Reader(partition, start) for partition in opened]
        for reader in readers:
            with suppress(DamageError):
                reader.locate()
        return readers

    async def _begin(self, reader: _Reader, offset: int) -> None:
        reader.offset = offset
        if not self._asked.raw:
            await self._connection.write(Started(reader.place, offset).encode())

    async def _send_past(self, reader: _Reader) -> None:
        """Send what is there now."""
        await self._service.run(reader.locate)
        await self._begin(reader, reader.offset)
        end = await self._service.run(reader.partition.end)
        while self._left and reader.offset < end:
            before = reader.offset
            async with self._service.reading(self._connection):
                try:
                    await self._send_range(reader, min(end, before + self._left))
                except FileNotFoundError:  # a segment is gone, or another one by compaction: look again
                    continue
            if reader.offset == before:
                start = await self._service.run(reader.partition.start)
                if start <= before:
                    return
                await self._begin(reader, start)  # more than was asked for is gone

    async def _send_range(self, reader: _Reader, end: int) -> None:
        found = await self._service.run(reader.partition.range, reader.offset, end)
        try:
            if found.first_offset > reader.offset:
                await self._begin(reader, found.first_offset)
            while span := await self._service.run(found.take):
                await self._connection.send(span)
                self._service.requests.count_sent(span.nbytes)
                self._left -= found.reached - reader.offset
                reader.offset = found.reached
        finally:
            self._service.release(found)

    # --- following ---------------------------------------------------------------------------------------------------

    async def _follow(self, readers: list[_Reader]) -> None:
        """Send what comes, until the client goes or `max` lines were sent."""
        while self._left:
            has_sent = False
            for reader in readers:
                try:
                    has_sent |= await self._send_new(reader)
                except DamageError as err:
                    if (damaged := await self._tell(reader, err)) is not None:
                        raise damaged from err
            if not has_sent and self._left:
                looks = {reader.partition.directory: reader.has_news for reader in readers}
                if self._asked.partition is None:
                    looks[os.path.dirname(readers[0].partition.directory)] = partial(self._has_grown, len(readers))
                await self._service.waking.news(looks, _WAIT_S)
                await self._add_partitions(readers)

    async def _send_new(self, reader: _Reader) -> bool:
        seen = reader.partition.signature()
        if seen == reader.seen or not self._left or reader.damage.is_resting:
            return False
        async with self._service.reading(self._connection):
            if reader.start is not None:
                await self._service.run(reader.locate)
                await self._begin(reader, reader.offset)
            batch = await self._service.run(reader.partition.batch, reader.offset, MAX_BATCH, self._left)
            if batch is None:
                reader.seen = seen
                return False
            try:
                if not self._asked.raw:
                    said = Batch(reader.place, batch.offset, batch.lines, batch.span.nbytes)
                    await self._connection.write(said.encode())
                await self._connection.send(batch.span)
            finally:
                self._service.release(batch)
        self._service.requests.count_sent(batch.span.nbytes)
        self._left -= batch.lines
        reader.offset = batch.next_offset
        return True

    def _has_grown(self, known: int) -> bool:
        return self._service.partitions.count(self._asked.topic) > known

    async def _add_partitions(self, readers: list[_Reader]) -> None:
        """Follow the partitions that the topic has been given meanwhile, from their first record on."""
        if self._asked.partition is None:
            count = await self._service.run(self._service.partitions.count, self._asked.topic)
            if count > len(readers):
                readers += await self._service.run(self._open, range(len(readers), count), EARLIEST)


# --- door ------------------------------------------------------------------------------------------------------------

_DRAIN_S = 2.0
_PAUSE_S = 0.02
_STOPPING = Failed("", "stopping", "the gateway is stopping; come again and go on at the next offset").encode()


class Lines:
    """The connections of the consumer port. An instance is a factory of protocols, as aiohttp's server is."""

    def __init__(self, service: Service, groups: Groups, redelivery: Redelivery | None = None) -> None:
        """`redelivery` None: nothing can be given back, and nothing comes again."""
        self._service, self._groups, self._redelivery = service, groups, redelivery
        self._connections: set[Connection] = set()

    def __call__(self) -> Connection:
        return Connection(self._serve, self._connections)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def stop(self) -> None:
        """End all connections."""
        for connection in [*self._connections]:
            connection.end(_STOPPING)

    async def drain(self) -> None:
        """Wait until the clients have read their last line, at most _DRAIN_S."""
        until = time.monotonic() + _DRAIN_S
        while self._connections and time.monotonic() < until:
            await asyncio.sleep(_PAUSE_S)
        for connection in [*self._connections]:
            connection.force_close()

    async def _serve(self, connection: Connection) -> None:
        verb, code = "none", "OK"
        try:
            line = await connection.read_line()
            if line is None:
                return
            asked = opening(line)
            verb = type(asked).__name__.upper()
            self._service.authorize(asked.token, connection.peer, verb)
            connection.is_admitted = True
            if not isinstance(asked, Consume):
                asked = await _whole(connection, asked, len(line))
            connection.pending = 1
            await self._handle(connection, asked)
        except (BadLine, TooLong) as err:
            code = "bad_request"
            await connection.write(Failed("", code, str(err)).encode())
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

    async def _handle(self, connection: Connection, asked: Opening) -> None:
        if isinstance(asked, Consume):
            await Consumption(self._service, connection, asked).run()
        elif isinstance(asked, Assign):
            reader = Reader(self._redelivery, asked.group, None) if asked.group and self._redelivery else None
            session = Session(self._service, connection, Commits(self._groups, asked.group), reader)
            await session.assign(0, await session.open_all(asked.partitions))
            connection.pending = 0
            await session.run()
        else:
            connection.pending = 0
            await MemberSession(self._service, connection, self._groups, asked, self._redelivery).run()


async def _whole(connection: Connection, asked: Group | Assign, nbytes: int) -> Group | Assign:
    """Return an opening with all its lines, of which the first has so many bytes. Raises BadLine, TooLong."""
    while asked.more:
        line = await connection.read_line()
        if line is None:
            raise BadLine("more: the connection has ended before the next line")
        nbytes += len(line)
        if nbytes > MAX_OPENING:
            raise TooLong(f"the lines of {type(asked).__name__.upper()} are over {MAX_OPENING} bytes together")
        asked = further(asked, line)
    return asked
