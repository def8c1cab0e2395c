"""The records of a topic in order of seq, whatever its partitions, and how far the router is.

Invariant   Nothing is shown before the router's watermark has passed it, so what is shown is in its queue file, and a record
            with a lower seq never appears later.
"""

import asyncio
import contextlib
import os
from collections import deque
from typing import NamedTuple

from kmq import record
from kmq.broker.stats import StatsPage
from kmq.client.lines import decode_payload
from kmq.gateway.core.refused import RequestRefused
from kmq.log import reader, topics
from kmq.routing import Topic

_OBJECT = 200  # bytes of memory that a record takes beside its payload
CHUNK_BYTES = 1 << 16  # read at once from one partition; a longer record comes alone
_FAST_S, _SLOW_S = 0.001, 0.05  # between looks at the watermark: when it has just moved, or will in a moment; when idle


class Record(NamedTuple):
    seq: int
    payload: bytes


class _Cursor:
    """Where we are in one partition, and what has been read but not handed out."""

    def __init__(self, log: reader.Log, seq: int) -> None:
        self.log, self.seq = log, seq
        self.offset = -1  # not looked up yet
        self.read: deque[tuple[int, bytes]] = deque()

    def fill(self) -> None:
        """Read on, past what compaction has emptied; nothing comes at the end only."""
        if self.offset < 0:
            self.offset = self.log.offset_of_seq(self.seq)
        lines = b"\n"
        while lines and not self.read:
            first, lines = self.log.read(self.offset, CHUNK_BYTES)
            self.offset = first + lines.count(b"\n")
            numbered = ((record.seq_of(line), line) for line in lines.split(b"\n") if line)
            self.read.extend(found for found in numbered if found[0] >= self.seq)


class Feed:
    """The records of `topic` from `seq` on. `fill` reads files: call it in a thread."""

    def __init__(self, data: str, topic: str, seq: int) -> None:
        self.data, self.topic = data, topic
        self.next_seq = seq  # all before it has been in `ready`
        self.ready: deque[Record] = deque()
        self.weight = 0  # bytes that it held in memory when it was last filled
        self._cursors: list[_Cursor] = []
        self._links: list[str] = []
        self._ended_at: list[tuple[int, int]] | None = None  # the active segments when there was nothing more in them

    def has_more(self) -> bool:
        """Whether `fill` may find something: a cheap look, so that followers can be woken for what is not theirs."""
        return self._ended_at is None or self._ended_at != self._look()

    def _look(self) -> list[tuple[int, int]]:
        """Which segments are active, and how long."""
        sizes = []
        for link in self._links:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(link)
                sizes.append((found.st_ino, found.st_size))
        return sizes

    def fill(self, upto: int) -> None:
        """Have more in `ready`, of what the router had written when it was at `upto`. Raises DamageError."""
        if not self._cursors and not self._open():
            return
        before = self._look()  # what comes while we read is a change
        for cursor in self._cursors:
            if not cursor.read:
                cursor.fill()
        self._ended_at = None if any(cursor.read for cursor in self._cursors) else before
        # A partition of which nothing is left has nothing up to `upto`; of the others we know what has been read.
        known = min([upto, *(cursor.read[-1][0] for cursor in self._cursors if cursor.read)])
        found: list[tuple[int, bytes]] = []
        for cursor in self._cursors:
            while cursor.read and cursor.read[0][0] <= known:
                found.append(cursor.read.popleft())
        for seq, line in sorted(found):
            fields = line.split(b"|", 5)
            self.ready.append(Record(seq, decode_payload(fields[4], fields[5]) or b""))
            self.next_seq = seq + 1
        waiting = sum(len(line) + _OBJECT for cursor in self._cursors for _, line in cursor.read)
        self.weight = waiting + sum(len(record.payload) + _OBJECT for record in self.ready)

    def _open(self) -> bool:
        """The partitions, once the topic exists."""
        if not os.path.isdir(f"{self.data}/topics/{self.topic}"):
            return False
        topic = Topic(self.topic, topics.load(self.data, self.topic)[0], 1)
        self._links = [f"{self.data}/{name}" for name in topic.log_names()]
        logs = (reader.partition(self.data, self.topic, number) for number in range(topic.partitions))
        self._cursors = [_Cursor(log, self.next_seq) for log in logs]
        return True


class Watermark:
    """The router's seq, and whoever waits for it to move: one timer looks for all, and only while somebody waits.

    A word in shared memory wakes nobody. A look costs some microseconds, every 50 ms when nothing comes; whoever knows that
    something comes says so (`expect`), and does not wait for the next one.
    """

    def __init__(self, page: StatsPage) -> None:
        self._router, self._durability = page.rows["router"], page.rows["durability"]
        self._durable = 0  # the highest we have seen: a stage that starts again counts from 0 until it has recovered
        self._seen = 0
        self._moved = asyncio.Event()
        self._pause = _SLOW_S
        self._waiting = 0
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def routed(self) -> int:
        return self._router.seq

    @property
    def durable(self) -> int:
        self._durable = max(self._durable, self._durability.seq)
        return self._durable

    def stop(self) -> None:
        """Nobody waits any longer."""
        self._stopping = True
        self._moved.set()

    def expect(self, seq: int) -> None:
        """`seq` is durable: the router will have it in a moment."""
        self._durable = max(self._durable, seq)
        if self._timer is not None and self._pause > 2 * _FAST_S:
            self._timer.cancel()
            self._arm(_FAST_S)

    async def passed(self, seq: int) -> None:
        """Wait until the router has routed `seq`. Raises RequestRefused once the gateway stops."""
        self._waiting += 1
        try:
            while self.routed < seq:
                if self._stopping:
                    raise RequestRefused("stopping", "the gateway is stopping; go on at the next offset")
                if self._timer is None:
                    self._arm(_FAST_S)
                await self._moved.wait()
        finally:
            self._waiting -= 1

    def _arm(self, pause: float) -> None:
        self._pause = pause
        self._timer = asyncio.get_running_loop().call_later(pause, self._look)

    def _look(self) -> None:
        self._timer = None
        seen, self._seen = self._seen, self.routed
        if seen != self._seen:
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()
        if self._waiting:
            self._arm(_FAST_S if seen != self._seen else min(_SLOW_S, self._pause * 1.25))
