"""A Kafka client that sends what a test says, and shows the answer as it came: no retries, no opinion."""

import socket
import struct
import sys
import typing
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

from kio.serial import entity_reader, entity_writer
from waiting import until

from kmq.gateway.kafka import wire
from kmq.gateway.kafka.wire import ErrorCode

PATIENCE_S = 60.0


def _entity(cls: Any, fields: dict[str, Any]) -> Any:
    """kio's object of these fields; lists of dicts become tuples of the entries' class."""
    hints = typing.get_type_hints(cls, vars(sys.modules[cls.__module__]))

    def value(name: str, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        kinds = [each for hint in typing.get_args(hints[name]) for each in (hint, *typing.get_args(hint))]
        entry = next((kind for kind in kinds if hasattr(kind, "__dataclass_fields__")), None)
        return tuple(given if entry is None else (_entity(entry, each) for each in given))

    return cls(**{name: value(name, given) for name, given in fields.items()})


class Peer:
    """A connection."""

    def __init__(self, port: int, client: bytes = b"peer") -> None:
        self.client = client
        self.sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self.stream = self.sock.makefile("rb")
        self.number = 0
        self.waiting: list[tuple[int, int, int]] = []

    @classmethod
    def of(cls, pipes: Path) -> "Peer":
        return cls(int((pipes / "kafka.port").read_text()))

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.stream.close()
        self.sock.close()

    def send(self, key: int, version: int, **fields: Any) -> None:
        cls, self.number = wire.request_class(key, version), self.number + 1
        out = BytesIO()
        name = struct.pack(">h", len(self.client)) + self.client
        out.write(struct.pack(">hhi", key, version, self.number) + name + (b"\0" if cls.__flexible__ else b""))
        entity_writer(cls)(out, _entity(cls, fields))
        self.send_raw(out.getvalue())
        self.waiting.append((key, version, self.number))

    def send_raw(self, request: bytes) -> None:
        self.last_request = request
        self.sock.sendall(struct.pack(">i", len(request)) + request)

    def read_raw(self) -> bytes:
        """The next response; b"" if the connection has ended."""
        head = self.stream.read(4)
        return self.stream.read(int.from_bytes(head)) if len(head) == 4 else b""

    def read(self) -> Any:
        """The response to the first request that has none."""
        key, version, number = self.waiting.pop(0)
        data = self.read_raw()
        assert data, "the connection has ended"
        cls = wire.response_class(key, version)
        at = 5 if cls.__flexible__ and key != 18 else 4
        assert int.from_bytes(data[:4]) == number
        entity, size = entity_reader(cls)(data, at)
        assert at + size == len(data)
        return entity

    def ask(self, key: int, version: int, **fields: Any) -> Any:
        self.send(key, version, **fields)
        return self.read()

    # --- produce -----------------------------------------------------------------------------------------------------

    def send_batch(self, topic: str, partition: int, batch: bytes | None, acks: int = -1, version: int = 8) -> None:
        parts = [{"index": partition, "records": batch}]
        topics = [{"name": topic, "partition_data": parts}]
        before = [*self.waiting]
        self.send(0, version, transactional_id=None, acks=acks, timeout=timedelta(seconds=5), topic_data=topics)
        self.waiting = before if acks == 0 else self.waiting

    def read_produced(self) -> Any:
        """What became of the one batch of a request."""
        return self.read().responses[0].partition_responses[0]

    def produce(self, topic: str, partition: int, batch: bytes | None, **more: Any) -> Any:
        self.send_batch(topic, partition, batch, **more)
        return self.read_produced()

    # --- fetch -------------------------------------------------------------------------------------------------------

    def send_fetch(
        self,
        offsets: dict[tuple[str, int], int],
        version: int = 12,
        *,
        wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 1 << 25,
        partition_bytes: int = 1 << 20,
        epoch: int = -1,
        session: tuple[int, int] = (0, -1),
    ) -> None:
        """Ask for records; `offsets`: by topic and partition."""
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, number), offset in offsets.items():
            part = {"partition": number, "fetch_offset": offset, "partition_max_bytes": partition_bytes}
            part |= {"log_start_offset": -1} if version >= 5 else {}
            topics.setdefault(topic, []).append(part | ({"current_leader_epoch": epoch} if version >= 9 else {}))
        fields: dict[str, Any] = {
            "replica_id": -1,
            "max_wait": timedelta(milliseconds=wait_ms),
            "min_bytes": min_bytes,
            "max_bytes": max_bytes,
            "isolation_level": 0,
            "topics": [{"topic": topic, "partitions": parts} for topic, parts in topics.items()],
        }
        if version >= 7:
            fields |= {"session_id": session[0], "session_epoch": session[1], "forgotten_topics_data": []}
        self.send(1, version, **fields, **({"rack_id": ""} if version >= 11 else {}))

    def read_fetched(self) -> dict[tuple[str, int], Any]:
        """The rows of a response to a Fetch."""
        responses = self.read().responses
        return {(topic.topic, row.partition_index): row for topic in responses for row in topic.partitions}

    def fetch(self, topic: str, partition: int, offset: int, version: int = 12, **more: Any) -> Any:
        """The row of one partition."""
        self.send_fetch({(topic, partition): offset}, version, **more)
        return self.read_fetched()[topic, partition]

    # --- topics ------------------------------------------------------------------------------------------------------

    def make_topic(self, topic: str) -> int:
        """Its number of partitions, once it takes batches."""

        def partitions() -> int | None:  # each request waits some seconds for the router
            [made] = self.ask(3, 4, topics=[{"name": topic}], allow_auto_topic_creation=True).topics
            return len(made.partitions) if made.error_code != ErrorCode.leader_not_available else None

        return until(partitions, f"batches of {topic}")
