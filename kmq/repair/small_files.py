"""Small files: id, lineage, format, topic.toml, checkpoints, deletions, dropped.log. Finds damage in them and heals it.

Each is healed from the other files.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product

from kmq.errors import CorruptError
from kmq.files import QUARANTINE, replace_file
from kmq.log import (
    checkpoint,
    dedupe_file,
    deletions,
    dropped,
    gaps,
    identity,
    index,
    reader,
    rows,
    segment,
    topics,
)
from kmq.log.damage import DamageError
from kmq.log.segment import LIMITS, SEQ
from kmq.log.topics import Since
from kmq.message import record
from kmq.message.routing import PARTITIONERS, Growth, Partitioner, Table, Topic, resolve
from kmq.repair.directory import DataDirectory, read_file, read_text
from kmq.repair.rewriting import Rewriter
from kmq.repair.scan import Finding

_EVIDENCE = 64 << 10  # bytes of each partition that tell which partitioner its topic has

# --- what is wrong ---------------------------------------------------------------------------------------------------

ID = re.compile(r"[0-9a-f]{32}\n")  # of the files id and lineage


def faults(directory: DataDirectory, is_live: bool) -> Iterator[Finding]:
    """Yield everything that is wrong with the small files. `is_live`: a broker may be writing meanwhile."""
    yield from _of_format(directory)
    yield from _of_identity(directory)
    yield from _of_topics(directory)
    try:
        checkpoint.load(directory.data)
    except (ValueError, LookupError) as err:
        yield Finding.of_file("router.ckpt", f"cannot be read: {err}")
    for name, what in deletions.faults(directory.data).items():
        yield Finding.of_file(name, what, is_damage=not is_live)
    for name, what in gaps.faults(directory.data).items():
        yield Finding.of_file(name, what)
    yield from _of_gaps(directory)
    if what := dedupe_file.fault(directory.data):
        yield Finding.of_file("producers.ckpt", what)
    for byte, line in damaged_ranges(directory):
        yield Finding.of_file("dropped.log", f"not a range of seqs: {line[:60]!r}", byte)


def _of_format(directory: DataDirectory) -> Iterator[Finding]:
    if identity.version(directory.data) is None:
        text = directory.read("format").decode(errors="replace")
        what = f"must hold a version, but holds {text[:40]!r}"
        if re.fullmatch(r"\d+[ \n].*", text):
            what = (
                f"holds {text.strip()!r}: damaged, or written by another version; if by this one: kmq verify --repair"
            )
        yield Finding.of_file("format", what)


def _of_identity(directory: DataDirectory) -> Iterator[Finding]:
    labels = label_lineages(directory).most_common(1)
    for name in ("id", "lineage"):
        if (
            name == "lineage"
            and not identity.is_newest(directory.data)
            and not os.path.exists(f"{directory.data}/{name}")
        ):
            continue  # version 1 had no such file
        text = directory.read(name).decode(errors="replace")
        if not ID.fullmatch(text):
            yield Finding.of_file(name, f"must hold 32 hexadecimal digits, but holds {text[:40]!r}")
        elif name == "lineage" and labels and labels[0][0] not in ("", text.strip()):
            yield Finding.of_file(name, f"names {text.strip()}, but most indexes name {labels[0][0]}")


def _of_gaps(directory: DataDirectory) -> Iterator[Finding]:
    for topic, number in directory.queues():
        name = f"topics/{topic}/{number}/{rows.FILE}"
        if (content := directory.read(name)) and gaps.parse(content, f"{topic}/{number}") is None:
            yield Finding.of_file(name, f"does not say which gaps and rows {topic}/{number} has")


def _of_topics(directory: DataDirectory) -> Iterator[Finding]:
    for name in topics.misnamed(directory.data):
        yield Finding.of_file(f"topics/{topics.printable(name)}", "is not a topic's name")
    _, rows, since = directory.load_checkpoint()
    since = checkpoint.complete(directory.data, rows, since, checkpoint.recorded_topics(directory.data))
    for topic in topics.names(directory.data):
        if what := topics.fault(directory.data, topic, since.get(topic)):
            yield Finding.of_file(f"topics/{topic}/topic.toml", what)


def label_lineages(directory: DataDirectory) -> Counter[str]:
    """Count the indexes by the lineage in their first line; "": an index that is not empty but has no lineage."""
    counts: Counter[str] = Counter()
    for log in directory.logs():
        for _, path in log.segments():
            text = read_file(segment.index_path(path), index.MAX_LABEL)
            fields = index.parse_label(index.read_label(text))
            if fields or text:
                counts[fields[0] if fields else ""] += 1
    return counts


def damaged_ranges(directory: DataDirectory) -> list[tuple[int, bytes]]:
    """Return (byte, line) of each line of dropped.log that is not a range. A torn last line is harmless."""
    return [(byte, line) for byte, line in dropped.lines(directory.data) if not dropped.is_range(line)]


# --- healing ---------------------------------------------------------------------------------------------------------


def heal_identity(directory: DataDirectory, rewriter: Rewriter) -> None:
    """Heal id, lineage and format. Call it before healing segments: these files say which segments belong here."""
    data = directory.data
    if not ID.fullmatch(read_text(f"{data}/id")):
        replace_file(f"{data}/id", os.urandom(16).hex().encode() + b"\n")
        what = "a new id: rings left in shared memory no longer belong to this directory"
        rewriter.report(f"{data}/id", what)
    labels = label_lineages(directory)
    lineage = _lineage(read_text(f"{data}/lineage").strip(), read_text(f"{data}/id").strip(), labels)
    if read_text(f"{data}/lineage") != f"{lineage}\n":
        replace_file(f"{data}/lineage", f"{lineage}\n".encode())
        what = "written again, as the indexes have it" if labels else "written again"
        rewriter.report(f"{data}/lineage", what)
    if identity.version(data) is None and not identity.is_unknown(data):
        from_seq = reader.wal(data).end_offset() if labels[""] else 1
        text = identity.mended(data) or identity.format_text(from_seq, from_seq, _version(data))
        replace_file(f"{data}/format", f"{text}\n".encode())
        rewriter.report(f"{data}/format", "written again")


def heal_forks(rewriter: Rewriter) -> None:
    """Heal one of the two copies of `restored` from the other. Raises CorruptError if both are damaged."""
    for name in gaps.faults(rewriter.data):
        gaps.write_forks(rewriter.data, gaps.forks(rewriter.data))
        rewriter.report(f"{rewriter.data}/{name}", "written again")


def heal_deletions(rewriter: Rewriter) -> None:
    """Heal one of the two copies from the other.

    Call it before anything else, because they say which records belong to no queue.
    """
    damaged = deletions.faults(rewriter.data)
    try:
        all_deletions = deletions.read(rewriter.data)
    except CorruptError:
        for name in damaged:
            _set_aside(rewriter, name, "cannot be read: deleted topics may come back with the records of the WAL")
        return
    if damaged:
        deletions.write(rewriter.data, all_deletions, lambda _, action: action())
        for name in damaged:
            rewriter.report(f"{rewriter.data}/{name}", "written again")


def heal(directory: DataDirectory, rewriter: Rewriter) -> None:
    """Heal checkpoints and declarations."""
    data = directory.data
    try:
        checkpoint.load(data)
    except (ValueError, LookupError):
        _set_aside(rewriter, "router.ckpt", "the next start reads the queues and the WAL instead")
    if dedupe_file.fault(data):
        oldest = reader.first_seq(data)
        forgotten = f"; message ids stored before seq {oldest} are forgotten" if oldest > 1 else ""
        _set_aside(rewriter, "producers.ckpt", f"the next start reads the whole WAL instead{forgotten}")
    for name in topics.misnamed(data):
        _move_away(rewriter, name)
    _, rows, since = directory.load_checkpoint()
    since = checkpoint.complete(data, rows, since, checkpoint.recorded_topics(data))
    had = Counter(name for name, _ in rows)
    for name in topics.names(data):
        if topics.fault(data, name, since.get(name)):
            _topic(rewriter, name, since.get(name), had[name])


def _version(data: str) -> int:
    """Return the version that `format` needs, as the other files show."""
    if gaps.forks(data):
        return identity.FORKED
    if checkpoint.recorded_starts(data):
        return identity.STARTED
    is_rerouted = any(topic.is_rerouted for topic in checkpoint.next_table(data).values())
    return identity.ROUTED if is_rerouted else identity.LABELLED


def _set_aside(rewriter: Rewriter, name: str, what: str) -> None:
    rewriter.quarantine.replace(name)
    rewriter.report(f"{rewriter.data}/{name}", what)


def _move_away(rewriter: Rewriter, name: str) -> None:
    """Set aside a directory that cannot be a topic.

    If its name was damaged, the queue is rebuilt from the WAL under the right name.
    """
    rewriter.quarantine.set_aside(f"{rewriter.data}/topics/{name}", f"{name}.misnamed")
    rewriter.report(f"{rewriter.data}/topics/{topics.printable(name)}", f"set aside in {QUARANTINE}/")


def _topic(rewriter: Rewriter, name: str, since_ckpt: Since | None, had: int) -> None:
    """Rewrite a declaration from the partitions, the checkpoint, its records, and its own readable lines.

    `had`: the partitions in the checkpoint. Partitions that are missing are made, to be filled from the WAL.
    """
    path = topics.toml_path(rewriter.data, name)
    text = read_text(path)
    partitions = max(1, had, sum(entry.isdigit() for entry in os.listdir(f"{rewriter.data}/topics/{name}")))
    declared = topics.read(rewriter.data, name)
    if declared.grown:  # its crc is right
        partitions = max(partitions, declared.partitions)
    for number in range(partitions):
        os.makedirs(f"{rewriter.data}/topics/{name}/{number}", exist_ok=True)
    line = re.search(r"(?m)^from_seq = (\d+)\n", text)
    since = since_ckpt.from_seq if since_ckpt else int(line[1]) if line else _first_seq(rewriter.data, name, partitions)
    record = checkpoint.recorded_topics(rewriter.data).get((name, since))
    if record:
        limits = record.limits
    else:
        limits = dict(re.findall(rf'(?m)^({"|".join(LIMITS)}) = "?([\w ]+?)"?$', text))
    grown = _growth(text, partitions, since_ckpt.grown if since_ckpt else ())
    if record and not since_ckpt and record.partitions == partitions:
        grown = record.grown
    has = record or since_ckpt
    partitioner = has.partitioner if has else _partitioner_of(rewriter.data, name, text, partitions, grown)
    replace_file(path, topics.Declaration(partitions, since, limits, grown, partitioner.name).text())
    rewriter.report(path, f"partitions = {partitions}, from_seq = {since}")


def _partitioner_of(data: str, name: str, text: str, partitions: int, grown: Growth) -> Partitioner:
    """Return the partitioner from the file, else the one that explains where most of the first records are."""
    stated = re.search(r'(?m)^partitioner = "(\w+)"\n', text)
    if stated and stated[1] in PARTITIONERS:
        return PARTITIONERS[stated[1]]
    votes: Counter[Partitioner] = Counter()
    marks_from = identity.marks_from(data)
    for partitioner in PARTITIONERS.values():
        topic = Topic(name, partitions, 0, (), grown, partitioner)
        table = Table([(name.encode(), topic)], marks_from)
        for number in range(partitions):
            for line in _first_lines(data, name, number):
                seq = record.seq_of(line)
                route = resolve(table, record.routing_key_of(line), seq)
                votes[partitioner] += route.partition is None and topic.partition_of(route, seq) == number
    return max(PARTITIONERS.values(), key=lambda partitioner: votes[partitioner])


def _first_lines(data: str, name: str, number: int) -> list[bytes]:
    log = reader.local(data, name, number)
    try:
        return [line for line in log.read(log.first_offset, _EVIDENCE)[1].split(b"\n") if line]
    except DamageError:
        return []


def _first_seq(data: str, name: str, partitions: int) -> int:
    try:
        heads = [reader.local(data, name, number).find(0, SEQ) for number in range(partitions)]
    except DamageError:
        return 1
    return min([record.seq_of(head.line) for head in heads if head], default=1)


def heal_dropped(directory: DataDirectory, rewriter: Rewriter) -> None:
    """Heal each damaged line of dropped.log: two of its three numbers must match a gap that exists."""
    path = f"{directory.data}/dropped.log"
    if not damaged_ranges(directory):
        return
    named = (line if dropped.is_range(line) else _range(directory, line) for _, line in dropped.lines(directory.data))
    lines = [line for line in named if line is not None]
    _set_aside(rewriter, "dropped.log", "mended by what is missing")
    replace_file(path, b"".join(line + b"\n" for line in lines))


def _range(directory: DataDirectory, line: bytes) -> bytes | None:
    """Return the line for the gap that two of its numbers match; None if there is no such gap."""
    numbers = [int(digits) for digits in re.findall(rb"(?<=\|)\d+(?=\|)", line)]
    pairs = list(product(numbers, repeat=2))
    candidates = {(a, b) for a, b in pairs if a <= b}
    candidates |= {(a, a + n - 1) for a, n in pairs} | {(b - n + 1, b) for b, n in pairs}
    queues = [directory.queue(at) for at in directory.queues()]
    for ring, logs in (("framed", [directory.wal()]), ("durable", queues)):
        for first, last in sorted(candidates, key=lambda pair: pair[0] - pair[1]):
            if 0 < first <= last and _is_gap(logs, first, last):
                stamp = re.search(rb"\d+\.\d{6}$", line)
                when = stamp[0] if stamp else record.format_ts(time.time_ns() // 1000)
                return b"%b|%d|%d|%d|%b" % (ring.encode(), first, last, last - first + 1, when)
    return None


def _is_gap(logs: list[reader.LogReader], first: int, last: int) -> bool:
    """Return True if exactly first…last are missing."""
    try:
        after = [record.seq_of(found.line) for log in logs if (found := log.find(first, SEQ))]
        before = [record.seq_of(found.line) for log in logs if (found := log.find(first - 1, SEQ))]
    except DamageError:
        return False
    return min(after, default=last + 1) == last + 1 and (first == 1 or min(before, default=0) == first - 1)


def _growth(text: str, partitions: int, before: Growth) -> Growth:
    """Return how a topic has grown: as its file says, unless that contradicts the checkpoint (`before`)."""
    line = re.search(r'(?m)^grown = "(.+)"$', text)
    try:
        found = topics.decode_growth(line[1]) if line else ()
    except ValueError:
        return before
    is_longer = list(found[: len(before)]) == list(before) and found[-1:] and found[-1][1] < partitions
    return found if is_longer else before


def _lineage(stated: str, own_id: str, labels: Counter[str]) -> str:
    """Return the lineage: the file's, unless its name is invalid, or the indexes and the id contradict it."""
    named = [name for name, _ in labels.most_common() if name]
    is_name = ID.fullmatch(f"{stated}\n") is not None
    if is_name and (stated == own_id or not named or stated in named):
        return stated
    if own_id in named or not named:
        return own_id
    is_near = is_name and sum(a != b for a, b in zip(stated, named[0], strict=True)) == 1
    return stated if is_name and not is_near else named[0]
