"""The records of a topic in order of seq across its partitions, and the router's watermark.

Invariant   A record is shown only after the router's watermark has passed it. So a shown record is always in its queue
            file, and a record with a lower seq never appears later.
"""

import asyncio
import contextlib
import os
from collections import deque
from typing import NamedTuple

from kmq.broker.stats import StatsPage
from kmq.gateway.core.broker import RequestRefused
from kmq.log import reader, topics
from kmq.message import record
from kmq.message.routing import Topic
from kmq.message.text import decode_payload

_OBJECT = 200  # bytes of memory that a record takes besides its payload
CHUNK_BYTES = 1 << 16  # read at once from one partition; a longer record is read alone
FAST_S, SLOW_S = 0.001, 0.05  # between looks at the watermark: while it moves or is about to; when idle


class Record(NamedTuple):
    seq: int
    payload: bytes


class _Cursor:
    """The position in one partition, and records read but not delivered yet."""

    def __init__(self, log: reader.LogReader, seq: int) -> None:
        self.log, self.seq = log, seq
        self.offset = -1  # not looked up yet
        self.read: deque[tuple[int, bytes]] = deque()

    def fill(self) -> None:
        """Read the next records, skipping those that compaction removed. Finds nothing only at the end."""
        if self.offset < 0:
            self.offset = self.log.offset_of_seq(self.seq)
        lines = b"\n"
        while lines and not self.read:
            first, lines = self.log.read(self.offset, CHUNK_BYTES)
            self.offset = first + lines.count(b"\n")
            numbered = ((record.seq_of(line), line) for line in lines.split(b"\n") if line)
            self.read.extend(entry for entry in numbered if entry[0] >= self.seq)


class Feed:
    """The records of `topic` from `seq` on. `fill` reads files: call it in a thread."""

    def __init__(self, data: str, topic: str, seq: int) -> None:
        self.data, self.topic = data, topic
        self.next_seq = seq  # every earlier record has been in `ready`
        self.ready: deque[Record] = deque()
        self.weight = 0  # bytes of memory held after the last `fill`
        self._cursors: list[_Cursor] = []
        self._links: list[str] = []
        self._declared = 0  # mtime of topic.toml when the partitions were opened
        # Sizes of the active segments when everything in them was read; None: there may be more to read.
        self._ended_at: list[tuple[int, int]] | None = None

    def has_more(self) -> bool:
        """Return True if `fill` may find records. This is cheap, because followers are woken for other topics, too."""
        return self._ended_at is None or self._ended_at != self._active_sizes()

    def _active_sizes(self) -> list[tuple[int, int]]:
        """Return (inode, size) of each active segment, and last the declaration's mtime, because the topic may grow."""
        sizes = []
        for link in self._links:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(link)
                sizes.append((status.st_ino, status.st_size))
        return [*sizes, (0, self._declared_ns())]

    def fill(self, upto: int) -> None:
        """Add records to `ready`, from the files as the router had written them at seq `upto`. Raises DamageError."""
        # `upto` was read earlier, and the router writes a declaration before it routes records by it.
        is_open = bool(self._cursors) and self._declared == self._declared_ns()
        if not is_open and not self._open() and not self._cursors:
            return
        before = self._active_sizes()  # so that a write during the read counts as a change
        for cursor in self._cursors:
            if not cursor.read:
                cursor.fill()
        self._ended_at = None if any(cursor.read for cursor in self._cursors) else before
        # An exhausted partition has no more records up to `upto`. Another one is known up to its last record read.
        complete = min([upto, *(cursor.read[-1][0] for cursor in self._cursors if cursor.read)])
        entries: list[tuple[int, bytes]] = []
        for cursor in self._cursors:
            while cursor.read and cursor.read[0][0] <= complete:
                entries.append(cursor.read.popleft())
        for seq, line in sorted(entries):
            fields = line.split(b"|", 5)  # hot loop: record.fields, without the names
            self.ready.append(Record(seq, decode_payload(fields[4], fields[5]) or b""))
            self.next_seq = seq + 1
        waiting = sum(len(line) + _OBJECT for cursor in self._cursors for _, line in cursor.read)
        self.weight = waiting + sum(len(record.payload) + _OBJECT for record in self.ready)

    def _open(self) -> bool:
        """Open the partitions that are not open yet; return False if the topic does not exist yet."""
        if not os.path.isdir(f"{self.data}/topics/{self.topic}"):
            return False
        self._declared = self._declared_ns()
        topic = Topic(self.topic, topics.load(self.data, self.topic)[0], 1)
        self._links = [f"{self.data}/{name}" for name in topic.log_names()]
        numbers = range(len(self._cursors), topic.partitions)
        self._cursors += [_Cursor(reader.partition(self.data, self.topic, number), self.next_seq) for number in numbers]
        return True

    def _declared_ns(self) -> int:
        try:
            return os.stat(topics.toml_path(self.data, self.topic)).st_mtime_ns
        except FileNotFoundError:
            return 0


class Watermark:
    """The router's seq, and the tasks that wait for it to move: one timer polls for all, and only while a task waits.

    A store to shared memory wakes no process, so the seq is polled. A poll costs a few microseconds, every 50 ms when
    idle. A caller that knows that the seq is about to move calls `expect`, which makes the next poll come sooner.
    """

    def __init__(self, page: StatsPage) -> None:
        self._router, self._durability = page.rows["router"], page.rows["durability"]
        self._durable = 0  # the highest seen: a restarted stage shows 0 until it has recovered
        self._seen = 0
        self._moved = asyncio.Event()
        self.pause_s = SLOW_S  # between the last poll and the next
        self._waiting = 0
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def routed(self) -> int:
        return self._router.seq

    @property
    def is_followed(self) -> bool:
        """Return True while the router works. Until it has recovered, logs may end earlier than before."""
        return self._router.state_name == "ready"

    @property
    def durable(self) -> int:
        self._durable = max(self._durable, self._durability.seq)
        return self._durable

    @property
    def is_polling(self) -> bool:
        """Return True while a next poll is due. Without waiting tasks there is none."""
        return self._timer is not None

    def stop(self) -> None:
        """Wake all waiting tasks; they raise RequestRefused."""
        self._stopping = True
        self._moved.set()

    def expect(self, seq: int) -> None:
        """Note that `seq` is durable, so that the router will reach it soon."""
        self._durable = max(self._durable, seq)
        if self._timer is not None and self.pause_s > 2 * FAST_S:
            self._timer.cancel()
            self._arm(FAST_S)

    async def passed(self, seq: int) -> None:
        """Wait until the router has routed `seq`. Raises RequestRefused once the gateway stops."""
        self._waiting += 1
        try:
            while self.routed < seq:
                if self._stopping:
                    raise RequestRefused("stopping", "the gateway is stopping; resume at the next offset")
                if self._timer is None:
                    self._arm(FAST_S)
                await self._moved.wait()
        finally:
            self._waiting -= 1

    def _arm(self, pause: float) -> None:
        self.pause_s = pause
        self._timer = asyncio.get_running_loop().call_later(pause, self.poll)

    def poll(self) -> None:
        """Wake the waiting tasks if the router's seq has moved, and arm the next poll if any task waits."""
        self._timer = None
        seen, self._seen = self._seen, self.routed
        if seen != self._seen:
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()
        if self._waiting:
            self._arm(FAST_S if seen != self._seen else min(SLOW_S, self.pause_s * 1.25))
