"""`DataFrame.mapInArrow` where pandas is not installed."""

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

Work = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def map_in_arrow(rows: DataFrame, work: Work, schema: str) -> DataFrame:
    """Return what `rows.mapInArrow(work, schema)` returns, without its need for pandas.

    Does the same as Spark's own method (pyspark.sql.pandas.map_ops, as of 4.2 and 4.3), which requires pandas although
    no part of it uses pandas.
    """
    udf = UserDefinedFunction(work, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    columns = udf(*(rows[name] for name in rows.columns))
    return DataFrame(rows._jdf.mapInArrow(columns._jc, False, None), rows.sparkSession)
