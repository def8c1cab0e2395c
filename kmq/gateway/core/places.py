"""Where stored messages are: seq → partition and offset, from the partition logs.

Cost        One lookup in an index, and a read of the records between the first seq asked for and the last. Requests
            that come while a topic is being read are answered together by the next read.
Not covered A record that compaction, retention or a deletion has removed has no place any more.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kmq import record, routing
from kmq.gateway.core.bounds import Bounds
from kmq.log import identity, reader
from kmq.log.lines import SEQ
from kmq.routing import Table, Topic
from kmq.settings import MIB

_THREADS = 2
_READERS = 1024  # partitions whose reader is kept: it knows where its last read ended
_READ_BYTES = MIB // 4


class Place(NamedTuple):
    """A record of a topic. `line`: as it is stored, without newline."""

    partition: int
    offset: int
    line: bytes


Wanted = tuple[bytes, int]  # routing key, seq
Places = dict[int, Place]  # by seq


class PlaceFinder:
    """Finds records that the router has passed."""

    def __init__(self, data: str) -> None:
        self._data, self._bounds = data, Bounds(data)
        self._marks_from = identity.marks_from(data)
        self._threads = ThreadPoolExecutor(_THREADS, "places")
        self._readers: OrderedDict[tuple[str, int], reader.LogReader] = OrderedDict()
        self._waiting: dict[str, list[tuple[Sequence[Wanted], asyncio.Future[Places]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def find(self, topic: str, wanted: Sequence[Wanted]) -> Places:
        """Return the places of these records of one topic; a record that is not there is left out."""
        future: asyncio.Future[Places] = asyncio.get_running_loop().create_future()
        if topic in self._waiting:
            self._waiting[topic].append((wanted, future))
        else:
            self._waiting[topic] = [(wanted, future)]
            task = asyncio.get_running_loop().create_task(self._drain(topic))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _drain(self, topic: str) -> None:
        """Answer everything that waits for this topic."""
        while batch := self._waiting[topic]:
            self._waiting[topic] = []
            everything = [each for wanted, _ in batch for each in wanted]
            error: Exception | None = None
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._threads, self._look, topic, everything)
            except Exception as err:  # each caller gets it
                error = err
            for _, future in batch:
                if future.done():
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(found)
        del self._waiting[topic]

    def _look(self, name: str, wanted: Iterable[Wanted]) -> Places:
        partitions, from_seq = self._bounds.declared(name)
        topic = Topic(name, partitions, from_seq or 0)
        table = Table({name.encode(): topic}, self._marks_from)
        by_partition: dict[int, list[int]] = {}
        for routing_key, seq in wanted:
            number = topic.partition_of(routing.resolve(table, routing_key, seq), seq) if partitions > 1 else 0
            by_partition.setdefault(number, []).append(seq)
        found: Places = {}
        for number, seqs in by_partition.items():
            found |= self._in_partition(name, number, sorted({*seqs}))
        missing = sorted({seq for seqs in by_partition.values() for seq in seqs} - found.keys())
        for number in range(partitions) if missing and partitions > 1 else ():
            found |= self._in_partition(name, number, missing)
        return found

    def _in_partition(self, topic: str, number: int, seqs: list[int]) -> Places:
        """Return the places of those records of `seqs`, in order, that are in this partition."""
        log = self._reader(topic, number)
        found: Places = {}
        at = 0
        while at < len(seqs):
            hit = log.find(seqs[at], SEQ)
            if hit is None:
                break
            first, lines = log.read(hit.offset, _READ_BYTES)
            if not lines:
                break
            for offset, line in enumerate(lines.split(b"\n")[:-1], first):
                if not line:
                    continue
                seq = record.seq_of(line)
                while at < len(seqs) and seqs[at] <= seq:
                    if seqs[at] == seq:
                        found[seq] = Place(number, offset, line)
                    at += 1
                if at == len(seqs):
                    break
        return found

    def _reader(self, topic: str, number: int) -> reader.LogReader:
        log = self._readers.pop((topic, number), None) or reader.partition(self._data, topic, number)
        self._readers[topic, number] = log
        while len(self._readers) > _READERS:
            self._readers.popitem(last=False)
        return log
