"""Lines of a screen: text with styles, never wider than the screen, never a control character.

Invariant   `Line.fit` returns exactly `width` cells, or fewer for a terminal that shows fewer. Whatever a name or a text
            holds, only printable characters get into a line: others are escaped (\\x1b), and all but ASCII become ? or a
            look-alike where the terminal is not one for UTF-8.
"""

import math

from rich.cells import cell_len, set_cell_size

_ASCII = str.maketrans({"═": "=", "─": "-", "▶": ">", "█": "#", "░": ".", "…": "~", "·": "-", "↑": "^", "↓": "v"})
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
NONE = "-"


def clean(text: str, is_ascii: bool) -> str:
    """Return `text` without anything that a terminal would obey."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else _escaped(c) for c in text)
    if is_ascii and not text.isascii():
        text = text.translate(_ASCII)
        text = "".join(c if c.isascii() else "?" for c in text)
    return text


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def cut(text: str, width: int) -> str:
    """Return `text` in at most `width` cells; … says that there was more."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…" if width > 0 else ""


class Line:
    """One line: parts of text, each in a style of screen.STYLES."""

    def __init__(self, text: str = "", style: str = "") -> None:
        self.parts: list[tuple[str, str]] = []
        self.add(text, style)

    def add(self, text: str, style: str = "") -> "Line":
        if text:
            self.parts.append((text, style))
        return self

    def cell(self, text: str, width: int, style: str = "", right: bool = False) -> "Line":
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
    """Small rates keep a digit, because 0/s would say that nothing moves."""
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
