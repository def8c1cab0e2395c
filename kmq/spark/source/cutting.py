"""How ranges are cut into tasks: by bytes, so that all cores work, and by minPartitions and maxRecordsPerPartition.

Bytes       The size of a task gives every core _TASKS_A_CORE tasks, with at least LEAST_BYTES and at most SPLIT_BYTES
            each. Very much data is cut into MOST_TASKS, however large. Cuts lie at the ends of index blocks, and only
            the index is read: twice for a range of many records, not at all for a range of few.
Options     minPartitions: at least this many tasks if there are as many records, in proportion to the size of each
            range. maxRecordsPerPartition: no task has more records.
"""

from collections.abc import Iterable

from kmq.spark.source.plan import Cuts, Key, Range, cut_up

SPLIT_BYTES = 64 << 20  # of lines in one task, at most
LEAST_BYTES = 4 << 20  # a task costs some 10 ms, as much as reading this
MOST_TASKS = 1000  # of a batch cut by bytes: a stream keeps its cuts in the checkpoint
_TASKS_A_CORE = 2  # more than one, so that no core idles long
_FEW = 1_000  # records: a smaller range is not cut by bytes


def cut(
    spans: list[Range], cuts: Cuts, cores: int = 1, min_partitions: int = 0, max_records: int = 0
) -> dict[Key, list[int]]:
    """Return where to cut each range; ranges that stay whole are left out."""
    pieces = _by_bytes(spans, cuts, _TASKS_A_CORE * cores)
    pieces = _at_least(pieces, min_partitions)
    if max_records:
        pieces = [part for piece in pieces for part in evenly(piece, -(-len(piece) // max_records))]
    found: dict[Key, list[int]] = {}
    starts = {span.key: span.start for span in spans}
    for piece in pieces:
        if piece.start > starts[piece.key]:
            found.setdefault(piece.key, []).append(piece.start)
    return found


def _by_bytes(spans: list[Range], cuts: Cuts, tasks: int) -> list[Range]:
    """Return the ranges cut into about `tasks` shares of all their bytes."""
    large = [span for span in spans if len(span) >= _FEW]
    edges = {span.key: cuts(span.key, span.start, span.end, SPLIT_BYTES) for span in large}
    coarse = sum(map(len, edges.values()))
    if coarse < tasks:  # less than SPLIT_BYTES per task: cut more finely
        edges = {span.key: cuts(span.key, span.start, span.end, LEAST_BYTES) for span in large}
        total = sum(map(len, edges.values())) + len(edges)  # in LEAST_BYTES
        step = min(-(-total // tasks) or 1, SPLIT_BYTES // LEAST_BYTES)
    else:
        step = -(-coarse // MOST_TASKS)
    return [piece for span in spans for piece in cut_up(span, edges.get(span.key, [])[step - 1 :: step])]


def _at_least(pieces: list[Range], count: int) -> list[Range]:
    """Cut the pieces by records, in proportion to their sizes, into `count` pieces, or one per record."""
    if len(pieces) >= count or not pieces:
        return pieces
    total = sum(map(len, pieces))
    count = min(count, total)
    shares = [max(1, count * len(piece) // total) for piece in pieces]
    missing = count - sum(shares)
    for at in sorted(range(len(pieces)), key=lambda n: -(count * len(pieces[n]) % total)):
        if missing > 0 and shares[at] < len(pieces[at]):
            shares[at], missing = shares[at] + 1, missing - 1
    return [part for piece, share in zip(pieces, shares, strict=True) for part in evenly(piece, share)]


def evenly(span: Range, count: int) -> list[Range]:
    """Return the range in `count` parts, equal but for one record."""
    return cut_up(span, (span.start + len(span) * n // count for n in range(1, count)))


def cut_as_format_1(spans: Iterable[Range], cuts: Cuts, min_partitions: int) -> list[Range]:
    """Return the pieces of a repeated batch that a release before format 2 of offsets has planned."""
    pieces = [
        piece
        for span in spans
        for piece in cut_up(span, cuts(span.key, span.start, span.end, SPLIT_BYTES) if len(span) >= 10_000 else [])
    ]
    if len(pieces) >= min_partitions or not pieces:
        return pieces
    total = sum(map(len, pieces))
    shares = [min(len(piece), max(1, round(min_partitions * len(piece) / total))) for piece in pieces]
    return [part for piece, share in zip(pieces, shares, strict=True) for part in evenly(piece, share)]
