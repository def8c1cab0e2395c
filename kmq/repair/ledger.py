"""What a broker says of itself beside its logs, for whoever compares them: kmq/spark/audit/snapshot.py.

Read in this order, so that of two ledgers with the ends of the logs taken in between the first one's `routed_seq`, and the
second one's table and names, hold for these ends: how far it has routed only grows, and so do the others.
"""

import contextlib
from typing import Any

from kmq.log import checkpoint, deletions, dropped, identity, topics

Span = tuple[int, int]


def read(data: str, routed_seq: int = 0) -> dict[str, Any]:
    """The ledger of a data directory, ready for JSON. `routed_seq`: what the router says where it is up.

    routed_seq  up to here every record is in its queue, but for those in `dropped`
    marks_from  the first seq whose routing key may have a mark
    topics      with partitions, from which seq they are in force (null: not yet) and cleanup
    deleted     topics that were deleted: from which seq and up to which each was in force, and the offsets where its partitions
                ended
    dropped     seqs, first and last, by ring; with those of the WAL that a repair has named as lost
    """
    routed_seq = max(routed_seq, checkpoint.routed_seq(data))
    table = []
    for name in topics.names(data):
        found = topics.read(data, name)
        cleanup = found.limits.get("cleanup", "delete")
        table.append({"name": name, "partitions": found.partitions, "from_seq": found.from_seq, "cleanup": cleanup})
    return {
        "routed_seq": routed_seq,
        "marks_from": identity.marks_from(data),
        "topics": table,
        "deleted": [[each.topic, each.from_seq, each.last_seq, each.ends] for each in deletions.read(data)],
        "dropped": _dropped(data),
    }


def _dropped(data: str) -> dict[str, list[Span]]:
    """What is no range is passed over here: an audit then finds it lost, and `kmq verify` where it is damaged."""
    found: dict[str, list[Span]] = {
        "framed": [(gone.first, gone.last) for gone in dropped.quarantined(data)],
        "durable": [],
    }
    with contextlib.suppress(FileNotFoundError), open(f"{data}/dropped.log", "rb") as file:
        for line in file.read().split(b"\n")[:-1]:
            if dropped.is_range(line):
                ring, first, last, *_ = line.decode().split("|")
                found[ring].append((int(first), int(last)))
    return found
