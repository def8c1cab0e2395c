"""Applies the fleet's states and commands to this broker.

States: topics are declared as by `kmq topics create|set`, all other states are written to a file. Commands: verify,
compact, retain; each runs once, and its result is reported to the fleet.
Example: the state `topics/orders partitions=4` declares topic orders. The command `verify` runs `kmq verify --json` and
reports `ok` or its first findings.

Owner       KMQ_DATA/cluster/states (kmq/config/states.py). The router still owns topics: this module only declares them
            and submits requests. If the file is removed or changed, `restore_file` writes it again from memory.
            KMQ_DATA/cluster/commands: each accepted command, and its result. A thread of its own runs the commands, so
            that no state waits for a check of terabytes. `verify` runs as `kmq verify` does, and `compact` runs the
            broker's compactor (kmq/gateway/core/compactor.py).
Invariant   `apply` returns only after the whole item is on disk. Applying an item twice, or a Snapshot instead of the
            messages before it, leads to the same files.
            A command is marked in Consul only after it is in the file. A command that has a result never runs again.
Crash       Killed before an item is marked: it is delivered again. Killed in the middle of a command: it starts again,
            because all three may be repeated. Killed before the result is in Consul: the result is in the file,
            and the next start writes it to Consul.
Memory      KEPT commands if their results are in Consul, MOST in all. Beyond that the oldest are dropped, those with a
            result first. Of a command's output only the first findings are kept.
Shard       Only the leader's agent applies states of topics; followers get the topics by the WAL. Whenever its broker
            begins to lead, the agent applies all of them again: requests of the former leader's agent may have been cut
            before they were committed.
Not covered If a topic here has another number of partitions, or a limit was changed here afterwards, it stays as it is:
            local commands are local. `findings` reports it to the fleet.
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

from kmq.cluster import fleet
from kmq.cluster.consul import ConsulError
from kmq.cluster.fleet import COMMANDS, MAX_FINDINGS, CommandResult
from kmq.cluster.presence import decode_fields
from kmq.cluster.publisher import Message
from kmq.cluster.subscriber import Item, Snapshot
from kmq.config.settings import Settings
from kmq.config.states import DEFAULT, SETTINGS, TOKENS, TOPICS, UNREADABLE, States, fault, path_of, read
from kmq.errors import ConfigError
from kmq.files import replace_file, sync_directory
from kmq.log import topic_changes, topics
from kmq.log.segment import LIMITS, Limits
from kmq.logfmt import Logger


class Applier:
    """Applies the states of the fleet to this broker."""

    def __init__(self, settings: Settings, log: Logger, leads: Callable[[], int] = lambda: 0) -> None:
        """`leads`: in a shard, the generation of the role in which this broker leads; 0: it does not lead."""
        self._settings, self._log, self._leads = settings, log, leads
        self._led = 0  # the generation in which all topics were applied
        self._reaching = threading.Lock()  # a state skipped because another broker leads is stored before `lead` looks
        self._path = path_of(settings)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        sync_directory(settings.data)
        self.states: States | None = None  # None: this broker knows nothing, so it needs a snapshot
        self.unreadable = ""  # why the file could not be read at the start; "": all states are known
        self._lock = threading.Lock()  # of the file
        self._passed_over = ""  # why the last message of type `state` was invalid; "": it was valid
        try:
            self.states = read(settings)
        except ConfigError as error:
            self.unreadable = str(error)
            effect = "not ready, and no token is accepted, until all states are read from Consul again"
            self._log.error("states_ignored", reason=error, effect=effect)

    @property
    def epoch(self) -> int:
        """Return the epoch of the last message that this broker has applied; -1: no message of this cluster."""
        return self.states.epoch if self.states is not None else -1

    def apply(self, item: Item) -> None:
        """Apply an item. Raises OSError if the disk refuses.

        A message that KMQ did not write cannot be applied. It is skipped and reported as a finding.
        """
        if isinstance(item, Snapshot):
            found, self._passed_over = fleet.states_of(item), ""
            self._reach(States(self._settings.cluster, item.epoch, found, item.id), found)
            self._log.info("snapshot_applied", epoch=item.epoch, states=len(found))
        elif item.type == fleet.STATE:
            try:
                key, value = fleet.state_of(item)
            except ValueError as error:
                self._pass(item)
                self._passed_over = f"{error}; passed over"
                self._log.warn("state_not_applied", reason=error, effect="passed over; kmq fleet status shows it")
                return
            before = self.states.values if self.states is not None else {}
            self._passed_over = ""
            self._reach(States(self._settings.cluster, item.epoch, {**before, key: value}, item.id), {key: value})
            self._log.info("state_applied", epoch=item.epoch, state=key, value=value)
        else:
            self._pass(item)

    def _reach(self, states: States, changed: dict[str, str]) -> None:
        with self._reaching:
            self._reach_each(changed)
            self._write(states)

    def lead(self) -> None:
        """Apply all topics again if this broker has begun to lead its shard; call it now and then. Raises OSError."""
        generation = self._leads()
        if generation in (0, self._led):
            return
        with self._reaching:
            values = self.states.values if self.states is not None else {}
            self._reach_each({key: value for key, value in values.items() if key.startswith(TOPICS)})
        self._led = generation

    def _reach_each(self, changed: dict[str, str]) -> None:
        if self._settings.shard and not self._leads():
            changed = {key: value for key, value in changed.items() if not key.startswith(TOPICS)}
        has_topics = any(key.startswith(TOPICS) for key in changed)
        names, requests = self._topics() if has_topics else (set[str](), {})
        for key, value in changed.items():
            why = ""
            if key.startswith(TOPICS):
                name = key.removeprefix(TOPICS)
                why = self._reach_topic(name, value, name in names, requests.get(name, []))
            elif key.startswith(SETTINGS):
                why = fault(key.removeprefix(SETTINGS), value)
            if why:
                effect = "it stays as it is here; kmq fleet status shows it"
                self._log.warn("state_not_applied", state=key, reason=why, effect=effect)

    def _write(self, states: States) -> None:
        with self._lock:
            replace_file(self._path, states.encode())
            self.states, self.unreadable = states, ""

    def restore_file(self) -> None:
        """Write the file again if it differs from the states in memory. Raises OSError."""
        with self._lock:
            if self.states is None:
                return
            text, reason = self.states.encode(), "it is not what the agent has written"
            try:
                with open(self._path, "rb") as file:
                    if file.read() == text:
                        return
            except OSError as error:
                reason = str(error.strerror)
            replace_file(self._path, text)
        self._log.warn("states_made_again", file=self._path, reason=reason)

    def _pass(self, message: Message) -> None:
        """Note a message that changes no state."""
        values = self.states.values if self.states is not None else {}
        self._write(States(self._settings.cluster, message.epoch, values, message.id))

    # --- topics ------------------------------------------------------------------------------------------------------

    def _topics(self) -> tuple[set[str], dict[str, list[topic_changes.TopicRequest]]]:
        """Return the names of all topics, and by topic the waiting requests to set limits. Read once for all states."""
        data, requests = self._settings.data, dict[str, list[topic_changes.TopicRequest]]()
        names = {*topics.names(data)}
        for request in topic_changes.waiting(data) if os.path.isdir(f"{data}/topics") else []:
            if request.verb == topic_changes.SET:
                requests.setdefault(request.topic, []).append(request)
        return names, requests

    def _reach_topic(self, name: str, value: str, is_here: bool, requests: list[topic_changes.TopicRequest]) -> str:
        """Declare a topic, or set its limits. Return why that cannot be done here; "" if it was done."""
        data = self._settings.data
        try:
            partitions, limits = parse_topic(value)
            if not is_here:
                topics.check_tier(data, name, limits, limits, bool(self._settings.shard))
                topics.declare(data, name, partitions, {limit: text for limit, text in limits.items() if text})
                return ""
            declared = topics.read(data, name)
            own = topic_changes.limits_to_be(data, name, dict(declared.limits), requests)
            changes = {limit: text for limit, text in limits.items() if _differ(limit, own.get(limit, ""), text)}
            if changes:
                topic_changes.apply(own, changes)
                Limits().with_changes(own)
                topics.check_letters(name, changes)
                topics.check_tier(data, name, changes, own, bool(self._settings.shard))
                topic_changes.submit(data, topic_changes.SET, name, changes)
            return _other_partitions(declared.partitions, partitions)
        except (ConfigError, ValueError) as error:
            return str(error)

    def findings(self) -> list[str]:
        """Return the states in which this broker differs from the fleet, one line each."""
        states, found = self.states, [self._passed_over] if self._passed_over else []
        if states is None:
            return []
        for name, value in states.under(SETTINGS).items():
            if why := fault(name, value):
                found.append(f"{SETTINGS}{name}: {why}")
        for name, value in states.under(TOKENS).items():
            if UNREADABLE in value:
                found.append(
                    f"{TOKENS}{name}: is not readable, taken for revoked; publish it anew: kmq fleet token revoke"
                )
        names, requests = self._topics()
        for name, value in states.under(TOPICS).items():
            if why := self._topic_differs(name, value, name in names, requests.get(name, [])):
                found.append(f"{TOPICS}{name}: {why}")
        return found

    def _topic_differs(self, name: str, value: str, is_here: bool, requests: list[topic_changes.TopicRequest]) -> str:
        try:
            partitions, limits = parse_topic(value)
        except ValueError as error:
            return str(error)
        if not is_here:
            return "is not here; it was deleted here, or its log says why (event state_not_applied)"
        declared = topics.read(self._settings.data, name)
        own = topic_changes.limits_to_be(self._settings.data, name, dict(declared.limits), requests)
        other = [
            f"{limit}={own.get(limit, DEFAULT)}"
            for limit, text in limits.items()
            if _differ(limit, own.get(limit, ""), text)
        ]
        return _other_partitions(declared.partitions, partitions) or (f"has {' '.join(other)} here" if other else "")


def parse_topic(value: str) -> tuple[int, dict[str, str]]:
    """Return the partitions and limits of a topic's state. A limit "" is unset. Raises ValueError."""
    if UNREADABLE in value:
        raise ValueError("is not readable; publish it anew with: kmq fleet topics create")
    fields = decode_fields(value.encode())
    limits = {name: "" if text == DEFAULT else text for name, text in fields.items() if name in LIMITS}
    if not fields.get("partitions", "").isdecimal():
        raise ValueError(f"{value!r}: must name partitions=")
    return int(fields["partitions"]), limits


def _differ(limit: str, here: str, wanted: str) -> bool:
    """Return True if two texts of a limit have different meanings; "" is unset."""
    if not (here and wanted):
        return here != wanted
    try:
        values = [getattr(Limits().with_changes({limit: text}), limit) for text in (here, wanted)]
    except ConfigError:
        return here != wanted
    return bool(values[0] != values[1])


def _other_partitions(here: int, wanted: int) -> str:
    if here == wanted:
        return ""
    advice = "kmq topics set --partitions adds some" if here < wanted else "there can never be fewer"
    return f"has {here} partition(s) here, and the fleet says {wanted}; {advice}"


# --- commands --------------------------------------------------------------------------------------------------------

VERSION = 1
KEPT, MOST = 200, 1000
_FINDING_CHARS = 300
_RETAIN_S = 60.0  # longest wait for the router
_AGAIN_S = 1.0  # until the next try to write a result that Consul did not take
_POLL_S = 0.05
_LINE = 1 << 16  # bytes of a line of a command that are looked at
# A command ends with its agent, even if the agent is killed: else the next agent would start a second run beside it.
CHILD = (
    "import sys; from runpy import run_module; from kmq.broker.supervisor import end_with; end_with(int(sys.argv.pop(1)));"
    " run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
_LOW = 10  # niceness of the processes of commands, because messages come first


class Commands:
    """The commands of one broker."""

    def __init__(self, settings: Settings, log: Logger, write: Callable[[str, CommandResult], None]) -> None:
        """`write`: reports the result of the command with this id to the fleet."""
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
        """End. A running command is stopped, and starts again at the next start."""
        self._stop.set()
        self._news.set()
        with self._lock:
            if self._child is not None:
                self._child.terminate()
        self._thread.join(5)

    def accept(self, message: Message) -> None:
        """Store a command to be run. Do nothing if it is known already. Raises OSError."""
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
        reported = [id for id, row in self._rows.items() if row["told"]]
        for id in reported[: max(0, len(self._rows) - KEPT)]:
            del self._rows[id]
        surplus = max(0, len(self._rows) - MOST)  # commands whose results Consul did not take
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
        """Run a command, and report its result to the fleet. Return False if that has to be tried again."""
        try:
            if row["result"] is None:
                result = self._attempt(row)
                if self._stop.is_set():
                    return False
                with self._lock:
                    row["result"] = result._asdict()
                    self._save()
                self._log.info("command_done", command=row["type"], epoch=row["epoch"], outcome=result.outcome)
            self._write(id, CommandResult(**row["result"]))
            with self._lock:
                row["told"] = True
                self._save()
        except (OSError, ConsulError):
            return False
        return True

    def _attempt(self, row: dict[str, Any]) -> CommandResult:
        """Run a command. An OSError becomes its outcome; else the command would be retried for ever, unseen."""
        try:
            return self._do(row)
        except OSError as error:
            return CommandResult(row["type"], str(error), [], time.time())

    def _do(self, row: dict[str, Any]) -> CommandResult:
        type, findings = row["type"], list[str]()
        if row["expires"] and time.time() > row["expires"]:
            outcome = "expired before this broker could begin"
        elif type not in COMMANDS:
            outcome = f"unknown command {type!r}"
        elif type == "retain":
            outcome = self._retain()
        elif type == "verify":
            code, findings, why = self._run_module(damage, "kmq", "verify", "--json")
            outcome = {0: "ok", 1: "damage"}.get(code, why)
        else:
            code, findings, why = self._run_module(str, "kmq.gateway.core.compactor", "--now")
            outcome = "ok" if code == 0 else "not compacted" if findings else why
        return CommandResult(type, outcome, findings, time.time())

    def _retain(self) -> str:
        request = topic_changes.submit(self._settings.data, topic_changes.RETAIN, "", {})
        until = time.monotonic() + _RETAIN_S
        while request.is_waiting:
            if time.monotonic() > until or self._stop.is_set():
                return f"the router did not do it within {_RETAIN_S:.0f} s; see its state: kmq status"
            time.sleep(_POLL_S)
        return "ok"

    def _run_module(self, finding: Callable[[str], str], *arguments: str) -> tuple[int, list[str], str]:
        """Run a module with arguments. Return its exit code, its first findings, and its last line on stderr.

        `finding`: converts a line of output to a finding; "" if the line is not a finding.
        """
        with open(os.memfd_create("kmq-errors"), "w+b") as errors:  # a read-only root allows no temporary file
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
        return code, lines, said[-1] if said else f"{' '.join(arguments)}: exit code {code}"


def damage(line: str) -> str:
    """Convert a line of `kmq verify --json` to a finding; "" for a note."""
    try:
        found = json.loads(line)
        return f"{found['path']}: byte {found['byte']}: {found['what']}" if found["is_damage"] else ""
    except (ValueError, KeyError, TypeError):
        return line
