"""Names of segment files: `<first record, 20 digits>.log`, so that text order is record order."""

import os


def name(first: int) -> str:
    return f"{first:020d}.log"


def index_path(log_path: str) -> str:
    return log_path.removesuffix(".log") + ".idx"


def listing(directory: str) -> list[tuple[int, str]]:
    """(first record, path) of the segments in `directory`, in order; [] where there is none."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted((int(n[:20]), f"{directory}/{n}") for n in names if n.endswith(".log") and n[:-4].isdigit())
