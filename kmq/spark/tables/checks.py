"""Checks before a stream starts, so that a wrong directory gives an error of one line, not a stack trace in a batch."""

import json
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from kmq.errors import ConfigError, KmqError, RetryError
from kmq.files import FULL
from kmq.spark.tables import disk
from kmq.spark.tables.places import Place

PARQUET, DELTA, ICEBERG = "parquet", "delta", "iceberg"
MARKS = {PARQUET: "", DELTA: "_delta_log", ICEBERG: "metadata"}  # format → the directory that only its tables have
_PROBE = ".kmq-probe"
_PROBE_BYTES = 4096


def usable(option: str, path: str) -> None:
    """Create a directory with its parents, and prove that files can be written there. Errors name the option."""
    probe = f"{path}/{_PROBE}"
    try:
        os.makedirs(path, exist_ok=True)
        try:
            with open(probe, "wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            if os.path.exists(probe):
                os.unlink(probe)
    except OSError as err:
        raise explained(option, path, err) from err


def explained(option: str, path: str, err: OSError) -> KmqError:
    """Return the error that says why files cannot be written below `path`."""
    if err.errno in FULL:
        return RetryError(f"{option} {path}: the disk is full; run again when there is room, nothing is lost")
    if file := _file_among(path):
        return ConfigError(f"{option} {path}: {file} is a file; name a directory")
    return ConfigError(f"{option} {path}: cannot be written: {err.strerror}")


def _file_among(path: str) -> str | None:
    """Return the part of a path that is a file, so that nothing can be below it; None if there is none."""
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    return path if path and not os.path.isdir(path) else None


def checkpoint(path: str, table: str, query: str) -> None:
    """Raise an error if a stream's checkpoint cannot be used, or belongs to another table.

    `query`: id of the stream whose rows the table holds; "" for a new table.
    """
    if "://" in path:  # Spark checks these
        return
    usable("--checkpoint", path)
    advice = "give each table a checkpoint of its own"
    found = _query_id(path)
    if query and not found:
        raise ConfigError(
            f"--checkpoint {path}: is new, but the rows of --to {table} are of another checkpoint; {advice}"
        )
    if query and found != query:
        raise ConfigError(f"--checkpoint {path}: belongs to another query than the rows of --to {table}; {advice}")
    if not query and found and any(name.isdigit() for name in _names(f"{path}/commits")):
        raise ConfigError(
            f"--checkpoint {path}: has written batches to another table, and --to {table} is new; {advice}"
        )


def _query_id(path: str) -> str:
    try:
        with open(f"{path}/metadata", encoding="utf-8") as file:
            return str(json.load(file)["id"])
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError, OSError) as err:
        raise ConfigError(f"--checkpoint {path}: its file metadata must be one that Spark wrote: {err}") from err


def _names(path: str) -> Sequence[str]:
    try:
        return os.listdir(path)
    except OSError:
        return ()


def partition_by(names: Iterable[str], columns: Sequence[str]) -> None:
    """Raise ConfigError if a name is not a column of the rows, or if the names leave no other column."""
    known = {column.lower() for column in columns}  # as Spark looks for them
    for name in names:
        if name.lower() not in known:
            near = get_close_matches(name, columns, 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(columns)}"
            raise ConfigError(f"--partition-by {name!r}: the rows have no such column{hint}")
    if {name.lower() for name in names} >= known:
        raise ConfigError("--partition-by: names all columns; at least one must be left for the files")


def format_is(wanted: str, to: str, state: str, place: Place) -> None:
    """Raise ConfigError if the place holds a table of another format, or an error if its store cannot be reached."""
    found = next((name for name, mark in MARKS.items() if mark and place.has(mark)), "")
    if not found and (os.path.exists(f"{state}/batch") or disk.directories(to)):
        found = PARQUET
    if found and found != wanted:
        raise ConfigError(f"--to {to}: holds a {found} table, not {wanted}; name another --to")


def same_partitions(to: str, table: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise ConfigError if a table is partitioned by other columns."""
    if list(table) != list(wanted):
        had, have = (", ".join(names) or "nothing" for names in (table, wanted))
        raise ConfigError(f"--to {to}: the table is partitioned by {had}, not by {have}; name another --to")
