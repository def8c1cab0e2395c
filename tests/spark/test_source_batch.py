"""spark.read.format("kmq"): rows, columns, ranges, and what is said where something is wrong."""

import pytest
from made_data import FIRST_TS, write_data

LINES = [b"orders.k%d|%d|%d;h=a%%20b|payload %d" % (n % 5, n, n, n) for n in range(1, 1001)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("source") / "data", LINES, {"orders": 3}, segment_bytes=20_000)


def read(spark, data, **options):
    reader = spark.read.format("kmq").option("path", data)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader


def test_every_record_comes_once_with_all_its_columns(spark, data):
    rows = read(spark, data, subscribe="orders").load().orderBy("seq").collect()
    assert [row.seq for row in rows] == list(range(1, 1001))
    row = rows[6]
    assert (row.broker, row.topic, row.key, row.routing_key) == (data, "orders", "k2", "orders.k2")
    assert (row.producer_ts, row.id, row.headers, bytes(row.value), row.value_text) == (
        "7",
        "7",
        {"h": "a b"},
        b"payload 7",
        "payload 7",
    )
    assert row.recv_ts.timestamp() == pytest.approx((FIRST_TS + 7) / 1e6, abs=1e-6)
