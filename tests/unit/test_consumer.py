"""kmq.Consumer with its threads and sockets, against a peer that breaks connections and moves partitions as it likes.

What needs the real port is in tests/scenario.
"""

import asyncio
import threading
import time

import pytest
from consumer_peer import EU, US, Peer, Server
from waiting import PATIENCE_S, collect, until

import kmq
from kmq.client import consumer_protocol
from kmq.errors import ConfigError
from kmq.wire import requests


@pytest.fixture
def server():
    server = Server(Peer({EU: 5, US: 3}))
    yield server
    server.close()


@pytest.fixture
def consumer(server):
    with kmq.Consumer("orders", group_id="billing", port=server.port, session_s=6) as consumer:
        yield consumer


def places(messages) -> list[tuple[int, int]]:
    return sorted((message.partition, message.offset) for message in messages)


ALL = [(0, n) for n in range(5)] + [(1, n) for n in range(3)]


def read(consumer, count: int) -> list[kmq.Message]:
    return collect(count, lambda: consumer.poll(timeout=0.2), consumer.describe)


def test_poll_returns_what_is_there_and_at_most_as_many_as_asked_for(consumer):
    first = until(lambda: consumer.poll(max_records=2, timeout=PATIENCE_S))
    assert 1 <= len(first) <= 2
    assert places(first + read(consumer, 8 - len(first))) == ALL


def test_seconds_given_as_the_number_of_records_are_refused_with_the_keyword(consumer):
    with pytest.raises(TypeError, match=r"max_records=1\.0: must be a whole number; seconds to wait are timeout=1\.0"):
        consumer.poll(1.0)


def test_poll_returns_nothing_when_its_time_is_up(consumer):
    read(consumer, 8)
    begin = time.monotonic()
    assert consumer.poll(timeout=0.05) == [] and consumer.poll(timeout=0) == []
    assert time.monotonic() - begin >= 0.05


def test_a_poll_that_does_not_wait_finds_what_has_come_since_the_last_one(server, consumer):
    read(consumer, 8)
    assert consumer.poll(timeout=0.05) == []
    server.peer.records[EU].append(server.peer.records[EU][0])
    assert places(collect(1, lambda: consumer.poll(timeout=0))) == [(0, 5)]


def test_iteration_goes_on_where_it_was_left(consumer):
    found = []
    for message in consumer:
        found.append(message)
        if len(found) % 3 == 0:
            break
    for message in consumer:
        found.append(message)
        if len(found) == 7:
            break
    assert places(found + consumer.poll(timeout=PATIENCE_S)) == ALL


def test_a_commit_is_what_was_given_out_or_what_is_named(server, consumer):
    for n, message in enumerate(consumer, 1):
        if n == 2:
            consumer.commit(message)
            assert server.peer.committed == {(message.topic, message.partition): message.offset + 1}
        if n == 8:
            break
    consumer.commit()
    assert server.peer.committed == {EU: 5, US: 3}
    consumer.commit({("orders", 0): 1})
    assert (consumer.committed(EU), consumer.committed(("orders", 1))) == (1, 3)


def test_an_asynchronous_commit_calls_back_in_a_later_poll(server, consumer):
    read(consumer, 8)
    ends = []
    consumer.commit_async(callback=lambda offsets, error: ends.append((offsets, error, threading.current_thread())))
    until(lambda: consumer.poll(timeout=0.05) == [] and ends)
    assert ends == [({EU: 5, US: 3}, None, threading.current_thread())]


def test_a_refused_commit_raises_its_code(server, consumer):
    read(consumer, 8)
    server.peer.refuses["commit"] = "fenced generation 3 is over"
    with pytest.raises(kmq.Refused, match="generation 3 is over") as caught:
        consumer.commit()
    assert caught.value.code == "fenced"
    consumer.commit()


def test_nothing_is_committed_unless_asked_for(server):
    with kmq.Consumer("orders", group_id="billing", port=server.port) as consumer:
        read(consumer, 8)
    assert server.peer.committed == {}


def test_auto_commit_commits_what_the_application_came_back_for(server):
    with kmq.Consumer("orders", group_id="billing", port=server.port, auto_commit=True, auto_commit_s=0.01) as consumer:
        read(consumer, 8)
        until(lambda: consumer.poll(timeout=0.02) == [] and server.peer.committed == {EU: 5, US: 3})


def test_auto_commit_comes_in_the_middle_of_a_batch_that_takes_long(server):
    server.peer.records = {EU: [b"x"] * 5000}
    with kmq.Consumer(
        "orders", group_id="billing", port=server.port, session_s=0.06, auto_commit=True, auto_commit_s=0.01
    ) as consumer:
        for message in consumer:
            if server.peer.committed.get(EU):
                break
            assert message.offset < 4999
            time.sleep(0.001)  # the work
        assert 0 < server.peer.committed[EU] <= message.offset


@pytest.mark.parametrize("by_poll", [False, True])
def test_auto_commit_leaves_out_what_was_being_handled_when_an_exception_came(server, by_poll):
    with (
        pytest.raises(ZeroDivisionError),
        kmq.Consumer("orders", group_id="billing", port=server.port, auto_commit=True) as consumer,
    ):
        if by_poll:
            handled = read(consumer, 1)
            failing = consumer.poll(timeout=PATIENCE_S)[0]
            raise ZeroDivisionError
        handled = []
        for failing in consumer:
            if len(handled) == 6:
                raise ZeroDivisionError
            handled.append(failing)
    committed = sum(server.peer.committed.values())
    assert committed == len(handled)
    assert server.peer.committed[failing.topic, failing.partition] == failing.offset


def test_a_clean_end_commits_all_that_was_given_out_and_leaves(server):
    with kmq.Consumer("orders", group_id="billing", port=server.port, auto_commit=True) as consumer:
        read(consumer, 8)
    assert server.peer.committed == {EU: 5, US: 3}
    assert server.peer.asked[-1] == requests.LEAVE


def test_seeking_and_asking_where_the_consumer_is(consumer):
    read(consumer, 8)
    consumer.seek(EU, 4)
    consumer.seek_to_beginning(US)
    assert (consumer.position(EU), consumer.position(US)) == (4, 0)
    assert places(read(consumer, 4)) == [(0, 4), (1, 0), (1, 1), (1, 2)]
    consumer.seek_to_end()
    assert (consumer.position(EU), consumer.position(US)) == (5, 3)
    assert consumer.beginning_offsets([US, EU]) == {US: 0, EU: 0}
    assert consumer.end_offsets([EU]) == {EU: 5} and consumer.committed(EU) is None
    with pytest.raises(kmq.KmqError, match="orders/7: not assigned"):
        consumer.seek(("orders", 7), 0)


def test_a_seek_inside_a_loop_counts_from_the_next_message_on(consumer):
    found = {0: [], 1: []}
    for n, message in enumerate(consumer, 1):
        found[message.partition].append(message.offset)
        if found[message.partition] == [0, 1, 2]:
            consumer.seek((message.topic, message.partition), 0)
        if n == 14:
            break
    assert found == {0: [0, 1, 2, 0, 1, 2, 3, 4], 1: [0, 1, 2, 0, 1, 2]}


def test_pause_and_resume(consumer):
    read(consumer, 8)
    consumer.pause(EU)
    consumer.seek_to_beginning()
    assert places(read(consumer, 3)) == [(1, 0), (1, 1), (1, 2)] and consumer.paused() == [EU]
    assert consumer.poll(timeout=0.05) == []
    consumer.resume(EU)
    assert places(read(consumer, 5)) == [(0, n) for n in range(5)] and consumer.paused() == []


def test_callbacks_tell_of_partitions_and_may_commit(server):
    told = []

    def revoke(which):
        told.append(("revoke", which))
        consumer.commit()

    with kmq.Consumer(
        "orders",
        group_id="billing",
        port=server.port,
        on_assign=lambda which: told.append(("assign", which)),
        on_revoke=revoke,
    ) as consumer:
        read(consumer, 8)
        server.say(server.sessions[-1][0].rebalance([EU]))
        until(lambda: consumer.poll(timeout=0.05) == [] and len(told) == 2)
        assert server.peer.committed == {EU: 5, US: 3}
        until(lambda: requests.REVOKED in server.peer.asked)
        assert consumer.assignment() == [EU]
    assert told == [("assign", [EU, US]), ("revoke", [US]), ("revoke", [EU])]


def test_what_a_callback_raises_is_raised_by_poll_as_it_is(server):
    with (
        kmq.Consumer(
            "orders", group_id="billing", port=server.port, on_assign=lambda which: next(iter(()))
        ) as consumer,
        pytest.raises(StopIteration),
    ):
        read(consumer, 8)


def test_a_revocation_ends_the_batch_that_is_being_given_out(server):
    server.peer.records = {EU: [b"x"] * 5000}
    given_up = []
    with kmq.Consumer(
        "orders", group_id="billing", port=server.port, session_s=0.6, on_revoke=given_up.append
    ) as consumer:
        for message in consumer:
            if message.offset == 10:
                server.say(server.sessions[-1][0].rebalance([]))
                until(lambda: consumer.assignment() == [])  # the background thread has heard of it
            if given_up or message.offset > 1000:
                break
            if message.offset >= 10:
                consumer.poll(timeout=0)
                break
        assert given_up == [[EU]] and message.offset <= 11


def test_after_an_outage_the_same_member_goes_on_where_it_was(server):
    with kmq.Consumer("orders", group_id="billing", port=server.port, fetch_max_bytes=1) as consumer:
        found = []
        for _ in range(8):
            found += consumer.poll(max_records=1, timeout=PATIENCE_S)
            server.cut()
        assert places(found) == ALL
        assert set(server.peer.members) == {consumer.member} and len(server.peer.members) > 2


def test_a_member_stays_one_while_the_application_works(server):
    with kmq.Consumer("orders", group_id="billing", port=server.port, session_s=0.3) as consumer:
        read(consumer, 8)
        until(lambda: server.peer.asked.count(requests.BEAT) > 2)
        server.cut()
        until(lambda: len(server.peer.members) > 1)
        assert consumer.poll(timeout=0) == [] and server.peer.asked.count(requests.LEAVE) == 0


def test_who_never_comes_back_leaves_until_it_does(server):
    server.peer.committed = {EU: 4, US: 3}
    with kmq.Consumer(
        "orders", group_id="billing", port=server.port, session_s=0.3, max_poll_interval_s=1.0
    ) as consumer:
        assert len(read(consumer, 1)) == 1
        until(lambda: requests.LEAVE in server.peer.asked)
        assert consumer.assignment() == []
        for _ in range(3):
            consumer._driver._watch()  # as its thread does every now and then
        assert not consumer.connected and len(server.peer.members) == 1
        assert places(read(consumer, 1)) == [(0, 4)]


def test_without_a_group_all_partitions_are_read_and_nothing_is_committed(server):
    with kmq.Consumer("orders", port=server.port) as consumer:
        assert places(read(consumer, 8)) == ALL
        with pytest.raises(kmq.KmqError, match="has no group"):
            consumer.commit()
    with kmq.Consumer("orders", port=server.port, start=3) as consumer:
        assert places(read(consumer, 2)) == [(0, 3), (0, 4)]


def test_assigned_partitions_are_read_from_where_asked(server):
    with kmq.Consumer(port=server.port, start="latest") as consumer:
        consumer.assign(EU, start=4)
        assert places(read(consumer, 1)) == [(0, 4)]
        consumer.assign(EU, US)
        until(lambda: consumer.poll(timeout=0.02) == [] and consumer.assignment() == [EU, US])
        server.peer.records[US].append(b"new")
        assert [message.value for message in read(consumer, 1)] == [b"new"]


def test_a_consumer_that_has_ended_says_why(server, consumer):
    read(consumer, 8)
    server.say(b"!err fenced another member has this name\n")
    with pytest.raises(kmq.Fenced, match="another member"):
        read(consumer, 1)
    with pytest.raises(kmq.Fenced):
        consumer.commit()


def test_a_commit_from_before_a_loss_is_refused_though_the_partition_came_back(server, consumer):
    """The program has waited for something else, so it has not heard that another member had read on. It would set that back."""
    assert len(read(consumer, 8)) == 8
    server.peer.committed[EU] = 4  # by another member, which had the partition meanwhile
    connections = consumer._core.connections
    server.cut()
    until(lambda: consumer._core.connections > connections and consumer.position(EU) == 4)
    with pytest.raises(kmq.Fenced):
        consumer.commit({EU: 2})
    with pytest.raises(kmq.Fenced):
        consumer.commit(kmq.Message("orders", 0, 1, b"1|1712345678.000001|orders|1.5|1|x"))
    assert server.peer.committed[EU] == 4
    consumer.commit({US: 3})
    assert [each.offset for each in read(consumer, 1)] == [4]  # now it has heard of it
    consumer.commit({EU: 5})
    assert server.peer.committed == {EU: 5, US: 3}


def test_a_closed_consumer_gives_nothing_and_ends_a_loop_of_another_thread(server):
    consumer = kmq.Consumer("orders", group_id="billing", port=server.port)
    found = []
    thread = threading.Thread(target=lambda: found.extend(consumer))
    thread.start()
    until(lambda: len(found) == 8)
    consumer.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and len(found) == 8
    with pytest.raises(kmq.KmqError, match="closed"):
        consumer.poll()
    consumer.close()


def test_no_broker_is_waited_for_and_named():
    with kmq.Consumer("orders", group_id="billing", port=1) as consumer:
        until(lambda: consumer.poll(timeout=0.05) == [] and "nothing listens on 127.0.0.1:1" in consumer.describe())
        with pytest.raises(kmq.NotAnswered, match="timed out waiting for the commit: not connected"):
            consumer.commit({EU: 1}, timeout=0.05)


def test_a_consumer_of_nothing_says_so():
    with kmq.Consumer() as consumer, pytest.raises(kmq.KmqError, match="nothing to read"):
        consumer.poll()


def test_letters_never_go_to_a_broker_at_a_port_that_nobody_has_named():
    """Behind the usual port there may be another broker."""
    for port in (15674, lambda: 5674):
        with kmq.Consumer("orders", port=port, group_id="g") as consumer, pytest.raises(ConfigError, match="producer"):
            consumer.run(print)


def test_a_broker_that_is_not_there_is_said_once_and_so_is_its_return(caplog, monkeypatch):
    monkeypatch.setattr(consumer_protocol, "STALL_S", 0.3)
    server, ports = Server(Peer({EU: 1})), [1]
    with kmq.Consumer("orders", port=lambda: ports[-1], group_id="g") as consumer:
        until(lambda: consumer.poll(timeout=0.2) == [] and caplog.records)
        for _ in range(3):
            assert not consumer.poll(timeout=0.2)
        monkeypatch.setattr(consumer_protocol, "STALL_S", 100.0)  # a server on a busy machine is not away again
        ports.append(server.port)
        until(lambda: consumer.poll(timeout=0.2))
    told = [each.getMessage() for each in caplog.records if each.name == "kmq.consumer"]
    assert len(told) == 2 and told[0].endswith("nothing listens on 127.0.0.1:1; is the broker up?")
    assert told[1].startswith("connected again, after ")


@pytest.mark.parametrize("kind", [kmq.Consumer, kmq.AsyncConsumer])
def test_who_closes_a_consumer_that_was_never_connected_is_not_told_that_it_tries_again(kind, caplog, monkeypatch):
    async def make():
        consumer = kind("orders", port=1)
        monkeypatch.setattr(consumer_protocol, "STALL_S", 0.0)
        closed = consumer.close()
        if closed is not None:
            await closed

    asyncio.run(make())
    assert not [each.getMessage() for each in caplog.records]
