"""What waits in the links between the stages, and how full they are. Only reads."""

import os

from kmq.config.settings import Settings
from kmq.links import fifo, layout, received


class Link:
    """One link at one moment. `messages`: None where a link does not count them; `fill`: 0 to 1."""

    __slots__ = ("bytes", "capacity", "fill", "messages", "name")

    def __init__(
        self, name: str, nbytes: int, capacity: int, messages: int | None = None, slots: int = 0, is_full: bool = False
    ) -> None:
        self.name, self.bytes, self.capacity, self.messages = name, nbytes, capacity, messages
        by_bytes = nbytes / capacity if capacity else 0.0
        by_count = messages / slots if messages and slots else 0.0
        # A ring is full when either limit is reached, or when the next block is too large for what is left.
        self.fill = 1.0 if is_full else round(min(1.0, max(by_bytes, by_count)), 4)

    def fields(self) -> dict[str, object]:
        """Return what JSON shows."""
        return {name: getattr(self, name) for name in ("name", "bytes", "capacity", "messages", "fill")}


def look(settings: Settings) -> list[Link]:
    """Return all links, in the order in which a message passes them; none if there is no FIFO."""
    try:
        raw = os.open(f"{settings.pipes}/raw", os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return []
    try:
        links = [Link("raw", fifo.waiting_bytes(raw), fifo.capacity(raw))]
    finally:
        os.close(raw)
    bytes_only = layout.filling(settings.instance, received.NAME)
    links.append(Link(received.NAME, bytes_only.nbytes, bytes_only.capacity, is_full=bytes_only.is_full))
    return links + [Link(name, *layout.filling(settings.instance, name)) for name in layout.RINGS]
