"""Three Consul servers on loopback addresses of their own, with their data on the disk, as a cluster has them."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.gauges import cpu_seconds
from bench.report import ROOT
from kmq.errors import RetryError

NUMBERS = (1, 2, 3)
PATIENCE_S = 60.0


class Servers:
    """The three servers. `addresses` is the value for KMQ_CONSUL, `program` the path of Consul."""

    def __init__(self, home: Path) -> None:
        done = subprocess.run([ROOT / "scripts/consul-setup"], capture_output=True, text=True)
        if done.returncode:
            raise RetryError(done.stderr.strip())
        self.program = done.stdout.strip()
        pid = os.getpid()
        self._net = f"127.{1 + pid % 254}.{1 + pid // 254 % 254}"
        self._processes = [self._start(home, number) for number in NUMBERS]
        self.addresses = ",".join(f"{self._net}.{number}:8500" for number in NUMBERS)

    def _start(self, home: Path, number: int) -> "subprocess.Popen[bytes]":
        address = f"{self._net}.{number}"
        settings = {
            "node_name": f"server-{number}",
            "data_dir": str(home / f"{number}.data"),
            "server": True,
            "bind_addr": address,
            "client_addr": address,
            "bootstrap_expect": len(NUMBERS),
            "retry_join": [f"{self._net}.{other}" for other in NUMBERS if other != number],
            "retry_interval": "500ms",
            "disable_update_check": True,
            "performance": {"raft_multiplier": 1},
            "limits": {"http_max_conns_per_client": 1000},  # 100 nodes on one address, and each has several connections
            "ports": {"dns": -1, "grpc": -1, "serf_wan": -1},
            "log_level": "warn",
        }
        file = home / f"{number}.json"
        file.write_text(json.dumps(settings))
        with open(home / f"{number}.log", "wb") as log:
            command = [self.program, "agent", f"-config-file={file}"]
            return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"CHECKPOINT_DISABLE": "1"})

    def wait(self) -> None:
        """Wait until each server can read what a majority confirms."""
        until = time.monotonic() + PATIENCE_S
        for address in self.addresses.split(","):
            while not _reads(address):
                if time.monotonic() > until:
                    raise RetryError(f"no leader of Consul within {PATIENCE_S:.0f} s; see the log of the servers")
                time.sleep(0.05)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all three so far."""
        return sum(cpu_seconds(process.pid) for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _reads(address: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{address}/v1/kv/none?consistent", timeout=5).close()
        return True
    except urllib.error.HTTPError as error:
        return error.code == 404
    except OSError:
        return False


@contextmanager
def servers_in(home: Path) -> Iterator[Servers]:
    made = Servers(home)
    try:
        made.wait()
        yield made
    finally:
        made.close()
