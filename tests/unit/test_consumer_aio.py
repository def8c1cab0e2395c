"""kmq.AsyncConsumer against the peer of test_consumer.py: what its own connection and its own waits must do."""

import asyncio
import time

import pytest
from consumer_peer import EU, US, Peer, Server
from waiting import PATIENCE_S, until_async

import kmq
from kmq.wire import requests

ALL = [(0, n) for n in range(5)] + [(1, n) for n in range(3)]


@pytest.fixture
def server():
    server = Server(Peer({EU: 5, US: 3}))
    yield server
    server.close()


def opened(server, **options) -> kmq.AsyncConsumer:
    return kmq.AsyncConsumer("orders", port=server.port, **({"group_id": "billing", "session_s": 6} | options))


def places(messages) -> list[tuple[int, int]]:
    return sorted((message.partition, message.offset) for message in messages)


async def read(consumer, count: int) -> list[kmq.Message]:
    found: list[kmq.Message] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            found += await consumer.poll(timeout=0.2)
    return found


async def poll_until(consumer, is_true) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():
            await consumer.poll(timeout=0.02)


def run(scenario) -> None:
    asyncio.run(scenario())


def test_poll_and_iteration_give_everything_once(server):
    async def scenario():
        async with opened(server) as consumer:
            found = await consumer.poll(max_records=3, timeout=PATIENCE_S)
            async for message in consumer:
                found.append(message)
                if len(found) == 8:
                    break
            assert places(found) == ALL
            begin = time.monotonic()
            assert await consumer.poll(timeout=0.05) == [] and time.monotonic() - begin >= 0.05
            await consumer.commit()
        assert server.peer.committed == {EU: 5, US: 3} and server.peer.asked[-1] == requests.LEAVE

    run(scenario)


def test_commits_seeks_and_offsets_have_the_names_of_the_consumer(server):
    async def scenario():
        async with opened(server) as consumer:
            assert await consumer.connect() == [EU, US]
            messages = await read(consumer, 8)
            await consumer.commit(messages[0])
            ends = []
            consumer.commit_async({EU: 4}, callback=lambda offsets, error: ends.append((offsets, error)))
            await poll_until(consumer, lambda: ends)
            assert ends == [({EU: 4}, None)] and await consumer.committed(EU) == 4
            consumer.seek(EU, 4)
            consumer.seek_to_end(US)
            assert (await consumer.position(EU), await consumer.position(US)) == (4, 3)
            assert await consumer.end_offsets([EU, US]) == {EU: 5, US: 3}
            consumer.pause(EU)
            assert await consumer.poll(timeout=0.05) == []
            consumer.resume(EU)
            assert places(await read(consumer, 1)) == [(0, 4)]
            server.peer.refuses["commit"] = "fenced generation 3 is over"
            with pytest.raises(kmq.Fenced):
                await consumer.commit()

    run(scenario)


def test_an_exception_leaves_out_what_was_being_handled(server):
    async def scenario():
        handled = []
        with pytest.raises(ZeroDivisionError):
            async with opened(server, auto_commit=True) as consumer:
                async for failing in consumer:
                    if len(handled) == 6:
                        raise ZeroDivisionError
                    handled.append(failing)
        assert sum(server.peer.committed.values()) == 6
        assert server.peer.committed[failing.topic, failing.partition] == failing.offset

    run(scenario)


def test_callbacks_may_be_coroutines_that_commit(server):
    async def scenario():
        told = []

        async def revoke(which):
            await consumer.commit()
            told.append(which)

        async with opened(server, on_assign=told.append, on_revoke=revoke) as consumer:
            await read(consumer, 8)
            server.say(server.sessions[-1][0].rebalance([EU]))
            await poll_until(consumer, lambda: len(told) == 2)
            await poll_until(consumer, lambda: requests.REVOKED in server.peer.asked)
            assert server.peer.committed == {EU: 5, US: 3} and consumer.assignment() == [EU]
        assert told == [[EU, US], [US], [EU]]

    run(scenario)


def test_after_an_outage_the_same_member_goes_on_where_it_was(server):
    async def scenario():
        async with opened(server, fetch_max_bytes=1) as consumer:
            found = []
            for _ in range(8):
                found += await consumer.poll(max_records=1, timeout=PATIENCE_S)
                server.cut()
            assert places(found) == ALL
            assert set(server.peer.members) == {consumer.member} and len(server.peer.members) > 2

    run(scenario)


def test_a_member_beats_while_the_application_works_and_leaves_when_it_never_comes_back(server):
    async def scenario():
        async with opened(server, session_s=0.3, max_poll_interval_s=3.0) as consumer:
            await read(consumer, 8)
            await until_async(lambda: server.peer.asked.count(requests.BEAT) > 1)
            assert requests.LEAVE not in server.peer.asked
            await until_async(lambda: requests.LEAVE in server.peer.asked)
            assert consumer.assignment() == []
            assert places(await read(consumer, 8)) == ALL

    run(scenario)


def test_without_a_group_all_partitions_are_read(server):
    async def scenario():
        async with opened(server, group_id="", start=3) as consumer:
            assert places(await read(consumer, 2)) == [(0, 3), (0, 4)]
            consumer.assign(US, start=1)
            assert places(await read(consumer, 2)) == [(1, 1), (1, 2)]

    run(scenario)


def test_no_broker_is_waited_for_and_named():
    async def scenario():
        async with kmq.AsyncConsumer("orders", group_id="billing", port=1) as consumer:
            await poll_until(consumer, lambda: "nothing listens on 127.0.0.1:1" in consumer.describe())
            with pytest.raises(kmq.NotAnswered, match="timed out waiting for the commit"):
                await consumer.commit({EU: 1}, timeout=0.05)

    run(scenario)


def test_a_fenced_consumer_has_ended_and_a_closed_one_says_so(server):
    async def scenario():
        async with opened(server) as consumer:
            await read(consumer, 8)
            server.say(b"!err fenced another member has this name\n")
            with pytest.raises(kmq.Fenced, match="another member"):
                await read(consumer, 1)
        with pytest.raises(kmq.KmqError, match="closed"):
            await consumer.poll()

    run(scenario)


def test_closing_ends_the_loop_of_another_task(server):
    async def scenario():
        consumer = opened(server)
        found = []

        async def loop():
            async for message in consumer:
                found.append(message)

        task = asyncio.create_task(loop())
        await until_async(lambda: len(found) == 8)
        await consumer.close()
        async with asyncio.timeout(PATIENCE_S):
            await task

    run(scenario)
