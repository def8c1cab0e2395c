"""Publishers and subscribers of the Broadcast Queue, as steps, with a simulated Consul and everything that may go wrong.

A Process runs the code of kmq/cluster. Whoever explores decides what happens next: which process goes on, and what
becomes of its request (`FATES`). The ghost judges each write and each item.
"""

import random
from collections.abc import Generator, Sequence
from typing import Any

from bq_code import Code
from bq_ghost import Broken, Ghost, Handler, Since, demand
from consul_model import ConsulModel, State

from kmq.cluster.consul import Response
from kmq.errors import BusyError, ConfigError

Acts = Generator[Any, Any, None]

# of a request: what becomes of it. `flying`: the sender gives up, and it is carried out later.
FATES = ("done", "lost", "unheard", "flying", "failed", "failed after all", "forbidden")
UNKNOWN = ("lost", "unheard", "flying", "flying", "failed", "failed after all")  # to its sender
TTL_S = 2.0


class Process:
    """A publisher or a subscriber, or what is left of one."""

    def __init__(self, name: str, broker: str = "") -> None:
        self.name, self.broker = name, broker
        self.presence: Any = None
        self.asked: Any = None  # the request or pause that it waits for
        self.answer: Response | None = None  # carried out, and not yet heard of
        self.acts: Acts | None = None  # None: it is dead
        self.head = ""  # the last message when its last snapshot was read
        self.trim_since = Since(0.0, 0.0)  # when it last read the marks
        self.positions: dict[str, int] = {}  # of the watches, as last answered
        self.subscriber: Any = None
        self.previous: int | None = None  # epoch of the item handled before
        self.sleeps_until = 0  # steps of the world
        self.is_in_step = False  # its place is that of its broker's handler
        self.done = 0  # messages published
        self.refused: tuple[bytes, int] = (b"", 0)  # its last request that changes something, and how often in a row

    @property
    def is_request(self) -> bool:
        return hasattr(self.asked, "method")


class World:
    """One run."""

    def __init__(self, code: Code, rng: random.Random, mistakes: bool = True, holds: bool | None = None) -> None:
        """`mistakes`: handlers fail now and then. `holds`: publishers hold the lock; None: for some messages."""
        self.code, self.rng, self.mistakes, self.holds = code, rng, mistakes, holds
        self.names: Sequence[str] = ["topics/t"]  # without mistakes: the states that a message changes
        self.filler = 1  # without mistakes: bytes of a message besides
        self.failing = 0  # so many items cannot be processed
        self.clock = code.clock
        self.consul = ConsulModel(self.clock.monotonic)
        self.keys = code.presence.Keys("c")
        self.ghost = Ghost(code, self.consul, self.keys)
        self.processes: list[Process] = []
        self.flying: list[tuple[Any, Process]] = []
        self.saved: list[tuple[State, str]] = []
        self.published = self.steps = 0
        self.trace: list[str] = []  # what happened, for people

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, process: Process, acts: Acts) -> Process:
        process.acts = acts
        self.processes.append(process)
        self._go_on(process, lambda: next(acts))
        return process

    def publisher(self, name: str, messages: int = 10**6, holds: Sequence[bool] = ()) -> Process:
        """`holds`: whether it holds the lock, message by message in turn."""
        process = Process(name)
        return self.start(process, self._publish_all(process, messages, holds))

    def subscriber(self, name: str, broker: str) -> Process:
        process = Process(name, broker)
        return self.start(process, self._receive_all(process))

    def kill(self, process: Process) -> None:
        """As SIGKILL does. What it has sent may still be on its way."""
        if process.is_request and process.answer is None and self.rng.random() < 0.5:
            self.flying.append((process.asked, process))
        process.acts = process.asked = None
        self.processes.remove(process)

    def _go_on(self, process: Process, resume: Any) -> None:
        process.answer = None
        try:
            process.asked = resume()
            if getattr(process.asked, "path", "") == "/v1/kv/" + self.keys.delivered:
                process.trim_since = Since(self.clock.time(), self.clock.monotonic())
        except StopIteration:
            process.acts = process.asked = None
            self.processes.remove(process)

    # --- what becomes of a request ------------------------------------------------------------------------------------

    def step(self, process: Process, fate: str = "done") -> None:
        """Let a process go on: it hears the answer that waits for it, has paused, or its request meets this fate."""
        assert process.acts is not None
        self.clock.forward(0.01)
        self.steps += 1
        if process.answer is not None:
            answer = process.answer
            self._go_on(process, lambda: process.acts.send(answer))
        elif not process.is_request:
            self.clock.forward(process.asked.seconds)
            self._go_on(process, lambda: process.acts.send(None))
        else:
            self._meet(process, fate)

    def _meet(self, process: Process, fate: str) -> None:
        request = process.asked
        self.note(f"{process.name} {request.method} {request.path} {request.body.decode()} {fate}")
        if fate in ("done", "unheard", "failed after all"):
            self._check_watch(request, process)
            process.answer = self.carry_out(request, process)
        if fate == "done" and "recurse" in request.params and process.answer is not None:
            process.positions[request.path] = int(process.answer.headers["x-consul-index"])
        if fate == "flying":
            self.flying.append((request, process))
        if fate in ("lost", "unheard", "flying"):
            process.answer = None
            error = self.code.consul.Unanswered(fate)
            self._go_on(process, lambda: process.acts.throw(error))  # type: ignore[union-attr]
        elif fate != "done":
            status, text = (403, b"Permission denied") if fate == "forbidden" else (500, b"rpc error: EOF")
            process.answer = Response(status, {}, text)

    def carry_out(self, request: Any, process: Process) -> Response:
        """Let Consul carry out a request, and judge what it wrote."""
        if request.path == "/v1/kv/" + self.keys.delivered and not process.broker:
            process.trim_since = process.trim_since._replace(run=self.clock.monotonic(), marked=self.ghost.marked())
        session = _session_of(request.body)
        answer = self.consul.answer(request)
        self._check_progress(request, answer.status, process)
        self.ghost.judge(self.consul.journal, session, process.trim_since)
        if b"get-tree" in request.body:
            process.head = self.ghost.head
        return answer

    def _check_progress(self, request: Any, status: int, process: Process) -> None:
        """What Consul refuses is not asked for ever."""
        if b"check-session" in request.body and status >= 400:
            body, times = process.refused
            process.refused = request.body, times + 1 if body == request.body else 1
            demand(process.refused[1] < 20, f"{process.name} asks again and again for what is refused")

    def _check_watch(self, request: Any, process: Process) -> None:
        """A watch never waits for what has come already, nor for a number that Consul has taken back."""
        index, subscriber = int(request.params.get("index", "0")), process.subscriber
        if not index or request.path not in process.positions or not process.broker:
            return
        demand(index <= process.positions[request.path], "a watch does not wait for a number that was taken back")
        if request.path == "/v1/kv/" + self.keys.messages and subscriber.done is not None:
            waits = self.consul.would_block(request) and self.ghost.links[self.ghost.head].epoch > subscriber.done.epoch
            demand(not waits, f"{process.name} waits, and {subscriber.done.epoch + 1} lies there")

    def land(self, at: int) -> None:
        """Carry out a request that its sender has given up."""
        request, sender = self.flying.pop(at)
        self.note(f"lands from {sender.name}: {request.path} {request.body.decode()}")
        head = sender.head
        self.carry_out(request, sender)
        sender.head = head

    # --- Consul -------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        self.saved.append((self.consul.snapshot(), self.ghost.head))

    def restore(self, at: int) -> None:
        """Bring an older snapshot back. Nothing is on its way then."""
        state, head = self.saved[at]
        self.note(f"restore of epoch {self.ghost.links[head].epoch}, it was {self.ghost.links[self.ghost.head].epoch}")
        self.consul.restore(state)
        self.flying.clear()
        self.ghost.head = head
        for broker in self.ghost.brokers.values():
            broker.is_healed, broker.noticer = False, ""
        for process in self.processes:
            process.positions.clear()
            if process.broker and process.is_in_step:
                noticing = self.ghost.brokers[process.broker]
                noticing.is_healed, noticing.noticer = True, process.name  # if it lives long enough

    def beat(self, process: Process) -> None:
        """Its heart, which is a thread of its own, beats, if it has a session."""
        if process.presence is None or not process.presence.session:
            return
        beat = process.presence.beat()
        try:
            asked = next(beat)
            while True:
                asked = beat.send(self.consul.answer(asked))
        except (StopIteration, self.code.presence.SessionLost):
            pass  # who uses the session finds out

    def expire(self, session: str) -> None:
        self.note(f"end of session {session}")
        self.consul.end_session(session)

    def note(self, text: str) -> None:
        self.trace.append(text[:300])

    # --- what processes do --------------------------------------------------------------------------------------------

    def _begin(self, process: Process) -> Acts:
        if process.presence is not None:  # after an error
            try:
                yield from process.presence.close()
            except self.code.consul.ConsulError:
                pass  # it ends by itself
        process.presence = self.code.presence.Presence(TTL_S)
        yield from process.presence.open()

    def lock(self, process: Process) -> Any:
        """Return the lock of the publishers, as this process uses it."""
        return self.code.presence.Lock(self.keys.coordinator, process.presence, process.name, self.clock.monotonic)

    def _holds(self, message: int, turns: Sequence[bool]) -> bool:
        if turns:
            return turns[message % len(turns)]
        return self.rng.random() < 0.5 if self.holds is None else self.holds

    def _publish_all(self, process: Process, messages: int, turns: Sequence[bool]) -> Acts:
        """Publish, some under a lock that is held; a new session after every error."""
        code, until = self.code, process.done + messages
        while process.done < until:
            message = None
            try:
                yield from self._begin(process)
                lock = self.lock(process)
                publisher = code.publisher.Publisher(self.keys, lock, self.clock.monotonic)
                while process.done < until:
                    holds = self._holds(process.done, turns)
                    decided = (yield from self._decide()) if self.mistakes and self.rng.random() < 0.3 else None
                    if holds:
                        yield from lock.take(5.0)
                        self.ghost.entered(self.keys.coordinator, process.presence.session)
                    message, changes = decided or (yield from self._decide())
                    epoch = yield from publisher.publish(message, changes, 5.0)
                    self.ghost.returned(message.id, epoch)
                    message = None
                    process.done += 1
                    if holds:
                        yield from lock.give()
                yield from process.presence.close()
            except (code.consul.ConsulError, BusyError, ConfigError) as error:
                self.note(f"{process.name}: {error!r}")
                if message is not None:
                    self.ghost.failed(message.id, not isinstance(error, code.consul.Unanswered))

    def _decide(self) -> Generator[Any, Any, Any]:
        """Read some state keys, and make the message that changes them."""
        self.published += 1
        id = f"{self.published:04d}"
        names = self.rng.sample(["topics/t", "settings/s"], self.rng.randrange(3)) if self.mistakes else self.names
        changes = []
        for name in names:
            found = yield from self.code.consul.read(self.keys.root + name)
            value, version = (int(found.value), found.version) if found is not None else (0, 0)
            changes.append(self.code.publisher.KeyChange(self.keys.root + name, b"%d" % (value + 1), version))
        lines = [change.key.removeprefix(self.keys.root).encode() + b"=" + change.value for change in changes]
        lines.append(b"x" * (self.rng.choices([1, 250, 400_000], [80, 19, 1])[0] if self.mistakes else self.filler))
        self.ghost.told[id] = "asked"
        return self.code.publisher.Message("greeting", b"\n".join(lines), id, 1.0), changes

    def _receive_all(self, process: Process) -> Acts:
        code, known = self.code, None
        while True:
            try:
                yield from self._begin(process)
                if process.subscriber is not None and process.subscriber.done is not None:
                    known = process.subscriber.done
                process.subscriber = code.subscriber.Subscriber(
                    self.keys, process.broker, process.presence, process.name, self.clock.monotonic
                )
                process.previous, process.positions = None, {}
                yield from process.subscriber.open(None, known)
                self.ghost.entered(self.keys.subscriber(process.broker), process.presence.session)
                self.ghost.came_back(process.broker, process.name)
                yield from self._receive(process)
            except (code.consul.ConsulError, BusyError) as error:
                self.note(f"{process.name}: {error!r}")

    def _receive(self, process: Process) -> Acts:
        """Fetch, process, mark. Where nobody knows whether a request was carried out, the same subscriber goes on."""
        subscriber, broker = process.subscriber, self.ghost.brokers[process.broker]
        mark = subscriber.done
        if broker.noticer not in ("", process.name):
            broker.is_healed = False  # who would have noticed that Consul was restored has ended
        process.is_in_step = mark is not None and mark.id == broker.last
        while True:
            try:
                for item in (yield from subscriber.fetch(1.0)):
                    if self._cannot_be_processed():
                        yield from subscriber.report("handler failed")
                        break
                    yield self.code.consul.Pause(0.0)  # killed before it is processed
                    self.note(f"{process.name} handles {item.epoch}")
                    by = Handler(process.name, process.presence.session, process.head, process.previous)
                    self.ghost.handled(process.broker, item, by)
                    process.previous = item.epoch
                    if broker.is_healed and item.epoch >= broker.furthest:
                        process.is_in_step = True
                    yield self.code.consul.Pause(0.0)  # killed between processing and marking
                    subscriber.processed(item)
                    if self.rng.random() < 0.3:
                        yield from subscriber.mark()
                yield from subscriber.mark()
            except self.code.consul.Unanswered as error:
                self.note(f"{process.name}: {error!r}")
                if self.mistakes and self.rng.random() < 0.3:
                    raise

    def _cannot_be_processed(self) -> bool:
        if self.failing:
            self.failing -= 1
            return True
        return self.mistakes and self.rng.random() < 0.1

    # --- the end ------------------------------------------------------------------------------------------------------

    def heal(self, rounds: int = 300) -> None:
        """Stop the faults: every broker comes to the epoch, and to the state, that Consul has."""
        self.mistakes = False
        for process in [process for process in self.processes if not process.broker]:
            self.kill(process)
        while self.flying:
            self.land(0)
        last = self.publisher("last", 1)
        for name in self.ghost.brokers:
            if not any(process.broker == name for process in self.processes):
                self.subscriber(f"last-{name}", name)
        for _ in range(rounds):
            self.expire_the_dead()
            for process in list(self.processes):
                self.beat(process)
                for _ in range(8):
                    if process.acts is not None:
                        self.step(process)
            if last.done and self._is_healed():
                break
        demand(last.done == 1, "a publisher gets through when nothing is in its way")
        demand(self._is_healed(), f"the brokers come to the epoch: {self.marks()}, {self.ghost.links[self.ghost.head]}")
        states = self.ghost.links[self.ghost.head].states
        there = {key.removeprefix(self.keys.root): pair.value for key, pair in self.consul.state.pairs.items()}
        demand(all(there[key] == value for key, value in states.items()), "the state keys are what the messages say")
        for name, broker in self.ghost.brokers.items():
            has = {key: states.get(key) if key in broker.put_back else value for key, value in broker.states.items()}
            demand(not broker.is_healed or has == states, f"{name} has {has}, Consul {states}")

    def expire_the_dead(self) -> None:
        alive = {process.presence.session for process in self.processes}
        for session in [name for name in self.consul.state.sessions if name not in alive]:
            self.expire(session)

    def marks(self) -> dict[str, tuple[int, str]]:
        keys, found = self.keys, self.consul.state.pairs
        marks = {name: found.get(keys.delivered_to(name)) for name in self.ghost.brokers}
        decode = self.code.publisher.Mark.decode
        return {name: tuple(decode(pair.value)[:2]) for name, pair in marks.items() if pair is not None}

    def _is_healed(self) -> bool:
        head = self.ghost.head
        epoch = self.ghost.links[head].epoch
        return set(self.marks()) == set(self.ghost.brokers) and all(
            mark[0] == epoch and mark[1] in (head, "") for mark in self.marks().values()
        )


def _session_of(body: bytes) -> str:
    """Return the session that a Txn names."""
    _, found, rest = body.partition(b'"Session": "')
    return rest.partition(b'"')[0].decode() if found else ""


__all__ = ["FATES", "UNKNOWN", "Broken", "Process", "World"]
