"""Reading one partition for consumers: from an offset on, what is durable and routed, waiting for more if asked to.

Invariant   Nothing above the router's watermark is shown. An offset never changes its record.
Memory      At most _THREADS reads at a time, each of at most its limit's bytes, or of one longer record. The reading
            thread turns the records into what the door sends, so nobody holds both for long.
Not covered Waiting looks at the partition whenever the router has written anything, also for other topics.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from kmq.client.message import Message, messages
from kmq.gateway.core.bounds import Bounds
from kmq.gateway.core.broker import Broker
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.refused import RequestRefused
from kmq.log import checkpoint, identity, reader
from kmq.log.damage import DamageError
from kmq.log.reader import LogReader
from kmq.settings import KIB

EARLIEST, LATEST = "earliest", "latest"
_THREADS = 4
_CHUNK_BYTES = 256 * KIB  # read at once
_LOOK_S = 0.5  # longest time until a waiting call notices that its client has gone

T = TypeVar("T")


class Fetched(NamedTuple):
    """Records of a partition. `next_offset`: where the next call continues; `end_offset`: of the partition now."""

    messages: list[Message]
    next_offset: int
    end_offset: int


class Limit(NamedTuple):
    """How much one call may return, and how long (s) it may wait for a first message."""

    messages: int
    nbytes: int
    wait_s: float = 0.0


class Fetching:
    """Reads for all doors. Every method may raise RequestRefused."""

    def __init__(self, broker: Broker, watermark: Watermark) -> None:
        self._data, self._router = broker.settings.data, broker.page.rows["router"]
        self._watermark, self._bounds = watermark, Bounds(broker.settings.data)
        self._marks_from = identity.marks_from(self._data)
        self._threads = ThreadPoolExecutor(_THREADS, "fetching")
        self._routed = checkpoint.routed_seq(self._data)  # the highest known: a router that starts shows 0 for a while

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except DamageError as err:
            fields = {name: getattr(err, name) for name in ("path", "byte", "end", "first_offset", "next_offset")}
            raise RequestRefused("damaged", str(err), **fields) from err

    # --- where to begin ----------------------------------------------------------------------------------------------

    async def begin(self, topic: str, partition: int, at: str) -> int:
        """Return the offset of EARLIEST or LATEST."""
        return await self._run(self._begin, topic, partition, at)

    def _begin(self, topic: str, partition: int, at: str) -> int:
        first, _ = self._bounds.of(topic, partition)
        return first if at == EARLIEST else self._end(self._log(topic, partition))

    async def at_time(self, topic: str, partition: int, micros: int) -> int:
        """Return the offset of the first record received at that time (µs) or later; the end if there is none."""
        return await self._run(lambda: self._log(topic, partition).offset_of_time(micros))

    def _log(self, topic: str, partition: int) -> LogReader:
        return reader.partition(self._data, topic, partition)

    def _seen(self) -> int:
        """Return the seq up to which records may be shown."""
        self._routed = max(self._routed, self._watermark.routed)
        return self._routed

    def _end(self, log: LogReader) -> int:
        """Return the offset behind the last record that may be shown."""
        routed = self._seen()
        end = log.end_offset()
        stamp = log.stamp_at_end(end)
        return end if stamp is not None and stamp[0] <= routed else min(end, log.offset_of_seq(routed + 1))

    # --- reading -----------------------------------------------------------------------------------------------------

    async def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        limit: Limit,
        shape: Callable[[Fetched], T],
        is_gone: Callable[[], bool] = lambda: False,
    ) -> T:
        """Read records from `offset` on, and return what `shape` makes of them, in a thread.

        Without a record, wait for one as long as the limit says, or until the client `is_gone`.
        """

        def read() -> tuple[bool, int, int, T]:
            found = self._fetch(topic, partition, offset, limit)
            return bool(found.messages), found.next_offset, found.end_offset, shape(found)

        deadline = time.monotonic() + limit.wait_s
        while True:
            routed = self._seen()
            has_some, offset, end, shaped = await self._run(read)
            left = deadline - time.monotonic()
            if has_some or left <= 0 or not await self._moved(routed, topic, partition, end, left, is_gone):
                return shaped

    async def _moved(
        self, routed: int, topic: str, partition: int, end: int, wait_s: float, is_gone: Callable[[], bool]
    ) -> bool:
        """Wait until the partition may have grown beyond `end`; return False if that did not happen in time."""
        deadline = time.monotonic() + wait_s
        while (left := deadline - time.monotonic()) > 0 and not is_gone():
            try:
                async with asyncio.timeout(min(left, _LOOK_S)):
                    await self._watermark.passed(routed + 1)
            except TimeoutError:
                continue
            except RequestRefused:  # the gateway stops
                return False
            routed = self._seen()
            if (await self._run(self._bounds.of, topic, partition))[1] > end:
                return True
        return False

    def _fetch(self, topic: str, partition: int, offset: int, limit: Limit) -> Fetched:
        routed, log = self._seen(), self._log(topic, partition)
        first, end = self._bounds.of(topic, partition)
        if not first <= offset <= end:
            if self._router.state_name != "ready" and offset > end:
                raise RequestRefused("not_ready", "the router is down or recovers, so the end of the log is unknown")
            text = f"offset {offset}: {topic}/{partition} has {first} to {end}"
            raise RequestRefused("out_of_range", text, field="offset", first=first, end=end)
        found: list[Message] = []
        nbytes = 0
        while offset < end and len(found) < limit.messages and nbytes < limit.nbytes:
            room = limit.nbytes - nbytes
            try:
                begin, lines = log.read(offset, min(_CHUNK_BYTES, room))
            except DamageError:
                if found:  # the next call hears of it
                    break
                raise
            if not lines or (found and len(lines) > room):
                break
            if begin != offset:
                text = f"offset {offset}: {topic}/{partition} begins with {begin}"
                raise RequestRefused("out_of_range", text, field="offset", first=begin, end=end)
            nbytes += len(lines)
            offset = begin + lines.count(b"\n")
            some = messages(topic, partition, begin, lines, self._marks_from)
            if len(found) + len(some) > limit.messages:
                offset = some[limit.messages - len(found)].offset
                del some[limit.messages - len(found) :]
            if some and some[-1].seq > routed:
                while some and some[-1].seq > routed:
                    offset = some.pop().offset
                return Fetched(found + some, offset, offset)
            found += some
        return Fetched(found, offset, max(offset, end))
