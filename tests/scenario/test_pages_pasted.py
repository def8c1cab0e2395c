"""Everything in README.md and docs/ works when pasted in order by a newcomer, a page at a time (pasted.py does it)."""

from collections import Counter

import pasted
import pytest
from pages import PAGES, PATIENCE_S, paste, pasted_blocks, text

# tests/spark pastes them
ELSEWHERE = [
    "docs/spark.md",
    "docs/spark-reading.md",
    "docs/spark-tables.md",
    "docs/spark-tier.md",
    "docs/spark-writing.md",
]
# What cannot run here: why, and how many blocks. Who marks a block changes this too, and somebody sees it.
MARKED = {
    "README.md": {"needs a cluster": 1, "takes half an hour": 1},
    "docs/installing.md": {"tests/unit/test_installing_page.py reads it": 2},
    "docs/ship-logs.md": {"a file of the shipper": 4},
    "docs/kubernetes.md": {
        "needs a cluster": 3,
        "tests/unit/test_alerts.py renders it": 1,
        "tests/unit/test_kubernetes_page.py renders it": 6,
    },
    "docs/kubernetes-backup.md": {"needs a cluster": 3, "tests/unit/test_kubernetes_page.py reads it": 1},
    "docs/kubernetes-pod.md": {"needs a cluster": 1},
    "docs/kubernetes-repair.md": {"needs a cluster": 1, "tests/unit/test_kubernetes_page.py renders it": 1},
    "docs/kubernetes-volume.md": {"needs a cluster": 2, "tests/unit/test_kubernetes_page.py renders it": 1},
    "docs/replicated-cluster-kubernetes.md": {"needs a cluster": 1},
    "docs/tier.md": {
        "a broker of its own": 2,
        "needs a bucket": 1,
        "needs a broker with a copy": 1,
        "needs a topic with old records in the store": 1,
        "needs a broker with a copy that is gone": 1,
        "needs a shard whose disks are gone; tests/contract/test_shard_copy.py runs it": 1,
    },
    "docs/performance.md": {"takes minutes, and what it prints depends on the machine": 1},
    "docs/spark-writing.md": {
        "needs a broker with certificates; tests/spark/test_pipelines_tls.py runs it": 1,
        "needs two brokers; tests/spark/test_stream_hold.py runs it": 1,
    },
    "docs/spark-tables.md": {
        "needs an object store and a catalog; tests/contract/test_spark_table_s3.py writes to a store": 1,
        "needs an object store; tests/contract/test_spark_table_s3.py writes to one": 1,
    },
}


def pages():
    """The README in each run of `make test`, and some of the others."""
    some = pytest.mark.sampled(6, group="pages")
    for page in PAGES:
        if pasted_blocks(page) and page not in ELSEWHERE:
            yield pytest.param(page, marks=[] if page == "README.md" else some)


@pytest.mark.root
@pytest.mark.java
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("page", [*pages()])
def test_everything_pasted_in_order_works_as_printed(page, tmp_path):
    paste(page, tmp_path)


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
