"""Log lines: one line each, whatever is in a value."""

import json
import os
import subprocess
import sys

import pytest

from kmq import logfmt
from kmq.logfmt import Logger, pairs


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (17, "17"),
        ("plain-text_1.5/x", "plain-text_1.5/x"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "x"', '"say \\"x\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("line\nbreak\ttab", '"line\\x0abreak\\x09tab"'),
        ("\x1b[31m", '"\\x1b[31m"'),
        ("größe", "größe"),
        (None, "None"),
    ],
)
def test_a_value_is_quoted_only_where_it_must_be(value, text):
    assert pairs(key=value) == f"key={text}"


def test_fields_keep_their_order():
    assert pairs(b=1, a=2) == "b=1 a=2"


def test_a_log_line_is_one_write_of_one_line(monkeypatch):
    writes = []
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append((fd, data)))
    Logger("framer").warn("dropped", name="a\nb", bad=b"\xff".decode(errors="surrogateescape"))
    [(fd, line)] = writes
    assert fd == 2 and line.count(b"\n") == 1 and line.endswith(b"\n")
    stamp, _, rest = line.decode().partition(" ")
    assert stamp.startswith("ts=20") and stamp.endswith("Z")
    assert rest.startswith('level=warn stage=framer event=dropped name="a\\x0ab" bad=')


def test_a_closed_terminal_does_not_stop_the_stage(monkeypatch):
    def closed(fd, data):
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", closed)
    Logger("framer").info("ready")


@pytest.fixture
def told():
    """What `obey` changes is put back."""
    yield logfmt.obey
    logfmt.obey("logfmt", "info", 0, 0)


def test_as_json_a_line_holds_the_same_fields_and_numbers_are_numbers(told, capfd):
    told("json", "info", 0, 0)
    Logger("framer").warn("dropped", name='a\n"b', count=3, share=0.5, reason=OSError("ü"), none=None)
    shown = json.loads(capfd.readouterr().err)
    assert shown.pop("ts").endswith("Z")
    assert shown == {
        "level": "warn",
        "stage": "framer",
        "event": "dropped",
        "name": 'a\n"b',
        "count": 3,
        "share": 0.5,
        "reason": "ü",
        "none": None,
    }


def test_lines_below_the_level_are_not_written(told, capfd):
    told("logfmt", "warn", 0, 0)
    for write in (Logger("x").info, Logger("x").warn, Logger("x").error):
        write("event")
    assert [line.split()[1] for line in capfd.readouterr().err.splitlines()] == ["level=warn", "level=error"]


WRITER = """
import sys
from kmq import logfmt
logfmt.obey("logfmt", "info", 20_000, int(sys.argv[2]))
for number in range(1000):
    logfmt.Logger(sys.argv[1]).info("line", number=number)
sys.stdout.write(f"by stdout {sys.argv[1]}\\n")  # one write, which no other process's comes between
"""


def test_a_full_log_is_renamed_and_every_line_is_somewhere_once(tmp_path):
    command = [sys.executable, "-uc", WRITER]
    with (tmp_path / "kmq.log").open("ab") as log:
        writers = [subprocess.Popen([*command, name, "30"], stdout=log, stderr=log) for name in ("a", "b", "c")]
        assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    names = ["kmq.log", *(f"kmq.log.{number}" for number in range(1, len(list(tmp_path.iterdir()))))]
    assert {path.name for path in tmp_path.iterdir()} == {*names} and len(names) > 5
    assert all((tmp_path / name).stat().st_size < 21_000 for name in names)
    lines = [line for name in reversed(names) for line in (tmp_path / name).read_text().splitlines()]
    for name in ("a", "b", "c"):
        numbers = [int(line.rpartition("=")[2]) for line in lines if f"stage={name}" in line]
        assert numbers == list(range(1000)) and f"by stdout {name}" in lines


def test_no_more_old_logs_are_kept_than_asked_for(tmp_path):
    with (tmp_path / "kmq.log").open("ab") as log:
        subprocess.run([sys.executable, "-uc", WRITER, "a", "2"], stdout=log, stderr=log, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kmq.log", "kmq.log.1", "kmq.log.2"]
    assert (tmp_path / "kmq.log").read_text().endswith("number=999\nby stdout a\n")


def test_the_new_log_has_the_mode_of_the_one_before_whatever_the_umask(tmp_path):
    with (tmp_path / "kmq.log").open("ab") as log:
        subprocess.run([sys.executable, "-uc", WRITER, "a", "2"], stdout=log, stderr=log, check=True, umask=0o077)
    assert (tmp_path / "kmq.log").stat().st_mode & 0o777 == logfmt.FILE_MODE


def test_a_stderr_that_is_no_log_of_a_broker_is_left_alone(tmp_path):
    with (tmp_path / "other.log").open("ab") as log:
        subprocess.run([sys.executable, "-c", WRITER, "a", "2"], stdout=log, stderr=log, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["other.log"]
    assert len((tmp_path / "other.log").read_bytes().splitlines()) == 1001
