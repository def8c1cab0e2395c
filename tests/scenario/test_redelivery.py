"""Messages that are given back, by the Python clients of a real broker, and by whichever door has their partition."""

import asyncio
import json
from itertools import count

import pytest
from brokers import PATIENCE_S, Broker
from line_client import LineClient

import kmq

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
        with pytest.raises(kmq.Refused, match="comes again"):
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
