"""The rows of all groups in memory: what each committed, and which messages it gave back.

Invariant   Of two rows for one place the one with the higher seq stays, in whatever order they arrive.
Cost        What any group has committed in a partition is known without a look at each group (`furthest`).
Memory      At most MAX_GROUPS groups and MAX_BYTES of rows (ROW_BYTES each, and its texts), MAX_NACKS messages given
            back in a partition; then `offsets_full`. Rows that were stored already are always taken in.
"""

from collections.abc import Mapping

from kmq.config.values import MIB
from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.groups.offset_records import Committed, Nack, Place, Row

MAX_GROUPS = 20_000
MAX_BYTES = 64 * MIB
ROW_BYTES = 450  # of memory that a row takes beside its texts
MAX_NACKS = 1000

Partition = tuple[str, int]  # topic, partition


class _Group:
    """The rows of a group."""

    __slots__ = ("commits", "nacks")

    def __init__(self) -> None:
        self.commits: dict[Partition, Committed] = {}
        self.nacks: dict[Partition, dict[int, Nack]] = {}

    def __bool__(self) -> bool:
        return bool(self.commits or self.nacks)


class OffsetTable:
    """The rows, by group and place."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._furthest: dict[Partition, tuple[int, str]] = {}  # partitions that were asked for → offset, whose it is
        self._bytes = 0

    def clear(self) -> None:
        self._groups.clear()
        self._furthest.clear()
        self._bytes = 0

    @property
    def groups(self) -> list[str]:
        """Return the names of the groups that have a row, in order."""
        return sorted(self._groups)

    @property
    def rows(self) -> int:
        """Return how many rows all groups have."""
        nacks = sum(len(given) for group in self._groups.values() for given in group.nacks.values())
        return nacks + sum(len(group.commits) for group in self._groups.values())

    def commits_of(self, group: str) -> Mapping[Partition, Committed]:
        found = self._groups.get(group)
        return found.commits if found else {}

    def nacks_of(self, group: str, at: Partition) -> Mapping[int, Nack]:
        found = self._groups.get(group)
        return found.nacks.get(at, {}) if found else {}

    def has_nacks(self, group: str) -> bool:
        """Return True if a group has messages to deliver again, or that were put aside."""
        found = self._groups.get(group)
        return bool(found and found.nacks)

    def has_handled(self, group: str, at: Partition, offset: int) -> bool:
        """Return True if a group has committed past a message, and does not keep it to be delivered again."""
        found = self._groups.get(group)
        if found is None or at not in found.commits or found.commits[at].offset <= offset:
            return False
        row = found.nacks.get(at, {}).get(offset)
        return row is None or bool(row.letter)

    def is_handled(self, at: Partition, offset: int) -> bool:
        """Return True if any group has handled a message."""
        if self.furthest(at) <= offset:
            return False
        return self.has_handled(self._furthest[at][1], at, offset) or any(
            self.has_handled(group, at, offset) for group in self._groups
        )

    def furthest(self, at: Partition) -> int:
        """Return the highest offset that any group has committed in a partition; 0: none has."""
        found = self._furthest.get(at)
        if found is None:  # a look at every group: again only when the group that was furthest has gone back
            rows = ((group.commits[at].offset, name) for name, group in self._groups.items() if at in group.commits)
            found = self._furthest[at] = max(rows, default=(0, ""))
        return found[0]

    def _moved(self, group: str, at: Partition, offset: int) -> None:
        """Note that a group has committed this offset, or 0: none any more."""
        found = self._furthest.get(at)
        if found is None:
            return
        if offset >= found[0]:
            self._furthest[at] = offset, group
        elif found[1] == group:
            del self._furthest[at]

    def rows_of(self, group: str) -> list[tuple[Place, Row]]:
        """Return all rows of a group."""
        found = self._groups.get(group)
        if found is None:
            return []
        rows: list[tuple[Place, Row]] = [(Place(group, *at), row) for at, row in found.commits.items()]
        rows += [(Place(group, *at, offset), row) for at, given in found.nacks.items() for offset, row in given.items()]
        return rows

    def row_at(self, place: Place) -> Row | None:
        group = self._groups.get(place.group)
        if group is None:
            return None
        at = place.topic, place.partition
        return group.commits.get(at) if place.offset is None else group.nacks.get(at, {}).get(place.offset)

    def put(self, place: Place, row: Row) -> None:
        """Take in a row, unless a newer one is known."""
        before = self.row_at(place)
        if before is not None and before.seq > row.seq:
            return
        group = self._groups.setdefault(place.group, _Group())
        at = place.topic, place.partition
        if isinstance(row, Committed):
            group.commits[at] = row
            self._moved(place.group, at, row.offset)
        elif place.offset is not None:
            group.nacks.setdefault(at, {})[place.offset] = row
        self._bytes += _weight(place, row) - (_weight(place, before) if before else 0)

    def drop(self, place: Place, seq: int) -> None:
        """Forget a row because of the tombstone `seq`, unless the row is newer."""
        group, before, at = self._groups.get(place.group), self.row_at(place), (place.topic, place.partition)
        if group is None or before is None or before.seq > seq:
            return
        self._bytes -= _weight(place, before)
        if place.offset is None:
            del group.commits[at]
            self._moved(place.group, at, 0)
        else:
            del group.nacks[at][place.offset]
            if not group.nacks[at]:
                del group.nacks[at]
        if not group:
            del self._groups[place.group]

    def check_room(self, group: str, rows: Mapping[Place, Row]) -> None:
        """Raise RequestRefused (offsets_full) if these rows must not be written."""
        if group not in self._groups and len(self._groups) >= MAX_GROUPS:
            raise RequestRefused("offsets_full", f"{MAX_GROUPS:,} groups have committed offsets; delete some")
        new = {place: row for place, row in rows.items() if self.row_at(place) is None}
        if self._bytes + sum(_weight(place, row) for place, row in new.items()) > MAX_BYTES:
            raise RequestRefused("offsets_full", f"committed offsets take {MAX_BYTES // MIB} MiB; delete some groups")
        for place in new:
            at = place.topic, place.partition
            if place.offset is not None and len(self.nacks_of(group, at)) >= MAX_NACKS:
                waiting = f"{MAX_NACKS:,} messages of {place.topic}/{place.partition} wait to be delivered again"
                raise RequestRefused("offsets_full", f"{waiting}; commit or dead-letter some")


def _weight(place: Place, row: Row) -> int:
    texts = row.metadata + row.member if isinstance(row, Committed) else row.reason
    return ROW_BYTES + len(place.group) + len(place.topic) + len(texts)
