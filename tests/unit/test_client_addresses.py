"""Clients with several addresses: which one is next, and what is said while none serves. With real sockets.

Three whole brokers and a leader that is killed: tests/contract/test_shard_clients.py.
"""

import asyncio
import contextlib
import socket
import threading

import pytest
from consumer_peer import EU, Peer, Server

import kmq
from kmq.client import consumer_protocol, producer_core
from kmq.client.connection import address_of, read_hosts
from kmq.errors import ConfigError

HOST = "127.0.0.1"
PATIENCE_S = 100.0


class Door:
    """A port at which each connection gets `greeting`; with `acks` each message after that has a reply, else it is cut."""

    def __init__(self, greeting: bytes, acks: int = 0) -> None:
        self.greeting, self.acks = greeting, acks
        self.ids: list[bytes] = []
        self.connections = 0
        self.holds = False  # it takes lines, and replies to none
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                with contextlib.suppress(OSError), sock, sock.makefile("rb") as lines:
                    lines.readline()
                    sock.sendall(self.greeting)
                    for number, line in enumerate(lines, 1):
                        if number > self.acks:
                            break
                        if self.holds:
                            continue
                        self.ids.append(line.split(b"|")[2])
                        sock.sendall(b"!ack %d %d\n" % (number, len(self.ids)))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def doors():
    made: list[Door] = []

    def make(greeting: bytes = b"!ok max_line=1000\n", acks: int = 0) -> Door:
        made.append(Door(greeting, acks))
        return made[-1]

    yield make
    for door in made:
        door.close()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", [("a", None)]),
        ("a:1, b ,c:65535", [("a", 1), ("b", None), ("c", 65535)]),
        ("::1", [("::1", None)]),
        ("[::1]:5,[fe80::1%eth0]", [("::1", 5), ("fe80::1%eth0", None)]),
    ],
)
def test_hosts_are_read(text, found):
    assert list(read_hosts(text)) == found


@pytest.mark.parametrize("text", ["", "a,", "a,,b", "a:0", "a:65536", "a:x", "[::1", "a b"])
def test_what_is_no_host_is_named_when_the_client_is_made(text):
    for kind in (kmq.Producer, kmq.AsyncProducer, kmq.Consumer, kmq.AsyncConsumer):
        with pytest.raises(
            ConfigError, match=r"host='.*': '.*' must be a host, or host:port with a port of 1 to 65535"
        ):
            kind(host=text)


def test_addresses_take_turns_and_a_port_that_is_a_function_is_asked_each_time():
    ports = iter((7, 8))
    address = address_of("a:1,b", lambda: next(ports))
    assert [tuple(address())[:2] for _ in range(4)] == [("a", 1), ("b", 7), ("a", 1), ("b", 8)]


def sends(host: str, is_async: bool) -> int:
    """Send one message; return its seq."""
    if not is_async:
        with kmq.Producer(host, timeout_s=PATIENCE_S) as producer:
            return producer.send("t", b"x").result()

    async def send() -> int:
        async with kmq.AsyncProducer(host, timeout_s=PATIENCE_S) as producer:
            return await producer.send("t", b"x")

    return asyncio.run(send())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_producer_goes_from_a_closed_port_and_a_broker_without_a_leader_to_the_next(doors, is_async):
    unled, leader = doors(b"!err 0 no_leader nobody leads\n"), doors(acks=9)
    assert sends(f"{HOST}:1,{unled.address},{leader.address}", is_async) == 1
    assert (unled.connections, leader.connections) == (1, 1)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_broker_has_not_answered_goes_to_the_next_with_the_same_id(doors, is_async):
    first, second = doors(acks=1), doors(acks=9)

    def check(seqs: list[int]) -> None:
        assert seqs == [1, 1, 2]
        assert (first.ids, second.ids) == ([b"1"], [b"2", b"3"])

    host = f"{first.address},{second.address}"
    if not is_async:
        with kmq.Producer(host, timeout_s=PATIENCE_S) as producer:
            check(producer.send_many("t", [b"1", b"2", b"3"]).results())
        return

    async def send() -> list[int]:
        async with kmq.AsyncProducer(host, timeout_s=PATIENCE_S) as producer:
            return await producer.send_many("t", [b"1", b"2", b"3"])

    check(asyncio.run(send()))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_broker_that_hangs_is_left_for_the_next_address_and_alone_is_waited_for(doors, monkeypatch, is_async):
    """Its kernel accepts and keeps connections; nobody reads."""
    monkeypatch.setattr(producer_core, "ELSEWHERE_S", 0.3)
    hung, leader = doors(acks=9), doors(acks=9)
    hung.holds = True
    assert sends(f"{hung.address},{leader.address}", is_async) > 0
    assert hung.connections and not hung.ids and leader.ids[0] == b"1"
    before = hung.connections
    alone = kmq.Producer(hung.address, timeout_s=1.5)
    with pytest.raises(kmq.NotAnswered):
        alone.send("t", b"x").result()
    alone.abort()
    assert hung.connections == before + 1, "there is nobody else to ask"


def test_while_no_address_serves_all_of_them_are_named():
    host = f"{HOST}:1,{HOST}:2"
    pattern = rf"nothing listens on {HOST}:[12] \(one of {HOST}:1,{HOST}:2\); is the broker up\?"
    with kmq.Producer(host) as producer, pytest.raises(kmq.NotAnswered, match=pattern):
        producer.connect(timeout=2.0)
    with kmq.Consumer("t", host=host, group_id="g") as consumer:
        assert consumer.poll(timeout=0.1) == []
        with pytest.raises(kmq.NotAnswered, match=pattern):
            consumer.commit({EU: 1}, timeout=2.0)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_consumer_goes_to_the_next_address_as_the_same_member_and_not_back(doors, is_async):
    unled = doors(b"!err no_leader nobody leads\n")
    peer = Peer({EU: 2})
    servers = [Server(peer), Server(peer)]
    host = f"{unled.address}," + ",".join(f"{HOST}:{server.port}" for server in servers)

    def fail_over() -> None:
        servers[0].close()
        peer.records[EU] += [b"2", b"3", b"4"]

    async def read() -> list[int]:
        async with kmq.AsyncConsumer("orders", host=host, group_id="g") as consumer:
            found = [message.offset for message in await consumer.poll(timeout=PATIENCE_S)]
            fail_over()
            while len(found) < 5:
                found += [message.offset for message in await consumer.poll(timeout=PATIENCE_S)]
        return found

    try:
        if is_async:
            found = asyncio.run(read())
        else:
            with kmq.Consumer("orders", host=host, group_id="g") as consumer:
                found = [message.offset for message in consumer.poll(timeout=PATIENCE_S)]
                fail_over()
                while len(found) < 5:
                    found += [message.offset for message in consumer.poll(timeout=PATIENCE_S)]
        assert found == [0, 1, 2, 3, 4]
        assert len(servers[1].sessions) == 1 and len(set(peer.members)) == 1 and unled.connections
    finally:
        for server in servers:
            server.close()


def test_a_consumer_leaves_a_broker_that_answers_fetches_and_no_commits(monkeypatch):
    monkeypatch.setattr(consumer_protocol, "ELSEWHERE_S", 0.5, raising=False)
    peer = Peer({EU: 2})
    servers = [Server(peer), Server(peer)]
    servers[0].drops = b"!commit"
    try:
        host = ",".join(f"{HOST}:{server.port}" for server in servers)
        with kmq.Consumer("orders", host=host, group_id="g") as consumer:
            assert len(consumer.poll(timeout=PATIENCE_S)) == 2
            consumer.commit(timeout=15.0)
        assert peer.committed[EU] == 2 and servers[1].sessions
    finally:
        for server in servers:
            server.close()


def test_letters_go_to_the_same_hosts_where_all_ports_are_the_usual_ones():
    for host in ("a:5674,b:15674", "a:15674"):
        with kmq.Consumer("t", host=host, group_id="g") as consumer, pytest.raises(ConfigError, match="producer"):
            consumer.run(print)
    with kmq.Consumer("t", host="a:5674,b,[::1]", group_id="g") as consumer:
        letters = consumer._make_producer("w")
        assert {letters._driver.address()[:2] for _ in range(3)} == {("a", 5673), ("b", 5673), ("::1", 5673)}
        letters.abort()
