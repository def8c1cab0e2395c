"""Refuses a commit beyond the end of a partition: the group would skip every message up to there, without a word.

Invariant   An offset beyond the end is never allowed while the router works: refused as out_of_range, with the first and
            end offset.
Crash       After a power cut a log may end earlier than it did, until the router has recovered. A member that goes on
            behind that end comes too early (not_ready), and is not wrong.
Cost        Ends only grow, also in a second life of a topic (kmq/log/deletions.py). So an offset up to which somebody has
            read is allowed without a look at a file. Any other one costs a look in a thread, 0.3 ms.
Memory      A number for each partition that members of groups read, or in which somebody has committed.
Not covered Files that do not say where they end, because they are damaged: a commit is allowed there.
"""

import asyncio
from collections.abc import Iterable

from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.partitions import Partitions
from kmq.gateway.core.refused import RequestRefused
from kmq.log.damage import DamageError

Partition = tuple[str, int]


class Ends:
    """The ends of partitions, as far as they were seen."""

    def __init__(self, partitions: Partitions, watermark: Watermark) -> None:
        self._partitions, self._watermark = partitions, watermark
        self._seen: dict[Partition, int] = {}

    def reach(self, place: Partition, end: int) -> None:
        """Note that a partition has records up to `end`."""
        self._seen[place] = max(end, self._seen.get(place, 0))

    def unseen(self, offsets: Iterable[tuple[Partition, int]]) -> list[tuple[Partition, int]]:
        """Return those of the next offsets that may be beyond the end: `look` for them."""
        return [(place, offset) for place, offset in offsets if offset > self._seen.get(place, 0)]

    async def look(self, offsets: list[tuple[Partition, int]]) -> None:
        """Look where the partitions end. Raises RequestRefused (out_of_range, not_ready) for an offset beyond."""
        is_followed = self._watermark.is_followed  # before the look: the router may recover during it
        beyond = await asyncio.to_thread(self._first_beyond, offsets)
        if beyond is not None:
            if is_followed and self._watermark.is_followed:
                raise beyond
            raise RequestRefused("not_ready", f"the router is down or recovers, so the end is unknown: {beyond}")

    def _first_beyond(self, offsets: Iterable[tuple[Partition, int]]) -> RequestRefused | None:
        """Return the refusal of the first offset that is beyond an end, and note the ends before it."""
        for place, offset in offsets:
            try:
                partition = self._partitions.open(*place)
                end = partition.end()
                if offset > end:
                    first = partition.start()
                    text = f"offset {offset}: {place[0]}/{place[1]} has {first} to {end}"
                    return RequestRefused("out_of_range", text, field="offset", first=first, end=end)
            except (DamageError, RequestRefused):
                continue  # damaged; or deleted a moment ago, which is for the coordinator to refuse
            self.reach(place, end)
        return None
