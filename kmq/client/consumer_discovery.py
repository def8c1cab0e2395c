"""Which partitions a topic has, asked of the consumer port: a consumer without a group reads them all.

`CONSUME <topic> from=latest` is answered by `!ok <topic>/<partition> offset=<end>` for each partition, and no record. A
damaged partition may be left out or refused; it is one nevertheless, and whoever reads it hears of the damage.
"""

import socket
import ssl
import time
from collections.abc import Iterable

from kmq.client.connection import CONNECT_S, open_socket
from kmq.client.consumer_protocol import Core
from kmq.client.egress_lines import EARLIEST, LATEST, BadLine, Consume, TopicPartition
from kmq.client.egress_replies import Failed, Started, reply
from kmq.client.failures import Refused
from kmq.settings import KIB

DISCOVER_S = 30.0  # between two looks for new partitions
_NOT_YET = frozenset({"unknown_topic", "not_found"})


def discover(
    topics: Iterable[str], host: str, port: int, token: str, tls: ssl.SSLContext | None, server_hostname: str | None
) -> list[TopicPartition]:
    """Return the partitions of these topics; a topic that is not there yet has none. Raises OSError, Refused."""
    found: list[TopicPartition] = []
    for topic in topics:
        with open_socket(host, port, tls, server_hostname) as sock:
            sock.sendall(Consume(topic, None, LATEST, token=token).encode())
            count = max((place.partition + 1 for place in _read(sock)), default=0)
            found += [TopicPartition(topic, number) for number in range(count)]
    return found


def _read(sock: socket.socket) -> list[TopicPartition]:
    found: list[TopicPartition] = []
    unfinished, deadline = b"", time.monotonic() + CONNECT_S
    while data := sock.recv(64 * KIB):
        *whole, unfinished = (unfinished + data).split(b"\n")
        for line in whole:
            if line.startswith(b"!"):  # others are records that came while the broker answered
                found += _place(line)
        if time.monotonic() > deadline:
            raise TimeoutError("the broker has not named the partitions in time")
    return found


def _place(line: bytes) -> list[TopicPartition]:
    try:
        answer = reply(line)
    except BadLine as err:
        raise Refused(f"protocol the broker's reply does not fit: {err}") from None
    if isinstance(answer, Failed) and answer.code not in (*_NOT_YET, "damaged"):
        raise Refused(f"{answer.code} {answer.text}")
    return [answer.place] if isinstance(answer, Started | Failed) and answer.place is not None else []


def add_partitions(core: Core, found: Iterable[TopicPartition]) -> bool:
    """Read these partitions too. Returns True if there are new ones; in a topic that is read already they begin at 0."""
    read = {*core.holdings.owned, *core.wanted}
    topics = {place.topic for place in read}
    new = {place: EARLIEST if place.topic in topics else core.start for place in found if place not in read}
    core.wanted.update(new)
    return bool(new)


__all__ = ["DISCOVER_S", "add_partitions", "discover"]
