"""How far streaming queries are and where they go on: what their listener leaves, `kmq pipeline status` and `reset`."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from brokers import environment
from commands import PATIENCE_S, wait
from made_data import append, write_data

from kmq.spark.pipelines import route
from kmq.spark.streaming import checkpoint, listener, reset, status

# As where pip install kmq was all: neither pyspark nor what Arrow needs, and no Java.
BARE = """
import sys
for name in ("pyspark", "pyarrow", "numpy", "pandas", "py4j"):
    sys.modules[name] = None
from kmq.cli.app import main
main()
"""


def kmq(*arguments, cwd="."):
    """A command without Spark: (exit code, stdout, stderr)."""
    env = environment() | {"PATH": "/nowhere", "COLUMNS": "200"}
    command = [sys.executable, "-c", BARE, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout, done.stderr


def copying(spark, data, at, seen, **options):
    """A query that notes the offsets of each batch in `seen`; all there is now."""
    rows = spark.readStream.format("kmq").option("path", data).option("subscribe", "orders,jobs").options(**options)
    rows = rows.option("startingOffsets", "earliest").schema("topic string, offset bigint").load()
    add = lambda batch, number: seen.append((number, sorted(tuple(row) for row in batch.collect())))  # noqa: E731
    stream = rows.writeStream.foreachBatch(add).queryName("copy").option("checkpointLocation", str(at))
    return stream.trigger(availableNow=True).start()


@pytest.fixture
def copied(spark, tmp_path):
    """(data directory that can grow, checkpoint, what its batches held): 60 records, all read."""
    lines = [b"%b|0|%d|a" % ((b"orders", b"jobs")[n % 3 == 0], n) for n in range(60)]
    made = write_data(tmp_path / "data", lines, closed=False)
    seen = []
    copying(spark, tmp_path / "data", tmp_path / "c", seen).awaitTermination()
    wait(lambda: not checkpoint.Checkpoint(tmp_path / "c").holder())  # the end of a query is told behind it
    return made, str(tmp_path / "c"), seen


def test_a_pipeline_returns_when_its_last_status_is_written(spark, tmp_path, monkeypatch):
    """The JVM reports the end of a query behind it: whoever removed the directory at once found a file in the making."""
    made = write_data(tmp_path / "pod", [b"orders|0|%d|a" % n for n in range(20)])
    write, waits = listener._Query.write, threading.Event()

    def write_late(query, at_once=False):
        if query.status["state"] != "running":
            waits.wait(0.5)  # nobody sets it: a disk that is slow
        write(query, at_once)

    monkeypatch.setattr(listener._Query, "write", write_late)
    assert route.run(spark, {"path": made}, str(tmp_path / "to")) == 20
    found = checkpoint.Checkpoint(tmp_path / "to" / ".kmq" / "checkpoint")
    assert found.status()["state"] == "ended" and not found.holder()


def test_status_tells_position_lag_and_late_rows_without_java_and_pyspark(copied, tmp_path):
    made, at, _ = copied
    append(made, [b"orders|0|9%d|b" % n for n in range(7)])
    code, out, err = kmq("pipeline", "status", at, "--json", cwd="/")
    assert code == 0, err
    found = json.loads(out)
    kept = {name: found[name] for name in ("query", "running", "batch", "unfinished_batch", "lag", "late", "problems")}
    assert kept == {
        **{"query": "copy", "running": False, "batch": 0, "unfinished_batch": None, "lag": 7, "late": 0},
        "problems": [],
    }
    where = [(part["topic"], part["offset"], part["latest"], part["lag"]) for part in found["partitions"]]
    assert where == [("jobs", 20, 20, 0), ("orders", 40, 47, 7)]
    assert found["oldest_unread_s"] > 1e6, "made-up records are of years ago"
    assert found["files"] >= 3 and found["bytes"] > 100 and found["last_commit_s"] < 600
    code, out, err = kmq("pipeline", "status", "--partitions", cwd=tmp_path)
    assert code == 0 and "copy" in out and "orders" in out, out + err
    assert len(re.findall(r"(?<![\d,.])47(?![\d,.])", out)) == 1, out  # not in the bytes of the checkpoint


def test_status_needs_no_listener_and_says_what_it_cannot_ask(copied, tmp_path):
    _, at, _ = copied
    os.remove(f"{at}/kmq-status.json")
    os.rename(tmp_path / "data", tmp_path / "moved")
    found = status.of(checkpoint.Checkpoint(at))
    assert (found["query"], found["lag"], len(found["problems"])) == ("c", None, 1)
    moved = status.of(checkpoint.Checkpoint(at), status.Sources(paths=(str(tmp_path / "moved"),)))
    assert (moved["lag"], moved["problems"]) == (0, [])


def test_a_running_query_is_shown_as_running_and_is_not_reset(spark, copied, tmp_path):
    _, at, _ = copied
    rows = spark.readStream.format("kmq").option("path", str(tmp_path / "data")).option("subscribe", "orders,jobs")
    stream = rows.schema("topic string, offset bigint").load().writeStream.format("noop")
    query = stream.option("checkpointLocation", at).start()
    try:
        code, out, err = kmq("pipeline", "status", at, "--json")
        assert json.loads(out)["running"] is True, err
        code, out, err = kmq("pipeline", "reset", at, "--to", "earliest")
        assert (code, out) == (69, "") and "its query is running" in err
    finally:
        query.stop()
    wait(lambda: not checkpoint.Checkpoint(at).holder())


@pytest.mark.parametrize("manager", ["", "Checksum"])
def test_reset_reads_again_and_skips_what_it_said(spark, copied, tmp_path, manager):
    made, at, seen = copied
    name = "spark.sql.streaming.checkpointFileManagerClass"
    before = spark.conf.get(name)
    if manager:
        spark.conf.unset(name)
    try:
        to = '{"orders": {"0": 30}, "jobs": {"0": -2}}'
        code, dry, err = kmq("pipeline", "reset", at, "--to", to, "--dry-run")
        assert code == 0 and "30 records are read again, 0 are skipped" in dry, err
        assert checkpoint.Checkpoint(at).batches("offsets") == [0]
        code, out, err = kmq("pipeline", "reset", at, "--to", to)
        assert code == 0 and "orders/0: 40 → 30 (10 read again)" in out, err
        copying(spark, tmp_path / "data", at, seen).awaitTermination()
        again = [("jobs", n) for n in range(20)] + [("orders", n) for n in range(30, 40)]
        assert seen[1:] == [(2, again)], "the number of no batch is used twice"
        append(made, [b"jobs|0|9%d|b" % n for n in range(5)])
        wait(lambda: not checkpoint.Checkpoint(at).holder())
        plan = reset.plan(checkpoint.Checkpoint(at), "latest")
        assert "5 are skipped" in "\n".join(reset.text(plan))
        backup = json.loads(Path(reset.apply(plan)).read_text())
        assert [each["jobs"]["0"] for each in backup["before"][0].values()] == [20]
        copying(spark, tmp_path / "data", at, seen).awaitTermination()
        assert len(seen) == 2
    finally:
        spark.conf.set(name, before)


def test_a_query_that_keeps_state_is_not_reset(spark, tmp_path):
    data = write_data(tmp_path / "data", [b"orders|0|1|a"])
    rows = spark.readStream.format("kmq").option("path", data).option("subscribe", "orders")
    rows = rows.option("startingOffsets", "earliest").load().dropDuplicates(["id"])
    stream = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    stream.trigger(availableNow=True).start().awaitTermination()
    wait(lambda: not checkpoint.Checkpoint(tmp_path / "c").holder())
    code, _, err = kmq("pipeline", "reset", tmp_path / "c", "--to", "earliest")
    assert code == 78 and "keeps state" in err and "new checkpoint" in err
