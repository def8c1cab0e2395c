"""Count damage on the stats page, so that status, /readyz and metrics warn: found by readers or by `kmq verify`."""

import contextlib

from kmq.broker.stats import Row, peek
from kmq.config.settings import Settings
from kmq.log.damage import DamageError

_MOST = 1000  # places remembered; with more the count is too low, and the warning stays


class Damaged:
    """Counts each damaged place that a process meets once, however often it is read."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._places: set[tuple[str, int]] = set()

    def note(self, err: DamageError) -> bool:
        """Count the place once; after a check without damage, once more. Return True if it is counted now."""
        if not self._row.damage:
            self._places.clear()
        place = err.path, err.byte
        is_new = place not in self._places and len(self._places) < _MOST
        if is_new:
            self._places.add(place)
            self._row.found_damage()
        return is_new


def report(settings: Settings, count: int, is_complete: bool) -> None:
    """Count damage in the gateway's row; forget all damage after a complete check that found none."""
    page = None
    with contextlib.suppress(PermissionError):  # a user who may read the files need not be the broker's user
        page = peek(settings.instance)
    if page is None or not page.serves(settings.data):
        return  # no broker has run here since the machine was started
    if count:
        page.rows["gateway"].found_damage(count)
    elif is_complete:
        for row in page.rows.values():
            row.damage = row.damage_at = 0
