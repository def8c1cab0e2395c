"""Where a message goes: routing key → topic, key, partition. The router and Spark use the same table.

Routing is a pure function of the stored line and of the table in force at its seq, so that rebuilding a queue from the
WAL gives the same file again:

    topic       the text before the mark (record.py); without a mark the longest declared topic that is a dot-prefix of
                the routing key, else the text before the first dot
    key         the rest of the routing key; without a mark, an empty rest means no key
    partition   the number in the mark; else what the topic's partitioner says: of the key, without a key of the seq

A topic is in force from its `from_seq` on: the router gives it that number when it adopts a declaration. If it was
deleted (kmq/log/deletions.py), its records up to then belong to no topic. If it has grown (kmq/log/topics.py), older
records stay in the partitions that it had at their seq. A mark is read as a mark only in records from the table's
`marks_from` on, so older records stay in their queues (kmq/log/identity.py).

The framer refuses a partition that the topic does not have. If such a line is stored nevertheless, its partition is the
number mod partitions, because every line in the WAL must have a place.
"""

import re
import struct
import zlib
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence

from kmq.message import record
from kmq.message.record import MAX_TOPIC

LEVEL = 3  # rises with a release that does something else with records: replicas must do alike (cluster/register.py)

# --- partitioners ----------------------------------------------------------------------------------------------------
# Which partition a key leads to, and how messages without a key take turns.
#
#     murmur2   toPositive(murmur2(key)) mod partitions, as Kafka's Java client, over the percent-decoded bytes of the
#               key. Without a key: RUN consecutive seqs go to one partition, the next RUN to the next one
#     crc32     zlib's crc32 over the key as it is stored. Without a key: seq mod partitions
#
# A topic keeps its partitioner for life (kmq/log/topics.py), because stored records have to be found where they are.
# docs/decisions/partitioners.md says why there are two.

_MASK = 0xFFFFFFFF
_M = 0x5BD1E995
_SEED = 0x9747B28C
RUN = 64  # seqs without a key that follow one another into one partition
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")


class Partitioner(namedtuple("Partitioner", ("name", "number", "run"))):
    """`number`: stored key → a number of at least 0. `run`: consecutive seqs without a key that stay together.

    The partition is the number, or the run's number `seq // run`, modulo the number of partitions.
    """

    __slots__ = ()


def decoded(key: bytes) -> bytes:
    """Return the bytes of a key before they were percent-encoded; a % without two hex digits after it stays."""
    if b"%" not in key:
        return key
    return _ESCAPE.sub(lambda escape: bytes.fromhex(escape[1].decode()), key)


def murmur2(data: bytes) -> int:
    """Return the 32 bits of Kafka's murmur2, unsigned."""
    whole = len(data) & ~3
    h = _SEED ^ len(data)
    for word in struct.unpack_from(f"<{whole >> 2}I", data):
        word = word * _M & _MASK
        h = h * _M & _MASK ^ (word ^ word >> 24) * _M & _MASK
    if whole < len(data):
        h = (h ^ int.from_bytes(data[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def _murmur2_of(key: bytes) -> int:
    return murmur2(decoded(key)) & 0x7FFFFFFF  # toPositive


CRC32 = Partitioner("crc32", zlib.crc32, 1)  # of topics without a partitioner: declared when there was no other
MURMUR2 = Partitioner("murmur2", _murmur2_of, RUN)
PARTITIONERS = {each.name: each for each in (CRC32, MURMUR2)}
DEFAULT = MURMUR2  # of topics declared from now on


# --- routing ---------------------------------------------------------------------------------------------------------

DELETED = b""  # the topic of a record whose topic was deleted later: no queue has it
_NEVER = 1 << 64  # a seq that no record can have


class Route(namedtuple("Route", ("topic", "key", "partition"), defaults=(None,))):
    """A resolved routing key: the topic, the key or None, the partition that the mark asks for or None."""

    __slots__ = ()

    @property
    def is_spread(self) -> bool:
        """Return True if the seq decides on the partition."""
        return self.key is None and self.partition is None


Growth = Sequence[tuple[int, int]]  # each growth of a topic: its first seq, and the number of partitions before it


class Topic:
    """One row of the table."""

    __slots__ = ("from_seq", "grown", "lives", "name", "partitioner", "partitions")

    def __init__(
        self,
        name: str,
        partitions: int,
        from_seq: int,
        lives: Sequence[tuple[int, int]] = (),
        grown: Growth = (),
        partitioner: Partitioner = CRC32,
    ) -> None:
        """`partitions`: how many now. `lives`: from_seq and last_seq of each deleted topic of this name, in order."""
        self.name, self.partitions, self.from_seq, self.lives, self.grown = name, partitions, from_seq, lives, grown
        self.partitioner = partitioner

    @classmethod
    def gone(cls, name: str, lives: Sequence[tuple[int, int]]) -> "Topic":
        """Return a deleted topic. The next message that names it creates it again, with one partition."""
        return cls(name, 1, _NEVER, lives)

    @property
    def is_gone(self) -> bool:
        return self.from_seq == _NEVER

    @property
    def is_rerouted(self) -> bool:
        """Return True if releases before format 3 would route some of its records to other partitions."""
        return bool(self.grown) or self.partitioner is not CRC32

    def is_in_force(self, seq: int) -> bool:
        return self.from_seq <= seq or any(first <= seq <= last for first, last in self.lives)

    def bounds(self) -> list[int]:
        """Return the seqs at which the topic came into force and was deleted, alternating, in order."""
        mine = [] if self.is_gone else [self.from_seq]
        return [*(seq for first, last in self.lives for seq in (first, last + 1)), *mine]

    def changes(self) -> list[int]:
        """Return in order every seq from which on this topic may change where a routing key leads."""
        return [*self.bounds(), *(seq for seq, _ in self.grown)]

    def partitions_at(self, seq: int) -> int:
        """Return how many partitions the topic had for a record with this seq."""
        return next((before for grown_from, before in self.grown if seq < grown_from), self.partitions)

    def exists_since(self, number: int) -> int:
        """Return the seq from which on the topic has partition `number`."""
        return max((seq for seq, before in self.grown if number >= before), default=self.from_seq)

    def partition_of(self, route: Route, seq: int) -> int:
        """Return the partition of a message with this route and seq."""
        number: int | None = route.partition
        if number is None:
            if route.key is None:
                return self.turn_of(seq)
            number = self.partitioner.number(route.key)
        return number % (self.partitions_at(seq) if self.grown else self.partitions)

    def turn_of(self, seq: int) -> int:
        """Return the partition of a message without a key."""
        number: int = seq // self.partitioner.run
        return number % (self.partitions_at(seq) if self.grown else self.partitions)

    def log_names(self) -> list[str]:
        """Return the names of the symlinks to the partitions, in order."""
        if self.partitions == 1:
            return [f"{self.name}.log"]
        return [f"{self.name}-{number}.log" for number in range(self.partitions)]


class Table(dict[bytes, Topic]):
    """Topics by name, including deleted topics, and the seq from which marks count."""

    def __init__(self, topics: Mapping[bytes, Topic] | Iterable[tuple[bytes, Topic]] = (), marks_from: int = 0) -> None:
        super().__init__(topics)
        self.marks_from = marks_from


Lives = dict[str, list[tuple[int, int]]]  # name → from_seq and last_seq of each deleted topic, in order


def lives(deleted: Iterable[tuple[str, int, int]]) -> Lives:
    """Return the lives of all deleted topics, given as (name, from_seq, last_seq), the oldest first."""
    found: Lives = {}
    for name, from_seq, last_seq in deleted:
        found.setdefault(name, []).append((from_seq, last_seq))
    return found


def table(in_force: Iterable[Topic], lives: Lives, marks_from: int = 0) -> Table:
    """Return the table of these topics, which get their lives here, and of deleted topics."""
    gone = [Topic.gone(name, mine) for name, mine in lives.items()]
    found = Table(((topic.name.encode(), topic) for topic in gone), marks_from)
    for topic in in_force:
        topic.lives = lives.get(topic.name, ())
        found[topic.name.encode()] = topic
    return found


def resolve(topics: Table, routing_key: bytes, seq: int) -> Route:
    """Return the route under the topics in force at `seq`; its topic is DELETED if it was deleted later."""
    route = _route(topics, routing_key, seq)
    topic = topics.get(route.topic)
    if topic is not None and topic.lives and seq <= topic.lives[-1][1]:
        return route._replace(topic=DELETED)
    return route


def _route(topics: Table, routing_key: bytes, seq: int) -> Route:
    if b".@" in routing_key and seq >= topics.marks_from and (mark := record.marked(routing_key)) is not None:
        return Route(mark.topic, mark.key, mark.partition)
    name = routing_key
    if len(name) > MAX_TOPIC:  # no longer prefix is a topic; a key of a million dots must not be tried dot by dot
        name = name[: MAX_TOPIC + 1].rpartition(b".")[0]
    while b"." in name:
        topic = topics.get(name)
        if topic is not None and topic.is_in_force(seq):
            break
        name = name.rpartition(b".")[0]
    return Route(name, routing_key[len(name) + 1 :] or None)


def exact(topic: bytes, key: bytes | None) -> bytes:
    """Return the routing key that leads to `topic` with this key, whatever is declared."""
    if key is None:
        return topic + b".@" if b"." in topic else topic
    return b"%b.@.%b" % (topic, key)


def key_behind(topic: bytes, routing_key: bytes, has_marks: bool = True) -> bytes | None:
    """Return the key in a routing key that leads to `topic`. `has_marks`: the record is one in which marks count."""
    key: bytes | None = routing_key[len(topic) + 1 :] or None
    if has_marks and b".@" in routing_key and (mark := record.marked(routing_key)) is not None:
        key = mark.key
    return key


class AnyTopic:
    """A catalog that accepts every topic."""

    def takes(self, text: bytes, next_seq: int, producer: bytes = b"") -> bool:
        """Return True if `text` is well-formed lines without misplaced marks. `next_seq`: the seq of the first line.

        `producer`: each line must have its header, and a decimal id, as stored.
        """
        shape = record.own_shape if producer else record.any_shape
        return shape.fits(text, producer) and record.marks(text) is not None

    def refusal(self, line: bytes, seq: int) -> str:
        """Return why this well-formed line, the next record `seq`, may not name its topic, as one word; else ""."""
        return ""

    def begin(self) -> None:
        """Begin a turn: `has_deleted` counts deletions before it."""

    def has_deleted(self, routing_key: bytes, seq: int, is_exact: bool = True, is_same: bool | None = True) -> bool:
        """Return True if the record `seq`, of the topic that this routing key names, was deleted.

        Without `is_exact` the record has this seq or a lower one. `is_same`: whether it has the same routing key and
        content as the message at hand; None: not known.
        """
        return False
