"""The process that plans a stream of a Python source: Spark's own module for it, with fewer imports.

    python -m kmq.spark.stream_planner      by the command that a session gives to Spark (sessions.py)

The planner of each stream is a fresh interpreter. Spark's module imports pyarrow and numpy there, which takes a third
of the CPU until the planner answers. Only sources that read rows while they plan need them. KMQ's sources do not. So
these modules are imported when a source first uses them.
"""

import importlib
import runpy
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
_READS = "pyspark.sql.worker.plan_data_source_read"  # of which _RUNNER uses one function


def records_to_arrow_batches(*arguments: Any) -> Any:
    return _real()(*arguments)


@cache
def _real() -> Callable[..., Any]:
    del sys.modules[_READS]
    found: Callable[..., Any] = importlib.import_module(_READS).records_to_arrow_batches
    return found


if __name__ == "__main__":
    deferred = ModuleType(_READS)
    deferred.__dict__["records_to_arrow_batches"] = records_to_arrow_batches
    sys.modules[_READS] = deferred
    runpy.run_module(_RUNNER, run_name="__main__", alter_sys=True)
