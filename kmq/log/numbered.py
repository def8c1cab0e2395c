"""Up to which seq numbers have been given out, as far as the disk knows: where a framer without a ring continues.

Invariant   No seq is given out twice. The WAL has every record that was acknowledged or shown to the router, so nothing
            else on disk may know of a later seq: not router.ckpt, not producers.ckpt, not deletions, not a queue. Where
            one does, the end of the WAL has been lost (a file deleted, an old copy restored), and continuing from it
            would give the seqs of the lost records to others.
Lax fsync   With a KMQ_FSYNC other than `always` a power cut may leave a queue ahead of the WAL. What neither checkpoint
            speaks of was not promised to survive that, so queues are not asked then; the router cuts them.
Cost        A few reads, and for each partition its sizes: where they are what router.ckpt says, so is its last seq.
"""

import os

from kmq import record
from kmq.errors import CorruptError
from kmq.log import checkpoint, dedupe_file, deletions, dropped, segment, topics, wal
from kmq.log.disk import find_tail
from kmq.log.lines import is_stored
from kmq.log.partition import EMPTY, directory_of


def end(data: str) -> tuple[int, int]:
    """(last seq, its recv_ts in µs) of the WAL; a later seq that is named as dropped or lost counts as well."""
    seq, recv_ts = wal.last_stored(data)
    return max([seq, *(gone.last for gone in dropped.accounted(data))]), recv_ts


def agreed_end(data: str, ask_queues: bool) -> tuple[int, int]:
    """`end`, if no other file knows of a later seq. Raises CorruptError where one does."""
    seq, recv_ts = end(data)
    others = {
        "router.ckpt": checkpoint.routed_seq(data),
        "producers.ckpt": dedupe_file.checkpoint_seq(data),
        deletions.NAME: deletions.last_seq(data),
    }
    if ask_queues:
        others |= _queue_end(data)
    name, later = max(others.items(), key=lambda item: item[1])
    if later > seq:
        raise CorruptError(
            f"{data}/append: the WAL ends at seq {seq}, but {name} has had seq {later}: its end was lost, and its"
            " numbers must not be given out again; run kmq verify --repair, which restores it from the queues"
        )
    return seq, recv_ts


def _queue_end(data: str) -> dict[str, int]:
    """The queue that speaks of the latest seq, of those that are not as router.ckpt has them."""
    try:
        rows = checkpoint.load(data)[1]
    except (ValueError, LookupError):
        rows = {}
    found = {"no queue": 0}
    for topic in topics.names(data):
        for number in (entry for entry in os.listdir(f"{data}/topics/{topic}") if entry.isdigit()):
            segments = segment.survey(directory_of(data, topic, int(number)))
            if sum(each.size for each in segments) != rows.get((topic, int(number)), EMPTY).size:
                found[f"topics/{topic}/{number}"] = _last_seq(segments)
    last = max(found, key=lambda name: found[name])
    return {last: found[last]}


def _last_seq(segments: list[segment.Segment]) -> int:
    for each in reversed(segments):
        with open(each.path, "rb") as file:
            tail = find_tail(file.fileno(), each.size, is_stored)
        if tail.last:
            return record.seq_of(tail.last)
    return 0
