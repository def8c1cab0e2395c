"""HTTP: the broker's state, the topics, and the application with everything else that HTTP serves.

The start page is the console: the files in kmq/gateway/console/static, at `/` and /console/<file>. So are the documents
that it links to, the runbook and what that links to, as pages. /pages lists what else a browser can open; its row of PAGES
says what it returns.

Invariant   The console's page is the same for everybody and holds nothing of the broker, so it needs no token. Everything
            it shows it asks the API for.
            No script, style, picture or answer from another host is ever loaded, none stands in the page itself, and no
            other page may show this one in a frame: HEADERS forbid it, whatever the files say.
Cache       A browser asks each time and gets 304 until the file changes, so an upgraded broker is never shown by an old
            script.
Memory      The files are read once, at the start, a document when it is first asked for; a path of a request is only
            looked up among their names.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection
from functools import cache
from hashlib import sha256
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

import kmq
from kmq.broker.concerns import Finding
from kmq.broker.health import Verdict
from kmq.broker.stats import REPLICA
from kmq.gateway.console.overview import ConsoleOverview
from kmq.gateway.core import metrics
from kmq.gateway.core.answers import Budget
from kmq.gateway.core.broker import Broker, RequestRefused, bad_field
from kmq.gateway.core.core import Core
from kmq.gateway.core.metrics import Requests
from kmq.gateway.core.topics import OPTIONS, TopicState
from kmq.gateway.groups.membership import Groups
from kmq.gateway.http import logs, openapi
from kmq.gateway.http.console import Console
from kmq.gateway.http.exchange import exchanging
from kmq.gateway.http.groups import GroupCalls
from kmq.gateway.http.messages import MessageCalls
from kmq.gateway.http.operations import ADMIN, CONSOLE, GROUPS, MESSAGES, register
from kmq.gateway.http.request import Bodies, HttpCall, refuse_unknown_paths, response_of
from kmq.gateway.http.schema import read_body
from kmq.log.bounds import TieredSize

# --- topics -----------------------------------------------------------------------------------------------------------


class Topics:
    """The handlers of /api/admin/topics. kmq/gateway/core/topics.py does the work."""

    def __init__(self, core: Core, bodies: Bodies) -> None:
        self._topics, self._bodies = core.topics, bodies
        self._row, self._is_of_shard = core.broker.page.rows[REPLICA], bool(core.settings.shard)
        self.handlers = {
            "createTopic": self.create,
            "listTopics": self.list_all,
            "topics": self.list_all,
            "describeTopic": self.describe,
            "changeTopic": self.change,
            "deleteTopic": self.delete,
        }

    async def create(self, call: HttpCall) -> web.Response:
        body = await read_body(self._bodies, call, "NewTopic")
        copies = self._copies()
        if body.get("replicationFactor", copies) != copies:
            why = "one broker keeps one copy of each message"
            if self._is_of_shard:
                why = f"each of the {copies} brokers of this shard keeps every message"
            raise bad_field("replicationFactor", f"must be {copies}, because {why}")
        topic, is_made = await self._topics.create(
            body["name"], body.get("partitions", 1), _options(body), body.get("partitioner")
        )
        return await self._described(topic, 201 if is_made else 200)

    async def list_all(self, call: HttpCall) -> web.Response:
        found = await self._topics.all(call.query["internal"])
        return web.json_response([self._summary(topic) | {"partitions": topic.partitions} for topic in found])

    async def describe(self, call: HttpCall) -> web.Response:
        return await self._described(await self._topics.describe(call.path["topic"]))

    async def change(self, call: HttpCall) -> web.Response:
        body = await read_body(self._bodies, call, "TopicChanges")
        topic = await self._topics.change(
            call.path["topic"], _options(body), body.get("partitions"), body.get("force", False)
        )
        return await self._described(topic)

    async def delete(self, call: HttpCall) -> web.Response:
        await self._topics.delete(call.path["topic"])
        return web.Response(status=204)

    async def _described(self, topic: TopicState, status: int = 200) -> web.Response:
        sizes = [
            {
                "partition": size.partition,
                "startOffset": size.first_offset,
                "endOffset": size.end_offset,
                "bytes": size.nbytes,
                "segments": size.segments,
                **({"gaps": size.gaps} if size.gaps else {}),
                **(_tiered(size.tier) if size.tier is not None else {}),
            }
            for size in await self._topics.sizes(topic)
        ]
        return web.json_response(self._summary(topic) | {"partitions": sizes}, status=status)

    def _copies(self) -> int:
        """Return how many brokers keep each message: in a shard all of them, according to the register."""
        return max(1, self._row.brokers) if self._is_of_shard else 1

    def _summary(self, topic: TopicState) -> dict[str, Any]:
        fixed = {"name": topic.name, "fromSeq": topic.from_seq, "replicationFactor": self._copies()}
        return fixed | {"partitioner": topic.partitioner} | topic.options


def _tiered(size: TieredSize) -> dict[str, int]:
    return {
        "localStartOffset": size.local_start,
        "tierEndOffset": size.end,
        "tierObjects": size.rows,
        "tierBytes": size.nbytes,
    }


def _options(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name in OPTIONS}


# --- api -------------------------------------------------------------------------------------------------------------


class Api:
    """All handlers of /api/…, and the bounds that they share."""

    def __init__(self, core: Core, groups: Groups, overview: ConsoleOverview) -> None:
        self.bodies = Bodies(core.settings)
        self.topics = Topics(core, self.bodies)
        self.console = Console(core, groups, overview, self.bodies)
        self.groups = GroupCalls(core, groups, self.bodies)
        self.messages = MessageCalls(core, self.bodies, self.groups.consume)

    def add_to(self, app: web.Application, requests: Requests) -> None:
        """Register all operations with `app`; `requests` counts them."""
        count = requests.count_http
        register(app, ADMIN, self.topics.handlers, count)
        register(app, MESSAGES, self.messages.handlers, count)
        register(app, GROUPS, self.groups.handlers, count)
        register(app, CONSOLE, self.console.handlers, count)
        app.on_cleanup.append(self._close)
        app[KEY] = self

    async def _close(self, app: web.Application) -> None:
        await self.groups.close()
        self.console.close()


KEY = web.AppKey("api", Api)


# --- the page of the console -----------------------------------------------------------------------------------------

STATIC = Path(__file__).parents[1] / "console/static"
INDEX = "index.html"
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".json": "application/json",
}


class _File(NamedTuple):
    content: bytes
    kind: str
    tag: str


def _read(directory: Path) -> dict[str, _File]:
    """Return the files that a browser may have, by name."""
    paths = [path for path in sorted(directory.iterdir()) if path.suffix in _TYPES and path.is_file()]
    return {path.name: _file(path.read_bytes(), _TYPES[path.suffix]) for path in paths}


def _file(content: bytes, kind: str) -> _File:
    return _File(content, kind, sha256(content).hexdigest()[:32])


DOCS = STATIC.parent / "docs"  # links to docs/: docs/operations.md, which findings name, and the pages that it links to
_DOCUMENT = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,'
    ' initial-scale=1"><meta name="color-scheme" content="light dark"><title>{title} · KMQ</title>'
    '<link rel="icon" href="/console/icon.svg" type="image/svg+xml"><link rel="stylesheet" href="/console/console.css">'
    '</head><body><header class="top"><p class="brand"><a href="/">KMQ</a> <span>{version}</span></p><nav><ul><li>'
    '<a href="/#/health">Health</a></li><li><a href="/console/operations.md#runbook">Runbook</a></li></ul></nav></header>'
    '<main class="document">{body}</main></body></html>\n'
)


@cache
def _document(name: str) -> _File:
    names = [path.name for path in DOCS.iterdir()]
    return _file(render((DOCS / name).read_text("utf-8"), names).encode(), _TYPES[".html"])


def render(text: str, names: Collection[str]) -> str:
    """Return a document (Markdown) as a page, without the comments for its tests.

    HTML in it is shown as text, and so are links to files that are not in `names`.
    """
    from markdown_it import MarkdownIt  # comes with rich; loaded only to render a document

    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = parser.parse(re.sub(r"(?m)^<!--.*?-->\n", "", text))
    for token, after in pairwise(tokens):
        token.attrs.pop("style", None)  # of a column, which the page's policy forbids
        if token.type == "heading_open":
            token.attrSet("id", re.sub(r"[^\w\- ]", "", after.content.lower()).replace(" ", "-"))
        for child in token.children or ():
            if child.type == "link_open":
                target = str(child.attrs["href"])
                is_link = target.startswith(("#", "https://")) or target.partition("#")[0] in names
            if child.type in ("link_open", "link_close") and not is_link:
                child.tag, child.attrs = "span", {}
    title = next((after.content for token, after in pairwise(tokens) if token.type == "heading_open"), "")
    body = parser.renderer.render(tokens, parser.options, {})
    return _DOCUMENT.format(title=escape(title), version=kmq.__version__, body=body)


def add_page(app: web.Application) -> None:
    """Register the page, its files and the documents with `app`."""
    files, documents = _read(STATIC), {path.name for path in DOCS.iterdir()}

    async def serve(request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("file", INDEX)
        found = await asyncio.to_thread(_document, name) if name in documents else files.get(name)
        if found is None:
            raise web.HTTPNotFound
        charset = "utf-8" if found.kind.startswith("text/") else None
        if request.if_none_match and any(tag.value in (found.tag, "*") for tag in request.if_none_match):
            response = web.Response(status=304, headers=HEADERS)
        else:
            response = web.Response(body=found.content, content_type=found.kind, charset=charset, headers=HEADERS)
        response.etag = found.tag
        return response

    app.add_routes([web.get("/", serve), web.get("/console/{file}", serve)])


# --- application -----------------------------------------------------------------------------------------------------

_MAX_BODY = 1 << 16  # of requests whose body nobody reads; request.py has its own limit

PAGES = {
    "/healthz": "200 while every stage is alive, else 503 and the reason; also the last durable write",
    "/readyz": "200 while a message sent now would become durable, else 503, the reasons and what to do; also warnings",
    "/metrics": "metrics for Prometheus",
    "/docs": "the API: topics, produce, consume",
    "/openapi.json": "the same for programs: OpenAPI 3.1",
    **logs.PAGES,
}


def application(
    core: Core, groups: Groups, requests: Requests, overview: ConsoleOverview | None = None
) -> web.Application:
    """Return the application with all pages. `overview`: the console's document; the caller runs it."""
    broker = core.broker

    async def pages(request: web.Request) -> web.Response:
        return web.Response(text=_index(broker), content_type="text/html")

    app = monitoring(broker, requests, core.answers)
    app.add_routes([web.get("/pages", pages)])
    add_page(app)
    Api(core, groups, overview or ConsoleOverview(core, groups)).add_to(app, requests)
    openapi.add_to(app)
    logs.LogCalls(broker, core.cold, core.partitions).add_to(app)
    return app


def monitoring(broker: Broker, requests: Requests, answers: Budget) -> web.Application:
    """Return the application with the pages on the broker's state only: none of them shows records."""

    async def healthz(request: web.Request) -> web.Response:
        verdict = broker.verdict()
        return _report(broker, verdict, verdict.lifeless)

    async def readyz(request: web.Request) -> web.Response:
        verdict = broker.verdict()
        return _report(broker, verdict, verdict.first)

    async def scrape(request: web.Request) -> web.Response:
        await requests.look()
        page = await asyncio.to_thread(metrics.page, broker, requests)
        return web.Response(body=page, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def shard(request: web.Request) -> web.Response:
        try:
            return web.json_response(broker.shard())
        except RequestRefused as refused:
            return response_of(request, refused)

    handlers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
        "/healthz": healthz,
        "/readyz": readyz,
        "/metrics": scrape,
        "/v1/cluster": shard,
    }
    app = web.Application(client_max_size=_MAX_BODY, middlewares=[exchanging(answers), refuse_unknown_paths])
    app.add_routes([web.get(path, handler) for path, handler in handlers.items()])
    app.on_response_prepare.append(_guard)
    return app


async def _guard(request: web.Request, response: web.StreamResponse) -> None:
    """Enforce the declared type of an answer: stored bytes never run as a script, and no page has code of its own."""
    headers = HEADERS if response.content_type == "text/html" else {"X-Content-Type-Options": "nosniff"}
    for name, value in headers.items():
        response.headers.setdefault(name, value)


def _report(broker: Broker, verdict: Verdict, reason: Finding | None) -> web.Response:
    return web.json_response(broker.report(verdict, reason), status=503 if reason else 200)


def _index(broker: Broker) -> str:
    rows = "".join(f'<dt><a href="{path}">{path}</a></dt><dd>{escape(what)}</dd>' for path, what in PAGES.items())
    state = escape(str(broker.verdict().first or "ready"))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>KMQ</title><h1>KMQ</h1>'
        f"<p>Instance {escape(broker.settings.instance)}: {state}.</p><dl>{rows}</dl>"
        "<p>gRPC: services podbus.v1.PodBus and kmq.v1.Kmq on their own port, with health and reflection.</p></html>\n"
    )
