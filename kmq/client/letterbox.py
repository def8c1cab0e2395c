"""Stores dead letters (kmq/message/letters.py) for a consumer that runs a handler. Blocks until each is on disk."""

import re
from collections.abc import Callable
from hashlib import sha256

from kmq.client.consumer_options import PORT, ConsumerOptions, logger
from kmq.client.failures import Refused
from kmq.client.producer import Producer
from kmq.errors import KmqError
from kmq.message.ids import NAME_PATTERN
from kmq.message.letters import Failure, format_letter
from kmq.message.message import Message

_NAME = re.compile(NAME_PATTERN)
PLAIN_PORT, TLS_PORT = 5673, 5443  # for producers
_TLS_CONSUMERS = 5444
MakeProducer = Callable[[str], Producer]  # given its window
_HEADER_ROOM = 4096  # bytes that a line takes beside its payload, where a letter has to be cut


class Letterbox:
    """The way of one group's letters to the broker. It connects when the first letter is put in."""

    def __init__(self, group: str, make: Callable[[str], Producer]) -> None:
        """`make` returns a producer, given its window."""
        self._group, self._make = group, make
        self._producer: Producer | None = None

    def put(self, message: Message, dlq: str, failure: Failure) -> int:
        """Store a message as a dead letter of topic `dlq`, and return its seq; 0: stored before, and not known.

        Raises KmqError if that is impossible.
        """
        if self._producer is None:
            self._producer = self._make(_window(self._group))
        try:
            seq = _send(self._producer, format_letter(message, dlq, failure))
        except Refused as refused:
            if refused.code != "too_long":
                raise
            most = self._producer.connect() - _HEADER_ROOM
            seq = _send(self._producer, format_letter(message, dlq, failure, most))
        logger().warning(
            "%s/%d offset %d went to %s after %d attempts: %.200r",
            *(message.topic, message.partition, message.offset, dlq, failure.attempts, failure.error),
        )
        return seq

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()


def _send(producer: Producer, line: bytes) -> int:
    try:
        return producer.send_lines(line).result()
    except Refused as refused:
        if refused.code != "id_reused":  # else it was stored before, with an older error
            raise
        seq = re.search(r"as seq (\d+)", refused.reason)
        return int(seq[1]) if seq else 0


def report(offsets: object, error: KmqError | None) -> None:
    """Log a commit that failed."""
    if error is not None:
        logger().warning("handled, and not committed, so it comes again: %s", error)


def makes_producers(host: str, port: object, options: ConsumerOptions) -> MakeProducer | None:
    """Return what makes a producer of the broker that a consumer at this address reads.

    None at another port than the usual ones: behind the usual port for producers there may be another broker.
    """
    tls = options.tls
    usual, other = (_TLS_CONSUMERS, TLS_PORT) if tls else (PORT, PLAIN_PORT)
    if port != usual:
        return None

    def make(window: str) -> Producer:
        name = options.server_hostname
        return Producer(host, other, window=window, token=options.token, tls=tls, server_hostname=name)

    return make


def local_producer(window: str) -> Producer:
    """Return a producer of the broker of this directory's settings."""
    return Producer.local(window=window)


def _window(group: str) -> str:
    """Return the scope in which the ids of a group's letters are remembered."""
    name = f"dlq:{group}"
    return name if _NAME.fullmatch(name) else f"dlq:{sha256(group.encode()).hexdigest()[:40]}"


__all__ = ["Letterbox", "MakeProducer", "local_producer", "makes_producers", "report"]
