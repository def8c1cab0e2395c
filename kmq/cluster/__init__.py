"""Parts that several brokers share through Consul. docs/broadcast-queue.md describes the keys and their use."""

from importlib.util import find_spec


def is_installed() -> bool:
    """Return True if the extra `cluster` is installed. Imports none of its packages."""
    return find_spec("h11") is not None
