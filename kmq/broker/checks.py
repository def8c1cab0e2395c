"""One check of the machine: what was looked at, how it is, and what to do about it."""

from typing import NamedTuple

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
LEVELS = (ERROR, WARNING, NOTE, OK)  # the most important first


class Check(NamedTuple):
    """The result of one check. `advice`: what to do; "" if nothing is to do."""

    name: str
    level: str
    text: str
    advice: str = ""


def size(nbytes: float) -> str:
    """Return a number of bytes for people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.1f} {unit}"
    return f"{nbytes:,.0f} B"
