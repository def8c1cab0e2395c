"""Raw lines into a real broker: what is stored of them over kills, who may send them, what is said and counted."""

import contextlib
import http.client
import json
import logging.handlers
import os
import re
import select
import signal
import socket
import ssl
import threading
from base64 import b64decode

import pytest

from kmq.access import tokens


@pytest.fixture
def raw(broker):
    """A function that brings the broker up with these intakes, without a gateway."""

    def up(intakes, **settings):
        broker.gateway = False
        broker.env |= {"KMQ_INTAKES": intakes} | {name: str(value) for name, value in settings.items()}
        broker.up()
        return broker

    return up


def port_of(broker, at=1):
    return int((broker.pipes / f"intake{at}.port").read_text())


def ship(broker, data, at=1):
    """Send all of it; returns when the broker has taken it."""
    with socket.create_connection(("127.0.0.1", port_of(broker, at)), timeout=60) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""  # in order, and without a word


def payloads(broker, topic):
    """What a reader gets, in order."""
    found = []
    text = b"".join(path.read_bytes() for path in sorted((broker.data / "topics" / topic).glob("*/*.log")))
    for line in text[: text.rfind(b"\n") + 1].split(b"\n")[:-1]:
        id, payload = line.split(b"|", 5)[4:]
        found.append(b64decode(payload) if b";enc=b64" in id else payload)
    return found


def counted(broker, at=1):
    """The counters of an intake, as `kmq status` has them."""
    shown = broker.kmq("status", "--json")
    return json.loads(shown.stdout)["intakes"][at - 1]


def test_raw_lines_are_stored_byte_for_byte_under_their_own_topic(raw):
    broker = raw("0=app 0=app.web")
    lines = [b"!hello acks=1", b"other|1|2|3", b"", b"a\0b", b"\xff\xfe\r", b"+5", b"__kmq|||x", b"plain"]
    ship(broker, b"".join(line + b"\n" for line in lines))
    ship(broker, b"of the web\n", at=2)
    broker.wait_routed(len(lines) + 1)
    assert payloads(broker, "app") == lines and payloads(broker, "app.web") == [b"of the web"]
    assert sorted(path.name for path in (broker.data / "topics").iterdir() if path.is_dir()) == ["app", "app.web"]
    broker.wait(lambda: counted(broker)["lines"] == len(lines), "the lines counted")
    assert counted(broker) | {"port": 0} == {
        "port": 0,
        "kind": "tcp",
        "topic": "app",
        "lines": len(lines),
        "bytes": sum(map(len, lines)) + len(lines),
        "connections": 0,
        "dropped": 0,
        "refused": 0,
    }
    shown = broker.kmq("status").stdout
    assert re.search(rf"intake {port_of(broker)}/tcp -> app +lines: 8", shown)


def is_back(broker, stage):
    shown = broker.status()[stage]
    return shown["restarts"] == "1" and shown["state"] == "ready"


@pytest.mark.parametrize("victim", ["ingress", "framer"])
def test_of_each_connection_a_prefix_survives_whoever_is_killed_in_the_middle(raw, victim):
    broker = raw("0=app")
    senders, sent = 4, [0] * 4
    stop = threading.Event()

    def send(who):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port_of(broker)), timeout=60) as sock:
            n = 0
            while not stop.wait(0.01):  # so that what is stored can be read again in a test
                sock.sendall(b"".join(b"%d %d |!| %b\n" % (who, n + i, b"x" * (n % 97)) for i in range(50)))
                n += 50
                sent[who] = n

    threads = [threading.Thread(target=send, args=(who,)) for who in range(senders)]
    for thread in threads:
        thread.start()
    try:
        broker.wait(lambda: all(n > 2000 for n in sent), "load on every connection")
        broker.kill(victim)
        broker.wait(lambda: is_back(broker, victim), f"{victim} back")
        if victim == "framer":
            before = list(sent)
            broker.wait(lambda: all(n > old for n, old in zip(sent, before, strict=True)), "lines after the kill")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    ship(broker, b"last\n")
    broker.wait(lambda: broker.lines("app")[-1].endswith(b"|last"), "the last line")
    assert set(broker.lines("dead")) == set()
    found = [re.fullmatch(rb"(\d) (\d+) \|!\| (x*)", line) for line in payloads(broker, "app")[:-1]]
    assert all(match and len(match[3]) == int(match[2]) // 50 * 50 % 97 for match in found)
    for who in range(senders):
        numbers = [int(match[2]) for match in found if int(match[1]) == who]
        assert numbers == list(range(len(numbers)))  # each once, in order, none left out before the last
        assert victim == "ingress" or len(numbers) >= sent[who]


def test_a_long_line_leaves_its_beginning_and_says_whose_it_was(raw):
    broker = raw("0=app", KMQ_MAX_LINE="64 KiB")
    ship(broker, b"before\n" + b"y" * (1 << 20) + b"\nafter\nwithout end")
    broker.wait_routed(4)
    assert payloads(broker, "app") == [b"before", b"after"]
    too_long, cut = broker.lines("dead")
    assert b";reason=too_long;len=1048576;topic=app|" + b"y" * 60000 in too_long and len(too_long) < 66_000
    assert cut.endswith(b"|dead.malformed||;reason=no_newline;len=11;topic=app|without end")


def test_where_json_is_wanted_any_other_line_is_a_dead_letter(raw):
    broker = raw("0=audit:json 0/udp=net:json")
    ship(broker, b'{"user": 17}\n{"user": 17\n\n"end"\n')
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.sendto(b'{"a":1}\nplain', ("127.0.0.1", port_of(broker, 2)))
    broker.wait_routed(6)
    assert payloads(broker, "audit") == [b'{"user": 17}', b'"end"'] and payloads(broker, "net") == [b'{"a":1}']
    letters = [line.split(b"||")[1] for line in broker.lines("dead")]
    assert sorted(letters) == [
        b";reason=not_json;len=0;topic=audit|",
        b";reason=not_json;len=11;topic=audit|" + b'{"user": 17',
        b";reason=not_json;len=5;topic=net|plain",
    ]


def test_over_tls_and_by_certificate_where_tokens_are_needed(raw, authority, tmp_path):
    cert, key = map(str, authority.issue("server"))
    tokens.new(str(tmp_path / "tokens"), "somebody")
    broker = raw(
        "0/tls=audit",
        KMQ_TLS_CERT=cert,
        KMQ_TLS_KEY=key,
        KMQ_TLS_CLIENT_CA=authority.path,
        KMQ_TLS_HOST="127.0.0.1",
        KMQ_TLS_PORT="0",
        KMQ_TOKENS=tmp_path / "tokens",
    )
    context = ssl.create_default_context(cafile=authority.path)

    def send(data):
        """Return what the broker does after all of it: b"" for an end in order. Raises OSError for any other end."""
        with (
            socket.create_connection(("127.0.0.1", port_of(broker)), timeout=60) as sock,
            context.wrap_socket(sock, server_hostname="localhost", suppress_ragged_eofs=False) as secure,
        ):
            secure.sendall(data)
            secure.setblocking(False)
            with contextlib.suppress(ssl.SSLWantReadError):
                secure.unwrap()
                return b""  # the broker has ended it already
            secure.settimeout(60)
            with contextlib.suppress(ssl.SSLZeroReturnError):
                return secure.read(1)
        return b""

    with contextlib.suppress(OSError):  # TLS 1.3 refuses a certificate only after the handshake of the client
        send(b"from a stranger\n")
    broker.wait(lambda: "event=tls_failed" in broker.log(), "a log line")
    context.load_cert_chain(*authority.issue("client"))
    assert send(b"!first\nsecond\n") == b""
    broker.wait_routed(2)
    assert payloads(broker, "audit") == [b"!first", b"second"]


def test_an_address_that_is_not_listed_is_closed_and_counted(raw):
    broker = raw("0=app 0/udp=net", KMQ_INTAKES_FROM="10.0.0.0/8")
    with (
        contextlib.suppress(ConnectionError),  # reset, if need be before the call that connects has returned
        socket.create_connection(("127.0.0.1", port_of(broker)), timeout=60) as sock,
    ):
        assert sock.recv(1) == b""
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.sendto(b"hello\n", ("127.0.0.1", port_of(broker, 2)))
    broker.wait(lambda: [counted(broker, at)["refused"] for at in (1, 2)] == [1, 1], "both counted")
    assert not broker.wal() and counted(broker)["lines"] == 0
    broker.wait(lambda: "event=intake_refused" in broker.log(), "a log line")


def test_connections_to_intakes_leave_half_of_all_to_producers(raw):
    broker = raw("0=app 0=net", KMQ_CONNECTIONS=20)
    with contextlib.ExitStack() as opened:
        silent = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port_of(broker, 1 + n % 2)))) for n in range(30)
        ]
        broker.wait(lambda: broker.status()["ingress"]["connections"] in ("10", "20"), "they are taken")
        done = broker.kmq("produce", "orders", "--acks", "--timeout", "20", "-m", "x")
        assert (done.returncode, done.stdout) == (0, "stored 1, last seq 1\n"), done.stderr
        broker.wait(lambda: "event=connection_refused" in broker.log(), "a word in the log")
        assert 'reason="10 are open at the intakes already (half of KMQ_CONNECTIONS, ulimit -n)"' in broker.log()
        broker.wait(lambda: len(select.select(silent, [], [], 0)[0]) == 20, "the others are closed")
        over = select.select(silent, [], [], 0)[0]
        next(sock for sock in silent if sock not in over).sendall(b"a line\n")
        broker.wait_routed(2)
    broker.wait(lambda: broker.status()["ingress"]["connections"] == "0", "they have gone")
    ship(broker, b"another\n")
    broker.wait_routed(3)


def test_datagrams_that_nobody_reads_are_counted_and_the_rest_is_whole(raw):
    broker = raw("0/udp=net")
    ingress = broker.pids()["ingress"]
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", port_of(broker)))
        os.kill(ingress, signal.SIGSTOP)
        try:
            count = 20_000
            for n in range(count):
                sock.send(b"<13>%06d %b" % (n, b"z" * 1000))
        finally:
            os.kill(ingress, signal.SIGCONT)
    broker.wait(lambda: counted(broker)["lines"] + counted(broker)["dropped"] == count, "each taken or dropped")
    found = counted(broker)
    assert 0 < found["lines"] < count
    broker.wait_routed(found["lines"])
    numbers = [int(re.fullmatch(rb"<13>(\d{6}) z{1000}", line)[1]) for line in payloads(broker, "net")]
    assert numbers == sorted(set(numbers)) and len(numbers) == found["lines"]


@pytest.mark.parametrize(
    ("intakes", "settings", "said"),
    [
        ("0=__consumer_offsets", {}, "reserved"),
        ("0=no/topic", {}, "no topic name"),
        ("5140=a 5140=b", {}, "port 5140 is that of 5140=a too"),
        ("5674=a", {"KMQ_EGRESS_PORT": "5674"}, "port 5674 is KMQ_EGRESS_PORT too"),
        ("0/tls=a", {}, "KMQ_TLS_CERT"),
        ("0=a", {"KMQ_TOKENS": "tokens"}, "KMQ_INTAKES_FROM"),
        ("0=a:xml", {}, "write :json"),
        ("0=a", {"KMQ_INTAKES_FROM": "here"}, "entry 1: expected an address or a network"),
        ("0=unknown", {"KMQ_AUTO_CREATE_TOPICS": "off"}, "kmq topics create unknown"),
    ],
)
def test_an_intake_that_cannot_be_is_named_and_the_broker_does_not_start(broker, intakes, settings, said):
    result = broker.kmq("up", "--no-gateway", KMQ_INTAKES=intakes, **settings)
    assert result.returncode == 78 and said in result.stderr and "KMQ_INTAKES" in result.stderr, result.stderr


@pytest.mark.parametrize(("kind", "suffix"), [(socket.SOCK_STREAM, ""), (socket.SOCK_DGRAM, "/udp")])
def test_a_port_that_is_taken_is_named(broker, kind, suffix):
    with socket.socket(type=kind) as other:
        other.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            other.listen()
        entry = f"{other.getsockname()[1]}{suffix}=app"
        result = broker.kmq("up", "--no-gateway", KMQ_INTAKES=entry)
    assert result.returncode == 78 and f"KMQ_INTAKES: {entry}" in result.stderr, result.stderr
    assert "Address already in use" in result.stderr


def test_the_metrics_have_each_intake(broker):
    broker.env["KMQ_INTAKES"] = "0=app"
    broker.gateway = True
    broker.up()
    ship(broker, b"one\ntwo\n")
    labels = f'{{kind="tcp",port="{port_of(broker)}",topic="app"}}'

    def has_both():
        return f"kmq_intake_lines_total{labels} 2.0" in broker.get("/metrics")[1]

    broker.wait(has_both, "both lines in the metrics")
    assert f"kmq_intake_bytes_total{labels} 8.0" in broker.get("/metrics")[1]


# --- what programs send, and what no program of ours sends -----------------------------------------------------------


def test_python_s_handlers_of_syslog_and_octet_counts_need_no_option(raw):
    broker = raw("0=tcp 0/udp=udp 0=counted")
    for at, kind in ((1, socket.SOCK_STREAM), (2, socket.SOCK_DGRAM)):
        handler = logging.handlers.SysLogHandler(("127.0.0.1", port_of(broker, at)), socktype=kind)
        for text in ("one", "two\nlines", "three"):
            handler.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO, "levelname": "INFO"}))
        broker.wait(lambda at=at: counted(broker, at)["lines"] >= 3, "the messages, while the connection is open")
        handler.close()
    ship(broker, b"7 <13>one9 <13>two\n\xff", at=3)
    broker.wait_routed(9)
    assert payloads(broker, "tcp") == [b"<14>one", b"<14>two\nlines", b"<14>three"]
    assert payloads(broker, "udp") == [b"<14>one", b"<14>two", b"lines", b"<14>three"]
    assert payloads(broker, "counted") == [b"<13>one", b"<13>two\n\xff"]
    assert broker.lines("dead") == []


def test_http_and_tls_on_a_port_of_lines_end_with_an_answer_and_nothing_is_stored(broker):
    broker.env |= {"KMQ_INTAKES": "0=app"}
    broker.gateway = True
    broker.up()
    names = ("ingress", "intake1", "ack", "egress", "status")
    ports = {name: int((broker.pipes / f"{name}.port").read_text()) for name in names}
    body = b"app|||forged\n" * 20_000
    for name, port in ports.items():
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nCookie: secret\r\nContent-Length: %d\r\n\r\n" % len(body))
                sock.sendall(body)
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            text = answer.read().decode()
        assert answer.status == 400 and "not HTTP. HTTP is on " in text and "KMQ_HTTP_PORT" in text, name
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as sock,
            pytest.raises(ssl.SSLError, match="alert"),
        ):
            ssl._create_unverified_context().wrap_socket(sock)
    ship(broker, b"after\n")
    with socket.create_connection(("127.0.0.1", ports["ingress"]), timeout=60) as sock:
        sock.sendall(b"GET|||a topic of this name\n")
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    broker.wait_routed(2)
    assert payloads(broker, "app") == [b"after"] and len(broker.wal()) == 2
    for stage in ("ingress", "gateway"):
        said = rf"stage={stage} event=cut_off .*port of lines"
        broker.wait(lambda said=said: re.search(said, broker.log()), said)
        assert len(re.findall(said, broker.log())) <= 10
    assert "secret" not in broker.log()
