"""`<topic>.@[<partition>][.<key>]` as a user meets it: what a client calls a topic is the topic, whatever the key says."""

import asyncio
import shutil

import pytest

import kmq
from kmq.message import text

DECLARED = (("orders.eu", 1), ("wide", 4))
BEFORE = len(DECLARED)  # each declaration takes a seq before the first message does


@pytest.fixture
def up(broker, monkeypatch):
    """A broker with topics whose names a key can be taken for, found by clients in this process."""
    for topic, partitions in DECLARED:
        assert broker.kmq("topics", "create", topic, "--partitions", str(partitions)).returncode == 0
    broker.up()
    for name, value in broker.env.items():
        if name.startswith("KMQ_"):
            monkeypatch.setenv(name, value)
    return broker


def held(broker, topic, partition="*"):
    """(routing key, payload) of each record of a topic, in the order of the files."""
    paths = sorted((broker.data / "topics" / topic).glob(f"{partition}/*.log"))
    rows = (line.split(b"|", 5) for path in paths for line in path.read_bytes().splitlines())
    return [(row[2], row[5]) for row in rows]


def test_a_typed_clients_key_does_not_change_the_topic(up):
    with kmq.Producer.local() as producer:
        producer.send("orders", b"one", key="eu")
        producer.send_many("orders", [b"two"], key="eu")
        producer.send("orders", b"bytes", key=b"eu.\xff")
        producer.send("orders.eu", b"three")
        producer.send("orders.us", b"four", key="")
        producer.send("orders", b"five")

    async def send():
        async with kmq.AsyncProducer.local() as producer:
            await producer.send("orders", b"six", key="eu")
            await producer.send_many("orders", [b"seven"], key=b"eu")

    asyncio.run(send())
    up.send_lines([b"orders.eu|0||plain", b"orders.us.x|0||plain too"])
    up.wait_routed(BEFORE + 10)
    assert held(up, "orders") == [
        (b"orders.@.eu", b"one"),
        (b"orders.@.eu", b"two"),
        (b"orders.@.eu%2E%FF", b"bytes"),
        (b"orders", b"five"),
        (b"orders.@.eu", b"six"),
        (b"orders.@.eu", b"seven"),
    ]
    assert text.decode_bytes(b"eu%2E%FF") == b"eu.\xff"
    assert held(up, "orders.eu") == [(b"orders.eu.@", b"three"), (b"orders.eu", b"plain")]
    assert held(up, "orders.us") == [(b"orders.us.@.", b"four"), (b"orders.us.x", b"plain too")]


def test_a_partition_is_the_one_that_was_asked_for_or_the_message_is_refused(up):
    with kmq.Producer.local(producer="p") as producer:
        producer.send("wide", b"in 3", key="eu", partition=3)
        producer.send_many("wide", [b"in 2", b"too"], partition=2)
        for topic in ("wide", "wide.new"):
            with pytest.raises(kmq.Refused) as refused:
                producer.send(topic, b"nowhere", partition=4).result()
            assert refused.value.code == "unknown_partition"
        assert producer.send("wide", b"goes on", partition=0).result() == BEFORE + 4
    up.send_lines([b"wide.@1.k|0||plain", b"wide.@4.k|0|7|nowhere", "w.ü.@|0|8|odd".encode(), b"wide.@a|0||a key"])
    up.wait_routed(BEFORE + 8)
    assert [held(up, "wide", number) for number in (0, 2)] == [
        [(b"wide.@0", b"goes on"), (b"wide.@a", b"a key")],
        [(b"wide.@2", b"in 2"), (b"wide.@2", b"too")],
    ]
    assert (b"wide.@3.eu", b"in 3") in held(up, "wide", 3) and (b"wide.@1.k", b"plain") in held(up, "wide", 1)
    dead = [line.split(b"|", 5)[4:] for line in up.lines("dead")]
    assert dead == [
        [b";reason=unknown_partition;len=21", b"wide.@4.k|0|7|nowhere"],
        [b";reason=bad_topic;len=14", "w.ü.@|0|8|odd".encode()],
    ]
    assert not (up.data / "topics/wide.new").exists()


def test_a_retry_in_the_new_spelling_is_known_from_the_old_one(up):
    with kmq.Producer.local(producer="p") as producer:
        assert producer.send_lines(b"orders.eu|0|1|x\norders.us%2E1|0|2|x\n").result() == BEFORE + 1
    with kmq.Producer.local(producer="p", first_id=1) as producer:
        again = [producer.send("orders", b"x", key=key, id=id) for id, key in ((1, "eu"), (2, "us.1"))]
        assert [delivery.result() for delivery in again] == [BEFORE + 1, BEFORE + 2] and producer.duplicates == 2


KEYS = [
    b"jobs.eu.x",
    b"jobs.eu.@.k",
    b"jobs.eu.x",
    b"jobs.x",
    b"jobs",
    b"jobs.eu.de.@.k",
    b"jobs.eu.de.x",
    b"jobs.@.eu.x",
]
KEYS += [
    b"wide.@2",
    b"wide.@",
    b"wide.@.",
    b"wide.@.k",
    b"wide.k",
    b"wide.@3.k",
    b"wide",
    b"wide.",
    b"orders.@.eu",
    b"orders.eu",
]


def test_queues_that_are_lost_are_made_again_from_the_wal_as_they_were(up):
    up.send_lines([b"%b|0|%d|payload" % (KEYS[n % len(KEYS)], n) for n in range(20 * len(KEYS))])
    up.wait_routed(BEFORE + 20 * len(KEYS))
    up.down()
    topics = up.data / "topics"
    before = {path.relative_to(topics): path.read_bytes() for path in topics.glob("*/*/*.log")}
    assert {str(path.parent) for path in before} > {
        "jobs/0",
        "jobs.eu/0",
        "jobs.eu.de/0",
        "wide/3",
        "orders/0",
        "orders.eu/0",
    }
    assert held(up, "jobs.eu")[0] == (b"jobs.eu.@.k", b"payload"), "the line before it went to jobs"
    for directory in topics.glob("*/[0-9]*"):
        shutil.rmtree(directory)
    shutil.rmtree(topics / "jobs.eu")
    up.up()
    up.wait_routed(BEFORE + 20 * len(KEYS))
    up.down()
    assert {path.relative_to(topics): path.read_bytes() for path in topics.glob("*/*/*.log")} == before
    assert up.kmq("verify").stdout.endswith("no damage\n")
    (up.data / "router.ckpt").unlink()
    shutil.rmtree(topics / "orders.eu/0")
    for directory in topics.glob("jobs*"):
        shutil.rmtree(directory)
    up.up()
    up.wait_routed(BEFORE + 20 * len(KEYS))
    up.down()
    assert {path.relative_to(topics): path.read_bytes() for path in topics.glob("*/*/*.log")} == before
