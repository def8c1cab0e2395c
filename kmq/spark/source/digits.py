"""Decimal numbers in a buffer as integers, eight digits at a time, without a string for each.

Eight bytes are one 64-bit word. Three multiplications add up its digits for all numbers at once: pairs of digits, pairs
of pairs, and the two halves. A shorter number is shifted to the end of its word and padded with zeros.
"""

from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]

_WORD = 8  # digits
_ZEROS = np.uint64(0x3030303030303030)
_UPPER = np.uint64(0xF0F0F0F0F0F0F0F0)
_SIX = np.uint64(0x0606060606060606)  # carries a byte above "9" into its upper half
_ONLY_DIGITS = np.uint64(0x3333333333333333)
_DIGITS = np.uint64(0x0F0F0F0F0F0F0F0F)
_PAIRS, _TENS = np.uint64(0x00FF00FF00FF00FF), np.uint64(2561)  # 10 · 2⁸ + 1
_FOURS, _HUNDREDS = np.uint64(0x0000FFFF0000FFFF), np.uint64(6553601)  # 100 · 2¹⁶ + 1
_THOUSANDS = np.uint64(42949672960001)  # 10,000 · 2³² + 1
_ONE, _4, _8, _16, _32 = (np.uint64(bits) for bits in (1, 4, 8, 16, 32))


def parse(data: Numbers, begins: Numbers, ends: Numbers) -> Numbers | None:
    """Return the numbers at begins[i]…ends[i]. They must have up to 8 digits each or 9 to 16 each, else None."""
    if not len(begins) or len(data) < 2 * _WORD:
        return None
    widths = ends - begins
    least, most = int(widths.min()), int(widths.max())
    if least < 1 or most > 2 * _WORD or least <= _WORD < most or int(begins.max()) + _WORD > len(data):
        return None
    words = np.ndarray((len(data) - _WORD + 1,), "<u8", data, strides=(1,))
    if most <= _WORD:
        return _parse(words[begins], _WORD - widths)
    upper, lower = _parse(words[begins], 2 * _WORD - widths), _parse(words[ends - _WORD], None)
    return None if upper is None or lower is None else upper * 10**_WORD + lower


def _parse(words: Numbers, missing: Numbers | None) -> Numbers | None:
    """Return words as numbers; the last `missing` bytes of a word do not belong to its number."""
    if missing is not None and missing.any():
        bits = missing.astype(np.uint64) * _8
        words = (words << bits) | (_ZEROS & ((_ONE << bits) - _ONE))
    if (((words & _UPPER) | (((words + _SIX) & _UPPER) >> _4)) != _ONLY_DIGITS).any():
        return None
    words = ((words & _DIGITS) * _TENS) >> _8
    words = ((words & _PAIRS) * _HUNDREDS) >> _16
    return (((words & _FOURS) * _THOUSANDS) >> _32).astype(np.int64)
