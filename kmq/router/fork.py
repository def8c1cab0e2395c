"""`kmq tier fork`: continues with a data directory that was put back from an older copy, and assigns no number twice.

    data/forking        id=<hex> of=<hex> last=20 next=1000000021 offset=1000000010 starts=1012 ts=1795276288.490144

The copy ends with seq 20 and offset 9. The broker has acknowledged later records, which the copy lacks. So the next
record gets a seq and an offset that are higher than any that the broker can have given out since the copy was made.

Owner       The command. The broker is down, and the command holds the locks of its logs.
Invariant   Every step is on disk before the next one. While `forking` exists no process starts with the directory
            (identity.py), and older releases refuse it already after the first step. The plan never changes: the numbers
            of a repeated command are those of the first one.
Crash       The command, run again, repeats the steps. Each of them finds what it has done before.
Not covered A copy that has served producers before it was forked has given out numbers again. Nothing on its disk shows it.
            The same copy put back twice, with a clock that was set back between the two forks.
"""

import os
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from kmq.broker.data_directory import read_starts, write_starts
from kmq.config.settings import Settings
from kmq.errors import ConfigError, CorruptError, RetryError
from kmq.files import replace_file, sync_directory
from kmq.log import checkpoint, deletions, dropped, gaps, identity, partition, rows, topics, wal
from kmq.log.gaps import Fork
from kmq.log.identity import FORKING
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.logfmt import Logger
from kmq.message import record
from kmq.router.queues import Queues

LEAST = 10**9  # how far numbers jump at least
RATE = 2 * 10**6  # and for each second since the last record of the copy: more than a broker can acknowledge
STARTS = 1000  # lives of gateways that the copy may lack
_MOST = 10**18  # a seq or an offset is lower
_PLAN = re.compile(
    r"id=([0-9a-f]{32}) of=([0-9a-f]{32}) last=(\d+) next=(\d+) offset=(\d+) starts=(\d+) ts=(\d+\.\d{6})\n"
)


class ForkPlan(NamedTuple):
    """What a fork does. `id`: of the directory from then on; before that it was `of`. `last_seq`: of the copy.

    `next_seq`, `offset`: of the next record. `starts`: of gateways.
    """

    id: str
    of: str
    last_seq: int
    next_seq: int
    offset: int
    starts: int
    ts: str

    def text(self) -> str:
        return (
            f"id={self.id} of={self.of} last={self.last_seq} next={self.next_seq} offset={self.offset}"
            f" starts={self.starts} ts={self.ts}\n"
        )


class ForkedPartition(NamedTuple):
    """A partition after a fork: where its records end, and the offset of the next one."""

    topic: str
    partition: int
    end_offset: int
    next_offset: int


def begun(data: str) -> ForkPlan | None:
    """Return the plan of a fork that has not finished; None if there is none. Raises ConfigError if it is damaged."""
    try:
        with open(f"{data}/{FORKING}", encoding="latin-1") as file:
            match = _PLAN.fullmatch(file.read())
    except FileNotFoundError:
        return None
    if match is None:
        raise ConfigError(f"{data}/{FORKING}: is no plan of a fork; put the copy back again")
    last_seq, next_seq, offset, starts = map(int, match.groups()[2:6])
    return ForkPlan(match[1], match[2], last_seq, next_seq, offset, starts, match[7])


def plan(data: str, now_ns: Callable[[], int] = time.time_ns) -> ForkPlan:
    """Return the plan for a directory. Changes nothing. Raises CorruptError if its files are of different ages."""
    if os.path.exists(f"{data}/replica"):
        raise ConfigError(
            f"KMQ_DATA={data!r}: is a replica of a shard; kmq cluster reset copies all from the leader, and after kmq"
            " cluster detach it can be forked"
        )
    if identity.version(data) is None:
        raise ConfigError(f"KMQ_DATA={data!r}: its file format is missing or of another release")
    last_seq, recv_ts = checkpoint.agreed_end(data, ask_queues=True)
    routed, states, _ = checkpoint.load(data)
    queues = [(topic, number) for topic in topics.names(data) for number in _partitions(data, topic)]
    _check_rows(data, queues)
    ends = [partition.end_offset(data, *at)[0] for at in queues if not at[0].startswith(gaps.INTERNAL)]
    ends += [row.end_offset for (topic, _), row in states.items() if not topic.startswith(gaps.INTERNAL)]
    ends += [end for gone in deletions.read(data) for end in gone.ends]
    ends += [fork.offset for fork in gaps.forks(data)]
    now_us = now_ns() // 1000
    # Not in whole seconds: the same copy may be put back twice within one.
    jump = LEAST + RATE * max(0, now_us - recv_ts) // 1_000_000
    end = max(ends, default=0) + max(0, last_seq - routed)  # records that are not in their queues yet
    if max(last_seq, end) + jump > _MOST:
        raise ConfigError(f"KMQ_DATA={data!r}: seq {last_seq} or offset {end} cannot rise by {jump} more")
    stamp = record.format_ts(now_us).decode()
    starts = read_starts(data) + STARTS
    return ForkPlan(
        os.urandom(16).hex(), identity.read(data, "id"), last_seq, last_seq + 1 + jump, end + jump, starts, stamp
    )


def _check_rows(data: str, queues: list[tuple[str, int]]) -> None:
    """Raise CorruptError if a file `tier` is damaged: the commits of the new lineage would never name its rows."""
    for at in queues if rows.may_exist(data) else ():
        if not rows.is_known(directory := partition.directory_of(data, *at)):
            raise CorruptError(
                f"{rows.path_of(directory)}: damaged; run kmq verify --repair with KMQ_TIER set, which writes it again"
            )


def _partitions(data: str, topic: str) -> list[int]:
    return sorted(int(entry) for entry in os.listdir(f"{data}/topics/{topic}") if entry.isdigit())


def carry_out(data: str, made: ForkPlan, settings: Settings, logger: Logger) -> list[ForkedPartition]:
    """Fork the directory. The broker is down, and the caller holds its locks. Returns all partitions of users' topics."""
    replace_file(f"{data}/{FORKING}", made.text().encode())
    _raise_format(data, made)
    gaps.name_records(data, made.id)
    mine = Fork(made.last_seq + 1, made.offset, made.ts, made.of)
    gaps.write_forks(data, [*(fork for fork in gaps.forks(data) if fork != mine), mine])
    last_stored = _settle_wal(data, settings)
    found = _leave_gaps(data, settings, last_stored, logger)
    for first, last in dropped.without(last_stored + 1, made.next_seq - 1, dropped.accounted(data)):
        dropped.append(data, "framed", first, last, _no_room)
    if read_starts(data) < made.starts:
        write_starts(data, made.starts)
    os.unlink(f"{data}/{FORKING}")
    sync_directory(data)
    return found


def _raise_format(data: str, made: ForkPlan) -> None:
    identity.raise_version(data, made.last_seq + 1)
    if text := identity.raised_text(data, identity.FORKED):
        replace_file(f"{data}/format", f"{text}\n".encode())


def _settle_wal(data: str, settings: Settings) -> int:
    """Cut a torn end of the WAL, as each start does, and return its last seq."""
    log = Wal(data, _no_room, wal.torn_bytes(settings.ring_bytes), Limits.of(settings), settings.fsync)
    log.close()
    return log.last_seq


def _leave_gaps(data: str, settings: Settings, last_stored: int, logger: Logger) -> list[ForkedPartition]:
    """Complete all queues from the WAL, as each start does, which also leaves their gaps. Return them."""
    queues = Queues(data, _no_room, logger, Limits.of(settings), are_recorded=True)
    queues.recover(last_stored)
    queues.make_topics()
    queues.settle()  # a start that was moved has begun one
    queues.checkpoints.start()
    queues.settle()
    queues.logs.close()
    return [
        ForkedPartition(topic, number, gaps.before(state.gaps, state.end_offset), state.end_offset)
        for (topic, number), state in sorted(queues.logs.states.items())
        if not topic.startswith(gaps.INTERNAL)
    ]


def _no_room(path: str) -> None:
    raise RetryError(f"{path}: the disk is full; make room, and run the command again")
