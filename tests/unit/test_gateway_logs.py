"""The logs over HTTP: shapes, refusals, and what a reader sees of damage, stalls, stops and files that go away."""

import http.client
import json
import os
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from log_server import up
from made_data import FIRST_TS, write_data
from waiting import PATIENCE_S, until

from kmq.access import tokens
from kmq.broker.stats import STATES
from kmq.gateway.core import partitions
from kmq.gateway.http import logs
from kmq.log import reader, topics

LINES = [b"t.k|%d|%d|%b" % (n, n, b"x" * 90) for n in range(2000)]
ALL = "/v1/logs/t/0/records"


BLOCK_BYTES = 4096  # of the index, see small_blocks
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path, LINES, {"t": 1, "empty": 2}, segment_bytes=100_000)


@pytest.fixture
def broker(data):
    with up(data, synced=len(LINES)) as found:
        found.serve()
        yield found


def get(broker, target, method="GET", **headers):
    """(status, headers, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", broker.port, timeout=PATIENCE_S)
    try:
        connection.request(method, target, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def get_json(broker, target):
    status, _, body = get(broker, target)
    assert status == 200, body
    return json.loads(body)


def refused(broker, target, **headers):
    status, _, body = get(broker, target, **headers)
    said = json.loads(body)
    assert said["error"] == said["message"], "a Spark source of an older release reads `error`"
    return status, said["code"], said["message"]


def files(data, directory="topics/t/0"):
    return sorted(Path(f"{data}/{directory}").glob("*.log"))


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_topics_of_kmq_itself_are_listed_only_when_they_are_asked_for(broker, data):
    before = get_json(broker, "/v1/topics")
    topics.declare(data, "__consumer_offsets", 1, own=True)
    assert get_json(broker, "/v1/topics") == before
    names = [row["name"] for row in get_json(broker, "/v1/topics?internal=true")]
    assert names == ["__consumer_offsets", "empty", "t"]
    assert get_json(broker, "/v1/logs?topic=__consumer_offsets")[0]["end_offset"] == 0


def test_topics_and_logs_tell_where_they_begin_and_end(broker, data):
    both = {"partitioner": "crc32", "from_seq": 1}
    assert get_json(broker, "/v1/topics") == [
        {"name": "empty", "partitions": 2, "first_offsets": [0, 0], "end_offsets": [0, 0]} | both,
        {"name": "t", "partitions": 1, "first_offsets": [0], "end_offsets": [2000]} | both,
    ]
    assert get_json(broker, "/v1/logs?topic=t&topic=__append&topic=nobody") == [
        {"topic": "t", "partition": 0, "first_offset": 0, "end_offset": 2000},
        {"topic": "__append", "partition": 0, "first_offset": 1, "end_offset": 2001},
    ]
    assert [row["topic"] for row in get_json(broker, "/v1/logs")] == ["empty", "empty", "t", "__append"]
    assert {row["topic"] for row in get_json(broker, "/v1/logs?wal=false")} == {"empty", "t"}
    for _ in range(2):
        assert get_json(broker, f"/v1/logs?topic=t&topic=empty&topic=__append&stamps=1&time={FIRST_TS + 701}") == {
            "data_id": Path(f"{data}/id").read_text().strip(),
            "logs": [
                {"topic": "t", "partition": 0, "first_offset": 0, "end_offset": 2000, "offset": 700}
                | {"last": [2000, FIRST_TS + 2000]},
                {"topic": "empty", "partition": 0, "first_offset": 0, "end_offset": 0, "offset": 0},
                {"topic": "empty", "partition": 1, "first_offset": 0, "end_offset": 0, "offset": 0},
                {"topic": "__append", "partition": 0, "first_offset": 1, "end_offset": 2001, "offset": 701}
                | {"last": [2000, FIRST_TS + 2000]},
            ],
        }
    assert get_json(broker, "/v1/broker") == {
        "data_id": Path(f"{data}/id").read_text().strip(),
        "format": "2",
        "instance": broker.settings.instance,
        "marks_from": 1,
    }


def test_a_listing_looks_again_only_at_what_has_changed(broker, data, monkeypatch):
    looked, end_offset = [], reader.LogReader.end_offset
    monkeypatch.setattr(reader.LogReader, "end_offset", lambda log: looked.append(log.directory) or end_offset(log))
    os.utime(f"{data}/topics/t/0", (1, 1))  # else one that has just changed is looked at again
    before = get_json(broker, "/v1/topics")
    looked.clear()
    assert get_json(broker, "/v1/topics") == before and f"{data}/topics/t/0" not in looked
    with files(data)[-1].open("ab") as active:
        active.write(b"2001|1700000900.000000|t|0|0|x\n")
    assert get_json(broker, "/v1/topics")[1]["end_offsets"] == [2001]
    Path(f"{data}/topics/empty/topic.toml").write_text("partitions = 3\nfrom_seq = 1\n")
    assert get_json(broker, "/v1/topics")[0]["end_offsets"] == [0, 0, 0]


def test_the_last_record_of_a_listing_is_the_one_before_its_end_whoever_looks_meanwhile(broker, data, monkeypatch):
    ends = logs.LogCalls._ends

    def overtaken(calls, topic, partition):
        found = ends(calls, topic, partition)
        with files(data)[-1].open("ab") as active:
            active.write(b"2001|1700000900.000000|t|0|0|x\n")
        assert ends(calls, topic, partition) == (0, 2001), "another request"
        return found

    with monkeypatch.context() as patched:
        patched.setattr(logs.LogCalls, "_ends", overtaken)
        [row] = get_json(broker, "/v1/logs?topic=t&stamps=1")["logs"]
    assert (row["end_offset"], row["last"]) == (2000, [2000, FIRST_TS + 2000])
    [row] = get_json(broker, "/v1/logs?topic=t&stamps=1")["logs"]
    assert (row["end_offset"], row["last"][0]) == (2001, 2001)


def test_the_last_record_is_of_the_topic_that_is_there_now(broker, data):
    """One that came back within a tick of the clock of files, with as many records as the one before."""
    active, tick = files(data)[-1], time.time_ns() + 3600 * 10**9
    others = active.read_bytes()
    for seq, changed in ((2001, 1), (2007, tick), (2008, tick)):
        active.write_bytes(others + b"%d|1700000900.000000|t|0|0|x\n" % seq)
        os.utime(active.parent, ns=(changed, changed))
        [row] = get_json(broker, "/v1/logs?topic=t&stamps=1")["logs"]
        assert (row["end_offset"], row["last"][0]) == (2001, seq)


def test_topics_are_listed_in_pages(broker):
    pages = [get_json(broker, f"/v1/topics?limit=1&after={after}") for after in ("", "empty", "t")]
    assert [[row["name"] for row in page] for page in pages] == [["empty"], ["t"], []]


def test_lookups_answer_with_offsets(broker):
    assert get_json(broker, "/v1/logs/t/0/offset?seq=701") == {"offset": 700}
    assert get_json(broker, "/v1/logs/t/0/offset?time=0") == {"offset": 0}
    assert get_json(broker, f"/v1/logs/t/0/offset?time={1 << 60}") == {"offset": 2000}
    cuts = get_json(broker, "/v1/logs/t/0/cuts?bytes=50000&start=100&end=1500")["cuts"]
    assert 2 <= len(cuts) <= 5 and all(100 < cut < 1500 for cut in cuts)


def test_records_are_the_bytes_of_the_files_and_say_which(broker, data):
    lines = b"".join(path.read_bytes() for path in files(data)).splitlines(keepends=True)
    status, headers, body = get(broker, f"{ALL}?start=3&end=1700")
    assert (status, body) == (200, b"".join(lines[3:1700]))
    assert (headers["KMQ-First-Offset"], headers["KMQ-Next-Offset"]) == ("3", "1700")
    assert (headers["Content-Type"], headers["Content-Length"]) == ("text/plain", str(len(body)))
    assert get(broker, ALL)[2] == b"".join(lines)
    status, headers, body = get(broker, f"{ALL}?start=2000")
    assert (status, body, headers["KMQ-First-Offset"], headers["KMQ-Next-Offset"]) == (200, b"", "2000", "2000")


def test_max_bytes_gives_whole_blocks_up_to_the_end_of_a_segment(broker, data):
    text, start = b"", 0
    while True:
        _, headers, body = get(broker, f"{ALL}?start={start}&max_bytes=20000")
        if not body:
            break
        assert len(body) < 25_000
        assert body.count(b"\n") == int(headers["KMQ-Next-Offset"]) - start
        text, start = text + body, int(headers["KMQ-Next-Offset"])
    assert text == b"".join(path.read_bytes() for path in files(data)) and start == 2000


def test_one_connection_serves_one_request_after_another(broker):
    connection = http.client.HTTPConnection("127.0.0.1", broker.port, timeout=PATIENCE_S)
    sockets = set()
    for target in (ALL, f"{ALL}?start=2000", "/v1/logs", f"{ALL}?start=7&end=8", "/v1/logs/t/9/records", ALL):
        connection.request("GET", target)
        response = connection.getresponse()
        response.read()
        sockets.add(connection.sock)
    assert len(sockets) == 1 and None not in sockets
    connection.close()


def test_the_wal_is_served_up_to_what_is_durable(data):
    with up(data, synced=1500) as broker:
        broker.serve()
        _, headers, body = get(broker, "/v1/logs/__append/0/records?start=1490")
        assert (body.count(b"\n"), headers["KMQ-Next-Offset"]) == (11, "1501")
        assert get(broker, "/v1/logs/__append/0/records?start=1501&end=1600")[2] == b""
        assert get_json(broker, f"/v1/logs/__append/0/offset?time={1 << 60}") == {"offset": 1501}
        assert max(get_json(broker, "/v1/logs/__append/0/cuts?bytes=10000")["cuts"]) < 1501


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (f"{ALL}?start=x", "start='x'"),
        (f"{ALL}?end=-1", "end='-1'"),
        (f"{ALL}?end=99999999999999999999", "end='9999"),
        (f"{ALL}?max_bytes=", "max_bytes=''"),
        (f"{ALL}?start=%D9%A3", "start="),
        ("/v1/logs?topic=", "topic="),
        ("/v1/logs?topic=t&topic=", "topic="),
        ("/v1/logs/t/one/records", "partition='one'"),
        ("/v1/logs/t/0/cuts", "bytes=''"),
        ("/v1/logs/t/0/cuts?bytes=0", "bytes='0'"),
        ("/v1/logs/t/0/offset", "time=<microseconds since the epoch> or seq="),
        ("/v1/logs/t/0/offset?time=1&seq=1", "give either time="),
        ("/v1/logs/t/0/offset?time=now", "time='now'"),
    ],
)
def test_a_bad_number_is_refused_by_the_name_of_its_field(broker, target, named):
    status, code, text = refused(broker, target)
    assert (status, code) == (400, "bad_request") and named in text


@pytest.mark.parametrize("topic", ["nobody", "..", "%2e%2e%2fappend", "t%2F..%2Ft", ".new-t", "append", "t%00", "%2E"])
def test_what_is_no_topic_is_not_found_wherever_its_name_leads(broker, data, topic):
    os.makedirs(f"{data}/topics/.new-t/0")
    for what in ("records", "cuts?bytes=9", "offset?time=1"):
        status, _, body = get(broker, f"/v1/logs/{topic}/0/{what}")
        assert status == 404 and b"t.k|" not in body
    assert get_json(broker, f"/v1/logs?topic={topic}") == []


def test_what_is_no_partition_is_not_found(broker):
    assert refused(broker, "/v1/logs/t/1/records")[:2] == (404, "not_found")
    assert refused(broker, "/v1/logs/__append/1/records")[:2] == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "target", "status", "code"),
    [("GET", "/v1/nothing", 404, "not_found"), ("PUT", "/v1/logs", 405, "method_not_allowed")],
)
def test_what_no_route_serves_is_refused_like_anything_else(broker, method, target, status, code):
    answered, headers, body = get(broker, target, method=method)
    said = json.loads(body)
    assert (answered, said["code"], headers["Content-Type"][:16]) == (status, code, "application/json")
    assert (headers.get("Allow") == "GET, HEAD") == (status == 405)


def test_a_head_is_not_answered_with_a_body(broker):
    assert get(broker, ALL, method="HEAD")[0] == 405


def test_without_a_token_nothing_is_shown(data, tmp_path):
    path = f"{tmp_path}/tokens"
    token = tokens.new(path, "spark")
    with up(data, synced=2000, KMQ_TOKENS=path) as broker:
        broker.serve()
        for target in (ALL, "/v1/logs", "/v1/topics", "/v1/broker", "/v1/logs/t/0/offset?time=1"):
            assert refused(broker, target)[:2] == (401, "unauthorized")
            assert get(broker, target, Authorization=f"Bearer {token}")[0] == 200


def test_what_is_durable_is_not_guessed_while_durability_recovers(data):
    with up(data) as broker:
        broker.page.rows["durability"].state = STATES.index("recovering")
        broker.serve()
        for target in ("/v1/logs", "/v1/logs/__append/0/records"):
            assert refused(broker, target)[:2] == (503, "not_ready")
        assert get_json(broker, "/v1/logs?topic=t")[0]["end_offset"] == 2000


def test_what_was_durable_stays_durable_while_durability_starts_again(broker):
    end = {"topic": "__append", "partition": 0, "first_offset": 1, "end_offset": 2001}
    assert get_json(broker, "/v1/logs?topic=__append") == [end]
    broker.page.rows["durability"].wipe()
    assert get_json(broker, "/v1/logs?topic=__append") == [end]


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_damage_at_the_start_is_an_error_with_file_and_byte(broker, data):
    flip(files(data)[1], 0)
    start = int(files(data)[1].stem)
    status, _, body = get(broker, f"{ALL}?start={start}")
    said = json.loads(body)
    assert (status, said["code"], said["path"], said["byte"]) == (500, "damaged", str(files(data)[1]), 0)
    assert (said["first_offset"], said["what"]) == (start, "crc mismatch") and said["error"].startswith(said["path"])


def test_damage_further_on_breaks_the_response_off_behind_what_is_good(broker, data):
    whole = b"".join(path.read_bytes() for path in files(data))
    flip(files(data)[1], 50_000)
    with pytest.raises(http.client.IncompleteRead) as raised:
        get(broker, ALL)
    first = os.path.getsize(files(data)[0])
    got = raised.value.partial
    assert whole.startswith(got) and first + 44_000 < len(got) <= first + 50_000 and got.endswith(b"\n")
    assert refused(broker, f"{ALL}?start={got.count(bytes([10]))}")[:2] == (500, "damaged")


# --- slow readers, stops, files that go away -------------------------------------------------------------------------


class Slow:
    """A reader that reads when it is told to, with a small buffer."""

    def __init__(self, broker, target=ALL):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(("127.0.0.1", broker.port))
        self.socket.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.socket.recv(512)
        head, _, self.got = head.partition(b"\r\n\r\n")
        self.length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))

    def rest(self):
        """What came in all, to the end of the connection."""
        with self.socket:
            while len(self.got) < self.length and (data := self.socket.recv(1 << 16)):
                self.got += data
        return self.got


@pytest.fixture
def large(tmp_path, monkeypatch):
    """More than socket buffers hold, in three segments, sent in small pieces."""
    monkeypatch.setattr(partitions, "PIECE_BYTES", 20_000)
    lines = [b"t|||%06d%b" % (n, b"x" * 5000) for n in range(3600)]
    return write_data(tmp_path, lines, segment_bytes=6 << 20, group=300)


def test_a_reader_that_stalls_holds_no_thread_and_is_ended_at_the_deadline(large):
    with up(large, synced=3600, KMQ_LINE_DEADLINE="1s") as broker:
        broker.serve()
        readers = [Slow(broker) for _ in range(2 * logs._THREADS)]
        assert broker.streams == len(readers)
        assert get_json(broker, "/v1/logs/t/0/offset?seq=3600") == {"offset": 3599}
        until(lambda: not broker.streams, "the end of those who stall")
        for each in readers:
            assert len(each.rest()) < each.length


def test_a_slow_reader_gets_all_of_it(large):
    with up(large, synced=3600) as broker:
        broker.serve()
        slow = Slow(broker)
        whole = b"".join(path.read_bytes() for path in files(large))
        assert slow.rest() == whole
        until(lambda: not broker.streams, "the end of the stream")


def test_streams_over_the_limit_are_refused_until_one_ends(large, monkeypatch):
    monkeypatch.setattr(logs, "_STREAMS", 2)
    with up(large, synced=3600) as broker:
        broker.serve()
        readers = [Slow(broker), Slow(broker)]
        assert refused(broker, ALL)[:2] == (429, "too_many")
        readers[0].socket.close()
        until(lambda: broker.streams == 1, "a stream less")
        assert get(broker, f"{ALL}?end=1")[0] == 200
        readers[1].socket.close()


def test_a_gateway_that_stops_does_not_wait_for_the_readers_of_long_responses(large):
    with up(large, synced=3600) as broker:
        broker.serve()
        slow = Slow(broker)
        broker.stop()  # which does not wait so long as the server would
        assert len(slow.rest()) < slow.length


def test_a_segment_that_retention_takes_is_read_to_its_end_and_no_further(large):
    with up(large, synced=3600) as broker:
        broker.serve()
        paths = files(large)
        first = paths[0].read_bytes()
        slow = Slow(broker)
        for path in paths[:2]:
            path.unlink()
            path.with_suffix(".idx").unlink()
        assert slow.length > len(first) and slow.rest() == first
        _, headers, _ = get(broker, f"{ALL}?start={first.count(bytes([10]))}&max_bytes=1")
        assert int(headers["KMQ-First-Offset"]) == int(paths[2].stem)


def test_a_range_whose_reader_leaves_is_closed_once_the_span_in_hand_is_found(large, monkeypatch):
    """Python crashes where one thread closes a generator that another one runs."""
    checked, begun, may_go_on = partitions._checked, threading.Event(), threading.Event()

    def slowly(*arguments):
        begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return checked(*arguments)

    monkeypatch.setattr(partitions, "_checked", slowly)
    asked = partitions.Range(reader.partition(str(large), "t", 0), 0, 100)
    with ThreadPoolExecutor() as threads:
        taken = threads.submit(asked.next_span)
        assert begun.wait(PATIENCE_S)
        closed = threads.submit(asked.close)
        may_go_on.set()
        assert taken.result(PATIENCE_S).nbytes and closed.result(PATIENCE_S) is None
    assert asked.next_span() is None


def test_a_segment_that_was_replaced_is_not_sent_as_the_one_that_was_looked_at(large):
    with up(large, synced=3600) as broker:
        broker.serve()
        paths = files(large)
        first = paths[0].read_bytes()
        slow = Slow(broker)
        made = paths[1].with_suffix(".new")
        made.write_bytes(paths[1].read_bytes())
        made.rename(paths[1])
        assert slow.rest() == first


def test_a_data_directory_that_goes_during_a_look_is_no_topic_without_partitions(broker, data, monkeypatch):
    """A reader would take the answer for a topic that was deleted, or has one partition."""
    declared = logs.Bounds.declared

    def declared_of_none(bounds, topic):
        if os.path.isdir(data):
            os.rename(data, f"{data}.away")
        return declared(bounds, topic)

    with monkeypatch.context() as patch:
        patch.setattr(logs.Bounds, "declared", declared_of_none)
        for _ in range(2):  # the second time it is away from the start
            assert refused(broker, "/v1/logs?topic=empty")[:2] == (503, "not_ready")
    os.rename(f"{data}.away", data)
    assert [row["partition"] for row in get_json(broker, "/v1/logs?topic=empty")] == [0, 1]
    assert get_json(broker, "/v1/logs?topic=none") == []


def test_of_topics_that_are_deleted_nothing_is_kept(broker, data, monkeypatch):
    seen, declared = [], logs.Bounds.declared
    monkeypatch.setattr(logs.Bounds, "declared", lambda bounds, topic: seen.append(bounds) or declared(bounds, topic))
    assert {row["topic"] for row in get_json(broker, "/v1/logs?stamps=1")["logs"]} == {"t", "empty", "__append"}
    (bounds,) = {*seen}
    assert f"{data}/topics/t/0" in str(vars(bounds))
    shutil.rmtree(f"{data}/topics/t")
    assert {row["topic"] for row in get_json(broker, "/v1/logs?stamps=1")["logs"]} == {"empty", "__append"}
    assert f"{data}/topics/t/0" not in str(vars(bounds)) and "'t'" not in str(vars(bounds))
