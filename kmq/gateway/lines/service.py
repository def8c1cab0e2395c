"""State shared by connections of the consumer port (partitions, wake-ups, tokens, threads, limits); the status port.

Limits      At most _READS reads hold files open at a time. A further one evicts the connection that has waited longest
            for its client. If all clients read, it waits, and is refused after _LONGEST_WAIT_S (`too_many`).
Threads     Reading has a few threads of its own, so that a slow disk never stops the event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Protocol, TypeVar

from kmq import files
from kmq.access import roles
from kmq.access.tokens import Tokens
from kmq.broker.stats import Strangers
from kmq.config.settings import Settings
from kmq.gateway.core.answers import PATIENCE_S
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.cold import ColdReads
from kmq.gateway.core.fetching import Waking
from kmq.gateway.core.finding import RecordPlace, SeqFinder
from kmq.gateway.core.metrics import Requests
from kmq.gateway.core.partitions import Batch, Partitions
from kmq.gateway.lines.connection import LineConnection, OtherProtocol, TooLong
from kmq.log.damage import DamageError, MisplacedError
from kmq.log.rows import NotHereError
from kmq.wire import foreign
from kmq.wire.requests import BadLine, name_of

_THREADS = 4
_READS = 512
_LONGEST_WAIT_S = 5.0
T = TypeVar("T")


class _Closes(Protocol):
    def close(self) -> None: ...


class Service:
    """Make one for each gateway, inside the event loop."""

    def __init__(
        self,
        settings: Settings,
        waking: Waking,
        tokens: Tokens | None,
        strangers: Strangers,
        requests: Requests,
        partitions: Partitions | None = None,
        damaged: Callable[[DamageError], object] = lambda err: None,
        cold: ColdReads | None = None,
    ) -> None:
        """`damaged` counts damage that is found. `cold` fetches in what lies in KMQ_TIER."""
        self.settings, self.waking, self.requests = settings, waking, requests
        self.partitions = partitions or Partitions(settings.data)
        self._tokens, self._strangers = tokens, strangers
        self.damaged = damaged
        self.cold = cold or ColdReads(settings.data, waking.wake if waking else lambda directory: None)
        self._threads = ThreadPoolExecutor(_THREADS, "lines")
        self._most_reads = max(8, min(_READS, files.claim() // 16))
        self._reads = asyncio.Semaphore(self._most_reads)
        self._readers: set[LineConnection] = set()

    def authorize(self, token: str, peer: str, what: str) -> None:
        """Raise RequestRefused unless `token` allows this, or no token is required."""
        if self._tokens is None:
            return
        holder = self._tokens.find(token.encode())
        if holder is None:
            self._strangers.refuse(peer, f"{what} without a valid token", "" if token else "token")
            raise RequestRefused("unauthorized", f"say {what} … token=<token>, with one that `kmq token new` has made")
        act = what if what == roles.GET_STATUS else roles.LINES_OUT
        if not holder.may(act):
            self._strangers.refuse(peer, f"{what}: the token of {holder.name} may not")
            raise RequestRefused("forbidden", holder.refusal(act))

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work that reads files in a thread. If the caller is cancelled, a batch's files are closed.

        After a power cut logs end earlier than before, or lack their index, until the router has recovered. A consumer
        of such a log is too early (not_ready). Its offset is not wrong (out_of_range), and nothing is damaged.

        Work that needs records of KMQ_TIER runs again once they are fetched in.
        """
        while True:
            try:
                return await self.run_now(work, *arguments)
            except NotHereError as err:
                await self.cold.wait(err)

    async def run_now(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work as `run` does, but do not wait for KMQ_TIER: the caller holds a place of `reading`, or has others.

        Raises NotHereError.
        """
        running = self._threads.submit(work, *arguments)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            running.add_done_callback(_close_batch)
            raise
        except RequestRefused as err:
            if err.code == "out_of_range" and not self.waking.watermark.is_followed:
                text = f"the router is down or recovers, so the end is unknown: {err}"
                raise RequestRefused("not_ready", text) from None
            raise
        except DamageError as err:
            if isinstance(err, MisplacedError) and not self.waking.watermark.is_followed:
                raise RequestRefused("not_ready", f"{err.path}: the router may be about to write its index") from None
            self.damaged(err)
            raise

    @asynccontextmanager
    async def reading(self, connection: LineConnection) -> AsyncIterator[None]:
        """Hold files open for a connection. Raises RequestRefused if too many connections do so for too long."""
        if self._reads.locked():
            self._evict_slowest()
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S) if self._reads.locked() else nullcontext():
                await self._reads.acquire()
        except TimeoutError:
            text = f"{self._most_reads} consumers are being sent records already"
            raise RequestRefused("too_many", text) from None
        self._readers.add(connection)
        try:
            yield
        finally:
            self._readers.discard(connection)
            self._reads.release()

    def _evict_slowest(self) -> None:
        """End the connection that has waited longest for its client, if any has for PATIENCE_S."""
        latest = time.monotonic() - PATIENCE_S
        slow = [reader for reader in self._readers if 0 < reader.waits_since <= latest]
        if slow:
            slowest = min(slow, key=lambda reader: reader.waits_since)
            self._readers.discard(slowest)  # its place is free when its task has ended
            self._strangers.turn_away(slowest.peer, f"{self._most_reads} are sent records, and this one is the slowest")
            slowest.force_close()

    def release(self, opened: _Closes) -> None:
        """Close files that `run` may be reading at this moment, because its caller was cancelled."""
        self._threads.submit(opened.close)

    async def dismiss(self, connection: LineConnection, protocol: str) -> None:
        """Tell a client that speaks HTTP or TLS that the port is for lines; then its connection ends."""
        port = self.settings.http_port
        self._strangers.cut_off(connection.peer, foreign.reason(protocol, port))
        await connection.write(foreign.reply(protocol, port))

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def _close_batch(done: Future[Any]) -> None:
    batch = None if done.cancelled() or done.exception() else done.result()
    if isinstance(batch, Batch) and batch.segment is not None:
        batch.segment.close()


# --- status port -----------------------------------------------------------------------------------------------------
# One question in, one line out: GET_STATUS <seq> [<group>] [token=<token>]
#
# PROCESSED   a consumer group, or that group, has committed past this record
# PENDING     not yet; also while the record is on its way to its partition
# UNKNOWN     no record has been given this seq, or the record is gone
# ERR …       no such question, no valid token, or damaged files; the connection goes on

_USAGE = b"ERR expected: GET_STATUS <seq> [<group>] [token=<token>]\n"
_MAX_DIGITS = 18
# (partition, offset, group or None for any) → has the group committed past this offset?
HasCommitted = Callable[[tuple[str, int], int, str | None], bool]


class Question:
    """A parsed question. Raises BadLine."""

    __slots__ = ("group", "seq", "token")

    def __init__(self, line: bytes) -> None:
        if not line.isascii():  # a group's name in another spelling would be PENDING for ever
            raise BadLine("the line must be ASCII; names are percent-encoded")
        verb, *words = line.decode("ascii").split() or [""]
        shown = [word for word in words if word.startswith("token=")]
        words = [word for word in words if word not in shown]
        if verb != "GET_STATUS" or not 1 <= len(words) <= 2 or len(shown) > 1 or not words[0].isdecimal():
            raise BadLine(verb)
        # A seq with more digits than any existing one becomes 0.
        self.seq = int(words[0]) if words[0].isascii() and len(words[0]) <= _MAX_DIGITS else 0
        self.group = name_of(words[1]) if len(words) > 1 else None
        self.token = shown[0].removeprefix("token=") if shown else ""


class StatusPort:
    """The connections of the status port. An instance is a factory of protocols."""

    def __init__(self, service: Service, finder: SeqFinder, has_committed: HasCommitted) -> None:
        self._service, self._finder, self._has_committed = service, finder, has_committed
        self._connections: set[LineConnection] = set()

    def __call__(self) -> LineConnection:
        return LineConnection(self._serve, self._connections)

    def stop(self) -> None:
        """End all connections."""
        for connection in [*self._connections]:
            connection.end(b"")

    async def _serve(self, connection: LineConnection) -> None:
        try:
            while (line := await connection.read_line()) is not None:
                answer = await self._answer(line, connection.peer)
                connection.is_admitted |= not answer.startswith(b"ERR")
                await connection.write(answer)
        except TooLong as err:
            await connection.write(f"ERR bad_request: {err}\n".encode())
        except OtherProtocol as other:
            await self._service.dismiss(connection, str(other))

    async def _answer(self, line: bytes, peer: str) -> bytes:
        try:
            question = Question(line)
            self._service.authorize(question.token, peer, "GET_STATUS")
            place = await self._service.run(self._locate, question.seq)
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

    def _locate(self, seq: int) -> RecordPlace | bytes:
        """Return where the record is, or the answer if it is nowhere."""
        if not self._finder.is_numbered(seq):
            return b"UNKNOWN\n"
        # Asked before the search: a record routed during the search must not be taken for gone.
        is_routed = self._finder.is_routed(seq)
        return self._finder.find(seq) or (b"UNKNOWN\n" if is_routed else b"PENDING\n")
