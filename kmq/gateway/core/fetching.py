"""Reading messages of partitions for all doors: from an offset on, waiting for new ones if asked to.

    cursor = await fetching.open("orders", 0, Position("offset", 17))
    _, messages = await fetching.read([cursor], Limit(100, MIB), list)    → messages 17, 18, …

Invariant   A message that is shown is in its partition, so it is durable and routed (partitions.py). A cursor moves
            past messages that were read or were deleted before. The latter stay in `Cursor.overtaken` until an answer
            has reported them. A record written after `look` returned False wakes the waiter. Therefore a directory is
            watched before `look` is asked. A wake-up may come without news: the reader looks again.
Damage      is reported once to each reader, by the read that finds nothing before it. Then the cursor rests, so that
            other partitions are read meanwhile, and looks again every _REST_S.
Cost        A watch ends with its first event (IN_ONESHOT): a busy partition without waiting readers costs nothing. A
            reader that waits again keeps its Waiter: a directory that is still watched is not looked at again, so 1,000
            idle readers cost one look each every _WATCHED_S. A look that is half due, and would become due during a
            wait, is made at the start of the wait. So a reader that waits again and again for a little less than
            _WATCHED_S is not woken in between.
Memory      At most _THREADS reads at a time, each of at most its limit's bytes, or of one longer record. The reading
            thread converts the records to what the door sends, so both are held only briefly. Answers that clients have
            not taken yet are bounded by one budget (answers.py).
            One inotify descriptor, from the first wait on. At most _MOST_WATCHES directories. Above that, or when the
            system has no watches left, waiters follow the router's watermark (feed.py), polled for all of them at once.
Not covered File systems that do not report writes to the kernel: there a look every _WATCHED_S finds the records.
"""

import asyncio
import ctypes
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import NamedTuple, TypeVar

from kmq.broker.damage import Damaged
from kmq.broker.stats import StatsPage
from kmq.config.values import KIB
from kmq.gateway.core.answers import ANSWER_BYTES, COPIES, READER, Budget
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.cold import WAIT_S, ColdObject, ColdReads, refusal
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.partitions import Partition, Partitions, Signature, moment
from kmq.log import gaps, identity
from kmq.log.damage import DamageError, MisplacedError
from kmq.log.rows import NotHereError
from kmq.message.message import Message, messages
from kmq.message.record import count_lines
from kmq.wire.requests import Position, TopicPartition

# --- waking ----------------------------------------------------------------------------------------------------------
# Readers that wait for new records are woken by the kernel: inotify on the directories of their partitions.

_MOST_WATCHES = 8192
_WATCHED_S = 30.0  # longest time without a look at watched directories
_READ_BYTES = 1 << 16
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_ONLYDIR, _ONESHOT = 0x0100_0000, 0x8000_0000
_MASK = _MODIFY | _MOVED_TO | _CREATE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR | _ONESHOT
_ALL = -1  # the watch in an event that means that events were lost

Looks = Mapping[str, Callable[[], bool]]  # directory → whether it has news


class Waiter:
    """Wakes one reader, in one wait after the other. `event`: set when the reader must look.

    Invariant   A directory that `is_quiet` is watched, had no news when its watch began, and has had no event since.
    """

    def __init__(self, event: asyncio.Event) -> None:
        self.event = event
        self.watches: dict[int, str] = {}  # → the directory
        self.quiet: set[str] = set()
        self.look_at = 0.0  # when all directories are looked at again

    def is_quiet(self, directory: str) -> bool:
        """Return True if there is no news, according to the kernel events read so far."""
        return directory in self.quiet

    def look_again(self, directory: str) -> None:
        """Look at the directory before the next wait, because its reader has moved."""
        self.quiet.discard(directory)

    async def woken(self, seconds: float) -> bool:
        """Wait for the event; return False if it is not set within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self.event.wait()
        except TimeoutError:
            return False
        return True


class Waking:
    """The waiting readers of the gateway."""

    def __init__(self, watermark: Watermark, most: int = _MOST_WATCHES) -> None:
        self.watermark, self._most = watermark, most
        self._libc = ctypes.CDLL(None)
        self._fd = -1
        self._waiters: dict[int, set[Waiter]] = {}  # by watch

    @property
    def watches(self) -> int:
        return len(self._waiters)

    async def news(self, looks: Looks, seconds: float, interrupt: asyncio.Event | None = None) -> bool:
        """Wait until there may be news, or `interrupt` is set; return False if neither happens within `seconds`.

        Raises RequestRefused if the gateway stops while the watermark is followed.
        """
        waiter = Waiter(interrupt or asyncio.Event())
        try:
            return await self.next_news(waiter, looks, seconds)
        finally:
            self.forget(waiter)

    async def next_news(self, waiter: Waiter, looks: Looks, seconds: float) -> bool:
        """Wait like `news`, for a reader that will wait again. The caller must `forget` the waiter in the end."""
        now = time.monotonic()
        until = now + seconds
        if waiter.look_at <= min(until, now + _WATCHED_S / 2):
            waiter.look_at = now
        while True:
            now = time.monotonic()
            if now >= waiter.look_at:
                waiter.look_at = now + _WATCHED_S
                waiter.quiet.clear()
            fresh = [directory for directory in looks if directory not in waiter.quiet]
            watched = [directory for directory in fresh if self._watch(waiter, directory)]
            if waiter.event.is_set() or any(looks[directory]() for directory in fresh):
                return True
            waiter.quiet.update(watched)
            if now >= until:
                return False
            left = min(until, waiter.look_at) - now
            if len(watched) < len(fresh):
                await self._moved(min(left, _LOOK_S))  # the event does not wake a reader that follows the watermark
            elif await waiter.woken(left):
                return True

    def wake(self, directory: str) -> None:
        """Wake the readers that wait for news of a directory, as a change in it would."""
        for watch, waiters in [*self._waiters.items()]:
            for waiter in [each for each in waiters if each.watches.get(watch) == directory]:
                waiter.look_again(directory)
                waiter.event.set()

    def close(self) -> None:
        """Close the descriptor, with all its watches."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    async def _moved(self, seconds: float) -> None:
        """Wait until the router has routed a record, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self.watermark.passed(self.watermark.routed + 1)
        except TimeoutError:
            pass

    def _watch(self, waiter: Waiter, directory: str) -> bool:
        """Wake `waiter` at the next change in `directory`. Return False if there is no watch or no directory (yet)."""
        if self._fd < 0 and not self._open():
            return False
        watch: int = self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _MASK)
        if watch < 0:
            return False  # a new topic is in force before all its directories exist
        if watch not in self._waiters and len(self._waiters) >= self._most:
            self._libc.inotify_rm_watch(self._fd, watch)
            return False
        self._waiters.setdefault(watch, set()).add(waiter)
        waiter.watches[watch] = directory
        return True

    def _open(self) -> bool:
        fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return False  # the system allows no more watches: the watermark is followed
        self._fd = fd
        asyncio.get_running_loop().add_reader(fd, self._read)
        return True

    def _read(self) -> None:
        """Wake readers whose directories have changed."""
        try:
            events = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        at = 0
        while at < len(events):
            watch, _, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size + length
            for ended in [*self._waiters] if watch == _ALL else [watch]:
                for waiter in self._waiters.pop(ended, ()):
                    waiter.look_again(waiter.watches.pop(ended))
                    waiter.event.set()

    def forget(self, waiter: Waiter) -> None:
        """Stop watching for a reader."""
        for watch in waiter.watches:
            waiters = self._waiters.get(watch, set())
            waiters.discard(waiter)
            if not waiters and self._waiters.pop(watch, None) is not None and self._fd >= 0:
                self._libc.inotify_rm_watch(self._fd, watch)


# --- fetching --------------------------------------------------------------------------------------------------------

_THREADS = 4
_CHUNK_BYTES = 256 * KIB  # read at once
_REST_S = 5.0  # until the next look at a partition that cannot be read
_LOOK_S = 0.5  # longest time until a waiting call notices that its client has gone

T = TypeVar("T")
_ANY_TIME: AbstractAsyncContextManager[object] = nullcontext()  # a turn that is always free


class Limit(NamedTuple):
    """How much one call may return, and how many seconds it may wait for a first message."""

    messages: int
    nbytes: int
    wait_s: float = 0.0


class Damage:
    """A reader's error on a partition, which is damaged or was deleted, and whether the reader was told."""

    def __init__(self) -> None:
        self._last_error, self._rests_until = "", 0.0

    @property
    def is_resting(self) -> bool:
        """Return True while the partition is not looked at, because it could not be read a moment ago."""
        return time.monotonic() < self._rests_until

    def is_new(self, err: Exception) -> bool:
        """Let the partition rest. Return True if the reader has not been told of this error."""
        before, self._last_error = self._last_error, str(err)
        self._rests_until = time.monotonic() + _REST_S
        return before != self._last_error


class Cursor:
    """The next place to read in a partition. `is_strict`: refuse an offset that is not there; else read the nearest.

    `skips`: offsets whose messages are left out. `most`: how many offsets the next read may advance.
    `start`: the position to begin at, until `locate` has found its offset. `overtaken`: the last offsets that retention
    or truncation deleted before they were read, until the door has told its client.
    """

    def __init__(
        self, partition: Partition, offset: int, is_strict: bool = False, start: Position | None = None
    ) -> None:
        self.partition, self.offset, self.is_strict, self.start = partition, offset, is_strict, start
        self.place = TopicPartition(partition.topic, partition.number)
        self.skips: frozenset[int] = frozenset()
        self.most: int | None = None
        self.overtaken = range(0)
        self.end = offset  # of the partition, at the last read
        self.seen: Signature | None = None  # at a read that found nothing
        self.cold: ColdObject | None = None  # what it waits for, because it lies in KMQ_TIER
        self.damage = Damage()

    def locate(self) -> None:
        """Find the offset of the start, if that is not known yet; reads files. Raises DamageError."""
        if (start := self.start) is not None:
            self.start = moment(start)
            self.offset, self.start = self.partition.locate(start), None

    def has_news(self) -> bool:
        if self.cold is not None:
            return self.cold.has_news()
        return not self.damage.is_resting and self.partition.signature() != self.seen

    def waits_for_cold(self) -> bool:
        """Return True while what it reads next is being fetched in. Raises DamageError if that is damaged."""
        if (cold := self.cold) is None:
            return False
        if cold.damage is not None:
            self.cold = None
            raise cold.damage
        if cold.has_news():
            self.cold = None
        return self.cold is not None

    def overtake(self, begin: int) -> None:
        """Move to the first record of the partition, if the next one to read was deleted."""
        if begin > self.offset:
            start = self.overtaken.start if self.overtaken else self.offset
            self.overtaken = gaps.range_of(self.partition.gaps(), start, begin)
            self.offset = begin

    def move(self, offset: int) -> None:
        """Move to another offset."""
        if offset != self.offset:
            self.offset, self.seen, self.cold, self.damage = offset, None, None, Damage()


class Fetching:
    """Reads for all doors. Every method may raise RequestRefused."""

    def __init__(
        self,
        data: str,
        page: StatsPage,
        partitions: Partitions,
        waking: Waking,
        answers: Budget | None = None,
        cold: ColdReads | None = None,
    ) -> None:
        self.partitions, self.waking, self._router = partitions, waking, page.rows["router"]
        self.cold = cold or ColdReads(data, waking.wake)
        self.answers = answers or Budget(ANSWER_BYTES)
        self.damaged = Damaged(page.rows["gateway"])
        self._marks_from = identity.marks_from(data)
        self._threads = ThreadPoolExecutor(_THREADS, "fetching")
        self._waiting: set[asyncio.Event] = set()
        self.is_stopping = False

    def stop(self) -> None:
        """End waiting calls: they return without messages."""
        self.is_stopping = True
        for event in self._waiting:
            event.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    @property
    def waiting(self) -> int:
        """Return how many calls wait for a message."""
        return len(self._waiting)

    async def run(
        self, work: Callable[..., T], *arguments: object, turn: AbstractAsyncContextManager[object] = _ANY_TIME
    ) -> T:
        """Run work that reads files in a thread, and return its result. It runs again once what it needs is fetched in.

        `turn`: a lock that several works of one request share. They read files one after the other, and what they need
        is fetched in for all of them at once. Raises RequestRefused (cold) if that takes too long.
        """
        deadline = 0.0
        while True:
            try:
                async with turn:
                    return await self._run(work, *arguments)
            except NotHereError as err:
                deadline = deadline or time.monotonic() + WAIT_S
                await self.wait_for_cold(err, deadline - time.monotonic())

    async def wait_for_cold(self, err: NotHereError, seconds: float) -> None:
        """Wait until what lies in KMQ_TIER is here. Raises RequestRefused (cold, damaged)."""
        try:
            await self.cold.wait(err, seconds)
        except DamageError as damage:
            raise self._refusal(damage) from damage

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except DamageError as err:
            if isinstance(err, MisplacedError) and self._router.state_name != "ready":
                raise RequestRefused("not_ready", f"{err.path}: the router may be about to write its index") from err
            raise self._refusal(err) from err

    def _refusal(self, err: DamageError) -> RequestRefused:
        self.damaged.note(err)
        fields = {name: getattr(err, name) for name in ("path", "byte", "end", "first_offset", "next_offset")}
        return RequestRefused("damaged", str(err), **fields)

    async def open(self, topic: str, number: int, at: Position) -> Cursor:
        """Return a cursor at that position. An offset is checked only by the first read."""

        def opened() -> Cursor:
            partition = self.partitions.open(topic, number)
            if at.kind == "offset":
                return Cursor(partition, at.value, is_strict=True)
            return Cursor(partition, partition.locate(at))

        return await self.run(opened)

    async def fetch(
        self,
        cursors: Sequence[Cursor],
        limit: Limit,
        shape: Callable[[list[Message]], T],
        event: asyncio.Event,
        is_over: Callable[[], bool] = lambda: False,
    ) -> T:
        """Read from the cursors in order, and return what `shape` makes of the messages, in a thread.

        Without a message, wait for one as long as the limit says, or until it `is_over`. `event` makes it look again.
        """
        deadline = time.monotonic() + limit.wait_s
        while True:
            count, shaped = await self.read(cursors, limit, shape)
            if count or not await self.wait(cursors, deadline, event, is_over):
                cold = next((cursor.cold for cursor in cursors if cursor.cold is not None), None)
                if not count and cold is not None and not self.is_stopping:
                    raise refusal(cold)  # an empty answer would say that there is nothing more
                return shaped

    async def read(self, cursors: Sequence[Cursor], limit: Limit, shape: Callable[[list[Message]], T]) -> tuple[int, T]:
        """Read the messages that are there, and move the cursors. Returns their number, and what `shape` makes of them.

        They count for the READER of this task, if there is one, until its answer is sent.
        """
        reader, nbytes = READER.get(), 0
        cold: list[tuple[Cursor, NotHereError]] = []
        if reader is not None:
            await self.answers.reserve(reader, COPIES * max(_CHUNK_BYTES, limit.nbytes))

        def work() -> tuple[int, T]:
            nonlocal nbytes
            found: list[Message] = []
            cold.clear()
            for cursor in cursors:
                room = Limit(limit.messages - len(found), limit.nbytes - nbytes)
                if found and (room.messages <= 0 or room.nbytes <= 0):
                    break
                if cursor.damage.is_resting:
                    continue
                # If messages were found, the next call reports the error, because their cursors have moved.
                try:
                    if cursor.waits_for_cold():
                        continue
                    some = self._read(cursor, room, is_first=not found)
                except DamageError as err:
                    if not found and cursor.damage.is_new(err):
                        raise
                    continue
                except NotHereError as err:
                    cold.append((cursor, err))
                    continue
                except RequestRefused:
                    if not found:
                        raise
                    break
                found += some
                nbytes += sum(message.size for message in some)
            return len(found), shape(found)

        try:
            done = await self.run(work)
            for cursor, err in cold:
                cursor.cold = self.cold.want(err)
            return done
        finally:
            if reader is not None:
                self.answers.settle(reader, COPIES * nbytes)

    async def wait(
        self, cursors: Sequence[Cursor], deadline: float, event: asyncio.Event, is_over: Callable[[], bool]
    ) -> bool:
        """Wait until a partition may have news, or `event` is set; return False if neither comes before the deadline."""
        looks = {cursor.partition.directory: cursor.has_news for cursor in cursors}
        self._waiting.add(event)
        try:
            while (left := deadline - time.monotonic()) > 0 and not is_over() and not self.is_stopping:
                if await self.waking.news(looks, min(left, _LOOK_S), event):
                    return not self.is_stopping
        except RequestRefused:  # the gateway stops
            pass
        finally:
            self._waiting.discard(event)
        return False

    def _read(self, cursor: Cursor, limit: Limit, is_first: bool) -> list[Message]:
        """Return the next messages of one partition, and move its cursor. `is_first`: one may be over the limit."""
        partition = cursor.partition
        seen, most = partition.signature(), limit.messages if cursor.most is None else min(limit.messages, cursor.most)
        if seen == cursor.seen:  # a member of a thousand partitions asks for all of them in each call
            return []
        start, cursor.end = partition.start(), partition.end()
        if not start <= cursor.offset <= cursor.end:
            self._judge(cursor, start)
        found: list[Message] = []
        nbytes = 0
        while len(found) < most and nbytes < limit.nbytes:
            room = limit.nbytes - nbytes
            try:
                begin, lines = partition.read(cursor.offset, min(_CHUNK_BYTES, room))
            except (DamageError, NotHereError):
                if found:
                    break
                raise
            if not lines or (len(lines) > room and (found or not is_first)):
                break
            if begin > cursor.offset:  # retention has just deleted the next ones
                if found:
                    break
                self._judge(cursor, begin)
            nbytes += len(lines)
            some = messages(partition.topic, partition.number, begin, lines, self._marks_from)
            cursor.offset = begin + count_lines(lines)
            if len(found) + len(some) > most:
                cursor.offset = some[most - len(found)].offset
                del some[most - len(found) :]
            found += [each for each in some if each.offset not in cursor.skips] if cursor.skips else some
        cursor.seen, cursor.is_strict = None if found else seen, False
        cursor.end = max(cursor.end, cursor.offset)
        return found

    def _judge(self, cursor: Cursor, start: int) -> None:
        """Move a cursor to the next records, or refuse its offset."""
        if start > cursor.offset and cursor.partition.passed(cursor.offset) == start:
            cursor.offset = start  # it lay in a gap, where no record was deleted
            return
        cursor.partition.begin(cursor.offset)
        place = f"{cursor.partition.topic}/{cursor.partition.number}"
        if self._router.state_name != "ready" and cursor.offset > cursor.end:
            raise RequestRefused("not_ready", f"{place}: the router is down or recovers, so the end is unknown")
        if cursor.offset > cursor.end:
            self.partitions.check_ends()
        if cursor.is_strict:
            text = f"offset {cursor.offset}: {place} has {start} to {cursor.end}"
            raise RequestRefused("out_of_range", text, field="offset", first=start, end=cursor.end)
        cursor.overtake(start)
        cursor.offset = min(cursor.offset, max(cursor.end, start))
