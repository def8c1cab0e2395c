"""onUnreachable=hold: a stream over several brokers goes on without one that is away, and loses and doubles nothing."""

import json
import shutil
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from commands import PATIENCE_S, wait
from heard import Heard
from pyspark.sql.streaming.datasource import ReadMaxRows

from kmq.errors import ConfigError, RetryError
from kmq.spark.source import brokers
from kmq.spark.source.options import ReadOptions
from kmq.spark.streaming import checkpoint, listener
from kmq.spark.streaming.checkpoint import Checkpoint

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)


class Reading:
    """A stream as Spark drives it, without Spark: offsets go through JSON, and a batch is planned, then read."""

    def __init__(self, stream, position=None):
        self.stream = stream
        self.position = self._json(stream.initialOffset()) if position is None else position
        self.batches = []  # (start, end)

    @staticmethod
    def _json(offset):
        return json.loads(json.dumps(offset))

    def plan(self):
        """Plan the next batch; None if there is nothing new."""
        end = self._json(self.stream.latestOffset(self.position, self.stream.getDefaultReadLimit()))
        if end == self.position:
            return None
        self.batches.append((self.position, end))
        self.position = end
        return self.batches[-1]

    def ids(self, stream=None):
        """The ids of the last batch."""
        return ids(stream or self.stream, *self.batches[-1])

    def next(self):
        return self.ids() if self.plan() else []


def ids(stream, start, end):
    batches = [batch for task in stream.partitions(start, end) for batch in stream.read(task)]
    return [each for batch in batches for each in batch.column(0).to_pylist()]


def back(fleet, read, number):
    """Bring a broker back, and wait until the stream has heard of it."""
    fleet.up(number)
    fleet.brokers[number].wait(lambda: read.stream._logs._back, "an answer of the broker")


def test_the_others_go_on_while_a_broker_is_down_and_it_goes_on_when_it_is_back(fleet, capfd):
    two = fleet(2)
    heard = Heard(capfd)
    first = two.send(0) + two.send(1)
    read = Reading(two.stream(**{"kmq.patience": f"{2 * PATIENCE_S:g}s"}))  # who waits for it fails by the deadline
    assert sorted(read.next()) == sorted(first)
    unread = two.send(1)
    two.kill(1)
    for _ in range(5):
        sent = two.send(0)
        assert read.next() == sent
        assert two.names[1] in read.stream._logs.away
    back(two, read, 1)
    assert read.next() == unread
    sent = two.send(0) + two.send(1)
    assert sorted(read.next()) == sorted(sent) and read.next() == []
    said = heard.text
    assert said.count("event=broker_held") == said.count("event=broker_back") == 1, said
    assert f"event=broker_held at={two.names[1]} " in said


def test_without_hold_a_broker_that_is_down_stops_the_stream(fleet):
    two = fleet(2)
    two.send(0), two.send(1)
    read = Reading(two.stream(onUnreachable="fail", **{"kmq.patience": "300ms"}))
    read.next()
    two.kill(1)
    with pytest.raises(RetryError, match=f"broker {two.names[1]}: .*kmq.patience"):
        read.next()


def test_the_lag_of_a_broker_that_is_away_is_as_it_was_last_seen(fleet):
    two = fleet(2)
    two.send(0), two.send(1)
    stream = two.stream(maxOffsetsPerTrigger="1")
    end = stream.latestOffset(stream.initialOffset(), ReadMaxRows(1))
    two.kill(1)
    end = stream.latestOffset(end, ReadMaxRows(1))
    assert end[two.names[0]]["orders"]["0"] == 2 and checkpoint.behind(stream.reportLatestOffset(), end) == 18


def test_a_broker_that_is_silent_is_waited_for_once(fleet):
    """Its network is gone: it takes connections and answers nothing, so each request would take its whole timeout."""
    two = fleet(2)
    two.send(0), two.send(1)
    read = Reading(two.stream(**{"kmq.timeout": "1h", "kmq.patience": "1h"}))
    read.next()
    two.fronts[1].is_mute = True
    two.fronts[1].cut()
    took = []
    for _ in range(6):
        sent = two.send(0)
        begun = time.monotonic()
        assert read.next() == sent
        took.append(time.monotonic() - begun)
    assert sorted(took)[3] < brokers.LOOK_S, took
    two.fronts[1].is_mute = False
    two.fronts[1].cut()
    two.brokers[1].wait(lambda: read.stream._logs._back, "an answer of the broker")
    sent = two.send(1)
    assert read.next() == sent


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_broker_that_is_down_at_the_start_begins_when_it_answers_where_starting_offsets_says(fleet, start):
    two = fleet(2)
    first = two.send(0), two.send(1)
    two.kill(1)
    read = Reading(two.stream(startingOffsets=start))
    assert read.next() == (first[0] if start == "earliest" else [])
    two.send(0, count=5)
    assert len(read.next()) == 5
    later = two.stream(startingOffsets=start)  # a restart in between: the checkpoint says that it has not begun
    read = Reading(later, read.position)
    two.send(0, count=5)
    assert len(read.next()) == 5
    back(two, read, 1)
    assert read.next() == (first[1] if start == "earliest" else [])
    sent = two.send(1)
    assert read.next() == sent
    assert ids(two.stream(startingOffsets=start), *read.batches[-2]) == (first[1] if start == "earliest" else [])


def test_a_broker_that_begins_late_begins_at_once_although_a_batch_waits_for_more_records(fleet):
    """Else `latest` would be looked up again by each plan, and what came between two plans would be skipped."""
    two = fleet(2)
    two.send(0), two.send(1)
    two.kill(1)
    read = Reading(two.stream(startingOffsets="latest", minOffsetsPerTrigger="10", maxTriggerDelay="1h"))
    sent = two.send(0)
    assert read.next() == sent
    back(two, read, 1)
    few = two.send(0, count=5)
    found = read.next()
    sent = two.send(1)
    assert found + read.next() == few + sent


class OtherServer(BaseHTTPRequestHandler):
    """A service that has taken a broker's address."""

    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_):
        pass


class Proxy(OtherServer):
    """A proxy whose broker is away."""

    status = 502


@contextmanager
def instead_of(front, handler, directory):
    """Let a service answer at the address of a broker."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (directory / "http.port").write_text(str(server.server_port))
        front.broker = SimpleNamespace(pipes=directory)
        try:
            yield
        finally:
            front.broker = None
            front.cut()
            server.shutdown()


def test_another_service_at_the_address_of_a_broker_that_is_away_is_an_error_and_no_silence(fleet, tmp_path):
    two = fleet(2)
    first = two.send(0) + two.send(1)
    read = Reading(two.stream())
    assert sorted(read.next()) == sorted(first)
    two.kill(1)
    sent = two.send(0)
    assert read.next() == sent
    with instead_of(two.fronts[1], OtherServer, tmp_path):
        two.brokers[1].wait(lambda: read.stream._logs._back, "an answer")
        with pytest.raises(ConfigError, match=f"broker {two.names[1]}: .*this is no gateway of KMQ"):
            read.next()


def test_a_broker_behind_a_proxy_that_does_not_reach_it_is_away(fleet, tmp_path):
    two = fleet(2)
    first = two.send(0) + two.send(1)
    read = Reading(two.stream())
    assert sorted(read.next()) == sorted(first)
    unread = two.send(1)
    two.kill(1)
    with instead_of(two.fronts[1], Proxy, tmp_path):
        sent = two.send(0)
        assert read.next() == sent
        assert "HTTP 502 of a proxy" in str(read.stream._logs.away[two.names[1]])
    back(two, read, 1)
    assert read.next() == unread


def test_a_stream_starts_while_no_broker_answers(fleet):
    one = fleet(1)
    first = one.send(0)
    one.kill(0)
    read = Reading(one.stream())
    assert read.next() == []
    back(one, read, 0)
    assert read.next() == first


def test_a_batch_that_was_planned_waits_for_its_broker_and_is_read_as_planned(fleet):
    """Its records were promised to the sink. Another process plans it again, and a task reads it while it is down."""
    two = fleet(2)
    first = two.send(0) + two.send(1)
    read = Reading(two.stream())
    read.plan()
    tasks = [task for task in read.stream.partitions(*read.batches[-1]) if task.broker == two.names[1]]
    two.kill(1)
    found = []
    again = threading.Thread(target=lambda: found.append(read.ids(two.stream())))
    task = threading.Thread(target=lambda: found.append([b for t in tasks for b in read.stream.read(t)]))
    again.start(), task.start()
    two.up(1)
    again.join(PATIENCE_S), task.join(PATIENCE_S)
    assert sorted(map(len, found)) == [1, 20] and sorted(max(found, key=len)) == sorted(first)


def test_a_fresh_volume_is_named_with_both_ids_and_left_out_until_the_old_one_is_back(fleet, capfd, tmp_path):
    two = fleet(2)
    two.send(0), two.send(1)
    read = Reading(two.stream())
    read.next()
    promised = two.send(1)
    read.plan()
    (task,) = read.stream.partitions(*read.batches[-1])
    two.kill(1)
    shutil.copytree(two.brokers[1].data, tmp_path / "old", symlinks=True)
    before, now = two.replace(1)
    two.send(1, count=100)
    named = f"{two.names[1]} has another data directory .id {now}. than this checkpoint .{before}..*--forget"
    with pytest.raises(ConfigError, match=named):
        list(read.stream.read(task))
    with pytest.raises(ConfigError, match=named):
        read.ids(two.stream())
    with pytest.raises(ConfigError, match=named):
        Reading(two.stream(onUnreachable="fail"), read.position).next()
    heard = Heard(capfd)
    sent = two.send(0)
    assert read.next() == sent
    assert f"another data directory (id {now}) than this checkpoint ({before})" in heard.text
    two.kill(1)
    shutil.rmtree(two.brokers[1].data)
    (tmp_path / "old").rename(two.brokers[1].data)
    back(two, read, 1)
    assert next(iter(read.stream.read(task))).column(0).to_pylist() == promised
    sent = two.send(1)
    assert read.next() == sent


def copy(spark, fleet, work, done=None, **options):
    """A query of Spark that adds the ids of each batch to a list, until `done` says so, or until it has read all."""
    seen = []
    rows = spark.readStream.format("kmq").schema("id string").options(**fleet.options(**options)).load()
    writer = rows.writeStream.foreachBatch(lambda batch, _: seen.extend(row.id for row in batch.collect()))
    writer = writer.option("checkpointLocation", f"{work}/c").queryName("copy")
    writer = writer.trigger(processingTime="0 seconds") if done else writer.trigger(availableNow=True)
    query = writer.start()
    try:
        if done:
            wait(lambda: query.exception() or done(seen), lambda: f"{len(seen)} read")
        else:
            query.awaitTermination(PATIENCE_S)
        assert query.exception() is None, query.exception()
    finally:
        query.stop()
        listener.settle(spark, str(query.runId))
    return seen


def test_status_has_the_last_lag_of_a_broker_that_is_away_and_it_can_be_forgotten(spark, fleet, tmp_path):
    two = fleet(2)
    first = two.send(0) + two.send(1)
    assert sorted(copy(spark, two, tmp_path, maxOffsetsPerTrigger="20")) == sorted(first)
    of_0, of_1 = two.send(0), two.send(1)
    away = two.names[1]

    def kmq(*arguments):
        return two.brokers[0].run("kmq", "pipeline", *arguments, patience_s=PATIENCE_S)

    # One by one, by their time: those of broker 0 come first.
    read = copy(spark, two, tmp_path, lambda seen: len(seen) >= 3, maxOffsetsPerTrigger="1")
    two.kill(1)
    at = committed(tmp_path)[away]["orders"]["0"]
    given = ("--brokers", ",".join(two.names), "--patience", "1s")
    found = json.loads(kmq("status", f"{tmp_path}/c", "--json", *given).stdout)
    of_broker = {each["broker"]: each for each in found["brokers"]}
    assert (of_broker[two.names[0]]["state"], of_broker[away]["state"]) == ("up", "unreachable"), found
    assert of_broker[away]["lag"] == 20 - at and f"broker {away}: " in of_broker[away]["why"]
    assert any(f"its lag of {20 - at} is as it was last seen" in each for each in found["problems"])
    batches = Checkpoint(f"{tmp_path}/c").batches("offsets")
    dry = kmq("reset", f"{tmp_path}/c", "--forget", away, "--dry-run")
    assert f"read up to {at}, was last seen to end at 20: {20 - at} are never read" in dry.stdout, dry
    assert Checkpoint(f"{tmp_path}/c").batches("offsets") == batches
    before, now = two.replace(1)
    fresh = two.send(1)
    stopped = kmq("status", f"{tmp_path}/c")
    assert f"(id {now}) than this checkpoint ({before})" in stopped.stderr and "--forget" in stopped.stderr
    done = kmq("reset", f"{tmp_path}/c", "--forget", away)
    assert done.returncode == 0 and away not in committed(tmp_path), done
    rest = copy(spark, two, tmp_path, onUnreachable="fail")
    assert {*read, *rest} - {*of_1} == {*of_0, *fresh}
    refused = kmq("reset", f"{tmp_path}/c", "--forget", "nobody:1")
    assert refused.returncode == 78 and f"it has {', '.join(sorted(two.names))}" in refused.stderr


def committed(work):
    """The source's end of the last committed batch."""
    return json.loads(Checkpoint(f"{work}/c").committed()[1].sources[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"onUnreachable": "wait"}, "onUnreachable='wait': must be fail or hold"),
        ({"path": "data", "kmq.bootstrap.servers": None}, "onUnreachable: `path` is read without a connection"),
    ],
)
def test_what_hold_cannot_mean_is_an_error(options, says):
    given = {"kmq.bootstrap.servers": "a:1", "subscribe": "t", "onUnreachable": "hold"} | options
    with pytest.raises(ConfigError, match=says):
        ReadOptions({name: text for name, text in given.items() if text is not None})


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_ten_brokers_three_killed_and_brought_back_and_one_replaced(spark, fleet, tmp_path):
    """Orders go to every broker that is up, at any time; what each broker has is read once, and the replaced is named."""
    ten = fleet(10)
    killed, replaced = (2, 5, 8), 9
    sent = [each for number in range(10) for each in ten.send(number)]
    seen = []
    where = ten.options(**{"kmq.patience": "1h"})
    rows = spark.readStream.format("kmq").schema("id string").options(**where).load()
    writer = rows.writeStream.foreachBatch(lambda batch, _: seen.extend(row.id for row in batch.collect()))
    query = writer.option("checkpointLocation", f"{tmp_path}/c").trigger(processingTime="0 seconds").start()

    def is_read(ids):
        assert query.exception() is None, query.exception()
        return {*ids} <= {*seen}

    try:
        wait(lambda: is_read(sent))
        for number in (*killed, replaced):
            ten.kill(number)
            for other in sorted({*range(10)} - {*killed, replaced}):
                sent.extend(ten.send(other))
            wait(lambda: is_read(sent), lambda: f"{len(seen)} of {len(sent)}")
        before, now = ten.replace(replaced)
        fresh = ten.send(replaced)
        for number in killed:
            ten.up(number)
            sent.extend(ten.send(number))
            wait(lambda: is_read(sent), lambda: f"{len(seen)} of {len(sent)}")
    finally:
        query.stop()
        listener.settle(spark, str(query.runId))
    assert sorted(seen) == sorted(sent), "each once, and none of the fresh volume"
    stopped = ten.brokers[0].kmq("pipeline", "status", f"{tmp_path}/c")
    assert f"(id {now}) than this checkpoint ({before})" in stopped.stderr
    done = ten.brokers[0].kmq("pipeline", "reset", f"{tmp_path}/c", "--forget", ten.names[replaced])
    assert done.returncode == 0, done
    rest = copy(spark, ten, tmp_path)
    assert sorted({*rest} - {*sent}) == sorted(fresh), "a batch that was begun is read again"
