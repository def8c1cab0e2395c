"""Messages of a fleet on the Broadcast Queue: states, which every broker applies, and commands, which it runs once.

State       A key under topics/, tokens/ or settings/ (kmq/config/states.py). Its message has the type `state` and the
            payload `<key> <value>`, for example `topics/orders partitions=4`. Key and message are written in one Txn,
            so a snapshot has the result of all messages.
Command     A message whose type is one of COMMANDS. It changes no key. Each broker runs a command id once, unless it
            expires before, and writes the result under `results/<id>/<broker>`.

Invariant   A state key and its message are published together or not at all. A new value is always computed from the
            value that it replaces: the Txn is refused if the old value was changed meanwhile.
Memory      A result has at most RESULT_BYTES, a state at most STATE_BYTES.
"""

import json
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kmq.cluster import consul
from kmq.cluster.consul import MAX_OPERATIONS, Conflict, ConsulError, KvOperation, Steps, Watched
from kmq.cluster.presence import GUARDS, Keys, Lock
from kmq.cluster.publisher import KeyChange, Message, Publisher, StateChanged
from kmq.cluster.subscriber import Snapshot
from kmq.config.states import KINDS, UNREADABLE
from kmq.errors import ConfigError

STATE = "state"
COMMANDS = ("verify", "compact", "retain")
RESULT_BYTES = 4096
STATE_BYTES = 4096
MAX_FINDINGS, _FINDING_CHARS = 20, 300
RESULT_S = 86_400.0  # a result may be deleted after so long
_TRIES = 20  # to change a state that others change too


class CommandResult(NamedTuple):
    """The result of a command. `outcome`: ok, or why it failed; `findings`: its first MAX_FINDINGS findings."""

    type: str
    outcome: str
    findings: list[str]
    ts: float  # when it was done, in seconds since the epoch of Unix

    @property
    def is_ok(self) -> bool:
        return self.outcome == "ok"

    def encode(self) -> bytes:
        """Return the value of its key, with as many findings as fit."""
        findings = [finding[:_FINDING_CHARS] for finding in self.findings[:MAX_FINDINGS]]
        outcome = self.outcome[:_FINDING_CHARS]
        while (
            len(text := json.dumps(self._replace(outcome=outcome, findings=findings)._asdict()).encode()) > RESULT_BYTES
        ):
            findings.pop()
        return text

    @classmethod
    def decode(cls, value: bytes) -> "CommandResult":
        """Return the result; for any other text, a result with the outcome `unreadable`."""
        try:
            found = json.loads(value)
            ts = float(found["ts"])
            if not math.isfinite(ts):
                raise ValueError("no time")
            return cls(_text(found["type"]), _text(found["outcome"]), _texts(found["findings"]), ts)
        except _NOT_OURS:
            return cls("", "unreadable", [], 0.0)


_NOT_OURS = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # raised by a text that KMQ did not write


def _text(value: object) -> str:
    """Return a text that can be printed. Raises TypeError if the value is not a string."""
    if not isinstance(value, str):
        raise TypeError("no text")
    return value.encode(errors="replace").decode()


def _texts(value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return [*map(_text, value)]


# --- messages --------------------------------------------------------------------------------------------------------


def state_of(message: Message) -> tuple[str, str]:
    """Return key and value of the state in a message. A value that is not one line of text becomes UNREADABLE.

    Raises ValueError if the message names no state.
    """
    name, blank, value = message.payload.partition(b" ")
    key = name.decode(errors="replace")
    if not blank or not is_state(key) or UNREADABLE in key:
        raise ValueError(
            f"message {message.epoch}: {message.payload[:80]!r} must be <key> <value>; KMQ did not write it"
        )
    return key, _line(value)


def states_of(snapshot: Snapshot) -> dict[str, str]:
    """Return the states of a fleet by key. A value that is not one line of text becomes UNREADABLE."""
    return {key: _line(value) for key, value in snapshot.states.items() if is_state(key)}


def _line(value: bytes) -> str:
    try:
        return UNREADABLE if b"\n" in value else value.decode()
    except UnicodeDecodeError:
        return UNREADABLE


def is_state(key: str) -> bool:
    """Return True if this key, without `kmq/<cluster>/`, holds a state of the fleet."""
    return key.startswith(KINDS) and key.partition("/")[2] != "" and not any(map(str.isspace, key))


def publish_state(publisher: Publisher, keys: Keys, key: str, decide: Callable[[str], str]) -> Steps[int]:
    """Publish a new value of a state; `decide` computes it from the old value ("" if none). Return the epoch.

    Raises what Publisher.publish raises, and ConfigError if the value is too long.
    """
    for left in reversed(range(_TRIES)):
        found = yield from consul.read(keys.root + key)
        value = decide(found.value.decode(errors="replace") if found is not None else "")
        if len(value.encode()) > STATE_BYTES:
            raise ConfigError(f"{key}: {len(value.encode()):,} bytes; at most {STATE_BYTES:,}")
        change = KeyChange(keys.root + key, value.encode(), found.version if found is not None else 0)
        try:
            return (yield from publisher.publish(Message.new(STATE, f"{key} {value}".encode()), [change]))
        except StateChanged:
            if not left:
                raise
    raise AssertionError


def publish_command(publisher: Publisher, keys: Keys, type: str, lasts_s: float) -> Steps[Message]:
    """Publish a command that brokers may begin within `lasts_s`, and delete old results. Return it with its epoch."""
    if type not in COMMANDS:
        raise ConfigError(f"unknown command {type!r}; expected one of {', '.join(COMMANDS)}")
    message = Message.new(type, b"", lasts_s)
    epoch = yield from publisher.publish(message)
    try:
        yield from sweep(keys, publisher.lock, time.time())
    except ConsulError:
        pass  # the command is published; the next publisher sweeps
    return message._replace(epoch=epoch)


def forget(publisher: Publisher, keys: Keys, broker: str) -> Steps[None]:
    """Remove the mark of a broker that is gone for good. Raises ConfigError if it is present or not known."""
    place = yield from consul.read(keys.subscriber(broker))
    if place is not None and place.session:
        raise ConfigError(f"broker {broker} is here; stop it first, or it comes back at once")
    mark = yield from consul.read(keys.delivered_to(broker))
    if mark is None:
        raise ConfigError(f"broker {broker!r} is not known; see: kmq fleet status")
    removed = KvOperation("delete-cas", keys.delivered_to(broker), version=mark.version)  # refused if it has come back
    yield from consul.txn(publisher.lock.around([removed]))


# --- results ---------------------------------------------------------------------------------------------------------


def write_result(keys: Keys, id: str, broker: str, result: CommandResult) -> Steps[None]:
    """Write the result that a command has had at this broker."""
    yield from consul.txn([KvOperation("set", f"{keys.results}{id}/{broker}", result.encode())])


def watch_results(keys: Keys, id: str, position: int, wait_s: float) -> Steps[tuple[dict[str, CommandResult], int]]:
    """Wait for a new result of a command. Return its results by broker, and the position for the next watch."""
    prefix = f"{keys.results}{id}/"
    found: Watched = yield from consul.watch(prefix, position, wait_s)
    return {
        entry.key.removeprefix(prefix): CommandResult.decode(entry.value) for entry in found.entries
    }, found.position


def sweep(keys: Keys, lock: Lock, now: float) -> Steps[int]:
    """Delete results older than RESULT_S; return how many. `lock`: the publisher's."""
    found = yield from consul.watch(keys.results, 0, 0)
    old = [entry.key for entry in found.entries if now - CommandResult.decode(entry.value).ts > RESULT_S]
    room = MAX_OPERATIONS - GUARDS
    for at in range(0, len(old), room):
        deletions = [KvOperation("delete", key) for key in old[at : at + room]]
        try:
            yield from consul.txn(lock.around(deletions))
        except Conflict:
            return at  # deposed: the next publisher sweeps
    return len(old)


# --- brokers ---------------------------------------------------------------------------------------------------------


class BrokerReport(NamedTuple):
    """Report of a broker about itself, in the key `brokers/<broker>`. The key is deleted when its session ends."""

    holder: str  # host and pid of the agent
    ready: bool
    reasons: list[str]  # why it is not ready
    findings: list[str]  # states that differ from the fleet's
    own: dict[str, str]  # the broker's own settings, which override the fleet's

    def encode(self) -> bytes:
        """Return the value of its key, with as many findings as fit."""
        report = self._replace(
            reasons=[reason[:_FINDING_CHARS] for reason in self.reasons[:MAX_FINDINGS]],
            findings=[finding[:_FINDING_CHARS] for finding in self.findings[:MAX_FINDINGS]],
        )
        while len(text := json.dumps(report._asdict()).encode()) > RESULT_BYTES and (report.findings or report.reasons):
            (report.findings or report.reasons).pop()
        return text

    @classmethod
    def decode(cls, value: bytes) -> "BrokerReport | None":
        """Return the report; None if the text is not a report."""
        try:
            found: dict[str, Any] = json.loads(value)
            own = {_text(name): _text(text) for name, text in found["own"].items()}
            reasons, findings = _texts(found["reasons"]), _texts(found["findings"])
            return cls(_text(found["holder"]), found["ready"] is True, reasons, findings, own)
        except (*_NOT_OURS, AttributeError):
            return None


def read_reports(keys: Keys) -> Steps[dict[str, BrokerReport]]:
    """Return the report of each broker that is present."""
    found = yield from consul.watch(keys.brokers, 0, 0)
    reports = {entry.key.removeprefix(keys.brokers): BrokerReport.decode(entry.value) for entry in found.entries}
    return {broker: report for broker, report in reports.items() if report is not None}


def read_states(keys: Keys) -> Steps[dict[str, str]]:
    """Return all states of the fleet, read in one Txn: key → value."""
    entries = yield from consul.txn([KvOperation("get-tree", keys.root + kind) for kind in KINDS])
    return {entry.key.removeprefix(keys.root): entry.value.decode(errors="replace") for entry in entries}


def read_results(keys: Keys) -> Steps[dict[str, dict[str, CommandResult]]]:
    """Return broker → type of command → its last result there, of the results that are still kept."""
    found = yield from consul.watch(keys.results, 0, 0)
    last: dict[str, dict[str, CommandResult]] = {}
    for entry in found.entries:
        broker, result = entry.key.rpartition("/")[2], CommandResult.decode(entry.value)
        of_broker = last.setdefault(broker, {})
        if result.ts >= of_broker.get(result.type, result).ts:
            of_broker[result.type] = result
    return last
