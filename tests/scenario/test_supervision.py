"""Who started the stages decides who stops them: `kmq up`, or something else (a kubelet, systemd, a shell), as here by hand."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

STAGES = ("ingress", "framer", "durability", "router")
BUSY = 69


@pytest.fixture
def by_hand(broker):
    """by_hand(names…) starts these processes as a kubelet would, each by itself, and returns when they are ready."""
    started = {}

    def start(*names):
        broker.pipes.mkdir(exist_ok=True)
        for name in names:
            module = "kmq.gateway" if name == "gateway" else f"stages.{name}"
            with (broker.pipes / "kmq.log").open("ab") as log:
                started[name] = subprocess.Popen(
                    [sys.executable, "-m", module], env=broker.env, cwd=broker.root, stderr=log
                )
        for name in names:
            broker.wait(lambda name=name: is_ready(name), f"{name} is ready")
        return started

    def is_ready(name):
        row = broker.status().get(name, {})
        return (row.get("pid"), row.get("state")) == (str(started[name].pid), "ready")

    yield start
    for process in started.values():
        process.kill()
        process.wait()


def metric(broker, name, stage):
    port = (broker.pipes / "http.port").read_text().strip()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{stage="{stage}"}}'))


# --- restarts --------------------------------------------------------------------------------------------------------


def test_restarts_are_counted_whoever_starts_the_processes_again(broker, by_hand):
    processes = by_hand(*STAGES, "gateway")
    for name, times in (("router", 2), ("gateway", 1)):
        for _ in range(times):
            processes[name].kill()
            processes[name].wait()
            by_hand(name)
    second = broker.run(sys.executable, "-m", "stages.framer")
    assert second.returncode == BUSY  # refused: it is no start of the framer
    expected = {name: {"router": 2, "gateway": 1}.get(name, 0) for name in (*STAGES, "gateway")}
    assert {name: int(broker.status()[name]["restarts"]) for name in expected} == expected
    assert {name: metric(broker, "kmq_restarts_total", name) for name in expected} == expected
    shown = json.loads(broker.kmq("status", "--json").stdout)
    assert {stage["name"]: stage["restarts"] for stage in shown["stages"]} == expected


def test_up_counts_restarts_from_0_again(broker):
    broker.up()
    broker.kill("router")
    broker.wait(lambda: broker.status()["router"]["restarts"] == "1", "the router is there again")
    broker.down()
    broker.up()
    assert broker.status()["router"]["restarts"] == "0"


def test_up_names_the_gateway_too_when_everything_was_killed(broker):
    broker.gateway = True
    broker.up()
    broker.kill()  # and with the supervisor the gateway
    result = broker.kmq("up")
    assert result.stderr.startswith(f"kmq: unclean_end: {', '.join((*STAGES, 'gateway'))}: killed or crashed")
    assert metric(broker, "kmq_unclean_ends_total", "gateway") == 1
    broker.kill()
    broker.gateway = False
    broker.up()
    assert "gateway" not in broker.status()  # what was killed is not missed where none is started


# --- up and down -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["up", "up --foreground", "down"])
def test_up_and_down_refuse_where_something_else_runs_the_stages(broker, by_hand, command):
    processes = by_hand(*STAGES)
    result = broker.kmq(*command.split())
    assert result.returncode == BUSY
    for name in STAGES:
        assert f"{name} (pid {processes[name].pid})" in result.stderr
    assert "kubectl scale statefulset" in result.stderr and "with: kmq down" not in result.stderr
    broker.send_lines([b"test.a|0|1|still served"])
    broker.wait_routed(1)
    assert all(process.poll() is None for process in processes.values())


def test_down_refuses_where_one_of_the_stages_was_started_by_something_else(broker, by_hand):
    broker.up()
    broker.kill("supervisor", "framer")
    framer = by_hand("framer")["framer"]
    refused = broker.kmq("down")
    assert refused.returncode == BUSY and f"framer (pid {framer.pid})" in refused.stderr
    assert "router (pid" not in refused.stderr
    framer.send_signal(signal.SIGKILL)
    framer.wait()
    broker.down()
    assert broker.processes() == []


# --- a supervisor that was killed ------------------------------------------------------------------------------------


def test_status_says_that_the_supervisor_was_killed(broker):
    broker.up()
    assert "supervisor" not in broker.kmq("status").stdout
    assert json.loads(broker.kmq("status", "--json").stdout)["supervisor"] == "up"
    broker.kill("supervisor")
    shown = broker.kmq("status")
    assert shown.returncode == 0, shown.stdout  # the stages are ready
    assert "no supervisor: it was killed" in shown.stdout and "kmq down" in shown.stdout
    assert json.loads(broker.kmq("status", "--json").stdout)["supervisor"] == "killed"
    assert "\nsupervisor=killed\n" in broker.kmq("status", "--logfmt").stdout
    broker.down()
    broker.up()
    assert "supervisor=up\n" in broker.kmq("status", "--logfmt").stdout


def test_status_misses_no_supervisor_where_the_stages_never_had_one(broker, by_hand):
    by_hand(*STAGES)
    shown = broker.kmq("status")
    assert (shown.returncode, "supervisor" in shown.stdout) == (0, False)
    assert json.loads(broker.kmq("status", "--json").stdout)["supervisor"] == "other"


def test_down_from_other_pipes_still_tells_the_supervisor(broker):
    """It would start again what is ended below it."""
    broker.up()
    result = broker.kmq("down", KMQ_PIPES=broker.root / "elsewhere")
    assert (result.returncode, result.stdout) == (0, "kmq: down\n"), result.stderr
    assert broker.processes() == [] and "event=stage_ended" not in broker.log()
