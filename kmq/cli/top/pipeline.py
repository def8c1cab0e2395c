"""The pipeline as it is in the README: producers, ingress, framer, durability, router, queues, and what links them."""

from kmq.cli.top.canvas import Line, bar, count, duration, per_second, percent, size
from kmq.cli.top.snapshot import Link, Snapshot, Stage
from kmq.config.settings import STAGES

_LEAST = 80  # columns for the drawing; fewer: one line per stage and link
_STAGE, _LINK, _MOST_LINK = 11, 10, 24  # columns of a stage and of a link
_ENDS = 6  # columns for the arrows at both ends
_AFTER = {"ingress": "raw", "framer": "framed", "durability": "durable"}
_FULL = 0.8  # of a link: from here on it is shown as a warning
_FINE, _SLOW = ("ready",), ("draining", "recovering", "starting", "waiting")
_ABSENT = Stage("", "-", None, None, None, None, None, None, None)


def state_style(state: str) -> str:
    """Return the style of a state; the word itself says the same without colours."""
    return "good" if state in _FINE else "warn" if state in _SLOW else "dim" if state == "-" else "bad"


def between(snapshot: Snapshot, stage: str) -> Link | None:
    """Return the link behind a stage. The FIFO and the ring behind ingress are one."""
    name = _AFTER.get(stage)
    if name is None:
        return None
    fifo, ring = snapshot.link(name), snapshot.link("received") if name == "raw" else None
    if fifo is None or ring is None:
        return fifo or ring
    nbytes = None if fifo.nbytes is None else fifo.nbytes + (ring.nbytes or 0)
    fills = [link.fill for link in (fifo, ring) if link.fill is not None]
    return Link(name, nbytes, None, None, max(fills) if fills else None)


def waits(link: Link | None) -> str:
    """Return what waits: messages where they are counted, else bytes."""
    if link is None:
        return "-"
    return f"{count(link.messages)} msg" if link.messages is not None else size(link.nbytes)


def fill_style(link: Link | None) -> str:
    return "warn" if link is not None and (link.fill or 0) >= _FULL else ""


def draw(snapshot: Snapshot, width: int) -> list[Line]:
    """Return the pipeline, how long things take, and the other processes."""
    drawn = _wide(snapshot, width) if width >= _LEAST else _narrow(snapshot)
    times = "  ".join(f"{row.name} {duration(row.p50)} / {duration(row.p99)}" for row in snapshot.latency)
    drawn.append(Line("p50 / p99  ", "dim").add(times))
    others = [stage for stage in snapshot.stages if stage.name not in STAGES]
    if others:
        line = Line()
        for stage in others:
            line.add(f"{stage.name} ").add(stage.state, state_style(stage.state)).add(_and(_restarted(stage)) + "  ")
        drawn.append(line)
    return drawn


def _wide(snapshot: Snapshot, width: int) -> list[Line]:
    link_width = min(_MOST_LINK, (width - _ENDS - len(STAGES) * _STAGE) // (len(STAGES) - 1))
    names, states, moved, seqs, again = Line("─▶ ", "bar"), Line("   "), Line("   "), Line("   "), Line("   ")
    for name in STAGES:
        stage, link = snapshot.stage(name) or _ABSENT, between(snapshot, name)
        is_last = name == STAGES[-1]
        names.add(name, "head")
        states.cell(stage.state, _STAGE, state_style(stage.state))
        rate = _rate(name, stage)
        gap = int(len(rate) >= _STAGE)  # a rate that fills its place stays apart from what follows
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


def _narrow(snapshot: Snapshot) -> list[Line]:
    lines = []
    for name in STAGES:
        stage, link = snapshot.stage(name) or _ABSENT, between(snapshot, name)
        line = (
            Line()
            .cell(name, _STAGE, "head")
            .cell(stage.state, _STAGE, state_style(stage.state))
            .cell(_rate(name, stage), 13)
        )
        lines.append(line.add(_about(name, stage) + _and(_restarted(stage))))
        if link is not None or name in _AFTER:
            line = Line("  ═▶ ", "bar").cell(_AFTER[name], 8).add(bar(link.fill if link else None, 8), "bar")
            fill = percent(link.fill if link else None)
            lines.append(line.add(f" {fill:<5}", fill_style(link)).add(waits(link)))
    return lines


def _rate(name: str, stage: Stage) -> str:
    """Return what a stage moves: ingress passes bytes on unread, so it counts no messages."""
    if name != "ingress":
        return per_second(stage.rate)
    return "-" if stage.byte_rate is None else size(stage.byte_rate) + "/s"


def _about(name: str, stage: Stage) -> str:
    producers = f"{count(stage.connections)} producer{'s' if stage.connections != 1 else ''}"
    return producers if name == "ingress" else f"seq {_whole(stage.seq)}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _restarted(stage: Stage) -> str:
    return f"{stage.restarts:.0f} restart{'s' if stage.restarts != 1 else ''}" if stage.restarts else ""


def _and(text: str) -> str:
    return f", {text}" if text else ""
