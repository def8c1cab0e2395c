"""The network that other tests break: a cut is one way and silent, losses lose their share, delays delay, healing heals."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from chaos.network import NET, Network, open_network

_RECEIVE = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
sock.bind(("", 7))
print("ready", flush=True)
sys.stdin.readline()
sock.setblocking(False)
count = 0
try:
    while sock.recv(16):
        count += 1
except BlockingIOError:
    print(count)
"""
_SEND = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    sock.sendto(b"x", (sys.argv[1], 7))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with open_network() as made:
        for number in (1, 2, 3):
            made.add(number)
        yield made


def arrived(network: Network, sender: int, receiver: int, count: int = 1) -> int:
    """Send so many packets; return how many of them arrive. A packet on a bridge has arrived when it was sent."""
    command = [*network.inside(receiver), sys.executable, "-c", _RECEIVE]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        words = [sys.executable, "-c", _SEND, f"{NET}.{receiver}", str(count)]
        subprocess.run([*network.inside(sender), *words], check=True, timeout=60)
        said, _ = process.communicate("how many?\n", timeout=60)
    return int(said)


def test_a_cut_is_one_way_and_healed(network: Network) -> None:
    network.cut(1, 2)
    assert not arrived(network, 1, 2) and arrived(network, 2, 1) and arrived(network, 1, 3)
    network.heal()
    assert arrived(network, 1, 2)


def test_a_split_keeps_each_side_together(network: Network) -> None:
    network.split([1], [2, 3])
    assert not any(arrived(network, *each) for each in ((1, 2), (2, 1), (1, 3), (3, 1)))
    assert arrived(network, 2, 3) and arrived(network, 3, 2)
    network.heal()
    assert arrived(network, 1, 2) and arrived(network, 3, 1)


def test_a_chain_has_its_middle(network: Network) -> None:
    network.split([1], [3])
    assert arrived(network, 1, 2) and arrived(network, 2, 3) and not arrived(network, 1, 3)
    network.heal()


def test_losses_lose_their_share_of_one_direction(network: Network) -> None:
    network.lose(1, 2, 0.5)
    assert 300 < arrived(network, 1, 2, 1000) < 700
    assert arrived(network, 2, 1, 1000) == 1000
    network.heal()
    assert arrived(network, 1, 2, 1000) == 1000


def round_trips_s(network: Network, sender: int, receiver: int) -> list[float]:
    """How long each of some TCP conversations takes there and back, the connection not counted."""
    code = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], 9))
for _ in range(3):
    began = time.monotonic()
    sock.sendall(b"x" * 100_000)
    got = 0
    while got < 100_000:
        got += len(sock.recv(1 << 16))
    print(time.monotonic() - began)
"""
    echo = """
import socket
server = socket.create_server(("", 9))
print("ready", flush=True)
sock, _ = server.accept()
while data := sock.recv(1 << 16):
    sock.sendall(data)
"""
    with subprocess.Popen([*network.inside(receiver), sys.executable, "-c", echo], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        words = [*network.inside(sender), sys.executable, "-c", code, f"{NET}.{receiver}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
    return [float(line) for line in done.stdout.split()]


def test_a_delay_delays_one_direction_and_loses_nothing(network: Network) -> None:
    assert min(round_trips_s(network, 1, 2)) < 0.5
    network.delay(1, [2], 0.5)
    assert min(round_trips_s(network, 1, 2)) >= 0.5
    assert min(round_trips_s(network, 1, 3)) < 0.5
    assert arrived(network, 2, 1, 100) == 100
    network.heal()
    assert min(round_trips_s(network, 1, 2)) < 0.5
