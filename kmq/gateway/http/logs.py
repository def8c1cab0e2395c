"""The logs over HTTP, read-only: what kmq.spark.source.remote, or anyone with curl, needs to read a broker's files from afar.

    GET /v1/broker                       {"data_id", "format", "instance", "marks_from"}
    GET /v1/topics[?after=&limit=]       [{"name", "partitions", "from_seq", "first_offsets": […], "end_offsets": […]}]
    GET /v1/ledger                       {"routed_seq", "topics": [{…}], "dropped": {ring: [[first, last]]}}, for an audit
    GET /v1/logs[?topic=a&topic=b]       [{"topic", "partition", "first_offset", "end_offset"}], without topics that do not exist
    GET /v1/logs/{topic}/{partition}/…
      offset?time=|seq=                  {"offset"} of the first record received then (µs) or later; with that seq or a later one
      cuts?bytes=[&start=&end=]          {"cuts": […]}: offsets that cut start…end into pieces of about so many bytes
      records[?start=&end=&max_bytes=]   the stored lines as they are; KMQ-First-Offset and KMQ-Next-Offset say which

A log is a partition, or the WAL: topic `__append`, partition 0, offset = seq, never beyond what is durable. These are files;
/v1/topics/{topic}/… stays free for an API of messages. Errors: {"code", "error"}; kmq/refusals.py has codes and statuses.

Records     The bytes of the files, sent by the kernel (sendfile) once their crcs were found right (spans.py). Against writing
            the checked bytes from Python that is as fast or faster, at two thirds of the gateway's CPU time, and a slow reader
            holds two descriptors and one block. TLS takes asyncio's detour: 256 KiB at a time.
Complete    Content-Length is that of the whole range, so what breaks off never looks complete: damage behind good records, a
            segment that went away, a reader that takes less than a piece in KMQ_LINE_DEADLINE, the end of the gateway. Whoever
            asks again at the offset it has come to reads on, or is told what is wrong.
Threads     A few of its own, so that bulk reading leaves the consumers theirs; held only while a piece is found and checked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from aiohttp import web

from kmq.gateway.core.broker import Broker
from kmq.gateway.core.catalog import END, Catalog
from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.core.spans import Range, Span
from kmq.log.damage import DamageError
from kmq.log.reader import Log

PAGES = {
    "/v1/broker": "which data directory this is",
    "/v1/topics": "topics, their partitions, and from where to where each goes",
    "/v1/ledger": "how far it has routed, its routing table, what dropped.log names",
    "/v1/logs": "the same of every log, the WAL too; /v1/logs/{topic}/{partition}/records gives the stored lines",
}
_THREADS = 4
_STREAMS = 128  # responses with records at a time; each holds three descriptors

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Logs:
    """The handlers. They read, and change nothing."""

    def __init__(self, broker: Broker) -> None:
        self._catalog = Catalog(broker)
        self._deadline_s = broker.settings.line_deadline
        self._threads = ThreadPoolExecutor(_THREADS, "logs")
        self._sending: set[asyncio.Task[None] | None] = set()

    def add_to(self, app: web.Application) -> None:
        """Serve them with `app`."""
        at_log = "/v1/logs/{topic}/{partition}"
        app.add_routes(
            [
                web.get("/v1/broker", _answering(self.broker)),
                web.get("/v1/topics", _answering(self.topics)),
                web.get("/v1/ledger", _answering(self.ledger)),
                web.get("/v1/logs", _answering(self.logs)),
                web.get(f"{at_log}/offset", _answering(self.offset)),
                web.get(f"{at_log}/cuts", _answering(self.cuts)),
                web.get(f"{at_log}/records", _answering(self.records), allow_head=False),
            ]
        )
        app.on_shutdown.append(self._stop)
        app.on_cleanup.append(self._close)

    async def _stop(self, app: web.Application) -> None:
        for task in self._sending:  # a long response would keep us for as long as its reader likes
            if task is not None:
                task.cancel()

    async def _close(self, app: web.Application) -> None:
        self._threads.shutdown(wait=False)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # --- what there is -----------------------------------------------------------------------------------------------

    async def broker(self, request: web.Request) -> web.Response:
        return web.json_response(await self._run(self._catalog.identity))

    async def topics(self, request: web.Request) -> web.Response:
        limit = _number("limit", request.query.get("limit", str(END)), least=1)
        return web.json_response(await self._run(self._catalog.topics, request.query.get("after", ""), limit))

    async def ledger(self, request: web.Request) -> web.Response:
        return web.json_response(await self._run(self._catalog.ledger))

    async def logs(self, request: web.Request) -> web.Response:
        asked = request.query.getall("topic", [])
        if "" in asked:
            raise RequestRefused("bad_request", "topic=: must be the name of a topic, or be left out")
        return web.json_response(await self._run(self._catalog.logs, asked))

    # --- one log -----------------------------------------------------------------------------------------------------

    def _asked(self, request: web.Request) -> tuple[str, Log]:
        """Return the topic and the log that a path names."""
        topic, partition = request.match_info["topic"], _number("partition", request.match_info["partition"])
        return topic, self._catalog.open(topic, partition)

    async def offset(self, request: web.Request) -> web.Response:
        given = [name for name in ("time", "seq") if name in request.query]
        if len(given) != 1:
            raise RequestRefused("bad_request", "give time=<microseconds since the epoch> or seq=<number>, one of them")
        target = _number(given[0], request.query[given[0]])

        def look() -> int:
            topic, log = self._asked(request)
            end = self._catalog.readable_end(topic)
            return min(log.offset_of_time(target) if given == ["time"] else log.offset_of_seq(target), end)

        return web.json_response({"offset": await self._run(look)})

    async def cuts(self, request: web.Request) -> web.Response:
        nbytes = _number("bytes", request.query.get("bytes", ""), least=1)

        def look() -> list[int]:
            log, start, end = self._range(request)
            return log.cuts(start, end, nbytes)

        return web.json_response({"cuts": await self._run(look)})

    def _range(self, request: web.Request) -> tuple[Log, int, int]:
        """Return the log that is asked for, and the range of offsets."""
        start, end = (_number(name, request.query.get(name, default)) for name, default in _RANGE.items())
        topic, log = self._asked(request)
        return log, start, min(end, self._catalog.readable_end(topic))

    async def records(self, request: web.Request) -> web.StreamResponse:
        max_bytes = _number("max_bytes", request.query.get("max_bytes", "0"))

        def begin() -> tuple[Range, Span | None]:
            log, start, end = self._range(request)
            while True:
                with suppress(FileNotFoundError):  # retention or compaction was faster
                    found = Range(log, start, end, max_bytes)
                    return found, found.take()

        with self._stream():
            asked, span = await self._run(begin)  # what is wrong with the first piece has a status of its own
            try:
                return await self._send(request, asked, span)
            finally:
                self._threads.submit(asked.close)

    async def _send(self, request: web.Request, asked: Range, span: Span | None) -> web.StreamResponse:
        offsets = {"KMQ-First-Offset": str(asked.first_offset), "KMQ-Next-Offset": str(asked.next_offset)}
        response = web.StreamResponse(headers=offsets)
        response.content_type, response.content_length = "text/plain", asked.length
        await response.prepare(request)
        try:
            while span:
                async with asyncio.timeout(self._deadline_s):
                    await _sendfile(request, span)
                span = await self._run(asked.take)
        except (DamageError, OSError, TimeoutError):  # it is less than was announced, so the reader knows
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


async def _sendfile(request: web.Request, span: Span) -> None:
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the reader has gone")
    with open(span.fd, "rb", buffering=0, closefd=False) as file:
        sent = await asyncio.get_running_loop().sendfile(request.transport, file, span.begin, span.nbytes)
    if sent != span.nbytes:
        raise FileNotFoundError("the file has been cut")


def _answering(handler: Handler) -> Handler:
    """Errors as JSON, with the status of their code."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except DamageError as err:
            return _refusal(RequestRefused("damaged", str(err)), **_fields(err))
        except RequestRefused as err:
            return _refusal(err)

    return answer


def _fields(err: DamageError) -> dict[str, Any]:
    return {name: getattr(err, name) for name in ("path", "byte", "end", "first_offset", "next_offset", "what")}


def _refusal(answer: RequestRefused, **fields: object) -> web.Response:
    return web.json_response({"code": answer.code, "error": str(answer), **fields}, status=answer.refusal.http)


def _number(name: str, text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= END):
        raise RequestRefused("bad_request", f"{name}={text[:40]!r}: is a whole number of at least {least}")
    return int(text)
