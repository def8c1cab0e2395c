"""Transactions by Kafka's clients as they are, with kills between the sends and the commit."""

import itertools

import pytest
from brokers import Broker
from consuls import free_ports
from kafka_peer import Peer
from kafka_transactions import stored
from record_lines import PARTITIONS, Row
from zoo import CLIENTS, StepFailed, Zoo, differences, need, now

NAMES = ["java", "librdkafka", "librdkafka-2.6", "aiokafka", "kafka-python"]
UNSTABLE = {"aiokafka"}  # it does not ask for stable offsets: a member has to commit before it leaves
FORGETFUL = {"kafka-python"}  # it forgets a commit that is asked for while it cannot connect, and waits for ever
RECORDS = 100  # of each partition that is copied
DESCRIBE_GROUPS, FETCH_OFFSETS = 15, 9
_numbers = itertools.count()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    broker = Broker(tmp_path_factory.mktemp("zoo"))
    broker.env["KMQ_KAFKA_PORT"] = str(free_ports(1)[0])  # clients find the next gateway there
    broker.up(KMQ_KAFKA_PARTITIONS=len(PARTITIONS))
    yield Zoo(broker)
    broker.close()


@pytest.fixture(params=NAMES)
def client(request):
    need(CLIENTS[request.param])
    return CLIENTS[request.param]


@pytest.fixture
def topics(zoo, client):
    """Two topics of this test alone."""
    names = [f"{client.name}.{next(_numbers)}" for _ in range(2)]
    with Peer.of(zoo.broker.pipes) as peer:
        assert {peer.make_topic(name) for name in names} == {len(PARTITIONS)}
    return names


def committed(zoo, client, topics):
    """What a read_committed consumer of the client reads of topics, and KMQ's own, too."""
    wanted = {topic: len(zoo.broker.lines(topic)) for topic in topics}
    found, ours = (zoo.run(reader, "consume", wanted) for reader in (client, CLIENTS["kmq"]))
    assert not found.error and not ours.error
    assert sorted(found.rows, key=place) == sorted(ours.rows, key=place)
    return {topic: [row for row in sorted(found.rows, key=place) if row.topic == topic] for topic in topics}


def kill(zoo, client, *names):
    zoo.broker.kill(*names)
    if client.name in FORGETFUL:
        zoo.broker.wait(zoo.answers, "a gateway that answers")


def place(row):
    return row.topic, row.partition, row.offset


@pytest.mark.parametrize("victim", ["gateway", "router"])
def test_a_transaction_is_stored_as_a_whole_though_a_stage_is_killed_before_its_end(zoo, client, victim, topics):
    begin, records = now(), client.records("none")
    with zoo.transactor(client) as sender:
        sender.do("init", topics[0])
        for end in ("abort", "commit"):
            sender.do("begin")
            for topic in topics:
                for row in records.values():
                    sent = row._replace(value=b"never to be seen") if end == "abort" else row
                    sender.do("send", sent._replace(topic=topic))
            sender.do("flush")
            kill(zoo, client, victim)
            assert not any(zoo.broker.lines(topic) for topic in topics)
            sender.do(end)
    found = committed(zoo, client, topics)
    assert not {topic: some for topic in topics if (some := differences(records, found[topic], client, (begin, now())))}
    files = [path for topic in topics for path in (zoo.broker.data / "topics" / topic).rglob("*") if path.is_file()]
    assert files and not any(b"never to be seen" in path.read_bytes() for path in files)


def test_a_producer_whose_id_another_one_has_taken_is_fenced(zoo, client, topics):
    with zoo.transactor(client) as zombie, zoo.transactor(client) as sender:
        zombie.do("init", topics[0])
        zombie.do("begin")
        zombie.do("send", Row(0, None, b"of the zombie", topic=topics[0]))
        zombie.do("flush")
        sender.do("init", topics[0])
        with pytest.raises(StepFailed, match=r"(?i)fenced|epoch"):
            zombie.do("commit")
        sender.do("begin")
        sender.do("send", Row(0, None, b"of the sender", topic=topics[0]))
        sender.do("commit")
    assert [row.value for row in committed(zoo, client, topics)[topics[0]]] == [b"of the sender"]


def test_records_are_copied_once_by_two_members_of_which_one_leaves(zoo, client, topics):
    source, target = topics
    values = {number: [b"%d-%d" % (number, n) for n in range(RECORDS)] for number in PARTITIONS}
    with zoo.transactor(client) as stays, zoo.transactor(client) as leaves:
        copied = set()

        def copy(*members, is_ended=True):
            """Let each copy what it finds in one poll."""
            for member in members:
                member.begin("poll")
            for member, rows in [(member, member.end()) for member in members]:
                if rows:
                    member.do("begin")
                    for row in rows:
                        member.do("send", row._replace(topic=target))
                    try:
                        member.do("offsets")
                    except StepFailed:  # the gateway that knew it as a member is dead
                        member.do("abort")
                        member.do("leave")
                        member.do("join", source, source)
                        continue
                    copied.add(member)
                    if is_ended:
                        member.do("commit")

        def copy_until(condition, *members, is_ended=True):
            zoo.broker.wait(lambda: copy(*members, is_ended=is_ended) or condition(), "what is copied")

        for number, member in enumerate((stays, leaves)):
            member.do("init", f"{source}.{number}")
            member.do("join", source, source)
        copy_until(lambda: count_members(zoo, source) == 2, stays, leaves)
        zoo.broker.send_lines([b"%b.@%d|||%b" % (source.encode(), n, each) for n in values for each in values[n]])
        copy_until(lambda: len(copied) == 2, stays, leaves)
        copied.clear()
        copy_until(lambda: copied, leaves, is_ended=False)
        if client.name in UNSTABLE:
            leaves.do("commit")
        leaves.do("leave")
        copy_until(lambda: count_members(zoo, source) == 1, stays)
        copy(stays)
        assert min(len(stored(zoo.broker, target, number)) for number in PARTITIONS) < RECORDS
        kill(zoo, client, "gateway", "router")
        if client.name not in UNSTABLE:
            leaves.do("commit")
        copy_until(lambda: len(zoo.broker.lines(target)) >= 2 * RECORDS, stays)
        stays.do("leave")
    assert {number: stored(zoo.broker, target, number) for number in PARTITIONS} == values
    found = committed(zoo, client, topics)
    assert [row.value for row in found[target]] == [row.value for row in found[source]]
    assert offsets(zoo, source) == [RECORDS] * len(PARTITIONS)


def count_members(zoo, group):
    """How many members a group has, once each has its partitions."""
    with Peer.of(zoo.broker.pipes) as peer:
        (found,) = peer.ask(DESCRIBE_GROUPS, 4, groups=(group,), include_authorized_operations=False).groups
    return len(found.members) if found.group_state == "Stable" else None


def offsets(zoo, topic):
    """What the group that is called like a topic has committed."""
    with Peer.of(zoo.broker.pipes) as peer:
        asked = [{"name": topic, "partition_indexes": PARTITIONS}]
        (found,) = peer.ask(FETCH_OFFSETS, 7, group_id=topic, topics=asked, require_stable=True).topics
    return [row.committed_offset for row in found.partitions]
