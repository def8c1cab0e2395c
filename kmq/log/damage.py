"""The errors that stop a reader: damaged bytes, and segments in the wrong place."""

import os

from kmq.errors import CorruptError

HEAL = "kmq verify --repair"
EXAMINE_COPY = "kmq tier verify --deep"  # what is damaged lies in KMQ_TIER


class DamageError(CorruptError):
    """The bytes of `path` from `byte` to `end` must not be served. `next_offset`: the first record after them."""

    def __init__(
        self, path: str, byte: int, end: int, first_offset: int, next_offset: int, what: str, advice: str = HEAL
    ) -> None:
        self.path, self.byte, self.end = path, byte, end
        self.first_offset, self.next_offset, self.what = first_offset, next_offset, what
        kind = "seq" if f"{os.sep}append{os.sep}" in path else "offset"
        records = f"{kind} {first_offset}" + (f" to {next_offset - 1}" if next_offset > first_offset + 1 else "")
        super().__init__(f"{path}: damaged at byte {byte} ({records}): {what}; run {advice}")


class MisplacedError(DamageError):
    """A whole segment that may not belong where it lies."""
