"""Clients of Kafka at a shard of three brokers: what they are told, and what a killed leader costs. With a real Consul."""

import random
import threading
import time
from contextlib import suppress
from itertools import pairwise

import pytest
from chaos.kafka_copier import GROUP, SOURCE, TARGET, Copier
from confluent_kafka import Consumer, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic
from consuls import free_ports
from test_shard import BROKERS
from test_shard_clients import HOST, Whole
from waiting import PATIENCE_S, collect, meanwhile, until

import kmq
from kmq.log import reader


class KafkaShard(Whole):
    """Brokers whose Kafka ports are the same in every role, as users have them."""

    def __init__(self, address, root):
        super().__init__(address, root)
        self.ports = dict(zip(BROKERS, map(str, free_ports(len(BROKERS))), strict=True))

    def kmq(self, name, *arguments, **more):
        return super().kmq(name, *arguments, **{"KMQ_KAFKA_PORT": self.ports[name]} | more)

    def bootstrap(self, *names):
        return {
            "log_level": 0,
            "bootstrap.servers": ",".join(f"{HOST}:{self.ports[name]}" for name in names or BROKERS),
        }


@pytest.fixture
def shard(consul, tmp_path):
    made = KafkaShard(consul.address, tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.close()


def create(admin, topic, partitions):
    """Make a topic; a broker that has just become the leader may say that it is declared, and not in force yet."""
    with suppress(KafkaException):
        admin.create_topics([NewTopic(topic, partitions, replication_factor=3)])[topic].result(PATIENCE_S)
    found = lambda: admin.list_topics(timeout=PATIENCE_S).topics.get(topic)  # noqa: E731
    until(lambda: found() and found().error is None and len(found().partitions) == partitions, f"topic {topic}")


def delivered(producer, topic, values):
    """Produce these values one by one to partition 0; value → offset of those that were delivered."""
    offsets = {}

    def hear(error, message):
        if error is None:
            offsets[int(message.value())] = message.offset()

    for value in values:
        producer.produce(topic, b"%d" % value, partition=0, on_delivery=hear)
        producer.poll(0.001)
    producer.flush(PATIENCE_S)
    return offsets


def test_clients_are_told_all_brokers_and_who_leads(shard):
    leader = shard.leader()
    follower = next(name for name in BROKERS if name != leader)
    admin = AdminClient(shard.bootstrap(follower))
    create(admin, "t", 2)
    with pytest.raises(Exception, match="must be 3"):
        admin.create_topics([NewTopic("u", 1, replication_factor=2)])["u"].result(PATIENCE_S)

    def whole():
        found = admin.list_topics(timeout=PATIENCE_S)
        return found if all(len(each.isrs) == 3 for each in found.topics["t"].partitions.values()) else None

    found = until(whole, "an ISR of three")
    ports = {node: str(each.port) for node, each in found.brokers.items()}
    assert ports == dict(enumerate(shard.ports.values(), 1))
    nodes = dict(zip(BROKERS, ports, strict=True))
    assert found.controller_id == nodes[leader]
    for each in found.topics["t"].partitions.values():
        assert each.leader == nodes[leader] and sorted(each.replicas) == sorted(each.isrs) == [1, 2, 3]
    resource = ConfigResource("topic", "t")
    settings = admin.describe_configs([resource])[resource].result(PATIENCE_S)
    assert settings["min.insync.replicas"].value == "2"
    assert shard.kmq("c", "down").returncode == 0
    assert shard.kmq("c", "up", KMQ_KAFKA_ADVERTISE="kafka.example:19092").returncode == 0

    def place():
        found = admin.list_topics(timeout=PATIENCE_S).brokers.get(nodes["c"])
        return found and (found.host, found.port) == ("kafka.example", 19092)

    until(place, "the address that c advertises")


def id_of(options, topic):
    """By which clients name the topic."""
    admin = AdminClient(options)  # has to be there until it has answered
    return str(admin.describe_topics(TopicCollection([topic]))[topic].result(PATIENCE_S).topic_id)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_killed_leader_costs_a_producer_and_a_group_nothing(shard, protocol):
    """Each record is stored once, in order, at the offset that its producer was told.

    The group goes on from what it has committed, with its member.
    """
    options = shard.bootstrap()
    producer = Producer(options | {"enable.idempotence": True, "linger.ms": 1, "acks": "all"})
    first = delivered(producer, "t", range(200))
    assert sorted(first) == list(range(200))
    group = options | {"group.id": "g", "auto.offset.reset": "earliest", "group.protocol": protocol}
    group |= {"session.timeout.ms": 6000} if protocol == "classic" else {}
    id = id_of(options, "t")
    assert {*id} != {"A"}, "zeros, in base64"
    consumer = Consumer(group | {"enable.auto.commit": False})
    consumer.subscribe(["t"])
    read = []

    def consume():
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            read.append((message.offset(), int(message.value())))
        if read and (message is None or len(read) % 50 == 0):
            with suppress(KafkaException):  # there is nothing new
                consumer.commit(asynchronous=True)

    with meanwhile(consume):
        until(lambda: len(read) >= 200, "the first records")
        leader, offsets = shard.leader(), {}
        producing = threading.Thread(target=lambda: offsets.update(delivered(producer, "t", range(200, 2000))))
        producing.start()
        until(lambda: len(read) > 300, "records on their way")
        shard.kill(leader)
        producing.join(PATIENCE_S)
        assert not producing.is_alive() and sorted(offsets) == list(range(200, 2000)), "the rest was not delivered"
        assert shard.leader() != leader
        assert id_of(options, "t") == id, "replicas know it by another id"
        until(lambda: (1999, 1999) in read, "all records")
        looking, where = Consumer(group), [TopicPartition("t", 0)]
        until(lambda: looking.committed(where, PATIENCE_S)[0].offset == 2000, "the last commit")
        looking.close()
    assert all(offset == value for offset, value in read), "each is stored once, in order"
    steps = [(before, after) for (before, _), (after, _) in pairwise(read) if after != before + 1]
    assert {offset for offset, _ in read} == set(range(2000)) and len(steps) <= 2
    assert all(after <= before for before, after in steps), "the group has missed records"
    told = {value: offset for value, offset in (first | offsets).items() if offset >= 0}
    assert told == {value: value for value in told} and len(told) > 1000
    consumer.close()
    epochs = [shard.view(name) for name in BROKERS if name != leader]
    assert {each["epoch"] for each in epochs} == {epochs[0]["epoch"]} and epochs[0]["epoch"] >= 2
    after = Consumer(group)
    after.subscribe(["t"])
    delivered(producer, "t", [2000])
    [found] = collect(1, lambda: [each for each in after.consume(1, 0.5) if each.error() is None])
    assert (found.offset(), found.leader_epoch()) == (2000, epochs[0]["epoch"])
    after.close()


def test_a_start_is_the_same_at_every_replica_and_at_the_next_leader(shard):
    options = shard.bootstrap()
    producer = Producer(options | {"acks": "all"})
    delivered(producer, "t", range(100))
    admin = AdminClient(options)  # has to be there until it has answered

    def start():
        (asked,) = admin.delete_records([TopicPartition("t", 0, 42)]).values()
        with suppress(KafkaException):  # REQUEST_TIMED_OUT: it waits for replicas that have no core
            return asked.result(PATIENCE_S).low_watermark

    assert until(start, "the start") == 42

    def firsts():
        return {reader.partition(f"{shard.root}/{name}/data", "t", 0).first_offset for name in BROKERS}

    until(lambda: firsts() == {42}, "the same start everywhere")
    leader = shard.leader()
    shard.kill(leader)
    until(lambda: shard.leader() != leader, "another leader")
    delivered(producer, "t", range(100, 110))
    consumer = Consumer(options | {"group.id": "g", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition("t", 0, 0)])
    read = []
    until(lambda: read.append(consumer.poll(1)) or (read[-1] and read[-1].offset() == 109), "the rest")
    consumer.close()
    assert [int(each.value()) for each in read if each and not each.error()] == [*range(42, 110)]


def test_transactions_go_on_at_the_next_leader(shard):
    """Each record is copied once, in order, with its offset, though leaders are killed in the middle."""
    sent, rng = [b"%d" % n for n in range(2500)], random.Random(34)
    with kmq.Producer(shard.hosts("ingress"), timeout_s=PATIENCE_S) as producer:
        producer.send_many(SOURCE, sent, key="k")
    options = shard.bootstrap()
    copier = Copier(options["bootstrap.servers"], "copier", rng)

    def copied(name):
        files = sorted((shard.root / name / "data/topics" / TARGET / "0").glob("*.log"))
        return [line.rpartition(b"|")[2] for file in files for line in file.read_bytes().splitlines()]

    try:
        for count in (700, 1400):
            leader = shard.leader()
            until(lambda leader=leader, count=count: len(copied(leader)) >= count, f"{count} records")
            shard.kill(leader)
            until(lambda leader=leader: shard.leader() not in (leader, None), "the next leader")
            assert shard.kmq(leader, "up").returncode == 0
            shard.await_whole()
        for name in BROKERS:
            until(lambda name=name: len(copied(name)) >= len(sent), f"all records at {name}")
            assert copied(name) == sent
        looking, where = Consumer(options | {"group.id": GROUP}), [TopicPartition(SOURCE, 0)]
        until(lambda: looking.committed(where, PATIENCE_S)[0].offset == len(sent), "the last offset")
        looking.close()
    finally:
        copier.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_resign_and_a_killed_leader_are_no_rebalance(shard, protocol):
    """Two members keep their ids, partitions and generation, and their commits go through at the next leader."""
    admin = AdminClient(shard.bootstrap())
    create(admin, "t", 4)
    producer = Producer(shard.bootstrap())
    for number in range(40):
        producer.produce("t", b"%d" % number, partition=number % 4)
    producer.flush(PATIENCE_S)
    group = shard.bootstrap() | {"group.id": "g", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    group |= {"group.protocol": protocol} | ({"session.timeout.ms": 45_000} if protocol == "classic" else {})
    changes = []
    members = [Consumer(group | {"client.id": f"m{number}"}) for number in range(2)]
    for member in members:
        member.subscribe(["t"], *[lambda _, partitions: changes.append(len(partitions))] * 2)

    def are_sharing():
        for member in members:
            member.poll(0.2)
        return [len(member.assignment()) for member in members] == [2, 2]

    until(are_sharing, "two members that share")
    time_to_settle = time.monotonic() + 3
    until(lambda: are_sharing() and time.monotonic() > time_to_settle, "a stable group")
    before = [(member.memberid(), member.assignment()) for member in members]
    changes.clear()
    fatal = ("UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION", "REBALANCE_IN_PROGRESS", "FENCED", "STALE_MEMBER_EPOCH")

    def commit(number):
        """Commit in each partition, again while nobody leads."""
        for member in members:
            offsets = [TopicPartition(each.topic, each.partition, number) for each in member.assignment()]

            def is_done(member=member, offsets=offsets):
                try:
                    done = member.commit(offsets=offsets, asynchronous=False)
                except KafkaException as error:
                    name = error.args[0].name().lstrip("_")
                    assert name not in fatal, f"{name} after {number - 1} changes of the leader"
                    member.poll(0.2)
                    return False
                return all(each.error is None for each in done)

            until(is_done, "a commit")

    commit(1)
    leader = shard.leader()
    done = shard.kmq(leader, "cluster", "resign", "--wait", "--timeout", "60s")
    assert done.returncode == 0, done.stderr
    commit(2)
    shard.kill(shard.leader())
    commit(3)
    time_to_settle = time.monotonic() + 8  # several heartbeats: whoever is told to join again does so
    until(lambda: are_sharing() and time.monotonic() > time_to_settle, "quiet")
    assert [(member.memberid(), member.assignment()) for member in members] == before
    assert changes == []
    for member in members:
        member.close()
