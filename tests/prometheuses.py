"""A real Prometheus for tests: Debian's, on a free port, with its data in the test's directory."""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from consuls import free_ports
from promtools import program
from waiting import PATIENCE_S, until


class Prometheus:
    """It scrapes `targets` (job → addresses) and evaluates `groups` of rules, both all the time."""

    def __init__(self, directory: Path, targets: dict[str, list[str]], groups: list[dict[str, Any]]) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "log"
        (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
        jobs = [{"job_name": job, "static_configs": [{"targets": listed}]} for job, listed in targets.items()]
        every = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"}
        config = {"global": every, "rule_files": [f"{directory}/rules.yaml"], "scrape_configs": jobs}
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        options = {
            "config.file": directory / "prometheus.yaml",
            "storage.tsdb.path": directory / "data",
            "web.listen-address": self.address,
            "log.level": "warn",
        }
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [program("prometheus"), *(f"--{name}={value}" for name, value in options.items())],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.wait(self._is_ready, "a Prometheus that is ready")

    def _is_ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5) as reply:
            return bool(reply.status == 200)
        return False

    def wait(self, condition: Any, what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until `condition()` is true."""
        until(condition, what, self.log.read_text, seconds=patience_s, process=self.process)

    def ask(self, path: str, **parameters: str) -> Any:
        """Return `data` of an answer of the API."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}?{query}", timeout=30) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def alerts(self) -> dict[str, dict[str, Any]]:
        """Return the alerts that fire, by name."""
        return {each["labels"]["alertname"]: each for each in self.ask("alerts")["alerts"] if each["state"] == "firing"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
