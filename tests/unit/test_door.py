"""A follower's doors, between real sockets: what passes, how it ends, who is refused, and that memory stays bounded."""

import contextlib
import ctypes
import json
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stats_rows import row_of
from waiting import PATIENCE_S, until

from kmq.broker.door import CONSUMERS, HTTP, LINES, OTHER, WAIT_S, Door, FollowerDoors, addresses
from kmq.config.intakes import parse_sources
from kmq.errors import ConfigError
from tests.certificates import Authority
from tests.fake_logger import FakeLogger

HOST = "127.0.0.1"
MIB = 1 << 20


def door(name: str = "lines", speaks: str = LINES, port: int = 0) -> Door:
    return Door(name, f"KMQ_{name.upper()}_PORT", HOST, port, speaks)


class Doorway:
    """Doors that a thread serves, and what a test changes under them."""

    def __init__(self, *doors: Door, leader: dict[str, str] | None = None, most: int = 100) -> None:
        self.leader: dict[str, str] | None = leader or {}
        self.ahead_s, self.is_over, self.turns = 0.0, False, 0
        self.clock = time.monotonic
        self.row = row_of("ingress")
        self.log = FakeLogger()
        self.doors = FollowerDoors(doors or (door(),), most, lambda: self.leader, self.row, self.log, self._now)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _now(self) -> float:
        return self.clock() + self.ahead_s

    def stop_clock(self) -> None:
        """Only `ahead_s` moves it from now on: how long this machine takes counts no more."""
        now = time.monotonic()
        self.clock = lambda: now

    def _serve(self) -> None:
        try:
            self.doors.serve(self._is_over)
        except BaseException as error:
            self.error = error

    def _is_over(self) -> bool:
        self.turns += 1
        return self.is_over

    def connect(self, name: str = "lines") -> socket.socket:
        return socket.create_connection((HOST, self.doors.ports[name]), PATIENCE_S)

    def await_connections(self, count: int) -> None:
        until(lambda: self.row.connections == count, f"{count} connections", lambda: self.row.connections)

    def end(self) -> None:
        self.is_over = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def serving(*doors: Door, leader: dict[str, str] | None = None, most: int = 100) -> Iterator[Doorway]:
    doorway = Doorway(*doors, leader=leader, most=most)
    try:
        yield doorway
    finally:
        doorway.end()


class Leader:
    """A port of the leader; the test is its program."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self._listener.settimeout(PATIENCE_S)
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"

    def accept(self) -> socket.socket:
        sock = self._listener.accept()[0]
        sock.settimeout(PATIENCE_S)
        return sock

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.close()


def read_all(sock: socket.socket) -> bytes:
    """Return everything up to an end in order. Raises ConnectionResetError after a reset."""
    pieces = []
    while piece := sock.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def read_before_reset(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
        raise AssertionError(f"an end in order after {data!r}")
    return data


def feed(sock: socket.socket, data: bytes) -> threading.Thread:
    def send() -> None:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_bytes_pass_both_ways_and_each_half_closes_for_itself(leader):
    with serving(leader={"broker": "b", "lines": leader.address}) as doorway, doorway.connect() as client:
        client.sendall(b"a|1\n")
        with leader.accept() as end:
            assert end.recv(100) == b"a|1\n"
            end.sendall(b"!ack 1\n")
            assert client.recv(100) == b"!ack 1\n"
            client.shutdown(socket.SHUT_WR)
            assert end.recv(100) == b""
            end.sendall(b"!ack 2\n")  # what is owed still arrives
            end.shutdown(socket.SHUT_WR)
            assert read_all(client) == b"!ack 2\n"
        doorway.await_connections(0)


def test_a_door_with_sources_lets_nobody_else_reach_the_leader(leader):
    narrow = Door("intake1", "KMQ_INTAKES", HOST, 0, OTHER, parse_sources("10.0.0.0/8"))
    wide = Door("intake2", "KMQ_INTAKES", HOST, 0, OTHER, parse_sources("10.0.0.0/8 127.0.0.1"))
    both = {"intake1": leader.address, "intake2": leader.address}
    with serving(narrow, wide, leader=both) as doorway:
        # It may be reset even before the call that connects has returned.
        with contextlib.suppress(ConnectionResetError), doorway.connect("intake1") as client:
            read_before_reset(client)
        with doorway.connect("intake2") as client, leader.accept() as end:
            client.sendall(b"raw\n")
            assert end.recv(100) == b"raw\n"
    assert "intake_refused" in doorway.log.names


def test_the_leader_may_end_first(leader):
    with serving(leader={"lines": leader.address}) as doorway, doorway.connect() as client, leader.accept() as end:
        end.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
        client.sendall(b"a|more\n")
        client.shutdown(socket.SHUT_WR)
        assert read_all(end) == b"a|more\n"


def test_much_passes_both_ways_at_once(leader):
    there, back = os.urandom(20 * MIB), os.urandom(30 * MIB)
    with serving(leader={"lines": leader.address}) as doorway, doorway.connect() as client, leader.accept() as end:
        feeding = [feed(client, there), feed(end, back)]
        found: list[bytes] = []
        reading = threading.Thread(target=lambda: found.append(read_all(end)))
        reading.start()
        assert read_all(client) == back
        for thread in (reading, *feeding):
            thread.join(PATIENCE_S)
        assert found == [there]


def test_a_side_that_does_not_read_holds_up_the_other_and_costs_no_turns(leader):
    with serving(leader={"lines": leader.address}) as doorway, doorway.connect() as client, leader.accept() as end:
        client.setblocking(False)
        sent = 0

        def is_still() -> bool:
            """The kernels are full: nothing more is taken, and five turns take as long as five waits."""
            nonlocal sent
            with contextlib.suppress(BlockingIOError):
                sent += client.send(bytes(MIB))
                return False
            before, began = doorway.turns, time.monotonic()
            until(lambda: doorway.turns >= before + 5, "turns of the doors")
            return time.monotonic() - began > 0.16

        until(is_still, "a rest of the doors")
        client.setblocking(True)
        client.shutdown(socket.SHUT_WR)
        assert len(read_all(end)) == sent


@pytest.mark.parametrize("side", ["client", "leader"])
def test_a_reset_is_passed_on_as_a_reset(leader, side):
    with serving(leader={"lines": leader.address}) as doorway, doorway.connect() as client, leader.accept() as end:
        client.sendall(b"x")
        end.sendall(b"y")
        assert client.recv(1) == b"y" and end.recv(1) == b"x"
        broken, other = (client, end) if side == "client" else (end, client)
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        broken.close()
        with pytest.raises(ConnectionResetError):
            read_all(other)
        doorway.await_connections(0)


def test_another_leader_resets_what_is_spliced_and_serves_what_comes(leader):
    other = Leader()
    with serving(leader={"broker": "b", "lines": leader.address}) as doorway, doorway.connect() as client:
        with leader.accept() as end:
            client.sendall(b"a|1\n")
            assert end.recv(100) == b"a|1\n"
            doorway.leader = {"broker": "c", "lines": other.address}
            assert read_before_reset(client) == b""
            assert read_before_reset(end) == b""
        with doorway.connect() as again, other.accept() as there:
            again.sendall(b"a|2\n")
            assert there.recv(100) == b"a|2\n"
    other.close()


def test_who_waits_is_served_by_the_leader_that_comes(leader):
    with serving() as doorway, doorway.connect() as client:
        doorway.stop_clock()
        client.sendall(b"a|1\n")
        doorway.await_connections(1)
        doorway.ahead_s += WAIT_S - 1  # not long enough to be refused
        doorway.leader = {"broker": "b", "lines": leader.address}
        with leader.accept() as end:
            assert end.recv(100) == b"a|1\n"


def test_without_a_leader_lines_are_told_and_reset_after_five_seconds():
    with serving() as doorway, doorway.connect() as client:
        doorway.stop_clock()
        client.sendall(b"a|1\n")
        doorway.await_connections(1)
        doorway.ahead_s += WAIT_S - 1
        turns = doorway.turns
        until(lambda: doorway.turns > turns + 2, "turns of the doors")
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
        client.settimeout(PATIENCE_S)
        doorway.clock = time.monotonic
        doorway.ahead_s += 1
        until(lambda: doorway.row.connections == 1 and "no_leader" in doorway.log.names, "a refusal")
        assert client.recv(200).startswith(b"!err 0 no_leader ")
        doorway.ahead_s += 2
        assert read_before_reset(client) == b""
        doorway.await_connections(0)


def test_without_a_leader_http_answers_503():
    with serving(door("http", HTTP)) as doorway, doorway.connect("http") as client:
        client.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        doorway.await_connections(1)
        doorway.ahead_s += WAIT_S
        head, _, body = read_all(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 1\r\n" in head
        assert f"Content-Length: {len(body)}".encode() in head
        found = json.loads(body)
        assert found["code"] == "no_leader" and found["error"] == found["message"]


def test_without_a_leader_what_speaks_neither_is_closed():
    with serving(door("https", OTHER)) as doorway, doorway.connect("https") as client:
        doorway.await_connections(1)
        doorway.ahead_s += WAIT_S
        assert read_before_reset(client) == b""


def test_a_leader_whose_port_refuses_is_tried_again_and_then_is_no_leader(leader):
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # and does not listen
        address = f"{HOST}:{taken.getsockname()[1]}"
        with serving(leader={"lines": address}) as doorway, doorway.connect() as client:
            doorway.await_connections(1)
            taken.listen()
            taken.settimeout(PATIENCE_S)
            doorway.ahead_s += 1
            taken.accept()[0].close()
            client.close()
        with serving(leader={"lines": f"{HOST}:1"}) as doorway, doorway.connect() as client:
            doorway.await_connections(1)
            doorway.ahead_s += WAIT_S
            assert client.recv(200).startswith(b"!err 0 no_leader ")
            until(lambda: doorway.log.of("no_leader"), "a log line")
            assert f" {HOST}:1" in str(doorway.log.of("no_leader")[0]["reason"])


def test_a_leader_without_this_port_is_no_leader(leader):
    with serving(leader={"broker": "b", "http": leader.address}) as doorway, doorway.connect() as client:
        doorway.await_connections(1)
        doorway.ahead_s += WAIT_S
        assert client.recv(200).startswith(b"!err 0 no_leader ")


def test_a_leader_may_be_named_by_its_host(leader):
    port = leader.address.rpartition(":")[2]
    with serving(leader={"lines": f"localhost:{port}"}) as doorway, doorway.connect() as client:
        client.sendall(b"x")
        with leader.accept() as end:
            assert end.recv(1) == b"x"


def test_a_host_that_nobody_knows_holds_up_nothing():
    with serving(leader={"lines": "no-such-host.invalid:5673"}) as doorway, doorway.connect() as client:
        doorway.await_connections(1)
        doorway.ahead_s += WAIT_S
        assert client.recv(200).startswith(b"!err 0 no_leader ")


def test_beyond_the_limit_lines_are_told_and_others_closed(leader):
    doors = door(), door("grpc", OTHER)
    with serving(*doors, leader={"lines": leader.address}, most=1) as doorway, doorway.connect() as first:
        with leader.accept() as end, doorway.connect() as second:
            assert second.recv(200).startswith(b"!err 0 connections 1 are open already")
            with contextlib.suppress(ConnectionResetError), doorway.connect("grpc") as third:
                assert read_before_reset(third) == b""
            until(lambda: doorway.row.turned_away == 2, "both counted")
            first.sendall(b"x")
            assert end.recv(1) == b"x"
            doorway.ahead_s += 2
            assert read_before_reset(second) == b""
        first.close()
        doorway.await_connections(0)
        with doorway.connect() as last, leader.accept() as end:
            last.sendall(b"y")
            assert end.recv(1) == b"y"


def test_no_more_than_some_of_those_beyond_the_limit_are_kept_open(leader):
    with serving(leader={"lines": leader.address}, most=1) as doorway, doorway.connect(), leader.accept():
        doorway.await_connections(1)
        with contextlib.ExitStack() as many:
            for _ in range(60):
                with contextlib.suppress(ConnectionResetError):  # it may be closed before it is there
                    many.enter_context(doorway.connect())
            until(lambda: doorway.row.turned_away == 60, "all refused")
            assert doorway.row.connections <= 1 + 16


def test_an_address_that_leads_back_here_makes_no_circle():
    with serving() as doorway, doorway.connect() as client:
        doorway.leader = {"lines": f"{HOST}:{doorway.doors.ports['lines']}"}
        with contextlib.suppress(ConnectionResetError):
            client.recv(1)
        until(lambda: "door_leads_here" in doorway.log.names, "that it leads")
        assert doorway.row.connections <= 2


def test_tls_passes_as_bytes(leader, tmp_path: Path):
    authority = Authority(tmp_path)
    cert, key = authority.issue("leader")
    there = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    there.load_cert_chain(cert, key)
    with serving(door("https", OTHER), leader={"https": leader.address}) as doorway:

        def answer() -> None:
            with there.wrap_socket(leader.accept(), server_side=True) as end:
                end.sendall(end.recv(100).upper())
                with contextlib.suppress(OSError):  # the client closes without a reply
                    end.unwrap()

        thread = threading.Thread(target=answer)
        thread.start()
        here = ssl.create_default_context(cafile=str(authority.path))
        with here.wrap_socket(doorway.connect("https"), server_hostname="localhost") as client:
            client.sendall(b"hello")
            assert client.recv(100) == b"HELLO"
            assert client.recv(100) == b""
        thread.join(PATIENCE_S)


def test_when_it_is_over_everything_is_reset_at_once(leader):
    doorway = Doorway(leader={"lines": leader.address})
    with doorway.connect() as client, leader.accept() as end:
        client.sendall(b"x")
        assert end.recv(1) == b"x"
        doorway.end()
        assert read_before_reset(client) == b"" and read_before_reset(end) == b""
    with pytest.raises(ConnectionRefusedError):
        doorway.connect()


def test_the_addresses_of_a_broker_are_those_of_its_open_ports(tmp_path: Path):
    with serving(door(), door("https", OTHER)) as doorway:
        doorway.doors.write_ports(str(tmp_path))
        (tmp_path / "http.port").write_text("no number")
        ports = doorway.doors.ports
        assert addresses(str(tmp_path), "pod-a") == {name: f"pod-a:{ports[name]}" for name in ("lines", "https")}
        assert addresses(str(tmp_path), "::1")["lines"] == f"[::1]:{ports['lines']}"


def test_without_a_leader_consumers_are_told_as_their_protocol_says():
    with serving(door("egress", CONSUMERS)) as doorway, doorway.connect("egress") as client:
        doorway.await_connections(1)
        doorway.ahead_s += WAIT_S
        assert client.recv(200).startswith(b"!err no_leader ")


def test_a_port_that_is_in_use_names_its_setting():
    with socket.create_server((HOST, 0)) as taken, pytest.raises(ConfigError, match="KMQ_LINES_PORT=") as caught:
        Doorway(door(port=taken.getsockname()[1]))
    assert "cannot listen" in str(caught.value)


def test_a_port_in_use_whose_door_may_wait_is_opened_once_it_is_free(tmp_path: Path, leader):
    (tmp_path / "kafka.port").write_text("1")
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        kafka = door("kafka", OTHER, port)._replace(may_wait=True)
        doorway = Doorway(door(), kafka, leader={"lines": leader.address, "kafka": leader.address})
        doorway.doors.write_ports(str(tmp_path))
        assert {*doorway.doors.closed} == {"kafka"} and not (tmp_path / "kafka.port").exists()
        with doorway.connect(), leader.accept():
            pass
    until(lambda: not doorway.doors.closed, "the port")
    assert (tmp_path / "kafka.port").read_text() == f"{port}\n"
    with doorway.connect("kafka"), leader.accept():
        pass
    doorway.end()


SO_ATTACH_FILTER = 26
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET: keep 0 bytes


def test_a_path_to_the_leader_that_is_dead_ends_its_clients_and_one_that_does_not_read_none(leader):
    ways = contextlib.ExitStack()
    with serving(leader={"lines": leader.address}) as doorway, ways:
        slow, busy, client, end = (
            ways.enter_context(each)
            for each in (doorway.connect(), leader.accept(), doorway.connect(), leader.accept())
        )
        slow.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while slow.send(bytes(MIB)):  # more than the kernels on the way take: backpressure
                pass
        end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(DROP_ALL)))
        client.sendall(b"x")
        ends = doorway.doors._ends
        until(lambda: any(each.unacked_since for each in [*ends.values()]), "a connection that is not confirmed")
        doorway.ahead_s += 60.0
        client.settimeout(PATIENCE_S)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        doorway.await_connections(1)
        assert busy.recv(1 << 20), "it goes on as soon as the leader reads"
    assert "path_dead" in doorway.log.names


def test_a_broker_that_reaches_no_leader_sends_clients_elsewhere_at_once():
    with serving(door(), door("http", HTTP)) as doorway, doorway.connect() as early:
        doorway.await_connections(1)
        early.settimeout(WAIT_S - 1)
        doorway.leader = None
        assert early.recv(200).startswith(b"!err 0 no_leader ")
        with doorway.connect("http") as late:
            late.settimeout(WAIT_S - 1)
            assert late.recv(200).startswith(b"HTTP/1.1 503 ")


def test_many_that_come_and_go_leave_nothing(leader):
    with serving(leader={"lines": leader.address}) as doorway:
        before = len(os.listdir("/proc/self/fd"))
        for turn in range(200):
            with doorway.connect() as client, leader.accept() as end:
                client.sendall(b"%d\n" % turn)
                assert end.recv(100) == b"%d\n" % turn
        doorway.await_connections(0)
        until(lambda: len(os.listdir("/proc/self/fd")) <= before, "the end of the descriptors")
