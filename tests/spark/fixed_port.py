"""A broker whose line protocol stays at one address over restarts, as a writer that is told `host:port` needs it."""

from typing import Any

from brokers import Broker
from consuls import free_ports


def up(broker: Broker, **settings: Any) -> str:
    """Start `broker`, and return its address; the same one each time."""
    if broker.env["KMQ_PORT"] == "0":
        broker.env["KMQ_PORT"] = str(free_ports(1)[0])
    broker.up(**settings)
    return address(broker)


def address(broker: Broker) -> str:
    return f"127.0.0.1:{broker.env['KMQ_PORT']}"


def messages(broker: Broker, topic: str) -> list[tuple[str, bytes]]:
    """(id, payload) of each stored line of `topic`; id without headers but with the producer: `name/number`."""
    found = []
    for line in broker.lines(topic):
        *_, id, payload = line.split(b"|", 5)
        number, _, owner = id.partition(b";p=")
        found.append((f"{owner.split(b';')[0].decode()}/{number.decode()}", payload))
    return found


def payloads(broker: Broker, topic: str) -> list[bytes]:
    return [payload for _, payload in messages(broker, topic)]


def routed(broker: Broker, count: int) -> None:
    """Wait until `count` messages, and no more, are in their topics."""
    broker.wait_routed(count)
    framer = broker.status()["framer"]
    assert int(framer["seq"]) == count, (framer, broker.wal()[-3:], broker.log()[-2000:])
