"""Roles at every door of a broker: lines in, lines out, HTTP, gRPC; and what the console may without tokens."""

import json
import os
import signal
import socket

import grpc
import pytest
from api_client import Api
from brokers import PATIENCE_S, Broker

from kmq.gateway.grpc.schema import KMQ, PODBUS

ROLES = ("produce", "consume", "admin")


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    root = tmp_path_factory.mktemp("roles")
    made = Broker(root / "broker")
    made.env["KMQ_TOKENS"] = str(root / "tokens")
    made.env["KMQ_AUTO_CREATE_TOPICS"] = "off"
    made.token = {}
    for role in (*ROLES, "all"):
        arguments = [] if role == "all" else ["--role", role]
        made.token[role] = made.kmq("token", "new", f"the-{role}", *arguments).stdout.strip()
    made.up()
    yield made
    made.close()


def port(broker, name):
    return int((broker.pipes / f"{name}.port").read_text())


@pytest.fixture(scope="module")
def apis(broker):
    made = {role: Api(port(broker, "http"), token) for role, token in broker.token.items()}
    made["none"] = Api(port(broker, "http"))
    yield made
    for api in made.values():
        api.close()


def talk(number, text):
    """The first line that a port of lines answers."""
    with socket.create_connection(("127.0.0.1", number), timeout=PATIENCE_S) as sock:
        sock.sendall(text.encode())
        return sock.makefile("rb").readline().decode()


def test_the_list_of_tokens_shows_roles(broker):
    rows = json.loads(broker.kmq("token", "list", "--json").stdout)["tokens"]
    assert {row["name"]: row["roles"] for row in rows} == {
        "the-produce": ["produce"],
        "the-consume": ["consume"],
        "the-admin": ["admin"],
        "the-all": ["produce,consume,admin"],
    }
    assert broker.kmq("token", "new", "x", "--role", "read").returncode == 78


@pytest.mark.parametrize(("role", "is_open"), [("produce", True), ("consume", False), ("admin", True), ("all", True)])
def test_lines_in_need_the_role_produce(broker, role, is_open):
    reply = talk(port(broker, "ingress"), f"!hello acks=1 token={broker.token[role]}\n")
    assert (
        reply.startswith("!ok")
        if is_open
        else reply.startswith("!err 0 forbidden the token of the-consume has consume")
    )


@pytest.mark.parametrize(("role", "is_open"), [("produce", False), ("consume", True), ("admin", True), ("all", True)])
def test_lines_out_need_the_role_consume(broker, role, is_open):
    reply = talk(port(broker, "egress"), f"ASSIGN g some/0 token={broker.token[role]}\n")
    assert ("forbidden" in reply) is not is_open, reply
    status = talk(port(broker, "status"), f"GET_STATUS 99 token={broker.token[role]}\n")
    assert status == "UNKNOWN\n"


# What each role is told: method, path, body → the roles that may.
CALLS = [
    ("POST", "/api/topics/t/produce", {"value": "eA=="}, {"produce", "admin", "all"}),
    ("GET", "/api/topics/t/consume", None, {"consume", "admin", "all"}),
    ("GET", "/api/topics/t/messages", None, {"consume", "admin", "all"}),
    ("GET", "/v1/logs/t/0/records", None, {"consume", "admin", "all"}),
    ("GET", "/v1/logs/t/0/rows", None, {"consume", "admin", "all"}),
    ("POST", "/api/topics/t/seek", {"group": "g", "to": "earliest"}, {"consume", "admin", "all"}),
    ("GET", "/api/overview", None, {*ROLES, "all"}),
    ("GET", "/api/session", None, {*ROLES, "all"}),
    ("GET", "/api/admin/topics", None, {*ROLES, "all"}),
    ("GET", "/metrics", None, {*ROLES, "all"}),
    ("POST", "/api/admin/topics", {"name": "t"}, {"admin", "all"}),
    ("PATCH", "/api/admin/topics/t", {"retentionMs": -1}, {"admin", "all"}),
    ("DELETE", "/api/groups/none", None, {"admin", "all"}),
    ("POST", "/api/groups/g/reset", {"topic": "t", "to": "latest"}, {"admin", "all"}),
    ("POST", "/api/topics/t/replay", {}, {"admin", "all"}),
]


@pytest.mark.parametrize(("method", "path", "body", "allowed"), CALLS)
def test_http_serves_what_the_role_allows(apis, method, path, body, allowed):
    apis["admin"].post("/api/admin/topics", {"name": "t"})
    for role in (*ROLES, "all"):
        answer = apis[role].call(method, path, body)
        assert (answer.status == 403) is (role not in allowed), (role, answer)
        if answer.status == 403:
            assert answer.value["code"] == "forbidden" and f"the-{role}" in answer.value["message"]
            assert f"has {role} and may not do " in answer.value["message"]
    assert apis["none"].call(method, path, body).refusal == (401, "unauthorized", "")


def test_a_token_that_is_not_known_is_told_so_and_not_that_there_is_none(broker, apis):
    stranger = Api(port(broker, "http"), f"{broker.token['consume']}x")
    try:
        answer = stranger.get("/api/overview")
    finally:
        stranger.close()
    assert answer.refusal == (401, "unauthorized", "")
    assert (
        answer.value["message"] == "this token is not known here, or was revoked; make one with: kmq token new <name>"
    )
    assert "is required" in apis["none"].get("/api/overview").value["message"]


def test_grpc_serves_what_the_role_allows(broker):
    calls = [
        (PODBUS, "Produce", {"produce", "admin", "all"}),
        (PODBUS, "Consume", {"consume", "admin", "all"}),
        (KMQ, "Produce", {"produce", "admin", "all"}),
        (KMQ, "Fetch", {"consume", "admin", "all"}),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{port(broker, 'grpc')}") as channel:
        for schema, name, allowed in calls:
            method = channel.unary_unary(
                f"/{schema.service}/{name}", schema.request_of(name).SerializeToString, lambda data: data
            )
            for role in (*ROLES, "all"):
                metadata = [("authorization", f"Bearer {broker.token[role]}")]
                code = grpc.StatusCode.OK
                try:
                    method(schema.request_of(name)(), metadata=metadata, timeout=PATIENCE_S)
                except grpc.RpcError as err:
                    code = err.code()
                assert (code == grpc.StatusCode.PERMISSION_DENIED) is (role not in allowed), (name, role, code)


def test_the_session_says_what_the_token_may_do(apis):
    shown = {role: apis[role].get("/api/session").value for role in (*ROLES, "all")}
    assert {role: (row["role"], row["writable"]) for role, row in shown.items()} == {
        "produce": ("produce", False),
        "consume": ("consume", False),
        "admin": ("admin", True),
        "all": ("admin", True),
    }
    assert shown["all"]["name"] == "the-all"


def test_the_page_needs_no_token_and_shows_nothing(broker, apis):
    assert broker.get("/")[0] == 200 and broker.get("/console/console.css")[0] == 200
    assert broker.get("/pages")[0] == broker.get("/api/overview")[0] == 401


def test_what_an_admin_changes_is_told_with_who_did_it(broker, apis):
    assert apis["admin"].post("/api/admin/topics", {"name": "made"}).status == 201
    assert apis["all"].call("DELETE", "/api/admin/topics/made").status == 204
    apis["admin"].post("/api/topics/t/replay", {"dryRun": True})
    changed = [event for event in apis["consume"].get("/api/events").value["events"] if event["kind"] == "changed"]
    told = [event["text"] for event in changed if "/made" in event["text"]]
    assert told == ["DELETE /api/admin/topics/made by the-all from 127.0.0.1"]
    assert not [event for event in changed if event["about"] == "replay"], "a dry run changes nothing"
    broker.wait(
        lambda: "event=changed what=deleteTopic" in broker.log() and "who=the-all" in broker.log(), "a log line"
    )


def test_a_replay_of_which_a_letter_is_refused_is_told_with_who_did_it(broker, apis):
    for topic in ("half", "half.dlq"):
        assert apis["admin"].post("/api/admin/topics", {"name": topic}).status == 201
    headers = "origin_topic={};origin_partition=0;origin_offset=1;group=g;error=e;attempts=1"
    lines = [f"half.dlq|0|g.{n};{headers.format(topic)}|x\n" for n, topic in enumerate(("half", "gone"))]
    talk(port(broker, "ingress"), f"!hello acks=0 token={broker.token['produce']}\n{''.join(lines)}")
    broker.wait(lambda: len(broker.lines("half.dlq")) == 2, "both letters")
    answer = apis["admin"].post("/api/topics/half.dlq/replay", {"dryRun": False})
    assert (answer.status, answer.value["replayed"]) == (200, 1)
    assert answer.value["stayed"] == {"refused: half.dlq/0@1: unknown_topic": 1}
    broker.wait(lambda: broker.lines("half"), "the letter that is not refused")
    told = [event["text"] for event in apis["admin"].get("/api/events").value["events"] if event["about"] == "replay"]
    assert told == ["POST /api/topics/half.dlq/replay by the-admin from 127.0.0.1"]


def test_a_change_that_may_be_done_in_part_is_told_with_who_did_it(broker, apis):
    assert apis["admin"].post("/api/admin/topics", {"name": "slow"}).status == 201
    router = broker.pids()["router"]
    os.kill(router, signal.SIGSTOP)
    try:
        answer = apis["admin"].call("DELETE", "/api/admin/topics/slow")
    finally:
        os.kill(router, signal.SIGCONT)
    assert answer.refusal[:2] == (503, "not_ready")
    told = [event["text"] for event in apis["admin"].get("/api/events").value["events"]]
    assert "DELETE /api/admin/topics/slow by the-admin from 127.0.0.1, answered 503: may be done in part" in told
    broker.wait(lambda: apis["admin"].get("/api/admin/topics/slow").status == 404, "the topic deleted after all")
