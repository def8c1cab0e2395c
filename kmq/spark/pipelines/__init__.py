"""The pipelines: each is a module with functions on DataFrames, and `run`, which `kmq pipeline run <name>` calls."""
