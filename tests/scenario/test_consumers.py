"""Consumers of a real broker: kmq.Consumer, kmq.AsyncConsumer, `kmq consume` and `kmq tail`. One broker for the file."""

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from brokers import PATIENCE_S, Broker
from line_client import LineClient
from secured import Secured
from waiting import attempts, collect

import kmq
from kmq.client.consumer_protocol import Phase
from kmq.errors import ConfigError

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

HEADERS = [("trace", b"\xff;|\n"), ("trace", None), ("p", b"mine"), ("", b"")]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("consumers") / "b")
    assert made.kmq("topics", "create", "spread", "--partitions", "3").returncode == 0
    made.up()
    with kmq.Producer(port=lambda: port(made, "ingress")) as producer:
        producer.send_many("spread", [b"%d" % n for n in range(3000)]).result()
        producer.send_many("orders", [b'{"n": %d}' % n for n in range(1000)]).result()
        last = producer.send("odd", b"\0\n\xff", key=b"a.b|\xff", headers=HEADERS, ts=1.25)
        producer.send("odd", None, key="gone")
        producer.send("odd", b"")
        made.wait_routed(last.result() + 2)
    yield made
    made.close()


def port(broker, name="egress"):
    return int((broker.pipes / f"{name}.port").read_text())


def opened(broker, *topics, **options) -> kmq.Consumer:
    return kmq.Consumer(*topics, port=lambda: port(broker), **options)


def read(consumer, count: int) -> list[kmq.Message]:
    return collect(count, lambda: consumer.poll(timeout=0.5), consumer.describe)


# --- kmq.Consumer without a group ------------------------------------------------------------------------------------


def test_every_partition_is_read_in_order_and_complete(broker):
    with opened(broker, "spread", fetch_max_bytes=5000) as consumer:
        found = read(consumer, 3000)
        assert sorted(int(message.value) for message in found) == list(range(3000))
        for partition in range(3):
            mine = [message for message in found if message.partition == partition]
            assert [message.offset for message in mine] == list(range(len(mine)))
            assert [message.line for message in mine] == broker_lines(broker, "spread", partition)


def broker_lines(broker, topic, partition):
    paths = sorted((broker.data / "topics" / topic / str(partition)).glob("*.log"))
    return b"".join(path.read_bytes() for path in paths).splitlines()


def test_a_typed_client_gets_exactly_what_another_has_sent(broker):
    with opened(broker, "odd") as consumer:
        first, second, third = read(consumer, 3)
    assert (first.key, first.value, first.headers, first.timestamp) == (b"a.b|\xff", b"\0\n\xff", HEADERS, 1.25)
    assert (second.key, second.value, second.headers) == (b"gone", None, [])
    assert (third.key, third.value) == (None, b"")
    assert first.producer == second.producer != "" and int(second.id) == int(first.id) + 1


def test_a_consumer_begins_and_goes_on_where_it_is_told(broker):
    with opened(broker, "orders", start="latest") as consumer:
        [place] = consumer.connect()
        assert place == kmq.TopicPartition("orders", 0) and consumer.position(place) == 1000
        assert consumer.end_offsets([place]) == {place: 1000} and consumer.beginning_offsets([place]) == {place: 0}
        consumer.seek(place, 998)
        messages = read(consumer, 2)
        assert [message.offset for message in messages] == [998, 999]
    with opened(broker, start=messages[0].recv_timestamp and "earliest") as consumer:
        consumer.assign(("orders", 0), start=997)
        assert [message.offset for message in read(consumer, 3)] == [997, 998, 999]


def test_a_consumer_of_a_topic_that_is_not_there_waits_for_it(broker):
    with opened(broker, "later") as consumer:
        assert consumer.poll(timeout=0.1) == [] and "no partitions of later yet" in consumer.describe()
        broker.send_lines([b"later|0||first"])
        assert [message.value for message in read(consumer, 1)] == [b"first"]


@pytest.mark.parametrize("group", ["", "leftover"])
def test_a_topic_that_is_deleted_under_a_consumer_is_said_once_and_the_others_are_read(broker, group):
    gone, stays = f"gone{group}", f"stays{group}"
    broker.send_lines([b"%b|0||1" % topic.encode() for topic in (gone, stays)])
    broker.wait(lambda: broker.lines(gone) and broker.lines(stays), "both topics")
    with opened(broker, gone, stays, group_id=group) as consumer:
        assert len(read(consumer, 2)) == 2
        assert broker.kmq("topics", "delete", gone, "--yes").returncode == 0
        broker.send_lines([b"%b|0||%d" % (stays.encode(), n) for n in range(20)])
        found, refused, tries = [], [], attempts("20 messages", every_s=0)
        while len(found) < 20:
            next(tries)
            try:
                found += consumer.poll(max_records=1, timeout=0.5)
            except kmq.Refused as err:
                refused.append(str(err))
        assert [message.topic for message in found] == [stays] * 20
        assert len(refused) <= 1 and all(f"unknown_topic {gone}/0: there is no topic" in text for text in refused)


def test_a_killed_gateway_costs_nothing_and_repeats_nothing(broker):
    total, found = 4000, []

    def produce():
        with kmq.Producer(port=lambda: port(broker, "ingress")) as producer:
            for n in range(total):
                producer.send("killed", b"%d" % n)

    thread = threading.Thread(target=produce)
    thread.start()
    with opened(broker, "killed", fetch_max_bytes=20_000) as consumer:
        for wanted in (total // 3, 2 * total // 3):
            found += read(consumer, wanted - len(found))
            broker.kill("gateway")
        found += read(consumer, total - len(found))
    thread.join()
    assert [message.offset for message in found] == list(range(total))
    assert [int(message.value) for message in found] == list(range(total))


def test_an_async_consumer_waits_and_reads_over_a_killed_gateway(broker):
    async def scenario():
        async with kmq.AsyncConsumer("waited", port=lambda: port(broker)) as consumer:
            broker.send_lines([b"waited|0||one"])
            async with asyncio.timeout(PATIENCE_S):
                async for message in consumer:
                    if message.value == b"two":
                        return
                    assert message.value == b"one"
                    await asyncio.to_thread(broker.kill, "gateway")
                    broker.send_lines([b"waited|0||two"])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "name",
    ["orders\n!commit orders/0 3", "orders session=7s", "x,orders", "a b", "orders/0", "", "orders token=x", "é"],
)
def test_a_name_is_one_name_or_an_error(broker, name):
    """No name of a topic commits, sets options, or names two topics."""
    for group in ("", "inj"):
        with pytest.raises(ConfigError, match="must be a topic's name"):
            opened(broker, name, group_id=group)
    with opened(broker, group_id="inj") as consumer:
        with pytest.raises(ConfigError, match="must be a topic's name"):
            consumer.assign((name, 0))
        with pytest.raises(ConfigError, match="must be a topic's name"):
            consumer.commit({(name, 0): 3})
        for place in [("orders", -1), ("orders", True), ("orders", "0"), "orders", ("orders",)]:
            with pytest.raises(ConfigError, match=r"must be \(topic, number\)"):
                consumer.assign(place)
        for offset, error in [("3", TypeError), (1.5, TypeError), (True, TypeError), (-1, ValueError)]:
            with pytest.raises(error, match=r"^offset"):
                consumer.commit({("orders", 0): offset})
    for command in ("consume", "tail"):
        result = broker.kmq(command, "--", name)
        assert result.returncode == 78 and "must be a topic's name" in result.stderr
    with opened(broker, "orders", group_id="inj") as consumer:
        assert consumer.connect() and consumer.committed(("orders", 0)) is None


def test_names_of_groups_and_members_are_taken_as_they_are(broker):
    name = "session=7s,%0A!x,token=é"
    with opened(broker, "orders", group_id=name, member=name) as consumer:
        consumer.connect()
        consumer.commit({("orders", 0): 5})
        assert consumer.committed(("orders", 0)) == 5
    assert name in {group["group"] for group in json.loads(broker.get("/api/groups")[1])}


@pytest.mark.parametrize("group", ["", "async-latest"])
def test_an_async_consumer_that_begins_with_latest_is_given_nothing_older(broker, group):
    topic = f"older{group}"

    def send(value: bytes) -> None:
        broker.send_lines([b"%b.@|0||%b" % (topic.encode(), value)])
        broker.wait(lambda: any(value in line for line in broker.lines(topic)), "the message")

    send(b"before")

    async def scenario():
        async with kmq.AsyncConsumer(topic, port=lambda: port(broker), group_id=group, start="latest") as consumer:
            async with asyncio.timeout(PATIENCE_S):
                assert await consumer.connect()
                assert not await consumer.poll(timeout=0.5)
                await asyncio.to_thread(send, b"after")
                found = []
                while not found:
                    found = await consumer.poll(timeout=0.1)
                assert [message.value for message in found] == [b"after"]

    asyncio.run(scenario())


@pytest.mark.parametrize("group", ["", "young"])
def test_a_partition_that_is_younger_than_the_subscription_is_read_from_its_start(broker, group):
    topic = f"grows{group}"
    with kmq.Producer(port=lambda: port(broker, "ingress")) as producer:
        producer.send_many(topic, [b"before"] * 5).result()
        broker.wait(lambda: len(broker.lines(topic)) == 5, "the first messages")
        with opened(broker, topic, f"late{group}", group_id=group, start="latest", member="m") as consumer:
            assert [consumer.position(place) for place in consumer.connect()] == [5]
            assert broker.kmq("topics", "set", topic, "--partitions", "3").returncode == 0
            for number in range(3):
                producer.send_many(topic, [b"%d" % n for n in range(10)], partition=number).result()
            producer.send_many(f"late{group}", [b"first"] * 4).result()
            found = read(consumer, 34)  # without coming back: nobody looks around for it
            assert not consumer.poll(timeout=0.5)
    got = sorted((each.topic, each.partition, each.offset) for each in found)
    assert got == [(topic, 0, n) for n in range(5, 15)] + [(topic, k, n) for k in (1, 2) for n in range(10)] + [
        (f"late{group}", 0, n) for n in range(4)
    ]


LONG = "l" * 199  # a name as long as one may be, less a digit


@pytest.mark.parametrize("group", ["", "wide"])
@pytest.mark.parametrize("topics", [1, 400])
def test_partitions_whose_names_take_more_than_a_line_are_read(broker, group, topics):
    """400 partitions, of one topic or one of each of 400: to name them takes 80 KB, and a line has 64 KiB at most."""
    names = (
        [f"{LONG}{group[:1] or 0}"] if topics == 1 else [f"{n:03}{group}{LONG[: 197 - len(group)]}" for n in range(400)]
    )
    if topics == 1:
        assert broker.kmq("topics", "create", names[0], "--partitions", "400").returncode == 0
    with kmq.Producer(port=lambda: port(broker, "ingress")) as producer:
        sent = [producer.send(names[n % topics], b"%d" % n, partition=n // topics) for n in range(400)]
        broker.wait_routed(sent[-1].result())
    options = {"group_id": group, "member": "m"}
    with opened(broker, *(names if group else ()), **options) as consumer:
        if not group:
            consumer.assign(*[(names[n % topics], n // topics) for n in range(400)])
        assert sorted(int(message.value) for message in read(consumer, 400)) == list(range(400))
        broker.kill("gateway")
        if group:
            consumer.commit()
        producer = kmq.Producer(port=lambda: port(broker, "ingress"))
        with producer:
            producer.send(names[-1], b"after", partition=0)
        assert [message.value for message in read(consumer, 1)] == [b"after"]


# --- groups ----------------------------------------------------------------------------------------------------------


def test_members_share_partitions_and_what_was_not_committed_comes_again(broker):
    options = {"group_id": "shared", "session_s": 6}
    with opened(broker, "spread", **options) as first:
        read(first, 3000)
        first.commit(dict.fromkeys(first.assignment(), 500))
        second = opened(broker, "spread", **options)
        handed_over: list[kmq.Message] = []
        with second:
            tries = attempts("what is handed over", every_s=0)
            while not second.assignment() or len(first.assignment()) + len(second.assignment()) != 3 or not handed_over:
                next(tries)
                assert first.poll(timeout=0.05) == []  # what stays here goes on where it was
                handed_over += second.poll(timeout=0.05)
            assert {message.offset for message in handed_over} <= set(range(500, 1100))
        again: list[kmq.Message] = []
        tries = attempts("what comes again", every_s=0)
        while len(first.assignment()) < 3 or not again:
            next(tries)
            again += first.poll(timeout=0.05)
        assert min(message.offset for message in again) == 500


def test_no_record_is_skipped_while_members_and_the_gateway_are_killed(broker, tmp_path):
    assert broker.kmq("topics", "create", "many", "--partitions", "4").returncode == 0
    outputs = [tmp_path / f"member{n}" for n in range(3)]
    members = []
    for path in outputs:
        with open(path, "wb") as out:
            command = ["kmq", "consume", "many", "--group", "restless", "--follow"]
            members.append(subprocess.Popen(command, env=broker.env, cwd=broker.root, stdout=out))

    def printed() -> set[int]:
        return {int(line) for path in outputs for line in path.read_bytes().split(b"\n")[:-1]}

    sent = 0
    try:
        with kmq.Producer(port=lambda: port(broker, "ingress")) as producer:

            def send_until(is_true, what: str) -> None:
                """Send 100 messages, and more as long as it is not true."""

                def is_true_now() -> bool:
                    nonlocal sent
                    producer.send_many("many", [b"%d" % n for n in range(sent, sent + 100)]).result()
                    sent += 100
                    return is_true()

                broker.wait(is_true_now, what)

            send_until(lambda: all(path.stat().st_size for path in outputs), "three members that print")
            members[0].kill()
            for _ in range(2):
                begin = sent
                send_until(lambda begin=begin: len(printed()) > begin, "more records")
                broker.kill("gateway")
            send_until(lambda: max(printed()) > sent - 1000, "records after the last kill")
        broker.wait(lambda: printed() == set(range(sent)), "all records")
        for member in members[1:]:
            member.send_signal(signal.SIGINT)
            assert member.wait(PATIENCE_S) == 130
    finally:
        for member in members:
            member.kill()
            member.wait()
    again = broker.kmq("consume", "many", "--group", "restless").stdout.split()
    assert set(map(int, again)) <= printed(), "what a member printed and could not commit any more"
    assert broker.kmq("consume", "many", "--group", "restless").stdout == ""


def test_a_member_goes_on_where_it_was_when_the_gateway_was_killed(broker):
    with opened(broker, "orders", group_id="steady", fetch_max_bytes=2000) as consumer:
        found = read(consumer, 300)
        broker.kill("gateway")
        consumer.commit({("orders", 0): 100})
        found += read(consumer, 1000 - len(found))
        assert [message.offset for message in found] == list(range(1000))
        assert consumer.committed(("orders", 0)) == 100
        consumer.commit()
        assert consumer.committed(("orders", 0)) == 1000


def test_an_opening_that_a_door_has_held_back_fences_no_later_connection(broker):
    with socket.create_server(("127.0.0.1", 0)) as door, LineClient(port(broker)) as late:
        where = iter([door.getsockname()[1]])
        with kmq.Consumer("orders", port=lambda: next(where, None) or port(broker), group_id="held") as consumer:
            assert not consumer.poll(timeout=0.1)
            door.settimeout(PATIENCE_S)
            held, _ = door.accept()
            held.settimeout(PATIENCE_S)
            with held, held.makefile("rb") as lines:
                opening = lines.readline()
            found = read(consumer, 100)
            late.send_raw(opening)
            assert late.rest().startswith(b"!err fenced ")
            found += read(consumer, 1000 - len(found))
            consumer.commit()
            assert [message.offset for message in found] == list(range(1000))


class Away(kmq.Consumer):
    """A consumer that can be cut off from the broker, as by a network."""

    def __init__(self, broker, *topics, **options) -> None:
        self.is_away = False
        super().__init__(*topics, port=lambda: 1 if self.is_away else port(broker), **options)

    def go_away(self) -> None:
        self.is_away = True
        with self._lock:
            self._driver.drop("the network is away")


@pytest.mark.parametrize("to", ["earliest", "latest"])
def test_a_group_that_was_moved_while_the_gateway_was_down_is_where_it_was_moved_to(broker, to):
    """The consumer is back after that: what an operator has set, or another member has committed, counts, not its memory."""
    reset = ("groups", "reset", f"moved-{to}", "--topic", "orders", "--to", to)
    with Away(broker, "orders", group_id=f"moved-{to}", session_s=60) as consumer:
        read_upto(consumer, 600)
        consumer.commit({("orders", 0): 500})
        consumer.is_away = True
        broker.kill("gateway")
        broker.wait(lambda: broker.kmq(*reset).returncode == 0, "another gateway")
        broker.wait(lambda: not consumer.connected, "the consumer notices")
        consumer.is_away = False
        broker.wait(lambda: consumer._core.phase is Phase.READING, "the consumer is back")
        if to == "earliest":
            assert [message.offset for message in read_upto(consumer, 1000)] == list(range(1000))
        else:
            broker.wait(lambda: not consumer.poll(timeout=0.2) and consumer.connected, "the consumer")
            assert consumer.position(("orders", 0)) == 1000


def read_upto(consumer, count: int) -> list[kmq.Message]:
    found: list[kmq.Message] = []
    while len(found) < count:
        found += consumer.poll(count - len(found), timeout=0.5)
    return found


def test_the_heir_of_a_latest_consumer_begins_where_that_one_has_subscribed(broker):
    """Its partition is idle, so it has committed nothing but its start; then it dies, and a message comes."""
    topic = "heirs"
    broker.send_lines([b"heirs|0||old"])
    broker.wait(lambda: broker.lines(topic), "the first message")
    options = {"group_id": topic, "start": "latest", "session_s": 6}
    with Away(broker, topic, **options) as first:
        assert first.poll(timeout=0.1) == [] and first.connect() and first.position((topic, 0)) == 1
        first.go_away()
        broker.send_lines([b"heirs|0||meanwhile"])
        broker.wait(lambda: len(broker.lines(topic)) == 2, "the message")
        with opened(broker, topic, **options) as heir:
            assert [message.value for message in read(heir, 1)] == [b"meanwhile"]


@pytest.mark.parametrize("grows", [True, False])
def test_a_latest_member_that_comes_after_the_growth_begins_young_partitions_at_their_start(broker, grows):
    """The group had subscribed before, so what came before this member did is not older than the subscription."""
    topic, options = f"young-{grows}", {"group_id": f"young-{grows}", "start": "latest", "session_s": 12}
    if grows:
        assert broker.kmq("topics", "create", topic).returncode == 0
    with Away(broker, topic, **options) as first:
        first.connect()
        # Once it has committed its start, or is a member of a topic that is not there yet, the group has subscribed.
        has_begun = lambda: not grows or first.committed((topic, 0)) == 0  # noqa: E731
        broker.wait(lambda: first.poll(timeout=0.1) == [] and has_begun(), "the start of the first member")
        first.go_away()
        assert broker.kmq("topics", "set" if grows else "create", topic, "--partitions", "3").returncode == 0
        with kmq.Producer(port=lambda: port(broker, "ingress")) as producer:
            for number in (1, 2):
                producer.send_many(topic, [b"%d" % n for n in range(10)], partition=number).result()
        broker.wait(lambda: all(len(broker_lines(broker, topic, n)) == 10 for n in (1, 2)), "the messages")
        with opened(broker, topic, **options) as heir:
            found = read(heir, 20)
    assert sorted((each.partition, each.offset) for each in found) == [(k, n) for k in (1, 2) for n in range(10)]


def test_consume_with_a_group_commits_what_it_has_printed(broker):
    with kmq.Producer(port=port(broker, "ingress")) as producer:
        producer.send_many("printed", [b"%d" % n for n in range(100)]).result()
    broker.wait(lambda: len(broker.lines("printed")) == 100, "the topic")
    take = ("consume", "printed", "--group", "printing")
    assert broker.kmq(*take, "--count", "3").stdout == "0\n1\n2\n"
    assert broker.kmq(*take).stdout.split() == [str(n) for n in range(3, 100)]
    with running(broker, *take, "--follow") as follower:
        broker.send_lines([b"printed|0||last"])
        assert follower.stdout.readline() == "last\n"
        broker.wait(lambda: committed(broker, "printing") == 101, "the commit, though nothing more comes")
        follower.send_signal(signal.SIGINT)
        assert follower.wait(PATIENCE_S) == 130
    assert broker.kmq(*take).stdout == ""


def committed(broker, group) -> int:
    """The last offset that a group has committed, of a topic of one partition."""
    lines = [line for line in broker.lines("__consumer_offsets") if f"__consumer_offsets.@.{group}.".encode() in line]
    return int(lines[-1].split(b"offset=")[1].split()[0])


# --- a handler with retries and dead letters -------------------------------------------------------------------------

QUICK = kmq.Backoff(first=0.01, longest=0.05)


def run(broker, topic, handler, count: int, **options) -> list[tuple[int, int]]:
    """Handle until `count` messages were handled or buried; returns (partition, offset) of those that were handled."""
    handled: list[tuple[int, int]] = []
    consumer = opened(broker, topic, group_id="handlers")

    def handle(message):
        handler(message)
        handled.append((message.partition, message.offset))

    thread = threading.Thread(
        target=consumer.run,
        args=(handle,),
        kwargs={"backoff": QUICK, "producer": lambda window: kmq.Producer(port=port(broker, "ingress"), window=window)}
        | options,
    )
    thread.start()
    broker.wait(lambda: partitions(broker, topic), "the topic")
    with opened(broker, group_id="handlers") as watching:
        watching.assign(*[(topic, number) for number in range(len(partitions(broker, topic)))])
        places = watching.connect()
        broker.wait(lambda: sum(watching.committed(place) or 0 for place in places) >= count, "all handled")
    consumer.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return handled


def partitions(broker, topic):
    return list((broker.data / "topics" / topic).glob("[0-9]*"))


def test_what_cannot_be_handled_becomes_a_letter_and_blocks_nothing(broker):
    assert broker.kmq("topics", "create", "handled", "--partitions", "2").returncode == 0
    with kmq.Producer(port=port(broker, "ingress")) as producer:
        for n in range(40):
            producer.send("handled", b"%d" % n, key=b"k%d" % n, partition=n % 2, headers=[("n", b"%d" % n)])
    tries: dict[bytes, int] = {}

    def handle(message):
        tries[message.value] = tries.get(message.value, 0) + 1
        if message.value == b"6":
            raise kmq.Permanent("never")
        if message.value == b"8" or (message.value == b"11" and tries[b"11"] < 3):
            raise OSError("later")

    handled = run(broker, "handled", handle, 40)
    assert sorted(handled) == sorted((n % 2, n // 2) for n in range(40) if n not in (6, 8))
    for partition in range(2):
        assert [p for p in handled if p[0] == partition] == sorted(p for p in handled if p[0] == partition)
    assert (tries[b"6"], tries[b"8"], tries[b"11"]) == (1, 4, 3)
    with opened(broker, "handled.dlq") as consumer:
        letters = {message.value: message for message in read(consumer, 2)}
        headers = dict(letters[b"8"].headers)
        assert headers["n"] == b"8" and headers["error"] == b"OSError: later" and headers["attempts"] == b"4"
        assert (headers["origin_topic"], headers["origin_offset"], headers["group"]) == (b"handled", b"4", b"handlers")
        assert letters[b"6"].key == b"k6" and dict(letters[b"6"].headers)["attempts"] == b"1"
        # Killed behind the letters and before the commits, everything comes again: the letters are stored once.
        with opened(broker, group_id="handlers") as back:
            back.assign(("handled", 0), ("handled", 1))
            back.connect()
            back.commit({("handled", 0): 0, ("handled", 1): 0})
        run(broker, "handled", handle, 40)
        assert consumer.poll(timeout=0.2) == []


def test_a_letter_that_is_too_long_is_cut(broker):
    with kmq.Producer(port=port(broker, "ingress")) as producer:
        producer.send("huge", b"y" * ((1 << 20) - 200)).result()

    def handle(_):
        raise kmq.Permanent("x" * 400)

    assert run(broker, "huge", handle, 1) == []
    with opened(broker, "huge.dlq") as consumer:
        [letter] = read(consumer, 1)
    assert len(letter.value) > 1_000_000 and dict(letter.headers)["len"] == b"%d" % ((1 << 20) - 200)


def test_an_async_consumer_runs_a_handler_by_the_same_rules(broker):
    with kmq.Producer(port=port(broker, "ingress")) as producer:
        for n in range(12):
            producer.send("awaited", b"%d" % n)
    tries: dict[bytes, int] = {}

    async def handle(message):
        await asyncio.sleep(0)
        tries[message.value] = tries.get(message.value, 0) + 1
        if message.value == b"3":
            raise kmq.Permanent("never")
        if message.value == b"5" and tries[b"5"] < 3:
            raise OSError("later")

    def made(window):
        return kmq.Producer(port=port(broker, "ingress"), window=window)

    async def scenario():
        async with asyncio.timeout(PATIENCE_S), kmq.AsyncConsumer(port=port(broker), group_id="awaiting") as watching:
            watching.assign(("awaited", 0))
            [place] = await watching.connect()
            consumer = kmq.AsyncConsumer("awaited", port=port(broker), group_id="awaiting")
            async with consumer:
                task = asyncio.create_task(consumer.run(handle, backoff=QUICK, producer=made))
                while await watching.committed(place) != 12:
                    assert not task.done()
                    await asyncio.sleep(0.01)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    broker.wait(lambda: partitions(broker, "awaited"), "the topic")
    asyncio.run(scenario())
    assert {value: count for value, count in tries.items() if count != 1} == {b"5": 3} and len(tries) == 12
    with opened(broker, "awaited.dlq") as consumer:
        [letter] = read(consumer, 1)
    assert (letter.value, dict(letter.headers)["error"]) == (b"3", b"Permanent: never")


# --- the commands ----------------------------------------------------------------------------------------------------


def test_consume_prints_values_in_order_and_ends_at_the_end(broker):
    result = broker.kmq("consume", "orders")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [f'{{"n": {n}}}' for n in range(1000)]
    spread = broker.kmq("consume", "spread").stdout.split()
    assert sorted(map(int, spread)) == list(range(3000))


def test_consume_counts_and_begins_where_asked(broker):
    assert broker.kmq("consume", "orders", "--count", "2", "--from", "5").stdout == '{"n": 5}\n{"n": 6}\n'
    assert broker.kmq("consume", "orders", "--from", "latest").stdout == ""
    assert len(broker.kmq("consume", "orders", "--from", "1h").stdout.splitlines()) == 1000
    assert broker.kmq("consume", "orders", "--from", "2199-01-01T00:00").stdout == ""


def test_consume_as_json_has_every_field(broker):
    first, second, third = map(json.loads, broker.kmq("consume", "odd", "--json").stdout.splitlines())
    assert first["topic"] == "odd" and first["timestamp"] == 1250 and first["offset"] == 0
    assert [header["name"] for header in first["headers"]] == ["trace", "trace", "p", ""]
    assert (second["key"], second["value"]) == ("gone", None) and third["value"] == ""


@pytest.mark.parametrize(
    "command", ["consume spread", "consume spread --follow --from earliest", "tail spread -n 2000"]
)
def test_a_reader_that_leaves_ends_the_command_well(broker, command):
    result = broker.run("bash", "-c", f"set -o pipefail; kmq {command} | head -n 1")
    assert (result.returncode, result.stderr) == (0, "") and len(result.stdout.splitlines()) == 1


def test_a_reader_that_leaves_is_noticed_while_nothing_comes(broker):
    result = broker.run("bash", "-c", "set -o pipefail; kmq consume orders --follow | sleep 0.5")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@contextlib.contextmanager
def running(broker, *command):
    """A command that follows, and a function that returns its next line."""
    process = subprocess.Popen(
        ["kmq", *command], env=broker.env, cwd=broker.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_tail_shows_the_last_ones_and_what_comes_until_ctrl_c(broker):
    broker.send_lines([b"tailed.k%d|0||%d" % (n, n) for n in range(5)])
    broker.wait(lambda: len(broker.lines("tailed")) == 5, "the topic")
    with running(broker, "tail", "tailed", "--count", "2") as tail:
        rows = [tail.stdout.readline().split(maxsplit=2)[2] for _ in range(2)]
        assert rows == ["0 3 k3 3\n", "0 4 k4 4\n"]
        broker.send_lines([b"tailed|0||new"])
        assert tail.stdout.readline().split(maxsplit=2)[2] == "0 5 - new\n"
        tail.send_signal(signal.SIGINT)
        assert tail.wait(PATIENCE_S) == 130


def test_a_follower_says_what_it_waits_for_and_goes_on(broker):
    broker.send_lines([b"followed|0||one"])
    broker.wait(lambda: broker.lines("followed"), "the topic")
    with running(broker, "consume", "followed", "--follow", "--from", "earliest") as follower:
        assert follower.stdout.readline() == "one\n"
        broker.kmq("down")
        assert "kmq: waiting: not connected" in follower.stderr.readline()
        with running(broker, "consume", "followed", "--follow", "--from", "earliest") as late:
            assert late.stderr.readline().startswith("kmq: waiting, at most 60 s: ")
            broker.up()
            assert follower.stderr.readline() == late.stderr.readline() == "kmq: goes on\n"
            broker.send_lines([b"followed|0||two"])
            assert follower.stdout.readline() == "two\n"
            assert [late.stdout.readline() for _ in range(2)] == ["one\n", "two\n"]


def test_what_cannot_be_consumed_is_named(broker, new_broker):
    result = broker.kmq("consume", "nothing")
    assert (result.returncode, result.stderr) == (78, "kmq: topic 'nothing' does not exist; see: kmq topics list\n")
    result = broker.kmq("consume", "orders", "--from", "soon")
    assert result.returncode == 78 and result.stderr.startswith(
        "kmq: --from 'soon': must be earliest, latest, an offset"
    )
    result = new_broker().kmq("consume", "orders")
    assert result.returncode == 78 and "is the broker up, with its gateway? (kmq status)" in result.stderr


# --- TLS and tokens --------------------------------------------------------------------------------------------------


def test_tls_a_clients_certificate_and_a_token_open_the_door(new_broker, authority, tmp_path):
    secured = Secured(new_broker(), authority, tmp_path, gateway=True)
    secured.broker.wait(lambda: (secured.broker.pipes / "egress_tls.port").exists(), "the port")
    assert secured.broker.kmq("produce", "orders", "-m", "one", "--acks").returncode == 0
    context = ssl.create_default_context(cafile=str(authority.path))
    context.load_cert_chain(secured.cert, secured.key)
    options = {"host": "localhost", "port": secured.port("egress_tls"), "tls": context}
    with kmq.Consumer("orders", token=secured.token, **options) as consumer:
        assert [message.value for message in read(consumer, 1)] == [b"one"]
    with kmq.Consumer("orders", **options) as consumer, pytest.raises(kmq.Refused) as caught:
        read(consumer, 1)
    assert caught.value.code == "unauthorized"
    assert secured.broker.kmq("consume", "orders").stdout == "one\n"


# --- the end of run --------------------------------------------------------------------------------------------------

_RUN = """
import asyncio, sys, kmq

async def main():
    async with kmq.AsyncConsumer("orders", port={port}, group_id="ends{kind}") as consumer:
        await consumer.run(handle, dlq=None)

def handle(message):
    print(message.offset, flush=True)
    if message.offset == 700:
        sys.stdin.readline()

if "{kind}" == "async":
    asyncio.run(main())
else:
    with kmq.Consumer("orders", port={port}, group_id="ends{kind}", auto_commit={auto}) as consumer:
        consumer.run(handle, dlq=None)
"""


@pytest.mark.parametrize(("kind", "auto"), [("sync", False), ("auto", True), ("async", False)])
def test_sigterm_ends_run_between_two_messages_commits_and_leaves(broker, kind, auto):
    """What was given out and not handled is not committed, also where the consumer commits by itself."""
    text = _RUN.format(port=port(broker), kind=kind, auto=auto)
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while process.stdout.readline() != "700\n":
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.stdin.write("go on\n")
        process.stdin.flush()
        handled = process.communicate(timeout=PATIENCE_S)[0].split()
    assert process.returncode == 0 and len(handled) < 200
    group = json.loads(broker.get(f"/api/groups/ends{kind}")[1])
    assert group["members"] == []
    assert [row["committed"] for row in group["partitions"]] == [701 + len(handled)]


def test_run_ends_when_it_is_told_to_stop_in_another_thread(broker):
    stop, handled = threading.Event(), []
    with opened(broker, "orders", group_id="told") as consumer:
        thread = threading.Thread(target=consumer.run, args=(handled.append,), kwargs={"dlq": None, "stop": stop})
        thread.start()
        broker.wait(lambda: len(handled) == 1000, "all messages")
        stop.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive() and not consumer.closed and consumer.committed(("orders", 0)) == 1000
