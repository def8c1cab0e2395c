"""Members by the newer protocol of Kafka's consumers (KIP-848): real clients, alone and beside other doors."""

import itertools
import json
import uuid
from collections import Counter
from datetime import timedelta

import kafka_members
import pytest
import test_kafka_groups as classic
from brokers import PATIENCE_S
from confluent_kafka import ConsumerGroupState, Producer
from confluent_kafka.admin import AdminClient
from kafka_members import Member, await_shared
from kafka_peer import Peer
from kio.schema.errors import ErrorCode
from test_kafka_groups import (
    PARTITIONS,
    answers,
    await_read,
    check_next_gateway,
    check_sharing,
    check_takeover,
    commit,
    described,
    has_one,
    join,
    places,
    port,
    produce,
    read,
    sync,
)
from waiting import until

from kmq.access import tokens

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

broker, group = classic.broker, classic.group
METADATA, OFFSET_FETCH, DELETE_TOPICS, HEARTBEAT, DESCRIBE = 3, 9, 20, 68, 69
NEW = {"group.protocol": "consumer", "enable.auto.commit": "false", "auto.offset.reset": "earliest"}
CLIENTS = ["confluent", pytest.param("java", marks=pytest.mark.java)]
SESSION_S = 30


@pytest.fixture
def start(broker, group, topic):
    """Starts members of the group by the newer protocol, which are gone after the test."""
    members = []

    def start_one(library="confluent", **more):
        if library == "java" and not kafka_members.has_java():
            pytest.skip("Apache's client is not there; see tests/kafka_members.py")
        members.append(Member(library, port(broker), group, topic, **{**NEW, **more}))
        return members[-1]

    yield start_one
    for member in members:
        member.kill()


# --- who reads what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", CLIENTS)
def test_members_share_a_topic_and_go_on_where_the_group_is(broker, topic, start, library):
    produce(broker, topic, 10)
    check_sharing(broker, topic, lambda: start(library))


def test_a_member_that_is_killed_or_stopped_loses_its_partitions_to_the_others(broker, topic, start):
    members = [start() for _ in range(3)]
    check_takeover(broker, topic, members)


def test_a_gateway_that_is_killed_forgets_no_offset_and_members_come_back(broker, topic, start):
    members = [start(), start()]
    check_next_gateway(broker, topic, members)


@pytest.mark.parametrize("library", CLIENTS)
def test_one_group_has_members_of_both_protocols_and_by_http(broker, topic, group, start, library):
    """While they come and go each record is read once, and no commit goes back."""
    producer, count = Producer({"bootstrap.servers": f"localhost:{port(broker)}"}), itertools.count()
    by_http, committed = [], Counter()
    auto = {"enable.auto.commit": "true", "auto.commit.interval.ms": 500}

    def go_on():
        """Produce one round, let the member by HTTP read, and look where the group is."""
        number = next(count)
        for partition in range(PARTITIONS):
            producer.produce(topic, str(number).encode(), partition=partition)
        assert producer.flush(PATIENCE_S) == 0
        path = f"/api/topics/{topic}/consume?group={group}&member=h&timeoutMs=50&autoCommit=true"
        status, body = broker.get(path)
        assert status == 200, body
        by_http.extend((message["partition"], message["offset"]) for message in json.loads(body)["messages"])
        for row in described(broker, group)["partitions"]:
            offset = row["committed"] or 0
            assert offset >= committed[row["partition"]], "a commit went back"
            committed[row["partition"]] = offset
        return number + 1

    def share(*shares):
        def is_shared():
            go_on()
            rows = described(broker, group)["members"]
            return sorted(len(row["assignment"]) for row in rows) == [*shares]

        until(is_shared, instead=lambda: described(broker, group))

    share(4)
    new = start(library, **auto)
    share(2, 2)
    old = start(**{**auto, "group.protocol": "classic", "partition.assignment.strategy": "cooperative-sticky"})
    share(1, 1, 2)
    third = start(**auto)
    share(1, 1, 1, 1)
    until(lambda: go_on() and all(map(has_one, (new, old, third))), instead=lambda: f"{new}\n{old}\n{third}")
    new.close()
    share(1, 1, 2)
    total = go_on()
    members = [new, old, third]
    until(
        lambda: go_on() and places(0, total) <= read(members) | {*by_http}, instead=lambda: "\n".join(map(str, members))
    )
    times = Counter(by_http) + Counter((place, offset) for each in members for place, offset, _ in each.messages)
    assert {times[place] for place in places(0, total)} == {1}
    assert all(each.messages for each in members) and by_http


def test_members_of_both_protocols_share_by_an_assignor_that_asks_for_everything(broker, topic, start):
    new = [start(), start()]
    await_shared(new, PARTITIONS)
    old = start(**{"group.protocol": "classic", "partition.assignment.strategy": "range"})
    await_shared([*new, old], PARTITIONS)
    assert described(broker, old.group)["protocol"] == "range"
    produce(broker, topic, 5)
    await_read([*new, old], places(0, 5))
    old.close()
    await_shared(new, PARTITIONS)
    assert not any(each.lost for each in (*new, old))


def test_a_static_member_that_starts_again_has_its_partitions_back(broker, topic, start):
    members = [start(**{"group.instance.id": f"w{n}"}) for n in range(2)]
    await_shared(members, PARTITIONS)
    first, other = members
    had, before = first.assigned, len(other.assignments)
    first.close()
    again = start(**{"group.instance.id": "w0"})
    again.await_assigned(*had)
    assert len(other.assignments) == before and not other.lost
    assert len(described(broker, again.group)["members"]) == 2


def test_a_pattern_finds_topics_that_are_made_later(broker, group):
    name = f"p{uuid.uuid4().hex[:8]}"
    member = Member(
        "confluent", port(broker), group, f"^{name}-.*", **NEW, **{"topic.metadata.refresh.interval.ms": 500}
    )
    try:
        with Peer.of(broker.pipes) as other:
            for number in range(2):
                other.make_topic(f"{name}-{number}")
                produce(broker, f"{name}-{number}", 1)
                until(lambda: len(member.messages) == PARTITIONS * (number + 1), instead=lambda: member)  # noqa: B023
    finally:
        member.kill()


def test_an_operator_sees_the_group(broker, group, start):
    member = start(**{"client.id": "etl"})
    member.await_assigned(*range(PARTITIONS))
    admin = AdminClient({"bootstrap.servers": f"localhost:{port(broker)}"})
    shown = admin.describe_consumer_groups([group])[group].result()
    [one] = shown.members
    assert (shown.state, shown.partition_assignor, one.client_id) == (
        ConsumerGroupState.STABLE,
        "cooperative-sticky",
        "etl",
    )
    assert sorted(place.partition for place in one.assignment.topic_partitions) == [*range(PARTITIONS)]
    listed = {row.group_id: row.state for row in admin.list_consumer_groups().result().valid}
    assert listed[group] == ConsumerGroupState.STABLE
    result = broker.kmq("groups", "describe", group)
    assert result.returncode == 0 and result.stdout.count(one.member_id) == PARTITIONS, result.stdout + result.stderr


# --- what is said, byte by byte ---------------------------------------------------------------------------------------


def beat(peer, group, member="m", epoch=0, topics=None, owned=None, version=1, pattern=None, rebalance_s=20.0, **more):
    """A heartbeat. `owned`: id of a topic → partitions."""
    rows = None if owned is None else [{"topic_id": id, "partitions": each} for id, each in owned.items()]
    fields = {"group_id": group, "member_id": member, "member_epoch": epoch, "subscribed_topic_names": topics}
    fields |= {"instance_id": None, "rack_id": None, "server_assignor": None, "topic_partitions": rows}
    fields["rebalance_timeout"] = timedelta(seconds=rebalance_s)
    if version:
        fields["subscribed_topic_regex"] = pattern
    return peer.ask(HEARTBEAT, version, **fields | more)


def numbers(answer):
    """Partitions of an answer; None if it says nothing of them."""
    assert answer.error_code == ErrorCode.none, answer
    if answer.assignment is None:
        return None
    return [number for row in answer.assignment.topic_partitions for number in row.partitions]


def id_of(peer, topic, version=12):
    more = {"include_cluster_authorized_operations": False} if version < 11 else {}
    rows = [{"name": topic, "topic_id": None}]
    fields = {"topics": rows, "allow_auto_topic_creation": False, "include_topic_authorized_operations": False}
    [row] = peer.ask(METADATA, version, **fields, **more).topics
    assert row.error_code == ErrorCode.none
    return row.topic_id


def test_what_a_member_is_asked_for_is_given_to_nobody_until_it_says_so(broker, peer, topic, group):
    id = id_of(peer, topic)
    a = beat(peer, group, "a", topics=[topic], owned={})
    assert numbers(a) == [*range(PARTITIONS)] and a.member_id == "a" and a.member_epoch > 0
    assert numbers(beat(peer, group, "a", a.member_epoch, owned={id: [*range(PARTITIONS)]})) is None, "nothing is new"
    with Peer.of(broker.pipes) as other:
        b = beat(other, group, "b", topics=[topic], owned={})
        assert numbers(b) == []
        # It says again what it had, before it has heard of anything; then less, as if it had.
        beat(peer, group, "a", a.member_epoch, owned={id: [*range(PARTITIONS)]})
        told = beat(peer, group, "a", a.member_epoch)
        kept = numbers(told)
        assert len(kept) == PARTITIONS // 2 and told.member_epoch > a.member_epoch
        asked = sorted({*range(PARTITIONS)} - {*kept})
        assert numbers(beat(peer, group, "a", told.member_epoch, owned={id: [*range(PARTITIONS)]})) is None
        b = beat(other, group, "b", b.member_epoch)
        assert not numbers(b), "it is read still"
        assert commit(peer, group, {(topic, asked[0]): 0}, "a", told.member_epoch, 9) == [ErrorCode.none]
        assert commit(other, group, {(topic, asked[0]): 0}, "b", b.member_epoch, 9) == [ErrorCode.stale_member_epoch]
        beat(peer, group, "a", told.member_epoch, owned={id: kept})
        found = []
        until(
            lambda: found.append(beat(other, group, "b", b.member_epoch)) or numbers(found[-1]) == asked,
            instead=lambda: found,
        )
        assert commit(other, group, {(topic, asked[0]): 0}, "b", found[-1].member_epoch, 9) == [ErrorCode.none]
        assert commit(peer, group, {(topic, asked[0]): 0}, "a", told.member_epoch, 9) == [ErrorCode.stale_member_epoch]


def test_what_a_member_says_before_it_has_heard_of_a_request_gives_nothing_up(broker, peer, topic, group):
    id = id_of(peer, topic)
    a = beat(peer, group, "a", topics=[topic], owned={})
    with Peer.of(broker.pipes) as other:
        b = beat(other, group, "b", topics=[topic], owned={})
        # As a client that has not begun with what it was given says after a heartbeat that got lost.
        told = beat(peer, group, "a", a.member_epoch, topics=[topic], owned={})
        asked = {*range(PARTITIONS)} - {*numbers(told)}
        assert len(asked) == PARTITIONS // 2
        for number in asked:  # it may be about to read them
            assert commit(peer, group, {(topic, number): 0}, "a", told.member_epoch, 9) == [ErrorCode.none]
        beat(peer, group, "a", told.member_epoch, owned={id: numbers(told)})
        until(lambda: len(numbers(beat(other, group, "b", b.member_epoch)) or ()) == 2, "what was given up")


def test_who_is_no_member_or_of_another_epoch_is_told_so(peer, topic, group):
    assert beat(peer, group, "m", 5).error_code == ErrorCode.unknown_member_id
    assert beat(peer, group, "m", -1).error_code == ErrorCode.unknown_member_id
    epoch = beat(peer, group, topics=[topic], owned={}).member_epoch
    assert beat(peer, group, "m", epoch + 1).error_code == ErrorCode.fenced_member_epoch
    assert beat(peer, group, "n", epoch).error_code == ErrorCode.unknown_member_id
    left = beat(peer, group, "m", -1)
    assert (left.error_code, left.member_epoch, left.assignment) == (ErrorCode.none, -1, None)
    assert beat(peer, group, "m", epoch).error_code == ErrorCode.unknown_member_id
    assert commit(peer, group, {(topic, 0): 0}, "m", epoch, 9) == [ErrorCode.unknown_member_id]


def test_a_member_of_the_older_version_is_given_an_id(peer, topic, group):
    found = beat(peer, group, "", topics=[topic], owned={}, version=0)
    assert numbers(found) == [*range(PARTITIONS)] and found.member_id.startswith("peer-")
    assert beat(peer, group, "", topics=[topic], owned={}, version=1).error_code == ErrorCode.invalid_request


def test_what_cannot_be_wanted_is_refused_with_the_error_that_says_so(peer, topic, group):
    assert beat(peer, group).error_code == ErrorCode.invalid_request, "neither topics nor a pattern"
    other = beat(peer, group, topics=[topic], server_assignor="mine")
    assert other.error_code == ErrorCode.unsupported_assignor
    for pattern in (
        "(a+)+b",
        "(a*)*",
        ".*.*.*x",
        ".?" * 30 + "x",
        "(a|a)" * 20 + "b",
        r"(a)\1",
        "a{1,9}",
        "(?=a)",
        "[",
        "(",
        "a" * 501,
    ):
        found = peer_code(peer, group, pattern)
        assert found == 128, pattern  # INVALID_REGULAR_EXPRESSION
    assert numbers(beat(peer, group, topics=[topic], server_assignor="range")) == [*range(PARTITIONS)]


def peer_code(peer, group, pattern):
    """The error of a heartbeat, as a number: kio knows no newer ones."""
    before = [*peer.waiting]
    fields = {"group_id": group, "member_id": "m", "member_epoch": 0, "instance_id": None, "rack_id": None}
    fields |= {"rebalance_timeout": timedelta(seconds=20), "subscribed_topic_names": None, "server_assignor": None}
    peer.send(HEARTBEAT, 1, **fields, subscribed_topic_regex=pattern, topic_partitions=[])
    peer.waiting = before
    return int.from_bytes(peer.read_raw()[9:11])


def test_a_pattern_is_bounded_and_an_empty_one_is_none(peer, group):
    for pattern in (r"(^a.*b)|(^c\.d.+)", "(orders|items)-[a-z0-9]+-v[12]", "|".join(f"t{n}.*x.*" for n in range(5))):
        assert peer_code(peer, group, pattern) == 0, pattern
    assert numbers(beat(peer, group, pattern="")) == []


def test_a_pattern_matches_whole_names(peer, topic, group):
    peer.make_topic(f"{topic}.x")
    found = [beat(peer, group, pattern=rf"{topic}(|\.x)")]

    def told():
        found.append(beat(peer, group, "m", found[-1].member_epoch))
        return numbers(found[-1]) or []

    # A topic that nobody names is found by the next look.
    until(lambda: len(numbers(found[0])) == 2 * PARTITIONS or len(told()) == 2 * PARTITIONS, instead=lambda: found)
    found.append(beat(peer, group, "m", found[-1].member_epoch, pattern=topic))
    until(lambda: len(numbers(found[-1]) or told()) == PARTITIONS, instead=lambda: found[-3:])


def test_a_static_name_is_free_when_its_member_has_left_or_is_gone(peer, topic, group):
    first = beat(peer, group, "a", topics=[topic], owned={}, instance_id="w")
    taken = beat(peer, group, "b", topics=[topic], owned={}, instance_id="w")
    assert taken.error_code == ErrorCode.unreleased_instance_id
    away = beat(peer, group, "a", -2, instance_id="w")
    assert (away.error_code, away.member_epoch) == (ErrorCode.none, -2)
    assert numbers(beat(peer, group, "b", topics=[topic], owned={}, instance_id="w")) == [*range(PARTITIONS)]
    assert beat(peer, group, "a", first.member_epoch).error_code == ErrorCode.unknown_member_id
    assert beat(peer, group, "a", first.member_epoch, instance_id="w").error_code == ErrorCode.fenced_instance_id
    assert beat(peer, group, "b", -1).error_code == ErrorCode.none


def test_an_older_member_is_told_of_an_illegal_generation_and_a_newer_one_of_a_stale_epoch(broker, peer, topic, group):
    old = join(peer, group, topic, assignors=("cooperative-sticky",))
    sync(peer, group, old)
    place = {(topic, 0): 0}
    generation = old.generation_id
    assert commit(peer, group, place, old.member_id, generation, 9) == [ErrorCode.none]
    assert commit(peer, group, place, old.member_id, generation + 9, 9) == [ErrorCode.illegal_generation]
    with Peer.of(broker.pipes) as other:
        new = beat(other, group, "n", topics=[topic], owned={})
        assert new.error_code == ErrorCode.none
        assert commit(other, group, place, "n", new.member_epoch + 9, 9) == [ErrorCode.stale_member_epoch]
    [row] = peer.ask(
        OFFSET_FETCH,
        9,
        groups=[{"group_id": group, "member_id": "n", "member_epoch": new.member_epoch, "topics": None}],
        require_stable=True,
    ).groups
    assert row.error_code == ErrorCode.none and row.topics[0].partitions[0].committed_offset == 0


def test_a_group_whose_members_need_a_leader_takes_no_member_of_the_newer_protocol(peer, topic, group):
    assert join(peer, group, topic, assignors=("mine",), session=6.0).error_code == ErrorCode.none
    assert beat(peer, group, topics=[topic], owned={}).error_code == ErrorCode.group_id_not_found


def test_a_group_is_described_to_those_who_ask_for_the_newer_kind(peer, topic, group):
    ask = {"group_ids": [group], "include_authorized_operations": False}
    assert peer.ask(DESCRIBE, 0, **ask).groups[0].error_code == ErrorCode.group_id_not_found
    epoch = beat(peer, group, topics=[topic], owned={}, instance_id="w").member_epoch
    [found] = peer.ask(DESCRIBE, 0, **ask).groups
    [member] = found.members
    assert (found.error_code, found.group_epoch, found.assignor_name) == (ErrorCode.none, epoch, "cooperative-sticky")
    assert (member.member_id, member.instance_id, member.client_id) == ("m", "w", "peer")
    [row] = member.assignment.topic_partitions
    assert (row.topic_id, row.topic_name, row.partitions) == (id_of(peer, topic), topic, (0, 1, 2, 3))


# --- ids of topics ----------------------------------------------------------------------------------------------------


def test_a_topic_has_one_id_for_life_and_another_when_it_is_made_again(broker, peer, topic):
    def by_id(client, id):
        rows = [{"name": None, "topic_id": id}]
        fields = {"topics": rows, "allow_auto_topic_creation": True, "include_topic_authorized_operations": False}
        [row] = client.ask(METADATA, 12, **fields).topics
        return row.error_code, row.name

    def fetched(client, id, offset=0):
        part = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20, "log_start_offset": -1}
        rows = [{"topic_id": id, "partitions": [part | {"current_leader_epoch": -1}]}]
        fields = {
            "replica_id": -1,
            "max_wait": timedelta(0),
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "isolation_level": 0,
        }
        fields |= {"topics": rows, "session_id": 0, "session_epoch": -1, "forgotten_topics_data": [], "rack_id": ""}
        [found] = client.ask(1, 13, **fields).responses
        assert found.topic_id == id
        return found.partitions[0].error_code, bool(found.partitions[0].records)

    produce(broker, topic, 1)
    first = id_of(peer, topic)
    assert first and {id_of(peer, topic, version) for version in (10, 11, 12)} == {first}
    broker.kill("gateway")
    broker.wait(lambda: answers(broker), "the next gateway")
    with Peer.of(broker.pipes) as again:
        until(lambda: fetched(again, first) == (ErrorCode.none, True), "the records")
        assert by_id(again, first) == (ErrorCode.none, topic) and id_of(again, topic) == first
        assert by_id(again, uuid.UUID(int=7)) == (ErrorCode.unknown_topic_id, None)
        assert fetched(again, uuid.UUID(int=7)) == (ErrorCode.unknown_topic_id, False)
        asked = {"topic_names": [topic], "timeout": timedelta(seconds=60)}
        gone, said = (ErrorCode.none, ErrorCode.unknown_topic_or_partition), []
        delete = lambda: again.ask(DELETE_TOPICS, 4, **asked).responses[0].error_code  # noqa: E731
        until(lambda: said.append(delete()) or said[-1] in gone, instead=lambda: said[-3:])
        assert fetched(again, first)[0] in (ErrorCode.unknown_topic_id, ErrorCode.unknown_topic_or_partition)
        # Nobody names it to this door, which still knows the former id.
        made = broker.kmq("topics", "create", topic, "--partitions", str(PARTITIONS))
        assert made.returncode == 0, made.stderr
        assert fetched(again, first, 1) == (ErrorCode.unknown_topic_id, False)
        assert by_id(again, first) == (ErrorCode.unknown_topic_id, None)
        produce(broker, topic, 1)
        assert id_of(again, topic) not in (None, first)
        assert fetched(again, first, 1) == (ErrorCode.unknown_topic_id, False)
        # No offset means two records, so what was made again begins behind what there was.
        until(lambda: fetched(again, id_of(again, topic), 1) == (ErrorCode.none, True), "the records")


def test_a_role_is_asked_for(new_broker):
    made = new_broker()
    made.gateway = True
    path = str(made.root / "tokens")
    token = tokens.new(path, "produce", ["produce"])
    made.up(KMQ_TOKENS=path)
    with Peer.of(made.pipes) as peer:
        assert peer.ask(17, 1, mechanism="PLAIN").error_code == ErrorCode.none
        assert peer.ask(36, 1, auth_bytes=b"\0me\0" + token.encode()).error_code == ErrorCode.none
        refused = ErrorCode.group_authorization_failed
        assert beat(peer, "g", topics=["t"], owned={}).error_code == refused
        [row] = peer.ask(DESCRIBE, 0, group_ids=["g"], include_authorized_operations=False).groups
        assert row.error_code == refused
