"""The ledger: what a broker states about its logs, for audits that compare it with them.

An audit reads a ledger, then the ends of the logs, then a second ledger. All values only grow, so the first ledger's
`routed_seq` and the second one's topics and dropped seqs hold for these ends.
"""

from collections.abc import Mapping
from typing import Any

from kmq.log import checkpoint, deletions, dropped, identity, topics
from kmq.message.routing import CRC32, PARTITIONERS, Topic


def read(data: str, routed_seq: int = 0) -> dict[str, Any]:
    """Return the ledger of a data directory, ready for JSON. `routed_seq`: of a running router.

    routed_seq  up to this seq every record is in its queue, except those in `dropped`
    marks_from  the first seq whose routing key may have a mark
    topics      with partitions, from_seq (null: not in force yet), cleanup, partitioner, and grown: from which seqs on
                there are more partitions, each with their number before
    deleted     deleted topics: the first and the last seq at which each was in force, and the end offsets of its
                partitions
    dropped     ranges of seqs, first and last, by ring; `framed` also has those that a repair has named as lost
    """
    routed_seq = max(routed_seq, checkpoint.routed_seq(data))
    table = []
    for name in topics.names(data):
        topic = topics.read(data, name)
        cleanup = topic.limits.get("cleanup", "delete")
        row = {"name": name, "partitions": topic.partitions, "from_seq": topic.from_seq, "cleanup": cleanup}
        table.append(row | {"partitioner": topic.partitioner, "grown": [[*each] for each in topic.grown]})
    return {
        "routed_seq": routed_seq,
        "marks_from": identity.marks_from(data),
        "topics": table,
        "deleted": [[gone.topic, gone.from_seq, gone.last_seq, gone.ends] for gone in deletions.read(data)],
        # A damaged line is skipped: an audit then reports its seqs as lost, and `kmq verify` the line.
        "dropped": {
            "framed": [*dropped.quarantined(data), *dropped.read(data, "framed", skips_damaged=True)],
            "durable": dropped.read(data, "durable", skips_damaged=True),
        },
    }


def in_force(ledger: Mapping[str, Any]) -> list[Topic]:
    """Return the topics in force in a ledger; an older gateway does not send the partitioner."""
    found = []
    for row in ledger["topics"]:
        if row["from_seq"] is not None:
            partitioner = PARTITIONERS[row.get("partitioner", CRC32.name)]
            found.append(Topic(row["name"], row["partitions"], row["from_seq"], (), row.get("grown", ()), partitioner))
    return found
