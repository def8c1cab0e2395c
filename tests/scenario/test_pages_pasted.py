"""Everything in README.md and docs/ works when pasted in order by a newcomer, a page at a time (pasted.py does it)."""

import os
import subprocess
import sys
from collections import Counter

import consuls
import pasted
import pytest
from brokers import ROOT

PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
# What cannot run here: why, and how many blocks. Who marks a block changes this too, and somebody sees it.
MARKED = {
    "README.md": {"needs a cluster": 1},
    "docs/kubernetes.md": {"needs a cluster": 4, "tests/unit/test_kubernetes_page.py renders it": 2},
    "docs/performance.md": {"takes minutes, and what it prints depends on the machine": 1},
    "docs/spark.md": {
        "needs a broker with certificates; tests/spark/test_pipelines_tls.py runs it": 1,
        "needs an object store and a catalog; tests/contract/test_spark_table_s3.py writes to a store": 1,
        "needs an object store; tests/contract/test_spark_table_s3.py writes to one": 1,
    },
}


def text(page):
    return (ROOT / page).read_text()


def pasted_blocks(page):
    return [block for block in pasted.blocks(text(page)) if not block.mark]


UNSHARE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
CLEAN = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8", "COLUMNS": "120"}


@pytest.mark.root
@pytest.mark.java
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if pasted_blocks(page)])
def test_everything_pasted_in_order_works_as_printed(page, tmp_path):
    if os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("namespaces of its own need root")
    if "consul-setup" in text(page):
        consuls.program()  # fetched now, because the page has no network
    java = {"JAVA_HOME": os.environ["JAVA_HOME"]} if "JAVA_HOME" in os.environ else {}
    command = [*UNSHARE, sys.executable, pasted.__file__, ROOT, tmp_path, page]
    done = subprocess.run(command, env=CLEAN | java, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    print(done.stdout)  # what was pasted, and how long it took
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_only_blocks_that_cannot_run_here_are_left_out(page):
    marks = Counter(block.mark for block in pasted.blocks(text(page)) if block.mark)
    assert marks == MARKED.get(page, {})


@pytest.mark.parametrize("page", PAGES)
def test_no_command_stands_where_nothing_pastes_it(page):
    assert pasted.unpasted(text(page)) == []


@pytest.mark.parametrize(
    ("printed", "said", "like"),
    [
        (["sent 1"], ["sent 12"], True),
        (["sent 1"], ["sent 0"], False),
        (["bad: 1, dlq"], ["good: 1, dlq"], False),
        (["stage    pid  state", "router  4714  ready"], ["stage  pid  state", "router  15  ready"], True),
        (["stage    pid  state"], ["stage  pid  state", "router  15  ready"], False),
        (["one", "two"], ["two", "one"], False),
        (["…", "audit: 9,312 records, all good"], ["a", "b", "audit: 7 records, all good"], True),
        (["…", "audit: 9,312 records, all good"], ["a", "audit: 7 records, all good", "and more"], False),
        (["7|1795254000.119480||hello"], ["8302|1795254003.77||hello"], True),
        (["id ab12cd34ef56"], ["id 0123456789abcdef"], True),
        (["0.5 MB"], ["730.2 KB"], True),
        ([], ["anything"], False),
    ],
)
def test_what_is_printed_is_compared_by_its_shape(printed, said, like):
    assert pasted.is_like(printed, said) is like


def test_a_block_falls_into_commands_and_what_they_print():
    console = "```console\n$ a  # why\n$ b\none\ntwo\n```\n<!-- not pasted: no ssh -->\n```console\n$ c\n```\n"
    text = console + "```python\nx = 1\nx\n# 1\ny\n```\n"
    first, second, third = pasted.blocks(text)
    assert [(step.line, step.code, step.printed) for step in pasted.steps(first)] == [
        (2, "a  # why", []),
        (3, "b", ["one", "two"]),
    ]
    assert (second.mark, second.line) == ("no ssh", 9)
    assert [(step.code, step.printed) for step in pasted.steps(third)] == [("x = 1\nx", ["1"]), ("y", [])]


def test_commands_outside_of_consoles_are_found():
    page = "a\n\n    kmq up\n\n```\n$ kmq down\n```\n```text\na drawing\n```\n```console\n$ kmq up\n```\n"
    assert pasted.unpasted(page) == ["    kmq up", "$ kmq down"]
