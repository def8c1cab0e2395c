"""Records which stream a table belongs to, and the last batch of that stream that was committed to it."""

from kmq.errors import ConfigError
from kmq.log.disk import replace_file
from kmq.spark.tables import checks, disk
from kmq.spark.tables.places import S3, Place


class BoundStream:
    """The files `query` and `batch` of a table's state; in an object store also a note beside the table."""

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

    def committed(self, batch_id: int) -> None:
        """Note the last batch."""
        replace_file(f"{self._state}/batch", b"%d" % batch_id)

    def check_checkpoint(self, path: str) -> None:
        """Raise ConfigError if the checkpoint does not belong to the table's stream."""
        checks.checkpoint(path, self._to, self.query)
