"""What a leader's doors say while no follower confirms: nothing that is not committed, and how to go on."""

import os
import signal
import socket
import time
from contextlib import closing

import pytest
from api_client import Api
from test_shard import BROKERS
from test_shard_status import Brokers
from waiting import until

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


class Door:
    """A connection as a door of KMQ has one, to the leader `a` or by way of a follower."""

    def __init__(self, brokers, through="a"):
        token = (brokers.root / "a/pipes/local.token").read_text().strip()
        number = int((brokers.root / through / "pipes/ingress.port").read_text())
        self.sock = socket.create_connection(("127.0.0.1", number), 20)
        self.replies = self.sock.makefile()
        self.sock.sendall(f"!hello acks=1 producer=__door-{through} reserved=1 token={token}\n".encode())
        assert self.replies.readline().startswith("!ok ")

    def unit(self, replies, *ids):
        """Send a unit, and the question for the last id of its name; return so many replies."""
        body = "".join(f"u.@0|0|{id}|x\n" for id in ids)
        said = f"!unit {len(ids)} {len(body)} p=k1000001.1.0\n{body}!unit 0 0 p=k1000001.1.0\n"
        self.sock.sendall(said.encode())
        return [" ".join(self.replies.readline().split()[:3]) for _ in range(replies)]

    def close(self):
        self.replies.close()
        self.sock.close()


def test_what_is_not_committed_is_neither_confirmed_nor_shown_and_the_same_id_stores_it_once(brokers):
    for name in BROKERS:
        assert brokers.kmq(name, "up", *(["--no-gateway"] if name != "a" else []), **LAG).returncode == 0
    brokers.init()
    brokers.await_whole()
    until(lambda: brokers.status("a")["ready"] and (brokers.root / "a/pipes/http.port").exists(), "an open door")
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
        door, by_way_of_b = Door(brokers), Door(brokers, "b")
        assert door.unit(2, 1, 2) == ["!ack 2 5", "!last 2"]
        assert by_way_of_b.unit(3, 1, 2) == ["!dup 1 4", "!dup 2 5", "!last 2"]
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

            until(lambda: "not_enough_replicas" in brokers.kmq("a", "status").stdout, "a refusal")
            assert brokers.readyz("a")[0] == 200, "who reads is served"
            assert door.unit(3, 3, 4) == [f"!err {n} not_enough_replicas" for n in (3, 4, 5)]
            assert api.post(produce, {"value": "eA=="}).refusal[:2] == (503, "not_enough_replicas")
            read = "/api/topics/t/consume?partition=0"
            assert [each["offset"] for each in api.get(f"{read}&offset=0").value["messages"]] == [0]
            assert api.get(f"{read}&offset=9").refusal[:2] == (503, "not_ready"), "its reader may know more"
        finally:
            for pid in replicas:
                os.kill(pid, signal.SIGCONT)
        until(lambda: "not_enough_replicas" not in brokers.kmq("a", "status").stdout, "an end of refusing")
        assert api.get(f"{read}&offset=9").refusal[1] == "out_of_range"
        again = api.post(produce, {"value": "dHdv", "id": "two"}).value
        assert (again["offset"], again["duplicate"]) == (1, True), again
        until(lambda: ack(brokers, seq) == "ACK", "an ack")
        with closing(Door(brokers)) as again:
            assert again.unit(2, 3, 4) == [f"!ack 2 {seq + 2}", "!last 4"]
        for each in (door, by_way_of_b):
            each.close()
