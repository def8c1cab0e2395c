"""`kmq ship` of one topic: its logs, its state, and the process while there is one."""

import os
import re
import signal
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brokers import Broker
from waiting import until


class Ship:
    """One ship; the test starts and ends it."""

    process: subprocess.Popen[bytes]

    def __init__(self, broker: Broker, root: Path, topic: str) -> None:
        self.broker, self.topic, self.root = broker, topic, root
        self.logs = root / "logs"
        self.logs.mkdir()
        self.state = root / f"{topic}.state"

    def command(self, *options: str, pattern: str = "*.log") -> list[str]:
        return ["kmq", "ship", f"{self.logs}/{pattern}", "--topic", self.topic, "--state", str(self.state), *options]

    def once(self, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.broker.run(*self.command("--once", *options, **more))

    def start(self, *options: str) -> None:
        with (self.root / "said").open("ab") as said:
            self.process = subprocess.Popen(
                self.command(*options), env=self.broker.env, cwd=self.root, stdout=said, stderr=said
            )

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        if hasattr(self, "process") and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def said(self) -> str:
        return (self.root / "said").read_text()

    def wait_state(self) -> None:
        """Until the first state is there, so that files which come later are new."""
        until(self.state.exists, "a state", self.said, process=self.process)

    def rows(self) -> dict[str, int]:
        """Name of each file in the state → its offset."""
        rows = re.findall(r"(?m)^offset=(\d+) .* path=(.*)$", self.state.read_text() if self.state.exists() else "")
        return {os.path.basename(path): int(offset) for offset, path in rows}

    def wait_sent(self, name: str) -> None:
        size = (self.logs / name).stat().st_size
        self.broker.wait(lambda: self.rows().get(name) == size, f"all of {name}")

    def stored(self) -> list[bytes]:
        """The payloads of the topic, once the router has them all."""
        self.broker.wait_routed(len(self.broker.wal()))
        return [decoded(line) for line in self.broker.lines(self.topic)]


def decoded(line: bytes) -> bytes:
    header, payload = line.split(b"|", 5)[4:]
    return b64decode(payload) if b";enc=b64" in header else payload


def shipping(broker: Broker, root: Path, topic: str) -> Iterator[Ship]:
    made = Ship(broker, root, topic)
    yield made
    made.close()
