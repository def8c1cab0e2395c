"""The door's connection to ingress: sends units of lines, each with its producer's name, and matches the replies.

    units.send(b"k7.1.0", b"orders.@0||1|…\n", 1, …)    → b"!unit 1 40 p=k7.1.0\n" and the lines; reply !ack 1 501
                                                         → [SeqRun(1, 501, …)]

Invariant   Units are sent in the order in which they are handed over. If the connection breaks, units without all
            replies are sent again in the same order on the next one. Each line has an id, so it is stored once.
            After a refusal of the whole connection (a full disk, too few replicas) nothing more is sent on it, and all
            waiting units are refused, too: on the next connection a unit could be stored although an earlier one was
            not. Where the framer refuses only lines, the connection continues. So a unit says which id of its name must
            be stored before it.
            A newer gateway of this broker fences this one: from then on every unit is refused.
Memory      _MOST_BYTES of lines without a reply. `room` waits until there are fewer. It does not reserve room.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from kmq.client.connection import backoff
from kmq.config.settings import Settings
from kmq.config.values import KIB, MIB
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.ingress import reserved_address
from kmq.logfmt import Logger
from kmq.message.record import count_lines
from kmq.wire import refusals

UNIT_BYTES = 64 * KIB  # that a unit may have besides the longest line (kmq/ingress/hello.py)
SPARE = b"producer=__kafka-spare reserved=spare"  # the hello of a connection that may write to a full disk
_MOST_BYTES = 64 * MIB
_ENTRY_BYTES = 500  # of a unit besides its text
_ANSWER_S = 5.0  # until ingress must have taken the hello
_JOINED = 16 * KIB  # bytes of a unit that is sent at once
_HIGH_BYTES = MIB  # of the socket's buffer in this process


class SeqRun(NamedTuple):
    """Lines of a unit that follow one another with consecutive seqs. `seq`: of the first; 0: no longer known."""

    lines: int
    seq: int
    is_duplicate: bool


class _Unit:
    """A unit that has not all its replies.

    `on_refused` is called at once for a refusal, before any later batch is judged. Its argument: may lines be stored?
    """

    __slots__ = ("after", "count", "future", "is_sent", "left", "name", "on_refused", "refused", "runs", "text")

    def __init__(
        self,
        name: bytes,
        text: bytes,
        count: int,
        future: "asyncio.Future[list[SeqRun]]",
        on_refused: Callable[[bool], None],
        after: int | None,
    ) -> None:
        self.after, self.is_sent = after, False
        self.name, self.text, self.count, self.future, self.on_refused = name, text, count, future, on_refused
        self.begin()

    def begin(self) -> None:
        """Forget the replies, because the unit is sent again."""
        self.left = self.count
        self.runs: list[SeqRun] = []
        self.refused: RequestRefused | None = None

    def head(self) -> bytes:
        after = b"" if self.after is None else b" after=%d" % self.after
        return b"!unit %d %d p=%b%b\n" % (self.count, len(self.text), self.name, after)

    def settle(self) -> None:
        """Set the result: all lines have their replies."""
        if self.refused is not None:
            self.refuse(self.refused)
        elif not self.future.done():
            self.future.set_result(self.runs)

    def refuse(self, refused: RequestRefused) -> None:
        """Set the refusal as the result: not all of the unit is stored."""
        self.on_refused(bool(self.runs) or (self.is_sent and self.left > 0))
        if not self.future.done():
            self.future.set_exception(refused)
            self.future.exception()  # its caller may have gone


class _Question:
    """A question for the last id of a name."""

    __slots__ = ("future", "name")
    text = b""

    def __init__(self, name: bytes, future: "asyncio.Future[int]") -> None:
        self.name, self.future = name, future

    def head(self) -> bytes:
        return b"!unit 0 0 p=%b\n" % self.name

    def refuse(self, refused: RequestRefused) -> None:
        """Set the refusal as the result: the last id cannot be asked for."""
        if not self.future.done():
            self.future.set_exception(refused)
            self.future.exception()


class Units:
    """The units that the door sends to ingress. Make it inside the event loop."""

    def __init__(self, settings: Settings, log: Logger, hello: bytes = b"producer=__kafka reserved=1") -> None:
        """`hello`: the name whose newer connection fences the older one, and what the connection may do."""
        self._settings, self._log, self._hello = settings, log, hello
        self._waiting: deque[_Unit | _Question] = deque()  # units without all replies, in order
        self._sent = 0  # how many of them were sent on this connection
        self._nbytes = 0
        self._answered = 0  # lines of this connection
        self._link: _Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._freed = asyncio.Event()
        self._refusal: RequestRefused | None = None  # why ingress accepts nothing more on this connection
        self._told = ""  # the code of the last refusal logged, until a line is stored again
        self._closed = ""  # why no unit is accepted any more

    # --- what callers do ---------------------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until another unit may be handed over."""
        while self._nbytes >= _MOST_BYTES and not self._closed:
            self._freed.clear()
            await self._freed.wait()

    def send(
        self, name: bytes, text: bytes, count: int, on_refused: Callable[[bool], None], after: int | None = None
    ) -> "asyncio.Future[list[SeqRun]]":
        """Hand over lines that belong together. The result: their seqs. Raises RequestRefused, also through the future.

        `after`: the lines have ids without a gap, and are refused unless this id of the name, or a later one, is
        stored. None: their ids only rise.
        """
        future: asyncio.Future[list[SeqRun]] = asyncio.get_running_loop().create_future()
        self._put(_Unit(name, text, count, future, on_refused, after))
        return future

    def last_id(self, name: bytes) -> "asyncio.Future[int]":
        """Ask for the last stored id of a name; 0: not known; FORGOTTEN: it may have been forgotten."""
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
        """Send waiting units, as far as the socket takes them. Connect first if needed."""
        link = self._link
        if link is None:
            if self._connecting is None or self._connecting.done():
                self._connecting = asyncio.create_task(self._connect())
            return
        while self._sent < len(self._waiting) and not (link.is_full or self._refusal is not None):
            unit = self._waiting[self._sent]
            self._sent += 1
            if isinstance(unit, _Unit):
                unit.is_sent = True
            if len(unit.text) <= _JOINED:
                link.transport.write(unit.head() + unit.text)
            else:  # joining the two would copy a megabyte
                link.transport.write(unit.head())
                link.transport.write(unit.text)

    async def _connect(self) -> None:
        """Open a connection; retry until that works."""
        attempt = 0
        while not self._closed:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    return await self._open()
            except (OSError, TimeoutError, KmqError):
                await asyncio.sleep(backoff(attempt))
                attempt += 1

    async def _open(self) -> None:
        server = reserved_address(self._settings)
        _, link = await asyncio.get_running_loop().create_connection(lambda: _Link(self), server.host, server.port)
        epoch = b"" if server.epoch is None else b" epoch=%d" % server.epoch
        link.transport.write(b"!hello acks=1 %b%b token=%b\n" % (self._hello, epoch, server.token.encode()))
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
        """Continue on another connection."""
        if link is not self._link:
            return
        self._link = None
        if self._refusal is not None:  # units sent after the refused line are refused, too
            self._refuse_all(self._refusal)
        elif self._waiting and not self._closed:
            self.write()

    # --- replies -----------------------------------------------------------------------------------------------------

    def take(self, reply: bytes) -> None:
        """Handle one reply. Raises ValueError for a reply that matches nothing that was sent."""
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
            # Each line that was stored before has a reply of its own.
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
        if isinstance(first, _Question):  # a refused connection refuses it like a message
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
        """Remove the first waiting entry, because it is answered."""
        self._nbytes -= len(self._waiting.popleft().text) + _ENTRY_BYTES
        self._sent -= 1

    def _next(self) -> None:
        """After a reply: make room, and leave a connection that accepts nothing more."""
        self._freed.set()
        if self._refusal is not None and not self._sent and self._link is not None:
            link, self._link = self._link, None
            link.transport.close()
            self._refuse_all(self._refusal)

    def _refuse_all(self, refused: RequestRefused) -> None:
        """Refuse all waiting units: on another connection one could be stored although an earlier batch was not."""
        if refused.code != self._told and not self._closed:
            self._told = refused.code
            self._log.warn("kafka_produce_refused", reason=f"{refused.code} {refused}", effect="its clients send again")
        waiting, self._waiting = self._waiting, deque()
        self._sent = self._nbytes = 0
        for unit in waiting:
            unit.refuse(refused)
        self._freed.set()

    def _end(self, why: str) -> None:
        """Refuse every unit from now on."""
        self._closed = why
        self._refuse_all(RequestRefused("stopping", why))


def split(text: bytes, count: int, most: int) -> Iterator[tuple[bytes, int]]:
    """Yield whole lines of at most `most` bytes, and their number. No line is longer."""
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
            self.transport.abort()  # which lines have replies is unknown now, so all are sent again

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionResetError("ingress has closed the connection"))
            self.greeted.exception()
        self._units.lost(self)
