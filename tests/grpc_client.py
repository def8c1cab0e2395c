"""A client of kmq.v1, as small as one that somebody writes with grpcio."""

from queue import SimpleQueue
from typing import Any

import grpc
from waiting import PATIENCE_S

from kmq.gateway.grpc.schema import KMQ

MESSAGES = KMQ.messages


def path_of(method: str) -> str:
    return f"/{KMQ.service}/{method}"


class Client:
    """A channel. Calls raise grpc.RpcError. `waits`: for a server that is not there yet, instead of raising."""

    waits = True

    def __init__(self, port: int, token: str = "", **options: Any) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", [*options.items()])
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def call(self, method: str, request: Any = None, /, **fields: Any) -> Any:
        """`request`: bytes as they are; else the request is made of `fields`."""
        data = KMQ.request_of(method)(**fields).SerializeToString() if request is None else request
        invoke = self.channel.unary_unary(path_of(method), None, KMQ.response_of(method).FromString)
        return invoke(data, timeout=PATIENCE_S, metadata=self._metadata, wait_for_ready=self.waits)

    def produce(self, topic: str, *messages: Any, **more: Any) -> list[Any]:
        """The results. A message is a dict of fields, or its value."""
        shown = [each if isinstance(each, dict) else {"value": each} for each in messages]
        return list(self.call("Produce", topic=topic, messages=shown, **more).results)

    def fetch(self, topic: str, partition: int = 0, at: Any = None, **more: Any) -> Any:
        return self.call("Fetch", topic=topic, partition=partition, **{"from": at or {}}, **more)

    def subscribe(self) -> "Stream":
        return Stream(self.channel, self._metadata, self.waits)

    def member(self, group: str, *topics: str, **more: Any) -> "Stream":
        """A stream that has joined, and was told its id."""
        stream = self.subscribe()
        stream.send("join", group=group, topics=topics, **more)
        stream.id = stream.next("joined").member
        return stream


class Stream:
    """One Subscribe. It never goes on by itself: what it is asked for it answers when the test says so."""

    def __init__(self, channel: grpc.Channel, metadata: Any = (), waits: bool = True) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        invoke = channel.stream_stream(path_of("Subscribe"), None, KMQ.response_of("Subscribe").FromString)
        self._call = invoke(iter(self._requests.get, None), timeout=PATIENCE_S, metadata=metadata, wait_for_ready=waits)
        self.id = ""
        self.generation = 0
        self.assigned: dict[tuple[str, int], int] = {}  # → next offset

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Break the stream, as a client that is killed does."""
        self._call.cancel()
        self._requests.put(None)

    def end(self) -> None:
        """Say that no request comes any more."""
        self._requests.put(None)

    def send(self, kind: str, request_id: int = 0, /, **fields: Any) -> None:
        self.send_raw(KMQ.request_of("Subscribe")(request_id=request_id, **{kind: fields}).SerializeToString())

    def send_raw(self, data: bytes) -> None:
        self._requests.put(data)

    def read(self) -> Any:
        """The next response."""
        response = next(self._call)
        if response.WhichOneof("response") == "assigned":
            self.generation = response.assigned.generation
            rows = response.assigned.partitions
            self.assigned = {(row.topic, row.partition): row.next_offset for row in rows}
        return response

    def next(self, kind: str, request_id: int = 0) -> Any:
        """The next response, which must be of this kind and answer this request."""
        response = self.read()
        assert (response.WhichOneof("response"), response.request_id) == (kind, request_id), response
        return getattr(response, kind)

    def ask(self, kind: str, answer: str, /, **fields: Any) -> Any:
        """The answer to a request, behind assignments that came meanwhile."""
        self.send(kind, 7, **fields)
        while (response := self.read()).WhichOneof("response") == "assigned":
            pass
        assert (response.WhichOneof("response"), response.request_id) == (answer, 7), response
        return getattr(response, answer)

    def status(self) -> tuple[str, str, dict[str, str]]:
        """(status, details, trailing metadata) of the end; whatever comes before it is passed over."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            pass
        return status_of(self._call)


def status_of(error: Any) -> tuple[str, str, dict[str, str]]:
    """(status, details, trailing metadata) of a call that has ended."""
    return error.code().name, error.details(), dict(error.trailing_metadata() or ())


def values(batch: Any) -> list[bytes]:
    return [record.value for record in batch.records]
