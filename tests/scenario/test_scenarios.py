"""The scenarios, as a user runs them: each twice in the same directory, for none may need cleaning up."""

import os
import signal

import pytest

RUNS = 2
KILLED = (
    "kmq: unclean_end: ingress, framer, durability, router, gateway: killed or crashed, and started again;"
    " nothing acknowledged is lost, nothing needs repair; find out why: event=stage_ended and event=failed"
    " (KMQ_PIPES/kmq.log); dmesg shows whether it was the OOM killer\n"
)


def fields(line):
    return dict(part.split("=", 1) for part in line.split())


def run(broker, scripts, number, patience_s=140, errors="", **settings):
    """Run a scenario that prints these errors; returns its checks (name → got) and its whole output."""
    result = broker.run(str(scripts / f"scenario-{number}"), patience_s=patience_s, **settings)
    assert result.returncode == 0, result.stdout + result.stderr + broker.log()[-3000:]
    assert result.stderr == errors
    rows = [fields(line) for line in result.stdout.splitlines()]
    assert all(row["scenario"] == number for row in rows)
    assert (rows[-1]["failed"], rows[-1]["result"]) == ("0", "pass")
    checks = {row["check"]: row["got"] for row in rows if "check" in row}
    assert int(rows[-1]["checks"]) == sum("check" in row for row in rows) > 0
    return checks, result.stdout


def test_scenario_1_goes_on_with_the_sequence_after_the_whole_pod_was_killed(broker, scripts):
    for first in (0, 1000):
        checks, output = run(broker, scripts, "1", errors=KILLED)
        assert checks["seq_resume"] == str(first + 500)
        assert f" event=seq_resume seq_resume={first + 500} " in broker.log()
        seam = [fields(line) for line in output.splitlines() if "seam_seq=" in line]
        assert [(int(row["seam_seq"]) - first, row["payload"]) for row in seam] == [
            (498, "batch1"),
            (499, "batch1"),
            (500, "batch1"),
            (501, "batch2"),
            (502, "batch2"),
        ]
    assert [int(line.split(b"|")[0]) for line in broker.wal()] == list(range(1, 2001))


def test_scenario_2_routes_a_mixed_hundred_into_four_queues(broker, scripts):
    for _ in range(RUNS):
        run(broker, scripts, "2")
    assert {topic: len(broker.lines(topic)) for topic in ("test", "jobs", "random", "bar", "dead")} == {
        "test": 40 * RUNS,
        "jobs": 40 * RUNS,
        "random": 10 * RUNS,
        "bar": 10 * RUNS,
        "dead": 0,
    }


def test_scenario_3_names_every_loss_and_brings_it_back_and_the_sender_feels_none(broker, scripts):
    for _ in range(RUNS):
        _, output = run(broker, scripts, "3")
        loss = next(fields(line) for line in output.splitlines() if "loss_percent=" in line)
        # The ring keeps at most its 8,192 of 20,000, and at least that less one block (a quarter of it).
        assert 59.0 <= float(loss["loss_percent"]) < 70.0
    assert len(broker.lines("test")) == 20_000 * RUNS < len(broker.wal())  # redriven from the WAL


def test_scenario_3_gives_a_running_pod_its_own_settings_back(broker, scripts):
    broker.up(RB_SLOTS=4096, RB_OVERFLOW_POLICY_FRAMED="drop_oldest")
    _, output = run(broker, scripts, "3")
    assert "event=restart" in output
    environment = next(p for p in broker.processes() if "stages.router" in p.cmdline()).environ()
    assert environment["RB_SLOTS"] == "4096"
    assert environment["RB_OVERFLOW_POLICY_FRAMED"] == "drop_oldest"
    assert "RB_OVERFLOW_POLICY_DURABLE" not in environment
    assert {broker.status()[stage]["state"] for stage in broker.pids() if stage != "supervisor"} == {"ready"}


def test_scenario_3_block_holds_the_sender_up_and_loses_nothing(broker, scripts):
    for _ in range(RUNS):
        checks, _ = run(broker, scripts, "3-block")
        assert checks["sender_blocked"] == "yes"
        assert [checks[f"memory_flat_{stage}"] for stage in ("ingress", "framer", "durability", "router")] == [
            "yes"
        ] * 4
    assert len(broker.lines("test")) == 210_000 * RUNS == len(broker.wal())


@pytest.mark.timeout(600)
def test_scenario_4_replays_dead_letters_in_three_ways_and_leaves_their_log_alone(broker, scripts):
    for _ in range(RUNS):
        _, output = run(broker, scripts, "4", patience_s=280)  # a start of Spark on a busy machine
        assert "skipped" not in output
    assert len(broker.lines("test")) == 300 * RUNS
    assert len(broker.lines("dead")) == 90 * RUNS


def test_scenario_5_loses_and_doubles_nothing_while_stages_are_killed(broker, scripts):
    acked = []
    for _ in range(RUNS):
        checks, output = run(broker, scripts, "5")
        acked.append(int(checks["acked"]))
        blows = [fields(line) for line in output.splitlines() if "event=killed" in line]
        assert len(blows) == 6 and all(blow["sender_runs"] == "yes" for blow in blows)
    assert len(broker.lines("test")) == sum(acked) == len(broker.wal()) and min(acked) >= 20_000


def test_a_scenario_leaves_a_pod_up_that_was_up_and_down_that_was_down(broker, scripts):
    run(broker, scripts, "2")
    assert broker.processes() == []
    broker.up()
    before = broker.pids()
    run(broker, scripts, "2")
    assert broker.pids() == before


def test_a_scenario_sees_a_message_that_is_missing(broker, scripts, tmp_path):
    """A wc that counts one too few stands for a broker that loses one."""
    liar = tmp_path / "bin" / "wc"
    liar.parent.mkdir()
    liar.write_text('#!/bin/sh\nn=$(/usr/bin/wc "$@")\necho $((n - (n == 40)))\n')
    liar.chmod(0o755)
    result = broker.run(str(scripts / "scenario-2"), PATH=f"{liar.parent}:{broker.env['PATH']}")
    assert result.returncode == 1
    assert "check=queue_test want=40 got=39 result=fail" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("result=fail")
    assert broker.processes() == []


def test_a_scenario_that_cannot_start_its_pod_says_why_and_fails(broker, scripts):
    result = broker.run(str(scripts / "scenario-2"), RB_SLOTS="many")
    assert result.returncode == 78
    assert "RB_SLOTS='many': expected a whole number" in result.stderr


def test_a_scenario_copes_with_a_router_that_a_killed_scenario_left_stopped(broker, scripts):
    broker.up()
    os.kill(broker.pids()["router"], signal.SIGSTOP)
    broker.wait(lambda: broker.status()["router"]["state"] == "silent", "router silent")
    run(broker, scripts, "2")
    assert broker.kmq("status").returncode == 0
