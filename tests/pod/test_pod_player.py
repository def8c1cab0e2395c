"""`make pod` leaves nothing behind: no container, pod, tmpfs or network, however and whenever it is told to stop."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import play as player
import pytest
from play import HOME, ROOT, podman
from waiting import PATIENCE_S, until


def left_of(name):
    """Everything there is of a pod."""
    found = podman("pod", "ps", "-q", "--filter", f"name=^{name}$").split()
    found += podman("ps", "-a", "--filter", f"name=^{name}", "--format", "{{.Names}}").split()
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"/{name}/" in line]
    return found + [str(path) for path in HOME.glob(name)]


@pytest.fixture
def start(image):
    """A function that starts a command of this checkout in a process group of its own, as a terminal does."""
    with ExitStack() as stack:

        def run(*command):
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


@pytest.fixture
def play_alone(start):
    """A function that starts a player without make; (process, name of its pod)."""
    names = []

    def run():
        process = start(sys.executable, "scripts/play")
        names.append(f"kmq-{process.pid}-0")
        return process, names[-1]

    yield run
    for name in filter(left_of, names):
        player.remove(name)


def name_of(process):
    """Of the pod that a player says is ready."""
    name = re.search(r"pod (\S+) is ready", process.stdout.readline())
    while name is None:
        line = process.stdout.readline()
        assert line, "it has ended"
        name = re.search(r"pod (\S+) is ready", line)
    return name[1]


def test_sigterm_to_make_removes_the_pod(start):
    make = start("make", "pod")
    name = name_of(make)
    try:
        assert len(left_of(name)) > 6
        make.terminate()
        make.wait(PATIENCE_S)
        assert left_of(name) == []
    finally:
        if left_of(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(name.split("-")[1]), signal.SIGKILL)
            player.remove(name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_the_group_while_the_pod_starts_removes_what_there_is(play_alone, number):
    process, name = play_alone()
    until(lambda: any("tmpfs" in line for line in left_of(name)), "the tmpfs of its volumes")
    os.killpg(process.pid, number)
    assert process.wait(PATIENCE_S) == 128 + number
    assert left_of(name) == []


def test_what_a_killed_player_has_left_is_removed_by_the_next_one(play_alone):
    killed, orphan = play_alone()
    assert name_of(killed) == orphan
    killed.kill()
    killed.wait()
    assert len(left_of(orphan)) > 6
    process, name = play_alone()
    until(lambda: left_of(name), "the next pod")
    assert left_of(orphan) == []
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # impatient
    assert process.wait(PATIENCE_S) == 0
    assert left_of(name) == []


def networks_of(pid):
    return [name for name in podman("network", "ls", "--format", "{{.Name}}").split() if name.startswith(f"kmq-{pid}-")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_of_a_fleet_no_pod_and_no_network_is_left(start, number):
    process = start(sys.executable, "scripts/play", "fleet")
    names = [f"kmq-{process.pid}-{count}" for count in range(4)]
    try:
        until(lambda: all(any(line.startswith(f"{name}-") for line in left_of(name)) for name in names), "four pods")
        assert networks_of(process.pid)
        process.send_signal(number)
        process.wait(PATIENCE_S)
        if number == signal.SIGKILL:
            player.remove_leftovers()
        assert not [*networks_of(process.pid), *(line for name in names for line in left_of(name))]
    finally:
        process.kill()
        process.wait()
        player.remove_leftovers()
