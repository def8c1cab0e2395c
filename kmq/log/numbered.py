"""The last seq that was given out, as far as the disk knows: a framer without a ring continues after it.

Invariant   No seq is given out twice. The WAL has every record that was acknowledged or shown to the router. So no
            other file may know of a later seq: neither router.ckpt, producers.ckpt, deletions nor a queue. If one does,
            the end of the WAL was lost (a file deleted, an old copy restored). To continue from that end would give
            the seqs of the lost records to other messages.
Lax fsync   With a KMQ_FSYNC other than `always` a power cut may leave a queue ahead of the WAL. Records that neither
            checkpoint covers were not promised to survive that. So queues are not read then; the router cuts them.
Cost        A few reads, and for each partition the sizes of its files: if they match router.ckpt, so does its last seq.
"""

import os

from kmq.errors import CorruptError
from kmq.files import find_tail
from kmq.log import checkpoint, dedupe_file, deletions, dropped, segment, topics, wal
from kmq.log.partition import EMPTY, directory_of
from kmq.log.segment import is_stored
from kmq.message import record


def end(data: str) -> tuple[int, int]:
    """Return (last seq, recv_ts of the last record in µs) of the WAL; seqs named as dropped or lost count too."""
    seq, recv_ts = wal.last_stored(data)
    return max([seq, *(gone.last for gone in dropped.accounted(data))]), recv_ts


def agreed_end(data: str, ask_queues: bool) -> tuple[int, int]:
    """Return `end`. Raises CorruptError if another file knows of a later seq. `ask_queues`: read queues too."""
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
            f"{data}/append: the WAL ends at seq {seq}, but {name} knows of seq {later}: its end was lost, and the seqs"
            " of that end must not be given out again; run kmq verify --repair, which restores it from the queues"
        )
    return seq, recv_ts


def _queue_end(data: str) -> dict[str, int]:
    """Return the queue with the latest seq, and that seq, of the queues whose sizes do not match router.ckpt."""
    try:
        rows = checkpoint.load(data)[1]
    except (ValueError, LookupError):
        rows = {}
    found = {"no queue": 0}
    for topic in topics.names(data):
        for number in (entry for entry in os.listdir(f"{data}/topics/{topic}") if entry.isdigit()):
            segments = segment.survey(directory_of(data, topic, int(number)))
            if sum(part.size for part in segments) != rows.get((topic, int(number)), EMPTY).size:
                found[f"topics/{topic}/{number}"] = _last_seq(segments)
    last = max(found, key=lambda name: found[name])
    return {last: found[last]}


def _last_seq(segments: list[segment.Segment]) -> int:
    for part in reversed(segments):
        with open(part.path, "rb") as file:
            tail = find_tail(file.fileno(), part.size, is_stored)
        if tail.last:
            return record.seq_of(tail.last)
    return 0
