"""The gateway's connection to ingress for records of topic `__consumer_offsets`: kmq.client's protocol core, unchanged.

Order       Commits leave in the order of the calls, and keep it whatever breaks. The producer's name is the same for
            every gateway of a broker: a new connection fences the older one, and its ids go on after the last one that
            is stored. So what an older connection, or a gateway that was killed, has left in a socket is refused or
            known as stored (`!dup`). It never lands behind a newer commit.
Batches     All rows of a commit are one delivery. Commits of one turn of the event loop leave with one write, and the
            broker syncs them together.
Memory      At most _IN_FLIGHT rows and _IN_FLIGHT_BYTES, and _WAITING commits in front of them; then `busy`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from kmq.access import local_token
from kmq.client.delivery import Delivery, Options
from kmq.client.failures import NotAnswered, Refused
from kmq.client.lines import read_port
from kmq.client.producer_aio import Link
from kmq.client.producer_core import Core
from kmq.config.settings import Settings
from kmq.config.values import MIB
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused
from kmq.message.text import format_text

PRODUCER = "__offsets"
_PATIENCE_S = 15.0  # until a commit fails: a stage that is restarted takes a few seconds
_IN_FLIGHT, _IN_FLIGHT_BYTES = 20_000, 8 * MIB
_WAITING = 1000  # commits that wait for room
_REPLACE_S = 1.0  # shortest time before a connection that ingress refused for good is replaced

Line = tuple[bytes, bytes]  # routing key, payload


class OffsetWriter:
    """Writes records through the WAL. `stored` is called with each list of lines that is durable, and their seqs."""

    def __init__(
        self,
        settings: Settings,
        stored: Callable[[Sequence[Line], Sequence[int]], None],
        stalled: Callable[[str], None],
    ) -> None:
        """`stalled` is called with a text when no reply comes for some seconds."""
        self._settings, self._stored, self._stalled = settings, stored, stalled
        self._order = asyncio.Lock()
        self._waiting = 0
        self._open()

    def _open(self) -> None:
        options = Options(
            producer=PRODUCER,
            reserved=True,
            retry=frozenset(),  # a refusal is told at once: the door knows how long its client wants to wait
            delivery_timeout_s=_PATIENCE_S,
            max_in_flight=_IN_FLIGHT,
            max_in_flight_bytes=_IN_FLIGHT_BYTES,
            on_stall=self._stalled,
        )
        self._core = Core(options)
        self._link = Link(self._core, self._address)
        self._opened = time.monotonic()

    def _address(self) -> tuple[str, int, str]:
        """Return where ingress listens now, and the token by which it knows a program of its pod."""
        settings = self._settings
        return settings.host, read_port(settings, "ingress", settings.port), local_token.read(settings)

    async def write(self, lines: Sequence[Line]) -> None:
        """Return once all lines are durable. Raises RequestRefused; then some of them may be durable all the same.

        A caller that is cancelled changes nothing: lines that were queued are written, and `stored` hears of them.
        """
        if self._waiting >= _WAITING:
            raise RequestRefused("busy", f"{_WAITING} commits wait already")
        self._waiting += 1
        try:
            async with asyncio.timeout(_PATIENCE_S), self._order:  # in the order of the calls, row by row
                await self._await_room()
                outcome = self._queue(lines)
        except TimeoutError:
            raise RequestRefused(
                "busy", f"no room for another commit: {self._core.describe(time.monotonic())}"
            ) from None
        finally:
            self._waiting -= 1
        await outcome

    async def _await_room(self) -> None:
        if self._core.failed is not None and time.monotonic() - self._opened > _REPLACE_S:
            await self._link.end()
            self._open()
        if self._core.window.is_full:
            core = self._core
            await self._link.wait(lambda: core.failed is not None or core.window.is_half_free)
        if self._core.failed is not None:
            raise _refusal_of(self._core.failed)

    def _queue(self, lines: Sequence[Line]) -> "asyncio.Future[None]":
        core, now = self._core, time.time()
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(delivery: Delivery) -> None:
            seqs = delivery.seqs
            if any(seqs):
                self._stored(lines, seqs)
            if outcome.done():
                return  # the caller was cancelled
            if delivery.error is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(_refusal_of(delivery.error))

        delivery = Delivery(done)
        data = b"".join(format_text(key, payload or None, core.ids.make(), now) for key, payload in lines)
        delivery.is_provisional = core.ids.is_provisional
        core.add_lines(delivery, data, len(lines))
        self._link.queued()
        return outcome

    async def close(self) -> None:
        """End; commits without a reply fail, though they may be stored."""
        await self._link.end()


def _refusal_of(err: KmqError) -> RequestRefused:
    if isinstance(err, Refused):
        return RequestRefused(err.code, err.reason.partition(" ")[2])
    return RequestRefused("not_answered" if isinstance(err, NotAnswered) else "stopping", str(err))
