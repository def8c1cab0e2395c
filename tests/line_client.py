"""A client of the consumer port and of the status port, as small as one typed by hand."""

import socket
import ssl
from typing import Any

from waiting import PATIENCE_S

from kmq.wire import replies


class LineClient:
    """A connection. Its reads end with an AssertionError where the broker says something else."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self._sock: Any = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        if context is not None:
            self._sock = context.wrap_socket(self._sock, server_hostname="localhost")
        self._file = self._sock.makefile("rb", 1 << 16)

    def __enter__(self) -> "LineClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._sock.close()

    def send(self, *lines: str, last: bool = False) -> None:
        """Send lines; `last`: and no more, as nc does at the end of its input."""
        self.send_raw("".join(f"{line}\n" for line in lines).encode())
        if last:
            self.end()

    def send_raw(self, data: bytes) -> None:
        self._sock.sendall(data)

    def end(self) -> None:
        """Send no more."""
        self._sock.shutdown(socket.SHUT_WR)

    def line(self) -> bytes:
        """The next line, without its newline."""
        line: bytes = self._file.readline()
        assert line.endswith(b"\n"), f"the connection ended: {line!r}"
        return line[:-1]

    def read(self, count: int) -> bytes:
        data: bytes = self._file.read(count)
        assert len(data) == count
        return data

    def rest(self) -> bytes:
        """Everything up to the end; a reset is an end too."""
        data = bytearray()
        try:
            while chunk := self._file.read1(1 << 16):
                data += chunk
        except ConnectionError:
            pass
        return bytes(data)

    def reply(self) -> replies.Reply:
        return replies.reply(self.line())

    def batch(self) -> tuple[Any, int, bytes]:
        """The next `!batch`: (partition or None, first offset, its lines)."""
        reply = self.reply()
        assert isinstance(reply, replies.Batch), reply
        lines = self.read(reply.nbytes)
        assert lines.count(b"\n") == reply.lines and (not lines or lines.endswith(b"\n"))
        return reply.place, reply.offset, lines

    def fetch(self, max_bytes: int, wait_ms: int = 0) -> tuple[Any, int, bytes]:
        self.send(f"!fetch {max_bytes} wait={wait_ms}")
        return self.batch()

    def is_open(self) -> bool:
        """Whether the broker keeps the connection, and has said nothing more."""
        self._sock.setblocking(False)
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        finally:
            self._sock.settimeout(PATIENCE_S)


def ask(port: int, *lines: str) -> bytes:
    """The whole answer to these lines, of a client that has nothing more to say."""
    with LineClient(port) as client:
        client.send(*lines, last=True)
        return client.rest()
