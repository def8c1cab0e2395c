"""kmq.v1.Kmq as its .proto promises it, on a real broker, beside the other doors."""

import threading
from contextlib import closing, suppress
from itertools import chain, count

import grpc
import pytest
from api_client import Api
from brokers import Broker
from grpc_client import MESSAGES, Client, status_of, values
from line_client import LineClient
from waiting import until

from kmq.wire.replies import Batch

_names = count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("kmq") / "b")
    try:
        made.up()
        yield made
    finally:
        made.close()


def port(broker, name):
    return int((broker.pipes / f"{name}.port").read_text())


@pytest.fixture
def api(broker):
    with closing(Api(port(broker, "http"))) as found:
        broker.wait(lambda: found.get("/api/groups").status == 200, "groups, whose offsets are loaded")
        yield found


@pytest.fixture
def client(broker, api):
    with Client(port(broker, "grpc")) as made:
        yield made


@pytest.fixture
def topic(api):
    name = f"orders{next(_names)}"
    api.post("/api/admin/topics", {"name": name, "partitions": 2})
    return name


@pytest.fixture
def group():
    return f"group{next(_names)}"


def refusal(call, *arguments, **fields):
    """(status, code) of a call that is refused, and the trailing metadata."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **fields)
    name, details, trailers = status_of(caught.value)
    assert details.startswith(trailers["kmq-code"] + ": ")
    return (name, trailers["kmq-code"]), trailers


def in_partition(number, *contents):
    return [{"value": content, "partition": number} for content in contents]


# --- produce and fetch -----------------------------------------------------------------------------------------------

BYTES = {
    "null": None,
    "empty": b"",
    "text": b"plain text",
    "separators": b"a|b;c=d%41",
    "every byte": bytes(range(256)),
    "dots": b".@3.eu",
}


def test_every_byte_and_every_null_comes_back_as_it_was_given(client, topic):
    headers = [
        {"name": "n", "value": b"1"},
        {"name": "n"},
        {"name": "n", "value": b""},
        {"name": "enc", "value": b"b64"},
    ]
    headers += [{"name": "ünï;=%", "value": bytes(range(256))}, {"name": "p", "value": b"mine"}]
    sent = [
        {"key": key, "value": value, "headers": headers * (n % 2), "partition": 0, "timestamp": 1_700_000_000_123 + n}
        for n, (key, value) in enumerate((key, value) for key in BYTES.values() for value in BYTES.values())
    ]
    results = client.produce(topic, *sent)
    assert [result.stored for result in results] == [
        MESSAGES["Stored"](topic=topic, partition=0, offset=n, timestamp=message["timestamp"])
        for n, message in enumerate(sent)
    ]
    answer = client.fetch(topic)
    assert (answer.next_offset, answer.end_offset) == (len(sent), len(sent))
    for n, (message, record) in enumerate(zip(sent, answer.records, strict=True)):
        wanted = {name: message[name] for name in ("key", "value", "headers", "timestamp")}
        assert record == MESSAGES["Record"](offset=n, **wanted)


def test_a_key_decides_on_the_partition_and_the_result_says_which(client, topic):
    results = client.produce(topic, *({"key": b"k%d" % n, "value": b"%d" % n} for n in range(20)))
    places = [(result.stored.partition, result.stored.offset) for result in results]
    assert {partition for partition, _ in places} == {0, 1} and len(set(places)) == 20
    for number in (0, 1):
        wanted = [b"%d" % n for n, place in enumerate(places) if place[0] == number]
        assert values(client.fetch(topic, number)) == wanted


def test_one_bad_message_of_a_batch_is_an_error_in_its_place(client, topic):
    results = client.produce(topic, *in_partition(0, b"a"), *in_partition(9, b"b"), *in_partition(1, b"c"))
    assert [result.WhichOneof("outcome") for result in results] == ["stored", "error", "stored"]
    assert results[1].error.code == "unknown_partition"
    assert (values(client.fetch(topic, 0)), values(client.fetch(topic, 1))) == ([b"a"], [b"c"])


def test_an_id_and_a_producer_with_ids_are_stored_once_also_over_http(client, api, topic):
    for producer, ids in (("", ["invoice 4711", "invoice 4712"]), (f"p{topic}", ["1", "2"])):
        batch = [{"value": b"paid", "id": id, "partition": 0} for id in ids]
        first = [result.stored for result in client.produce(topic, *batch, producer=producer)]
        again = [result.stored for result in client.produce(topic, *batch, producer=producer)]
        assert [each.offset for each in again] == [each.offset for each in first]
        assert all(each.duplicate for each in again) and not any(each.duplicate for each in first)
    sent = {"value": "paid", "id": "invoice 4711", "partition": 0}
    assert api.post(f"/api/topics/{topic}/produce?format=text", sent).value["duplicate"] is True
    assert client.fetch(topic).end_offset == 4


def test_acks_none_returns_without_results_and_the_messages_come(client, topic):
    none = MESSAGES["ProduceRequest"].NONE
    assert client.produce(topic, *in_partition(1, b"a", b"b"), acks=none) == []
    until(lambda: values(client.fetch(topic, 1)) == [b"a", b"b"], "the messages")


def test_a_fetch_begins_where_it_is_asked_to_and_ends_at_its_limits(client, topic):
    client.produce(topic, *in_partition(0, b"a", b"b", b"c" * 1000))
    latest, earliest = MESSAGES["Position"].LATEST, MESSAGES["Position"].EARLIEST
    assert values(client.fetch(topic, at={"offset": 1}, max_records=1)) == [b"b"]
    assert values(client.fetch(topic, at={"offset": 2}, max_bytes=1)) == [b"c" * 1000]  # longer, so it comes alone
    assert values(client.fetch(topic, at={"place": earliest}, max_bytes=100)) == [b"a"]
    assert values(client.fetch(topic, at={"timestamp": 0})) == [b"a", b"b", b"c" * 1000]
    late = client.fetch(topic, at={"place": latest})
    assert (values(late), late.next_offset, late.end_offset) == ([], 3, 3)
    assert client.fetch(topic, at={"timestamp": 999_999_999_999_999}).next_offset == 3
    with pytest.raises(grpc.RpcError, match=r"bad_field: from.place: must be one of EARLIEST, LATEST"):
        client.fetch(topic, at={"place": 9})


def test_a_fetch_that_waits_is_woken_by_a_message(client, topic):
    answers = []
    end = {"offset": 0}  # LATEST would be behind the message, if that came first
    thread = threading.Thread(target=lambda: answers.append(client.fetch(topic, at=end, wait_ms=60_000)))
    thread.start()
    client.produce(topic, *in_partition(0, b"late"))
    thread.join(60)
    assert [values(answer) for answer in answers] == [[b"late"]]


def message(**fields):
    return {"topic": "t", "messages": [{"value": b"x", **fields}]}


REFUSED = [
    ("Produce", {"topic": "t"}, "INVALID_ARGUMENT", "bad_field", "messages"),
    ("Produce", message(headers=[{"name": ""}]), "INVALID_ARGUMENT", "bad_field", "messages[0].headers[0].name"),
    ("Produce", message(headers=[{"name": "a"}] * 1001), "INVALID_ARGUMENT", "bad_field", "messages[0].headers"),
    ("Produce", message(timestamp=10**15), "INVALID_ARGUMENT", "bad_field", "messages[0].timestamp"),
    ("Produce", message(id="x" * 257), "INVALID_ARGUMENT", "bad_field", "messages[0].id"),
    ("Produce", {**message(), "producer": "p"}, "INVALID_ARGUMENT", "bad_field", "messages[0].id"),
    ("Produce", {**message(), "producer": "a b"}, "INVALID_ARGUMENT", "bad_field", "producer"),
    ("Produce", {**message(), "acks": 9}, "INVALID_ARGUMENT", "bad_field", "acks"),
    ("Produce", {**message(), "topic": "../x"}, "INVALID_ARGUMENT", "bad_topic", None),
    ("Produce", b"\xff\xff", "INVALID_ARGUMENT", "bad_request", None),
    ("Fetch", b"\x0a\xff", "INVALID_ARGUMENT", "bad_request", None),
    ("Fetch", {"topic": "nowhere"}, "NOT_FOUND", "unknown_topic", None),
    ("Fetch", {"topic": "../x"}, "NOT_FOUND", "unknown_topic", None),
    ("Fetch", {"topic": "t", "wait_ms": 60_001}, "INVALID_ARGUMENT", "bad_field", "wait_ms"),
    ("Fetch", {"topic": "t", "from": {"offset": 1 << 63}}, "INVALID_ARGUMENT", "bad_field", "from.offset"),
    ("Fetch", {"topic": "t", "from": {"timestamp": 1 << 63}}, "INVALID_ARGUMENT", "bad_field", "from.timestamp"),
]


@pytest.mark.parametrize(("method", "request_", "status", "code", "field"), REFUSED)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(client, method, request_, status, code, field):
    raw, fields = (request_, {}) if isinstance(request_, bytes) else (None, request_)
    shown, trailers = refusal(client.call, method, raw, **fields)
    assert (shown, trailers.get("kmq-field")) == ((status, code), field)


def test_an_offset_that_is_not_there_is_refused_with_the_offsets_that_are(client, topic):
    client.produce(topic, *in_partition(0, b"a", b"b"))
    shown, trailers = refusal(client.fetch, topic, at={"offset": 3})
    assert shown == ("OUT_OF_RANGE", "out_of_range")
    assert (trailers["kmq-first"], trailers["kmq-end"]) == ("0", "2")
    assert refusal(client.fetch, topic, 2)[0] == ("NOT_FOUND", "unknown_partition")


# --- groups ----------------------------------------------------------------------------------------------------------


def test_a_member_gets_what_it_asks_for_and_nothing_else(client, topic, group):
    client.produce(topic, *in_partition(0, b"a", b"b", b"c"), *in_partition(1, b"x"))
    with client.member(group, topic) as member:
        member.next("assigned")
        assert member.assigned == {(topic, 0): 0, (topic, 1): 0}
        seen = {}
        for number in range(4):
            member.send("fetch", number + 1, max_records=2)
            batch = member.next("batch", number + 1)
            seen.setdefault(batch.partition, []).extend(values(batch))
        assert seen == {
            0: [b"a", b"b", b"c"],
            1: [b"x"],
        }
        assert member.ask("fetch", "batch") == MESSAGES["Batch"]()


def test_requests_overtake_a_fetch_that_waits_and_a_message_ends_it(client, topic, group):
    with client.member(group, topic) as member:
        member.next("assigned")
        member.send("fetch", 1, wait_ms=60_000)
        assert member.ask("seek", "sought", topic=topic, to={"place": MESSAGES["Position"].LATEST}).next_offset == 0
        member.ask("commit", "committed", offsets=[{"topic": topic, "next_offset": 0, "metadata": "é"}])
        client.produce(topic, *in_partition(1, b"late"))
        batch = member.next("batch", 1)
        assert (batch.partition, values(batch), batch.next_offset, batch.end_offset) == (1, [b"late"], 1, 1)


def test_what_was_committed_is_where_the_next_member_begins(client, api, topic, group):
    client.produce(topic, *in_partition(0, b"a", b"b", b"c"))
    with client.member(group, topic) as first:
        first.next("assigned")
        assert values(first.ask("fetch", "batch")) == [b"a", b"b", b"c"]
        first.ask("commit", "committed", offsets=[{"topic": topic, "partition": 0, "next_offset": 2}])
        first.send("leave")
        assert first.status()[0] == "OK"
    row = api.get(f"/api/groups/{group}").value["partitions"][0]
    assert (row["committed"], row["end"], row["lag"]) == (2, 3, 1)
    with client.member(group, topic) as second:
        second.next("assigned")
        assert second.assigned[topic, 0] == 2 and values(second.ask("fetch", "batch")) == [b"c"]
        second.ask("seek", "sought", topic=topic, partition=0, to={"offset": 1})
        assert values(second.ask("fetch", "batch")) == [b"b", b"c"]


def test_a_request_that_fails_is_answered_and_the_stream_goes_on(client, topic, group):
    with client.member(group, topic, member="m") as member:
        member.next("assigned")

        def code(kind, **fields):
            error = member.ask(kind, "error", **fields)
            return error.code, error.field

        place = {"topic": "elsewhere", "partition": 0}
        assert code("commit", offsets=[{**place, "next_offset": 1}])[0] == "unknown_partition"
        assert code("commit", offsets=[{"topic": topic, "partition": 0, "next_offset": 1 << 63}])[0] == "bad_request"
        assert code("commit", offsets=[{"topic": topic, "partition": 0, "next_offset": 1}]) == (
            "out_of_range",
            "offset",
        )
        assert code("commit") == ("bad_field", "commit.offsets")
        assert code("seek", topic=topic, partition=0, to={"offset": 1})[0] == "out_of_range"
        assert code("seek", **place)[0] == "unknown_partition"
        assert code("fetch", partitions=[{"topic": topic, "partitions": [0, 9]}])[0] == "unknown_partition"
        assert code("fetch", wait_ms=300_001) == ("bad_field", "wait_ms")
        assert code("join", group=group, topics=[topic])[0] == "bad_request"
        member.send("heartbeat")
        member.send("revoked")  # nobody has asked for it
        member.send("fetch", 1, wait_ms=60_000)
        for number in range(2, 66):
            member.send("fetch", number)
        assert member.next("error", 65).code == "too_many"


def test_a_message_given_back_comes_again_before_new_ones_and_is_done_by_itself(client, api, topic, group):
    client.produce(topic, *in_partition(0, b"a", b"b", b"c", b"d"))
    place = {"topic": topic, "partition": 0}

    def again(batch):
        [record] = batch.records
        return batch.again, record.offset, record.value, record.deliveries, batch.next_offset

    with client.member(group, topic) as member:
        member.next("assigned")
        batch = member.ask("fetch", "batch", max_records=3)
        assert not batch.again and [record.deliveries for record in batch.records] == [0, 0, 0]
        given = member.ask("nack", "nacked", offset=1, reason="busy", **place)
        assert given == MESSAGES["Nacked"](deliveries=1)
        assert again(member.ask("fetch", "batch")) == (True, 1, b"b", 2, 3)
        member.ask("commit", "committed", offsets=[{"next_offset": 2, **place}])  # of before it came again
        assert values(member.ask("fetch", "batch")) == [b"d"]
        member.ask("commit", "committed", offsets=[{"next_offset": 3, **place}])
        member.ask("commit", "committed", again=[{"offset": 1, **place}])
        row = api.get(f"/api/groups/{group}").value["partitions"][0]
        assert (row["committed"], row["nacked"]) == (3, 0)
        member.send("fetch", 1, wait_ms=60_000)
        member.ask("nack", "nacked", offset=2, delay_ms=300, **place)
        assert again(member.next("batch", 1)) == (True, 2, b"c", 2, 4)
        member.send("leave")
        assert member.status()[0] == "OK"
    with client.member(group, topic) as heir:
        heir.next("assigned")
        assert again(heir.ask("fetch", "batch", wait_ms=60_000)) == (True, 2, b"c", 3, 3)
        heir.ask("commit", "committed", again=[{"offset": 2, **place}], offsets=[{"next_offset": 4, **place}])
        assert heir.ask("nack", "error", offset=9, **place).code == "out_of_range"
        assert heir.ask("nack", "error", topic="elsewhere", offset=9).code == "unknown_partition"
        assert heir.ask("nack", "error", offset=1, delay_ms=700_000_000, **place).field == "delay"


def _letters(client, topic):
    with suppress(grpc.RpcError):  # the topic is made by its first letter
        return client.fetch(f"{topic}.dlq").records
    return []


def test_a_message_that_is_given_back_too_often_says_where_its_letter_is(client, api, group):
    topic = f"orders{next(_names)}"
    api.post("/api/admin/topics", {"name": topic, "partitions": 1, "maxDeliveries": 2})
    client.produce(topic, *in_partition(0, b"a", b"b"))
    with client.member(group, topic) as member:
        member.next("assigned")
        member.ask("fetch", "batch")
        assert member.ask("nack", "nacked", topic=topic).letter == ""
        assert member.ask("fetch", "batch", wait_ms=60_000).again
        given = member.ask("nack", "nacked", topic=topic, reason="no account")
        assert (given.deliveries, given.letter) == (2, f"{topic}.dlq/0@0")
        assert member.ask("fetch", "batch") == MESSAGES["Batch"]()
    [letter, *_] = until(lambda: _letters(client, topic), "the letter, which is stored, in its topic")
    headers = {header.name: header.value for header in letter.headers}
    assert (headers["error"], headers["attempts"]) == (b"no account", b"2")


def test_what_one_door_gives_back_comes_by_the_door_of_the_partitions_owner(broker, client, api, group):
    topic = f"orders{next(_names)}"
    api.post("/api/admin/topics", {"name": topic, "partitions": 1})
    client.produce(topic, *in_partition(0, b"a", b"b"))
    place = {"topic": topic, "partition": 0}
    with client.member(group, topic, member="grpc") as member:
        member.next("assigned")
        assert values(member.ask("fetch", "batch")) == [b"a", b"b"]
        member.ask("commit", "committed", offsets=[{"next_offset": 2, **place}])
        member.ask("nack", "nacked", offset=0, **place)
        member.send("leave")
        assert member.status()[0] == "OK"
    with LineClient(port(broker, "egress")) as lines:
        lines.send(f"GROUP {group} member=lines topics={topic}", "!fetch 1000 wait=60000")
        while not isinstance(reply := lines.reply(), Batch):
            pass
        assert (reply.offset, reply.deliveries) == (0, 2) and lines.read(reply.nbytes).endswith(b"|a\n")
        lines.send(f"!nack {topic}/0 0", "!leave")
        assert lines.reply().deliveries == 2
        lines.rest()
    over_http = f"/api/topics/{topic}/consume?group={group}&member=http&timeoutMs=20000&format=text"
    [message] = api.get(over_http).value["messages"]
    assert (message["offset"], message["value"], message["deliveries"]) == (0, "a", 3)


def test_a_message_is_read_in_its_turn_when_it_is_not_to_come_again_any_more(broker, client, api, group):
    topic = f"orders{next(_names)}"
    api.post("/api/admin/topics", {"name": topic, "partitions": 1})
    client.produce(topic, *in_partition(0, b"a", b"b", b"c", b"d"))
    with LineClient(port(broker, "egress")) as lines:

        def ask(request):
            lines.send(request)
            return lines.reply()

        ask(f"ASSIGN {group} {topic}/0@1")
        ask(f"!commit {topic}/0 1")
        assert ask(f"!nack {topic}/0 2 delay=600000").deliveries == 1
        _, offset, found = lines.fetch(1000)
        assert (offset, found.count(b"\n")) == (1, 1), "up to what comes again"
        assert api.post(f"/api/topics/{topic}/seek", {"group": group, "to": "earliest"}).status == 200
        _, offset, found = lines.fetch(1000)
        assert (offset, found.count(b"\n")) == (2, 2)


def test_a_revoked_partition_is_given_up_and_read_by_the_other_member(client, topic, group):
    client.produce(topic, *in_partition(0, b"a"), *in_partition(1, b"x"))
    with client.member(group, topic) as first, client.member(group, topic) as second:
        first.next("assigned")
        gone = first.next("revoke")
        (place,) = [(row.topic, *row.partitions) for row in gone.partitions]
        first.next("assigned")
        (kept,) = first.assigned
        assert {place, kept} == {(topic, 0), (topic, 1)}
        assert first.ask("fetch", "batch").partition == kept[1]
        assert first.ask("fetch", "batch") == MESSAGES["Batch"]()  # nothing of what it gave up
        first.ask("commit", "committed", offsets=[{"topic": topic, "partition": place[1], "next_offset": 1}])
        first.send("revoked")
        while not second.assigned:
            second.next("assigned")
        assert second.assigned == {place: 1}
        offsets = [{"topic": topic, "partition": place[1], "next_offset": 0}]
        assert first.ask("commit", "error", offsets=offsets).code == "fenced"


def test_members_of_three_doors_share_a_topic_with_one_state(broker, client, api, group):
    topic = f"orders{next(_names)}"
    api.post("/api/admin/topics", {"name": topic, "partitions": 3})
    over_http = f"/api/topics/{topic}/consume?group={group}&member=http"
    with client.member(group, topic, member="grpc") as member, LineClient(port(broker, "egress")) as lines:
        member.next("assigned")
        lines.send(f"GROUP {group} member=lines topics={topic}")
        held = {}

        def is_shared():
            held["http"] = {row["partition"] for row in api.get(over_http).value["assignment"]}
            held["grpc"] = {number for _, number in member.assigned}
            if sorted(map(len, held.values())) != [1, 1]:
                response = member.read()
                if response.WhichOneof("response") == "revoke":
                    member.send("revoked")
                return False
            return True

        until(is_shared, "one partition for each of three doors")
        view = api.get(f"/api/groups/{group}").value
        places = {row["id"]: [each["partition"] for each in row["assignment"]] for row in view["members"]}
        assert places.keys() == {"grpc", "http", "lines"} and sorted(chain(*places.values())) == [0, 1, 2]
        assert {places["grpc"][0]} == held["grpc"] and {places["http"][0]} == held["http"]
        offsets = [{"topic": topic, "partition": places["http"][0], "next_offset": 0}]
        assert member.ask("commit", "error", offsets=offsets).code == "fenced"


def test_a_newer_stream_of_a_member_takes_its_place_and_its_partitions(client, topic, group):
    with client.member(group, topic, member="m") as old, client.member(group, topic, member="m") as new:
        new.next("assigned")
        assert new.assigned.keys() == {(topic, 0), (topic, 1)}
        code, details, _ = old.status()
        assert (code, details.partition(":")[0]) == ("FAILED_PRECONDITION", "fenced")
        assert new.ask("fetch", "batch") == MESSAGES["Batch"]()


def test_an_earlier_attempt_of_a_run_that_arrives_late_fences_no_later_stream(client, topic, group):
    def join(attempt):
        return client.member(group, topic, member="m", attempt=attempt)

    with join("r.2") as later, client.subscribe() as late:
        later.next("assigned")
        late.send("join", group=group, topics=[topic], member="m", attempt="r.1")
        code, details, _ = late.status()
        assert (code, details.partition(":")[0]) == ("FAILED_PRECONDITION", "fenced")
        assert later.ask("fetch", "batch") == MESSAGES["Batch"]()
        with join("r.10") as latest, join("s.1"):
            assert later.status()[0] == latest.status()[0] == "FAILED_PRECONDITION"


OPENINGS = [
    (b"\xff", "INVALID_ARGUMENT", "bad_request"),
    (b"", "INVALID_ARGUMENT", "bad_request"),
    (b"x" * 70_000, "RESOURCE_EXHAUSTED", "too_large"),
    ({"heartbeat": {}}, "INVALID_ARGUMENT", "bad_request"),
    ({"join": {"topics": ["t"]}}, "INVALID_ARGUMENT", "bad_name"),
    ({"join": {"group": "g"}}, "INVALID_ARGUMENT", "bad_field"),
    ({"join": {"group": "g", "topics": ["../x"]}}, "INVALID_ARGUMENT", "bad_topic"),
    ({"join": {"group": "g", "topics": ["t"], "session_ms": 10}}, "INVALID_ARGUMENT", "bad_timeout"),
    ({"join": {"group": "g", "topics": ["t"], "assignor": "mine"}}, "INVALID_ARGUMENT", "unknown_assignor"),
    ({"join": {"group": "g", "topics": ["t"], "member": "m", "attempt": "1"}}, "INVALID_ARGUMENT", "bad_field"),
    ({"join": {"group": "g", "topics": ["t"], "generation": 1 << 40}}, "INVALID_ARGUMENT", "bad_request"),
]


@pytest.mark.parametrize(("first", "status", "code"), OPENINGS)
def test_a_stream_that_begins_wrong_ends_with_the_reason(client, first, status, code):
    request = first if isinstance(first, bytes) else MESSAGES["SubscribeRequest"](**first).SerializeToString()
    with client.subscribe() as stream:
        stream.send_raw(request)
        name, _, trailers = stream.status()
    assert (name, trailers["kmq-code"]) == (status, code)


def test_garbage_in_the_middle_ends_the_stream_and_not_the_member(client, topic, group):
    with client.member(group, topic, member="m") as member:
        member.next("assigned")
        member.send_raw(b"\xff\xff\xff")
        assert member.status()[0] == "INVALID_ARGUMENT"
    with client.member(group, topic, member="m") as again:
        again.next("assigned")
        assert len(again.assigned) == 2
        again.end()
        assert again.status()[0] == "OK"


def test_members_of_a_killed_gateway_come_back_with_what_they_had(broker, client, api, topic, group):
    client.produce(topic, *in_partition(0, b"a", b"b"), *in_partition(1, b"x"))
    with client.member(group, topic) as one, client.member(group, topic) as two:
        one.next("assigned")
        one.next("revoke")
        one.next("assigned")
        (kept,) = one.assigned
        one.ask("commit", "committed", offsets=[{"topic": topic, "partition": kept[1], "next_offset": 1}])
        one.send("revoked")
        while not two.assigned:
            two.next("assigned")
        before = {stream.id: (stream.generation, dict(stream.assigned)) for stream in (one, two)}
        former = port(broker, "grpc")
        broker.kill("gateway")
        assert one.status()[0] == two.status()[0] == "UNAVAILABLE"

    def back(id):
        generation, assigned = before[id]
        owned = [{"topic": topic, "partitions": [number]} for _, number in assigned]
        try:
            return reached.member(group, topic, member=id, generation=generation, owned=owned)
        except grpc.RpcError as error:
            assert error.code().name == "UNAVAILABLE", error  # the next gateway reads the committed offsets still
            return None

    broker.wait(lambda: port(broker, "grpc") != former, "the next gateway")
    with Client(port(broker, "grpc")) as reached:
        again = {id: until(lambda id=id: back(id), "groups, whose offsets are loaded") for id in before}
        for id, stream in again.items():
            while not stream.assigned:
                stream.next("assigned")
            generation, assigned = before[id]
            assert stream.assigned.keys() == assigned.keys() and stream.generation > generation
            if kept in stream.assigned:
                assert stream.assigned[kept] == 1
