"""What pages of other sites make a browser send to a broker without tokens: refused. Programs are served as before."""

import http.client
import json

import pytest
from brokers import PATIENCE_S, Broker

CHROME = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)", "Accept-Language": "en"}
SIMPLE = {**CHROME, "Content-Type": "text/plain", "Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("browsers") / "broker")
    made.up(KMQ_CONSOLE_HOSTS="kmq.example")
    yield made
    made.close()


def ask(broker, method, path, body=None, host="localhost", **headers):
    """(status, code or "") of a request with exactly these headers."""
    port = int((broker.pipes / "http.port").read_text())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    shown = {"Host": f"{host}:{port}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, None if body is None else json.dumps(body), shown)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    is_error = response.status >= 400
    return response.status, json.loads(text)["code"] if is_error else ""


def messages(broker, topic):
    return len(broker.lines(topic))


def test_a_simple_request_of_another_site_stores_nothing(broker):
    assert ask(broker, "POST", "/api/topics/t/produce", {"value": "eA=="})[0] == 200
    assert ask(broker, "POST", "/api/topics/t/produce", {"value": "eA=="}, **SIMPLE) == (403, "cross_site")
    origin_only = CHROME | {"Origin": "null"}
    assert ask(broker, "POST", "/api/topics/t/produce", {"value": "eA=="}, **origin_only) == (403, "cross_site")
    assert messages(broker, "t") == 1


def test_a_get_of_another_site_commits_nothing(broker):
    ask(broker, "POST", "/api/topics/g/produce", {"value": "eA=="})
    path = "/api/topics/g/consume?group=g&autoCommit=true"
    image = CHROME | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    assert ask(broker, "GET", path, **image) == (403, "cross_site")
    assert ask(broker, "GET", path, host="127.0.0.1", **CHROME) == (403, "cross_site"), "over http no site is named"
    assert ask(broker, "GET", "/api/groups/g")[1] == "unknown_group"


@pytest.mark.parametrize("path", ["/api/overview", "/api/topics/t/messages", "/metrics", "/v1/logs", "/", "/readyz"])
def test_a_rebound_name_reads_nothing(broker, path):
    assert ask(broker, "GET", path, host="evil.example", **CHROME) == (403, "cross_site")
    assert ask(broker, "GET", path, host="evil.example") == (403, "cross_site"), "over loopback, whatever its headers"
    assert ask(broker, "GET", path, host="kmq.example", **CHROME)[0] in (200, 404)


def test_the_page_itself_and_programs_are_served(broker):
    port = int((broker.pipes / "http.port").read_text())
    own = CHROME | {"Sec-Fetch-Site": "same-origin", "Origin": f"http://localhost:{port}"}
    assert ask(broker, "POST", "/api/topics/own/produce", {"value": "eA=="}, **own)[0] == 200
    assert ask(broker, "GET", "/api/topics/own/consume?group=x", host="127.0.0.1")[0] == 200
    link = CHROME | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert ask(broker, "GET", "/", **link)[0] == 200
    assert ask(broker, "GET", "/api/overview", **link) == (403, "cross_site")


def test_without_tokens_the_console_changes_nothing(broker):
    ask(broker, "POST", "/api/topics/c/produce", {"value": "eA=="})
    assert ask(broker, "POST", "/api/topics/c/replay", {"dryRun": False}) == (403, "forbidden")
    reset = {"topic": "c", "to": "latest"}
    assert ask(broker, "POST", "/api/groups/x/reset", reset) == (403, "forbidden")


@pytest.mark.parametrize("header", ["X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Forwarded", "Via"])
def test_what_a_proxy_of_this_machine_passes_on_is_not_from_this_machine(broker, header):
    assert ask(broker, "GET", "/api/overview", **{header: "127.0.0.1"}) == (403, "forbidden")
    assert ask(broker, "GET", "/api/admin/topics", **{header: "127.0.0.1"})[0] == 200, "programs are served as before"
