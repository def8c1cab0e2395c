"""Ends of a ring as processes; whatever a test leaves is ended and removed."""

import itertools
import os
import pathlib
import subprocess
import sys

import pytest

from kmq.links import layout

TESTS = pathlib.Path(__file__).parents[1]
SCRIPT = pathlib.Path(__file__).with_name("ring_end.py")
_numbers = itertools.count()


@pytest.fixture
def instance():
    """A name in /dev/shm of this test's own."""
    name = f"contract-{os.getpid()}-{next(_numbers)}"
    yield name
    for ring in ("received", "framed"):
        layout.remove(name, ring)


@pytest.fixture
def start(instance, tmp_path):
    """start(role, policy) runs one end of the test's ring."""
    processes = []

    def run(role, policy="block"):
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        argv = [sys.executable, str(SCRIPT), role, instance, policy, f"{tmp_path}/out"]
        processes.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()
