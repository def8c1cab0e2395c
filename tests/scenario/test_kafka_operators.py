"""What an operator sees of the Kafka port: kmq status, doctor, top and metrics, and clients that are sent to a wrong address."""

import contextlib
import json
import socket
import subprocess
import time
from contextlib import contextmanager
from functools import partial

import pytest
from brokers import ROOT, Broker
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from kafka_peer import Peer
from waiting import meanwhile

from kmq.gateway.kafka.wire import Key


@pytest.fixture
def new_broker(tmp_path):
    made = []

    def make():
        made.append(Broker(tmp_path / f"b{len(made)}"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def port(broker):
    return int((broker.pipes / "kafka.port").read_text())


def kafka_of(broker):
    return json.loads(broker.kmq("status", "--json").stdout)["kafka"]


def checks(broker, **settings):
    rows = json.loads(broker.kmq("doctor", "--json", **settings).stdout)["checks"]
    return {row["check"]: row for row in rows}


@contextmanager
def repeated(*actions):
    """Each of these again and again, in a thread of its own, until the block ends. Yields how often, by action."""
    done = dict.fromkeys(actions, 0)

    def repeat(action):
        with contextlib.suppress(KafkaException):
            action()
        done[action] += 1

    with meanwhile(*(partial(repeat, action) for action in actions), every_s=0.5):
        yield done


def test_clients_that_never_come_to_the_address_they_are_told_are_found(new_broker):
    subprocess.run([ROOT / "scripts" / "kafka-clients", "kcat"], capture_output=True, check=True)
    broker = new_broker()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        wrong = f"127.0.0.1:{closed.getsockname()[1]}"
    broker.env |= {"KMQ_KAFKA_ADVERTISE": wrong, "KMQ_AUTO_CREATE_TOPICS": "off"}
    broker.up()
    assert broker.kmq("topics", "create", "orders").returncode == 0
    bootstrap = {"bootstrap.servers": f"127.0.0.1:{port(broker)}", "log_level": 0, "socket.timeout.ms": 2000}
    admin = AdminClient({**bootstrap, "client.id": "lists"})
    waiting = Producer({**bootstrap, "client.id": "waits-for-a-topic"})
    waiting.produce("not-there", b"x")
    one = Peer(port(broker))

    def uses_one_connection():
        one.ask(Key.METADATA, 7, topics=[{"name": "orders"}], allow_auto_topic_creation=False)
        one.fetch("orders", 0, 0)

    def kcat():
        servers, client = bootstrap["bootstrap.servers"], "client.id=kcat"
        subprocess.run(["kcat", "-L", "-b", servers, "-X", client], capture_output=True, timeout=30)

    def lost(client, topics):
        """A program that begins anew every few seconds: librdkafka 2.16 may fall silent for good after a few."""
        consumer = Consumer({**bootstrap, "client.id": client, "group.id": client})
        consumer.subscribe([topics])
        consumer.poll(4)
        consumer.close()

    def warnings():
        return {row["code"]: row for row in json.loads(broker.kmq("status", "--json").stdout)["warnings"]}

    honest = (lambda: admin.list_topics(timeout=2), lambda: waiting.poll(0), uses_one_connection, kcat)
    with repeated(*honest) as done:
        broker.wait(lambda: min(done[kcat], done[uses_one_connection]) > 24, "seconds of honest clients")
        assert kafka_of(broker)["misdirected"] == 0
        with repeated(lambda: lost("lost-a", "orders"), lambda: lost("lost-b", "^orders.*")):
            broker.wait(lambda: kafka_of(broker)["misdirected"] == 2, "two clients that are found")
            warning = warnings()["kafka_misdirected"]
            assert "2 clients of Kafka" in warning["why"] and wrong in warning["why"]
            assert "KMQ_KAFKA_ADVERTISE" in warning["advice"]
            broker.wait(lambda: "event=kafka_misdirected" in broker.log(), "a log line")
            assert checks(broker)["broker: kafka_misdirected"]["level"] == "warning"
    [line] = [line for line in broker.log().splitlines() if "event=kafka_misdirected" in line]
    assert f"told={wrong}" in line and "client=lost-" in line and "level=warn" in line
    one.close()


def test_a_stranger_makes_no_table_of_clients_grow_for_ever(new_broker):
    broker = new_broker()
    broker.up()
    with Peer(port(broker), b"lost") as peer:

        def look():
            peer.ask(Key.METADATA, 7, topics=[{"name": "t"}], allow_auto_topic_creation=True)

        def is_found():
            look()
            return kafka_of(broker)["misdirected"] == 1

        broker.wait(is_found, "a client that asks again and again on one connection")
        at = time.monotonic()
        for number in range(1000):
            peer.client = b"stranger%d" % number
            look()
        broker.wait(lambda: kafka_of(broker)["misdirected"] == 0, "the client that makes room")
    assert time.monotonic() - at < 40  # it is remembered for 60 s otherwise


def test_doctor_tries_the_advertised_address(new_broker):
    broker = new_broker()
    broker.up()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        right = checks(broker, KMQ_KAFKA_ADVERTISE=f"localhost:{number}")["KMQ_KAFKA_ADVERTISE"]
        assert right["level"] == "ok"
    refused = checks(broker, KMQ_KAFKA_ADVERTISE=f"localhost:{number}")["KMQ_KAFKA_ADVERTISE"]
    assert refused["level"] == "warning" and f"localhost:{number}" in refused["text"]
    unknown = checks(broker, KMQ_KAFKA_ADVERTISE="no.such.name.invalid:9092")["KMQ_KAFKA_ADVERTISE"]
    assert unknown["level"] == "warning" and "resolve" in unknown["text"]


def test_status_top_and_metrics_show_the_kafka_port(new_broker):
    broker = new_broker()
    broker.up()
    number = port(broker)
    servers = {"bootstrap.servers": f"127.0.0.1:{number}"}
    producer = Producer({**servers, "enable.idempotence": True})
    producer.produce("orders", b"x")
    assert producer.flush(60) == 0
    consumer = Consumer({**servers, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.subscribe(["orders"])
    assert [record.value() for record in consumer.consume(1, 60)] == [b"x"]

    def is_shown():
        found = kafka_of(broker)
        return found["connections"] >= 2 and found["producers"] == 1 and found["batches_from_cache"] >= 1

    broker.wait(is_shown, "the connections, the producer and the batch")
    found = kafka_of(broker)
    assert (found["port"], found["batches_from_lines"], found["misdirected"]) == (number, 0, 0)
    assert f"kafka {number}   connections: {found['connections']}   producers: 1" in broker.kmq("status").stdout
    [line] = [line for line in broker.kmq("status", "--logfmt").stdout.splitlines() if line.startswith("kafka=")]
    assert f"kafka={number} connections=" in line
    shown = broker.kmq("top", "--once").stdout
    assert f"kafka {number}" in shown and "connected" in shown
    metrics = broker.get("/metrics")[1]
    assert "kmq_kafka_producers 1.0" in metrics and 'kmq_kafka_batches_total{source="cache"} ' in metrics
    consumer.close()
