"""A group that retention or truncation has overtaken is told so: in its answers, the log, the metrics, and once."""

import logging
import socket
import struct
import threading
from contextlib import closing
from itertools import count

import pytest
from api_client import NDJSON, Api
from brokers import PATIENCE_S, Broker
from confluent_kafka import Consumer as KafkaConsumer
from grpc_client import Client
from line_client import LineClient

import kmq
from kmq.wire import replies
from kmq.wire.requests import TopicPartition

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

_numbers = count()
END = "end"
_LONGEST_MS = 60_000  # that a call of HTTP may wait


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("overtaken") / "b")
    made.env["KMQ_SEGMENT_BYTES"] = str(64 << 10)
    try:
        made.up()
        yield made
    finally:
        made.close()


@pytest.fixture
def api(broker):
    found = Api(port(broker, "http"))
    broker.wait(lambda: found.get("/api/groups").status == 200, "groups, whose offsets are loaded")
    yield found
    found.close()


@pytest.fixture
def topic(api):
    """A topic of 30 messages. Its group has its name, and has committed 5 of them."""
    name = f"orders{next(_numbers)}"
    assert api.post("/api/admin/topics", {"name": name}).status == 201
    fill(api, name, 30)
    commit(api, name, 5)
    return name


def port(broker, name):
    return int((broker.pipes / f"{name}.port").read_text())


def fill(api, topic, number, size=1):
    batch = [{"value": "x" * size} for _ in range(number)]
    assert api.post(f"/api/topics/{topic}/produce?format=text", {"messages": batch}).status == 200


def commit(api, topic, offset):
    body = {"group": topic, "offsets": [{"partition": 0, "offset": offset}]}
    assert api.post(f"/api/topics/{topic}/commit", body).status == 200


def consume(api, topic, **more):
    query = "".join(f"&{name}={value}" for name, value in more.items())
    return api.get(f"/api/topics/{topic}/consume?group={topic}&format=text{query}").value


def offsets(answer):
    return [message["offset"] for message in answer["messages"]]


def truncate(broker, topic, before):
    done = broker.kmq("topics", "truncate", topic, "--partition", "0", "--before", str(before), "--yes")
    assert done.returncode == 0, done.stderr


def described(api, topic):
    (row,) = api.get(f"/api/groups/{topic}").value["partitions"]
    return row


def assert_counted(broker, api, topic, number, *events):
    """Once: in the group, in the metrics, and in the log as these events, each (first, last)."""
    assert described(api, topic)["overtaken"] == number
    labels = f'group="{topic}",partition="0",topic="{topic}"'
    assert f"kmq_group_overtaken_total{{{labels}}} {number}.0" in broker.get("/metrics")[1].splitlines()
    shown = [
        line.partition("event=group_overtaken ")[2] for line in broker.log().splitlines() if f"group={topic} " in line
    ]
    expected = [f"group={topic} topic={topic} partition=0 first={a} last={b} count={b - a + 1}" for a, b in events]
    assert [line.partition(" effect=")[0] for line in shown if line] == expected


def test_a_member_by_http_is_told_what_was_deleted_before_it_had_read_it(broker, api, topic):
    assert offsets(consume(api, topic, maxMessages=3)) == [5, 6, 7]
    truncate(broker, topic, 20)
    answer = consume(api, topic, maxMessages=3)
    assert offsets(answer) == [20, 21, 22]
    assert answer["positions"] == [{"partition": 0, "offset": 23, "endOffset": 30, "overtaken": 12}]
    assert consume(api, topic, maxMessages=3)["positions"] == [{"partition": 0, "offset": 26, "endOffset": 30}]
    assert_counted(broker, api, topic, 12, (8, 19))
    text = broker.kmq("groups", "describe", topic).stdout
    assert f"{topic}/0: 12 messages were deleted before the group had read them, since the gateway's start\n" in text
    truncate(broker, topic, 28)
    assert consume(api, topic)["positions"][0]["overtaken"] == 2
    assert_counted(broker, api, topic, 14, (8, 19), (26, 27))


def test_a_call_that_waits_where_all_was_deleted_is_told_with_the_next_message(broker, api, topic):
    assert offsets(consume(api, topic, member="m", maxMessages=1)) == [5]
    truncate(broker, topic, END)
    found = []

    def wait():
        other = Api(port(broker, "http"))
        found.append(consume(other, topic, member="m", timeoutMs=_LONGEST_MS))
        other.close()

    waiting = threading.Thread(target=wait)
    waiting.start()
    broker.wait(lambda: described(api, topic)["overtaken"] == 24, "the count, while the call waits")
    fill(api, topic, 1)
    waiting.join()
    assert offsets(found[0]) == [30] and found[0]["positions"][0]["overtaken"] == 24
    assert_counted(broker, api, topic, 24, (6, 29))


def test_an_answer_without_messages_tells_too_and_ndjson_in_a_header(broker, api, topic):
    truncate(broker, topic, END)
    answer = consume(api, topic)
    assert (answer["messages"], answer["positions"][0]["overtaken"]) == ([], 25)
    assert "overtaken" not in consume(api, topic)["positions"][0]
    fill(api, topic, 2)
    truncate(broker, topic, END)
    shown = api.get(f"/api/topics/{topic}/consume?group={topic}", Accept=NDJSON)
    assert (shown.value, shown.headers["KMQ-Overtaken"]) == ([], "2")


def test_a_member_that_begins_where_records_are_gone_is_told_and_nothing_counts_twice(broker, api, topic):
    truncate(broker, topic, 20)
    for member in ("one", "two"):  # the first one has committed nothing when it leaves
        answer = consume(api, topic, member=member)
        assert (offsets(answer)[0], answer["positions"][0]["overtaken"]) == (20, 15)
        assert api.call("DELETE", f"/api/groups/{topic}/members/{member}").status == 204
    assert_counted(broker, api, topic, 15, (5, 19))
    commit(api, topic, 30)
    assert "overtaken" not in consume(api, topic, member="three")["positions"][0]


def test_retention_counts_as_truncation_does(broker, api):
    topic = f"orders{next(_numbers)}"
    assert api.post("/api/admin/topics", {"name": topic, "retentionBytes": 1 << 20}).status == 201
    fill(api, topic, 10, 1000)
    assert offsets(consume(api, topic, maxMessages=3)) == [0, 1, 2]
    path = f"/api/admin/topics/{topic}"

    def is_deleted():
        fill(api, topic, 200, 1000)
        return api.get(path).value["partitions"][0]["startOffset"] > 3

    broker.wait(is_deleted, "retention")
    answer = consume(api, topic, maxMessages=1)
    (first,) = offsets(answer)
    assert first > 3 and answer["positions"][0]["overtaken"] == first - 3
    assert_counted(broker, api, topic, first - 3, (3, first - 1))


def test_a_group_that_begins_is_not_overtaken_by_what_was_deleted_before(broker, api, topic):
    truncate(broker, topic, 20)
    answer = api.get(f"/api/topics/{topic}/consume?group=new{topic}").value
    assert offsets(answer)[0] == 20 and "overtaken" not in answer["positions"][0]
    assert api.get(f"/api/groups/new{topic}").value["partitions"][0]["overtaken"] == 0


@pytest.mark.parametrize("opening", ["GROUP {} member=a topics={}", "ASSIGN {} {}/0"])
def test_a_client_by_lines_is_told_if_it_says_that_it_listens(broker, api, topic, opening):
    with LineClient(port(broker, "egress")) as client:
        client.send(opening.format(topic, topic) + " overtaken=said", "!fetch 1")
        assert isinstance(client.reply(), replies.Assigned)
        assert client.batch()[:2] == (TopicPartition(topic, 0), 5)
        truncate(broker, topic, 20)
        client.send("!fetch 1", "!fetch 1")
        reply = client.reply()
        assert (reply.offset, reply.overtaken) == (20, 14)
        client.read(reply.nbytes)
        reply = client.reply()
        assert (reply.offset, reply.overtaken) == (21, 0)
        client.read(reply.nbytes)
        truncate(broker, topic, END)
        client.send("!fetch 1")
        assert client.line() == b"!batch -"
        assert_counted(broker, api, topic, 22, (6, 19), (22, 29))
        client.send("!leave")
    with LineClient(port(broker, "egress")) as client:
        client.send(opening.format(topic, topic) + " overtaken=said", "!fetch 1 wait=60000")
        assert client.line().endswith(b"@30")
        fill(api, topic, 1)
        assert client.line().endswith(b" overtaken=25"), "it begins where the group has committed"
    assert_counted(broker, api, topic, 22, (6, 19), (22, 29))


def test_an_older_client_by_lines_gets_the_batches_that_it_knows(broker, api, topic):
    truncate(broker, topic, 20)
    with LineClient(port(broker, "egress")) as client:
        client.send(f"GROUP {topic} member=a topics={topic}", "!fetch 1", "!leave")
        client.line()
        header = client.line()
        assert header.startswith(b"!batch %b/0 20 1 " % topic.encode()) and b"overtaken" not in header
    assert_counted(broker, api, topic, 15, (5, 19))


def test_a_member_by_grpc_is_told(broker, api, topic):
    with Client(port(broker, "grpc")) as client:
        member = client.member(topic, topic)
        member.next("assigned")
        assert member.ask("fetch", "batch", max_records=1).overtaken == 0
        truncate(broker, topic, 20)
        batch = member.ask("fetch", "batch", max_records=1)
        assert (batch.records[0].offset, batch.overtaken) == (20, 14)
        assert member.ask("fetch", "batch", max_records=1).overtaken == 0
        truncate(broker, topic, END)
        assert member.ask("fetch", "batch", max_records=1).topic == ""
        assert_counted(broker, api, topic, 22, (6, 19), (22, 29))
        fill(api, topic, 1)
        assert member.ask("fetch", "batch", max_records=1, wait_ms=60_000).overtaken == 8


def test_a_consumer_in_python_counts_and_warns(broker, api, topic, caplog):
    truncate(broker, topic, 20)
    with (
        caplog.at_level(logging.WARNING, "kmq"),
        kmq.Consumer(topic, group_id=topic, port=port(broker, "egress")) as consumer,
    ):
        first = next(iter(consumer))
        assert (first.offset, consumer.overtaken()) == (20, {TopicPartition(topic, 0): 15})
    assert f"{topic}/0: 15 messages were deleted before group {topic} had read them" in caplog.text


def test_a_group_without_members_is_overtaken_at_once_so_kafkas_groups_are_counted_too(broker, api, topic):
    truncate(broker, topic, 10)
    broker.wait(lambda: described(api, topic)["overtaken"] == 5, "the look at the groups")
    truncate(broker, topic, 20)
    broker.wait(lambda: described(api, topic)["overtaken"] == 15, "the next look")
    assert_counted(broker, api, topic, 15, (5, 9))  # what was said of this commit already is not said again
    address = {"bootstrap.servers": f"localhost:{port(broker, 'kafka')}", "log_level": 0}
    consumer = KafkaConsumer(address | {"group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    assert consumer.poll(PATIENCE_S).offset() == 20
    consumer.close()
    assert_counted(broker, api, topic, 15, (5, 9))


def test_a_message_that_was_given_back_and_is_deleted_counts(broker, api, topic):
    assert offsets(consume(api, topic, maxMessages=3)) == [5, 6, 7]
    body = {"group": topic, "partition": 0, "offset": 6}
    assert api.post(f"/api/topics/{topic}/nack", body).status == 200
    truncate(broker, topic, 8)
    assert offsets(consume(api, topic, maxMessages=1)) == [8]
    broker.wait(lambda: described(api, topic)["nacked"] == 0, "the end of what was given back")
    assert described(api, topic)["overtaken"] == 1


def test_an_answer_that_broke_off_is_told_again_and_counted_once(broker, api):
    topic = f"orders{next(_numbers)}"
    assert api.post("/api/admin/topics", {"name": topic}).status == 201
    fill(api, topic, 900, 1000)
    commit(api, topic, 5)
    truncate(broker, topic, 20)
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port(broker, "http")))
        request = f"GET /api/topics/{topic}/consume?group={topic}&format=text&maxMessages=900 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        client.sendall(request.encode())
        assert client.recv(1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    told = []

    def is_again():
        answer = consume(api, topic, maxMessages=1)
        told.append((offsets(answer), answer["positions"][0].get("overtaken")))
        return told[-1][1]

    broker.wait(is_again, "the answer again")
    assert told[-1] == ([20], 15)
    assert_counted(broker, api, topic, 15, (5, 19))


def test_what_compaction_removes_overtakes_nobody(broker, api):
    topic = f"table{next(_numbers)}"
    assert api.post("/api/admin/topics", {"name": topic, "cleanupPolicy": "compact"}).status == 201
    for n in range(30):
        body = {"messages": [{"key": "k", "value": f"v{n}"}, {"key": "b", "value": "x" * 3000}]}
        assert api.post(f"/api/topics/{topic}/produce?format=text", body).status == 200
    commit(api, topic, 1)
    broker.wait(lambda: b"|v10" not in b"".join(broker.lines(topic)), "the compactor")
    answer = consume(api, topic, maxMessages=1)
    assert offsets(answer)[0] > 2 and "overtaken" not in answer["positions"][0]
    assert described(api, topic)["overtaken"] == 0
