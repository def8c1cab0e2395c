"""Judges a shard from what its clients wrote and from the brokers' files alone. Shares no code with kmq/ or stages/.

    python -m chaos.cluster.judge HISTORIES WITNESS a=DATA b=DATA c=DATA      prints what is wrong; exit code 1 if anything is

HISTORIES and WITNESS are directories: one history a file (chaos/history.py), and what witness.py saw of each WAL.

Claims, each named by what breaks it
    lost ack          an acknowledged message that is not stored as the seq that was answered, or not stored at all
    stored twice      a message that was to be stored once, at two seqs
    other content     a stored message that is not what was sent
    invented          a stored message that nobody sent
    answered twice    one seq was answered for two messages, or one message with two seqs
    read what was cut a record was read at an offset at which the final log does not have it
    end went back     a partition was said to end in front of what its client had seen before
    two leaders       two brokers began one epoch, or two records were written as one seq in one epoch
    epochs fall       an epoch's record lies behind that of a later epoch
    gap               a seq is missing within a WAL
    WALs differ       two replicas have different bytes under one seq, both committed
    logs differ       two replicas have different lines at one offset, or a partition log is not what the WAL says
    behind            a replica has not all that is committed, though the shard has settled
    cut unaccounted   a record was in a WAL, and is neither there nor in a file of `cut/`
    slow healing      no message that was sent after a healing was acknowledged in time
and of chaos/anomalies.py those of READERS: order, groups, and readers that move from broker to broker.
"""

import itertools
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from chaos import anomalies
from chaos.anomalies import Verdict
from chaos.history import OK, Again, Answer, Ends, Healed, Operation, Place, Poll, Produce, read

HEALED_S = 10.0  # from a healing to the first new acknowledgement
READERS = {
    "refused write",
    "reordered",
    "non-monotonic poll",
    "poll-skip",
    "unassigned poll",
    "unseen",
    "lost answer",
    "lost nack",
    "skipped by latest",
    "commit lost",
    "position against group",
    "stale commit",
    "two owners",
}
EPOCH_KEY = b"__kmq.epoch"
_EPOCH = re.compile(rb"epoch=(\d+) mark=([0-9a-f]+) broker=(\S+) level=\d+")

Epoch = tuple[bytes, bytes, int]  # mark, broker, seq of its record


class Replica(NamedTuple):
    """The files of one data directory. `shown`: the last seq that its readers may have seen."""

    name: str
    wal: dict[int, bytes]
    logs: dict[Place, dict[int, bytes]]
    cuts: list[tuple[str, dict[int, bytes]]]
    shown: int


def seq_of(line: bytes) -> int:
    return int(line.partition(b"|")[0])


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file. What follows the last newline is none; NULs stand in for bytes that never came."""
    return [line for line in path.read_bytes().split(b"\n")[:-1] if b"\0" not in line]


def load_replica(name: str, data: Path) -> Replica:
    wal: dict[int, bytes] = {}
    for path in sorted((data / "append").glob("*.log"), key=lambda path: int(path.stem)):
        wal |= {seq_of(line): line for line in _whole_lines(path)}
    logs: dict[Place, dict[int, bytes]] = {}
    for directory in sorted((data / "topics").glob("*/[0-9]*")):
        log = logs.setdefault((directory.parent.name, int(directory.name)), {})
        for path in sorted(directory.glob("*.log"), key=lambda path: int(path.stem)):
            log |= dict(enumerate(_whole_lines(path), int(path.stem)))
    cuts = [
        (path.name, {seq_of(line): line for line in _whole_lines(path)})
        for path in sorted((data / "cut").glob("*.log"))
    ]
    committed = (
        re.match(rb"(?:hw=)?(\d+)\s", (data / "committed").read_bytes()) if (data / "committed").exists() else None
    )
    shown = [seq_of(line) for log in logs.values() for line in log.values() if line]
    return Replica(name, wal, logs, cuts, max([int(committed[1]) if committed else 0, *shown]))


class Store:
    """What the replicas hold together. Everything committed that they do not agree on is found while it is put together."""

    def __init__(self, replicas: Iterable[Replica], verdict: Verdict) -> None:
        self.replicas, self._verdict = list(replicas), verdict
        self.records: dict[int, bytes] = {}  # committed: seq → line
        self.logs: defaultdict[Place, dict[int, bytes]] = defaultdict(dict)
        self._owner: dict[object, str] = {}
        for replica in self.replicas:
            self._merge(replica)

    def _merge(self, replica: Replica) -> None:
        for seq, line in replica.wal.items():
            if seq <= replica.shown:
                self._agree("WALs differ", f"seq {seq}", self.records, seq, line, replica)
        for place, log in replica.logs.items():
            for offset, line in log.items():
                if not line:  # removed by compaction
                    continue
                what = f"{place[0]}/{place[1]} offset {offset}"
                self._agree("logs differ", what, self.logs[place], offset, line, replica)
                self._agree("logs differ", f"{what}, seq {seq_of(line)}", self.records, seq_of(line), line, replica)

    def _agree(self, kind: str, what: str, table: dict[int, bytes], key: int, line: bytes, replica: Replica) -> None:
        known = table.setdefault(key, line)
        owner = self._owner.setdefault((id(table), key), replica.name)
        if known != line:
            self._verdict.add(kind, f"{what}: {owner} has {known[:60]!r}, {replica.name} has {line[:60]!r}")

    def check_gaps(self) -> None:
        for replica in self.replicas:
            seqs = sorted(replica.wal)
            for before, seq in itertools.pairwise(seqs):
                if seq != before + 1:
                    self._verdict.add("gap", f"{replica.name}: {seq} follows {before}")

    def check_settled(self) -> None:
        """Every replica has all that any of them has shown, on disk and in its logs."""
        last = max((replica.shown for replica in self.replicas), default=0)
        for replica in self.replicas:
            if last and last not in replica.wal:
                self._verdict.add("behind", f"{replica.name}: its WAL ends at {max(replica.wal, default=0)} of {last}")
            for place, log in self.logs.items():
                end, most = max(replica.logs.get(place, {}), default=-1), max(log)
                if end < most:
                    self._verdict.add("behind", f"{replica.name}: {place[0]}/{place[1]} ends at {end} of {most}")

    def check_epochs(self) -> None:
        """Of an epoch there is one record, wherever it was written, and one line under each seq."""
        begun: dict[int, Epoch] = {}
        written: dict[tuple[int, int], tuple[str, bytes]] = {}
        for where, lines in self._all_that_was_written():
            epoch = None
            for seq, line in sorted(lines.items()):
                if (found := epoch_of(line)) is not None:
                    if epoch is not None and found[0] <= epoch:
                        self._verdict.add("epochs fall", f"{where}: {found[0]} at {seq}, after {epoch}")
                    epoch = found[0]
                    if begun.setdefault(epoch, found[1]) != found[1]:
                        self._verdict.add("two leaders", f"{where}: epoch {epoch}: {begun[epoch]} and {found[1]}")
                if epoch is not None:
                    other, known = written.setdefault((epoch, seq), (where, line))
                    if known != line:
                        what = f"seq {seq} of epoch {epoch}: {known[:60]!r} in {other}, {line[:60]!r} in {where}"
                        self._verdict.add("two leaders", what)

    def _all_that_was_written(self) -> Iterator[tuple[str, dict[int, bytes]]]:
        for replica in self.replicas:
            yield f"{replica.name}/append", replica.wal
            for name, lines in replica.cuts:
                yield f"{replica.name}/cut/{name}", lines


def epoch_of(line: bytes) -> tuple[int, Epoch] | None:
    """Return the epoch that this record begins, or None."""
    fields = line.split(b"|", 5)
    match = _EPOCH.fullmatch(fields[5]) if len(fields) == 6 and fields[2] == EPOCH_KEY else None
    return (int(match[1]), (match[2], match[3], int(fields[0]))) if match else None


# --- messages --------------------------------------------------------------------------------------------------------


def check_messages(store: Store, history: list[Operation], verdict: Verdict) -> None:
    """Compare what was sent and answered with what is stored."""
    sent = {each.value: each for each in history if isinstance(each, Produce)}
    seqs: defaultdict[str, list[int]] = defaultdict(list)
    for seq, line in sorted(store.records.items()):
        fields = line.split(b"|", 5)
        if fields[2].startswith((b"__", b"dead.malformed")):  # KMQ's own, and lines that were cut off on their way
            continue
        payload = fields[5] if len(fields) == 6 else b""
        value = payload.partition(b" ")[0].decode(errors="replace")
        seqs[value].append(seq)
        message = sent.get(value)
        if message is None:
            verdict.add("invented", f"seq {seq}: {line[:80]!r}")
        elif not _is_content(message, payload):
            verdict.add("other content", f"seq {seq}: {value} is {len(payload)} bytes, {payload[:60]!r}")
    for value, found in seqs.items():
        if len(found) > 1 and value in sent and sent[value].once:
            verdict.add("stored twice", f"{value}: as {found[:5]}")
    _check_answers(seqs, history, verdict)


def _is_content(message: Produce, payload: bytes) -> bool:
    """A payload is its value, a space, and x as often as it has to be long."""
    start = message.value.encode() + b" "
    is_long_enough = message.size is None or len(payload) == message.size
    return is_long_enough and payload.startswith(start) and not payload[len(start) :].strip(b"x")


def _check_answers(seqs: Mapping[str, list[int]], history: list[Operation], verdict: Verdict) -> None:
    by_seq: dict[int, str] = {}
    by_value: dict[str, int] = {}
    for each in history:
        if isinstance(each, Produce) and each.outcome == OK and each.value not in seqs:
            verdict.add("lost ack", f"{each.value}, sent by {each.process}, is not stored")
        if not isinstance(each, Answer):
            continue
        other, before = by_seq.setdefault(each.seq, each.value), by_value.setdefault(each.value, each.seq)
        if other != each.value:
            verdict.add("answered twice", f"seq {each.seq}: for {other} and for {each.value}")
        if before != each.seq:
            verdict.add("answered twice", f"{each.value}: as {before} and as {each.seq}")
        if each.seq not in seqs.get(each.value, []):
            what = f"{each.value}, sent by {each.process}, was answered with {each.seq}"
            verdict.add("lost ack", f"{what}; it is stored as {seqs.get(each.value, 'nothing')}")


# --- readers ---------------------------------------------------------------------------------------------------------


def check_readers(store: Store, history: list[Operation], verdict: Verdict) -> None:
    ends: Counter[tuple[str, Place]] = Counter()
    for each in history:
        if isinstance(each, Poll | Again):
            values = each.values if isinstance(each, Poll) else (each.value,)
            first = each.first if isinstance(each, Poll) else each.offset
            for offset, value in enumerate(values, first):
                line = store.logs[each.place].get(offset)
                if line is None or line.split(b"|", 5)[-1].partition(b" ")[0] != value.encode():
                    what = f"{each.process} read {value} at {each.place} {offset}"
                    verdict.add("read what was cut", f"{what}; the final log has {line and line[:60]!r}")
            ends[each.process, each.place] = max(ends[each.process, each.place], first + len(values))
        elif isinstance(each, Ends):
            if each.end < ends[each.process, each.place]:
                what = f"{each.process}: {each.place} ends at {each.end} after {ends[each.process, each.place]}"
                verdict.add("end went back", what)
            ends[each.process, each.place] = max(ends[each.process, each.place], each.end)


def check_groups(store: Store, history: list[Operation], drained: Iterable[str], verdict: Verdict) -> None:
    """Have groups and orders judged as those of one broker are: one log, whoever serves it."""
    answered = {each.value for each in history if isinstance(each, Answer)}
    operations: list[Operation] = [
        each._replace(outcome=OK) if isinstance(each, Produce) and each.value in answered else each for each in history
    ]
    topics = {each.place[0] for each in history if isinstance(each, Poll)}
    for place, log in store.logs.items():
        values = tuple(line.split(b"|", 5)[-1].partition(b" ")[0].decode(errors="replace") for line in log.values())
        if place[0] in topics and log:
            operations.append(Poll("the final log", "", place, min(log), values, 0.0))
    found = anomalies.check(operations, drained=tuple(drained))
    for anomaly in found.anomalies:
        if anomaly.kind in READERS:
            verdict.add(anomaly.kind, anomaly.what)


def check_healing(history: list[Operation], within_s: float, verdict: Verdict) -> None:
    answers = [each for each in history if isinstance(each, Answer)]
    for healed in (each for each in history if isinstance(each, Healed)):
        ended = [each.ended for each in answers if each.began >= healed.ended]
        took = min(ended, default=float("inf")) - healed.ended
        if took > within_s:
            verdict.add("slow healing", f"{healed.what}: the first new acknowledgement came after {took:.1f} s")


# --- what was cut ----------------------------------------------------------------------------------------------------


def check_cuts(store: Store, witness: Path, verdict: Verdict) -> None:
    """All that the witness saw in a WAL since it was last emptied is there, or in what was cut from it."""
    for replica in store.replicas:
        seen: dict[tuple[int, int], None] = {}
        path = witness / replica.name
        for line in path.read_text().splitlines() if path.exists() else ():
            if line == "forget":
                seen.clear()
            else:
                seq, crc = line.split()
                seen[int(seq), int(crc)] = None
        kept = {(seq, zlib.crc32(line)) for seq, line in replica.wal.items()}
        cuts = [lines for _, lines in replica.cuts]
        cuts += [_by_seq(path) for path in (witness / f"{replica.name}.cut").glob("*.log")]
        kept |= {(seq, zlib.crc32(line)) for lines in cuts for seq, line in lines.items()}
        for number, _ in seen.keys() - kept:
            verdict.add("cut unaccounted", f"{replica.name}: seq {number} was there, and is in no file")


def _by_seq(path: Path) -> dict[int, bytes]:
    return {seq_of(line): line for line in _whole_lines(path)}


# --- all of it -------------------------------------------------------------------------------------------------------


def judge(
    history: Iterable[Operation],
    replicas: Iterable[Replica],
    witness: Path | None = None,
    drained: Iterable[str] = (),
    settled: bool = True,
    healed_s: float = HEALED_S,
) -> Verdict:
    """Return what is wrong. `settled`: all faults are healed, and every replica had time to catch up.

    `drained`: groups that have come to the end of every partition.
    """
    verdict, operations = Verdict(), list(history)
    verdict.operations.update(type(operation).__name__ for operation in operations)
    store = Store(replicas, verdict)
    store.check_gaps()
    store.check_epochs()
    if settled:
        store.check_settled()
    check_messages(store, operations, verdict)
    check_readers(store, operations, verdict)
    check_groups(store, operations, drained, verdict)
    check_healing(operations, healed_s, verdict)
    if witness is not None:
        check_cuts(store, witness, verdict)
    return verdict


def main(histories: str, witness: str, *directories: str) -> int:
    history = [operation for path in sorted(Path(histories).iterdir()) for operation in read(path)]
    named = [word.partition("=") for word in directories]
    verdict = judge(history, [load_replica(name, Path(data)) for name, _, data in named], Path(witness))
    print(verdict)
    return bool(verdict.counts)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
