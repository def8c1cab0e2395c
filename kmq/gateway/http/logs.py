"""The logs over HTTP, read-only: for kmq.spark.source.brokers, and for any other remote reader, such as curl.

    GET /v1/broker                       {"data_id", "format", "instance", "marks_from"}; of a shard also its name, `shard`,
                                           and where its brokers have their HTTP ports, `doors`;
                                           after a fork `forked_from`, the ids before
    GET /v1/topics[?after=&limit=]       [{"name", "partitions", "partitioner", "from_seq", "first_offsets": […],
                                           "end_offsets": […]}]
                  &internal=true         also topics of KMQ itself (`__…`)
    GET /v1/ledger                       {"routed_seq", "topics": [{…}], "dropped": {ring: [[first, last]]}}
    GET /v1/logs[?topic=a&topic=b]       [{"topic", "partition", "first_offset", "end_offset"}] of the topics that exist;
                                           a row with gaps (kmq/log/gaps.py) has "gaps": [[first, to]]
                  &wal=false             without the WAL, whose end is unknown while durability recovers
                  &time=                 each row also has "offset", of the first record received then (µs) or later
                  &stamps=1              {"data_id", "logs": […]}: each row also has "last", [seq, recv_ts] of the record
                                         before end_offset, unless there is none, or compaction took it
    GET /v1/logs/{topic}/{partition}/…
      offset?time=|seq=                  {"offset"} of the first record at or after that time of receipt (µs), or seq
      cuts?bytes=[&start=&end=]          {"cuts": […]}: offsets that cut start…end into pieces of about that size
      rows[?start=&end=]                 {"life", "first_offset", "local_offset", "end_offset", "rows": […]}: the rows in
                                         force with records of start…end-1 (kmq/log/rows.py): where old records lie in
                                         KMQ_TIER, for readers that get objects themselves. Those before local_offset are
                                         on no disk of the broker
      records[?start=&end=&max_bytes=]   the stored lines as they are; KMQ-First-Offset and KMQ-Next-Offset say which

A log is a partition, or the WAL: topic `__append`, partition 0, offset = seq, never beyond what is durable. These are
files; messages have an API of their own, /api/topics/{topic}/… Errors: request.py.

Records     The kernel sends the bytes of the files (sendfile) after their crcs were checked (core/partitions.py). That
            is at least as fast as writing the checked bytes from Python, and takes two thirds of the gateway's CPU
            time. A slow reader holds two descriptors and one block. With TLS asyncio reads and sends 256 KiB at a time.
Complete    Content-Length covers the whole range, so a response that breaks off never looks complete. Causes: damage
            after good records, a removed segment, a reader that reads less than one span within KMQ_LINE_DEADLINE,
            the end of the gateway. A reader resumes at the offset it has reached, and then learns what is wrong.
Threads     Bulk reading has a few threads of its own, so that it never blocks consumers. A request holds a thread only
            while a span is found and checked.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os.path import isdir
from typing import Any, TypeVar

from aiohttp import web

from kmq.broker.door import advertised
from kmq.gateway.core.broker import Broker, RequestRefused, check_data
from kmq.gateway.core.cold import ColdReads
from kmq.gateway.core.partitions import END, Partitions, Range, Span
from kmq.gateway.http.request import answering
from kmq.log import gaps, identity, reader, topics
from kmq.log.bounds import Bounds
from kmq.log.damage import DamageError
from kmq.log.reader import WAL, LogReader
from kmq.log.rows import NotHereError
from kmq.message import record
from kmq.repair import ledger

PAGES = {
    "/v1/broker": "the data directory: its id and format",
    "/v1/topics": "topics with their partitions, first and end offsets",
    "/v1/ledger": "the last routed seq, the routing table, and the ranges in dropped.log",
    "/v1/logs": "every log, the WAL too, with its offsets; /v1/logs/{topic}/{partition}/records gives the stored lines",
}
_THREADS = 4
_STREAMS = 128  # simultaneous responses with records; each holds three descriptors

T = TypeVar("T")


class LogCalls:
    """The handlers. They only read."""

    def __init__(self, broker: Broker, cold: ColdReads, partitions: Partitions) -> None:
        self._cold, self._look = cold, partitions.look
        self._settings, self._data = broker.settings, broker.settings.data
        self._durability, self._router = broker.page.rows["durability"], broker.page.rows["router"]
        self._durable = 0  # the highest durable seq seen
        self._bounds = Bounds(self._data, is_strict=True)
        self._threads = ThreadPoolExecutor(_THREADS, "logs")
        self._sending: set[asyncio.Task[None] | None] = set()

    def add_to(self, app: web.Application) -> None:
        """Register the handlers with `app`."""
        at_log = "/v1/logs/{topic}/{partition}"
        app.add_routes(
            [
                web.get("/v1/broker", answering(self.broker)),
                web.get("/v1/topics", answering(self.topics)),
                web.get("/v1/ledger", answering(self.ledger)),
                web.get("/v1/logs", answering(self.logs)),
                web.get(f"{at_log}/offset", answering(self.offset)),
                web.get(f"{at_log}/cuts", answering(self.cuts)),
                web.get(f"{at_log}/rows", answering(self.rows)),
                web.get(f"{at_log}/records", answering(self.records), allow_head=False),
            ]
        )
        app.on_shutdown.append(self._stop)
        app.on_cleanup.append(self._close)

    async def _stop(self, app: web.Application) -> None:
        for task in self._sending:  # otherwise a slow reader of a long response would delay the stop
            if task is not None:
                task.cancel()

    async def _close(self, app: web.Application) -> None:
        self._threads.shutdown(wait=False)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work in a thread, again once what it needs of KMQ_TIER is fetched in. Raises RequestRefused (cold)."""
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
            except NotHereError as err:
                await self._cold.wait(err)

    # --- all logs ----------------------------------------------------------------------------------------------------

    async def broker(self, request: web.Request) -> web.Response:
        def identify() -> dict[str, object]:
            form, _ = identity.version(self._data) or (0, 0)
            found: dict[str, object] = {
                "data_id": identity.of_records(self._data),
                "format": str(form),
                "instance": self._settings.instance,
                "marks_from": identity.marks_from(self._data),
            }
            if forks := gaps.forks(self._data):
                found["forked_from"] = [fork.of for fork in forks]
            if self._settings.shard:
                doors = advertised(self._settings.pipes, "http", "https")
                found |= {"shard": self._settings.shard, "doors": doors}
            return found

        return web.json_response(await self._run(identify))

    async def topics(self, request: web.Request) -> web.Response:
        limit = _number("limit", request.query.get("limit", str(END)), least=1)
        after, internal = request.query.get("after", ""), request.query.get("internal", "") == "true"

        def read() -> list[dict[str, object]]:
            self._bounds.evict_except(found := topics.names(self._data))
            names = [name for name in found if internal or not name.startswith("__")]
            start = bisect_right(names, after)
            return list(self._bounds.rows(names[start : start + limit]))

        return web.json_response(await self._run(read))

    async def ledger(self, request: web.Request) -> web.Response:
        return web.json_response(await self._run(lambda: ledger.read(self._data, self._router.seq)))

    async def logs(self, request: web.Request) -> web.Response:
        wanted = request.query.getall("topic", [])
        if "" in wanted:
            raise RequestRefused("bad_request", "topic=: must be the name of a topic, or be left out")

        has_stamps = request.query.get("stamps", "") == "1"
        wal = [] if request.query.get("wal", "") == "false" else [WAL]
        micros = _number("time", request.query["time"]) if "time" in request.query else None

        def read() -> object:
            data_id = identity.of_records(self._data) if has_stamps else ""
            names = wanted or topics.names(self._data)
            if not wanted:
                self._bounds.evict_except(names)
            logs = [
                self._row(topic, number, has_stamps, micros)
                for topic in wanted or [*names, *wal]
                for number in range(self._partitions(topic))
            ]
            return {"data_id": data_id, "logs": logs} if has_stamps else logs

        return web.json_response(await self._run(read))

    def _row(self, topic: str, partition: int, has_stamp: bool, micros: int | None) -> dict[str, Any]:
        first, end = self._ends(topic, partition)
        row: dict[str, Any] = {"topic": topic, "partition": partition, "first_offset": first, "end_offset": end}
        if found := gaps.of_wal(self._data) if topic == WAL else self._bounds.gaps(topic, partition):
            row["gaps"] = found
        if micros is not None:
            found_at = self._look(self._log(topic, partition).offset_of_time, micros)
            row["offset"] = min(found_at, self._readable_end(topic))
        if has_stamp and first < end:
            is_wal = topic == WAL
            last = self._log(topic, 0).stamp_of(end - 1) if is_wal else self._bounds.stamp(topic, partition, end)
            row |= {"last": last} if last else {}
        return row

    def _log(self, topic: str, partition: int) -> LogReader:
        return reader.wal(self._data) if topic == WAL else reader.partition(self._data, topic, partition)

    def _partitions(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 if it does not exist."""
        if topic == WAL:
            return 1
        found = self._bounds.declared(topic)[0] if record.is_topic_name(topic) else 0
        # After the read: if the data directory goes meanwhile, its topic reads as one with one partition.
        if found and isdir(f"{self._data}/topics/{topic}"):
            return found
        check_data(self._data)
        return 0

    def _ends(self, topic: str, partition: int) -> tuple[int, int]:
        if topic != WAL:
            return self._bounds.of(topic, partition)
        log = reader.wal(self._data)
        end = self._readable_end(WAL)  # read before first_offset, so that records deleted in between count as deleted
        return min(log.first_offset, end), end

    def _readable_end(self, topic: str) -> int:
        """Return the offset at which reading must stop. A partition is limited only by its own end."""
        if topic != WAL:
            return END
        self._durable = max(
            self._durable, self._durability.seq
        )  # after a start it counts from 0 until it has recovered
        if not self._durable and self._durability.state_name != "ready":
            raise RequestRefused("not_ready", "the durable end of the WAL is unknown until durability has recovered")
        return self._durable + 1

    # --- one log -----------------------------------------------------------------------------------------------------

    def _named_log(self, request: web.Request) -> tuple[str, LogReader]:
        """Return the topic and the log that the path names. Raises RequestRefused if it does not exist."""
        topic, partition = request.match_info["topic"], _number("partition", request.match_info["partition"])
        if partition >= self._partitions(topic):
            raise RequestRefused("not_found", f"there is no partition {partition} of topic {topic!r}")
        return topic, self._log(topic, partition)

    async def offset(self, request: web.Request) -> web.Response:
        given = [name for name in ("time", "seq") if name in request.query]
        if len(given) != 1:
            raise RequestRefused("bad_request", "give either time=<microseconds since the epoch> or seq=<number>")
        target = _number(given[0], request.query[given[0]])

        def find() -> int:
            topic, log = self._named_log(request)
            end = self._readable_end(topic)
            found = self._look(log.offset_of_time if given == ["time"] else log.offset_of_seq, target)
            return min(found, end)

        return web.json_response({"offset": await self._run(find)})

    async def cuts(self, request: web.Request) -> web.Response:
        nbytes = _number("bytes", request.query.get("bytes", ""), least=1)

        def find() -> list[int]:
            log, start, end = self._range(request)
            return log.cuts(start, end, nbytes)

        return web.json_response({"cuts": await self._run(find)})

    def _range(self, request: web.Request) -> tuple[LogReader, int, int]:
        """Return the log that the path names, and the range of offsets that the query names."""
        start, end = _query_range(request)
        topic, log = self._named_log(request)
        return log, start, min(end, self._readable_end(topic))

    async def rows(self, request: web.Request) -> web.Response:
        def find() -> dict[str, object]:
            start, end = _query_range(request)
            topic, log = self._named_log(request)
            first, log_end = self._ends(topic, int(request.match_info["partition"]))
            found = log.rows(start, end)
            rows = [row.to_json() for row in found.rows]
            return {**found._asdict(), "first_offset": first, "end_offset": log_end, "rows": rows}

        return web.json_response(await self._run(find))

    async def records(self, request: web.Request) -> web.StreamResponse:
        max_bytes = _number("max_bytes", request.query.get("max_bytes", "0"))

        def begin() -> tuple[Range, Span | None]:
            opened = Range(*self._range(request), max_bytes)
            return opened, opened.next_span()

        with self._stream():
            selection, span = await self._run(self._look, begin)  # an error in the first span still gets its own status
            try:
                return await self._send(request, selection, span)
            finally:
                self._threads.submit(selection.close)

    async def _send(self, request: web.Request, selection: Range, span: Span | None) -> web.StreamResponse:
        offsets = {"KMQ-First-Offset": str(selection.first_offset), "KMQ-Next-Offset": str(selection.next_offset)}
        response = web.StreamResponse(headers=offsets)
        response.content_type, response.content_length = "text/plain", selection.length
        await response.prepare(request)
        try:
            while span:
                async with asyncio.timeout(self._settings.line_deadline):
                    await _sendfile(request, span)
                span = await self._run(selection.next_span)
        except (DamageError, OSError, TimeoutError):  # the response is shorter than announced, which the reader notices
            pass
        if span is not None and request.transport is not None:
            request.transport.close()
        return response

    @contextmanager
    def _stream(self) -> Iterator[None]:
        if len(self._sending) >= _STREAMS:
            raise RequestRefused("too_many", f"{_STREAMS} responses with records are being read already")
        task = asyncio.current_task()
        self._sending.add(task)
        try:
            yield
        finally:
            self._sending.discard(task)


_RANGE = {"start": "0", "end": str(END)}


def _query_range(request: web.Request) -> tuple[int, int]:
    start, end = (_number(name, request.query.get(name, default)) for name, default in _RANGE.items())
    return start, end


async def _sendfile(request: web.Request, span: Span) -> None:
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the reader has gone")
    with open(span.fd, "rb", buffering=0, closefd=False) as file:
        sent = await asyncio.get_running_loop().sendfile(request.transport, file, span.begin, span.nbytes)
    if sent != span.nbytes:
        raise FileNotFoundError("the file has been cut")


def _number(name: str, text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= END):
        raise RequestRefused("bad_request", f"{name}={text[:40]!r}: must be a whole number of at least {least}")
    return int(text)
