"""The tail of partitions as it was produced: batches that consumers are served as they came, still compressed.

Truth       The lines are the truth. A batch is put here once its lines were found in their partition, the first to the
            last, and only if it shows what they show. Whoever serves it has to know that they are still there: it is not
            served below the start of its partition, after its topic was deleted, or of a compacted topic.
Coming      A batch is in its partition a moment before it is known where. So a consumer that has read the last batch here
            waits a moment for the next one, if that is on its way: to read it from its lines costs ten times as much.
Memory      At most `most` bytes, with what an entry takes besides. What was put first goes first.
"""

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Any, NamedTuple

from kmq.config.values import MIB
from kmq.wire.requests import TopicPartition

MAX_BATCH = MIB  # a larger one is served from its lines, in pieces
_ENTRY_BYTES = 400  # of a batch, besides its data
_COMING_S = 0.05  # that a consumer waits for a batch; one that takes longer may be held up for good
_ATTRIBUTES_AT, _CODEC, _ZSTD = 22, 0x07, 4


class KeptBatch(NamedTuple):
    """The records first…last of a partition of the topic that is in force since `from_seq`."""

    from_seq: int
    first: int
    last: int
    data: bytes

    @property
    def is_zstd(self) -> bool:
        return self.data[_ATTRIBUTES_AT] & _CODEC == _ZSTD


class TailCache:
    """The batches of all partitions. Any thread may put and find; what is coming belongs to the event loop."""

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self._lock = Lock()
        self._batches: OrderedDict[tuple[str, int, int], KeptBatch] = OrderedDict()  # by topic, partition, first offset
        self._firsts: dict[tuple[str, int], list[int]] = {}  # by topic and partition, in order
        self._coming: dict[TopicPartition, dict[asyncio.Task[Any], None]] = {}  # in order

    def put(self, topic: str, partition: int, first: int, last: int, data: bytes, from_seq: int) -> None:
        """Keep a produced batch that lies in its partition as the records first…last."""
        key = topic, partition, first
        with self._lock:
            if len(data) > min(MAX_BATCH, self._most - _ENTRY_BYTES) or key in self._batches:
                return
            firsts = self._firsts.setdefault((topic, partition), [])
            firsts.insert(bisect_right(firsts, first), first)
            self._batches[key] = KeptBatch(from_seq, first, last, data)
            self._used += len(data) + _ENTRY_BYTES
            while self._used > self._most:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        (topic, partition, first), batch = self._batches.popitem(last=False)
        self._used -= len(batch.data) + _ENTRY_BYTES
        firsts = self._firsts[topic, partition]
        firsts.remove(first)
        if not firsts:
            del self._firsts[topic, partition]

    def find(self, topic: str, partition: int, offset: int, from_seq: int | None) -> KeptBatch | None:
        """Return the batch that holds the record at `offset`; None if there is none, or it is of a topic deleted since."""
        with self._lock:
            firsts = self._firsts.get((topic, partition), ())
            at = bisect_right(firsts, offset)
            batch = self._batches[topic, partition, firsts[at - 1]] if at else None
        return batch if batch is not None and offset <= batch.last and batch.from_seq == from_seq else None

    # --- what is coming ----------------------------------------------------------------------------------------------

    def expect(self, place: TopicPartition, task: "asyncio.Task[Any]") -> None:
        """Note a batch that is on its way to this partition; `task` puts it here, or ends without."""
        tasks = self._coming.setdefault(place, {})
        tasks[task] = None
        task.add_done_callback(lambda _: self._arrived(place, task))

    def _arrived(self, place: TopicPartition, task: "asyncio.Task[Any]") -> None:
        tasks = self._coming[place]
        del tasks[task]
        if not tasks:
            del self._coming[place]

    async def wait(self, positions: Iterable[tuple[TopicPartition, int]], most_s: float) -> None:
        """Wait a moment, at most `most_s` seconds, for the next batch that may hold one of these offsets."""
        if not self._coming:
            return
        places = [place for place, offset in positions if place in self._coming and offset == self.end(place)]
        if places:
            oldest = [next(iter(self._coming[place])) for place in places]
            await asyncio.wait(oldest, timeout=min(most_s, _COMING_S), return_when=asyncio.FIRST_COMPLETED)

    def end(self, place: TopicPartition) -> int | None:
        """Return the offset behind the last batch of a partition; None: there is none."""
        with self._lock:
            firsts = self._firsts.get(place)
            return self._batches[(*place, firsts[-1])].last + 1 if firsts else None
