"""How fast the data pipeline on Spark is, beside Spark's own source. `make bench-spark` runs it; no test does."""
