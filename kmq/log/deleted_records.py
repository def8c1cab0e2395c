"""Which records of a topic were deleted: with the topic, by a start of a partition, or by retention. Reads files only.

    DeletedRecords(data, routed_seq).has("orders", b"orders.k", 4711) → True: record 4711 of `orders` is gone for good

Used by    the framer: an id whose record was deleted is unknown (kmq/framing/dedupe.py), so the message is stored. Also
           `kmq dlq replay`: a letter whose replayed record was deleted counts as not replayed.
           docs/decisions/deleted-ids.md says why.
Invariant  A record that a reader can see, or that will be in its queue, never counts as deleted. A deletion counts at
           the latest when its request was answered, because readers see the same files. Files must prove a deletion: a
           line of `deletions`, or a partition that begins with a later record because records before it were deleted. A
           missing record alone is no proof: the queue may be lost or damaged, and is rebuilt; drop_oldest may have
           dropped the record; compaction may have replaced it, and storing it again would bring an old value back. The
           first record of a segment always stays in compaction, so it says which seqs came before it.
Crash      This module writes nothing. The router has `deletions` on disk before it removes a queue, and a rebuilt queue
           begins no earlier than its start. So a record that counted as deleted counts so after every start.
Cost       For each topic in a turn one stat of its directories. Partitions are searched only for a record older than
           the first record of a partition from which records were deleted.
Memory     At most _MOST partitions, some numbers each.
"""

import contextlib
from collections.abc import Callable

from kmq.files import Signature, is_settled, signature, signatures
from kmq.log import deletions, reader, rows, segment, topics
from kmq.log.damage import DamageError
from kmq.log.deletions import Deleted
from kmq.log.partition import directory_of
from kmq.log.rows import NotHereError
from kmq.log.segment import COMPACT, SEQ, within
from kmq.log.topics import Declaration
from kmq.message import record, routing
from kmq.message.routing import Lives, Table

_MOST = 16_384
_HEAD = 64  # bytes of a record that have its seq


_Beginning = tuple[int, int, bool]  # of a partition: offset, seq (0: no record, or damaged), whether it is empty
# A partition, the least seq that it has of its topic's records, and whether it had records before that.
_QueueStart = tuple[int, int, bool]
_Queues = tuple[Declaration, list[_QueueStart]]  # the list is empty if it is not known how they begin


class DeletedRecords:
    """Answers for one thread. A deletion after `begin` counts from the next `begin` on."""

    def __init__(self, data: str, routed_seq: Callable[[], int]) -> None:
        """`routed_seq`: a record up to this seq is in its queue, or was."""
        self._data, self._routed_seq = data, routed_seq
        self._declared: dict[str, tuple[Signature, Declaration]] = {}
        self._listed: Signature | None = None  # of the file `deletions`, when it was read
        self._deleted, self._lives, self._gone = Deleted([]), Lives(), Table()
        self._beginnings: dict[str, tuple[list[str], Signature, _Beginning]] = {}  # by directory: files, signature
        self._seen: dict[str, _Queues] = {}  # topics in this turn

    def begin(self) -> None:
        """Look again: files may have changed."""
        self._seen.clear()

    def has(self, topic: str, routing_key: bytes, seq: int, is_exact: bool = True) -> bool:
        """Return True if the record `seq`, which was stored in `topic`, was deleted.

        Without `is_exact` the record has this seq or a lower one. `routing_key`: of the record, except for its mark.
        """
        queues = self._seen.get(topic)
        if queues is None:
            queues = self._seen[topic] = self._look(topic)
        declared, partitions = queues
        is_in_force = declared.from_seq is not None and declared.from_seq <= seq
        if is_exact and not is_in_force:  # the topic that was in force then may have had a longer name
            return bool(routing.resolve(self._gone, routing_key, seq).topic == routing.DELETED)
        had_lives = any(first <= seq for first, _ in self._lives.get(topic, ()))
        cut = [number for number, least, is_cut in partitions if is_cut and seq < least]
        reached = [number for number, least, _ in partitions if least <= seq]
        if not is_exact:
            return had_lives if not is_in_force else bool(partitions) and not reached and (bool(cut) or had_lives)
        if declared.limits.get("cleanup") == COMPACT and len(partitions) > 1:
            table = Table({topic.encode(): declared.topic(topic, 0)})
            mine = table[topic.encode()].partition_of(routing.resolve(table, routing_key, seq), seq)
            cut = [number for number in cut if number == mine]
        return bool(cut) and not any(self._holds(topic, number, seq) for number in reached)

    def routing_key(self, seq: int) -> bytes | None:
        """Return the routing key of a record; None if the WAL does not have it any more, or it is damaged there."""
        wal = reader.wal(self._data)
        try:
            line = within(wal.read(seq, 1)[1], seq, seq) if seq >= wal.first_offset else b""
        except DamageError:
            return None
        return record.routing_key_of(line) if line else None

    def _holds(self, topic: str, number: int, seq: int) -> bool:
        """Return True if a partition has the record, or is damaged where it would be."""
        try:
            found = reader.partition(self._data, topic, number).find(seq, SEQ)
        except (DamageError, NotHereError):
            return True
        return found is not None and record.seq_of(found.line) == seq

    # --- files -------------------------------------------------------------------------------------------------------

    def _look(self, topic: str) -> _Queues:
        routed = self._routed_seq()  # first: a record up to it is in its queue when we look
        self._look_at_deletions()
        declared = self._declaration(topic)
        starts: list[_QueueStart] = []
        if declared.is_guessed or declared.from_seq is None:
            return declared, starts
        for number in range(declared.partitions):
            found = self._beginning(directory_of(self._data, topic, number))
            if found is None:
                return declared, []
            first, seq, is_empty = found
            is_cut = first > self._deleted.first_offset(topic, number)
            starts.append((number, routed + 1 if is_empty else seq, is_cut))
        return declared, starts

    def _declaration(self, topic: str) -> Declaration:
        try:
            seen = signature(topics.toml_path(self._data, topic))
        except FileNotFoundError:
            return topics.read(self._data, topic)
        cached = self._declared.get(topic)
        if cached is None or cached[0] != seen:
            if len(self._declared) >= _MOST:
                self._declared.clear()
            cached = self._declared[topic] = seen, topics.read(self._data, topic)
        return cached[1]

    def _look_at_deletions(self) -> None:
        seen: Signature = ()
        with contextlib.suppress(FileNotFoundError):
            seen = signature(f"{self._data}/{deletions.NAME}")
        if seen != self._listed:
            self._listed, self._deleted = seen, Deleted.of(self._data)
            self._lives = self._deleted.lives
            self._gone = routing.table((), self._lives)

    def _beginning(self, directory: str) -> _Beginning | None:
        """Return how a partition begins; None if it is not there, or not known because its file `tier` is damaged."""
        while True:
            try:
                cached = self._beginnings.get(directory)
                if cached is not None and signatures(cached[0]) == cached[1]:
                    return cached[2]
                seen = signature(directory)
                segments, has_tier = segment.look(directory)
                if not segments:
                    return None
                first, path = segments[0]
                paths = [directory, *([rows.path_of(directory)] if has_tier else [])]
                tier_seen = signatures(paths[1:])
                cold = rows.of(directory).cold(first) if has_tier else []
                with open(path, "rb", buffering=0) as file:
                    head = file.read(_HEAD)
            except FileNotFoundError:
                if not segment.listing(directory):
                    return None
                continue  # the segment was deleted meanwhile
            except DamageError:
                return None
            found = first, record.stamp(head)[0], not head
            if cold:
                found = rows.of(directory).begin(first), cold[0].seqs[0], False
            if head and is_settled(seen):  # an empty one gets a record without a change of the directory
                if len(self._beginnings) >= _MOST:
                    self._beginnings.clear()
                self._beginnings[directory] = paths, seen + tier_seen, found
            return found
