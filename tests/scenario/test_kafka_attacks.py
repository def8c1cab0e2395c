"""Strangers and rogue clients at the Kafka port: a real broker goes on, serves the others, and takes little memory."""

import contextlib
import random
import resource
import select
import socket
import struct
import time
from pathlib import Path

import pytest
from brokers import PATIENCE_S, Broker
from kafka_client import KafkaClient, made_up, request

from kmq.access import tokens
from kmq.broker import stats
from kmq.config.values import KIB, MIB
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.access import BEFORE
from kmq.gateway.kafka.wire import ErrorCode, Key

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

DEADLINE_S = 2.0
MANY = min(5000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500)
MOST = 1000  # connections of the port
LONGEST_S = 5.0  # for an honest request among attacks, on a busy machine
NAMES = 19_000  # topics of a request that is as long as may be
WAITS = (Key.JOIN_GROUP, Key.SYNC_GROUP)  # for the other members of a group
METADATA = {"topics": [{"name": "served"}], "allow_auto_topic_creation": False}


class Attacked:
    """A broker that wants tokens, whose clients must be quick."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        path = str(broker.root / "tokens")
        self.token = tokens.new(path, "client", ["produce", "consume"])
        self.admin = tokens.new(path, "admin")
        broker.env |= {"KMQ_TOKENS": path, "KMQ_LINE_DEADLINE": f"{DEADLINE_S:.0f}s"}
        assert broker.kmq("topics", "create", "served", "--partitions", "1000").returncode == 0
        broker.up()
        self.port = int((broker.pipes / "kafka.port").read_text())
        self.pid = broker.pids()["gateway"]

    def known(self, token: str = "") -> KafkaClient:
        """A connection that has shown a token."""
        client = KafkaClient(self.port)
        client.ask(Key.SASL_HANDSHAKE, 1, mechanism="PLAIN")
        shown = client.ask(Key.SASL_AUTHENTICATE, 2, auth_bytes=b"\0x\0" + (token or self.token).encode())
        assert shown.error_code == ErrorCode.none
        return client

    def resident(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def cut_off(self) -> int:
        return int(stats.peek(self.broker.instance).rows["gateway"].cut_off)

    def check(self) -> None:
        """The same gateway serves a new client, and no library has had to say anything."""
        with self.known() as client:
            assert_served(client)
        assert self.broker.pids()["gateway"] == self.pid
        assert "event=library" not in self.broker.log(), self.broker.log()[-3000:]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    made = Attacked(Broker(tmp_path_factory.mktemp("kafka-attacks") / "b"))
    yield made
    made.broker.close()


def assert_served(client: KafkaClient) -> None:
    begin = time.monotonic()
    assert len(client.ask(Key.METADATA, 9, **METADATA).topics[0].partitions) == 1000
    assert time.monotonic() - begin < LONGEST_S


# --- what is no request ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "event"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP was spoken"),
        (b"POST /api/topics HTTP/1.1\r\n\r\n", "HTTP was spoken"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP was spoken"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS was spoken"),
        (b"orders|1||a line\n", "a request of"),
        (b"!hello acks=1\n", "a request of"),
    ],
)
def test_another_protocol_is_turned_away_and_named(attacked, said, event):
    with KafkaClient(attacked.port) as client:
        client.say(said)
        assert client.is_over()
    attacked.broker.wait(lambda: event in attacked.broker.log(), event)
    attacked.check()


@pytest.mark.parametrize("length", [-1, -(1 << 31), 0, 7, 2 * MIB + 1, 32 * MIB + 1, (1 << 31) - 1])
def test_a_length_that_no_request_has_ends_the_connection_at_once(attacked, length):
    before = attacked.resident()
    for client in (KafkaClient(attacked.port), attacked.known()):
        with client:
            client.say(struct.pack(">ihhih", length, Key.METADATA, 9, 1, -1) + bytes(100))
            assert client.is_over()
    assert attacked.resident() - before < 8 * MIB


def test_requests_of_any_bytes_end_their_connection_alone(attacked):
    rng = random.Random(7)
    with attacked.known() as honest:
        for number in range(300):
            key = rng.choice([*Key])
            version = rng.randint(key.low, key.high)
            body = rng.randbytes(rng.choice([0, 3, 20, 300, 5000]))
            frame = struct.pack(">hhih", key, version, number, 1) + b"x\0"[: 1 + wire.is_flexible(key, version)] + body
            with attacked.known() as client:
                client.say(len(frame).to_bytes(4) + frame)
                client.sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while client.sock.recv(1 << 16):
                        pass
            if number % 50 == 0:
                assert_served(honest)
    attacked.check()


@pytest.mark.parametrize("key", [key for key in Key if key not in (Key.PRODUCE, Key.FETCH, *BEFORE)])
def test_requests_that_make_no_sense_are_answered(attacked, key):
    """Whole requests with fields of any kind: the gateway answers, or waits as a group does, and nothing breaks."""
    rng = random.Random(key)
    for version in range(key.low, key.high + 1):
        for _ in range(20):
            with attacked.known(attacked.admin) as client:
                client.sock.settimeout(0.3 if key in WAITS else PATIENCE_S)
                client.say(request(key, version, **made_up(rng, wire.request_class(key, version))))
                try:
                    client.response(key, version)
                except TimeoutError:
                    assert key in WAITS
                except ValueError as err:  # of kio, which does not know all errors
                    assert f"{wire.INVALID_REGULAR_EXPRESSION} is not a valid ErrorCode" in str(err)
    attacked.check()


# --- slow and greedy clients -----------------------------------------------------------------------------------------


def test_a_request_that_comes_byte_by_byte_is_cut_off_at_the_deadline(attacked):
    whole = request(Key.METADATA, 9, client="x" * 1000, **METADATA)
    with attacked.known() as client:
        begin = time.monotonic()
        for at in range(len(whole)):
            client.say(whole[at : at + 1])
            if select.select([client.sock], [], [], 0.1)[0]:
                break
        assert client.is_over()
        assert DEADLINE_S - 0.5 < time.monotonic() - begin < PATIENCE_S
    attacked.check()


def test_readers_that_do_not_read_cost_little_memory_and_are_cut_off(attacked):
    before, cut_off = attacked.resident(), attacked.cut_off()
    asked = request(Key.METADATA, 9, **METADATA)  # the answer is some 30 KB
    with contextlib.ExitStack() as stack, attacked.known() as honest:
        for _ in range(4):
            client = stack.enter_context(attacked.known())
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
            client.sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(2000):
                    client.sock.sendall(asked)
        while attacked.cut_off() < cut_off + 4:
            assert_served(honest)
        assert attacked.resident() - before < 48 * MIB
    attacked.check()


def test_large_requests_that_never_end_are_bounded_together(attacked):
    before = attacked.resident()
    head = struct.pack(">ihhih", 30 * MIB, Key.PRODUCE, 9, 1, -1)
    with contextlib.ExitStack() as stack, attacked.known() as honest:
        clients = [stack.enter_context(attacked.known()) for _ in range(12)]
        for client in clients:
            client.say(head + bytes(20 * MIB))
            assert attacked.resident() - before < 96 * MIB
        assert_served(honest)
    attacked.check()


def test_whole_large_requests_are_bounded_together(attacked):
    before = attacked.resident()
    size = 30 * MIB
    frame = struct.pack(">ihhih", size, Key.PRODUCE, 3, 1, -1) + b"\xff" * (size - 10)
    with contextlib.ExitStack() as stack, attacked.known() as honest:
        for _ in range(8):
            stack.enter_context(attacked.known()).say(frame)
            assert attacked.resident() - before < 192 * MIB
        assert_served(honest)
    attacked.check()


def test_long_lists_of_topics_do_not_hold_up_the_others(attacked):
    names = [{"name": f"none{number}"} for number in range(NAMES)]
    asked = request(Key.METADATA, 9, topics=names, allow_auto_topic_creation=False)
    with contextlib.ExitStack() as stack, attacked.known() as honest:
        clients = [stack.enter_context(attacked.known()) for _ in range(3)]
        for client in clients:
            client.say(asked)
        while clients:
            begin = time.monotonic()
            assert_served(honest)
            assert time.monotonic() - begin < 1.0
            for client in select.select([client.sock for client in clients], [], [], 0)[0]:
                answered = next(each for each in clients if each.sock is client)
                assert len(answered.response(Key.METADATA, 9).topics) == NAMES
                clients.remove(answered)
    attacked.check()


# --- many connections ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("said", [b"", b"\0\0\0", request(Key.API_VERSIONS, 0)], ids=["silent", "half", "polite"])
def test_thousands_of_strangers_keep_nobody_out(attacked, said):
    before = attacked.resident()
    with contextlib.ExitStack() as stack, attacked.known() as honest:
        for number in range(MANY):
            with contextlib.suppress(ConnectionError):
                stack.enter_context(KafkaClient(attacked.port)).say(said)
            if number % 500 == 499:
                assert_served(honest)
                attacked.check()
        assert attacked.resident() - before < MOST * 64 * KIB + 16 * MIB
    attacked.check()
