"""A network for several pods, in which names of Services lead to them."""

import contextlib
import ipaddress
from typing import NamedTuple

from play.engine import PlayError, podman
from play.manifest import Document

_FIRST = 10  # the first address that a pod gets; podman has the lowest ones


class Network:
    """A network of podman. Its pods keep their addresses, so a name leads to the same address even while its pod is
    down.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._subnet = ipaddress.ip_network("0.0.0.0/0")  # until the network exists

    def create(self) -> None:
        podman("network", "create", "--disable-dns", self.name)
        found = podman("network", "inspect", "-f", "{{(index .Subnets 0).Subnet}}", self.name)
        self._subnet = ipaddress.ip_network(found.strip())

    def remove(self) -> None:
        """Remove the network if it exists; its pods have been removed before."""
        with contextlib.suppress(PlayError):
            podman("network", "rm", "-f", "-t", "0", self.name)

    def address(self, number: int) -> str:
        """Return the address of the pod with this number."""
        return str(self._subnet[_FIRST + number])


class Place(NamedTuple):
    """The place of a pod: its number in a network, and the numbers of the pods behind each name."""

    network: Network
    number: int
    names: dict[str, list[int]]

    @property
    def option(self) -> str:
        # Fix the hardware address too: neighbours remember it for half a minute, and would not find a pod with a new
        # one.
        mac = f"02:00:00:00:00:{_FIRST + self.number:02x}"
        return f"{self.network.name}:ip={self.network.address(self.number)},mac={mac}"

    @property
    def hosts(self) -> list[Document]:
        """The names as `hostAliases`, which podman writes to /etc/hosts."""
        pairs = [(self.network.address(number), name) for name, numbers in self.names.items() for number in numbers]
        return [{"ip": ip, "hostnames": [name]} for ip, name in pairs]
