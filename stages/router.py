"""Router stage: sorts durable lines into the partition logs of their topics.

Example: the durable line `17|<ts>|orders.eu|…` is appended to topics/orders/<partition of key eu>.

Links       in: ring `durable` (sole reader)   out: topics/<topic>/<partition>/…
Owns        topics/ (lock topics/.owner), router.ckpt, the symlinks <topic>.log, the `durable` lines of dropped.log.

Invariant   Each WAL record is in exactly one partition log, once, in order, except what dropped.log names and
            the records of topics that were deleted (kmq/log/deletions.py).
Crash       The logs are copies and the WAL is the truth. A start looks at every log (recover), then replays the WAL
            from the checkpoint, or from an earlier seq if a log is shorter than the checkpoint says. Each log skips
            the records that it has. So it does not matter where the router was killed.
            A gap between the last routed record and the next block is read from the WAL. If drop_oldest made the gap,
            it is named in dropped.log before any later record is routed.
"""

import sys
import time
from collections.abc import Iterator
from functools import partial

from kmq import files
from kmq.broker.admission import NEW_TOPIC, Admission
from kmq.broker.clock import AgeClock
from kmq.broker.damage import Damaged
from kmq.broker.stage import Stage, main
from kmq.config.states import InForce
from kmq.config.values import KIB
from kmq.links.layout import Block
from kmq.links.ring import RingReader
from kmq.log import dropped, identity, wal
from kmq.log.dropped import without
from kmq.log.segment import Limits
from kmq.router.declarations import MADE_AT_ONCE
from kmq.router.queues import Queues

_TURN_BYTES = 256 * KIB  # per turn: routing so much fits the CPU cache, and a stall does not enlarge the heap
_TICK_NS = 1_000_000_000  # provisional index lines, new declarations, the checkpoint's clock


def name_or_read_gap(stage: Stage, queues: Queues, block: Block, dropped_it: bool) -> None:
    """Account for the seqs between the last sorted record and `block`: replay them, or name them in dropped.log."""
    first, last = queues.sorter.sorted_seq + 1, block.first_seq - 1
    if last < first:
        return
    if not dropped_it:
        queues.replay(first, last)
        return
    data = stage.settings.data
    for low, high in without(first, last, dropped.read(data, "framed")):
        dropped.append(data, "durable", low, high, stage.wait_for_room)
        stage.row.dropped += high - low + 1
        stage.log.warn("dropped", ring="durable", first_seq=low, last_seq=high)


def in_runs(blocks: list[Block]) -> Iterator[list[Block]]:
    """Yield the blocks in runs without a gap.

    A gap may follow any block. Either drop_oldest dropped blocks from `framed`; or durability was killed before it
    showed blocks that it had stored, and `framed` dropped them meanwhile.
    """
    run: list[Block] = []
    for block in blocks:
        if run and block.first_seq != run[-1].last_seq + 1:
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def wait_for_quota(stage: Stage, admission: Admission, queues: Queues) -> None:
    """Wait until the quota has room for a new topic, which takes far more disk than its first message."""
    while admission.must_wait(NEW_TOPIC):
        queues.changes.set_early()  # a lower limit may make room
        queues.make_room()
        stage.wait_for_room(f"{stage.settings.data} (KMQ_DATA_QUOTA)", "quota")


def note_times(stage: Stage, blocks: list[Block]) -> None:
    """Note the time since each block was received. It is in its queues now, or waits for its topic to be made."""
    times, now = stage.row.times, time.time()
    if times is not None:
        for block in blocks:
            times.observe(now - block.recv_ts / 1e6)


def turn(stage: Stage, ring: RingReader, queues: Queues) -> bool:
    """Route the waiting blocks; if there are none, make some new topics. Return True if there was anything to do."""
    row = stage.row
    blocks = ring.take(_TURN_BYTES)
    if blocks:
        for run in in_runs([block for block in blocks if block.last_seq > queues.sorter.sorted_seq]):
            name_or_read_gap(stage, queues, run[0], ring.jumped and run[0] is blocks[0])
            row.bytes += queues.route(run)
            row.messages += sum(block.count for block in run)
            note_times(stage, run)
        ring.release(blocks[-1])
    elif queues.sorter.newcomers:
        row.bytes += queues.make_topics(MADE_AT_ONCE)
    else:
        return False
    row.seq = queues.routed_seq
    stage.end_disk_full()
    return True


def run(stage: Stage) -> None:
    """Promise: see the module. Settings → links → recover → loop → drain."""
    settings = stage.settings
    topics = f"{settings.data}/topics"
    stage.give_way(f"{settings.data}/append/.owner")
    owner = stage.own(f"{topics}/.owner", f"queues {topics}", traces=f"{topics}/*/*/*.log")
    ring = stage.wait_for("ring durable, from durability", partial(stage.attach_ring, "durable"))
    assert isinstance(ring, RingReader)
    stage.wait_for("formats of the newest version, by durability", lambda: identity.is_newest(settings.data) or None)
    stage.state("recovering")
    in_force, admission = InForce(settings), Admission(settings, lambda: stage.page.rows["durability"].bytes)
    queues = Queues(
        settings.data,
        stage.wait_for_room,
        stage.log,
        Limits.of(in_force.settings),
        wal_is_synced=settings.fsync == 0,
        most_open=stage.most_files - files.OWN,
        are_recorded=True,
        in_shard=bool(settings.shard),
        damaged=Damaged(stage.row).note,
        check=stage.check,
        lacks_room=lambda: bool(admission.refusal()),
        has_room=admission.has_room,
        shortage=admission.shortage,
        recount=admission.recount,
        has_store=bool(settings.tier),
        now_s=AgeClock(stage.row, wal.last_stored(settings.data)[1], stage.log).now_s,
        before_topic=partial(wait_for_quota, stage, admission),
    )
    queues.recover(ring.committed().next_seq - 1)
    stage.row.seq = queues.routed_seq
    stage.ready(routed_seq=queues.routed_seq, topics=queues.in_force.count)

    ticked = 0
    while True:
        if time.monotonic_ns() - ticked > _TICK_NS:
            if in_force.changed():
                queues.use_limits(Limits.of(in_force.settings))
            queues.tick()
            if not queues.checkpoints.is_busy:
                stage.end_disk_full()
            ticked = time.monotonic_ns()
        busy = turn(stage, ring, queues)
        is_sweeping = queues.changes.sweep()
        stage.beat()
        if stage.stopping:
            stage.state("draining")
            if not busy and ring.writer_is_gone():
                break
            stage.check()
        if not busy:
            queues.adopt_declarations()
            if not is_sweeping:
                ring.wait()
    queues.close()
    ring.close()
    owner.release()


if __name__ == "__main__":
    sys.exit(main("router", run))
