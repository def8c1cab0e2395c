"""Groups through the Kafka door, with real clients: who reads what, whatever is killed, and where they go on."""

import contextlib
import itertools
import json
import os
import re
import signal
import struct
import time
import urllib.error
import urllib.request
from datetime import timedelta

import kafka_members
import pytest
from brokers import PATIENCE_S, Broker
from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from consuls import free_ports
from kafka_members import Member, await_shared
from kafka_peer import Peer
from kio.schema.errors import ErrorCode
from line_client import ask
from waiting import collect, until

import kmq
from kmq.access import tokens

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

PARTITIONS = 4
COMMIT, FETCH, JOIN, BEAT, LEAVE, SYNC = 8, 9, 11, 12, 13, 14
DESCRIBE, LIST, DELETE, DELETE_OFFSETS = 15, 16, 42, 47
numbers = itertools.count()

# How each client says: sessions as short as may be, quick heartbeats, commits only when told, from the start.
SETTINGS = {
    "confluent": {
        "session.timeout.ms": 6000,
        "heartbeat.interval.ms": 300,
        "enable.auto.commit": "false",
        "auto.offset.reset": "earliest",
        "partition.assignment.strategy": "range",
        "log_level": 2,
    },
    "kafka-python": {
        "session_timeout_ms": 6000,
        "heartbeat_interval_ms": 300,
        "enable_auto_commit": "false",
        "auto_offset_reset": "earliest",
        "assignors": "range,roundrobin",
    },
}
SETTINGS["aiokafka"] = SETTINGS["kafka-python"]
_NAMED_OTHERWISE = ("log_level", "partition.assignment.strategy")
SETTINGS["java"] = {name: value for name, value in SETTINGS["confluent"].items() if name not in _NAMED_OTHERWISE}
CLIENTS = [
    ("confluent", {}),
    ("confluent", {"partition.assignment.strategy": "cooperative-sticky"}),
    ("kafka-python", {}),
    ("aiokafka", {}),
    pytest.param(
        "java",
        {"partition.assignment.strategy": "org.apache.kafka.clients.consumer.CooperativeStickyAssignor"},
        marks=pytest.mark.java,
    ),
]


def answers(broker):
    """Whether a gateway answers: one that was killed may still have its port, and its state, for a moment."""
    with contextlib.suppress(OSError, AssertionError), Peer.of(broker.pipes) as peer:
        return peer.ask(18, 0).error_code == ErrorCode.none


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("kafka-groups") / "b")
    made.env["KMQ_KAFKA_PORT"] = str(free_ports(1)[0])  # clients find the next gateway there
    made.up(KMQ_KAFKA_PARTITIONS=PARTITIONS)
    yield made
    made.close()


@pytest.fixture
def group():
    return f"g{next(numbers)}"


@pytest.fixture
def start(broker, group, topic):
    """Starts members of the group, which are gone after the test."""
    members = []

    def start_one(library, settings=None, **more):
        if library == "java" and not kafka_members.has_java():
            pytest.skip("Apache's client is not there; see tests/kafka_members.py")
        asked = SETTINGS[library] | (settings or {}) | more
        members.append(Member(library, port(broker), group, topic, **asked))
        return members[-1]

    yield start_one
    for member in members:
        member.kill()


def port(broker, name="kafka"):
    return int((broker.pipes / f"{name}.port").read_text())


def described(broker, group):
    """What HTTP says of a group."""
    status, body = broker.get(f"/api/groups/{group}")
    assert status == 200, body
    return json.loads(body)


def produce(broker, topic, count, begin=0):
    """Store so many messages in each partition."""
    producer = Producer({"bootstrap.servers": f"localhost:{port(broker)}"})
    failed = []
    for partition, n in itertools.product(range(PARTITIONS), range(begin, begin + count)):
        report = lambda err, _: failed.append(err) if err else None  # noqa: E731
        producer.produce(topic, f"{partition}/{n}".encode(), partition=partition, on_delivery=report)
    assert producer.flush(PATIENCE_S) == 0 and not failed


def read(members):
    """What the members have read, each place once."""
    return {(partition, offset) for member in members for partition, offset, _ in member.messages}


def places(begin, end):
    return set(itertools.product(range(PARTITIONS), range(begin, end)))


def await_read(members, wanted):
    until(lambda: wanted <= read(members), "all", lambda: f"{wanted - read(members)}: {[*map(str, members)]}")


# --- what holds for members of either protocol (test_kafka_groups_848.py) ------------------------------------------------


def check_sharing(broker, topic, start):
    """A second member shares with the first one, goes on where that has committed, and has all when it leaves."""
    first = start()
    first.await_assigned(*range(PARTITIONS))
    await_read([first], places(0, 10))
    for partition in range(PARTITIONS):
        assert first.ask(f"commit {partition} 10") == "10"
    second = start()
    await_shared([first, second], PARTITIONS)
    assert second.ask(f"committed {min(second.assigned)}") == "10"
    produce(broker, topic, 5, begin=10)
    await_read([first, second], places(10, 15))
    assert not read([second]) & places(0, 10), "the group has committed that"
    first.close()
    second.await_assigned(*range(PARTITIONS))
    assert not first.lost and not second.lost
    await_read([second], places(10, 15))


def check_takeover(broker, topic, members):
    """Of three members one is killed and one stopped beyond its session: the third reads on, and no commit is lost."""
    await_shared(members, PARTITIONS)
    killed, stopped, left = members
    killed.process.kill()
    stopped.process.send_signal(signal.SIGSTOP)
    left.await_assigned(*range(PARTITIONS))
    produce(broker, topic, 10)
    await_read([left], places(0, 10))
    for partition in range(PARTITIONS):
        assert left.ask(f"commit {partition} 10") == "10"
    stopped.process.send_signal(signal.SIGCONT)
    await_shared([stopped, left], PARTITIONS)
    assert stopped.lost, "it knows that others had its partitions"
    produce(broker, topic, 5, begin=10)
    await_read([left, stopped], places(10, 15))
    assert all(stopped.ask(f"committed {partition}") == "10" for partition in range(PARTITIONS))


def check_next_gateway(broker, topic, members):
    """The gateway is killed: members come back, and go on where they have committed."""
    await_shared(members, PARTITIONS)
    produce(broker, topic, 10)
    await_read(members, places(0, 10))
    for member in members:
        for partition in member.assigned:
            member.ask(f"commit {partition} 10")
        member.messages.clear()
    broker.kill("gateway")
    broker.wait(lambda: answers(broker), "the next gateway")
    produce(broker, topic, 5, begin=10)
    await_read(members, places(10, 15))
    await_shared(members, PARTITIONS)
    assert not read(members) & places(0, 10), "an empty answer would have sent them back to the start"


# --- who reads what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("library", "settings"), CLIENTS)
def test_members_share_a_topic_and_go_on_where_the_group_is(broker, topic, start, library, settings):
    produce(broker, topic, 10)
    check_sharing(broker, topic, lambda: start(library, settings))


def test_members_of_different_clients_are_one_group(broker, topic, start):
    libraries = ["confluent", "kafka-python", "aiokafka"] + ["java"] * kafka_members.has_java()
    members = [
        start(library, {"partition.assignment.strategy": "range"} if library == "confluent" else {})
        for library in libraries
    ]
    await_shared(members, PARTITIONS)
    produce(broker, topic, 10)
    await_read(members, places(0, 10))
    assert all(member.messages for member in members)
    members.pop().close()
    await_shared(members, PARTITIONS)


@pytest.mark.java
def test_one_group_has_members_by_http_by_lines_and_by_two_clients_of_kafka(broker, topic, group, start):
    cooperative = {"partition.assignment.strategy": "cooperative-sticky"}
    found = {"http": set(), "lines": set()}
    with kmq.Consumer(topic, port=lambda: port(broker, "egress"), group_id=group, session_s=6) as lines:
        members = [start("java"), start("confluent", cooperative)]

        def shared() -> list[int]:
            """Let the two that are here ask for messages. Returns how many partitions each member has."""
            path = f"/api/topics/{topic}/consume?group={group}&member=h&timeoutMs=50&autoCommit=true"
            status, body = broker.get(path)
            assert status == 200, body
            found["http"] |= {(message["partition"], message["offset"]) for message in json.loads(body)["messages"]}
            found["lines"] |= {(message.partition, message.offset) for message in lines.poll(timeout=0.05)}
            return sorted(len(row["assignment"]) for row in described(broker, group)["members"])

        until(lambda: shared() == [1, 1, 1, 1] and all(map(has_one, members)), instead=lambda: described(broker, group))
        produce(broker, topic, 10)
        until(
            lambda: bool(shared()) and places(0, 10) <= read(members) | found["http"] | found["lines"],
            instead=lambda: found,
        )
        parts = [read([member]) for member in members] + [*found.values()]
        assert [len({partition for partition, _ in part}) for part in parts] == [1, 1, 1, 1]
        members.pop(0).close()
        until(lambda: shared() == [1, 1, 2], instead=lambda: described(broker, group))
        lines.commit()
        assert described(broker, group)["protocol"] == "cooperative-sticky"


def has_one(member):
    return member.assigned is not None and len(member.assigned) == 1


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_a_member_that_is_killed_or_stopped_loses_its_partitions_to_the_others(broker, topic, start, assignor):
    members = [start("confluent", {"partition.assignment.strategy": assignor}) for _ in range(3)]
    check_takeover(broker, topic, members)


@pytest.mark.java
def test_members_move_from_an_eager_assignor_to_the_cooperative_one_by_two_restarts_each(broker, topic, start):
    name = "partition.assignment.strategy"
    both = ",".join(
        f"org.apache.kafka.clients.consumer.{each}" for each in ("CooperativeStickyAssignor", "RangeAssignor")
    )
    members = [start("confluent") for _ in range(2)]
    await_shared(members, PARTITIONS)
    for library, assignors in [("java", both)] * 2 + [("confluent", "cooperative-sticky")] * 2:
        members.pop(0).close()
        members.append(start(library, {name: assignors}))
        await_shared(members, PARTITIONS)
    assert described(broker, members[0].group)["protocol"] == "cooperative-sticky"
    produce(broker, topic, 5)
    await_read(members, places(0, 5))


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_a_static_member_that_starts_again_has_its_partitions_and_disturbs_nobody(broker, topic, start, assignor):
    def one(name):
        return start("confluent", {"partition.assignment.strategy": assignor, "group.instance.id": name})

    first, second = one("w1"), one("w2")
    await_shared([first, second], PARTITIONS)
    had = first.assigned
    first.kill()
    second.assignments.clear()
    again = one("w1")
    again.await_assigned(*had)
    produce(broker, topic, 5)
    await_read([again, second], places(0, 5))
    assert not second.assignments and not second.lost
    again.close()  # which does not leave the group
    assert len(described(broker, again.group)["members"]) == 2


def test_a_gateway_that_is_killed_forgets_no_offset_and_members_come_back(broker, topic, start):
    members = [start("confluent"), start("aiokafka")]
    check_next_gateway(broker, topic, members)


# --- what is said, byte by byte ---------------------------------------------------------------------------------------


def subscription(*topics, owned=()):
    """A member's metadata, version 1, with what it reads still: (topic, partition)."""
    text = lambda word: struct.pack(f">h{len(word)}s", len(word), word.encode())  # noqa: E731
    numbers = {name: [number for other, number in owned if other == name] for name in dict(owned)}
    rows = [text(name) + struct.pack(f">i{len(of)}i", len(of), *of) for name, of in numbers.items()]
    return b"".join(
        (struct.pack(">hi", 1, len(topics)), *map(text, topics), b"\xff" * 4, struct.pack(">i", len(rows)), *rows)
    )


def send_join(peer, group, topic, member="", *, assignors=("range",), owned=(), version=3, session=6.0, **more):
    protocols = [{"name": name, "metadata": subscription(topic, owned=owned)} for name in assignors]
    fields = {"group_id": group, "session_timeout": timedelta(seconds=session), "member_id": member}
    if version >= 1:
        fields["rebalance_timeout"] = timedelta(seconds=20)
    peer.send(JOIN, version, **fields, protocol_type="consumer", protocols=protocols, **more)


def join(peer, *arguments, **more):
    send_join(peer, *arguments, **more)
    return peer.read()


def sync(peer, group, joined, version=3, **more):
    fields = {"group_id": group, "generation_id": joined.generation_id, "member_id": joined.member_id}
    return peer.ask(SYNC, version, **fields, assignments=[], **more)


def beat(peer, group, member, generation, version=3, **more):
    return peer.ask(BEAT, version, group_id=group, generation_id=generation, member_id=member, **more).error_code


def commit(peer, group, rows, member="", generation=-1, version=6, epoch=-1, **more):
    """Commit (topic, partition) → offset or (offset, metadata). Returns what became of each."""
    topics = []
    for (topic, partition), row in rows.items():
        offset, metadata = row if isinstance(row, tuple) else (row, "")
        part = {"partition_index": partition, "committed_offset": offset, "committed_metadata": metadata}
        if version >= 6:
            part["committed_leader_epoch"] = epoch
        topics.append({"name": topic, "partitions": [part]})
    if version <= 4:
        more["retention_time"] = timedelta(milliseconds=-1)
    found = peer.ask(
        COMMIT,
        version,
        group_id=group,
        generation_id_or_member_epoch=generation,
        member_id=member,
        topics=topics,
        **more,
    )
    return [part.error_code for row in found.topics for part in row.partitions]


def fetch(peer, group, topic=None, partitions=(0,), version=5):
    """What OffsetFetch says: the error of the group, and partition → its row."""
    topics = None if topic is None else [{"name": topic, "partition_indexes": list(partitions)}]
    if version == 8:
        [found] = peer.ask(FETCH, 8, groups=[{"group_id": group, "topics": topics}], require_stable=True).groups
    else:
        more = {"require_stable": False} if version == 7 else {}
        found = peer.ask(FETCH, version, group_id=group, topics=topics, **more)
    rows = {part.partition_index: part for row in found.topics for part in row.partitions}
    return getattr(found, "error_code", None), rows


def assigned(response):
    """Partitions in an assignment of one topic."""
    assert response.error_code == ErrorCode.none
    count = struct.unpack_from(">h", response.assignment, 6)[0]
    if response.assignment[2:6] == b"\0\0\0\0":
        return []
    found, *_ = struct.unpack_from(">i", response.assignment, 8 + count)
    return list(struct.unpack_from(f">{found}i", response.assignment, 12 + count))


def test_every_version_of_a_members_requests_is_served(peer, topic, group):
    for version in range(8):
        if version < 4:
            joined = join(peer, group, topic, version=version)
        else:
            asked = join(peer, group, topic, version=version)
            assert asked.error_code == ErrorCode.member_id_required and asked.member_id
            joined = join(peer, group, topic, asked.member_id, version=version)
        assert joined.error_code == ErrorCode.none and joined.leader == "" and not joined.members
        assert joined.member_id and joined.protocol_name == "range"
        for number in range(6):
            assert assigned(sync(peer, group, joined, number)) == [*range(PARTITIONS)]
        who = joined.member_id, joined.generation_id
        assert [beat(peer, group, *who, number) for number in range(5)] == [ErrorCode.none] * 5
        for number in range(2, 9):
            assert commit(peer, group, {(topic, 1): (0, f"v{number}")}, *who, version=number) == [ErrorCode.none]
            for reading in range(1, 9):
                code, rows = fetch(peer, group, topic, (1, 2), reading)
                assert code in (None, ErrorCode.none)
                assert (rows[1].committed_offset, rows[1].metadata) == (0, f"v{number}")
                assert (rows[2].committed_offset, rows[2].metadata) == (-1, "")
        assert {number: [*fetch(peer, group, None, (), number)[1]] for number in range(2, 9)} == {
            n: [1] for n in range(2, 9)
        }
        leave(peer, group, joined.member_id, version % 5)


def leave(peer, group, member, version=2, name=None):
    if version < 3:
        return peer.ask(LEAVE, version, group_id=group, member_id=member).error_code
    found = peer.ask(LEAVE, version, group_id=group, members=[{"member_id": member, "group_instance_id": name}])
    assert found.error_code == ErrorCode.none
    return found.members[0].error_code


def test_who_joins_again_without_need_moves_nothing(broker, peer, topic, group):
    """Else two members with an eager assignor would send one another back to JoinGroup for ever."""
    with Peer.of(broker.pipes) as other:
        first = join(peer, group, topic)
        sync(peer, group, first)
        send_join(other, group, topic)
        until(lambda: beat(peer, group, first.member_id, first.generation_id) == ErrorCode.rebalance_in_progress)
        first = join(peer, group, topic, first.member_id)
        second = other.read()
        assert first.generation_id == second.generation_id
        mine = assigned(sync(peer, group, first))
        assert sorted(mine + assigned(sync(other, group, second))) == [*range(PARTITIONS)]
        again = join(peer, group, topic, first.member_id)
        assert again.generation_id == first.generation_id
        assert beat(other, group, second.member_id, second.generation_id) == ErrorCode.none
        assert assigned(sync(peer, group, again)) == mine


def test_what_a_member_still_reads_is_given_to_nobody_until_it_joins_again_without_it(broker, peer, topic, group):
    asked = {"assignors": ("cooperative-sticky",), "version": 3}
    with Peer.of(broker.pipes) as other:
        first = join(peer, group, topic, **asked)
        mine = assigned(sync(peer, group, first))
        second = join(other, group, topic, **asked)
        assert assigned(sync(other, group, second)) == []
        first = join(peer, group, topic, first.member_id, owned=[(topic, n) for n in mine], **asked)
        kept = assigned(sync(peer, group, first))
        assert len(kept) == 2 and assigned(sync(other, group, second)) == []
        moving = (topic, min({*mine} - {*kept}))
        assert commit(peer, group, {moving: 0}, first.member_id, first.generation_id) == [ErrorCode.none]
        first = join(peer, group, topic, first.member_id, owned=[(topic, n) for n in kept], **asked)
        assert first.generation_id > second.generation_id
        assert beat(other, group, second.member_id, second.generation_id) == ErrorCode.rebalance_in_progress
        second = join(other, group, topic, second.member_id, **asked)
        assert sorted(assigned(sync(peer, group, first)) + assigned(sync(other, group, second))) == mine
        assert commit(peer, group, {moving: 0}, first.member_id, first.generation_id) == [ErrorCode.illegal_generation]


def test_a_member_whose_connection_ends_in_joingroup_stays_until_its_session_ends(broker, peer, topic, group):
    first = join(peer, group, topic)
    sync(peer, group, first)
    with Peer.of(broker.pipes) as other:
        send_join(other, group, topic)
        until(lambda: beat(peer, group, first.member_id, first.generation_id) == ErrorCode.rebalance_in_progress)
    begun = time.monotonic()
    first = join(peer, group, topic, first.member_id)
    assert len(assigned(sync(peer, group, first))) == 2, "the other is a member"
    code = ErrorCode.none
    while code == ErrorCode.none:
        code = beat(peer, group, first.member_id, first.generation_id)
    assert code == ErrorCode.rebalance_in_progress and time.monotonic() - begun > 4.0
    first = join(peer, group, topic, first.member_id)
    assert assigned(sync(peer, group, first)) == [*range(PARTITIONS)]


def test_who_is_no_member_or_of_an_old_generation_commits_nothing(broker, peer, topic, group):
    mine = {(topic, 0): 0}
    assert commit(peer, group, mine) == [ErrorCode.none], "nobody is a member"
    assert commit(peer, group, mine, "ghost", 1) == [ErrorCode.unknown_member_id]
    first = join(peer, group, topic)
    sync(peer, group, first)
    who = first.member_id, first.generation_id
    assert commit(peer, group, mine) == [ErrorCode.unknown_member_id], "only members may"
    assert commit(peer, group, mine, who[0], who[1] + 1) == [ErrorCode.illegal_generation]
    assert commit(peer, group, mine, who[0], -1) == [ErrorCode.illegal_generation]
    with Peer.of(broker.pipes) as other:
        send_join(other, group, topic)
        until(lambda: beat(peer, group, *who) == ErrorCode.rebalance_in_progress, "a rebalance")
        assert commit(peer, group, mine, *who) == [ErrorCode.none], "before it gives up what it has"
        first = join(peer, group, topic, first.member_id)
        other.read()
    assert commit(peer, group, mine, *who) == [ErrorCode.illegal_generation]
    assert beat(peer, group, *who) == ErrorCode.illegal_generation
    assert sync(peer, group, first).error_code == ErrorCode.none
    assert leave(peer, group, who[0]) == ErrorCode.none
    assert leave(peer, group, who[0], 4) == ErrorCode.unknown_member_id


def test_a_newer_member_of_the_same_static_name_takes_the_place_and_the_older_is_fenced(broker, peer, topic, group):
    static = {"version": 5, "group_instance_id": "w1"}
    old = join(peer, group, topic, **static)
    assert old.error_code == ErrorCode.none, "no id is asked for first"
    sync(peer, group, old, group_instance_id="w1")
    with Peer.of(broker.pipes) as other:
        send_join(other, group, topic)
        until(lambda: beat(peer, group, old.member_id, old.generation_id) == ErrorCode.rebalance_in_progress)
        old = join(peer, group, topic, old.member_id, **static)
        mine = assigned(sync(peer, group, old, group_instance_id="w1"))
        second = other.read()
        place = topic, assigned(sync(other, group, second))[0]
        new = join(peer, group, topic, **static)
        assert new.member_id != old.member_id
        assert assigned(sync(peer, group, new, group_instance_id="w1")) == mine
        assert beat(other, group, second.member_id, second.generation_id) == ErrorCode.none, "nobody else hears of it"
        assert commit(other, group, {place: 0}, second.member_id, second.generation_id) == [ErrorCode.none]
    who = old.member_id, old.generation_id
    fenced = ErrorCode.fenced_instance_id
    assert join(peer, group, topic, old.member_id, **static).error_code == fenced
    assert sync(peer, group, old, group_instance_id="w1").error_code == fenced
    assert beat(peer, group, *who, group_instance_id="w1") == fenced
    assert beat(peer, group, *who, group_instance_id="w2") == ErrorCode.unknown_member_id
    assert commit(peer, group, {(topic, mine[0]): 0}, *who, version=7, group_instance_id="w1") == [fenced]
    assert leave(peer, group, old.member_id, 3, "w1") == fenced
    assert leave(peer, group, "", 3, "w2") == ErrorCode.unknown_member_id
    assert leave(peer, group, "", 3, "w1") == ErrorCode.none, "by its name alone, as an operator says it"
    assert beat(peer, group, new.member_id, new.generation_id) == ErrorCode.unknown_member_id


def test_a_static_name_that_is_taken_over_ends_a_joingroup_that_waits(broker, peer, topic, group):
    first = join(peer, group, topic)
    with Peer.of(broker.pipes) as other, Peer.of(broker.pipes) as third:
        send_join(other, group, topic, version=5, group_instance_id="w1")
        until(lambda: len(described(broker, group)["members"]) == 2, "the member")
        send_join(third, group, topic, version=5, group_instance_id="w1")
        assert other.read().error_code == ErrorCode.fenced_instance_id
        assert join(peer, group, topic, first.member_id).generation_id == third.read().generation_id


def test_a_leaders_epoch_is_committed_with_the_offset_and_stands_in_the_record(broker, peer, topic, group):
    produce(broker, topic, 4)
    for version in (5, 6, 8):  # 5 knows of no epochs
        assert commit(peer, group, {(topic, 0): (version - 4, "m")}, version=version, epoch=7) == [ErrorCode.none]
        found = {number: fetch(peer, group, topic, (0, 1), number)[1] for number in (4, 5, 8)}
        assert {rows[0].committed_offset for rows in found.values()} == {version - 4}
        assert [found[number][0].committed_leader_epoch for number in (5, 8)] == [7 if version > 5 else -1] * 2
        assert found[5][1].committed_leader_epoch == -1
    last = broker.lines("__consumer_offsets")[-1]
    assert f".{group}.{topic}.0|".encode() in last and last.endswith(b" metadata=m epoch=7")
    broker.kill("gateway")
    broker.wait(lambda: answers(broker), "the next gateway")
    with Peer.of(broker.pipes) as after:
        until(lambda: fetch(after, group, topic)[0] == ErrorCode.none, "the groups")
        assert fetch(after, group, topic)[1][0].committed_leader_epoch == 7


def test_a_partition_that_is_refused_for_itself_does_not_stop_the_others(broker, peer, topic, group):
    produce(broker, topic, 3)
    rows = {
        (topic, 0): 3,
        (topic, 1): 1 << 40,  # beyond the end, as Kafka takes it
        (topic, 2): (2, "x" * 1025),
        (topic, 3): -1,
        (topic, PARTITIONS): 0,
        ("nowhere", 0): 0,
    }
    assert commit(peer, group, rows) == [
        ErrorCode.none,
        ErrorCode.none,
        ErrorCode.offset_metadata_too_large,
        ErrorCode.invalid_commit_offset_size,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unknown_topic_or_partition,
    ]
    found = fetch(peer, group, topic, range(PARTITIONS))[1]
    assert [row.committed_offset for row in found.values()] == [3, 1 << 40, -1, -1]


def test_a_commit_beyond_the_end_is_taken_and_hides_no_record(broker, peer, topic):
    """As of a tool that sets offsets ahead: Kafka's members reset, the others begin at the end."""
    produce(broker, topic, 3)
    names = [f"{topic}-{kind}" for kind in ("earliest", "http", "lines")]
    for name in names:
        assert set(commit(peer, name, {(topic, n): 1000 + n for n in range(PARTITIONS)})) == {ErrorCode.none}
        assert [row.committed_offset for row in fetch(peer, name, topic, range(PARTITIONS))[1].values()] == [
            1000 + n for n in range(PARTITIONS)
        ]
        assert {row["lag"] for row in described(broker, name)["partitions"]} == {0}
    metrics = broker.get("/metrics")[1]
    lags = re.findall(rf'^kmq_group_lag{{group="{topic}-.*}} (\S+)$', metrics, re.MULTILINE)
    assert lags and {float(each) for each in lags} == {0.0}

    settings = {"bootstrap.servers": f"localhost:{port(broker)}", "group.id": names[0]}
    consumer = Consumer(settings | {"auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    found = collect(3 * PARTITIONS, lambda: consumer.consume(100, 0.5))
    consumer.close()
    assert sorted(each.value().decode() for each in found) == [
        f"{n}/{at}" for n in range(PARTITIONS) for at in range(3)
    ]

    path = f"/api/topics/{topic}/consume?group={names[1]}&member=m&format=text&timeoutMs="
    assert json.loads(broker.get(f"{path}0")[1])["messages"] == []
    with kmq.Consumer(topic, port=port(broker, "egress"), group_id=names[2]) as member:
        member.connect()
        assert member.poll(timeout=0.5) == []
        produce(broker, topic, 1, 3)
        expected = {f"{n}/3" for n in range(PARTITIONS)}
        by_http = collect(PARTITIONS, lambda: json.loads(broker.get(f"{path}500")[1])["messages"])
        by_lines = collect(PARTITIONS, lambda: member.poll(timeout=0.5))
        assert {each["value"] for each in by_http} == {each.value.decode() for each in by_lines} == expected
        member.commit()
    assert {(row["committed"], row["lag"]) for row in described(broker, names[2])["partitions"]} == {(4, 0)}


def test_a_joingroup_that_waits_hears_that_its_member_was_taken_out(broker, peer, topic, group):
    first = join(peer, group, topic)
    with Peer.of(broker.pipes) as other:
        send_join(other, group, topic, "second")
        until(lambda: len(described(broker, group)["members"]) == 2, "the member")
        url = f"http://127.0.0.1:{port(broker, 'http')}/api/groups/{group}/members/second"
        with urllib.request.urlopen(urllib.request.Request(url, method="DELETE")) as answer:
            assert answer.status == 204
        assert other.read().error_code == ErrorCode.unknown_member_id
    assert [row["id"] for row in described(broker, group)["members"]] == [first.member_id]


def test_what_cannot_be_joined_is_refused_with_the_error_that_says_so(peer, topic, group):
    def refused(group=group, **more):
        return join(peer, group, topic, **more).error_code

    assert refused(session=5.9) == refused(session=1800.1) == ErrorCode.invalid_session_timeout
    assert refused("a b") == refused("") == refused("g" * 201) == ErrorCode.invalid_group_id
    assert refused(session=1800) == ErrorCode.none, "half an hour"
    broken = [{"name": "range", "metadata": b"\0"}]
    fields = {"group_id": group, "session_timeout": timedelta(seconds=6), "member_id": "", "protocol_type": "consumer"}
    assert peer.ask(JOIN, 0, **fields, protocols=broken).error_code == ErrorCode.inconsistent_group_protocol
    assert peer.ask(JOIN, 0, **fields, protocols=[]).error_code == ErrorCode.inconsistent_group_protocol
    long = [{"name": "range", "metadata": subscription(topic) + b"x" * (256 << 10)}]
    assert peer.ask(JOIN, 0, **fields, protocols=long).error_code == ErrorCode.group_max_size_reached
    claims = [(topic, number) for number in range(10_001)]
    assert refused("claims", assignors=("cooperative-sticky",), owned=claims) == ErrorCode.inconsistent_group_protocol
    unnamed = fields | {"protocol_type": ""}
    assert peer.ask(JOIN, 0, **unnamed, protocols=broken).error_code == ErrorCode.inconsistent_group_protocol


def test_a_client_that_calls_roundrobin_by_another_name_is_answered_by_that(broker, peer, topic, group):
    kafkajs = join(peer, group, topic, assignors=("RoundRobinAssigner",))
    assert kafkajs.protocol_name == "RoundRobinAssigner"
    sync(peer, group, kafkajs)
    with Peer.of(broker.pipes) as other:
        send_join(other, group, topic, assignors=("roundrobin", "range"))
        until(lambda: beat(peer, group, kafkajs.member_id, kafkajs.generation_id) == ErrorCode.rebalance_in_progress)
        kafkajs = join(peer, group, topic, kafkajs.member_id, assignors=("RoundRobinAssigner",))
        assert (kafkajs.protocol_name, other.read().protocol_name) == ("RoundRobinAssigner", "roundrobin")


# --- groups of which a member assigns ---------------------------------------------------------------------------------


@pytest.mark.java
def test_members_with_an_assignor_of_their_own_share_a_topic(broker, topic, group, start):
    members = [start("kafka-python", assignors="own") for _ in range(2)]
    members.append(start("java", {"partition.assignment.strategy": "own"}))
    await_shared(members, PARTITIONS)
    assert described(broker, group)["protocol"] == "own"
    produce(broker, topic, 10)
    await_read(members, places(0, 10))
    for member in members:
        for partition in member.assigned:
            assert member.ask(f"commit {partition} 10") == "10"
    for left in (2, 1):  # the leader is killed
        members.pop(0).kill()
        await_shared(members, PARTITIONS)
        assert len(members) == left
    produce(broker, topic, 5, begin=10)
    await_read(members, places(10, 15))
    members[0].messages.clear()
    broker.kill("gateway")
    broker.wait(lambda: answers(broker), "the next gateway")
    produce(broker, topic, 5, begin=15)
    await_read(members, places(15, 20))


def led(peer, group, member="", *, version=5, send=False, metadata=b"meta", session=6.0, **more):
    """Join a group of Connect's workers, by two protocols."""
    protocols = [{"name": name, "metadata": name.encode() + metadata} for name in ("sessioned", "eager")]
    fields = {"group_id": group, "session_timeout": timedelta(seconds=session), "protocol_type": "connect"}
    peer.send(JOIN, version, **fields, **REBALANCE, member_id=member, protocols=protocols, **more)
    return None if send else peer.read()


REBALANCE = {"rebalance_timeout": timedelta(seconds=20)}


def say_assignments(peer, group, joined, version=3, **assignments):
    rows = [{"member_id": member, "assignment": data} for member, data in assignments.items()]
    fields = {"group_id": group, "generation_id": joined.generation_id, "member_id": joined.member_id}
    peer.send(SYNC, version, **fields, assignments=rows)


def test_a_leader_is_told_of_all_members_and_its_bytes_reach_each_of_them(broker, peer, group):
    asked = led(peer, group)
    assert asked.error_code == ErrorCode.member_id_required
    first = led(peer, group, asked.member_id)
    assert first.leader == first.member_id and [row.metadata for row in first.members] == [b"sessionedmeta"]
    say_assignments(peer, group, first, **{first.member_id: b"all"})
    assert peer.read().assignment == b"all"
    with Peer.of(broker.pipes) as other:
        led(other, group, "second", send=True, metadata=b"other", group_instance_id="w2")
        who = first.member_id, first.generation_id
        until(lambda: beat(peer, group, *who) == ErrorCode.rebalance_in_progress, "a rebalance")
        first = led(peer, group, first.member_id)
        second = other.read()
        assert second.leader == first.leader == first.member_id and not second.members
        assert {(row.member_id, row.metadata) for row in first.members} == {
            (first.member_id, b"sessionedmeta"),
            ("second", b"sessionedother"),
        }
        say_assignments(other, group, second)
        assert described(broker, group)["state"] == "completing", "the second waits"
        say_assignments(peer, group, first, first=b"", second=b"two", **{first.member_id: b"one"})
        assert (peer.read().assignment, other.read().assignment) == (b"one", b"two")
        [shown] = other.ask(DESCRIBE, 4, groups=[group], include_authorized_operations=False).groups
        assert (shown.protocol_type, shown.protocol_data, shown.group_state) == ("connect", "sessioned", "Stable")
        rows = {
            row.member_id: (row.group_instance_id, row.member_metadata, row.member_assignment) for row in shown.members
        }
        assert rows["second"] == ("w2", b"sessionedother", b"two")
        listed = {row.group_id: row.protocol_type for row in other.ask(LIST, 3).groups}
        assert listed[group] == "connect"
        led(other, group, "second", metadata=b"other", group_instance_id="w2")
        say_assignments(other, group, second)
        assert other.read().assignment == b"two", "who joins again without need is told the same"
        assert beat(peer, group, first.member_id, first.generation_id) == ErrorCode.none
        led(peer, group, first.member_id, send=True)
        who = "second", second.generation_id
        until(lambda: beat(other, group, *who) == ErrorCode.rebalance_in_progress, "what the leader wants")


def test_who_waits_for_the_leader_hears_of_the_next_generation_and_of_its_end(broker, peer, group):
    with Peer.of(broker.pipes) as other, Peer.of(broker.pipes) as third:
        first = led(peer, group, "first")
        led(other, group, "second", send=True)
        who = "first", first.generation_id
        until(lambda: beat(peer, group, *who) == ErrorCode.rebalance_in_progress, "a rebalance")
        first, second = led(peer, group, "first"), other.read()
        say_assignments(other, group, second)
        led(third, group, "third", send=True)
        assert other.read().error_code == ErrorCode.rebalance_in_progress, "the leader has not said anything"
        led(other, group, "second", send=True)
        first, second = led(peer, group, "first"), other.read()
        third.read()
        say_assignments(other, group, second)
        until(lambda: leave(third, group, "second") == ErrorCode.none, "another client says so")
        assert other.read().error_code in (ErrorCode.unknown_member_id, ErrorCode.rebalance_in_progress)


def test_a_group_is_of_one_kind_while_it_has_members(broker, peer, topic, group):
    led(peer, group, "worker")
    assert join(peer, group, topic).error_code == ErrorCode.inconsistent_group_protocol
    body = json.dumps({"topics": [topic], "member": "h"}).encode()
    url = f"http://127.0.0.1:{port(broker, 'http')}/api/groups/{group}/members"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}))
    with refused.value as answer:
        assert (answer.code, json.load(answer)["code"]) == (409, "group_kind")
    by_lines = ask(port(broker, "egress"), f"GROUP {group} member=l topics={topic}")
    assert by_lines.startswith(b"!err group_kind ")
    assert delete_offsets(peer, group, topic, 0) == (ErrorCode.non_empty_group, [])
    assert leave(peer, group, "worker") == ErrorCode.none
    member = join(peer, group, topic)
    assert member.error_code == ErrorCode.none
    assert led(peer, group, "worker").error_code == ErrorCode.inconsistent_group_protocol


# --- groups as people look after them ---------------------------------------------------------------------------------


def delete_offsets(peer, group, topic, *partitions):
    """Returns the error of the group, and what became of each partition."""
    rows = [{"partition_index": number} for number in partitions]
    found = peer.ask(DELETE_OFFSETS, 0, group_id=group, topics=[{"name": topic, "partitions": rows}])
    return found.error_code, [part.error_code for row in found.topics for part in row.partitions]


def test_an_operator_sees_groups_of_all_doors_and_moves_and_deletes_them(broker, topic, group, start):
    admin = AdminClient({"bootstrap.servers": f"localhost:{port(broker)}"})
    member = start("confluent", {"group.instance.id": "w1"})
    member.await_assigned(*range(PARTITIONS))
    by_http = f"{group}-http"
    assert broker.get(f"/api/topics/{topic}/consume?group={by_http}&member=h")[0] == 200
    listed = {row.group_id: row.state for row in admin.list_consumer_groups().result().valid}
    assert listed[group] == ConsumerGroupState.STABLE and by_http in listed
    filtered = admin.list_consumer_groups(states={ConsumerGroupState.EMPTY}).result().valid
    assert group not in {row.group_id for row in filtered}
    shown = {name: row.result() for name, row in admin.describe_consumer_groups([group, by_http]).items()}
    [one] = shown[group].members
    assert (one.group_instance_id, one.client_id, shown[group].partition_assignor) == ("w1", "rdkafka", "range")
    assert sorted(place.partition for place in one.assignment.topic_partitions) == [*range(PARTITIONS)]
    [other] = shown[by_http].members
    assert other.member_id == "h" and {place.topic for place in other.assignment.topic_partitions} == {topic}
    with pytest.raises(KafkaException, match="NON_EMPTY_GROUP"):
        admin.delete_consumer_groups([group])[group].result()
    member.close()
    with Peer.of(broker.pipes) as peer:
        assert leave(peer, group, "", 4, "w1") == ErrorCode.none
    moved = [TopicPartition(topic, number, 0) for number in range(PARTITIONS)]
    admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, moved)])[group].result()
    found = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result()
    assert [(row.partition, row.offset) for row in found.topic_partitions] == [
        (number, 0) for number in range(PARTITIONS)
    ]
    admin.delete_consumer_groups([group])[group].result()
    assert group not in {row.group_id for row in admin.list_consumer_groups().result().valid}
    assert broker.get(f"/api/groups/{group}")[0] == 404


def test_offsets_are_deleted_only_where_no_member_subscribes(broker, peer, topic, group):
    assert delete_offsets(peer, group, topic, 0) == (ErrorCode.group_id_not_found, [])
    other = f"{topic}-other"
    peer.make_topic(other)
    assert commit(peer, group, {(topic, 0): 0, (topic, 1): 0, (other, 0): 0}) == [ErrorCode.none] * 3
    member = join(peer, group, topic)
    subscribed = ErrorCode.group_subscribed_to_topic
    assert delete_offsets(peer, group, topic, 0, 3) == (ErrorCode.none, [subscribed, subscribed])
    assert delete_offsets(peer, group, other, 0) == (ErrorCode.none, [ErrorCode.none])
    assert fetch(peer, group)[1].keys() == {0, 1}
    leave(peer, group, member.member_id)
    assert delete_offsets(peer, group, topic, 0) == (ErrorCode.none, [ErrorCode.none])
    assert fetch(peer, group)[1].keys() == {1}
    assert delete_offsets(peer, group, topic, 1) == (ErrorCode.none, [ErrorCode.none])
    assert broker.get(f"/api/groups/{group}")[0] == 404, "nothing is left of it"


def test_every_version_of_an_operators_requests_is_served(peer, topic, group):
    member = join(peer, group, topic)
    sync(peer, group, member)
    for version in range(6):
        more = {"include_authorized_operations": False} if version >= 3 else {}
        gone, there = peer.ask(DESCRIBE, version, groups=["nobody", group], **more).groups
        assert (gone.error_code, gone.group_state, there.group_state) == (ErrorCode.none, "Dead", "Stable")
        assert (there.protocol_type, there.protocol_data) == ("consumer", "range")
        assert [row.member_id for row in there.members] == [member.member_id]
    for version in range(5):
        more = {"states_filter": []} if version >= 4 else {}
        listed = peer.ask(LIST, version, **more)
        assert listed.error_code == ErrorCode.none and group in {row.group_id for row in listed.groups}
    for version in range(3):
        found = peer.ask(DELETE, version, groups_names=[group, "nobody"])
        assert [row.error_code for row in found.results] == [ErrorCode.non_empty_group, ErrorCode.group_id_not_found]


def test_roles_are_asked_for(new_broker):
    made = new_broker()
    made.gateway = True
    path = str(made.root / "tokens")
    roles = {role: tokens.new(path, role, [role]) for role in ("produce", "consume", "admin")}
    made.up(KMQ_TOKENS=path)
    forbidden = ErrorCode.group_authorization_failed

    def opened(role):
        peer = Peer.of(made.pipes)
        assert peer.ask(17, 1, mechanism="PLAIN").error_code == ErrorCode.none
        assert peer.ask(36, 1, auth_bytes=b"\0me\0" + roles[role].encode()).error_code == ErrorCode.none
        return peer

    with opened("admin") as admin, opened("consume") as reader, opened("produce") as writer:
        admin.make_topic("t")
        assert join(writer, "g", "t").error_code == beat(writer, "g", "m", 1) == leave(writer, "g", "m") == forbidden
        assert commit(writer, "g", {("t", 0): 0}) == [forbidden]
        assert fetch(writer, "g", "t", version=2) == (forbidden, {})
        assert fetch(writer, "g", "t", version=1)[1][0].error_code == forbidden
        assert writer.ask(DESCRIBE, 0, groups=["g"]).groups[0].error_code == forbidden
        assert commit(reader, "g", {("t", 0): 0}) == [ErrorCode.none]
        assert not writer.ask(LIST, 0).groups and reader.ask(LIST, 0).groups
        assert reader.ask(DELETE, 0, groups_names=["g"]).results[0].error_code == forbidden
        assert delete_offsets(reader, "g", "t", 0) == (forbidden, [])
        assert delete_offsets(admin, "g", "t", 1) == (ErrorCode.none, [ErrorCode.none])
        assert admin.ask(DELETE, 0, groups_names=["g"]).results[0].error_code == ErrorCode.none


def test_nothing_is_said_of_a_group_before_its_offsets_are_loaded(broker, topic, group):
    with Peer.of(broker.pipes) as before:
        assert commit(before, group, {(topic, 0): 0}) == [ErrorCode.none]
    router = broker.pids()["router"]
    loading = ErrorCode.coordinator_load_in_progress
    os.kill(router, signal.SIGSTOP)
    try:
        broker.send_lines([b"orders|0||is durable, and not routed"])
        broker.kill("gateway")
        broker.wait(lambda: broker.status()["gateway"]["state"] == "recovering", "the next gateway")
        with Peer.of(broker.pipes) as peer:
            assert join(peer, group, topic, "m").error_code == leave(peer, group, "m") == loading
            again = peer.ask(SYNC, 0, group_id=group, generation_id=1, member_id="m", assignments=[]).error_code
            assert again == ErrorCode.rebalance_in_progress, "clients know no other error here"
            assert beat(peer, group, "m", 1) == ErrorCode.none, "aiokafka dies of any other answer"
            assert peer.ask(LEAVE, 4, group_id=group, members=[{"member_id": "m"}]).error_code == loading
            assert commit(peer, group, {(topic, 0): 0}) == [loading]
            code, rows = fetch(peer, group, topic, (0, 1), 1)
            assert code is None and [row.error_code for row in rows.values()] == [loading, loading]
            assert {fetch(peer, group, topic, (0,), version)[0] for version in range(2, 9)} == {loading}
            assert peer.ask(DESCRIBE, 0, groups=[group]).groups[0].error_code == loading
            assert peer.ask(LIST, 0).error_code == loading
            assert peer.ask(DELETE, 0, groups_names=[group]).results[0].error_code == loading
            assert delete_offsets(peer, group, topic, 0) == (loading, [])
    finally:
        os.kill(router, signal.SIGCONT)
    broker.wait(lambda: answers(broker) and broker.status()["gateway"]["state"] == "ready", "the offsets")
    with Peer.of(broker.pipes) as peer:
        until(lambda: fetch(peer, group, topic)[0] == ErrorCode.none, "the groups")
        assert fetch(peer, group, topic)[1][0].committed_offset == 0
