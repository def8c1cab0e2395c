"""Topics of a shard: who may change them, what the fleet says of them, and a change of leader meanwhile."""

import json
import os
import signal

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from test_shard import BROKERS
from test_shard_status import Brokers
from waiting import PATIENCE_S, until

import kmq
from kmq.log import topic_changes


@pytest.fixture
def brokers(consul, tmp_path):
    made = Brokers(consul.address, tmp_path)
    yield made
    made.close()


def topics(brokers, name):
    """The number of partitions of each topic in force."""
    rows = json.loads(brokers.kmq(name, "topics", "list", "--json").stdout)["topics"]
    in_force = [row["topic"] for row in rows if row["from_seq"] is not None]
    return {topic: in_force.count(topic) for topic in in_force}


def logged(brokers, name, event):
    lines = (brokers.root / name / "pipes" / "kmq.log").read_text().splitlines()
    return [line for line in lines if f"event={event} " in line]


def states(brokers, name):
    path = brokers.root / name / "data" / "cluster" / "states"
    return path.read_text() if path.exists() else ""


def pid(brokers, name, stage):
    return next(each["pid"] for each in brokers.status(name)["stages"] if each["name"] == stage)


def test_the_leader_alone_changes_topics_and_its_successor_reaches_what_the_fleet_says(brokers):
    for name in BROKERS:
        assert brokers.kmq(name, "up", "--no-gateway").returncode == 0
    brokers.init()
    brokers.await_whole()
    for name in BROKERS:
        until(lambda name=name: brokers.status(name)["ready"], f"readiness of {name}")

    refused = brokers.kmq("b", "topics", "create", "x")
    assert refused.returncode == 69 and "run it at broker a" in refused.stderr, refused
    assert brokers.kmq("a", "topics", "create", "x").returncode == 0
    until(lambda: topics(brokers, "b") == {"x": 1}, "x")
    for change in (("set", "x", "segment_age=1d"), ("delete", "x", "--yes")):
        assert brokers.kmq("b", "topics", *change).returncode == 69
    data = f"{brokers.root}/b/data"
    laid = topic_changes.submit(data, topic_changes.CREATE, "laid", {"partitions": "2"})
    until(lambda: not laid.is_waiting, "a refusal")
    until(lambda: [each for each in logged(brokers, "b", "request_refused") if "topic=laid" in each], "a line of it")

    assert brokers.kmq("a", "fleet", "topics", "create", "orders", "--partitions", "3").returncode == 0
    for name in BROKERS:
        until(lambda name=name: topics(brokers, name) == {"x": 1, "orders": 3}, f"orders at {name}")
    refusals = {name: logged(brokers, name, "request_refused") for name in BROKERS}
    assert not refusals["a"] and not refusals["c"] and len(refusals["b"]) == 1, refusals

    framer = pid(brokers, "a", "framer")
    os.kill(framer, signal.SIGSTOP)  # what the agent of the leader asks for is not numbered
    try:
        assert brokers.kmq("b", "fleet", "topics", "create", "late", "--partitions", "2").returncode == 0
        for name in BROKERS:
            until(lambda name=name: "late" in states(brokers, name), f"the mark of {name}")
        assert brokers.kmq("a", "cluster", "resign").returncode == 0
        until(lambda: any(topics(brokers, name).get("late") == 2 for name in "bc"), "late")
    finally:
        os.kill(framer, signal.SIGCONT)
    for name in BROKERS:
        until(lambda name=name: topics(brokers, name) == {"x": 1, "orders": 3, "late": 2}, f"late at {name}")


def test_a_topic_is_truncated_and_goes_to_the_tier_once_every_broker_of_the_shard_is_of_this_release(brokers):
    """Brokers are upgraded one by one. One of an older release would pass over the record, and may lead."""
    older = brokers.root / "older"
    older.mkdir()
    (older / "sitecustomize.py").write_text("import kmq.message.routing\n\nkmq.message.routing.LEVEL = 1\n")
    for name in BROKERS:
        started = brokers.kmq(name, "up", **{"PYTHONPATH": str(older)} if name == "c" else {})
        assert started.returncode == 0, started.stderr
    brokers.init()
    brokers.await_whole()
    for name in BROKERS:
        until(lambda name=name: brokers.status(name)["ready"], f"readiness of {name}")
    ingress, kafka = (
        (brokers.root / "a" / "pipes" / f"{name}.port").read_text().strip() for name in ("ingress", "kafka")
    )
    with kmq.Producer(f"127.0.0.1:{ingress}") as producer:
        producer.send("t", b"x").result(PATIENCE_S)

    truncate = ("topics", "truncate", "t", "--before", "end", "--yes")
    refused = brokers.kmq("a", *truncate)
    assert refused.returncode == 75 and "of an older release" in refused.stderr, refused
    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{kafka}", "log_level": 0})
    (deleted,) = admin.delete_records([TopicPartition("t", 0, 1)]).values()
    with pytest.raises(KafkaException, match="UNSUPPORTED_VERSION"):
        deleted.result(PATIENCE_S)
    to_tier = ("topics", "set", "t", "tier=on")
    refused = brokers.kmq("a", *to_tier)
    assert refused.returncode == 78 and "tier: not on while a broker of the shard is away" in refused.stderr, refused
    assert brokers.register().level == 1

    assert brokers.kmq("c", "down").returncode == 0
    assert brokers.kmq("c", "up").returncode == 0
    until(lambda: brokers.register().level == 3, "the next level")
    until(lambda: any(logged(brokers, name, "replica_level") for name in BROKERS), "a line of it")
    done = brokers.kmq("a", *truncate)
    assert done.returncode == 0 and "deleted" in done.stdout, done
    assert brokers.kmq("a", *to_tier).returncode == 0
    for name in BROKERS:
        toml = brokers.root / name / "data/topics/t/topic.toml"
        until(lambda toml=toml: 'tier = "on"' in toml.read_text(), f"the option at {name}")

    assert brokers.kmq("c", "down").returncode == 0
    brokers.kmq("c", "up", PYTHONPATH=str(older))
    until(lambda: [each for each in logged(brokers, "c", "failed") if "install a later one" in each], "a refusal")
