"""The two ways to a broker's logs (broker.py): its data directory, or its gateway over HTTP (remote.py)."""

import glob
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kmq.broker import stats
from kmq.config.settings import SHM
from kmq.errors import ConfigError
from kmq.links.ownership import FileLock
from kmq.log import identity, reader, topics
from kmq.log.reader import WAL
from kmq.repair import ledger
from kmq.spark.connections import PLAIN, Access
from kmq.spark.source.broker import BLOCK_BYTES, Broker, Layout

if TYPE_CHECKING:  # blocks.py needs numpy, which `kmq pipeline status` must work without
    from kmq.spark.source.blocks import Lines


class Directory(Broker):
    """A data directory, whether its broker runs or not."""

    def __init__(self, name: str, path: str = "") -> None:
        self.name, self.path = name, os.path.abspath(path or name)
        # LogReaders remember where their log ended: finding the new end costs less.
        self._kept: dict[tuple[str, int], reader.LogReader] = {}

    def identity(self) -> str:
        try:
            return identity.read(self.path, "id")
        except FileNotFoundError:
            why = "it has no file `id`" if os.path.isdir(self.path) else "it does not exist"
            inside = os.path.join(self.name, "data")
            advice = f"; did you mean {inside}?" if os.path.isfile(f"{inside}/id") else ""
            raise ConfigError(f"path={self.name!r}: no data directory of KMQ: {why}{advice}") from None
        except OSError as err:
            raise ConfigError(
                f"path={self.name!r}: no data directory of KMQ: {err.strerror} ({err.filename})"
            ) from None

    def marks_from(self) -> int:
        return identity.marks_from(self.path)

    def topics(self) -> dict[str, Layout]:
        self.identity()  # raises if this is no data directory
        found = {name: topics.read(self.path, name) for name in topics.names(self.path)}
        return {name: Layout(each.partitions, each.partitioner) for name, each in found.items()}

    def bounds(self, topics_asked: Sequence[str]) -> dict[tuple[str, int], tuple[int, int]]:
        self.identity()  # raises if this is no data directory
        bounds = {}
        for topic in topics_asked:
            if topic == WAL:
                bounds[topic, 0] = self._wal_bounds()
            elif os.path.isdir(f"{self.path}/topics/{topic}"):
                for number in range(topics.load(self.path, topic)[0]):
                    log = self._log(topic, number)
                    end = log.end_offset()  # the end first: a removal by retention in between is then noticed
                    bounds[topic, number] = min(log.first_offset, end), end
        return bounds

    def _wal_bounds(self) -> tuple[int, int]:
        """Return the bounds of the durable WAL, without records that durability has written but not yet synced."""
        log = reader.wal(self.path)
        synced = self._synced_seq()
        end = synced + 1 if synced else log.end_offset()
        return min(log.first_offset, end), end

    def _synced_seq(self) -> int:
        """Return the synced seq from the stats page of the broker that writes here; 0 without a visible page."""
        return self._seq_of("durability", "append")

    def _seq_of(self, stage: str, owns: str) -> int:
        """Return the seq of the stage that owns a directory here; 0 without an owner or a visible page."""
        if not FileLock(f"{self.path}/{owns}/.owner").is_held():
            return 0
        mine = f"data_id={self.identity()} "
        for path in glob.glob(f"{SHM}/*.stats"):
            page = stats.peek(os.path.basename(path).removesuffix(".stats"))
            if page is not None and mine in page.identity():
                return page.rows[stage].seq
        return 0

    def _log(self, topic: str, partition: int) -> reader.LogReader:
        if (topic, partition) not in self._kept:
            log = reader.wal(self.path) if topic == WAL else reader.partition(self.path, topic, partition)
            self._kept[topic, partition] = log
        return self._kept[topic, partition]

    def offset_of_time(self, topic: str, partition: int, micros: int) -> int:
        return self._log(topic, partition).offset_of_time(micros)

    def stamp_at_end(self, topic: str, partition: int, offset: int) -> tuple[int, int] | None:
        """Return (seq, recv_ts in µs) of the record before `offset`, if that was the end when `bounds` last looked."""
        return self._log(topic, partition).stamp_at_end(offset)

    def offset_of_seq(self, topic: str, partition: int, seq: int) -> int:
        return self._log(topic, partition).offset_of_seq(seq)

    def ledger(self) -> dict[str, Any]:
        return ledger.read(self.path, self._seq_of("router", "topics"))

    def cuts(self, topic: str, partition: int, start: int, end: int, nbytes: int) -> list[int]:
        return self._log(topic, partition).cuts(start, end, nbytes)

    def blocks(self, topic: str, partition: int, start: int, end: int) -> "Iterator[Lines]":
        from kmq.spark.source import blocks

        return blocks.read(self._log(topic, partition), start, end, BLOCK_BYTES)


def open_broker(name: str, is_path: bool, access: Access = PLAIN) -> Broker:
    """Return the broker of this name: a path, or host:port of a gateway."""
    if is_path:
        return Directory(name)
    from kmq.spark.source.remote import Remote

    return Remote(name, access)
