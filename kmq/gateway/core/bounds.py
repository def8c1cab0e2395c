"""From where to where each partition goes, for listings of thousands of topics: looked up again only where a file has changed.

Memory      Some hundred bytes for each partition that there is.
"""

import os
from collections.abc import Iterator

from kmq.log import reader, segment, topics

Signature = tuple[int, ...]


def _signature(path: str) -> Signature:
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size


class Bounds:
    """What the last look has found, and by which files."""

    def __init__(self, data: str) -> None:
        self._data = data
        self._declared: dict[str, tuple[Signature, tuple[int, int | None]]] = {}
        self._bounds: dict[str, tuple[str, Signature, tuple[int, int]]] = {}  # by directory; of its active segment

    def declared(self, topic: str) -> tuple[int, int | None]:
        """(partitions, from_seq) of a topic."""
        try:
            now = _signature(topics.toml_path(self._data, topic))
        except FileNotFoundError:
            return topics.load(self._data, topic)
        found = self._declared.get(topic)
        if found is None or found[0] != now:
            found = self._declared[topic] = now, topics.load(self._data, topic)
        return found[1]

    def of(self, topic: str, partition: int) -> tuple[int, int]:
        """(first offset, end offset) of a partition."""
        directory = f"{self._data}/topics/{topic}/{partition}"
        found = self._bounds.get(directory)
        if found is not None:
            try:
                if self._look(directory, found[0]) == found[1]:
                    return found[2]
            except FileNotFoundError:
                pass
        log = reader.partition(self._data, topic, partition)
        segments = segment.listing(directory)
        seen = self._look(directory, segments[-1][1]) if segments else None  # first: what comes then changes it
        end = log.end_offset()
        bounds = min(log.first_offset, end), end
        if seen is not None:
            self._bounds[directory] = segments[-1][1], seen, bounds
        return bounds

    def _look(self, directory: str, active: str) -> Signature:
        return _signature(directory) + _signature(active)

    def rows(self, names: list[str]) -> Iterator[dict[str, object]]:
        """The topics of these names, ready for JSON."""
        for name in names:
            partitions, from_seq = self.declared(name)
            firsts, ends = zip(*(self.of(name, number) for number in range(partitions)), strict=True)
            row = {"name": name, "partitions": partitions, "from_seq": from_seq}
            yield row | {"first_offsets": firsts, "end_offsets": ends}
