"""Recognizes HTTP or TLS in the first bytes of a connection to a line port, and answers it.

    POST /x HTTP/1.1\\r\\n    HTTP: a browser, or curl with a wrong port. Answered 400, which names the HTTP port
    16 03 01 …               a ClientHello of TLS. Answered by an alert, so that the client fails at once

Invariant   A line of KMQ is never taken for HTTP. A request line is a method, a blank, a target without blanks, a blank, its
            version, and CR LF. `GET|1|2|x` has no blank after the first word, and no routing key has one.
Not covered A raw line at an intake that is a whole request line with CR LF, as the first line of its connection.
"""

import re

HTTP, TLS = "HTTP", "TLS"
_METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH", b"PRI")
FIRST_BYTES = frozenset(b"GHPDCOT\x16")  # any other first byte begins neither
_REQUEST_LINE = re.compile(rb"(?:%b) [!-~\x80-\xff]+ HTTP/\d(?:\.\d)?\r" % b"|".join(_METHODS))
_CLIENT_HELLO = (b"\x16\x03\x00", b"\x16\x03\x01", b"\x16\x03\x02", b"\x16\x03\x03", b"\x16\x03\x04")
# Fatal: protocol_version. handshake_failure would look like a missing certificate.
_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"


def is_request_line(line: bytes) -> bool:
    """Return True if a line, without its newline, is the first line of an HTTP request."""
    return _REQUEST_LINE.fullmatch(line) is not None


def spoken(start: bytes, is_line: bool) -> str | None:
    """Return HTTP or TLS; "" for neither; None if more bytes are needed.

    `start`: the first line of a connection without its newline (`is_line`), or the part that has arrived.
    """
    if start.startswith(_CLIENT_HELLO):
        return TLS
    if is_line:
        return HTTP if is_request_line(start) else ""
    method, blank, _ = start.partition(b" ")
    may_be_http = method in _METHODS if blank else any(each.startswith(method) for each in _METHODS)
    may_be_tls = any(each.startswith(start) for each in _CLIENT_HELLO)
    return None if may_be_http or may_be_tls else ""


def reply(protocol: str, http_port: int) -> bytes:
    """Return the answer to such a client. `http_port`: 0: the number is in the file http.port in KMQ_PIPES."""
    if protocol == TLS:
        return _ALERT
    text = f"This port takes lines of KMQ, not HTTP. {_where(http_port)}\n".encode()
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(text), text)


def reason(protocol: str, http_port: int) -> str:
    """Return the reason for the log."""
    if protocol == TLS:
        return "speaks TLS to a port of lines without TLS; see KMQ_TLS_PORT and KMQ_EGRESS_TLS_PORT"
    return f"speaks HTTP to a port of lines. {_where(http_port)}"


def _where(http_port: int) -> str:
    where = f"port {http_port}" if http_port else "the port that http.port in KMQ_PIPES has"
    return f"HTTP is on {where} (KMQ_HTTP_PORT)"
