"""The checker on histories broken by hand: each finding must be found, and a good history must be clean."""

import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos import checker
from chaos.checker import Stream, check

LINES = 40
KEYS = [b"test.probe", b"jobs.a", b"wide.k1", b"wide.k2", b"wide"]


def sent_line(n: int) -> bytes:
    return b"%b|%d|w-%d|payload %d" % (KEYS[n % len(KEYS)], n, n, n)


def stored(n: int) -> bytes:
    return b"%d|1700000000.%06d|%b\n" % (n + 1, n, sent_line(n))


SENT = [Stream("w", sent_line, LINES)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A good history: 40 records in three topics, `wide` has three partitions."""
    root = tmp_path / "data"
    records = [stored(n) for n in range(LINES)]
    queues: dict[str, list[bytes]] = {}
    for n, record in enumerate(records):
        topic, _, key = sent_line(n).split(b"|")[0].decode().partition(".")
        number = (zlib.crc32(key.encode()) if key else n + 1) % 3 if topic == "wide" else 0
        queues.setdefault(f"topics/{topic}/{number}", []).append(record)
    for topic, partitions in {"test": 1, "jobs": 1, "wide": 3}.items():
        (root / "topics" / topic).mkdir(parents=True)
        (root / "topics" / topic / "topic.toml").write_text(f"partitions = {partitions}\nfrom_seq = 1\n")
    (root / "lineage").write_text(LINEAGE + "\n")
    write_log(root / "append" / f"{1:020d}.log", records, 1)
    for name, lines in queues.items():
        write_log(root / name / f"{0:020d}.log", lines, 0)
        _, topic, number = name.split("/")
        link = f"{topic}-{number}.log" if topic == "wide" else f"{topic}.log"
        (root / link).symlink_to(f"{name}/{0:020d}.log")
    (root / "append.log").symlink_to(f"append/{1:020d}.log")
    return root


def write_log(path: Path, lines: list[bytes], first: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))
    half = lines[: len(lines) // 2 or 1]
    size, rest = sum(map(len, half)), b"".join(lines[len(half) :])
    log = "append" if path.parent.name == "append" else "/".join(path.parent.parts[-2:])
    label = f"kmq-idx 2 lineage={LINEAGE} log={log} base={first}\n"
    index = f"{label}{first}|0|{zlib.crc32(half[0])}|1.000000\n{first}|0|{zlib.crc32(b''.join(half))}|1.000000\n"
    if rest:
        index += f"{first + len(half)}|{size}|{zlib.crc32(rest)}|1.000000\n"
    path.with_suffix(".idx").write_text(index)


LINEAGE = "0123456789abcdef" * 2
WAL = f"append/{1:020d}.log"
TEST = f"topics/test/0/{0:020d}.log"  # seqs 1, 6, 11, …
JOBS = f"topics/jobs/0/{0:020d}.log"  # seqs 2, 7, 12, …


def edit(name: str, change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    """Rewrite one log by its lines."""

    def apply(data: Path) -> None:
        path = data / name
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return apply


def append(name: str, text: bytes) -> Callable[[Path], None]:
    return edit(name, lambda lines: [*lines, text])


def without(nth: int) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: lines[:nth] + lines[nth + 1 :]


def twice(nth: int) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: [*lines[: nth + 1], *lines[nth:]]


def swapped(nth: int) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: [*lines[:nth], lines[nth + 1], lines[nth], *lines[nth + 2 :]]


def replaced(nth: int, old: bytes, new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: [*lines[:nth], lines[nth].replace(old, new), *lines[nth + 1 :]]


def write(name: str, text: bytes) -> Callable[[Path], None]:
    def apply(data: Path) -> None:
        (data / name).write_bytes(text)

    return apply


def unlink(name: str) -> Callable[[Path], None]:
    return lambda data: (data / name).unlink()


BROKEN = {
    "a seq missing in the WAL": ("gap", edit(WAL, without(6))),
    "a sent line missing in the WAL": ("lost", edit(WAL, without(6))),
    "the last sent line missing": ("lost", edit(WAL, without(LINES - 1))),
    "a record twice in the WAL": ("duplicate", edit(WAL, twice(6))),
    "a sent line twice under two seqs": ("duplicate", append(WAL, stored(6).replace(b"7|", b"41|", 1))),
    "two records of the WAL swapped": ("reordered", edit(WAL, swapped(6))),
    "a stream out of order": ("reordered", edit(WAL, lambda ls: [*ls[:6], renumber(ls[7]), renumber(ls[6]), *ls[8:]])),
    "time going back": ("reordered", edit(WAL, replaced(6, b"1700000000.", b"1600000000."))),
    "a torn last line in the WAL": ("torn", append(WAL, b"41|1700000000.000")),
    "NULs at the end of the WAL": ("torn", append(WAL, b"\0" * 100)),
    "a NUL in a record": ("torn", edit(WAL, replaced(6, b"payload", b"pay\0oad"))),
    "another payload than was sent": ("torn", edit(WAL, replaced(6, b"payload", b"payl0ad"))),
    "two lines run together": ("torn", edit(WAL, replaced(6, b"\n", b""))),
    "a cut line kept as dead.malformed": ("torn", append(WAL, b"41|1700000001.000000|dead.malformed||;reason=x|t\n")),
    "a record nobody sent": ("invented", append(WAL, b"41|1700000001.000000|test.probe|1|other-1|x\n")),
    "a line beyond what was sent": ("invented", append(WAL, b"41|1700000001.000000|test.probe|1|w-40|x\n")),
    "a record missing in its queue": ("lost", edit(TEST, without(3))),
    "the end of a queue missing": ("lost", edit(TEST, lambda lines: lines[:-1])),
    "a queue file deleted": ("lost", unlink(TEST)),
    "a record twice in its queue": ("duplicate", edit(TEST, twice(3))),
    "a queue out of order": ("reordered", edit(TEST, swapped(3))),
    "a record in another queue": ("misplaced", append(JOBS, stored(5))),
    "a record in the wrong partition": ("misplaced", append(f"topics/wide/0/{0:020d}.log", stored(5))),
    "a record the WAL does not have": ("invented", append(TEST, stored(LINES + 5))),
    "a record unlike the one in the WAL": ("torn", edit(TEST, replaced(3, b"payload", b"payl0ad"))),
    "a torn last line in a queue": ("torn", append(TEST, b"41|17")),
    "a dropped record that is in its queue": ("invented", write("dropped.log", b"durable|6|6|1|1.000000\n")),
    "a dropped record that is in the WAL": ("invented", write("dropped.log", b"framed|6|6|1|1.000000\n")),
    "a range dropped twice": ("duplicate", write("dropped.log", b"durable|1|1|1|1.000000\n" * 2)),
    "a torn dropped.log": ("torn", write("dropped.log", b"durable|6|")),
    "a count that does not fit its range": ("torn", write("dropped.log", b"durable|6|7|1|1.000000\n")),
    "an index entry between lines": ("index", write(WAL.replace(".log", ".idx"), b"1|5|0|1.000000\n")),
    "an index with a wrong crc": ("index", edit(WAL.replace(".log", ".idx"), replaced(2, b"1|0|", b"1|0|1"))),
    "an index with a wrong number": ("index", edit(WAL.replace(".log", ".idx"), replaced(3, b"21|", b"22|"))),
    "the index of another segment": ("index", edit(WAL.replace(".log", ".idx"), replaced(0, b"base=1", b"base=2"))),
    "an index of another lineage": ("index", edit(WAL.replace(".log", ".idx"), replaced(0, b"lineage=", b"lineage=f"))),
    "an index without its first line": ("index", edit(WAL.replace(".log", ".idx"), lambda lines: lines[1:])),
    "no index": ("index", unlink(WAL.replace(".log", ".idx"))),
    "no append.log": ("link", unlink("append.log")),
    "a symlink to another queue": ("link", lambda data: (data / "jobs.log").rename(data / "test.log")),
}


def renumber(record: bytes) -> bytes:
    """Seqs 7 and 8 exchanged, so that the WAL is in order and the stream is not."""
    seq, _, rest = record.split(b"|", 2)
    return b"%d|1700000000.000006|%b" % (15 - int(seq), rest)


def test_a_good_history_is_clean(data: Path) -> None:
    report = check(data, SENT)
    assert str(report) == "records=40 queues=5 dropped=0 clean=1"


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_history_is_found(data: Path, case: str) -> None:
    kind, damage = BROKEN[case]
    damage(data)
    assert kind in check(data, SENT).kinds


def test_what_dropped_log_names_is_not_missed(data: Path) -> None:
    edit(WAL, without(6))(data)
    edit(JOBS, lambda lines: lines[:1] + lines[3:])(data)  # seq 7 (dropped before the WAL), seq 12 after it
    write("dropped.log", b"framed|7|7|1|1.000000\ndurable|12|12|1|1.000000\n")(data)
    assert check(data, SENT).kinds <= {"index"}


def test_more_missing_lines_than_dropped_log_names_are_lost(data: Path) -> None:
    edit(WAL, lambda lines: lines[:-2])(data)
    write("dropped.log", b"framed|40|40|1|1.000000\n")(data)
    assert "lost" in check(data, SENT).kinds


@pytest.mark.parametrize(("mode", "kinds"), [("all", {"lost"}), ("prefix", {"lost"}), ("some", set())])
def test_a_hole_is_a_loss_unless_the_stream_may_have_holes(data: Path, mode: str, kinds: set[str]) -> None:
    def with_hole(n: int) -> bytes:
        return sent_line(n if n < 10 else n - 1).replace(b"|w-%d|" % (n - 1), b"|w-%d|" % n)

    edit(WAL, lambda lines: [line.replace(b"|w-%d|" % n, b"|w-%d|" % (n + (n >= 10))) for n, line in enumerate(lines)])(
        data
    )
    assert check(data, [Stream("w", with_hole, LINES + 1, mode)]).kinds & {"lost"} == kinds


@pytest.mark.parametrize(("mode", "kinds"), [("all", {"lost"}), ("prefix", set()), ("some", set())])
def test_a_missing_end_is_a_loss_only_of_a_complete_stream(data: Path, mode: str, kinds: set[str]) -> None:
    assert check(data, [Stream("w", sent_line, LINES + 5, mode)]).kinds == kinds


def test_it_runs_alone_and_says_by_its_exit_code_what_it_found(data: Path) -> None:
    command = [sys.executable, "-I", checker.__file__, str(data)]
    clean = subprocess.run(command, capture_output=True, text=True)
    append(WAL, b"torn")(data)
    torn = subprocess.run(command, capture_output=True, text=True)
    assert (clean.returncode, torn.returncode) == (0, 1)
    assert "finding=torn" in torn.stdout


def test_it_shares_no_code_with_the_stages() -> None:
    text = Path(checker.__file__).read_text()
    assert not [line for line in text.splitlines() if line.startswith(("import kmq", "from kmq", "from stages"))]
