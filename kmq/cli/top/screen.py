"""A snapshot, what the user wants to see, and the size of the terminal → lines. Pure: looks at nothing else.

Invariant   `draw` returns exactly `height` lines of at most `width` cells, for every snapshot and size from 20x5 on.
"""

import textwrap
import time
from typing import NamedTuple

from kmq.cli.top import pipeline, tables
from kmq.cli.top.canvas import Line
from kmq.cli.top.snapshot import Snapshot

NAMELESS = "broker"
VIEWS = {"p": "pipeline", "t": "topics", "g": "groups", "c": "connections", "l": "log"}
_HELP = (
    ("p", "the pipeline: state, rate and fill of every link, and what is wrong"),
    ("t", "topics, the highest rate first"),
    ("g", "consumer groups, the largest lag first"),
    ("c", "connections and links"),
    ("l", "log: what has happened, the newest first"),
    ("arrows", "scroll; Page Up, Page Down, Home"),
    ("?", "this page"),
    ("q", "quit; also Ctrl-C"),
)
_KEYS = "p pipeline  t topics  g groups  c connections  l log  ? help  q quit"
_FINDINGS = 6  # lines, at least, where there are so many


class Wanted(NamedTuple):
    """What the user wants to see: a key of VIEWS or ?, and how many rows further down."""

    view: str = "p"
    scroll: int = 0


def draw(snapshot: Snapshot, wanted: Wanted, width: int, height: int) -> list[Line]:
    """Return the screen."""
    head, foot = header(snapshot, width), Line(_KEYS, "dim")
    room = max(0, height - len(head) - 1)
    if wanted.view == "?":
        body = [Line().cell(key, 8, "key").add(text) for key, text in _HELP]
    elif wanted.view == "p":
        body = overview(snapshot, width, room)
    else:
        body = _scrolled(_table(snapshot, wanted.view, width), wanted.scroll, room)
    body = (body + [Line()] * room)[:room]
    return [*[*head, *body][: max(0, height - 1)], foot][:height]


def rows(snapshot: Snapshot, view: str) -> int:
    """Return how many rows a view can scroll."""
    return max(0, len(_table(snapshot, view, 80)) - 2) if view in "tgcl" else 0


def _table(snapshot: Snapshot, view: str, width: int) -> list[Line]:
    makers = {"t": tables.topics, "g": tables.groups, "c": tables.connections, "l": tables.events}
    return makers[view](snapshot, width)


def _scrolled(table: list[Line], scroll: int, room: int) -> list[Line]:
    """Return a table that keeps its title."""
    title, rest = table[:1], table[1:]
    scroll = min(scroll, max(0, len(rest) - 1))
    return title + rest[scroll : scroll + room - 1]


def header(snapshot: Snapshot, width: int) -> list[Line]:
    """Return who, how it is, and when."""
    line = Line("KMQ ", "head").add(snapshot.instance or NAMELESS, "head").add("  ")
    errors = sum(finding.is_error for finding in snapshot.findings)
    warnings = len(snapshot.findings) - errors
    if not snapshot.as_of:
        line.add("unknown", "bad")
    elif snapshot.is_ready:
        line.add("ready", "good")
    else:
        line.add("not ready" if snapshot.is_up else "down", "bad")
    for number, word, style in ((errors, "error", "bad"), (warnings, "warning", "warn")):
        if number:
            line.add(f", {number} {word}{'s' if number > 1 else ''}", style)
    if snapshot.supervisor == "killed":
        line.add(", no supervisor", "warn")
    if snapshot.as_of:
        line.add("  " + time.strftime("%H:%M:%S", time.gmtime(snapshot.as_of)) + " UTC", "dim")
    if snapshot.version:
        line.add(f"  {snapshot.version}", "dim")
    return [line, *([Line(snapshot.problem, "bad")] if snapshot.problem else [])]


def overview(snapshot: Snapshot, width: int, room: int) -> list[Line]:
    """Return pipeline, findings, and as much of topics, groups and events as has room."""
    lines = pipeline.draw(snapshot, width)
    found = findings(snapshot, width)
    left = room - len(lines)
    shown = found[: max(min(_FINDINGS, left), left // 2)]
    if len(shown) < len(found) and shown:
        shown[-1] = Line("… more; a larger terminal shows all", "dim")
    lines += shown
    parts = [tables.topics(snapshot, width), tables.groups(snapshot, width), tables.events(snapshot, width)]
    return lines + shared(parts, room - len(lines))


def shared(parts: list[list[Line]], room: int) -> list[Line]:
    """Return the beginnings of `parts` in `room` lines: each as much as it has, and what one does not need to the others."""
    room -= len(parts)  # a blank line before each
    while parts and room < 2 * len(parts):
        parts, room = parts[:-1], room + 1
    sizes = [0] * len(parts)
    for _ in range(max(0, room)):
        growing = [at for at, part in enumerate(parts) if sizes[at] < len(part)]
        if not growing:
            break
        sizes[min(growing, key=lambda at: sizes[at])] += 1
    return [line for part, size in zip(parts, sizes, strict=True) for line in (Line(), *part[:size])]


def findings(snapshot: Snapshot, width: int) -> list[Line]:
    """Return each finding with what to do."""
    lines = []
    for finding in snapshot.findings:
        style = "bad" if finding.is_error else "warn"
        for text in _wrapped(f"{finding.code}: {finding.why}", width, ""):
            lines.append(Line(text, style))
        for text in _wrapped(f"do: {finding.do}", width, "  ") if finding.do else ():
            lines.append(Line(text))
    return [Line(), *lines] if lines else []


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """Return at most three lines."""
    return textwrap.wrap(
        text, max(20, width), initial_indent=indent, subsequent_indent="  " + indent, max_lines=3, placeholder=" …"
    )
