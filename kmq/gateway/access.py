"""Access over HTTP: checks of browsers, tokens and roles (kmq/access/roles.py), the console's rules, and the admin log.

    POST /api/… with `Origin: http://evil.example`    → refused as cross_site

Browsers    A page of any site can make a browser on this machine, or in this network, send requests here
            (docs/decisions/browsers.md). Two tricks matter. With DNS rebinding the page's own name leads to this
            broker, so the browser takes both for one site and lets the page read the answers. With cross-site requests
            the page cannot read the answers, but the request has its effect. So requests that a browser sends for
            another site are refused:
            Host must be a name of this broker: localhost, an address, the names in KMQ_HOST, KMQ_TLS_HOST,
            KMQ_CONSOLE_HOSTS. It is checked if a header shows that a browser sent the request. If no token is required,
            it is also checked for every request over loopback whose host has a dot, because such a name can be rebound.
            Origin must be exactly this host and port. Sec-Fetch-Site must not name another site, except to open a page.
            A browser that sends neither of these headers, as over plain HTTP to an address, changes nothing, except
            from a page of exactly this host (Referer).
            Without these headers a program is served under whatever name it reached the gateway.
Open        /healthz and /readyz, because kubelets send no token; the files of the console, because a browser sends none
            with the address that a user typed. They show nothing of what is stored.
Console     Without KMQ_TOKENS its paths are served to this machine only and change nothing, unless KMQ_CONSOLE says
            otherwise. A request passed on by a proxy is not from this machine, wherever the proxy runs. Programs
            without tokens may use the other paths as before.
Log         An admin's action over HTTP is a log line and an event of the console: what, who, from where. So is an
            action that failed (5xx), because part of it may be done.
"""

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from multidict import CIMultiDictProxy

from kmq.access import roles
from kmq.access.roles import ADMIN
from kmq.access.tokens import Tokens
from kmq.broker.overview import Events
from kmq.broker.stats import Strangers
from kmq.config.settings import Settings
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.http.exchange import WebHandler
from kmq.gateway.http.operations import CONSOLE, CONSOLE_PAGES, OPERATIONS
from kmq.gateway.http.request import CALLER, Caller, Operation, response_of
from kmq.logfmt import Logger

# --- browsers --------------------------------------------------------------------------------------------------------

_PAGES = re.compile(r"/|/pages|/docs|/console/[a-z0-9-]+\.md")  # a link of another site may open these
_ORIGIN, _SITE = "Origin", "Sec-Fetch-Site"
_SIGNS = (_ORIGIN, _SITE, "Referer", "Cookie")  # headers that few programs send
_SAFE = ("GET", "HEAD")
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\s:/?#@\\\[\]]+))(?::\d{1,5})?")

Headers = CIMultiDictProxy[str]


def names_of(settings: Settings) -> set[str]:
    """Return the names of this broker according to the settings."""
    given = (settings.host, settings.tls_host, *settings.console_hosts.split(","))
    return {name.strip().lower().rstrip(".") for name in given if name.strip()}


def refused_for(names: set[str], method: str, path: str, headers: Headers, is_strict: bool, changes: bool) -> str:
    """Return why a request is refused; "" if it is not. `names`: of this broker.

    `is_strict`: check a host with a dot of programs too; `changes`: the request may change something.
    """
    host = headers.get("Host")
    is_browser = _is_browser(headers)
    is_checked = is_browser or (is_strict and "." in (host or "").rstrip("."))
    if host is not None and is_checked and not _is_ours(host, names):
        return f"Host {host[:100]!r} is no name of this broker; use localhost or an address, or set KMQ_CONSOLE_HOSTS"
    for origin in headers.getall(_ORIGIN, ()):
        if not _is_at(origin, host):
            return f"Origin {origin[:100]!r}: a page of another site may not do this"
    sites: Collection[str] = headers.getall(_SITE, ())
    if any(site not in ("same-origin", "none") for site in sites) and not _opens_page(method, path, headers):
        return f"{_SITE} {','.join(sites)[:40]!r}: a page of another site may not do this"
    is_shown = _ORIGIN in headers or bool(sites)
    if is_browser and changes and not is_shown and not _is_at(headers.get("Referer", ""), host):
        return "a browser that names no origin may change nothing; use https:// or localhost"
    return ""


def _is_ours(host: str, names: set[str]) -> bool:
    name = _name_of(host)
    if name is None:
        return False
    try:
        ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost") or name in names
    return True


def _is_browser(headers: Headers) -> bool:
    if any(name in headers for name in _SIGNS):
        return True
    agent = headers.get("User-Agent", "")
    return (agent.startswith("Mozilla/") and "PowerShell" not in agent) or headers.get("Accept-Language", "*") != "*"


def _name_of(host: str) -> str | None:
    """Return the name or address in a Host header; None if it is not valid."""
    match = _HOST.fullmatch(host)
    if match is None or (match[1] and ":" not in match[1]):  # in brackets there is an IPv6 address
        return None
    return (match[1] or match[2]).lower().rstrip(".")


def _is_at(url: str, host: str | None) -> bool:
    """Return True if a URL has this host and port."""
    try:
        found = urlsplit(url)
    except ValueError:
        return False
    if found.scheme not in ("http", "https") or host is None:
        return False
    default = ":443" if found.scheme == "https" else ":80"
    ours = host.lower().removesuffix(default)
    return found.netloc.lower().removesuffix(default) == ours


def _opens_page(method: str, path: str, headers: Headers) -> bool:
    return (
        method in _SAFE
        and _PAGES.fullmatch(path) is not None
        and headers.get("Sec-Fetch-Mode") == "navigate"
        and headers.get("Sec-Fetch-Dest") == "document"
    )


# --- access ----------------------------------------------------------------------------------------------------------

_NO_TOKEN = "authorization: Bearer <token> is required, with a token that `kmq token new` has made"
_UNKNOWN_TOKEN = "this token is not known here, or was revoked; make one with: kmq token new <name>"
_BY_ROUTE = {(operation.method, operation.path): operation for operation in OPERATIONS}
_OPEN = {"health", "readiness", *(operation.name for operation in CONSOLE_PAGES)}
_OPEN_PATHS = ("/healthz", "/readyz", "/")
_CONSOLE = {operation.name for operation in (*CONSOLE, *CONSOLE_PAGES)}
_OF_CONSOLE = {"replay", "resetGroup"}  # changes that only the console has
_READS = {"GET", "HEAD"}
_FORWARDED = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP")


def unauthorized(shown: str) -> RequestRefused:
    """Return the refusal of a request without a valid token. `shown`: its header `authorization`."""
    is_token = shown.lower().startswith("bearer ")
    return RequestRefused("unauthorized", _UNKNOWN_TOKEN if is_token else _NO_TOKEN)


class HttpAccess:
    """The middleware of one gateway."""

    def __init__(
        self, settings: Settings, tokens: Tokens | None, strangers: Strangers, log: Logger, events: Events
    ) -> None:
        self._settings, self._tokens, self._strangers = settings, tokens, strangers
        self._log, self._events = log, events
        self._names = names_of(settings)

    @property
    def middleware(self) -> Any:
        """Return the middleware that refuses requests, and tells handlers the caller."""

        @web.middleware
        async def guard(request: web.Request, handler: WebHandler) -> web.StreamResponse:
            operation = _operation_of(request)
            try:
                self._check_browser(request, operation)
                caller = self._caller(request, operation)
            except RequestRefused as refused:
                more = {"WWW-Authenticate": "Bearer"} if refused.code == "unauthorized" else {}
                return response_of(request, refused, **more)
            CALLER.set(caller)  # a connection has one task, which serves its requests in turn
            status = 500
            try:
                response = await handler(request)
                status = response.status
                return response
            finally:
                if operation is not None and _changes(operation) and not caller.is_dry_run:
                    self._log_change(request, operation, caller, status)

        return guard

    def _check_browser(self, request: web.Request, operation: Operation | None) -> None:
        is_strict = self._tokens is None and _is_loopback(_address(request, "sockname"))
        changes = request.method not in _READS or "group" in request.query
        why = refused_for(self._names, request.method, request.path, request.headers, is_strict, changes)
        if why:
            self._strangers.note("cross_site", request.remote or "", why)
            raise RequestRefused("cross_site", why)

    def _caller(self, request: web.Request, operation: Operation | None) -> Caller:
        """Return the caller. Raises RequestRefused if it may not do this."""
        act = operation.name if operation is not None else ""
        if act in _CONSOLE and self._settings.console == "off":
            raise RequestRefused("not_found", f"{request.path}: KMQ_CONSOLE=off")
        if self._tokens is None:
            return self._of_anybody(request, act)
        if act in _OPEN or request.path in _OPEN_PATHS:
            return Caller("", frozenset(), may_change=False)
        shown = request.headers.get("Authorization", "")
        holder = self._tokens.find_header(shown)
        if holder is None:
            self._strangers.refuse(request.remote or "", "HTTP without a valid token", "" if shown else "token")
            raise unauthorized(shown)
        if act and not holder.may(act):
            self._strangers.refuse(request.remote or "", f"{act}: the token of {holder.name} may not")
            raise RequestRefused("forbidden", holder.refusal(act))
        return Caller(holder.name, holder.roles, ADMIN in holder.roles)

    def _of_anybody(self, request: web.Request, act: str) -> Caller:
        console = self._settings.console
        is_here = _is_loopback(_address(request, "peername"))
        is_here &= not any(name in request.headers for name in _FORWARDED)
        if act in _CONSOLE and act not in _OPEN and not is_here and console != "on":
            text = "without KMQ_TOKENS the console is shown to this machine only; set KMQ_TOKENS, or KMQ_CONSOLE=on"
            raise RequestRefused("forbidden", text)
        may_change = is_here and console == "write"
        if act in _OF_CONSOLE and not may_change:
            text = "this needs a token with the role admin, or KMQ_CONSOLE=write and a client on this machine"
            raise RequestRefused("forbidden", text)
        return Caller("", frozenset(), may_change)

    def _log_change(self, request: web.Request, operation: Operation, caller: Caller, status: int) -> None:
        if 300 <= status < 500:
            return  # refused: nothing was done
        failed = {"status": status} if status >= 500 else {}
        who, peer = caller.name or "-", request.remote or ""
        what = f"{request.method} {request.path}"
        self._log.info("changed", what=operation.name, path=what, who=who, peer=peer, **failed)
        more = f", answered {status}: may be done in part" if failed else ""
        self._events.add("changed", operation.name, f"{what} by {who} from {peer}{more}")


def _operation_of(request: web.Request) -> Operation | None:
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    return _BY_ROUTE.get((method, resource.canonical)) if resource is not None else None


def _changes(operation: Operation) -> bool:
    return roles.NEEDED.get(operation.name, ADMIN) == ADMIN or operation.name == "seek"


def _address(request: web.Request, which: str) -> str:
    address = request.transport.get_extra_info(which) if request.transport is not None else None
    return str(address[0]) if isinstance(address, tuple) else ""


def _is_loopback(address: str) -> bool:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
