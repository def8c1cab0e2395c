"""Judges a data directory from its files alone. Shares no code with kmq/ or stages/: a bug cannot hide in both.

    python tests/chaos/checker.py DATA          prints findings as logfmt, exit code 1 where there are any

Findings
    torn        a line that is not a whole record: cut off, NULs in it, two lines run together
    gap         a seq that is missing from the WAL and not named in dropped.log
    duplicate   a seq, or a sent line, that is there twice
    reordered   seqs, times, or the lines of one stream, out of order
    lost        a WAL record that its queue lacks, or a sent line that the WAL lacks
    misplaced   a record in a queue where it does not belong
    invented    something nobody sent, or that the WAL does not have, or that dropped.log says is gone
    index       an .idx line that contradicts its log
    link        a symlink that is missing or leads elsewhere
"""

import re
import sys
import tomllib
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

RECORD = re.compile(rb"([1-9]\d*)\|(\d+\.\d{6})\|([^|\0]+)\|[^|\0]*\|([^|\0]*)\|[^\0]*")
STREAM_ID = re.compile(rb"([^;-]+)-(\d+)(?:;w=.*)?|(\d+);p=(.*)")
CHANGE = b"__kmq.topic"  # the routing key of a change of a topic, which only the broker writes
SHOWN = 10  # findings of one kind that are listed; the rest is counted


class Finding(NamedTuple):
    kind: str
    where: str
    what: str

    def __str__(self) -> str:
        return f'finding={self.kind} where={self.where} what="{self.what}"'


class Stream(NamedTuple):
    """What one writer sent, in order: line(0), line(1), … line(count - 1), each with the id `<name>-<n>` or `<n>;p=<name>`.

    `mode`  all: every line reached the FIFO and must be in the WAL;
            prefix: the writer was cut off, so some prefix of it is there;
            some: anything may be missing (the FIFO died with all the stages), but nothing twice, torn or out of order.
    """

    name: str
    line: Callable[[int], bytes]
    count: int  # type: ignore[assignment]  # hides tuple.count, which nothing here calls
    mode: str = "all"


class Report:
    """The findings. Few of each kind are kept in words, all are counted."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()
        self.records = self.queues = self.dropped = 0

    def add(self, kind: str, where: object, what: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= SHOWN:
            self.findings.append(Finding(kind, str(where), what))

    @property
    def kinds(self) -> set[str]:
        return set(self.counts)

    def __str__(self) -> str:
        counts = " ".join(f"{kind}={count}" for kind, count in sorted(self.counts.items())) or "clean=1"
        summary = f"records={self.records} queues={self.queues} dropped={self.dropped} {counts}"
        return "\n".join([*map(str, self.findings), summary])


class Record(NamedTuple):
    seq: int
    key: bytes
    id: bytes
    line: bytes


def check(data: Path | str, sent: Iterable[Stream] = ()) -> Report:
    """Everything that can be said about the directory `data` while no stage runs on it."""
    data, report = Path(data), Report()
    dropped = {ring: _dropped(data, ring, report) for ring in ("framed", "durable")}
    records = _wal(data, report)
    _check_seqs(records, dropped["framed"], report)
    _check_queues(data, records, dropped["durable"], report)
    _check_links(data, report)
    sent = list(sent)
    if sent:
        _check_sent(records, sent, len(dropped["framed"]), report)
    report.records, report.dropped = len(records), sum(map(len, dropped.values()))
    return report


# --- reading ---------------------------------------------------------------------------------------------------------


def _lines(path: Path, report: Report) -> list[bytes]:
    """The lines of a log; what follows the last newline is torn."""
    *lines, rest = path.read_bytes().split(b"\n")
    if rest:
        report.add("torn", path, f"no newline after the last {len(rest)} bytes")
    return lines


def _parse(lines: list[bytes], where: Path, report: Report) -> list[Record]:
    records = []
    for number, line in enumerate(lines):
        match = RECORD.fullmatch(line)
        if match is None:
            report.add("torn", where, f"line {number}: {line[:80]!r}")
        else:
            records.append(Record(int(match[1]), match[3], match[4], line))
    return records


def _segments(directory: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.stem), path) for path in directory.glob("*.log"))


def _wal(data: Path, report: Report) -> list[Record]:
    records: list[Record] = []
    for first, path in _segments(data / "append"):
        lines = _lines(path, report)
        segment = _parse(lines, path, report)
        if segment and not (records[-1].seq if records else 0) < first <= segment[0].seq:
            report.add("gap", path, f"begins with seq {segment[0].seq}")
        _check_index(path, lines, [record.seq for record in segment], report)
        records += segment
    return records


def _dropped(data: Path, ring: str, report: Report) -> set[int]:
    """The seqs that dropped.log names for one ring; each may be named once only."""
    path, named = data / "dropped.log", set[int]()
    if not path.exists():
        return named
    for line in _lines(path, report):
        name, first, last, count, ts = (line.split(b"|") + [b""] * 5)[:5]
        if not (first.isdigit() and last.isdigit() and count.isdigit() and re.fullmatch(rb"\d+\.\d{6}", ts)):
            report.add("torn", path, repr(line[:80]))
        elif name.decode() == ring:
            span = range(int(first), int(last) + 1)
            if len(span) != int(count) or not span:
                report.add("torn", path, f"count does not fit: {line!r}")
            if not named.isdisjoint(span):
                report.add("duplicate", path, f"named before: {line!r}")
            named.update(span)
    return named


# --- the WAL ---------------------------------------------------------------------------------------------------------


def _check_seqs(records: list[Record], dropped: set[int], report: Report) -> None:
    """Contiguous from 1, but for what was dropped before it got here; times never go back."""
    last_seq, last_ts = 0, b""
    for record in records:
        seq = record.seq
        if seq in dropped:
            report.add("invented", "WAL", f"seq {seq} is there, and named as dropped")
        if seq == last_seq:
            report.add("duplicate", "WAL", f"seq {seq}")
        elif seq < last_seq:
            report.add("reordered", "WAL", f"seq {seq} after {last_seq}")
        elif seq > last_seq + 1:
            for missing in set(range(last_seq + 1, seq)) - dropped:
                report.add("gap", "WAL", f"seq {missing}")
        ts = record.line.split(b"|", 2)[1]
        if (len(ts), ts) < (len(last_ts), last_ts):
            report.add("reordered", "WAL", f"seq {seq}: time {ts.decode()} after {last_ts.decode()}")
        last_seq, last_ts = max(seq, last_seq), ts


def _check_index(path: Path, lines: list[bytes], numbers: list[int], report: Report) -> None:
    """Each entry lies at a line start and has its number; sealed blocks have their crc, the open one that of a part."""
    index = path.with_suffix(".idx")
    if not index.exists():
        if lines:
            report.add("index", index, "missing")
        return
    entries: dict[int, tuple[int, int]] = {}
    label, *texts = _lines(index, report) or [b""]
    if label != _label(path):
        report.add("index", index, f"says {label[:120]!r}, not {_label(path)!r}")
    for text in texts:
        fields = text.split(b"|")
        if len(fields) != 4 or not all(field.isdigit() for field in fields[:3]):
            report.add("index", index, repr(text[:80]))
            continue
        offset, position, crc = map(int, fields[:3])
        entries[offset] = position, crc  # the last line of an offset wins
    starts, at = {}, 0
    for number, line in zip(numbers, lines, strict=False):
        starts[at] = number
        at += len(line) + 1
    log = path.read_bytes()
    ordered = sorted(entries.items())
    if ordered and ordered[0][1][0] != 0:
        report.add("index", index, f"begins at byte {ordered[0][1][0]}")
    for nth, (offset, (position, crc)) in enumerate(ordered):
        if starts.get(position) != offset:
            report.add("index", index, f"{offset}|{position} is not where record {offset} begins")
            continue
        if nth + 1 < len(ordered):
            end = ordered[nth + 1][1][0]
            if zlib.crc32(log[position:end]) != crc:
                report.add("index", index, f"crc of the sealed block {offset}|{position}…{end}")
        elif not _is_crc_of_part(log, position, crc):
            report.add("index", index, f"crc of the open block {offset}|{position}")


def _label(path: Path) -> bytes:
    """What the index of a log has to begin with: the records' lineage, the log, and what it begins with."""
    place = path.parent.parts
    log, root = ("append", path.parents[1]) if place[-1] == "append" else ("/".join(place[-2:]), path.parents[3])
    return f"kmq-idx 2 lineage={(root / 'lineage').read_text().strip()} log={log} base={int(path.stem)}".encode()


def _is_crc_of_part(log: bytes, position: int, crc: int) -> bool:
    """Whether `crc` covers log[position:] up to the end of some line."""
    found = 0
    for line in log[position:].split(b"\n"):
        found = zlib.crc32(line + b"\n", found)
        if found == crc:
            return True
    return False


# --- the queues ------------------------------------------------------------------------------------------------------


class Topic(NamedTuple):
    partitions: int
    from_seq: int
    grown: tuple[tuple[int, int], ...] = ()  # from which seq on, partitions before it
    partitioner: str = "crc32"

    def count_at(self, seq: int) -> int:
        return next((before for grown_from, before in self.grown if seq < grown_from), self.partitions)

    def place(self, key: bytes | None, seq: int) -> int:
        if self.partitioner == "crc32":
            return (seq if key is None else zlib.crc32(key)) % self.count_at(seq)
        number = seq // 64 if key is None else _murmur2(unquote_to_bytes(key)) & 0x7FFFFFFF
        return number % self.count_at(seq)


def _murmur2(key: bytes) -> int:
    """Kafka's, written down once more, byte by byte."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    found = 0x9747B28C ^ len(key)
    while len(key) >= 4:
        word = sum(byte << 8 * n for n, byte in enumerate(key[:4])) * m & mask
        word = (word ^ word >> 24) * m & mask
        found, key = (found * m & mask) ^ word, key[4:]
    if key:
        found = (found ^ sum(byte << 8 * n for n, byte in enumerate(key))) * m & mask
    found = (found ^ found >> 13) * m & mask
    return found ^ found >> 15


_ALONE = Topic(1, 0)  # a topic that nobody has declared


def _topics(data: Path) -> dict[bytes, Topic]:
    topics = {}
    for path in (data / "topics").iterdir():
        if path.is_dir() and not path.name.startswith("."):
            table = tomllib.loads((path / "topic.toml").read_text())
            pairs = [pair.split(":") for pair in table.get("grown", "").split(",") if pair]
            grown = tuple((int(seq), int(before)) for seq, before in pairs)
            count, since = int(table["partitions"]), int(table.get("from_seq", 1 << 62))
            topics[path.name.encode()] = Topic(count, since, grown, table.get("partitioner", "crc32"))
    return topics


_MARK = re.compile(rb"([^@]*)\.@([0-9]*)((?s:\..*)?)")


def _home(topics: dict[bytes, Topic], record: Record) -> tuple[bytes, int]:
    """(topic, partition) of a record, worked out from its routing key alone."""
    if marked := _MARK.fullmatch(record.key):
        name, number, key = marked.groups()
        topic = topics.get(name, _ALONE)
        key = key[1:] if key else None
        return name, int(number) % topic.count_at(record.seq) if number else topic.place(key, record.seq)
    labels = record.key.split(b".")
    for n in range(len(labels), 0, -1):
        name = b".".join(labels[:n])
        if name in topics and (topics[name].from_seq <= record.seq or n == 1):
            break
    key = b".".join(labels[n:])
    return name, topics.get(name, _ALONE).place(key or None, record.seq)


def _check_queues(data: Path, records: list[Record], dropped: set[int], report: Report) -> None:
    topics = _topics(data)
    expected: dict[tuple[bytes, int], list[Record]] = defaultdict(list)
    for record in records:
        if record.seq not in dropped:
            expected[_home(topics, record)].append(record)
    places = {(name, number) for name, topic in topics.items() for number in range(topic.partitions)} | set(expected)
    homes: dict[int, tuple[bytes, int]] = {}
    for name, number in sorted(places):
        directory = data / "topics" / name.decode() / str(number)
        paths = [path for _, path in _segments(directory)]
        lines = [line for path in paths for line in _lines(path, report)]
        wanted = expected[name, number]
        report.queues += 1
        for path in paths:
            own = _lines(path, Report())
            _check_index(path, own, [*range(int(path.stem), int(path.stem) + len(own))], report)
        if lines != [record.line for record in wanted]:
            homes = homes or {r.seq: home for home, group in expected.items() for r in group}
            _explain(directory, (name, number), _parse(lines, directory, report), wanted, homes, report)


def _explain(
    where: Path,
    home: tuple[bytes, int],
    found: list[Record],
    wanted: list[Record],
    homes: dict[int, tuple[bytes, int]],
    report: Report,
) -> None:
    """The queue differs from what the WAL says it holds: how?"""
    by_seq = {record.seq: record.line for record in wanted}
    seen: set[int] = set()
    last = 0
    for record in found:
        seq = record.seq
        if seq in seen:
            report.add("duplicate", where, f"seq {seq}")
        elif homes.get(seq, home) != home:
            report.add("misplaced", where, f"seq {seq}")
        elif seq not in by_seq:
            report.add("invented", where, f"seq {seq}")
        elif by_seq[seq] != record.line:
            report.add("torn", where, f"seq {seq} differs from the WAL: {record.line[:80]!r}")
        if seq < last:
            report.add("reordered", where, f"seq {seq} after {last}")
        seen.add(seq)
        last = max(last, seq)
    for seq in sorted(by_seq.keys() - seen):
        report.add("lost", where, f"seq {seq}")


def _check_links(data: Path, report: Report) -> None:
    """append.log leads to the last segment, <topic>[-<partition>].log to each queue that has records."""
    segments = _segments(data / "append")
    wanted = {data / "append.log": segments[-1][1]} if segments else {}
    for name, topic in _topics(data).items():
        for number in range(topic.partitions):
            logs = _segments(data / "topics" / name.decode() / str(number))
            suffix = f"-{number}" if topic.partitions > 1 else ""
            if logs:
                wanted[data / f"{name.decode()}{suffix}.log"] = logs[-1][1]
    for link, target in wanted.items():
        if not link.is_symlink() or link.resolve() != target.resolve():
            report.add("link", link, f"does not lead to {target}")


# --- what was sent ---------------------------------------------------------------------------------------------------


def _check_sent(records: list[Record], sent: list[Stream], dropped: int, report: Report) -> None:
    """Every sent line is in the WAL as its mode says, byte for byte, and nothing else is."""
    streams = {stream.name.encode(): stream for stream in sent}
    seen: dict[bytes, list[int]] = {name: [] for name in streams}
    for record in records:
        if record.key == CHANGE and record.id.startswith(b";request="):  # the broker's own
            continue
        match = STREAM_ID.fullmatch(record.id)
        name = (match[1] or match[4]) if match else b""
        stream = streams.get(name)
        if match is None or stream is None:
            kind = "torn" if record.key == b"dead.malformed" else "invented"
            report.add(kind, "WAL", f"seq {record.seq}, sent by nobody: {record.line[:80]!r}")
            continue
        n = int(match[2] or match[3])
        if n >= stream.count:
            report.add("invented", "WAL", f"seq {record.seq}: {stream.name}-{n} was not sent")
        elif record.line.split(b"|", 2)[2] != stream.line(n):
            report.add("torn", "WAL", f"seq {record.seq} is not what {stream.name}-{n} was: {record.line[:80]!r}")
        seen[name].append(n)
    missing = 0
    for name, numbers in seen.items():
        missing += _check_stream(streams[name], numbers, bool(dropped), report)
    if dropped and missing != dropped and all(stream.mode == "all" for stream in sent):
        kind = "lost" if missing > dropped else "invented"
        report.add(kind, "WAL", f"{missing} sent lines are missing, dropped.log names {dropped}")


def _check_stream(stream: Stream, numbers: list[int], may_drop: bool, report: Report) -> int:
    """`numbers` of one stream in the order of the WAL; returns how many lines of it are missing."""
    there: set[int] = set()
    expected = 0
    for n in numbers:
        if n in there:
            report.add("duplicate", "WAL", f"{stream.name}-{n}")
        elif n < expected:
            report.add("reordered", "WAL", f"{stream.name}-{n} after {expected - 1}")
        there.add(n)
        expected = max(expected, n + 1)
    must = {"all": stream.count, "prefix": expected, "some": 0}[stream.mode]
    missing = sorted(set(range(must)) - there)
    if not may_drop:
        for n in missing:
            report.add("lost", "WAL", f"{stream.name}-{n}")
    return len(missing)


if __name__ == "__main__":
    result = check(sys.argv[1])
    print(result)
    sys.exit(1 if result.counts else 0)
