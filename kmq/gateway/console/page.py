"""The page of the console: the files in static/, at `/` and /console/<file>.

Invariant   The page is the same for everybody and holds nothing of the broker, so it needs no token. Everything it
            shows it asks the API for.
            No script, style, picture or answer from another host is ever loaded, none stands in the page itself, and no
            other page may show this one in a frame: the headers below forbid it, whatever the files say.
Cache       A browser asks each time and gets 304 until the file changes, so an upgraded broker is never shown by an old
            script.
Memory      The files are read once, at the start; a path of a request is only looked up among their names.
"""

from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

STATIC = Path(__file__).parent / "static"
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
    found = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in paths}
    return {name: _File(content, kind, sha256(content).hexdigest()[:32]) for name, (content, kind) in found.items()}


def add_page(app: web.Application) -> None:
    """Register the page and its files with `app`."""
    files = _read(STATIC)

    async def serve(request: web.Request) -> web.StreamResponse:
        found = files.get(request.match_info.get("file", INDEX))
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
