"""A second instance of a stage is refused, and the first one's row of the stats page does not show it."""

import os
import pathlib
import subprocess
import sys

import pytest
from waiting import wait_until

from kmq import stats
from kmq.errors import EXIT_BUSY
from kmq.links import layout
from kmq.settings import STAGES


@pytest.fixture
def run_stage(tmp_path, instance):
    """run_stage(name) starts a stage alone, with settings of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KMQ_", "RB_"))}
    environ |= {"KMQ_INSTANCE": instance, "KMQ_PORT": "0", "KMQ_ACK_PORT": "0"}
    processes = []

    def run(name):
        argv = [sys.executable, "-m", f"stages.{name}"]
        processes.append(subprocess.Popen(argv, env=environ, cwd=tmp_path, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()
    layout.remove(instance, "durable")
    pathlib.Path(f"/dev/shm/{instance}.stats").unlink()


@pytest.mark.parametrize("name", STAGES)
def test_a_second_instance_of_a_stage_is_refused_and_leaves_no_trace(run_stage, instance, name):
    first = run_stage(name)
    wait_until(lambda: (page := stats.peek(instance)) and page.rows[name].pid == first.pid, f"{name} runs")
    row = stats.peek(instance).rows[name]
    row.dropped = 500  # stands for all that a wipe would take, like the cursor that answers GET_ACK
    second = run_stage(name)
    _, said = second.communicate(timeout=30)
    assert second.returncode == EXIT_BUSY and f"is held by pid={first.pid} " in said
    assert (row.pid, row.dropped) == (first.pid, 500) and row.state_name != "stopped"
    assert first.poll() is None
