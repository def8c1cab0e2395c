"""Which partitions a topic has, and where they end: a consumer without a group reads them all, and `latest` is their ends.

`CONSUME <topic> from=latest` is answered by `!ok <topic>/<partition> offset=<end>` for each partition, and no record. A
damaged partition may be left out or refused; it is one nevertheless, and whoever reads it hears of the damage.
"""

import socket
import ssl
import time
from collections.abc import Iterable

from kmq.client.connection import CONNECT_S, open_socket
from kmq.client.consumer_protocol import Core
from kmq.client.failures import Refused
from kmq.config.values import KIB
from kmq.wire.replies import Failed, Started, reply
from kmq.wire.requests import EARLIEST, LATEST, BadLine, Consume, TopicPartition

DISCOVER_S = 10.0  # between two looks for new partitions
_NOT_YET = frozenset({"unknown_topic", "not_found"})


def discover(
    topics: Iterable[str], host: str, port: int, token: str, tls: ssl.SSLContext | None, server_hostname: str | None
) -> dict[TopicPartition, int | None]:
    """Return the partitions of these topics and their ends, None if damage hides one; a topic that is not there has none.

    Raises OSError, Refused.
    """
    found: dict[TopicPartition, int | None] = {}
    for topic in topics:
        with open_socket(host, port, tls, server_hostname) as sock:
            sock.sendall(Consume(topic, None, LATEST, token=token).encode())
            ends = _read(sock)
        for number in range(max((place.partition + 1 for place in ends), default=0)):
            place = TopicPartition(topic, number)
            found[place] = ends.get(place)
    return found


def _read(sock: socket.socket) -> dict[TopicPartition, int | None]:
    found: dict[TopicPartition, int | None] = {}
    unfinished, deadline = b"", time.monotonic() + CONNECT_S
    while data := sock.recv(64 * KIB):
        *whole, unfinished = (unfinished + data).split(b"\n")
        for line in whole:
            if line.startswith(b"!"):  # others are records that came while the broker answered
                _note(line, found)
        if time.monotonic() > deadline:
            raise TimeoutError("the broker has not named the partitions in time")
    return found


def _note(line: bytes, found: dict[TopicPartition, int | None]) -> None:
    """Add what a reply says. The first of a partition counts: another one follows where retention has deleted records."""
    try:
        answer = reply(line)
    except BadLine as err:
        raise Refused(f"protocol the broker's reply does not fit: {err}") from None
    if isinstance(answer, Failed) and answer.code not in (*_NOT_YET, "damaged"):
        raise Refused(f"{answer.code} {answer.text}")
    if isinstance(answer, Started):
        found.setdefault(answer.place, answer.offset)
    elif isinstance(answer, Failed) and answer.place is not None:
        found.setdefault(answer.place, None)


def take_over(core: Core, found: dict[TopicPartition, int | None]) -> bool:
    """Read these partitions too, if there is no group. Returns True if there are new ones.

    What was not there when the consumer subscribed begins at its first record, also with `latest`.
    """
    is_first = core.ends is None
    if core.ends is None:
        core.ends, core.subscribed_us = found, time.time_ns() // 1000
    if core.is_managed:
        return False
    read = {*core.holdings.owned, *core.wanted}
    topics = {place.topic for place in read}
    is_young = core.start == LATEST and not is_first
    new = [place for place in found if place not in read]
    for place in new:
        if is_young or place.topic in topics:
            core.wanted[place] = EARLIEST
        else:
            core.wanted[place] = core.start if found[place] is not None else core.start_of(place)
    return bool(new)


__all__ = ["DISCOVER_S", "discover", "take_over"]
