"""The pipelines: each a module with functions of DataFrames, and `run`, which `kmq pipeline run <name>` calls."""
