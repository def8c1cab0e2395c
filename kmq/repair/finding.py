"""The findings of `kmq verify`: each is one place on disk that is not as it was written."""

from typing import NamedTuple


class Finding(NamedTuple):
    """One place that is not as it was written. The fields are the keys of `kmq verify --json`."""

    path: str  # under the data directory
    byte: int  # where the damage begins
    first_seq: int  # of the records concerned; 0: it concerns no record
    last_seq: int  # 0: it is not known, because what follows is damaged too
    what: str
    is_damage: bool = True  # False: a note, harmless

    @classmethod
    def of_file(cls, path: str, what: str, byte: int = 0, is_damage: bool = True) -> "Finding":
        """Return a finding that concerns a file and no record of its own."""
        return cls(path, byte, 0, 0, what, is_damage)

    @classmethod
    def of_records(cls, path: str, what: str, seqs: tuple[int, int], byte: int = 0) -> "Finding":
        """Return a finding that concerns the records with these seqs (first, last)."""
        return cls(path, byte, *seqs, what)

    def __str__(self) -> str:
        last = f"to {self.last_seq}" if self.last_seq else "and later"  # of damage at the end of a log
        seqs = f"seq {self.first_seq} {last}: " if self.first_seq else ""
        return f"{self.path}: byte {self.byte}: {seqs}{self.what}"
