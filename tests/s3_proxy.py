"""An HTTP proxy in front of an S3 server. It delays, repeats, cuts and lies, as its `fate` says for each request.

with LyingProxy.before("127.0.0.1:9000") as proxy:           the environment names the proxy as the endpoint
    proxy.fate = lambda method, path: "done" if method == "PUT" else ""

""        the request is carried out and answered
slow      the same, a moment later
twice     it is carried out twice, as by a proxy that repeats it; the second answer counts
lost      it is not carried out; the connection ends without an answer
done      it is carried out; the answer is 500
late      the connection ends without an answer; `deliver` carries it out, as often as there are such requests
silent    it is not carried out, and never answered
mute      it is carried out, and never answered
cut       it is carried out; half of the answer's body comes, then the connection ends
flipped   it is carried out; a byte in the body of an object is another one. A LIST is left as it is
denied    403 AccessDenied
throttled 503 SlowDown
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest

ENDS = ("lost", "late")  # without an answer, at once
REFUSALS = {"done": (500, "InternalError"), "denied": (403, "AccessDenied"), "throttled": (503, "SlowDown")}
FATES = ("slow", "twice", *ENDS, *REFUSALS, "silent", "mute", "cut", "flipped")
CREDENTIALS = "<AWSAccessKeyId>AKIASECRET</AWSAccessKeyId><Token-0>a token</Token-0>"  # S3 repeats them in a refusal
_SLOW_S = 0.05


class S3Request(NamedTuple):
    """A request as it came, to be carried out as often as its fate says."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


class LyingProxy:
    """One proxy, on a loopback port."""

    def __init__(self, server: str) -> None:
        self.fate: Callable[[str, str], str] = lambda method, path: ""
        self.is_calm = False  # then every request is carried out and answered
        self.seen: list[tuple[str, str, str]] = []  # method, path, fate
        self._server = server
        self._late: list[S3Request] = []
        self._closing = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True

    @classmethod
    @contextmanager
    def before(cls, server: str) -> Iterator["LyingProxy"]:
        """Run a proxy in front of `server`, <host>:<port>."""
        proxy, patch = cls(server), pytest.MonkeyPatch()
        thread = threading.Thread(target=proxy._http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy._http.server_port}")
        try:
            yield proxy
        finally:
            patch.undo()
            proxy._closing.set()
            proxy._http.shutdown()
            proxy._http.server_close()
            thread.join()

    def deliver(self) -> None:
        """Carry out what is late."""
        late, self._late = self._late, []
        for request in late:
            self._carry_out(request)

    # --- one request -------------------------------------------------------------------------------------------------

    def _carry_out(self, request: S3Request) -> tuple[HTTPResponse, bytes]:
        upstream = HTTPConnection(self._server)
        try:
            upstream.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, text in request.headers:
                upstream.putheader(name, text)
            upstream.endheaders(request.body or None)
            answer = upstream.getresponse()
            return answer, answer.read()
        finally:
            upstream.close()

    def _answer(self, handler: BaseHTTPRequestHandler, request: S3Request) -> None:
        fate = "" if self.is_calm else self.fate(request.method, request.path.partition("?")[0])
        self.seen.append((request.method, request.path, fate))
        if fate == "late":
            self._late.append(request)
        if fate == "slow":
            self._closing.wait(_SLOW_S)
        if fate not in (*ENDS, "silent", "denied", "throttled"):
            answer, body = self._carry_out(request)
        if fate == "twice":
            answer, body = self._carry_out(request)
        if fate in ("silent", "mute"):
            self._closing.wait()
        if fate in (*ENDS, "silent", "mute"):
            handler.close_connection = True
        elif fate in REFUSALS:
            status, code = REFUSALS[fate]
            text = f"<Error><Code>{code}</Code><Message>the proxy says so</Message>{CREDENTIALS}</Error>".encode()
            self._send(handler, status, [("Content-Type", "application/xml")], text, len(text))
        else:
            length = len(body)
            if fate == "cut" and body:
                body, handler.close_connection = body[: length // 2], True
            if fate == "flipped" and request.method == "GET" and "list-type" not in request.path and body:
                body = body[: length // 2] + bytes([body[length // 2] ^ 4]) + body[length // 2 + 1 :]
            kept = [each for each in answer.getheaders() if each[0].lower() not in _OWN]
            self._send(handler, answer.status, kept, body, length)

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], body: bytes, length: int
    ) -> None:
        handler.send_response_only(status)
        for name, text in headers:
            handler.send_header(name, text)
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        handler.wfile.write(body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                try:
                    proxy._answer(self, S3Request(self.command, self.path, self.headers.items(), body))
                except OSError:  # the client did not wait
                    self.close_connection = True

            do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _any

            def log_message(self, format: str, *arguments: object) -> None:
                """Say nothing: `seen` has it."""

        return Handler


_OWN = ("content-length", "transfer-encoding", "connection")  # headers that the proxy sets itself
