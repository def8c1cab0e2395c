"""Writes an audit's result as one HTML file with plots. The file needs no network."""

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape

from kmq.spark.audit import plots
from kmq.spark.audit.findings import NOTES
from kmq.spark.audit.found import Result
from kmq.spark.audit.report import at, by_topic_and_hour, found, records, seqs, verdict, what, where

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


def write(result: Result, path: str) -> None:
    """Write the page to a file, and replace an older one as a whole: a reader never sees half of it."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(page(result))
    os.replace(f"{path}.new", path)


def page(result: Result) -> str:
    """Return the page as HTML."""
    title = "all good" if result.is_good else f"{found(result):,} records with findings"
    names = ", ".join(each.name for each in result.sources)
    parts = [
        f'<header class="{"good" if result.is_good else "bad"}"><h1>KMQ audit: {title}</h1>'
        f"<p>{escape(names)}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC</p></header>",
        _tiles(result),
        _findings(result),
        _section(
            "Sequence numbers",
            plots.seq_map(result),
            "Red: findings. Amber: notes, such as ranges that dropped.log names.",
        ),
        _section("Throughput", plots.throughput(result)),
        _section("Records by topic and hour", plots.hours(result), table=_hours_table(result)),
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


def _tiles(result: Result) -> str:
    tiles = [
        (f"{records(result):,}", "records in the WAL"),
        (_size(sum(each.nbytes for each in result.hours)), "in the WAL"),
        (f"{len({(each.broker, each.topic) for each in result.hours}):,}", "topics"),
        (f"{sum(len(each.snapshot.queues) for each in result.sources):,}", "queues"),
        (f"{found(result):,}", "records with findings"),
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


def _findings(result: Result) -> str:
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


def _hours_table(result: Result) -> str:
    rows = by_topic_and_hour(result.hours, len(result.sources) > 1)
    lines = (
        (topic, hour, f"{count:,}", _size(nbytes), f"{nbytes / max(count, 1):,.0f} B")
        for topic, hour, count, nbytes in rows[:_SHOWN]
    )
    more = f'<p class="soft">… and {len(rows) - _SHOWN:,} more.</p>' if len(rows) > _SHOWN else ""
    return _html_table(["topic", "hour (UTC)", "records", "bytes", "mean size"], lines, (2, 3, 4), {}) + more
