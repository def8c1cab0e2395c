"""Data directories made without a broker: a WAL of given lines, routed into queues."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room

from kmq.log import identity, topics
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.router.queues import Queues

__all__ = ["FIRST_TS", "append", "orders_and_letters", "write_data"]


def write_data(
    path: object,
    lines: list[bytes],
    declared: dict[str, int] | None = None,
    segment_bytes: int = 1 << 30,
    group: int = 1000,
    closed: bool = True,
) -> Any:
    """A data directory with these lines (as sent) in its WAL and routed; `declared`: {topic: partitions}.

    recv_ts of the record with seq n is FIRST_TS + n µs. With closed=False: (wal, queues, next seq), to go on with `append`.
    """
    data = str(path)
    identity.open_data(data)
    for name, partitions in (declared or {}).items():
        topics.declare(data, name, partitions, partitioner="crc32")  # takes turns by single seqs, so all get records
    limits = Limits(segment_bytes=segment_bytes)
    wal, queues = Wal(data, no_room, 1 << 20, limits), Queues(data, no_room, FakeLogger(), limits)
    queues.recover(0)
    made: list[Any] = [wal, queues, 1]
    append(made, lines, group)
    if not closed:
        return made
    wal.close()
    queues.close()
    return data


def append(made: list[Any], lines: list[bytes], group: int = 1000) -> None:
    """More lines for a directory that is not closed."""
    wal, queues, seq = made
    for at in range(0, len(lines), group):
        routed = block(lines[at : at + group], seq)
        wal.append([(routed.data, seq, routed.count, FIRST_TS + routed.last_seq)])
        wal.sync()
        queues.route([routed])
        seq += routed.count
    made[2] = seq
    wal.note_open_block()
    queues.tick()


ORDERS = [b'orders.k%d|0|%d|{"user": "u%d", "amount": %d}' % (n % 5, n, n % 2, n) for n in range(1, 11)]
LETTERS = [b"jobs.eu.x|0|;enc=b64|/wA=", b"jobs.eu.y|0|2;aa=1|tab\there, and a comma", b"Jobs|0|1|other case"]


@contextmanager
def orders_and_letters(path: str) -> Iterator[tuple[str, list[Any]]]:
    """Ten orders in two partitions, three letters, and a way to add more: (path, wal and queues)."""
    made = write_data(path, ORDERS + LETTERS, {"orders": 2, "jobs.eu": 1}, closed=False)
    yield path, made
    made[0].close()
    made[1].close()
