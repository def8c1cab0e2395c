"""Strangers at the ports of a pod (attacks_ports.py): small in every run, full size with `make soak`."""

import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from brokers import Broker
from certificates import Authority

from chaos import attacks_ports as attacks
from chaos.pod import STAGES, Pod
from kmq.access import tokens
from kmq.broker import stats

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

Make = Callable[..., Pod]
Up = Callable[..., Broker]


def started(pod: Pod, descriptors: int = 1024) -> Pod:
    """All stages, ingress with so many descriptors."""
    pod.start(*STAGES[1:])
    pod.start("ingress", under=("prlimit", f"--nofile={descriptors}:{descriptors}"))
    pod.wait_ready()
    return pod


def test_silent_askers_shut_out_nobody(make_pod: Make) -> None:
    pod = started(make_pod(), descriptors=160)
    attacks.silent_askers(pod, 200)
    pod.wait(lambda: (row := pod.row("ingress")) is not None and row.turned_away >= 180, "they are turned away")
    pod.wait(lambda: pod.events("asker_evicted"), "a word in the log")


def test_askers_that_ask_nothing_are_cut_off_at_the_line_deadline(make_pod: Make) -> None:
    pod = started(make_pod(KMQ_LINE_DEADLINE="1s"))
    with attacks.connect(pod, "ack") as silent, attacks.connect(pod, "ack") as unfinished:
        unfinished.sendall(b"GET_A")
        assert silent.recv(1) == unfinished.recv(1) == b""
    pod.wait(lambda: (row := pod.row("ingress")) is not None and (row.cut_off, row.askers) == (2, 0), "both are gone")


def test_the_ack_port_answers_only_who_shows_a_token(make_pod: Make) -> None:
    pod = make_pod()
    pod.settings["KMQ_TOKENS"] = pod.root / "tokens"
    token = tokens.new(str(pod.root / "tokens"), "asker")
    started(pod)
    seq = attacks.produce(pod, token)
    assert attacks.ask(pod, b"GET_ACK %d token=%b" % (seq, token.encode())) == b"ACK\n"
    for question in (b"GET_ACK %d" % seq, b"GET_ACK %d token=asker.wrong" % seq):
        assert attacks.ask(pod, question).startswith(b"ERR unauthorized")
    row = pod.row("ingress")
    assert row is not None and row.unauthorized == 2
    assert token not in pod.log()


def test_replies_that_nobody_reads_take_little_memory(make_pod: Make) -> None:
    attacks.unread_refusals(started(make_pod()), 6, most=16 * attacks.MIB)


def test_malformed_requests_leave_one_short_log_line_a_sweep(make_pod: Make) -> None:
    attacks.malformed_lines(started(make_pod()), 30)


# --- the gateway -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gateway(new_broker: Up) -> Up:
    """A broker with its gateway; gateway(KMQ_LINE_DEADLINE="2s")."""

    def up(**settings: object) -> Broker:
        broker: Broker = new_broker()
        broker.env |= {name: str(value) for name, value in settings.items()}
        broker.up()
        return broker

    return up


@pytest.fixture(scope="module")
def gateway_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with its gateway for several tests, which count nothing."""
    broker = Broker(tmp_path_factory.mktemp("gateway") / "broker")
    try:
        broker.up()
        yield broker
    finally:
        broker.close()


@pytest.fixture
def tls(authority: Authority) -> dict[str, object]:
    """Settings for TLS on ports of the gateway's choice."""
    cert, key = authority.issue("server")
    ports = dict.fromkeys(("KMQ_TLS_PORT", "KMQ_HTTPS_PORT", "KMQ_GRPCS_PORT", "KMQ_EGRESS_TLS_PORT"), 0)
    return {"KMQ_TLS_HOST": "127.0.0.1", "KMQ_TLS_CERT": cert, "KMQ_TLS_KEY": key} | ports


def row(broker: Broker) -> stats.Row:
    page = stats.peek(broker.instance)
    assert page is not None
    return page.rows["gateway"]


def test_handshakes_that_are_never_made_shut_out_nobody(gateway: Up, tls: dict[str, object]) -> None:
    broker = gateway(**tls)
    begin = attacks.memory(broker, "gateway")
    attacks.silent_handshakes(broker, 300, begin + 60 * attacks.MIB)
    broker.wait(lambda: row(broker).turned_away > 0, "they are turned away")


def test_handshakes_that_are_never_made_end_at_the_line_deadline(gateway: Up, tls: dict[str, object]) -> None:
    broker = gateway(KMQ_LINE_DEADLINE="1s", **tls)
    with attacks.connect(broker, "https") as silent:
        assert silent.recv(1) == b""
    broker.wait(lambda: row(broker).cut_off == 1, "it is counted")


def test_requests_that_are_never_finished_shut_out_nobody(gateway: Up, tls: dict[str, object]) -> None:
    broker = gateway(KMQ_CONNECTIONS=20, **tls)
    begin = attacks.memory(broker, "gateway")
    attacks.idle_requests(broker, 200, begin + 40 * attacks.MIB)
    broker.wait(lambda: row(broker).turned_away >= 150, "they are turned away")


def test_malformed_requests_to_the_gateway_leave_one_short_log_line_a_sweep(gateway: Up) -> None:
    attacks.malformed_requests(gateway(), 30)


def test_calls_of_bystanders_shut_out_nobody(gateway: Up) -> None:
    broker = gateway()
    begin = attacks.memory(broker, "gateway")
    for least, path in ((150, attacks.WATCH), (300, attacks.REFLECT)):
        are_refused = partial(lambda least: row(broker).turned_away >= least, least)
        attacks.bystanders(broker, path, 200, begin + 40 * attacks.MIB, are_refused)
    broker.wait(lambda: row(broker).turned_away >= 300, "they are turned away")


@pytest.mark.parametrize("path", [attacks.WATCH, attacks.REFLECT])
def test_bystanders_that_read_nothing_are_closed_when_newer_ones_come(gateway_up: Broker, path: str) -> None:
    with attacks.http2(gateway_up, 0) as silent:
        first = silent.call(path, request=attacks.framed(b""))
        silent.hear_of(first)  # it is older than those that come now
        attacks.bystanders(gateway_up, path, 40, 256 * attacks.MIB)
        with pytest.raises(ConnectionError):
            silent.status(first)


def test_grpc_connections_without_a_call_shut_out_nobody(gateway: Up) -> None:
    broker = gateway(KMQ_CONNECTIONS=40)
    begin = attacks.memory(broker, "gateway")
    attacks.silent_connections(broker, 200, begin + 40 * attacks.MIB)
    broker.wait(lambda: row(broker).turned_away >= 150, "they are turned away")


def test_with_tokens_only_a_health_check_needs_none(gateway: Up, tmp_path: Path) -> None:
    tokens.new(str(tmp_path / "tokens"), "x")
    broker = gateway(KMQ_TOKENS=tmp_path / "tokens")
    assert attacks.called(broker, attacks.CHECK, b"") == 0
    for path in (attacks.WATCH, attacks.REFLECT, attacks.PRODUCE):
        assert attacks.called(broker, path, b"") == 16
    assert row(broker).unauthorized == 3


def test_streams_that_nobody_reads_give_way(gateway: Up) -> None:
    broker = gateway()
    begin = attacks.memory(broker, "gateway")
    attacks.unread_streams(broker, 60, most=begin + 120 * attacks.MIB)
    broker.wait(lambda: row(broker).turned_away > 0, "they are turned away")


def test_calls_that_are_never_finished_give_way(gateway: Up) -> None:
    broker = gateway()
    begin = attacks.memory(broker, "gateway")
    attacks.unfinished_calls(broker, 150, most=begin + 110 * attacks.MIB)
    broker.wait(lambda: row(broker).turned_away > 0, "they are turned away")


def test_calls_that_are_never_finished_end_at_the_line_deadline(gateway: Up) -> None:
    broker = gateway(KMQ_LINE_DEADLINE="1s")
    with attacks.http2(broker) as peer:
        peer.call(attacks.PRODUCE, request=attacks.framed(b"x" * 10, announced=1000))
        with pytest.raises(ConnectionError):
            peer.status(1)
    broker.wait(lambda: row(broker).cut_off == 1, "it is counted")


def test_answers_that_nobody_reads_give_way_and_their_memory_comes_back(gateway: Up) -> None:
    broker = gateway()
    attacks.unread_answers(broker, 60)
    broker.wait(lambda: row(broker).turned_away > 0, "they are turned away")


def test_lines_that_nobody_reads_cost_socket_buffers_and_nothing_else(gateway: Up) -> None:
    attacks.unread_lines(gateway(), 120, most=48 * attacks.MIB)


def test_a_call_that_waits_for_messages_makes_room_for_a_newcomer(gateway: Up) -> None:
    """All connections wait: who comes now is served, and who has waited longest is answered, without messages."""
    broker = gateway(KMQ_CONNECTIONS=20)
    attacks.produce(broker)
    broker.wait_routed(1)
    poll = b"GET /api/topics/test/consume?from=latest&timeoutMs=60000 HTTP/1.1\r\nHost: kmq\r\n\r\n"
    with ExitStack() as opened:
        polls = [opened.enter_context(attacks.connect(broker, "http")) for _ in range(20)]
        for sock in polls:  # each has been served before, or a newcomer would evict one that has not asked yet
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: kmq\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
            sock.sendall(poll)
        broker.wait(lambda: attacks.healthy(broker), "a newcomer is served")
        answered = select.select(polls, [], [], attacks.PATIENCE_S)[0]
        assert len(answered) < 20 and answered[0].recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        left = [sock for sock in polls if sock not in answered]
        attacks.produce(broker)
        assert left[-1].recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


def test_the_257th_call_that_waits_is_as_good_as_the_first(gateway: Up) -> None:
    broker = gateway()
    attacks.produce(broker)
    broker.wait_routed(1)
    poll = b"GET /api/topics/test/consume?from=latest&timeoutMs=60000 HTTP/1.1\r\nHost: kmq\r\n\r\n"
    with attacks.attack(broker) as opened:
        polls = [opened.enter_context(attacks.connect(broker, "http")) for _ in range(300)]
        for sock in polls:
            sock.sendall(poll)
        assert attacks.healthy(broker) and not select.select(polls[256:], [], [], 0)[0]
        while polls:  # one that is served late waits for the next message
            attacks.produce(broker)
            for sock in select.select(polls, [], [], 0.05)[0]:
                answer = b""
                while b'"offset":' not in answer:  # which may come in pieces
                    piece = sock.recv(1 << 16)
                    assert piece, answer
                    answer += piece
                polls.remove(sock)


def test_a_follower_that_died_while_it_waited_gives_its_place_back(gateway: Up) -> None:
    broker = gateway(KMQ_CONNECTIONS=20)
    attacks.produce(broker)
    broker.wait_routed(1)
    for _ in range(3):  # each time all of them are killed, and come again
        with ExitStack() as opened:
            for _ in range(20):
                sock = opened.enter_context(attacks.connect(broker, "egress"))
                sock.sendall(b"ASSIGN test/0@0\n!fetch 1000\n")
                assert attacks.line_of(sock).startswith(b"!assign") and attacks.line_of(sock).startswith(
                    b"!batch test/0"
                )
                sock.recv(1 << 16)
                sock.sendall(b"!fetch 1000 wait=60000\n")


# --- full size -------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_soak_strangers_at_the_ports_of_ingress(make_pod: Make) -> None:
    pod = started(make_pod())
    attacks.silent_askers(pod)
    attacks.unread_refusals(pod)
    attacks.malformed_lines(pod)
    attacks.silent_askers(pod)


@pytest.mark.soak
def test_soak_strangers_at_the_http_ports(gateway: Up, tls: dict[str, object]) -> None:
    broker = gateway(**tls)
    attacks.silent_handshakes(broker)
    attacks.idle_requests(broker)
    attacks.malformed_requests(broker)
    attacks.silent_handshakes(broker)
    attacks.unread_answers(broker)
    attacks.unread_lines(broker)


@pytest.mark.soak
def test_soak_strangers_at_the_grpc_port(gateway: Up) -> None:
    broker = gateway()
    attacks.silent_connections(broker)
    attacks.bystanders(broker)
    attacks.bystanders(broker, attacks.REFLECT)
    for path in (attacks.WATCH, attacks.REFLECT):
        attacks.bystanders(broker, path, window=0)
    attacks.unfinished_calls(broker)
    attacks.unread_streams(broker)
    attacks.unread_streams(broker, window=attacks.WIDE)
    attacks.malformed_requests(broker)
