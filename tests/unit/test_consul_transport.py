"""Consul's HTTP over real sockets: what comes back as an answer, and what is asked again, or never."""

import asyncio
import base64
import contextlib
import gc
import os
import socket
import ssl
import time

import pytest
from certificates import Authority

from kmq.cluster import consul
from kmq.cluster.consul import ConsulAddress, Request, Response, Transport, Unanswered
from kmq.errors import ConfigError

PATIENCE_S = 100.0
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"
GET, PUT = Request("GET", "/v1/kv/a"), Request("PUT", "/v1/txn", body=b"[1]")


class Server:
    """Answers each request with what `replies` says: bytes, or None to say nothing. An empty text: it closes.

    `b"…" + END` closes after it.
    """

    def __init__(self, *replies, tls=None):
        self.replies, self.tls = [*replies], tls
        self.heads, self.bodies, self.connections = [], [], []
        self.hangs = asyncio.Event()  # a request has come that is not answered
        self.ended = asyncio.Event()  # a client has closed its connection

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error):
        for writer in self.connections:
            writer.close()
        self._server.close()

    async def _serve(self, reader, writer):
        self.connections.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while self.replies:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = [
                    line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")
                ]
                self.bodies.append(await reader.readexactly(int(length[0])) if length else b"")
                reply = self.replies.pop(0)
                if reply is None:
                    self.hangs.set()
                    await reader.read()
                    break
                writer.write(reply.removesuffix(END))
                if not reply or reply.endswith(END):
                    break
            else:
                await reader.read()
        self.ended.set()
        writer.close()


END = b"<end>"


def ask(*asked, servers, address=None):
    """Return the answer to each of these requests, or the error."""

    async def scene():
        async with contextlib.AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server)
            text = ",".join(f"https://{each.address}" if each.tls else each.address for each in servers)
            transport = Transport(address._replace(urls=text.split(",")) if address else ConsulAddress.of(text))
            found = []
            for each in asked:
                try:
                    found.append(await transport.ask(each))
                except Unanswered as error:
                    found.append(error)
            await transport.close()
            return found

    return asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nX-Consul-Index: 7\r\nContent-Length: 5\r\n\r\n[1,2]",
        b"HTTP/1.1 200 OK\r\nX-Consul-Index: 7\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Consul-Index: 7\r\n\r\n[1,2]" + END,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-Consul-Index: 7\r\nContent-Length: 5\r\n\r\n[1,2]",
    ],
)
def test_each_form_of_an_answer_is_whole_and_the_next_one_is_another(reply):
    server = Server(reply, EMPTY)
    first, second = ask(GET, GET, servers=[server])
    assert (first.status, first.headers["x-consul-index"], first.body) == (200, "7", b"[1,2]")
    assert second.body == b"[]" and len(server.connections) == 1 + reply.endswith(END)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"", "the connection was closed without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[1" + END, "without sending complete message body"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "illegal status line"),
    ],
)
def test_a_change_without_a_whole_answer_is_sent_to_nobody_else(reply, says):
    first, second = Server(reply), Server(EMPTY)
    [found] = ask(PUT, servers=[first, second])
    assert isinstance(found, Unanswered) and says in str(found) and first.address in str(found)
    assert (first.bodies, second.bodies) == ([b"[1]"], [])
    first, second = Server(reply), Server(EMPTY)
    [found] = ask(GET, servers=[first, second])
    assert found.body == b"[]" and len(first.heads) == len(second.heads) == 1


def test_a_change_goes_to_the_next_address_if_nobody_listens_at_the_first():
    server = Server(EMPTY)

    async def scene():
        async with server:
            with socket.socket() as silent:  # bound, and nobody listens
                silent.bind(("127.0.0.1", 0))
                nobody = f"127.0.0.1:{silent.getsockname()[1]}"
                transport = Transport(ConsulAddress.of(f"{nobody},{server.address}"))
                assert (await transport.ask(PUT)).body == b"[]"
                await transport.close()

    asyncio.run(scene())


def test_the_late_answer_to_a_cancelled_watch_is_nobodys():
    server = Server(None, EMPTY)

    async def scene():
        async with server:
            transport = Transport(ConsulAddress.of(server.address))
            watching = asyncio.create_task(transport.ask(GET))
            await server.hangs.wait()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await server.ended.wait()  # Consul hears at once that nobody waits
            assert (await transport.ask(GET)).body == b"[]"
            await transport.close()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
    assert len(server.connections) == 2


@pytest.mark.parametrize("more", [b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n", b""])
def test_what_comes_while_nobody_asks_is_no_answer_to_the_next_request(more):
    server = Server(EMPTY + more, EMPTY)

    async def scene():
        async with server:
            transport = Transport(ConsulAddress.of(server.address))
            assert (await transport.ask(GET)).body == b"[]"
            if not more:  # after the answer was taken
                server.connections[0].write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
                await server.ended.wait()
            found = await transport.ask(PUT)
            assert found.status == 200 and len(server.connections) == 2
            await transport.close()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_a_transport_that_was_closed_keeps_no_connection():
    """An iteration that its reader has left gives its place back after the queue has closed."""

    async def scene():
        async with Server(EMPTY) as server:
            transport = Transport(ConsulAddress((f"http://{server.address}",)))
            await transport.close()
            assert (await transport.ask(GET)).status == 200
            await asyncio.wait_for(server.ended.wait(), PATIENCE_S)

    asyncio.run(scene())


def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch):
    server = Server(EMPTY, EMPTY, EMPTY)

    async def scene():
        async with server:
            transport = Transport(ConsulAddress.of(server.address))
            await transport.ask(GET)
            await transport.ask(GET)
            assert len(server.connections) == 1
            monkeypatch.setattr(consul, "_IDLE_S", 0.0)
            await transport.ask(PUT)
            assert len(server.connections) == 2
            await transport.close()

    asyncio.run(scene())


def test_a_watch_may_take_what_consul_may_hold_it_back_and_others_may_not(monkeypatch):
    monkeypatch.setattr(consul, "_ANSWER_S", 0.1)
    began = time.monotonic()
    [found] = ask(GET._replace(wait_s=1.0), servers=[Server(None)])
    assert str(found).endswith(": timed out") and time.monotonic() - began >= 0.1 + 17 / 16
    [found] = ask(PUT, servers=[Server(None)])
    assert str(found).endswith(": timed out")


def test_token_login_and_prefix_are_sent_and_parameters_are_escaped():
    server = Server(EMPTY)

    async def scene():
        async with server:
            url = f"http://me:p%40ss@{server.address}/consul/"
            transport = Transport(ConsulAddress.of(url, token="t-1"))
            await transport.ask(Request("GET", "/v1/kv/a b", {"recurse": "", "wait": "1&2"}))
            await transport.close()

    asyncio.run(scene())
    line, *headers = server.heads[0].split("\r\n")
    assert line == "GET /consul/v1/kv/a%20b?recurse=&wait=1%262 HTTP/1.1"
    assert f"Host: {server.address}" in headers and "X-Consul-Token: t-1" in headers
    assert f"Authorization: Basic {base64.b64encode(b'me:p@ss').decode()}" in headers


@pytest.mark.parametrize(("login", "sent"), [("me", b"me:"), ("me%3As%253A", b"me:s%3A"), ("me:s%253A", b"me:s%3A")])
def test_a_login_has_one_colon_also_without_a_password_or_with_an_encoded_one(login, sent):
    server = Server(EMPTY)

    async def scene():
        async with server:
            transport = Transport(ConsulAddress.of(f"http://{login}@{server.address}"))
            await transport.ask(GET)
            await transport.close()

    asyncio.run(scene())
    assert f"Authorization: Basic {base64.b64encode(sent).decode()}" in server.heads[0].split("\r\n")


@pytest.mark.parametrize(
    "text",
    [
        "a:1,ftp://me:secret@h:1",
        "a:1,http://me:secret@h:port",
        "a:1,http://me:secret/1@h:1",  # of which urlsplit's error names `secret`
        "a:1,http://me:secret,1@h:1",
        "a:1,me:secret@h..b:1",
    ],
)
def test_an_address_that_is_wrong_is_named_without_its_login(text):
    with pytest.raises(ConfigError, match=r"^KMQ_CONSUL=… \(not shown .*\): address 2 must be host:port") as told:
        ConsulAddress.of(text)
    assert "secret" not in str(told.value)


def test_no_error_shows_token_or_login():
    for token in ("secret\n", " secret", "sécret"):
        with pytest.raises(ConfigError, match="KMQ_CONSUL_TOKEN: must be printable ASCII") as told:
            Transport(ConsulAddress.of("127.0.0.1:8500", token=token))
        assert "cret" not in str(told.value)

    async def scene():
        async with Server(b"") as server:
            transport = Transport(ConsulAddress.of(f"http://me:secret@{server.address}/consul"))
            with pytest.raises(Unanswered, match=f"^Consul at http://{server.address}/consul: ") as told:
                await transport.ask(PUT)
            await transport.close()
            return str(told.value)

    assert "secret" not in asyncio.run(scene())


def test_over_tls_the_authority_of_the_setting_counts(tmp_path):
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue("consul"))
    [found] = ask(GET, servers=[Server(EMPTY, tls=context)], address=ConsulAddress([], ca=str(authority.path)))
    assert isinstance(found, Response) and found.body == b"[]"
    first, second = Server(EMPTY, tls=context), Server(EMPTY)
    found, _ = ask(PUT, PUT, servers=[first, second])  # a handshake that fails has sent nothing
    assert found.body == b"[]" and not first.heads
    [found] = ask(PUT, servers=[Server(EMPTY, tls=context)])
    assert "certificate verify failed" in str(found)


@pytest.mark.parametrize("text", ["ftp://a:1", "http://", "a b:8500", "[::1", "a:port", "a\x07:8500", "a..b:8500", ","])
def test_what_is_no_address_is_refused_with_the_setting(text):
    with pytest.raises(ConfigError, match="KMQ_CONSUL"):
        ConsulAddress.of(text)


def test_addresses_of_all_forms_are_taken():
    urls = ConsulAddress.of("127.0.0.1:8500, [::1]:8500,consul,https://consul.example/x/").urls
    assert urls == ["http://127.0.0.1:8500", "http://[::1]:8500", "http://consul", "https://consul.example/x"]


def test_a_request_that_is_cancelled_while_it_connects_leaves_no_socket():
    """At whichever turn of the loop that happens. The collector would close it, with a warning, at some later time."""

    async def left_after(turns, listener):
        transport = Transport(ConsulAddress.of(f"127.0.0.1:{listener.getsockname()[1]}"))
        before = os.listdir("/proc/self/fd")  # what earlier tests have left may be closed meanwhile
        asking = asyncio.create_task(transport.ask(GET))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await transport.close()
        for _ in range(5):
            await asyncio.sleep(0)
        return {*os.listdir("/proc/self/fd")} - {*before}

    async def scene():
        with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
            return [await left_after(turns, listener) for turns in range(40)]

    gc.disable()
    try:
        assert not any(asyncio.run(scene()))
    finally:
        gc.enable()
