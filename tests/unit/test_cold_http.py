"""Records that lie in the store, by HTTP: long polls, ranges of a log, offsets, and a store that is away."""

import http.client
import json
import os

import pytest
from api_client import document
from jsonschema import Draft202012Validator
from log_server import up
from made_up import FIRST_TS
from tiered import cold_broker

from kmq.tier import objects

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def made(tmp_path):
    return cold_broker(tmp_path)


@pytest.fixture
def broker(made):
    with up(made.data, synced=400, KMQ_TIER=f"file://{made.store.root}") as found:
        found.serve()
        yield found


def get(broker, target):
    """(status, headers, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", broker.port, timeout=100)
    try:
        connection.request("GET", target)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def test_a_range_of_a_log_ends_with_an_object_and_goes_on_with_the_next(made, broker):
    offset, found = 0, b""
    while offset < 400:
        status, headers, body = get(broker, f"/v1/logs/t/0/records?start={offset}")
        assert status == 200 and int(headers["KMQ-First-Offset"]) == offset
        offset, found = int(headers["KMQ-Next-Offset"]), found + body
    assert found == b"".join(made.sent)


@pytest.mark.parametrize("target", [f"offset?time={FIRST_TS + 8}", "offset?seq=8", "records?start=3&end=9"])
def test_a_damaged_cached_object_is_fetched_once_more(made, broker, target):
    good = get(broker, f"/v1/logs/t/0/{target}")
    with open(f"{made.data}/tier/cache/t/1/0/0/log", "r+b") as file:
        file.write(b"999")
    status, _, body = get(broker, f"/v1/logs/t/0/{target}")
    assert (status, body) == (good[0], good[2]) == (200, good[2])


def test_offsets_are_those_of_the_whole_partition(made, broker):
    [row] = json.loads(get(broker, "/v1/logs?topic=t&stamps=1")[2])["logs"]
    assert (row["first_offset"], row["end_offset"]) == (0, 400)
    assert json.loads(get(broker, f"/v1/logs/t/0/offset?time={FIRST_TS + 8}")[2]) == {"offset": 7}
    cuts = json.loads(get(broker, "/v1/logs/t/0/cuts?start=0&end=400&bytes=9000")[2])["cuts"]
    assert cuts and cuts == sorted(cuts)


def test_a_topic_says_what_lies_in_the_store_and_what_on_the_disk(made, broker):
    [log] = json.loads(get(broker, "/api/admin/topics/t")[2])["partitions"]
    found = made.rows()
    assert (log["localStartOffset"], log["tierEndOffset"], log["tierObjects"]) == (
        made.local()[0],
        found[-1][1],
        len(found),
    )
    assert log["startOffset"] == 0 and log["tierBytes"] == sum(map(len, made.sent[: found[-1][1]]))


def test_a_long_poll_waits_for_the_store(made, broker):
    offset, found = 0, []
    while offset < 400:
        status, _, body = get(broker, f"/api/topics/t/consume?partition=0&offset={offset}&timeoutMs=60000&format=text")
        assert status == 200, body
        messages = json.loads(body)["messages"]
        assert messages and messages[0]["offset"] == offset
        found += [each["offset"] for each in messages]
        offset = found[-1] + 1
    assert found == [*range(400)]


def test_while_the_store_is_away_it_says_cold_and_when_to_come_again(made, broker):
    os.rename(made.store.root, f"{made.store.root}-away")
    status, headers, body = get(broker, "/api/topics/t/consume?partition=0&offset=0&timeoutMs=0")
    assert (status, json.loads(body)["code"]) == (503, "cold") and headers["Retry-After"]
    status, _, body = get(broker, "/api/topics/t/consume?partition=0&offset=390&timeoutMs=0")
    assert status == 200 and json.loads(body)["messages"][0]["offset"] == 390
    os.rename(f"{made.store.root}-away", made.store.root)
    status, _, body = get(broker, "/api/topics/t/consume?partition=0&offset=0&timeoutMs=60000")
    assert status == 200 and json.loads(body)["messages"][0]["offset"] == 0


def test_rows_in_force_are_told_to_who_reads_objects_itself(made, broker):
    status, _, body = get(broker, "/v1/logs/t/0/rows")
    found = json.loads(body)
    assert status == 200
    assert (found["first_offset"], found["local_offset"], found["end_offset"]) == (0, made.local()[0], 400)
    assert [(row["base"], row["next"]) for row in found["rows"]] == made.rows()
    for row in found["rows"]:
        content = b"".join(made.store.get(row["key"]))
        lines = b"".join(objects.unpack([content], row["key"]))
        assert lines == b"".join(made.sent[row["base"] : row["next"]])
        assert (row["bytes"], row["size"]) == (len(lines), len(content))
    shape = Draft202012Validator({"$ref": "#/components/schemas/LogRows", "components": document()["components"]})
    shape.validate(found)
    third = found["rows"][2]
    some = json.loads(get(broker, f"/v1/logs/t/0/rows?start={third['base']}&end={third['next']}")[2])
    assert some["rows"] == [third] and some["first_offset"] == 0
    assert json.loads(get(broker, "/v1/logs/__append/0/rows")[2])["rows"] == []
    assert get(broker, "/v1/logs/t/9/rows")[0] == 404


def test_a_damaged_tier_file_is_a_refusal_that_names_it(made, broker):
    with open(f"{made.data}/topics/t/0/tier", "ab") as file:
        file.write(b"rubbish\n")
    status, _, body = get(broker, "/v1/logs/t/0/rows")
    assert status == 500 and json.loads(body)["code"] == "damaged" and "topics/t/0/tier" in json.loads(body)["message"]
