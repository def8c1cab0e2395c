"""Find the bars that separate the fields of stored lines, for many lines at once (numpy)."""

from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]

FIELDS = 6
_BAR = ord("|")
_LONG, _HEAD = 512, 96  # bytes: if lines average _LONG, only their first _HEAD bytes are searched at first


def find(data: Numbers, starts: Numbers, ends: Numbers) -> list[Numbers]:
    """Return where the first five bars of each line are, one array for each bar. Lines are data[starts[i]:ends[i]]."""
    count = len(starts)
    if len(data) > _LONG * count and (near := _find_near(data, starts, ends)):
        return near
    bars = np.flatnonzero(data == _BAR)
    if len(bars) == (FIELDS - 1) * count:  # no payload holds a bar
        return [bars[at :: FIELDS - 1] for at in range(FIELDS - 1)]
    first = np.searchsorted(bars, starts)
    return [bars[first + at] for at in range(FIELDS - 1)]


def _find_near(data: Numbers, starts: Numbers, ends: Numbers) -> list[Numbers] | None:
    """Return the same, from the first bytes of each line only; None if a bar is not among them."""
    count, last = len(starts), len(data) - _HEAD
    if not count or starts[-1] > last:
        return None
    heads = np.ndarray((last + 1, _HEAD), np.uint8, data, strides=(1, 1))[starts]
    places = np.flatnonzero(heads == _BAR)
    rows = np.arange(count + 1) * _HEAD
    first = np.searchsorted(places, rows)
    if (np.diff(first) < FIELDS - 1).any():
        return None
    shift = starts - rows[:-1]
    bars = [places[first[:-1] + at] + shift for at in range(FIELDS - 1)]
    return bars if (bars[-1] < ends).all() else None
