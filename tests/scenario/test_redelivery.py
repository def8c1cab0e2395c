"""Messages that are given back, by the Python clients of a real broker, and by whichever door has their partition."""

import asyncio
import json
import re
import subprocess
import sys
from contextlib import ExitStack, closing
from itertools import count

import pytest
from api_client import Api
from brokers import PATIENCE_S, Broker
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer as KafkaProducer
from confluent_kafka import TopicPartition
from grpc_client import Client
from kafka_members import Member
from line_client import LineClient, ask
from waiting import attempts

import kmq
from kmq.spark.sql.shell import group_rows
from kmq.wire import replies

QUICK = kmq.Backoff(first=0.01, longest=0.02)
_numbers = count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("redelivery") / "b")
    made.up()
    yield made
    made.close()


def port(broker, name="egress"):
    return int((broker.pipes / f"{name}.port").read_text())


@pytest.fixture
def topic(broker, request):
    """A topic of its own, of one partition and ten messages; asked with a number it is how often one is delivered."""
    name = f"given{next(_numbers)}"
    most = getattr(request, "param", 0)
    made = broker.kmq("topics", "create", name, *(["--set", f"max_deliveries={most}"] if most else []))
    assert made.returncode == 0, made.stderr
    add(broker, name, range(10))
    return name


def add(broker, topic, numbers):
    with kmq.Producer(port=port(broker, "ingress")) as producer:
        broker.wait_routed(producer.send_many(topic, [b"%d" % n for n in numbers]).result())


def opened(broker, topic, group, **options):
    return kmq.Consumer(topic, port=lambda: port(broker), group_id=group, **options)


def read(consumer, count: int) -> list[kmq.Message]:
    """The next messages; a message that comes again may come between them."""
    found: list[kmq.Message] = []
    for _ in range(int(PATIENCE_S * 2)):
        found += consumer.poll(count - len(found), timeout=0.5)
        if len(found) == count:
            return found
    raise AssertionError(f"only {len(found)} of {count}: {consumer.describe()}")


def counted(messages) -> list[tuple[int, int]]:
    return [(message.offset, message.deliveries) for message in messages]


NEW = [(n, 1) for n in range(10)]


def test_a_message_given_back_comes_again_and_is_done_when_it_is_committed(broker, topic):
    place = (topic, 0)
    with opened(broker, topic, "givers") as consumer:
        found = read(consumer, 10)
        assert counted(found) == NEW
        given = consumer.nack(found[3], reason="no room")
        assert (given.offset, given.deliveries, given.letter) == (3, 1, "")
        consumer.nack(found[7], delay=600)
        consumer.commit()
        [again] = read(consumer, 1)
        assert counted([again]) == [(3, 2)] and again.value == b"3" and again.as_dict()["deliveries"] == 2
        assert consumer.position(place) == 10
        consumer.commit()
        assert consumer.committed(place) == 10
        consumer.nack(found[7])  # at once, then
        [again] = read(consumer, 1)
        assert counted([again]) == [(7, 2)]
        add(broker, topic, [10])
        assert counted(read(consumer, 1)) == [(10, 1)]
        consumer.commit(again)  # just this message
        assert consumer.committed(place) == 10 and consumer.position(place) == 11
        consumer.commit()
        assert consumer.committed(place) == 11
    with opened(broker, topic, "givers") as heir:
        assert heir.poll(timeout=1.0) == []


def test_what_came_again_and_was_not_committed_comes_once_more(broker, topic):
    with opened(broker, topic, "once-more", member="a") as consumer:
        found = read(consumer, 10)
        consumer.commit()
        consumer.nack(found[4])
        [again] = read(consumer, 1)
        broker.kill("gateway")
        broker.wait(lambda: not consumer.connected or consumer.poll(timeout=0.1), "the break")
        with pytest.raises(kmq.Refused, match="is delivered again"):
            consumer.commit(again)
        assert counted(read(consumer, 1)) == [(4, 3)]
    with opened(broker, topic, "once-more", member="b") as consumer:
        [again] = read(consumer, 1)
        assert again.offset == 4
        consumer.commit(again)
        consumer.commit(again)  # the second time there is nothing to do
        assert consumer.committed((topic, 0)) == 10 and consumer.poll(timeout=0.5) == []


def test_a_paused_partition_gives_nothing_until_it_is_resumed(broker, topic):
    with opened(broker, topic, "pausing") as consumer:
        found = read(consumer, 10)
        consumer.commit()
        consumer.nack(found[2])
        consumer.pause((topic, 0))  # it may be on its way
        assert consumer.poll(timeout=1.0) == []
        consumer.resume((topic, 0))
        assert counted(read(consumer, 1)) == [(2, 2)]


def test_a_consumer_that_commits_by_itself_commits_what_came_again(broker, topic):
    with opened(broker, topic, "by-itself", auto_commit=True, auto_commit_s=0.05) as consumer:
        it = iter(consumer)
        for message in it:
            if message.offset == 5 and message.deliveries == 1:
                consumer.nack(message)
            elif message.deliveries > 1:
                assert message.offset == 5
                break
        add(broker, topic, [10])
        while next(it).offset != 10:
            pass
    with opened(broker, topic, "by-itself") as heir:
        assert heir.poll(timeout=1.0) == []


@pytest.mark.parametrize("topic", [2], indirect=True)
def test_a_message_given_back_too_often_is_a_letter(broker, topic):
    with opened(broker, topic, "writers") as consumer:
        found = read(consumer, 10)
        consumer.commit()
        consumer.nack(found[3])
        [again] = read(consumer, 1)
        given = consumer.nack(again, reason="no account; 50 %")
        assert (given.deliveries, given.letter) == (2, f"{topic}.dlq/0@0")
        assert consumer.poll(timeout=0.5) == []
    with kmq.Consumer(f"{topic}.dlq", port=port(broker)) as consumer:
        [letter] = read(consumer, 1)
    headers = dict(letter.headers)
    assert (letter.value, headers["error"], headers["attempts"]) == (b"3", b"no account; 50 %", b"2")


def test_a_handler_gets_what_comes_again_and_its_retries_hold_nobody_up(broker, topic):
    with opened(broker, topic, "handlers") as first:
        found = read(first, 10)
        first.commit()
        for n in (3, 6, 8):
            first.nack(found[n])
    tries: list[tuple[int, int]] = []

    def handle(message):
        tries.append((message.offset, message.deliveries))
        if message.offset == 6 and message.deliveries < 4:
            raise OSError("later")
        if message.offset == 8:
            raise kmq.Permanent("never")
        if (6, 4) in tries and message.offset == 10:
            consumer.close()

    def made(window):
        return kmq.Producer(port=port(broker, "ingress"), window=window)

    with opened(broker, topic, "handlers") as consumer:

        def handle_all(message):
            handle(message)
            if message.offset == 6:
                add(broker, topic, [10])

        consumer.run(handle_all, backoff=QUICK, producer=made)
    assert sorted(tries) == [(3, 2), (6, 2), (6, 3), (6, 4), (8, 2), (10, 1)]
    with opened(broker, topic, "handlers") as heir:
        assert [offset for offset, _ in counted(heir.poll(timeout=1.0))] in ([], [10])
    with kmq.Consumer(f"{topic}.dlq", port=port(broker)) as consumer:
        [letter] = read(consumer, 1)
    assert letter.value == b"8" and dict(letter.headers)["error"] == b"Permanent: never"


@pytest.mark.parametrize("topic", [1], indirect=True)
def test_a_message_has_one_letter_whether_its_handler_or_the_broker_puts_it_aside(broker, topic):
    def fail(message):
        if message.offset == 9:
            consumer.close()
        raise kmq.Permanent("never")

    def made(window):
        return kmq.Producer(port=port(broker, "ingress"), window=window)

    with opened(broker, topic, "both") as consumer:
        consumer.run(fail, producer=made)
    reset = broker.kmq("groups", "reset", "both", "--topic", topic, "--to", "earliest")
    assert reset.returncode == 0, reset.stderr
    with opened(broker, topic, "both") as consumer:
        for message in read(consumer, 10):
            assert consumer.nack(message).letter
    with kmq.Consumer(f"{topic}.dlq", port=port(broker)) as consumer:
        letters = read(consumer, 10) + consumer.poll(timeout=0.5)
    assert sorted(letter.value for letter in letters) == [b"%d" % n for n in range(10)]


def test_a_run_stores_its_letters_where_messages_make_no_topics(tmp_path):
    made = Broker(tmp_path / "b")

    def produced(topic, *values):
        with kmq.Producer(port=port(made, "ingress"), window=topic.replace(".", "-")) as producer:
            lines = [b"%b.@||%d|%b\n" % (topic.encode(), number, value) for number, value in enumerate(values)]
            producer.send_lines(b"".join(lines)).result()

    def handle(message):
        if message.value == b"bad":
            raise kmq.Permanent("no")
        consumer.close()

    try:
        made.up(KMQ_AUTO_CREATE_TOPICS="off")
        for topic in ("orders", "a.b"):
            assert made.kmq("topics", "create", topic).returncode == 0
            produced(topic, b"bad", b"good")
            for name in (f"{topic}.dlq", "nobody", "nobody.dlq"):
                with pytest.raises(kmq.KmqError, match="unknown_topic"):
                    produced(name, b"no letter")
            with opened(made, topic, "g") as consumer:
                consumer.run(handle, producer=lambda window: kmq.Producer(port=port(made, "ingress"), window=window))
            made.wait_routed(len(made.wal()))
            shown = made.kmq("dlq", "show", f"{topic}.dlq", "0", "--json")
            assert shown.returncode == 0 and "Permanent: no" in shown.stdout, shown
    finally:
        made.close()


def test_an_async_consumer_gives_back_too(broker, topic):
    async def scenario():
        async with asyncio.timeout(PATIENCE_S), kmq.AsyncConsumer(topic, port=port(broker), group_id="async") as one:
            found: list[kmq.Message] = []
            async for message in one:
                found.append(message)
                if message.offset == 4 and message.deliveries == 1:
                    assert (await one.nack(message, delay=0.1, reason="busy")).deliveries == 1
                if message.deliveries == 2:
                    break
                await one.commit()
            assert counted(found) == [*NEW, (4, 2)]
            await one.commit(found[-1])
            assert await one.committed((topic, 0)) == 10 and await one.poll(timeout=0.5) == []

    asyncio.run(scenario())


def test_consume_with_a_group_prints_and_commits_what_comes_again(broker, topic):
    with opened(broker, topic, "printers") as consumer:
        found = read(consumer, 10)
        consumer.commit()
        consumer.nack(found[5])
    printed = broker.kmq("consume", topic, "--group", "printers", "--count", "1")
    assert (printed.returncode, printed.stdout) == (0, "5\n"), printed.stderr
    with opened(broker, topic, "printers") as consumer:
        assert consumer.poll(timeout=1.0) == []


def test_what_cannot_be_given_back_says_why(broker, topic):
    with kmq.Consumer(topic, port=port(broker)) as alone:
        [message] = read(alone, 1)
        with pytest.raises(kmq.KmqError, match="group_id="):
            alone.nack(message)
    with opened(broker, topic, "strict") as consumer:
        [message] = read(consumer, 1)
        with pytest.raises(ValueError, match="delay=-1"):
            consumer.nack(message, delay=-1)
        with pytest.raises(kmq.Refused, match="out_of_range"):
            consumer.nack(kmq.Message(topic, 0, 99, message.line))
        assert consumer.nack(message, reason="x" * 1000).deliveries == 1


def test_what_was_done_before_the_group_has_come_there_does_not_come_again(broker, topic):
    with opened(broker, topic, "ahead") as first:
        found = read(first, 10)
        first.nack(found[5])  # and commits nothing
    with opened(broker, topic, "ahead") as second:
        again, *rest = read(second, 10)
        assert counted([again, *rest]) == [(5, 2), *[(n, 1) for n in range(10) if n != 5]]
        second.commit(again)
        assert second.committed((topic, 0)) is None
        second.commit(rest[3])
    with opened(broker, topic, "ahead") as third:
        assert counted(read(third, 5)) == [(n, 1) for n in (4, 6, 7, 8, 9)]
        third.commit()
        assert third.committed((topic, 0)) == 10


@pytest.mark.parametrize("topic", [3], indirect=True)
def test_a_group_that_has_handled_all_that_came_apart_has_no_lag(broker, topic):
    """A consumer commits its position with what came again, and that is where the group stood when its first reader died."""
    with LineClient(port(broker)) as dead:
        dead.send(f"GROUP apart member=m topics={topic}", "!fetch 100000 wait=10000")
        while not dead.line().startswith(b"!batch "):
            pass
    with opened(broker, topic, "apart", member="m") as heir:
        found = []
        while len(found) < 10:
            found += read(heir, 1)
            heir.commit()
        assert counted(found) == [(n, 2) for n in range(10)] and heir.committed((topic, 0)) == 10
    [row] = json.loads(broker.kmq("groups", "describe", "apart", "--json").stdout)["partitions"]
    assert row["lag"] == 0
    with opened(broker, topic, "apart") as later:
        add(broker, topic, [10])
        assert counted(read(later, 1)) == [(10, 1)]


# --- the end of a reader with much in its buffer ---------------------------------------------------------------------

BUFFERED = 3000
IN_HAND = """
import sys, time, kmq
consumer = kmq.Consumer(sys.argv[1], port=int(sys.argv[2]), group_id="buffers", member="m")
for message in consumer:
    if message.offset == 4:
        print("has it", flush=True)
        time.sleep(600)
"""


def read_counting(consumer, count: int) -> tuple[list[kmq.Message], int]:
    """The next messages, and how many polls brought them; everything is committed before the next poll."""
    found: list[kmq.Message] = []
    polls, tries = 0, attempts(f"{count} messages", lambda: found, every_s=0)
    while len(found) < count and polls < 100:
        next(tries)
        if some := consumer.poll(count, timeout=0.5):
            found, polls = found + some, polls + 1
            consumer.commit()
    return found, polls


@pytest.mark.parametrize("topic", [3], indirect=True)
def test_what_a_killed_consumer_had_only_in_its_buffer_comes_to_its_heir_as_ever(broker, topic):
    add(broker, topic, range(10, BUFFERED))
    program = [sys.executable, "-c", IN_HAND, topic, str(port(broker))]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as dead:
        assert dead.stdout is not None and dead.stdout.readline() == b"has it\n"
        dead.kill()
    with opened(broker, topic, "buffers", member="m", max_poll_records=BUFFERED) as heir:
        found, polls = read_counting(heir, BUFFERED)
    assert sorted(message.offset for message in found) == [*range(BUFFERED)]
    alone = [message.offset for message in found if message.deliveries > 1]
    assert polls < 20 and {*range(5)} <= {*alone} <= {*range(15)}, (polls, alone)


@pytest.mark.parametrize("topic", [3], indirect=True)
def test_many_messages_of_a_reader_that_died_come_in_parts_until_one_kills_alone(broker, topic):
    """By a client that does not say what it has in hand. The message that kills is found in a few deaths."""
    add(broker, topic, range(10, BUFFERED))
    handled, deaths, requests, poison = [], 0, 0, 1234
    while deaths < 20 and requests < 100:
        with LineClient(port(broker)) as client:
            client.send(f"GROUP divided member=m topics={topic}")
            assert client.line().startswith(b"!assign ")
            while requests < 100:
                client.send("!fetch 10000000 wait=2000")
                batch = replies.reply(client.line())
                if batch.place is None:
                    break
                requests += 1
                for _ in range(batch.lines):
                    client.line()
                offsets = range(batch.offset, batch.offset + batch.lines)
                if poison in offsets:
                    break
                handled += offsets
                word = "again " if batch.deliveries else ""
                client.send(f"!commit {word}{batch.place} {batch.offset if word else offsets.stop}")
                assert client.line().startswith(b"!committed ")
        if batch.place is None:
            break
        deaths += 1
    assert sorted(handled) == [n for n in range(BUFFERED) if n != poison]
    assert deaths <= 6 and requests < 100, (deaths, requests)
    [letter] = ask(port(broker), f"CONSUME {topic}.dlq/0 raw").splitlines()
    assert letter.endswith(b"|1234") and b"attempts=3" in letter


# --- partitions that a member by Kafka's protocol owns ----------------------------------------------------------------

EARLIEST = {"enable.auto.commit": "false", "auto.offset.reset": "earliest"}
KAFKA_MEMBERS = {
    "classic": ("confluent", EARLIEST | {"partition.assignment.strategy": "cooperative-sticky"}),
    "kip-848": ("confluent", EARLIEST | {"group.protocol": "consumer"}),
    "aiokafka": ("aiokafka", {"enable_auto_commit": "false", "auto_offset_reset": "earliest", "assignors": "range"}),
}


@pytest.fixture
def api(broker):
    with closing(Api(port(broker, "http"))) as found:
        yield found


@pytest.fixture
def kafka_member(broker):
    """Starts members by Kafka's protocol, which are gone after the test."""
    with ExitStack() as running:

        def start(protocol, group, topic):
            library, settings = KAFKA_MEMBERS[protocol]
            member = Member(library, port(broker, "kafka"), group, topic, **settings)
            running.callback(member.kill)
            member.await_assigned(0)
            return member

        yield start


def give_back(api, topic, group, *offsets, committed):
    """A member by HTTP reads all, gives these back, commits and leaves."""
    url = f"/api/topics/{topic}"
    assert len(api.get(f"{url}/consume?group={group}&member=h").value["messages"]) == 10
    for offset in offsets:
        assert nack_by_http(api, topic, group, offset).status == 200
    row = {"partition": 0, "offset": committed}
    assert api.post(f"{url}/commit", {"group": group, "member": "h", "offsets": [row]}).status == 200
    assert api.call("DELETE", f"/api/groups/{group}/members/h").status == 204


def nack_by_http(api, topic, group, offset, **more):
    return api.post(f"/api/topics/{topic}/nack", {"group": group, "partition": 0, "offset": offset, **more})


def partition_of(broker, group):
    [row] = json.loads(broker.kmq("groups", "describe", group, "--json").stdout)["partitions"]
    return row


def lags(broker, topic, group):
    """The lag of a group, by each place that shows one."""
    [row] = json.loads(broker.get(f"/api/groups/{group}")[1])["partitions"]
    metric = re.search(
        rf'kmq_group_lag{{group="{group}",partition="0",topic="{topic}"}} (\S+)', broker.get("/metrics")[1]
    )
    shown = {each["group"]: each["lag"] for each in json.loads(broker.get("/api/overview")[1])["groups"]}
    table = {each.group: each.lag for each in group_rows({"path": str(broker.data)})}
    return [row["lag"], metric and int(float(metric[1])), shown.get(group), table.get(group)]


def warns(broker):
    return 'kmq_warning{reason="nacked_waiting"} 1.0' in broker.get("/metrics")[1]


@pytest.mark.parametrize("protocol", KAFKA_MEMBERS)
def test_what_waits_when_a_kafka_member_takes_over_is_lag_and_a_finding_until_it_is_done(
    broker, api, topic, kafka_member, protocol
):
    group = f"over-{protocol}"
    give_back(api, topic, group, 2, 5, committed=10)
    member = kafka_member(protocol, group, topic)
    add(broker, topic, [10])
    broker.wait(lambda: [offset for _, offset, _ in member.messages] == [10], f"the new one alone: {member}")
    member.ask("commit 0 11")
    broker.wait(lambda: lags(broker, topic, group) == [2, 2, 2, 2], "what waits in every lag")
    assert f" {2} " in broker.kmq("groups", "describe", group).stdout and partition_of(broker, group)["lagSeconds"] > 0
    broker.wait(lambda: warns(broker), "the finding")
    broker.wait(lambda: f"event=nacked_waiting group={group} " in broker.log(), "its event")
    assert "nacked_waiting" in broker.kmq("status").stdout and "nacked_waiting" in broker.get("/readyz")[1]
    member.close()
    consumed = api.get(f"/api/topics/{topic}/consume?group={group}&member=h&timeoutMs=5000").value
    assert [(row["offset"], row["deliveries"]) for row in consumed["messages"]] == [(2, 2), (5, 2)]
    rows = [{"partition": 0, "offset": 11}]
    assert api.post(f"/api/topics/{topic}/commit", {"group": group, "member": "h", "offsets": rows}).status == 200
    broker.wait(lambda: lags(broker, topic, group) == [0, 0, 0, 0] and not warns(broker), "its end")


def test_what_a_kafka_member_has_read_and_committed_does_not_wait_any_more(broker, api, topic, kafka_member):
    give_back(api, topic, "again", 0, 3, 5, committed=1)
    member = kafka_member("classic", "again", topic)
    broker.wait(lambda: [offset for _, offset, _ in member.messages] == [*range(1, 10)], str(member))
    member.ask("commit 0 5")
    assert (partition_of(broker, "again")["lag"], partition_of(broker, "again")["nacked"]) == (6, 2), "0 and 5"
    member.ask("commit 0 10")
    assert (partition_of(broker, "again")["lag"], partition_of(broker, "again")["nacked"]) == (1, 1), "0 alone"
    member.ask("commit 0 1")  # the client goes back: this is not a commit of 0 alone
    assert partition_of(broker, "again")["committed"] == 1


def test_what_is_committed_in_a_transaction_of_kafka_does_not_wait_any_more(broker, api, topic):
    give_back(api, topic, "exactly", 3, committed=1)
    address = {"bootstrap.servers": f"localhost:{port(broker, 'kafka')}"}
    producer = KafkaProducer(address | {"transactional.id": topic})
    with closing(KafkaConsumer(address | EARLIEST | {"group.id": "exactly"})) as consumer:
        consumer.subscribe([topic])
        found = []
        broker.wait(lambda: found.extend(consumer.consume(10, 0.1)) or len(found) == 9, "all behind the offset")
        producer.init_transactions()
        producer.begin_transaction()
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, 10)], consumer.consumer_group_metadata())
        producer.commit_transaction()
        broker.wait(lambda: partition_of(broker, "exactly")["nacked"] == 0, "the end of what waited")
        assert partition_of(broker, "exactly")["lag"] == 0


@pytest.mark.parametrize("protocol", KAFKA_MEMBERS)
def test_nothing_is_given_back_while_a_kafka_member_owns_the_partition(broker, api, topic, kafka_member, protocol):
    group = f"owned-{protocol}"
    give_back(api, topic, group, committed=10)
    member = kafka_member(protocol, group, topic)
    for more in ({}, {"member": "h"}, {"generation": 1}):
        refused = nack_by_http(api, topic, group, 4, **more)
        assert (refused.status, refused.value["code"]) == (409, "kafka_owner"), more
    assert partition_of(broker, group)["nacked"] == 0
    member.close()
    broker.wait(lambda: nack_by_http(api, topic, group, 4).status == 200, "a partition without an owner")


def test_a_kafka_owner_is_the_refusal_of_a_nack_by_lines_grpc_and_the_python_client(broker, topic, kafka_member):
    with opened(broker, topic, "doors") as consumer:
        message = read(consumer, 10)[4]
        consumer.commit()
    kafka_member("classic", "doors", topic)
    with opened(broker, topic, "doors") as consumer:
        with pytest.raises(kmq.Refused, match="a member by Kafka's protocol") as refused:
            consumer.nack(message)
        assert refused.value.code == "kafka_owner" and refused.value.exit_code == 1
        assert consumer.poll(timeout=0.1) == [], "it goes on"
    with LineClient(port(broker)) as client:
        client.send(f"GROUP doors member=l topics={topic}", f"!nack {topic}/0 4")
        while not (line := client.line()).startswith(b"!err "):
            assert line.startswith(b"!assign "), line
        assert line.startswith(b"!err nack kafka_owner ")
    with Client(port(broker, "grpc")) as client, client.member("doors", topic) as stream:
        assert stream.ask("nack", "error", topic=topic, partition=0, offset=4).code == "kafka_owner"
