"""`__consumer_offsets` as a table: the last commit of each partition, with its lag, from files and over HTTP."""

from datetime import UTC, datetime

import pytest
from log_server import up
from made_data import append, write_data

from kmq.gateway.groups.offset_table import CommittedOffset, NackRow, RowKey, encode_payload, routing_key
from kmq.log import topics
from kmq.spark.sql import shell

ORDERS = [b"orders.k%d|0|%d|x" % (n % 5, n) for n in range(10)]


def line(row, *place):
    return routing_key(RowKey(*place)) + b"|0||" + (encode_payload(row) if row else b"")


COMMITS = [
    line(CommittedOffset(4, 1700000000.125, "m-1", 3), "billing.eu", "orders", 1),
    line(CommittedOffset(2, 1700000001.0), "a", "orders", 0),
    line(CommittedOffset(8, 1700000002.5, "m 2", 4, "a|b"), "billing.eu", "orders", 1),
    line(CommittedOffset(1, 1700000003.0), "forgotten", "orders", 0),
    line(None, "forgotten", "orders", 0),
    line(CommittedOffset(5, 1700000003.0), "a", "gone", 0),
    line(CommittedOffset(5, 1700000003.0), "a", "orders", 9),
    line(NackRow(1, 1700000003.0, "bad"), "a", "orders", 0, 1),
    b"__consumer_offsets|0||no commit",
    b"__consumer_offsets.@.%67.orders.0|0||offset=9 ts=1.000 member= generation=0 metadata=",
]
EXPECTED = [
    ("a", "orders", 0, 2, 2, 1, "", 0, "", datetime(2023, 11, 14, 22, 13, 21, tzinfo=UTC)),
    ("billing.eu", "orders", 1, 8, 8, 0, "m 2", 4, "a|b", datetime(2023, 11, 14, 22, 13, 22, 500000, tzinfo=UTC)),
]


@pytest.fixture
def made(tmp_path):
    topics_of = write_data(tmp_path / "data", ORDERS, {"orders": 2}, closed=False)
    topics.declare(str(tmp_path / "data"), shell.GROUPS_VIEW, 1, own=True)
    append(topics_of, COMMITS)
    return str(tmp_path / "data"), topics_of


def rows(source):
    return [tuple(row[:-1]) for row in shell.group_rows(source)]


def test_each_partition_has_its_last_commit_and_what_is_gone_has_none(made):
    data, topics_of = made
    assert rows({"path": data}) == EXPECTED
    append(topics_of, ORDERS)
    found = [(row.group, row.committed, row.end, row.lag) for row in shell.group_rows({"path": data})]
    assert found == [("a", 2, 4, 3), ("billing.eu", 8, 16, 8)]


def test_what_retention_took_is_not_behind(tmp_path):
    data = str(tmp_path / "data")
    made = write_data(data, [], {"orders": 1}, segment_bytes=100, closed=False)
    append(made, [b"orders|0|%d|x" % n for n in range(9)], group=3)
    topics.declare(data, shell.GROUPS_VIEW, 1, own=True)
    append(made, [line(CommittedOffset(1, 1.0), "a", "orders", 0), line(NackRow(1, 1.0), "a", "orders", 0, 0)])
    assert [row.lag for row in shell.group_rows({"path": data})] == [9], "one of them was given back"
    first, second, *_ = sorted((tmp_path / "data/topics/orders/0").glob("*.log"))
    first.unlink()
    first.with_suffix(".idx").unlink()
    assert [row.lag for row in shell.group_rows({"path": data})] == [9 - int(second.stem)]


def test_the_same_table_comes_over_http(made):
    data, _ = made
    with up(data, synced=len(ORDERS) + len(COMMITS)) as broker:
        broker.serve()
        assert rows({"kmq.bootstrap.servers": f"127.0.0.1:{broker.port}"}) == EXPECTED


def test_a_broker_without_groups_has_an_empty_table(tmp_path):
    assert rows({"path": write_data(tmp_path / "data", ORDERS)}) == []
