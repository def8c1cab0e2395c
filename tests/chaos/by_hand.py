"""An acknowledged connection spoken by hand, line by line."""

import socket

from chaos.pod import Pod


class Client:
    """One acknowledged connection, spoken by hand."""

    def __init__(self, pod: Pod, hello: str) -> None:
        self.sock = socket.create_connection(("127.0.0.1", int((pod.pipes / "ingress.port").read_text())), timeout=30)
        self.replies = self.sock.makefile("rb")
        self.sock.sendall(f"!hello acks=1 {hello}\n".encode())
        assert self.replies.readline().startswith(b"!ok ")
        self.sent = 0

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.replies.close()
        self.sock.close()

    def send(self, *lines: bytes) -> list[str]:
        """The reply to each of `lines`, an ack or a dup as `ack <seq>`, an error as `err <code>`."""
        self.sock.sendall(b"".join(line + b"\n" for line in lines))
        return self.told(len(lines))

    def told(self, lines: int) -> list[str]:
        """The reply to each of the next so many lines."""
        told: list[str] = []
        while len(told) < lines:
            kind, n, rest = self.replies.readline().decode().split(" ", 2)
            count = int(n) - self.sent - len(told)
            assert count == 1 or (count > 1 and kind == "!ack"), (kind, n, rest)
            for ahead in range(count - 1, -1, -1):
                told.append(f"err {rest.split()[0]}" if kind == "!err" else f"{kind[1:]} {int(rest) - ahead}")
        self.sent += lines
        return told


def message(id: object) -> bytes:
    return b"test.probe|1|%b|payload" % str(id).encode()
