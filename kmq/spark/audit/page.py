"""Writes an audit's result as one HTML file with plots. The file needs no network."""

import io
import os
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from kmq.log.reader import WAL
from kmq.spark.audit.findings import FINDINGS, NOTES
from kmq.spark.audit.report import (
    AuditResult,
    LocatedRow,
    Moment,
    as_time,
    at,
    by_topic_and_hour,
    seqs,
    verdict,
    what,
    where,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- plots -----------------------------------------------------------------------------------------------------------

_ROWS = 24  # logs in the map of seqs
_TOPICS = 8  # that have a colour of their own
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6", "#bab0ac")
_RED, _AMBER, _GREY, _TEXT = "#d62728", "#e6a700", "#dfe5ec", "#3b4654"
_OTHERS = "others"


def _plot(height: float, columns: int = 1) -> tuple[Any, Any]:
    """Return (figure, axes) in the page's style. Needs no display."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(10.2, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, columns)
    return figure, axes


def _tidy(axes: "Axes", grid: str) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#b8c2cd")
    axes.tick_params(colors=_TEXT, length=0)
    axes.grid(axis=grid, color="#edf1f5")  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kmq", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def seq_map(result: AuditResult) -> str:
    """Draw findings (red) and notes (amber) of each log over the seqs: the WAL first, then queues that have any."""
    marks: defaultdict[tuple[str, str, int], list[LocatedRow]] = defaultdict(list)
    for each in [*result.noted, *result.found]:
        if each.row.first_seq:
            marks[each.broker, each.row.topic, each.row.partition].append(each)
    logs = [(source, WAL, 0) for source in result.sources]
    logs += [(source, *place) for source in result.sources for place in sorted(source.snapshot.queues)]
    logs.sort(key=lambda log: (log[1] != WAL, not marks.get((log[0].name, log[1], log[2]))))
    logs = logs[:_ROWS]
    many = len(result.sources) > 1
    figure, axes = _plot(0.7 + 0.27 * len(logs))
    ends = [source.snapshot.wal for source in result.sources]
    low, high = min(first for first, _ in ends), max(end for _, end in ends)
    least = (high - low) / 400  # so that a single record is visible
    labels = []
    for y, (source, topic, partition) in enumerate(logs):
        first, end = source.snapshot.wal
        axes.broken_barh([(first, end - first)], (y - 0.36, 0.72), color=_GREY)
        for is_finding, colour in ((False, _AMBER), (True, _RED)):
            spans = [
                (max(each.row.first_seq, low), max(each.row.last_seq + 1 - each.row.first_seq, least))
                for each in marks[source.name, topic, partition]
                if (each.row.what in FINDINGS) == is_finding
            ]
            axes.broken_barh(spans, (y - 0.36, 0.72), color=colour)
        name = "append (WAL)" if topic == WAL else f"{topic}/{partition}"
        labels.append(f"{source.name} {name}" if many else name)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(low, max(high, low + 1))
    axes.set_xlabel("seq", color=_TEXT)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _tidy(axes, "x")
    return _svg(figure)


def _by_topic(moments: list[Moment]) -> tuple[list[str], dict[tuple[str, int], int]]:
    """Return (topics, records by topic and time). Topics with most records come first; the last may be `others`."""
    sums: defaultdict[str, int] = defaultdict(int)
    for each in moments:
        sums[each.topic] += each.records
    names = sorted(sums, key=lambda name: (-sums[name], name))
    largest = names if len(names) <= _TOPICS + 1 else names[:_TOPICS]
    counts: defaultdict[tuple[str, int], int] = defaultdict(int)
    for each in moments:
        counts[each.topic if each.topic in largest else _OTHERS, each.time] += each.records
    return largest if len(largest) == len(names) else [*largest, _OTHERS], counts


def throughput(result: AuditResult) -> str:
    """Draw records per second over time, with a colour for each topic."""
    if not result.moments:
        return ""
    bucket = max(each.bucket for each in result.sources)
    names, counts = _by_topic([each._replace(time=each.time // bucket * bucket) for each in result.moments])
    times = [time for _, time in counts]
    ticks = range(min(times) - bucket, max(times) + 2 * bucket, bucket)
    if len(ticks) > 5_000:  # days without messages: plot only around the times that have some
        ticks = sorted({time + step for time in times for step in (-bucket, 0, bucket)})  # type: ignore[assignment]
    figure, axes = _plot(2.7)
    rates = [[counts.get((name, time), 0) / (bucket / 1e6) for time in ticks] for name in names]
    axes.stackplot([as_time(time) for time in ticks], rates, labels=names, colors=_COLOURS, step="post")
    axes.set_ylabel("records/s", color=_TEXT)
    axes.set_ylim(0)
    axes.margins(x=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _time_axis(axes)
    _tidy(axes, "y")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=_TEXT)
    return _svg(figure)


def _time_axis(axes: "Axes") -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator()  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]


def hours(result: AuditResult) -> str:
    """Draw records by hour, with a colour for each topic; if there is only one hour, by topic."""
    if not result.hours:
        return ""
    names, counts = _by_topic(result.hours)
    times = sorted({time for _, time in counts})
    if len(times) == 1:
        figure, axes = _plot(0.6 + 0.3 * len(names))
        axes.barh(names, [counts[name, times[0]] for name in names], color=_COLOURS[: len(names)], height=0.7)
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("records", color=_TEXT)
        _tidy(axes, "x")
        return _svg(figure)
    figure, axes = _plot(2.7)
    below = [0] * len(times)
    for name, colour in zip(names, _COLOURS, strict=False):
        heights = [counts.get((name, hour), 0) for hour in times]
        axes.bar([as_time(hour) for hour in times], heights, 0.036, below, label=name, color=colour, align="edge")
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_ylabel("records", color=_TEXT)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _time_axis(axes)
    _tidy(axes, "y")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=_TEXT)
    return _svg(figure)


# --- page ------------------------------------------------------------------------------------------------------------

_SHOWN = 200  # findings in the table of the page

_STYLE = """
:root{--text:#1d2733;--soft:#5b6878;--line:#dfe5ec;--good:#1a7f37;--bad:#c62828}
*{box-sizing:border-box}body{margin:0;background:#f6f8fa;color:var(--text);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}h1{font-size:26px;margin:0}h2{font-size:17px;margin:0 0 10px}
header{border-left:6px solid var(--good);padding:2px 0 2px 16px;margin-bottom:22px}header.bad{border-color:var(--bad)}
header p{margin:2px 0 0;color:var(--soft)}.tiles{display:flex;flex-wrap:wrap;gap:12px;margin-bottom:18px}
.tile,section{background:#fff;border:1px solid var(--line);border-radius:8px}
.tile{padding:10px 16px;min-width:130px;flex:1}.tile b{display:block;font-size:21px}
.tile span{color:var(--soft);font-size:13px}
section{padding:16px 18px;margin-bottom:18px;overflow-x:auto}svg{max-width:100%;height:auto;display:block}
table{border-collapse:collapse;width:100%;font-size:13.5px}th{text-align:left;color:var(--soft);font-weight:600}
th,td{padding:4px 14px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}td.n,th.n{text-align:right}
td:last-child{padding-right:0}td.kind{color:var(--bad);font-weight:600;white-space:nowrap}
td.file,td.seq{white-space:nowrap;font-size:12.5px}
.soft{color:var(--soft)}footer{color:var(--soft);font-size:13px}
"""


def write(result: AuditResult, path: str) -> None:
    """Write the page to a file, and replace an older one as a whole: a reader never sees half of it."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(page(result))
    os.replace(f"{path}.new", path)


def page(result: AuditResult) -> str:
    """Return the page as HTML."""
    title = "all good" if result.is_good else f"{result.affected:,} records with findings"
    names = ", ".join(each.name for each in result.sources)
    parts = [
        f'<header class="{"good" if result.is_good else "bad"}"><h1>KMQ audit: {title}</h1>'
        f"<p>{escape(names)}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC</p></header>",
        _tiles(result),
        _findings(result),
        _section(
            "Sequence numbers",
            seq_map(result),
            "Red: findings. Amber: notes, such as ranges that dropped.log names.",
        ),
        _section("Throughput", throughput(result)),
        _section("Records by topic and hour", hours(result), table=_hours_table(result)),
        "<footer>Every block of the WAL and of the queues was checked against the crc in its index.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>KMQ audit: {escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        + "\n".join(filter(None, parts))
        + "</main></body></html>\n"
    )


def _section(title: str, plot: str, note: str = "", table: str = "") -> str:
    if not plot and not table:
        return ""
    text = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{text}{plot}{table}</section>"


def _tiles(result: AuditResult) -> str:
    tiles = [
        (f"{result.records:,}", "records in the WAL"),
        (_size(sum(each.nbytes for each in result.hours)), "in the WAL"),
        (f"{len({(each.broker, each.topic) for each in result.hours}):,}", "topics"),
        (f"{sum(len(each.snapshot.queues) for each in result.sources):,}", "queues"),
        (f"{result.affected:,}", "records with findings"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{a}</b><span>{b}</span></div>' for a, b in tiles)
        + "</div>"
    )


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def _html_table(
    titles: list[str], rows: Iterable[Iterable[str]], numbers: tuple[int, ...], classes: dict[int, str]
) -> str:
    def cell(tag: str, column: int, text: str) -> str:
        name = "n" if column in numbers else classes.get(column, "") if tag == "td" else ""
        return f'<{tag} class="{name}">{escape(text)}</{tag}>' if name else f"<{tag}>{escape(text)}</{tag}>"

    def line(tag: str, texts: Iterable[str]) -> str:
        return "<tr>" + "".join(cell(tag, column, text) for column, text in enumerate(texts)) + "</tr>"

    return (
        f"<table><thead>{line('th', titles)}</thead><tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"
    )


def _findings(result: AuditResult) -> str:
    many = len(result.sources) > 1
    parts = []
    if result.found:
        rows = (
            (each.row.what, where(each, many), seqs(each), f"{each.row.records:,}", each.file, at(each), what(each))
            for each in result.found[:_SHOWN]
        )
        titles = ["finding", "where", "seq", "records", "file", "at", "what"]
        parts.append(_html_table(titles, rows, (3,), {0: "kind", 2: "seq", 4: "file", 5: "seq"}))
        if len(result.found) > _SHOWN:
            parts.append(
                f'<p class="soft">The first {_SHOWN} are shown; all are counted: {escape(verdict(result))}.</p>'
            )
    parts += [f'<p class="soft">Note: {count:,} {escape(NOTES[kind])}.</p>' for kind, count in result.notes.items()]
    return f"<section><h2>Findings</h2>{''.join(parts) or '<p>None.</p>'}</section>"


def _hours_table(result: AuditResult) -> str:
    rows = by_topic_and_hour(result.hours, len(result.sources) > 1)
    lines = (
        (topic, hour, f"{count:,}", _size(nbytes), f"{nbytes / max(count, 1):,.0f} B")
        for topic, hour, count, nbytes in rows[:_SHOWN]
    )
    more = f'<p class="soft">… and {len(rows) - _SHOWN:,} more.</p>' if len(rows) > _SHOWN else ""
    return _html_table(["topic", "hour (UTC)", "records", "bytes", "mean size"], lines, (2, 3, 4), {}) + more
