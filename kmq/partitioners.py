"""Partitioners: which partition a key leads to, and how messages without a key take turns.

    murmur2   toPositive(murmur2(key)) mod partitions, as Kafka's Java client, over the percent-decoded bytes of the
              key. Without a key: RUN consecutive seqs go to one partition, the next RUN to the next one
    crc32     zlib's crc32 over the key as it is stored. Without a key: seq mod partitions

A topic keeps its partitioner for life (kmq/log/topics.py), because stored records have to be found where they are.
docs/decisions/partitioners.md says why there are two.
"""

import re
import struct
import zlib
from collections import namedtuple

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
    """Return the bytes of a key before they were percent-encoded; a % without two digits behind it stays."""
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


CRC32 = Partitioner(
    "crc32", zlib.crc32, 1
)  # of topics that do not name one: they were declared when there was no other
MURMUR2 = Partitioner("murmur2", _murmur2_of, RUN)
PARTITIONERS = {each.name: each for each in (CRC32, MURMUR2)}
DEFAULT = MURMUR2  # of topics declared from now on
