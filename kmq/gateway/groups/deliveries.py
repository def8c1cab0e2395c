"""Deliveries that are not committed yet: which messages each member has, and which must be delivered again. Pure code.

Example: a member gives back offset 7 of orders/0. `due` returns [7] once its row is due, `open` notes who has it, and
after a commit of offset 8 by that member `done_by` returns [7].

A message that was shown to a group is in one of these states, for each group:

    state        begins when                                 a commit past it      its reader dies
    read         a member is given it, as a new message      done                  in doubt, if the program got it; or new
    given back   its reader gives it back (NackRow)          stays given back      stays given back
    in hand      it is due, and delivered again              done                  single
    on the way   the next answer is sent, and nobody knows   given back            as it was before
                 whether the one with this message arrived
    in doubt     its reader died (see Parts)                 done                  in doubt, in smaller parts
    single       its reader died with it in hand             as in hand            single, and this delivery counts

    done         the member committed the position that came with the message, or just this message (offset + 1)
    overtaken    deleted by retention or truncation before the group had read it; each offset is counted once

Parts       Messages in doubt are those that a dead reader's program had, as far as its client reports that. They are
            delivered again in a part of such messages, and the part is all that its reader has. If that reader dies,
            its part is divided by _PARTS, until each message is delivered singly: as the only message that its reader
            has. So a message that kills its reader is found in a few deaths, and what a killed client had buffered is
            not read one by one.
Invariant   A message that was given back is delivered before new ones, to one member at a time. Only a commit that came
            after its delivery makes it done, so an older commit of a higher offset does not remove it.
            A commit of a later answer never makes a message done that is on the way: it is delivered again.
            When a reader dies, only the delivery of a single message counts, and only if the reader has not polled
            since. So a message that kills its reader never counts against its neighbours.
Crash       Which messages are in hand or single is known in memory only. After a start of the gateway their rows are due
            again, and deliveries that were counted stay counted.
Memory      An entry for each message in hand (at most the rows of the store), and a few for each partition.
            An offset for each message on the way in answers of open connections. Of closed connections at most as many
            as the store has rows (`Answers.first_on_the_way`).
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kmq.gateway.groups.group import NEVER
from kmq.gateway.groups.offset_table import MAX_NACKS, CommittedOffset, NackRow, Partition

_PARTS = 16  # 20,000 messages are delivered in 16 parts; a killer is alone after four deaths


class OpenDelivery(NamedTuple):
    """Which member has a message, the committed position that makes it done, and whether the member has nothing else.

    `is_shown`: the client got the position with the message, so a commit of offset + 1 makes this message done, too.
    """

    member: str
    position: int
    is_alone: bool = False
    is_shown: bool = False


class Doubt(NamedTuple):
    """New messages up to offset `end` are delivered in parts of at most `most` messages; 1: each singly."""

    end: int
    most: int


class Answer:
    """One answer to a member: its new messages by partition, in order, and the redelivered ones."""

    def __init__(self, new: Mapping[Partition, list[int]], again: Iterable[tuple[Partition, int]]) -> None:
        self.new, self.again = dict(new), set(again)
        self.is_passed = False  # a later answer was sent after it
        self.is_lost = False  # its connection is gone, so it will never be known to have arrived
        self.rows: dict[Partition, list[int]] = {}  # delivered again, because a later answer's commit passed them


class Answers:
    """The answers of all members that are not known to have arrived, in order."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], list[Answer]] = {}

    def send(self, group: str, member: str, answer: Answer) -> None:
        """Note that an answer is sent to the member after all others."""
        mine, sent = self._of.get((group, member), []), {place: set(new) for place, new in answer.new.items()}
        for each in mine:
            each.is_passed = True
            each.again -= answer.again  # a message that is sent again is on the way only once
            for place in sent.keys() & each.new.keys():
                each.new[place] = [offset for offset in each.new[place] if offset not in sent[place]]
        if answer.new or answer.again:
            mine = [*(each for each in mine if not each.is_lost or any(each.new.values()) or each.again), answer]
            self._of[group, member] = mine

    def has(self, group: str, member: str, answer: Answer) -> bool:
        """Return False if it no longer matters whether an answer arrives."""
        return answer in self._of.get((group, member), ())

    def end(self, group: str, member: str, answer: Answer) -> None:
        """Note that an answer has arrived, or that all its messages will be delivered again."""
        mine = [each for each in self._of.pop((group, member), []) if each is not answer]
        if mine:
            self._of[group, member] = mine

    def commit(self, group: str, member: str, place: Partition, offset: int) -> list[tuple[Answer, list[int]]]:
        """Return, by answer, the new messages on the way that a commit of this next offset would pass."""
        found = []
        for answer in list(self._of.get((group, member), ())):
            new = answer.new.get(place)
            if new and new[0] < offset <= new[-1]:
                self.end(group, member, answer)  # a client that commits an offset inside the answer has received it
            elif new and answer.is_passed and new[0] < offset:
                found.append((answer, new))
        return found

    def is_on_the_way(self, group: str, member: str, place: Partition, offset: int) -> bool:
        """Return True if this redelivered message is on the way."""
        mine = self._of.get((group, member), ())
        return any(answer.is_passed and (place, offset) in answer.again for answer in mine)

    def first_on_the_way(self, group: str, member: str, place: Partition, committed: int, most: int) -> int | None:
        """Return the first offset on the way in a partition, to resume there; None if at most `most` are."""
        new = [[at for at in each.new.get(place, ()) if at >= committed] for each in self._of.get((group, member), ())]
        return min(offsets[0] for offsets in new if offsets) if sum(map(len, new)) > most else None

    def release(self, group: str, member: str, keeps: Iterable[Partition] = ()) -> None:
        """Note that a member now reads only `keeps`."""
        remaining = set(keeps)
        for answer in self._of.get((group, member), ()) if remaining else ():
            answer.new = {place: new for place, new in answer.new.items() if place in remaining}
            answer.again = {(place, offset) for place, offset in answer.again if place in remaining}
        if not remaining:
            self._of.pop((group, member), None)

    def drop(self, group: str, place: Partition | None) -> None:
        """Forget the messages on the way, of one partition or of all."""
        for pair in [pair for pair in self._of if pair[0] == group]:
            self.release(*pair, keeps=() if place is None else self._places(pair) - {place})

    def places(self) -> set[tuple[str, Partition]]:
        """Return the groups and partitions that have messages on the way."""
        return {(pair[0], place) for pair in self._of for place in self._places(pair)}

    def _places(self, pair: tuple[str, str]) -> set[Partition]:
        return {place for each in self._of[pair] for place in (*each.new, *(at for at, _ in each.again))}


class Deliveries:
    """The messages that members of all groups have, until they are committed or given back."""

    def __init__(self) -> None:
        self.answers = Answers()
        self._open: dict[tuple[str, Partition], dict[int, OpenDelivery]] = {}
        self._read: dict[tuple[str, str], dict[Partition, int]] = {}  # group and member → the next new message of each
        # Rows to deliver singly → whether the next delivery counts: not if the last was counted, but was not single.
        self._single: dict[tuple[str, Partition], dict[int, bool]] = {}
        self._in_doubt: dict[tuple[str, Partition], list[Doubt]] = {}  # in order, the smallest parts first
        # Group and member → by partition, the next offset that its program was not given. Of clients that report it.
        self._handed_out: dict[tuple[str, str], dict[Partition, int]] = {}
        self.deaths: dict[str, list[float]] = {}  # group → since its last commit, when members with messages died
        self.refused: set[tuple[str, Partition, int]] = set()  # messages whose dead letters are refused for good
        self._began: dict[tuple[str, Partition], int] = {}  # of groups without a commit: offset of their first message
        self._alone: dict[tuple[str, str], tuple[Partition, int]] = {}  # group and member → its only message
        # How many messages were deleted before the group read them, and the offset up to which they are counted.
        self._overtaken: dict[tuple[str, Partition], tuple[int, int]] = {}

    # --- delivering --------------------------------------------------------------------------------------------------

    def open(self, group: str, place: Partition, offset: int, delivery: OpenDelivery) -> None:
        """Note that a message is delivered again, and to whom."""
        self._open.setdefault((group, place), {})[offset] = delivery
        if delivery.is_alone:
            self._alone[group, delivery.member] = place, offset

    def give_back(self, group: str, place: Partition, offset: int) -> bool:
        """Note that no member has a message in hand any more. Returns True if one had."""
        mine = self._open.get((group, place), {})
        found = mine.pop(offset, None)
        if not mine:
            self._open.pop((group, place), None)
        if found is not None and self._alone.get((group, found.member)) == (place, offset):
            del self._alone[group, found.member]
        return found is not None

    def show(self, group: str, place: Partition, offset: int, position: int) -> None:
        """Note that a message was delivered with this position: committing the position makes the message done."""
        if self.has(group, place, offset):
            mine = self._open[group, place]
            mine[offset] = mine[offset]._replace(position=position, is_shown=True)

    def has(self, group: str, place: Partition, offset: int) -> bool:
        """Return True if a member has a message in hand."""
        return offset in self._open.get((group, place), ())

    def find(self, group: str, place: Partition, offset: int) -> OpenDelivery | None:
        """Return the open delivery of a message; None if no member has it in hand."""
        return self._open.get((group, place), {}).get(offset)

    def read(self, group: str, member: str, positions: Mapping[Partition, int]) -> None:
        """Note the positions up to which a member was given new messages."""
        if positions:
            self._read.setdefault((group, member), {}).update(positions)

    def begin(self, group: str, place: Partition, offset: int) -> None:
        """Note the offset of the first message that a group was given in a partition where it has no commit."""
        self._began.setdefault((group, place), offset)

    def begun(self, group: str) -> dict[Partition, int]:
        """Return the offsets of the first messages that a group was given, for partitions where it has no commit."""
        return {place: offset for (other, place), offset in self._began.items() if other == group}

    def read_to(self, group: str, place: Partition) -> int:
        """Return the position up to which a group's reader was given new messages; 0: no reader."""
        return max((rows.get(place, 0) for (name, _), rows in self._read.items() if name == group), default=0)

    def overtake(self, group: str, place: Partition, gone: range, is_again: bool = False) -> range:
        """Count offsets that were deleted before the group read them. Return those that were not counted before.

        `is_again`: they had been given back, so the group's position is already past them.
        """
        number, end = self._overtaken.get((group, place), (0, 0))
        if not is_again:
            gone, end = range(max(gone.start, end), gone.stop), max(gone.stop, end)
        if gone:
            self._overtaken[group, place] = number + len(gone), end
        return gone

    def overtaken(self, group: str, place: Partition) -> int:
        """Return how many messages of a partition were deleted before the group had read them."""
        return self._overtaken.get((group, place), (0, 0))[0]

    def says_hand_outs(self, group: str, member: str) -> None:
        """Note that a member's client reports what its program is given: until it reports, the program has nothing."""
        self._handed_out[group, member] = {}

    def hand_out(self, group: str, member: str, offsets: Iterable[tuple[Partition, int]]) -> None:
        """Note that a client gives messages to its program, up to these next offsets."""
        offsets_of = self._handed_out.setdefault((group, member), {})
        for place, offset in offsets:
            offsets_of[place] = max(offset, offsets_of.get(place, 0))

    def has_nothing(self, group: str, member: str, committed: Callable[[Partition], int]) -> bool:
        """Return True if a member has committed all that it was given. `committed`: the group's offset."""
        read = self._read.get((group, member), {})
        return not self._of(group, member) and all(committed(place) >= position for place, position in read.items())

    def has_one_alone(self, group: str, member: str) -> bool:
        """Return True while a member has a message that must be its only one."""
        return (group, member) in self._alone

    def came_back(self, group: str, member: str) -> None:
        """Note that a member polls again, so it lives: the message that it had alone no longer counts as alone."""
        found = self._alone.pop((group, member), None)
        if found is not None:
            mine = self._open[group, found[0]]
            mine[found[1]] = mine[found[1]]._replace(is_alone=False)

    # --- the end of a reader -----------------------------------------------------------------------------------------

    def release(self, group: str, member: str, keeps: Iterable[Partition] = ()) -> None:
        """Note that a member now reads only `keeps`: messages it had in hand of other partitions are due again."""
        remaining = set(keeps)
        self.answers.release(group, member, remaining)
        for place, offset in self._of(group, member):
            if place not in remaining:
                self.give_back(group, place, offset)
        handed_out = self._handed_out.get((group, member), {})
        read = self._read.get((group, member), {})
        for place in [place for place in read if place not in remaining]:
            del read[place]
            handed_out.pop(place, None)
        if not read:
            self._read.pop((group, member), None)
        if not remaining:
            self._handed_out.pop((group, member), None)

    def died(self, group: str, member: str, committed: Mapping[Partition, CommittedOffset]) -> None:
        """Note that a member has died: its program's messages are delivered again, in parts or singly."""
        handed_out, has_died = self._handed_out.pop((group, member), None), False
        self.answers.release(group, member)
        for place, offset in self._of(group, member):
            was_alone = self._open[group, place][offset].is_alone
            self.give_back(group, place, offset)
            self._single.setdefault((group, place), {})[offset] = was_alone
        for place, position in self._read.pop((group, member), {}).items():
            end = position if handed_out is None else min(position, handed_out.get(place, 0))
            begin = committed[place].offset if place in committed else self._began.get((group, place), 0)
            if end > begin:
                self._doubt(group, place, begin, end)
            has_died |= position > begin
        if has_died:
            self.deaths[group] = [*self.deaths.get(group, ())[-2:], time.monotonic()]

    def _doubt(self, group: str, place: Partition, begin: int, end: int) -> None:
        """Divide the messages that a dead reader had into smaller parts. Later messages stay in doubt as they were."""
        earlier = self.doubt(group, place, begin)
        had = end - begin if earlier is None else min(earlier.most, end - begin)
        behind = [doubt for doubt in self._in_doubt.get((group, place), ()) if doubt.end > end]
        self._in_doubt[group, place] = [Doubt(end, max(1, had // _PARTS)), *behind]

    def _of(self, group: str, member: str) -> list[tuple[Partition, int]]:
        return [
            (place, offset)
            for (other, place), mine in self._open.items()
            if other == group
            for offset, delivery in mine.items()
            if delivery.member == member
        ]

    def is_single(self, group: str, place: Partition, offset: int) -> bool:
        """Return True if a row must be delivered singly."""
        return offset in self._single.get((group, place), ())

    def counts(self, group: str, place: Partition, offset: int) -> bool:
        """Return True if the next delivery of a row counts."""
        return self._single.get((group, place), {}).get(offset, True)

    def doubt(self, group: str, place: Partition, position: int) -> Doubt | None:
        """Return the part size for new messages from this position on; None: no limit."""
        if not self._in_doubt:
            return None
        return next((doubt for doubt in self._in_doubt.get((group, place), ()) if doubt.end > position), None)

    def trust(self, group: str, place: Partition, offset: int | None = None) -> None:
        """Deliver a row like any other again. Without `offset`: all rows, and new messages too."""
        mine = self._single.get((group, place))
        if offset is None:
            self.trust_new(group, place)
            self._single.pop((group, place), None)
        elif mine is not None:
            mine.pop(offset, None)
            if not mine:
                del self._single[group, place]

    def trust_new(self, group: str, place: Partition, offset: int | None = None) -> None:
        """Deliver new messages before `offset`, or all of them, without parts again."""
        left = [doubt for doubt in self._in_doubt.pop((group, place), ()) if offset is not None and doubt.end > offset]
        if left:
            self._in_doubt[group, place] = left

    def committed(self, group: str, place: Partition, offset: int) -> None:
        """Note that a group has committed this next offset: earlier messages are no longer in doubt."""
        self._began.pop((group, place), None)
        self.deaths.pop(group, None)
        if self._in_doubt:
            self.trust_new(group, place, offset)

    def drop(self, group: str, place: Partition | None = None) -> None:
        """Forget all deliveries of a group, in one partition or in all: the group reads anew there, or it is gone."""
        self.answers.drop(group, place)
        if place is None:
            self.deaths.pop(group, None)
        for table in (self._open, self._single, self._in_doubt, self._began, self._overtaken):
            for key in [key for key in table if key[0] == group and place in (None, key[1])]:
                del table[key]
        for pair in [pair for pair, (where, _) in self._alone.items() if pair[0] == group and place in (None, where)]:
            del self._alone[pair]
        for pair in [pair for pair in self._read if pair[0] == group]:
            self.release(*pair, keeps=() if place is None else [other for other in self._read[pair] if other != place])

    def forget_topics(self, names: Iterable[str]) -> None:
        """Forget the deliveries of topics that were deleted and declared again."""
        gone = set(names)
        tables = self._open, self._single, self._in_doubt, self._began, self._overtaken, self.answers.places()
        for group, place in {key for table in tables for key in table if key[1][0] in gone}:
            self.drop(group, place)

    # --- what is due, and what is done -------------------------------------------------------------------------------

    def is_quiet(self, group: str) -> bool:
        """Return True if no new message of any partition of the group is in doubt."""
        return not self._in_doubt or not any(other == group for other, _ in self._in_doubt)

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
        """Return the offsets in hand that a commit of this next offset makes done."""
        return [offset for offset, is_done in self._passed_by(group, place, committed) if is_done]

    def lost_by(self, group: str, place: Partition, committed: int) -> list[int]:
        """Return the offsets in hand that a commit of this next offset passes while they are on the way."""
        return [offset for offset, is_done in self._passed_by(group, place, committed) if not is_done]

    def _passed_by(self, group: str, place: Partition, committed: int) -> list[tuple[int, bool]]:
        found = []
        for offset, delivery in self._open.get((group, place), {}).items():
            is_just_this = delivery.is_shown and committed == offset + 1
            if is_just_this or committed >= delivery.position:
                # A reader that gave the message back after reading it commits the same offset as its new reader.
                found.append((offset, not self.answers.is_on_the_way(group, delivery.member, place, offset)))
        return sorted(found)


def is_paused(rows: Mapping[int, NackRow]) -> bool:
    """Return True if so many given-back messages wait that a partition delivers no new ones."""
    return len(rows) >= MAX_NACKS


def after_letters(rows: Mapping[int, NackRow], offset: int) -> int:
    """Return the first offset at or after `offset` whose message was not put aside."""
    while offset in rows and rows[offset].letter:
        offset += 1
    return offset


def is_spent(row: NackRow, max_deliveries: int) -> bool:
    """Return True if a message must not be delivered again. `max_deliveries`: 0 is no limit."""
    return bool(max_deliveries) and row.deliveries >= max_deliveries


def given_back(before: NackRow | None, now: float, delay_s: float, reason: str) -> NackRow:
    """Return the row of a message that a member gives back. Repeating the request changes only the time."""
    if before is None:
        return NackRow(1, now + delay_s, reason, first=now)
    return before._replace(due=now + delay_s, reason=reason, letter="")
