"""Debian's promtool and prometheus for tests, where they are or can be had."""

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@cache
def directory() -> Path | str:
    """Return where the two programs are, or why there are none."""
    done = subprocess.run([ROOT / "scripts/prometheus-setup"], capture_output=True, text=True, timeout=300)
    return done.stderr.strip()[-500:] if done.returncode else Path(done.stdout.strip())


def program(name: str) -> str:
    """Return the path of `promtool` or `prometheus`; skip the test where there is none, and fail it in CI."""
    found = directory()
    if isinstance(found, str):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{name} is missing: {found}")
    return str(found / name)
