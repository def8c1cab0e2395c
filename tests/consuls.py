"""A real Consul for tests: one development agent, on free ports, in memory."""

import random
import socket
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path

from waiting import until

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 60.0
_random = random.SystemRandom()  # tests seed the other one, several of them alike


def program() -> str:
    """The path of Consul's program, fetched if there is none."""
    done = subprocess.run([ROOT / "scripts/consul-setup"], capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody has, neither for TCP nor for UDP, and that stay free between two starts of a server.

    The kernel gives higher ones to sockets that ask for any: tests beside this one open thousands of those.
    """
    ports: set[int] = set()
    while len(ports) < count:
        address = "127.0.0.1", _random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(address), socket.socket(type=socket.SOCK_DGRAM) as udp:
            udp.bind(address)
            ports.add(address[1])
    return [*ports]


class Consul:
    """`consul agent -dev`. Every test takes a cluster name of its own in it."""

    def __init__(self, log: Path, hcl: str = "", address: str = "") -> None:
        """`hcl`: more of its configuration. `address`: where one was that has ended; this one is empty again."""
        http, server, serf = free_ports(3)
        http = int(address.rpartition(":")[2]) if address else http
        self.address = f"127.0.0.1:{http}"
        self.log = log
        options = {"bind": "127.0.0.1", "http-port": http, "server-port": server, "serf-lan-port": serf}
        options |= {"serf-wan-port": -1, "dns-port": -1, "grpc-port": -1, "log-level": "warn"}
        arguments = [f"-{name}={value}" for name, value in options.items()]
        self._command = [program(), "agent", "-dev", *arguments, "-hcl", f"disable_update_check = true\n{hcl}"]
        self.start()

    def start(self) -> None:
        """Start it, on the same ports and with nothing in it."""
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                self._command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={"CHECKPOINT_DISABLE": "1", "PATH": "/usr/bin:/bin"},
            )
        until(self._has_leader, "a leader", self.log.read_text, process=self.process)

    def _has_leader(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{self.address}/v1/status/leader", timeout=5) as reply:
            return len(reply.read()) > 4
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
