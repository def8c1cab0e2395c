"""The rows of committed offsets in memory: what any group has committed, whatever was committed, moved and forgotten."""

import random

import pytest

from kmq.gateway.groups.offset_table import CommittedOffset, OffsetTable, RowKey, partition_lag
from kmq.log.gaps import Gap


class Counted(dict):
    """Counts how often all groups are looked at."""

    looks = 0

    def items(self):
        self.looks += 1
        return super().items()


@pytest.mark.parametrize("seed", range(5))
def test_the_furthest_offset_of_a_partition_is_that_of_some_group(seed):
    chance, table, rows = random.Random(seed), OffsetTable(), {}
    for seq in range(1, 400):
        place = RowKey(f"g{chance.randrange(4)}", "t", chance.randrange(2))
        if chance.random() < 0.2:
            rows.pop(place, None)
            table.drop(place, seq)
        else:
            rows[place] = chance.randrange(9)
            table.put(place, CommittedOffset(rows[place], 0.0, seq=seq))
        for partition in range(2):
            known = [offset for at, offset in rows.items() if at.partition == partition]
            assert table.furthest(("t", partition)) == max(known, default=0)


def test_a_question_after_a_commit_costs_no_look_at_every_group():
    table = OffsetTable()
    table._groups = groups = Counted()
    for seq in range(100):
        table.put(RowKey(f"g{seq}", "t", 0), CommittedOffset(seq, 0.0, seq=seq))
        table.furthest(("t", 0))
    assert groups.looks == 1


@pytest.mark.parametrize(
    ("committed", "lag", "first"),
    [(None, 15, 0), (7, 8, 7), (10, 5, 1000), (13, 5, 1000), (1000, 5, 1000), (1003, 2, 1003), (1005, 0, 1005)],
)
def test_a_gap_is_no_backlog(committed, lag, first):
    assert partition_lag((0, 1005), committed, (), (Gap(10, 1000),)) == (lag, first)
    assert partition_lag((0, 1005), committed, [2], (Gap(10, 1000),)) == (lag + 1, min(2, first))
