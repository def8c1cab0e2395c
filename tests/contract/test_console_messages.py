"""Messages, dead letters and resets of the console against a broker: what is shown is what is stored."""

import base64
import http.client
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from api_client import Api
from brokers import PATIENCE_S, Broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("console") / "broker")
    made.up(KMQ_CONSOLE="write")
    yield made
    made.close()


@pytest.fixture(scope="module")
def api(broker):
    made = Api(int((broker.pipes / "http.port").read_text()))
    yield made
    made.close()


def produce(api, topic, *messages, text=True):
    results = api.post(
        f"/api/topics/{topic}/produce?format={'text' if text else 'base64'}", {"messages": [*messages]}
    ).value
    return results["results"]


@pytest.fixture(scope="module")
def orders(api):
    """A topic of 3 partitions with 300 messages of 30 keys."""
    api.post("/api/admin/topics", {"name": "orders", "partitions": 3})
    produce(api, "orders", *({"key": f"k{n % 30}", "value": f"v{n}"} for n in range(300)))
    return "orders"


def shown(api, topic, query=""):
    return api.get(f"/api/topics/{topic}/messages{query}").value


def test_the_last_messages_come_in_the_order_of_their_seqs(api, orders):
    found = shown(api, orders, "?limit=20")
    assert [message["value"] for message in found["messages"]] == [f"v{n}" for n in range(280, 300)]
    seqs = [message["seq"] for message in found["messages"]]
    assert seqs == sorted(seqs) and found["error"] is None


def test_pages_by_offset_show_each_message_once(api, orders):
    values, offset = [], 0
    while True:
        found = shown(api, orders, f"?partition=0&offset={offset}&limit=17")
        values += [message["value"] for message in found["messages"]]
        if not found["messages"]:
            break
        [row] = found["next"]
        assert row["partition"] == 0 and row["offset"] > offset
        offset = row["offset"]
    expected = [m["value"] for m in shown(api, orders, "?partition=0&from=earliest&limit=500")["messages"]]
    assert values == expected and len(set(values)) == len(values)


def test_a_message_is_found_by_seq_key_and_time(api, orders):
    one = shown(api, orders, "?limit=7")["messages"][0]
    assert shown(api, orders, f"?seq={one['seq']}&limit=1")["messages"] == [one]
    of_key = shown(api, orders, "?key=k7&limit=500")["messages"]
    assert [message["value"] for message in of_key] == [f"v{n}" for n in range(7, 300, 30)]
    assert len(shown(api, orders, "?timestamp=2020-01-01T00:00:00Z&limit=500")["messages"]) == 300
    assert api.get("/api/topics/orders/messages?seq=99999999").refusal == (404, "not_found", "")
    assert api.get("/api/topics/orders/messages?offset=0").refusal == (422, "bad_field", "partition")
    assert api.get("/api/topics/none/messages").refusal[1] == "unknown_topic"


HOSTILE = ["<script>alert(1)</script>", "a|b;c\u202e\u0000\u001b[31m", "", "\n\r\t", "é" * 50_000, "x" * (600 << 10)]


def test_hostile_and_long_values_are_text_or_cut_and_say_so(api):
    produce(api, "hostile", *({"value": value, "key": value[:100]} for value in HOSTILE))
    found = shown(api, "hostile", "?from=earliest")["messages"]
    assert [message["value"] for message in found[:4]] == HOSTILE[:4]
    assert [message["truncated"] for message in found] == [False] * 4 + [True] * 2
    assert found[4]["value"] == "é" * 32768 and found[5]["value"] == "x" * 65536
    assert all(len(message["raw"]) <= 65536 for message in found) and found[5]["bytes"] > 600 << 10


def test_bytes_that_are_no_text_come_as_base64_beside_the_raw_line(api):
    value = base64.b64encode(bytes(range(256))).decode()
    produce(api, "bytes", {"value": value, "headers": [{"name": "h", "value": "AAE="}]}, text=False)
    [message] = shown(api, "bytes")["messages"]
    assert (message["encoding"], message["value"], message["truncated"]) == ("base64", value, False)
    assert "enc=b64" in message["raw"] and message["raw"].count("|") >= 5
    assert message["headers"] == [{"name": "h", "value": "\u0000\u0001"}]


def test_a_damaged_block_is_an_error_beside_the_messages(api, broker):
    for _ in range(8):  # blocks of about 64 KiB
        produce(api, "damaged", *({"value": "y" * 1000} for _ in range(50)))
    [log] = (broker.data / "topics" / "damaged" / "0").glob("*.log")
    index = log.with_suffix(".idx")
    broker.wait(lambda: len(index.read_bytes().splitlines()) > 3, "the index of the first blocks")
    content = bytearray(log.read_bytes())
    content[10_000] ^= 0xFF
    log.write_bytes(bytes(content))
    found = shown(api, "damaged", "?from=earliest&limit=500")
    assert found["error"]["code"] == "damaged"
    assert found["next"][0]["offset"] == max(found["error"]["next_offset"], 1)
    rest = shown(api, "damaged", f"?offset={found['next'][0]['offset']}&limit=500")
    assert rest["messages"] and rest["error"] is None


# --- following -------------------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, broker, topic):
        port = int((broker.pipes / "http.port").read_text())
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self.connection.request("GET", f"/api/topics/{topic}/follow")
        self.response = self.connection.getresponse()

    def line(self):
        return json.loads(self.response.readline())

    def close(self):
        self.connection.close()


def test_a_follower_gets_a_bounded_sample_and_its_share(api, broker):
    produce(api, "busy", {"value": "before"})
    stream = Stream(broker, "busy")
    assert stream.line()["messages"] == []
    lines = [b"busy|0||%d" % n for n in range(20_000)]
    sender = threading.Thread(target=broker.send_lines, args=(lines,))
    sender.start()
    seen = shown_count = 0
    while seen < 20_000:
        line = stream.line()
        assert len(line["messages"]) == line["shown"] <= 50 and line["error"] is None
        assert line["share"] == pytest.approx(line["shown"] / line["seen"] if line["seen"] else 1, abs=1e-5)
        assert "before" not in [message["value"] for message in line["messages"]]
        seen, shown_count = seen + line["seen"], shown_count + line["shown"]
    sender.join()
    assert seen == 20_000 and 0 < shown_count < 20_000
    stream.close()


def test_followers_are_bounded_and_leave_when_their_clients_go(api, broker):
    produce(api, "followed", {"value": "x"})
    streams = [Stream(broker, "followed") for _ in range(16)]
    assert api.get("/api/topics/followed/follow").refusal == (429, "too_many", "")
    for stream in streams:
        stream.close()

    def has_room():
        stream = Stream(broker, "followed")
        found = stream.response.status
        stream.close()
        return found == 200

    broker.wait(has_room, "room for a follower")


# --- dead letters, resets --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dead(api):
    """A topic whose messages are dead letters: 6 of `boom`, 2 of `late`."""
    api.post("/api/admin/topics", {"name": "jobs", "maxDeliveries": 1})
    produce(api, "jobs", *({"value": f"job{n}"} for n in range(8)))
    api.get("/api/topics/jobs/consume?group=workers")
    for n in range(8):
        body = {"group": "workers", "partition": 0, "offset": n, "reason": "late" if n % 4 == 3 else "boom"}
        assert api.post("/api/topics/jobs/nack", body).value["deadLetter"] == "jobs.dlq"
    return "jobs"


def test_letters_are_grouped_by_reason(api, broker, dead, orders):
    broker.wait(lambda: api.get("/api/topics/jobs/letters").value["total"] == 8, "the letters")
    found = api.get("/api/topics/jobs/letters").value
    assert [(row["reason"], row["count"], len(row["examples"])) for row in found["groups"]] == [
        ("boom", 6, 5),
        ("late", 2, 2),
    ]
    assert found["topic"] == "jobs.dlq" and not found["more"]
    assert all(row["first_at"] <= row["last_at"] for row in found["groups"])
    assert api.get("/api/topics/orders/letters").value["groups"] == []
    [one] = {row["examples"][-1]["seq"] for row in found["groups"] if row["reason"] == "late"}
    tried = api.post("/api/topics/jobs/replay", {"filter": f"seq={one}"}).value
    assert (tried["would_replay"], tried["complete"]) == (1, True)


def test_lines_that_were_no_messages_are_letters_by_reason_everywhere(api, broker):
    broker.send_lines([b"no separator"] * 3 + [b"|0||no key"] * 2)
    broker.wait(lambda: len(broker.lines("dead")) == 5, "the dead letters")
    found = api.get("/api/topics/dead/letters").value
    assert [(row["reason"], row["count"]) for row in found["groups"]] == [("no_separator", 3), ("empty_routing_key", 2)]
    assert found["total"] == 5 and [row["value"] for row in found["groups"][0]["examples"]] == ["no separator"] * 3
    listed = broker.kmq("dlq", "ls")
    assert re.search(r"^dead +5$", listed.stdout, re.M), listed.stdout
    rows = broker.kmq("dlq", "ls", "dead").stdout.splitlines()
    assert len(rows) == 6 and sum("no_separator" in row for row in rows) == 3
    shown = broker.kmq("dlq", "show", "dead", "0").stdout
    assert "no_separator" in shown and shown.endswith("no separator\n")
    tried = broker.kmq("dlq", "replay", "dead", "--dry-run").stdout
    assert "would replay 0 of dead; 5 " in tried and "kmq redrive dead --to" in tried


def test_a_replay_sends_nothing_until_it_is_told_to_and_nothing_twice(api, broker, dead):
    broker.wait(lambda: api.get("/api/topics/jobs/letters").value["total"] == 8, "the letters")
    ends = [row["endOffset"] for row in api.get("/api/admin/topics/jobs").value["partitions"]]
    tried = api.post("/api/topics/jobs/replay", {"filter": "error=late"}).value
    assert (tried["dryRun"], tried["would_replay"], tried["complete"]) == (True, 2, True)
    assert [row["endOffset"] for row in api.get("/api/admin/topics/jobs").value["partitions"]] == ends
    sent = api.post("/api/topics/jobs/replay", {"filter": ["error=late"], "dryRun": False, "rate": 1000}).value
    assert (sent["replayed"], sent["repeated"]) == (2, 0)
    again = api.post("/api/topics/jobs/replay", {"filter": ["error=late"], "dryRun": False}).value
    assert (again["replayed"], again["repeated"], again["complete"]) == (0, 2, True)
    tried = api.post("/api/topics/jobs/replay", {"filter": "error=late"}).value
    assert (tried["would_replay"], tried["repeated"], tried["complete"]) == (0, 2, True)
    broker.wait(
        lambda: [message["value"] for message in shown(api, "jobs", "?limit=2")["messages"]] == ["job3", "job7"],
        "the letters in their topic",
    )
    assert api.post("/api/topics/jobs/replay", {"filter": "boom"}).refusal == (422, "bad_field", "filter")


class Letters:
    """Seven letters of two partitions, which are named by number. The last has a header with the seq of the first."""

    def __init__(self, api, broker, topic):
        self.api, self.broker, self.topic = api, broker, topic
        for name, partitions in ((topic, 1), (f"{topic}.dlq", 2)):
            assert api.post("/api/admin/topics", {"name": name, "partitions": partitions}).status == 201
        self.seqs = []
        for n in range(7):
            own = f"origin_topic={topic};origin_partition=0;origin_offset={n};group=g;error=no;attempts=1"
            more = f"seq={self.seqs[0]};" if n == 6 else ""
            broker.send_lines([f"{topic}.dlq.@{n % 2}|0|g.{n};{more}{own}|{n}".encode()])
            broker.wait(lambda n=n: len(shown(api, f"{topic}.dlq")["messages"]) == n + 1, "the letter")
            self.seqs.append(shown(api, f"{topic}.dlq", "?limit=1")["messages"][0]["seq"])

    def replay(self, *numbers, api=None, **body):
        body["filter"] = f"seq={','.join(str(self.seqs[number]) for number in numbers)}"
        return (api or self.api).post(f"/api/topics/{self.topic}/replay", body)

    def came_back(self):
        """Return the numbers of those that are back where they came from, once no further one is on its way."""
        self.broker.send_lines([b"%b.@|0||end" % self.topic.encode()])
        payloads = lambda: [line.rpartition(b"|")[2] for line in self.broker.lines(self.topic)]  # noqa: E731
        self.broker.wait(lambda: b"end" in payloads(), "the last line")
        return sorted(map(int, payloads()[:-1]))


def outcome(answer):
    found = answer.value
    return found["would_replay" if found["dryRun"] else "replayed"], found["repeated"], found["complete"]


def test_letters_that_are_named_go_back_once_and_the_answer_says_which_went_before(api, broker):
    letters = Letters(api, broker, "named")
    assert outcome(letters.replay(4, 0, 3, 1)) == (4, 0, True)
    assert outcome(letters.replay(3, dryRun=False)) == (1, 0, True)  # by another operator, after the dry run
    assert outcome(letters.replay(4, 0, 3, 1, dryRun=False)) == (3, 1, True)
    assert outcome(letters.replay(4, 0, 3, 1)) == outcome(letters.replay(4, 0, 3, 1, dryRun=False)) == (0, 4, True)
    assert letters.came_back() == [0, 1, 3, 4]
    assert letters.replay(*[0] * 101).refusal == (422, "bad_field", "filter")


def test_two_operators_who_confirm_the_same_letters_at_once_send_each_once(api, broker):
    letters = Letters(api, broker, "confirmed")

    def confirm():
        mine, answers = Api(int((broker.pipes / "http.port").read_text())), []

        def is_done():  # another replay that is going on is refused, and says so
            answers.append(letters.replay(0, 2, 5, api=mine, dryRun=False))
            return answers[-1].status != 429

        try:
            broker.wait(is_done, "the turn of this operator")
        finally:
            mine.close()
        return outcome(answers[-1])

    with ThreadPoolExecutor(2) as operators:
        done = [each.result() for each in [operators.submit(confirm) for _ in range(2)]]
    assert sorted(done) == [(0, 3, True), (3, 0, True)]
    assert letters.came_back() == [0, 2, 5]


def test_a_replay_at_its_limit_says_so_and_the_same_one_goes_on(api, broker):
    own = "origin_topic=limited;origin_partition=0;origin_offset={0};group=g;error={1};attempts=1"
    for topic in ("limited", "limited.dlq"):
        assert api.post("/api/admin/topics", {"name": topic}).status == 201
    errors = ("even", "odd")
    lines = [f"limited.dlq.@|0|g.{n};{own.format(n, errors[n % 2])}|{n}".encode() for n in range(2300)]
    broker.send_lines(lines)
    broker.wait(lambda: api.get("/api/topics/limited/letters").value["total"] == 2300, "the letters")

    def replay(**body):
        found = api.post("/api/topics/limited/replay", body).value
        return found["would_replay" if found["dryRun"] else "replayed"], found["repeated"], found["complete"]

    assert replay(dryRun=False, filter="error=odd", max=100) == (100, 0, False)
    assert replay(filter="error=odd") == (1000, 100, False)
    assert replay() == replay(dryRun=False) == (1000, 100, False)
    assert replay(dryRun=False) == (1000, 1100, False)
    assert replay() == replay(dryRun=False) == (200, 2100, True)
    assert replay() == replay(dryRun=False) == (0, 2300, True)
    broker.wait(lambda: len(broker.lines("limited")) >= 2300, "the letters where they came from")
    payloads = [line.rpartition(b"|")[2] for line in broker.lines("limited")]
    assert sorted(map(int, payloads)) == list(range(2300))


def test_a_reset_moves_nothing_until_it_is_told_to(api, orders):
    offsets = [{"partition": number, "offset": 5} for number in range(3)]
    api.post("/api/topics/orders/commit", {"group": "books", "offsets": offsets})
    body = {"topic": "orders", "to": "earliest"}
    tried = api.post("/api/groups/books/reset", body).value
    assert tried["dryRun"] and [(row["from"], row["to"]) for row in tried["partitions"]] == [(5, 0)] * 3

    def committed():
        return [row["committed"] for row in api.get("/api/groups/books").value["partitions"]]

    assert committed() == [5, 5, 5]
    done = api.post("/api/groups/books/reset", body | {"dryRun": False}).value
    assert not done["dryRun"] and committed() == [0, 0, 0]
    assert api.post("/api/groups/none/reset", body).refusal == (404, "unknown_group", "")
    api.post("/api/groups/books/members", {"topics": ["orders"]})
    assert api.post("/api/groups/books/reset", body).refusal == (409, "group_not_empty", "")
