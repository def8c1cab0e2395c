"""The console's API, also for `kmq top --url`: what it shows and may change. kmq/gateway/console does the work.

Bounds      _THREADS reads at a time, _WAITING including those that wait; one page of the table of topics at a time,
            _TABLES including those that wait; _FOLLOWERS topics followed at a time; one replay at a time. None of them
            takes a thread of consumers.
End         A stream of `follow` ends when its client goes, reads nothing for KMQ_LINE_DEADLINE, has had it for
            _FOLLOWED_S (a token may have been revoked), or the gateway stops.
"""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

import kmq
from kmq.gateway.console.dead import DeadLetters
from kmq.gateway.console.messages import EVERY_S, QUIET_S, Follower, Wanted, find_messages
from kmq.gateway.console.overview import ConsoleOverview
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.cold import refusal
from kmq.gateway.core.core import Core
from kmq.gateway.core.finding import SeqFinder
from kmq.gateway.groups.admin import GroupAdmin
from kmq.gateway.groups.membership import Groups
from kmq.gateway.http.exchange import exchange, time_limit
from kmq.gateway.http.messages import micros, position
from kmq.gateway.http.request import JSON, NDJSON, Bodies, HttpCall, body_of, caller
from kmq.gateway.http.schema import read_body
from kmq.log.damage import DamageError
from kmq.log.rows import NotHereError
from kmq.wire.requests import Position

_THREADS = 2
_FOLLOWERS = 16
_WAITING, _TABLES = 32, 8  # requests for messages and letters; for pages of the table of topics
_FOLLOWED_S = 600.0
_MOST_REPLAYED = 1000  # unless the request says otherwise
T = TypeVar("T")


class Console:
    """The handlers, by the names of their operations."""

    def __init__(self, core: Core, groups: Groups, overview: ConsoleOverview, bodies: Bodies) -> None:
        self._core, self._overview, self._bodies = core, overview, bodies
        self._settings, self._deadline_s = core.settings, core.settings.line_deadline
        self._finder = SeqFinder(core.settings.data, core.broker.page)
        self._dead = DeadLetters(core.partitions)
        self._admin = GroupAdmin(groups, core.partitions, core.fetching)
        self._threads = ThreadPoolExecutor(_THREADS, "console-reads")
        self._replays = ThreadPoolExecutor(2, "replays")  # the second one refuses a second replay
        self.following = self.reading = self.listing = 0
        self.handlers = {
            "overview": self.overview,
            "overviewTopics": self.overview_topics,
            "history": self.history,
            "events": self.events,
            "groupHistory": self.group_history,
            "session": self.session,
            "messages": self.messages,
            "follow": self.follow,
            "letters": self.letters,
            "replay": self.replay,
            "resetGroup": self.reset,
        }

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._replays.shutdown(wait=False)

    # --- the broker --------------------------------------------------------------------------------------------------

    async def overview(self, call: HttpCall) -> web.Response:
        return web.json_response(await self._overview.document())

    async def overview_topics(self, call: HttpCall) -> web.Response:
        if self.listing >= _TABLES:
            raise RequestRefused("too_many", f"{_TABLES} requests wait for the table of topics; send this one again")
        self.listing += 1
        try:
            return web.json_response(await self._overview.topics(call.query))
        finally:
            self.listing -= 1

    async def history(self, call: HttpCall) -> web.Response:
        text = await asyncio.to_thread(lambda: json.dumps(self._overview.history.document()))
        return web.Response(text=text, content_type=JSON)

    async def events(self, call: HttpCall) -> web.Response:
        found = self._overview.events.after(call.query["after"])
        return web.json_response({"as_of": round(time.time(), 3), "events": [event.fields() for event in found]})

    async def group_history(self, call: HttpCall) -> web.Response:
        group = call.path["group"]
        if group not in (self._overview.groups.names or ()):
            raise RequestRefused("unknown_group", f"group {group!r}: is not known, or not yet looked at")
        return web.json_response(self._overview.history.of_group(group))

    async def session(self, call: HttpCall) -> web.Response:
        return web.json_response(caller().session() | {"instance": self._settings.instance, "version": kmq.__version__})

    # --- messages ----------------------------------------------------------------------------------------------------

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
            except NotHereError as err:
                await self._core.cold.wait(err)

    async def _answer(self, work: Callable[[], dict[str, Any]]) -> web.Response:
        """Return what `work` finds. A large answer becomes text in the thread, too."""
        if self.reading >= _WAITING:
            raise RequestRefused("too_many", f"{_WAITING} requests read messages already; send this one again")
        self.reading += 1
        try:
            return web.Response(text=await self._run(lambda: json.dumps(work())), content_type=JSON)
        finally:
            self.reading -= 1

    async def messages(self, call: HttpCall) -> web.Response:
        query = call.query
        at = position(query, "latest")
        key, value, header = (_bytes(query[name]) for name in ("key", "value", "header"))
        wanted = Wanted(query["partition"], at, query["seq"], key, query["limit"], query["before"], value)
        if header is not None:
            name, equals, content = header.partition(b"=")
            wanted = wanted._replace(header=(name.decode(errors="replace"), content if equals else None))
        if wanted.before is not None and not wanted.is_tail:
            raise bad_field("before", "goes with none of offset, seq, timestamp and from=earliest")
        topic, partitions = call.path["topic"], self._core.partitions
        return await self._answer(lambda: find_messages(partitions, self._finder, topic, wanted))

    async def letters(self, call: HttpCall) -> web.Response:
        return await self._answer(lambda: self._dead.grouped(call.path["topic"]))

    async def follow(self, call: HttpCall) -> web.StreamResponse:
        if self.following >= _FOLLOWERS:
            raise RequestRefused("too_many", f"{_FOLLOWERS} topics are being followed already; close one of them")
        self.following += 1
        try:
            topic, partition = call.path["topic"], call.query["partition"]
            follower = await self._run(Follower, self._core.partitions, topic, partition)
            response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
            response.content_type = NDJSON
            await response.prepare(call.request)
            try:
                await self._stream(call, response, follower)
            except (ConnectionError, TimeoutError):
                if call.request.transport is not None:
                    call.request.transport.abort()
            return response
        finally:
            self.following -= 1

    async def _stream(self, call: HttpCall, response: web.StreamResponse, follower: Follower) -> None:
        await self._write(response, _encoded(follower.line()))
        written = time.monotonic()
        until = written + _FOLLOWED_S
        current = exchange()
        while not current.is_over and not self._core.fetching.is_stopping and time.monotonic() < until:
            await asyncio.sleep(EVERY_S)
            try:
                line = await self._run(lambda: _encoded(follower.look()))
            except RequestRefused as refused:
                return await self._write(response, _encoded(follower.line() | {"error": body_of(refused)}))
            except DamageError as err:
                line = _encoded(follower.line(damage=err))
            if not line and time.monotonic() - written > QUIET_S:
                line = _encoded(follower.line())
            if line:
                await self._write(response, line)
                written = time.monotonic()

    async def _write(self, response: web.StreamResponse, line: bytes) -> None:
        async with time_limit(self._deadline_s):
            await response.write(line)

    # --- changing ----------------------------------------------------------------------------------------------------

    async def replay(self, call: HttpCall) -> web.Response:
        body = await self._read_changes(call, "Replay")
        given = body.get("filter", [])
        filters = [given] if isinstance(given, str) else given
        dry_run = body.get("dryRun", True)
        rate, most = float(body.get("rate", 0)), body.get("max", _MOST_REPLAYED)
        arguments = call.path["topic"], filters, rate, most, dry_run
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._replays, self._dead.replay, *arguments)
        except NotHereError as err:
            raise refusal(self._core.cold.want(err)) from err
        return web.json_response(found)

    async def reset(self, call: HttpCall) -> web.Response:
        body = await self._read_changes(call, "Reset")
        to, dry_run = body["to"], body.get("dryRun", True)
        moves = await self._admin.reset(call.path["group"], body["topic"], where_to(to), dry_run)
        rows = [{"partition": number, "from": before, "to": offset} for number, before, offset in moves]
        return web.json_response({"dryRun": dry_run, "partitions": rows})

    async def _read_changes(self, call: HttpCall, schema: str) -> dict[str, Any]:
        """Return the body. Raises RequestRefused if this caller may change nothing."""
        if not caller().may_change:
            raise RequestRefused("forbidden")
        body = await read_body(self._bodies, call, schema)
        caller().is_dry_run = body.get("dryRun", True)
        return body


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode(errors="surrogateescape")


def _encoded(line: dict[str, Any] | None) -> bytes:
    return b"" if line is None else json.dumps(line, separators=(",", ":")).encode() + b"\n"


def where_to(to: Any) -> Position | dict[int, int]:
    """Return the target of a group's offsets, from a checked body."""
    if isinstance(to, str):
        return Position(to)
    if "timestamp" in to:
        return Position("time", micros(str(to["timestamp"]), "to.timestamp"))
    return {each["partition"]: each["offset"] for each in to["offsets"]}
