"""Where a message goes: routing key → topic, key, partition. One table, used by the router and by Spark.

Routing is a pure function of the stored line and of the table in force at its seq, so that rebuilding a queue from the
WAL gives the same file again:

    topic       the longest declared topic that is a dot-prefix of the routing key, else the text before the first dot
    key         what is left of the routing key
    partition   crc32(key) mod partitions; without a key: seq mod partitions

A topic is in force from its `from_seq` on: the router gives it that number when it adopts a declaration.
Where it was deleted (kmq/log/deletions.py), its records up to then belong to no topic.
"""

import zlib
from collections.abc import Iterable, Sequence

from kmq import record
from kmq.record import MAX_TOPIC

DELETED = b""  # the name of what no queue has: a topic that was deleted after this record
_NEVER = 1 << 64  # a seq that no record can have


class Topic:
    """One row of the table."""

    __slots__ = ("from_seq", "lives", "name", "partitions")

    def __init__(self, name: str, partitions: int, from_seq: int, lives: Sequence[tuple[int, int]] = ()) -> None:
        """`lives`: from_seq and last_seq of each deleted topic of this name, in order."""
        self.name, self.partitions, self.from_seq, self.lives = name, partitions, from_seq, lives

    @classmethod
    def gone(cls, name: str, lives: Sequence[tuple[int, int]]) -> "Topic":
        """One that was deleted, and does not exist again: a message that names it now makes it, with one partition."""
        return cls(name, 1, _NEVER, lives)

    @property
    def is_gone(self) -> bool:
        return self.from_seq == _NEVER

    def is_in_force(self, seq: int) -> bool:
        return self.from_seq <= seq or any(first <= seq <= last for first, last in self.lives)

    def bounds(self) -> list[int]:
        """The seqs at which it came into force and was deleted, in turns, in order."""
        mine = [] if self.is_gone else [self.from_seq]
        return [*(seq for first, last in self.lives for seq in (first, last + 1)), *mine]

    def partition_of(self, key: bytes, seq: int) -> int:
        """Partition of a message with this key and seq."""
        return (zlib.crc32(key) if key else seq) % self.partitions

    def log_names(self) -> list[str]:
        """Names of the symlinks to its partitions, in order."""
        if self.partitions == 1:
            return [f"{self.name}.log"]
        return [f"{self.name}-{number}.log" for number in range(self.partitions)]


Lives = dict[str, list[tuple[int, int]]]  # name → from_seq and last_seq of each deleted topic, in order


def lives(deleted: Iterable[tuple[str, int, int]]) -> Lives:
    """Of (name, from_seq, last_seq) of all that were deleted, the oldest first."""
    found: Lives = {}
    for name, from_seq, last_seq in deleted:
        found.setdefault(name, []).append((from_seq, last_seq))
    return found


def table(in_force: Iterable[tuple[str, int, int]], lives: Lives) -> dict[bytes, Topic]:
    """The table of these topics, (name, partitions, from_seq), and of those that were deleted."""
    rows = [Topic(name, partitions, from_seq, lives.get(name, ())) for name, partitions, from_seq in in_force]
    gone = [Topic.gone(name, mine) for name, mine in lives.items()]
    return {topic.name.encode(): topic for topic in (*gone, *rows)}


def resolve(topics: dict[bytes, Topic], routing_key: bytes, seq: int) -> tuple[bytes, bytes]:
    """(topic name, key) of a routing key, under the topics in force at `seq`; the name is DELETED where the topic is."""
    name = routing_key
    if len(name) > MAX_TOPIC:  # no longer prefix is a topic; a key of a million dots must not be tried dot by dot
        name = name[: MAX_TOPIC + 1].rpartition(b".")[0]
    while b"." in name:
        topic = topics.get(name)
        if topic is not None and topic.is_in_force(seq):
            break
        name = name.rpartition(b".")[0]
    key, topic = routing_key[len(name) + 1 :], topics.get(name)
    if topic is not None and topic.lives and seq <= topic.lives[-1][1]:
        return DELETED, key
    return name, key


class AnyTopic:
    """Every topic may be named."""

    def takes(self, text: bytes, next_seq: int) -> bool:
        """Return True if `text` is well-formed lines whose topics may all be named. Its first line will be `next_seq`."""
        return record.good_prefix(text) == len(text)

    def refusal(self, line: bytes, seq: int) -> str:
        """Why this well-formed line, which would become record `seq`, may not name its topic, as one word; else ""."""
        return ""
