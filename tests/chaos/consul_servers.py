"""Three Consul servers, and their clients, in network namespaces of their own (network.py). Needs root.

Tests ask a server by its Unix socket, which no cut of the network reaches.
"""

import base64
import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from consuls import program
from waiting import attempts, until

from chaos.network import NET, Network, run

CLIENT = 101  # number of the first client
HTTP_PORT = 8500
_ANSWER_S = 5.0

_SETTINGS = {
    "server": True,
    "disable_update_check": True,
    "leave_on_terminate": False,
    "skip_leave_on_interrupt": True,
    "retry_interval": "500ms",
    "performance": {"raft_multiplier": 1},
    # A lost server is found out in 3 s. Sooner, and a busy machine loses one that runs, and with it all sessions there.
    "gossip_lan": {"probe_interval": "500ms", "probe_timeout": "400ms", "suspicion_mult": 4},
    "autopilot": {"cleanup_dead_servers": False},  # a server that comes back has its vote at once
    "ports": {"http": HTTP_PORT, "dns": -1, "grpc": -1, "serf_wan": -1},
    "log_level": "warn",
}


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("consul", timeout=_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class ConsulServer:
    """One server; `start` after `kill` goes on with its data."""

    def __init__(self, network: Network, number: int, root: Path) -> None:
        self.number = number
        self.address = f"{NET}.{number}"
        self.socket = root / f"{number}.sock"
        self._command = [*network.inside(number), program(), "agent", f"-config-file={root / str(number)}.json"]
        self._log = root / f"{number}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.is_paused = False
        settings = _SETTINGS | {
            "node_name": f"server-{number}",
            "data_dir": str(root / f"{number}.data"),
            "bind_addr": self.address,
            "addresses": {"http": f"{self.address} unix://{self.socket}"},
            "bootstrap_expect": 3,
            "retry_join": [f"{NET}.{other}" for other in (1, 2, 3) if other != number],
        }
        (root / f"{number}.json").write_text(json.dumps(settings))

    @property
    def pid(self) -> int:
        assert self.process is not None, f"server {self.number} does not run"
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and not self.is_paused

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        with open(self._log, "ab") as out:
            environment = {"CHECKPOINT_DISABLE": "1", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
            self.process = subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def kill(self) -> None:
        """SIGKILL: it says goodbye to nobody, and keeps what is on its disk."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process, self.is_paused = None, False

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.is_paused = False

    def ask(self, path: str) -> Any:
        """Return what this server answers; None if it does not answer within some seconds, or refuses."""
        connection = _UnixConnection(self.socket)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            if response.status == 404:
                return []
            return json.loads(body) if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def knows_leader(self) -> str:
        """Return the address of the leader that this server follows, or is; "": it knows none, or does not answer."""
        return str(self.ask("/v1/status/leader") or "").partition(":")[0]

    def reads(self) -> bool:
        """Return True if this server can read what a majority confirms."""
        return self.ask("/v1/kv/none?consistent") is not None

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


class ConsulServers:
    """The three servers. `network` cuts; servers and clients are numbers there."""

    def __init__(self, root: Path) -> None:
        self.root, self.network = root, Network()
        self.servers: list[ConsulServer] = []
        try:
            for number in (1, 2, 3):
                self.network.add(number)
                self.servers.append(ConsulServer(self.network, number, root))
            for server in self.servers:
                server.start()
            self.wait()
        except BaseException:
            self.close()
            raise

    def addresses_of(self, servers: list[ConsulServer]) -> str:
        return ",".join(f"{server.address}:{HTTP_PORT}" for server in servers)

    @property
    def addresses(self) -> str:
        """What KMQ_CONSUL is for a client."""
        return self.addresses_of(self.servers)

    def client(self, index: int = 0) -> int:
        """Return the number of a client's namespace, made now if there is none."""
        self.network.add(CLIENT + index)
        return CLIENT + index

    def leader(self) -> ConsulServer:
        """Return the leader that most servers agree on, waiting for one."""

        def known() -> list[str]:
            return [server.knows_leader() for server in self.servers if server.is_running]

        def agreed() -> ConsulServer | None:
            found = known()
            return next((each for each in self.servers if each.is_running and found.count(each.address) >= 2), None)

        return until(agreed, "a leader", lambda: f"they know {known()}: {self.servers[0].log()}")

    def others(self) -> list[ConsulServer]:
        """Return the servers that follow."""
        leader = self.leader()
        return [server for server in self.servers if server is not leader]

    def wait(self) -> None:
        """Wait until every running server can read what a majority confirms."""
        for each in self.servers:
            until(lambda each=each: not each.is_running or each.reads(), f"server {each.number} reads", each.log)  # type: ignore[misc]

    def repair(self) -> None:
        """Heal the network, let every server run, and wait until all of them work."""
        self.network.heal()
        for server in self.servers:
            if server.process is None:
                server.start()
            elif server.is_paused:
                server.resume()
        self.wait()

    def entries(self, prefix: str) -> dict[str, bytes]:
        """Return the keys under a prefix, without it, and their values, as a majority confirms them."""
        tries = attempts("an answer of Consul")
        while True:
            next(tries)
            server = next((server for server in self.servers if server.is_running), None)
            items = server.ask(f"/v1/kv/{prefix}?recurse&consistent") if server is not None else None
            if items is not None:
                return {item["Key"].removeprefix(prefix): base64.b64decode(item["Value"] or "") for item in items}

    def snapshot(self, verb: str, file: Path) -> None:
        """`verb`: save what Consul holds, or restore it."""
        server = self.leader()
        environment = {"CONSUL_HTTP_ADDR": f"unix://{server.socket}", "PATH": "/usr/bin:/bin"}
        done = subprocess.run([program(), "snapshot", verb, file], capture_output=True, text=True, env=environment)
        assert not done.returncode, done.stderr

    def close(self) -> None:
        for server in self.servers:
            server.kill()
        self.network.close()


@contextmanager
def consul_servers(root: Path) -> Iterator[ConsulServers]:
    """The servers for a with block. Where there are no network namespaces the test is skipped; in CI it fails."""
    try:
        run("ip", "netns", "list")
        assert os.geteuid() == 0, "not root"
        made = ConsulServers(root)
    except (OSError, AssertionError) as error:
        reason = f"no network namespaces with Consul here (needs root): {error}"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    try:
        yield made
    finally:
        made.close()
