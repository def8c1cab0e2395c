"""Which messages members have in hand, and which come again when a member gives them back or dies. Pure code.

    given back      a row of the store (offset_table.NackRow): how often it was delivered, and when it is due
    in hand         delivered again to a member, which has neither committed nor given it back since
    read            new messages that a member was given: all up to a position, as far as they are not committed
    apart           in hand, or read, when its reader died: it comes again as the only message that its reader has
    on the way      in an answer that is not known to have arrived, while a later answer has gone on behind it
    done            the member has committed beyond the position that came with the message, or just this one message

Invariant   A message that was given back is delivered before new ones, to one member at a time. It is done only by a
            commit that came after its delivery, so an older commit that passes it takes nothing away.
            Nothing is done by a commit of a later answer while it is on the way: then it comes again.
            Of the messages that a reader has when it dies, a delivery counts only for one that came apart and that the
            reader has not come back from. So a message that kills its reader never counts against its neighbours.
Crash       What is in hand, and what comes apart, is in memory only: after a start of the gateway rows are due again,
            and the delivery that the gateway has counted stays counted.
Memory      An entry for each message in hand, at most as many as the store has rows, and one or two for each partition.
            An offset for each message on the way: of the answers on open connections, and at most as many as the store
            has rows of those whose connection is gone (`Answers.first_kept`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kmq.gateway.groups.group import NEVER
from kmq.gateway.groups.offset_table import MAX_NACKS, NackRow, Partition


class OpenDelivery(NamedTuple):
    """Who has a message, from which committed position on it is done, and whether it is all that the member has.

    `is_shown`: the position came with the message, so a commit of just the message (offset + 1) is one of it, too.
    """

    member: str
    position: int
    is_alone: bool = False
    is_shown: bool = False


class Answer:
    """Messages that a member was sent: new ones by partition, in order, and those that came again."""

    def __init__(self, new: Mapping[Partition, list[int]], again: Iterable[tuple[Partition, int]]) -> None:
        self.new, self.again = dict(new), set(again)
        self.is_passed = False  # a later answer has gone on behind it
        self.is_lost = False  # its connection is gone, so it will never be known to have arrived
        self.rows: dict[Partition, list[int]] = {}  # what comes again, because a commit went beyond it


class Answers:
    """The answers of all members that are not known to have arrived, in order."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], list[Answer]] = {}

    def send(self, group: str, member: str, answer: Answer) -> None:
        """Note that an answer goes on behind all others of the member."""
        mine, sent = self._of.get((group, member), []), {place: set(new) for place, new in answer.new.items()}
        for each in mine:
            each.is_passed = True
            each.again -= answer.again  # what is sent again is on the way once
            for place in sent.keys() & each.new.keys():
                each.new[place] = [offset for offset in each.new[place] if offset not in sent[place]]
        if answer.new or answer.again:
            mine = [*(each for each in mine if not each.is_lost or any(each.new.values()) or each.again), answer]
            self._of[group, member] = mine

    def has(self, group: str, member: str, answer: Answer) -> bool:
        """Return False if it does not matter any more whether an answer arrives."""
        return answer in self._of.get((group, member), ())

    def end(self, group: str, member: str, answer: Answer) -> None:
        """Note that an answer has arrived, or that all of it comes again."""
        mine = [each for each in self._of.pop((group, member), []) if each is not answer]
        if mine:
            self._of[group, member] = mine

    def commit(self, group: str, member: str, place: Partition, offset: int) -> list[tuple[Answer, list[int]]]:
        """Return the new messages on the way that a commit of this next offset would go beyond, by answer."""
        found = []
        for answer in list(self._of.get((group, member), ())):
            new = answer.new.get(place)
            if new and new[0] < offset <= new[-1]:
                self.end(group, member, answer)  # who knows an offset from inside it has it
            elif new and answer.is_passed and new[0] < offset:
                found.append((answer, new))
        return found

    def is_on_the_way(self, group: str, member: str, place: Partition, offset: int) -> bool:
        """Return True if a message that came again is on the way."""
        mine = self._of.get((group, member), ())
        return any(answer.is_passed and (place, offset) in answer.again for answer in mine)

    def first_kept(self, group: str, member: str, place: Partition, committed: int, most: int) -> int | None:
        """Return where to go on in a partition if more than `most` messages are on the way: at the first of them."""
        new = [[at for at in each.new.get(place, ()) if at >= committed] for each in self._of.get((group, member), ())]
        return min(offsets[0] for offsets in new if offsets) if sum(map(len, new)) > most else None

    def release(self, group: str, member: str, keeps: Iterable[Partition] = ()) -> None:
        """Note that a member reads only `keeps` any more."""
        kept = set(keeps)
        for answer in self._of.get((group, member), ()) if kept else ():
            answer.new = {place: new for place, new in answer.new.items() if place in kept}
            answer.again = {(place, offset) for place, offset in answer.again if place in kept}
        if not kept:
            self._of.pop((group, member), None)

    def drop(self, group: str, place: Partition | None) -> None:
        """Forget what is on the way of a partition, or of all."""
        for pair in [pair for pair in self._of if pair[0] == group]:
            self.release(*pair, keeps=() if place is None else self._places(pair) - {place})

    def places(self) -> set[tuple[str, Partition]]:
        """Return the groups and partitions of which something is on the way."""
        return {(pair[0], place) for pair in self._of for place in self._places(pair)}

    def _places(self, pair: tuple[str, str]) -> set[Partition]:
        return {place for each in self._of[pair] for place in (*each.new, *(at for at, _ in each.again))}


class Deliveries:
    """The messages of all groups that members have."""

    def __init__(self) -> None:
        self.answers = Answers()
        self._open: dict[tuple[str, Partition], dict[int, OpenDelivery]] = {}
        self._read: dict[tuple[str, str], dict[Partition, int]] = {}  # group and member → the next new message of each
        # Rows that come apart, and whether their next delivery counts: it does not where the last one did without right.
        self._apart: dict[tuple[str, Partition], dict[int, bool]] = {}
        self._doubted: dict[tuple[str, Partition], int] = {}  # new messages up to here come apart
        self._alone: dict[tuple[str, str], tuple[Partition, int]] = {}  # group and member → all that it has

    # --- delivering --------------------------------------------------------------------------------------------------

    def take(self, group: str, place: Partition, offset: int, delivery: OpenDelivery) -> None:
        """Note that a message is delivered again."""
        self._open.setdefault((group, place), {})[offset] = delivery
        if delivery.is_alone:
            self._alone[group, delivery.member] = place, offset

    def give_back(self, group: str, place: Partition, offset: int) -> bool:
        """Note that nobody has a message in hand any more. Returns True if somebody had."""
        mine = self._open.get((group, place), {})
        found = mine.pop(offset, None)
        if not mine:
            self._open.pop((group, place), None)
        if found is not None and self._alone.get((group, found.member)) == (place, offset):
            del self._alone[group, found.member]
        return found is not None

    def show(self, group: str, place: Partition, offset: int, position: int) -> None:
        """Note that a message was delivered with this position: a commit of it says that the message is done."""
        if self.has(group, place, offset):
            mine = self._open[group, place]
            mine[offset] = mine[offset]._replace(position=position, is_shown=True)

    def has(self, group: str, place: Partition, offset: int) -> bool:
        """Return True if somebody has a message in hand."""
        return offset in self._open.get((group, place), ())

    def find(self, group: str, place: Partition, offset: int) -> OpenDelivery | None:
        """Return who has a message in hand."""
        return self._open.get((group, place), {}).get(offset)

    def read(self, group: str, member: str, positions: Mapping[Partition, int]) -> None:
        """Note up to where a member was given new messages."""
        if positions:
            self._read.setdefault((group, member), {}).update(positions)

    def has_nothing(self, group: str, member: str, committed: Callable[[Partition], int]) -> bool:
        """Return True if a member has committed all that it was given. `committed`: the group's offset."""
        read = self._read.get((group, member), {})
        return not self._of(group, member) and all(committed(place) >= position for place, position in read.items())

    def has_one_alone(self, group: str, member: str) -> bool:
        """Return True while a member has a message that must be all that it has."""
        return (group, member) in self._alone

    def came_back(self, group: str, member: str) -> None:
        """Note that a member asks for more, so it lives: what it had alone is one of many from now on."""
        found = self._alone.pop((group, member), None)
        if found is not None:
            mine = self._open[group, found[0]]
            mine[found[1]] = mine[found[1]]._replace(is_alone=False)

    # --- the end of a reader -----------------------------------------------------------------------------------------

    def release(self, group: str, member: str, keeps: Iterable[Partition] = ()) -> None:
        """Note that a member reads only `keeps` any more: what it had in hand of other partitions is due again."""
        kept = set(keeps)
        self.answers.release(group, member, kept)
        for place, offset in self._of(group, member):
            if place not in kept:
                self.give_back(group, place, offset)
        read = self._read.get((group, member), {})
        for place in [place for place in read if place not in kept]:
            del read[place]
        if not read:
            self._read.pop((group, member), None)

    def died(self, group: str, member: str) -> None:
        """Note that a member has died: what it had comes again, each message apart."""
        self.answers.release(group, member)
        for place, offset in self._of(group, member):
            was_alone = self._open[group, place][offset].is_alone
            self.give_back(group, place, offset)
            self._apart.setdefault((group, place), {})[offset] = was_alone
        for place, position in self._read.pop((group, member), {}).items():
            self._doubted[group, place] = max(position, self._doubted.get((group, place), 0))

    def _of(self, group: str, member: str) -> list[tuple[Partition, int]]:
        return [
            (place, offset)
            for (other, place), mine in self._open.items()
            if other == group
            for offset, delivery in mine.items()
            if delivery.member == member
        ]

    def is_apart(self, group: str, place: Partition, offset: int) -> bool:
        """Return True if a row comes apart."""
        return offset in self._apart.get((group, place), ())

    def counts(self, group: str, place: Partition, offset: int) -> bool:
        """Return True if the next delivery of a row counts."""
        return self._apart.get((group, place), {}).get(offset, True)

    def doubted(self, group: str, place: Partition) -> int:
        """Return up to which offset new messages come apart; 0: none."""
        return self._doubted.get((group, place), 0)

    def trust(self, group: str, place: Partition, offset: int | None = None) -> None:
        """Let a row come as others do; without `offset` all rows, and new messages."""
        mine = self._apart.get((group, place))
        if offset is None:
            self.trust_new(group, place)
            self._apart.pop((group, place), None)
        elif mine is not None:
            mine.pop(offset, None)
            if not mine:
                del self._apart[group, place]

    def trust_new(self, group: str, place: Partition) -> None:
        """Let new messages come as others do."""
        self._doubted.pop((group, place), None)

    def committed(self, group: str, place: Partition, offset: int) -> None:
        """Note that a group has committed this next offset: what is in front of it is not in doubt any more."""
        if self._doubted and 0 < self.doubted(group, place) <= offset:
            self.trust_new(group, place)

    def drop(self, group: str, place: Partition | None = None) -> None:
        """Forget what a group had in hand, in a partition or in all: it reads anew there, or it is gone."""
        self.answers.drop(group, place)
        for table in (self._open, self._apart, self._doubted):
            for key in [key for key in table if key[0] == group and place in (None, key[1])]:
                del table[key]
        for pair in [pair for pair, (where, _) in self._alone.items() if pair[0] == group and place in (None, where)]:
            del self._alone[pair]
        for pair in [pair for pair in self._read if pair[0] == group]:
            self.release(*pair, keeps=() if place is None else [other for other in self._read[pair] if other != place])

    def forget_topics(self, names: Iterable[str]) -> None:
        """Forget what groups had in hand of topics that were deleted, and whose names others have now."""
        gone = set(names)
        tables = self._open, self._apart, self._doubted, self.answers.places()
        for group, place in {key for table in tables for key in table if key[1][0] in gone}:
            self.drop(group, place)

    # --- what is due, and what is done -------------------------------------------------------------------------------

    def is_quiet(self, group: str) -> bool:
        """Return True if no new message of any partition of the group comes apart."""
        return not self._doubted or not any(other == group for other, _ in self._doubted)

    def due(self, group: str, place: Partition, rows: Mapping[int, NackRow], now: float) -> list[int]:
        """Return the offsets that are to be delivered again now, in order."""
        mine = self._open.get((group, place), {})
        return sorted(
            offset for offset, row in rows.items() if row.due <= now and offset not in mine and not row.letter
        )

    def next_due(self, group: str, place: Partition, rows: Mapping[int, NackRow]) -> float:
        """Return when the next message is due, by the clock of the rows; NEVER if none waits."""
        mine = self._open.get((group, place), {})
        return min((row.due for offset, row in rows.items() if offset not in mine and not row.letter), default=NEVER)

    def done_by(self, group: str, place: Partition, committed: int) -> list[int]:
        """Return the offsets in hand that a commit of this next offset says are handled."""
        return [offset for offset, is_done in self._passed_by(group, place, committed) if is_done]

    def lost_by(self, group: str, place: Partition, committed: int) -> list[int]:
        """Return the offsets in hand that a commit of this next offset goes beyond, though they are on the way."""
        return [offset for offset, is_done in self._passed_by(group, place, committed) if not is_done]

    def _passed_by(self, group: str, place: Partition, committed: int) -> list[tuple[int, bool]]:
        found = []
        for offset, delivery in self._open.get((group, place), {}).items():
            is_just_this = delivery.is_shown and committed == offset + 1
            if is_just_this or committed >= delivery.position:
                # Who read up to this message before giving it back commits the same offset as who has it again.
                found.append((offset, not self.answers.is_on_the_way(group, delivery.member, place, offset)))
        return sorted(found)


def is_paused(rows: Mapping[int, NackRow]) -> bool:
    """Return True if so many messages wait that a partition delivers no new ones."""
    return len(rows) >= MAX_NACKS


def is_spent(row: NackRow, max_deliveries: int) -> bool:
    """Return True if a message must not be delivered again. `max_deliveries`: 0 is no limit."""
    return bool(max_deliveries) and row.deliveries >= max_deliveries


def given_back(known: NackRow | None, now: float, delay_s: float, reason: str) -> NackRow:
    """Return the row of a message that a member gives back. The same request again changes nothing but the time."""
    if known is None:
        return NackRow(1, now + delay_s, reason, first=now)
    return known._replace(due=now + delay_s, reason=reason, letter="")
