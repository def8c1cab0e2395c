"""Reading partitions for doors that give messages: from an offset on, waiting for more if asked to.

Invariant   What is shown is in its partition, so durable and routed (partitions.py). A cursor moves over what was read,
            and over nothing else.
            A record that is written after `look` returned False wakes the waiter. Therefore a directory is watched
            before `look` is asked. A wake-up may come without news: the reader looks again.
Damage      is said once to each reader, by the read that finds nothing before it. The cursor rests then, so that other
            partitions are read meanwhile, and looks again every _REST_S.
Cost        A watch ends with its first event (IN_ONESHOT): a busy partition without waiting readers costs nothing. A
            reader that waits again keeps its Waiter: a directory that is still watched is not looked at again, so 1,000
            idle readers cost one look each every _WATCHED_S. A look that is half due, and would come due in a wait,
            comes at its start: so who waits for a little less than _WATCHED_S, again and again, sleeps through.
Memory      At most _THREADS reads at a time, each of at most its limit's bytes, or of one longer record. The reading
            thread turns the records into what the door sends, so nobody holds both for long. What answers hold until
            their clients have taken them is bounded by one budget (answers.py).
            One inotify descriptor, from the first wait on. At most _MOST_WATCHES directories; beyond that, or where the
            system has no watches left, waiters follow the router's watermark (feed.py), polled for all of them at once.
Not covered File systems that tell the kernel nothing of writes: there a look every _WATCHED_S finds the records.
"""

import asyncio
import ctypes
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from kmq.broker.damage import Damaged
from kmq.broker.stats import StatsPage
from kmq.config.values import KIB
from kmq.gateway.core.answers import ANSWER_BYTES, COPIES, READER, Budget
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.partitions import Partition, Partitions, Signature, moment
from kmq.log import identity
from kmq.log.damage import DamageError, MisplacedError
from kmq.message.message import Message, messages
from kmq.message.record import count_lines
from kmq.wire.requests import Position, TopicPartition

# --- waking ----------------------------------------------------------------------------------------------------------
# Readers that wait for new records are woken by the kernel: inotify on the directories of their partitions.

_MOST_WATCHES = 8192
_WATCHED_S = 30.0  # at most, until watched directories are looked at all the same
_READ_BYTES = 1 << 16
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_ONLYDIR, _ONESHOT = 0x0100_0000, 0x8000_0000
_MASK = _MODIFY | _MOVED_TO | _CREATE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR | _ONESHOT
_ALL = -1  # the watch of an event that says that events were lost

Looks = Mapping[str, Callable[[], bool]]  # directory → whether it has news


class Waiter:
    """What wakes one reader, in one wait after the other. `event`: it is set when the reader must look.

    Invariant   A directory that `is_quiet` is watched, had no news when its watch had begun, and has had no event since.
    """

    def __init__(self, event: asyncio.Event) -> None:
        self.event = event
        self.watches: dict[int, str] = {}  # → the directory
        self.quiet: set[str] = set()
        self.look_at = 0.0  # when all directories are looked at again

    def is_quiet(self, directory: str) -> bool:
        """Return True if there is no news, as far as the kernel's events have been read."""
        return directory in self.quiet

    def look_again(self, directory: str) -> None:
        """Look at the directory before the next wait: its reader has moved."""
        self.quiet.discard(directory)

    async def woken(self, seconds: float) -> bool:
        """Wait for the event; return False if it has not come after `seconds`."""
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
        """Wait until there may be news, or `interrupt` is set; return False if neither has come after `seconds`.

        Raises RequestRefused if the gateway stops while the watermark is followed.
        """
        waiter = Waiter(interrupt or asyncio.Event())
        try:
            return await self.next_news(waiter, looks, seconds)
        finally:
            self.forget(waiter)

    async def next_news(self, waiter: Waiter, looks: Looks, seconds: float) -> bool:
        """Do the same for a reader that will wait again. The caller forgets the waiter in the end."""
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
                await self._moved(min(left, _LOOK_S))  # who follows the watermark is not woken by its event
            elif await waiter.woken(left):
                return True

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
        """Wake `waiter` at the next change in `directory`. Return False if there is no watch for it, or no directory (yet)."""
        if self._fd < 0 and not self._open():
            return False
        watch: int = self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _MASK)
        if watch < 0:
            return False  # a new topic is in force before the directories of all its partitions are made
        if watch not in self._waiters and len(self._waiters) >= self._most:
            self._libc.inotify_rm_watch(self._fd, watch)
            return False
        self._waiters.setdefault(watch, set()).add(waiter)
        waiter.watches[watch] = directory
        return True

    def _open(self) -> bool:
        fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return False  # the system allows no more of them: the watermark is followed
        self._fd = fd
        asyncio.get_running_loop().add_reader(fd, self._read)
        return True

    def _read(self) -> None:
        """Wake those whose directories have changed."""
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
        """Watch nothing more for a reader."""
        for watch in waiter.watches:
            waiters = self._waiters.get(watch, set())
            waiters.discard(waiter)
            if not waiters and self._waiters.pop(watch, None) is not None and self._fd >= 0:
                self._libc.inotify_rm_watch(self._fd, watch)


# --- fetching --------------------------------------------------------------------------------------------------------

_THREADS = 4
_CHUNK_BYTES = 256 * KIB  # read at once
_REST_S = 5.0  # until a partition that cannot be read is looked at again
_LOOK_S = 0.5  # longest time until a waiting call notices that its client has gone

T = TypeVar("T")


class Limit(NamedTuple):
    """How much one call may return, and how long (s) it may wait for a first message."""

    messages: int
    nbytes: int
    wait_s: float = 0.0


class Damage:
    """What a reader cannot read of a partition, because it is damaged or was deleted, and whether it was told."""

    def __init__(self) -> None:
        self._told, self._rests_until = "", 0.0

    @property
    def is_resting(self) -> bool:
        """Return True while the partition need not be looked at, because it could not be read a moment ago."""
        return time.monotonic() < self._rests_until

    def is_new(self, err: Exception) -> bool:
        """Let the partition rest. Return True if the reader has not been told of this error."""
        known, self._told = self._told, str(err)
        self._rests_until = time.monotonic() + _REST_S
        return known != self._told


class Cursor:
    """Where a partition is read next. `is_strict`: an offset that is not there is refused; else the nearest is read.

    `skips`: offsets whose messages are left out. `start`: the position to begin at, until `locate` has found its offset.
    """

    def __init__(
        self, partition: Partition, offset: int, is_strict: bool = False, start: Position | None = None
    ) -> None:
        self.partition, self.offset, self.is_strict, self.start = partition, offset, is_strict, start
        self.place = TopicPartition(partition.topic, partition.number)
        self.skips: frozenset[int] = frozenset()
        self.end = offset  # of the partition, when it was read last
        self.seen: Signature | None = None  # when a read found nothing
        self.damage = Damage()

    def locate(self) -> None:
        """Find the offset of the start, if that is not known yet; reads files. Raises DamageError."""
        if (start := self.start) is not None:
            self.start = moment(start)
            self.offset, self.start = self.partition.locate(start), None

    def has_news(self) -> bool:
        return not self.damage.is_resting and self.partition.signature() != self.seen

    def move(self, offset: int) -> None:
        """Go on at another offset."""
        if offset != self.offset:
            self.offset, self.seen, self.damage = offset, None, Damage()


class Fetching:
    """Reads for all doors. Every method may raise RequestRefused."""

    def __init__(
        self, data: str, page: StatsPage, partitions: Partitions, waking: Waking, answers: Budget | None = None
    ) -> None:
        self.partitions, self.waking, self._router = partitions, waking, page.rows["router"]
        self.answers = answers or Budget(ANSWER_BYTES)
        self.damaged = Damaged(page.rows["gateway"])
        self._marks_from = identity.marks_from(data)
        self._threads = ThreadPoolExecutor(_THREADS, "fetching")
        self._waiting: set[asyncio.Event] = set()
        self.is_stopping = False

    def stop(self) -> None:
        """End waiting calls: they return what they have, which is nothing."""
        self.is_stopping = True
        for event in self._waiting:
            event.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    @property
    def waiting(self) -> int:
        """Return how many calls wait for a message."""
        return len(self._waiting)

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Return the result of work that reads files."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except DamageError as err:
            if isinstance(err, MisplacedError) and self._router.state_name != "ready":
                raise RequestRefused("not_ready", f"{err.path}: the router may be about to write its index") from err
            self.damaged.note(err)
            fields = {name: getattr(err, name) for name in ("path", "byte", "end", "first_offset", "next_offset")}
            raise RequestRefused("damaged", str(err), **fields) from err

    async def open(self, topic: str, number: int, at: Position) -> Cursor:
        """Return a cursor at that position. An offset is taken as it is, and judged by the first read."""

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

        Without a message, wait for one as long as the limit says, or until it `is_over`; `event` lets it look.
        """
        deadline = time.monotonic() + limit.wait_s
        while True:
            count, shaped = await self.read(cursors, limit, shape)
            if count or not await self.wait(cursors, deadline, event, is_over):
                return shaped

    async def read(self, cursors: Sequence[Cursor], limit: Limit, shape: Callable[[list[Message]], T]) -> tuple[int, T]:
        """Read what is there, and move the cursors. Returns how many messages that is, and what `shape` makes of them.

        What is read counts for the READER of this task, if there is one, until its answer is sent.
        """
        reader, nbytes = READER.get(), 0
        if reader is not None:
            await self.answers.take(reader, COPIES * max(_CHUNK_BYTES, limit.nbytes))

        def work() -> tuple[int, T]:
            nonlocal nbytes
            found: list[Message] = []
            for cursor in cursors:
                room = Limit(limit.messages - len(found), limit.nbytes - nbytes)
                if found and (room.messages <= 0 or room.nbytes <= 0):
                    break
                if cursor.damage.is_resting:
                    continue
                # With messages in hand the next call hears of what is wrong: the cursors of what was found have moved.
                try:
                    some = self._read(cursor, room, is_first=not found)
                except DamageError as err:
                    if not found and cursor.damage.is_new(err):
                        raise
                    continue
                except RequestRefused:
                    if not found:
                        raise
                    break
                found += some
                nbytes += sum(message.size for message in some)
            return len(found), shape(found)

        try:
            return await self.run(work)
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
        seen = partition.signature()
        if seen == cursor.seen:  # a member of a thousand partitions asks for all of them in each call
            return []
        start, cursor.end = partition.start(), partition.end()
        if not start <= cursor.offset <= cursor.end:
            self._judge(cursor, start)
        found: list[Message] = []
        nbytes = 0
        while len(found) < limit.messages and nbytes < limit.nbytes:
            room = limit.nbytes - nbytes
            try:
                begin, lines = partition.read(cursor.offset, min(_CHUNK_BYTES, room))
            except DamageError:
                if found:
                    break
                raise
            if not lines or (len(lines) > room and (found or not is_first)):
                break
            if begin != cursor.offset and cursor.is_strict:
                self._judge(cursor, begin)
            nbytes += len(lines)
            some = messages(partition.topic, partition.number, begin, lines, self._marks_from)
            cursor.offset = begin + count_lines(lines)
            if len(found) + len(some) > limit.messages:
                cursor.offset = some[limit.messages - len(found)].offset
                del some[limit.messages - len(found) :]
            found += [each for each in some if each.offset not in cursor.skips] if cursor.skips else some
        cursor.seen, cursor.is_strict = None if found else seen, False
        cursor.end = max(cursor.end, cursor.offset)
        return found

    def _judge(self, cursor: Cursor, start: int) -> None:
        """Move a cursor to where there are records, or refuse its offset."""
        place = f"{cursor.partition.topic}/{cursor.partition.number}"
        if self._router.state_name != "ready" and cursor.offset > cursor.end:
            raise RequestRefused("not_ready", f"{place}: the router is down or recovers, so the end is unknown")
        if cursor.offset > cursor.end:
            self.partitions.check_ends()
        if cursor.is_strict:
            text = f"offset {cursor.offset}: {place} has {start} to {cursor.end}"
            raise RequestRefused("out_of_range", text, field="offset", first=start, end=cursor.end)
        cursor.offset = min(max(cursor.offset, start), max(cursor.end, start))
