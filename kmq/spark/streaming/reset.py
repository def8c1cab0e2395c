"""`kmq pipeline reset`: moves the position of a query's next batch. Changes plain files; needs no pyspark and no Java.

    last batch 41 ends at {"orders": {"0": 1500}}, --to earliest   → offsets/42 and commits/42 with {"orders": {"0": 0}}

It adds one batch to the checkpoint, without records, that ends where the next batch is to begin: offsets/<n> and
commits/<n>, with n above every existing batch. So nothing is overwritten, and the numbers of batches keep rising. A
pipeline's table skips a batch whose number it knows, so a number used again for other records would lose these records.

With `forget` the new batch ends where the last one does, but without one broker.

Invariant   A reset never happens while the query runs. It removes nothing, and never uses the number of a batch twice.
Crash       offsets/<n> without commits/<n>: the next start finds a batch to run, from the old position to the new one.
            It runs like any batch, or is refused because it goes backwards. Another reset is correct before and after
            that.
Backup      kmq-reset-<n>.json beside it: the offsets before and after, and the time. --to accepts the part "before".
Not covered Queries with state: their windows have counted what was read. They are refused, and need a new checkpoint.
            A query that starts at this very moment, and has neither a pipeline's table nor KMQ's listener.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from kmq.errors import BusyError, ConfigError, KmqError, quotation
from kmq.files import replace_file
from kmq.links.ownership import describe
from kmq.spark.connections import have_one_address
from kmq.spark.source.broker import Broker
from kmq.spark.source.plan import Key, Offsets, StreamPosition, least, name_of, to_json
from kmq.spark.streaming.checkpoint import Checkpoint, Logged, identities, is_ours, positions
from kmq.spark.streaming.status import AS_NAMED, Sources, ends_seen

EARLIEST, LATEST = "earliest", "latest"


class OffsetMove(NamedTuple):
    """The change of one partition's offset."""

    key: Key
    before: int
    after: int
    first: int  # the first offset that exists now
    latest: int  # the end of the log now

    @property
    def again(self) -> int:
        """The number of records that are read a second time."""
        return max(0, min(self.before, self.latest) - max(self.after, self.first))

    @property
    def gone(self) -> int:
        """The number of unread records that do not exist any more and are not requested again."""
        return max(0, min(self.after, self.first) - self.before)

    @property
    def skipped(self) -> int:
        """The number of records that are never read."""
        return max(0, min(self.after, self.latest) - max(self.before, self.first))


class Plan(NamedTuple):
    """What a reset will do."""

    checkpoint: Checkpoint
    batch: int  # the number of the added batch
    unfinished: int | None
    logged: Logged
    lines: list[str]  # the sources of the new batch
    moves: list[OffsetMove]
    forgotten: list[str]  # for each partition of the forgotten broker, what is never read


def plan(checkpoint: Checkpoint, to: str, sources: Sources = AS_NAMED, forget: str = "") -> Plan:
    """Return the plan for `to` (earliest, latest, JSON of offsets, or a time), or for a broker to `forget`.

    Changes nothing. Raises ConfigError.
    """
    if checkpoint.has_state():
        raise ConfigError(
            f"{checkpoint.path}: the query keeps state (windows, or rows to detect duplicates), which has counted what"
            " was read, so it cannot begin elsewhere; give it a new checkpoint and a new table"
        )
    _, logged = checkpoint.committed()
    unfinished = checkpoint.unfinished()
    if logged is None:
        raise ConfigError(f"{checkpoint.path}: no batch is committed yet; remove it and give startingOffsets")
    if not any(map(is_ours, logged.sources)):
        raise ConfigError(f"{checkpoint.path}: the query reads nothing with format('kmq')")
    cwd = str(checkpoint.status().get("cwd") or os.getcwd())
    lines, moves, forgotten = [], [], []
    for line in logged.sources:
        if is_ours(line) and forget:
            line, lost = _without(line, forget, sources, cwd, ends_seen(checkpoint.status()))
            forgotten += lost
        elif is_ours(line):
            wanted, changed = _source(line, to, sources, cwd)
            moves += changed
            line = json.dumps(wanted)
        lines.append(line)
    if forget and not forgotten:
        names = ", ".join(name for line in logged.sources for name in identities(line))
        raise ConfigError(f"--forget {quotation(forget)}: is not in this checkpoint; it has {names}")
    batch = max([*checkpoint.batches("offsets"), *checkpoint.batches("commits"), _of_table(checkpoint)]) + 1
    if batch - 1 not in checkpoint.batches("offsets"):
        raise ConfigError(
            f"{checkpoint.path}: its table has batch {batch - 1} already, which the checkpoint does not know; was the"
            " checkpoint restored from an older copy? Begin with a new table and a new checkpoint"
        )
    return Plan(checkpoint, batch, unfinished, logged, lines, moves, forgotten)


def _of_table(checkpoint: Checkpoint) -> int:
    try:
        with open(f"{checkpoint.table}/.kmq/batch", encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):
        return -1


def _source(line: str, to: str, sources: Sources, cwd: str) -> tuple[dict[str, Any], list[OffsetMove]]:
    ids, before = identities(line), positions(line)
    wanted: Offsets = {}
    moves = []
    for name, identity in ids.items():
        broker = sources.open(name, identity, cwd)
        topics = sorted({topic for at, topic, _ in before if at == name})
        bounds = {(name, *at): edges for at, edges in broker.bounds(topics).items()}
        target = _targets(to, name, bounds, broker)
        for key in sorted({key for key in before if key[0] == name} | bounds.keys()):
            begun = before.get(key, least(key[1]))
            first, latest = bounds.get(key, (begun, begun))
            wanted[key] = target.get(key, begun)
            moves.append(OffsetMove(key, begun, wanted[key], first, latest))
    return to_json(wanted, ids), moves


def _without(line: str, forget: str, sources: Sources, cwd: str, seen: dict[Key, int]) -> tuple[str, list[str]]:
    """Return a source's line without a broker, and for each of its partitions what is never read.

    `seen`: where logs ended when the query last looked.
    """
    position, lost = StreamPosition.of_json(json.loads(line)), []
    for name in [name for name in position.identities if have_one_address(name, forget)]:
        identity = position.identities.pop(name)
        before = {key: at for key, at in position.offsets.items() if key[0] == name}
        lost.append(f"{name} is forgotten (data id {identity or 'not known'})")
        ends, how = seen, "was last seen to end at"
        try:
            broker = sources.open(name, identity, cwd)
            bounds = broker.bounds(sorted({topic for _, topic, _ in before}))
            ends, how = {(name, *log): end for log, (_, end) in bounds.items()}, "ends at"
        except KmqError as error:
            lost.append(f"it cannot be asked: {error}")
        for key, at in sorted(before.items()):
            what = (
                f"{how} {ends[key]}: {max(0, ends[key] - at):,} are"
                if key in ends
                else "its end is not known: what came later is"
            )
            lost.append(f"{name_of(key)}: read up to {at}, {what} never read")
    if not position.identities:
        raise ConfigError(
            f"--forget {quotation(forget)}: is the only broker of this checkpoint; begin with a new checkpoint"
        )
    offsets = {key: at for key, at in position.offsets.items() if key[0] in position.identities}
    last = {key: stamp for key, stamp in position.last.items() if key in offsets}
    return json.dumps(StreamPosition(offsets, position.identities, last, {}).to_json()), lost


def _targets(to: str, name: str, bounds: dict[Key, tuple[int, int]], broker: Broker) -> Offsets:
    if to == EARLIEST:
        return {key: first for key, (first, _) in bounds.items()}
    if to == LATEST:
        return {key: latest for key, (_, latest) in bounds.items()}
    if not to.lstrip().startswith("{"):
        micros = _micros(to)
        found = broker.offsets_of_time([key[1:] for key in bounds], micros)
        return {(name, *log): offset for log, offset in found.items()}
    return _named(to, name, bounds)


def _named(to: str, name: str, bounds: dict[Key, tuple[int, int]]) -> Offsets:
    """Parse offsets in the form of startingOffsets: {"topic": {"0": 5}}, by broker or for every broker.

    -2: earliest; -1: latest. Raises ConfigError.
    """
    try:
        table = json.loads(to)
        topics = table[name] if name in table else {} if any(map(_is_broker, table.values())) else table
        offsets = {
            (name, topic, int(number)): at
            for topic, partitions in topics.items()
            if topic[:2] != "__" or topic == "__append"
            for number, at in partitions.items()
        }
    except (ValueError, AttributeError, TypeError) as err:
        raise ConfigError(
            f'--to {quotation(to)}: must be {{"topic": {{"0": 23}}}} or {{"broker": {{"topic": …}}}}: {err}'
        ) from None
    for key, at in offsets.items():
        if key not in bounds:
            partitions = ", ".join(f"{topic}/{number}" for _, topic, number in sorted(bounds))
            raise ConfigError(f"--to: unknown partition {key[1]}/{key[2]} at {name}; expected one of {partitions}")
        first, latest = bounds[key]
        offsets[key] = at = {-2: first, -1: latest}.get(at, at)
        if type(at) is not int or not least(key[1]) <= at <= latest:
            raise ConfigError(f"--to: {key[1]}/{key[2]} at {name} has offsets {first} to {latest}, but not {at}")
    return offsets


def _is_broker(topics: Any) -> bool:
    return isinstance(topics, dict) and any(isinstance(value, dict) for value in topics.values())


def _micros(text: str) -> int:
    """Return a time in microseconds since the epoch. Raises ConfigError.

    `text`: milliseconds since the epoch, as in Spark's options, or ISO 8601, in UTC unless it names a zone.
    """
    if re.fullmatch(r"\d+", text):
        return int(text) * 1000
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--to {quotation(text)}: must be earliest, latest, JSON of offsets, milliseconds since the epoch, or a time such as"
            " 2026-11-22T10:00"
        ) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1_000_000)


def apply(found: Plan) -> str:
    """Carry out a plan; return the path of the backup. Raises BusyError if the query runs or has advanced since."""
    checkpoint = found.checkpoint
    with _alone(checkpoint):
        if checkpoint.batches("offsets")[-1] >= found.batch:
            raise BusyError(f"{checkpoint.path}: the query has advanced meanwhile; run the command again")
        about = {**found.logged.about, "batchTimestampMs": int(time.time() * 1000)}
        offsets = "\n".join((found.logged.version, json.dumps(about), *found.lines))
        backup = f"{checkpoint.path}/kmq-reset-{found.batch}.json"
        note = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "before": [json.loads(line) if is_ours(line) else line for line in found.logged.sources],
            "after": [json.loads(line) if is_ours(line) else line for line in found.lines],
            "unfinished_batch": found.unfinished,
        }
        replace_file(backup, json.dumps(note, indent=1).encode())
        watermark = json.dumps({"nextBatchWatermarkMs": about.get("batchWatermarkMs", 0)})
        _write(f"{checkpoint.path}/offsets/{found.batch}", offsets)
        _write(f"{checkpoint.path}/commits/{found.batch}", f"v1\n{watermark}")
    return backup


def _write(path: str, text: str) -> None:
    """Write a file as a whole, and remove the checksum of an earlier file of this name: it would not match."""
    directory, name = os.path.split(path)
    new = f"{directory}/.{name}.kmq"
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileNotFoundError):
        os.remove(f"{directory}/.{name}.crc")
    os.rename(new, path)


@contextmanager
def _alone(checkpoint: Checkpoint) -> Iterator[None]:
    """Hold the locks of the query during the `with` block. Raises BusyError if the query runs."""
    held = []
    try:
        for lock in checkpoint.locks():
            if not lock.try_acquire(describe("reset", checkpoint.path)):
                raise BusyError(f"{checkpoint.path}: its query is running ({lock.holder()}); stop it first")
            held.append(lock)
        yield
    finally:
        for lock in held:
            lock.release()


# --- text ------------------------------------------------------------------------------------------------------------


def text(found: Plan) -> list[str]:
    """Return lines that tell the user what the plan means."""
    lines = [*found.forgotten]
    for move in found.moves:
        broker, topic, number = move.key
        counts = (move.again, "read again"), (move.skipped, "skipped"), (move.gone, "gone")
        what = [f"{count:,} {how}" for count, how in counts if count]
        lines.append(
            f"{broker} {topic}/{number}: {move.before} → {move.after}" + (f" ({', '.join(what)})" if what else "")
        )
    again, skipped = sum(move.again for move in found.moves), sum(move.skipped for move in found.moves)
    if found.forgotten:
        lines.append("a query that still names this broker reads it from its first record, as one that is new")
    else:
        lines.append(f"in all: {again:,} records are read again, {skipped:,} are skipped")
    if again:
        lines.append(
            "read again: a pipeline's table (Parquet, Delta) gets these records twice, because it knows batches only by"
            " number; remove the records there first, or begin a new table. A topic gets them twice, except if its ids"
            " are made from the records (origin_… columns, mirror, dead letters): then the broker stores nothing again"
        )
    if skipped:
        lines.append("skipped: no result of this query will ever have these records")
    for move in (move for move in found.moves if move.gone):
        last = min(move.after, move.first) - 1
        lines.append(
            f"gone for good: {name_of(move.key)} offsets {move.before} to {last} ({move.gone:,} records), which retention,"
            " truncation or a deletion took before they were read"
        )
    if found.unfinished is not None:
        lines.append(
            f"batch {found.unfinished} was begun and not finished: it will not be run again, and what it has added"
            " already stays; above, its records count as not read"
        )
    return lines
