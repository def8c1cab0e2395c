"""A topic that is larger than the disk, as users have it: every door shows the same messages, whatever is killed or away."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal

import pytest
from brokers import Broker
from grpc_client import Client as GrpcClient
from kafka_peer import Peer
from waiting import until

import kmq
from kmq.log import reader, rows, segment

COUNT = 30_000
WORDS = [f"{n} {'x' * 150}" for n in range(COUNT)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A topic of five MiB, of which one or two lie on the disk."""
    root = tmp_path_factory.mktemp("tiered")
    made = Broker(root / "b")
    made.env |= {
        "KMQ_TIER": f"file://{root}/store",
        "KMQ_TIER_EVERY": "100ms",
        "KMQ_TIER_OBJECT": "1 MiB",
        "KMQ_TIER_CACHE": "4 MiB",
        "KMQ_SEGMENT_BYTES": "256 KiB",
    }
    made.up()
    said = made.kmq("topics", "create", "orders", "--set", "tier=on", "--set", "local_retention_bytes=1MiB")
    assert said.returncode == 0, said.stderr
    assert made.kmq("produce", "orders", text="".join(f"{word}\n" for word in WORDS)).returncode == 0, made.log()
    wait_until_cold(made)
    yield made
    made.close()


def directory(broker, topic="orders"):
    return f"{broker.data}/topics/{topic}/0"


def wait_until_cold(broker, topic="orders"):
    """What the local limit allows is all that is left on the disk."""
    until(
        lambda: segment.listing(directory(broker, topic))[0][0] > COUNT // 2, "old segments leave the disk", broker.log
    )


def empty_cache(broker):
    shutil.rmtree(f"{broker.data}/tier/cache", ignore_errors=True)


def port(broker, name):
    return int((broker.pipes / f"{name}.port").read_text())


def by_lines(broker):
    return broker.kmq("consume", "orders", "--from", "earliest").stdout.splitlines()


def by_client(broker):
    with kmq.Consumer("orders", port=port(broker, "egress"), group_id="python") as consumer:
        return [message.value.decode() for _, message in zip(range(COUNT), consumer, strict=False)]


def by_http(broker):
    found = []
    while len(found) < COUNT:
        target = (
            f"/api/topics/orders/consume?partition=0&offset={len(found)}&timeoutMs=60000&format=text&maxMessages=10000"
        )
        status, body = broker.get(target)
        assert status == 200, body
        found += [each["value"] for each in json.loads(body)["messages"]]
    return found


def by_grpc(broker):
    found = []
    with GrpcClient(port(broker, "grpc")) as client:
        while len(found) < COUNT:
            answer = client.fetch("orders", 0, {"offset": len(found)}, wait_ms=60_000, max_records=10_000)
            found += [record.value.decode() for record in answer.records]
    return found


def by_kafka(broker):
    found, offset = [], 0
    with Peer(port(broker, "kafka")) as peer:
        while offset < COUNT:
            row = peer.fetch("orders", 0, offset, wait_ms=60_000)
            assert row.error_code == 0 and row.high_watermark == COUNT
            some = re.findall(rb"\d+ x{150}", bytes(row.records or b""))
            found += [each.decode() for each in some]
            offset += len(some)
    return found


def by_log(broker):
    found, offset = b"", 0
    while offset < COUNT:
        connection = http.client.HTTPConnection("127.0.0.1", port(broker, "http"), timeout=60)
        connection.request("GET", f"/v1/logs/orders/0/records?start={offset}")
        answer = connection.getresponse()
        assert answer.status == 200
        found, offset = found + answer.read(), int(answer.headers["KMQ-Next-Offset"])
        connection.close()
    return [line.rpartition(b"|")[2].decode() for line in found.splitlines()]


@pytest.mark.parametrize("door", [by_lines, by_client, by_http, by_grpc, by_kafka, by_log])
def test_every_door_shows_the_same_messages_from_the_first_one_on(broker, door):
    empty_cache(broker)
    assert door(broker) == WORDS


def test_ends_sizes_and_objects_are_shown(broker):
    shown = json.loads(broker.kmq("topics", "show", "orders", "--json").stdout)
    [log] = shown["logs"]
    assert (log["first_offset"], log["last_offset"], log["messages"]) == (0, COUNT - 1, COUNT)
    [row] = rows.of(f"{broker.data}/topics/orders/0").rows[-1:]
    assert 0 < log["local_start"] <= row.next == log["tier_end"] and log["tier_objects"] > 3
    [topic] = [
        each
        for each in json.loads(broker.kmq("topics", "list", "--json").stdout)["topics"]
        if each["topic"] == "orders"
    ]
    assert topic["tier_bytes"] == log["tier_bytes"] > 3 << 20
    assert f"{log['local_start']:,}" in broker.kmq("topics", "describe", "orders").stdout
    status = json.loads(broker.kmq("tier", "status", "--json").stdout)
    assert (status["partitions"], status["row_bytes"]) == (1, log["tier_bytes"])
    assert status["rows"] == log["tier_objects"] and status["behind_bytes"] < 2 << 20
    copy = json.loads(broker.kmq("status", "--json").stdout)["copy"]
    assert (copy["objects"], copy["bytes"]) == (log["tier_objects"], log["tier_bytes"])
    assert shown["limits"]["tier"]["value"] == "on" and shown["limits"]["local_retention_bytes"]["value"] == 1 << 20
    objects = json.loads(broker.kmq("tier", "ls", "orders", "--json").stdout)
    assert objects[0]["from"] == "0" and {each["what"] for each in objects} == {"add orders/0"}
    assert broker.kmq("tier", "verify", "--deep").returncode == 0
    done = broker.kmq("verify")
    assert done.returncode == 0, done.stdout


def test_the_cache_stays_within_its_bounds(broker):
    by_http(broker)
    sizes = [
        os.path.getsize(f"{path}/{name}") for path, _, names in os.walk(f"{broker.data}/tier/cache") for name in names
    ]
    assert 0 < sum(sizes) <= 5 << 20


def test_a_restart_finds_the_same_and_new_messages_follow(broker):
    broker.down()
    broker.up()
    assert reader.partition(str(broker.data), "orders", 0).first_offset == 0
    assert by_grpc(broker) == WORDS


def test_what_cannot_be_is_refused_by_name(broker):
    table = broker.kmq("topics", "set", "orders", "tier=off", "cleanup=compact")
    assert table.returncode != 0 and "old records lie in KMQ_TIER" in table.stderr
    assert broker.kmq("topics", "create", "table", "--set", "cleanup=compact").returncode == 0
    tiered = broker.kmq("topics", "set", "table", "tier=on")
    assert tiered.returncode != 0 and "cleanup=compact" in tiered.stderr
    said = broker.kmq("topics", "create", "plain")
    assert said.returncode == 0
    said = broker.kmq("topics", "set", "plain", "tier=on")
    assert said.returncode == 0 and "retention_bytes" in said.stdout and "as retention_age" in said.stdout


def test_kills_of_the_copy_and_of_the_router_lose_nothing(broker):
    words = [f"k{n} {'y' * 150}" for n in range(COUNT // 2)]
    assert (
        broker.kmq("topics", "create", "killed", "--set", "tier=on", "--set", "local_retention_bytes=1MiB").returncode
        == 0
    )
    for number, at in enumerate(range(0, len(words), 1500)):
        text = "".join(f"{word}\n" for word in words[at : at + 1500])
        assert broker.kmq("produce", "killed", text=text).returncode == 0
        victim = ("tier", "router")[number % 2]
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(broker.status()[victim]["pid"]), signal.SIGKILL)
    until(lambda: segment.listing(directory(broker, "killed"))[0][0] > 0, "old segments leave the disk", broker.log)
    done = broker.kmq("consume", "killed", "--from", "earliest")
    assert done.stdout.splitlines() == words
    assert broker.kmq("verify").returncode == 0


def test_truncating_moves_the_start_at_once_and_its_objects_are_dropped(broker):
    end = rows.of(directory(broker)).rows[1].next
    done = broker.kmq("topics", "truncate", "orders", "--partition", "0", "--before", str(end), "--yes")
    assert done.returncode == 0, done.stderr
    assert reader.partition(str(broker.data), "orders", 0).first_offset == end
    until(lambda: rows.of(directory(broker)).rows[0].base == end, "rows before the start are dropped", broker.log)


def test_after_the_loss_of_the_disk_history_is_read_from_the_store(broker):
    words = [f"r{n} {'z' * 150}" for n in range(COUNT // 2)]
    asked = "topics", "create", "lost", "--set", "tier=on", "--set", "local_retention_bytes=1MiB"
    assert broker.kmq(*asked).returncode == 0
    assert broker.kmq("produce", "lost", text="".join(f"{word}\n" for word in words)).returncode == 0
    until(lambda: segment.listing(directory(broker, "lost"))[0][0] > 0, "old segments leave the disk", broker.log)
    until(lambda: json.loads(broker.kmq("tier", "status", "--json").stdout)["age"] == 0, "the copy is not behind")
    broker.lose_disk()
    done = broker.kmq("restore", "--yes")
    assert done.returncode == 0, done.stderr
    broker.up()
    assert broker.kmq("produce", "lost", text="new\n").returncode == 0
    found = broker.kmq("consume", "lost", "--from", "earliest").stdout.splitlines()
    assert found == [*words, "new"]
    assert broker.kmq("verify").returncode == 0
