"""Log lines: one line each, whatever is in a value."""

import os

import pytest

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
