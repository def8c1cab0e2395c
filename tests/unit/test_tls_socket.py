"""TLS under an event loop that knows only plain sockets, and certificates that change."""

import os
import random
import select
import shutil
import socket
import ssl
import time
from types import SimpleNamespace

import pytest
from certificates import Authority
from fake_logger import FakeLogger
from fifo_reading import read_all
from framing_steps import Steps, table
from received_ends import Way
from stats_rows import row_of

from kmq.broker import tls
from kmq.config.settings import load
from kmq.errors import ConfigError
from kmq.ingress.connection import Connection
from kmq.ingress.producers import Producers
from kmq.ingress.receiving import Intake
from kmq.links.fifo import LINES, open_fifo
from kmq.links.received import Handover
from kmq.message import record

MAX_LINE = 4096  # the smallest there is: a TLS record is four times as long


def settings_of(**files):
    return load({f"KMQ_TLS_{name.upper()}": str(path) for name, path in files.items()}, "/nonexistent.toml")


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch):
    monkeypatch.setattr("kmq.files._LOOK_S", 0.0)


@pytest.fixture
def files(authority, tmp_path):
    """Certificate and key of a server, in files of the test's own."""
    made = {"cert": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    for path, source in zip(made.values(), authority.issue("server"), strict=True):
        shutil.copy(source, path)
    return made


@pytest.fixture
def connect(authority):
    """A function that makes (client, server) ends over a socket pair; they are closed afterwards."""
    made = []

    def make(context, client=None, send_buffer=0, **options):
        far, near = socket.socketpair()
        far.setblocking(False)
        near.setblocking(False)
        if send_buffer:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = tls.accept(context, far)
        client = client or ssl.create_default_context(cafile=authority.path)
        options.setdefault("server_hostname", "localhost")
        made.extend(
            (client.wrap_socket(near, do_handshake_on_connect=False, suppress_ragged_eofs=False, **options), server)
        )
        return made[-2:]

    yield make
    for sock in made:
        sock.close()


def receive(server, buffer=None):
    """What recv_into gives now: a number, or None for "not now"."""
    try:
        return server.recv_into(bytearray(1 << 18) if buffer is None else buffer)
    except BlockingIOError:
        return None


def shake(client, server):
    """The handshake, driven from both ends as an event loop would."""
    for _ in range(100):
        try:
            client.do_handshake()
            return
        except ssl.SSLWantReadError:
            assert receive(server) is None
    raise AssertionError("no end of the handshake")


def context_of(settings, logger=None):
    """A listener's context, as the stages make it; None without TLS."""
    found = tls.certificates(settings, logger or FakeLogger(), row_of("ingress"))
    return found and found.context()


def open_pair(connect, files, **options):
    client, server = connect(context_of(settings_of(**files)), **options)
    shake(client, server)
    return client, server


def push(client, data):
    """Send as much as goes into the socket; how much that was."""
    try:
        return client.send(data)
    except ssl.SSLWantWriteError:
        return 0


# --- the socket ------------------------------------------------------------------------------------------------------


def test_the_first_reads_do_the_handshake(connect, files):
    client, server = connect(context_of(settings_of(**files)))
    assert server.is_shaking
    shake(client, server)
    assert receive(server) is None and not server.is_shaking
    assert client.version() == "TLSv1.3"


@pytest.mark.parametrize("room", [tls.RECORD_BYTES, 3 * tls.RECORD_BYTES - 1, 1 << 18])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_nothing_that_has_arrived_stays_where_epoll_cannot_see_it(connect, files, authority, room, version):
    offer = ssl.create_default_context(cafile=authority.path)
    offer.maximum_version = version
    client, server = open_pair(connect, files, client=offer)
    rng = random.Random(7)
    buffer, sent, got = bytearray(room), bytearray(), bytearray()
    for _ in range(60):
        piece = rng.randbytes(rng.choice([1, 100, 5000, tls.RECORD_BYTES]))
        if push(client, piece):
            sent += piece
        if rng.random() < 0.5:
            count = receive(server, buffer)
            assert server.pending() == 0
            got += buffer[: count or 0]
    while (count := receive(server, buffer)) is not None:
        got += buffer[:count]
    assert got == sent and len(sent) > 100_000


def test_an_end_right_behind_the_data_is_not_forgotten(connect, files):
    """The end is in the socket no more when the data has been taken: epoll would never tell of it again."""
    client, server = open_pair(connect, files)
    client.send(b"last words\n")
    with pytest.raises(ssl.SSLWantReadError):
        client.unwrap()
    buffer = bytearray(1 << 18)
    assert receive(server, buffer) == 11 and buffer[:11] == b"last words\n" and server.over
    assert server.failure == ""
    assert server.send(b"reply\n") == 6  # a half-close: our side is still open
    server.say_end()
    assert client.read(100) == b"reply\n"
    with pytest.raises(ssl.SSLZeroReturnError):  # close_notify, and no truncation
        client.read(100)


def test_garbage_behind_the_data_is_not_forgotten_either(connect, files):
    client, server = open_pair(connect, files)
    client.send(b"good\n")
    os.write(client.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
    assert receive(server) == 5 and server.over and server.failure == "DECRYPTION_FAILED_OR_BAD_RECORD_MAC"


def test_an_end_without_close_notify_is_an_end(connect, files):
    client, server = open_pair(connect, files)
    client.send(b"x")
    socket.socket.shutdown(client, socket.SHUT_WR)
    assert receive(server) == 1 and server.over and receive(server) == 0


def test_a_server_that_breaks_off_is_seen_as_truncation(connect, files):
    client, server = open_pair(connect, files)
    server.close()
    with pytest.raises(ssl.SSLEOFError):
        client.read(1)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"test.probe|1|1|x\n", bytes(100), b"\x16\x03\x01\xff\xff"]
)
def test_what_is_no_tls_ends_in_an_error_with_a_reason_or_waits_for_more(connect, files, garbage):
    far, near = socket.socketpair()
    far.setblocking(False)
    server = tls.accept(context_of(settings_of(**files)), far)
    near.sendall(garbage)
    near.close()
    try:
        ended = receive(server) == 0
    except OSError:
        ended = True
        assert server.failure
    assert ended and server.over
    server.close()


def test_replies_that_the_socket_does_not_take_wait_as_of_a_plain_one(connect, files):
    client, server = open_pair(connect, files, send_buffer=8192)
    connection = Connection(server, "test", server)
    expected, got = bytearray(), bytearray()
    for n in range(20_000):
        connection.replies.pending += b"!ack %d %d\n" % (n, n)
        expected += b"!ack %d %d\n" % (n, n)
        if n % 500 == 0:
            assert connection.send_replies()
    assert connection.replies.pending
    while len(got) < len(expected):
        try:
            got += client.read(1000)
        except ssl.SSLWantReadError:
            assert connection.send_replies()
    assert got == expected and not connection.replies.pending


def test_a_server_flight_longer_than_the_socket_takes_asks_for_room(connect, files):
    """A chain of many certificates."""
    certificate = files["cert"].read_bytes()
    files["cert"].write_bytes(certificate * 60)
    client, server = connect(context_of(settings_of(**files)), send_buffer=1)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    assert receive(server) is None and server.wants_write
    shake(client, server)
    assert receive(server) is None and not server.wants_write


def test_a_client_that_never_reads_has_nothing_unread(connect, files):
    """Unread tickets would turn its orderly end into a reset that throws away what it has not sent yet."""
    client, server = open_pair(connect, files)
    client.send(b"x")
    assert receive(server) == 1
    with socket.socket(fileno=os.dup(client.fileno())) as raw, pytest.raises(BlockingIOError):
        raw.recv(1, socket.MSG_PEEK)


def test_a_connection_that_is_gone_before_it_began_is_no_error(files):
    context = context_of(settings_of(**files))
    server = socket.create_server(("127.0.0.1", 0))
    for words in (b"", b"words"):
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        accepted.setblocking(False)
        client.send(words)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        assert tls.accept(context, accepted) is None
    server.close()


@pytest.mark.parametrize("step", [1, 100, 5000, 20_000])
def test_lines_come_through_however_long_records_and_lines_are(connect, files, tmp_path, step):
    client, server = open_pair(connect, files)
    raw = open_fifo(str(tmp_path), "raw")
    way = Way()
    intake = Intake(Handover(raw, way.writer), MAX_LINE, row_of("ingress"))
    steps = Steps(table(), max_line=MAX_LINE, way=way)
    connection = Connection(server, "test", server)
    lines = [b"t|||" + b"x" * size for size in (0, 10, 3000, MAX_LINE - 4, MAX_LINE - 3, 1, 9000, 2)]
    data = b"".join(line + b"\n" for line in lines)[: 500 if step == 1 else None]
    for at in range(0, len(data), step):
        assert push(client, data[at : at + step])
        while receive_line(intake, connection):
            steps.read(drained(intake, raw))
    stored = [
        line if len(line) <= MAX_LINE else record.malformed("too_long", line, len(line), MAX_LINE) for line in lines
    ]
    assert steps.lines == stored[: 2 if step == 1 else None]
    os.close(raw)


def test_what_waits_for_the_fifo_is_not_overwritten_by_what_comes_next(connect, files, tmp_path):
    """While producers are refused they are heard although the FIFO is full; over TLS a first byte cannot be looked at before."""
    raw = open_fifo(str(tmp_path), "raw")
    way = Way(1 << 16)
    intake = Intake(Handover(raw, way.writer), 1 << 20, row_of("ingress"))
    steps = Steps(table(), max_line=1 << 20, way=way)
    while not intake.handover.clogged:
        intake.handover.put([b"t|||fill\n" * 400], None, 0)
    intake.expect_clogging(True)
    sent = [b"t|||%b\n" % (bytes([letter]) * 500) * 100 for letter in b"abc"]
    for data in sent:
        client, server = open_pair(connect, files)
        connection = Connection(server, "test", server)
        assert push(client, data)
        assert receive_line(intake, connection)
        assert intake.bytes <= 3 * 16384
    assert intake.handover.clogged
    while intake.handover.clogged:
        steps.read(drained(intake, raw))
    for data in sent:
        assert steps.lines.count(data[:504]) == 16384 // 505
    os.close(raw)


def test_an_end_is_answered_only_when_the_fifo_speaks_of_the_lines_that_came_with_it(
    connect, files, tmp_path, monkeypatch
):
    """Killed between the two, ingress would have told the producer that lines are safe of which nobody knows."""
    raw, acks = (open_fifo(str(tmp_path), name) for name in ("raw", "acks"))
    page = SimpleNamespace(histogram=lambda what: None)  # nothing is acked here
    stage = SimpleNamespace(
        settings=load({}, "/nonexistent.toml"), row=None, page=page, acks=acks, most_files=1000, epoch=0
    )
    accepting = SimpleNamespace(refusal=b"")
    producers = Producers(stage, Handover(raw, Way(4 << 20).writer), accepting, None, None)
    told = []
    monkeypatch.setattr("kmq.ingress.producers.close_in_order", lambda connection: told.append(read_all(raw)))
    client, server = open_pair(connect, files)
    connection = Connection(server, "test", server)
    producers.table.add(connection)
    producers.poll.register(server, select.EPOLLIN)
    assert push(client, b"t|||1\n")
    with pytest.raises(ssl.SSLWantReadError):
        client.unwrap()
    producers.note_ready(server.fileno(), select.EPOLLIN)
    producers.serve()
    assert [LINES.fullmatch(text) is not None for text in told] == [True]
    os.close(raw)
    os.close(acks)


def receive_line(intake, connection):
    """One receive; whether it took anything."""
    connection.was_active = False
    assert intake.receive(connection)
    return connection.was_active


def drained(intake, raw):
    """What the FIFO says now."""
    intake.handover.flush()
    return read_all(raw)


# --- certificates --------------------------------------------------------------------------------------------------


def served(connect, context, client=None, **options):
    """Common name of the certificate that a new connection is shown."""
    client, server = connect(context, client, **options)
    shake(client, server)
    return dict(pair[0] for pair in client.getpeercert()["subject"])["commonName"]


def replace(files, pair):
    for path, source in zip(files.values(), pair, strict=True):
        shutil.copy(source, f"{path}.new")
        os.rename(f"{path}.new", path)


@pytest.mark.parametrize("server_hostname", ["localhost", None])
def test_new_certificates_are_for_new_connections(connect, files, authority, server_hostname):
    logger = FakeLogger()
    context = context_of(settings_of(**files), logger)
    anyone = ssl.create_default_context(cafile=authority.path)
    anyone.check_hostname = False
    before, server = connect(context)
    shake(before, server)
    assert served(connect, context, anyone, server_hostname=server_hostname) == "server"
    replace(files, authority.issue("renewed"))
    assert served(connect, context, anyone, server_hostname=server_hostname) == "renewed"
    assert logger.names == ["certificates_reloaded"]
    before.send(b"x")
    assert receive(server) == 1


def test_files_that_do_not_fit_together_keep_the_old_ones_until_they_do(connect, files, authority):
    logger = FakeLogger()
    context = context_of(settings_of(**files), logger)
    cert, key = authority.issue("renewed")
    shutil.copy(cert, files["cert"])
    assert served(connect, context) == served(connect, context) == "server"
    assert logger.names == ["certificates_kept"]  # and not again for each connection
    assert "KEY_VALUES_MISMATCH" in str(logger.events[0][1]["reason"])
    shutil.copy(key, files["key"])
    assert served(connect, context) == "renewed"
    files["key"].unlink()
    assert served(connect, context) == "renewed"
    assert logger.names == ["certificates_kept", "certificates_reloaded", "certificates_kept"]


def test_client_certificates_are_asked_for_and_their_authority_can_change(connect, files, authority, tmp_path):
    from certificates import Authority

    other = Authority(tmp_path / "other", "other")
    trusted = tmp_path / "trusted.pem"
    shutil.copy(authority.path, trusted)
    context = context_of(settings_of(**files, client_ca=trusted))

    def admitted(*pair):
        offer = ssl.create_default_context(cafile=authority.path)
        if pair:
            offer.load_cert_chain(*pair)
        client, server = connect(context, offer)
        shake(client, server)  # in TLS 1.3 the client is through before the server has looked at it
        client.send(b"x")
        try:
            return receive(server) == 1
        except ssl.SSLError:
            assert server.failure in ("CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE")
            return False

    ours, theirs = authority.issue("client"), other.issue("client")
    assert admitted(*ours) and not admitted(*theirs) and not admitted()
    shutil.copy(other.path, trusted)
    assert admitted(*theirs) and not admitted(*ours)


def test_a_certificate_is_warned_of_once_a_day_and_again_when_it_has_expired(authority, monkeypatch):
    cert, key = authority.issue("short", until=3)
    logger, row, ahead = FakeLogger(), row_of("ingress"), [0.0]
    monkeypatch.setattr(
        "kmq.broker.tls.time", SimpleNamespace(time=lambda: time.time() + ahead[0], monotonic=lambda: ahead[0])
    )
    used = tls.certificates(settings_of(cert=cert, key=key), logger, row)
    said = []
    for hours in range(0, 24 * 5):
        ahead[0] = hours * 3600.0
        used.look()
        said += [(event, hours // 24) for event in logger.names]
        logger.events.clear()
    assert said == [("certificate_expires", day) for day in (0, 1, 2)] + [
        ("certificate_expired", day) for day in (3, 4)
    ]


def test_of_two_client_authorities_one_may_expire(files, tmp_path, monkeypatch):
    """As in a rotation: the page then has the date of the other one, though no file has changed."""
    short, long = (Authority(tmp_path, name, until) for name, until in (("short", 3), ("long", 60)))
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(short.path.read_text() + long.path.read_text())
    row, now = row_of("ingress"), time.time()
    used = tls.certificates(settings_of(**files, client_ca=bundle), FakeLogger(), row)
    days = []
    for days_later in (0, 2, 4, 61):
        monkeypatch.setattr("kmq.broker.tls.time.time", lambda later=days_later: now + later * 86_400)
        used.look()
        days.append(round((row.client_ca_until - now) / 86_400))
    assert days == [3, 3, 60, 60]


def test_nothing_older_than_tls_1_2_is_spoken(connect, files, authority):
    offer = ssl.create_default_context(cafile=authority.path)
    offer.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        offer.minimum_version = offer.maximum_version = ssl.TLSVersion.TLSv1_1
    client, server = connect(context_of(settings_of(**files)), offer)
    with pytest.raises(ssl.SSLError):
        shake(client, server)
    assert server.failure == "UNSUPPORTED_PROTOCOL"


@pytest.mark.parametrize("given", [["cert"], ["key"], ["client_ca"], ["cert", "client_ca"]])
def test_half_of_what_tls_needs_is_an_error_that_names_both(given):
    with pytest.raises(ConfigError, match="KMQ_TLS_CERT and KMQ_TLS_KEY"):
        context_of(settings_of(**dict.fromkeys(given, "/some/file")))


def test_without_certificates_there_is_no_tls():
    assert context_of(settings_of()) is None


def test_files_that_cannot_be_used_are_named(files, authority, tmp_path):
    (tmp_path / "empty").touch()
    for change, reason in (
        ({"cert": tmp_path / "none"}, r"KMQ_TLS_CERT=.*No such file"),
        ({"cert": tmp_path / "empty"}, "KMQ_TLS_CERT"),
        ({"key": authority.issue("other")[1]}, "KEY_VALUES_MISMATCH"),
        ({"client_ca": tmp_path / "none"}, r"KMQ_TLS_CLIENT_CA=.*No such file"),
        ({"client_ca": tmp_path / "empty"}, "KMQ_TLS_CLIENT_CA"),
    ):
        with pytest.raises(ConfigError, match=reason):
            context_of(settings_of(**(files | change)))


def test_a_locked_key_is_refused_instead_of_asking_the_terminal(files, authority):
    cert, key = authority.issue("locked", password=b"secret")
    with pytest.raises(ConfigError, match="KMQ_TLS_KEY must not be encrypted"):
        context_of(settings_of(cert=cert, key=key))
