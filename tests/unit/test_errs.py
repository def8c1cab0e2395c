"""The classes of `!err`, as they are counted in the stats page."""

import pytest

from kmq.broker.stats import _ROW, Row
from kmq.ingress.limits import Errs
from kmq.wire import refusals

CLASSES = ("errs_auth", "errs_format", "errs_limit", "errs_order")


@pytest.mark.parametrize(
    "row", [row for row in refusals.table() if row.scope in ("message", "connection")], ids=lambda row: row.code
)
def test_every_refusal_is_counted_in_one_class(row):
    words = Row()
    words.lie_in(memoryview(bytearray(8 * _ROW)).cast("Q"))
    errs = Errs(words)
    errs.count(refusals.reason(row.code).encode(), 2)
    errs.count_reply(b"!err 17 %b some text" % row.code.encode())
    counts = {name: getattr(words, name) for name in CLASSES}
    assert sum(counts.values()) == 3 and 3 in counts.values()
    assert bool(counts["errs_auth"]) == (row.code == "unauthorized")
    assert counts["errs_format"] == 0 or not row.is_retryable


def test_without_a_row_nothing_is_counted():
    Errs().count(b"bad_hello")
