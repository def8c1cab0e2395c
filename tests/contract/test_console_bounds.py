"""What hostile producers cannot make the console do: an answer has a limit, whatever the messages hold, and says so."""

import http.client
import json

import pytest
from api_client import Api
from brokers import PATIENCE_S, Broker

MIB = 1 << 20
MOST = 6 * MIB  # 4 MiB of an answer, and the message that is over it
WORST = b"%01" * 3300  # control characters: each is six bytes of JSON


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("bounds") / "broker")
    made.up(KMQ_CONSOLE="write")
    yield made
    made.close()


@pytest.fixture(scope="module")
def api(broker):
    made = Api(int((broker.pipes / "http.port").read_text()))
    yield made
    made.close()


def fill(api, broker, topic, lines):
    """Declare a topic and send these lines to it; returns when it has them."""
    assert api.post("/api/admin/topics", {"name": topic}).status == 201
    broker.send_lines([b"%b|0|%b" % (topic.encode(), line) for line in lines])

    def end():
        return api.get(f"/api/admin/topics/{topic}").value["partitions"][0]["endOffset"]

    broker.wait(lambda: end() >= len(lines), f"the lines of {topic}")


def letter(origin, reason, payload=b"x", more=b""):
    ours = b"origin_topic=%b;origin_partition=0;origin_offset=%d;group=g;attempts=1" % (origin.encode(), 1)
    return b"g.%b.0.1;%b;error=%b%b|%b" % (origin.encode(), ours, reason, more, payload)


def body(broker, path):
    """(length of the answer, its value)."""
    port = int((broker.pipes / "http.port").read_text())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", path)
    text = connection.getresponse().read()
    connection.close()
    return len(text), json.loads(text)


def test_headers_count_in_the_limit_of_an_answer(api, broker):
    headers = b";".join(b"h%d=%b" % (n, WORST) for n in range(100))
    fill(api, broker, "headers", [b";%b|x" % headers] * 20)
    size, found = body(broker, "/api/topics/headers/messages?limit=500")
    assert size < MOST and found["messages"] and all(message["truncated"] for message in found["messages"])
    assert found["messages"][-1]["offset"] == 19, "the newest, although all of them are more than is held"


def test_headers_that_are_left_out_make_a_message_truncated(api, broker):
    fill(api, broker, "many", [b";%b|x" % b";".join(b"h%d=1" % n for n in range(150)), b";one=1|x"])
    long, short = api.get("/api/topics/many/messages").value["messages"]
    assert (len(long["headers"]), long["truncated"]) == (100, True)
    assert (len(short["headers"]), short["truncated"]) == (1, False)


def test_the_newest_messages_are_shown_where_not_all_have_room(api, broker):
    fill(api, broker, "large", [b"|" + b"y" * (70 << 10)] * 80)
    offsets = [message["offset"] for message in api.get("/api/topics/large/messages?limit=500").value["messages"]]
    assert offsets == [*range(80 - len(offsets), 80)] and len(offsets) < 80
    found = api.get("/api/topics/large/messages?limit=500&from=earliest").value
    offsets = [message["offset"] for message in found["messages"]]
    assert offsets == [*range(len(offsets))] and found["next"] == [{"partition": 0, "offset": len(offsets)}]


def test_examples_of_letters_have_a_limit_together(api, broker):
    fill(api, broker, "big.dlq", [letter("big", b"reason%d" % n, b"y" * 900_000) for n in range(60)])
    size, found = body(broker, "/api/topics/big.dlq/letters")
    assert size < MOST and len(found["groups"]) == found["total"] == 60
    examples = [len(group["examples"]) for group in found["groups"]]
    assert 0 < sum(examples) < 60 and max(examples) == 1


def test_reasons_why_letters_stay_have_a_limit(api, broker):
    fill(api, broker, "back.dlq", [letter("back", b"e", more=b";replays=%d" % (1000 + n)) for n in range(300)])
    stayed = api.post("/api/topics/back.dlq/replay", {}).value["stayed"]
    assert sum(stayed.values()) == 300 and len(stayed) <= 101
