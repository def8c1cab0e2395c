"""What the console and `kmq top --url` ask for. kmq/gateway/console does the work."""

import asyncio
import json
import time

from aiohttp import web

import kmq
from kmq.gateway.console.overview import Overview
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.http.caller import caller
from kmq.gateway.http.operation import JSON, Call


class Console:
    """The handlers, by the names of their operations."""

    def __init__(self, core: Core, overview: Overview) -> None:
        self._settings, self._overview = core.settings, overview
        self.handlers = {
            "overview": self.overview,
            "history": self.history,
            "events": self.events,
            "groupHistory": self.group_history,
            "session": self.session,
        }

    async def overview(self, call: Call) -> web.Response:
        return web.json_response(await self._overview.document())

    async def history(self, call: Call) -> web.Response:
        text = await asyncio.to_thread(lambda: json.dumps(self._overview.history.document()))
        return web.Response(text=text, content_type=JSON)

    async def events(self, call: Call) -> web.Response:
        found = self._overview.events.after(call.query["after"])
        return web.json_response({"as_of": round(time.time(), 3), "events": [event.fields() for event in found]})

    async def group_history(self, call: Call) -> web.Response:
        group = call.path["group"]
        if group not in (self._overview.groups.names or ()):
            raise RequestRefused("unknown_group", f"group {group!r}: is not known, or not yet looked at")
        return web.json_response(self._overview.history.of_group(group))

    async def session(self, call: Call) -> web.Response:
        return web.json_response(caller().session() | {"instance": self._settings.instance, "version": kmq.__version__})
