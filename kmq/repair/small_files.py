"""What is no log: identity, checkpoints, declarations, dropped.log. Each from what the others say."""

import os
import re
import time
from collections import Counter

from kmq import record
from kmq.errors import CorruptError
from kmq.log import checkpoint, dedupe_file, deletions, identity, reader, topics
from kmq.log.disk import QUARANTINE, replace_file, sync_directory
from kmq.log.segment import LIMITS
from kmq.repair import places
from kmq.repair.rewriting import Rewriter, text_of
from kmq.repair.verify import Directory, dropped_faults, label_lineages

_ID = re.compile(r"[0-9a-f]{32}\n")


class SmallFiles:
    """One run over them."""

    def __init__(self, directory: Directory, rewriter: Rewriter) -> None:
        self.directory, self.rewriter, self.data = directory, rewriter, directory.data

    def heal_identity(self) -> None:
        """id, lineage, format: first, because they say which segments are ours."""
        data = self.data
        if not _ID.fullmatch(text_of(f"{data}/id")):
            replace_file(f"{data}/id", os.urandom(16).hex().encode() + b"\n")
            what = "a new id: rings that are left in shared memory are not this directory's any more"
            self.rewriter.report(f"{data}/id", what)
        labels = label_lineages(data)
        lineage = _lineage(text_of(f"{data}/lineage").strip(), text_of(f"{data}/id").strip(), labels)
        if text_of(f"{data}/lineage") != f"{lineage}\n":
            replace_file(f"{data}/lineage", f"{lineage}\n".encode())
            self.rewriter.report(
                f"{data}/lineage", "written again, as the indexes have it" if labels else "written again"
            )
        if identity.version(data) is None and not (
            os.path.exists(f"{data}/format") and identity.is_of_another_version(data)
        ):
            from_seq = reader.wal(data).end_offset() if labels[""] else 1
            text = identity.mended(data) or identity.format_text(from_seq, from_seq)
            replace_file(f"{data}/format", f"{text}\n".encode())
            self.rewriter.report(f"{data}/format", "written again")

    def heal_deletions(self) -> None:
        """One of the two files from the other: before anything, because they say which records belong to no queue."""
        faults = deletions.faults(self.data)
        try:
            every = deletions.read(self.data)
        except CorruptError:
            for name in faults:
                self._set_aside(name, "cannot be read: topics deleted once may come back with the records of the WAL")
            return
        if faults:
            deletions.write(self.data, every, lambda _, action: action())
            for name in faults:
                self.rewriter.report(f"{self.data}/{name}", "written again")

    def heal(self) -> None:
        """Checkpoints and declarations."""
        data = self.data
        try:
            checkpoint.load(data)
        except (ValueError, LookupError):
            self._set_aside("router.ckpt", "the next start finds out by the queues and the WAL")
        if dedupe_file.fault(data):
            oldest = reader.first_seq(data)
            forgotten = f"; who stored something before seq {oldest} is forgotten" if oldest > 1 else ""
            self._set_aside("producers.ckpt", f"the next start reads the whole WAL instead{forgotten}")
        for name in topics.misnamed(data):
            self._move_away(name)
        since = self.directory.load_checkpoint()[2]
        for name in topics.names(data):
            if topics.fault(data, name, since.get(name)):
                self._topic(name, since.get(name))

    def _set_aside(self, name: str, what: str) -> None:
        os.makedirs(f"{self.data}/{QUARANTINE}", exist_ok=True)
        os.rename(f"{self.data}/{name}", f"{self.data}/{QUARANTINE}/{os.path.basename(name)}")
        sync_directory(self.data)
        self.rewriter.report(f"{self.data}/{name}", what)

    def _move_away(self, name: str) -> None:
        """What cannot be a topic; where it was one, the queue under the right name is made again from the WAL."""
        os.makedirs(f"{self.data}/{QUARANTINE}", exist_ok=True)
        target = places.free_name(f"{self.data}/{QUARANTINE}/{name}.misnamed")
        os.rename(f"{self.data}/topics/{name}", target)
        sync_directory(f"{self.data}/topics")
        self.rewriter.report(f"{self.data}/topics/{topics.printable(name)}", f"set aside in {QUARANTINE}/")

    def _topic(self, name: str, since: int | None) -> None:
        """A declaration from its partitions, the checkpoint, and what can still be read of it."""
        path = topics.toml_path(self.data, name)
        text = text_of(path)
        found = sum(entry.isdigit() for entry in os.listdir(f"{self.data}/topics/{name}"))
        if since is None:
            line = re.search(r"(?m)^from_seq = (\d+)\n", text)
            since = int(line[1]) if line else self._first_seq(name, found)
        limits = dict(re.findall(rf'(?m)^({"|".join(LIMITS)}) = "?([\w ]+?)"?$', text))
        replace_file(path, topics.Declaration(max(1, found), since, limits).text())
        self.rewriter.report(path, f"partitions = {max(1, found)}, from_seq = {since}")

    def _first_seq(self, name: str, partitions: int) -> int:
        try:
            heads = [reader.partition(self.data, name, number).find(0, 0) for number in range(partitions)]
        except reader.DamageError:
            return 1
        return min([record.seq_of(line) for *_, line in heads if line], default=1)

    def heal_dropped(self) -> None:
        """A line of dropped.log from two of its three numbers: those that name what really is missing."""
        path = f"{self.data}/dropped.log"
        faults = dict(dropped_faults(self.data))
        if not faults:
            return
        with open(path, "rb") as file:
            text = file.read()
        lines, at = [], 0
        for line in text[: text.rfind(b"\n") + 1].split(b"\n")[:-1]:
            if at not in faults:
                lines.append(line)
            elif (mended := self._range(line)) is not None:
                lines.append(mended)
            at += len(line) + 1
        self._set_aside("dropped.log", "mended by what is missing")
        replace_file(path, b"".join(line + b"\n" for line in lines))

    def _range(self, line: bytes) -> bytes | None:
        numbers = [int(each) for each in re.findall(rb"(?<=\|)\d+(?=\|)", line)]
        candidates = {(a, b) for a in numbers for b in numbers if a <= b}
        candidates |= {(a, a + n - 1) for a in numbers for n in numbers} | {
            (b - n + 1, b) for b in numbers for n in numbers
        }
        for ring, logs in (
            ("framed", [reader.wal(self.data)]),
            ("durable", [reader.partition(self.data, *at) for at in self.directory.queues()]),
        ):
            for first, last in sorted(candidates, key=lambda each: each[0] - each[1]):
                if 0 < first <= last and self._is_gap(logs, first, last):
                    stamp = re.search(rb"\d+\.\d{6}$", line)
                    when = stamp[0] if stamp else record.format_ts(time.time_ns() // 1000)
                    return b"%b|%d|%d|%d|%b" % (ring.encode(), first, last, last - first + 1, when)
        return None

    def _is_gap(self, logs: list[reader.Log], first: int, last: int) -> bool:
        """Whether first…last are missing, and no more than they."""
        try:
            after = [record.seq_of(found[3]) for log in logs if (found := log.find(first, 0))[3]]
            before = [record.seq_of(found[3]) for log in logs if (found := log.find(first - 1, 0))[3]]
        except reader.DamageError:
            return False
        return min(after, default=last + 1) == last + 1 and (first == 1 or min(before, default=0) == first - 1)


def _lineage(said: str, own_id: str, labels: Counter[str]) -> str:
    """What the records are called: as the file says, unless that is no name, or the indexes and the id know better."""
    named = [name for name, _ in labels.most_common() if name]
    is_name = _ID.fullmatch(f"{said}\n") is not None
    if is_name and (said == own_id or not named or said in named):
        return said
    if own_id in named or not named:
        return own_id
    is_near = is_name and sum(a != b for a, b in zip(said, named[0], strict=True)) == 1
    return said if is_name and not is_near else named[0]
