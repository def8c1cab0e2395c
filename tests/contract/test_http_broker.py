"""The HTTP API of a real broker: what is stored where, what a repetition gives, what happens when a stage is away.

Every answer is one that the OpenAPI document has (api_client.py).
"""

import asyncio
import json
import os
import random
import signal
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import count

import pytest
from api_client import NDJSON, Api
from brokers import Broker
from fake_logger import FakeLogger
from waiting import attempts

from kmq.broker.stats import peek
from kmq.client.producer import Producer
from kmq.config.settings import load
from kmq.errors import BusyError
from kmq.gateway.core import producing
from kmq.gateway.core.compactor import Compactor, Throttle
from kmq.gateway.core.core import Core
from kmq.gateway.core.producing import NewMessage
from kmq.log import compaction, passes, reader, topic_changes
from kmq.message.message import Message
from kmq.message.text import decode_payload
from kmq.sending.failures import Fenced

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

TOPICS = "/api/admin/topics"
SMALL = {
    "RB_SLOTS": 64,
    "RB_BYTES": "256 KiB",
    "KMQ_MAX_LINE": "64 KiB",
    "KMQ_DATA_QUOTA": "12 MiB",
    "KMQ_FSYNC": "never",
}
BY_KAFKA = {b"k0": 1, b"k1": 1, b"k2": 1, b"k3": 0, b"k4": 0, b"k5": 0, b"k6": 1}  # of four partitions, by murmur2
_names = count()


def started(root, **settings):
    broker = Broker(root)
    try:
        broker.up(**settings)
        broker.env |= {name: str(value) for name, value in settings.items()}
        yield broker
    finally:
        broker.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    yield from started(tmp_path_factory.mktemp("broker") / "b")


@contextmanager
def connected(broker):
    with closing(Api(int((broker.pipes / "http.port").read_text()))) as api:
        yield api


@pytest.fixture
def api(broker):
    with connected(broker) as found:
        yield found


@pytest.fixture
def topic():
    return f"t{next(_names)}"


def produce(topic, query="format=text"):
    return f"/api/topics/{topic}/produce?{query}"


def line_at(broker, topic, place):
    """The stored line that an answer names."""
    log = reader.partition(str(broker.data), topic, place["partition"])
    first, lines = log.read(place["offset"], 1)
    assert first == place["offset"]
    return Message(topic, place["partition"], first, lines.splitlines()[0])


# --- produce ---------------------------------------------------------------------------------------------------------


def test_a_message_is_where_the_answer_says_and_comes_back_as_it_was(broker, api, topic):
    headers = [{"name": "a", "value": "1"}, {"name": "a", "value": None}, {"name": "enc", "value": ""}]
    given = {"key": "u|7", "value": "hällo\n", "headers": headers, "timestamp": 1_700_000_000_123}
    place = api.post(produce(topic), given).value
    assert place == {"topic": topic, "partition": 0, "offset": 0, "timestamp": 1_700_000_000_123}
    stored = line_at(broker, topic, place)
    assert (stored.key, stored.value) == (b"u|7", "hällo\n".encode())
    [shown] = api.get(f"/api/topics/{topic}/consume?format=text").value["messages"]
    assert shown == given | {"partition": 0, "offset": 0}


def test_the_api_as_it_was_specified_works_word_for_word(broker, api, topic):
    given = {"key": "user-7", "value": b64encode(b"hello\xff").decode(), "headers": {"trace-id": "a1"}}
    place = api.post(produce(topic, ""), given).value
    stored = line_at(broker, topic, place)
    assert (stored.key, stored.value, stored.headers) == (b"user-7", b"hello\xff", [("trace-id", b"a1")])
    [shown] = api.get(f"/api/topics/{topic}/consume").value["messages"]
    assert {name: shown[name] for name in given} == given
    assert topic in [each["name"] for each in api.get("/api/topics").value]
    assert api.get("/api/topics").value == api.get(TOPICS).value


def test_a_value_that_is_json_is_stored_compact_and_comes_back_as_json(broker, api, topic):
    text = b'{"key": "u7", "value": {"name": "Z\xc3\xbcrich", "sum": 12.30, "items": [1, null]}}'
    place = api.call("POST", produce(topic, "format=json"), text, Content_Type="application/json").value
    assert line_at(broker, topic, place).value == b'{"name":"Z\xc3\xbcrich","sum":12.30,"items":[1,null]}'
    broker.send_lines([b"%b.k|0|0|no json" % topic.encode()])
    where = f"/api/topics/{topic}/consume?format=json&timeoutMs=20000&offset="
    [shown] = api.get(f"{where}0&maxMessages=1").value["messages"]
    assert shown["value"] == {"name": "Zürich", "sum": 12.3, "items": [1, None]} and "encoding" not in shown
    [other] = api.get(f"{where}1").value["messages"]
    assert (other["value"], other["encoding"]) == ("no json", "text")


@pytest.mark.parametrize("kind", ["application/octet-stream", "text/plain", "text/plain; charset=utf-8"])
def test_a_body_of_bytes_is_one_value(broker, api, topic, kind):
    value = bytes(range(256)) + b'{"value": 1}\n'
    api.post(TOPICS, {"name": topic, "partitions": 2})
    place = api.call("POST", produce(topic, "key=u7&partition=1&id=a"), value, Content_Type=kind).value
    stored = line_at(broker, topic, place)
    assert (place["partition"], stored.key, stored.value) == (1, b"u7", value)
    again = api.call("POST", produce(topic, "key=u7&partition=1&id=a"), value, Content_Type=kind).value
    assert again == place | {"duplicate": True}
    assert api.call("POST", produce(topic, "partition=2"), value, Content_Type=kind).refusal[1] == "unknown_partition"


def test_what_log_shippers_send_is_a_message_a_line_or_an_item(broker, api, topic):
    lines = [b'{"log": "a", "n": 1.50}', b"no json \xff\r", b" ", b'{"a":1,"a":2}']
    body = b"\n".join(lines) + b"\n\n"
    answers = api.call("POST", produce(topic, "format=raw&key=node-1"), body, Content_Type=NDJSON).value
    assert [line_at(broker, topic, place).value for place in answers] == lines
    assert {line_at(broker, topic, place).key for place in answers} == {b"node-1"}
    items = b'[{"date": 1.50, "log": "a"}, "b", null]'
    answers = api.call("POST", produce(topic, "format=raw"), items, Content_Type="application/json").value["results"]
    assert [line_at(broker, topic, place).value for place in answers] == [b'{"date":1.50,"log":"a"}', b'"b"', b"null"]


@pytest.mark.parametrize(("kind", "body"), [(NDJSON, b"a\nb\n"), ("application/json", b'["a", "b"]')])
@pytest.mark.parametrize(
    ("name", "query", "refusal"),
    [("append", "", (400, "reserved_topic", "")), ("t-raw", "&partition=7", (404, "unknown_partition", ""))],
)
def test_lines_that_are_refused_for_good_are_no_success_for_a_shipper(api, kind, body, name, query, refusal):
    assert api.call("POST", produce(name, "format=raw" + query), body, Content_Type=kind).refusal == refusal


@pytest.mark.parametrize("kept", [b"x" * 100, b"x\0" * 50], ids=["text", "nul"])
def test_a_raw_line_that_is_too_long_leaves_its_beginning_as_a_dead_letter(broker, api, topic, kept):
    long = kept * 15_000
    for body in (b"one\n" + long + b"\ntwo\n", long + b"\n"):
        answers = api.call("POST", produce(topic, "format=raw"), body, Content_Type=NDJSON).value
        errors = [each["error"]["code"] for each in answers if "error" in each]
        assert (len(answers), errors) == (body.count(b"\n"), ["too_long"])
    broker.wait(lambda: len(letters(broker, topic)) == 2, "the dead letters")
    assert [line.rpartition(b"|")[2] for line in broker.lines(topic)] == [b"one", b"two"]
    for id, value in letters(broker, topic):
        assert b";reason=too_long;len=1500000;topic=" + topic.encode() in id
        assert long.startswith(value) and len(value) > 700_000


def letters(broker, topic):
    """Id field and value of the dead letters that name this topic."""
    rows = (line.split(b"|", 5)[4:] for line in broker.lines("dead"))
    return [(id, decode_payload(id, payload)) for id, payload in rows if b";topic=" + topic.encode() in id]


@pytest.mark.parametrize(
    ("query", "kind", "body", "field"),
    [
        ("format=raw", "application/json", b"{}", "body"),
        ("format=raw", "application/json", b"[]", "body"),
        ("format=raw", "application/json", b'[{"a": 1, "a": 2}]', "body[0]"),
        ("format=raw&id=7", NDJSON, b"a\n", "id"),
        ("key=k", "application/json", b'{"value": ""}', "key"),
        ("partition=0", NDJSON, b'{"value": ""}', "partition"),
        ("format=json", NDJSON, b'{"value": 1}\n{"value": {"a": 1, "a": 2}}\n', "line[2].value"),
        ("", "application/json", b"[]", "body"),
        ("", "application/json", b'{"records": [{"value": "x"}]}', "records"),
        ("", NDJSON, b'{"records": [{"value": "x"}]}\n', "line[1].records"),
        ("format=base64&key=*", "text/plain", b"a", "key"),
    ],
)
def test_a_body_that_does_not_fit_its_form_is_refused_whole(api, topic, query, kind, body, field):
    assert api.call("POST", produce(topic, query), body, Content_Type=kind).refusal == (422, "bad_field", field)


def test_a_batch_is_answered_in_order_with_a_place_for_each(broker, api, topic):
    api.post(TOPICS, {"name": topic, "partitions": 4})
    batch = [{"key": f"k{n % 7}", "value": f"v{n}"} for n in range(50)] + [{"value": f"v{n}"} for n in range(50, 60)]
    for results in (
        api.post(produce(topic), {"messages": batch}).value["results"],
        api.lines(produce(topic), batch).value,
    ):
        stored = [line_at(broker, topic, place) for place in results]
        assert [message.value.decode() for message in stored] == [message["value"] for message in batch]
        of_key = {}
        for message in stored[:50]:
            of_key.setdefault(message.key, []).append((message.partition, message.offset))
        assert len(of_key) == 7
        assert {key: places[0][0] for key, places in of_key.items()} == BY_KAFKA
        for places in of_key.values():
            assert len({partition for partition, _ in places}) == 1 and places == sorted(places)


def test_a_partition_that_is_asked_for_is_taken_and_an_unknown_one_refused(api, topic):
    api.post(TOPICS, {"name": topic, "partitions": 2})
    batch = [{"value": "a", "partition": 1}, {"value": "b", "partition": 2}, {"value": "c", "partition": 1}]
    first, second, third = api.post(produce(topic), {"messages": batch}).value["results"]
    assert (first["partition"], first["offset"], third["offset"]) == (1, 0, 1)
    assert second["error"]["code"] == "unknown_partition"
    assert api.post(produce(topic), batch[1]).refusal[:2] == (404, "unknown_partition")


def test_null_and_empty_values_and_keys_are_different_things(broker, api, topic):
    given = [{"key": key, "value": value} for key in (None, "", "k") for value in (None, "", "v")]
    api.lines(produce(topic), given)
    shown = api.get(f"/api/topics/{topic}/consume?format=text").value["messages"]
    assert [{"key": each["key"], "value": each["value"]} for each in shown] == given


def test_an_id_that_comes_again_gives_the_first_place_and_stores_nothing(broker, api, topic):
    first = api.post(produce(topic), {"value": "a", "id": "order 7|ü"}).value
    again = api.post(produce(topic), {"value": "a", "id": "order 7|ü"}).value
    assert again == first | {"duplicate": True}
    assert api.post(produce(topic), {"value": "b", "id": "order 7|ü"}).refusal[:2] == (409, "id_reused")
    assert api.post(produce(f"{topic}-2"), {"value": "b", "id": "order 7|ü"}).value["offset"] == 0, "its own window"
    assert len(broker.lines(topic)) == 1


def deleted(broker, api, topic):
    assert api.call("DELETE", f"{TOPICS}/{topic}").status == 204


def made_again(broker, api, topic):
    deleted(broker, api, topic)
    assert api.post(TOPICS, {"name": topic, "partitions": 3}).status == 201


def truncated(broker, api, topic):
    done = broker.kmq("topics", "truncate", topic, "--before", "end", "--yes")
    assert done.returncode == 0, done.stderr


def retained(broker, api, topic):
    """What is older goes, only the last record of the partition stays."""
    assert api.call("PATCH", f"{TOPICS}/{topic}", {"retentionMs": 1}).status == 200
    end = api.post(produce(topic), {"value": "the last one"}).value["offset"]

    def is_alone():
        topic_changes.submit(str(broker.data), topic_changes.RETAIN, "", {})
        return reader.partition(str(broker.data), topic, 0).first_offset == end

    broker.wait(is_alone, "retention")
    assert api.call("PATCH", f"{TOPICS}/{topic}", {"retentionMs": None}).status == 200


REMOVALS = [deleted, made_again, truncated, retained]


@pytest.mark.parametrize("remove", REMOVALS)
def test_an_id_whose_record_was_deleted_is_stored_anew_and_once(broker, api, topic, remove):
    """By HTTP in the topic's window and by a producer's rising ids, by acked lines, over a restart of the framer."""
    messages = [{"value": f"v{n}", "id": str(n)} for n in range(1, 6)]
    batches = [{"messages": messages}, {"messages": messages, "producer": f"loader-{topic}"}]
    port, name = int((broker.pipes / "ingress.port").read_text()), f"lines-{topic}"

    def send_all():
        found = [api.post(produce(topic), batch).value["results"] for batch in batches]
        with Producer(port=port, producer=name, first_id=1) as producer:
            delivery = producer.send_many(topic, [b"by lines %d" % n for n in range(5)])
            broker.wait_routed(delivery.result(60))
            return found, producer.duplicates

    assert send_all()[1] == 0
    seen = broker.lines(topic)
    assert len(seen) == 15
    remove(broker, api, topic)
    left = broker.lines(topic) if os.path.isdir(broker.data / "topics" / topic) else []
    assert not {*left} & {*seen}
    again, duplicates = send_all()
    assert duplicates == 0 and not any("duplicate" in each for results in again for each in results)
    assert all(each["offset"] is not None for results in again for each in results)
    assert len(broker.lines(topic)) == len(left) + 15
    broker.kill("framer")  # it finds its table again in what is stored
    third, duplicates = send_all()
    assert duplicates == 5 and third == [[each | {"duplicate": True} for each in results] for results in again]
    assert len(broker.lines(topic)) == len(left) + 15


def test_an_id_is_a_duplicate_as_long_as_its_record_is_there_though_others_were_deleted(broker, api, topic):
    assert api.post(TOPICS, {"name": topic, "partitions": 4}).status == 201
    messages = [{"value": f"v{n}", "id": f"id {n}", "partition": n % 4} for n in range(40)]
    first = api.post(produce(topic), {"messages": messages}).value["results"]
    for partition, before in ((0, "4"), (1, "end"), (2, "9")):
        done = broker.kmq("topics", "truncate", topic, "-p", str(partition), "--before", before, "--yes")
        assert done.returncode == 0, done.stderr
    again = api.post(produce(topic), {"messages": messages}).value["results"]
    starts = {0: 4, 1: 10, 2: 9, 3: 0}
    for before, after in zip(first, again, strict=True):
        if before["offset"] >= starts[before["partition"]]:
            assert after == before | {"duplicate": True}
        else:
            assert "duplicate" not in after and after["offset"] >= 10
    third = api.post(produce(topic), {"messages": messages}).value["results"]
    assert [each["offset"] for each in third] == [each["offset"] for each in again]
    assert all(each["duplicate"] for each in third)


def test_a_retry_of_what_compaction_replaced_stays_a_duplicate(broker, api, topic):
    """Stored anew it would bring back the older value of its key."""
    assert api.post(TOPICS, {"name": topic, "cleanupPolicy": "compact", "segmentBytes": 1 << 16}).status == 201
    api.post(produce(topic), {"key": "a", "value": "first"})  # the first record of a segment stays
    api.post(produce(topic), {"key": "k", "value": "old", "id": "1"})
    api.post(produce(topic), {"key": "k", "value": "new", "id": "2"})
    for n in range(30):
        api.post(produce(topic), {"key": "b", "value": f"{n}" * 3000})
    broker.wait(lambda: b"old" not in b"".join(broker.lines(topic)), "the compactor")
    assert api.post(produce(topic), {"key": "k", "value": "old", "id": "1"}).value["duplicate"]
    assert len([line for line in broker.lines(topic) if b"|new" in line or b"|old" in line]) == 1


def test_ids_of_a_topic_with_a_long_name_are_remembered_too(broker, api):
    topic = "x" * 190 + str(next(_names))
    places = [api.post(produce(topic), {"value": "a", "id": "1"}).value for _ in range(2)]
    assert places[1] == places[0] | {"duplicate": True}


def test_a_producer_with_rising_ids_is_stored_exactly_once(broker, api, topic):
    name = f"loader-{topic}"
    batch = [{"value": f"v{n}", "id": str(n)} for n in range(1, 21)]
    first = api.post(produce(topic), {"messages": batch, "producer": name}).value["results"]
    again = api.post(produce(topic), {"messages": [*batch[10:], {"value": "v21", "id": "30"}], "producer": name})
    assert again.value["results"][:10] == [place | {"duplicate": True} for place in first[10:]]
    assert api.lines(produce(topic, f"format=text&producer={name}"), [{"value": "late", "id": "25"}]).value == [
        {"error": api.post(produce(topic), {"value": "late", "id": "25", "producer": name}).value}
    ]
    late = api.post(produce(topic), {"value": "late", "id": "25", "producer": name})
    assert late.refusal[:2] == (409, "id_too_old")
    assert [Message(topic, 0, 0, line).id for line in broker.lines(topic)] == [*map(str, range(1, 21)), "30"]


def test_a_line_client_of_the_same_name_fences_and_is_fenced(broker, api, topic):
    name = f"both-{topic}"
    api.post(produce(topic), {"value": "a", "id": "1", "producer": name})
    port = int((broker.pipes / "ingress.port").read_text())
    with pytest.raises(Fenced), Producer(port=port, producer=name) as producer:
        producer.send(topic, b"b").result(60)
        answer = api.post(produce(topic), {"value": "c", "id": "9", "producer": name})
        while answer.status == 409 and answer.value["code"] == "fenced":  # the connection that the other has fenced
            answer = api.post(produce(topic), {"value": "c", "id": "9", "producer": name})
        assert answer.value["offset"] == 2
        producer.send(topic, b"d").result(60)


def test_without_acks_the_answer_comes_at_once_and_the_message_later(broker, api, topic):
    for answer in (
        api.post(produce(topic), {"value": "a", "acks": 0}),
        api.lines(produce(topic, "acks=0&format=text"), [{"value": "b"}, {"value": "c"}]),
    ):
        assert answer.status == 202
    broker.wait(lambda: len(broker.lines(topic)) == 3, "messages that nobody waited for")


def test_what_the_broker_refuses_says_so(api, topic):
    assert api.post(produce("__internal"), {"value": ""}).refusal[:2] == (400, "reserved_topic")
    assert api.post(produce(topic), {"value": "x" * (1 << 20)}).refusal[:2] == (413, "too_long")
    batch = [{"value": "a"}, {"value": "x" * (1 << 20)}, {"value": "b"}]
    results = api.post(produce(topic), {"messages": batch}).value["results"]
    assert [result.get("offset", result.get("error", {}).get("code")) for result in results] == [0, "too_long", 1]


def test_a_body_that_is_encoded_is_refused_and_not_a_fault(broker, topic):
    for path, body in ((produce(topic), {"value": "a"}), (TOPICS, {"name": topic})):
        with connected(broker) as once:  # the body is not read, so the connection ends
            answer = once.post(path, body, Content_Encoding="gzip")
        assert answer.refusal[:2] == (400, "bad_request") and "gzip" in answer.value["message"]


def test_a_message_of_the_epoch_is_answered_with_its_time(api, topic):
    assert api.post(produce(topic), {"value": "a", "timestamp": 0}).value["timestamp"] == 0


def test_an_offset_beyond_the_end_is_answered_with_the_bounds(api, topic):
    api.post(produce(topic), {"value": "a"})
    answer = api.get(f"/api/topics/{topic}/messages?offset=99")
    assert (answer.status, answer.value["code"]) == (416, "out_of_range")
    assert (answer.value["field"], answer.value["first"], answer.value["end"]) == ("offset", 0, 1)


def test_a_message_that_is_not_routed_in_time_is_stored_and_found_later(broker, api, topic, monkeypatch):
    api.post(produce(topic), {"value": "first"})
    monkeypatch.setattr(producing, "ROUTED_S", 0.2)
    monkeypatch.setattr(os, "environ", broker.env)

    async def send():
        core = Core(load(toml=""), peek(broker.instance), FakeLogger())
        try:
            return [(await core.producing.produce(topic, [NewMessage(None, b"second", id="2")]))[0] for _ in range(2)]
        finally:
            await core.close()

    router = broker.pids()["router"]
    os.kill(router, signal.SIGSTOP)
    try:
        refused, again = asyncio.run(send())
    finally:
        os.kill(router, signal.SIGCONT)
    assert (refused.code, refused.refusal.http) == (again.code, again.refusal.http) == ("stored_not_routed", 504)
    again = api.post(produce(topic), {"value": "second", "id": "2"}).value
    assert (again["offset"], again["duplicate"]) == (1, True)
    assert line_at(broker, topic, again).seq == refused.fields["seq"]


def test_a_full_disk_is_507_with_the_time_to_come_again(tmp_path):
    for broker in started(tmp_path / "b", KMQ_AUTO_CREATE_TOPICS="off", **SMALL):
        with connected(broker) as api:
            assert api.post(produce("nobody"), {"value": ""}).refusal[:2] == (404, "unknown_topic")
            raw = api.call("POST", produce("nobody", "format=raw"), b"a\nb\n", Content_Type=NDJSON)
            assert raw.refusal[:2] == (404, "unknown_topic")
            api.post(TOPICS, {"name": "orders"})
            batch = {"messages": [{"value": b64encode(bytes(40_000)).decode()}] * 50}
            tries = attempts("a full quota", every_s=0)
            while (answer := api.post(produce("orders"), batch)).status == 200:
                next(tries)
            assert answer.refusal[:2] == (507, "quota") and answer.headers["Retry-After"] == "1"


# --- topics ----------------------------------------------------------------------------------------------------------


def test_a_topic_is_created_changed_deleted_and_its_name_used_again(api, topic):
    asked = {
        "name": topic,
        "partitions": 3,
        "retentionMs": 86_400_000,
        "cleanupPolicy": "compact",
        "deleteRetentionMs": 0,
    }
    made = api.post(TOPICS, asked)
    assert made.status == 201 and made.value["fromSeq"] > 0 and len(made.value["partitions"]) == 3
    assert made.value["partitioner"] == "murmur2"
    assert api.post(TOPICS, asked).status == api.post(TOPICS, asked | {"partitioner": "murmur2"}).status == 200
    assert api.post(TOPICS, asked | {"partitioner": "crc32"}).refusal[:2] == (409, "topic_exists")
    assert api.post(TOPICS, {"name": topic, "partitions": 3}).refusal[:2] == (409, "topic_exists")
    changed = api.call("PATCH", f"{TOPICS}/{topic}", {"retentionMs": None, "retentionBytes": 1 << 30, "partitions": 3})
    assert (changed.value["retentionMs"], changed.value["retentionBytes"]) == (-1, 1 << 30)
    assert changed.value["deleteRetentionMs"] == 0
    for given, shown in ((None, 86_400_000), (-1, -1)):
        changed = api.call("PATCH", f"{TOPICS}/{topic}", {"deleteRetentionMs": given})
        assert changed.value["deleteRetentionMs"] == shown
    assert api.call("PATCH", f"{TOPICS}/{topic}", {"deleteRetentionMs": "1d"}).refusal[:2] == (422, "bad_field")
    assert api.get(f"{TOPICS}/{topic}").value == changed.value
    api.post(produce(topic), {"key": "k", "value": "v"})
    assert api.call("DELETE", f"{TOPICS}/{topic}").status == 204
    assert api.get(f"{TOPICS}/{topic}").refusal[:2] == (404, "unknown_topic")
    assert topic not in [row["name"] for row in api.get(TOPICS).value]
    assert api.post(TOPICS, {"name": topic, "partitioner": "crc32"}).value["partitioner"] == "crc32"
    assert api.post(produce(topic), {"value": "new"}).value["topic"] == topic


def test_a_topic_that_a_message_makes_first_is_not_created_as_asked(broker, api, topic):
    router = broker.pids()["router"]
    os.kill(router, signal.SIGSTOP)
    broker.send_lines([b"%b.k|0|1|x" % topic.encode()])
    broker.wait(lambda: any(topic.encode() in line for line in broker.wal()), "it is numbered")
    with ThreadPoolExecutor() as pool, connected(broker) as other:
        asked = pool.submit(other.post, TOPICS, {"name": topic, "partitions": 4, "retentionMs": 86_400_000})
        broker.wait(lambda: list(broker.data.glob("topics/.request-*")), "it is asked for")
        os.kill(router, signal.SIGCONT)
        assert asked.result().refusal[:2] == (409, "topic_exists")


def test_a_table_is_read_right_while_the_broker_compacts_it(broker, api, topic):
    api.post(TOPICS, {"name": topic, "cleanupPolicy": "compact", "segmentBytes": 1 << 16})
    keys = [b64encode(key).decode() for key in (b"\0|%", b"", b"\xff.@.", b"key" * 20, b"a", b"b")]
    values = [None, "", *(b64encode(b"%d" % n * 50).decode() for n in range(5))]
    batch = [{"key": keys[n % 6], "value": values[n % 7]} for n in range(1500)]
    api.lines(produce(topic, "format=base64"), batch)
    checkpointed(broker, api, topic)

    def page(offset, most):
        asked = f"/api/topics/{topic}/consume?partition=0&offset={offset}&maxMessages={most}&format=base64"
        return [(row["offset"], row["key"], row["value"]) for row in api.get(asked).value["messages"]]

    before = [(n, message["key"], message["value"]) for n, message in enumerate(batch)]
    assert page(0, 200) == before[:200]
    tries = attempts("a pass over the topic")
    while (topic, 0) not in passes.read(str(broker.data)):
        next(tries)
        with suppress(BusyError):  # the broker's own is at work
            Compactor(str(broker.data), FakeLogger(), Throttle(0, cpu_share=1000)).run()
    rest, whole = page(200, 1000), page(0, 1000)
    assert whole[0] == before[0] and len(whole) < 700 and whole == sorted(set(whole) & set(before))
    assert {row[1]: row for row in whole} == {row[1]: row for row in before}
    assert [row for row in whole if row[0] >= 200] == rest
    printed = broker.kmq("consume", topic, "--json", "--from", "earliest").stdout.splitlines()
    assert [json.loads(line)["offset"] for line in printed] == [offset for offset, _, _ in whole]
    text = api.get("/metrics", Accept="text/plain").value
    assert f'kmq_uncompacted_bytes{{partition="0",topic="{topic}"}} 0.0' in text
    assert f'kmq_compacted_seconds{{partition="0",topic="{topic}"}}' in text


def checkpointed(broker, api, topic):
    """Wait until a checkpoint says that all of the topic is on disk. The deletion of an empty topic makes one."""
    api.post(TOPICS, {"name": f"{topic}-empty"})
    api.call("DELETE", f"{TOPICS}/{topic}-empty")
    data = str(broker.data)
    end = reader.partition(data, topic, 0).end_offset()
    broker.wait(lambda: compaction.synced_ends(data).get((topic, 0)) == end, "a checkpoint")


def test_a_topic_grows_and_one_with_keys_only_by_force(broker, api, topic):
    api.post(TOPICS, {"name": topic})
    for number in range(3):
        api.post(produce(topic), {"value": str(number)})
    grown = api.call("PATCH", f"{TOPICS}/{topic}", {"partitions": 2, "retentionBytes": 1 << 30})
    assert grown.status == 200 and grown.value["retentionBytes"] == 1 << 30
    assert [row["endOffset"] for row in grown.value["partitions"]] == [3, 0]
    assert api.post(produce(topic), {"key": "k", "value": "v", "partition": 1}).value["offset"] == 0
    change = {"partitions": 4}
    refused = api.call("PATCH", f"{TOPICS}/{topic}", change)
    assert refused.refusal[:2] == (422, "bad_field") and "force=true" in refused.value["message"]
    fewer = api.call("PATCH", f"{TOPICS}/{topic}", {"partitions": 1})
    assert fewer.refusal[:2] == (422, "bad_field") and "never have fewer" in fewer.value["message"]
    assert len(api.call("PATCH", f"{TOPICS}/{topic}", change | {"force": True}).value["partitions"]) == 4
    reserved = api.call("PATCH", f"{TOPICS}/__consumer_offsets", change)
    assert reserved.refusal[:2] == (400, "reserved_topic")


def test_a_topic_of_kmq_itself_is_listed_only_when_asked_for(api, broker):
    names = {row["name"] for row in api.get(f"{TOPICS}?internal=true").value}
    assert {row["name"] for row in api.get(TOPICS).value} == {name for name in names if not name.startswith("__")}


# --- anything at all -------------------------------------------------------------------------------------------------

GOOD = [
    ("POST", TOPICS, b'{"name":"f1","partitions":2,"retentionMs":60000,"cleanupPolicy":"delete"}'),
    ("PATCH", f"{TOPICS}/f1", b'{"retentionBytes":1048576,"partitions":2}'),
    ("GET", f"{TOPICS}/f1", b""),
    ("POST", "/api/topics/f1/produce?format=base64", b'{"key":"aw==","value":"YQ==","partition":1,"acks":"all"}'),
    ("POST", "/api/topics/f1/produce?format=text", b'{"messages":[{"value":"a","id":"7"},{"value":null}]}'),
    ("GET", "/api/topics/f1/consume?partition=0&offset=0&maxMessages=10&timeoutMs=1&format=text", b""),
    ("GET", "/api/topics/f1/consume?partition=1&timestamp=1700000000000&maxBytes=1000", b""),
    ("GET", "/v1/logs/f1/0/records?start=0&end=3", b""),
    ("GET", "/api/topics/f1/consume?group=g&member=m&maxMessages=3&timeoutMs=1&autoCommit=true", b""),
    (
        "POST",
        "/api/topics/f1/commit",
        b'{"group":"g","generation":1,"offsets":[{"partition":0,"offset":1,"metadata":"x"}]}',
    ),
    ("POST", "/api/topics/f1/seek", b'{"group":"h","to":{"offsets":[{"partition":0,"offset":0}]}}'),
    ("POST", "/api/groups/g/members", b'{"member":"n","topics":["f1"],"assignor":"sticky","sessionMs":6000}'),
    ("POST", "/api/groups/g/members/n/heartbeat", b'{"generation":1}'),
    ("DELETE", "/api/groups/g/members/n", b""),
    ("GET", "/api/groups/g", b""),
    ("DELETE", "/api/groups/h", b""),
]
SPICE = [
    b"\0",
    b"\xff",
    b'"',
    b"{",
    b"]",
    b"\\ud800",
    b"null",
    b"-1",
    b"1e999",
    b"[" * 50,
    b"99999999999999999999",
    b"\n",
]


def spoiled(dice, text):
    """The text with some bytes gone, doubled, or replaced."""
    at, length = dice.randrange(len(text) + 1), dice.randrange(1, 9)
    kind = dice.randrange(3)
    if kind == 0:
        return text[:at] + text[at + length :]
    if kind == 1:
        return text[:at] + text[at : at + length] * 2 + text[at + length :]
    return text[:at] + dice.choice(SPICE) + text[at + length :]


def test_whatever_is_asked_the_answer_is_documented_and_no_fault(broker, api):
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"CHAOS_SEED={seed}")
    dice = random.Random(seed)
    statuses = set()
    for _ in range(400):
        method, target, body = dice.choice(GOOD)
        for _ in range(dice.randrange(3)):
            body = spoiled(dice, body)
            where = target.encode()
            target = target if dice.randrange(2) else spoiled(dice, where).decode("latin-1")
        target = "/" + "".join(c for c in target if "!" <= c <= "~" and c != "#").lstrip("/")
        kind = {"Content_Type": NDJSON} if dice.randrange(4) == 0 else {}
        answer = api.call(method, target, body or None, **kind)
        assert answer.status not in (500, 503, 504), (method, target, body, answer.value)
        statuses.add(answer.status)
    assert {200, 400, 404, 422} <= statuses
    assert api.get("/healthz").status == 200 and "Traceback" not in broker.log()
