"""The bytes of the consumer port as a client reads and writes them: a stream cut into replies, requests with answers.

Invariant   Every request that was asked gets exactly one outcome, in the order in which its kind was asked.
Memory      At most _MOST_COMMITS commits are on their way; what is committed meanwhile is joined to one. A reply line is
            at most MAX_REPLY bytes. A batch is as large as the client has asked for, or one record.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from kmq.client.failures import Fenced
from kmq.errors import KmqError
from kmq.wire import replies
from kmq.wire.requests import MAX_REPLY, MAX_REQUEST, Assign, BadLine, Commit, Fetch, Group, TopicPartition

Item = TypeVar("Item")

_MOST_COMMITS = 8  # on their way; what is committed meanwhile waits, as one commit


class Pending:
    """A request without its answer yet. `value` is the answer, as soon as `done` and without `error`."""

    __slots__ = ("callback", "done", "error", "line", "offsets", "since", "value")

    def __init__(self, line: bytes, since: float, offsets: tuple[tuple[TopicPartition, int], ...] = ()) -> None:
        self.line, self.since, self.offsets = line, since, offsets
        self.done = False
        self.error: KmqError | None = None
        self.value: object = None
        self.callback: Callable[[Pending], object] | None = None

    def then(self, callback: "Callable[[Pending], object]") -> None:
        """Call back when it is done, after whoever waits already."""
        before = self.callback
        self.callback = callback if before is None else lambda pending: (before(pending), callback(pending))

    def finish(self, value: object = None, error: KmqError | None = None) -> None:
        self.value, self.error, self.done = value, error, True
        if self.callback is not None:
            self.callback(self)


def split(whole: Pending, items: tuple[Item, ...], ask: Callable[[tuple[Item, ...]], Pending]) -> list[Pending]:
    """Return the requests that ask for `items` together: several where one line would be over MAX_REQUEST bytes.

    `whole` is done as soon as all of them are: with the first error, or with the rows of all answers.
    """
    if len(whole.line) <= MAX_REQUEST:
        return [whole]
    return joined(whole, [ask(part) for part in fitting(items, lambda some: ask(some).line)])


def joined(whole: Pending, parts: list[Pending]) -> list[Pending]:
    """Let `whole` be done as soon as all its parts are: with the first error, or with the rows of all answers."""
    missing, rows, error = len(parts), list[object](), None

    def answered(part: Pending) -> None:
        nonlocal missing, error
        missing, error = missing - 1, error or part.error
        rows.extend(part.value if isinstance(part.value, tuple) else ())
        if not missing:
            whole.finish(tuple(rows), error)

    for part in parts:
        if part.done:
            answered(part)
        else:
            part.then(answered)
    return parts


def fitting(items: tuple[Item, ...], encode: Callable[[tuple[Item, ...]], bytes]) -> Iterator[tuple[Item, ...]]:
    """Yield the items in order, in parts whose lines the broker takes."""
    if len(items) < 2 or len(encode(items)) <= MAX_REQUEST:
        yield items
        return
    half = len(items) // 2
    yield from fitting(items[:half], encode)
    yield from fitting(items[half:], encode)


def opening_of(asked: Group | Assign) -> bytes:
    """Return the first lines of a connection: several where one would be over MAX_REQUEST bytes."""

    def line_of(some: tuple[Any, ...], more: bool = True) -> bytes:
        if isinstance(asked, Group):
            return asked._replace(topics=some, more=more).encode()
        return asked._replace(partitions=some, more=more).encode()

    names: tuple[Any, ...] = asked.topics if isinstance(asked, Group) else asked.partitions
    *others, last = fitting(names, line_of)
    return b"".join([*map(line_of, others), line_of(last, more=False)])


def nameable(wanted: tuple[TopicPartition, ...], last: TopicPartition | None) -> tuple[TopicPartition, ...]:
    """Return the partitions that one `!fetch` can name; those behind `last`, which was named last, come first."""
    at = wanted.index(last) + 1 if last in wanted else 0
    return next(fitting((*wanted[at:], *wanted[:at]), lambda some: Fetch(1 << 62, 99_999, some).encode()))


def commit_parts(whole: Pending) -> list[Pending]:
    """Return the requests that ask for a commit."""
    return split(whole, whole.offsets, lambda some: _commit_of(some, whole.since))


def _commit_of(pairs: tuple[tuple[TopicPartition, int], ...], now: float) -> Pending:
    return Pending(Commit(pairs).encode(), now, pairs)


class Requests:
    """What is written, and what is still to be answered: `seek`, `offsets`, `commit` and `nack`, each in order."""

    def __init__(self, session_s: float) -> None:
        self.written_at = 0.0  # when the last request was made: each counts as a beat
        self.was_silent = False  # on this connection, for so long that the broker has ended the member
        self._session_s = session_s
        self._out: list[bytes] = []
        self._asked: dict[str, deque[Pending]] = {name: deque() for name in ("seek", "offsets", "commit", "nack")}
        self._next_commit: Pending | None = None  # waits until one of those on their way is answered

    def connected(self, now: float) -> None:
        """Note that a connection was opened."""
        self.written_at, self.was_silent = now, False

    def write(self, line: bytes, now: float) -> None:
        self._out.append(line)
        self.was_silent = self.was_silent or now - self.written_at >= self._session_s
        self.written_at = now

    @property
    def expires_at(self) -> float:
        """When the broker ends the member for its silence, or 0 if it may have done so already."""
        return 0.0 if self.was_silent else self.written_at + self._session_s

    def take(self) -> bytes:
        """Return the bytes to write now."""
        if not self._out:
            return b""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def expect(self, name: str, pending: Pending) -> Pending:
        self._asked[name].append(pending)
        return pending

    def commit(self, offsets: dict[TopicPartition, int], now: float) -> Pending | None:
        """Return a commit to ask for; None if it waits, joined to others: then `waiting_commit` is it."""
        if len(self._asked["commit"]) < _MOST_COMMITS:
            return _commit_of(tuple(offsets.items()), now)
        joined = dict(self._next_commit.offsets) | offsets if self._next_commit else offsets
        if self._next_commit is None:
            self._next_commit = _commit_of(tuple(joined.items()), now)
        self._next_commit.offsets = tuple(joined.items())
        return None

    def asked_commits(self) -> set[tuple[TopicPartition, int]]:
        """Return what is asked to be committed, and not answered."""
        return {pair for pending in self._asked["commit"] for pair in pending.offsets}

    @property
    def waiting_commit(self) -> Pending | None:
        return self._next_commit

    def next_commit(self, now: float) -> Pending | None:
        """Return the commit that has waited for an answer to another one; None: there is none."""
        waiting, self._next_commit = self._next_commit, None
        if waiting is not None:
            waiting.line, waiting.since = Commit(waiting.offsets).encode(), now
        return waiting

    def answered(self, name: str) -> Pending:
        """Return the request to which this answer belongs. Raises BadLine if there is none."""
        if not self._asked[name]:
            raise BadLine(f"!{name}: an answer to nothing")
        return self._asked[name].popleft()

    def is_asked(self, name: str) -> bool:
        """Return True while a request of this kind has no answer."""
        return bool(self._asked[name])

    def forget_written(self) -> None:
        """The connection is gone, with what was to be written."""
        self._out.clear()

    def fence(self, kept: Collection[TopicPartition]) -> None:
        """Fail commits for other partitions than these: sent again, they could undo what a later owner has committed."""
        asked = [*self._asked["commit"], *([self._next_commit] if self._next_commit else [])]
        gone = [pending for pending in asked if any(place not in kept for place, _ in pending.offsets)]
        self._asked["commit"] = deque(pending for pending in self._asked["commit"] if pending not in gone)
        if self._next_commit in gone:
            self._next_commit = None
        for pending in gone:
            pending.finish(error=Fenced("fenced another member may have read on meanwhile"))

    def write_again(self, now: float) -> None:
        """Write the requests without an answer: this is another connection."""
        for asked in self._asked.values():
            for pending in asked:
                pending.since = now
                self.write(pending.line, now)

    def fail(self, error: KmqError, *names: str) -> None:
        """Fail the requests of these kinds; without a name all."""
        if not names and (waiting := self.next_commit(0.0)) is not None:
            waiting.finish(error=error)
        for name in names or tuple(self._asked):
            asked = self._asked[name]
            while asked:
                asked.popleft().finish(error=error)

    def oldest(self, otherwise: float) -> float:
        """Return when the request was made that waits longest for its answer."""
        return min((asked[0].since for asked in self._asked.values() if asked), default=otherwise)


class Decoder:
    """Cuts a stream into replies, each with the stored lines that follow it."""

    def __init__(self) -> None:
        self._line = b""  # an unfinished reply
        self._batch: replies.Batch | None = None  # whose lines are on their way
        self._parts: list[bytes] = []
        self._missing = 0

    def feed(self, data: bytes) -> Iterator[tuple[replies.Reply, bytes]]:
        """Yield the replies that are whole now. Raises BadLine for what is no reply."""
        at = 0
        while at < len(data):
            if self._batch is not None:
                part = data[at : at + self._missing] if at or self._missing < len(data) else data
                self._parts.append(part)
                at += len(part)
                self._missing -= len(part)
                if not self._missing:
                    batch, body = self._batch, b"".join(self._parts)
                    self._batch, self._parts = None, []
                    if body.count(b"\n") != batch.lines or not body.endswith(b"\n"):
                        raise BadLine(f"{batch}: its lines are others")
                    yield batch, body
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or len(data)]
            at = end or len(data)
            if len(self._line) > MAX_REPLY:
                raise BadLine("a reply is too long")
            if not end:
                return
            line, self._line = self._line, b""
            reply = replies.reply(line)
            if isinstance(reply, replies.Batch) and reply.nbytes:
                self._batch, self._missing = reply, reply.nbytes
            else:
                yield reply, b""


__all__ = ["Decoder", "Pending", "Requests", "commit_parts", "joined", "nameable", "opening_of", "split"]
