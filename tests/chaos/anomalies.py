"""Judges a history of produce, poll, commit and assignment, in the manner of Jepsen's workload for Kafka. Pure code.

Anomalies
    lost write           an acknowledged message that no reader met, though one read past its place or read everything
    refused write        a message that was refused, and is stored all the same
    invented             a message that nobody sent
    duplicate            a message at two offsets, though it was to be stored once
    reordered            two messages of one process in one partition, the later one in front
    inconsistent offset  two messages at one offset, or a message elsewhere than the broker said
    non-monotonic poll   a reader goes back, without a new assignment
    poll-skip            a reader goes past records that it was not given and its group has not committed
    unassigned poll      a member is given a partition that it does not have
    unseen               a stored record that a group was never given, although it had come to the end
    lost answer          a record of an answer that a member has given up, and that its group was never given after that
    lost nack            a record that a member gave back, and that its group was never given after that
    skipped by latest    a record that came after a group had subscribed with `latest`, and that it was never given
    commit lost          a group goes on in front of what was acknowledged as committed
    position against group   a commit is accepted in front of one that had been acknowledged, so the group goes back
    stale commit         a commit of a former owner is accepted, after another member has begun to read
    two owners           a partition has two owners in one generation
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from chaos.history import (
    FAIL,
    OK,
    Again,
    Assigned,
    Commit,
    Committed,
    Lost,
    Nacked,
    Operation,
    Owners,
    Place,
    Poll,
    Produce,
)

SHOWN = 10  # anomalies of one kind that are listed; the rest is counted
_NO_OFFSET = -1

At = tuple[Place, int]
_InGroup = tuple[str, Place, int]


class Anomaly(NamedTuple):
    kind: str
    what: str

    def __str__(self) -> str:
        return f'anomaly="{self.kind}" what="{self.what}"'


class Verdict:
    """The anomalies. Few of each kind are kept in words, all are counted. `operations`: how many of each type were seen."""

    def __init__(self) -> None:
        self.anomalies: list[Anomaly] = []
        self.counts: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def add(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= SHOWN:
            self.anomalies.append(Anomaly(kind, what))

    @property
    def kinds(self) -> set[str]:
        return set(self.counts)

    def __str__(self) -> str:
        counts = " ".join(f'"{kind}"={count}' for kind, count in sorted(self.counts.items())) or "clean=1"
        operations = " ".join(f"{name.lower()}={count}" for name, count in sorted(self.operations.items()))
        return "\n".join([*map(str, self.anomalies), f"{operations} {counts}"])


def check(
    history: Iterable[Operation],
    drained: Collection[str] = (),
    complete: bool = False,
    latest: Mapping[str, float] | None = None,
) -> Verdict:
    """Return what is wrong with a history, in which the operations of each process are in their order.

    drained: groups that have come to the end of every partition.   complete: readers without a group have read everything.
    latest: groups that begin with `latest`, and when they had subscribed.
    """
    verdict, operations, latest = Verdict(), list(history), latest or {}
    verdict.operations.update(type(operation).__name__ for operation in operations)
    records = _Records(operations, verdict)
    records.check_writes(complete)
    records.check_order()
    for group in drained:
        records.check_seen_by(group, latest.get(group))
        records.check_lost_by(group)
        records.check_nacked_by(group)
    commits = _Commits(operations)
    _check_readers(operations, commits, verdict, latest)
    commits.check_queries(verdict)
    commits.check_order(verdict)
    commits.check_fences(verdict)
    _check_owners(operations, verdict)
    return verdict


class _Records:
    """What was sent, and what lies where as far as anybody saw."""

    def __init__(self, operations: list[Operation], verdict: Verdict) -> None:
        self._verdict = verdict
        self._sent = {each.value: each for each in operations if isinstance(each, Produce)}
        self._at: dict[At, str] = {}
        self._places: defaultdict[str, set[At]] = defaultdict(set)
        self._ends: Counter[Place] = Counter()
        self._seen: defaultdict[str, dict[At, float]] = defaultdict(dict)
        for poll in (each for each in operations if isinstance(each, Poll)):
            self._ends[poll.place] = max(self._ends[poll.place], poll.end)
            for offset, value in enumerate(poll.values, poll.first):
                self._note((poll.place, offset), value)
                self._see(poll.group, (poll.place, offset), poll.ended)
        for again in (each for each in operations if isinstance(each, Again)):
            self._note((again.place, again.offset), again.value)
            self._see(again.group, (again.place, again.offset), again.ended)
        self._lost = [each for each in operations if isinstance(each, Lost)]
        self._nacked = [each for each in operations if isinstance(each, Nacked)]
        for lost in self._lost:
            for offset, value in enumerate(lost.values, lost.first):
                self._note((lost.place, offset), value)

    def _see(self, group: str, at: At, when: float) -> None:
        """Note when a group was given a record last."""
        self._seen[group][at] = max(when, self._seen[group].get(at, 0.0))

    def _note(self, at: At, value: str) -> None:
        if self._at.setdefault(at, value) != value:
            self._verdict.add("inconsistent offset", f"{at}: {self._at[at]} and {value}")
        self._places[value].add(at)

    def check_writes(self, complete: bool) -> None:
        for value, sent in self._sent.items():
            found = self._places.get(value, set())
            if sent.outcome == FAIL and found:
                self._verdict.add("refused write", f"{value} is at {_first(found)}")
            if sent.once and len(found) > 1:
                self._verdict.add("duplicate", f"{value} is at {sorted(found)[:3]}")
            if sent.outcome == OK:
                self._check_acknowledged(sent, found, complete)
        for value in self._places.keys() - self._sent.keys():
            self._verdict.add("invented", f"{value} at {_first(self._places[value])}")

    def _check_acknowledged(self, sent: Produce, found: set[At], complete: bool) -> None:
        if sent.place is None or sent.offset is None:
            if complete and not found:
                self._verdict.add("lost write", f"{sent.value}, sent by {sent.process}")
            return
        told = sent.place, sent.offset
        if found and told not in found:
            self._verdict.add(
                "inconsistent offset", f"{sent.value} is at {_first(found)}, and was said to be at {told}"
            )
        if not found and (complete or sent.offset < self._ends[sent.place]):
            self._verdict.add("lost write", f"{sent.value}, sent by {sent.process}, was said to be at {told}")

    def check_order(self) -> None:
        last: dict[tuple[str, Place], tuple[int, str]] = {}
        for value, sent in self._sent.items():
            found = self._places.get(value, set())
            for place, offset in found if sent.once and len(found) == 1 else ():
                before, earlier = last.get((sent.process, place), (_NO_OFFSET, ""))
                if offset < before:
                    self._verdict.add("reordered", f"{value} at {(place, offset)}, in front of {earlier} at {before}")
                else:
                    last[sent.process, place] = offset, value

    def check_seen_by(self, group: str, since: float | None = None) -> None:
        """`since`: the group need not be given what was sent before."""
        told = {
            (p.place, p.offset) for p in self._sent.values() if p.outcome == OK and p.place and p.offset is not None
        }
        given_up = {(each.place, n) for each in self._lost if each.group == group for n in range(each.first, each.end)}
        for at in sorted((self._at.keys() | told) - self._seen[group].keys() - given_up):
            sent = self._sent.get(self._at.get(at, ""))
            what = f"{self._at.get(at, 'a message')} at {at}: never given to group {group}"
            if since is None:
                self._verdict.add("unseen", what)
            elif sent is not None and sent.began > since:
                self._verdict.add("skipped by latest", what)

    def check_lost_by(self, group: str) -> None:
        for lost in (each for each in self._lost if each.group == group):
            for offset, value in enumerate(lost.values, lost.first):
                if self._seen[group].get((lost.place, offset), 0.0) < lost.began:
                    what = (
                        f"{value} at {(lost.place, offset)}: given up by {lost.process}, and not given to {group} again"
                    )
                    self._verdict.add("lost answer", what)

    def check_nacked_by(self, group: str) -> None:
        for nacked in (each for each in self._nacked if each.group == group):
            if self._seen[group].get((nacked.place, nacked.offset), 0.0) < nacked.began:
                at = nacked.place, nacked.offset
                what = f"{self._at.get(at)} at {at}: given back by {nacked.process}, and not given to {group} again"
                self._verdict.add("lost nack", what)


class _Commits:
    """What was committed when, and who began to read when, of each group's partitions."""

    def __init__(self, operations: list[Operation]) -> None:
        self._acked: defaultdict[tuple[str, Place], list[tuple[float, int]]] = defaultdict(list)
        self._asked: defaultdict[tuple[str, Place], list[tuple[float, int]]] = defaultdict(list)
        self._commits = [each for each in operations if isinstance(each, Commit)]
        self._queries = [each for each in operations if isinstance(each, Committed)]
        self._begins: defaultdict[tuple[str, Place], list[Assigned]] = defaultdict(list)
        for commit in self._commits:
            for place, offset in commit.offsets.items():
                if commit.outcome != FAIL:
                    self._asked[commit.group, place].append((commit.began, offset))
                if commit.outcome == OK:
                    self._acked[commit.group, place].append((commit.ended, offset))
        for table in (self._acked, self._asked):
            for place_in_group, rows in table.items():
                table[place_in_group] = _rising(sorted(rows))
        for assigned in operations:
            if isinstance(assigned, Assigned):
                for place in assigned.fresh:
                    self._begins[assigned.group, place].append(assigned)

    def acked(self, group: str, place: Place, before: float) -> int:
        """The highest offset whose commit had been acknowledged before that time."""
        return _highest(self._acked.get((group, place), []), before)

    def asked(self, group: str, place: Place, before: float) -> int:
        """The highest offset that anybody had asked to commit before that time, and was not refused."""
        return _highest(self._asked.get((group, place), []), before)

    def check_queries(self, verdict: Verdict) -> None:
        for query in self._queries:
            for group, place in self._acked:
                acked, found = self.acked(group, place, query.began), query.offsets.get(place, 0)
                if group == query.group and found < acked:
                    verdict.add("commit lost", f"{group} {place}: {found} after {acked} was acknowledged")

    def check_order(self, verdict: Verdict) -> None:
        for commit in self._commits:
            for place, offset in commit.offsets.items() if commit.outcome == OK else ():
                acked = self.acked(commit.group, place, commit.began)
                if offset < acked:
                    what = f"{commit.group} {place}: {commit.process} commits {offset} after {acked} was acknowledged"
                    verdict.add("position against group", what)

    def check_fences(self, verdict: Verdict) -> None:
        for commit in self._commits:
            for place in commit.offsets if commit.outcome == OK else ():
                begins = [each for each in self._begins[commit.group, place] if each.ended < commit.began]
                own = [each.ended for each in begins if each.process == commit.process]
                newer = [each.process for each in begins if each.began > max(own, default=0.0)]
                if newer:
                    verdict.add("stale commit", f"{commit.group} {place}: by {commit.process}, {newer[-1]} reads it")


def _rising(rows: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Each time with the highest offset up to then."""
    highest = 0
    return [(at, highest := max(highest, offset)) for at, offset in rows]


def _highest(rows: list[tuple[float, int]], before: float) -> int:
    low, high = 0, len(rows)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if rows[middle][0] < before else (low, middle)
    return rows[low - 1][1] if low else 0


class _Reader:
    """Where one process goes on in each of its partitions. None: at what its group has committed."""

    def __init__(
        self, commits: _Commits, verdict: Verdict, latest: Collection[str], again: Collection[_InGroup]
    ) -> None:
        self._commits, self._verdict, self._latest, self._again = commits, verdict, latest, again
        self._behind: defaultdict[Place, set[int]] = defaultdict(set)  # answers that were given up
        self._next: dict[Place, int | None] = {}
        self._was: dict[Place, int] = {}
        self._began: dict[Place, float] = {}

    def assign(self, assigned: Assigned) -> None:
        before = self._next
        self._next = {place: before.get(place) for place in assigned.places}
        for place in assigned.fresh:
            self._was[place] = (
                (before.get(place) or self._was.get(place, 0)) if assigned.goes_on and place in before else 0
            )
            self._next[place], self._began[place] = None, assigned.began
            if not assigned.goes_on:
                self._behind[place].clear()

    def lose(self, lost: Lost) -> None:
        """It goes on behind an answer that it has given up, or is given it again."""
        self._behind[lost.place].add(lost.end)

    def _may_skip(self, poll: Poll, due: int) -> bool:
        skipped = range(due, poll.first)
        return poll.first in self._behind[poll.place] or all(
            (poll.group, poll.place, offset) in self._again for offset in skipped
        )

    def poll(self, poll: Poll) -> None:
        if poll.group and poll.place not in self._next:
            self._verdict.add("unassigned poll", f"{poll.process}: {poll.place} at {poll.first}")
        due = self._next.get(poll.place, None if poll.group else 0)
        if due is None:
            self._check_begin(poll)
        elif poll.first < due:
            self._verdict.add("non-monotonic poll", f"{poll.process}: {poll.place} at {poll.first} after {due - 1}")
        elif poll.first > due and not self._may_skip(poll, due):
            self._verdict.add("poll-skip", f"{poll.process}: {poll.place} at {poll.first}, {due} was next")
        self._next[poll.place] = poll.end

    def _check_begin(self, poll: Poll) -> None:
        most = self._commits.asked(poll.group, poll.place, poll.ended)
        least = self._commits.acked(poll.group, poll.place, self._began.get(poll.place, 0.0))
        is_start = poll.group in self._latest and not most  # the member commits its start without telling us
        if (
            poll.first > most
            and poll.first != self._was.get(poll.place)
            and not is_start
            and not self._may_skip(poll, most)
        ):
            self._verdict.add("poll-skip", f"{poll.process}: {poll.place} begins at {poll.first}, committed is {most}")
        if poll.first < least:
            what = f"{poll.group} {poll.place}: {poll.process} begins at {poll.first} after {least} was acknowledged"
            self._verdict.add("commit lost", what)


def _check_readers(operations: list[Operation], commits: _Commits, verdict: Verdict, latest: Collection[str]) -> None:
    readers: dict[str, _Reader] = {}
    again = {(each.group, each.place, each.offset) for each in operations if isinstance(each, Again)}
    for operation in operations:
        if isinstance(operation, Assigned | Poll | Lost):
            reader = readers.setdefault(operation.process, _Reader(commits, verdict, latest, again))
            if isinstance(operation, Assigned):
                reader.assign(operation)
            elif isinstance(operation, Poll):
                reader.poll(operation)
            else:
                reader.lose(operation)


def _check_owners(operations: list[Operation], verdict: Verdict) -> None:
    owners: dict[tuple[str, int, Place], str] = {}

    def own(group: str, generation: int, place: Place, member: str) -> None:
        other = owners.setdefault((group, generation, place), member)
        if other != member:
            verdict.add("two owners", f"{group} {place} in generation {generation}: {other} and {member}")

    for operation in operations:
        if isinstance(operation, Owners):
            for member, place in operation.owners:
                own(operation.group, operation.generation, place, member)
        elif isinstance(operation, Assigned) and operation.generation is not None:
            for place in operation.places:
                own(operation.group, operation.generation, place, operation.process)


def _first(found: set[At]) -> At:
    return min(found)
