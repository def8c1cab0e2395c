"""Messages that members gave back (nack): which are due, who has one in hand again, and when one is done. Pure code.

    given back      a row of the store (offset_records.Nack): how often it was delivered, and when it is due
    in hand         delivered again to a member, which has neither committed nor given it back since
    done            the member has committed the position that came with the message, or just this one message

Invariant   A message that was given back is delivered before new ones, to one member at a time. It is done only by a
            commit that came after its delivery, so an older commit that passes it takes nothing away.
Crash       What is in hand is in memory only: after a start of the gateway it is due again.
Memory      An entry for each message in hand, at most as many as the store has rows.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kmq.gateway.groups.offset_records import Nack
from kmq.gateway.groups.offset_table import MAX_NACKS

Partition = tuple[str, int]
NEVER = float("inf")


class Hand(NamedTuple):
    """Who has a message, and the position that came with it: the partition's next new message."""

    member: str
    position: int


class InHand:
    """The messages of all groups that were delivered again."""

    def __init__(self) -> None:
        self._hands: dict[tuple[str, Partition], dict[int, Hand]] = {}

    def take(self, group: str, place: Partition, offset: int, hand: Hand) -> None:
        """Note that a message is delivered again."""
        self._hands.setdefault((group, place), {})[offset] = hand

    def give_back(self, group: str, place: Partition, offset: int) -> bool:
        """Note that nobody has a message in hand any more. Returns True if somebody had."""
        mine = self._hands.get((group, place), {})
        found = mine.pop(offset, None)
        if not mine:
            self._hands.pop((group, place), None)
        return found is not None

    def release(self, group: str, member: str, keeps: Iterable[Partition] = ()) -> None:
        """Note that a member reads only `keeps` any more: what it had in hand of other partitions is due again."""
        kept = set(keeps)
        for other, place in [key for key in self._hands if key[0] == group and key[1] not in kept]:
            for offset, hand in list(self._hands[other, place].items()):
                if hand.member == member:
                    self.give_back(group, place, offset)

    def due(self, group: str, place: Partition, rows: Mapping[int, Nack], now: float) -> list[int]:
        """Return the offsets that are to be delivered again now, in order."""
        mine = self._hands.get((group, place), {})
        return sorted(offset for offset, row in rows.items() if row.due <= now and offset not in mine)

    def next_due(self, group: str, place: Partition, rows: Mapping[int, Nack]) -> float:
        """Return when the next message is due, by the clock of the rows; NEVER if none waits."""
        mine = self._hands.get((group, place), {})
        return min((row.due for offset, row in rows.items() if offset not in mine), default=NEVER)

    def done_by(self, group: str, place: Partition, committed: int) -> list[int]:
        """Return the offsets in hand that a commit of this next offset says are handled."""
        mine = self._hands.get((group, place), {})
        return sorted(offset for offset, hand in mine.items() if committed >= hand.position or committed == offset + 1)

    def is_of_one(self, group: str, place: Partition, committed: int, before: int) -> bool:
        """Return True if a commit concerns just one message in hand, behind which the group is already (`before`)."""
        return committed < before and committed - 1 in self._hands.get((group, place), {})


def is_paused(rows: Mapping[int, Nack]) -> bool:
    """Return True if so many messages wait that a partition delivers no new ones."""
    return len(rows) >= MAX_NACKS


def is_spent(row: Nack, max_deliveries: int) -> bool:
    """Return True if a message must not be delivered again. `max_deliveries`: 0 is no limit."""
    return bool(max_deliveries) and row.deliveries >= max_deliveries


def given_back(known: Nack | None, now: float, delay_s: float, reason: str) -> Nack:
    """Return the row of a message that a member gives back. The same request again changes nothing but the time."""
    if known is None:
        return Nack(1, now + delay_s, reason, first=now)
    return known._replace(due=now + delay_s, reason=reason)
