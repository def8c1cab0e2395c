"""What a leader's doors say while no follower confirms: nothing that is not committed, and how to go on."""

import os
import signal
import socket
import time
from contextlib import closing

import pytest
from api_client import Api
from test_shard import BROKERS, wait_for
from test_shard_status import Brokers

from kmq.log import wal

LAG = {"KMQ_REPLICA_LAG": "12s"}  # a request is given up before it


@pytest.fixture
def brokers(consul, tmp_path):
    made = Brokers(consul.address, tmp_path)
    yield made
    made.close()


def port(brokers, name):
    return int((brokers.root / "a" / "pipes" / f"{name}.port").read_text())


def ack(brokers, seq):
    with socket.create_connection(("127.0.0.1", port(brokers, "ack")), 20) as sock:
        sock.sendall(b"GET_ACK %d\n" % seq)
        return sock.makefile().readline().strip()


def test_what_is_not_committed_is_neither_confirmed_nor_shown_and_the_same_id_stores_it_once(brokers):
    for name in BROKERS:
        assert brokers.kmq(name, "up", *(["--no-gateway"] if name != "a" else []), **LAG).returncode == 0
    brokers.init()
    brokers.await_whole()
    wait_for("an open door", lambda: brokers.status("a")["ready"] and (brokers.root / "a/pipes/http.port").exists())
    replicas = [
        next(each["pid"] for each in brokers.status(name)["stages"] if each["name"] == "replica") for name in "bc"
    ]
    data = f"{brokers.root}/a/data"
    with closing(Api(port(brokers, "http"))) as api:
        refused = api.post("/api/admin/topics", {"name": "t", "replicationFactor": 2})
        assert refused.refusal == (422, "bad_field", "replicationFactor") and "must be 3" in refused.value["message"]
        assert api.post("/api/admin/topics", {"name": "t", "replicationFactor": 3}).value["replicationFactor"] == 3
        produce = "/api/topics/t/produce"
        assert api.post(produce, {"value": "b25l", "id": "one"}).status == 200
        for pid in replicas:
            os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert api.post(produce, {"value": "dHdv", "id": "two"}).refusal[:2] == (503, "not_answered")
            assert time.monotonic() - began > 4.9
            seq = wal.last_stored(data)[0]
            assert (ack(brokers, seq - 1), ack(brokers, seq)) == ("ACK", "PENDING")
            assert brokers.kmq("a", "log", "cat", "append").stdout.splitlines()[-1].startswith(f"{seq - 1}|")
            listed = api.get("/v1/logs?topic=__append&topic=t").value
            assert [each["end_offset"] for each in listed] == [seq, 1]

            wait_for("a refusal", lambda: "not_enough_replicas" in brokers.kmq("a", "status").stdout)
            assert brokers.readyz("a")[0] == 200, "who reads is served"
            assert api.post(produce, {"value": "eA=="}).refusal[:2] == (503, "not_enough_replicas")
            read = "/api/topics/t/consume?partition=0"
            assert [each["offset"] for each in api.get(f"{read}&offset=0").value["messages"]] == [0]
            assert api.get(f"{read}&offset=9").refusal[:2] == (503, "not_ready"), "its reader may know more"
        finally:
            for pid in replicas:
                os.kill(pid, signal.SIGCONT)
        wait_for("an end of refusing", lambda: "not_enough_replicas" not in brokers.kmq("a", "status").stdout)
        assert api.get(f"{read}&offset=9").refusal[1] == "out_of_range"
        again = api.post(produce, {"value": "dHdv", "id": "two"}).value
        assert (again["offset"], again["duplicate"]) == (1, True), again
        wait_for("an ack", lambda: ack(brokers, seq) == "ACK")
