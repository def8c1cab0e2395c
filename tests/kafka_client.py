"""A client of the Kafka port that says what it is told to, byte by byte; its messages are written and read by kio."""

import contextlib
import datetime
import random
import socket
import ssl
import struct
import uuid
from io import BytesIO
from typing import Any

from kio.serial import entity_reader, entity_writer
from kio.serial.errors import OutOfBoundValue

from kmq.gateway.kafka import wire
from kmq.gateway.kafka.wire import Key

PATIENCE_S = 60.0


def request(api: Key, version: int, correlation: int = 1, client: str = "test", **fields: Any) -> bytes:
    """A request as it crosses the network, with its length. `fields`: by kio's names; entries of arrays are dicts.

    What is not said is empty.
    """
    cls = wire.request_class(api, version)
    name = client.encode()
    out = BytesIO()
    out.write(struct.pack(">hhih", api, version, correlation, len(name)) + name + b"\0" * cls.__flexible__)
    entity_writer(cls)(out, wire.entity(cls, fields))
    return struct.pack(">i", len(out.getvalue())) + out.getvalue()


class KafkaClient:
    """A connection. Use it as a context manager."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self.sock: socket.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        if context is not None:
            self.sock = context.wrap_socket(self.sock, server_hostname="localhost")

    def __enter__(self) -> "KafkaClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def say(self, data: bytes) -> None:
        """Send bytes; a peer that has gone is no error, because `is_over` tells."""
        with contextlib.suppress(OSError):
            self.sock.sendall(data)

    def frame(self) -> bytes:
        """The next thing that is answered, without its length. Raises ConnectionError at the end of the connection."""
        return self._exactly(int.from_bytes(self._exactly(4)))

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self.sock.recv(length - len(data))
            if not part:
                raise ConnectionResetError("the broker has ended the connection")
            data += part
        return data

    def ask(self, api: Key, version: int, **fields: Any) -> Any:
        """The response to a request, as kio's object."""
        self.say(request(api, version, **fields))
        return self.response(api, version)

    def response(self, api: Key, version: int) -> Any:
        cls = wire.response_class(api, version)
        at = 4 + (cls.__flexible__ and api != Key.API_VERSIONS)
        frame = self.frame()
        try:
            found, size = entity_reader(cls)(frame, at)
        except OutOfBoundValue:  # kio does not read -1, by which Kafka means no time
            return None
        assert at + size == len(frame)
        return found

    def is_over(self) -> bool:
        """Wait for the end of the connection. False: the broker has sent something instead."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True


# --- what may be asked -----------------------------------------------------------------------------------------------

_NUMBERS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}


def made_up(rng: random.Random, cls: Any) -> dict[str, Any]:
    """Fields of a request, as an honest client might send them."""
    return {field.name: _field_value(rng, field) for field in wire._fields(cls)}


def _field_value(rng: random.Random, field: Any) -> Any:
    if field.is_nullable and rng.random() < 0.2:
        return None
    if not field.is_array:
        return _value(rng, field)
    return tuple(_value(rng, field) for _ in range(rng.choice([0, 1, 3])))


def _value(rng: random.Random, field: Any) -> Any:
    if field.entry is not None:
        return made_up(rng, field.entry)
    if field.kind in _NUMBERS:
        most = 1 << _NUMBERS[field.kind]
        return rng.choice([-1, 0, 1, 2, 4, rng.randrange(-most, most)])
    if field.kind.startswith("timedelta"):
        return datetime.timedelta(milliseconds=rng.randrange(-1, 1 << 31))
    if field.kind == "uuid":
        return uuid.UUID(int=rng.randrange(1, 1 << 128))
    return {
        "string": rng.choice(["", "orders", "schlüssel", "x" * 300]),
        "bytes": rng.randbytes(rng.choice([0, 3, 300])),
        "bool": rng.random() < 0.5,
    }[field.kind]
