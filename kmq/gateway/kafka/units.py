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
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kmq.config.settings import Settings
from kmq.config.values import KIB, MIB
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused, refusal_of
from kmq.gateway.core.ingress import reserved_address
from kmq.logfmt import Logger
from kmq.message.record import count_lines
from kmq.sending.delivery import Delivery
from kmq.sending.failures import Refused
from kmq.sending.protocol import OK, Replies, format_hello, read_greeting
from kmq.sending.window import SendWindow, backoff
from kmq.wire import refusals

UNIT_BYTES = 64 * KIB  # that a unit may have besides the longest line (kmq/ingress/hello.py)
_HELLO = "producer=__kafka", "reserved=1"
SPARE = "producer=__kafka-spare", "reserved=spare"  # the hello of a connection that may write to a full disk
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


class _Unit(Delivery):
    """A unit that has not all its replies, or a question for the last id of a name: a unit of 0 lines.

    `on_refused` is called at once for a refusal, before any later batch is judged. Its argument: may lines be stored?
    """

    __slots__ = ("future", "head", "on_refused")

    def __init__(
        self, head: bytes, future: "asyncio.Future[Any]", on_refused: Callable[[bool], None] | None = None
    ) -> None:
        super().__init__(_settle)
        self.head, self.future, self.on_refused = head, future, on_refused

    def seq_runs(self) -> list[SeqRun]:
        if self.count == 1:
            return [SeqRun(1, self.seq, bool(self.duplicates))]
        if not self.duplicates:
            return [SeqRun(lines, seq, False) for _, seq, lines in self.runs]
        runs, repeated = list[SeqRun](), {place for place, _ in self.duplicates}
        for place, seq, lines in self.runs:
            last = runs[-1] if runs else None
            is_duplicate = place in repeated
            # Each line that was stored before has a reply of its own.
            if last and is_duplicate and last.is_duplicate and seq and last.seq + last.lines == seq:
                runs[-1] = last._replace(lines=last.lines + lines)
            else:
                runs.append(SeqRun(lines, seq, is_duplicate))
        return runs


def _settle(unit: Delivery) -> None:
    """Set the result of a unit or question that has its outcome."""
    assert isinstance(unit, _Unit)
    future, error = unit.future, unit.error
    if error is None:
        if not future.done():
            future.set_result(unit.seq_runs() if unit.count else unit.seq)
        return
    if unit.on_refused is not None:
        unit.on_refused(unit.seq >= 0 or (unit.may_be_stored and unit.answered < unit.count))
    if not future.done():
        future.set_exception(refusal_of(error, {}))
        future.exception()  # its caller may have gone


class Units:
    """The units that the door sends to ingress. Make it inside the event loop."""

    def __init__(self, settings: Settings, log: Logger, hello: Sequence[str] = _HELLO) -> None:
        """`hello`: the name whose newer connection fences the older one, and what the connection may do."""
        self._settings, self._log, self._hello = settings, log, hello
        self._window = SendWindow(max_in_flight=sys.maxsize, max_in_flight_bytes=_MOST_BYTES)
        self._link: _Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._freed = asyncio.Event()
        self._logged = ""  # the code of the last refusal logged, until a line is stored again
        self._closed = ""  # why no unit is accepted any more

    # --- what callers do ---------------------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until another unit may be handed over."""
        while self._window.is_full and not self._closed:
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
        condition = b"" if after is None else b" after=%d" % after
        head = b"!unit %d %d p=%b%b\n" % (count, len(text), name, condition)
        self._put(_Unit(head, future, on_refused), text, count)
        return future

    def last_id(self, name: bytes) -> "asyncio.Future[int]":
        """Ask for the last stored id of a name; 0: not known; FORGOTTEN: it may have been forgotten."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._put(_Unit(b"!unit 0 0 p=%b\n" % name, future), b"", 0)
        return future

    async def close(self) -> None:
        self._end("the gateway is stopping")
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.transport.abort()

    # --- sending -----------------------------------------------------------------------------------------------------

    def _put(self, unit: _Unit, text: bytes, count: int) -> None:
        if self._closed:
            raise RequestRefused("stopping", self._closed)
        self._window.enqueue(unit, text, count, _ENTRY_BYTES)
        self.write()

    def write(self) -> None:
        """Send waiting units, as far as the socket takes them. Connect first if needed."""
        link = self._link
        if link is None:
            if self._connecting is None or self._connecting.done():
                self._connecting = asyncio.create_task(self._connect())
            return
        window = self._window
        while window.queue and not (link.is_full or link.replies.refusing):
            unit = window.next()
            assert isinstance(unit, _Unit)
            unit.may_be_stored = True
            if len(unit.data) <= _JOINED:
                link.transport.write(unit.head + unit.data)
            else:  # joining the two would copy a megabyte
                link.transport.write(unit.head)
                link.transport.write(unit.data)

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
        link.transport.write(format_hello(*self._hello, epoch=server.epoch, token=server.token))
        try:
            verb, reason = read_greeting(await link.greeted)
        except BaseException:
            link.transport.abort()
            raise
        if verb != OK:
            link.transport.abort()
            return self._refuse_all(reason)
        self._link = link
        self.write()

    def lost(self, link: "_Link") -> None:
        """Continue on another connection."""
        if link is not self._link:
            return
        self._link = None
        if link.replies.refusing:  # units sent after the refused line are refused, too
            return self._refuse_all(link.replies.refusing)
        self._window.requeue(whole=True)
        if self._window.queue and not self._closed:
            self.write()

    # --- replies -----------------------------------------------------------------------------------------------------

    def receive(self, lines: list[bytes], link: "_Link") -> None:
        """Handle replies. Raises ValueError or IndexError for a reply that matches nothing that was sent."""
        window, replies = self._window, link.replies
        try:
            for line in lines:
                if line.startswith(b"!last "):
                    window.answer(int(line[6:]))
                    continue
                verb, count, text = replies.parse(line)
                if verb == b"!ack":
                    window.stored(count, int(text) - count + 1)
                elif count == 1 and verb == b"!dup":
                    window.stored_before(int(text))
                elif count == 1 and verb == b"!err":
                    self._refused(replies, text.decode(errors="replace"))
                    continue
                else:
                    raise ValueError("no reply")
                self._logged = ""
        finally:
            window.call_back()
            self._freed.set()
        if replies.refusing and not window.flying and link is self._link:  # leave: it accepts nothing more
            self._link = None
            link.transport.close()
            self._refuse_all(replies.refusing)

    def _refused(self, replies: Replies, reason: str) -> None:
        """Handle the refusal of a line, a question, or all further lines of the connection."""
        refused = Refused(reason)
        if refused.code == "fenced":
            return self._end("a newer gateway of this broker has taken over")
        if refusals.find(refused.code).scope == refusals.CONNECTION:
            replies.refusing = reason
        self._window.refuse(refused)

    def _refuse_all(self, reason: str) -> None:
        """Refuse all waiting units: on another connection one could be stored although an earlier batch was not."""
        refused = Refused(reason)
        if refused.code != self._logged and not self._closed:
            self._logged, shown = refused.code, refusal_of(refused, {})
            self._log.warn("kafka_produce_refused", reason=f"{shown.code} {shown}", effect="its clients send again")
        window = self._window
        if window.flying:
            window.flying[0].error = None  # of a part of its lines: the whole unit is refused now
        window.fail_all(refused)
        window.call_back()
        self._freed.set()

    def _end(self, why: str) -> None:
        """Refuse every unit from now on."""
        self._closed = why
        self._refuse_all(f"stopping {why}")


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
        self.replies = Replies()

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
        try:
            lines = self.replies.split(data)
            if lines and not self.greeted.done():
                self.greeted.set_result(lines.pop(0))
            self._units.receive(lines, self)
        except (ValueError, IndexError, Refused):
            self.transport.abort()  # which lines have replies is unknown now, so all are sent again

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionResetError("ingress has closed the connection"))
            self.greeted.exception()
        self._units.lost(self)
