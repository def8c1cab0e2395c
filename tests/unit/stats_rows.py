"""Rows of a stats page that nobody reads: row_of("framer").duplicates = 3."""

from kmq.broker.stats import ROWS, Row


def row_of(process: str) -> Row:
    """Return a row of this process, in memory of its own."""
    row = ROWS[process]()
    row.lie_in(memoryview(bytearray(8 * 64)).cast("Q"))
    return row
