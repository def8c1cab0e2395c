"""Data directories that were put back and forked, without a broker."""

from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room

from kmq.config.settings import load
from kmq.log import dropped
from kmq.log.wal import Wal
from kmq.router import fork
from kmq.router.fork import ForkedPartition, ForkPlan
from kmq.router.queues import Queues


def forked(data: str, made: ForkPlan | None = None) -> tuple[ForkPlan, list[ForkedPartition]]:
    """Fork a directory, by `made` if it is given, as the command does; also one whose fork was begun."""
    made = made or fork.begun(data) or fork.plan(data)
    return made, fork.carry_out(data, made, load({"KMQ_DATA": data}, ""), FakeLogger())


def send(data: str, lines: list[bytes]) -> None:
    """Append lines (as sent) to a directory, as a broker that is started and stopped."""
    wal = Wal(data, no_room, 1 << 20)
    seq = max([wal.last_seq, *(gone.last for gone in dropped.accounted(data))]) + 1
    queues = Queues(data, no_room, FakeLogger())
    queues.recover(wal.last_seq)
    routed = block(lines, seq)
    wal.append([(routed.data, seq, routed.count, FIRST_TS + routed.last_seq)])
    queues.route([routed])
    queues.close()
    wal.close()
