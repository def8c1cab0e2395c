"""kmq pipeline status and reset over checkpoints as Spark leaves them, without Spark; with it: test_pipeline_status.py."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from made_data import write_data
from typer.testing import CliRunner

from kmq.cli.app import app
from kmq.errors import BusyError, ConfigError
from kmq.links.ownership import FileLock
from kmq.log import identity, topic_changes
from kmq.spark.streaming import checkpoint, reset, status

V1 = "v1\n"
PAGE = Path(__file__).parents[2] / "docs/spark-writing.md"


def log_batch(path, number, *sources, committed=True):
    """What Spark writes of one batch."""
    for log in ("offsets", "commits"):
        (path / log).mkdir(parents=True, exist_ok=True)
    (path / "metadata").write_text('{"id":"7e"}')
    about = {"batchWatermarkMs": 5, "batchTimestampMs": 1, "conf": {}}
    (path / "offsets" / str(number)).write_text(V1 + "\n".join([json.dumps(about), *map(json.dumps, sources)]))
    if committed:
        (path / "commits" / str(number)).write_text(V1 + '{"nextBatchWatermarkMs":5}')


@pytest.fixture
def read_to(tmp_path):
    """(checkpoint directory, offsets as Spark has them): 3 of 10 records of orders/0 were read, in batches 0 to 2."""
    write_data(tmp_path / "data", [b"orders|0|%d|a" % n for n in range(10)])
    data = str(tmp_path / "data")

    def at(offset):
        mine = {"__id": identity.read(data, "id"), "__format": "2", "__last": {"orders": {"0": "3 1.000000"}}}
        return {data: mine | {"orders": {"0": offset}}}

    for number in range(3):
        log_batch(tmp_path / "t/.kmq/checkpoint", number, at(number + 1))
    return tmp_path / "t/.kmq/checkpoint", at


def test_the_last_batch_that_is_through_counts_and_an_unfinished_one_is_named(read_to, tmp_path):
    path, at = read_to
    log_batch(path, 3, at(9), committed=False)
    found = status.of(checkpoint.Checkpoint(path))
    assert (found["batch"], found["unfinished_batch"], found["lag"]) == (2, 3, 7)
    assert (found["table"], found["query"]) == (str(tmp_path / "t"), "t")
    assert "batch 3 was begun and not finished" in status.notes(found)[0]


def test_a_reset_says_which_records_are_gone_for_good(tmp_path):
    made = write_data(tmp_path / "data", [b"orders|0|%d|a" % n for n in range(10)], closed=False)
    data = str(tmp_path / "data")
    log_batch(tmp_path / "c", 0, {data: {"__id": identity.read(data, "id"), "__format": "2", "orders": {"0": 3}}})
    topic_changes.begin_at(data, "orders", None, {0: 8})
    made[1].tick()
    made[1].settle()
    said = "\n".join(reset.text(reset.plan(checkpoint.Checkpoint(str(tmp_path / "c")), "earliest")))
    assert "orders/0: 3 → 8 (5 gone)" in said
    assert f"gone for good: {data} orders/0 offsets 3 to 7 (5 records)" in said


def test_status_finds_checkpoints_by_table_and_by_directory(read_to, tmp_path):
    for place in (tmp_path, tmp_path / "t", read_to[0]):
        assert [each.path for each in checkpoint.find([str(place)])] == [str(read_to[0])]
    with pytest.raises(ConfigError, match="not a checkpoint, a pipeline's table"):
        checkpoint.find([str(tmp_path / "data")])
    shown = CliRunner().invoke(app, ["pipeline", "status", str(tmp_path), "--partitions"])
    assert shown.exit_code == 0 and "orders" in shown.stdout, shown.output


def test_a_probe_fails_unless_the_query_runs_and_was_heard_of(read_to):
    path, _ = read_to
    probe = ["pipeline", "status", str(path), "--alive", "1m", "--offline"]
    found = CliRunner().invoke(app, probe)
    assert str(found.exception) == "t: is not running"
    lock = FileLock(f"{path}/kmq-owner")
    assert lock.try_acquire("pid=1")
    assert str(CliRunner().invoke(app, probe).exception) == "t: is running, but has never reported its status"
    (path / "kmq-status.json").write_text("{}")
    assert CliRunner().invoke(app, probe).exit_code == 0
    os.utime(path / "kmq-status.json", (1, 1))
    assert "last reported" in str(CliRunner().invoke(app, probe).exception)
    lock.release()


def test_reset_writes_a_batch_behind_all_there_are_and_keeps_what_was(read_to):
    path, at = read_to
    log_batch(path, 3, at(9), 17, committed=False)
    log_batch(path, 2, at(3), 17)
    (path / "offsets/.4.crc").write_text("of another file")
    plan = reset.plan(checkpoint.Checkpoint(path), "earliest")
    assert "in all: 3 records are read again, 0 are skipped" in reset.text(plan)
    assert "batch 3 was begun and not finished" in "\n".join(reset.text(plan))
    backup = json.loads(Path(reset.apply(plan)).read_text())
    assert backup["before"][0] == at(3)
    number, logged = checkpoint.Checkpoint(path).committed()
    (mine,) = json.loads(logged.sources[0]).values()
    assert (number, mine["orders"], sorted(mine), logged.sources[1]) == (4, {"0": 0}, ["__id", "orders"], "17")
    assert (path / "commits/4").read_text() == V1 + '{"nextBatchWatermarkMs": 5}'
    assert not (path / "offsets/.4.crc").exists()
    # What the backup says was before, given back:
    again = reset.plan(checkpoint.Checkpoint(path), json.dumps(backup["before"][0]))
    assert [(move.after, move.skipped) for move in again.moves] == [(3, 3)]


def test_a_time_is_where_its_first_record_is(read_to):
    path, _ = read_to
    after = [
        reset.plan(checkpoint.Checkpoint(path), to).moves[0].after for to in ("0", "2023-01-01", "2099-01-01T00:00")
    ]
    assert after == [0, 0, 10]


def test_reset_is_refused_while_the_table_has_a_writer_or_its_batches_do_not_fit(read_to, tmp_path):
    path, _ = read_to
    plan = reset.plan(checkpoint.Checkpoint(path), "latest")
    lock = FileLock(f"{tmp_path}/t/.kmq/owner")
    assert lock.try_acquire("pid=7")
    with pytest.raises(BusyError, match=r"its query is running .pid=7.; stop it first"):
        reset.apply(plan)
    lock.release()
    (tmp_path / "t/.kmq/batch").write_text("5")
    with pytest.raises(ConfigError, match="its table has batch 5 already"):
        reset.plan(checkpoint.Checkpoint(path), "latest")


def test_another_data_directory_at_the_same_place_is_not_asked(read_to, tmp_path):
    path, _ = read_to
    (tmp_path / "data").rename(tmp_path / "old")
    write_data(tmp_path / "data", [b"orders|0|1|a"])
    (problem,) = status.of(checkpoint.Checkpoint(path))["problems"]
    assert "has another data directory (id " in problem
    with pytest.raises(Exception, match="has another data directory"):
        reset.plan(checkpoint.Checkpoint(path), "latest")
    old = status.Sources(paths=(str(tmp_path / "old"),))
    assert status.of(checkpoint.Checkpoint(path), old)["lag"] == 7


def test_the_metrics_of_the_page_have_a_broker_that_has_never_answered(read_to, tmp_path):
    (line,) = re.findall(r"(?m)^\$ kmq pipeline status \S+ --json (\| python3 .*)$", PAGE.read_text())
    (tmp_path / "data").rename(tmp_path / "old")
    said = CliRunner().invoke(app, ["pipeline", "status", str(read_to[0]), "--json"]).stdout
    shown = {"one": said, "two": said.replace(str(tmp_path / "data"), "b:8082")}
    done = subprocess.run(["bash", "-c", f"cat {line}"], input="".join(shown.values()), capture_output=True, text=True)
    label = 'kmq_pipeline_lag{query="t",broker="%s",state="unreachable"} NaN'
    assert done.stdout.splitlines() == [label % (tmp_path / "data"), label % "b:8082"], done.stderr


def test_the_timer_of_the_page_leaves_the_old_metrics_where_the_status_fails(tmp_path):
    (line,) = re.findall(r"`(set -o pipefail; … > \S+ && mv \S+ \S+)`", " ".join(PAGE.read_text().split()))
    (tmp_path / "kmq.prom").write_text("before\n")
    for pipeline, code, after in [("false | cat", 1, "before\n"), ("echo now | cat", 0, "now\n")]:
        done = subprocess.run(["bash", "-c", line.replace("…", pipeline)], cwd=tmp_path)
        assert (done.returncode, (tmp_path / "kmq.prom").read_text()) == (code, after)


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("yesterday", "--to 'yesterday': must be earliest, latest, JSON of offsets"),
        ('{"order": {"0": 1}}', "--to: unknown partition order/0 .*expected one of orders/0"),
        ('{"orders": {"1": 1}}', "--to: unknown partition orders/1 "),
        ('{"orders": {"0": 41}}', "--to: orders/0 .* has offsets 0 to 10, but not 41"),
        ('{"orders": 4}', '--to .*: must be {"topic": {"0": 23}}'),
        ("{", '--to .*: must be {"topic": {"0": 23}}'),
    ],
)
def test_reset_names_what_is_wrong_with_the_place(read_to, to, said):
    with pytest.raises(ConfigError, match=said):
        reset.plan(checkpoint.Checkpoint(read_to[0]), to)


def test_a_batch_is_told_by_its_topics_partitions_and_records(tmp_path):
    first = {"b": {"__id": "2f", "orders": {"0": 5, "1": 9}, "jobs": {"0": 2}}}
    second = {"b": {"__id": "2f", "orders": {"0": 5, "1": 1009}, "jobs": {"0": 3}}}
    log_batch(tmp_path, 0, first)
    log_batch(tmp_path, 1, second, 17, committed=False)
    many = {"b": {"__id": "2f", **{f"t{n}": {"0": 1} for n in range(7)}}}
    log_batch(tmp_path / "many", 0, many)
    assert checkpoint.batch_text(str(tmp_path), 0) == "jobs/0 orders/0,1: up to 16 records"
    assert checkpoint.batch_text(str(tmp_path), 1) == "jobs/0 orders/1: 1,001 records"
    assert checkpoint.batch_text(f"{tmp_path}/many", 0) == "t0/0 t1/0 t2/0 t3/0 t4/0 and 2 more topics: up to 7 records"
    assert checkpoint.batch_text("s3://bucket/c", 0) == ""
