"""The API of topics and messages, /api/…: all handlers of one gateway."""

from aiohttp import web

from kmq.gateway.console.overview import Overview
from kmq.gateway.core.core import Core
from kmq.gateway.core.metrics import Requests
from kmq.gateway.groups.membership import Groups
from kmq.gateway.http.bodies import Bodies
from kmq.gateway.http.console import Console
from kmq.gateway.http.console_messages import ConsoleMessages
from kmq.gateway.http.console_operations import CONSOLE
from kmq.gateway.http.consume import Consume
from kmq.gateway.http.groups import GroupCalls
from kmq.gateway.http.operations import ADMIN, GROUPS, MESSAGES, register
from kmq.gateway.http.produce import Produce
from kmq.gateway.http.topics import Topics


class Api:
    """The handlers and the bounds that they share."""

    def __init__(self, core: Core, groups: Groups, overview: Overview) -> None:
        self.bodies = Bodies(core.settings)
        self.topics = Topics(core, self.bodies)
        self.produce = Produce(core, self.bodies)
        self.consume = Consume(core)
        self.console = Console(core, overview)
        self.console_messages = ConsoleMessages(core, groups, self.bodies)
        self.groups = GroupCalls(core, groups, self.bodies, self.consume)

    def add_to(self, app: web.Application, requests: Requests) -> None:
        """Register all operations with `app`; `requests` counts them."""
        count = requests.count_http
        register(app, ADMIN, self.topics.handlers, count)
        register(app, MESSAGES, self.produce.handlers | self.consume.handlers, count)
        register(app, GROUPS, self.groups.handlers, count)
        register(app, CONSOLE, {**self.console.handlers, **self.console_messages.handlers}, count)
        app.on_cleanup.append(self._close)
        app[KEY] = self

    async def _close(self, app: web.Application) -> None:
        await self.produce.close()
        await self.groups.close()
        self.console_messages.close()


KEY = web.AppKey("api", Api)
