"""Draws the plots of an audit's page, as SVG."""

import io
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kmq.log.reader import WAL
from kmq.spark.audit.findings import FINDINGS
from kmq.spark.audit.found import Found, Moment, Result
from kmq.spark.audit.report import as_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def seq_map(result: Result) -> str:
    """Draw findings (red) and notes (amber) of each log over the seqs: the WAL first, then queues that have any."""
    marks: defaultdict[tuple[str, str, int], list[Found]] = defaultdict(list)
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
    kept = names if len(names) <= _TOPICS + 1 else names[:_TOPICS]
    counts: defaultdict[tuple[str, int], int] = defaultdict(int)
    for each in moments:
        counts[each.topic if each.topic in kept else _OTHERS, each.time] += each.records
    return kept if len(kept) == len(names) else [*kept, _OTHERS], counts


def throughput(result: Result) -> str:
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


def hours(result: Result) -> str:
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
