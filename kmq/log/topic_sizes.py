"""How large a topic is: offsets, bytes and segments of each partition. Reads files, changes nothing."""

from typing import NamedTuple

from kmq.log import reader
from kmq.log.segment import survey


class PartitionSize(NamedTuple):
    """One partition: its first offset, the offset of its next record, and what is on disk."""

    partition: int
    first_offset: int
    end_offset: int
    nbytes: int
    segments: int

    @property
    def messages(self) -> int:
        return self.end_offset - self.first_offset


def measure(data: str, topic: str, partitions: int) -> list[PartitionSize]:
    """Return the size of each partition of a topic, in order."""
    return [_measure(data, topic, number) for number in range(partitions)]


def _measure(data: str, topic: str, number: int) -> PartitionSize:
    log = reader.partition(data, topic, number)
    end = log.end_offset()  # before first_offset: retention may delete segments between the two
    first = min(log.first_offset, end)
    found = survey(f"{data}/topics/{topic}/{number}")
    return PartitionSize(number, first, end, sum(segment.size for segment in found), len(found))
