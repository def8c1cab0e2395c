"""The protocol of queues as an executable model: any worker takes the next message, each message is acknowledged alone.

    queue_model.py                  every interleaving of each configuration: 4 minutes of CPU
    queue_model.py NAME [NAME …]    of these configurations
    queue_model.py --walks N        N random walks, longer and with more faults than an exploration can have

No code of queues exists yet: it has to follow this model. One partition, one queue, two workers. Example of one message:

    take → the message is shown to worker 0 → ack → a record with its done bit is on its way → durable → answered

**Disk**     `start`: every earlier message is done, gone, or has a row of its own. `reach`: no message at or after it was ever
             shown without a row. A done bit for each message acknowledged out of order. A row for each message with a story:
             how many deliveries counted, how often it was in doubt. Letters: messages in the dead letter topic.
**Memory**   Who has which message, what waits. A kill of the gateway forgets all of it. So after a start each message below
             the reach that is not done is *in doubt*: perhaps a worker has it.
**Faults**   Kills of the gateway, after any prefix of the records on their way. Deaths of workers. Locks that lapse. Late
             acks and nacks. Retention, a reset, a time under a release without queues, a volume that was restored.

A message that kills its worker, or the gateway, must end as a letter, and its neighbours must not. What is decided:

**Rule**     A message is in doubt when its delivery ended and nobody can say how: the gateway was killed, or its worker died
             with several messages. In doubt once, it is delivered as others are, after a row with `doubt=1` is durable (the
             rows of one take are one write). In doubt twice, it is delivered alone: its worker has nothing else, and this
             delivery is counted in a row with `doubt=2` before it is shown. A row keeps its `doubt` until the message is
             done, also through a nack. A worker that dies with only one message says enough: the delivery counts, and
             the message is delivered alone from then on. A worker that has a message alone is refused what it says to have
             since before a start.
**Why**      With "in doubt once, alone at once" every innocent kill makes single file of up to 1,024 messages (the reach
             grows by as many). A worker with 100 threads and jobs of 10 s needs 1,024 · 10 s = 2.8 hours for them; here 11
             rounds, 110 s. "In doubt twice in a row" is not enough: if a nack clears the doubt, or the row follows the
             delivery, a message is shown more often than `deliveries` + 2 times (mutants). Deaths of workers follow the
             same rule, so there is one rule: a worker that is killed leaves no single file either.
**Cost**     Kills: a message that kills each time is shown at most `deliveries` + 2 times: one kill more than with "alone at
             once". Time: after the second kill only those come alone that were in hand at both. Of a worker with 100 threads
             that is at most 100, so 17 minutes. Disk: a row of about 190 B for each message that was in doubt, in the write of
             its take, and a tombstone when it is done.
             Counts: one too high for each kill of the gateway while a worker had the message alone. So beside a message that
             kills the gateway, a job that is longer than the time between two kills becomes a letter with it.

What never may happen is in `check`, `show` and `explore`: each violation says what is broken. `queue_mutants` has a mutant for
each guard. Not in the model: two partitions, time, rewriting the log, done bits in blocks of 256, sessions of clients.
"""

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

DELIVERIES = 2  # counted ones; then the message becomes a letter
ALONE = 2  # so often in doubt: delivered alone
WORKERS = (0, 1)

NEW = "new"  # never delivered, or returned
WAITS = "waits"  # has a row; delivered as others are
DOUBTED = "doubted"  # was in doubt for the first time: delivered as others are, after its row is durable
SINGLE = "single"  # delivered alone, after its row with the count is durable
COUNTED = "counted"  # as SINGLE, and the row with the count is durable: its worker died before it was shown
IN_DOUBT = "in doubt"  # since the start: perhaps a worker has it, and says so
DONE = "done"
ACKING = "acking"  # the records of its ack are on their way
BURYING = "burying"  # its letter is on its way
NOTING = "noting"  # its row is on its way
NOTING_COUNT = "noting count"  # as NOTING; its worker died before the delivery that the row counts
NOTING_RETURN = "noting return"  # as NOTING; the delivery that the row counted is returned
TAKING = "taking"  # the row of its delivery is on its way; then the worker gets it
IN_HAND = "in hand"

FAULTS = ("kill", "worker", "lapse of", "restore", "snapshot", "reset", "retention", "old")  # how their steps begin


class Row(NamedTuple):
    """What is on disk of one message. `life` None: the row has none."""

    life: int
    counted: int
    doubt: int = 0
    is_done: bool = False


class Disk(NamedTuple):
    """`foreign`: the start was written by a release without queues. `bits`, `letters`: the life of each; -1 without one."""

    start: int
    reach: int
    life: int
    foreign: bool
    bits: tuple[int, ...]
    rows: tuple[Row | None, ...]
    letters: tuple[int, ...]


class Message(NamedTuple):
    """A message in memory. `number`: of its delivery; of a message that is TAKING: how often it was in doubt."""

    state: str
    worker: int = -1
    number: int = 0
    is_alone: bool = False  # its delivery was counted before it was shown


class Hold(NamedTuple):
    """What the program of a worker believes to have. `n`: the delivery as the client sees it. `is_over`: it lost it."""

    offset: int
    identity: int
    era: int
    life: int
    number: int
    n: int
    starts: int
    is_over: bool = False


class State(NamedTuple):
    """The disk, what is on its way there, memory (None while the gateway is down), and what the checks have to know."""

    disk: Disk
    pending: tuple[Any, ...]
    memory: tuple[Message, ...] | None
    holds: tuple[frozenset[Hold], ...]
    acked: frozenset[tuple[int, int, int]]  # era, offset, identity
    answered: frozenset[tuple[int, int, int]]
    shown: tuple[int, ...]  # how often
    blame: tuple[int, ...]  # how often a delivery ended badly, or may have
    suspect: tuple[int, ...]  # how often in doubt; 2 after a worker died with nothing else
    era: int  # resets so far
    low: int  # first offset that retention left
    end: int
    identity: tuple[int, ...]  # of the message at each offset: a restored volume gives an offset to another message
    snapshot: tuple[Disk, int] | None
    base: int  # the end of the partition when the gateway started
    starts: int
    kills: int
    deaths: int
    lapses: int
    events: tuple[str, ...]


class Violated(Exception):
    """Something happened that never may."""


Steps = Iterator[tuple[str, State]]


def demand(holds: bool, violation: str) -> None:
    if not holds:
        raise Violated(violation)


def put(values: tuple[Any, ...], offset: int, value: Any) -> tuple[Any, ...]:
    return (*values[:offset], value, *values[offset + 1 :])


# --- the disk --------------------------------------------------------------------------------------------------------


def write(disk: Disk, record: tuple[Any, ...]) -> Disk:
    """Return the disk with one more record."""
    kind, offset = record[:2]
    if kind == "start":
        return disk._replace(start=offset, reach=record[2], life=record[3], foreign=False)
    if kind == "foreign":
        return disk._replace(start=offset, foreign=True)
    if kind == "bit":
        return disk._replace(bits=put(disk.bits, offset, record[2]))
    if kind == "row":
        return disk._replace(rows=put(disk.rows, offset, record[2]))
    # A letter is stored once for each id. The id has the life, so a letter of an older life does not hide it.
    return disk._replace(letters=put(disk.letters, offset, record[2]))


def row_of(disk: Disk, offset: int) -> Row | None:
    """Return the row of a message. A row of an older life does not count; a foreign start has no life of its own."""
    row = disk.rows[offset]
    if row is None or disk.foreign or row.life >= disk.life:
        return row
    return None


def has_bit(disk: Disk, offset: int) -> bool:
    return disk.bits[offset] >= 0 and not disk.foreign and disk.bits[offset] == disk.life


def is_done(disk: Disk, offset: int) -> bool:
    row = row_of(disk, offset)
    return has_bit(disk, offset) or (row.is_done if row else offset < disk.start)


def view(state: State) -> Disk:
    """Return the disk as it will be with all that is on its way."""
    return reduce(write, state.pending, state.disk)


# --- small changes ---------------------------------------------------------------------------------------------------


def send(state: State, *records: tuple[Any, ...]) -> State:
    return state._replace(pending=state.pending + records)


def move_start(state: State) -> State:
    """Send the record that moves the start, as far as the records before it allow."""
    disk = view(state)
    start = disk.start
    while start < disk.reach and (has_bit(disk, start) or row_of(disk, start) or start < state.low):
        start += 1
    return send(state, ("start", start, disk.reach, disk.life)) if start > disk.start else state


def remember(state: State, offset: int, message: str | Message) -> State:
    found = Message(message) if isinstance(message, str) else message
    return state._replace(memory=put(state.memory or (), offset, found))


def blame(state: State, offset: int, times: int = 1) -> State:
    return state._replace(blame=put(state.blame, offset, state.blame[offset] + times))


def suspect(state: State, offset: int, times: int = 1) -> State:
    return state._replace(suspect=put(state.suspect, offset, min(ALONE, state.suspect[offset] + times)))


def end_holds(state: State, offset: int) -> State:
    """Note that no worker is the owner of the message any more."""
    held = (frozenset(h._replace(is_over=True) if h.offset == offset else h for h in mine) for mine in state.holds)
    return state._replace(holds=tuple(held))


def replace_hold(state: State, worker: int, hold: Hold, other: Hold | None = None) -> State:
    mine = state.holds[worker] - {hold} | ({other} if other else frozenset())
    return state._replace(holds=put(state.holds, worker, mine))


def is_single(message: Message) -> bool:
    """Return whether its worker has, or gets, nothing else."""
    return message.is_alone or (message.state == TAKING and message.number >= ALONE)


def is_counted(message: Message) -> bool:
    """Return whether the row may have a delivery that has not ended, or was not shown."""
    return message.is_alone or message.state in (TAKING, COUNTED, ACKING, NOTING_COUNT, NOTING_RETURN)


def message_of(state: State, offset: int) -> tuple[int, int, int]:
    return state.era, offset, state.identity[offset]


class Model:
    """What happens, and how often at most. `keys`: the key of each message, if a key has one message at a time."""

    def __init__(
        self,
        n: int = 2,
        kills: int = 0,
        deaths: int = 0,
        lapses: int = 0,
        keys: str = "",
        end: int | None = None,
        events: tuple[str, ...] = (),
    ) -> None:
        self.n, self.kills, self.deaths, self.lapses = n, kills, deaths, lapses
        self.keys, self.end, self.events = keys, n if end is None else end, events

    def first(self) -> State:
        n, zeros = self.n, (0,) * self.n
        disk = Disk(0, 0, 0, False, (-1,) * n, (None,) * n, (-1,) * n)
        return State(
            disk=disk, pending=(), memory=(Message(NEW),) * n, holds=(frozenset(), frozenset()),
            acked=frozenset(), answered=frozenset(), shown=zeros, blame=zeros, suspect=zeros, era=0, low=0,
            end=self.end, identity=zeros, snapshot=None, base=0, starts=0, kills=0, deaths=0, lapses=0, events=(),
        )  # fmt: skip

    # --- deliveries --------------------------------------------------------------------------------------------------

    def show(self, state: State, offset: int, worker: int, is_alone: bool) -> State:
        """A worker gets the message."""
        disk, row, memory = state.disk, row_of(state.disk, offset), state.memory or ()
        demand(offset < disk.reach or row is not None, f"{offset} shown above the reach")
        demand(message_of(state, offset) not in state.answered, f"{offset} shown, its ack was answered")
        self.check_key(state, offset)
        others = [m for at, m in enumerate(memory) if at != offset and m.state == IN_HAND and m.worker == worker]
        demand(not (is_alone and others), f"{offset} shown alone beside others")
        demand(not any(m.is_alone for m in others), f"{offset} shown beside one that is alone")
        demand(not is_alone or state.suspect[offset] >= ALONE, f"{offset} shown alone, in doubt only once")
        number, count = state.shown[offset] + 1, row.counted if row else 0
        lives = state.era + max(state.identity) + state.events.count("old")
        limit = ALONE + (DELIVERIES + 2) * lives + state.events.count("return")
        demand(number - count <= limit, f"{offset} shown {number} times, and {count} of them count")
        n = count + (not is_alone)
        demand(n <= DELIVERIES, f"{offset} shown in delivery {n}")
        hold = Hold(offset, state.identity[offset], state.era, disk.life, number, n, state.starts)
        mine = frozenset(h for h in state.holds[worker] if h.offset != offset) | {hold}
        state = state._replace(shown=put(state.shown, offset, number), holds=put(state.holds, worker, mine))
        return remember(state, offset, Message(IN_HAND, worker, number, is_alone))

    def check_key(self, state: State, offset: int) -> None:
        """Of one key one message is out, and none overtakes another."""
        for other in range(self.n):
            if not self.keys or other == offset or self.keys[other] != self.keys[offset]:
                continue
            is_out = any(h.offset == other and h.era == state.era and not h.is_over for m in state.holds for h in m)
            demand(not is_out, f"{other} and {offset} of one key are out")
            is_next = other > offset or is_done(state.disk, other) or other < state.low
            demand(is_next, f"{offset} shown before {other} of its key is done")

    def doubt(self, state: State, offset: int) -> State:
        """Nobody can say how the last delivery ended. A message that is gone frees its key then."""
        if offset < state.low:
            return remember(state, offset, DONE)
        row = row_of(view(state), offset)
        times = (row.doubt if row else 0) + 1
        return remember(state, offset, SINGLE if times >= ALONE else DOUBTED)

    def bury(self, state: State, offset: int, count: int) -> State:
        """Send the letter, then the row that says so."""
        life = view(state).life
        records = [("letter", offset, life), ("row", offset, Row(life, count, is_done=True))]
        return move_start(remember(send(state, *records), offset, BURYING))

    def end_badly(self, state: State, offset: int, is_counted: bool, doubt: int = 0) -> State:
        """End a delivery that failed: the row with its count, or the letter."""
        if offset < state.low:
            return remember(state, offset, DONE)
        disk = view(state)
        row = row_of(disk, offset) or Row(disk.life, 0)
        count = row.counted + (not is_counted)
        if count >= DELIVERIES:
            demand(count <= state.blame[offset], f"{offset} is a letter, ended badly {state.blame[offset]} times")
            return self.bury(state, offset, count)
        noted = Row(disk.life, count, max(doubt, row.doubt))
        return remember(send(state, ("row", offset, noted)), offset, NOTING)

    def ack(self, state: State, worker: int, hold: Hold) -> State | None:
        """A worker acknowledges. None: answered after what is on its way."""
        offset, disk = hold.offset, view(state)
        message = (state.memory or ())[offset]
        if message.state in (ACKING, BURYING, NOTING, NOTING_COUNT, NOTING_RETURN, TAKING):
            return None
        if hold.life != disk.life:
            return replace_hold(state, worker, hold)
        if hold.starts < state.starts and (
            (offset >= disk.reach and not row_of(disk, offset)) or offset >= state.base
        ):  # of a gateway before, and not in doubt at the start of this one: after a restore it is another message
            return replace_hold(state, worker, hold)
        over = hold._replace(is_over=True)
        if offset < state.low and message.state == IN_DOUBT:  # the first worker that acknowledges it ends it
            state, hold = end_holds(state, offset), over
        if message.state == DONE or offset < state.low:
            is_free = message.state != IN_HAND or message.worker == worker
            return replace_hold(remember(state, offset, DONE) if is_free else state, worker, hold)
        if self.keys and message.state == IN_HAND and message.worker != worker:
            return replace_hold(state, worker, hold)  # lost: else the next of the key would be out beside it
        if (hold.era, offset, hold.identity) == message_of(state, offset):
            state = state._replace(acked=state.acked | {message_of(state, offset)})
        if message.state == IN_DOUBT:
            state, hold = end_holds(state, offset), over
        state = replace_hold(state, worker, hold, over)
        if offset >= disk.start:
            state = send(state, ("bit", offset, disk.life))
        if disk.rows[offset]:
            state = send(state, ("row", offset, None))
        return remember(move_start(state), offset, Message(ACKING, worker))

    def is_blocked(self, state: State, offset: int) -> bool:
        """Return whether an earlier message of the key is not done."""
        memory = state.memory or ()
        same = (other for other in range(offset) if self.keys and self.keys[other] == self.keys[offset])
        return any(memory[other].state != DONE for other in same)

    # --- steps -------------------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Steps:
        """Yield all that may happen next."""
        if state.pending:
            yield "sync", self.sync(state)
        if state.kills < self.kills:
            yield from self.kill(state)
        if state.memory is None:
            if not state.pending:
                yield from self.begin(state)
            return
        for worker in WORKERS:
            yield from self.take(state, worker)
            for hold in sorted(state.holds[worker]):
                yield from self.answer(state, worker, hold)
            yield from self.lapse(state, worker)
            if state.deaths < self.deaths and state.holds[worker]:
                yield f"worker {worker} dies", self.die(state, worker)
        for offset, message in enumerate(state.memory):
            if message.state == IN_DOUBT:
                yield f"grace of {offset} is over", self.doubt(end_holds(state, offset), offset)
        yield from self.put_aside(state)
        yield from self.disturb(state)

    def kill(self, state: State) -> Steps:
        """Kill the gateway: a prefix of what is on its way is on disk."""
        for survivors in range(len(state.pending) + 1):
            disk = reduce(write, state.pending[:survivors], state.disk)
            is_reset = disk.life > state.disk.life and not state.disk.foreign
            killed = self.forget(state._replace(disk=disk, pending=(), era=state.era + is_reset))
            killed = killed._replace(kills=state.kills + 1)
            yield f"kill gateway, {survivors} of {len(state.pending)} survive", killed

    def forget(self, state: State) -> State:
        """Forget what is in memory. Nobody can say how the deliveries ended that were counted before they were shown."""
        for offset, message in enumerate(state.memory or ()):
            row = row_of(state.disk, offset)
            if row and row.doubt >= ALONE and is_counted(message):
                state = blame(state, offset)
        return state._replace(memory=None)

    def begin(self, state: State) -> Steps:
        """Start the gateway; or let a release without queues run for a while."""
        disk = state.disk
        if disk.foreign:  # adopt it: its rows in the next life, then a start of ours
            life = disk.life + 1
            rows = [("row", at, row._replace(life=life)) for at, row in enumerate(disk.rows) if row]
            start = ("start", disk.start, max(disk.start, state.end), life)
            yield "adopt", send(state, *rows, start)
        else:
            yield "start", self.load(state)
        if state.events.count("old") < self.events.count("old"):
            yield from self.run_old_release(state._replace(events=(*state.events, "old")))

    def load(self, state: State) -> State:
        disk = state.disk
        for offset in range(state.low):
            state = end_holds(state, offset)  # nobody knows any more whose it is
        memory = []
        for offset in range(self.n):
            if offset < state.low or is_done(disk, offset):
                memory.append(Message(DONE))
            elif offset >= state.end or not (offset < disk.reach or row_of(disk, offset)):
                memory.append(Message(NEW))
            else:
                memory.append(Message(IN_DOUBT))
                state = suspect(state, offset)
        return state._replace(memory=tuple(memory), base=state.end, starts=state.starts + 1)

    def sync(self, state: State) -> State:
        """All that is on its way is durable."""
        disk = view(state)
        is_reset = disk.life > state.disk.life and not state.disk.foreign
        state = state._replace(disk=disk, pending=(), era=state.era + is_reset)
        memory = state.memory or ()
        for offset, message in enumerate(memory):
            row = row_of(disk, offset)
            if message.state == ACKING:
                rest = frozenset(h for h in state.holds[message.worker] if h.offset != offset)
                state = remember(state, offset, DONE)
                state = state._replace(holds=put(state.holds, message.worker, rest))
                state = state._replace(answered=state.answered | {message_of(state, offset)})
            elif message.state in (NOTING, NOTING_COUNT, NOTING_RETURN):
                then = COUNTED if message.state == NOTING_COUNT else SINGLE if row and row.doubt >= ALONE else WAITS
                state = remember(state, offset, DONE if offset < state.low else then)
            elif message.state == BURYING:
                state = remember(state, offset, DONE)
        for offset, message in enumerate(memory):  # a delivery begins after all that has ended
            if message.state == TAKING:
                is_gone, is_alone = offset < state.low, message.number >= ALONE
                taken = remember(state, offset, DONE) if is_gone else None
                state = taken or self.show(state, offset, message.worker, is_alone)
        return state

    def take(self, state: State, worker: int) -> Steps:
        """A worker asks for a message: the oldest one that it may have."""
        memory, disk, durable = state.memory or (), view(state), state.disk
        mine = [m for m in memory if m.state in (IN_HAND, TAKING) and m.worker == worker]
        if any(is_single(m) for m in mine):
            return
        for offset in range(state.low, state.end):
            kind, row = memory[offset].state, row_of(disk, offset) or Row(disk.life, 0)
            if self.is_blocked(state, offset):
                continue
            if kind == COUNTED and not mine:
                yield f"take {offset} alone by {worker}", self.show(state, offset, worker, True)
            elif kind == SINGLE and not mine:
                counted = Row(disk.life, row.counted + 1, ALONE)
                if row.counted >= DELIVERIES:
                    yield f"{offset} is spent", self.bury(state, offset, row.counted)
                else:
                    taken = remember(send(state, ("row", offset, counted)), offset, Message(TAKING, worker, ALONE))
                    yield f"take {offset} alone by {worker}", taken
            elif kind == DOUBTED:
                once = Row(disk.life, row.counted, 1)
                taken = remember(send(state, ("row", offset, once)), offset, Message(TAKING, worker, 1))
                yield f"take {offset} in doubt by {worker}", taken
            elif kind in (NEW, WAITS) and (offset < durable.reach or row_of(durable, offset)):
                yield f"take {offset} by {worker}", self.show(state, offset, worker, False)
            elif kind in (NEW, WAITS) and disk.reach <= offset:
                yield "grow the reach", send(state, ("start", disk.start, min(self.n, disk.reach + 2), disk.life))
            if not self.keys and kind in (NEW, WAITS, DOUBTED):
                break

    def answer(self, state: State, worker: int, hold: Hold) -> Steps:
        """Ack, nack, reject or return; or a worker comes back to a gateway that was started."""
        offset, disk = hold.offset, view(state)
        message = (state.memory or ())[offset]
        acked = self.ack(state, worker, hold)
        if acked is not None:
            yield f"ack {offset} by {worker}", acked
        is_same = hold[:2] == (offset, state.identity[offset]) and hold.life == disk.life
        if message.state == IN_HAND and is_same and (message.worker, message.number) == (worker, hold.number):
            yield from self.give_back(state, worker, hold)
        is_mine = hold.life == state.disk.life and (hold.starts == state.starts or offset < state.base)
        if message.state == IN_DOUBT and is_mine:
            yield from self.come_back(state, worker, hold)

    def come_back(self, state: State, worker: int, hold: Hold) -> Steps:
        """A worker says that it still has a message. A message alone has no neighbour then either."""
        offset, row = hold.offset, row_of(state.disk, hold.offset)
        mine = [m for m in state.memory or () if m.state in (IN_HAND, TAKING) and m.worker == worker]
        is_alone = bool(row and row.doubt >= ALONE)
        if any(is_single(m) for m in mine) or (is_alone and mine):
            return
        if row and row.doubt >= ALONE:
            state = blame(state, offset, -1)  # of the kill, which ended nothing
        back = hold._replace(is_over=False)
        state = replace_hold(end_holds(state, offset), worker, hold._replace(is_over=True), back)
        message = Message(IN_HAND, worker, hold.number, is_alone)
        yield f"{worker} comes back with {offset}", remember(state, offset, message)

    def give_back(self, state: State, worker: int, hold: Hold) -> Steps:
        """Only the delivery in force ends so."""
        offset, disk = hold.offset, view(state)
        message, row = (state.memory or ())[offset], row_of(disk, offset)
        is_in_force = (message.worker, message.number) == (worker, hold.number)
        demand(is_in_force, f"nack of {offset} by {worker} ends the delivery of another")
        state = replace_hold(state, worker, hold)
        failed = blame(state, offset)
        yield f"nack {offset} by {worker}", self.end_badly(failed, offset, message.is_alone)
        if "reject" in self.events:
            yield f"reject {offset} by {worker}", self.bury(failed, offset, DELIVERIES)
        if "return" in self.events and state.events.count("return") < 2:
            state = state._replace(events=(*state.events, "return"))
            if offset < state.low:
                returned = remember(state, offset, DONE)
            elif message.is_alone and row:
                uncounted = row._replace(life=disk.life, counted=row.counted - 1)
                returned = remember(send(state, ("row", offset, uncounted)), offset, NOTING_RETURN)
            else:
                returned = remember(state, offset, SINGLE if row and row.doubt >= ALONE else WAITS if row else NEW)
            yield f"return {offset} by {worker}", returned

    def lapse(self, state: State, worker: int) -> Steps:
        for offset, message in enumerate(state.memory or ()):
            if message.state == IN_HAND and message.worker == worker and state.lapses < self.lapses:
                lapsed = end_holds(blame(state, offset), offset)._replace(lapses=state.lapses + 1)
                yield f"lapse of {offset}", self.end_badly(lapsed, offset, message.is_alone)

    def die(self, state: State, worker: int) -> State:
        """A worker ends without a word."""
        memory = state.memory or ()
        mine = [m for m in memory if m.state in (IN_HAND, TAKING) and m.worker == worker]
        state = state._replace(holds=put(state.holds, worker, frozenset()), deaths=state.deaths + 1)
        for offset, message in enumerate(memory):
            if message.worker != worker:
                continue
            if message.state == TAKING:  # its row is on its way, and nobody was shown it
                state = remember(state, offset, NOTING_COUNT if message.number >= ALONE else NOTING)
            elif message.state == IN_HAND and (message.is_alone or len(mine) == 1):
                state = suspect(blame(state, offset), offset, ALONE)
                state = self.end_badly(state, offset, message.is_alone, doubt=ALONE)
            elif message.state == IN_HAND:
                state = self.doubt(suspect(state, offset), offset)
        return state

    def put_aside(self, state: State) -> Steps:
        """A straggler that is not done gets a row, so that the start can move."""
        disk, offset, memory = view(state), view(state).start, state.memory or ()
        if offset >= min(self.n, disk.reach) or row_of(disk, offset) or has_bit(disk, offset):
            return
        if memory[offset].state in (IN_HAND, WAITS) and any(has_bit(disk, at) for at in range(offset + 1, self.n)):
            yield f"straggler {offset}", move_start(send(state, ("row", offset, Row(disk.life, 0))))

    # --- from outside ------------------------------------------------------------------------------------------------

    def disturb(self, state: State) -> Steps:
        """Retention, a reset, a volume that is restored; a producer."""
        memory, low = state.memory or (), state.low
        if "retention" in self.events and not state.pending and low < state.end:
            busy = (IN_HAND, TAKING, ACKING, NOTING, NOTING_COUNT, NOTING_RETURN, BURYING, IN_DOUBT)
            gone = state._replace(low=low + 1)  # what is in hand or in doubt has its key until that ends
            yield f"retention of {low}", move_start(gone if memory[low].state in busy else remember(gone, low, DONE))
        is_idle = not state.pending and not any(m.state in (IN_HAND, TAKING) for m in memory)
        if "reset" in self.events and "reset" not in state.events and is_idle and state.acked:
            reset = send(self.forget(state), ("start", 0, 0, state.disk.life + 1))
            yield "reset", reset._replace(events=(*state.events, "reset"))
        if "restore" in self.events and not state.pending:
            if state.snapshot is None and state.end < self.n:
                yield "snapshot", state._replace(snapshot=(state.disk, state.end))
            elif state.snapshot and "restore" not in state.events:
                yield "restore", self.restore(state, *state.snapshot)
        if state.end < self.n:
            yield "produce", state._replace(end=state.end + 1)

    def restore(self, state: State, disk: Disk, end: int) -> State:
        identity = tuple(known + (offset >= end) for offset, known in enumerate(state.identity))
        state = self.forget(state)._replace(disk=disk, end=end, identity=identity)
        return state._replace(answered=frozenset(), events=(*state.events, "restore"))

    def run_old_release(self, state: State) -> Steps:
        """A member of the release before commits a position, gives back, or resets. Acks of queues are forgotten."""
        disk = state.disk
        state = state._replace(answered=frozenset())
        for position in range(disk.start + 1, state.end + 1):
            acks = {message_of(state, offset) for offset in range(disk.start, position) if disk.rows[offset] is None}
            committed = state._replace(disk=write(disk, ("foreign", position)), acked=state.acked | acks)
            yield f"old release commits {position}", committed
        for offset, row in enumerate(disk.rows[: state.end]):
            is_open = offset >= disk.start if row is None else not row.is_done
            if is_open and (row is None or row.counted + 1 < DELIVERIES):
                noted = Row(disk.life, (row.counted if row else 0) + 1)
                given = blame(state, offset)._replace(disk=write(disk, ("row", offset, noted)))
                yield f"old release gives {offset} back", given
        reset = write(disk._replace(rows=(None,) * self.n), ("foreign", 0))
        yield "old release resets", state._replace(disk=reset, era=state.era + 1)

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """What must hold in every state."""
        disk, memory = state.disk, state.memory
        for offset in range(state.low, state.end):
            row = row_of(disk, offset)
            is_buried = disk.letters[offset] == disk.life or ("old" in self.events and disk.letters[offset] >= 0)
            is_lost = is_done(disk, offset) and message_of(state, offset) not in state.acked and not is_buried
            demand(not is_lost, f"{offset} is done on disk, and nobody did it")
            if row and not row.is_done:
                message = memory[offset] if memory else Message(DONE)
                most = state.blame[offset] + (is_counted(message) and row.doubt >= ALONE)
                demand(row.counted <= most, f"{offset} has count {row.counted}, ended badly {most} times")
                demand(row.counted <= DELIVERIES, f"{offset} has count {row.counted}")
            is_known = not memory or memory[offset].state != DONE or is_done(disk, offset)
            demand(is_known, f"{offset} is done in memory only")

    def next(self, state: State) -> list[tuple[str, State]]:
        """Check a state, and return what may happen next. Raises Violated."""
        self.check(state)
        following = [*self.steps(state)]
        if not any(not name.startswith(FAULTS) and other != state for name, other in following):
            is_over = all(is_done(state.disk, offset) or offset < state.low for offset in range(self.n))
            demand(is_over, "stuck")
        return following


# --- runs ------------------------------------------------------------------------------------------------------------


def explore(model: Model, most: int, seconds: float = 1e9) -> tuple[bool, int]:
    """Go through every interleaving. Return whether that is complete, and the number of states. Raises Violated."""
    first = model.first()
    before: dict[State, tuple[State, str] | None] = {first: None}
    todo = deque([first])
    begun = time.process_time()
    while todo:
        state = todo.popleft()
        try:
            for name, other in model.next(state):
                if other not in before:
                    before[other] = state, name
                    todo.append(other)
        except Violated as violated:
            steps = []
            while (step := before[state]) is not None:
                steps.append(step[1])
                state = step[0]
            raise Violated(f"{violated}: {' > '.join(reversed(steps))}") from None
        if len(before) > most or time.process_time() - begun > seconds:
            return False, len(before)
    return True, len(before)


def walk(seed: int, length: int = 150) -> State:
    """One random walk, in a configuration that the seed chooses. Return where it ends. Raises Violated."""
    chance = random.Random(seed)
    keys = chance.choice(["", "", "aaa", "aba"])
    events = tuple(event for event in ("reject", "return", "retention", "reset") if chance.random() < 0.3)
    kills, deaths, lapses = (chance.choice((0, 1, 2, 6)) for _ in range(3))
    model = Model(3, kills, deaths, lapses, keys, events=events)
    state = model.first()
    steps: list[str] = []
    for _ in range(length):
        try:
            following = model.next(state)
        except Violated as violated:
            raise Violated(f"seed {seed}: {violated}: {' > '.join(steps)}") from None
        if not following:
            break
        name, state = chance.choice(following)
        steps.append(name)
    return state


CONFIGS = {
    "kills": Model(kills=1, events=("reject",)),
    "kill, lapse": Model(kills=1, lapses=1),
    "one, many kills": Model(n=1, kills=4, deaths=1, lapses=1),
    "deaths": Model(kills=1, deaths=1),
    "two deaths": Model(deaths=2),
    "zombies": Model(lapses=2, deaths=1, events=("reject",)),
    "return": Model(n=1, kills=2, deaths=1, events=("return",)),
    "three": Model(n=3, deaths=1),
    "retention": Model(kills=1, events=("retention",)),
    "reset": Model(n=1, kills=1, lapses=1, events=("reset", "reject")),
    "old": Model(kills=1, events=("old",)),
    "old, twice": Model(n=1, kills=2, events=("old", "old")),
    "restore": Model(n=1, end=0, events=("restore",)),
    "key": Model(keys="aa", kills=1, deaths=1),
    "key, lapse": Model(keys="aa", lapses=1, kills=1),
    "keys": Model(n=3, keys="aba", lapses=1),
    "keys, retention": Model(3, keys="aba", deaths=1, events=("retention",)),
    "key, retention": Model(keys="aa", kills=1, lapses=1, events=("retention",)),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Look for a violation in the model of queues.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CONFIGS)}")
    parser.add_argument("--walks", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        for seed in range(options.walks):
            walk(seed)
        for name in options.names or ([] if options.walks else CONFIGS):
            begun = time.process_time()
            is_complete, states = explore(CONFIGS[name], 5_000_000)
            how = "complete" if is_complete else "stopped"
            print(f"{name:20} {how}, {states:,} states, {time.process_time() - begun:.0f} s", flush=True)
    except Violated as violated:
        print(f"violated: {violated}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
