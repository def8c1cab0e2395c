"""Whole segments put where they do not belong, as a restore by hand may do it."""

import shutil
from collections.abc import Callable
from pathlib import Path

QUEUE, OTHER, WAL = "topics/jobs/0", "topics/test/0", "append"


SEGMENT_BYTES = 128 << 10


class Restore:
    """A clumsy hand. `indexes`: whether they go "along" with their logs, stay "behind", or are "lost"."""

    def __init__(self, data: Path, foreign: Path, indexes: str) -> None:
        self.data, self.foreign, self.indexes = data, foreign, indexes

    def segment(self, place: str, number: int) -> Path:
        return sorted((self.data / place).glob("*.log"))[number]

    def swap(self, one: Path, other: Path) -> None:
        for a, b in self._files(one, other):
            spare = a.with_suffix(".spare")
            a.rename(spare)
            b.rename(a)
            spare.rename(b)
        self._lose(one, other)

    def copy(self, source: Path, target: Path) -> None:
        for a, b in self._files(source, target):
            shutil.copyfile(a, b)
        self._lose(target)

    def move(self, source: Path, target: Path) -> None:
        for a, b in self._files(source, target):
            a.rename(b)
        self._lose(target)

    def delete(self, *paths: Path) -> None:
        for path in paths:
            for file, _ in self._files(path, path):
                file.unlink()
            self._lose(path)

    def _files(self, one: Path, other: Path) -> list[tuple[Path, Path]]:
        suffixes = (".log", ".idx") if self.indexes == "along" else (".log",)
        return [(one.with_suffix(suffix), other.with_suffix(suffix)) for suffix in suffixes]

    def _lose(self, *paths: Path) -> None:
        for path in paths:
            if self.indexes == "lost":
                path.with_suffix(".idx").unlink(missing_ok=True)


Case = Callable[[Restore], object]


def cases_of(place: str, name: str) -> dict[str, Case]:
    return {
        f"two sealed segments of {name} swapped": lambda r: r.swap(r.segment(place, 0), r.segment(place, 2)),
        f"a sealed and the active segment of {name} swapped": lambda r: r.swap(
            r.segment(place, 1), r.segment(place, -1)
        ),
        f"a segment of {name} copied over the next": lambda r: r.copy(r.segment(place, 1), r.segment(place, 2)),
        f"a segment of {name} copied over the active one": lambda r: r.copy(r.segment(place, 1), r.segment(place, -1)),
        f"the active segment of {name} copied over the first": lambda r: r.copy(
            r.segment(place, -1), r.segment(place, 0)
        ),
        f"a segment of another topic in {name}": lambda r: r.copy(r.segment(OTHER, 1), r.segment(place, 1)),
        f"the active segment of another topic in {name}": lambda r: r.copy(r.segment(OTHER, -1), r.segment(place, -1)),
        f"another broker's segment in {name}": lambda r: r.copy(
            sorted((r.foreign / place).glob("*.log"))[1], r.segment(place, 1)
        ),
        f"another broker's first segment in {name}": lambda r: r.copy(
            min((r.foreign / place).glob("*.log")), r.segment(place, 0)
        ),
        f"another broker's active segment in {name}": lambda r: r.copy(
            sorted((r.foreign / place).glob("*.log"))[-1], r.segment(place, -1)
        ),
        f"a segment of {name} under a later number": lambda r: r.copy(
            r.segment(place, 1), r.data / place / f"{9_000_000:020d}.log"
        ),
        f"a segment of {name} renamed to a later number": lambda r: r.move(
            r.segment(place, 1), r.data / place / f"{9_000_000:020d}.log"
        ),
        f"another broker's segment behind {name}": lambda r: r.copy(
            sorted((r.foreign / place).glob("*.log"))[2], r.data / place / f"{9_000_000:020d}.log"
        ),
        f"a segment of {name} deleted": lambda r: r.delete(r.segment(place, 1)),
        f"the last two segments of {name} deleted": lambda r: r.delete(r.segment(place, -2), r.segment(place, -1)),
        f"all segments of {name} deleted": lambda r: r.delete(*(r.data / place).glob("*.log")),
    }


CASES: dict[str, Case] = cases_of(WAL, "the WAL") | cases_of(QUEUE, "a queue")
CASES |= {
    "a segment of the WAL in a queue": lambda r: r.copy(r.segment(WAL, 1), r.segment(QUEUE, 1)),
    "a segment of a queue in the WAL": lambda r: r.copy(r.segment(QUEUE, 1), r.segment(WAL, 1)),
    "segments of two queues swapped": lambda r: r.swap(r.segment(QUEUE, 1), r.segment(OTHER, 1)),
    "active segments of two queues swapped": lambda r: r.swap(r.segment(QUEUE, -1), r.segment(OTHER, -1)),
    "an empty file under a later number of the WAL": lambda r: (r.data / WAL / f"{9_000_000:020d}.log").touch(),
}
