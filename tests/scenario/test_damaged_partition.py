"""One partition of a topic is damaged: the others are served at every door, and the damage is said once."""

import asyncio
import json

import pytest
from brokers import PATIENCE_S, Broker
from grpc_client import Client
from line_client import LineClient, ask
from waiting import attempts

import kmq

COUNT = 500  # messages of each partition
HURT = ("torn", 1)


class Torn(Broker):
    """A broker whose topic `torn` has three partitions, of which the middle one is damaged from `bad` on."""

    bad: int
    later = 0  # messages that were sent to each of the others since

    @property
    def port(self) -> int:
        return int((self.pipes / "egress.port").read_text())

    @property
    def readable(self) -> list[list[int]]:
        """The offsets that can be read of each partition."""
        return [list(range(count)) for count in (COUNT + self.later, self.bad, COUNT + self.later)]


def flip(path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def torn(tmp_path_factory):
    made = Torn(tmp_path_factory.mktemp("torn") / "b")
    made.env["KMQ_SEGMENT_BYTES"] = str(64 << 10)
    assert made.kmq("topics", "create", "torn", "--partitions", "3").returncode == 0
    made.up()
    rows = [b"torn.@%d|0||%d %b" % (n % 3, n, b"z" * 400) for n in range(3 * COUNT)]
    for at in range(0, len(rows), 100):  # each in blocks of its own
        made.send_lines(rows[at : at + 100])
        made.wait_routed(at + 101)
    path = sorted((made.data / "topics" / "torn" / "1").glob("*.log"))[1]
    made.bad = int(path.stem)
    flip(path, 200)
    yield made
    made.close()


def opened(torn, **options) -> kmq.Consumer:
    return kmq.Consumer("torn", port=lambda: torn.port, **options)


def offsets(messages) -> list[list[int]]:
    return [[each.offset for each in messages if each.partition == number] for number in range(3)]


def said(caplog) -> list[str]:
    return [text for each in caplog.records if "damaged at byte" in (text := each.getMessage())]


@pytest.mark.parametrize(("group", "start"), [("", "earliest"), ("", "latest"), ("g", "earliest"), ("l", "latest")])
def test_a_consumer_reads_the_others_and_says_the_damage_once(torn, caplog, group, start):
    found, polls = [], 0
    with opened(torn, group_id=group, start=start) as consumer:
        if start == "latest":
            for place in consumer.connect():
                consumer.position(place)
            consumer.seek_to_beginning()
        tries = attempts("ten polls", consumer.describe, every_s=0)
        while polls < 10:
            next(tries)
            found += consumer.poll(timeout=0.1)
            polls += offsets(found) == torn.readable and bool(consumer.paused())
        assert consumer.paused() == [HURT] and "torn/1" in consumer.describe()
        assert len(said(caplog)) == 1 and "torn/1" in said(caplog)[0] and "kmq verify --repair" in said(caplog)[0]
        consumer.resume(HURT)
        while not consumer.paused():
            next(tries)
            consumer.poll(timeout=0.1)
        assert len(said(caplog)) == 2 and consumer.position(HURT) == torn.bad
    assert offsets(found) == torn.readable


def test_run_goes_on_beside_a_damaged_partition(torn):
    handled = []
    with opened(torn, group_id="run") as consumer:

        def handle(message):
            handled.append(message)
            if offsets(handled) == torn.readable:
                consumer.close()

        consumer.run(handle, dlq=None)
    assert offsets(handled) == torn.readable


def test_an_async_consumer_reads_the_others_and_says_the_damage_once(torn, caplog):
    async def scenario():
        found = []
        async with kmq.AsyncConsumer("torn", port=lambda: torn.port) as consumer, asyncio.timeout(PATIENCE_S):
            while offsets(found) != torn.readable or not consumer.paused():
                found += await consumer.poll(timeout=0.1)

    asyncio.run(scenario())
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("group", [[], ["--group", "cli"]])
def test_kmq_consume_prints_all_others_and_ends_with_the_damage(torn, group):
    result = torn.kmq("consume", "torn", *group)
    assert result.returncode == 65 and result.stdout.count("\n") == sum(map(len, torn.readable))
    assert result.stderr.count("damaged at byte") == 1 and "torn/1" in result.stderr


def test_lines_serve_the_others_and_say_the_damage_once(torn):
    rows = ask(torn.port, "CONSUME torn").splitlines()
    assert [row for row in rows if row.startswith(b"!ok")] == [b"!ok torn/%d offset=0" % n for n in range(3)]
    assert rows[-1].startswith(b"!err damaged torn/1: ") and len(rows) == 4 + sum(map(len, torn.readable))
    with LineClient(torn.port) as client:
        client.send("ASSIGN torn/0 torn/1 torn/2")
        client.line()
        counts, answers = {}, []
        while answers[-3:] != [b"-"] * 3:
            client.send("!fetch 100000")
            head = client.line().split(b" ")
            answers.append(head[1])
            if head[0] == b"!err":
                assert head[2:4] == [b"damaged", b"torn/1:"]
            elif head[1] != b"-":
                counts[head[1]] = counts.get(head[1], 0) + int(head[3])
                client.read(int(head[4]))
        assert answers.count(b"fetch") == 1
        assert counts == {b"torn/%d" % number: len(numbers) for number, numbers in enumerate(torn.readable)}
        client.send(f"!seek torn/1 {torn.bad}", "!fetch 1000 torn/1")
        assert client.line() == b"!seek torn/1@%d" % torn.bad
        assert client.line().startswith(b"!err fetch damaged torn/1: ")  # asked again, and said again


def test_a_follower_by_lines_is_sent_the_others_and_hears_of_the_damage_once(torn):
    with LineClient(torn.port) as client:
        client.send("CONSUME torn follow from=earliest")
        rows = [client.line() for _ in range(4 + sum(map(len, torn.readable)))]
        heads = [row for row in rows if row.startswith(b"!")]
        assert [row for row in heads if row.startswith(b"!ok")] == [b"!ok torn/%d offset=0" % n for n in range(3)]
        assert [row[:30] for row in heads if row.startswith(b"!err")] == [b"!err consume damaged torn/1: /"[:30]]
        torn.send_lines([b"torn.@%d|0||later" % number for number in (0, 2)])
        torn.later += 1
        later = [client.line() for _ in range(4)]
        assert sorted(row.split(b" ")[1] for row in later[::2]) == [b"torn/0", b"torn/2"]
        assert all(row.endswith(b"|later") for row in later[1::2])
    alone = ask(torn.port, "CONSUME torn/1 follow from=earliest").splitlines()  # nothing is left to follow
    assert alone[-1].startswith(b"!err damaged torn/1: ")


@pytest.mark.parametrize("query", ["group=http", "group=http-member&member=m"])
def test_http_serves_the_others_and_says_the_damage_once(torn, query):
    found, faults = [[], [], []], 0
    for _ in range(25):
        status, text = torn.get(f"/api/topics/torn/consume?{query}&maxMessages=200")
        assert status == 200 or (status, json.loads(text)["code"]) == (500, "damaged")
        faults += status == 500
        for message in json.loads(text).get("messages", ()):
            found[message["partition"]].append(message["offset"])
    assert found == torn.readable and faults == 1


def test_http_without_a_group_refuses_the_damaged_partition_alone(torn):
    for number, status in enumerate((200, 500, 200)):
        asked = f"/api/topics/torn/consume?partition={number}&offset={torn.bad}"
        assert torn.get(asked)[0] == status


def test_grpc_serves_the_others_and_says_the_damage_once(torn):
    found, empty, faults = [[], [], []], 0, []
    with Client(int((torn.pipes / "grpc.port").read_text())) as client, client.member("grpc", "torn") as member:
        member.next("assigned")
        while empty < 3:
            member.send("fetch", 1, max_records=200)
            response = member.read()
            if response.WhichOneof("response") == "error":
                faults.append(response.error.code)
                continue
            found[response.batch.partition] += [record.offset for record in response.batch.records]
            empty += not response.batch.records
    assert found == torn.readable and faults == ["damaged"]


def test_what_was_given_back_and_is_damaged_now_keeps_nothing_else_back(torn):
    """It waits until it is healed; others that were given back, and new messages of its partition, come."""
    for at in range(0, 300, 100):
        torn.send_lines([b"hurt|0||%d %b" % (n, b"z" * 400) for n in range(at, at + 100)])
        torn.wait(lambda at=at: len(torn.lines("hurt")) == at + 100, "a block")
    path = min((torn.data / "topics" / "hurt" / "0").glob("*.log"))
    with kmq.Consumer("hurt", port=lambda: torn.port, group_id="hurt") as consumer:
        found = []
        while len(found) < 300:
            found += consumer.poll(timeout=0.1)
        for n in (10, 190, 290):
            consumer.nack(found[n], delay=5)  # due after the damage
        consumer.commit()
        flip(path, 200)
        torn.send_lines([b"hurt|0||new"])
        again = []
        while len(again) < 3:
            again += consumer.poll(timeout=0.1)
        assert sorted((each.offset, each.deliveries) for each in again) == [(190, 2), (290, 2), (300, 1)]
        consumer.commit()
        flip(path, 200)  # healed
        [last] = consumer.poll(timeout=PATIENCE_S)
        assert (last.offset, last.deliveries) == (10, 2)


@pytest.mark.parametrize("door", ["lines", "follow", "no group", "group", "asyncio"])
def test_latest_is_the_moment_of_the_request_also_where_damage_hides_the_end(torn, door):
    topic = f"blind.{door.replace(' ', '-')}"

    def send(first: int, count: int) -> None:
        torn.send_lines([b"%b.@|0||%d" % (topic.encode(), n) for n in range(first, first + count)])
        torn.wait(lambda: len(torn.lines(topic)) == first + count, "the messages")

    assert torn.kmq("topics", "create", topic).returncode == 0
    send(0, 10)
    [index] = (torn.data / "topics" / topic / "0").glob("*.idx")
    flip(index, 25)  # it belongs to another segment now
    options = {"port": lambda: torn.port, "start": "latest", "group_id": door * (door == "group")}
    if door in ("lines", "follow"):
        with LineClient(torn.port) as client:
            client.send(
                *([f"ASSIGN {topic}/0@latest", "!fetch 1000"] if door == "lines" else [f"CONSUME {topic} follow"])
            )
            while not client.line().startswith(b"!err "):
                pass
            send(10, 5)
            flip(index, 25)
            client.send(*["!fetch 1000 wait=60000"] * (door == "lines"))
            heads = [client.line() for _ in range(1 + (door == "follow"))]
            assert heads[-1].startswith(f"!batch {topic}/0 10 5 ".encode())
    elif door == "asyncio":

        async def scenario():
            async with kmq.AsyncConsumer(topic, **options) as consumer, asyncio.timeout(PATIENCE_S):
                while not consumer.paused():
                    await consumer.poll(timeout=0.1)
                await asyncio.to_thread(send, 10, 5)
                flip(index, 25)
                consumer.resume((topic, 0))
                found = []
                while len(found) < 5:
                    found += await consumer.poll(timeout=0.1)
                assert [each.offset for each in found] == list(range(10, 15))

        asyncio.run(scenario())
    else:
        with kmq.Consumer(topic, **options) as consumer:
            while not consumer.paused():
                assert not consumer.poll(timeout=0.1)
            send(10, 5)
            flip(index, 25)
            consumer.resume((topic, 0))
            found = []
            while len(found) < 5:
                found += consumer.poll(timeout=0.1)
            assert [each.offset for each in found] == list(range(10, 15))
