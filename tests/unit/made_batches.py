"""Arrow batches of made-up rows, and the lines that the sink makes of them."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kmq.message import record
from kmq.spark.sink.lines import block, to_lines

ALPHABETS = (b"abc", b"a.b|c;d%e f", bytes(range(256)), "aé€😀\u0085".encode(), b"\t\r\n\0\x7f|")
random_ = random.Random(4)


def some_bytes(most: int = 12) -> bytes:
    return bytes(random_.choices(random_.choice(ALPHABETS), k=random_.randrange(most)))


def some_text(most: int = 8) -> str:
    return "".join(random_.choices("aZ09_:@/=+-.|;% é😀\n\0\x7f", k=random_.randrange(most)))


def batch(**columns: Any) -> pa.RecordBatch:
    arrays = {
        name: pa.array(*given) if isinstance(given, tuple) else pa.array(given) for name, given in columns.items()
    }
    return pa.RecordBatch.from_pydict(arrays)


def written(
    given: pa.RecordBatch, ids: Sequence[int] | None = None, first_row: int = 0, max_line: int = 1 << 20, **more: Any
) -> list[bytes]:
    """Each line, without newline."""
    numbers = np.arange(given.num_rows) if ids is None else np.array(ids)
    made = to_lines(given, numbers, 1.5, max_line=max_line, first_row=first_row, **more)
    text = block(made)
    assert text.count(b"\n") == len(made) == given.num_rows
    assert record.good_prefix(text) == len(text) and not record.claims(text)
    return text.split(b"\n")[:-1]
