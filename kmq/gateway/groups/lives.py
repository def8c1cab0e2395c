"""data/gateway.starts: how many gateways have served groups here, so that each has generations of its own.

    <n>                     decimal, one line

Owner       the gateway; written once at its start.
Invariant   `begin` never returns a number that it returned before, because the next one is on disk before it returns.
Crash       The file is replaced atomically. A missing or damaged file, as after a restore, counts on from `least`.
"""

from kmq.files import replace_file

NAME = "gateway.starts"
_MOST_DIGITS = 9


def begin(data: str, least: int = 0) -> int:
    """Return the number of former lives, at least `least`, and count this one. Raises OSError if it cannot be written."""
    try:
        with open(f"{data}/{NAME}", "rb") as file:
            text = file.read(_MOST_DIGITS + 2).strip()
    except FileNotFoundError:
        text = b""
    former = max(least, int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else 0)
    replace_file(f"{data}/{NAME}", b"%d\n" % (former + 1))
    return former
