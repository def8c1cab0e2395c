"""The history that a member of a group writes while it runs."""

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from chaos.history import OK, UNKNOWN, Again, Assigned, Commit, Lost, Nacked, Offsets, Operation, Place, Poll, encode

Row = tuple[Place, int, str]  # where a message lies, its offset and value
At = tuple[Place, int]
NACKED = 0.02  # of the messages


class Diary:
    """Knows what the member reads and where it is. Everything is in the file before the member acts upon it."""

    def __init__(self, path: Path, process: str, group: str) -> None:
        self.process, self.group, self._rng = process, group, random.Random(process)
        self.again: list[At] = []  # came again, and is to be committed by itself
        self.to_nack: list[At] = []
        self.next: Offsets = {}  # behind what was given to the member, of the partitions that it has
        self.committed: Offsets = {}  # what was acknowledged, of these
        self.generation: int | None = None
        self.gap_s = 0.0  # between the last two polls
        self._polled_at = time.monotonic()
        self._places: tuple[Place, ...] = ()
        self._file = path.open("a", buffering=1)

    def _write(self, operation: Operation) -> None:
        self._file.write(f"{encode(operation)}\n")

    def assigned(
        self,
        generation: int | None,
        places: Iterable[Place],
        fresh: Iterable[Place],
        began: float,
        goes_on: bool = False,
    ) -> None:
        places, fresh = tuple(places), tuple(fresh)
        # In the very next generation nobody else has had what the member had and has: what it was given is still to commit.
        is_next = goes_on and self.generation is not None and generation == self.generation + 1
        kept = {*self._places} if is_next else set[Place]()
        self.generation, self._places = generation, places
        now = time.monotonic()
        self._write(Assigned(self.process, self.group, generation, places, fresh, began, now, goes_on))
        for table in (self.next, self.committed):
            for place in [place for place in table if place not in places or (place in fresh and place not in kept)]:
                del table[place]
        self.again = [at for at in self.again if at[0] in places]
        self.to_nack = [at for at in self.to_nack if at[0] in places]

    @property
    def places(self) -> tuple[Place, ...]:
        return self._places

    def give_up(self, places: Iterable[Place]) -> None:
        """These are no longer the member's."""
        gone = set(places)
        self.assigned(None, [place for place in self._places if place not in gone], (), 0.0)

    def polled(self, rows: Iterable[Row], again: Iterable[Row] = ()) -> None:
        """The records in the order in which the member was given them; `again`: those that it was given again."""
        before, self._polled_at = self._polled_at, time.monotonic()
        self.gap_s = self._polled_at - before
        rows = tuple(rows)
        for place, offset, value in again:
            self._write(Again(self.process, self.group, place, offset, value, time.monotonic()))
            self.committed.pop(
                place, None
            )  # over HTTP the next commit says that it is done, if it goes no further, too
            if not self._wants_to_nack((place, offset)):
                self.again.append((place, offset))
        for place, offset, _ in rows:
            self._wants_to_nack((place, offset))
        for place, first, values in _runs(rows):
            poll = Poll(self.process, self.group, place, first, values, time.monotonic())
            self._write(poll)
            self.next[place] = poll.end

    def _wants_to_nack(self, at: At) -> bool:
        if self._rng.random() < NACKED:
            self.to_nack.append(at)
            return True
        return False

    def take_again(self) -> list[At]:
        """What came again, and is to be committed now."""
        found, self.again = self.again, []
        return found

    def take_nacks(self) -> list[At]:
        """What is to be given back now."""
        found, self.to_nack = self.to_nack, []
        return found

    def nacked(self, at: At, began: float) -> None:
        self._write(Nacked(self.process, self.group, *at, began, time.monotonic()))

    def lost(self, rows: Iterable[Row], began: float) -> None:
        """The records of an answer that the member has given up; `began`: when it was asked for."""
        for place, first, values in _runs(rows):
            self._write(Lost(self.process, self.group, place, first, values, began))

    def due(self, places: Iterable[Place] | None = None) -> Offsets:
        """What there is to commit."""
        wanted = self.next if places is None else [place for place in places if place in self.next]
        return {place: self.next[place] for place in wanted if self.committed.get(place) != self.next[place]}

    def asks_to_commit(self, offsets: Mapping[Place, int]) -> float:
        """To be called before; returns when that was."""
        now = time.monotonic()
        self._write(Commit(self.process, self.group, dict(offsets), UNKNOWN, now, now))
        return now

    def has_committed(self, offsets: Mapping[Place, int], began: float) -> None:
        self._write(Commit(self.process, self.group, dict(offsets), OK, began, time.monotonic()))
        self.committed.update({place: offset for place, offset in offsets.items() if place in self.next})


def _runs(rows: Iterable[Row]) -> Iterator[tuple[Place, int, tuple[str, ...]]]:
    """Runs of records that follow one another: place, first offset, values."""
    runs: list[tuple[Place, int, list[str]]] = []
    for place, offset, value in rows:
        if runs and runs[-1][0] == place and runs[-1][1] + len(runs[-1][2]) == offset:
            runs[-1][2].append(value)
        else:
            runs.append((place, offset, [value]))
    return ((place, first, tuple(values)) for place, first, values in runs)
