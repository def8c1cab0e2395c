"""Pipelines with onUnreachable=hold: one of two brokers is killed while they run, and each record arrives once."""

import re
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from time import time_ns

import made_data
import made_up
import pytest
from commands import PATIENCE_S, wait
from fronts import Front

from kmq.spark.pipelines import archive, metrics, mirror
from kmq.spark.source.brokers import Directory
from kmq.spark.streaming.checkpoint import Checkpoint, is_checkpoint, offsets_of

HOUR_US = 3_600_000_000
pytestmark = pytest.mark.timeout(3 * PATIENCE_S)


class Running:
    """A pipeline that runs beside the test."""

    def __init__(self, done, checkpoint):
        self._done, self._checkpoint = done, checkpoint

    def becomes(self, condition):
        def check():
            if self._done.done():
                self._done.result()
                raise AssertionError("the pipeline has ended")
            return condition()

        wait(check, lambda: f"at {self.read()}")

    def read(self):
        """How many records of each broker are through."""
        found = {}
        if is_checkpoint(self._checkpoint):
            for (broker, _, _), offset in offsets_of(Checkpoint(self._checkpoint).committed()[1]).items():
                found[broker] = found.get(broker, 0) + offset
        return found


@contextmanager
def running(spark, directory, run, *arguments, **options):
    """Call `run` with a stream that follows its topics until the block ends."""
    checkpoint = f"{directory}/checkpoint"
    options |= {"once": False, "every": "100 milliseconds", "checkpoint": checkpoint}
    with futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(run, spark, *arguments, **options)
        try:
            yield Running(done, checkpoint)
        finally:
            while not done.done():
                for query in spark.streams.active:
                    query.stop()
                futures.wait([done], 0.2)
    done.result()


def through_an_outage(two, pipeline):
    """Kill broker 1 with records that nobody has read, and bring it back. Return the ids of all orders."""
    here, away = two.names
    sent = two.send(0) + two.send(1)
    pipeline.becomes(lambda: pipeline.read() == {here: 10, away: 10})
    two.part(1)  # a batch that has its records would wait for it
    sent += two.send(1)
    two.kill(1)
    for count in (20, 30):
        sent += two.send(0)
        pipeline.becomes(lambda count=count: pipeline.read() == {here: count, away: 10})
    two.up(1)
    sent += two.send(1)
    pipeline.becomes(lambda: pipeline.read() == {here: 30, away: 30})
    return sent


@pytest.mark.sampled(1, group="without a broker")
def test_archive_goes_on_without_a_broker_and_adds_each_record_once(spark, fleet, tmp_path):
    two, to = fleet(2), str(tmp_path / "lake")
    with running(spark, tmp_path, archive.run, two.options(), to, schema="none") as pipeline:
        sent = through_an_outage(two, pipeline)
    rows = spark.read.parquet(to)
    assert sorted(row.id for row in rows.select("id").collect()) == sorted(sent)
    assert {row.broker for row in rows.select("broker").collect()} == {*two.names}


@pytest.mark.sampled(1, group="without a broker")
def test_mirror_goes_on_without_a_broker_and_copies_each_message_once(spark, fleet, new_broker, tmp_path):
    two, target = fleet(2), new_broker()
    target.gateway = False
    target.up()
    to = f"127.0.0.1:{(target.pipes / 'ingress.port').read_text().strip()}"
    logs = Directory(str(target.data))
    with running(spark, tmp_path, mirror.run, two.options(), to, logs) as pipeline:
        sent = through_an_outage(two, pipeline)
    target.wait_routed(len(sent))
    copied = [re.search(rb";mirror_id=(\d+)[;|]", line)[1].decode() for line in target.lines("orders")]
    assert sorted(copied) == sorted(sent)


@pytest.mark.sampled(1, group="without a broker")
def test_metrics_go_on_without_a_broker_and_count_each_record_once(spark, fleet, new_broker, tmp_path, monkeypatch):
    """A third broker has a record of the next day. It is up at the end, and closes all windows."""
    two, tomorrow, front, to = fleet(2), new_broker(), Front(), str(tmp_path / "metrics")
    for module in (made_data, made_up):
        monkeypatch.setattr(module, "FIRST_TS", time_ns() // 1000 + 24 * HOUR_US)
    made_data.write_data(tomorrow.data, [b"orders.k|0|tomorrow|x"])
    where = two.options(**{"kmq.bootstrap.servers": ",".join([*two.names, front.name])})
    try:
        with running(spark, tmp_path, metrics.run, where, to, watermark="2 hours") as pipeline:
            sent = through_an_outage(two, pipeline)
            tomorrow.up()
            front.broker = tomorrow
            pipeline.becomes(lambda: any(Path(to).glob("date=*/*.parquet")))
    finally:
        front.close()
    (row,) = spark.read.parquet(to).selectExpr("sum(messages) messages", "sum(bytes) bytes").collect()
    assert (row.messages, row.bytes) == (len(sent), len(sent))
