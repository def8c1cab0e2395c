"""The newest produced batches of partitions, as received and still compressed, to serve fetches without reading files.

    cache.put("orders", 0, 17, 19, data, from_seq)    then    cache.find("orders", 0, 18, from_seq) → that batch

Truth       The lines on disk are the truth. A batch is put here only after its first and last line were found in their
            partition, and only if it shows the same as they do. The caller of `find` must know that they are still
            there: not below the start of the partition, not after the topic was deleted, and never in a compacted
            topic.
Coming      A batch is in its partition a moment before its offset is known. So a consumer that has read the last batch
            here waits a moment for the next one, if one is expected: reading it from its lines costs ten times as much.
Memory      At most `most` bytes, including overhead. The oldest batches go first.
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
_COMING_S = 0.05  # longest wait of a consumer; a batch that takes longer may never come
_ATTRIBUTES_AT, _CODEC, _ZSTD = 22, 0x07, 4


class KeptBatch(NamedTuple):
    """The records first…last of a partition. `from_seq`: of the topic's present life."""

    from_seq: int
    first: int
    last: int
    data: bytes

    @property
    def is_zstd(self) -> bool:
        return self.data[_ATTRIBUTES_AT] & _CODEC == _ZSTD


class TailCache:
    """The batches of all partitions. Any thread may put and find; expected batches belong to the event loop."""

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
        """Return the batch that holds the record at `offset`; None if there is none, or its topic was deleted since."""
        with self._lock:
            firsts = self._firsts.get((topic, partition), ())
            at = bisect_right(firsts, offset)
            batch = self._batches[topic, partition, firsts[at - 1]] if at else None
        return batch if batch is not None and offset <= batch.last and batch.from_seq == from_seq else None

    # --- what is coming ----------------------------------------------------------------------------------------------

    def expect(self, place: TopicPartition, task: "asyncio.Task[Any]") -> None:
        """Note that a batch for this partition is being stored. `task` puts it here, or ends without."""
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
        """Return the offset after the last batch of a partition; None if there is no batch."""
        with self._lock:
            firsts = self._firsts.get(place)
            return self._batches[(*place, firsts[-1])].last + 1 if firsts else None
