"""Requests that a browser sends for somebody else: refused (docs/decisions/browsers.md).

A page of any site can make a browser on this machine, or in this network, send requests here. Two tricks matter. With DNS
rebinding the page's own name leads to this broker, so the browser takes both for one site and lets the page read the
answers. With cross-site requests the page cannot read the answers, and what the request did is done.

Host        Must be a name of this broker: localhost, an address, the names in KMQ_HOST, KMQ_TLS_HOST, KMQ_CONSOLE_HOSTS.
            It is checked where a browser shows itself by a header. Where no token is required, every request over
            loopback is checked whose host has a dot in it, as any name has that somebody could rebind.
Origin      Must be this very host and port. Sec-Fetch-Site must not name another site, except to open a page.
Change      A browser that shows neither of these headers, as over plain HTTP to an address, changes nothing, except from
            a page of this very host (Referer).
Programs    Without these headers a program is served as before, under whatever name it reached the gateway.
"""

import re
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from multidict import CIMultiDictProxy

from kmq.config.settings import Settings

_PAGES = ("/", "/pages", "/docs")  # what a link of another site may lead to
_ORIGIN, _SITE = "Origin", "Sec-Fetch-Site"
_SIGNS = (_ORIGIN, _SITE, "Referer", "Cookie")  # headers that hardly any program sends
_SAFE = ("GET", "HEAD")
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\s:/?#@\\\[\]]+))(?::\d{1,5})?")

Headers = CIMultiDictProxy[str]


class Browsers:
    """What browsers may send."""

    def __init__(self, settings: Settings) -> None:
        given = (settings.host, settings.tls_host, *settings.console_hosts.split(","))
        self._names = {name.strip().lower().rstrip(".") for name in given if name.strip()}

    def refused_for(self, method: str, path: str, headers: Headers, is_strict: bool, changes: bool) -> str:
        """Return why a request is refused; "" if it is not.

        `is_strict`: check a host with a dot of programs too; `changes`: the request may change something.
        """
        host = headers.get("Host")
        is_browser = _is_browser(headers)
        is_checked = is_browser or (is_strict and "." in (host or "").rstrip("."))
        if host is not None and is_checked and not self._is_ours(host):
            return (
                f"Host {host[:100]!r} is no name of this broker; use localhost or an address, or set KMQ_CONSOLE_HOSTS"
            )
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

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        if name is None:
            return False
        try:
            ip_address(name)
        except ValueError:
            return name == "localhost" or name.endswith(".localhost") or name in self._names
        return True


def _is_browser(headers: Headers) -> bool:
    if any(name in headers for name in _SIGNS):
        return True
    agent = headers.get("User-Agent", "")
    return (agent.startswith("Mozilla/") and "PowerShell" not in agent) or headers.get("Accept-Language", "*") != "*"


def _name_of(host: str) -> str | None:
    """Return the name or address in a Host header; None if it is none."""
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
        and path in _PAGES
        and headers.get("Sec-Fetch-Mode") == "navigate"
        and headers.get("Sec-Fetch-Dest") == "document"
    )
