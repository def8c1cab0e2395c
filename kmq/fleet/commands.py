"""Commands of the fleet: verify, compact, retain. Each is done once here, and the fleet is told what came of it.

Owner       KMQ_DATA/cluster/commands: each command that was accepted, and what came of it. A thread works it off, so
            that no state waits for a check of terabytes. `verify` and `compact` run as the commands of that name do.
Invariant   A command is marked in Consul only after it is in the file. One that has a result is never done again.
Crash       Killed in the middle of a command: it is begun again, because all three may be repeated. Killed before its
            result is in Consul: the result is in the file, and is written at the next start.
Memory      KEPT commands that are told, MOST in all: beyond that the oldest go, those with a result first.
            Of what a command prints, the first findings.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kmq.cluster.consul import ConsulError
from kmq.cluster.fleet import COMMANDS, MAX_FINDINGS, Result
from kmq.cluster.message import Message
from kmq.config.settings import Settings
from kmq.files import replace_file
from kmq.log import topic_changes
from kmq.logfmt import Logger

VERSION = 1
KEPT, MOST = 200, 1000
_FINDING_CHARS = 300
_RETAIN_S = 60.0  # longest wait for the router
_AGAIN_S = 1.0  # until a result is written again that Consul did not take
_POLL_S = 0.05
_LINE = 1 << 16  # bytes of a line of a command that are looked at
# A command ends with its agent, also if that is killed: else the next one would begin it a second time beside it.
CHILD = (
    "import sys; from kmq.broker.supervisor import end_with; end_with(int(sys.argv.pop(1)));"
    " from kmq.__main__ import main; main()"
)
_LOW = 10  # niceness of what a command runs: messages come first


class Commands:
    """The commands of one broker."""

    def __init__(self, settings: Settings, log: Logger, write: Callable[[str, Result], None]) -> None:
        """`write`: tells the fleet what came of the command with this id."""
        self._settings, self._log, self._write = settings, log, write
        self._path = f"{settings.data}/cluster/commands"
        self._rows: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._news, self._stop = threading.Event(), threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="kmq-commands", daemon=True)
        self._load()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End; a command that runs is begun again at the next start."""
        self._stop.set()
        self._news.set()
        with self._lock:
            if self._child is not None:
                self._child.terminate()
        self._thread.join(5)

    def accept(self, message: Message) -> None:
        """Take a command over; nothing happens if it is known already. Raises OSError."""
        if message.id in self._rows:
            return
        row = {"type": message.type, "epoch": message.epoch, "expires": message.expires, "result": None, "told": False}
        with self._lock:
            self._rows[message.id] = row
            try:
                self._save()
            except OSError:
                del self._rows[message.id]
                raise
        self._news.set()

    # --- the file ----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        try:
            with open(self._path, encoding="utf-8") as file:
                found = json.load(file)
            if found["version"] != VERSION:
                raise ValueError(f"has version {found['version']}, but this release knows {VERSION}")
            self._rows = found["commands"]
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            self._log.warn("commands_forgotten", file=self._path, reason=error, effect="commands may be done again")

    def _save(self) -> None:
        told = [id for id, row in self._rows.items() if row["told"]]
        for id in told[: max(0, len(self._rows) - KEPT)]:
            del self._rows[id]
        surplus = max(0, len(self._rows) - MOST)  # results that Consul does not take
        for id in sorted(self._rows, key=lambda id: self._rows[id]["result"] is None)[:surplus]:
            del self._rows[id]
        replace_file(self._path, json.dumps({"version": VERSION, "commands": self._rows}).encode())

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self._news.clear()
            is_done = True
            for id, row in [*self._rows.items()]:
                if not row["told"] and not self._stop.is_set():
                    is_done = self._advance(id, row) and is_done
            self._news.wait(None if is_done else _AGAIN_S)

    def _advance(self, id: str, row: dict[str, Any]) -> bool:
        """Do a command, and tell the fleet; return False if that has to be tried again."""
        try:
            if row["result"] is None:
                result = self._attempt(row)
                if self._stop.is_set():
                    return False
                with self._lock:
                    row["result"] = result._asdict()
                    self._save()
                self._log.info("command_done", command=row["type"], epoch=row["epoch"], outcome=result.outcome)
            self._write(id, Result(**row["result"]))
            with self._lock:
                row["told"] = True
                self._save()
        except (OSError, ConsulError):
            return False
        return True

    def _attempt(self, row: dict[str, Any]) -> Result:
        """Do a command. What the system does not allow is its outcome; else it would be tried for ever, unseen."""
        try:
            return self._do(row)
        except OSError as error:
            return Result(row["type"], str(error), [], time.time())

    def _do(self, row: dict[str, Any]) -> Result:
        type, findings = row["type"], list[str]()
        if row["expires"] and time.time() > row["expires"]:
            outcome = "expired before this broker could begin"
        elif type not in COMMANDS:
            outcome = f"unknown command {type!r}"
        elif type == "retain":
            outcome = self._retain()
        elif type == "verify":
            code, findings, why = self._kmq(damage, "verify", "--json")
            outcome = {0: "ok", 1: "damage"}.get(code, why)
        else:
            code, findings, why = self._kmq(str, "pipeline", "run", "compact")
            outcome = "ok" if code == 0 else why
        return Result(type, outcome, findings, time.time())

    def _retain(self) -> str:
        request = topic_changes.submit(self._settings.data, topic_changes.RETAIN, "", {})
        until = time.monotonic() + _RETAIN_S
        while request.is_waiting:
            if time.monotonic() > until or self._stop.is_set():
                return f"the router did not do it within {_RETAIN_S:.0f} s; see its state: kmq status"
            time.sleep(_POLL_S)
        return "ok"

    def _kmq(self, finding: Callable[[str], str], *arguments: str) -> tuple[int, list[str], str]:
        """Run a command of kmq. Returns its exit code, its first findings, and its last word about an error.

        `finding`: makes a finding of a line; "" if it is none.
        """
        with open(os.memfd_create("kmq-errors"), "w+b") as errors:  # a read-only root has no place for a file
            with self._lock:
                if self._stop.is_set():
                    return -1, [], "the agent ends"
                child = self._child = subprocess.Popen(
                    [sys.executable, "-c", CHILD, str(os.getpid()), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=dict(os.environ) | self._settings.environment(),
                )
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child.pid, _LOW)
            lines: list[str] = []
            assert child.stdout is not None
            with child.stdout as out:
                while line := out.readline(_LINE):
                    if len(lines) < MAX_FINDINGS and (found := finding(line.decode(errors="replace").strip())):
                        lines.append(found[:_FINDING_CHARS])
            code = child.wait()
            with self._lock:
                self._child = None
            errors.seek(0)
            said = errors.read(_LINE).decode(errors="replace").strip().splitlines()
        return code, lines, said[-1] if said else f"kmq {' '.join(arguments)}: exit code {code}"


def damage(line: str) -> str:
    """Return one line about a finding of `kmq verify --json`; "" for a note."""
    try:
        found = json.loads(line)
        return f"{found['path']}: byte {found['byte']}: {found['what']}" if found["is_damage"] else ""
    except (ValueError, KeyError, TypeError):
        return line
