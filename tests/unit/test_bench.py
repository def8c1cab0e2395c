"""The benchmark counts replies rightly, says which tool is missing, and reads what strace prints. Little is measured here."""

import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from shard_demo import free_ports  # noqa: E402

from bench import redis, syscalls  # noqa: E402
from bench.report import Figure, show  # noqa: E402
from bench.requests import Kmq, Redis, Requests  # noqa: E402
from bench.scale import Scale  # noqa: E402

KMQ_REPLIES = b"!ack 1 17\n!ack 40 56\n!ack 41 60\n"
REDIS_REPLIES = b"$15\r\n1700000000000-0\r\n$15\r\n1700000000000-1\r\n"


def test_no_connection_gets_a_port_of_the_shard_before_its_broker_starts():
    """The kernel chose one of them for another connection, and the broker could not listen."""
    ports = free_ports(20)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len({*ports}) == 20 and max(ports) < first


@pytest.mark.parametrize(
    ("dialect", "data", "answered", "replies"), [(Kmq, KMQ_REPLIES, 41, 3), (Redis, REDIS_REPLIES, 2, 2)]
)
def test_replies_cut_anywhere_are_counted_once(dialect, data, answered, replies):
    for cut in range(1, len(data)):
        reader = dialect()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == answered
        assert reader.replies == replies


@pytest.mark.parametrize(
    ("dialect", "data"), [(Kmq, b"!err 1 quota\n"), (Redis, b"-ERR no\r\n-ERR no\r\n"), (Kmq, b"")]
)
def test_a_refusal_or_the_end_stops_the_generator(dialect, data):
    with pytest.raises(SystemExit):
        dialect().feed(data)


def test_both_dialects_carry_the_same_payload():
    assert len(Kmq.message) == 100
    assert Redis.payload == Kmq.message.split(b"|", 3)[3].rstrip(b"\n")
    assert Redis.message.startswith(b"*5\r\n$4\r\nXADD\r\n") and Redis.message.endswith(Redis.payload + b"\r\n")


def acknowledge(sock):
    """Greet, then acknowledge each line by itself."""
    with sock, sock.makefile("rb") as lines, suppress(ConnectionError):  # of the end, with replies on the way
        lines.readline()
        sock.sendall(b"!ok max_line=1048576\n")
        for number, _ in enumerate(lines, 1):
            sock.sendall(b"!ack %d %d\n" % (number, number))


def accept(server, threads):
    while True:
        try:
            sock, _ = server.accept()
        except OSError:  # shut down
            return
        threads.append(threading.Thread(target=acknowledge, args=(sock,)))
        threads[-1].start()


@pytest.fixture
def port():
    threads = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threads.append(threading.Thread(target=accept, args=(server, threads)))
        threads[0].start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("kind", "arguments"), [("one", ()), ("window", ()), ("flood", (1000,)), ("connections", (3,))]
)
def test_each_kind_of_load_ends_and_gives_a_rate(kind, arguments, port):
    found = Requests("kmq", kind, port, *arguments, 0.1).go().result()
    assert found["rate"] > 0 and found["cores"] > 0
    if kind in ("window", "flood"):
        assert found["replies"] == found["count"]


def test_missing_tools_are_named_in_the_rows(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    [figure] = syscalls.syscalls(tmp_path, Scale(quick=True))
    assert (figure.value, figure.note, figure.met) == (None, "strace not installed", None)
    with redis.server(tmp_path / "redis") as server:
        assert server is None
    show([figure, Figure("redis", "Redis", None, "msg/s", note=redis.MISSING)], "here")
    printed = capsys.readouterr().out
    assert "strace not installed" in printed and "redis-server not installed" in printed


def test_the_table_of_strace_is_read_with_and_without_errors():
    summary = (
        "% time     seconds  usecs/call     calls    errors syscall\n"
        "------ ----------- ----------- --------- --------- ----------------\n"
        " 90.00    0.900000          10     90000       123 recvfrom\n"
        " 10.00    0.100000           5     20000           epoll_wait\n"
        "------ ----------- ----------- --------- --------- ----------------\n"
        "100.00    1.000000           9    110000       123 total\n"
    )
    assert syscalls.parse(summary) == {"recvfrom": 90000, "epoll_wait": 20000}
    assert syscalls.parse("") == {}


@pytest.mark.parametrize(
    ("bar", "met"), [("≤ 1.4", True), ("< 1.4", False), ("≥ 1.4", True), ("≥ 1.5", False), ("", None)]
)
def test_a_bar_is_compared_by_its_sign(bar, met):
    assert Figure("part", "what", 1.4, "x", bar).met is met
