"""The logs of a broker that is up, read from afar: while it writes, over TLS with a token, and over the gateway's death."""

import psutil
import pytest
from brokers import is_alive
from certificates import Authority
from consuls import free_ports

from kmq.errors import ConfigError, RetryError
from kmq.log.reader import WAL
from kmq.log.segment import last_line
from kmq.message import record
from kmq.spark.connections import Access, Tls
from kmq.spark.source import brokers
from kmq.spark.source.brokers import Remote

COUNT = 20_000


@pytest.fixture
def broker(new_broker):
    """With its gateway."""
    return new_broker()


@pytest.fixture
def lines():
    return [b"orders.k%d|%d|%d|%b" % (n % 100, n, n, b"x" * 400) for n in range(COUNT)]


def up_with_a_fixed_port(broker):
    """A gateway that comes back must be found where it was."""
    broker.env["KMQ_HTTP_PORT"] = str(free_ports(1)[0])
    broker.up()
    return f"127.0.0.1:{broker.env['KMQ_HTTP_PORT']}"


def test_a_gateway_that_is_killed_in_the_middle_of_a_read_is_not_noticed(broker, monkeypatch):
    name = up_with_a_fixed_port(broker)
    assert broker.kmq("topics", "create", "orders", "--partitions", "2").returncode == 0
    broker.send_lines([b"orders.k%d|||%d %b" % (n % 100, n, b"x" * 2000) for n in range(COUNT)])
    broker.wait_routed(1 + COUNT)  # the declaration has the first seq
    monkeypatch.setattr(brokers, "BLOCK_BYTES", 1 << 18)
    access, connections = Remote(name), []
    connect = access.connect
    monkeypatch.setattr(access, "connect", lambda: connections.append(connect()) or connections[-1])
    bounds = access.bounds(["orders", WAL])
    assert bounds[WAL, 0] == (1, COUNT + 2)
    assert bounds["orders", 0][1] + bounds["orders", 1][1] == COUNT
    got = {}
    for (topic, partition), (first, end) in bounds.items():
        blocks, reached = [], first
        connections.clear()
        for offset, block in access.read(topic, partition, first, end):
            assert offset == reached
            if not blocks:  # more than the sockets hold is still to come
                gateway = psutil.Process(broker.pids()["gateway"])
                gateway.kill()
                broker.wait(lambda gateway=gateway: not is_alive(gateway), "the end of the gateway")
            blocks.append(block)
            reached = record.seq_of(last_line(block)) + 1 if topic == WAL else offset + block.count(b"\n")
        assert reached == end and len(connections) > 1
        got[topic, partition] = b"".join(blocks).splitlines()
    assert got[WAL, 0] == broker.wal()
    assert got["orders", 0] + got["orders", 1] == broker.lines("orders")


def test_the_wal_is_read_to_its_durable_end_while_it_is_written(broker, lines):
    broker.up()
    access = Remote(f"127.0.0.1:{(broker.pipes / 'http.port').read_text().strip()}")
    assert access.bounds([WAL]) == {(WAL, 0): (1, 1)}
    offset, got = 1, []
    for at in range(0, COUNT, 1000):
        broker.send_lines(lines[at : at + 1000])
        end = access.bounds([WAL])[WAL, 0][1]
        for first, block in access.read(WAL, 0, offset, end):
            assert first == offset
            got += block.splitlines()
            offset = record.seq_of(last_line(block)) + 1
        assert offset == end
    broker.wait(lambda: access.bounds([WAL])[WAL, 0][1] == COUNT + 1, "all of it durable")
    got += [line for _, block in access.read(WAL, 0, offset, COUNT + 1) for line in block.splitlines()]
    assert got == broker.wal() and [line.split(b"|", 2)[2] for line in got] == lines


def test_over_tls_and_with_a_token_the_same_is_read(broker, lines, authority, monkeypatch, tmp_path):
    cert, key = authority.issue("server")
    settings = {
        "KMQ_TLS_CERT": cert,
        "KMQ_TLS_KEY": key,
        "KMQ_TLS_HOST": "127.0.0.1",
        "KMQ_TOKENS": tmp_path / "tokens",
    }
    ports = {f"KMQ_{name}_PORT": "0" for name in ("TLS", "HTTPS", "GRPCS")}
    broker.env |= {name: str(value) for name, value in settings.items()} | ports
    token = broker.kmq("token", "new", "spark").stdout.split()[-1]
    broker.up()
    result = broker.kmq("produce", "--raw", "--acks", text=b"\n".join(lines[:5000]).decode() + "\n")
    assert result.returncode == 0, result.stderr
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    access = Remote(f"https://127.0.0.1:{(broker.pipes / 'https.port').read_text().strip()}", Access(token))
    assert access.bounds([WAL]) == {(WAL, 0): (1, 5001)}
    got = b"".join(block for _, block in access.read(WAL, 0, 1, 5001))
    assert got.splitlines() == broker.wal()


def test_a_client_certificate_is_shown_where_the_gateway_asks_for_one(broker, lines, authority, tmp_path):
    cert, key = authority.issue("server")
    ports = {f"KMQ_{name}_PORT": "0" for name in ("TLS", "HTTPS", "GRPCS")}
    broker.env |= {
        "KMQ_TLS_CERT": str(cert),
        "KMQ_TLS_KEY": str(key),
        "KMQ_TLS_CLIENT_CA": str(authority.path),
        "KMQ_TLS_HOST": "127.0.0.1",
    } | ports
    broker.up()
    result = broker.kmq("produce", "--raw", "--acks", text=b"\n".join(lines[:500]).decode() + "\n")
    assert result.returncode == 0, result.stderr
    name = f"127.0.0.1:{(broker.pipes / 'https.port').read_text().strip()}"
    mine = Tls(str(authority.path), *map(str, authority.issue("client")))
    got = b"".join(block for _, block in Remote(name, Access(tls=mine)).read(WAL, 0, 1, 501))
    assert got.splitlines() == broker.wal()
    with pytest.raises(RetryError, match=r"does it ask for a certificate\? option kmq\.ssl\.certificate\.location"):
        Remote(name, Access(tls=Tls(str(authority.path)), patience_s=0.5)).topics()
    stranger = Tls(str(Authority(tmp_path / "other", "other").path))
    with pytest.raises(ConfigError, match=r"CERTIFICATE_VERIFY_FAILED.* kmq\.ssl\.ca\.location"):
        Remote(name, Access(tls=stranger)).topics()
