"""`kmq sql --engine duckdb`: topics as tables without Spark, what it refuses, what it holds in memory."""

import csv
import io
import json
import subprocess
import sys

import pytest
from log_server import up
from made_data import FIRST_TS, append, orders_and_letters, write_data
from typer.testing import CliRunner

from kmq.cli import app, spark
from kmq.cli.spark_options import On
from kmq.errors import EXIT_CONFIG, ConfigError, KmqError
from kmq.spark.source import brokers
from kmq.spark.source.plan import DataLossError
from kmq.spark.sql import shell

engine = pytest.importorskip("kmq.spark.sql.duckdb_engine")


@pytest.fixture
def data(tmp_path):
    with orders_and_letters(str(tmp_path / "data")) as found:
        yield found


@pytest.fixture
def ask(data, capsys):
    """A function that runs statements in one session and returns what is printed."""
    source = {"path": data[0]}
    with engine.opened(source, {}) as opened:

        def run(text, show=None):
            topics = shell.Shell(opened, source, show or shell.as_table(100))
            capsys.readouterr()
            for statement in shell.statements(text):
                topics.run(statement)
            return capsys.readouterr().out

        yield run


def cells(table):
    """The rows of a printed table, without its header."""
    return [line.split() for line in table.splitlines()[2:]]


# --- what is there -----------------------------------------------------------------------------------------------------


def test_topics_are_tables_under_their_names_and_so_are_the_wal_and_all_of_them(ask):
    assert cells(ask("select topic, count(*) from orders group by 1")) == [["orders", "10"]]
    assert cells(ask("select partition, count(*) from `jobs.eu` group by 1")) == [["0", "2"]]
    assert cells(ask('select count(*) from "jobs.eu"')) == [["2"]]
    assert cells(ask("select count(*), min(seq), max(seq) from append")) == [["13", "1", "13"]]
    found = cells(ask("select topic, count(*) n from all_topics group by 1 order by 1"))
    assert found == [["Jobs", "1"], ["jobs.eu", "2"], ["orders", "10"]]


def test_a_gateway_has_the_same_tables(data, capsys):
    with up(data[0], synced=13) as broker:
        broker.serve()
        where = f"127.0.0.1:{broker.port}"
        source = {"kmq.bootstrap.servers": where}
        with engine.opened(source, {}) as opened:
            topics = shell.Shell(opened, source, shell.as_csv)
            topics.run("select max(key), count(*), min(broker) from orders where offset >= 0")
            topics.run("select count(*) from append")
    assert capsys.readouterr().out.splitlines()[1::2] == [f"k4,10,{where}", "13"]


def test_the_column_offset_needs_no_quotes_and_the_word_of_limit_stays(ask):
    text = "select offset, o.offset from orders o where offset >= 1 order by offset, seq"
    assert cells(ask(text))[0] == ["1", "1"]
    assert cells(ask("select seq from append order by seq limit 2 offset 3")) == [["4"], ["5"]]
    assert cells(ask("select min(offset), 'offset x' as s from orders")) == [["0", "offset", "x"]]
    assert ask("select headers, key from orders limit 1", shell.as_csv).splitlines()[1].startswith("{},k")


def test_topics_join_and_json_payloads_have_fields(ask):
    text = "select value_text->>'$.user' as u, sum((value_text->>'$.amount')::int) from orders group by 1 order by 1"
    assert cells(ask(text)) == [["u0", "30"], ["u1", "25"]]
    assert cells(ask("select count(*) from orders o join append a using (seq) where o.value = a.value")) == [["10"]]


def test_each_statement_sees_what_is_there_when_it_begins_also_through_a_view(ask, data):
    assert cells(ask("create view big as select * from orders where seq > 3; select count(*) from big")) == [["7"]]
    append(data[1], [b"orders|0|11|late", b"new|0|1|topic"])
    assert cells(ask("select count(*) from big")) == [["8"]]
    assert cells(ask("select (select count(*) from orders), (select count(*) from orders where seq > 3)")) == [
        ["11", "8"]
    ]
    assert cells(ask("select count(*) from new")) == [["1"]]
    assert ask("drop view big") == ""


def test_csv_and_json_have_values_in_full_and_times_to_the_microsecond(ask):
    text = "select id, headers, value, value_text, recv_ts from `jobs.eu` order by offset"
    rows = list(csv.reader(io.StringIO(ask(text, shell.as_csv))))
    assert rows[0] == ["id", "headers", "value", "value_text", "recv_ts"]
    assert rows[2][:3] == ["2", "{aa -> 1}", "tab\there, and a comma"] and rows[1][1] == "{}"
    assert rows[2][4].endswith("12")
    first, second = map(json.loads, ask(text, shell.as_json).splitlines())
    assert (first["value"], first["headers"], second["headers"]) == ("/wA=", {}, {"aa": "1"})
    assert second["recv_ts"].endswith("12Z")


def test_show_tables_names_each_topic_and_view(ask):
    assert cells(ask("show tables")) == [
        [name] for name in ("Jobs", "__consumer_offsets", "all_topics", "append", "jobs.eu", "orders")
    ]
    ask("create view big as select * from orders; select count(*) from big")
    assert ["big"] in cells(ask("SHOW TABLES ;"))
    assert json.loads(ask("show tables", shell.as_json).splitlines()[0]) == {"name": "Jobs"}


def test_headers_are_those_of_the_client_its_own_p_and_a_name_twice_too(ask, data):
    append(data[1], [b"odd|0|1;p=auto-k2.1;%70=own;trace=1;trace=2;gone|v"])
    [line] = ask("select headers, headers['p'] as p from odd", shell.as_json).splitlines()
    assert json.loads(line) == {"headers": {"p": "own", "trace": "1", "gone": None}, "p": "own"}


def test_values_of_every_kind_are_printed(ask):
    text = (
        "select 1e300 d, 'nan'::double n, 1.25 c, date '2020-01-02' dt, interval 3 hour i, [1, null] l,"
        " {'a': 1, 'b': 'x'} s, true t, 170141183460469231731687303715884105727::hugeint h, time '10:00:00' ti,"
        " timestamp '2020-01-02 00:00:00' ts, null x"
    )
    [line] = ask(text, shell.as_json).splitlines()
    found = json.loads(line)
    assert (found["n"], found["l"], found["s"], found["x"]) == ("NaN", [1, None], {"a": 1, "b": "x"}, None)
    assert (found["dt"], found["h"], found["c"]) == ("2020-01-02", 170141183460469231731687303715884105727, 1.25)
    assert ",[1, null]" in ask(text, shell.as_csv).replace('"', "")


def test_consumer_groups_are_a_table_with_their_lag(ask, data):
    assert cells(ask("select count(*) from __consumer_offsets")) == [["0"]]
    commit = b"__consumer_offsets.@.bill%%2Eeu.orders.%d|0||offset=%d ts=1700000000.125 member=m generation=3 metadata="
    append(data[1], [commit % (0, 1), commit % (1, 2), commit % (0, 2)])
    text = "select `group`, topic, partition, committed, `end`, lag, time from __consumer_offsets order by partition"
    row, other = ask(text, shell.as_csv).splitlines()[1:]
    assert row == "bill.eu,orders,0,2,2,0,2023-11-14 22:13:20.125"
    assert other.startswith("bill.eu,orders,1,2,8,6,")


def test_two_topics_whose_names_differ_in_case_are_named_with_what_to_do(ask, data):
    assert cells(ask("select value_text from Jobs")) == [["other", "case"]]
    append(data[1], [b"jobs|0|1|small"])
    with pytest.raises(ConfigError, match="DuckDB cannot tell Jobs and jobs apart; ask all_topics"):
        ask("select value_text from Jobs, jobs")
    assert cells(ask("select value_text from all_topics where topic = 'jobs'")) == [["small"]]


# --- filters -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Sixty thousand records of 500 bytes in one partition: eight ranges, and their directory."""
    lines = [b"long|0|%d|%b" % (n, b"x" * 500) for n in range(60_000)]
    return write_data(tmp_path_factory.mktemp("long") / "data", lines, {"long": 1})


@pytest.mark.parametrize(
    ("condition", "count", "at_most"),
    [
        ("offset >= 59000", 1000, 10_000),
        ("offset = 7", 1, 10_000),
        ("offset < 0", 0, 0),
        ("partition = 1", 0, 0),
        ("topic in ('other', 'none')", 0, 0),
        ("recv_ts >= to_timestamp({late}::double)", 1000, 20_000),
        ("timestamp < to_timestamp({early}::double)", 10, 20_000),
        ("id = '5' or offset = 59999", 2, 60_000),
        ("key is null", 60_000, 60_000),
    ],
)
def test_filters_skip_ranges_that_cannot_match(long, monkeypatch, capsys, condition, count, at_most):
    read = []
    blocks = brokers.Directory.blocks

    def counted(self, topic, partition, start, end):
        if end - start > 64:  # else a look at a time
            read.append(end - start)
        return blocks(self, topic, partition, start, end)

    monkeypatch.setattr(brokers.Directory, "blocks", counted)
    late, early = ((FIRST_TS + n) / 1e6 for n in (59_001, 11))
    with engine.opened({"path": long}, {}) as opened:
        text = f"select count(*) from long where {condition.format(late=late, early=early)}"
        shell.Shell(opened, {"path": long}, shell.as_csv).run(text)
    assert int(capsys.readouterr().out.splitlines()[1]) == count
    assert sum(read) <= at_most


def test_a_scan_is_read_as_the_result_is(long, monkeypatch):
    """Nobody takes more than the first rows: no more than a few blocks are read."""
    read = []
    blocks = brokers.Directory.blocks
    monkeypatch.setattr(brokers.Directory, "blocks", lambda *where: (read.append(1) or each for each in blocks(*where)))
    source = {"path": long}
    with (
        engine.opened(source, {}) as opened,
        opened.query("select * from long", shell.views_of("long", ["long"])) as found,
    ):
        rows = found.rows(0)
        assert next(rows)[1] == "long"
        assert len(read) <= 10, "all 30 MB were gathered before the first row"
        assert sum(1 for _ in rows) == 59_999 and len(read) > 20


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "create table t as select 1",
        "create macro m(a) as a + 1",
        "insert into orders values (1)",
        "copy (select 1) to '{there}'",
        "copy orders to '{there}'",
        "explain analyze copy (select 1) to '{there}'",
        "-- select\nattach '{there}'",
        "install httpfs",
        "load httpfs",
        "set threads = 1",
        "pragma enable_profiling",
        "export database '{there}'",
        "call enable_logging(storage = 'file')",
        "/* x */ begin",
        "use memory",
        "drop table orders",
    ],
)
def test_a_statement_that_does_more_than_read_is_refused(ask, tmp_path, text):
    there = tmp_path / "there"
    with pytest.raises(ConfigError, match=r"^kmq sql only reads: SELECT, .* CREATE VIEW, DROP VIEW; not [A-Z]+$"):
        ask(text.format(there=there))
    assert not there.exists()


@pytest.mark.parametrize(
    "text",
    [
        "select * from read_text('{there}')",
        "select * from '{there}'",
        "select * from glob('{there}')",
        "select * from read_csv('{there}')",
        "from enable_logging(storage = 'file', storage_path = '{there}')",
        "select * from ORDERS_HERE",
    ],
)
def test_a_function_reaches_no_file_and_no_variable_of_python(ask, tmp_path, text):
    ORDERS_HERE = engine.pa.table({"a": [1]})
    there = tmp_path / "secret.csv"
    there.write_text("a,b\nsecret,1\n")
    with pytest.raises(KmqError) as refused:
        ask(text.format(there=there))
    assert "\n" not in str(refused.value) and len(ORDERS_HERE) == 1


def test_a_topic_that_does_not_exist_is_named_with_those_that_do(ask):
    with pytest.raises(
        ConfigError, match=r"unknown topic `nope`; expected one of Jobs, jobs.eu, orders, append, all_topics"
    ):
        ask("select 1 from nope")


def test_wrong_sql_is_one_line_and_the_next_statement_runs(ask):
    for text in ("selec 1", "select nope from orders", "select sqrt(value) from orders", "select 1 from orders where"):
        with pytest.raises(KmqError) as refused:
            ask(text)
        assert "\n" not in str(refused.value) and "LINE" not in str(refused.value)
        assert refused.value.exit_code == KmqError.exit_code
    assert cells(ask("select count(*) from orders")) == [["10"]]


def test_what_a_scan_raises_is_what_is_said(ask, monkeypatch):
    def gone(self, topic, partition, start, end):
        raise DataLossError((self.name, topic, partition), "offsets 0 to 5 went while they were to be read: retention")
        yield

    monkeypatch.setattr(brokers.Directory, "blocks", gone)
    with pytest.raises(DataLossError, match="went while they were to be read: retention"):
        ask("select count(*) from orders")


def test_more_memory_than_the_limit_is_named_with_the_setting(long, capsys):
    settings = {"memory_limit": "20MB", "threads": "1", "max": ""}
    with pytest.raises(ConfigError, match="--conf max: of DuckDB there are memory_limit, threads, temp_directory"):
        engine.opened({"path": long}, settings).__enter__()
    del settings["max"]
    with engine.opened({"path": long}, settings) as opened, pytest.raises(KmqError, match=r"more: --conf memory_limit"):
        text = "select list(value_text) from long"
        shell.Shell(opened, {"path": long}, shell.as_csv).run(text)
    with pytest.raises(ConfigError, match=r"^--conf memory_limit=much: "):
        engine.opened({"path": long}, {"memory_limit": "much"}).__enter__()


# --- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_prints_and_its_codes_are_those_of_spark(data):
    def kmq(*words):
        return subprocess.run([sys.executable, "-m", "kmq", "sql", *words], capture_output=True, text=True, timeout=60)

    where = ("--path", data[0], "--engine", "duckdb")
    done = kmq("select count(*) from orders", "--csv", *where)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["10"]), done.stderr
    for text, code, says in (
        ("select 1 from nope", EXIT_CONFIG, "unknown topic `nope`"),
        ("selec 1", 1, "Parser Error"),
    ):
        done = kmq(text, *where)
        assert (done.returncode, done.stdout) == (code, "") and says in done.stderr
        assert done.stderr.startswith("kmq: ") and done.stderr.count("\n") == 1


def test_the_engine_imports_neither_pyspark_nor_a_jvm():
    code = "import sys, kmq.spark.sql.duckdb_engine; sys.exit(bool({'pyspark', 'py4j'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("name", "there", "chosen"),
    [
        ("", {"pyspark", "duckdb", "pyarrow", "numpy"}, "spark"),
        ("", {"duckdb", "pyarrow", "numpy"}, "duckdb"),
        ("duckdb", {"pyspark", "duckdb", "pyarrow", "numpy"}, "duckdb"),
        ("spark", set(), "spark"),  # which says itself what it lacks
        ("duckdb", {"pyspark", "pyarrow", "numpy"}, r"--engine duckdb: this needs DuckDB: pip install .*\[duckdb\]'"),
        (
            "",
            set(),
            r"this needs Spark or DuckDB: pip install .*\[spark\]', or for this machine pip install .*\[duckdb\]'",
        ),
        ("sqlite", set(), "--engine 'sqlite': must be spark or duckdb"),
    ],
)
def test_the_engine_is_the_one_that_is_given_or_installed(monkeypatch, name, there, chosen):
    monkeypatch.setattr(spark, "find_spec", lambda package: package in there or None)
    if chosen in ("spark", "duckdb"):
        assert spark._engine(name, On()) == chosen
    else:
        with pytest.raises(ConfigError, match=f"^{chosen}"):
            spark._engine(name, On())


def test_options_of_spark_are_refused_by_duckdb():
    done = CliRunner().invoke(app.app, ["sql", "select 1", "--engine", "duckdb", "--master", "local[1]"])
    assert "--master 'local[1]': is for Spark" in str(done.exception)
