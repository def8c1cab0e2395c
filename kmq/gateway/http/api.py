"""The API of topics and messages, /api/…: all handlers of one gateway."""

from aiohttp import web

from kmq.gateway.core.core import Core
from kmq.gateway.http.bodies import Bodies
from kmq.gateway.http.consume import Consume
from kmq.gateway.http.operations import ADMIN, MESSAGES, register
from kmq.gateway.http.produce import Produce
from kmq.gateway.http.topics import Topics


def add_to(app: web.Application, core: Core) -> None:
    """Register all operations with `app`."""
    bodies = Bodies(core.settings)
    produce = Produce(core, bodies)
    register(app, ADMIN, Topics(core, bodies).handlers)
    register(app, MESSAGES, produce.handlers | Consume(core).handlers)

    async def close(app: web.Application) -> None:
        await produce.close()

    app.on_cleanup.append(close)
