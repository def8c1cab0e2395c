"""What strangers do, for the log: one short line an event and sweep, with how often it happened and the last case.

Bound       An event is a name of ours, so there are few; a peer and a reason are cut at _LONGEST characters.
"""

from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kmq.broker.stats import Row

_LONGEST = 200


class Incidents:
    """Events since the last sweep. Strangers must not fill the log with a line for each thing they do."""

    def __init__(self, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._noted: dict[str, tuple[int, str, str]] = {}  # event → how often; last peer and reason

    def note(self, event: str, peer: str, reason: str) -> None:
        """Count it, and keep this case for the line."""
        count = self._noted[event][0] if event in self._noted else 0
        self._noted[event] = (count + 1, peer[:_LONGEST], reason[:_LONGEST])

    def say(self) -> None:
        """Write the lines. Call once a sweep."""
        for event, (count, peer, reason) in self._noted.items():
            self._warn(event, count=count, peer=peer, reason=reason)
        self._noted.clear()


class Strangers:
    """What a listener does with whom it does not serve: counted in its row of the stats page, and noted for the log."""

    def __init__(self, row: "Row", incidents: Incidents) -> None:
        self._row, self.note = row, incidents.note

    def turn_away(self, peer: str, reason: str) -> None:
        """Too many are here."""
        self._row.turned_away += 1
        self.note("turned_away", peer, reason)

    def cut_off(self, peer: str, reason: str) -> None:
        """It has kept us waiting too long, or does not read what it has asked for."""
        self._row.cut_off += 1
        self.note("cut_off", peer, reason)

    def refuse(self, peer: str, reason: str) -> None:
        """It has no valid token."""
        self._row.unauthorized += 1
        self.note("unauthorized", peer, reason)
