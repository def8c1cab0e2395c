"""Counts the records and bytes that the WAL received, by topic and moment."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from kmq.spark.audit.findings import Place, Row
from kmq.spark.source.columns import Block, Numbers

TopicTime = tuple[str, int]  # µs since the epoch, rounded down to a bucket


class Arrivals:
    """Counts of what was read so far."""

    def __init__(self, bucket: int) -> None:
        """`bucket`: µs of one moment."""
        self._bucket = bucket
        self._counts: Counter[TopicTime] = Counter()
        self._sizes: Counter[TopicTime] = Counter()

    def add(self, block: Block, times: Numbers, targets: Numbers, places: list[Place]) -> None:
        """Count the records of a block. `times`: when each was received; `targets`: index of its queue in `places`."""
        lengths = block.ends[-1] + 1 - block.starts[0]
        moments = times // self._bucket
        cuts = [0, *(np.flatnonzero(np.diff(moments)) + 1).tolist(), block.count]
        for low, high in pairwise(cuts):
            number = np.bincount(targets[low:high])
            nbytes = np.bincount(targets[low:high], lengths[low:high])
            for target in np.flatnonzero(number).tolist():
                key = places[target][0], int(moments[low]) * self._bucket
                self._counts[key] += int(number[target])
                self._sizes[key] += int(nbytes[target])

    def rows(self) -> Iterator[Row]:
        for (topic, time), count in self._counts.items():
            yield Row("records", topic, records=count, nbytes=self._sizes[topic, time], time=time)
