"""Topics in a bucket behind a proxy that lies at random: every door reads them, and a restore of it is as good as the disk."""

import json
import os
import random
from contextlib import closing

import pytest
import tier_stores
from api_client import Api
from brokers import Broker
from cold_doors import DOORS, empty_cache
from confluent_kafka import Consumer, Producer, TopicPartition
from consuls import free_ports
from waiting import until

from kmq.log import segment

COUNT, LATER = 30_000, 15
WORDS = [f"{n} {'x' * 150}" for n in range(COUNT)]
LIES = ("slow", "twice", "lost", "done", "late", "cut", "throttled")
OPTIONS = {
    "tier": "on",
    "local_retention_bytes": "1MiB",
    "local_retention_age": "30d",
    "retention_age": "365d",
    "retention_bytes": "1GiB",
    "segment_bytes": "256KiB",
    "segment_age": "7d",
    "delete_retention": "2d",
    "max_deliveries": "7",
    "message_timestamp_type": "CreateTime",
}


FIRST, *OTHERS = tier_stores.SERVERS


@pytest.fixture(scope="module", params=[FIRST, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)])
def bucket(request, tmp_path_factory):
    with tier_stores.s3_behind_proxy(request.param, tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture(scope="module")
def proxy(bucket):
    """One request of sixteen goes wrong."""
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"CHAOS_SEED={seed}")
    chance = random.Random(seed)
    bucket[1].fate = lambda method, path: chance.choice(LIES) if chance.random() < 1 / 16 else ""
    return bucket[1]


@pytest.fixture(scope="module")
def broker(bucket, proxy, tmp_path_factory):
    """A topic of five MiB, of which one or two lie on the disk."""
    made = Broker(tmp_path_factory.mktemp("bucket") / "b")
    made.env |= {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    made.env |= {
        "KMQ_TIER": bucket[0],
        "KMQ_TIER_EVERY": "100ms",
        "KMQ_TIER_OBJECT": "1 MiB",
        "KMQ_TIER_CACHE": "4 MiB",
        "KMQ_SEGMENT_BYTES": "256 KiB",
        "KMQ_KAFKA_PORT": str(free_ports(1)[0]),  # the same after a restore, as consumers expect
    }
    made.up()
    options = [word for name, text in OPTIONS.items() for word in ("--set", f"{name}={text}")]
    done = made.kmq("topics", "create", "orders", "--partitions", "1", *options)
    assert done.returncode == 0, done.stderr
    assert made.kmq("produce", "orders", text="".join(f"{word}\n" for word in WORDS)).returncode == 0, made.log()
    until(lambda: segment.listing(f"{made.data}/topics/orders/0")[0][0] > COUNT // 2, "segments leave", made.log)
    yield made
    made.close()


def kafka(broker, **more):
    return {"bootstrap.servers": f"127.0.0.1:{broker.env['KMQ_KAFKA_PORT']}"} | more


def send(broker, words):
    """100 records are a batch or several, of a producer that is not idempotent."""
    producer = Producer(kafka(broker, **{"enable.idempotence": False, "linger.ms": 50}))
    failed = []
    for word in words:
        producer.produce("orders", word, on_delivery=lambda err, _: err and failed.append(err))
    assert producer.flush(60) == 0 and not failed, failed


def polled(consumer, count):
    """(offset, value) of the next messages."""
    found = []

    def look():
        message = consumer.poll(0.5)
        if message is not None:
            assert message.error() is None, message.error()
            found.append((message.offset(), message.value().decode()))
        return len(found) >= count

    until(look, f"{count} messages", lambda: found[-3:])
    return found


def grouped(api, count):
    """Values of the next messages of a group, which commits them."""
    found = []

    def look():
        answer = api.get("/api/topics/orders/consume?group=g&format=text&maxMessages=10000&timeoutMs=20000")
        found.extend((each["offset"], each["value"]) for each in answer.value.get("messages", []))
        return len(found) >= count

    until(look, f"{count} messages of the group", lambda: len(found))
    body = {"group": "g", "offsets": [{"partition": 0, "offset": found[-1][0] + 1}]}
    assert api.post("/api/topics/orders/commit", body).status == 200
    return [value for _, value in found]


def is_copied(broker):
    done = broker.kmq("tier", "status", "--json")
    return done.returncode == 0 and json.loads(done.stdout)["age"] == 0


@pytest.mark.parametrize("door", DOORS)
def test_every_door_reads_what_lies_in_a_bucket(broker, door):
    empty_cache(broker)
    assert door(broker, "orders", COUNT) == WORDS


def test_what_is_restored_of_a_bucket_goes_on_as_clients_left_it(broker, proxy):
    """A Kafka consumer and a producer without ids have gone on after the copy ended. Nothing is skipped or taken for a repeat."""
    limits = json.loads(broker.kmq("topics", "show", "orders", "--json").stdout)["limits"]
    with closing(Api(int((broker.pipes / "http.port").read_text()))) as api:
        assert grouped(api, COUNT) == WORDS
    send(broker, before := [f"b{n}" for n in range(100)])
    consumer = Consumer(kafka(broker, **{"group.id": "k", "auto.offset.reset": "error", "enable.auto.commit": False}))
    consumer.assign([TopicPartition("orders", 0, COUNT)])
    assert [value for _, value in polled(consumer, 100)] == before
    until(lambda: is_copied(broker), "all is copied", broker.log)
    lies, proxy.fate = proxy.fate, lambda method, path: "lost" if method == "PUT" else ""
    send(broker, [f"lost{n}" for n in range(LATER)])
    lost = polled(consumer, LATER)
    broker.lose_disk()
    proxy.fate = lies

    until(lambda: broker.kmq("restore", "--yes").returncode == 0 or None, "a restore that the proxy lets through")
    broker.up()
    assert json.loads(broker.kmq("topics", "show", "orders", "--json").stdout)["limits"] == limits
    send(broker, again := before)
    found = polled(consumer, 100)
    assert [value for _, value in found] == again and found[0][0] > lost[-1][0]
    consumer.close()
    with closing(Api(int((broker.pipes / "http.port").read_text()))) as api:
        broker.wait(lambda: api.get("/api/groups").status == 200, "groups")
        (row,) = api.get("/api/groups/g").value["partitions"]
        assert (row["committed"], row["lag"]) == (COUNT, 200)
        assert grouped(api, 200) == before + again
    shown = broker.kmq("consume", "orders", "--from", "earliest").stdout.splitlines()
    assert shown == [*WORDS, *before, *again]
    assert broker.kmq("verify").stdout.endswith("no damage\n")
