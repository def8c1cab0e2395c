"""Consumer groups over HTTP, on a real broker: members by requests, alone and beside members of the consumer port."""

import select
import socket
import time
from contextlib import closing
from itertools import count
from threading import Thread

import pytest
from api_client import NDJSON, Api
from brokers import Broker
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient
from line_client import LineClient, ask
from waiting import until

from kmq.log import reader

TOPICS = "/api/admin/topics"
_names = count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("groups") / "b")
    try:
        made.up()
        yield made
    finally:
        made.close()


def connected(broker):
    return closing(Api(int((broker.pipes / "http.port").read_text())))


@pytest.fixture
def api(broker):
    with connected(broker) as found:
        broker.wait(lambda: found.get("/api/groups").status == 200, "groups, whose offsets are loaded")
        yield found


@pytest.fixture
def topic(api):
    name = f"orders{next(_names)}"
    api.post(TOPICS, {"name": name, "partitions": 2})
    return name


@pytest.fixture
def group():
    return f"group{next(_names)}"


def produce(api, topic, *values, partition=0):
    batch = [{"value": value, "partition": partition} for value in values]
    answer = api.post(f"/api/topics/{topic}/produce?format=text", {"messages": batch})
    assert all("offset" in result for result in answer.value["results"]), answer.value


def consume(api, topic, group, **more):
    query = "&".join(f"{name}={value}" for name, value in {"group": group, "format": "text", **more}.items())
    return api.get(f"/api/topics/{topic}/consume?{query}")


def values(answer):
    return [message["value"] for message in answer.value["messages"]]


def commit(api, topic, group, offsets, **more):
    rows = [{"partition": partition, "offset": offset} for partition, offset in offsets.items()]
    return api.post(f"/api/topics/{topic}/commit", {"group": group, "offsets": rows, **more})


def leave(api, group, member):
    assert api.call("DELETE", f"/api/groups/{group}/members/{member}").status == 204


# --- consuming -------------------------------------------------------------------------------------------------------


def test_a_member_that_joins_again_is_given_what_it_did_not_commit(api, topic, group):
    """Its program was killed with messages in its hands, and the next one has its name."""
    produce(api, topic, "a", "b", "c")
    members = f"/api/groups/{group}/members"
    assert api.post(members, {"member": "m", "topics": [topic]}).status == 200
    assert values(consume(api, topic, group, member="m", maxMessages=1, autoCommit="true")) == ["a"]
    assert values(consume(api, topic, group, member="m", maxMessages=1, autoCommit="true")) == ["b"]
    assert api.post(members, {"member": "m", "topics": [topic]}).status == 200
    assert values(consume(api, topic, group, member="m")) == ["b", "c"]


def test_a_loop_of_calls_without_a_member_goes_on_where_the_last_one_ended(api, topic, group):
    produce(api, topic, "a", "b", "c")
    seen = [values(consume(api, topic, group, maxMessages=1)) for _ in range(4)]
    assert seen == [["a"], ["b"], ["c"], []]
    answer = consume(api, topic, group)
    assert answer.value["assignment"] == [{"topic": topic, "partition": 0}, {"topic": topic, "partition": 1}]
    assert answer.value["generation"] > 0
    assert {row["partition"]: row["offset"] for row in answer.value["positions"]} == {0: 3, 1: 0}


def test_what_was_not_committed_comes_again_to_the_next_member(api, topic, group):
    produce(api, topic, "a", "b", "c")
    first = consume(api, topic, group, member="one")
    assert values(first) == ["a", "b", "c"]
    assert commit(api, topic, group, {0: 2}, member="one", generation=first.value["generation"]).status == 200
    leave(api, group, "one")
    again = consume(api, topic, group, member="two")
    assert values(again) == ["c"]


def test_auto_commit_commits_what_the_call_before_has_delivered(api, topic, group):
    produce(api, topic, "a", "b")
    described = lambda: api.get(f"/api/groups/{group}").value["partitions"]  # noqa: E731
    assert values(consume(api, topic, group, member="m", autoCommit="true", maxMessages=1)) == ["a"]
    assert [row["committed"] for row in described()] == [None, None]
    assert values(consume(api, topic, group, member="m", autoCommit="true", maxMessages=1)) == ["b"]
    assert [(row["committed"], row["end"], row["lag"]) for row in described()] == [(1, 2, 1), (None, 0, 0)]
    leave(api, group, "m")
    assert [(row["committed"], row["lag"], row["lagSeconds"]) for row in described()] == [(2, 0, 0)]


def test_a_waiting_member_is_woken_by_a_message(broker, api, topic, group):
    answers = []

    def wait():
        with connected(broker) as mine:
            answers.append(consume(mine, topic, group, timeoutMs=60_000))

    thread = Thread(target=wait)
    thread.start()
    until(lambda: api.get(f"/api/groups/{group}").status == 200, "the member")
    produce(api, topic, "late", partition=1)
    thread.join(60)
    assert values(answers[0]) == ["late"]


def test_two_members_share_the_partitions_and_nothing_is_read_twice(api, topic, group):
    places = lambda answer: [row["partition"] for row in answer.value["assignment"]]  # noqa: E731
    assert places(consume(api, topic, group, member="one")) == [0, 1]

    def shared():
        mine = {name: places(consume(api, topic, group, member=name)) for name in ("one", "two")}
        return sorted(mine.values()) == [[0], [1]]

    until(shared, "one partition for each")
    produce(api, topic, *"abc")
    produce(api, topic, *"xyz", partition=1)
    seen = {name: values(consume(api, topic, group, member=name)) for name in ("one", "two")}
    assert sorted(seen.values()) == [["a", "b", "c"], ["x", "y", "z"]]
    leave(api, group, "one")
    until(lambda: places(consume(api, topic, group, member="two")) == [0, 1], "all partitions for who stays")


def test_what_is_committed_after_a_group_was_deleted_stays(api, topic, group):
    produce(api, topic, "a", "b")
    assert commit(api, topic, group, {0: 1}).status == 200
    assert api.call("DELETE", f"/api/groups/{group}").status == 204
    assert commit(api, topic, group, {0: 2}).status == 200
    consume(api, topic, f"{group}-other")  # what the coordinator has to say of the deletion is done now
    assert commit(api, topic, f"{group}-third", {0: 1}).status == 200  # and what it has written is on disk
    assert api.get(f"/api/groups/{group}").value["partitions"][0]["committed"] == 2


def test_a_member_of_the_consumer_port_and_one_of_http_share_a_topic(broker, api, topic, group):
    consume(api, topic, group, member="http")
    port = int((broker.pipes / "egress.port").read_text())
    with LineClient(port) as lines:
        lines.send(f"GROUP {group} member=lines topics={topic}")

        def shared():
            places = consume(api, topic, group, member="http").value["assignment"]
            return len(places) == 1 and len(api.get(f"/api/groups/{group}").value["members"]) == 2

        until(shared, "one partition for each of two doors")


def test_ndjson_gives_the_same_messages(api, topic, group):
    produce(api, topic, "a")
    answer = api.get(f"/api/topics/{topic}/consume?group={group}&format=text", Accept=NDJSON)
    assert [message["value"] for message in answer.value] == ["a"]


def test_messages_of_an_answer_that_broke_off_come_again_at_once(broker, api, topic, group):
    """More than the kernel keeps for a client that does not read; with autoCommit they would be committed unread."""
    produce(api, topic, *("x" * 700_000 for _ in range(10)))
    wanted = f"/api/topics/{topic}/consume?group={group}&member=m&autoCommit=true&format=text&maxBytes=8000000"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int((broker.pipes / "http.port").read_text())))
        client.sendall(f"GET {wanted} HTTP/1.1\r\nHost: kmq\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        consume(api, topic, group, member="m", autoCommit="true")
        assert api.get(f"/api/groups/{group}").value["partitions"][0]["committed"] is None, "it is still on its way"

    def again():
        answer = consume(api, topic, group, member="m", autoCommit="true", maxMessages=1)
        return [message["offset"] for message in answer.value["messages"]]

    assert until(again, "messages") == [0]
    assert api.get(f"/api/groups/{group}").value["partitions"][0]["committed"] is None


def asked_without_reading(broker, topic, group, **more):
    """Return a socket whose answer has come, and is not read."""
    query = "&".join(f"{name}={value}" for name, value in {"group": group, "format": "text", **more}.items())
    client = socket.create_connection(("127.0.0.1", int((broker.pipes / "http.port").read_text())))
    client.sendall(f"GET /api/topics/{topic}/consume?{query} HTTP/1.1\r\nHost: kmq\r\n\r\n".encode())
    assert select.select([client], [], [], 60)[0]
    return client


def again_of(api, topic, group, **more):
    """What comes again, until nothing is left to come again."""
    found = []
    while api.get(f"/api/groups/{group}").value["partitions"][0]["nacked"] and len(found) < 100:
        answer = consume(api, topic, group, timeoutMs=500, **more)
        found += [message["value"] for message in answer.value["messages"] if message.get("deliveries")]
        positions = {row["partition"]: row["offset"] for row in answer.value["positions"]}
        assert commit(api, topic, group, positions, **more).status == 200
    return found


@pytest.mark.parametrize("who", [{"member": "m"}, {}])
@pytest.mark.parametrize("how", ["commit", "positions", "autoCommit"])
def test_messages_of_an_answer_that_hangs_come_again_when_a_commit_goes_beyond_it(broker, api, topic, group, how, who):
    """Its program has given it up, asked again on a new connection, and commits what it was given there."""
    more = who | ({"autoCommit": "true"} if how == "autoCommit" else {})
    produce(api, topic, *"abcd")
    with asked_without_reading(broker, topic, group, **more):
        if how != "positions":
            produce(api, topic, "e")
        answer = consume(api, topic, group, **more)
        assert values(answer) == ([] if how == "positions" else ["e"])
        if how == "autoCommit":
            consume(api, topic, group, **more)
        else:
            positions = {row["partition"]: row["offset"] for row in answer.value["positions"]}
            assert commit(api, topic, group, positions, **who).status == 200
        row = api.get(f"/api/groups/{group}").value["partitions"][0]
        assert (row["committed"], row["nacked"]) == (row["end"], 4)
        if how != "commit":
            assert again_of(api, topic, group, **who) == ["a", "b", "c", "d"]
        else:  # it is the group's, whoever has the partition
            leave(api, group, who.get("member", "-"))
            assert again_of(api, topic, group, member="heir") == ["a", "b", "c", "d"]


def test_what_came_again_and_was_committed_does_not_come_when_the_answer_that_hung_breaks_off(
    broker, api, topic, group
):
    produce(api, topic, *"abcd")
    with asked_without_reading(broker, topic, group):
        positions = {row["partition"]: row["offset"] for row in consume(api, topic, group).value["positions"]}
        assert commit(api, topic, group, positions).status == 200
        assert again_of(api, topic, group) == ["a", "b", "c", "d"]
    # The gateway has seen its end as soon as a request on a later connection is answered.
    with connected(broker) as later:
        assert values(consume(later, topic, group)) == []
    assert values(consume(api, topic, group, timeoutMs=200)) == []


def test_what_comes_again_in_an_answer_that_hangs_comes_once_more(broker, api, topic, group):
    produce(api, topic, "a")
    assert values(consume(api, topic, group)) == ["a"]
    api.post(f"/api/topics/{topic}/nack", {"group": group, "partition": 0, "offset": 0})
    with asked_without_reading(broker, topic, group):
        produce(api, topic, "b")
        assert values(consume(api, topic, group)) == ["b"]
        assert commit(api, topic, group, {0: 2}).status == 200
        assert again_of(api, topic, group) == ["a"]


def test_the_last_message_read_comes_once_more_if_it_was_given_back_and_its_answer_hangs(broker, api, topic, group):
    """Its member commits all that it had read before: the offset that whoever has the message again would commit."""
    produce(api, topic, *"ab")
    assert values(consume(api, topic, group)) == ["a", "b"]
    nack(api, topic, group, 1)
    with asked_without_reading(broker, topic, group):
        assert values(consume(api, topic, group, timeoutMs=200)) == []
        assert commit(api, topic, group, {0: 2}).status == 200
        assert again_of(api, topic, group) == ["b"]


def test_an_answer_that_is_read_after_all_does_not_come_again(broker, api, topic, group):
    """Two callers of one member: the quick one commits beyond what the slow one works on."""
    produce(api, topic, *"ab")
    with asked_without_reading(broker, topic, group) as slow:
        produce(api, topic, "c")
        assert values(consume(api, topic, group)) == ["c"]
        assert commit(api, topic, group, {0: 3}).status == 200
        assert slow.recv(10_000).startswith(b"HTTP/1.1 200 ")
        slow.sendall(b"GET /api/groups HTTP/1.1\r\nHost: kmq\r\n\r\n")

        def is_settled():
            return api.get(f"/api/groups/{group}").value["partitions"][0]["nacked"] == 0

        until(is_settled, "the end of the doubt")
        assert values(consume(api, topic, group)) == []


@pytest.mark.parametrize("header", ["keep-alive", "close"])
def test_a_loop_of_calls_on_new_connections_is_given_nothing_twice(broker, api, topic, group, header):
    """As a loop around curl: each client has closed its connection before the next one asks."""
    produce(api, topic, *"abcdef")
    seen = []
    for more in (
        *({"maxMessages": 1} for _ in range(3)),
        *({"maxMessages": 1, "autoCommit": "true"} for _ in range(3)),
    ):
        with connected(broker) as once:
            query = "&".join(f"{name}={value}" for name, value in {"group": group, "format": "text", **more}.items())
            seen += values(once.get(f"/api/topics/{topic}/consume?{query}", Connection=header))
    assert seen == [*"abcdef"]
    with connected(broker) as once:
        assert commit(once, topic, group, {0: 6}).status == 200
    row = api.get(f"/api/groups/{group}").value["partitions"][0]
    assert (row["committed"], row["nacked"]) == (6, 0)


def test_a_topic_that_was_deleted_and_came_back_is_read_on_by_its_groups(broker, api, topic, group):
    """The members never left: they were there before the deletion, and are there after it."""
    produce(api, topic, "old")
    with LineClient(int((broker.pipes / "egress.port").read_text())) as lines:
        lines.send(f"GROUP {group}-lines member=m topics={topic}")
        assert lines.line().startswith(b"!assign ")
        assert lines.fetch(1000)[2].endswith(b"|old\n")
        assert values(consume(api, topic, group)) == ["old"]
        api.call("DELETE", f"{TOPICS}/{topic}")
        api.post(TOPICS, {"name": topic, "partitions": 2})
        produce(api, topic, "new")

        def again():
            answer = consume(api, topic, group)
            assert answer.status == 200 or answer.value["code"] == "unknown_topic"
            return answer.status == 200 and values(answer)

        assert until(again, "the new topic") == ["new"]
        while f"{topic}/0@1" not in lines.line().decode():
            pass  # an assignment of the time in which there was no topic
        assert lines.fetch(1000, wait_ms=60_000)[2].endswith(b"|new\n")


def test_a_topic_that_is_not_there_is_404_and_makes_no_group(api, group):
    assert consume(api, "nobody", group).refusal == (404, "unknown_topic", "")
    assert api.get(f"/api/groups/{group}").status == 404


# --- members and commits ---------------------------------------------------------------------------------------------


def test_a_member_joins_beats_and_leaves(api, topic, group):
    joined = api.post(f"/api/groups/{group}/members", {"topics": [topic], "assignor": "range", "sessionMs": 10_000})
    member, generation = joined.value["member"], joined.value["generation"]
    assert [row["partition"] for row in joined.value["assignment"]] == [0, 1]
    beat = api.post(f"/api/groups/{group}/members/{member}/heartbeat", {"generation": generation})
    assert beat.value == joined.value
    shown = api.get(f"/api/groups/{group}").value
    assert (shown["state"], shown["protocol"], shown["generation"]) == ("stable", "range", generation)
    assert [row["id"] for row in shown["members"]] == [member] and shown["members"][0]["host"] == "127.0.0.1"
    leave(api, group, member)
    assert api.call("DELETE", f"/api/groups/{group}/members/{member}").refusal[:2] == (409, "unknown_member")
    answer = api.post(f"/api/groups/{group}/members/{member}/heartbeat", {"generation": generation})
    assert answer.refusal[:2] == (409, "unknown_member")


def test_a_member_that_joins_again_reads_what_it_asked_for_last(api, topic, group):
    other = f"{topic}-other"
    api.post(TOPICS, {"name": other})
    produce(api, topic, "a")
    produce(api, other, "b")
    subscribed = lambda: {row["topic"] for row in api.get(f"/api/groups/{group}").value["members"][0]["assignment"]}  # noqa: E731
    for asked in ([topic, other], [other], [topic]):
        assert api.post(f"/api/groups/{group}/members", {"member": "m", "topics": asked}).status == 200
        until(
            lambda asked=asked: consume(api, asked[0], group, member="m") and subscribed() == {*asked}, "these topics"
        )
    assert until(lambda: values(consume(api, other, group, member="m")), "a topic that is asked for again") == ["b"]


def test_a_stale_generation_and_a_strangers_partition_are_409(api, topic, group):
    generation = consume(api, topic, group, member="one").value["generation"]
    consume(api, topic, group, member="two")
    until(lambda: len(consume(api, topic, group, member="one").value["assignment"]) == 1, "a partition given up")
    until(lambda: len(consume(api, topic, group, member="two").value["assignment"]) == 1, "a partition for two")
    mine = consume(api, topic, group, member="one").value["assignment"][0]["partition"]
    answer = commit(api, topic, group, {1 - mine: 0}, member="one")
    assert answer.refusal[:2] == (409, "fenced")
    assert commit(api, topic, group, {mine: 0}, member="one", generation=generation + 100).refusal[:2] == (
        409,
        "fenced",
    )
    assert commit(api, topic, group, {mine: 0}, member="nobody").refusal[:2] == (409, "unknown_member")
    assert commit(api, topic, group, {0: 0}).refusal[:2] == (409, "unknown_member")
    assert commit(api, topic, group, {7: 0}, member="one").refusal[:2] == (404, "unknown_partition")


def test_a_stale_generation_is_409_for_nack_too_whether_or_not_a_member_is_named(api, topic, group):
    produce(api, topic, "a")
    assert consume(api, topic, group).status == 200
    asked = {"group": group, "partition": 0, "offset": 0, "generation": 99}
    assert api.post(f"/api/topics/{topic}/nack", asked).refusal[:2] == (409, "fenced")


@pytest.mark.parametrize("below", ["{topic}%2F0", "..%2Ftopics%2F{topic}", "..", ".%2F{topic}"])
def test_a_directory_that_is_no_topic_cannot_be_committed_to(api, topic, group, below):
    """Every such name would be a row of its own in the bounded table of offsets."""
    produce(api, topic, "a")
    assert commit(api, below.format(topic=topic), group, {0: 1}).refusal[:2] == (404, "unknown_partition")


def test_a_commit_beyond_the_end_is_refused_with_the_offsets_that_are_there(api, topic, group):
    """Else the group would skip what comes later, and each message up to there would count as processed."""
    produce(api, topic, "a", "b")
    member = consume(api, topic, group, member="m").value
    for named in ({"member": "m", "generation": member["generation"]}, {"member": "m"}):
        for offset in (3, (1 << 63) - 1):
            refused = commit(api, topic, group, {0: offset, 1: 0}, **named)
            assert refused.refusal == (416, "out_of_range", "offset")
            assert (refused.value["first"], refused.value["end"]) == (0, 2)
    assert [row["committed"] for row in api.get(f"/api/groups/{group}").value["partitions"]] == [None, None]
    assert commit(api, topic, group, {0: 2}, member="m").status == 200
    produce(api, topic, "c")
    assert commit(api, topic, group, {0: 3}, member="m").status == 200, "what is there now counts"
    leave(api, group, "m")
    assert commit(api, topic, group, {0: 4}).refusal == (416, "out_of_range", "offset"), "no member either"


def test_a_commit_that_was_answered_is_a_record_of_the_reserved_topic(broker, api, topic, group):
    produce(api, topic, *"abcde")
    produce(api, topic, "a", "b", partition=1)
    assert commit(api, topic, group, {0: 5}).status == 200
    log = reader.partition(str(broker.data), "__consumer_offsets", 0)
    until(lambda: f"{group}.{topic}.0".encode() in log.read(0)[1], "the record in its topic")
    assert commit(api, topic, group, {1: 2}, member="-").status == 200, "the member of all without a name, while none"


def test_offsets_are_moved_only_while_the_group_has_no_members(api, topic, group):
    produce(api, topic, *"abcde")
    seek = lambda to: api.post(f"/api/topics/{topic}/seek", {"group": group, "to": to})  # noqa: E731
    rows = lambda answer: {row["partition"]: row["offset"] for row in answer.value["offsets"]}  # noqa: E731
    assert rows(seek("latest")) == {0: 5, 1: 0}
    assert rows(seek("earliest")) == {0: 0, 1: 0}
    assert rows(seek({"timestamp": 0})) == {0: 0, 1: 0}
    assert rows(seek({"offsets": [{"partition": 0, "offset": 3}]})) == {0: 3}
    assert seek({"offsets": [{"partition": 0, "offset": 6}]}).refusal == (416, "out_of_range", "offset")
    assert seek("middle").refusal == (422, "bad_field", "to")
    assert values(consume(api, topic, group, member="m")) == ["d", "e"]
    assert seek("earliest").refusal[:2] == (409, "group_not_empty")
    assert api.call("DELETE", f"/api/groups/{group}").refusal[:2] == (409, "group_not_empty")
    leave(api, group, "m")
    assert api.call("DELETE", f"/api/groups/{group}").status == 204
    assert api.get(f"/api/groups/{group}").refusal[:2] == (404, "unknown_group")
    assert values(consume(api, topic, group)) == [*"abcde"]


def test_groups_are_listed_with_their_state(api, topic, group):
    consume(api, topic, group)
    [row] = [row for row in api.get("/api/groups").value if row["group"] == group]
    assert (row["members"], row["protocol"], row["committed"]) == (1, "cooperative-sticky", 0)


def test_the_offsets_of_a_deleted_topic_are_forgotten(api, topic, group):
    produce(api, topic, "a", "b")
    commit(api, topic, group, {0: 2})
    api.call("DELETE", f"{TOPICS}/{topic}")
    api.post(TOPICS, {"name": topic})
    produce(api, topic, "new")
    assert values(consume(api, topic, group)) == ["new"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("member=m", "group"),
        ("autoCommit=true", "group"),
        ("group=g&partition=0", "partition"),
        ("group=g&from=latest", "from"),
        ("group=", "group"),
        ("group=g&autoCommit=1", "autoCommit"),
    ],
)
def test_parameters_that_do_not_fit_together_are_refused(api, topic, query, field):
    assert api.get(f"/api/topics/{topic}/consume?{query}").refusal == (422, "bad_field", field)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/topics/t/commit", {"group": "g"}, "offsets"),
        ("/api/topics/t/commit", {"group": "g", "offsets": []}, "offsets"),
        ("/api/topics/t/commit", {"group": "g", "offsets": [{"partition": 0}]}, "offsets[0].offset"),
        ("/api/topics/t/commit", {"group": "g", "offsets": [{"partition": 0, "offset": -1}]}, "offsets[0].offset"),
        ("/api/topics/t/seek", {"group": "g", "to": {"offset": 1}}, "to"),
        ("/api/groups/g/members", {"topics": []}, "topics"),
        ("/api/groups/g/members", {"topics": ["t"], "sessionMs": 1}, "sessionMs"),
        ("/api/groups/g/members", {"topics": ["t"], "assignor": "best"}, "assignor"),
        ("/api/groups/g/members/m/heartbeat", {}, "generation"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_its_field(api, path, body, field):
    assert api.post(path, body).refusal == (422, "bad_field", field)


def test_offsets_generations_and_what_was_given_back_survive_a_killed_gateway(broker, api, topic, group):
    produce(api, topic, "a", "b", "c")
    before = consume(api, topic, group, member="m").value["generation"]
    commit(api, topic, group, {0: 1}, member="m")
    nack(api, topic, group, 0)
    nack(api, topic, group, 2, delayMs=600_000)
    assert values(consume(api, topic, group, member="m")) == ["a"]  # in hand when the gateway dies
    broker.kill("gateway")

    def again():
        try:
            with connected(broker) as new:
                answer = consume(new, topic, group, member="m")
                return answer if answer.status == 200 and answer.value["assignment"] else None
        except (OSError, AssertionError):
            return None

    answer = until(again, "a gateway that serves the group")
    assert values(answer) == ["a", "b"] and answer.value["generation"] > before
    assert answer.value["messages"][0]["deliveries"] == 3


def test_lag_and_requests_are_metrics(broker, api, topic, group):
    produce(api, topic, "a", "b", "c")
    commit(api, topic, group, {0: 1, 1: 0})
    status, text = broker.get("/metrics")
    assert status == 200
    assert f'kmq_group_lag{{group="{group}",partition="0",topic="{topic}"}} 2.0' in text
    assert f'kmq_group_lag_seconds{{group="{group}",partition="1",topic="{topic}"}} 0.0' in text
    assert 'kmq_http_requests_total{code="OK",operation="commit"}' in text


def test_a_group_whose_workers_die_before_their_first_commit_has_a_lag_and_is_a_finding(broker, api, topic, group):
    produce(api, topic, *map(str, range(5)))
    for turn in range(3):
        api.post(f"/api/groups/{group}/members", {"member": "w", "topics": [topic]})
        assert len(consume(api, topic, group, member="w", maxMessages=3).value["messages"]) > 0, turn
    api.post(f"/api/groups/{group}/members", {"member": "w", "topics": [topic]})
    rows = api.get(f"/api/groups/{group}").value["partitions"]
    assert sum(row["lag"] for row in rows) == 5 and {row["committed"] for row in rows} == {None}
    leave(api, group, "w")
    assert sum(row["lag"] for row in api.get(f"/api/groups/{group}").value["partitions"]) == 5, "also without a member"
    broker.wait(lambda: f'kmq_group_lag{{group="{group}"' in broker.get("/metrics")[1], "the lag as a metric")
    broker.wait(lambda: 'kmq_warning{reason="group_crashing"} 1.0' in broker.get("/metrics")[1], "the finding")
    assert f"event=group_crashing group={group}" in broker.log()
    consume(api, topic, group, member="w")
    assert commit(api, topic, group, {0: 1}, member="w").status == 200
    broker.wait(lambda: 'kmq_warning{reason="group_crashing"} 0.0' in broker.get("/metrics")[1], "its end")


# --- giving messages back --------------------------------------------------------------------------------------------


def nack(api, topic, group, offset, **more):
    return api.post(f"/api/topics/{topic}/nack", {"group": group, "partition": 0, "offset": offset, **more})


def nacked(api, group):
    return api.get(f"/api/groups/{group}").value["partitions"][0]["nacked"]


def test_a_message_given_back_comes_again_before_new_ones_and_commits_may_pass_it(api, topic, group):
    produce(api, topic, "a", "b", "c", "d")
    assert values(consume(api, topic, group, member="m", maxMessages=2)) == ["a", "b"]
    answer = nack(api, topic, group, 1, reason="busy")
    assert (answer.status, answer.value["deliveries"], answer.value["deadLetter"]) == (200, 1, None)
    nack(api, topic, group, 0)
    assert nack(api, topic, group, 1).value["deliveries"] == 1  # the same again
    assert commit(api, topic, group, {0: 2}, member="m").status == 200 and nacked(api, group) == 2
    again = consume(api, topic, group, member="m", maxMessages=3)
    shown = [(row["value"], row.get("deliveries")) for row in again.value["messages"]]
    assert shown == [("a", 2), ("b", 2), ("c", None)]
    assert values(consume(api, topic, group, member="m", maxMessages=1)) == ["d"]  # a and b are in hand
    for next_offset, left, committed in ((1, 1, 2), (3, 0, 3)):  # a alone: the group does not go back
        assert commit(api, topic, group, {0: next_offset}, member="m").status == 200
        assert nacked(api, group) == left
        assert api.get(f"/api/groups/{group}").value["partitions"][0]["committed"] == committed


def test_what_was_in_hand_when_its_member_left_comes_to_the_next_one(api, topic, group):
    produce(api, topic, "a", "b")
    assert values(consume(api, topic, group, member="m", autoCommit="true")) == ["a", "b"]
    nack(api, topic, group, 0)
    assert values(consume(api, topic, group, member="m")) == ["a"]
    leave(api, group, "m")
    again = consume(api, topic, group, member="n", autoCommit="true")
    assert [(row["value"], row.get("deliveries")) for row in again.value["messages"]] == [("a", 3)]
    leave(api, group, "n")  # which commits
    assert nacked(api, group) == 0


def test_a_message_given_back_does_not_come_in_its_turn_where_nothing_was_committed(api, topic, group):
    produce(api, topic, "a", "b")
    assert values(consume(api, topic, group, member="m")) == ["a", "b"]
    nack(api, topic, group, 0, delayMs=600_000)
    leave(api, group, "m")
    assert values(consume(api, topic, group, member="n")) == ["b"]


def told_letters(api):
    return [event for event in api.get("/api/events").value["events"] if event["about"] == "letter_stored"]


def test_a_message_given_back_too_often_is_a_dead_letter(api, topic, group):
    assert api.call("PATCH", f"{TOPICS}/{topic}", {"maxDeliveries": 2}).value["maxDeliveries"] == 2
    headers = [{"name": "trace", "value": "t;"}]
    api.post(f"/api/topics/{topic}/produce?format=text", {"value": "a", "key": "k", "headers": headers, "partition": 0})
    produce(api, topic, "b")
    assert values(consume(api, topic, group)) == ["a", "b"]
    assert nack(api, topic, group, 0, reason="busy").value["deadLetter"] is None
    assert values(consume(api, topic, group)) == ["a"]
    answer = nack(api, topic, group, 0, reason="no such account")
    assert answer.value == {
        "partition": 0,
        "offset": 0,
        "deliveries": 2,
        "notBefore": None,
        "deadLetter": f"{topic}.dlq",
    }
    assert values(consume(api, topic, group)) == [] and nacked(api, group) == 0
    until(lambda: told_letters(api), "the event of the letter")
    assert {event["kind"] for event in told_letters(api)} == {"noted"}
    assert not [
        event
        for event in api.get("/api/events").value["events"]
        if event["kind"] == "refused" and ".dlq" in event["text"]
    ]
    letters = f"/api/topics/{topic}.dlq/consume?offset=0&format=text"
    until(lambda: api.get(letters).value.get("messages"), "the letter, which is stored, in its topic")
    [letter] = api.get(letters).value["messages"]
    said = letter["headers"]
    assert (letter["key"], letter["value"], said["trace"]) == ("k", "a", "t;")
    assert (said["origin_topic"], said["origin_offset"], said["group"]) == (topic, "0", group)
    assert (said["error"], said["attempts"]) == ("no such account", "2") and said["first_failure"] < said[
        "last_failure"
    ]


def letters(api, topic):
    """The letters of a topic, as (offset of the message, attempts)."""
    found = api.get(f"/api/topics/{topic}.dlq/consume?offset=0&format=text").value.get("messages", [])
    said = [letter["headers"] for letter in found]
    return [(int(each["origin_offset"]), int(each["attempts"])) for each in said]


def live(api, topic, group, handled, poison, commits_each):
    """One life of a program that dies of a message. Returns False once there is nothing left to read."""
    joined = {"member": "m", "topics": [topic]}
    assert api.post(f"/api/groups/{group}/members", joined).status == 200
    position = 0
    while True:
        answer = consume(api, topic, group, member="m")
        if not answer.value["messages"]:
            if position:
                commit(api, topic, group, {0: position}, member="m")
            return False
        for message in answer.value["messages"]:
            if message["value"] == poison:
                return True
            handled.append(message["value"])
            position = max(position, message["offset"] + 1)
            if commits_each:
                assert commit(api, topic, group, {0: message["offset"] + 1}, member="m").status == 200


@pytest.mark.parametrize("commits_each", [True, False])
def test_a_message_that_kills_its_readers_becomes_a_letter_alone_and_never_comes_again(api, topic, group, commits_each):
    assert api.call("PATCH", f"{TOPICS}/{topic}", {"maxDeliveries": 2}).status == 200
    innocents = [f"i{n}" for n in range(9)]
    produce(api, topic, *innocents[:4], "poison", *innocents[4:])
    handled, lives = [], 0
    while live(api, topic, group, handled, "poison", commits_each):
        lives += 1
        assert lives < 20
    assert {*handled} == {*innocents} and lives == 2
    assert until(lambda: letters(api, topic), "the letter, which is stored, in its topic") == [(4, 2)]
    [row] = [row for row in api.get(f"/api/groups/{group}").value["partitions"] if row["partition"] == 0]
    assert (row["committed"], row["lag"], row["nacked"]) == (10, 0, 0)
    handled.clear()
    assert not live(api, topic, group, handled, "poison", commits_each) and not handled


def test_messages_given_back_in_one_answer_with_one_that_kills_do_not_become_letters(api, topic, group):
    assert api.call("PATCH", f"{TOPICS}/{topic}", {"maxDeliveries": 3}).status == 200
    produce(api, topic, *"abcdefghij")
    assert len(values(consume(api, topic, group, member="m"))) == 10
    for offset in range(10):
        nack(api, topic, group, offset)
    assert commit(api, topic, group, {0: 10}, member="m").status == 200
    handled, lives = [], 0
    while live(api, topic, group, handled, "e", commits_each=True):
        lives += 1
        assert lives < 20
    assert sorted(handled) == [*"abcdfghij"] and nacked(api, group) == 0
    assert until(lambda: letters(api, topic), "the letter, which is stored, in its topic") == [(4, 3)]


def test_a_letter_is_behind_its_group_also_where_nobody_commits(api, topic, group):
    assert api.call("PATCH", f"{TOPICS}/{topic}", {"maxDeliveries": 1}).status == 200
    produce(api, topic, "a", "b")
    assert values(consume(api, topic, group, member="m")) == ["a", "b"]
    assert nack(api, topic, group, 0).value["deadLetter"] == f"{topic}.dlq"
    again = nack(api, topic, group, 0).value
    assert (again["deadLetter"], again["deliveries"]) == (f"{topic}.dlq", 1)
    leave(api, group, "m")
    assert values(consume(api, topic, group, member="n")) == ["b"]


def test_a_message_that_was_given_back_is_not_processed_until_it_is_committed(broker, api, topic, group):
    produce(api, topic, "a", "b")
    consume(api, topic, group, member="m")
    seqs = [int(line.split(b"|")[0]) for line in broker.lines(topic)[:2]]
    questions = [f"GET_STATUS {seq} {of}".strip() for seq in seqs for of in (group, "")]

    def status():
        return ask(int((broker.pipes / "status.port").read_text()), *questions).split()

    nack(api, topic, group, 0, delayMs=600_000)
    assert commit(api, topic, group, {0: 2}, member="m").status == 200
    assert status() == [b"PENDING"] * 2 + [b"PROCESSED"] * 2
    nack(api, topic, group, 0)
    assert values(consume(api, topic, group, member="m")) == ["a"] and status()[0] == b"PENDING"
    assert commit(api, topic, group, {0: 1}, member="m").status == 200
    assert status() == [b"PROCESSED"] * 4


def test_a_waiting_member_is_given_what_is_due_when_it_is_due(api, topic, group):
    produce(api, topic, "a")
    assert values(consume(api, topic, group)) == ["a"]
    begun = time.time()
    due = nack(api, topic, group, 0, delayMs=2500).value["notBefore"] / 1000
    assert begun + 2.499 <= due <= time.time() + 2.501
    assert values(consume(api, topic, group)) == []
    assert values(consume(api, topic, group, timeoutMs=60_000)) == ["a"]
    assert due <= time.time() < due + 30


def test_a_wrong_request_to_give_back_is_refused(api, topic, group):
    produce(api, topic, "a")
    refused = nack(api, topic, group, 0)
    assert (refused.status, refused.value["code"]) == (404, "unknown_group")
    consume(api, topic, group, member="m")
    for more, status, code in (
        ({"offset": 7}, 416, "out_of_range"),
        ({"partition": 5}, 404, "unknown_partition"),
        ({"member": "n"}, 409, "unknown_member"),
        ({"member": "m", "generation": 77}, 409, "fenced"),
        ({"delayMs": -1}, 422, "bad_field"),
        ({"reason": "x" * 251}, 422, "bad_field"),
    ):
        answer = nack(api, topic, group, **{"offset": 0, **more})
        assert (answer.status, answer.value["code"]) == (status, code), answer.value
    assert nack(api, "nosuch", group, 0).value["code"] == "unknown_topic" and nacked(api, group) == 0


def test_seek_forgets_what_was_given_back_because_the_group_reads_anew(api, topic, group):
    produce(api, topic, "a", "b")
    consume(api, topic, group, member="m")
    nack(api, topic, group, 0, delayMs=600_000)
    leave(api, group, "m")
    assert api.post(f"/api/topics/{topic}/seek", {"group": group, "to": "latest"}).status == 200
    assert nacked(api, group) == 0


def with_letters(api, topic, group):
    """The first two of four messages are letters, and the group stands behind them."""
    assert api.call("PATCH", f"{TOPICS}/{topic}", {"maxDeliveries": 1}).status == 200
    produce(api, topic, "a", "b", "c", "d")
    assert values(consume(api, topic, group)) == ["a", "b", "c", "d"]
    for offset in (0, 1):
        assert nack(api, topic, group, offset, reason="no").value["deadLetter"] == f"{topic}.dlq"
    leave(api, group, "-")


def by_http(broker, api, topic, group):
    assert api.post(f"/api/topics/{topic}/seek", {"group": group, "to": "earliest"}).status == 200


def by_command(broker, api, topic, group):
    done = broker.kmq("groups", "reset", group, "--topic", topic, "--to", "earliest")
    assert done.returncode == 0, done.stderr


def by_kafka(broker, api, topic, group):
    """As kafka-consumer-groups.sh does: a commit of nobody, which goes back."""
    address = f"localhost:{(broker.pipes / 'kafka.port').read_text().strip()}"
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 0)])
    [future] = admin.alter_consumer_group_offsets([asked]).values()
    assert future.result(60).topic_partitions[0].error is None


@pytest.mark.parametrize("reset", [by_http, by_command, by_kafka])
def test_a_group_that_is_set_back_reads_messages_that_became_letters_again(broker, api, topic, group, reset):
    with_letters(api, topic, group)
    reset(broker, api, topic, group)
    [row] = [row for row in api.get(f"/api/groups/{group}").value["partitions"] if row["partition"] == 0]
    assert (row["committed"], row["lag"]) == (0, 4)
    assert values(consume(api, topic, group)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("how", ["deleted", "truncated"])
def test_a_message_that_fails_again_is_a_letter_again_if_its_first_letter_was_deleted(broker, api, topic, group, how):
    with_letters(api, topic, group)
    if how == "deleted":
        assert api.call("DELETE", f"{TOPICS}/{topic}.dlq").status == 204
    else:
        done = broker.kmq("topics", "truncate", f"{topic}.dlq", "--before", "end", "--yes")
        assert done.returncode == 0, done.stderr
    by_http(broker, api, topic, group)
    assert values(consume(api, topic, group)) == ["a", "b", "c", "d"]
    for offset in (0, 1):
        assert nack(api, topic, group, offset, reason="again").value["deadLetter"] == f"{topic}.dlq"
    found = api.get(f"/api/topics/{topic}.dlq/consume?from=earliest&format=text").value["messages"]
    assert [(each["value"], each["headers"]["error"]) for each in found] == [("a", "again"), ("b", "again")]


def test_a_letter_that_can_never_be_stored_stops_its_message_alone(tmp_path):
    """No topic is made by messages, so the gateway declares that of the letters; a name of 198 characters has none."""
    made, long = Broker(tmp_path / "b"), "x" * 198
    try:
        made.up(KMQ_AUTO_CREATE_TOPICS="off")
        with connected(made) as api:
            made.wait(lambda: api.get("/api/groups").status == 200, "groups, whose offsets are loaded")
            assert api.post(TOPICS, {"name": "orders", "maxDeliveries": 2}).status == 201
            assert api.post(TOPICS, {"name": long, "maxDeliveries": 2}).refusal[:2] == (422, "bad_field")
            assert api.post(TOPICS, {"name": long}).status == 201
            refused = api.call("PATCH", f"{TOPICS}/{long}", b'{"maxDeliveries": 2}', Content_Type="application/json")
            assert refused.refusal[:2] == (422, "bad_field")
            for command in ("create", f"{long[1:]}"), ("set", long):
                verb, name = command
                flag = ["--set"] if verb == "create" else []
                done = made.kmq("topics", verb, name, *flag, "max_deliveries=2")
                assert done.returncode == 78 and "at most 196" in done.stderr, done
            with open(made.data / "topics" / long / "topic.toml", "a") as file:  # as a release before could declare it
                file.write("max_deliveries = 2\n")
            for topic, letter in (("orders", "orders.dlq"), (long, None)):
                produce(api, topic, "a", "b")
                assert values(consume(api, topic, "g")) == ["a", "b"]
                assert nack(api, topic, "g", 0).value["deadLetter"] is None
                assert values(consume(api, topic, "g")) == ["a"]
                assert nack(api, topic, "g", 0).value["deadLetter"] == letter
                produce(api, topic, "c")
                assert values(consume(api, topic, "g", timeoutMs=10_000)) == ["c"]
            assert made.log().count("event=letter_refused") == 1 and "offset=0 code=" in made.log()
            shown = 'kmq_warning{reason="letter_refused"}'
            made.wait(lambda: f"{shown} 1.0" in made.get("/metrics")[1], "the finding")
            assert "letter_refused" in made.kmq("status").stdout
            leave(api, "g", "-")
            by_http(made, api, long, "g")
            made.wait(lambda: f"{shown} 0.0" in made.get("/metrics")[1], "its end")
    finally:
        made.close()
