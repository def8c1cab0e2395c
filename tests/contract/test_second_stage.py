"""A second instance of a stage is refused, and the first one's row of the stats page does not show it."""

import pathlib
import subprocess
import sys

import pytest
from brokers import FREE_PORTS, environment
from waiting import until

from kmq.broker import stats
from kmq.config.settings import STAGES
from kmq.errors import EXIT_BUSY
from kmq.links import layout


@pytest.fixture
def run_stage(tmp_path, instance):
    """run_stage(name) starts a stage alone, with settings of its own."""
    environ = environment(KMQ_INSTANCE=instance, **FREE_PORTS)
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


def test_a_second_instance_of_each_stage_is_refused_and_leaves_no_trace(run_stage, instance):
    first = {name: run_stage(name) for name in STAGES}

    def pids():
        page = stats.peek(instance)
        return page and {name: page.rows[name].pid for name in STAGES}

    running = {name: process.pid for name, process in first.items()}
    until(lambda: pids() == running, "all run")
    rows = stats.peek(instance).rows
    for name in STAGES:
        rows[name].dropped = 500  # stands for all that a wipe would take, like the cursor that answers GET_ACK
    for name, second in [(name, run_stage(name)) for name in STAGES]:
        _, said = second.communicate(timeout=60)
        assert second.returncode == EXIT_BUSY and f"is held by pid={running[name]} " in said
        assert (rows[name].pid, rows[name].dropped) == (running[name], 500) and rows[name].state_name != "stopped"
        assert first[name].poll() is None
