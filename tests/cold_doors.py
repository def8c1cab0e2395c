"""A topic whose old records lie in the store, read whole through each door of a broker.

for door in DOORS:
    empty_cache(broker)
    assert door(broker, "orders", 30_000) == words
"""

import http.client
import json
import re
import shutil
from itertools import islice

from brokers import Broker
from grpc_client import Client as GrpcClient
from kafka_peer import Peer

import kmq

_WAIT_MS = 60_000


def empty_cache(broker: Broker) -> None:
    shutil.rmtree(f"{broker.data}/tier/cache", ignore_errors=True)


def port(broker: Broker, name: str) -> int:
    return int((broker.pipes / f"{name}.port").read_text())


def by_lines(broker: Broker, topic: str, count: int) -> list[str]:
    return broker.kmq("consume", topic, "--from", "earliest").stdout.splitlines()


def by_client(broker: Broker, topic: str, count: int) -> list[str]:
    with kmq.Consumer(topic, port=port(broker, "egress"), group_id="python") as consumer:
        return [(message.value or b"").decode() for message in islice(consumer, count)]


def by_http(broker: Broker, topic: str, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        more = f"offset={len(found)}&timeoutMs={_WAIT_MS}&format=text&maxMessages=10000"
        status, body = broker.get(f"/api/topics/{topic}/consume?partition=0&{more}")
        assert status == 200, body
        found += [each["value"] for each in json.loads(body)["messages"]]
    return found


def by_grpc(broker: Broker, topic: str, count: int) -> list[str]:
    found: list[str] = []
    with GrpcClient(port(broker, "grpc")) as client:
        while len(found) < count:
            answer = client.fetch(topic, 0, {"offset": len(found)}, wait_ms=_WAIT_MS, max_records=10_000)
            found += [record.value.decode() for record in answer.records]
    return found


def by_kafka(broker: Broker, topic: str, count: int) -> list[str]:
    """The values are a number, a space, and letters."""
    found: list[str] = []
    with Peer(port(broker, "kafka")) as peer:
        while len(found) < count:
            row = peer.fetch(topic, 0, len(found), wait_ms=_WAIT_MS)
            assert row.error_code == 0 and row.high_watermark == count
            found += [each.decode() for each in re.findall(rb"\d+ x{150}", bytes(row.records or b""))]
    return found


def by_log(broker: Broker, topic: str, count: int) -> list[str]:
    text, offset = b"", 0
    while offset < count:
        connection = http.client.HTTPConnection("127.0.0.1", port(broker, "http"), timeout=60)
        connection.request("GET", f"/v1/logs/{topic}/0/records?start={offset}")
        answer = connection.getresponse()
        assert answer.status == 200
        text, offset = text + answer.read(), int(answer.headers["KMQ-Next-Offset"])
        connection.close()
    return [line.rpartition(b"|")[2].decode() for line in text.splitlines()]


DOORS = [by_lines, by_client, by_http, by_grpc, by_kafka, by_log]
