"""KMQ_INTAKES: ports on which each raw line becomes a message of one topic.

    5140=app 5141=audit:json 5142/udp=net 6514/tls=audit

Blanks or commas separate entries. A port without a kind takes lines over TCP, `/tls` over TLS, `/udp` datagrams.
`:json` takes lines that are one JSON value each.
The ports themselves are opened by ingress (kmq/ingress/ports.py).
"""

import re
from collections import namedtuple

TYPE_CHECKING = False  # stages do not import typing, because that takes longer than the rest of this module
if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    Network = IPv4Network | IPv6Network

MOST = 16  # the stats page has counters for so many
TCP, TLS, UDP = "tcp", "tls", "udp"
_ENTRY = r"(\d{1,5})(?:/(tcp|tls|udp))?=([^:]*)(?::(.*))?"


class IntakePort(namedtuple("IntakePort", ("number", "kind", "topic", "is_json"), defaults=(False,))):
    """One entry. `is_json`: a line that is not a JSON value becomes a dead letter."""

    __slots__ = ()
    number: int
    kind: str
    topic: str
    is_json: bool

    def __str__(self) -> str:
        kind = "" if self.kind == TCP else f"/{self.kind}"
        return f"{self.number}{kind}={self.topic}{':json' * self.is_json}"


def parse_intakes(text: str) -> tuple[IntakePort, ...]:
    """Return the entries of KMQ_INTAKES. Raises ValueError that names the entry: by its number if it could be a secret."""
    found = tuple(_entry(part, at) for at, part in enumerate(re.split(r"[\s,]+", text.strip(" ,")), start=1))
    if len(found) > MOST:
        raise ValueError(f"{len(found)} intakes: must be at most {MOST}")
    return found


def _entry(text: str, at: int) -> IntakePort:
    from kmq.message import record  # only where there are intakes

    match = re.fullmatch(_ENTRY, text)
    if not match or int(match[1]) > 65535:
        raise ValueError(f"entry {at}: expected <port>[/tls|/udp]=<topic>[:json], with a port between 0 and 65535")
    number, kind, topic, form = match.groups()
    if form not in (None, "json"):
        raise ValueError(f"{text!r}: :{form} is not known; write :json, or without it take lines of every kind")
    if not record.is_topic(topic):
        reason = "is reserved" if record.is_topic_name(topic) else "is no topic name"
        raise ValueError(f"{text!r}: {topic!r} {reason}; name another topic")
    return IntakePort(int(number), kind or TCP, topic, form == "json")


def parse_sources(text: str) -> "tuple[Network, ...]":
    """Return the networks of KMQ_INTAKES_FROM. Raises ValueError that names the entry by its number."""
    import ipaddress  # only where there are sources

    found: list[Network] = []
    for at, part in enumerate(re.split(r"[\s,]+", text.strip(" ,")), start=1):
        try:
            found.append(ipaddress.ip_network(part))
        except ValueError:
            raise ValueError(f"entry {at}: expected an address or a network, like 10.0.0.7 or 10.1.0.0/16") from None
    return tuple(found)


def is_among(networks: "tuple[Network, ...]", address: str) -> bool:
    """Return True if one of the networks holds the address of a peer."""
    import ipaddress

    found = ipaddress.ip_address(address)
    found = getattr(found, "ipv4_mapped", None) or found  # an IPv4 peer of a port on `::`
    return any(found in network for network in networks)
