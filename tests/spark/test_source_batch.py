"""spark.read.format("kmq"): rows, columns, ranges, and what is said where something is wrong."""

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from made_data import FIRST_TS, append, write_data
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

COUNT = 1000
LINES = [b"orders.k%d|%d|%d;hh=a%%20b|payload %d" % (n % 5, n, n, n) for n in range(1, COUNT + 1)]
OTHERS = [b"jobs.x|0|%d|job %d" % (n, n) for n in range(20)]
START = datetime.fromtimestamp(FIRST_TS // 1_000_000, UTC)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """1,000 orders in three partitions and many segments, then 20 jobs."""
    return write_data(
        tmp_path_factory.mktemp("source") / "data", LINES + OTHERS, {"orders": 3}, segment_bytes=9_000, group=50
    )


def read(spark, data, schema="", **options):
    reader = spark.read.format("kmq").option("path", data)
    for name, value in options.items():
        reader = reader.option(name, value)
    return (reader.schema(schema) if schema else reader).load()


def seqs(df):
    return sorted(row.seq for row in df.select("seq").collect())


def test_every_record_comes_once_with_all_its_columns(spark, data):
    rows = read(spark, data, subscribe="orders").orderBy("seq").collect()
    assert [row.seq for row in rows] == list(range(1, COUNT + 1))
    row = rows[6]
    assert (row.broker, row.topic, row.key, row.routing_key) == (data, "orders", "k2", "orders.k2")
    assert (row.producer_ts, row.id, row.headers) == ("7", "7", {"hh": "a b"})
    assert (bytes(row.value), row.value_text) == (b"payload 7", "payload 7")
    micros = read(spark, data, subscribe="orders").where("seq = 7").select(F.unix_micros("recv_ts")).first()[0]
    assert micros == FIRST_TS + 7
    places = {(row.partition, row.offset) for row in rows}
    assert len(places) == COUNT and {at for at, _ in places} == {0, 1, 2}


def test_offsets_are_lines_of_the_files(spark, data):
    for row in read(spark, data, "partition int, offset bigint, line binary", subscribe="orders").collect()[::50]:
        directory = Path(data, "topics/orders", str(row.partition))
        lines = b"".join(path.read_bytes() for path in sorted(directory.glob("*.log"))).splitlines()
        assert bytes(row.line) == lines[row.offset]


def test_the_wal_is_a_topic_whose_offset_is_the_seq(spark, data):
    rows = read(spark, data, subscribe="__append").collect()
    assert sorted(row.offset for row in rows) == list(range(1, COUNT + 21))
    assert all(row.offset == row.seq and row.topic == "__append" and row.key is None for row in rows)


def test_topics_are_chosen_by_list_pattern_and_assignment(spark, data):
    assert read(spark, data, subscribe="orders,jobs").count() == COUNT + 20
    assert read(spark, data, subscribePattern="o.*").count() == COUNT
    assert read(spark, data, subscribePattern=".*").count() == COUNT + 20
    chosen = read(spark, data, assign='{"orders": [0, 2]}').select("partition").distinct().collect()
    assert {row.partition for row in chosen} == {0, 2}


def test_several_directories_are_read_together(spark, data, tmp_path):
    other = write_data(tmp_path / "pods" / "b", OTHERS)
    counts = read(spark, f"{data},{tmp_path}/pods/*", subscribePattern=".*").groupBy("broker").count().collect()
    assert {row.broker: row["count"] for row in counts} == {data: COUNT + 20, other: 20}


def test_offsets_bound_what_is_read(spark, data):
    bounded = read(
        spark,
        data,
        assign='{"orders": [1]}',
        startingOffsets='{"orders": {"1": 5}}',
        endingOffsets='{"orders": {"1": 9}}',
    )
    assert sorted(row.offset for row in bounded.collect()) == [5, 6, 7, 8]
    assert read(spark, data, subscribe="orders", startingOffsets="latest").count() == 0
    assert read(spark, data, subscribe="__append", startingOffsets='{"__append": {"0": 1000}}').count() == 21
    late = read(spark, data, subscribe="orders,jobs", startingTimestamp=str(FIRST_TS // 1000 + 1))
    assert seqs(late) == list(range(1000, COUNT + 21))


def test_a_schema_is_the_projection(spark, data):
    df = read(spark, data, "value_text string, seq bigint, key binary", subscribe="orders")
    assert df.columns == ["value_text", "seq", "key"]
    assert tuple(df.where("seq = 3").first()) == ("payload 3", 3, b"k3")
    with pytest.raises(PySparkException, match="there is no column 'nothing'"):
        read(spark, data, "nothing string", subscribe="orders").count()


def test_headers_are_a_map_or_structs_as_kafkas_connector_has_them(spark, data):
    kinds = {"map": "map<string,string>", "structs": "array<struct<key:string,value:binary>>"}
    plain, asked = read(spark, data, subscribe="orders"), read(spark, data, subscribe="orders", includeHeaders="true")
    chosen = read(spark, data, f"seq bigint, headers {kinds['structs']}", subscribe="orders")
    assert [df.schema["headers"].dataType.simpleString() for df in (plain, asked, chosen)] == [
        kinds["map"], kinds["structs"], kinds["structs"],
    ]  # fmt: skip
    for df in (asked, chosen):
        assert df.where("seq = 3").first().headers == [("hh", bytearray(b"a b"))]
    assert read(spark, data, subscribe="jobs", includeHeaders="true").select("headers").distinct().collect() == [
        (None,)
    ]


def test_timestamp_is_recv_ts_of_kafkas_type_log_append_time(spark, data):
    df = read(spark, data, subscribe="orders")
    assert df.where("timestamp = recv_ts and timestampType = 1").count() == COUNT
    assert df.select("timestamp", "timestampType").dtypes == [("timestamp", "timestamp"), ("timestampType", "int")]


def test_origin_says_where_a_record_was_stored_first(spark, data, tmp_path):
    other = write_data(tmp_path / "b", OTHERS)
    rows = read(spark, f"{data},{other}", subscribePattern=".*", includeOrigin="true")
    ids = {path: Path(path, "id").read_text().strip() for path in (data, other)}
    same = "origin_topic = topic and origin_partition = partition and origin_offset = offset"
    found = rows.where(same).groupBy("broker", "origin_broker").count().collect()
    assert {(row.broker, row.origin_broker, row["count"]) for row in found} == {
        (data, ids[data], COUNT + 20), (other, ids[other], 20),
    }  # fmt: skip
    wal = read(spark, data, "origin_broker string, origin_offset bigint, seq bigint", subscribe="__append").collect()
    assert all((row.origin_broker, row.origin_offset) == (ids[data], row.seq) for row in wal)
    with pytest.raises(PySparkException, match="includeOrigin: the schema given lacks origin_broker, origin_topic"):
        read(spark, data, "origin_offset bigint", subscribe="jobs", includeOrigin="true").count()


def test_an_unknown_option_is_named_with_its_value_and_the_nearest(spark, data):
    for name, nearest in {"startingOfsets": "startingOffsets", "maxRecordsPerTrigger": "maxOffsetsPerTrigger"}.items():
        with pytest.raises(PySparkException, match=rf"(?i)unknown reader option {name}='7'; did you mean .*{nearest}"):
            read(spark, data, subscribe="jobs", **{name: "7"})
    with pytest.raises(PySparkException, match="did you mean minPartitions"):
        spark.sql(f"create temporary view wrong using kmq options (path '{data}', subscribe 'jobs', minPartition 2)")


def test_min_partitions_makes_tasks(spark, data):
    df = read(spark, data, subscribe="orders", minPartitions="12")
    assert df.rdd.getNumPartitions() >= 12
    assert seqs(df) == list(range(1, COUNT + 1))


def rows_read(df):
    """(rows of the query, rows the source handed to Spark for it)."""
    count = len(df.collect())
    plan = df._jdf.queryExecution().executedPlan()
    metrics = plan.collectLeaves().head().metrics()
    return count, metrics.apply("numOutputRows").value()


@pytest.mark.parametrize(
    ("condition", "count", "at_most"),
    [
        ("partition = 1 and offset >= 10 and offset < 14", 4, 4),
        ("offset = 3", 3 + 1, 3 + 1),
        ("topic = 'jobs'", 20, 20),
        ("topic in ('jobs', 'none')", 20, 20),
        ("partition in (7)", 0, 0),
        ("recv_ts >= timestamp'{late}'", 21, 21),
        ("recv_ts < timestamp'{early}'", 9, 9),
        ("recv_ts > timestamp'{early}' and recv_ts <= timestamp'{late}'", 990, 992),
        ("offset < 0", 0, 0),
        ("key = 'k1'", 200, COUNT + 20),
    ],
)
def test_filters_push_down_to_ranges(spark, data, condition, count, at_most):
    moments = {"early": START + timedelta(microseconds=10), "late": START + timedelta(microseconds=1000)}
    text = condition.format(**{name: f"{each:%Y-%m-%d %H:%M:%S.%f}" for name, each in moments.items()})
    found, received = rows_read(read(spark, data, subscribe="orders,jobs", pushFilters="true").where(text))
    assert found == count
    assert received <= at_most


def test_seq_pushes_down_in_the_wal(spark, data):
    wal = read(spark, data, subscribe="__append", pushFilters="true")
    assert rows_read(wal.where("seq between 100 and 109")) == (10, 10)


def test_the_filters_of_one_query_do_not_reach_another_one_of_the_same_frame(spark, data):
    df = read(spark, data, subscribe="jobs")
    assert [df.where("offset >= 15").count(), df.count(), df.where("offset < 4").count()] == [5, 20, 4]
    df.createOrReplaceTempView("jobs_twice")
    both = (
        "select count(*) from jobs_twice where offset >= 15 union all select count(*) from jobs_twice where offset < 4"
    )
    try:
        assert [row[0] for row in spark.sql(both).collect()] == [5, 4]
    finally:
        spark.catalog.dropTempView("jobs_twice")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"subscribe": "nope"}, "topic 'nope' does not exist"),
        (
            {"subscribe": "orders", "startingOffsets": '{"orders": {"0": 5}}'},
            "says nothing of .* orders/1, .* orders/2",
        ),
        ({"assign": '{"orders": [7]}'}, "there is no partition 7"),
        ({"subscribe": "orders", "endingOffsets": '{"orders": {"0": 99999}}'}, "the log ends at"),
        ({"subscribe": "orders", "startingOffsets": '{"orders": {"0": 99999}}'}, "ends at"),
        ({"subscribe": "orders", "minPartitions": "few"}, "minPartitions"),
    ],
)
def test_what_is_wrong_is_said(spark, data, options, says):
    with pytest.raises(PySparkException, match=says):
        read(spark, data, **options).count()


def test_offsets_may_be_given_by_time_as_in_kafkas_connector(spark, data):
    first, then = FIRST_TS // 1000, FIRST_TS // 1000 + 1
    by_time = {name: f'{{"jobs": {{"0": {ms}}}}}' for name, ms in {"starting": first, "ending": then}.items()}
    jobs = read(spark, data, subscribe="jobs", startingOffsetsByTimestamp=by_time["ending"])
    assert seqs(jobs) == list(range(1001, COUNT + 21))
    none = {"startingOffsetsByTimestamp": by_time["starting"], "endingOffsetsByTimestamp": by_time["ending"]}
    assert read(spark, data, subscribe="jobs", **none).count() == 0
    orders = read(spark, data, subscribe="orders", startingTimestamp=str(first), ENDINGTIMESTAMP=str(then))
    assert seqs(orders) == list(range(1, 1000))
    wins = read(spark, data, subscribe="orders", startingTimestamp=str(then), startingOffsets="earliest")
    assert seqs(wins) == [1000]


def test_directories_may_be_given_to_load_as_a_list(spark, data, tmp_path):
    other = write_data(tmp_path / "a,b", OTHERS)
    assert spark.read.format("kmq").option("subscribe", "jobs").load([data, other]).count() == 40


def test_no_data_directory_is_said(spark, tmp_path):
    with pytest.raises(PySparkException, match=r"path='\S+none': no data directory of KMQ: it does not exist"):
        read(spark, str(tmp_path / "none"), subscribe="orders").count()
    with pytest.raises(PySparkException, match=r"no data directory of KMQ: it has no file `id`"):
        read(spark, str(tmp_path), subscribe="orders").count()


def test_damage_stops_the_query_with_its_place(spark, data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "data", symlinks=True)
    path = sorted((copy / "topics/orders/1").glob("*.log"))[0]
    text = bytearray(path.read_bytes())
    text[4000] ^= 1
    path.write_bytes(text)
    with pytest.raises(PySparkException, match=f"{path.name}: damaged at byte"):
        read(spark, str(copy), subscribe="orders").count()
    assert read(spark, str(copy), assign='{"orders": [0]}').count() > 0


def test_a_torn_last_line_is_not_a_row(spark, tmp_path):
    data = write_data(tmp_path / "data", OTHERS)
    with open(f"{data}/jobs.log", "ab") as log:
        log.write(b"21|1700000000.000021|jobs.x|0|2")
    assert read(spark, data, subscribe="jobs").count() == 20


def test_what_compaction_took_is_not_a_row_and_offsets_stay(spark, tmp_path):
    made = write_data(tmp_path / "data", OTHERS[:10], segment_bytes=300, group=1, closed=False)
    path = sorted((tmp_path / "data/topics/jobs/0").glob("*.log"))[0]
    first = path.read_bytes().splitlines()
    path.write_bytes(b"\n" * len(first))
    path.with_suffix(".idx").unlink()
    append(made, OTHERS[10:])
    rows = read(spark, str(tmp_path / "data"), subscribe="jobs").collect()
    assert sorted(row.offset for row in rows) == list(range(len(first), 20))


def test_retention_during_a_query_is_an_error_or_passed_over(spark, data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "data", symlinks=True)
    segments = sorted((copy / "topics/orders/0").glob("*.log"))
    gone = int(segments[2].stem)
    plain = read(spark, str(copy), "offset bigint", assign='{"orders": [0]}')
    lenient = read(spark, str(copy), "offset bigint", assign='{"orders": [0]}', failOnDataLoss="false")
    total = plain.count()
    plans = [df._jdf.queryExecution().executedPlan() for df in (plain, lenient)]  # planned: the ranges are fixed
    for path in segments[:2]:
        path.unlink()
        path.with_suffix(".idx").unlink()
    assert plans and lenient.count() == total - gone
    with pytest.raises(PySparkException, match="went while they were to be read: retention"):
        plain.collect()
    with pytest.raises(PySparkException, match="is gone, the log begins with"):
        read(spark, str(copy), assign='{"orders": [0]}', startingOffsets='{"orders": {"0": 1}}').count()


SCRIPT = """
from pyspark.sql import SparkSession
quick = {{"spark.ui.enabled": "false", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}}
spark = SparkSession.builder.master("local[1]").config(map=quick).getOrCreate()
rows = spark.read.format("kmq").option("path", {data!r}).option("subscribe", "jobs").load()
print("rows", rows.where("offset < 5").count())
"""


def test_an_installed_wheel_is_found_by_spark_without_a_word(data, tmp_path):
    """pip install of the built wheel, elsewhere, in a session that nobody has told of kmq: the source is there."""
    root = Path(__file__).resolve().parents[2]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path / "dist", root], check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True, capture_output=True
    )
    assert (tmp_path / "site/pyspark_kmq/__init__.py").is_file()
    assert not (tmp_path / "site/kmq/spark/discovery").exists()
    # -S would lose the rest; what comes first on the path wins over the checkout.
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(data=data)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "rows 5" in done.stdout, done.stderr[-3000:]


def test_discovery_never_fails(tmp_path):
    """Where the source cannot be imported, the module that Spark looks at imports all the same."""
    (tmp_path / "kmq").mkdir()
    (tmp_path / "kmq/__init__.py").write_text("raise RuntimeError('broken')")
    module = Path(__file__).resolve().parents[2] / "kmq/spark/discovery/pyspark_kmq"
    shutil.copytree(module, tmp_path / "pyspark_kmq")
    code = "import pyspark_kmq; print(hasattr(pyspark_kmq, 'DefaultSource'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_the_readme_of_options_is_json_where_it_says_json():
    from kmq.spark.source import options

    examples = [part for part in (options.__doc__ or "").split() if part.startswith('{"') and part.endswith("}")]
    assert all(json.loads(each.rstrip(",")) for each in examples)
