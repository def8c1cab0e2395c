"""What the commands on Spark do without Spark: options, Java, errors as one line, statements, figures."""

import inspect
import json
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from made_data import write_data
from typer.testing import CliRunner

import kmq.spark
from kmq.cli import pipelines, spark, spark_options
from kmq.errors import EXIT_CONFIG, EXIT_CORRUPT, EXIT_RETRY, ConfigError, CorruptError, RetryError
from kmq.spark import failures, sessions, tables
from kmq.spark.pipelines.options import MIRROR_EVERY, ArchiveOptions, MirrorOptions, RouteOptions, complete
from kmq.spark.source import options
from kmq.spark.sql import shell, spark_engine
from kmq.spark.streaming import checkpoint, streams


def test_the_command_line_starts_without_spark_and_arrow():
    code = "import sys; from kmq.cli.app import app; app(['--help'], standalone_mode=False); " + (
        "sys.exit('kmq.cli.spark' not in sys.modules or bool({'pyspark', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


# --- options -------------------------------------------------------------------------------------------------------


def test_lines_come_from_directories_or_over_http_and_not_from_both(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KMQ_DATA", "here")
    assert spark_options.From().options() == {"path": "here"}
    assert spark_options.From(path="a,b").options() == {"path": "a,b"}
    assert spark_options.From(brokers="a:1,b:1").options() == {"kmq.bootstrap.servers": "a:1,b:1"}
    (tmp_path / "token").write_text("secret\n")
    assert spark_options.From(brokers="a:1", token_file="token").options()["kmq.token"] == "secret"
    with pytest.raises(ConfigError, match="not both"):
        spark_options.From("a", "b:1").options()
    with pytest.raises(ConfigError, match="--token-file 'none': No such file"):
        spark_options.From(brokers="a:1", token_file="none").options()


def test_topics_come_by_name_or_by_pattern():
    assert spark_options.TopicOptions("a,b").options() == {"subscribe": "a,b"}
    assert spark_options.TopicOptions("", "a.*").options() == {"subscribePattern": "a.*"}
    assert spark_options.TopicOptions().options(".*") == {"subscribePattern": ".*"}
    for wrong in (("a", "b"), ("", "")):
        with pytest.raises(ConfigError, match="--topics or --pattern"):
            spark_options.TopicOptions(*wrong).options()


def test_a_conf_that_is_no_pair_is_named():
    assert spark_options.On(conf=["spark.x=a=b"]).confs() == {"spark.x": "a=b"}
    for wrong in ("spark.x", "=1"):
        with pytest.raises(ConfigError, match="must be name=value"):
            spark_options.On(conf=[wrong]).confs()


def test_the_list_has_every_pipeline_with_what_it_does(capsys):
    spark.list_pipelines()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(pipelines.run_app.registered_commands)
    assert all(len(line.split()) > 2 for line in lines)


# --- Java ----------------------------------------------------------------------------------------------------------


def java(home, version):
    """A home of a made-up Java that says its version as the real one does."""
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-01' >&2\n")
    (home / "bin" / "java").chmod(0o755)
    return home


@pytest.fixture
def no_java(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sessions, "_JVMS", tmp_path / "jvm")


def test_java_home_comes_first_then_path_then_debians(no_java, monkeypatch, tmp_path):
    debian = java(tmp_path / "jvm" / "java-17-openjdk", "17.0.15")
    java(tmp_path / "jvm" / "java-11-openjdk", "11.0.2")
    assert sessions.find_java() == debian
    on_path = java(tmp_path / "other", "21.0.1")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "java").symlink_to(on_path / "bin" / "java")
    assert sessions.find_java() == on_path
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "own", "17.0.1")))
    assert sessions.find_java() == tmp_path / "own"


@pytest.mark.parametrize("versions", [[], ["11.0.2"], ["1.8.0_402"]])
def test_a_java_that_is_missing_or_too_old_is_named_with_the_command_to_get_one(no_java, tmp_path, versions):
    for version in versions:
        java(tmp_path / "jvm" / version, version)
    with pytest.raises(ConfigError, match=r"Java 17 or newer.*apt-get install openjdk-17-jre-headless"):
        sessions.find_java()


def test_a_java_that_is_too_old_is_named_with_its_version(no_java, tmp_path):
    home = java(tmp_path / "jvm" / "java-11", "11.0.2")
    with pytest.raises(ConfigError, match=f"only Java 11 at {home} was found"):
        sessions.find_java()


def test_a_master_that_nobody_answers_at_is_named_before_java_is_started():
    with socket.socket() as bound:  # bound and not listening: refuses
        bound.bind(("127.0.0.1", 0))
        master = f"spark://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(RetryError, match=f"--master '{master}': nothing answers .*refused"):
            sessions.session(master)
    with pytest.raises(ConfigError, match="--master 'spark://here': 'here' must be host:port"):
        sessions.check_master("spark://here")


def test_a_checkpoint_that_cannot_be_written_or_is_anothers_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for place, why in ((f"{tmp_path}/file/c", "Not a directory"), ("/proc/c", "")):
        with pytest.raises(ConfigError, match=f"--checkpoint {place}: must be a directory that can be written: {why}"):
            streams.check_checkpoint(place, "archive")
    made_checkpoint(tmp_path / "c", {"b": {"__id": "2f", "t": {"0": 5}}}, name="mirror")
    with pytest.raises(ConfigError, match="was written by mirror, not by archive"):
        streams.check_checkpoint(f"{tmp_path}/c", "archive")
    made_checkpoint(tmp_path / "rate", 17)
    with pytest.raises(ConfigError, match="by a query that reads no topics"):
        streams.check_checkpoint(f"{tmp_path}/rate", "archive")


def test_an_error_has_the_options_of_the_command_that_made_the_query(monkeypatch):
    monkeypatch.setattr(sessions, "session", lambda *_: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(streams, "Progress", lambda *_: nullcontext(SimpleNamespace()))
    monkeypatch.setattr(streams.StopSignals, "_handle", lambda self: None)
    for text, said in (
        ("b t/0: offsets 5 to 9 are gone; failOnDataLoss=false continues without them", "--on-loss skip continues"),
        ("topic 'x' does not exist at d; subscribePattern takes what there is", "; --pattern takes"),
        ("give `path` (data directories) or `kmq.bootstrap.servers` (host:port)", "give --path .* or `--brokers`"),
        ("path='x*': matches no data directory", "^--path='x"),
    ):
        with pytest.raises(ConfigError, match=said), spark_options.running("archive"):
            raise ConfigError(text)


@pytest.mark.parametrize("command", ["archive", "metrics", "mirror", "redrive", "route"])
def test_each_pipeline_that_reads_topics_says_what_it_does_about_loss(command):
    done = CliRunner().invoke(spark.pipeline_app, ["run", command, "-h"], env={"COLUMNS": "200"})
    if done.exit_code:
        done = CliRunner().invoke(spark.pipeline_app, ["run", command, "--help"], env={"COLUMNS": "200"})
    assert "--on-loss" in done.output
    assert spark_options.Loss("skip").options() == {"failOnDataLoss": "false"}
    with pytest.raises(ConfigError, match="--on-loss 'no': must be fail or skip"):
        spark_options.Loss("no").options()


@pytest.mark.parametrize("scheme", ["", "file:", "file://", "file://localhost", "FILE:"])
def test_a_path_with_the_scheme_file_is_the_path_itself_wherever_one_is_given(tmp_path, monkeypatch, scheme):
    monkeypatch.chdir(tmp_path)
    made_checkpoint(tmp_path / "c", {"b": {"__id": "2f", "t": {"0": 5}}}, name="mirror")
    named = f"{scheme}{tmp_path}/c"
    with pytest.raises(ConfigError, match="was written by mirror, not by archive"):
        streams.check_checkpoint(named, "archive")
    assert streams.Trigger(checkpoint=named).at("x").checkpoint == f"{tmp_path}/c"
    assert [each.path for each in checkpoint.find([named])] == [f"{tmp_path}/c"]
    with tables.open_table(f"{scheme}{tmp_path}/t", "parquet", ()) as table:
        assert table.path == f"{tmp_path}/t"
    assert options.ReadOptions({"path": f"{scheme}{tmp_path}/d", "subscribe": "t"}).paths == [f"{tmp_path}/d"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "t"]


@pytest.mark.parametrize("place", ["hdfs://h/x", "hdfs:/x", "dbfs:/x", "s3a://b/x"])
def test_another_file_system_is_named_where_only_this_one_can_be_read(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    streams.check_checkpoint(place, "archive")  # Spark reaches it
    assert streams.Trigger(checkpoint=place).at("x").checkpoint == place
    what = f"{place.partition(':')[0]}: is another file system; must be a directory"
    with pytest.raises(ConfigError, match=what):
        checkpoint.find([place])
    if not place.startswith("s3a"):  # a bucket may have the copy of a broker
        with pytest.raises(ConfigError, match=f"path '{place}': {what}"):
            options.ReadOptions({"path": place, "subscribe": "t"})
        with pytest.raises(ConfigError, match=f"--to '{place}': {what}.* or s3://bucket/prefix"):
            tables.open_table(place, "parquet", ())
    assert list(tmp_path.iterdir()) == []


def made_checkpoint(path, source, name=None):
    """A checkpoint as Spark writes it, of one batch that is through."""
    for log, text in (("offsets", f"v1\n{{}}\n{json.dumps(source)}"), ("commits", 'v1\n{"nextBatchWatermarkMs":0}')):
        (path / log).mkdir(parents=True)
        (path / log / "0").write_text(text)
    (path / "metadata").write_text('{"id":"7e"}')
    if name:
        (path / "kmq-status.json").write_text(json.dumps({"name": name}))


def test_a_java_that_does_not_start_is_named_with_what_it_said(monkeypatch, tmp_path):
    home = java(tmp_path / "own", "17.0.1")
    with (home / "bin" / "java").open("a") as script:
        script.write('[ "$1" = -version ] || { echo "Error: could not reserve enough space" >&2; exit 1; }\n')
    monkeypatch.setenv("JAVA_HOME", str(home))
    code = "from kmq.spark import sessions; sessions.session('local[1]')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    said = done.stderr.splitlines()[-1]
    assert re.search(rf"RetryError: Spark's Java at {home} ended before .*could not reserve enough space", said), (
        done.stderr
    )
    assert done.stderr.count("starting it once more") == 1


def test_a_missing_extra_is_named_with_the_command_to_get_it(monkeypatch):
    monkeypatch.setattr(sessions, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*\[spark\]'"):
        sessions.require_spark()


def as_of(monkeypatch, version):
    monkeypatch.setattr(pytest.importorskip("pyspark.version"), "__version__", version)


@pytest.mark.parametrize("version", ["4.0.5", "3.5.8", "4.0.0.dev1"])
def test_a_pyspark_too_old_for_anything_is_named_with_the_one_that_is_needed(monkeypatch, version):
    as_of(monkeypatch, version)
    with pytest.raises(ConfigError, match=rf"^this needs pyspark 4\.1, {re.escape(version)} is here; pip install"):
        sessions.session("local[1]")
    with pytest.raises(ConfigError, match=r"^this needs pyspark 4\.1"):
        kmq.spark.register(None)


def test_pyspark_4_1_reads_batches_and_refuses_a_stream(monkeypatch, tmp_path):
    as_of(monkeypatch, "4.1.4")
    failures.require_pyspark()
    types = pytest.importorskip("pyspark.sql.types")
    schema = types.StructType([types.StructField("offset", types.LongType())])
    format = pytest.importorskip("kmq.spark.format")
    source = format.KmqDataSource({"path": write_data(tmp_path / "data", [b"orders|0|1|a"]), "subscribe": "orders"})
    [task] = source.reader(schema).partitions()
    assert [len(batch) for batch in source.reader(schema).read(task)] == [1]
    with pytest.raises(ConfigError, match=r"^a stream of topics needs pyspark 4\.2, 4\.1\.4 is here"):
        source.streamReader(schema)


def test_only_a_stream_imports_what_pyspark_4_1_lacks():
    pytest.importorskip("pyspark")
    code = (
        "import pyspark.sql.datasource, pyspark.sql.streaming.datasource as lacking; vars(lacking).clear();"
        " import kmq.spark.format, kmq.spark.sink.sink, kmq.spark.streaming.listener"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    late = subprocess.run([sys.executable, "-c", f"{code}, kmq.spark.source.stream_reader"], stderr=-1, timeout=60)
    assert b"ImportError: cannot import name 'ReadAllAvailable'" in late.stderr


@pytest.mark.parametrize(
    ("master", "cores"), [("local", 1), ("local[3]", 3), ("local[3,2]", 3), ("local-cluster[2,3,1024]", 6)]
)
def test_the_cores_of_a_master_here_are_those_it_names(master, cores):
    assert sessions.cores(master) == cores
    assert sessions.is_here(master)


def test_a_master_elsewhere_is_not_told_to_come_back_over_loopback():
    assert not sessions.is_here("spark://cluster:7077")
    assert "spark.driver.host" not in sessions.default_confs("spark://cluster:7077")
    assert sessions.default_confs("spark://127.0.0.1:7077")["spark.driver.host"] == "127.0.0.1"


# --- errors --------------------------------------------------------------------------------------------------------

WORKER = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "udf.py", line 14, in g
    raise {raised}
{raised}"""
JAVA = """An error occurred while calling o93.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 2.0 failed 1 times, \
most recent failure: Lost task 1.0 in stage 2.0 (TID 5) (127.0.0.1 executor driver): java.lang.IllegalStateException: no room
\tat org.apache.spark.api.python.BasePythonRunner.read(PythonRunner.scala:1136)

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2898)"""
STREAM = "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: " + WORKER


def spark_error(text, name="PySparkException", module="pyspark.errors.exceptions.captured"):
    return type(name, (Exception,), {"__module__": module})(text)


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (spark_error(WORKER.format(raised="kmq.errors.ConfigError: option x: bad")), "option x: bad", EXIT_CONFIG),
        (spark_error(STREAM.format(raised="kmq.log.reader.DamageError: a.log: byte 3")), "a.log: byte 3", EXIT_CORRUPT),
        (spark_error(WORKER.format(raised="ZeroDivisionError: by zero")), "ZeroDivisionError: by zero", 1),
        (spark_error(JAVA, "Py4JJavaError", "py4j.protocol"), "IllegalStateException: no room", 1),
        (spark_error("[COL] no column `x`. Maybe `y`. SQLSTATE: 42703; line 1 pos 7;\n'Project"), "no column `x`", 1),
        (spark_error("[PATH_NOT_FOUND] file:/x. SQLSTATE: 42K03"), "[PATH_NOT_FOUND] file:/x", 1),
        (
            spark_error("x Python worker failed to connect back."),
            "no Python worker started within the 10 s",
            EXIT_RETRY,
        ),
        (spark_error("answer is empty", "Py4JNetworkError", "py4j.protocol"), "JVM has ended", EXIT_RETRY),
        (CorruptError("as it is"), "as it is", EXIT_CORRUPT),
    ],
    ids=["ours", "in a stream", "python's", "java's", "analysis", "path", "busy", "no JVM", "not of Spark"],
)
def test_an_error_of_spark_is_its_cause_in_one_line_with_the_exit_code(error, said, code):
    cause = failures.explain(error)
    assert said in str(cause)
    assert "\n" not in str(cause) and " at org." not in str(cause) and "SQLSTATE" not in str(cause)
    assert cause.exit_code == code


def test_an_error_that_is_not_of_spark_is_left_as_it_is():
    assert failures.explain(KeyError("x")) is None


# --- SQL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("select topic, count(*) from orders group by 1", "topic string"),
        ("SELECT COUNT( * ) FROM orders", "offset bigint"),
        ("select `key`, max(offset) from a join b using (seq)", "offset bigint, seq bigint, key string"),
        ("with a as (select id from o) select count(id) from a", "id string"),
        ("select 1 from a where headers['value'] = 'topic'", "headers map<string,string>"),
        ("select * from orders", ""),
        ("select a.* from a join b using (seq)", ""),
        ("select seq from a natural join b", ""),
        ("from orders", ""),
        ("select 1 union all from orders", ""),
        ("table orders", ""),
        ("select 1 union all table orders", ""),
        ("from orders |> where seq > 1", ""),
        ("describe orders", ""),
    ],
)
def test_a_query_gets_the_columns_it_names_and_all_where_it_may_need_others(text, columns):
    assert spark_engine.needed(text) == columns


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("select count(*) from orders where offset > 5", True),
        ("SELECT * FROM `jobs.eu` where recv_ts > now() limit 3", True),
        ("select * from orders a, orders b where a.offset > 5", False),
        ("select * from orders where offset > (select max(seq) - 5 from append)", False),
        ("select 1 from orders where offset > 5 union all select 2 from orders", False),
        ("with a as (select * from orders) select 1 from a x join a y using (seq) where x.offset > 5", False),
        ("create temporary view v as select * from orders", False),
        ("from orders |> where offset > 5", False),
        ("select * from orders join `jobs.eu` using (seq)", False),
    ],
)
def test_filters_are_pushed_where_a_statement_surely_has_one_scan(text, is_one):
    assert spark_engine.is_one_scan(text, shell.views_of(text, ["jobs.eu", "orders"])) is is_one


def test_a_statement_ends_with_a_semicolon_that_is_not_quoted():
    text = "select ';' from a; -- not; here\nselect `x;y`, \"a;b\", 'it\\'s;' from b ;\n\n;"
    first, second = shell.statements(text)
    assert first == "select ';' from a"
    assert second.endswith("from b") and "not; here" in second


def test_long_and_unprintable_values_are_cut_and_escaped_in_a_table():
    assert shell.cell_text(None) == "NULL"
    assert shell.cell_text("a\tb\n") == "a\\tb\\n"
    assert shell.cell_text("x" * 100) == "x" * 59 + "…"


# --- progress ------------------------------------------------------------------------------------------------------


def test_what_a_stream_is_behind_is_the_sum_over_all_partitions():
    source = {
        "endOffset": {"b": {"__id": "2f", "__cuts": {"t": [1]}, "__seqs": {"0": 900}, "t": {"0": 5, "1": 7}}},
        "latestOffset": {"b": {"__id": "2f", "t": {"0": 15, "1": 8}, "u": {"0": 2}}},
    }
    said = {"sources": [source], "batchId": 3, "numInputRows": 12, "processedRowsPerSecond": 99.6, "batchDuration": 120}
    figures = checkpoint.batch_figures("stream", said)
    assert figures == {
        **{"query": "stream", "batch": 3, "rows": 12, "bytes": None, "rows_per_s": 100, "ms": 120},
        **{"behind": 13, "late": None},
    }
    assert streams.batch_line(figures) == "batch 3: 12 rows, 100/s, 13 behind"
    said["observedMetrics"] = {checkpoint.RECORDS: {"rows": 5000, "bytes": 640_000}}
    figures = checkpoint.batch_figures("stream", said)
    assert streams.batch_line(figures) == "batch 3: 5,000 rows, 0.6 MB, 41,667/s, 13 behind"
    said["stateOperators"] = [{"numRowsDroppedByWatermark": 2}, {"numRowsDroppedByWatermark": 3}]
    assert checkpoint.batch_figures("stream", said)["late"] == 5
    source["latestOffset"] = None
    assert checkpoint.batch_figures("stream", said)["behind"] is None


def test_a_connection_to_read_by_holds_for_writing_unless_another_one_is_given(tmp_path):
    for name in ("ours", "theirs"):
        (tmp_path / name).write_text(f"{name}\n")
    origin = spark_options.From("", "https://a", str(tmp_path / "ours"), "ca", "cert", "key", "5s")
    tls = {
        "kmq.token": "ours",
        "kmq.ssl.ca.location": "ca",
        "kmq.ssl.certificate.location": "cert",
        "kmq.ssl.key.location": "key",
    }
    assert origin.options() == {"kmq.bootstrap.servers": "https://a", "kmq.patience": "5s", **tls}
    assert spark_options.TargetOptions().options(origin) == tls
    assert spark_options.TargetOptions(timeout="1m").options(origin) == {**tls, "kmq.timeout": "1m"}
    target = spark_options.TargetOptions(str(tmp_path / "theirs"), "other")
    assert target.options(origin) == {"kmq.token": "theirs", "kmq.ssl.ca.location": "other"}
    assert spark_options.TargetOptions().options() == {}
    with pytest.raises(ConfigError, match="--patience: applies to gateways only"):
        spark_options.From("data", patience="5s").options()


@pytest.mark.parametrize("name", ["archive", "metrics", "mirror", "redrive"])
def test_every_pipeline_that_writes_takes_the_options_of_its_target(name, capsys):
    with pytest.raises(SystemExit):
        pipelines.run_app([name, "--help"], standalone_mode=True)
    said = capsys.readouterr().out
    assert all(f"--{option} " in said for option in ("to-token-file", "to-ca", "to-cert", "to-key", "timeout", "ca"))


def test_the_archive_sends_dead_letters_by_the_connection_that_is_given_for_them(monkeypatch, tmp_path):
    archive = pytest.importorskip("kmq.spark.pipelines.archive")
    (tmp_path / "token").write_text("theirs\n")
    job = SimpleNamespace(spark=None, progress=SimpleNamespace(stop=lambda: None))
    asked = []
    monkeypatch.setattr(pipelines, "running", lambda *_, **__: nullcontext(job))
    done = archive.Archived(0, 0, 0, 0)
    monkeypatch.setattr(archive, "run", lambda _, *place, **options: asked.append((place, options)) or done)
    command = [
        "archive",
        "--to",
        "lake",
        "--path",
        "data",
        "--topics",
        "orders",
        "--schema",
        "n int",
        "--every",
        "1 minute",
    ]
    result = CliRunner().invoke(pipelines.run_app, [*command, "--to-token-file", str(tmp_path / "token")])
    assert result.exit_code == 0, result.output
    [(place, options)] = asked
    assert options["connection"] == {"kmq.token": "theirs"}
    assert place == ({"path": "data", "subscribe": "orders"}, "lake", "parquet")
    assert (options["schema"], options["every"]) == ("n int", "1 minute")
    assert options["partition_by"] == ["topic", "date", "hour"]


def test_a_command_gives_a_pipeline_the_defaults_that_its_keyword_arguments_have():
    commands = {command.callback.__name__: command.callback for command in pipelines.run_app.registered_commands}
    for name, kind in (("archive", ArchiveOptions), ("mirror", MirrorOptions), ("route", RouteOptions)):
        shown = inspect.signature(commands[name]).parameters
        asked = complete(kind, {}, **({"every": MIRROR_EVERY} if name == "mirror" else {}))
        both = {option: given.default for option, given in shown.items() if option in asked}
        assert len(both) >= 4
        assert both == {
            option: ",".join(default) if isinstance(default, tuple) else default
            for option, default in asked.items()
            if option in both
        }


def test_an_argument_that_a_pipeline_does_not_know_is_refused_as_python_does():
    assert complete(ArchiveOptions, {"schema": "n int", "host": "h"})["bad"] == "dlq"
    with pytest.raises(TypeError, match=r"run\(\) got an unexpected keyword argument 'shema'"):
        complete(ArchiveOptions, {"shema": "n int"})


def test_compact_is_refused_and_says_who_compacts():
    for command in (["compact"], ["compact", "--topics", "users", "--dry-run"]):
        result = CliRunner().invoke(pipelines.run_app, command)
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception).endswith("the broker compacts topics with cleanup=compact itself")
