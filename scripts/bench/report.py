"""What all benchmarks share: options, the parts in turn, and a table of figures, also as JSON."""

import argparse
import compileall
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
from rich.console import Console

from bench.pod import PRIVATE
from kmq.errors import EXIT_FAILED, EXIT_OK, EXIT_SIGINT, KmqError

ROOT = Path(__file__).resolve().parents[2]

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class Figure:
    """One measured value beside its bar. `bar` reads like "≥ 1400000"; "" without a bar.

    A value of None was not measured; `note` says why.
    """

    def __init__(self, part: str, what: str, value: float | None, unit: str, bar: str = "", note: str = "") -> None:
        self.part, self.what, self.value, self.unit, self.bar, self.note = part, what, value, unit, bar, note

    @property
    def met(self) -> bool | None:
        if not self.bar or self.value is None:
            return None
        sign, _, limit = self.bar.partition(" ")
        if sign == "≥":
            return self.value >= float(limit)
        return self.value <= float(limit) if sign == "≤" else self.value < float(limit)


Measure = Callable[[str], Iterator[Figure]]  # a part's name → its figures


def say(text: str) -> None:
    err.print(f"bench: {text}", markup=False)


def show(figures: list[Figure], where: str) -> None:
    out.print(where)
    changed = sorted(name for name in os.environ if name.startswith(("KMQ_", "RB_")) and name not in PRIVATE)
    if changed:
        out.print("settings changed: " + ", ".join(f"{name}={os.environ[name]}" for name in changed), markup=False)
    part = ""
    for figure in figures:
        verdict = {None: "", True: "[green]met[/]", False: "[red]not met[/]"}[figure.met]
        sign, _, limit = figure.bar.partition(" ")
        bar = f"{sign} {float(limit):{',.0f' if float(limit).is_integer() else ',g'}}" if limit else ""
        head = figure.part if figure.part != part else ""
        value = _number(figure.value)
        out.print(f"{head:13} {figure.what:42} {value:>12} {figure.unit:11} {bar:>11} {verdict}".rstrip())
        if figure.note:
            out.print(f"{'':13}   {figure.note}", style="dim", markup=False)
        part = figure.part
    barred = [figure for figure in figures if figure.bar]
    out.print(f"bars met: {sum(bool(figure.met) for figure in barred)} of {len(barred)}")
    if any(figure.part == "latency" for figure in figures):
        out.print(
            "latency: from time.time() before the send (in producer_ts) to time.time() after the read; the wake-up by"
            " inotify is in it (some 20 to 60 µs); at 50,000 msg/s 50 messages go with one send each millisecond"
        )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 0 if value >= 1000 else 1 if value >= 100 else 3
    return f"{value:,.{digits}f}"


def machine(directory: Path) -> str:
    model = next((r.split(":", 1)[1].strip() for r in Path("/proc/cpuinfo").open() if r.startswith("model name")), "?")
    mounts = {m.mountpoint: m.fstype for m in psutil.disk_partitions(all=True)}
    mount = next(str(p) for p in (directory.resolve(), *directory.resolve().parents) if str(p) in mounts)
    memory = psutil.virtual_memory()
    return (
        f"{os.cpu_count()} cores ({model}), Linux {platform.release()}, Python {platform.python_version()}, {mounts[mount]},"
        f" {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory free, load {os.getloadavg()[0]:.2f}"
    )


def run(
    parser: argparse.ArgumentParser,
    parts: Sequence[str],
    quick: str,
    prepare: Callable[[argparse.Namespace], AbstractContextManager[Measure]],
) -> int:
    """Read the options, run the parts in turn, print a table of the figures; return the exit code."""
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of: {' '.join(parts)} (default: all)")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="one part; may come again")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--dir", type=Path, default=ROOT / "bench", help="where the files lie (default: ./bench)")
    options = parser.parse_args()
    options.parts += options.only
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are: {' '.join(parts)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FAILED))  # so that what was started is stopped and removed
    # Compile first, as an installation does: a process that compiles KMQ takes 2 MB more, and Python may not write
    # caches.
    for package in ("kmq", "stages"):
        compileall.compile_dir(ROOT / package, quiet=1)
    options.dir.mkdir(parents=True, exist_ok=True)
    where = machine(options.dir)
    err.print(where)
    figures: list[Figure] = []
    code = EXIT_OK
    try:
        with prepare(options) as measure:
            for part in options.parts or parts:
                figures.extend(measure(part))
    except KmqError as error:
        print(f"bench: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        code = EXIT_SIGINT
    finally:
        show(figures, where)
    if options.json:
        rows = [vars(figure) | {"met": figure.met} for figure in figures]
        options.json.write_text(
            json.dumps({"machine": where, "quick": options.quick, "figures": rows}, indent=1) + "\n"
        )
    return code
