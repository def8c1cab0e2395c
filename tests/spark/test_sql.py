"""`kmq sql`: topics as tables, what it prints, what it says where something is wrong."""

import csv
import io
import json

import pytest
from made_data import append, orders_and_letters

from kmq.errors import ConfigError
from kmq.spark.sql import shell, spark_engine


@pytest.fixture
def data(tmp_path):
    with orders_and_letters(str(tmp_path / "data")) as found:
        yield found


@pytest.fixture
def ask(spark, data, capsys):
    """A function that runs a query and returns what is printed."""

    def run(text, show=None):
        source = {"path": data[0]}
        topics = shell.Shell(spark_engine.engine(spark, source), source, show or shell.as_table(100))
        capsys.readouterr()
        for statement in shell.statements(text):
            topics.run(statement)
        return capsys.readouterr().out

    yield run
    spark.conf.unset("spark.sql.caseSensitive")


def cells(table):
    """The rows of a printed table, without its header."""
    return [line.split() for line in table.splitlines()[2:]]


def test_topics_are_tables_under_their_names_and_so_are_the_wal_and_all_of_them(ask):
    assert cells(ask("select topic, count(*) from orders group by 1")) == [["orders", "10"]]
    assert cells(ask("select partition, count(*) from `jobs.eu` group by 1")) == [["0", "2"]]
    assert cells(ask("select count(*), min(seq), max(seq) from append")) == [["13", "1", "13"]]
    found = cells(ask("select topic, count(*) n from all_topics group by 1 order by 1"))
    assert found == [["Jobs", "1"], ["jobs.eu", "2"], ["orders", "10"]]


def test_topics_join_and_json_payloads_have_fields(ask):
    user, amount = (f"get_json_object(value_text, '$.{name}')" for name in ("user", "amount"))
    text = f"select {user} as u, sum({amount}) from orders group by 1 order by 1"
    assert cells(ask(text)) == [["u0", "30.0"], ["u1", "25.0"]]
    assert cells(ask("select count(*) from orders o join append a using (seq) where o.value = a.value")) == [["10"]]


def test_each_query_sees_what_is_there_when_it_begins(ask, data):
    assert cells(ask("select count(*) from orders")) == [["10"]]
    append(data[1], [b"orders|0|11|late", b"new|0|1|topic"])
    assert cells(ask("select count(*) from orders")) == [["11"]]
    assert cells(ask("select count(*) from new")) == [["1"]]


def test_show_tables_names_each_topic_and_view(ask):
    assert {"orders", "jobs.eu", "append", "all_topics"} <= {name for (name,) in cells(ask("show tables"))}


def test_csv_and_json_have_values_in_full_and_times_to_the_microsecond(ask):
    text = "select id, headers, value, value_text, recv_ts from `jobs.eu` order by offset"
    rows = list(csv.reader(io.StringIO(ask(text, shell.as_csv))))
    assert rows[0] == ["id", "headers", "value", "value_text", "recv_ts"]
    assert rows[2][0] == "2" and rows[2][2] == "tab\there, and a comma"
    assert rows[2][4].endswith("12")
    first, second = map(json.loads, ask(text, shell.as_json).splitlines())
    assert (first["value"], second["headers"]) == ("/wA=", {"aa": "1"})
    assert second["recv_ts"].endswith("12Z")


def test_two_columns_of_one_name_and_a_table_cut_at_its_rows_are_shown(ask, capsys):
    assert (
        ask("select a.id, b.id from orders a join orders b using (seq) order by seq", shell.as_table(3)).count("\n")
        == 5
    )
    assert cells(ask("select 1 as n where false")) == []


def test_names_that_differ_in_case_only_are_two_topics(ask, data):
    append(data[1], [b"jobs|0|1|small"])
    assert cells(ask("select value_text from jobs")) == [["small"]]
    assert "other case" in ask("select value_text from Jobs")


def test_a_topic_that_does_not_exist_is_named_with_those_that_do(ask):
    with pytest.raises(
        ConfigError, match=r"unknown topic `nope`; expected one of Jobs, jobs.eu, orders, append, all_topics"
    ):
        ask("select 1 from nope")


def test_a_table_wider_than_the_terminal_keeps_its_columns(ask, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = ask("select value_text, value_text as again from orders order by seq").splitlines()
    assert lines[2].count('{"user": "u1", "amount": 1}') == 2


def test_consumer_groups_are_a_table_with_their_lag(ask, data):
    assert cells(ask("select count(*) from __consumer_offsets")) == [["0"]]
    commit = b"__consumer_offsets.@.bill%%2Eeu.orders.%d|0||offset=%d ts=1700000000.125 member=m generation=3 metadata="
    append(data[1], [commit % (0, 1), commit % (1, 2), commit % (0, 2)])
    text = "select group, topic, partition, committed, end, lag, member, generation, metadata, time, broker"
    row, other = ask(f"{text} from __consumer_offsets order by partition", shell.as_csv).splitlines()[1:]
    assert row == f"bill.eu,orders,0,2,2,0,m,3,,2023-11-14 22:13:20.125,{data[0]}"
    assert other.startswith("bill.eu,orders,1,2,8,6,m,")
    both = "select max(g.lag) - count(*) from orders o join __consumer_offsets g using (topic, partition)"
    assert cells(ask(both)) == [["-4"]]


def test_filters_of_one_scan_do_not_reach_another_of_the_same_statement(ask):
    both = "select (select count(*) from orders where offset >= 4), (select count(*) from orders)"
    assert cells(ask(both)) == [["4", "10"]]


SAME = [
    "select * from orders order by seq",
    "select topic, key, headers, value, value_text, id, recv_ts, timestampType from all_topics order by topic, seq",
    "select count(*) c, min(seq) l, max(recv_ts) m, sum(offset) s, avg(seq) a, max(key) k from append",
    "select key, count(*) as n, sum(seq) / 2 as half from orders where offset >= 1 group by key order by key",
    "select o.offset, a.value from orders o join append a using (seq) where o.partition = 1 order by seq",
    "select `group`, lag, time from __consumer_offsets",
    "select value_text, null as nothing, true as yes, 1.5 as dec from `jobs.eu` order by offset limit 1",
    "select topic from all_topics where topic = 'Jobs' or recv_ts < timestamp '2000-01-01 00:00:00'",
]


@pytest.mark.parametrize("text", SAME)
def test_duckdb_prints_the_same(ask, data, capsys, text):
    duckdb_engine = pytest.importorskip("kmq.spark.sql.duckdb_engine")
    append(
        data[1], [b"__consumer_offsets.@.bill.orders.0|0||offset=2 ts=1700000000.125 member=m generation=3 metadata="]
    )
    source = {"path": data[0]}
    for show in (shell.as_table(100), shell.as_csv, shell.as_json):
        here = ask(text, show)
        with duckdb_engine.opened(source, {}) as engine:
            shell.Shell(engine, source, show).run(text)
        there = capsys.readouterr().out
        assert there == here
