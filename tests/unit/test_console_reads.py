"""Bounds of the console's reads in time and number, on queue files without a broker."""

import json
import os
import shutil
import threading
from contextlib import closing, contextmanager
from http.client import HTTPConnection

import pytest
from api_client import Api
from log_server import up
from made_data import write_data

from kmq.gateway.console import messages, overview
from kmq.gateway.http import console
from kmq.log import compaction, identity, segment, topic_changes, topics
from kmq.log.segment import COMPACT

PATIENCE_S = 100.0
LINES = [b"t|1700000000.%03d|%d|v%d" % (n, n, n) for n in range(1, 401)]


@contextmanager
def serving(data, count):
    """The API of a gateway over a directory with `count` records."""
    with up(data, synced=count) as made:
        made.page.rows["router"].seq = count
        made.serve()
        with closing(Api(made.port)) as api:
            yield api


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


def assert_too_many(broker, path):
    """The next request is refused, whatever the ones before it are waiting for."""
    connection = HTTPConnection("127.0.0.1", broker.port, timeout=PATIENCE_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["code"]) == (429, "too_many")
    connection.close()


def test_reads_that_wait_are_bounded_and_the_next_one_is_refused(broker, monkeypatch):
    monkeypatch.setattr(console, "_WAITING", 2, raising=False)
    begun, may_end, statuses = threading.Semaphore(0), threading.Event(), []

    def find(partitions, finder, topic, wanted):
        begun.release()
        assert may_end.wait(PATIENCE_S)
        return {"as_of": 1.0, "messages": [], "next": [], "before": None, "looked": 0, "of": 0, "error": None}

    def ask():
        with closing(Api(broker.port)) as api:
            statuses.append(api.get("/api/topics/t/messages").status)

    monkeypatch.setattr(console, "find_messages", find)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=PATIENCE_S) and begun.acquire(timeout=PATIENCE_S)
        assert_too_many(broker, "/api/topics/t/letters")
    finally:
        may_end.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert statuses == [200, 200]


def test_a_stream_that_is_followed_ends_after_its_time(broker, monkeypatch):
    monkeypatch.setattr(console, "_FOLLOWED_S", 0.3, raising=False)
    connection = HTTPConnection("127.0.0.1", broker.port, timeout=PATIENCE_S)
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


def walk(api, query):
    """Every value of the pages of a search, newest first, as `before` leads through them; and the last answer."""
    values, more = [], ""
    while True:
        found = api.get(f"/api/topics/t/messages?{query}{more}").value
        values += [message["value"] for message in reversed(found["messages"])]
        if found["before"] is None:
            return values, found
        assert found["before"] > 0 and more != f"&before={found['before']}", "each page gets some way"
        more = f"&before={found['before']}"


def test_pages_of_the_newest_show_each_message_of_all_partitions_once(broker):
    with closing(Api(broker.port)) as api:
        for query in ("limit=17", "limit=500", "limit=17&partition=2"):
            values, last = walk(api, query)
            expected = [f"v{n}" for n in range(400, 0, -1)]
            if "partition" in query:
                one = api.get("/api/topics/t/messages?partition=2&from=earliest&limit=500").value["messages"]
                expected = [message["value"] for message in reversed(one)]
            assert values == expected and last["looked"] == last["of"] == len(expected)
        assert api.get("/api/topics/t/messages?before=5&offset=0&partition=0").refusal == (422, "bad_field", "before")


def test_a_search_is_bounded_says_how_far_it_looked_and_goes_on(broker, monkeypatch):
    monkeypatch.setattr(messages, "_SCANNED", 64)
    monkeypatch.setattr(messages, "_MOST_WINDOW", 16)
    with closing(Api(broker.port)) as api:
        first = api.get("/api/topics/t/messages?value=v7").value
        assert first["messages"] == [] and first["of"] == 400 and 32 <= first["looked"] < 200
        values, last = walk(api, "value=v7&limit=5")
        assert values == [*(f"v{n}" for n in range(79, 69, -1)), "v7"] and last["looked"] == 400
        onward = api.get("/api/topics/t/messages?value=nobody&from=earliest").value
        assert onward["messages"] == [] and onward["looked"] <= onward["of"] == 400
        assert walk(api, "header=none")[0] == walk(api, "key=none")[0] == []


def test_a_header_is_searched_by_its_name_and_its_value(tmp_path):
    lines = [b"t|0|%d;hue=%d|v%d" % (n, n % 3, n) for n in range(1, 10)] + [
        b"t|0|10;size|dHJ1ZQ==",
        b"t|0|11;hue;enc=b64|dHJ1ZQ==",
    ]
    with serving(write_data(tmp_path, lines, {"t": 2}), len(lines)) as api:
        assert walk(api, "header=hue%3D2")[0] == ["v8", "v5", "v2"]
        assert walk(api, "header=hue")[0] == ["true", *(f"v{n}" for n in range(9, 0, -1))]
        assert walk(api, "value=rue")[0] == ["true"], "the value, not the line"


def test_damage_is_told_and_hides_nothing_else(tmp_path):
    data = write_data(tmp_path, [line + b"y" * 1000 for line in LINES], {"t": 1}, group=50)  # of several blocks
    [log] = (tmp_path / "topics" / "t" / "0").glob("*.log")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0xFF
    log.write_bytes(bytes(content))
    with serving(data, len(LINES)) as api:
        found = api.get("/api/topics/t/messages?limit=500").value
        good = [message["offset"] for message in found["messages"]]
        error = found["error"]
        assert error["code"] == "damaged" and 200 < len(good) < 400 and {0, 399} <= {*good}
        assert not any(error["first_offset"] <= offset < error["next_offset"] for offset in good)


def test_a_search_of_many_partitions_shows_what_it_looked_at_and_gets_on(tmp_path, monkeypatch):
    count = 16 * 600
    monkeypatch.setattr(messages, "_SCANNED", 4096)
    monkeypatch.setattr(messages, "_SCAN_S", PATIENCE_S)
    lines = [b"t|0|%d|v%d" % (n, n) for n in range(1, count + 1)]
    with serving(write_data(tmp_path, lines, {"t": 16}), count) as api:
        found = api.get(f"/api/topics/t/messages?value=v{count - 1000}").value
        assert [message["value"] for message in found["messages"]] == [f"v{count - 1000}"]
        looked = 0
        while found["before"] is not None:
            assert found["looked"] >= looked + 2048, "half of what a search may read is progress"
            assert found["looked"] == count + 1 - found["before"], "what lies before is looked at by the next one"
            looked = found["looked"]
            found = api.get(f"/api/topics/t/messages?value=nobody&before={found['before']}").value
        assert found["looked"] == found["of"] == count


def test_a_search_of_more_partitions_than_it_may_read_gets_on(tmp_path, monkeypatch):
    count = 64 * 32
    monkeypatch.setattr(messages, "_SCANNED", 256)
    monkeypatch.setattr(messages, "_SCAN_S", PATIENCE_S)
    data = write_data(tmp_path, [b"t|0|%d|v%d" % (n, n) for n in range(1, count + 1)], {"t": 64})
    with serving(data, count) as api:
        first = api.get("/api/topics/t/messages?value=nobody").value
        second = api.get(f"/api/topics/t/messages?value=nobody&before={first['before']}").value
        assert second["looked"] >= first["looked"] + 10 >= 20 and second["before"] <= first["before"] - 10


@pytest.fixture
def windows(monkeypatch):
    """The bytes of what each window has found."""
    sizes, window = [], messages._window

    def look(*arguments):
        found = window(*arguments)
        sizes.append(sum(message.size for message in found))
        return found

    monkeypatch.setattr(messages, "_window", look)
    return sizes


def test_the_newest_get_past_a_gap_of_compaction_however_late_it_is(tmp_path, windows, monkeypatch):
    data = str(tmp_path)
    identity.open_data(data)
    topics.declare(data, "t", 1, {"cleanup": COMPACT})
    count = 101_000
    write_data(data, [b"t.k|0|%d|v%d" % (n, n) for n in range(1, count + 1)], segment_bytes=4_000_000)
    which = compaction.sealed(data, "t", 0, compaction.synced_ends(data)["t", 0])[0]
    with compaction.compactor(data) as where:
        compaction.lay_out(data, which, range(which.first, which.end), where)
    compaction.install(data, which)
    assert which.first == 0 and which.end > 80_000, "all but its first and last record have gone"
    monkeypatch.setattr(messages, "_READ_S", 0.0)
    monkeypatch.setattr(messages, "_SCAN_S", 0.0)
    with serving(data, count) as api:
        for query in ("limit=1", "value=v"):
            windows.clear()
            more = f"&before={which.end + 2}"
            values = []
            while more:
                found = api.get(f"/api/topics/t/messages?{query}{more}").value
                values += [message["value"] for message in reversed(found["messages"])]
                assert more != f"&before={found['before']}"
                more = found["before"] and f"&before={found['before']}"
            assert values == [f"v{which.end + 1}", f"v{which.end}", "v1"] and len(windows) < 50


def test_segments_that_retention_deletes_meanwhile_are_not_counted(tmp_path, monkeypatch):
    data = write_data(tmp_path, LINES, {"t": 1}, segment_bytes=2000, group=20)
    *_, (last, _) = segment.listing(f"{data}/topics/t/0")
    begin = messages._begin

    def delete(*arguments):
        begun = begin(*arguments)
        for first, path in segment.listing(f"{data}/topics/t/0"):
            if first < last:
                os.unlink(path)
        return begun

    monkeypatch.setattr(messages, "_begin", delete)
    with serving(data, len(LINES)) as api:
        found = api.get("/api/topics/t/messages?limit=500").value
        assert [message["offset"] for message in found["messages"]] == [*range(last, 400)]
        assert found["before"] is None and found["looked"] == found["of"] == 400 - last


def test_a_window_holds_few_bytes_however_large_older_messages_are(tmp_path, windows, monkeypatch):
    monkeypatch.setattr(messages, "_WINDOW_BYTES", 256 << 10)
    large = [b"t|0|%d|v%d %b" % (n, n, b"x" * 60_000) for n in range(1, 101)]
    lines = large + [b"t|0|%d|v%d " % (n, n) for n in range(101, 121)]
    with serving(write_data(tmp_path, lines, {"t": 1}, group=10), len(lines)) as api:
        for query in ("limit=500", "limit=500&value=v"):
            windows.clear()
            values, _ = walk(api, query)
            assert [value.split()[0] for value in values] == [f"v{n}" for n in range(120, 0, -1)]
            assert max(windows) < 1 << 20, "some window and a block at each of its ends"


def test_a_table_of_topics_parses_a_file_once_and_looks_for_changes_each_time(broker, monkeypatch):
    data, reads, read = broker.settings.data, [], topics.read
    for number in range(5):
        topics.make(data, f"tabled{number}", topics.Declaration(1, 1, {"retention_age": f"{number + 1}d"}))
    with closing(Api(broker.port)) as api:

        def names():
            found = api.get("/api/overview/topics?contains=tabled&sort=retentionMs&order=asc").value["topics"]
            return [row["topic"][-1] for row in found]

        assert names() == [*"01234"]
        monkeypatch.setattr(topics, "read", lambda data, name: reads.append(name) or read(data, name))
        assert names() == [*"01234"] and reads == []
        topic_changes.submit(data, topic_changes.SET, "tabled0", {"retention_age": "9d"})
        assert names() == [*"12340"] and reads == []
        topics.make(data, "tabled1", topics.Declaration(1, 1, {"retention_age": "never"}))
        assert names() == [*"23401"]


def test_requests_that_wait_for_the_table_of_topics_are_bounded(broker, monkeypatch):
    monkeypatch.setattr(console, "_TABLES", 1, raising=False)
    begun, may_end, statuses = threading.Event(), threading.Event(), []

    def page(self, wanted):
        begun.set()
        assert may_end.wait(PATIENCE_S)
        return {"as_of": 1.0, "total": 0, "found": 0, "topics": []}

    def ask():
        with closing(Api(broker.port)) as api:
            statuses.append(api.get("/api/overview/topics").status)

    monkeypatch.setattr(overview.ConsoleOverview, "_topics_page", page)
    thread = threading.Thread(target=ask)
    try:
        thread.start()
        assert begun.wait(PATIENCE_S)
        assert_too_many(broker, "/api/overview/topics")
    finally:
        may_end.set()
        thread.join(PATIENCE_S)
    assert statuses == [200]


def test_without_the_directory_of_topics_a_list_says_that_the_data_is_missing(tmp_path):
    with serving(write_data(tmp_path, LINES, {"t": 1}), len(LINES)) as api:
        shutil.rmtree(tmp_path / "topics")
        for path in ("overview/topics", "overview/topics?sort=retentionMs", "admin/topics", "admin/topics/t"):
            found = api.get(f"/api/{path}")
            assert (found.status, found.value["code"]) == (503, "not_ready"), path
