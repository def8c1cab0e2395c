"""The lanes of `make test`: processes of pytest that share the test files, so that all end at about the same time.

    LANE_TAKES=/tmp/x LANE_OWN=tests/scenario pytest tests/scenario tests/spark

A lane runs the files of its own folders, one folder after the other, and then those that no lane has taken. Of these the
longest come first, as tests/durations has them (`RECORD=1 make test` writes it). To take a file is to make a file of its
name in LANE_TAKES, which only one process can; in the end its text is how many seconds it took.

Invariant   Each test file is run by one lane. The next file is taken before the last test of a file is run, because pytest
            wants to know what comes next: fixtures that the next test needs stay.
Crash       What a lane had taken when it was killed is run by nobody; the exit code of the lane tells it.
"""

import os
import time
from pathlib import Path

import pytest


def _take(path: Path, root: Path, takes: str) -> Path | None:
    """Return the file by which this lane has taken `path`; None if another one has."""
    mine = Path(takes, "+".join(path.relative_to(root).parts))
    try:
        os.close(os.open(mine, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return None
    return mine


def _durations(root: Path) -> dict[str, float]:
    """Return the recorded seconds of each test file that takes long: `42 tests/chaos/test_kill.py`."""
    recorded = root / "tests/durations"
    lines = recorded.read_text().splitlines() if recorded.exists() else []
    return {name: float(seconds) for seconds, name in (line.split() for line in lines)}


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run what this lane can take; without LANE_TAKES, all, as pytest does."""
    # A pytest that a test starts runs what it is told to: it would share the files of this run.
    takes, own = os.environ.pop("LANE_TAKES", None), os.environ.get("LANE_OWN", "").split()
    if not takes or session.config.option.collectonly or session.testsfailed:
        return None
    root = session.config.rootpath
    files: dict[Path, list[pytest.Item]] = {}
    for item in session.items:  # fixtures of the session with parameters may have put other files between those of one
        files.setdefault(item.path, []).append(item)
    durations = _durations(root)

    def place(path: Path) -> tuple[int, float]:
        name = str(path.relative_to(root))
        folder = next((at for at, folder in enumerate(own) if name.startswith(f"{folder}/")), len(own))
        return folder, -durations.get(name, 0.0)

    left = iter(sorted(files, key=place))

    def take() -> tuple[Path | None, list[pytest.Item]]:
        return next(((mine, files[path]) for path in left if (mine := _take(path, root, takes))), (None, []))

    mine, items = take()
    while mine is not None:
        began = time.monotonic()
        after: Path | None = None
        following: list[pytest.Item] = []
        for number, item in enumerate(items, 1):
            if number == len(items):
                after, following = take()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=[*items[number:], *following, None][0])
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        mine.write_text(f"{time.monotonic() - began:.0f}")
        mine, items = after, following
    return True
