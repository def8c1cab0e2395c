"""A broker as a user has one: `kmq` commands, an environment, files. Private, and gone after the test whatever happened.

Two others start processes of a broker themselves, because a supervisor would start again what a test has ended: chaos.pod.Pod
the four stages, contract/test_shard.py a replica and the stages behind it.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import command_server
import psutil
from waiting import PATIENCE_S, until

from kmq.broker import status
from kmq.config.settings import load
from kmq.links import layout

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("ingress", "framer", "durability", "router")
_PORTS = ("PORT", "ACK_PORT", "HTTP_PORT", "GRPC_PORT", "KAFKA_PORT", "KAFKA_TLS_PORT", "EGRESS_PORT", "STATUS_PORT")
FREE_PORTS = {f"KMQ_{port}": "0" for port in _PORTS}  # each broker its own: other tests run beside it
_number = count()


def environment(**settings: object) -> dict[str, str]:
    """The environment of this process, with these settings and no other ones of KMQ."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KMQ_", "RB_"))}
    return kept | {name: str(value) for name, value in settings.items()}


def is_alive(process: psutil.Process) -> bool:
    """Not gone and not a zombie: init takes its time to reap what a dead supervisor leaves to it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def whole_lines(paths: list[Path]) -> list[bytes]:
    """The lines of these logs, without one that is being written."""
    texts = (path.read_bytes() for path in paths)
    return b"".join(text[: text.rfind(b"\n") + 1] for text in texts).split(b"\n")[:-1]


def remove_shared_memory(instance: str) -> None:
    """Remove what the instance has left, when none of its processes lives."""
    for path in Path("/dev/shm").glob(f"{instance}.*"):
        path.unlink()
    layout.remove_left_bells(instance)


class Broker:
    """One instance: its settings as environment, its directories, the commands that drive it."""

    def __init__(self, root: Path, data: Path | None = None) -> None:
        self.inside: Sequence[str] = ()  # the words under which commands run, as of a network namespace
        self.gateway = True  # whether it will have one: that takes longer to start than the four stages together
        self.root, self.data, self.pipes = root, data or root / "data", root / "pipes"
        root.mkdir(parents=True, exist_ok=True)
        self.instance = f"sc{os.getpid()}-{next(_number)}"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        where = {"KMQ_INSTANCE": self.instance, "KMQ_DATA": self.data, "KMQ_PIPES": self.pipes}
        self.env = environment(PATH=path, COLUMNS=80, **where, **FREE_PORTS)

    # --- commands ------------------------------------------------------------------------------------------------

    def run(
        self, *command: str, text: str = "", patience_s: float = PATIENCE_S, **settings: object
    ) -> subprocess.CompletedProcess[str]:
        """A command in this broker's environment, changed by `settings`; `text` is its stdin."""
        env = self.env | {name: str(value) for name, value in settings.items()}
        return subprocess.run(
            [*self.inside, *command],
            env=env,
            cwd=self.root,
            input=text,
            capture_output=True,
            text=True,
            timeout=patience_s,
        )

    def kmq(
        self, *arguments: str, text: str = "", patience_s: float = PATIENCE_S, **settings: object
    ) -> subprocess.CompletedProcess[str]:
        """The same of `kmq`, without a new interpreter for it where that is possible (command_server.py)."""
        if self.inside:
            return self.run("kmq", *arguments, text=text, patience_s=patience_s, **settings)
        env = self.env | {name: str(value) for name, value in settings.items()}
        return command_server.run([*arguments], env, self.root, text, patience_s)

    def up(self, **settings: Any) -> None:
        result = self.kmq("up", *[] if self.gateway else ["--no-gateway"], **settings)
        assert result.returncode == 0, result.stderr

    def down(self) -> None:
        result = self.kmq("down")
        assert result.returncode == 0, result.stderr

    # --- what is there -------------------------------------------------------------------------------------------

    def status(self) -> dict[str, dict[str, str]]:
        """Stage → fields of `kmq status --logfmt`, without the half second for its rates; the links are under `backlog`."""
        found = {}
        shown = status.logfmt(status.collect(load(self.env, toml="")))
        for line in [line for line in shown.splitlines() if line.startswith(("stage=", "links="))]:
            fields = dict(part.split("=", 1) for part in line.split())
            found[fields.pop("stage", "") or fields.pop("links")] = fields
        return found

    def pids(self) -> dict[str, int]:
        """Stage → pid, with the gateway's and the supervisor's."""
        shown = self.status()
        owner = (self.pipes / "supervisor.owner").read_text()
        return {name: int(shown[name]["pid"]) for name in (*STAGES, "gateway") if name in shown} | {
            "supervisor": int(owner.split()[0][len("pid=") :])
        }

    def log(self) -> str:
        return (self.pipes / "kmq.log").read_text()

    def lines(self, topic: str) -> list[bytes]:
        """The stored lines of a topic, partition by partition."""
        return whole_lines(sorted((self.data / "topics" / topic).glob("*/*.log")))

    def wal(self) -> list[bytes]:
        return whole_lines(sorted((self.data / "append").glob("*.log")))

    def get(self, path: str, port: str = "http") -> tuple[int, str]:
        """(status, body) of an HTTP request to the gateway; `port`: http or metrics."""
        number = int((self.pipes / f"{port}.port").read_text())
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{number}{path}", timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    # --- messages ------------------------------------------------------------------------------------------------

    def send_lines(self, lines: list[bytes]) -> None:
        """Over plain TCP; returns when the broker has taken them all."""
        port = int((self.pipes / "ingress.port").read_text())
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"".join(line + b"\n" for line in lines))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass

    def wait(self, condition, what: str, **options):  # type: ignore[no-untyped-def]
        return until(condition, what, lambda: self.log()[-2000:], **options)

    def wait_routed(self, n: int) -> None:
        """Until the router has passed seq `n`, and those in front of it have said so too."""

        def is_routed() -> bool:
            shown = self.status()
            return all(int(shown[name]["seq"]) >= n for name in STAGES[1:])

        self.wait(is_routed, f"seq {n} routed")

    # --- faults and the end --------------------------------------------------------------------------------------

    def kill(self, *names: str) -> None:
        """SIGKILL these (default: everything, the supervisor first) and wait until they are gone."""
        victims: list[psutil.Process] = []

        def are_alive() -> bool:  # one killed just before has its old pid in the status until it is there again
            pids = self.pids()
            with contextlib.suppress(psutil.NoSuchProcess):
                victims[:] = [psutil.Process(pids[name]) for name in names or ("supervisor", *STAGES)]
                return all(map(is_alive, victims))
            return False

        self.wait(are_alive, f"life in those to be killed: {names}")
        for victim in victims:
            victim.kill()
        self.wait(lambda: not any(map(is_alive, victims)), "the end of those killed")

    def processes(self) -> list[psutil.Process]:
        """Everything that runs in this instance's environment, however it was started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("KMQ_INSTANCE") == self.instance:
                    found.append(process)
        return found

    def kill_all(self) -> None:
        """SIGKILL whatever runs in this instance, until nothing is left."""
        while left := self.processes():  # again: a supervisor may have started a stage just now
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def lose_disk(self) -> None:
        """What a machine leaves that burns down: every process killed, directories and memory gone."""
        self.kill_all()
        shutil.rmtree(self.data)
        shutil.rmtree(self.pipes)
        remove_shared_memory(self.instance)

    def close(self) -> None:
        self.kill_all()
        remove_shared_memory(self.instance)
        shutil.rmtree(self.root)
