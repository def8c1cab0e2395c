"""Producers over TLS and with tokens, deadlines and caps: a real broker, real certificates, clients of the standard library."""

import contextlib
import http.client
import itertools
import os
import re
import shutil
import signal
import socket
import ssl
import threading
import time
import traceback
from math import inf

import grpc
import pytest
from certificates import Authority
from chaos import attacks_ports

from kmq.gateway.http.server import STATIC

PATIENCE_S = 60.0
DEADLINE = "4s"  # of what is cut off; on a busy machine a handshake takes a second


@pytest.fixture
def files(authority, tmp_path):
    """The server's certificate and key, in files of the test's own."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path, source in zip((cert, key), authority.issue("server"), strict=True):
        shutil.copy(source, path)
    return cert, key


@pytest.fixture
def secured(broker, authority, files):
    """A function that brings the broker up with TLS and further settings; with the gateway where it is asked."""
    broker.env |= {
        "KMQ_TLS_HOST": "127.0.0.1",
        "KMQ_TLS_PORT": "0",
        "KMQ_HTTPS_PORT": "0",
        "KMQ_GRPCS_PORT": "0",
        "KMQ_EGRESS_TLS_PORT": "0",
        "KMQ_TLS_CERT": str(files[0]),
        "KMQ_TLS_KEY": str(files[1]),
    }
    broker.trust = ssl.create_default_context(cafile=authority.path)

    def up(gateway=False, **settings):
        broker.env |= {name: str(value) for name, value in settings.items()}
        broker.gateway = gateway
        broker.up()
        return broker

    return up


def port_of(broker, name):
    return int((broker.pipes / f"{name}.port").read_text())


def plain(broker):
    return socket.create_connection(("127.0.0.1", port_of(broker, "ingress")), timeout=PATIENCE_S)


def secure(broker, context=None):
    """A TLS connection that takes a missing close_notify for what it is."""
    sock = socket.create_connection(("127.0.0.1", port_of(broker, "tls")), timeout=PATIENCE_S)
    try:
        context = context or broker.trust
        return context.wrap_socket(sock, server_hostname="localhost", suppress_ragged_eofs=False)
    except OSError as error:
        sock.close()
        for frame, _ in traceback.walk_tb(error.__traceback__):  # after a reset the library forgets its own socket
            if isinstance(leaked := frame.f_locals.get("self"), ssl.SSLSocket):
                leaked.close()
        raise


def end(sock):
    """Nothing more to send; returns when the broker has ended the connection in order, with what it said until then."""
    said = b""
    if isinstance(sock, ssl.SSLSocket):
        sock.setblocking(False)
        try:
            sock.unwrap()  # both sides have said close_notify
        except ssl.SSLWantReadError:
            sock.settimeout(PATIENCE_S)
            with contextlib.suppress(ssl.SSLZeroReturnError):  # the same
                while data := sock.read(65536):
                    said += data
    else:
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(65536):
            said += data
    sock.close()
    return said


def half_closed(broker, data):
    """Send all of it and our end, then listen until the broker's: ssl's own sockets take no data after their close_notify."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = broker.trust.wrap_bio(incoming, outgoing, server_hostname="localhost")
    said = b""
    with socket.create_connection(("127.0.0.1", port_of(broker, "tls")), timeout=PATIENCE_S) as sock:

        def finish(step, *arguments):
            while True:
                try:
                    return step(*arguments)
                except ssl.SSLWantReadError:
                    sock.sendall(outgoing.read())
                    received = sock.recv(65536)
                    incoming.write(received) if received else incoming.write_eof()

        finish(tls.do_handshake)
        tls.write(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.unwrap()
        with contextlib.suppress(ssl.SSLZeroReturnError):  # the broker's close_notify
            while True:
                said += finish(tls.read, 65536)
    return said


def reply(sock):
    """One line from the broker."""
    line = b""
    while not line.endswith(b"\n"):
        data = sock.recv(1)
        assert data, line
        line += data
    return line


def greet(sock, words):
    sock.sendall(b"!hello " + words.encode() + b"\n")
    return reply(sock)


def assert_broken(sock):
    """Within the time that is left the connection ends, and not in order."""
    with pytest.raises((ConnectionError, ssl.SSLEOFError)), sock:
        while sock.recv(65536):
            pass


def lines_of(name, count, size=100):
    return [b"test.%b|1|%d|%b" % (name, n, b"x" * size) for n in range(count)]


def payload_lines(broker, name):
    """What the broker has stored of test.<name>, as it was sent."""
    stored = [line.split(b"|", 2)[2] for line in broker.lines("test")]
    return [line for line in stored if line.startswith(b"test.%b|" % name)]


def logged(broker, event):
    """How often the log says that this has happened; it says so once a second."""
    return sum(map(int, re.findall(rf"event={event} count=(\d+)", broker.log())))


def at_once(*jobs):
    """Run all of them in threads; what any of them raises is raised."""
    failed = []

    def run(job):
        try:
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


# --- TLS -------------------------------------------------------------------------------------------------------------


def test_plain_and_tls_producers_at_once_each_keep_their_order(secured):
    broker = secured()
    sent = {name: lines_of(name, 20_000) for name in (b"p1", b"p2", b"t1", b"t2")}

    def produce(name):
        sock = secure(broker) if name.startswith(b"t") else plain(broker)
        sock.sendall(b"".join(line + b"\n" for line in sent[name]))
        assert end(sock) == b""

    at_once(*(lambda name=name: produce(name) for name in sent))
    broker.wait_routed(80_000)
    assert all(payload_lines(broker, name) == lines for name, lines in sent.items())


def test_acked_messages_of_any_length_over_tls(secured):
    broker = secured()
    sizes = [10, 1_000_000, 0, 70_000, 16_384, 5000, 1 << 20]
    lines = [b"test.k|1|%d|%b" % (n, b"x" * size) for n, size in enumerate(sizes, 1)]
    said = half_closed(broker, b"!hello acks=1 producer=me\n" + b"".join(line + b"\n" for line in lines))
    first, *replies = said.decode().splitlines()
    assert first == "!ok max_line=1048576"
    assert replies[-1] == "!err 7 too_long" and replies[-2].startswith("!ack 6 "), replies
    broker.wait_routed(6)
    stored = [line.split(b"|", 5) for line in broker.lines("test")]
    assert [len(fields[5]) for fields in stored] == sizes[:-1]


def test_an_unfinished_line_at_the_end_of_a_tls_connection_is_not_lost_unsaid(secured):
    broker = secured()
    sock = secure(broker)
    sock.sendall(b"test.k|1|1|whole\ntest.k|1|2|unfin")
    assert end(sock) == b""
    broker.wait_routed(2)
    assert b"reason=no_newline" in broker.lines("dead")[0]


def test_the_python_producer_over_tls_and_with_a_token(secured, tmp_path):
    from kmq import Producer

    broker = secured(**token_file(tmp_path))
    with Producer("localhost", port_of(broker, "tls"), tls=broker.trust, token=token(tmp_path)) as producer:
        assert producer.send("test", b"hello", key="k").result(PATIENCE_S) == 1


def test_who_does_not_do_the_handshake_is_cut_off_and_holds_up_nobody(secured):
    broker = secured(KMQ_LINE_DEADLINE=DEADLINE)
    silent = socket.create_connection(("127.0.0.1", port_of(broker, "tls")), timeout=PATIENCE_S)
    slow = socket.create_connection(("127.0.0.1", port_of(broker, "tls")), timeout=PATIENCE_S)
    slow.sendall(b"\x16\x03\x01\x02\x00\x01")  # the begin of a ClientHello
    patient = secure(broker)  # done with its handshake, it may be silent
    other = secure(broker)
    other.sendall(b"test.k|1|1|x\n")
    assert end(other) == b""
    for sock in (silent, slow):
        with sock, contextlib.suppress(ConnectionError):
            assert sock.recv(100) == b""
    patient.sendall(b"test.k|1|2|y\n")
    assert end(patient) == b""
    broker.wait_routed(2)
    broker.wait(lambda: logged(broker, "cut_off") == 2, "a word in the log")


def test_garbage_on_the_tls_port_ends_there_and_the_log_says_why(secured):
    broker = secured()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"test.probe|1|1|x\n", bytes(5000)):
        with socket.create_connection(("127.0.0.1", port_of(broker, "tls")), timeout=PATIENCE_S) as sock:
            sock.sendall(garbage)
            with contextlib.suppress(ConnectionError):
                while sock.recv(100):  # an alert
                    pass
    broker.wait(lambda: "event=tls_failed" in broker.log(), "a word in the log")
    other = secure(broker)
    other.sendall(b"test.k|1|1|x\n")
    assert end(other) == b""
    broker.wait_routed(1)
    assert len(broker.wal()) == 1


def test_certificates_are_renewed_under_load_and_nobody_notices(secured, authority, files):
    broker = secured()
    stop = threading.Event()
    seen, sent = set(), {b"long": 0, b"short": 0}

    def one_long_connection():
        sock = secure(broker)
        while not stop.is_set():
            sock.sendall(b"test.long|1|%d|x\n" % sent[b"long"] * 20)
            sent[b"long"] += 1
            time.sleep(0.001)
        assert end(sock) == b""

    def many_short_ones():
        while not stop.is_set():
            sock = secure(broker)
            seen.add(dict(pair[0] for pair in sock.getpeercert()["subject"])["commonName"])
            sock.sendall(b"test.short|1|%d|x\n" % sent[b"short"])
            assert end(sock) == b""
            sent[b"short"] += 1

    def renew():
        try:
            broker.wait(lambda: "server" in seen, "the first certificate in use")
            for name in ("server-2", "server-3"):
                for path, source in zip(files, authority.issue(name), strict=True):
                    shutil.copy(source, f"{path}.new")
                    os.rename(f"{path}.new", path)
                broker.wait(lambda name=name: name in seen, f"{name} in use")
        finally:
            stop.set()

    at_once(one_long_connection, many_short_ones, renew)
    broker.wait_routed(20 * sent[b"long"] + sent[b"short"])
    assert seen == {"server", "server-2", "server-3"}
    assert len(payload_lines(broker, b"long")) == 20 * sent[b"long"]
    assert payload_lines(broker, b"short") == [b"test.short|1|%d|x" % n for n in range(sent[b"short"])]


def test_a_broken_certificate_keeps_the_old_one_and_the_log_says_so(secured, files):
    broker = secured()
    end(secure(broker))
    files[0].write_text("broken")

    def kept():
        end(secure(broker))
        return "event=certificates_kept" in broker.log()

    broker.wait(kept, "a word in the log")


def test_client_certificates_are_asked_for(secured, authority, tmp_path):
    broker = secured(KMQ_TLS_CLIENT_CA=authority.path)

    def attempt(*pair):
        """Whether a client with this certificate could produce."""
        context = ssl.create_default_context(cafile=authority.path)
        if pair:
            context.load_cert_chain(*pair)
        try:
            with secure(broker, context) as sock:
                # Not by the end: an alert that comes before our close_notify looks like an orderly one to ssl's unwrap.
                assert greet(sock, "acks=1").startswith(b"!ok ")
                sock.sendall(b"test.k|1|1|x\n")
                return reply(sock) == b"!ack 1 1\n"
        except (ssl.SSLError, ConnectionError):
            return False

    assert attempt(*authority.issue("client"))
    assert not attempt(*Authority(tmp_path / "other", "other").issue("client"))
    assert not attempt()
    broker.wait(lambda: "event=tls_failed" in broker.log(), "a word in the log")
    broker.wait_routed(1)
    assert len(broker.wal()) == 1


def test_a_killed_ingress_does_not_look_like_an_orderly_end(secured):
    broker = secured()
    socks = [secure(broker) for _ in range(5)]
    for sock in socks:
        sock.sendall(b"test.k|1|1|x\n")
    broker.wait_routed(5)
    broker.kill("ingress")
    for sock in socks:
        assert_broken(sock)


def test_a_broker_that_stops_ends_in_order(secured):
    broker = secured()
    sock = secure(broker)
    sock.sendall(b"test.k|1|1|x\n")
    unfinished = secure(broker)
    unfinished.sendall(b"test.k|1|2|unfin")
    broker.wait_routed(1)
    broker.down()
    assert sock.recv(100) == b""  # close_notify
    sock.close()
    assert_broken(unfinished)
    assert len(broker.wal()) == 1


def test_tls_costs_less_than_the_rest_of_the_way(secured):
    """Compares both kinds in one run. The bound is loose; it catches a loop per record.

    Other work on the machine may hold up any one of the sends, so a kind gets as many as it needs, up to eight.
    """
    broker = secured()
    data = b"".join(line + b"\n" for line in lines_of(b"k", 60_000))
    took = {"plain": inf, "secure": inf}
    for n, connect in enumerate((plain, secure) * 8, 1):
        sock = connect(broker)
        begin = time.monotonic()
        sock.sendall(data)
        assert end(sock) == b""
        took[connect.__name__] = min(time.monotonic() - begin, took[connect.__name__])
        broker.wait_routed(n * 60_000)
        if n >= 4 and took["secure"] < 3 * took["plain"] + 0.2:
            break
    print({name: f"{60_000 / seconds:,.0f} msg/s" for name, seconds in took.items()})
    assert took["secure"] < 3 * took["plain"] + 0.2


@pytest.mark.parametrize("given", [["KMQ_TLS_CERT"], ["KMQ_TLS_KEY"], ["KMQ_TLS_CLIENT_CA"]])
def test_half_of_what_tls_needs_stops_the_start(broker, files, given):
    result = broker.kmq("up", **dict.fromkeys(given, files[0]))
    assert result.returncode == 78
    assert "KMQ_TLS_CERT and KMQ_TLS_KEY belong together" in result.stderr


# --- tokens ----------------------------------------------------------------------------------------------------------


def token_file(tmp_path):
    """Settings of a broker that asks for tokens; there is one, for `orders`."""
    from kmq.access import tokens

    (tmp_path / "token").write_text(tokens.new(str(tmp_path / "tokens"), "orders"))
    return {"KMQ_TOKENS": tmp_path / "tokens"}


def token(tmp_path):
    return (tmp_path / "token").read_text()


def test_a_token_opens_the_door_and_nothing_else_does(secured, tmp_path):
    broker = secured(**token_file(tmp_path))
    good = token(tmp_path)
    bad = ("acks=1", "acks=0", "acks=1 token=", f"acks=1 token={good}x", "acks=1 token=orders.x")
    for connect, words in itertools.product((plain, secure), bad):
        with connect(broker) as sock:
            sock.sendall(f"!hello {words}\ntest.k|1|1|x\n".encode())
            assert reply(sock).startswith(b"!err 0 unauthorized "), words
    for seq, connect in enumerate((plain, secure), 1):
        sock = connect(broker)
        assert greet(sock, f"acks=1 token={good}").startswith(b"!ok ")
        sock.sendall(b"test.k|1|1|x\n")
        assert reply(sock) == b"!ack 1 %d\n" % seq
        assert end(sock) == b""
    assert len(broker.wal()) == 2


def test_lines_without_a_hello_are_not_taken_and_do_not_end_in_order(secured, tmp_path):
    broker = secured(**token_file(tmp_path))
    for connect in (plain, secure):
        sock = connect(broker)
        sock.sendall(b"test.k|1|1|x\nunfinished")
        assert reply(sock).startswith(b"!err 0 unauthorized ")
        assert_broken(sock)
    sock = plain(broker)
    assert greet(sock, f"acks=0 token={token(tmp_path)}").startswith(b"!ok ")  # and from here on as without tokens
    sock.sendall(b"test.k|1|2|y\nbad\n")
    assert end(sock) == b""
    broker.wait_routed(2)
    assert len(broker.wal()) == 2 and b"reason=no_separator" in broker.lines("dead")[0]


def test_tokens_change_while_the_broker_runs(secured, tmp_path):
    broker = secured(**token_file(tmp_path))

    def admitted(text):
        with plain(broker) as sock:
            return greet(sock, f"acks=1 token={text}").startswith(b"!ok ")

    old = token(tmp_path)
    assert admitted(old)
    new = broker.kmq("token", "new", "billing").stdout.strip()
    row = r"name={0} tokens=1 ids={0}\.[0-9a-f]{{12}} roles=produce,consume,admin\n".format
    assert re.fullmatch(row("orders") + row("billing"), broker.kmq("token", "list").stdout)
    broker.wait(lambda: admitted(new), "the new token in force")
    assert admitted(old)
    rows = (tmp_path / "tokens").read_text().splitlines()
    (tmp_path / "tokens").write_text(rows[1] + "\n")
    broker.wait(lambda: not admitted(old), "the old token gone")
    assert admitted(new)


def test_commands_on_the_same_machine_need_no_token_of_their_own(secured, tmp_path):
    broker = secured(**token_file(tmp_path))
    result = broker.kmq("produce", "dead.letter_1", "-m", "hello")
    assert (result.returncode, result.stdout) == (0, "sent 1\n"), result.stderr
    broker.wait_routed(1)
    assert broker.kmq("redrive", "dead", "--to", "test.{key}").returncode == 0
    result = broker.kmq("produce", "test.k", "-m", "hello", "--acks")
    assert (result.returncode, result.stdout) == (0, "stored 1, last seq 3\n"), result.stderr
    broker.wait_routed(3)


def test_a_command_that_is_refused_says_why(secured, tmp_path):
    broker = secured(**token_file(tmp_path))
    result = broker.kmq("produce", "test.k", "-m", "hello", KMQ_TOKENS="")
    assert result.returncode == 75 and "unauthorized" in result.stderr, result.stderr
    assert not broker.wal()


def test_kmq_token_says_what_is_wrong(broker, tmp_path):
    assert "KMQ_TOKENS is not set" in broker.kmq("token", "new", "a").stderr
    result = broker.kmq("token", "new", "a.b", KMQ_TOKENS=tmp_path / "tokens")
    assert result.returncode == 78 and "must be" in result.stderr


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_tokens_that_would_travel_in_clear_are_warned_of(broker, tmp_path, host, warned):
    broker.up(KMQ_HOST=host, **token_file(tmp_path))
    assert ("event=tokens_in_clear" in broker.log()) == warned


# --- the gateway -----------------------------------------------------------------------------------------------------

PRODUCE, STREAM = "/podbus.v1.PodBus/Produce", "/podbus.v1.PodBus/ProduceStream"
FETCH = "/kmq.v1.Kmq/Fetch"
HEALTH = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
A_RECORD = b"\n\x03id1\x12\x05hello"  # of Produce, as protobuf has it
OFFSET_1 = b"\x08\x01"


def wait_gateway(broker):
    broker.wait(lambda: "stage=gateway event=ready" in broker.log(), "the gateway")


def get(broker, path, name="https", context=None, bearer=""):
    """Status of one page, and its text."""
    if name == "https":
        port = port_of(broker, name)
        connection = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_S, context=context or broker.trust)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port_of(broker, name), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Authorization": f"Bearer {bearer}"} if bearer else {})
        response = connection.getresponse()
        return response.status, response.read().decode()


def call(broker, authority, method, request, name="grpcs", bearer="", pair=()):
    """The response to one gRPC request, or the code of its failure."""
    if name == "grpcs":
        key, cert = (path.read_bytes() for path in reversed(pair)) if pair else (None, None)
        credentials = grpc.ssl_channel_credentials(authority.path.read_bytes(), key, cert)
        channel = grpc.secure_channel(f"localhost:{port_of(broker, name)}", credentials)
    else:
        channel = grpc.insecure_channel(f"127.0.0.1:{port_of(broker, name)}")
    metadata = [("authorization", f"Bearer {bearer}")] if bearer else []
    with channel:
        try:
            if method == STREAM:
                return list(channel.stream_stream(method)(iter(request), timeout=PATIENCE_S, metadata=metadata))
            return channel.unary_unary(method)(request, timeout=PATIENCE_S, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()


def shown_name(broker, authority, name):
    """Common name in the certificate that a port shows."""
    with socket.create_connection(("127.0.0.1", port_of(broker, name)), timeout=PATIENCE_S) as sock:
        context = ssl.create_default_context(cafile=authority.path)
        context.set_alpn_protocols(["h2", "http/1.1"])
        with context.wrap_socket(sock, server_hostname="localhost") as secured:
            return dict(pair[0] for pair in secured.getpeercert()["subject"])["commonName"]


def test_http_and_grpc_are_there_in_clear_and_over_tls_with_certificates_that_change(secured, authority, files):
    broker = secured(gateway=True)
    wait_gateway(broker)
    for name in ("http", "https"):
        broker.wait(lambda name=name: get(broker, "/readyz", name)[0] == 200, "ready")
    for name in ("grpc", "grpcs"):
        assert call(broker, authority, PRODUCE, A_RECORD, name) == OFFSET_1
    files[0].write_text("broken")
    assert get(broker, "/healthz")[0] == 200
    assert call(broker, authority, HEALTH, b"") == SERVING
    for path, source in zip(files, authority.issue("renewed"), strict=True):
        shutil.copy(source, path)
    for name in ("https", "grpcs"):
        broker.wait(lambda name=name: shown_name(broker, authority, name) == "renewed", "the new certificate")
    assert get(broker, "/healthz")[0] == 200
    assert call(broker, authority, PRODUCE, A_RECORD) == OFFSET_1
    assert "Traceback" not in broker.log()


def test_the_gateway_asks_for_client_certificates_too(secured, authority, tmp_path):
    broker = secured(gateway=True, KMQ_TLS_CLIENT_CA=authority.path)
    wait_gateway(broker)
    ours, theirs = authority.issue("client"), Authority(tmp_path / "other", "other").issue("client")
    for pair in (theirs, ()):
        context = ssl.create_default_context(cafile=authority.path)
        if pair:
            context.load_cert_chain(*pair)
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            get(broker, "/healthz", context=context)
        assert call(broker, authority, HEALTH, b"", pair=pair) == grpc.StatusCode.UNAVAILABLE
    broker.trust.load_cert_chain(*ours)
    assert get(broker, "/healthz")[0] == 200
    assert call(broker, authority, HEALTH, b"", pair=ours) == SERVING


def test_the_gateway_asks_for_tokens_but_not_for_health_or_the_console_files(secured, authority, tmp_path):
    broker = secured(gateway=True, **token_file(tmp_path))
    wait_gateway(broker)
    good = token(tmp_path)
    for name in ("grpc", "grpcs"):
        for bad in ("", good + "x"):
            assert call(broker, authority, PRODUCE, A_RECORD, name, bad) == grpc.StatusCode.UNAUTHENTICATED
            assert call(broker, authority, STREAM, [], name, bad) == grpc.StatusCode.UNAUTHENTICATED
            assert call(broker, authority, FETCH, b"", name, bad) == grpc.StatusCode.UNAUTHENTICATED
        assert call(broker, authority, PRODUCE, A_RECORD, name, good) == OFFSET_1
        assert call(broker, authority, STREAM, [A_RECORD] * 2, name, good) == [OFFSET_1] * 2
        broker.wait_routed(1)  # podbus.v1 replies when it is on disk
        assert call(broker, authority, FETCH, b"\n\x06podbus", name, good).startswith(b"\n")
        assert call(broker, authority, HEALTH, b"", name) == SERVING
    for name in ("http", "https"):
        for path in ("/healthz", "/readyz"):
            assert get(broker, path, name)[0] == 200
        for path, file in (("/", "index.html"), ("/console/api.js", "api.js")):  # a browser sends no token for these
            assert get(broker, path, name) == (200, (STATIC / file).read_text()), path
        for path in (
            "/metrics",
            "/api/overview",
            "/nothing",
            "/console/../metrics",
            "/healthz/../metrics",
            "//metrics",
        ):
            assert get(broker, path, name)[0] == get(broker, path, name, bearer=good + "x")[0] == 401, path
        assert get(broker, "/metrics", name, bearer=good)[0] == 200
    assert len(broker.wal()) == 1


def test_a_credential_that_is_no_text_is_refused_and_never_logged(secured, tmp_path):
    broker = secured(gateway=True, **token_file(tmp_path))
    wait_gateway(broker)
    shown = b"Bearer " + token(tmp_path).encode() + b"\xff"
    with socket.create_connection(("127.0.0.1", port_of(broker, "http")), timeout=PATIENCE_S) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: kmq\r\nAuthorization: " + shown + b"\r\n\r\n")
        assert reply(sock).startswith(b"HTTP/1.1 401 ")
    with attacks_ports.Http2("127.0.0.1", port_of(broker, "grpc")) as peer:
        peer.call(PRODUCE, [(b"authorization", shown)], end=True)
        assert peer.status(1) == 16  # UNAUTHENTICATED
    assert get(broker, "/metrics", "http", bearer=token(tmp_path))[0] == 200
    assert token(tmp_path).partition(".")[2] not in broker.log()


def is_over(sock):
    """Whether the other side has ended the connection by now."""
    sock.settimeout(0.1)
    try:
        return sock.recv(100) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_http_requests_and_grpc_handshakes_that_are_not_finished_are_cut_off(secured):
    broker = secured(gateway=True, KMQ_LINE_DEADLINE=DEADLINE)
    wait_gateway(broker)
    begin = time.monotonic()
    slow = [socket.create_connection(("127.0.0.1", port_of(broker, name))) for name in ("http", "https", "grpcs")]
    slow[1] = broker.trust.wrap_socket(slow[1], server_hostname="localhost")
    for sock in slow[:2]:
        sock.sendall(b"GET /healthz HTTP/1.1\r\n")
    client = http.client.HTTPConnection("127.0.0.1", port_of(broker, "http"), timeout=PATIENCE_S)
    over = []
    while len(over) < len(slow):  # meanwhile one that finishes its requests is served over one connection
        client.request("GET", "/healthz")
        assert client.getresponse().read() and client.sock is not None
        over += [sock for sock in slow if sock not in over and is_over(sock)]
        assert time.monotonic() - begin < PATIENCE_S
    assert time.monotonic() - begin >= 4
    for sock in (*slow, client):
        sock.close()


# --- deadlines and caps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("connect", [plain, secure])
def test_a_silent_connection_is_ended_and_one_that_waits_for_replies_is_not(secured, connect):
    broker = secured(KMQ_IDLE=DEADLINE)
    durability = broker.pids()["durability"]
    silent, talking, waiting = connect(broker), connect(broker), connect(broker)
    begin = time.monotonic()
    os.kill(durability, signal.SIGSTOP)  # the reply will take its time
    waiting.sendall(b"!hello acks=1\ntest.k|1|1|x\n")
    assert reply(waiting).startswith(b"!ok ")
    silent.settimeout(0.3)
    sent = 0
    while True:
        talking.sendall(b"test.k|1|1|y\n")
        sent += 1
        try:
            assert silent.recv(1) == b""  # ended in order: it had not begun anything
            break
        except TimeoutError:
            assert time.monotonic() - begin < PATIENCE_S
    assert time.monotonic() - begin >= 4
    silent.close()
    os.kill(durability, signal.SIGCONT)
    assert reply(waiting).startswith(b"!ack 1 ")
    assert end(talking) == b"" and end(waiting) == b""
    broker.wait_routed(sent + 1)


def test_a_line_that_is_never_finished_becomes_dead_malformed(secured):
    broker = secured(KMQ_LINE_DEADLINE=DEADLINE)
    socks = [plain(broker), secure(broker)]
    for sock in socks:
        sock.sendall(b"test.k|1|1|whole\ntest.k|1|2|unfin")
    for sock in socks:
        assert end_of(sock) == b""
    broker.wait_routed(4)
    lines = broker.lines("dead")
    assert len(lines) == 2
    assert all(b"reason=no_newline" in line and line.endswith(b"|test.k|1|2|unfin") for line in lines)


def test_a_hello_that_is_never_finished_is_told_and_its_token_is_not_stored(secured):
    broker = secured(KMQ_LINE_DEADLINE=DEADLINE)
    sock = secure(broker)
    sock.sendall(b"!hello acks=1 token=secret")
    assert end_of(sock).startswith(b"!err 0 bad_hello ")
    sock = plain(broker)
    sock.sendall(b"!hello acks=1 token=secret")
    sock.shutdown(socket.SHUT_WR)
    end_of(sock)
    sock = plain(broker)
    sock.sendall(b"test.k|1|1|x\n")
    assert end(sock) == b""
    broker.wait_routed(1)
    assert len(broker.wal()) == 1


def end_of(sock):
    """What is said until the end."""
    with sock, sock.makefile("rb") as file:
        return file.read()


def test_descriptors_do_not_run_out_before_the_limit_is_told(secured):
    """Without one left nobody could be told, and every turn of the loop would end in a pause."""
    broker = secured()
    broker.down()
    result = broker.run("bash", "-c", "ulimit -n 100 && kmq up --no-gateway")
    assert result.returncode == 0, result.stderr
    socks = [plain(broker) for _ in range(40)]
    told = [sock for sock in socks[36:] if reply(sock).startswith(b"!err 0 connections 36 ")]
    assert len(told) == 4
    for sock in socks[:36]:
        sock.sendall(b"test.k|1|1|x\n")
        assert end(sock) == b""
    broker.wait_routed(36)
    for sock in told:
        sock.close()
    assert "event=accept_failed" not in broker.log()


def test_one_connection_too_many_is_told_and_another_may_come_when_one_has_gone(secured):
    broker = secured(KMQ_CONNECTIONS=3)
    first, *others = [plain(broker), secure(broker), plain(broker)]
    broker.wait(lambda: broker.status()["ingress"]["connections"] == "3", "three connections")
    over = plain(broker)
    assert reply(over).startswith(b"!err 0 connections ")
    assert_broken(over)
    with pytest.raises((ConnectionError, ssl.SSLError)):
        secure(broker)
    first.sendall(b"test.k|1|1|x\n")
    assert end(first) == b""
    another = secure(broker)
    another.sendall(b"test.k|1|2|y\n")
    assert end(another) == b""
    for sock in others:
        assert end(sock) == b""
    broker.wait_routed(2)
    broker.wait(lambda: logged(broker, "connection_refused") == 2, "a word in the log")
