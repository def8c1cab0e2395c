"""Old records that come back to the disk: whole segments of what rows have, for the router to install.

    topics/.fetched/orders-3-1000-1512/log, idx       laid out by `kmq tier fetch`: the records 1000…1511 of orders/3
    topics/orders/3/00000000000000001000.log, .idx    installed

Owner       topics/ has one owner, the router. The command only lays out segments, each with one rename, the newest first
            (outbox and lock as for compaction.py). The router installs a segment directly before the first local one;
            then it checkpoints. Whether the broker is up does not matter: what is laid out stays until it is installed.
Invariant   The rows stay in force, and a segment has what they have, byte for byte. So readers find the same records
            before, between and after the steps, and retention decides over the same list. Nothing before the start of a
            partition comes back.
Crash       laid out         the next router installs it;
            index renamed    a start removes an index without a log; the rest of the layout is discarded;
            log renamed      no checkpoint counts the segment, so a start deletes it. Its records lie in the store, as
                             before. `kmq tier fetch` fetches them again.
"""

import os
import shutil

from kmq.files import sync_directory
from kmq.log import segment
from kmq.log.compaction import Sealed, waiting
from kmq.log.segment import Segment

FETCHED = ".fetched"  # below topics/


def waiting_of(data: str, topic: str, partition: int) -> list[Sealed]:
    """Return the segments of a partition that are laid out, the newest first."""
    return [each for each in reversed(waiting(data, FETCHED)) if (each.topic, each.partition) == (topic, partition)]


def is_whole(data: str, which: Sealed) -> bool:
    """Return False for what a kill has left of an installation."""
    return all(os.path.exists(f"{which.outbox_path(data, FETCHED)}/{name}") for name in ("log", "idx"))


def install(data: str, which: Sealed) -> Segment:
    """Give a segment its place. A reader finds it with its index, or not at all."""
    place, log = which.outbox_path(data, FETCHED), which.path(data)
    os.rename(f"{place}/idx", segment.index_path(log))
    os.rename(f"{place}/log", log)
    sync_directory(os.path.dirname(log))
    shutil.rmtree(place)
    return Segment(which.first, log, os.path.getsize(log))
