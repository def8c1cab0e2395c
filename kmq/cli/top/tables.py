"""Tables of the screen: topics, groups, connections and links, events. The first line of each is its title."""

import time

from kmq.cli.top.canvas import Line, bar, count, duration, per_second, percent, size
from kmq.cli.top.pipeline import fill_style, state_style
from kmq.cli.top.snapshot import Snapshot

_NUMBER = 11


def _title(name: str, total: int, shown: int, columns: tuple[str, ...], width: int) -> Line:
    what = f"{name} ({total:,})" if total <= shown else f"{name} ({shown:,} of {total:,})"
    line = Line().cell(what, _first(width, len(columns)), "head")
    for column in columns:
        line.cell(column, _NUMBER, "dim", right=True)
    return line


def _first(width: int, columns: int) -> int:
    return max(12, width - columns * _NUMBER)


def _few(width: int, *columns: str) -> tuple[str, ...]:
    """Return as many columns as have room beside a name."""
    return columns[: max(1, (width - 24) // _NUMBER)]


def topics(snapshot: Snapshot, width: int) -> list[Line]:
    """Topics, the highest rate first."""
    columns = _few(width, "msg/s", "bytes/s", "records", "bytes", "partitions")
    lines = [_title("topics", snapshot.topics_total, len(snapshot.topics), columns, width)]
    for row in snapshot.topics:
        cells = (
            per_second(row.rate).removesuffix("/s"),
            size(row.byte_rate),
            count(row.records),
            size(row.nbytes),
            count(row.partitions),
        )
        line = Line().cell(row.topic, _first(width, len(columns)))
        for cell in cells[: len(columns)]:
            line.cell(cell, _NUMBER, right=True)
        lines.append(line)
    return _with_note(lines, snapshot, "topics", "no topics yet; the first message makes one")


def groups(snapshot: Snapshot, width: int) -> list[Line]:
    """Groups, the largest lag first."""
    columns = _few(width, "lag", "lag time", "members", "state")
    lines = [_title("groups", snapshot.groups_total, len(snapshot.groups), columns, width)]
    for row in snapshot.groups:
        line = Line().cell(row.group, _first(width, len(columns)))
        for cell in (count(row.lag), duration(row.lag_seconds), count(row.members), row.state)[: len(columns)]:
            line.cell(cell, _NUMBER, right=True)
        lines.append(line)
    return _with_note(lines, snapshot, "groups", "no groups yet")


def events(snapshot: Snapshot, width: int) -> list[Line]:
    """Events, the newest first."""
    lines = [Line("events", "head")]
    for event in snapshot.events:
        style = {"not_ready": "bad", "warning": "warn", "ready": "good"}.get(event.kind, "")
        at = time.strftime("%H:%M:%S", time.gmtime(max(0.0, min(event.at, 1e11))))
        lines.append(Line(f"{at} ", "dim").cell(event.kind, 10, style).cell(event.about, 12).add(f" {event.text}"))
    return _with_note(lines, snapshot, "events", "none")


def _with_note(lines: list[Line], snapshot: Snapshot, about: str, empty: str) -> list[Line]:
    note = snapshot.notes.get(about, "")
    if note:
        lines[0].add(f"  {note}", "dim") if about == "events" else lines.append(Line(f"  {note}", "dim"))
    elif len(lines) == 1:
        lines.append(Line(f"  {empty}", "dim"))
    return lines


def connections(snapshot: Snapshot, width: int) -> list[Line]:
    """Connections of the processes that have some, then the links."""
    lines = [_title("processes", len(snapshot.stages), len(snapshot.stages), ("state", *_COUNTS), width)]
    for stage in snapshot.stages:
        line = Line().cell(stage.name, _first(width, 5)).cell(stage.state, _NUMBER, state_style(stage.state), True)
        for value in (stage.connections, stage.restarts, stage.refused, stage.dropped):
            line.cell(count(value), _NUMBER, right=True)
        lines.append(line)
    titles = Line().cell("links", _first(width, 5), "head")
    for title in ("fill", "", "bytes", "capacity", "messages"):
        titles.cell(title, _NUMBER, "dim", right=True)
    lines += [Line(), titles]
    for link in snapshot.links:
        line = Line().cell(link.name, _first(width, 5)).cell(percent(link.fill), _NUMBER, fill_style(link), True)
        line.add(" ").add(bar(link.fill, _NUMBER - 1), "bar")
        for cell in (size(link.nbytes), size(link.capacity), count(link.messages)):
            line.cell(cell, _NUMBER, right=True)
        lines.append(line)
    return lines


_COUNTS = ("connected", "restarts", "refused", "dropped")
