"""The door's connection to ingress: units of lines, each with the name of its producer, and what becomes of them.

Invariant   Units are sent in the order in which they are handed over. What has no reply when the connection breaks is sent
            again, in the same order, on the next one: each line has an id, so it is stored once.
            After a refusal of the whole connection (a full disk, too few replicas) nothing more is sent on it, and what
            waits is refused with it: on the next connection it could be stored although what came before was not.
            Where the framer refuses lines, the connection goes on. So a unit says which id of its name must be stored
            before it.
            A newer gateway of this broker fences this one: from then on everything is refused.
Memory      _MOST_BYTES of lines without a reply. `room` waits until there are fewer, and is no reservation.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from kmq.access import local_token
from kmq.client.connection import backoff
from kmq.client.lines import read_port
from kmq.config.settings import Settings
from kmq.config.values import KIB, MIB
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused
from kmq.logfmt import Logger
from kmq.message.record import count_lines
from kmq.wire import refusals

UNIT_BYTES = 64 * KIB  # that a unit may have beside the longest line (kmq/ingress/hello.py)
SPARE = b"producer=__kafka-spare reserved=spare"  # the hello of a connection that may write to a full disk
_MOST_BYTES = 64 * MIB
_ENTRY_BYTES = 500  # of a unit beside its text
_ANSWER_S = 5.0  # until ingress must have taken the hello
_JOINED = 16 * KIB  # bytes of a unit that is sent at once
_HIGH_BYTES = MIB  # of the socket's buffer in this process


class SeqRun(NamedTuple):
    """Lines that follow one another in a unit and have consecutive seqs. `seq`: of the first; 0: it is not known any more."""

    lines: int
    seq: int
    is_duplicate: bool


class _Unit:
    """A unit without all its replies. `on_refused` hears of a refusal at once, before anything else is judged."""

    __slots__ = ("after", "count", "future", "left", "name", "on_refused", "refused", "runs", "text")

    def __init__(
        self,
        name: bytes,
        text: bytes,
        count: int,
        future: "asyncio.Future[list[SeqRun]]",
        on_refused: Callable[[], None],
        after: int | None,
    ) -> None:
        self.after = after
        self.name, self.text, self.count, self.future, self.on_refused = name, text, count, future, on_refused
        self.begin()

    def begin(self) -> None:
        """Forget the replies: it is sent again."""
        self.left = self.count
        self.runs: list[SeqRun] = []
        self.refused: RequestRefused | None = None

    def head(self) -> bytes:
        after = b"" if self.after is None else b" after=%d" % self.after
        return b"!unit %d %d p=%b%b\n" % (self.count, len(self.text), self.name, after)

    def settle(self) -> None:
        """Tell who waits: all lines have their replies."""
        if self.refused is not None:
            self.refuse(self.refused)
        elif not self.future.done():
            self.future.set_result(self.runs)

    def refuse(self, refused: RequestRefused) -> None:
        """Tell who waits that not all of it is stored."""
        self.on_refused()
        if not self.future.done():
            self.future.set_exception(refused)
            self.future.exception()  # who waited may have given up


class _Question:
    """A question for the last id of a name."""

    __slots__ = ("future", "name")
    text = b""

    def __init__(self, name: bytes, future: "asyncio.Future[int]") -> None:
        self.name, self.future = name, future

    def head(self) -> bytes:
        return b"!unit 0 0 p=%b\n" % self.name

    def refuse(self, refused: RequestRefused) -> None:
        """Tell who waits that nobody knows."""
        if not self.future.done():
            self.future.set_exception(refused)
            self.future.exception()


class Units:
    """What the door sends to ingress. Make it inside the event loop."""

    def __init__(self, settings: Settings, log: Logger, hello: bytes = b"producer=__kafka reserved=1") -> None:
        """`hello`: the name whose newer connection fences the older one, and what the connection may do."""
        self._settings, self._log, self._hello = settings, log, hello
        self._waiting: deque[_Unit | _Question] = deque()  # without all replies, in order
        self._sent = 0  # how many of them were sent on this connection
        self._nbytes = 0
        self._answered = 0  # lines of this connection
        self._link: _Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._freed = asyncio.Event()
        self._refusal: RequestRefused | None = None  # why ingress takes nothing more on this connection
        self._told = ""  # the code of these refusals that the log has had, until a line is stored again
        self._closed = ""  # why nothing is taken any more

    # --- what callers do ---------------------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until another unit may be handed over."""
        while self._nbytes >= _MOST_BYTES and not self._closed:
            self._freed.clear()
            await self._freed.wait()

    def send(
        self, name: bytes, text: bytes, count: int, on_refused: Callable[[], None], after: int | None = None
    ) -> "asyncio.Future[list[SeqRun]]":
        """Hand over lines that belong together. The result: their seqs. Raises RequestRefused, also through the future.

        `after`: they have ids without a gap, and are refused unless this id of the name, or a later one, is stored. None:
        their ids only rise.
        """
        future: asyncio.Future[list[SeqRun]] = asyncio.get_running_loop().create_future()
        self._put(_Unit(name, text, count, future, on_refused, after))
        return future

    def last_id(self, name: bytes) -> "asyncio.Future[int]":
        """Ask for the last id that is stored of a name; 0: it is not known."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._put(_Question(name, future))
        return future

    async def close(self) -> None:
        self._end("the gateway is stopping")
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.transport.abort()

    # --- sending -----------------------------------------------------------------------------------------------------

    def _put(self, unit: "_Unit | _Question") -> None:
        if self._closed:
            raise RequestRefused("stopping", self._closed)
        self._waiting.append(unit)
        self._nbytes += len(unit.text) + _ENTRY_BYTES
        self.write()

    def write(self) -> None:
        """Send what waits, as far as the socket takes it; connect first if need be."""
        link = self._link
        if link is None:
            if self._connecting is None or self._connecting.done():
                self._connecting = asyncio.create_task(self._connect())
            return
        while self._sent < len(self._waiting) and not (link.is_full or self._refusal is not None):
            unit = self._waiting[self._sent]
            self._sent += 1
            if len(unit.text) <= _JOINED:
                link.transport.write(unit.head() + unit.text)
            else:  # to join the two would copy a megabyte
                link.transport.write(unit.head())
                link.transport.write(unit.text)

    async def _connect(self) -> None:
        """Open a connection, however often it takes."""
        attempt = 0
        while not self._closed:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    return await self._open()
            except (OSError, TimeoutError, KmqError):
                await asyncio.sleep(backoff(attempt))
                attempt += 1

    async def _open(self) -> None:
        settings = self._settings
        port = read_port(settings, "ingress", settings.port)
        _, link = await asyncio.get_running_loop().create_connection(lambda: _Link(self), settings.host, port)
        token = local_token.read(settings).encode()
        link.transport.write(b"!hello acks=1 %b token=%b\n" % (self._hello, token))
        try:
            hello = await link.greeted
        except BaseException:
            link.transport.abort()
            raise
        if not hello.startswith(b"!ok"):
            link.transport.abort()
            code, _, reason = hello.removeprefix(b"!err 0 ").decode(errors="replace").partition(" ")
            return self._refuse_all(RequestRefused(code, reason))
        self._sent = self._answered = 0
        self._refusal = None
        for unit in self._waiting:
            if isinstance(unit, _Unit):
                unit.begin()
        self._link = link
        self.write()

    def lost(self, link: "_Link") -> None:
        """Go on with another connection."""
        if link is not self._link:
            return
        self._link = None
        if self._refusal is not None:  # what was sent behind the refused line is refused too
            self._refuse_all(self._refusal)
        elif self._waiting and not self._closed:
            self.write()

    # --- replies -----------------------------------------------------------------------------------------------------

    def take(self, reply: bytes) -> None:
        """Take one reply. Raises ValueError for one that fits to nothing that was sent."""
        verb, _, rest = reply.partition(b" ")
        if verb == b"!last":
            question = self._waiting[0] if self._sent else None
            if not isinstance(question, _Question):
                raise ValueError("a last id that nobody asked for")
            self._drop()
            if not question.future.done():
                question.future.set_result(int(rest))
            return self._next()
        number, _, rest = rest.partition(b" ")
        count = int(number) - self._answered
        if verb == b"!ack":
            self._acked(count, int(rest) - count + 1)
        elif count == 1 and verb == b"!dup":
            self._acked(1, int(rest), is_duplicate=True)
        elif count == 1 and verb == b"!err":
            self._refused(rest)
        else:
            raise ValueError("no reply")
        self._answered += count

    def _head(self) -> _Unit:
        unit = self._waiting[0] if self._sent else None
        if not isinstance(unit, _Unit):
            raise ValueError("a reply to a line that was not sent")
        return unit

    def _acked(self, count: int, seq: int, is_duplicate: bool = False) -> None:
        self._told = ""
        while count > 0:
            unit = self._head()
            some = min(count, unit.left)
            last = unit.runs[-1] if unit.runs else None
            # Lines that were stored before are told one by one.
            if last and is_duplicate and last.is_duplicate and seq and last.seq + last.lines == seq:
                unit.runs[-1] = last._replace(lines=last.lines + some)
            else:
                unit.runs.append(SeqRun(some, seq, is_duplicate))
            count -= some
            seq += some
            self._pass(unit, some)

    def _refused(self, text: bytes) -> None:
        code, _, reason = text.decode(errors="replace").partition(" ")
        if code == "fenced":
            return self._end("a newer gateway of this broker has taken over")
        if refusals.find(code).scope == refusals.CONNECTION:
            self._refusal = RequestRefused(code, reason)
        first = self._waiting[0] if self._sent else None
        if isinstance(first, _Question):  # on a refused connection it is a message
            self._drop()
            first.refuse(RequestRefused(code, reason))
            return self._next()
        unit = self._head()
        if unit.refused is None:
            unit.refused = RequestRefused(code, reason)
        self._pass(unit, 1)

    def _pass(self, unit: _Unit, lines: int) -> None:
        unit.left -= lines
        if not unit.left:
            self._drop()
            unit.settle()
            self._next()

    def _drop(self) -> None:
        """Take the first of what waits away, because it is answered."""
        self._nbytes -= len(self._waiting.popleft().text) + _ENTRY_BYTES
        self._sent -= 1

    def _next(self) -> None:
        """After a reply: make room, and leave a connection on which nothing is taken any more."""
        self._freed.set()
        if self._refusal is not None and not self._sent and self._link is not None:
            link, self._link = self._link, None
            link.transport.close()
            self._refuse_all(self._refusal)

    def _refuse_all(self, refused: RequestRefused) -> None:
        """Refuse everything that waits: on another connection it could be stored although a batch before it was not."""
        if refused.code != self._told and not self._closed:
            self._told = refused.code
            self._log.warn("kafka_produce_refused", reason=f"{refused.code} {refused}", effect="its clients send again")
        waiting, self._waiting = self._waiting, deque()
        self._sent = self._nbytes = 0
        for unit in waiting:
            unit.refuse(refused)
        self._freed.set()

    def _end(self, why: str) -> None:
        """Refuse everything from now on."""
        self._closed = why
        self._refuse_all(RequestRefused("stopping", why))


def split(text: bytes, count: int, most: int) -> Iterator[tuple[bytes, int]]:
    """Yield whole lines of at most `most` bytes, and how many they are. No line is longer."""
    at = 0
    while len(text) - at > most:
        end = text.rindex(b"\n", at, at + most) + 1
        some = text[at:end]
        lines = count_lines(some)
        yield some, lines
        at, count = end, count - lines
    yield text[at:], count


class _Link(asyncio.Protocol):
    """One connection to ingress."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self.transport: Any = None
        self.is_full = False
        self.greeted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._partial = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=_HIGH_BYTES)
        with suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._units.write()

    def data_received(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if lines and not self.greeted.done():
            self.greeted.set_result(lines.pop(0))
        try:
            for line in lines:
                self._units.take(line)
        except ValueError:
            self.transport.abort()  # nobody knows what was answered: everything is sent again

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionResetError("ingress has closed the connection"))
            self.greeted.exception()
        self._units.lost(self)
