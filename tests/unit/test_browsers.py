"""What browsers may send: the tricks of pages of other sites are refused, and programs are served as before."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from kmq.config.settings import load
from kmq.gateway.access import names_of, refused_for

CHROME = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)", "Accept-Language": "en"}
OWN = {**CHROME, "Host": "localhost:8082", "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
NAMES = names_of(load({"KMQ_HOST": "broker-0", "KMQ_CONSOLE_HOSTS": "kmq.example, Console.Example."}, toml=""))


def refused(headers, method="GET", path="/api/overview", strict=False, changes=None):
    changes = method not in ("GET", "HEAD") if changes is None else changes
    return refused_for(NAMES, method, path, CIMultiDictProxy(CIMultiDict(headers)), strict, changes)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8082", "127.0.0.1:8082", "[::1]:8082", "10.1.2.3", "a.localhost"]
)
def test_the_own_page_is_served_under_loopback_names_and_addresses(host):
    assert not refused(OWN | {"Host": host})
    assert not refused(OWN | {"Host": host, "Origin": f"http://{host}"}, "POST")


@pytest.mark.parametrize("host", ["broker-0:8082", "kmq.example", "console.example:443", "KMQ.Example."])
def test_names_in_the_settings_are_names_of_the_broker(host):
    assert not refused(OWN | {"Host": host})


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example:8082", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b", "x@localhost/"),
        *("[::1].evil.example", "[::1]x:8082", "localhost:evil", "localhost:8082:80", "[localhost]", "127.0.0.1:"),
    ],
)
def test_a_page_whose_name_was_rebound_is_refused(host):
    for method in ("GET", "POST"):
        assert "Host" in refused(CHROME | {"Host": host}, method)
    if "." in host:
        assert "Host" in refused({"Host": host}, strict=True), (
            "over loopback a page without any header of a browser, too"
        )


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://localhost"},
        {"Origin": "file://"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
    ],
)
def test_a_request_for_a_page_of_another_site_is_refused(headers):
    base = CHROME | {"Host": "localhost:8082"}
    for method, path in (("GET", "/api/topics/t/consume"), ("POST", "/api/topics/t/produce"), ("GET", "/metrics")):
        assert refused(base | headers, method, path)


def test_a_link_of_another_site_may_open_a_page_and_not_frame_it():
    link = CHROME | {"Host": "localhost:8082", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    for path in ("/", "/console/operations.md"):
        assert not refused(link | {"Sec-Fetch-Dest": "document"}, path=path)
    assert refused(link | {"Sec-Fetch-Dest": "document"}, path="/console/x.md/../../metrics")
    assert refused(link | {"Sec-Fetch-Dest": "iframe"}, path="/")
    assert refused(link | {"Sec-Fetch-Dest": "document"}, "POST", "/")


def test_a_browser_that_names_no_origin_changes_nothing():
    plain = CHROME | {"Host": "10.1.2.3:8082"}
    assert not refused(plain) and refused(plain, changes=True)
    assert not refused(plain | {"Referer": "http://10.1.2.3:8082/"}, changes=True)
    assert refused(plain | {"Referer": "http://10.1.2.3.evil.example/"}, changes=True)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "kmq"},
        {"Host": "kmq.default.svc.cluster.local:8082", "User-Agent": "Go-http-client/1.1"},
        {"Host": "kmq:8082", "User-Agent": "node", "Accept-Language": "*", "Sec-Fetch-Mode": "cors"},
        {"Host": "kmq:8082", "User-Agent": "curl/8.5.0"},
        {"Host": "kmq:8082", "User-Agent": "Mozilla/5.0 (Windows NT; PowerShell/7)"},
    ],
)
def test_programs_are_served_under_any_name(headers):
    assert not refused(headers) and not refused(headers, "POST")


def test_programs_over_loopback_may_use_names_without_a_dot():
    assert not refused({"Host": "kmq:8082"}, "POST", strict=True) and not refused({"Host": "x"}, strict=True)
