"""The console's JSON against a broker: every answer is one that the document names, and what it says is so."""

import http.client
import re
import time
from base64 import b64encode
from contextlib import closing, suppress
from hashlib import sha256

import pytest
from api_client import Api
from brokers import PATIENCE_S, Broker
from consuls import free_ports

from kmq.broker import health
from kmq.gateway.http.server import DOCS, HEADERS, render


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("console") / "broker")
    made.up()
    yield made
    made.close()


@pytest.fixture(scope="module")
def api(broker):
    made = Api(int((broker.pipes / "http.port").read_text()))
    yield made
    made.close()


def page(broker, path, **headers):
    port = int((broker.pipes / "http.port").read_text())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, text, response.headers


def test_the_page_comes_with_headers_that_shut_others_out(broker):
    status, text, headers = page(broker, "/")
    assert status == 200 and b"<script>" not in text and b"style=" not in text
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    assert page(broker, "/", If_None_Match=headers["ETag"])[:2] == (304, b"")
    kinds = {name: page(broker, f"/console/{name}")[2].get_content_type() for name in ("index.html", "console.css")}
    assert kinds == {"index.html": "text/html", "console.css": "text/css"}


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/pages", "/api/overview", "/v1/topics", "/metrics", "/none", "/readyz"]
)
def test_no_answer_can_be_taken_for_a_script_and_no_page_has_inline_code(broker, path):
    _, text, headers = page(broker, path)
    assert headers["X-Content-Type-Options"] == "nosniff"
    if headers.get_content_type() == "text/html":
        policy = headers["Content-Security-Policy"]
        assert {name: headers[name] for name in HEADERS} == HEADERS | {"Content-Security-Policy": policy}
        assert "'unsafe-inline'" not in policy and "frame-ancestors 'none'" in policy
        assert b"<script>" not in text and b"style=" not in text
        styles = [b64encode(sha256(style).digest()).decode() for style in re.findall(b"<style>(.*?)</style>", text)]
        assert all(f"'sha256-{digest}'" in policy for digest in styles), "the page's own style, and no other"


@pytest.mark.parametrize("path", ["/console/none.js", "/console/..%2fpage.py", "/console/%2e%2e", "/console/"])
def test_only_the_files_of_the_page_are_served(broker, path):
    assert page(broker, path)[0] == 404


def test_every_finding_has_a_section_of_the_runbook_and_no_link_of_a_document_leads_nowhere(broker):
    documents, waiting = {}, ["operations.md"]
    while waiting:
        name = waiting.pop()
        status, text, headers = page(broker, f"/console/{name}")
        assert status == 200 and headers.get_content_type() == "text/html" and b"style=" not in text
        assert headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
        documents[name] = text.decode()
        assert "&lt;!--" not in documents[name]
        links = re.findall(r'href="([^"#/:]+)', documents[name])
        waiting += [link for link in links if link not in documents and link not in waiting]
    assert documents.keys() == {path.name for path in DOCS.iterdir()}
    assert all(f'<h3 id="{code}">' in documents["operations.md"] for code in (*health.REASONS, *health.WARNINGS))
    for name, text in documents.items():
        for target, anchor in re.findall(r'href="([^"#/:]*)#([^"]+)"', text):
            assert f'id="{anchor}"' in documents[target or name], (name, target, anchor)


def test_a_document_shows_markup_as_text_and_links_only_to_what_is_served():
    text = (
        "# a <b>\n<script>alert(1)</script>\n\n[x](javascript:alert(1)) [y](none.md) [z](https://a.example) [w](w.md#v)"
    )
    body = render(text, ["w.md"]).partition("<main")[2]
    assert "<script" not in body and "<b>" not in body and "<img" not in body and "&lt;script&gt;" in body
    assert re.findall(r'href="([^"]*)"', body) == ["https://a.example", "w.md#v"] and "<span>y</span>" in body


def test_the_overview_shows_what_status_shows(broker, api):
    shown = api.get("/api/overview").value
    assert shown["status"]["ready"] is True
    assert {row["name"] for row in shown["status"]["stages"]} == {*broker.status()} - {"backlog"}


def started(api):
    """Process → when it started, in unix seconds."""
    return {row["name"]: row["started"] for row in api.get("/api/overview").value["status"]["stages"]}


def test_a_process_has_started_at_a_time_of_day(broker, api):
    before = started(api)
    assert all(0 < time.time() - each < 3600 for each in before.values()), before
    broker.kill("framer")
    broker.wait(lambda: broker.status()["framer"]["restarts"] != "0", "the framer is there again")
    broker.wait(lambda: started(api)["framer"] > before["framer"] + 0.1, "it is younger now")
    broker.wait(lambda: abs(started(api)["ingress"] - before["ingress"]) < 0.1, "ingress is as old as before")


def test_rates_topics_and_groups_follow_what_is_sent(broker, api):
    assert api.post("/api/admin/topics", {"name": "shown", "partitions": 2}).status == 201
    sent = {"messages": [{"value": "eA==", "key": f"{n}"} for n in range(500)]}

    def is_shown():
        api.post("/api/topics/shown/produce?format=text", sent)
        now = api.get("/api/overview").value
        return now if any(row["topic"] == "shown" and row["rate"] > 0 for row in now["topics"]) else None

    found = []
    broker.wait(lambda: found.append(is_shown()) or found[-1], "a rate of the topic")
    row = next(row for row in found[-1]["topics"] if row["topic"] == "shown")
    assert row["partitions"] == 2 and row["records"] >= 500 and row["bytes"] > row["records"]
    assert found[-1]["rates"]["router"]["messages"] > 0 and found[-1]["topics_total"] >= 1


def test_the_table_of_topics_is_sorted_by_any_column_and_cut_into_pages(broker, api):
    sizes = {"tabled-a": 1, "tabled-b": 3, "tabled-C": 2}
    limits = {"tabled-a": -1, "tabled-b": 3_600_000, "tabled-C": 7_200_000}
    for name, count in sizes.items():
        assert api.post("/api/admin/topics", {"name": name, "retentionMs": limits[name]}).status == 201
        api.post(f"/api/topics/{name}/produce?format=text", {"messages": [{"value": "x"}] * count})

    def names(query):
        found = api.get(f"/api/overview/topics?contains=TABLED&{query}").value
        return [row["topic"] for row in found["topics"]]

    by_records = ["tabled-b", "tabled-C", "tabled-a"]
    broker.wait(lambda: names("sort=records") == by_records, "the records of three topics")
    assert names("sort=records&order=asc") == by_records[::-1]
    assert names("sort=topic&order=asc") == ["tabled-C", "tabled-a", "tabled-b"]
    assert names("sort=retentionMs") == ["tabled-a", "tabled-C", "tabled-b"], "no limit is more than any limit"
    assert names("sort=records&first=1&limit=1") == ["tabled-C"] and names("first=3") == []
    found = api.get("/api/overview/topics?contains=tabled-b").value
    assert found["found"] == 1 and found["total"] >= 3
    assert (found["topics"][0]["records"], found["topics"][0]["cleanupPolicy"]) == (3, "delete")
    assert api.get("/api/overview/topics?sort=colour").refusal == (422, "bad_field", "sort")


def test_the_lag_of_a_group_is_shown_and_kept(broker, api):
    api.post("/api/topics/lagging/produce?format=text", {"messages": [{"value": "x"}] * 10})
    offsets = {"group": "slow", "offsets": [{"partition": 0, "offset": 3}]}
    assert api.post("/api/topics/lagging/commit", offsets).status == 200

    def row():
        return next((each for each in api.get("/api/overview").value["groups"] if each["group"] == "slow"), None)

    broker.wait(lambda: (row() or {}).get("lag") == 7 and row()["lag_seconds"] is not None, "the lag of the group")
    broker.wait(lambda: 7.0 in api.get("/api/groups/slow/history").value["lag"], "the lag in the history")
    assert api.get("/api/groups/none/history").refusal == (404, "unknown_group", "")


def answers(broker):
    """True if the gateway listens. The state on the page may be what the killed one has left."""
    with suppress(OSError):
        return broker.get("/healthz")[0] == 200
    return False


def test_a_lag_that_the_gateway_does_not_know_yet_is_no_0(new_broker):
    broker = new_broker()
    broker.env["KMQ_HTTP_PORT"] = str(free_ports(1)[0])
    broker.up()
    with closing(Api(int(broker.env["KMQ_HTTP_PORT"]))) as api:
        api.post("/api/topics/lagging/produce?format=text", {"messages": [{"value": "x"}] * 10})
        commit = {"group": "slow", "offsets": [{"partition": 0, "offset": 3}]}
        assert api.post("/api/topics/lagging/commit", commit).status == 200
        pid = broker.pids()["gateway"]
    broker.kill("gateway")
    broker.wait(lambda: broker.status()["gateway"]["state"] == "ready" and broker.pids()["gateway"] != pid, "a gateway")
    broker.wait(lambda: answers(broker), "a gateway that listens")
    with closing(Api(int(broker.env["KMQ_HTTP_PORT"]))) as api:

        def lags():
            return [lag for lag in api.get("/api/history").value["series"]["lag.total"] if lag is not None]

        broker.wait(lags, "a lag that is known")
        assert lags()[0] == 7.0


def test_the_history_has_a_number_or_null_for_each_step(broker, api):
    broker.wait(lambda: any(api.get("/api/history").value["series"]["rate.router"]), "a step with a rate")
    shown = api.get("/api/history").value
    lengths = {len(row) for row in shown["series"].values()}
    assert shown["step"] == 5.0 and len(lengths) == 1 and max(lengths) <= 720
    end = shown["times_from"] + (max(lengths) - 1) * shown["step"]
    assert abs(end - shown["as_of"]) < 1


def test_events_tell_of_a_killed_stage_in_order(broker, api):
    broker.kill("router")
    broker.wait(lambda: broker.get("/readyz")[0] == 200, "readiness")

    def kinds():
        events = api.get("/api/events").value["events"]
        assert [event["id"] for event in events] == sorted(event["id"] for event in events)
        return [event["kind"] for event in events if event["about"] == "router"]

    broker.wait(lambda: "restarted" in kinds(), "the event of a restart")
    last = api.get("/api/events").value["events"][-1]["id"]
    assert all(event["id"] > last for event in api.get(f"/api/events?after={last}").value["events"])


def test_without_tokens_nobody_has_a_role(broker, api):
    shown = api.get("/api/session").value
    assert (shown["role"], shown["writable"], shown["instance"]) == ("none", False, broker.instance)
