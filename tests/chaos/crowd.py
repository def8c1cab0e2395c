"""Groups of members over every door, each a process, and what befalls them: killed, stopped for too long, gone, new."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from typing import Protocol

from waiting import PATIENCE_S

from chaos import history

TESTS = Path(__file__).resolve().parents[1]


class Home(Protocol):
    """Where members find their broker's ports, and leave what they write."""

    root: Path
    pipes: Path


class Crowd:
    """The members of some groups, all of one topic. `groups`: group → the doors of its first members, and of any other."""

    def __init__(
        self, pod: Home, topic: str, groups: dict[str, tuple[str, ...]], session_s: float, rng: random.Random
    ) -> None:
        self._pod, self._topic, self.groups, self._session_s, self._rng = pod, topic, groups, session_s, rng
        self._directory = pod.root / "histories"
        self._directory.mkdir()
        self._numbers = count(1)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._asleep: dict[str, float] = {}  # member → when it goes on
        self.started = self.killed = self.zombies = self.left = 0

    # --- members -----------------------------------------------------------------------------------------------------

    def join(self, group: str, door: str = "", name: str = "") -> None:
        door = door or self._rng.choice(self.groups[group])
        name = name or f"{group}-{door}-{next(self._numbers)}"
        words = [door, name, group, self._topic, self._pod.pipes, self._directory / name, self._session_s]
        argv = [sys.executable, "-m", "chaos.member", *map(str, words)]
        with (self._pod.root / "members.log").open("ab") as log:
            env = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
            self._running[name] = subprocess.Popen(argv, cwd=self._pod.root, env=env, stderr=log)
        self.started += 1

    def join_all(self) -> None:
        for group, doors in self.groups.items():
            for door in doors:
                self.join(group, door)

    def _awake(self) -> list[str]:
        return sorted(self._running.keys() - self._asleep.keys())

    def kill(self) -> None:
        """One is killed; it, under its name, or another one comes."""
        if awake := self._awake():
            name = self._rng.choice(awake)
            group, door, _ = name.rsplit("-", 2)
            self._end(name, signal.SIGKILL)
            self.killed += 1
            self.join(group, *([door, name] if self._rng.random() < 0.4 else []))

    def leave(self) -> None:
        """One leaves in order, and another one comes."""
        if awake := self._awake():
            name = self._rng.choice(awake)
            self._end(name, signal.SIGTERM)
            self.left += 1
            self.join(name.rsplit("-", 2)[0])

    def replace(self, door: str) -> None:
        """Those at this door leave, and others come at another one."""
        for name in [name for name in self._running if name.rsplit("-", 2)[1] == door]:
            group = name.rsplit("-", 2)[0]
            self._end(name, signal.SIGTERM)
            self.join(group, self._rng.choice([other for other in self.groups[group] if other != door]))

    def sleep(self) -> None:
        """One is stopped until its session has long ended, and then goes on."""
        if awake := self._awake():
            name = self._rng.choice(awake)
            self._running[name].send_signal(signal.SIGSTOP)
            self._asleep[name] = time.monotonic() + self._session_s * (1.2 + self._rng.random())
            self.zombies += 1

    def wake(self, everybody: bool = False) -> None:
        """Those whose time has come go on. Nobody has ended by itself."""
        for name, process in self._running.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}: {self.log()[-3000:]}"
        for name, at in list(self._asleep.items()):
            if everybody or at <= time.monotonic():
                del self._asleep[name]
                self._running[name].send_signal(signal.SIGCONT)

    def _end(self, name: str, number: int) -> None:
        process = self._running.pop(name)
        process.send_signal(number)
        code = process.wait(PATIENCE_S)
        assert code in (0, -number), f"{name} ended with {code}: {self.log()[-2000:]}"

    def finish(self) -> None:
        """All leave in order."""
        self.wake(everybody=True)
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for name in list(self._running):
            self._end(name, signal.SIGTERM)

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def log(self) -> str:
        """What the members have to say, and who is there."""
        return f"{(self._pod.root / 'members.log').read_text()}\nrunning: {sorted(self._running)}"

    def doors_that_read(self) -> set[str]:
        """The doors over which a member was given messages."""
        return {path.name.rsplit("-", 2)[1] for path in self._directory.iterdir() if "\nPoll" in path.read_text()}

    def history(self) -> Iterator[history.Operation]:
        for path in sorted(self._directory.iterdir()):
            yield from history.read(path)


class Observer(threading.Thread):
    """Asks the broker all the time who owns what, and what is committed."""

    def __init__(self, pod: Home, groups: Iterable[str]) -> None:
        super().__init__(daemon=True)
        self._port_file, self._groups = pod.pipes / "http.port", tuple(groups)
        self.history: list[history.Operation] = []
        self.ends: dict[str, history.Offsets] = {}
        self.lags: dict[str, int] = {}
        self.enough = threading.Event()

    def run(self) -> None:
        while not self.enough.wait(0.1):
            try:
                connection = HTTPConnection("127.0.0.1", int(self._port_file.read_text()), timeout=PATIENCE_S)
                with closing(connection):
                    for group in self._groups:
                        self._ask(connection, group)
            except (OSError, ValueError, HTTPException):
                pass  # the gateway is away

    def _ask(self, connection: HTTPConnection, group: str) -> None:
        began = time.monotonic()
        connection.request("GET", f"/api/groups/{group}")
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            return
        rows = {(row["topic"], row["partition"]): row for row in answer["partitions"]}
        offsets = {place: row["committed"] for place, row in rows.items() if row["committed"] is not None}
        owners = [
            (member["id"], (place["topic"], place["partition"]))
            for member in answer["members"]
            for place in member["assignment"]
        ]
        self.history.append(history.Committed(group, offsets, began, time.monotonic()))
        self.history.append(history.Owners(group, answer["generation"], tuple(owners)))
        self.ends[group] = {place: row["end"] for place, row in rows.items()}
        # What was given back, or may not have arrived, lies in front of the committed offset, and is still to come.
        self.lags[group] = sum(row["end"] - (row["committed"] or 0) + row["nacked"] for row in rows.values())

    def finish(self) -> None:
        self.enough.set()
        self.join(PATIENCE_S)
