"""What is wrong with the small files: id, lineage, format, topic.toml, checkpoints, deletions, dropped.log.

Read-only.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator

from kmq.log import checkpoint, dedupe_file, deletions, dropped, identity, index, recorded, segment, topics
from kmq.repair.directory import Directory, read_file
from kmq.repair.finding import Finding

ID = re.compile(r"[0-9a-f]{32}\n")  # of the files id and lineage


def of_small_files(directory: Directory, is_live: bool) -> Iterator[Finding]:
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
    if what := dedupe_file.fault(directory.data):
        yield Finding.of_file("producers.ckpt", what)
    for byte, line in of_dropped(directory):
        yield Finding.of_file("dropped.log", f"not a range of seqs: {line[:60]!r}", byte)


def _of_format(directory: Directory) -> Iterator[Finding]:
    if identity.version(directory.data) is None:
        text = directory.read("format").decode(errors="replace")
        what = f"must hold a version, but holds {text[:40]!r}"
        if re.fullmatch(r"\d+[ \n].*", text):
            what = (
                f"holds {text.strip()!r}: damaged, or written by another version; if by this one: kmq verify --repair"
            )
        yield Finding.of_file("format", what)


def _of_identity(directory: Directory) -> Iterator[Finding]:
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


def _of_topics(directory: Directory) -> Iterator[Finding]:
    for name in topics.misnamed(directory.data):
        yield Finding.of_file(f"topics/{topics.printable(name)}", "is not a topic's name")
    _, rows, since = directory.load_checkpoint()
    since = recorded.complete(directory.data, rows, since, recorded.lives(directory.data))
    for topic in topics.names(directory.data):
        if what := topics.fault(directory.data, topic, since.get(topic)):
            yield Finding.of_file(f"topics/{topic}/topic.toml", what)


def label_lineages(directory: Directory) -> Counter[str]:
    """Count the indexes by the lineage in their first line; "": an index that is not empty but names none."""
    counts: Counter[str] = Counter()
    for log in directory.logs():
        for _, path in log.segments():
            text = read_file(segment.index_path(path), index.MAX_LABEL)
            fields = index.parse_label(index.read_label(text))
            if fields or text:
                counts[fields[0] if fields else ""] += 1
    return counts


def of_dropped(directory: Directory) -> list[tuple[int, bytes]]:
    """Return (byte, line) of each line of dropped.log that is no range; a torn last line is harmless."""
    text, byte, faults = directory.read("dropped.log"), 0, []
    for line in text[: text.rfind(b"\n") + 1].split(b"\n")[:-1]:
        if not dropped.is_range(line):
            faults.append((byte, line))
        byte += len(line) + 1
    return faults
