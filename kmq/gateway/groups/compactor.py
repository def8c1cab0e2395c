"""`python -m kmq.gateway.groups.compactor`: compacts the topics of KMQ itself, beside the gateway, at idle priority.

Owner       the gateway starts it now and then (keeping.py); Spark's `compact` pipeline shares its lock, so one of them
            works at a time. The other topics are the pipeline's.
Invariant   It only lays out segments; the router installs them (kmq/log/compaction.py). While some wait to be
            installed, nothing is planned.
Crash       Killed at any call it has changed nothing, or whole segments.
Memory      See kmq/log/replaced.py. It is a process of its own, so that neither its memory nor its work is the
            gateway's: to compare keys is a loop in Python, which would delay every other request.
"""

import os
import signal
import sys
import time

from kmq.broker.clock import GAP_S
from kmq.errors import BusyError, KmqError
from kmq.log import compaction, identity, reader, topics, wal
from kmq.log.replaced import Horizon, Removable, plan
from kmq.logfmt import Logger
from kmq.settings import load

MIN_DIRTY = 0.5  # share of a segment's bytes: below it rewriting costs more than it gains
TOMBSTONES_S = 86400.0
_DEADLINE_S = 600


def compact(data: str, topic: str, log: Logger, min_dirty: float = MIN_DIRTY, now_s: float | None = None) -> int:
    """Lay out the segments of a topic that are worth it; return how many. `now_s`: seconds since the epoch.

    Raises BusyError if another compactor is at work, DamageError at damage.
    """
    with compaction.compactor(data) as place:
        if compaction.waiting(data):
            return 0
        horizon = _horizon(data, time.time() if now_s is None else now_s)
        count = 0
        for number in range(topics.load(data, topic)[0]):
            end = compaction.synced_ends(data).get((topic, number), 0)
            for found in plan(data, topic, number, end, horizon, identity.marks_from(data)):
                if found.nbytes >= min_dirty * os.path.getsize(found.segment.path(data)):
                    count += _lay_out(data, found, place, log)
        return count


def _lay_out(data: str, found: Removable, place: str, log: Logger) -> int:
    saved = compaction.lay_out(data, found.segment, found.offsets, place)
    log.info("segment_laid_out", segment=found.segment, removed=len(found.offsets), saved=saved)
    return 1


def _horizon(data: str, now_s: float) -> Horizon:
    """Return which tombstones may go. A clock that is far ahead must not delete them all (kmq/broker/clock.py)."""
    last_record_s = wal.last_stored(data)[1] / 1e6
    before_us = int((min(now_s, last_record_s + GAP_S) - TOMBSTONES_S) * 1e6)
    return Horizon(before_us, reader.first_seq(data))


def main() -> int:
    """Compact the topics of KMQ itself that are declared so. Returns an exit code of kmq/errors.py."""
    log = Logger("compactor")
    signal.alarm(_DEADLINE_S)
    os.nice(19)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    data = load().data
    try:
        for name in topics.names(data):
            if name.startswith("__") and compaction.is_compacted(data, name):
                compact(data, name, log)
    except BusyError:
        return 0  # the next time
    except (KmqError, OSError) as err:
        log.warn("not_compacted", reason=err, effect="tried again later")
        return getattr(err, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
