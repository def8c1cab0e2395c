"""The kernel's count of processes that it killed for lack of memory."""

import pytest
from stats_rows import row_of

from kmq.broker.stage import OomKills


@pytest.fixture
def row():
    return row_of("durability")


def files(root, cgroup, events, text):
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    path = root / "cgroup" / events
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(root / "proc"), str(root / "cgroup")


def look(row, where):
    kills = OomKills(row, *where)
    kills.look()
    return row.oom_kills


@pytest.mark.parametrize(
    "cgroup, events, before",
    [
        ("0::/pod/kmq\n", "pod/kmq/memory.events", "low 0\noom 1\n"),
        ("0::/\n", "memory.events", ""),
        ("0::/not/seen/here\n", "memory.events", ""),
        ("5:cpu,memory:/docker/x\n4:pids:/\n", "memory/docker/x/memory.oom_control", "oom_kill_disable 0\n"),
    ],
)
def test_kills_are_counted_from_the_first_look_on(tmp_path, row, cgroup, events, before):
    where = files(tmp_path, cgroup, events, f"{before}oom_kill 3\n")
    assert look(row, where) == 0 and row.oom_at == 0
    row.begin(0)
    files(tmp_path, cgroup, events, f"{before}oom_kill 5\n")
    assert look(row, where) == 2 and row.oom_at > 0
    row.begin(0)
    files(tmp_path, cgroup, events, f"{before}oom_kill 1\n")  # of a new container
    assert look(row, where) == 3


def test_one_look_is_enough_for_ten_seconds(tmp_path, row):
    where = files(tmp_path, "0::/\n", "memory.events", "oom_kill 0\n")
    kills = OomKills(row, *where)
    kills.look()
    files(tmp_path, "0::/\n", "memory.events", "oom_kill 1\n")
    kills.look()
    assert row.oom_kills == 0


def test_without_a_count_there_are_no_kills(tmp_path, row):
    OomKills(row, str(tmp_path), str(tmp_path)).look()
    assert row.oom_kills == row.oom_seen == 0
