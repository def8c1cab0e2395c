"""Events that strangers cause, for the log: per event and sweep at most one short line, with count and last case.

Memory      One case per event, and the events are names in our source; peer and reason are cut at _LONGEST characters.
"""

from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kmq.broker.stats import Row

_LONGEST = 200


class Incidents:
    """Events since the last sweep. A stranger must not be able to fill the log."""

    def __init__(self, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._noted: dict[str, tuple[int, str, str]] = {}  # event → how often; last peer and reason

    def note(self, event: str, peer: str, reason: str) -> None:
        """Count an event, and keep this case for its log line."""
        count = self._noted[event][0] if event in self._noted else 0
        self._noted[event] = (count + 1, peer[:_LONGEST], reason[:_LONGEST])

    def say(self) -> None:
        """Write the log lines. Call once a sweep."""
        for event, (count, peer, reason) in self._noted.items():
            self._warn(event, count=count, peer=peer, reason=reason)
        self._noted.clear()


class Strangers:
    """Counts the peers that a listener does not serve in its row of the stats page, and notes them for the log."""

    def __init__(self, row: "Row", incidents: Incidents) -> None:
        self._row, self.note = row, incidents.note

    def turn_away(self, peer: str, reason: str) -> None:
        """Note that a peer was refused because too many are connected."""
        self._row.turned_away += 1
        self.note("turned_away", peer, reason)

    def cut_off(self, peer: str, reason: str) -> None:
        """Note that a peer's connection was ended, because it missed a deadline or does not read its responses."""
        self._row.cut_off += 1
        self.note("cut_off", peer, reason)

    def refuse(self, peer: str, reason: str, without: str = "") -> None:
        """Note that a peer has no valid token. `without`: "token" if it showed none, "local" if it lacks the local one."""
        self._row.unauthorized += 1
        if without == "token":
            self._row.auth_missing += 1
        elif without == "local":
            self._row.auth_local += 1
        self.note("unauthorized", peer, reason)
