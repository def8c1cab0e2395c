"""A snapshot, the user's view, and the size of the terminal → lines. Pure: reads nothing else.

Invariant   `draw` returns exactly `height` lines of at most `width` cells, for every snapshot and size from 20x5 on.
            `ScreenLine.fit` returns exactly `width` cells, or fewer for a terminal that shows fewer. Only printable
            characters of a name or a text get into a line: others are escaped (\\x1b). On a terminal without UTF-8
            characters outside ASCII become ? or a similar character.
"""

import math
import textwrap
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from kmq.cli.top.snapshot import LinkRow, StageRow, TopSnapshot
from kmq.config.settings import STAGES

_ASCII = str.maketrans({"═": "=", "─": "-", "▶": ">", "█": "#", "░": ".", "…": "~", "·": "-", "↑": "^", "↓": "v"})
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
NONE = "-"

NAMELESS = "broker"
VIEWS = {"p": "pipeline", "t": "topics", "g": "groups", "c": "connections", "l": "log"}
_HELP = (
    ("p", "the pipeline: state, rate and fill of every link, and what is wrong"),
    ("t", "topics, the highest rate first"),
    ("g", "consumer groups, the largest lag first"),
    ("c", "connections, intakes and links"),
    ("l", "log: what has happened, the newest first"),
    ("arrows", "scroll; Page Up, Page Down, Home"),
    ("?", "this page"),
    ("q", "quit; also Ctrl-C"),
)
_KEYS = "p pipeline  t topics  g groups  c connections  l log  ? help  q quit"
_FINDINGS = 6  # lines, at least, where there are so many

_LEAST = 80  # columns for the drawing; fewer: one line per stage and link
_STAGE, _LINK, _MOST_LINK = 11, 10, 24  # columns of a stage and of a link
_ENDS = 6  # columns for the arrows at both ends
_AFTER = {"ingress": "raw", "framer": "framed", "durability": "durable"}
_FULL = 0.8  # of a link: from here on it is shown as a warning
_FINE, _SLOW = ("ready", "following"), ("draining", "recovering", "starting", "waiting", "unled")
_ABSENT = StageRow("", "-", None, None, None, None, None, None, None)

_NUMBER = 11  # columns of a number in a table


# --- lines -----------------------------------------------------------------------------------------------------------


def clean(text: str, is_ascii: bool) -> str:
    """Return `text` without control characters for the terminal."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else _escaped(c) for c in text)
    if is_ascii and not text.isascii():
        text = text.translate(_ASCII)
        text = "".join(c if c.isascii() else "?" for c in text)
    return text


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def cut(text: str, width: int) -> str:
    """Return `text` in at most `width` cells; … marks a cut."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…" if width > 0 else ""


class ScreenLine:
    """One line: parts of text, each in a style of screen.STYLES."""

    def __init__(self, text: str = "", style: str = "") -> None:
        self.parts: list[tuple[str, str]] = []
        self.add(text, style)

    def add(self, text: str, style: str = "") -> "ScreenLine":
        if text:
            self.parts.append((text, style))
        return self

    def cell(self, text: str, width: int, style: str = "", right: bool = False) -> "ScreenLine":
        """Add text in exactly `width` cells."""
        text = cut(clean(text, False), width)
        blank = " " * (width - cell_len(text))
        return self.add(blank).add(text, style) if right else self.add(text, style).add(blank)

    def fit(self, width: int, is_ascii: bool) -> list[tuple[str, str]]:
        """Return the parts, cleaned, cut and filled with blanks to `width`."""
        left, fitted = width, []
        parts = [(clean(text, is_ascii), style) for text, style in self.parts]
        for number, (text, style) in enumerate(parts):
            rest = sum(cell_len(later) for later, _ in parts[number + 1 :])
            size = cell_len(text)
            if size > left or (size == left and rest):
                text = clean(cut(text + "  " * (rest > 0), left), is_ascii)
                size = cell_len(text)
                fitted.append((text, style))
                left -= size
                break
            fitted.append((text, style))
            left -= size
        return [*fitted, (" " * left, "")] if left > 0 else fitted

    @property
    def plain(self) -> str:
        return "".join(text for text, _ in self.parts)


# --- numbers, in few cells -------------------------------------------------------------------------------------------


def count(value: float | None) -> str:
    """12,345 · 12.3M"""
    if value is None:
        return NONE
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e7, "M")):
        if abs(value) >= size:
            return f"{value / (1e6 if unit == 'M' else size):,.1f}{unit}"
    return f"{value:,.0f}"


def per_second(value: float | None) -> str:
    """Return a rate. Small rates keep a digit, because 0/s would mean that nothing moves."""
    if value is None:
        return NONE
    return f"{value:.1f}/s" if 0 < value < 10 else f"{count(value)}/s"


def size(value: float | None) -> str:
    """512 B · 12.3 KiB"""
    if value is None:
        return NONE
    power = 0
    while abs(value) >= 1023.95 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{value:,.0f} B" if not power else f"{value:,.1f} {_UNITS[power]}"


def duration(value: float | None) -> str:
    """850 us · 1.2 ms · 3.4 s · 12 m"""
    if value is None:
        return NONE
    if value < 0.9995:
        return f"{value * 1e6:.0f} us" if value < 0.0009995 else f"{value * 1e3:.3g} ms"
    for limit, unit, seconds in ((120, "s", 1.0), (7200, "m", 60.0), (172_800, "h", 3600.0)):
        if value < limit:
            return f"{value / seconds:.3g} {unit}"
    return f"{value / 86_400:,.0f} d"


def percent(fill: float | None) -> str:
    if fill is None:
        return NONE
    return f"{math.ceil(fill * 100)}%"  # never 0 % while something waits


def bar(fill: float | None, width: int) -> str:
    """A bar of `width` cells."""
    full = 0 if fill is None else min(width, math.ceil(max(0.0, fill) * width))
    return "█" * full + "░" * (width - full)


# --- screen ----------------------------------------------------------------------------------------------------------


class View(NamedTuple):
    """The user's view: a key of VIEWS or ?, and how many rows it is scrolled down."""

    view: str = "p"
    scroll: int = 0


def draw(snapshot: TopSnapshot, wanted: View, width: int, height: int) -> list[ScreenLine]:
    """Return the screen."""
    head, foot = header(snapshot, width), ScreenLine(_KEYS, "dim")
    room = max(0, height - len(head) - 1)
    if wanted.view == "?":
        body = [ScreenLine().cell(key, 8, "key").add(text) for key, text in _HELP]
    elif wanted.view == "p":
        body = overview(snapshot, width, room)
    else:
        body = _scrolled(_table(snapshot, wanted.view, width), wanted.scroll, room)
    body = (body + [ScreenLine()] * room)[:room]
    return [*[*head, *body][: max(0, height - 1)], foot][:height]


def rows(snapshot: TopSnapshot, view: str) -> int:
    """Return how many rows a view can scroll."""
    return max(0, len(_table(snapshot, view, 80)) - 2) if view in "tgcl" else 0


def _table(snapshot: TopSnapshot, view: str, width: int) -> list[ScreenLine]:
    makers = {"t": topics, "g": groups, "c": connections, "l": events}
    return makers[view](snapshot, width)


def _scrolled(table: list[ScreenLine], scroll: int, room: int) -> list[ScreenLine]:
    """Scroll a table, but keep its title."""
    title, rest = table[:1], table[1:]
    scroll = min(scroll, max(0, len(rest) - 1))
    return title + rest[scroll : scroll + room - 1]


def header(snapshot: TopSnapshot, width: int) -> list[ScreenLine]:
    """Return the name of the broker, its state, and the time."""
    line = ScreenLine("KMQ ", "head").add(snapshot.instance or NAMELESS, "head").add("  ")
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
    return [line, *([ScreenLine(snapshot.problem, "bad")] if snapshot.problem else [])]


def overview(snapshot: TopSnapshot, width: int, room: int) -> list[ScreenLine]:
    """Return pipeline, findings, and as much of topics, groups and events as fits."""
    lines = draw_pipeline(snapshot, width)
    found = findings(snapshot, width)
    left = room - len(lines)
    shown = found[: max(min(_FINDINGS, left), left // 2)]
    if len(shown) < len(found) and shown:
        shown[-1] = ScreenLine("… more; a larger terminal shows all", "dim")
    lines += shown
    parts = [topics(snapshot, width), groups(snapshot, width), events(snapshot, width)]
    if snapshot.intakes:
        parts.insert(0, intakes(snapshot, width))
    return lines + shared(parts, room - len(lines))


def shared(parts: list[list[ScreenLine]], room: int) -> list[ScreenLine]:
    """Return the beginnings of `parts` in `room` lines. Lines that a short part does not need go to the others."""
    room -= len(parts)  # a blank line before each
    while parts and room < 2 * len(parts):
        parts, room = parts[:-1], room + 1
    sizes = [0] * len(parts)
    for _ in range(max(0, room)):
        growing = [at for at, part in enumerate(parts) if sizes[at] < len(part)]
        if not growing:
            break
        sizes[min(growing, key=lambda at: sizes[at])] += 1
    return [line for part, size in zip(parts, sizes, strict=True) for line in (ScreenLine(), *part[:size])]


def findings(snapshot: TopSnapshot, width: int) -> list[ScreenLine]:
    """Return each finding with what to do."""
    lines = []
    for finding in snapshot.findings:
        style = "bad" if finding.is_error else "warn"
        for text in _wrapped(f"{finding.code}: {finding.why}", width, ""):
            lines.append(ScreenLine(text, style))
        for text in _wrapped(f"do: {finding.advice}", width, "  ") if finding.advice else ():
            lines.append(ScreenLine(text))
    return [ScreenLine(), *lines] if lines else []


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """Return at most three lines."""
    return textwrap.wrap(
        text, max(20, width), initial_indent=indent, subsequent_indent="  " + indent, max_lines=3, placeholder=" …"
    )


# --- pipeline --------------------------------------------------------------------------------------------------------
# As it is in the README: producers, ingress, framer, durability, router, queues, and what links them.


def state_style(state: str) -> str:
    """Return the style of a state; the word itself says the same without colours."""
    return "good" if state in _FINE else "warn" if state in _SLOW else "dim" if state == "-" else "bad"


def between(snapshot: TopSnapshot, stage: str) -> LinkRow | None:
    """Return the link after a stage. The FIFO and the ring after ingress count as one."""
    name = _AFTER.get(stage)
    if name is None:
        return None
    fifo, ring = snapshot.link(name), snapshot.link("received") if name == "raw" else None
    if fifo is None or ring is None:
        return fifo or ring
    nbytes = None if fifo.bytes is None else fifo.bytes + (ring.bytes or 0)
    fills = [link.fill for link in (fifo, ring) if link.fill is not None]
    return LinkRow(name, nbytes, None, None, max(fills) if fills else None)


def waits(link: LinkRow | None) -> str:
    """Return what waits in a link: in messages if they are counted, else in bytes."""
    if link is None:
        return "-"
    return f"{count(link.messages)} msg" if link.messages is not None else size(link.bytes)


def fill_style(link: LinkRow | None) -> str:
    return "warn" if link is not None and (link.fill or 0) >= _FULL else ""


def draw_pipeline(snapshot: TopSnapshot, width: int) -> list[ScreenLine]:
    """Return the pipeline, how long things take, and the other processes."""
    drawn = _wide(snapshot, width) if width >= _LEAST else _narrow(snapshot)
    times = "  ".join(f"{row.name} {duration(row.p50)} / {duration(row.p99)}" for row in snapshot.latency)
    drawn.append(ScreenLine("p50 / p99  ", "dim").add(times))
    others = [stage for stage in snapshot.stages if stage.name not in STAGES]
    if others:
        line = ScreenLine()
        for stage in others:
            line.add(f"{stage.name} ").add(stage.state, state_style(stage.state)).add(_and(_restarted(stage)) + "  ")
        if snapshot.kafka is not None:
            line.add(f"kafka {_whole(snapshot.kafka.port)}, {count(snapshot.kafka.connections)} connected")
        drawn.append(line)
    if (copy := snapshot.copy) is not None:
        age = f" for {duration(copy.age_s)}" if copy.behind else ""
        text = f"seq {_whole(copy.seq)}, {count(copy.behind)} msg behind{age}"
        if copy.bytes or copy.behind_bytes:  # in 80 columns
            text += f"; topics {size(copy.bytes)}, {size(copy.behind_bytes)} behind"
        drawn.append(ScreenLine("tier  ", "dim").add(text))
    return drawn


def _wide(snapshot: TopSnapshot, width: int) -> list[ScreenLine]:
    link_width = min(_MOST_LINK, (width - _ENDS - len(STAGES) * _STAGE) // (len(STAGES) - 1))
    names, (states, moved, seqs, again) = ScreenLine("─▶ ", "bar"), (ScreenLine("   ") for _ in range(4))
    for name in STAGES:
        stage, link = snapshot.stage(name) or _ABSENT, between(snapshot, name)
        is_last = name == STAGES[-1]
        names.add(name, "head")
        states.cell(stage.state, _STAGE, state_style(stage.state))
        rate = _rate(name, stage)
        gap = int(len(rate) >= _STAGE)  # a rate that fills its place needs a gap
        moved.cell(rate, _STAGE).add(" " * gap)
        place = width - _ENDS // 2 - (len(STAGES) - 1) * (_STAGE + link_width) if is_last else _STAGE + link_width
        seqs.cell(_about(name, stage), place)
        again.cell(_restarted(stage), place)
        if is_last:
            names.add(" " * (_STAGE - len(name) - 1)).add("─▶", "bar")
            continue
        room = _STAGE + link_width - len(name) - 2
        names.add(" ").add(f"{'═' + _AFTER[name]:═^{room - 1}}▶ ", "bar")
        fill = percent(link.fill if link else None)
        states.add(bar(link.fill if link else None, link_width - 6), fill_style(link) or "bar").cell(f" {fill}", 6)
        moved.cell(waits(link), link_width - gap, fill_style(link))
    is_again = any(stage.restarts for stage in snapshot.stages if stage.name in STAGES)
    return [names, states, moved, seqs, *([again] if is_again else [])]


def _narrow(snapshot: TopSnapshot) -> list[ScreenLine]:
    lines = []
    for name in STAGES:
        stage, link = snapshot.stage(name) or _ABSENT, between(snapshot, name)
        line = (
            ScreenLine()
            .cell(name, _STAGE, "head")
            .cell(stage.state, _STAGE, state_style(stage.state))
            .cell(_rate(name, stage), 13)
        )
        lines.append(line.add(_about(name, stage) + _and(_restarted(stage))))
        if link is not None or name in _AFTER:
            line = ScreenLine("  ═▶ ", "bar").cell(_AFTER[name], 8).add(bar(link.fill if link else None, 8), "bar")
            fill = percent(link.fill if link else None)
            lines.append(line.add(f" {fill:<5}", fill_style(link)).add(waits(link)))
    return lines


def _rate(name: str, stage: StageRow) -> str:
    """Return the rate of a stage. Ingress counts bytes, not messages, because it passes blocks on unread."""
    if name != "ingress":
        return per_second(stage.rate)
    return "-" if stage.bytes_rate is None else size(stage.bytes_rate) + "/s"


def _about(name: str, stage: StageRow) -> str:
    producers = f"{count(stage.connections)} producer{'s' if stage.connections != 1 else ''}"
    return producers if name == "ingress" else f"seq {_whole(stage.seq)}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _restarted(stage: StageRow) -> str:
    return f"{stage.restarts:.0f} restart{'s' if stage.restarts != 1 else ''}" if stage.restarts else ""


def _and(text: str) -> str:
    return f", {text}" if text else ""


# --- tables ----------------------------------------------------------------------------------------------------------
# Topics, groups, connections and links, events. The first line of each is its title.


def _rows(
    name: str, total: int, columns: tuple[str, ...], cells: Sequence[tuple[str, ...]], width: int
) -> list[ScreenLine]:
    """Return a title and a line for each of `cells`, a name and then numbers: as many columns as fit beside the
    name.
    """
    columns = columns[: max(1, (width - 24) // _NUMBER)]
    what = f"{name} ({total:,})" if total <= len(cells) else f"{name} ({len(cells):,} of {total:,})"
    lines = [_line(what, columns, width, "head", "dim")]
    return lines + [_line(first, numbers[: len(columns)], width) for first, *numbers in cells]


def _line(first: str, numbers: Sequence[str], width: int, style: str = "", style_of_numbers: str = "") -> ScreenLine:
    line = ScreenLine().cell(first, max(12, width - len(numbers) * _NUMBER), style)
    for number in numbers:
        line.cell(number, _NUMBER, style_of_numbers, right=True)
    return line


def intakes(snapshot: TopSnapshot, width: int) -> list[ScreenLine]:
    """Ports for raw lines, in the order of KMQ_INTAKES."""
    cells = [
        (
            row.name,
            per_second(row.rate).removesuffix("/s"),
            *(size(row.bytes_rate), count(row.connections), count(row.refused), count(row.dropped)),
        )
        for row in snapshot.intakes
    ]
    columns = ("lines/s", "bytes/s", "connected", "refused", "dropped")
    return _rows("intakes", len(cells), columns, cells, width)


def topics(snapshot: TopSnapshot, width: int) -> list[ScreenLine]:
    """Topics, the highest rate first."""
    cells = [
        (
            row.topic,
            per_second(row.rate).removesuffix("/s"),
            *(size(row.bytes_rate), count(row.records), size(row.bytes), count(row.partitions)),
        )
        for row in snapshot.topics
    ]
    columns = ("msg/s", "bytes/s", "records", "bytes", "partitions")
    lines = _rows("topics", snapshot.topics_total, columns, cells, width)
    return _with_note(lines, snapshot, "topics", "no topics yet; the first message makes one")


def groups(snapshot: TopSnapshot, width: int) -> list[ScreenLine]:
    """Groups, the largest lag first."""
    cells = [
        (row.group, count(row.lag), duration(row.lag_seconds), count(row.members), row.state) for row in snapshot.groups
    ]
    lines = _rows("groups", snapshot.groups_total, ("lag", "lag time", "members", "state"), cells, width)
    return _with_note(lines, snapshot, "groups", "no groups yet")


def events(snapshot: TopSnapshot, width: int) -> list[ScreenLine]:
    """Events, the newest first."""
    lines = [ScreenLine("events", "head")]
    for event in snapshot.events:
        style = {"not_ready": "bad", "warning": "warn", "ready": "good"}.get(event.kind, "")
        at = time.strftime("%H:%M:%S", time.gmtime(max(0.0, min(event.at, 1e11))))
        lines.append(
            ScreenLine(f"{at} ", "dim").cell(event.kind, 10, style).cell(event.about, 12).add(f" {event.text}")
        )
    return _with_note(lines, snapshot, "events", "none")


def _with_note(lines: list[ScreenLine], snapshot: TopSnapshot, about: str, empty: str) -> list[ScreenLine]:
    note = snapshot.notes.get(about, "")
    if note:
        lines[0].add(f"  {note}", "dim") if about == "events" else lines.append(ScreenLine(f"  {note}", "dim"))
    elif len(lines) == 1:
        lines.append(ScreenLine(f"  {empty}", "dim"))
    return lines


def connections(snapshot: TopSnapshot, width: int) -> list[ScreenLine]:
    """Connections of the processes that have some, then the links."""
    first = max(12, width - 5 * _NUMBER)
    title = f"processes ({len(snapshot.stages):,})"
    lines = [_line(title, ("state", "connected", "restarts", "refused", "dropped"), width, "head", "dim")]
    for stage in snapshot.stages:
        line = ScreenLine().cell(stage.name, first).cell(stage.state, _NUMBER, state_style(stage.state), True)
        for value in (stage.connections, stage.restarts, stage.refused, stage.dropped):
            line.cell(count(value), _NUMBER, right=True)
        lines.append(line)
    if snapshot.intakes:
        lines += [ScreenLine(), *intakes(snapshot, width)]
    if snapshot.kafka is not None:
        port, *counts = snapshot.kafka
        columns = ("connected", "producers", "from cache", "from lines")
        lines += [ScreenLine(), _line("clients of Kafka", columns, width, "head", "dim")]
        lines.append(_line(f"port {_whole(port)}", [count(value) for value in counts], width))
    lines += [ScreenLine(), _line("links", ("fill", "", "bytes", "capacity", "messages"), width, "head", "dim")]
    for link in snapshot.links:
        line = ScreenLine().cell(link.name, first).cell(percent(link.fill), _NUMBER, fill_style(link), True)
        line.add(" ").add(bar(link.fill, _NUMBER - 1), "bar")
        for cell in (size(link.bytes), size(link.capacity), count(link.messages)):
            line.cell(cell, _NUMBER, right=True)
        lines.append(line)
    return lines
