"""A topic as its archive's table and its log together: each record once, and what is said where the two do not fit."""

import re
import shutil
import sys
from datetime import date
from pathlib import Path

import duckdb
import made_data
import made_up
import pytest
from made_data import FIRST_TS, append, write_data
from pyspark.sql import functions as F

import kmq.spark
from kmq.errors import EXIT_CONFIG, ConfigError, KmqError, RetryError
from kmq.log import identity, topics
from kmq.spark import lake, tables
from kmq.spark.pipelines import archive
from kmq.spark.source.planner import QueryLogs
from kmq.spark.sql import shell, spark_engine
from kmq.spark.tables import base
from kmq.spark.tables.base import BoundStream
from kmq.spark.tables.stores import TableDirectory

pytestmark = pytest.mark.sampled(0.4, group="file")  # none needs another: each run takes a part

SCHEMA = "n bigint, user string"
OTHER = "topic string, partition int, offset bigint, seq bigint, recv_ts timestamp, key string, value_text string"


def orders(low, high, bad_every=0):
    for n in range(low, high):
        bad = bad_every and n % bad_every == 0
        yield b"orders.k%d|1|%d|%b" % (n % 5, n, b"bad" if bad else b'{"n": %d, "user": "u%d"}' % (n, n % 7))


class Lake:
    """A data directory, its archive, and both together."""

    def __init__(self, spark, root, format="parquet", **options):
        self.spark, self.data, self.to = spark, str(root / "data"), str(root / "lake")
        self.format, self.options = format, {"schema": SCHEMA, "bad": "drop"} | options

    def archive(self, **where):
        where = {"path": self.data, "subscribe": "orders"} | where
        return archive.run(self.spark, where, self.to, self.format, **self.options).rows

    def table(self, **options):
        return kmq.spark.table(self.spark, "orders", self.to, {"path": self.data} | options)

    def numbers(self, **options):
        return sorted(row.n for row in self.table(**options).select("n").collect())


def whole(spark, data):
    """All records of the log, as rows of the same columns; made without the archive."""
    read = spark.read.format("kmq").schema(OTHER).option("path", data).option("subscribe", "orders").load()
    fields = F.from_json("value_text", SCHEMA)
    return read.withColumns({"n": fields["n"], "user": fields["user"]}).where("n is not null").drop("value_text")


def same(one, other):
    names = sorted(other.columns)
    rows = [sorted(map(tuple, frame.select(*names).collect())) for frame in (one, other)]
    return rows[0] == rows[1] and len(rows[0])


# --- the same records ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", tables.FORMATS)
def test_table_and_log_together_are_the_whole_log(spark, up, tmp_path, format):
    found = Lake(spark, up.root, format)
    found.data = str(up.data)
    assert up.kmq("topics", "create", "orders", "--partitions", "3").returncode == 0
    up.send_lines(list(orders(0, 1000, 10)))
    up.wait_routed(1001)
    assert found.archive(maxOffsetsPerTrigger="400") == 900
    up.send_lines(list(orders(1000, 1500, 10)))
    up.wait_routed(1501)
    both = found.table()
    assert same(both, whole(spark, found.data)) == 1350
    of_files = "select count(*) from {both} where startswith(input_file_name(), 'file:') "
    assert spark.sql(of_files, both=both).first()[0] == 900, "the others are of the log"
    assert both.schema == spark.sql("select * from {both} where offset < 5", both=both).schema
    assert both.where("partition = 1 and n >= 995").count() + both.where("partition <> 1 and n >= 995").count() == 455


def test_archived_rows_and_those_of_the_log_have_the_same_columns_types_and_values(spark, tmp_path):
    found = Lake(spark, tmp_path, schema="infer", bad="keep", rest=True)
    lines = [b'orders.a|1|1;hh=x;host=n1|{"at": {"x": 1, "y-z": [1.5]}, "tags": ["a"], "big": 3000000000}']
    lines += [b"orders.a|1|2|nope", b"orders|1|;enc=b64|/wA="]
    made = write_data(found.data, lines, closed=False)
    assert found.archive() == 3
    append(made, [*lines, b'orders|1|4|{"tags": [], "new": {"b": 1}}'])
    rows = found.table().drop("seq", "recv_ts").orderBy("offset").collect()
    assert [row[4:] for row in rows[:3]] == [row[4:] for row in rows[3:6]] and len(rows) == 7
    assert (rows[3].reason, rows[4].reason, rows[3].at.x, rows[6].rest) == (None, "not_json", 1, {"new": '{"b":1}'})
    assert rows[3].host == "n1" and {row.broker for row in rows} == {found.data}


def test_payloads_as_text_and_other_ways_to_the_same_directory(spark, tmp_path):
    found = Lake(spark, tmp_path, schema="none")
    made = write_data(found.data, [b"orders|1|1|a", b"orders|1|;enc=b64|/wA="], closed=False)
    found.archive()
    append(made, [b"orders|1|3|b"])
    (tmp_path / "other").symlink_to(tmp_path / "data")
    rows = found.table(path=str(tmp_path / "other")).orderBy("offset").collect()
    assert [(row.value_text, row.value) for row in rows] == [("a", None), (None, b"\xff\0"), ("b", None)]
    assert {row.broker for row in rows} == {found.data}, "as the archive calls it"


def test_a_function_of_the_user_makes_rows_of_both_sides(spark, tmp_path, monkeypatch):
    (tmp_path / "of_ours.py").write_text("def double(rows):\n    return rows.selectExpr('*', 'n * 2 twice')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = Lake(spark, tmp_path, enrich_with="of_ours:double")
    made = write_data(found.data, list(orders(0, 3)), closed=False)
    found.archive()
    append(made, list(orders(3, 5)))
    with pytest.raises(ConfigError, match="the rows have no column twice; give enrich_with the module:function"):
        found.table()
    both = kmq.spark.table(spark, "orders", found.to, {"path": found.data}, enrich_with="of_ours:double")
    assert sorted(row.twice for row in both.collect()) == [0, 2, 4, 6, 8]


# --- the seam --------------------------------------------------------------------------------------------------------


def test_a_frame_keeps_its_moment_while_the_archive_goes_on(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "MERGE_FILES", 1000)  # merged files of plain Parquet are gone for who has listed them
    found = Lake(spark, tmp_path)
    made = write_data(found.data, list(orders(0, 100)), {"orders": 2}, closed=False)
    for end in (100, 200, 300):
        before = found.table() if end > 100 else None
        assert found.archive(maxOffsetsPerTrigger="40") == 100
        append(made, list(orders(end, end + 100)))
        if before is not None:
            assert sorted(row.n for row in before.collect()) == list(range(end))
        assert found.numbers() == list(range(end + 100))
    assert same(found.table(), whole(spark, found.data)) == 400


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", tables.FORMATS)
def test_each_step_of_a_commit_shows_each_record_once(spark, tmp_path, monkeypatch, format):
    found = Lake(spark, tmp_path, format)
    made = write_data(found.data, list(orders(0, 60)), {"orders": 2}, closed=False)
    found.archive()
    append(made, list(orders(60, 150)))
    seen, kinds = [], {"parquet": tables.Parquet, "delta": tables.Delta, "iceberg": tables.Iceberg}

    def watched(owner, name):
        step = getattr(owner, name)

        def run(*arguments):
            done = step(*arguments)
            seen.append((name, found.numbers()))
            return done

        monkeypatch.setattr(owner, name, run)

    for owner, name in ((TableDirectory, "adopt"), (kinds[format], "_record"), (BoundStream, "committed")):
        watched(owner, name)
    assert found.archive(maxOffsetsPerTrigger="50") == 90
    assert [name for name, _ in seen] == ["adopt", "_record", "committed"] * 2
    assert all(numbers == list(range(150)) for _, numbers in seen)


def test_files_that_are_merged_while_they_are_listed_are_read_once(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "MERGE_FILES", 2)
    found = Lake(spark, tmp_path)
    made = write_data(found.data, list(orders(0, 100)), closed=False)
    found.archive(maxOffsetsPerTrigger="30")
    append(made, list(orders(100, 200)))
    last = BoundStream.last_batch.fget
    turns = iter([True])

    def late(stream):  # the ledger is read, then a whole run of the archive goes by, which merges its files
        number = last(stream)
        if next(turns, False):
            found.archive(maxOffsetsPerTrigger="30")
        return number

    with monkeypatch.context() as patch:
        patch.setattr(BoundStream, "last_batch", property(late))
        both = found.table()
    assert sorted(row.n for row in both.collect()) == list(range(200))
    assert any("+" in path.name for path in Path(found.to).glob("*=*/**/*.parquet"))


# --- where log and table differ --------------------------------------------------------------------------------------


def first_segments(data):
    return sorted(Path(data, "topics/orders/0").glob("*.log"))


def forget_before(data, count):
    """As retention does."""
    for path in first_segments(data)[:count]:
        path.unlink()
        path.with_suffix(".idx").unlink()


def test_history_outlives_the_retention_of_the_log(spark, up, tmp_path):
    found = Lake(spark, up.root)
    found.data = str(up.data)
    assert up.kmq("topics", "create", "orders", "--set", "segment_bytes=1MiB").returncode == 0
    up.send_lines([line + b" " * 1000 for line in orders(0, 5000)])
    up.wait_routed(5001)
    assert found.archive() == 5000
    assert up.kmq("topics", "set", "orders", "retention_bytes=1MiB").returncode == 0
    first = up.data / "topics/orders/0/00000000000000000000.log"
    up.wait(lambda: not first.exists(), "a deleted segment")
    up.send_lines(list(orders(5000, 5010)))
    up.wait_routed(5012)
    assert found.numbers() == list(range(5010))


def test_retention_in_the_middle_of_the_call_changes_no_row(spark, tmp_path, monkeypatch):
    found = Lake(spark, tmp_path)
    write_data(found.data, list(orders(0, 60)), segment_bytes=300, group=5)
    found.archive()
    look = QueryLogs.offsets_of_time

    def late(*arguments):
        forget_before(found.data, 3)
        return look(*arguments)

    monkeypatch.setattr(QueryLogs, "offsets_of_time", late)
    assert found.numbers() == list(range(60)) and int(first_segments(found.data)[0].stem) > 0


def test_records_that_retention_took_before_they_were_archived_are_named(spark, tmp_path, capfd):
    found = Lake(spark, tmp_path)
    made = write_data(found.data, list(orders(0, 20)), segment_bytes=300, group=5, closed=False)
    found.archive()
    append(made, list(orders(20, 100)), group=5)
    left = first_segments(found.data)
    forget_before(found.data, len(left) - 2)
    first = int(left[-2].stem)
    gone = f"orders/0: offsets 20 to {first - 1} are gone: retention, .*, before they were archived"
    with pytest.raises(KmqError, match=rf"archive={found.to}: .* {gone}; failOnDataLoss=false continues"):
        found.table()
    assert found.numbers(failOnDataLoss="false") == [*range(20), *range(first, 100)]
    assert "event=archive_differs" in capfd.readouterr().err


def test_another_directory_an_older_copy_and_another_topic_are_refused(spark, tmp_path):
    found = Lake(spark, tmp_path)
    write_data(found.data, list(orders(0, 10)))
    shutil.copytree(found.data, tmp_path / "older")
    found.archive()
    other = write_data(tmp_path / "other", list(orders(0, 20)))
    with pytest.raises(
        ConfigError, match=rf"is of .*/data \(data id .*\), and the log here is of {other} \(data id .*\)"
    ):
        found.table(path=other)
    with pytest.raises(ConfigError, match="name all brokers that were archived, and no others"):
        found.table(path=f"{found.data},{other}")
    with pytest.raises(ConfigError, match=r"has no topic 'ordres'; did you mean orders\?"):
        kmq.spark.table(spark, "ordres", found.to, {"path": found.data})
    for wrong, what in (
        (str(tmp_path), f"{tmp_path}: is no table that a pipeline"),
        ("s3://a/b", "'s3://a/b': s3: is another file system; must be a directory"),
    ):
        with pytest.raises(ConfigError, match=f"^archive={what}"):
            kmq.spark.table(spark, "orders", wrong, {"path": found.data})
    with pytest.raises(ConfigError, match=r"^startingOffsets: the archive says where"):
        found.table(startingOffsets="earliest")


def test_an_archive_that_a_broker_has_never_answered_says_so_until_it_has(spark, fleet, tmp_path):
    two, to = fleet(2), str(tmp_path / "lake")
    sent = two.send(0) + two.send(1)
    two.kill(1)
    archive.run(spark, two.options(), to, schema="none")
    two.up(1)
    log = {"kmq.bootstrap.servers": ",".join(two.names)}
    with pytest.raises(RetryError, match=rf"^archive={to}: {two.names[1]} has not answered .*\(onUnreachable=hold\)"):
        kmq.spark.table(spark, "orders", to, log)
    archive.run(spark, two.options(), to, schema="none")
    assert sorted(row.id for row in kmq.spark.table(spark, "orders", to, log).collect()) == sorted(sent)


def test_an_older_copy_of_the_directory_is_refused(spark, tmp_path):
    found = Lake(spark, tmp_path)
    made = write_data(found.data, list(orders(0, 10)), closed=False)
    shutil.copytree(found.data, tmp_path / "older")
    append(made, list(orders(10, 30)))
    found.archive()
    shutil.rmtree(found.data)
    shutil.move(tmp_path / "older", found.data)
    with pytest.raises(
        KmqError, match=r"archive=.*: .* orders/0: .*the data directory was restored from an older copy"
    ):
        found.table()


def test_a_compacted_topic_keeps_its_history_and_says_so(spark, tmp_path, capfd):
    found = Lake(spark, tmp_path)
    identity.open_data(found.data)
    topics.declare(found.data, "orders", 1, {"cleanup": "compact"})
    write_data(found.data, list(orders(0, 10)))
    found.archive()
    capfd.readouterr()
    assert found.numbers() == list(range(10))
    assert "compaction removes records from the log" in capfd.readouterr().err


def test_what_the_log_has_from_before_the_archive_or_its_first_day_comes_from_the_log(spark, tmp_path):
    found = Lake(spark, tmp_path)
    made = write_data(found.data, list(orders(0, 10)), closed=False)
    found.archive(startingOffsets='{"orders": {"0": 4}}')
    append(made, list(orders(10, 12)))
    assert found.numbers() == list(range(12))


def test_a_table_that_begins_with_a_later_day_than_the_log_gets_the_days_before_from_the_log(spark, tmp_path):
    found = Lake(spark, tmp_path)
    made = write_data(found.data, list(orders(0, 10)), closed=False)
    found.archive()
    day = 86_400_000_000
    with pytest.MonkeyPatch.context() as patch:
        for module in (made_data, made_up):
            patch.setattr(module, "FIRST_TS", FIRST_TS + day)
        append(made, list(orders(10, 20)))
    found.archive()
    first, second = sorted(Path(found.to).glob("topic=orders/date=*"))
    assert found.numbers() == list(range(20))
    shutil.rmtree(first)
    rows = {row.n: row.date for row in found.table().collect()}
    assert sorted(rows) == list(range(20)) and {rows[n] for n in range(10)} == {date.fromisoformat(first.name[5:])}
    shutil.rmtree(second)
    assert found.numbers() == list(range(20)), "all of the log, if the table has no file"


# --- SQL -------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1, group="commands")
def test_sql_asks_both_and_a_topic_that_is_not_archived_as_before(spark, tmp_path, capsys):
    found = Lake(spark, tmp_path)
    made = write_data(found.data, [*orders(0, 20), b"jobs|1|1|job"], closed=False)
    found.archive()
    source = {"path": found.data}
    asked = shell.Shell(spark_engine.engine(spark, source, lake.history(spark, found.to)), source, shell.as_csv)

    def ask(text):
        capsys.readouterr()
        asked.run(text)
        return capsys.readouterr().out.splitlines()[1:]

    append(made, list(orders(20, 30)))
    assert ask("select count(*), sum(n) from orders where offset >= 10") == ["20,390"]
    assert ask("select user, count(*) from orders where n < 14 group by user order by user limit 2") == ["u0,2", "u1,2"]
    append(made, list(orders(30, 31)))
    assert ask("select (select count(*) from orders where offset >= 15), (select count(*) from orders)") == ["16,31"]
    assert ask("select o.n, j.value_text from orders o, jobs j where n = 30") == ["30,job"]


@pytest.mark.sampled(1, group="commands")
def test_the_command_takes_an_archive_and_duckdb_says_that_it_does_not(spark, up, tmp_path):
    found = Lake(spark, up.root)
    found.data = str(up.data)
    up.send_lines(list(orders(0, 5)))
    up.wait_routed(5)
    found.archive()
    up.send_lines(list(orders(5, 7)))
    up.wait_routed(7)
    done = up.run("kmq", "sql", "--archive", found.to, "--csv", "select sum(n) from orders", patience_s=240)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["21"]), done.stderr
    refused = up.run("kmq", "sql", "--archive", found.to, "--engine", "duckdb", "select 1")
    assert refused.returncode == EXIT_CONFIG, refused
    assert f"--archive {found.to!r}: is for Spark" in refused.stderr and "[spark]" in refused.stderr
    asked = re.search(r"ask its files by DuckDB itself: (.*)", refused.stderr)[1]
    with duckdb.connect() as database:
        assert database.execute(f"select sum(n) {asked}").fetchone() == (10,), "as the message says, without the log"
