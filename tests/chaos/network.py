"""A network of namespaces that tests can break: each end has a namespace of its own, all are on one bridge. Needs root.

Every end has an address 10.77.0.<number>. Nothing of it can be reached from the host's network, and nothing of the
host's network is changed.

A cut is one way: the sender is given a wrong hardware address of the receiver, so what it sends arrives nowhere, and
nobody tells it. That is how a broken network looks from both sides. Loss needs iptables in the receiver's namespace.
Delay is slow_link.py, because not every kernel has netem.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from consuls import PATIENCE_S

PREFIX = "kmqt"  # of the names of namespaces: kmqt<pid>-<name>
NET = "10.77.0"
NOWHERE = "02:00:00:00:00:01"  # no interface has this address


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.startswith(PREFIX)]


def _remove_left_over() -> None:
    """Remove namespaces of tests that were killed."""
    for name in _namespaces():
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            with suppress(AssertionError):  # another test run has just removed it
                run("ip", "netns", "del", name)


def _iptables() -> str:
    """Return the path of iptables, installed if that is possible."""
    if not shutil.which("iptables") and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "-o", "DPkg::Lock::Timeout=100", "install", "-qq", "iptables"],
            capture_output=True,
            timeout=PATIENCE_S,
        )
    found = shutil.which("iptables")
    assert found, "iptables is not there, and cannot be installed: no packet can be lost on purpose"
    return found


class Network:
    """A bridge in a namespace of its own; each number has a namespace with one interface on it."""

    def __init__(self) -> None:
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._numbers: set[int] = set()
        self._cuts: set[tuple[int, int]] = set()
        self._lossy: set[int] = set()
        self._slow: dict[int, subprocess.Popen[bytes]] = {}
        _remove_left_over()
        self._bridge = self._prefix + "bridge"
        run("ip", "netns", "add", self._bridge)
        run("ip", "-n", self._bridge, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._bridge, "link", "set", "br0", "up")

    def namespace(self, number: int) -> str:
        return f"{self._prefix}{number}"

    def add(self, number: int) -> None:
        """Give this number its namespace, unless it has it."""
        if number in self._numbers:
            return
        name, port = self.namespace(number), f"p{number}"
        run("ip", "netns", "add", name)
        self._numbers.add(number)
        link = ["link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name]
        run("ip", "-n", self._bridge, *link)
        run("ip", "-n", self._bridge, "link", "set", port, "master", "br0", "up")
        run("ip", "-n", name, "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")

    def inside(self, number: int) -> list[str]:
        """What to write before a command so that it runs there, and ends with this process. The pid stays the same.

        `ip netns exec` would give it mounts of its own, and so keep a file system in use that this process unmounts.
        """
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/var/run/netns/{self.namespace(number)}"]

    def cut(self, sender: int, receiver: int) -> None:
        """From now on nothing that `sender` sends arrives at `receiver`. The way back stays open."""
        where = [f"{NET}.{receiver}", "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent"]
        run("ip", "-n", self.namespace(sender), "neigh", "replace", *where)
        self._cuts.add((sender, receiver))

    def cut_off(self, number: int) -> None:
        """Nothing arrives there, and nothing leaves."""
        for other in self._numbers - {number}:
            self.cut(number, other)
            self.cut(other, number)

    def split(self, ones: Iterable[int], others: Iterable[int]) -> None:
        """Nothing passes between these two sides any more. Within each side, and to all other ends, everything does."""
        others = tuple(others)
        for one in ones:
            for other in others:
                self.cut(one, other)
                self.cut(other, one)

    def lose(self, sender: int, receiver: int, share: float) -> None:
        """From now on this share of the packets from `sender` is lost on the way to `receiver`."""
        rule = ["-s", f"{NET}.{sender}", "-m", "statistic", "--mode", "random", "--probability", str(share)]
        run("ip", "netns", "exec", self.namespace(receiver), _iptables(), "-w", "-A", "INPUT", *rule, "-j", "DROP")
        self._lossy.add(receiver)

    def delay(self, sender: int, receivers: Iterable[int], delay_s: float) -> None:
        """From now on what `sender` sends to these receivers arrives so much later. One delay a sender."""
        self._undelay(sender)
        words = [f"{NET}.{sender}", str(delay_s), *(f"{NET}.{receiver}" for receiver in receivers)]
        command = [*self.inside(sender), sys.executable, str(Path(__file__).with_name("slow_link.py")), *words]
        link = self._slow[sender] = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert link.stdout is not None and link.stdout.readline() == b"ready\n", f"no delay of {sender}"

    def _undelay(self, sender: int) -> None:
        if link := self._slow.pop(sender, None):
            link.kill()
            link.communicate()

    def heal(self) -> None:
        """Take all cuts, losses and delays away."""
        for sender in [*self._slow]:
            self._undelay(sender)
        while self._cuts:
            sender, receiver = self._cuts.pop()
            run("ip", "-n", self.namespace(sender), "neigh", "del", f"{NET}.{receiver}", "dev", "eth0")
        while self._lossy:
            run("ip", "netns", "exec", self.namespace(self._lossy.pop()), _iptables(), "-w", "-F", "INPUT")

    def close(self) -> None:
        for sender in [*self._slow]:
            self._undelay(sender)
        for name in [*map(self.namespace, self._numbers), self._bridge]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def open_network() -> Iterator[Network]:
    """A network for a with block. Where there are no network namespaces the test is skipped; in CI it fails."""
    try:
        run("ip", "netns", "list")
        assert os.geteuid() == 0, "not root"
        made = Network()
    except (OSError, AssertionError) as error:
        reason = f"no network namespaces here (needs root): {error}"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    try:
        yield made
    finally:
        made.close()
