"""Who started the stages decides who stops them: `kmq up`, or something else (a kubelet, systemd, a shell), as here by hand."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import psutil
import pytest

from kmq.links.ownership import FileLock, describe

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


# --- two pods on one volume ------------------------------------------------------------------------------------------


def test_a_pod_whose_data_another_pod_holds_names_that_pod(broker):
    broker.env["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
    ours = describe("durability", str(broker.data), broker.instance)
    theirs = re.sub(r"host=\S+", "host=kmq-old-0", re.sub(r"pod=\S+", "pod=0badf00d-2e-1", ours))
    (broker.data / "append").mkdir(parents=True)
    lock = FileLock(str(broker.data / "append/.owner"))
    lock.acquire("the WAL", theirs)
    ingress = subprocess.Popen([sys.executable, "-m", "stages.ingress"], env=broker.env, cwd=broker.root)
    try:
        durability = broker.run(sys.executable, "-m", "stages.durability")
        assert durability.returncode == BUSY and "host=kmq-old-0" in durability.stderr
        for command in ("status", "doctor"):
            said = broker.kmq(command).stdout
            assert f"KMQ_DATA={broker.data} is held by another pod or machine (pid=" in said
            assert "kubectl delete pod kmq-old-0" in said and "not been started" not in said
        probe = broker.run(sys.executable, "-m", "kmq.probe", "ready", "durability").stdout
        assert "durability has ended with exit code 69 (busy)" in probe and "-c durability --previous" in probe
        assert "kmq down" not in probe
    finally:
        ingress.kill()
        ingress.wait()
        lock.release()


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


# --- a supervisor that lacks something -------------------------------------------------------------------------------


@pytest.fixture
def no_forks(broker):
    """A file: while it exists, the supervisor of this broker cannot start a process, as if no pid were free (EAGAIN)."""
    refusing = broker.root / "no-forks"
    (broker.root / "sitecustomize.py").write_text(
        f"""
import errno, os
spawn = os.posix_spawn
def refuse(*arguments, **options):
    if os.path.exists({str(refusing)!r}):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return spawn(*arguments, **options)
os.posix_spawn = refuse
"""
    )
    broker.env["PYTHONPATH"] = str(broker.root)
    return refusing


def events(broker, event):
    return [line for line in broker.log().splitlines() if f"stage=supervisor event={event} " in line]


def test_a_supervisor_that_cannot_start_a_stage_tries_again(broker, no_forks):
    broker.up()
    before = broker.pids()
    no_forks.touch()
    broker.kill("framer")
    broker.wait(lambda: len(events(broker, "start_failed")) >= 3, "it has tried again")
    tried = [line for line in events(broker, "start_failed") if "name=framer" in line]
    first, second = (float(line.rpartition("restart_in_s=")[2]) for line in tried[:2])
    assert first >= 0.1 and second == 2 * first
    no_forks.unlink()
    broker.wait(lambda: broker.status()["framer"]["restarts"] == "1", "the framer is there again")
    broker.wait(lambda: broker.status()["framer"]["state"] == "ready", "and ready")
    after = broker.pids()
    assert before.pop("framer") != after.pop("framer")
    assert before == after
    broker.down()
    assert broker.processes() == []


def test_up_waits_for_a_supervisor_that_cannot_start_the_stages_yet(broker, no_forks):
    no_forks.touch()
    with subprocess.Popen(["kmq", "up", "--no-gateway"], env=broker.env, cwd=broker.root) as up:
        broker.wait((broker.pipes / "kmq.log").exists, "a log")
        broker.wait(lambda: events(broker, "start_failed"), "a stage that cannot be started")
        no_forks.unlink()
        assert up.wait(60) == 0
    assert {row["state"] for name, row in broker.status().items() if name in STAGES} == {"ready"}


def test_a_supervisor_that_cannot_go_on_ends_the_stages_first(broker):
    """Another one has taken its lock file, which somebody had deleted."""
    broker.up()
    owner = broker.pipes / "supervisor.owner"
    owner.rename(broker.root / "moved")
    other = FileLock(str(owner))
    other.acquire("this broker", f"pid={os.getpid()}")
    broker.wait(lambda: not broker.processes(), "the end of everything")
    other.release()
    assert "exit_code=69" in events(broker, "failed")[0] and f"pid={os.getpid()}" in events(broker, "failed")[0]
    assert events(broker, "stopped") and all(name not in broker.log().partition("stage_killed")[2] for name in STAGES)


def test_a_stage_that_has_to_be_killed_is_named_by_down_and_costs_no_cpu(broker):
    broker.up()
    pids = broker.pids()
    supervisor = psutil.Process(pids["supervisor"])
    os.kill(pids["router"], signal.SIGSTOP)
    used = []
    with subprocess.Popen(["kmq", "down"], env=broker.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as down:
        while down.poll() is None:
            with contextlib.suppress(psutil.Error):
                used.append(sum(supervisor.cpu_times()[:2]))
                supervisor.wait(0.2)
        out, err = (text.decode() for text in down.communicate())
    assert down.returncode == 1 and "router" in err and "framer" not in err, (out, err)
    assert len(events(broker, "stage_killed")) == 1
    assert max(used) - used[0] < 0.5
    assert broker.processes() == []
    broker.up()


def test_log_lines_are_json_where_that_is_asked_for(broker):
    """Of every process, and `kmq up` still shows why a start failed."""
    broker.env["KMQ_LOG_FORMAT"] = "json"
    broker.up()
    broker.down()
    lines = [json.loads(line) for line in broker.log().splitlines()]
    assert {line["stage"] for line in lines} >= {*STAGES, "supervisor"}
    assert any(line["event"] == "stopped" and line["exit_code"] == 0 for line in lines)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failed = broker.kmq("up", KMQ_PORT=taken.getsockname()[1])
    shown = [json.loads(line) for line in failed.stderr.splitlines() if line.startswith("{")]
    assert failed.returncode and {line["level"] for line in shown} == {"error"}, failed.stderr
