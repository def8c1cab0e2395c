"""A broker without processes, and changes of its topics that are killed at a line."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room

from kmq.log import identity, topic_changes
from kmq.log.wal import Wal
from kmq.repair import verify
from kmq.router.queues import Queues


class Broker:
    """A WAL and the queues of it."""

    def __init__(self, data: object, seq: int = 1) -> None:
        self.data, self.seq = str(data), seq
        identity.open_data(self.data)
        self.wal = Wal(self.data, no_room, 1 << 20)
        self.start()

    def start(self) -> None:
        self.log = FakeLogger()
        self.queues = Queues(self.data, no_room, self.log)
        self.queues.recover(self.seq - 1)

    def send(self, *lines: bytes) -> None:
        made = block(list(lines), self.seq)
        self.wal.append([(made.data, self.seq, made.count, FIRST_TS + made.last_seq)])
        self.wal.sync()
        self.wal.note_open_block()
        self.queues.route([made])
        self.seq += made.count

    def ask(self, verb: str, topic: str = "orders", **texts: object) -> None:
        topic_changes.submit(self.data, verb, topic, {name: str(text) for name, text in texts.items()})
        self.queues.tick()

    def delete(self, topic: str = "orders") -> None:
        self.ask(topic_changes.DELETE, topic)

    def findings(self) -> list[str]:
        return [str(each) for each in verify.Verifier(self.data, is_live=False).findings() if each.is_damage]

    def segments(self, topic: str) -> dict[str, int]:
        found = sorted(Path(self.data, "topics", topic).glob("*/*.log"))
        return {f"{path.parent.name}/{int(path.stem)}": path.read_bytes().count(b"\n") for path in found}

    def files(self) -> dict[str, bytes]:
        """Return the content of every log of a queue."""
        return {
            str(path.relative_to(self.data)): path.read_bytes() for path in Path(self.data).glob("topics/*/*/*.log")
        }

    def links(self) -> dict[str, str]:
        return {path.name: os.readlink(path) for path in Path(self.data).iterdir() if path.is_symlink()}


def kill_at(data: str, seq: int, nth: int, traced: set[str], verb: str, topic: str, **texts: object) -> bool:
    """Carry out a request in a child that is killed when it reaches its nth line; return True if it got so far.

    `traced`: names of the functions whose lines count.
    """
    pid = os.fork()
    if not pid:
        reached: set[tuple[object, int]] = set()

        def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
            if event == "line":
                reached.add((frame.f_code, frame.f_lineno))
                if len(reached) == nth:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace if frame.f_code.co_name in traced else None

        broker = Broker(data, seq)
        topic_changes.submit(data, verb, topic, {name: str(text) for name, text in texts.items()})
        sys.settrace(trace)
        broker.queues.tick()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
