"""Transactions on disk: their states, and the lines that are held back.

    __transactions/<t>     t = crc32 of the transactional id, mod 8. A line's key is <pid>-<epoch>-<n>, n the number of
                           the transaction, and its payload the line to be written, without its id:
                           `orders.@2.eu|1714500000.123|;trace=x|…`, or an offset:
                           `__consumer_offsets.@.<group>.…|||offset=…`
    __transaction_state    compacted; key <transactional id>; payload
                           `pid= epoch= n= state=empty|commit|abort partition= first= end= copy= timeout= [former=]`

State       `empty`: transaction n may be open. `commit`: n is decided, its lines are those with its key in first…end,
            and its copies have the ids from `copy` on. `abort`: n is aborted, and n + 1 may be open. The last record of
            an id counts. `former`: the epoch whose holder may ask again for the next one, which is in force. Older
            releases ignore it.
Open        A transaction is open if it has lines and no state that decides it. No record says that it is open.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

from kmq.config.values import MIB
from kmq.gateway.groups.offset_table import TOPIC as OFFSETS
from kmq.gateway.groups.offset_table import CommittedOffset, Partition, RowKey, decode_key, decode_payload
from kmq.log import reader
from kmq.log.deletions import DeletedTopics
from kmq.message import record
from kmq.message.text import decode

STATES, HELD = "__transaction_state", "__transactions"
PARTITIONS = 8
_NO_RETENTION = {"retention_age": "never", "retention_bytes": "none"}
LIMITS = {
    STATES: {"cleanup": "compact", "segment_bytes": "16 MiB", **_NO_RETENTION},
    HELD: {"segment_bytes": "16 MiB", **_NO_RETENTION},
}
_OFFSETS_MARK = b"%b.@" % OFFSETS.encode()
EMPTY, COMMIT, ABORT = "empty", "commit", "abort"
READ_BYTES = MIB  # at once


def partition_of(id: str) -> int:
    """Return the partition of `__transactions` that has the lines of a transactional id."""
    return crc32(id.encode()) % PARTITIONS


class TransactionState(NamedTuple):
    """A record of `__transaction_state`. `number`: of the transaction that it decides, or of the next transaction."""

    id: str
    pid: int
    epoch: int
    number: int
    state: str
    partition: int
    first: int
    end: int
    copy: int
    timeout_ms: int
    former: int | None = None
    seq: int = 0
    seconds: int = 0  # when it was stored, in seconds since the epoch

    @property
    def open_number(self) -> int:
        """Return the number of the transaction that is committed, or of the one that may be open."""
        return self.number + (self.state == ABORT)

    @property
    def held_key(self) -> bytes:
        """Return the key of the lines of that transaction."""
        return b"%d-%d-%d" % (self.pid, self.epoch, self.open_number)

    def encode(self) -> bytes:
        return (
            f"pid={self.pid} epoch={self.epoch} n={self.number} state={self.state} partition={self.partition}"
            f" first={self.first} end={self.end} copy={self.copy} timeout={self.timeout_ms}"
            + ("" if self.former is None else f" former={self.former}")
        ).encode()


_NUMBERS = ("pid", "epoch", "n", "partition", "first", "end", "copy", "timeout")
_OPTIONAL = {"former"}


def _decode_state(line: bytes) -> TransactionState | None:
    """Return the state in a stored line; None for a tombstone. Raises ValueError or KeyError for any other line."""
    stored = record.fields(line)
    id = _id_of(stored.routing_key)
    if not stored.payload:
        return None
    said = dict(word.split("=", 1) for word in stored.payload.decode("ascii").split(" "))
    if (state := said.pop("state")) not in (EMPTY, COMMIT, ABORT):
        raise ValueError(f"state {state!r}")
    names = {"n": "number", "timeout": "timeout_ms"}
    numbers = {names.get(name, name): int(said[name]) for name in (*_NUMBERS, *(_OPTIONAL & said.keys()))}
    seconds = record.parse_ts(stored.recv_ts) // 1_000_000
    return TransactionState(id=id, state=state, seq=int(stored.seq), seconds=seconds, **numbers)


def _id_of(routing_key: bytes) -> str:
    mark = record.marked(routing_key)
    return decode(mark.key or b"") if mark is not None else ""


def read_states(data: str) -> dict[str, TransactionState]:
    """Return id → its last state, in the order of these records. Raises DamageError. Call it in a thread."""
    found: dict[str, TransactionState] = {}
    if not os.path.isdir(f"{data}/topics/{STATES}"):
        return found
    for _, lines in reader.partition(data, STATES, 0).chunks(0, READ_BYTES):
        for line in lines.split(b"\n"):
            with suppress(ValueError, KeyError, TypeError):
                if line:
                    state = _decode_state(line)
                    found.pop(_id_of(record.routing_key_of(line)), None)
                    if state is not None:
                        found[state.id] = state
    return found


class HeldLines(NamedTuple):
    """The lines of an open transaction. `first`: the offset of the first one. `offsets`: that it commits, by group.

    `first_ids`: partition → id of its first record.
    """

    first: int
    lines: int
    nbytes: int
    offsets: set[tuple[str, Partition]]
    first_ids: dict[Partition, int]


_HELD_LINE = re.compile(
    rb"(?m)^\d+\|[^|\n]*\|%b\.@\d+\.([0-9-]+)\|[^|\n]*\|(\d*)[^|\n]*\|([^|\n]*)\|[^\n]*\n" % HELD.encode()
)


def read_held(data: str, keys: Iterable[bytes]) -> dict[bytes, HeldLines]:
    """Return key → held lines, for those of these keys that have any. Raises DamageError. Call it in a thread."""
    wanted, found = frozenset(keys), dict[bytes, HeldLines]()
    if not wanted or not os.path.isdir(f"{data}/topics/{HELD}"):
        return found
    for number in range(PARTITIONS):
        log = reader.partition(data, HELD, number)
        for first, lines in log.chunks(log.first_offset, READ_BYTES):
            for ahead, match in enumerate(_HELD_LINE.finditer(lines)):
                key, id, target = match.groups()
                if key in wanted:
                    before = found.get(key) or HeldLines(first + ahead, 0, 0, set(), {})
                    mark = record.marked(target)
                    if mark is not None and mark.topic == OFFSETS.encode():
                        with suppress(ValueError):
                            row = decode_key(mark.key or b"")
                            before.offsets.add((row.group, (row.topic, row.partition)))
                    elif mark is not None:
                        before.first_ids.setdefault((mark.topic.decode(), mark.partition), int(id))
                    nbytes = before.nbytes + match.end() - match.start()
                    found[key] = before._replace(lines=before.lines + 1, nbytes=nbytes)
    return found


def held_routing_key(partition: int, key: bytes) -> bytes:
    return b"%b.@%d.%b" % (HELD.encode(), partition, key)


# --- lines to be copied ----------------------------------------------------------------------------------------------


class Copied(NamedTuple):
    """The result of a copy. `next_id`: after the ids of the copies. `last_seq`: of the last copy.

    `deleted`: number of records left out because their topic was deleted. `too_long`: left out because they exceed the
    longest line now, or did in the life that began to copy.
    """

    next_id: int
    offsets: dict[RowKey, CommittedOffset]
    deleted: int
    too_long: int
    last_seq: int = 0


def render_copies(
    lines: Iterable[bytes], key: bytes, name: bytes, before: Copied, deleted_topics: DeletedTopics, max_line: int
) -> tuple[bytes, Copied]:
    """Return the copies of the stored lines that have this routing key, as lines for their topics, and the new total.

    `name`: the producer of the copies.
    """
    copies: list[bytes] = []
    id, offsets, deleted, too_long, last_seq = before
    for line in lines:
        seq, _, line_key, _, held_id, payload = line.split(b"|", 5)  # hot loop: record.fields
        if line_key != key:
            continue
        target, stamp, rest = payload.split(b"|", 2)
        is_offset = target.startswith(_OFFSETS_MARK)
        # Few lines need this, and it takes more time than all the rest.
        mark = record.marked(target) if is_offset or deleted_topics.is_due else None
        if is_offset and mark is not None:
            row = decode_key(mark.key)
            offset = decode_payload(rest.partition(b"|")[2], int(seq))
            if isinstance(offset, CommittedOffset) and not deleted_topics.covers(row.topic, int(seq)):
                offsets[row] = offset
        elif mark is not None and deleted_topics.covers(mark.topic.decode(), _from_seq(held_id)):
            deleted += 1
        elif len(copy := b"%b|%b|%d;p=%b%b\n" % (target, stamp, id, name, rest)) > max_line + 1:
            too_long += 1
        else:
            copies.append(copy)
        id += 1
    return b"".join(copies), Copied(id, offsets, deleted, too_long, last_seq)


def _from_seq(held_id: bytes) -> int:
    """Return the from_seq of the topic for which a line is held. Its producer's name has it."""
    return int(held_id.partition(b";p=k")[2].partition(b";")[0].split(b".")[1])
