"""Compaction of a data directory without a broker: what its compactor and its router do."""

from typing import Any

from fake_logger import FakeLogger

from kmq.gateway.core.compactor import Compactor, Throttle
from kmq.log import compaction


def lay_out(data: str, min_dirty: float = 0.01, log: Any = None) -> int:
    """Lay out every segment of which so much can go, and return how many these are."""
    compactor = Compactor(data, log or FakeLogger(), Throttle(0, cpu_share=1000), install_s=0)
    return compactor.run(min_dirty=min_dirty, now=True)


def install(data: str) -> None:
    """Install what is laid out, as the router does."""
    for which in compaction.waiting(data):
        compaction.install(data, which)


def compact(data: str, min_dirty: float = 0.01) -> int:
    """Compact all topics with cleanup=compact; return how many segments are new."""
    count = lay_out(data, min_dirty)
    install(data)
    return count
