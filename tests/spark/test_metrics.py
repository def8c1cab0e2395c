"""Metrics: what is counted in which window, in a batch and in a stream."""

import io
import json
import re
from datetime import UTC, datetime

import fixed_port
import made_data
import made_up
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from made_data import FIRST_TS, append, write_data
from rich.console import Console
from time_zone import tokyo

from kmq.errors import ConfigError
from kmq.spark import failures
from kmq.spark.pipelines import metrics
from kmq.spark.pipelines.metrics import READ, measure
from kmq.spark.streaming.checkpoint import LateError

pytestmark = pytest.mark.sampled(0.4, group="file")  # none needs another: each run takes a part

START = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


def rows(spark, *given):
    """Rows as the source has them: (topic, seconds behind START, routing key, producer_ts, payload)."""
    made = [
        (topic, datetime.fromtimestamp(START.timestamp() + at, UTC), key.encode(), ts, payload)
        for topic, at, key, ts, payload in given
    ]
    return spark.createDataFrame(made, READ)


def test_each_topic_has_its_figures_in_each_window(spark):
    at = START.timestamp()
    given = [("a", n / 10, f"a.k{n % 3}", f"{at + n / 10 - 0.25:.6f}", b"x" * (n + 1)) for n in range(100)]
    given += [
        ("a", 60, "a", "", b'{"j":1}'),
        ("a", 61, "a", "never", b"[1]"),
        ("a", 62, "a", "1", b"{nope"),
        ("b", 0, "b", "0", b""),
    ]
    found = measure(rows(spark, *given)).orderBy("start", "topic").collect()
    assert [(row.topic, row.start.minute, row.messages) for row in found] == [("a", 0, 100), ("b", 0, 1), ("a", 1, 3)]
    first, empty, second = found
    assert (first.bytes, first.size_max, first.msg_per_s, first.keys, first.json) == (5050, 100, 1.667, 3, 0.0)
    assert first.size_p50 in (50, 51) and first.size_p99 in (99, 100)
    assert (first.delay_p50, first.delay_p99) == (pytest.approx(0.25, abs=1e-5), pytest.approx(0.25, abs=1e-5))
    assert (empty.bytes, empty.size_max, empty.json, empty.delay_p50) == (0, 0, 0.0, None)
    assert (second.json, second.delay_p50) == (pytest.approx(2 / 3, abs=1e-3), None)


@pytest.mark.parametrize("factor", [1, 1e3, 1e6])
def test_a_producer_may_tell_its_time_in_any_unit(spark, factor):
    sent = START.timestamp() - 2
    found = measure(rows(spark, ("a", 0, "a", f"{sent * factor:.0f}", b""))).first()
    assert found.delay_p50 == pytest.approx(2.0)


@pytest.mark.parametrize("window", ["", "1", "0 seconds", "1 month", "minute"])
def test_a_window_that_is_none_is_refused(spark, window):
    with pytest.raises(ConfigError, match="--window"):
        measure(rows(spark), window)


def lines(count):
    return [b"t%d.k%d|0|%d|payload %d" % (n % 2, n % 5, n, n) for n in range(count)]


def test_a_summary_of_a_directory_counts_all_of_it(spark, tmp_path):
    data = write_data(tmp_path / "data", lines(1000))
    figures = metrics.summary(spark, {"path": data, "subscribePattern": "t.*"})
    found = figures.collect()
    assert {row.topic: row.messages for row in found} == {"t0": 500, "t1": 500}
    console = Console(width=200, file=io.StringIO(), record=True)
    with tokyo(spark):
        console.print(metrics.as_table(figures))
    shown = [line.split() for line in console.export_text().splitlines()[1:]]
    assert [line[:5] for line in shown] == [["2023-11-14", "22:13:00", topic, "500", "5,445"] for topic in ("t0", "t1")]


def late_after(tmp_path, monkeypatch):
    """(options, a function): an hour that is read first, and what makes records of the hour before it come later."""
    monkeypatch.setattr(made_up, "FIRST_TS", FIRST_TS + 3600_000_000)
    monkeypatch.setattr(made_data, "FIRST_TS", FIRST_TS + 3600_000_000)
    write_data(tmp_path / "a", lines(20))
    behind = write_data(tmp_path / "b", [b"other|0|1|a"], closed=False)
    for module in (made_up, made_data):
        monkeypatch.setattr(module, "FIRST_TS", FIRST_TS)
    where = {"path": f"{tmp_path}/a,{tmp_path}/b", "subscribePattern": "t.*"}
    return where, lambda: append(behind, lines(30))


def test_late_rows_end_the_run_before_anything_of_the_batch_is_added(spark, tmp_path, monkeypatch, capfd):
    where, later = late_after(tmp_path, monkeypatch)
    to = str(tmp_path / "t")
    assert metrics.run(spark, where, to) == 0
    later()
    with pytest.raises(Exception) as failed:
        metrics.run(spark, where, to)
    cause = failures.explain(failed.value)
    assert cause.exit_code != 0
    said = r"metrics: batch 2 .* later than the watermark \(\d+ or more\): nothing of it was added to .*--late drop"
    assert re.fullmatch(said, str(cause)), cause
    assert metrics.run(spark, where, to, on_late="drop") == 0


@pytest.mark.soak
def test_late_rows_end_the_run_that_sends_to_a_topic(spark, broker, tmp_path, monkeypatch):
    where, later = late_after(tmp_path, monkeypatch)
    arguments = {"topic": "figures", "producers": fixed_port.up(broker), "checkpoint": str(tmp_path / "c")}
    metrics.run(spark, where, **arguments)
    later()
    with pytest.raises(LateError, match=r"metrics: batch 2 .*its other rows were sent already"):
        metrics.run(spark, where, **arguments)


@pytest.fixture
def over(tmp_path, monkeypatch):
    """(options, a function): 100 messages in one minute, and what makes that minute be over."""
    made = write_data(tmp_path / "data", lines(100), closed=False)

    def later():
        for module in (made_up, made_data):
            monkeypatch.setattr(module, "FIRST_TS", FIRST_TS + 120_000_000)
        append(made, lines(10))

    return {"path": str(tmp_path / "data"), "subscribePattern": "t.*"}, later


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_stream_adds_each_window_that_is_over_to_a_table_once(spark, tmp_path, over, format):
    where, later = over
    to = str(tmp_path / "t")
    assert metrics.run(spark, where, to, format) == 0
    later()
    assert metrics.run(spark, where, to, format) == 2
    assert metrics.run(spark, where, to, format) == 0
    found = DeltaTable(to).to_pyarrow_table() if format == "delta" else ds.dataset(to, partitioning="hive").to_table()
    assert sorted((row["topic"], row["messages"], row["keys"]) for row in found.to_pylist()) == [
        ("t0", 50, 5),
        ("t1", 50, 5),
    ]


def test_a_backlog_is_counted_whole_though_its_topics_differ_in_size(spark, tmp_path, monkeypatch):
    """The limit of a batch lets no topic run ahead: its watermark would drop what the other one still has."""
    made = write_data(tmp_path / "data", [], closed=False)
    for minute in range(15):
        for module in (made_up, made_data):
            monkeypatch.setattr(module, "FIRST_TS", FIRST_TS + 60_000_000 * minute)
        append(made, [b"%b|0|%d|%b" % (b"small" if n % 11 == 10 else b"big", n, b"x" * 500) for n in range(330)])
    where = {"path": str(tmp_path / "data"), "subscribePattern": "big|small", "maxBytesPerTrigger": "900k"}
    metrics.run(spark, where, str(tmp_path / "t"))
    found = {}
    for row in ds.dataset(str(tmp_path / "t"), partitioning="hive").to_table().to_pylist():
        found.setdefault(row["topic"], []).append(row["messages"])
    # The last minute or two are not over yet.
    assert set(found["big"]) == {300} and set(found["small"]) == {30}
    assert len(found["big"]) == len(found["small"]) >= 13


def test_a_stream_tells_a_topic_each_window_that_is_over_once(spark, broker, tmp_path, over):
    where, later = over
    arguments = {"topic": "figures", "producers": fixed_port.up(broker), "checkpoint": str(tmp_path / "c")}
    metrics.run(spark, where, **arguments)
    later()
    metrics.run(spark, where, **arguments)
    metrics.run(spark, where, **arguments)
    broker.wait_routed(2)
    told = {line.split(b"|")[2]: json.loads(line.split(b"|", 5)[5]) for line in broker.lines("figures")}
    assert {key: figures["messages"] for key, figures in told.items()} == {b"figures.@.t0": 50, b"figures.@.t1": 50}
    assert len(broker.lines("figures")) == 2


def test_where_to_is_to_be_said(spark):
    with pytest.raises(ConfigError, match="--to or --into"):
        metrics.run(spark, {})
    with pytest.raises(ConfigError, match="--checkpoint"):
        metrics.run(spark, {}, topic="t")
