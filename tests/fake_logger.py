"""A logger that writes nothing and remembers what it was told."""


class FakeLogger:
    stage = "test"

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **fields: object) -> None:
        self.events.append((event, fields))

    warn = error = info

    @property
    def names(self) -> list[str]:
        return [event for event, _ in self.events]

    def of(self, event: str) -> list[dict[str, object]]:
        """Return the fields of each event with this name."""
        return [fields for name, fields in self.events if name == event]
