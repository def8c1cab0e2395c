"""The classes of `!err`, as they are counted in the stats page."""

import pytest
from stats_rows import row_of

from kmq.ingress.limits import count_err
from kmq.wire import refusals

CLASSES = [f"errs_{name}" for name in refusals.CLASSES]


@pytest.mark.parametrize(
    "row", [row for row in refusals.table() if row.scope in ("message", "connection")], ids=lambda row: row.code
)
def test_every_refusal_is_counted_in_one_class(row):
    words = row_of("ingress")
    count_err(words, refusals.reason(row.code).encode(), 2)
    count_err(words, b"%b some text" % row.code.encode())
    counts = {name: getattr(words, name) for name in CLASSES}
    assert sum(counts.values()) == 3 and 3 in counts.values()
    assert bool(counts["errs_auth"]) == (row.code == "unauthorized")
    assert counts["errs_format"] == 0 or not row.is_retryable


def test_a_refusal_of_another_version_counts_as_a_fault_of_format():
    words = row_of("ingress")
    count_err(words, b"of_tomorrow \xff")
    count_err(words, b"\xff")
    assert words.errs_format == 2
