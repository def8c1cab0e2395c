"""The consumer port: what the first line of a connection asks for, who may ask, and how a connection ends.

Limits      doors.py: connections, deadlines, unread bytes; service.py: simultaneous reads.
End         When the gateway stops, every connection that is not in the middle of a batch gets `!err stopping`.
"""

import asyncio
import time

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.redelivery import Reader, Redelivery
from kmq.gateway.lines.connection import Connection, TooLong
from kmq.gateway.lines.consume import Consumption
from kmq.gateway.lines.member import GroupCommits, MemberSession
from kmq.gateway.lines.service import Service
from kmq.gateway.lines.session import NoGroup, Session
from kmq.log.damage import DamageError
from kmq.wire.replies import Failed
from kmq.wire.requests import MAX_OPENING, Assign, BadLine, Consume, Group, Opening, further, opening

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
            commits = GroupCommits(self._groups, asked.group) if asked.group else NoGroup()
            reader = Reader(self._redelivery, asked.group, None) if asked.group and self._redelivery else None
            session = Session(self._service, connection, commits, reader)
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
