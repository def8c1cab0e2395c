"""What `kmq bq follow|receive` do with each item: print it as a line of JSON, or run a command for it."""

import base64
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time

from kmq.cluster.publisher import SNAPSHOT, Message
from kmq.cluster.subscriber import Item, Snapshot
from kmq.config import terminal
from kmq.config.settings import DRAIN_S
from kmq.errors import KmqError
from kmq.logfmt import pairs

_LOOK_S = 0.2  # longest time until a running command notices a stop
_KILL_S = 2.0  # between SIGTERM and SIGKILL


def as_fields(item: Item) -> dict[str, object]:
    """Return the fields of an item's JSON line. Bytes that are not UTF-8 are in base64, under another name."""
    if isinstance(item, Snapshot):
        texts, others = {}, {}
        for key, value in item.states.items():
            text = _as_text(value)
            if text is None:
                others[key] = _as_base64(value)
            else:
                texts[key] = text
        fields = {"epoch": item.epoch, "type": SNAPSHOT, "id": "", "ts": round(time.time(), 6), "states": texts}
        return fields | ({"states_base64": others} if others else {})
    text = _as_text(item.payload)
    fields = {"epoch": item.epoch, "type": item.type, "id": item.id, "ts": item.ts}
    if item.expires:
        fields["expires"] = item.expires
    return fields | ({"payload": text} if text is not None else {"payload_base64": _as_base64(item.payload)})


def _as_text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _as_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


class Printer:
    """Prints each item as a line. Ends the following when the reader of the lines is gone."""

    def __init__(self, stop: threading.Event, is_json: bool) -> None:
        self._stop, self._is_json = stop, is_json
        self.failed: KmqError | None = None  # why output failed

    def __call__(self, item: Item) -> None:
        """Print the item. Raises an exception if it did not reach its reader."""
        fields = as_fields(item)
        if isinstance(item, Snapshot) and not self._is_json:
            fields = {"epoch": item.epoch, "type": SNAPSHOT, "states": len(item.states)}
        try:
            print(json.dumps(fields) if self._is_json else pairs(**fields))
            sys.stdout.flush()
        except KmqError as error:
            self.failed = error
        if self.failed or not terminal.is_read():
            self._stop.set()
            raise self.failed or KmqError("nobody reads stdout any more")


def run_command(item: Item, command: str, stop: threading.Event) -> None:
    """Run a shell command for an item to its end, with the payload on stdin. Raises KmqError if it fails."""
    fields = as_fields(item)
    names = {f"BQ_{name.upper()}": str(fields[name]) for name in ("epoch", "type", "id")}
    given = item.payload if isinstance(item, Message) else json.dumps(fields).encode() + b"\n"
    # Not a pipe, because a command may not read it. Not a file, because a container may have a read-only root.
    with open(os.memfd_create("kmq-payload"), "w+b") as stdin:
        stdin.write(given)
        stdin.seek(0)
        # In a process group of its own: Ctrl-C then reaches only this process, which lets the command finish.
        process = subprocess.Popen(["/bin/sh", "-c", command], stdin=stdin, env=os.environ | names, process_group=0)
    try:
        _wait(process, stop)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code := process.returncode:
        outcome = f"exit code {code}" if code > 0 else f"end by {signal.Signals(-code).name}"
        raise KmqError(f"{outcome} of: {command}")


def _wait(process: subprocess.Popen[bytes], stop: threading.Event) -> None:
    """Wait for its end. After a stop wait at most as long as a stage has to drain."""
    ended = os.pidfd_open(process.pid)
    signals = [(DRAIN_S, signal.SIGTERM), (_KILL_S, signal.SIGKILL)]
    deadline = 0.0  # 0: not told to stop yet
    try:
        while not select.select([ended], [], [], _LOOK_S)[0]:
            if stop.is_set() and signals:
                deadline = deadline or time.monotonic() + signals[0][0]
                if time.monotonic() > deadline:
                    os.killpg(process.pid, signals.pop(0)[1])
                    deadline = 0.0
    finally:
        os.close(ended)
    process.wait()
