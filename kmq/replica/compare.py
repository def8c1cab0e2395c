"""Comparison of replicas: finds the first record that differs between data directories, or brokers of a shard.

Example: for log `orders/0` it yields `Compared` with the first and last offset compared, and "" if all are equal.

    DirectoryLogs       the logs of a data directory: the WAL as far as it is committed, and the queues
    answer              a broker's side of a comparison over port 5677
    ReplicaComparison   asks all sides for the crc of the same range; where two differ it halves the range, to a record

Invariant   Nothing is written on any side. Only records that all sides have are compared, and in the WAL only those
            that are committed on all sides: later ones may yet be cut.
Memory      A side reads RANGE_BYTES, or one longer record, for each request, in a thread. It has one request at a time.
            The caller is not registered as a replica: its id is wire.NOBODY. A broker serves one caller at a time, and
            each of its answers must arrive within wire.DEAD_S.
Not covered Topics under compaction: each replica blanks replaced records in its own time.
"""

import asyncio
import contextlib
import os
import re
import zlib
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from kmq.broker.tls import client_context
from kmq.config.settings import Settings
from kmq.errors import ConfigError, CorruptError, RetryError
from kmq.log import committed, identity, reader, topics, wal
from kmq.log.damage import DamageError
from kmq.log.segment import within
from kmq.message import record
from kmq.message.routing import LEVEL
from kmq.replica import wire
from kmq.replica.bootstrap import in_thread
from kmq.replica.shard import ShardView
from kmq.replica.wire import Link, LogRange, NextLog, WireError

RANGE_BYTES = 1 << 20
NO_LOG = "-"  # stands before the first log, and after the last
_WAL = "append"
_MOST_ALONE = 100_000  # logs in a row that only some sides have; no broker has so many partitions
_IDLE_S = 60.0  # longest time between two requests
_DAMAGED, _REPLACED = "damaged", "bootstrap"
_LOG = re.compile(rf"{_WAL}|([A-Za-z0-9_][A-Za-z0-9_.-]{{0,199}})/(\d{{1,4}})")

Request = NextLog | LogRange
Ask = Callable[[Request], Awaitable[LogRange]]


def _rank(log: str) -> tuple[str, int]:
    """Return the sort key of a log: logs are compared in this order. Raises WireError for an invalid name."""
    match = _LOG.fullmatch(log)
    if match is None:
        raise WireError(f"{log[:40]!r} is no log")
    return (match[1], int(match[2])) if match[1] else ("", -1)


# --- a side ----------------------------------------------------------------------------------------------------------


class DirectoryLogs:
    """The logs of a data directory, also while its broker runs."""

    def __init__(self, data: str) -> None:
        self._data = data
        self._logs: list[str] = []
        self._reader = _WAL, reader.wal(data)

    def ask(self, request: Request) -> LogRange:
        """Answer a request. Raises WireError if it is invalid, DamageError, OSError."""
        return self._following(request.log) if isinstance(request, NextLog) else self._read(request)

    def _following(self, log: str) -> LogRange:
        """Return the name and the range of the log after `log`."""
        if log == NO_LOG:
            self._logs = [*self._listing()]
        number = bisect_right(self._logs, _rank(log), key=_rank) if log != NO_LOG else 0
        if number == len(self._logs):
            return LogRange(NO_LOG, 0, 0, 0)
        log = self._logs[number]
        records = self._open(log)
        end = committed.shown_seq(self._data) + 1 if records.by_seq else records.end_offset()
        return LogRange(log, min(records.first_offset, end), end, 0)

    def _listing(self) -> Iterator[str]:
        yield _WAL
        for topic in topics.names(self._data):
            if not topics.is_compacted(self._data, topic):
                with contextlib.suppress(FileNotFoundError):  # it was deleted just now
                    numbers = sorted(int(name) for name in os.listdir(f"{self._data}/topics/{topic}") if name.isdigit())
                    yield from (f"{topic}/{number}" for number in numbers)

    def _open(self, log: str) -> reader.LogReader:
        """Return the reader of a log. The last one is kept, because it knows where its last read ended."""
        if log != self._reader[0]:
            if log not in self._logs:  # check the name, which a peer sent
                raise WireError(f"{log!r} is no log of this broker")
            topic, _, number = log.partition("/")
            self._reader = log, reader.local(self._data, topic, int(number)) if number else reader.wal(self._data)
        return self._reader[1]

    def _read(self, wanted: LogRange) -> LogRange:
        """Return the crc of the first RANGE_BYTES of a range, up to the end of a record, and the range of these
        records.

        Its end depends on the records alone. Blocks and segments would differ between replicas.
        """
        log = self._open(wanted.log)
        first = min(max(wanted.first, log.first_offset), wanted.next)
        lines, end = bytearray(), first
        for start, chunk in log.chunks(first, RANGE_BYTES) if first < wanted.next else ():
            lines += chunk
            end = record.seq_of(wal.last_line(chunk)) + 1 if log.by_seq else start + chunk.count(b"\n")
            if end >= wanted.next or len(lines) >= RANGE_BYTES:
                break
        text = bytes(lines)
        if cut := text.find(b"\n", RANGE_BYTES - 1) + 1:
            text = text[:cut]
            end = record.seq_of(wal.last_line(text)) + 1 if log.by_seq else first + text.count(b"\n")
        if end > wanted.next:
            end = wanted.next
            records = text.split(b"\n", end - first)[: end - first] if not log.by_seq else ()
            text = within(text, first, end - 1) if log.by_seq else b"".join(line + b"\n" for line in records)
        return LogRange(wanted.log, first, end, zlib.crc32(text))


async def answer(link: Link, data: str, message: wire.Message, is_replaced: Callable[[], bool]) -> None:
    """Serve a peer that compares this broker with others, until the peer ends it. `message`: its first one.

    `is_replaced`: whether the files of `data` are being replaced, or were replaced since the call.
    """
    logs = DirectoryLogs(data)
    while isinstance(message, (NextLog, LogRange)):
        reply: LogRange | wire.RefusedText = wire.RefusedText(_DAMAGED)
        try:
            reply = await in_thread(logs.ask, message)
        except Exception as err:
            if not isinstance(err, DamageError) and not is_replaced():
                raise
        if is_replaced():  # a mix of old and new files looks damaged, and cached facts about the old files are wrong
            reply = wire.RefusedText(_REPLACED)
        link.send(reply)
        if isinstance(reply, wire.RefusedText):
            return
        async with asyncio.timeout(_IDLE_S):
            message = await link.read()
    raise WireError(f"{type(message).__name__} came in place of what is to be compared")


async def _ask_broker(link: Link, request: Request) -> LogRange:
    """Ask a broker. Raises CorruptError if it finds damage, WireError, OSError."""
    link.send(request)
    try:
        async with asyncio.timeout(wire.DEAD_S):
            reply = await link.read()
    except TimeoutError:
        raise WireError(f"has not answered for {wire.DEAD_S} s") from None
    if isinstance(reply, wire.RefusedText) and reply.reason == _DAMAGED:
        where = f"from {request.first} on" if isinstance(request, LogRange) else "or the log after it"
        raise CorruptError(f"{request.log} {where} is damaged there; run kmq verify there")
    if isinstance(reply, wire.RefusedText):
        is_replaced = reply.reason == _REPLACED
        raise WireError("a bootstrap is being put in place; ask again" if is_replaced else f"refused: {reply.reason}")
    if not isinstance(reply, LogRange):
        raise WireError(f"{type(reply).__name__} came in place of an answer")
    return reply


def directories(paths: Sequence[str]) -> dict[str, Ask]:
    """Return the sides of these directories. Raises ConfigError if their lineages differ."""
    for one, other in pairwise(paths):
        if identity.lineage(one) != identity.lineage(other):
            raise ConfigError(f"{one} and {other}: are of different lineages, so not of one shard")
    return {path: partial(in_thread, DirectoryLogs(path).ask) for path in paths}


@contextlib.asynccontextmanager
async def brokers(
    view: ShardView, shard: str, name: str, settings: Settings
) -> AsyncIterator[tuple[dict[str, Ask], dict[str, Exception]]]:
    """Yield the sides of the brokers in the register, and for the others the error. `name`: of this broker."""
    register = view.register
    if register is None:
        raise ConfigError(view.unreadable or f"shard {shard}: is not begun; see: kmq cluster init --help")
    me = wire.Me(shard, register.lineage, name, wire.NOBODY, LEVEL, settings.max_line)
    secret = wire.read_secret(settings.replica_secret)
    context = client_context(settings) if settings.tls_cert else None
    addresses = {each.note.broker: each.note.replica for each in view.members.values() if each.session}
    sides, away = dict[str, Ask](), dict[str, Exception]()
    async with contextlib.AsyncExitStack() as stack:
        for broker in register.brokers:
            try:
                if broker not in addresses:
                    raise RetryError("is not there; start it")
                link = await wire.call(addresses[broker], me, secret, context, wire.HANDSHAKE_S)
                stack.callback(link.abort)
                sides[broker] = partial(_ask_broker, link)
            except TimeoutError:
                away[broker] = RetryError(f"{addresses[broker]} has not answered within {wire.HANDSHAKE_S:g} s")
            except (WireError, OSError, RetryError) as err:
                away[broker] = err
        yield sides, away


# --- the comparison --------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A log, and its first and last record that were compared; last < first: the sides share no record."""

    log: str  # "append", or "<topic>/<partition>"
    first: int
    last: int
    difference: str  # the first difference; "": all records are equal


class ReplicaComparison:
    """One run. A side that fails is left out of the rest."""

    def __init__(self, sides: Mapping[str, Ask], advance: Callable[[int], None] = lambda _: None) -> None:
        """`advance` is called with the number of records that were compared."""
        self._sides, self._advance = dict(sides), advance
        self.lost: dict[str, Exception] = {}

    async def logs(self) -> AsyncIterator[Compared]:
        """Compare the logs that all sides have, one after the other, and yield each result."""
        heads: dict[str, LogRange] = {}
        left = _MOST_ALONE
        wanted = dict.fromkeys(self._sides, NO_LOG)
        while True:
            heads |= await self._ask({name: NextLog(log) for name, log in wanted.items()})
            heads = {name: heads[name] for name in self._sides}
            logs = {head.log for head in heads.values()}
            if len(heads) < 2 or NO_LOG in logs:
                return
            newest = max(logs, key=_rank)
            wanted = {name: head.log for name, head in heads.items() if head.log != newest}
            left -= 1
            if not left:
                for name in wanted:
                    self._lose(name, WireError(f"has more than {_MOST_ALONE} logs that others lack"))
                wanted, left = {}, _MOST_ALONE
            elif not wanted:
                yield await self._compare([*heads.values()])
                wanted, left = dict.fromkeys(self._sides, newest), _MOST_ALONE

    async def _compare(self, heads: Sequence[LogRange]) -> Compared:
        log, first, end = heads[0].log, max(head.first for head in heads), min(head.next for head in heads)
        at = first
        while found := await self._range(log, at, end):
            part = next(iter(found.values()))
            if part.first > at:
                first = part.first  # retention has deleted the records before it
            if _differ(found):
                return Compared(log, first, part.next - 1, await self._first_difference(found))
            self._advance(part.next - part.first)
            at = part.next
        return Compared(log, first, at - 1, "")

    async def _range(self, log: str, first: int, end: int) -> dict[str, LogRange]:
        """Return each side's range of the first records, the same records on all sides; {}: there are none."""
        while first < end:
            found = await self._ask(dict.fromkeys(self._sides, LogRange(log, first, end, 0)))
            if len(found) < 2:
                break
            begin, stop = max(each.first for each in found.values()), min(each.next for each in found.values())
            if begin > first:
                first = begin  # retention has deleted the records before it
            elif any(each.next != stop for each in found.values()):
                end = stop
            else:
                return found if stop > first else {}
        return {}

    async def _first_difference(self, found: dict[str, LogRange]) -> str:
        """Describe the first record that differs within a range that differs, and the sides that differ."""
        log, first, end, _ = next(iter(found.values()))
        while end - first > 1:
            half = await self._range(log, first, (first + end) // 2)
            if not half:  # a side failed, or retention has deleted the records
                break
            part = next(iter(half.values()))
            first, end = (part.first, part.next) if _differ(half) else (part.next, end)
        exact = await self._range(log, first, end)
        return _text(exact if exact and _differ(exact) else found)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _ask(self, requests: Mapping[str, Request]) -> dict[str, LogRange]:
        """Ask these sides at the same time; return the answers of those that have not failed."""
        found = await asyncio.gather(*(self._ask_side(name, request) for name, request in requests.items()))
        return {name: reply for name, reply in zip(requests, found, strict=True) if reply is not None}

    async def _ask_side(self, name: str, request: Request) -> LogRange | None:
        try:
            reply = await self._sides[name](request)
            _check(request, reply)
        except (WireError, OSError, CorruptError) as err:
            self._lose(name, err)
            return None
        return reply

    def _lose(self, name: str, error: Exception) -> None:
        self.lost[name] = error
        del self._sides[name]


def _check(request: Request, reply: LogRange) -> None:
    """Raise WireError for an answer that would keep a comparison from ending."""
    if isinstance(request, LogRange):
        is_good = reply.log == request.log and request.first <= reply.first <= reply.next <= request.next
    elif reply.log == NO_LOG:
        is_good = True
    else:
        is_next = _rank(reply.log) > _rank(request.log) if request.log != NO_LOG else reply.log == _WAL
        is_good = is_next and reply.first <= reply.next
    if not is_good:
        raise WireError(f"{wire.encode(reply)} is no answer to {wire.encode(request)}")


def _differ(found: Mapping[str, LogRange]) -> bool:
    return len({each.crc for each in found.values()}) > 1


def _text(found: Mapping[str, LogRange]) -> str:
    """Describe which sides differ: a single side, or a minority, differs from the others."""
    by_crc: dict[int, list[str]] = {}
    for name, each in found.items():
        by_crc.setdefault(each.crc, []).append(name)
    most = max(by_crc.values(), key=len)
    others = ", ".join(name for name in found if name not in most)
    part = next(iter(found.values()))
    what = f"{'seq' if part.log == _WAL else 'offset'} {part.first}"
    if part.next > part.first + 1:
        what += f" to {part.next - 1}"
    return (
        f"{part.log}: {what} of {others} differs from {', '.join(most)};"
        " kmq verify says which is damaged, kmq cluster reset makes that one new"
    )
