"""One turn of the router: what the ring lacks between two blocks is read from the WAL, wherever in the turn it lies."""

from types import SimpleNamespace

import pytest
from fake_logger import FakeLogger
from made_up import block, no_room, stored, write_wal

from kmq.links.layout import Framed, Stamp
from kmq.log import segment
from kmq.router.queues import Queues
from stages.router import _TURN_BYTES, turn

LINES = [b"t|||%d" % number for number in range(1, 31)]


def stage_in(data):
    row = SimpleNamespace(times=None, bytes=0, messages=0, seq=0)
    return SimpleNamespace(row=row, settings=SimpleNamespace(data=data), end_disk_full=lambda: None)


def push(writer, first_seq, last_seq, lines=LINES):
    """The block of these records, as durability shows it."""
    made = block(lines[first_seq - 1 : last_seq], first_seq)
    writer.append(Framed(bytes(made.data), Stamp(first_seq, made.count, made.key_length, made.recv_ts)))


@pytest.mark.parametrize("shown", [[(1, 10), (21, 30)], [(11, 12), (15, 16), (29, 30)], [(1, 10), (11, 12), (29, 30)]])
@pytest.mark.parametrize("routed", [0, 10, 12])
def test_a_gap_behind_any_block_of_a_turn_is_read_from_the_wal(data, rings, shown, routed):
    """Durability was killed before it showed what it had stored, and drop_oldest took it from the ring in front."""
    write_wal(data, LINES).close()
    queues = Queues(data, no_room, FakeLogger())
    queues.recover(routed)
    writer, ring = rings()
    for first_seq, last_seq in shown:
        push(writer, first_seq, last_seq)
    stage = stage_in(data)
    assert turn(stage, ring, queues)
    with open(f"{data}/topics/t/0/{segment.name(0)}", "rb") as file:
        assert file.read() == b"".join(stored(LINES))
    assert stage.row.seq == 30
    queues.close()


def test_a_turn_takes_a_part_of_what_waits_after_a_stall(data, rings):
    """All of a full ring at once would need several times its size in memory, and keep it."""
    lines = [b"t|||" + b"x" * (_TURN_BYTES // 4)] * 12
    write_wal(data, lines).close()
    queues = Queues(data, no_room, FakeLogger())
    queues.recover(0)
    writer, ring = rings(nbytes=4 * _TURN_BYTES)
    for seq in range(1, 13):
        push(writer, seq, seq, lines)
    stage, seen = stage_in(data), []
    while turn(stage, ring, queues):
        seen.append(stage.row.seq)
    assert seen == [4, 8, 12] and stage.row.messages == 12
    queues.close()
