"""A World in which nothing happens but what a story tells: `bq_stories` is written with it."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bq_code import DAY_S, Code, Edit
from bq_ghost import Broker, demand
from bq_world import TTL_S, Acts, Process, World

STEPS = 400  # of one process, until it does what the story waits for

Story = Callable[["Stage"], None]


class Stage(World):
    """One broker, `b1`, unless a story adds another. A message changes no state unless the story says which."""

    def __init__(self, code: Code) -> None:
        super().__init__(code, random.Random(0), mistakes=False, holds=False)
        del self.ghost.brokers["b2"]
        self.names = []

    def add_broker(self, name: str) -> None:
        self.ghost.brokers[name] = Broker()

    # --- a process goes on --------------------------------------------------------------------------------------------

    def wait_until(self, process: Process, what: str, is_there: Callable[[], bool]) -> None:
        """Let a process go on until something holds. Raises Broken."""
        for _ in range(STEPS):
            if is_there():
                return
            demand(process.acts is not None, f"{process.name} has ended, and {what} never came")
            self.step(process)
        demand(False, f"{process.name} goes on and on, and {what} never came")

    def until(self, process: Process, words: str) -> None:
        """Let a process go on until it asks for this; that is not carried out yet."""
        self.wait_until(process, words, lambda: self.is_asking(process, words))

    def is_asking(self, process: Process, words: str) -> bool:
        return process.answer is None and words in self._about(process)

    def next(self, process: Process, words: str) -> None:
        """As `until`, but what it asks for now is carried out first."""
        self.hear(process)
        self.until(process, words)

    def hear(self, process: Process, fate: str = "done") -> None:
        """Its request meets this fate, and it hears of that."""
        self.step(process, fate)
        if process.answer is not None:
            self.step(process)

    def finish(self, process: Process) -> None:
        """Let a publisher come to its end."""
        self.wait_until(process, "its end", lambda: process.acts is None)

    def follow(self, process: Process) -> None:
        """Let a subscriber go on until it waits for the next message."""
        self.wait_until(process, "a wait", lambda: self._waits(process))

    def _waits(self, process: Process) -> bool:
        about = self._about(process)
        return process.answer is None and about == "GET kv/bq/ recurse" and self.consul.would_block(process.asked)

    def _about(self, process: Process) -> str:
        """Return what a process asks for, as `GET kv/epoch` or `PUT txn lock:coordinator … set:bq/1 …`."""
        asked = process.asked
        if asked is None or not process.is_request:
            return "pause" if asked is not None else ""
        path = str(asked.path).removeprefix("/v1/").replace(self.keys.root, "")
        recurse = ["recurse"] if "recurse" in asked.params else []
        return " ".join([asked.method, path, *recurse, *self._operations(asked.body)])

    def _operations(self, body: bytes) -> Sequence[str]:
        if not body.startswith(b"["):
            return []
        items = self.code.consul.json.loads(body)
        return [f"{item['KV']['Verb']}:{item['KV']['Key'].removeprefix(self.keys.root)}" for item in items]

    # --- what stories are made of -------------------------------------------------------------------------------------

    def publish(self, messages: int = 1, names: Sequence[str] = ()) -> None:
        """Let another publisher publish; `names`: the states that each message changes."""
        before, self.names = self.names, names or self.names
        self.finish(self.publisher(f"q{self.steps}", messages))
        self.names = before

    def following(self, name: str = "s", broker: str = "b1") -> Process:
        """Return a subscriber that waits for the next message."""
        process = self.subscriber(name, broker)
        self.follow(process)
        return process

    def forget(self, process: Process) -> None:
        """Its session ends, and so does the delay after which others get its locks. It does not know yet."""
        self.expire(process.presence.session)
        self.clock.forward(TTL_S)

    def bury(self, process: Process) -> None:
        """Kill a process, and end its session."""
        self.forget(process)
        process.acts = process.asked = None
        self.processes.remove(process)

    def lock_holder(self, name: str) -> Process:
        """Return a process that holds the lock of the publishers; `finish` lets it give the lock back."""
        process = Process(name)
        self.start(process, self._hold(process))
        self.until(process, "pause")
        return process

    def _hold(self, process: Process) -> Acts:
        yield from self._begin(process)
        lock = self.lock(process)
        yield from lock.take(5.0)
        yield self.code.consul.Pause(0.0)
        yield from lock.give()

    def a_day_passes(self) -> None:
        self.clock.wall += DAY_S

    def is_noted(self, words: str) -> bool:
        return self.times_noted(words) > 0

    def times_noted(self, words: str) -> int:
        return sum(words in line for line in self.trace)

    def messages_there(self) -> int:
        return sum(key.startswith(self.keys.messages) for key in self.consul.state.pairs)


def tell(story: Story, code: Code) -> None:
    """Let a story happen, then stop the faults and see that all brokers come to the epoch. Raises Broken."""
    stage = Stage(code)
    story(stage)
    stage.heal()


class Mutant(NamedTuple):
    """The code without one of its guards. `name`: what it does then; `story`: where that matters."""

    name: str
    story: Story
    edits: tuple[Edit, ...]


def edited(module: str, *pairs: tuple[str, str]) -> tuple[Edit, ...]:
    """Return edits of one module: what stands there, and what is put in its place."""
    return tuple((module, old, new) for old, new in pairs)


def without(module: str, text: str) -> tuple[Edit, ...]:
    """Return the edit that takes this text out."""
    return edited(module, (text, ""))
