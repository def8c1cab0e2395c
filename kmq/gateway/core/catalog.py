"""The logs that a remote reader of a broker may see: their names, first offsets and end offsets.

A log is a partition, or the WAL: topic `__append`, partition 0, offset = seq, never beyond what is durable.
Everything here reads files, so call it in a thread.
"""

from bisect import bisect_right
from os.path import basename, isdir
from typing import Any

from kmq.gateway.core.broker import Broker, RequestRefused
from kmq.log import identity, reader, topics
from kmq.log.bounds import Bounds
from kmq.log.reader import WAL, LogReader
from kmq.repair import ledger

END = (1 << 63) - 1  # beyond any offset


class Catalog:
    """The logs. Changes nothing."""

    def __init__(self, broker: Broker) -> None:
        self._data, self._settings = broker.settings.data, broker.settings
        self._durability, self._router = broker.page.rows["durability"], broker.page.rows["router"]
        self._durable = 0
        self._bounds_cache = Bounds(self._data)

    def identity(self) -> dict[str, str | int]:
        """Return the id, format and instance of the data directory, ready for JSON."""
        form, _ = identity.version(self._data) or (0, 0)
        return {
            "data_id": identity.read(self._data, "id"),
            "format": str(form),
            "instance": self._settings.instance,
            "marks_from": identity.marks_from(self._data),
        }

    def ledger(self) -> dict[str, Any]:
        """Return what an audit needs: the last routed seq, the routing table, and the ranges in dropped.log."""
        return ledger.read(self._data, self._router.seq)

    def topics(self, after: str, limit: int, internal: bool = False) -> list[dict[str, object]]:
        """Return the next `limit` topics by name; those of KMQ itself only if `internal`."""
        names = [name for name in topics.names(self._data) if internal or not name.startswith("__")]
        start = bisect_right(names, after)
        return list(self._bounds_cache.rows(names[start : start + limit]))

    def logs(self, asked: list[str]) -> list[dict[str, Any]]:
        """Return the logs of these topics, or of all; a topic that does not exist has none."""
        rows = []
        for topic in asked or [*topics.names(self._data), WAL]:
            for number in range(self._partitions(topic)):
                first, end = self._bounds(topic, number)
                rows.append({"topic": topic, "partition": number, "first_offset": first, "end_offset": end})
        return rows

    def open(self, topic: str, partition: int) -> LogReader:
        """Return a log. Raises RequestRefused if it does not exist."""
        if partition >= self._partitions(topic):
            raise RequestRefused("not_found", f"there is no partition {partition} of topic {topic!r}")
        return self._open(topic, partition)

    def readable_end(self, topic: str) -> int:
        """Return the offset beyond which nothing may be read; a partition is limited by its own end alone."""
        return self._durable_seq() + 1 if topic == WAL else END

    def _open(self, topic: str, partition: int) -> LogReader:
        return reader.wal(self._data) if topic == WAL else reader.partition(self._data, topic, partition)

    def _partitions(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 if it does not exist."""
        if topic == WAL:
            return 1
        is_name = topic == basename(topic) and not topic.startswith(".")  # the name comes from a remote reader
        return self._bounds_cache.declared(topic)[0] if is_name and isdir(f"{self._data}/topics/{topic}") else 0

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        if topic != WAL:
            return self._bounds_cache.of(topic, partition)
        log = self._open(topic, partition)
        end = self._durable_seq() + 1  # before first_offset: what retention deletes in between counts as deleted
        return min(log.first_offset, end), end

    def _durable_seq(self) -> int:
        """Return the highest durable seq seen: durability that starts again counts from 0 until it has recovered."""
        self._durable = max(self._durable, self._durability.seq)
        if not self._durable and self._durability.state_name != "ready":
            raise RequestRefused("not_ready", "the durable end of the WAL is unknown until durability has recovered")
        return self._durable
