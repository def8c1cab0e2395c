"""The status port: one question in, one line out.

GET_STATUS <seq> [<group>] [token=<token>]

PROCESSED   a consumer group, or that group, has committed past this record
PENDING     not yet; also while the record is on its way to its partition
UNKNOWN     no record has been given this seq, or the record is gone
ERR …       no such question, no valid token, or damaged files; the connection goes on
"""

from collections.abc import Callable

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.finding import Locator, RecordPlace
from kmq.gateway.lines.connection import Connection, TooLong
from kmq.gateway.lines.service import Service
from kmq.log.damage import DamageError
from kmq.wire.requests import BadLine, name_of

_USAGE = b"ERR expected: GET_STATUS <seq> [<group>] [token=<token>]\n"
_MAX_DIGITS = 18
# (partition, offset, group or None for any) → has the group committed past this offset?
HasCommitted = Callable[[tuple[str, int], int, str | None], bool]


class Question:
    """A parsed question. Raises BadLine."""

    __slots__ = ("group", "seq", "token")

    def __init__(self, line: bytes) -> None:
        if not line.isascii():  # a name of another spelling than the one that committed would be PENDING for ever
            raise BadLine("the line must be ASCII; names are percent-encoded")
        verb, *words = line.decode("ascii").split() or [""]
        shown = [word for word in words if word.startswith("token=")]
        words = [word for word in words if word not in shown]
        if verb != "GET_STATUS" or not 1 <= len(words) <= 2 or len(shown) > 1 or not words[0].isdecimal():
            raise BadLine(verb)
        # A seq of more digits than any has been given.
        self.seq = int(words[0]) if words[0].isascii() and len(words[0]) <= _MAX_DIGITS else 0
        self.group = name_of(words[1]) if len(words) > 1 else None
        self.token = shown[0].removeprefix("token=") if shown else ""


class StatusPort:
    """The connections of the status port. An instance is a factory of protocols."""

    def __init__(self, service: Service, locator: Locator, has_committed: HasCommitted) -> None:
        self._service, self._locator, self._has_committed = service, locator, has_committed
        self._connections: set[Connection] = set()

    def __call__(self) -> Connection:
        return Connection(self._serve, self._connections)

    def stop(self) -> None:
        """End all connections."""
        for connection in [*self._connections]:
            connection.end(b"")

    async def _serve(self, connection: Connection) -> None:
        try:
            while (line := await connection.read_line()) is not None:
                answer = await self._answer(line, connection.peer)
                connection.is_admitted |= not answer.startswith(b"ERR")
                await connection.write(answer)
        except TooLong as err:
            await connection.write(f"ERR bad_request: {err}\n".encode())

    async def _answer(self, line: bytes, peer: str) -> bytes:
        try:
            question = Question(line)
            self._service.authorize(question.token, peer, "GET_STATUS")
            place = await self._service.run(self._place, question.seq)
            if not isinstance(place, RecordPlace):
                return place
            where = place.topic, place.partition
            return b"PROCESSED\n" if self._has_committed(where, place.offset, question.group) else b"PENDING\n"
        except BadLine:
            return _USAGE
        except RequestRefused as err:
            return f"ERR {err.code}: {err}\n".encode()
        except DamageError as err:
            return f"ERR damaged: {err}\n".encode()

    def _place(self, seq: int) -> RecordPlace | bytes:
        """Return where the record is, or the answer if it is nowhere."""
        if not self._locator.is_numbered(seq):
            return b"UNKNOWN\n"
        is_routed = self._locator.is_routed(
            seq
        )  # before the search: what is routed after it must not be taken for gone
        return self._locator.find(seq) or (b"UNKNOWN\n" if is_routed else b"PENDING\n")
