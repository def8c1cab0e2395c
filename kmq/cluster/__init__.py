"""What several brokers share through Consul. docs/cluster.md has the keys and what is done with them."""

from importlib.util import find_spec


def is_installed() -> bool:
    """Return True if the extra `cluster` is installed. Imports none of its packages."""
    return find_spec("h11") is not None
