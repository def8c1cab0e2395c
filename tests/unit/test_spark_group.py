"""Option groupId: what is committed for a stream and when, and that no gateway can fail or delay the query by it."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fake_logger import FakeLogger
from log_server import up
from made_data import append, write_data
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from kmq.errors import ConfigError
from kmq.log.reader import WAL
from kmq.spark.connections import Access
from kmq.spark.source import group, stream_reader
from kmq.spark.source.group import GroupOffsets
from kmq.spark.source.options import ReadOptions
from kmq.spark.streaming import listener

OTHERS = (409, {"code": "unknown_member", "message": "group g has members; only they may commit"})


class Gateway:
    """Takes commits, unless `refusals` says otherwise: by topic, or by topic/partition, (status, body)."""

    def __init__(self):
        self.commits, self.headers, self.group = [], [], {}
        self.refusals = {}
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                rows = [{"topic": t, "partition": p, "committed": at} for (t, p), at in gateway.group.items()]
                self.answer(200, {"partitions": rows})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                topic = self.path.split("/")[3]
                rows = {(topic, row["partition"]): row["offset"] for row in body["offsets"]}
                names = [topic, *(f"{topic}/{number}" for _, number in rows)]
                gateway.headers.append(self.headers["Authorization"])
                if refusal := next((gateway.refusals[name] for name in names if name in gateway.refusals), None):
                    return self.answer(*refusal)
                assert (body["group"], body["generation"]) == ("g", 0) and "member" not in body
                gateway.commits.append(rows)
                gateway.group |= rows
                self.answer(200, {})

            def answer(self, status, value):
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.name = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def gateway():
    made = Gateway()
    yield made
    made.stop()


@pytest.fixture
def log(monkeypatch):
    made = FakeLogger()
    monkeypatch.setattr(group, "Logger", lambda _: made)
    return made


@pytest.fixture
def at_once(monkeypatch):
    """No pause after a failure, and a look at the group before each commit."""
    monkeypatch.setattr(group, "PAUSE_S", 0.0)
    monkeypatch.setattr(group, "LOOK_S", 0.0)


def offsets_of(gateway, **options):
    return GroupOffsets("g", [gateway.name], Access(token="geheim"), **options)


def at(gateway, **partitions):
    """Offsets by topic_partition."""
    return {(gateway.name, *split(name)): offset for name, offset in partitions.items()}


def split(name):
    topic, _, number = name.rpartition("_")
    return topic, int(number)


# --- what is committed -----------------------------------------------------------------------------------------------


def test_only_what_has_changed_is_committed_topic_by_topic_and_never_the_wal(gateway, log):
    made = offsets_of(gateway)
    made.commit(at(gateway, a_0=5, a_1=7, b_0=1) | {(gateway.name, WAL, 0): 13})
    assert gateway.commits == [{("a", 0): 5, ("a", 1): 7}, {("b", 0): 1}]
    made.commit(at(gateway, a_0=5, a_1=7, b_0=1))
    made.commit(at(gateway, a_0=5, a_1=9, b_0=1))
    assert gateway.commits[2:] == [{("a", 1): 9}]
    assert set(gateway.headers) == {"Bearer geheim"} and not log.events


def test_a_topic_or_partition_that_is_gone_keeps_no_other_from_its_commit(gateway, log):
    gateway.refusals = {
        "b": (404, {"code": "unknown_topic", "message": "x"}),
        "a/1": (404, {"code": "unknown_partition", "message": "x"}),
    }
    made = offsets_of(gateway)
    made.commit(at(gateway, a_0=5, a_1=7, b_0=1, c_0=2))
    assert gateway.commits == [{("a", 0): 5}, {("c", 0): 2}]
    count = len(gateway.headers)
    made.commit(at(gateway, a_0=5, a_1=7, b_0=1, c_0=2))
    assert len(gateway.headers) == count, "what is gone is not asked for again"
    assert not log.events


# --- what fails ------------------------------------------------------------------------------------------------------


def test_a_gateway_that_is_down_is_warned_of_once_and_gets_all_later(gateway, log, at_once):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        down = f"127.0.0.1:{taken.getsockname()[1]}"
    made = GroupOffsets("g", [down, gateway.name], Access())
    for offset in (5, 6):
        made.commit({(down, "a", 0): offset} | at(gateway, a_0=offset))
    [warning] = log.of("offsets_not_committed")
    assert down in warning["at"] and "refused" in warning["reason"]
    assert gateway.commits == [{("a", 0): 5}, {("a", 0): 6}], "the other one has its commits"
    gateway.refusals["a"] = (503, {"code": "not_ready", "message": "later"})
    made.commit(at(gateway, a_0=7))
    assert log.of("offsets_not_committed")[1]["reason"] == "not_ready: later"
    gateway.refusals.clear()
    made.commit(at(gateway, a_0=7, b_0=1))
    assert gateway.commits[2:] == [{("a", 0): 7}, {("b", 0): 1}]


def test_after_a_failure_nothing_is_asked_for_a_while_except_at_the_end(gateway, log):
    gateway.refusals["a"] = (503, {"code": "not_ready", "message": "later"})
    made = offsets_of(gateway)
    made.commit(at(gateway, a_0=5))
    gateway.refusals.clear()
    made.commit(at(gateway, a_0=5))
    assert gateway.commits == []
    made.commit(at(gateway, a_0=5), is_last=True)
    assert gateway.commits == [{("a", 0): 5}]


def test_a_silent_gateway_costs_a_commit_no_more_than_its_budget(monkeypatch, log):
    monkeypatch.setattr(group, "BUDGET_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        GroupOffsets("g", [name], Access()).commit({(name, "a", 0): 1})
        assert time.monotonic() - begin < 20, "kmq.timeout is 30 s"
    assert "timed out" in log.of("offsets_not_committed")[0]["reason"]


def test_what_is_no_gateway_is_said_and_ends_nothing(gateway, log):
    gateway.refusals["a"] = (404, "not found")
    offsets_of(gateway).commit(at(gateway, a_0=5))
    assert "no gateway of KMQ, or one without groups" in log.of("offsets_not_committed")[0]["reason"]


def test_a_group_with_members_is_named_in_one_message_until_they_are_gone(gateway, log, at_once):
    gateway.refusals["a"] = OTHERS
    made, second = offsets_of(gateway), offsets_of(gateway, is_second=True)
    for offset in (5, 6):
        made.commit(at(gateway, a_0=offset))
        second.commit(at(gateway, a_0=offset))
    assert log.names == ["group_has_members"]
    assert "goes on" in log.events[0][1]["effect"] and "groupId of its own" in log.events[0][1]["effect"]
    gateway.refusals.clear()
    made.commit(at(gateway, a_0=6))
    assert gateway.commits == [{("a", 0): 6}]
    gateway.refusals["a"] = OTHERS
    made.commit(at(gateway, a_0=7))
    assert log.names == ["group_has_members"] * 2, "said again when it begins again"


def test_another_query_of_the_same_group_is_noticed_and_a_lost_reply_is_not(gateway, log, at_once):
    made = offsets_of(gateway)
    made.commit(at(gateway, a_0=5))
    gateway.group["a", 0] = 6  # as the listener of this query commits
    made.commit(at(gateway, a_0=6))
    assert not log.events
    gateway.group["a", 0] = 2
    made.commit(at(gateway, a_0=7))
    [warning] = log.of("group_shared")
    assert (warning["at"], warning["reason"][:24]) == ("a/0", "committed here 6, found ")
    assert gateway.commits[-1] == {("a", 0): 7}


# --- when ------------------------------------------------------------------------------------------------------------


class Recorder:
    """In place of GroupOffsets: what it was told to commit."""

    def __init__(self, *_, **__):
        self.seen, self.came = [], threading.Event()
        made_recorders.append(self)

    def commit(self, offsets, is_last=False):
        self.seen.append(({key[1:]: at for key, at in offsets.items()}, is_last))
        self.came.set()


made_recorders = []


def test_the_source_commits_a_batch_when_the_next_is_asked_for_and_no_start(tmp_path, monkeypatch):
    made = write_data(tmp_path / "data", [b"t|0|%d|x" % n for n in range(9)], closed=False)
    monkeypatch.setattr(stream_reader, "GroupOffsets", Recorder)
    with up(tmp_path / "data", synced=9) as broker:
        broker.serve()
        given = {"kmq.bootstrap.servers": f"127.0.0.1:{broker.port}", "subscribe": "t", "startingOffsets": "earliest"}

        def reader():
            return stream_reader.StreamReader(StructType([]), ReadOptions(given | {"groupId": "g"}))

        first = reader()
        seen = made_recorders[-1].seen
        start = json.loads(json.dumps(first.initialOffset()))
        end = first.latestOffset(start, ReadAllAvailable())
        assert seen == [], "nothing has been read"
        end = json.loads(json.dumps(end))
        append(made, [b"t|0|9|x"])
        broker.page.rows["durability"].seq = 10
        first.latestOffset(end, ReadAllAvailable())
        assert seen == [({("t", 0): 9}, False)]
        reader().latestOffset(end, ReadAllAvailable())
        assert made_recorders[-1].seen == seen, "a restart commits what its checkpoint has"


@pytest.fixture
def committer(monkeypatch):
    """A committer for two sources, the first with a group: (committer, recorder)."""
    recorder = Recorder()
    monkeypatch.setattr(listener, "groups_of", lambda _: [recorder, None])
    return listener.Committer(None), recorder


def progress(offset):
    ours = {"h:1": {"__id": "1", "__format": "2", "a": {"0": offset}, "__from": {"a": {"0": "0"}}}}
    return [{"endOffset": ours}, {"endOffset": 17}]


def test_the_listener_commits_the_last_batch_of_a_run_and_only_that(committer):
    made, recorder = committer
    made.ended()
    assert recorder.seen == [], "a run without a batch"
    for offset in (5, 6):
        made.finished(progress(offset))
    made.ended()
    assert recorder.seen == [({("a", 0): 6}, True)]


def test_the_listener_commits_a_batch_that_no_other_follows_soon(committer, monkeypatch):
    monkeypatch.setattr(listener, "IDLE_S", 0.01)
    made, recorder = committer
    made.finished(progress(5))
    assert recorder.came.wait(60)
    assert recorder.seen == [({("a", 0): 5}, False)]


# --- the option ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": "d", "subscribe": "a"}, "committed by a gateway.*give kmq.bootstrap.servers instead of path"),
        ({"kmq.bootstrap.servers": "h:1", "subscribe": f"a,{WAL}"}, f"{WAL} is no topic"),
        ({"kmq.bootstrap.servers": "h:1", "subscribe": "a", "groupId": "a b"}, "without space and /"),
        ({"kmq.bootstrap.servers": "h:1", "subscribe": "a", "groupId": ""}, "must be 1 to 200"),
        ({"kmq.bootstrap.servers": "h:1", "subscribe": "a", "kafka.group.id": "g"}, "did you mean groupId"),
    ],
)
def test_a_group_that_cannot_be_is_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        ReadOptions({"groupId": "g"} | given)


def test_a_batch_says_that_a_group_has_no_effect(capfd):
    ReadOptions({"kmq.bootstrap.servers": "h:1", "subscribe": "a", "groupId": "g"}).check_batch()
    assert 'option=groupId effect="only a stream commits offsets"' in capfd.readouterr().err


def test_offsets_of_a_shard_go_through_the_next_address_where_one_is_silent(gateway, monkeypatch):
    monkeypatch.setattr(group, "Logger", lambda _: FakeLogger())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        silent = f"127.0.0.1:{taken.getsockname()[1]}"
    name = f"{silent},{gateway.name}"
    offsets = GroupOffsets("g", name.split(","), Access())
    offsets.commit({(name, "t", 0): 5})
    offsets.commit({(name, "t", 0): 6, ("other:8082", "t", 0): 7})
    assert gateway.commits == [{("t", 0): 5}, {("t", 0): 6}]
