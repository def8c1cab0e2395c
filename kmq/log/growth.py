"""How a topic grew: from which seq on it has more partitions, and how many it had before. docs/decisions/topic-growth.md

    17:1,90:2       before seq 17 it had one partition, then two, and from seq 90 on what `partitions` says

The text is in topic.toml, with a crc over all that decides on partitions, and in router.ckpt, which has a crc.
"""

import re
import zlib
from collections import namedtuple
from itertools import pairwise

from kmq.log import reader
from kmq.log.damage import DamageError
from kmq.message import record
from kmq.message.routing import Growth, key_behind

KEYED = "its records have keys, and new records of a key would go to another partition than its stored ones"
_SAMPLE = 1000  # records that are looked at, from each end of a partition
_TEXT = re.compile(r"\d{1,18}:\d{1,4}(?:,\d{1,18}:\d{1,4})*")


class Since(namedtuple("Since", ("from_seq", "grown", "partitioner"), defaults=((), None))):
    """From which seq on a topic is in force, how it has grown, and its partitioner; None: not known here."""

    __slots__ = ()


def encode(grown: Growth) -> str:
    return ",".join(f"{seq}:{before}" for seq, before in grown)


def decode(text: str) -> Growth:
    """Return the growth in a text; "" is none. Raises ValueError if the text is damaged."""
    if not text:
        return ()
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{text[:40]!r}: must be <seq>:<partitions before it>, separated by commas")
    pairs = [tuple(map(int, pair.split(":"))) for pair in text.split(",")]
    if sorted(set(pairs)) != pairs or any(low[1] >= high[1] for low, high in pairwise(pairs)):
        raise ValueError(f"{text[:40]!r}: seqs and partitions must rise")
    return [(seq, before) for seq, before in pairs]


def crc(partitions: int, from_seq: int | None, grown: Growth) -> int:
    """Return the crc32 that topic.toml has beside its growth: a wrong digit would route records to other partitions."""
    return zlib.crc32(f"{partitions}|{from_seq}|{encode(grown)}".encode())


def has_keys(data: str, topic: str, partitions: int) -> bool:
    """Return True if some of the oldest and newest records of a topic have keys, or cannot be read."""
    for number in range(partitions):
        log = reader.partition(data, topic, number)
        try:
            starts = (log.first_offset, max(log.first_offset, log.end_offset() - _SAMPLE))
            lines = [line for start in starts for line in log.read(start)[1].split(b"\n") if line]
        except DamageError:
            return True
        if any(key_behind(topic.encode(), record.routing_key_of(line)) is not None for line in lines):
            return True
    return False
