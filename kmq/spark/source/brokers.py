"""The logs of a broker, read in one of two ways: from its data directory, or from its gateway over HTTP.

    open_broker("a:8082", is_path=False).bounds(["orders"])   → {("orders", 0): (first offset, next offset), …}

Both are a Broker (broker.py). With option `tier` a task gets old records that lie in the store from there (store.py), and
only what the disk of the broker has from the broker.

Remote      Only a connection, so that any process may send requests. A Remote can be pickled; in another process it
            connects anew. The gateway's side is kmq/gateway/http/logs.py.
Shard       A shard is one broker with several addresses. `recognised` finds out which addresses belong to one shard. A
            Remote with several addresses continues at the next one when a request fails.
Invariant   Only whole lines are handed out, and those of a partition are counted: a response states its first and last
            offset and its size in bytes. The missing rest of a response is requested again.
Connection  A Remote keeps one connection, for one request after the other. If records are not read to their end, their
            connection is closed.
Older       A gateway without `stamps` is asked for its id and each stamp one by one, as in the previous release.
Retries     Every request only reads. It is retried, with growing pauses, while the gateway or a proxy before it is
            down or too busy, and reading resumes at the next offset. It fails only when nothing has arrived for
            kmq.patience: a restart of the gateway in the middle of a read goes unnoticed. A proxy's Retry-After only
            makes pauses within it longer. A Remote with a data id waits without a limit, and asks on each new
            connection for that id: records of another directory are never taken for those planned.
Damage      DamageError, as if the files were read here, after all records before the damage were handed out.
Start       The planner of each stream is a fresh process. Modules that only some requests need are imported there.
"""

import glob
import json
import os
import random
import re
import select
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, RemoteDisconnected
from ssl import SSLContext, SSLError
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from kmq.config.settings import SHM
from kmq.errors import ConfigError, CorruptError, RetryError, quotation
from kmq.links.ownership import FileLock
from kmq.log import gaps, identity, reader, segment_reader, topics
from kmq.log.damage import DamageError
from kmq.log.gaps import Gap, Gaps
from kmq.log.reader import WAL
from kmq.log.rows import LogRows, NotHereError, TierRow, full_key
from kmq.log.segment import COMPACT, RECV_TS, SEQ
from kmq.logfmt import Logger
from kmq.spark.connections import (
    PATIENCE_S,
    PLAIN,
    Access,
    ReplacedError,
    ShardDoors,
    Tls,
    UnreachableError,
    check_logins,
    gateway_address,
)
from kmq.spark.paths import scheme
from kmq.spark.source.broker import Broker, Layout, LogBounds
from kmq.spark.source.store import Lineage, StoreReader, blocks

if TYPE_CHECKING:
    from kmq.spark.source.columns import Lines

BLOCK_BYTES = segment_reader.READ_BYTES  # size of the blocks handed out
AT_A_TIME = 32  # gateways that are asked at the same time

# --- a data directory ------------------------------------------------------------------------------------------------


class Directory(Broker):
    """A data directory, whether its broker runs or not."""

    def __init__(self, name: str, path: str = "", tier: str = "") -> None:
        """`tier`: the URL of the store with its old records; "": they cannot be read."""
        self.name, self.path = name, os.path.abspath(path or name)
        self._store = StoreReader(tier)
        # LogReaders remember where their log ended: finding the new end costs less.
        self._readers: dict[tuple[str, int], reader.LogReader] = {}
        self.gaps: dict[tuple[str, int], Gaps] = {}

    def ancestors(self) -> list[str]:
        return [fork.of for fork in gaps.forks(self.path)]

    def identity(self) -> str:
        try:
            return identity.of_records(self.path)
        except FileNotFoundError:
            why = "it has no file `id`" if os.path.isdir(self.path) else "it does not exist"
            inside = os.path.join(self.name, "data")
            advice = f"; did you mean {inside}?" if os.path.isfile(f"{inside}/id") else ""
            raise ConfigError(
                f"path={quotation(self.name, is_path=True)}: no data directory of KMQ: {why}{advice}"
            ) from None
        except OSError as err:
            raise ConfigError(
                f"path={quotation(self.name, is_path=True)}: no data directory of KMQ: {err.strerror} ({err.filename})"
            ) from None

    def marks_from(self) -> int:
        return identity.marks_from(self.path)

    def topics(self) -> dict[str, Layout]:
        self.identity()  # raises if this is no data directory
        found = {name: topics.read(self.path, name) for name in topics.names(self.path)}
        return {
            name: Layout(each.partitions, each.partitioner, each.limits.get("cleanup") == COMPACT)
            for name, each in found.items()
        }

    def bounds(self, names: Sequence[str]) -> LogBounds:
        self.identity()  # raises if this is no data directory
        bounds = {}
        for topic in names:
            if topic == WAL:
                self._note_gaps((topic, 0), gaps.of_wal(self.path))
                bounds[topic, 0] = self._wal_bounds()
            elif os.path.isdir(f"{self.path}/topics/{topic}"):
                for number in range(topics.load(self.path, topic)[0]):
                    log = self._log(topic, number)
                    self._note_gaps((topic, number), log.gaps())
                    end = log.end_offset()  # the end first: a removal by retention in between is then noticed
                    bounds[topic, number] = min(log.first_offset, end), end
        return bounds

    def survey(self, topics: Sequence[str], wants: Callable[[str], bool]) -> tuple[str, Callable[[], LogBounds]]:
        def bounds() -> LogBounds:
            return self.bounds(topics or [topic for topic in [*self.topics(), WAL] if wants(topic)])

        return self.identity(), bounds

    def _note_gaps(self, at: tuple[str, int], found: Gaps) -> None:
        self.gaps.pop(at, None)
        if found:
            self.gaps[at] = found

    def _wal_bounds(self) -> tuple[int, int]:
        """Return the bounds of the durable WAL, without records that were written but not yet synced."""
        from kmq.log.committed import readable_seq

        log = reader.wal(self.path)
        synced = self._seq_of("durability", "append")
        last = synced or readable_seq(self.path)
        end = log.end_offset() if last is None else last + 1
        return min(log.first_offset, end), end

    def _seq_of(self, stage: str, owns: str) -> int:
        """Return the seq of the stage that owns directory `owns`; 0 without an owner or a visible stats page."""
        if not FileLock(f"{self.path}/{owns}/.owner").is_held():
            return 0
        from kmq.broker import stats

        mine = f"data_id={identity.read(self.path, 'id')} "
        for path in glob.glob(f"{SHM}/*.stats"):
            page = stats.peek(os.path.basename(path).removesuffix(".stats"))
            if page is not None and mine in page.identity():
                return page.rows[stage].seq
        return 0

    def _log(self, topic: str, partition: int) -> reader.LogReader:
        if (topic, partition) not in self._readers:
            log = reader.wal(self.path) if topic == WAL else reader.partition(self.path, topic, partition)
            self._readers[topic, partition] = log
        return self._readers[topic, partition]

    def offset_of_time(self, topic: str, partition: int, micros: int) -> int:
        log = self._log(topic, partition)
        return self._offset_of(topic, partition, log.offset_of_time, micros, RECV_TS)

    def stamp_at_end(self, topic: str, partition: int, offset: int) -> tuple[int, int] | None:
        return self._log(topic, partition).stamp_at_end(offset)

    def offset_of_seq(self, topic: str, partition: int, seq: int) -> int:
        return self._offset_of(topic, partition, self._log(topic, partition).offset_of_seq, seq, SEQ)

    def _offset_of(self, topic: str, partition: int, find: Callable[[int], int], target: int, field: int) -> int:
        try:
            return find(target)
        except NotHereError as err:
            self._check_tier(topic, partition, err.row)
            row = err.row._replace(key=full_key(identity.lineage(self.path), err.row.key))
            found = self._store.offset_of(row, target, field)
            return max(row.next if found is None else found, self._log(topic, partition).first_offset)

    def _check_tier(self, topic: str, partition: int, row: TierRow) -> None:
        if not self._store.url:
            raise ConfigError(
                f"{self.name} {topic}/{partition}: offsets {row.base} to {row.next - 1} lie in the store alone; set option"
                " tier to the URL of that store, or read through the gateway (kmq.bootstrap.servers)"
            )

    def ledger(self) -> dict[str, Any]:
        from kmq.repair import ledger

        return ledger.read(self.path, self._seq_of("router", "topics"))

    def cuts(self, topic: str, partition: int, start: int, end: int, nbytes: int) -> list[int]:
        return self._log(topic, partition).cuts(start, end, nbytes)

    def blocks(self, topic: str, partition: int, start: int, end: int) -> "Iterator[Lines]":
        from kmq.spark.source import columns

        log = self._log(topic, partition)

        def rows_of(low: int, high: int, missing: str) -> LogRows:
            found = log.rows(low, high)
            first, stop = max(low, found.first_offset), min(high, found.local_offset)
            if row := next((row for row in found.rows if row.next > first and row.base < stop), None):
                self._check_tier(topic, partition, row)
            return found

        def local(low: int, high: int) -> "Iterator[Lines]":
            return columns.read_lines(log, low, high, BLOCK_BYTES)

        return local(start, end) if topic == WAL else blocks(self._store, rows_of, local, start, end)


# --- a gateway over HTTP ---------------------------------------------------------------------------------------------

_PAUSES_S = (0.05, 2.0)  # before a retry: the first pause, the longest one
_LONGEST_QUERY = 4000  # bytes; servers refuse a request line of 8 KiB
_LATER = (429, 503)  # statuses of a gateway, or of a proxy before it
_PROXY = (502, 504)  # statuses that a gateway never sends to a reader
LOOK_S = 8.0  # for one of several addresses to accept, or to answer one request; a follower waits 5 s for a leader
# OpenSSL's reasons for permanent faults: one side does not trust the other, or does not speak TLS.
_FINAL = re.compile(r"CERTIFICATE|UNKNOWN_CA|HANDSHAKE_FAILURE|WRONG_VERSION_NUMBER|PROTOCOL_VERSION|ACCESS_DENIED")


class Remote(Broker):
    """A broker whose gateway listens at `name`: host:port or https://host:port; a shard has several:
    `a:8082,b:8082`.
    """

    _context: SSLContext | None = None

    def __init__(self, name: str, access: Access = PLAIN, data_id: str = "", tier: str = "") -> None:
        """`data_id`: read only this data directory, and wait for it without a limit.

        `tier`: the URL of the store from which old records come; "": from the gateway, as all others.
        """
        self.name, self._access, self._data_id = name, access, data_id
        # With onUnreachable=hold a plan has less patience with a broker, which it can leave out. It needs the store.
        self._store = StoreReader(tier, patience_s=max(access.patience_s, PATIENCE_S))
        self._idle: list[HTTPConnection] = []  # one, unless several requests ran at the same time
        self.addresses = [gateway_address(part, access) for part in name.split(",")]
        self._last: dict[tuple[str, int], tuple[int, list[int] | None]] = {}  # end, and stamp of the record before it
        self._is_older = False
        self.gaps: dict[tuple[str, int], Gaps] = {}

    def __del__(self) -> None:  # a Broker has no close method
        self.close()

    def __reduce__(self) -> tuple[type["Remote"], tuple[str, Access, str, str]]:
        return Remote, (self.name, self._access, self._data_id, self._store.url)

    # --- the interface -----------------------------------------------------------------------------------------------

    def identity(self) -> str:
        return str(self._get("/v1/broker", "data_id")["data_id"])

    def ancestors(self) -> list[str]:
        return list(self._get("/v1/broker", "data_id").get("forked_from", ()))

    def marks_from(self) -> int:
        # An older gateway does not send it.
        return int(self._get("/v1/broker", "data_id").get("marks_from", identity.NEVER))

    def topics(self) -> dict[str, Layout]:
        # A gateway of the previous release sends no partitioner, because there was only one.
        rows = self._get("/v1/topics?internal=true", rows=("name", "partitions"))
        return {
            row["name"]: Layout(row["partitions"], row.get("partitioner", "crc32"), row.get("cleanupPolicy") == COMPACT)
            for row in rows
        }

    def bounds(self, topics: Sequence[str]) -> LogBounds:
        return self._bounds(self._logs(topics), set(topics).__contains__) if topics else {}

    def survey(self, topics: Sequence[str], wants: Callable[[str], bool]) -> tuple[str, Callable[[], LogBounds]]:
        found = self._logs(topics, stamps="1", wal=str(wants(WAL)).lower())
        if isinstance(found, list):
            self._warn_older()
            return self.identity(), lambda: self._bounds(found, wants)
        self._last = {(row["topic"], row["partition"]): (row["end_offset"], row.get("last")) for row in found["logs"]}
        return str(found["data_id"]), lambda: self._bounds(found["logs"], wants)

    def _logs(self, topics: Sequence[str], **query: str) -> Any:
        parameters = urlencode([*(("topic", name) for name in topics), *query.items()])
        # Request all topics if a request line cannot name these.
        parameters = parameters if len(parameters) < _LONGEST_QUERY else urlencode(query)
        target = f"/v1/logs?{parameters}" if parameters else "/v1/logs"
        return self._get(target, "data_id", "logs", rows=("topic", "partition", "first_offset", "end_offset"))

    def _bounds(self, rows: Any, wants: Callable[[str], bool]) -> LogBounds:
        here = {(row["topic"], row["partition"]): row for row in rows}
        self.gaps = {at: each for at, each in self.gaps.items() if at not in here}
        self.gaps |= {at: tuple(Gap(*pair) for pair in row["gaps"]) for at, row in here.items() if "gaps" in row}
        return {
            (row["topic"], row["partition"]): (row["first_offset"], row["end_offset"])
            for row in rows
            if wants(row["topic"])
        }

    def _warn_older(self) -> None:
        if not self._is_older:
            effect = "each batch asks it once more, and once for each partition; upgrade the broker"
            Logger("spark").warn("older_broker", at=self.describe(), effect=effect)
        self._is_older = True

    def stamp_at_end(self, topic: str, partition: int, offset: int) -> tuple[int, int] | None:
        end, last = self._last.get((topic, partition), (0, None))
        return (last[0], last[1]) if last is not None and end == offset else None

    def offsets_of_time(self, logs: Sequence[tuple[str, int]], micros: int) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        if len(logs) > 1 and not self._is_older:
            rows = self._logs(sorted({topic for topic, _ in logs}), time=str(max(0, micros)))
            found = {(row["topic"], row["partition"]): row["offset"] for row in rows if "offset" in row}
            if rows and not found:
                self._warn_older()
        return {log: found[log] if log in found else self.offset_of_time(*log, micros) for log in logs}

    def offset_of_time(self, topic: str, partition: int, micros: int) -> int:
        return int(self._get(_at(topic, partition, "offset", time=max(0, micros)), "offset")["offset"])

    def offset_of_seq(self, topic: str, partition: int, seq: int) -> int:
        return int(self._get(_at(topic, partition, "offset", seq=seq), "offset")["offset"])

    def ledger(self) -> dict[str, Any]:
        return dict(self._get("/v1/ledger", "routed_seq"))

    def cuts(self, topic: str, partition: int, start: int, end: int, nbytes: int) -> list[int]:
        return list(self._get(_at(topic, partition, "cuts", start=start, end=end, bytes=nbytes), "cuts")["cuts"])

    def rows(self, topic: str, partition: int, start: int, end: int) -> LogRows:
        """Return the rows in force that have records of start…end-1."""
        target = _at(topic, partition, "rows", start=start, end=end)
        found = self._get(target, *LogRows._fields)
        rows = [TierRow.of_json(row) for row in found["rows"]]
        return LogRows(found["life"], found["first_offset"], found["local_offset"], rows)

    def blocks(self, topic: str, partition: int, start: int, end: int) -> "Iterator[Lines]":
        def local(low: int, high: int) -> "Iterator[Lines]":
            return self._served(topic, partition, low, high)

        def rows_of(low: int, high: int, missing: str) -> LogRows:
            return self.rows(topic, partition, low, high)

        return (
            blocks(self._store, rows_of, local, start, end) if self._store.url and topic != WAL else local(start, end)
        )

    def _served(self, topic: str, partition: int, start: int, end: int) -> "Iterator[Lines]":
        """Yield the same from the gateway alone."""
        from kmq.spark.source import columns

        offset, trial = start, _Trial(self._access.patience_s, bool(self._data_id))
        while offset < end:
            target = _at(topic, partition, "records", start=offset, end=end)
            try:
                with self._connected() as connection:
                    response = self._ask(connection, target)
                    offsets = [response.headers[f"KMQ-{name}-Offset"] for name in ("First", "Next")]
                    if None in offsets:
                        raise self._foreign(target, 200, "expected the header KMQ-First-Offset")
                    first, following = map(int, offsets)
                    if not response.length:  # the log ends here, or begins after `end`
                        response.read()
                        return
                    offset = first
                    for data in _blocks(response):
                        trial.progress()
                        lines = columns.of_bytes(offset, data, topic == WAL)
                        yield lines
                        offset = lines.next_offset
                    if response.length:
                        raise ConnectionError("the response ended too early")
                    response.read()  # empty, but http.client requires the read
            except _AGAIN as err:
                self._again(trial, err, target)
                continue
            if offset != following and (topic != WAL or offset > following):
                raise CorruptError(f"{self.describe(target)}: {offset - first} records came of {following - first}")
            offset = following

    # --- requests ----------------------------------------------------------------------------------------------------

    def _get(self, target: str, *fields: str, rows: Sequence[str] = ()) -> Any:
        """Return the JSON of the response: an object with these fields, or a list of objects with those of `rows`."""
        trial = _Trial(self._access.patience_s, bool(self._data_id))
        while True:
            try:
                return self._get_now(target, *fields, rows=rows)
            except _AGAIN as err:
                self._again(trial, err, target)

    def _get_now(self, target: str, *fields: str, rows: Sequence[str] = ()) -> Any:
        """Return the same, after one attempt. Raises one of _AGAIN if a retry may succeed."""
        with self._connected() as connection:
            return self._json(connection, target, *fields, rows=rows)

    def _json(self, connection: HTTPConnection, target: str, *fields: str, rows: Sequence[str] = ()) -> Any:
        body = self._ask(connection, target).read()
        with suppress(ValueError, AttributeError):
            found = json.loads(body)
            objects, names = (found, rows) if isinstance(found, list) else ([found], fields)
            if names and all(each.keys() >= {*names} for each in objects):
                return found
        raise self._foreign(target, 200, f"expected JSON with {', '.join(fields or rows)}")

    @contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        """Provide the kept connection, or a new one; keep it if its response was read without an error."""
        connection = self._idle.pop() if self._idle else self.connect()
        if _is_dropped(connection):
            connection.close()
        try:
            if self._data_id and connection.sock is None:
                now = self._json(connection, "/v1/broker", "data_id")["data_id"]
                if now != self._data_id:
                    raise ReplacedError(self.name, self._data_id, now)
            yield connection
        except BaseException:
            connection.close()
            raise
        if self._idle:  # another request came while records were read
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        while self._idle:
            self._idle.pop().close()

    def connect(self) -> HTTPConnection:
        """Return a new connection, which opens with its first request."""
        (scheme, host, port), timeout = self.addresses[0], self._access.timeout_s
        if scheme == "http":
            return HTTPConnection(host, port, timeout=timeout)
        if self._context is None:
            self._context = (self._access.tls or Tls()).context()
        return HTTPSConnection(host, port, timeout=timeout, context=self._context)

    def turn(self) -> None:
        """Use the next address of the shard from now on."""
        self.close()
        self.addresses = [*self.addresses[1:], self.addresses[0]]

    def authorization(self) -> dict[str, str]:
        """Return the headers with the token, if there is a token."""
        return {"Authorization": f"Bearer {self._access.token}"} if self._access.token else {}

    def describe(self, target: str = "") -> str:
        """Return the broker's name and the URL of a request, as errors name them."""
        scheme, host, port = self.addresses[0]
        return f"broker {self.name}: {scheme}://{host}:{port}{target}"

    def _again(self, trial: "_Trial", err: Exception, target: str, advice: str = "") -> None:
        """Wait before a retry, which uses the next address. Raises RetryError after kmq.patience."""
        is_tls = self.addresses[0].scheme == "https"
        if isinstance(err, RemoteDisconnected) and is_tls and not (self._access.tls or Tls()).certificate:
            advice = "; does it ask for a certificate? option kmq.ssl.certificate.location"
        trial.failed(err, self, self.describe(target), advice)
        self.turn()

    def _ask(self, connection: HTTPConnection, target: str) -> HTTPResponse:
        """Return the response to a GET, its body not yet read. Raises the error that a refusal means."""
        try:
            opened = connection.sock
            if opened is None and len(self.addresses) > 1:  # a host that is switched off must not use up kmq.patience
                whole, connection.timeout = connection.timeout, min(self._access.timeout_s, LOOK_S)
                connection.connect()
                connection.sock.settimeout(whole)
            connection.request("GET", target, headers=self.authorization())
            response = connection.getresponse()
        except SSLError as err:
            if not _FINAL.search(str(err.reason)):
                raise
            advice = "options kmq.ssl.ca.location (whom to trust) and kmq.ssl.certificate.location (what to show)"
            raise ConfigError(f"{self.describe(target)}: {err}; see {advice}") from err
        if response.status == 200:
            return response
        raise self._refusal(target, response.status, response.read(), response.headers["Retry-After"] or "")

    def _refusal(self, target: str, status: int, body: bytes, retry_after: str) -> Exception:
        try:
            said = {} if status in _PROXY else json.loads(body)  # some proxies send JSON of the same form
            code, text = said["code"], said.get("message") or said["error"]  # `error` alone: an older gateway
            if not isinstance(code, str):
                raise TypeError(code)  # a number of gRPC, which only a proxy sends
        except (ValueError, KeyError, TypeError):
            if status in (*_PROXY, *_LATER):  # the page of a proxy
                why = "has too many requests" if status == 429 else "does not reach the gateway"
                return _LaterError(f"HTTP {status} of a proxy that {why}", _seconds(retry_after))
            return self._foreign(target, status)
        if status in _LATER:
            return _LaterError(f"{code}: {text}")
        if code == "damaged":
            fields = (said[name] for name in ("byte", "end", "first_offset", "next_offset", "what"))
            return DamageError(f"{self.name}:{said['path']}", *fields)
        if code == "unauthorized":
            return ConfigError(f"{self.describe(target)}: option kmq.token: {text}")
        return (RetryError if status >= 500 else ConfigError)(f"{self.describe(target)}: {code}: {text}")

    def _foreign(self, target: str, status: int, expected: str = "") -> ConfigError:
        """Return the error for an address at which another service listens."""
        why = "this is no gateway of KMQ, or one too old to read from"
        return ConfigError(f"{self.describe(target)}: HTTP {status}; {why}" + (f"; {expected}" if expected else ""))


class _LaterError(Exception):
    """A gateway or a proxy asks for a retry later. A proxy may say after how many seconds."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


def _seconds(retry_after: str) -> float:
    """Return the seconds that a header Retry-After asks for, as a number or as a date; 0 for anything else."""
    if retry_after.isascii() and retry_after.isdecimal():
        return float(retry_after)
    with suppress(ValueError, TypeError, OverflowError):
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    return 0.0


_AGAIN = (OSError, HTTPException, _LaterError)


class _Trial:
    """Counts the retries of a request and limits their time."""

    def __init__(self, patience_s: float, is_endless: bool = False) -> None:
        """`is_endless`: warn instead of raising an error."""
        self._patience_s, self._is_endless, self._is_warned = patience_s, is_endless, False
        self.progress()

    def progress(self) -> None:
        """Restart the time limit, because data has arrived."""
        self._pause, self._deadline = _PAUSES_S[0], time.monotonic() + self._patience_s
        self._failures = 0

    def failed(self, err: Exception, remote: Remote, url: str, advice: str) -> None:
        """Wait before the next attempt.

        Raises UnreachableError if it took too long and each address of `remote` was tried.
        """
        self._failures += 1
        if time.monotonic() + self._pause > self._deadline and self._failures >= len(remote.addresses):
            why = f"{url}: {err or type(err).__name__}; nothing else for {self._patience_s:g} s (kmq.patience){advice}"
            if not self._is_endless:
                raise UnreachableError(remote.name, why) from err
            if not self._is_warned:
                effect = "a batch that was planned has records of it, and waits for it"
                Logger("spark").warn("broker_held", at=remote.name, reason=why, effect=effect)
            self._is_warned = True
        # Random, so that the tasks of a job do not retry all at once. Another address may answer at once.
        later = getattr(err, "after_s", 0.0) if self._failures % len(remote.addresses) == 0 else 0.0
        rest = self._patience_s if self._is_endless else max(0.0, self._deadline - time.monotonic())
        time.sleep(self._pause * random.uniform(0.5, 1) + max(0.0, min(later, rest, PATIENCE_S)))
        self._pause = min(2 * self._pause, _PAUSES_S[1])


def _is_dropped(connection: HTTPConnection) -> bool:
    """Return True if the gateway has closed a connection that has no request: nothing else can be read of it."""
    if connection.sock is None:
        return False
    look = select.poll()
    look.register(connection.sock, select.POLLIN)
    return bool(look.poll(0))


def _at(topic: str, partition: int, what: str, **query: int) -> str:
    return f"/v1/logs/{quote(topic, safe='')}/{partition}/{what}?{urlencode(query)}"


def _blocks(response: HTTPResponse) -> Iterator[bytes]:
    """Yield the body in blocks of whole lines; if it breaks off, response.length tells how much is missing."""
    while response.length:
        data = response.read(BLOCK_BYTES) + response.readline()
        whole = data.rfind(b"\n") + 1
        if whole:
            yield data[:whole]  # no copy if the block ends with a whole line
        if whole < len(data) or not data:
            return


# --- the addresses of a shard ----------------------------------------------------------------------------------------

_SPELLING = "; if it is of the shard that answers, spell it as that broker's KMQ_ADVERTISE and port, or leave it out"


def recognised(names: Sequence[str], access: Access = PLAIN, waits: bool = True) -> list[str]:
    """Return the names of the brokers at these gateways. A shard with several addresses is one name, `a:8082,b:8082`.

    Each gateway tells its shard, and where that shard's brokers listen (KMQ_ADVERTISE). So a silent address that the
    shard names is known without a reply. Every other silent address is waited for, because records would be missing
    without its broker. Two addresses of one data directory without a shard stay two names.
    Raises RetryError when an address has been silent for kmq.patience. Without `waits` it becomes a broker of its own.
    """
    check_logins(names)
    if len(names) < 2:
        return [*names]
    quick = replace(access, timeout_s=min(access.timeout_s, LOOK_S))
    remotes, trial = [Remote(name, quick) for name in names], _Trial(access.patience_s)
    found: dict[str, str] = {}  # name → the lineage of its shard, or the name itself
    doors = ShardDoors()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        while silent := [remote for remote in remotes if remote.name not in found]:
            failed = None
            for remote, answer in zip(silent, pool.map(_look, silent), strict=True):
                if isinstance(answer, Exception):
                    failed = failed or (remote, answer)
                    continue
                is_shard = "shard" in answer and doors.add(answer["data_id"], answer["doors"])
                found[remote.name] = answer["data_id"] if is_shard else remote.name
            for remote in silent:
                _, host, port = remote.addresses[0]
                if remote.name not in found and (lineage := doors.shard_at(host, port)):
                    found[remote.name] = lineage
            if not waits:
                found |= {remote.name: remote.name for remote in silent if remote.name not in found}
            elif failed is not None and failed[0].name not in found:
                is_near = any(name != lineage for name, lineage in found.items())
                failed[0]._again(trial, failed[1], "/v1/broker", _SPELLING if is_near else "")
    brokers: dict[str, list[str]] = {}
    for name in names:
        brokers.setdefault(found[name], []).append(name)
    return [",".join(addresses) for addresses in brokers.values()]


def _look(remote: Remote) -> Any:
    """Return the gateway's description of itself, or the error of the request."""
    try:
        return remote._get_now("/v1/broker", "data_id")
    except _AGAIN as err:
        return err
    finally:
        remote.close()


def open_broker(name: str, is_path: bool, access: Access = PLAIN, data_id: str = "", tier: str = "") -> Broker:
    """Return the broker of this name: a path, or host:port of a gateway; of a shard also `a:8082,b:8082`.

    A path with a scheme is a lineage in a store. `data_id`, `tier`: see Remote.
    """
    if is_path and scheme(name):
        return Lineage(name)
    return Directory(name, tier=tier) if is_path else Remote(name, access, data_id, tier)
