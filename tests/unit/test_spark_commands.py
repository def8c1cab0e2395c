"""What the commands on Spark do without Spark: options, Java, errors as one line, statements, figures."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kmq.errors import EXIT_CONFIG, EXIT_CORRUPT, EXIT_RETRY, ConfigError, CorruptError
from kmq.spark import commands, failures, progress, sessions, sql


def test_the_command_line_starts_without_spark_and_arrow():
    code = "import sys, kmq.cli; sys.exit(bool({'pyspark', 'pyarrow', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- options -------------------------------------------------------------------------------------------------------


def test_lines_come_from_directories_or_over_http_and_not_from_both(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KMQ_DATA", "here")
    assert commands.From().options() == {"path": "here"}
    assert commands.From(path="a,b").options() == {"path": "a,b"}
    assert commands.From(brokers="a:1,b:1").options() == {"kmq.bootstrap.servers": "a:1,b:1"}
    (tmp_path / "token").write_text("secret\n")
    assert commands.From(brokers="a:1", token_file="token").options()["kmq.token"] == "secret"
    with pytest.raises(ConfigError, match="not both"):
        commands.From("a", "b:1").options()
    with pytest.raises(ConfigError, match="--token-file 'none': No such file"):
        commands.From(brokers="a:1", token_file="none").options()


def test_topics_come_by_name_or_by_pattern():
    assert commands.Topics("a,b").options() == {"subscribe": "a,b"}
    assert commands.Topics("", "a.*").options() == {"subscribePattern": "a.*"}
    assert commands.Topics().options(".*") == {"subscribePattern": ".*"}
    for wrong in (("a", "b"), ("", "")):
        with pytest.raises(ConfigError, match="--topics or --pattern"):
            commands.Topics(*wrong).options()


def test_a_conf_that_is_no_pair_is_named():
    assert commands._pair("spark.x=a=b") == ("spark.x", "a=b")
    for wrong in ("spark.x", "=1"):
        with pytest.raises(ConfigError, match="must be name=value"):
            commands._pair(wrong)


def test_the_list_has_every_pipeline_with_what_it_does(capsys):
    commands.list_pipelines()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(commands.run_app.registered_commands)
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
    with pytest.raises(ConfigError, match=r"pip install 'kmq\[spark\]'"):
        sessions.require_spark()


@pytest.mark.parametrize(
    ("master", "cores"), [("local", 1), ("local[3]", 3), ("local[3,2]", 3), ("local-cluster[2,3,1024]", 6)]
)
def test_the_cores_of_a_master_here_are_those_it_names(master, cores):
    assert sessions.cores(master) == cores
    assert sessions.is_here(master)


def test_a_master_elsewhere_is_not_told_to_come_back_over_loopback():
    assert not sessions.is_here("spark://cluster:7077")
    assert "spark.driver.host" not in sessions._confs("spark://cluster:7077")
    assert sessions._confs("spark://127.0.0.1:7077")["spark.driver.host"] == "127.0.0.1"


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
        (spark_error("answer is empty", "Py4JNetworkError", "py4j.protocol"), "JVM has ended", EXIT_RETRY),
        (CorruptError("as it is"), "as it is", EXIT_CORRUPT),
    ],
    ids=["ours", "in a stream", "python's", "java's", "analysis", "path", "no JVM", "not of Spark"],
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
    assert sql.needed(text) == columns


def test_a_statement_ends_with_a_semicolon_that_is_not_quoted():
    text = "select ';' from a; -- not; here\nselect `x;y`, \"a;b\", 'it\\'s;' from b ;\n\n;"
    first, second = sql.statements(text)
    assert first == "select ';' from a"
    assert second.endswith("from b") and "not; here" in second


def test_long_and_unprintable_values_are_cut_and_escaped_in_a_table():
    assert sql._cut(None) == "NULL"
    assert sql._cut("a\tb\n") == "a\\tb\\n"
    assert sql._cut("x" * 100) == "x" * 59 + "…"


# --- progress ------------------------------------------------------------------------------------------------------


def test_what_a_stream_is_behind_is_the_sum_over_all_partitions():
    source = SimpleNamespace(
        endOffset='{"b": {"__id": "2f", "t": {"0": 5, "1": 7}}}',
        latestOffset='{"b": {"__id": "2f", "t": {"0": 15, "1": 8}, "u": {"0": 2}}}',
    )
    said = SimpleNamespace(
        sources=[source], batchId=3, numInputRows=12, processedRowsPerSecond=99.6, batchDuration=120, name=None
    )
    figures = progress.batch_figures("stream", said)
    assert figures == {"query": "stream", "batch": 3, "rows": 12, "rows_per_s": 100, "ms": 120, "behind": 13}
    source.latestOffset = None
    assert progress.batch_figures("stream", said)["behind"] is None
