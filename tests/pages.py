"""README.md and the pages of docs/: what on them is pasted, and a page pasted by a newcomer (pasted.py does it)."""

import os
import subprocess
import sys
from pathlib import Path

import consuls
import pasted
import pytest
from brokers import ROOT

PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
PATIENCE_S = 1800  # for a page
_UNSHARE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_JAVA = ("JAVA_HOME", "SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS")  # the last two: scripts/test
_CLEAN = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8", "COLUMNS": "120"}


def text(page: str) -> str:
    return (ROOT / page).read_text()


def pasted_blocks(page: str) -> list[pasted.Block]:
    return [block for block in pasted.blocks(text(page)) if not block.mark]


def paste(page: str, scratch: Path) -> None:
    """Paste a page in order into an empty directory; everything on it must print what the page says."""
    if os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("namespaces of its own need root")
    if "consul-setup" in text(page):
        consuls.program()  # fetched now, because the page has no network
    java = {name: os.environ[name] for name in _JAVA if name in os.environ}
    command = [*_UNSHARE, sys.executable, pasted.__file__, str(ROOT), str(scratch), page]
    environment = _CLEAN | java
    done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, timeout=PATIENCE_S)
    print(done.stdout)  # what was pasted, and how long it took
    assert done.returncode == 0, done.stderr
