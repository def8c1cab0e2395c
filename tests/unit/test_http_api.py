"""The HTTP API on queue files, without a broker: bad input, reading, limits. Every answer is one that the document has."""

import gzip
import json
import os
import re
import socket
import threading
import time
from contextlib import closing

import pytest
from api_client import NDJSON, Api
from forked import forked, send
from log_server import up
from made_data import write_data
from typer.testing import CliRunner
from waiting import PATIENCE_S, until

from kmq.access import tokens
from kmq.broker.stats import STATES
from kmq.cli.app import app
from kmq.gateway.core import partitions
from kmq.gateway.http import request, schema

KEYED = [b"t.k|1700000000.%03d|%d|v%d" % (n, n, n) for n in range(1, 501)]
PRODUCE, CONSUME = "/api/topics/t/produce", "/api/topics/t/consume"
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    data = write_data(tmp_path_factory.mktemp("data"), KEYED, {"t": 1, "empty": 2}, segment_bytes=70_000)
    with up(data, synced=len(KEYED), KMQ_LINE_DEADLINE="500ms") as found:
        found.page.rows["router"].seq = len(KEYED)
        found.serve()
        yield found


@pytest.fixture
def api(broker):
    with closing(Api(broker.port)) as found:
        yield found


# --- bad input -------------------------------------------------------------------------------------------------------

TOPICS = "/api/admin/topics"
DEEP = b'{"value":' + b"[" * 100_000

BAD = [
    ("POST", TOPICS, b"", 400, "bad_request", ""),
    ("POST", TOPICS, b"{", 400, "bad_request", ""),
    ("POST", TOPICS, b"\xff", 400, "bad_request", ""),
    ("POST", TOPICS, b'{"name": NaN}', 400, "bad_request", ""),
    ("POST", TOPICS, DEEP, 400, "bad_request", ""),
    ("POST", TOPICS, b"[]", 422, "bad_field", "body"),
    ("POST", TOPICS, {}, 422, "bad_field", "name"),
    ("POST", TOPICS, {"name": 1}, 422, "bad_field", "name"),
    ("POST", TOPICS, {"name": ""}, 422, "bad_field", "name"),
    ("POST", TOPICS, {"name": "x" * 201}, 422, "bad_field", "name"),
    ("POST", TOPICS, {"name": "../x"}, 422, "bad_field", "name"),
    ("POST", TOPICS, {"name": "x\ud800"}, 422, "bad_field", "name"),
    ("POST", TOPICS, {"name": "__offsets"}, 422, "bad_field", "name"),
    ("POST", TOPICS, {"name": "append"}, 422, "bad_field", "name"),
    ("POST", TOPICS, {"name": "x", "partitions": 0}, 422, "bad_field", "partitions"),
    ("POST", TOPICS, {"name": "x", "partitions": 1025}, 422, "bad_field", "partitions"),
    ("POST", TOPICS, {"name": "x", "partitions": "1"}, 422, "bad_field", "partitions"),
    ("POST", TOPICS, {"name": "x", "replicationFactor": 3}, 422, "bad_field", "replicationFactor"),
    ("POST", TOPICS, {"name": "x", "retentionMs": 0}, 422, "bad_field", "retentionMs"),
    ("POST", TOPICS, {"name": "x", "retentionMs": -2}, 422, "bad_field", "retentionMs"),
    ("POST", TOPICS, {"name": "x", "retentionBytes": 1}, 422, "bad_field", "retentionBytes"),
    ("POST", TOPICS, {"name": "x", "segmentBytes": 1}, 422, "bad_field", "segmentBytes"),
    ("POST", TOPICS, {"name": "x", "cleanupPolicy": "keep"}, 422, "bad_field", "cleanupPolicy"),
    ("POST", TOPICS, {"name": "x", "partitioner": "md5"}, 422, "bad_field", "partitioner"),
    ("POST", TOPICS, {"name": "t", "partitioner": "murmur2"}, 409, "topic_exists", "partitioner"),
    ("PATCH", f"{TOPICS}/t", {"partitioner": "murmur2"}, 422, "bad_field", "partitioner"),
    ("POST", TOPICS, {"name": "x", "maxDeliveries": 0}, 422, "bad_field", "maxDeliveries"),
    ("POST", TOPICS, {"name": "x", "color": 1}, 422, "bad_field", "color"),
    ("POST", TOPICS, {"name": "t", "partitions": 2}, 409, "topic_exists", "partitions"),
    ("POST", TOPICS, {"name": "t", "retentionMs": 5}, 409, "topic_exists", ""),
    ("POST", f"{TOPICS}?x=1", {"name": "x"}, 422, "bad_field", "x"),
    ("GET", f"{TOPICS}?internal=yes", None, 422, "bad_field", "internal"),
    ("GET", f"{TOPICS}/nobody", None, 404, "unknown_topic", ""),
    ("GET", f"{TOPICS}/%2e%2e", None, 404, "unknown_topic", ""),
    ("GET", f"{TOPICS}/.new-t", None, 404, "unknown_topic", ""),
    ("GET", f"{TOPICS}/t%00", None, 404, "unknown_topic", ""),
    ("GET", f"{TOPICS}/{'x' * 201}", None, 422, "bad_field", "topic"),
    ("PATCH", f"{TOPICS}/nobody", {}, 404, "unknown_topic", ""),
    ("PATCH", f"{TOPICS}/t", {"name": "u"}, 422, "bad_field", "name"),
    ("PATCH", f"{TOPICS}/t", {"partitions": 2}, 422, "bad_field", "partitions"),
    ("PATCH", f"{TOPICS}/t", {"partitions": 1025, "force": True}, 422, "bad_field", "partitions"),
    ("PATCH", f"{TOPICS}/empty", {"partitions": 1}, 422, "bad_field", "partitions"),
    ("PATCH", f"{TOPICS}/t", {"force": "yes"}, 422, "bad_field", "force"),
    ("PATCH", f"{TOPICS}/t", {"retentionMs": True}, 422, "bad_field", "retentionMs"),
    ("DELETE", f"{TOPICS}/nobody", None, 404, "unknown_topic", ""),
    ("PATCH", f"{TOPICS}/__consumer_offsets", {"retentionMs": 1000}, 400, "reserved_topic", ""),
    ("DELETE", f"{TOPICS}/__consumer_offsets", None, 400, "reserved_topic", ""),
    ("PUT", f"{TOPICS}/t", {}, 405, "method_not_allowed", ""),
    ("GET", "/api/nothing", None, 404, "not_found", ""),
    ("POST", PRODUCE, b"", 400, "bad_request", ""),
    ("POST", PRODUCE, b"hello", 400, "bad_request", ""),
    ("POST", PRODUCE, DEEP, 400, "bad_request", ""),
    ("POST", PRODUCE, b"7", 422, "bad_field", "body"),
    ("POST", PRODUCE, {}, 422, "bad_field", "value"),
    ("POST", PRODUCE, {"value": "*"}, 422, "bad_field", "value"),
    ("POST", PRODUCE, {"value": "", "acks": 2}, 422, "bad_field", "acks"),
    ("POST", PRODUCE, {"value": "", "acks": True}, 422, "bad_field", "acks"),
    ("POST", PRODUCE, {"value": "", "producer": "a b", "id": "1"}, 422, "bad_field", "producer"),
    ("POST", PRODUCE, {"value": "", "producer": "a\n", "id": "1"}, 422, "bad_field", "producer"),
    ("POST", PRODUCE, {"value": "", "producer": "a"}, 422, "bad_field", "id"),
    ("POST", PRODUCE, {"value": "", "producer": "a", "id": "x"}, 422, "bad_field", "id"),
    ("POST", PRODUCE, {"value": "", "producer": "a", "id": "1" * 19}, 422, "bad_field", "id"),
    ("POST", PRODUCE, {"messages": []}, 422, "bad_field", "messages"),
    ("POST", PRODUCE, {"messages": {}}, 422, "bad_field", "messages"),
    ("POST", PRODUCE, {"messages": [{"value": ""}], "value": ""}, 422, "bad_field", "value"),
    ("POST", PRODUCE, {"messages": [{"value": ""}, 3]}, 422, "bad_field", "messages[1]"),
    ("POST", PRODUCE, {"messages": [{"value": ""}, {"value": "", "acks": 1}]}, 422, "bad_field", "messages[1].acks"),
    ("POST", PRODUCE, {"messages": [{"value": ""}], "producer": "a"}, 422, "bad_field", "messages[0].id"),
    ("POST", f"{PRODUCE}?format=hex", {"value": ""}, 422, "bad_field", "format"),
    ("POST", f"{PRODUCE}?acks=2", {"value": ""}, 422, "bad_field", "acks"),
    ("POST", f"{PRODUCE}?format=text&format=text", {"value": ""}, 422, "bad_field", "format"),
    ("POST", "/api/topics/a%7Cb/produce", {"value": ""}, 400, "bad_topic", ""),
    ("POST", "/api/topics/.x/produce", {"value": ""}, 400, "bad_topic", ""),
    ("GET", PRODUCE, None, 405, "method_not_allowed", ""),
    ("GET", "/api/topics/nobody/consume", None, 404, "unknown_topic", ""),
    ("GET", f"{CONSUME}?partition=1", None, 404, "unknown_partition", "partition"),
    ("GET", f"{CONSUME}?partition=x", None, 422, "bad_field", "partition"),
    ("GET", f"{CONSUME}?partition=%D9%A3", None, 422, "bad_field", "partition"),
    ("GET", f"{CONSUME}?offset=-1", None, 422, "bad_field", "offset"),
    ("GET", f"{CONSUME}?offset={1 << 63}", None, 422, "bad_field", "offset"),
    ("GET", f"{CONSUME}?offset=501", None, 416, "out_of_range", "offset"),
    ("GET", f"{CONSUME}?offset=1&from=latest", None, 422, "bad_field", "from"),
    ("GET", f"{CONSUME}?from=middle", None, 422, "bad_field", "from"),
    ("GET", f"{CONSUME}?timestamp=yesterday", None, 422, "bad_field", "timestamp"),
    ("GET", f"{CONSUME}?timestamp=2026-13-01T00:00:00Z", None, 422, "bad_field", "timestamp"),
    ("GET", f"{CONSUME}?maxMessages=0", None, 422, "bad_field", "maxMessages"),
    ("GET", f"{CONSUME}?maxMessages=10001", None, 422, "bad_field", "maxMessages"),
    ("GET", f"{CONSUME}?maxBytes=99999999", None, 422, "bad_field", "maxBytes"),
    ("GET", f"{CONSUME}?timeoutMs=60001", None, 422, "bad_field", "timeoutMs"),
    ("GET", f"{CONSUME}?unknown=1", None, 422, "bad_field", "unknown"),
    ("GET", "/api/topics/empty/consume", None, 422, "bad_field", "partition"),
]


@pytest.mark.parametrize(("method", "target", "body", "status", "code", "field"), BAD)
def test_bad_input_is_refused_with_its_code_and_field(api, method, target, body, status, code, field):
    answer = api.call(method, target, body)
    assert answer.refusal == (status, code, field), answer.value
    assert answer.value["message"] and "Traceback" not in answer.value["message"]


def test_a_wrong_line_of_many_is_named_by_its_number(api):
    body = b'{"value":"YQ=="}\n\n{"value":1}\n'
    answer = api.call("POST", PRODUCE, body, Content_Type=NDJSON)
    assert answer.refusal == (422, "bad_field", "line[3].value")
    answer = api.call("POST", PRODUCE, body[:18] + b"oops\n", Content_Type=NDJSON)
    assert answer.refusal[:2] == (400, "bad_request") and answer.value["message"].startswith("line 3: not JSON")


def test_nobody_may_do_anything_without_a_token(tmp_path):
    token = tokens.new(f"{tmp_path}/tokens", "consumer")
    data = write_data(tmp_path / "data", KEYED, {"t": 1})
    with up(data, synced=500, KMQ_TOKENS=f"{tmp_path}/tokens") as broker:
        broker.serve()
        with closing(Api(broker.port)) as stranger, closing(Api(broker.port, token)) as known:
            for method, target in (("GET", TOPICS), ("GET", CONSUME), ("POST", PRODUCE), ("DELETE", f"{TOPICS}/t")):
                assert stranger.call(method, target).refusal == (401, "unauthorized", "")
            assert known.get(TOPICS).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "x"])
def test_a_body_that_is_encoded_is_refused(api, encoding):
    for body in (gzip.compress(b'{"value":""}'), b'{"value":""}'):
        answer = api.call("POST", PRODUCE, body, Content_Encoding=encoding)
        assert answer.refusal == (400, "bad_request", "") and "Content-Encoding" in answer.value["message"]
    assert api.call("POST", PRODUCE, b"{}", Content_Encoding="identity").refusal == (422, "bad_field", "value")


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_partition_is_read_from_an_offset_to_its_end(api):
    answer = api.get(f"{CONSUME}?offset=497&format=text")
    assert [(each["offset"], each["key"], each["value"]) for each in answer.value["messages"]] == [
        (497, "k", "v498"),
        (498, "k", "v499"),
        (499, "k", "v500"),
    ]
    assert answer.value["positions"] == [{"partition": 0, "offset": 500, "endOffset": 500}]
    assert answer.value["messages"][0]["timestamp"] == 1_700_000_000_498
    assert api.get(f"{CONSUME}?offset=500").value["messages"] == []


@pytest.mark.parametrize("most", ["maxMessages=7", "maxBytes=400", "maxMessages=10000", "maxBytes=1"])
def test_a_loop_over_next_offsets_reads_every_message_once(api, most):
    offset, seen = 0, []
    while True:
        answer = api.get(f"{CONSUME}?offset={offset}&{most}&format=text", Accept=NDJSON)
        seen += [message["value"] for message in answer.value]
        offset = int(answer.headers["KMQ-Next-Offset"])
        if not answer.value:
            break
        assert len(answer.value) <= 10_000 and offset == answer.value[-1]["offset"] + 1
    assert seen == [f"v{n}" for n in range(1, 501)] and offset == int(answer.headers["KMQ-End-Offset"]) == 500


@pytest.mark.parametrize(
    ("where", "offset"),
    [
        ("from=earliest", 0),
        ("", 0),
        ("from=latest", 500),
        ("timestamp=0", 0),
        ("timestamp=999999999999999", 500),
        ("timestamp=2100-01-01T00:00:00.5%2B01:00", 500),
        ("timestamp=1970-01-01T00:00:00Z", 0),
    ],
)
def test_reading_begins_where_it_is_asked_to(api, where, offset):
    answer = api.get(f"{CONSUME}?{where}&maxMessages=1")
    assert answer.value["positions"][0]["offset"] == min(offset + 1, 500)


def test_a_time_between_two_messages_leads_to_the_later_one(api, broker):
    line = (broker.settings.data + "/topics/t/0", sorted(os.listdir(broker.settings.data + "/topics/t/0")))
    with open(f"{line[0]}/{next(name for name in line[1] if name.endswith('.log'))}", "rb") as file:
        stamps = [float(stored.split(b"|")[1]) for stored in file.read().splitlines()]
    later = next(n for n, stamp in enumerate(stamps) if stamp > stamps[0])
    asked = int(stamps[later] * 1000)
    expected = next(n for n, stamp in enumerate(stamps) if stamp >= asked / 1000)
    assert api.get(f"{CONSUME}?timestamp={asked}&maxMessages=1").value["messages"][0]["offset"] == expected


def test_an_offset_beyond_the_end_is_not_judged_while_the_router_recovers(tmp_path):
    with up(write_data(tmp_path, KEYED, {"t": 1}), synced=500) as broker:
        broker.page.rows["router"].state = STATES.index("recovering")
        broker.serve()
        with closing(Api(broker.port)) as api:
            answer = api.get(f"{CONSUME}?offset=501")
            assert answer.refusal[:2] == (503, "not_ready") and answer.headers["Retry-After"] == "1"


def test_damage_is_an_error_and_never_a_message(tmp_path):
    data = write_data(tmp_path, KEYED, {"t": 1})
    path = next(path for path in (tmp_path / "topics/t/0").iterdir() if path.suffix == ".log")
    text = bytearray(path.read_bytes())
    text[5000] ^= 1
    path.write_bytes(text)
    with up(data, synced=500) as broker:
        broker.page.rows["router"].seq = 500
        broker.serve()
        with closing(Api(broker.port)) as api:
            offset, seen = 0, []
            while (answer := api.get(f"{CONSUME}?offset={offset}&format=text")).status == 200:
                seen += [message["value"] for message in answer.value["messages"]]
                offset = answer.value["positions"][0]["offset"]
            assert answer.refusal[:2] == (500, "damaged") and answer.value["path"] == str(path)
            assert seen == [f"v{n}" for n in range(1, len(seen) + 1)] and 0 < len(seen) < 500


def test_topics_are_listed_and_described(api):
    rows = {row["name"]: row["partitions"] for row in api.get(TOPICS).value}
    assert (rows["t"], rows["empty"]) == (1, 2)
    shown = api.get(f"{TOPICS}/t").value
    [partition] = shown["partitions"]
    assert (partition["startOffset"], partition["endOffset"], shown["retentionMs"]) == (0, 500, -1)
    assert partition["bytes"] > 10_000 and partition["segments"] >= 1


def test_a_gap_counts_as_no_message_for_who_asks_from_elsewhere(tmp_path):
    data = write_data(tmp_path / "data", KEYED[:10], {"t": 1})
    made, _ = forked(str(data))
    send(str(data), KEYED[10:13])
    with up(data, synced=made.next_seq + 3) as broker:
        broker.page.rows["router"].seq = made.next_seq + 3
        broker.serve()
        with closing(Api(broker.port)) as api:
            [partition] = api.get(f"{TOPICS}/t").value["partitions"]
            assert (partition["endOffset"], partition["gaps"]) == (made.offset + 3, [[10, made.offset]])
        url = f"http://127.0.0.1:{broker.port}"
        listed = CliRunner().invoke(app, ["--url", url, "topics", "list", "--json"])
        [row] = [row for row in json.loads(listed.stdout)["topics"] if row["topic"] == "t"]
        assert row["messages"] == 13
        shown = CliRunner().invoke(app, ["--url", url, "topics", "show", "t"])
        assert re.search(r"^ *0 +13 ", shown.stdout, re.M), shown.stdout


# --- waiting and limits ----------------------------------------------------------------------------------------------


def polling(broker, answers, target=f"{CONSUME}?offset=500&timeoutMs=60000&format=text"):
    def run():
        with closing(Api(broker.port)) as api:
            answers.append(api.get(target))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.fixture
def growing(tmp_path):
    data = write_data(tmp_path, KEYED, {"t": 1})
    with up(data, synced=500) as broker:
        broker.page.rows["router"].seq = 500
        broker.serve()
        yield broker


def append(broker, seq):
    """A record as the router writes it, and only then its watermark."""
    directory = f"{broker.settings.data}/topics/t/0"
    name = max(name for name in os.listdir(directory) if name.endswith(".log"))
    with open(f"{directory}/{name}", "ab") as file:
        file.write(b"%d|1800000000.000000|t.k|0|0|new\n" % seq)
    broker.page.rows["router"].seq = seq


def waiting(broker):
    return broker.fetching.waiting


def test_a_long_poll_is_answered_when_a_message_comes(growing):
    answers = []
    thread = polling(growing, answers)
    until(lambda: waiting(growing) == 1, "a call that waits")
    append(growing, 501)
    thread.join(PATIENCE_S)
    assert [each["value"] for each in answers[0].value["messages"]] == ["new"]


def test_a_long_poll_without_a_message_ends_when_its_time_is_over(api):
    begin = time.monotonic()
    answer = api.get(f"{CONSUME}?offset=500&timeoutMs=200")
    assert answer.value["messages"] == [] and 0.2 <= time.monotonic() - begin < PATIENCE_S


def test_a_long_poll_reads_nothing_while_nothing_comes(growing, monkeypatch):
    reads, read = [], partitions.Partition.read
    monkeypatch.setattr(partitions.Partition, "read", lambda *asked: reads.append(asked) or read(*asked))
    with closing(Api(growing.port)) as api:
        assert api.get(f"{CONSUME}?offset=500&timeoutMs=700").value["messages"] == []
    assert len(reads) <= 3


def test_a_gateway_that_stops_answers_long_polls_at_once(growing):
    answers = []
    thread = polling(growing, answers)
    until(lambda: waiting(growing) == 1, "a call that waits")
    growing.stop()
    thread.join(PATIENCE_S)
    assert answers[0].value["messages"] == []


def test_a_long_poll_whose_client_has_gone_gives_its_place_back(growing):
    with socket.create_connection(("127.0.0.1", growing.port)) as sock:
        sock.sendall(f"GET {CONSUME}?offset=500&timeoutMs=60000 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        until(lambda: waiting(growing) == 1, "a call that waits")
    until(lambda: waiting(growing) == 0, "the end of a call without a client")


def test_a_body_over_the_limit_is_refused_before_it_is_read(broker):
    with socket.create_connection(("127.0.0.1", broker.port)) as sock:
        sock.settimeout(PATIENCE_S)
        head = f"POST {PRODUCE} HTTP/1.1\r\nHost: x\r\nContent-Length: {request._MOST_BYTES + 1}\r\n\r\n"
        sock.sendall(head.encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_body_without_a_length_is_refused_when_it_gets_too_long(broker, monkeypatch):
    monkeypatch.setattr(broker.api.bodies, "most_bytes", 100_000)
    with socket.create_connection(("127.0.0.1", broker.port)) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendall(f"POST {PRODUCE} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        sock.sendall(b"186A1\r\n" + b"x" * 100_001 + b"\r\n")
        answer = sock.recv(4000)
        assert answer.startswith(b"HTTP/1.1 413 ") and b'"too_large"' in answer
    until(lambda: broker.api.bodies.held == 0, "the bytes of the body to be given back")


def test_a_body_that_is_not_whole_in_time_is_refused(broker):
    with socket.create_connection(("127.0.0.1", broker.port)) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendall(f"POST {PRODUCE} HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{{".encode())
        answer = sock.recv(4000)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"KMQ_LINE_DEADLINE" in answer


def test_bodies_together_are_bounded(broker, api, monkeypatch):
    monkeypatch.setattr(broker.api.bodies, "held", broker.api.bodies._all_bytes)
    answer = api.post(PRODUCE, {"value": ""})
    assert answer.refusal[:2] == (503, "busy") and answer.headers["Retry-After"] == "1"


def test_more_messages_than_the_limit_are_refused(api):
    many = schema.MOST_MESSAGES + 1
    assert api.post(PRODUCE, {"messages": [{"value": ""}] * many}).refusal == (422, "bad_field", "messages")
    assert api.lines(PRODUCE, [{"value": ""}] * many).refusal[:2] == (413, "too_large")
