"""What Spark's discovery of data sources finds: any top-level module pyspark_* with a DefaultSource.

One such module that fails to import disables discovery for every data source on the machine, so this one never does.
"""

try:
    from kmq.spark.format import KmqDataSource as DefaultSource
except Exception:  # without the extra, or with a Spark too old for us: format("kmq") is then unknown, others go on
    pass
else:
    __all__ = ["DefaultSource"]
