"""Records which stream a table belongs to, and the batches of that stream that were committed to it.

A batch is its number and its offsets: a checkpoint that was restored from an older copy uses the numbers again for
other records.

Invariant   A batch is never skipped unless the table has a batch with this number and these offsets. Batches that a
            release before the offsets has committed are known by number: only the last can come again.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

from kmq.errors import ConfigError
from kmq.files import replace_file
from kmq.spark.tables import checks, disk
from kmq.spark.tables.places import S3, Place

Offsets = list[str]  # where a batch ends: the line of each source, as in Spark's own note of the batch

KEEP = 100  # batches whose offsets are kept, as Spark keeps its own notes
_VERSION = "v1"
_MAX_SHOWN = 5  # partitions in an error


class BoundStream:
    """The files `query`, `batch` and offsets/<batch> of a table's state; in an object store a note beside the table."""

    def __init__(self, to: str, state: str, place: Place) -> None:
        self._to, self._state, self._place = to, state, place

    @property
    def query(self) -> str:
        """The stream's id; "" before the first batch."""
        return disk.read(f"{self._state}/query")

    @property
    def last_batch(self) -> int:
        """The number of the last committed batch, -1 before the first."""
        return int(disk.read(f"{self._state}/batch") or -1)

    def bind(self, query: str, batch_id: int) -> None:
        """Bind the table to a stream at its first batch. Raises ConfigError if the table belongs to another stream."""
        known = self.query
        if not known and batch_id == 0:
            self._own(query)
            replace_file(f"{self._state}/query", query.encode())
        elif known != query:
            why = "holds rows of another checkpoint" if known else "is new, but the checkpoint is not"
            raise ConfigError(f"--to {self._to}: {why}; give each table a checkpoint of its own")

    def _own(self, query: str) -> None:
        """Note the owner in an object store, where only this note keeps two checkpoints apart."""
        if isinstance(self._place, S3):
            if (owner := self._place.owner()) and owner != query:
                raise ConfigError(f"--to {self._to}: holds rows of another checkpoint; name another --to")
            self._place.own(query)

    def offsets(self, batch_id: int) -> Offsets | None:
        """Return the offsets of a committed batch; None if they are not kept, or not any more."""
        version, *lines = disk.read(f"{self._state}/offsets/{batch_id}").splitlines() or [""]
        if version not in ("", _VERSION):
            raise ConfigError(f"{self._state}/offsets/{batch_id}: unknown format {version!r}; expected {_VERSION}")
        return lines if version else None

    def committed(self, batch_id: int, offsets: Offsets | None) -> None:
        """Note the last batch. Its offsets come first: without them its number alone would decide."""
        if offsets is not None:
            directory = f"{self._state}/offsets"
            os.makedirs(directory, exist_ok=True)
            replace_file(f"{directory}/{batch_id}", "\n".join((_VERSION, *offsets)).encode())
            for name in os.listdir(directory):
                if name.isdecimal() and int(name) <= batch_id - KEEP:
                    os.unlink(f"{directory}/{name}")
        replace_file(f"{self._state}/batch", b"%d" % batch_id)

    def check_same(self, batch_id: int, offsets: Offsets | None, taken: Offsets | None, last: int) -> None:
        """Raise ConfigError if the batch is not the one that the table took under this number.

        `taken`: the offsets of that batch; `last`: the number of the table's last batch.
        """
        if offsets is None or (taken is None and batch_id == last):
            return  # the stream's checkpoint cannot be read here, or an earlier release took the batch: by number
        if taken is None:
            why = f"took a batch of this number long ago, and is at batch {last}"
        elif differing := _differing(offsets, taken):
            why = f"took a batch of this number with other offsets: {differing}"
        else:
            return
        raise ConfigError(
            f"--to {self._to}: batch {batch_id} of the checkpoint is not in the table, which {why}; was the checkpoint"
            " restored from an older copy? Nothing was added. Go on with the newest copy of the checkpoint, or begin a"
            " new table with a new checkpoint"
        )

    def check_checkpoint(self, path: str) -> None:
        """Raise ConfigError if the checkpoint does not belong to the table's stream."""
        checks.checkpoint(path, self._to, self.query)


def _differing(offsets: Offsets, taken: Offsets) -> str:
    """Return the partitions whose offsets differ, for an error; "" if none does."""
    ours, theirs = (dict(_leaves([_parsed(line) for line in lines])) for lines in (offsets, taken))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return (
        ", ".join(
            f"{'/'.join(name[1:]) or 'source'} {ours.get(name, 'none')} now, {theirs.get(name, 'none')} in the table"
            for name in names[:_MAX_SHOWN]
        )
        + more
    )


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line


def _leaves(value: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (names of the keys, value) of everything within a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*name, str(key)))
    else:
        yield name, value
