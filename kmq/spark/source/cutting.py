"""How ranges are cut into tasks: by bytes, so that all cores work, and by what minPartitions and maxRecordsPerPartition ask.

Bytes       A task has a share of the batch that gives every core _TASKS_A_CORE of them, at least LEAST_BYTES and at most
            SPLIT_BYTES; of very much data there are MOST_TASKS, however large. Cuts lie at the ends of index blocks, and only
            the index is asked: twice for a range of many records, not at all for a range of few.
Options     minPartitions: at least so many tasks where there are as many records, in proportion to what each range has.
            maxRecordsPerPartition: no task has more records.
"""

from collections.abc import Iterable

from kmq.spark.source.plan import Cuts, Key, Range, cut_up

SPLIT_BYTES = 64 << 20  # of lines in one task, at most
LEAST_BYTES = 4 << 20  # a task costs some 10 ms, as much as reading this
MOST_TASKS = 1000  # cut by bytes: a stream keeps its cuts in the checkpoint
_TASKS_A_CORE = 2  # so that none waits long for the others
_FEW = 1_000  # records that are never looked at for a place to cut


def cut(
    spans: list[Range], cuts: Cuts, cores: int = 1, min_partitions: int = 0, max_records: int = 0
) -> dict[Key, list[int]]:
    """Where to cut each range; ranges that stay whole are left out."""
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
    """The ranges cut into shares of the bytes that they have together."""
    large = [span for span in spans if len(span) >= _FEW]
    edges = {span.key: cuts(span.key, span.start, span.end, SPLIT_BYTES) for span in large}
    coarse = sum(map(len, edges.values()))
    if coarse < tasks:  # less than a SPLIT_BYTES for each: look closer
        edges = {span.key: cuts(span.key, span.start, span.end, LEAST_BYTES) for span in large}
        total = sum(map(len, edges.values())) + len(edges)  # in LEAST_BYTES
        step = min(-(-total // tasks) or 1, SPLIT_BYTES // LEAST_BYTES)
    else:
        step = -(-coarse // MOST_TASKS)
    return [piece for span in spans for piece in cut_up(span, edges.get(span.key, [])[step - 1 :: step])]


def _at_least(pieces: list[Range], count: int) -> list[Range]:
    """The pieces cut by records, in proportion to what each has, until there are `count`, or one a record."""
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
    """The range in `count` parts of as many records each, or one more."""
    return cut_up(span, (span.start + len(span) * n // count for n in range(1, count)))


def cut_as_format_1(spans: Iterable[Range], cuts: Cuts, min_partitions: int) -> list[Range]:
    """The pieces of a batch that a release before format 2 of offsets has planned, and that is read again."""
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
