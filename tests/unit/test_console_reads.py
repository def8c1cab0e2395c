"""Bounds of the console's reads in time and number, on queue files without a broker."""

import json
import threading
from contextlib import closing
from http.client import HTTPConnection

import pytest
from api_client import Api
from log_server import up
from made_data import write_data

from kmq.gateway.console import messages
from kmq.gateway.http import console
from kmq.log import topic_changes, topics

PATIENCE_S = 30.0
LINES = [b"t|1700000000.%03d|%d|v%d" % (n, n, n) for n in range(1, 401)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    data = write_data(tmp_path_factory.mktemp("data"), LINES, {"t": 4})
    with up(data, synced=len(LINES)) as found:
        found.page.rows["router"].seq = len(LINES)
        found.serve()
        yield found


def test_a_search_has_one_deadline_for_all_partitions(broker, monkeypatch):
    monkeypatch.setattr(messages, "_SCAN_S", 0.0)
    with closing(Api(broker.port)) as api:
        found = api.get("/api/topics/t/messages?key=nobody&from=earliest").value
        assert [row["offset"] > 0 for row in found["next"]] == [True, False, False, False]
        later = api.get("/api/topics/t/messages?key=nobody&partition=3&offset=0").value
        assert later["next"][0]["offset"] > 0, "the search goes on in each partition"


def test_reads_that_wait_are_bounded_and_the_next_one_is_refused(broker, monkeypatch):
    monkeypatch.setattr(console, "_WAITING", 2, raising=False)
    begun, may_end, statuses = threading.Semaphore(0), threading.Event(), []

    def find(partitions, finder, topic, wanted):
        begun.release()
        assert may_end.wait(PATIENCE_S)
        return {"as_of": 1.0, "messages": [], "next": [], "error": None}

    def ask():
        with closing(Api(broker.port)) as api:
            statuses.append(api.get("/api/topics/t/messages").status)

    monkeypatch.setattr(console, "find_messages", find)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=PATIENCE_S) and begun.acquire(timeout=PATIENCE_S)
        connection = HTTPConnection("127.0.0.1", broker.port, timeout=5)
        connection.request("GET", "/api/topics/t/letters")
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["code"]) == (429, "too_many")
        connection.close()
    finally:
        may_end.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert statuses == [200, 200]


def test_a_stream_that_is_followed_ends_after_its_time(broker, monkeypatch):
    monkeypatch.setattr(console, "_FOLLOWED_S", 0.3, raising=False)
    connection = HTTPConnection("127.0.0.1", broker.port, timeout=10)
    connection.request("GET", "/api/topics/t/follow")
    lines = connection.getresponse().read().splitlines()
    connection.close()
    assert lines and json.loads(lines[0])["error"] is None


def test_a_list_of_topics_looks_for_waiting_requests_once(broker, monkeypatch):
    """Each look lists the directory of all topics: one for each topic took seconds at 2,000 topics."""
    looks, waiting = [], topic_changes.waiting
    monkeypatch.setattr(topic_changes, "waiting", lambda data: looks.append(data) or waiting(data))
    for name in ("a", "b", "c"):
        topics.make(broker.settings.data, name, topics.Declaration(1, 1, {"retention_age": "1d"}))
    topic_changes.submit(broker.settings.data, topic_changes.SET, "b", {"retention_age": "2d"})
    with closing(Api(broker.port)) as api:
        found = {row["name"]: row["retentionMs"] for row in api.get("/api/topics").value}
    assert found["a"] == found["c"] == 86_400_000 and found["b"] == 2 * 86_400_000
    assert len(looks) == 1
