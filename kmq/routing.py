"""Where a message goes: routing key → topic, key, partition. One table, used by the router and by Spark.

Routing is a pure function of the stored line and of the table in force at its seq, so that rebuilding a queue from the
WAL gives the same file again:

    topic       the longest declared topic that is a dot-prefix of the routing key, else the text before the first dot
    key         what is left of the routing key
    partition   crc32(key) mod partitions; without a key: seq mod partitions

A topic is in force from its `from_seq` on: the router gives it that number when it adopts a declaration.
"""

import zlib

from kmq import record
from kmq.record import MAX_TOPIC


class Topic:
    """One row of the table."""

    __slots__ = ("from_seq", "name", "partitions")

    def __init__(self, name: str, partitions: int, from_seq: int) -> None:
        self.name, self.partitions, self.from_seq = name, partitions, from_seq

    def partition_of(self, key: bytes, seq: int) -> int:
        """Partition of a message with this key and seq."""
        return (zlib.crc32(key) if key else seq) % self.partitions

    def log_names(self) -> list[str]:
        """Names of the symlinks to its partitions, in order."""
        if self.partitions == 1:
            return [f"{self.name}.log"]
        return [f"{self.name}-{number}.log" for number in range(self.partitions)]


def resolve(topics: dict[bytes, Topic], routing_key: bytes, seq: int) -> tuple[bytes, bytes]:
    """(topic name, key) of a routing key, under the topics in force at `seq`."""
    name = routing_key
    if len(name) > MAX_TOPIC:  # no longer prefix is a topic; a key of a million dots must not be tried dot by dot
        name = name[: MAX_TOPIC + 1].rpartition(b".")[0]
    while b"." in name:
        topic = topics.get(name)
        if topic is not None and topic.from_seq <= seq:
            break
        name = name.rpartition(b".")[0]
    return name, routing_key[len(name) + 1 :]


class AnyTopic:
    """Every topic may be named."""

    def takes(self, text: bytes, next_seq: int) -> bool:
        """Return True if `text` is well-formed lines whose topics may all be named. Its first line will be `next_seq`."""
        return record.good_prefix(text) == len(text)

    def refusal(self, line: bytes, seq: int) -> str:
        """Why this well-formed line, which would become record `seq`, may not name its topic, as one word; else ""."""
        return ""
