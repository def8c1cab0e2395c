"""A logger that writes nothing and remembers what it was told."""

from kmq.logfmt import Logger


class FakeLogger(Logger):
    def __init__(self) -> None:
        super().__init__("test")
        self.events: list[tuple[str, dict[str, object]]] = []

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        self.events.append((event, fields))

    @property
    def names(self) -> list[str]:
        return [event for event, _ in self.events]

    def of(self, event: str) -> list[dict[str, object]]:
        """Return the fields of each event with this name."""
        return [fields for name, fields in self.events if name == event]
