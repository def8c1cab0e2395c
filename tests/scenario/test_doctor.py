"""`kmq doctor`: each check against the real thing, and nothing is made or changed, but for doorbells left over."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from kmq.cli import machine
from kmq.cli.machine import ERROR, NOTE, OK, WARNING
from kmq.config.settings import load
from kmq.links import doorbell


def doctor(broker, code=0, **settings):
    """Check → its row, of `kmq doctor --json`; the command has ended with `code`."""
    result = broker.kmq("doctor", "--json", **settings)
    assert (result.returncode, result.stderr) == (code, ""), result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["ok"] is (code == 0)
    return {row["check"]: row for row in found["checks"]}, found


def test_doctor_works_without_a_broker_and_makes_nothing(broker):
    found, whole = doctor(broker)
    assert found["broker"]["level"] == NOTE and "kmq up" in found["broker"]["advice"]
    assert {row["level"] for row in whole["checks"]} <= {OK, NOTE, WARNING}
    assert {
        "python",
        "open files",
        "shared memory",
        "doorbells",
        "leftovers",
        "memory",
        "clock",
        "disk",
        "space",
        "sync",
    } <= set(found)
    assert {"KMQ_DATA", "KMQ_PIPES", "java", "gateway"} <= set(found) and list(broker.root.iterdir()) == []
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"{broker.instance}.")]
    text = broker.kmq("doctor").stdout
    assert "note    broker: it does not run" in text and "        do: start it with: kmq up" in text
    assert text.splitlines()[-1].startswith("0 errors, ")


def test_doctor_names_what_keeps_a_broker_from_starting(broker):
    broker.pipes.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        found, _ = doctor(broker, 1, KMQ_PORT=number, KMQ_TOKENS=broker.root / "none", KMQ_CONNECTIONS=10_000_000)
    port = found[f"port {number}"]
    assert port["level"] == ERROR and "KMQ_PORT" in port["text"] and f"sport = :{number}" in port["advice"]
    assert found["KMQ_PIPES"]["level"] == ERROR and "is no directory" in found["KMQ_PIPES"]["text"]
    assert found["KMQ_TOKENS"]["level"] == ERROR and str(broker.root) not in found["KMQ_TOKENS"]["text"]
    assert found["open files"]["level"] == WARNING and "KMQ_CONNECTIONS" in found["open files"]["advice"]


def test_doctor_of_a_running_broker_finds_its_ports_and_a_stage_that_is_stopped(broker, new_broker):
    broker.up()
    port = int((broker.pipes / "ingress.port").read_text())
    found, whole = doctor(broker, KMQ_PORT=port)
    assert found[f"port {port}"]["text"] == "KMQ_PORT: ingress of this broker has it"
    assert found["broker"]["level"] == OK and whole["findings"] == []
    assert "the running broker" in found["open files"]["text"]
    router = broker.pids()["router"]
    os.kill(router, signal.SIGSTOP)
    try:
        broker.wait(lambda: broker.kmq("status", "--json").returncode == 1, "a broker that is not ready")
        found, whole = doctor(broker, 1)
    finally:
        os.kill(router, signal.SIGCONT)
    assert found["broker: silent"]["level"] == ERROR and f"kill -CONT {router}" in found["broker: silent"]["advice"]
    assert [finding["code"] for finding in whole["findings"]] == ["silent"]
    broker.kill()
    broker.wait(lambda: '"code": "down"' in broker.kmq("status", "--json").stdout, "the end of its heartbeats")
    assert doctor(broker)[0]["broker"]["text"] == "it does not run"
    broker.wait(lambda: doctor_sees(new_broker(), broker.instance), "the rings that it has left")
    assert len(doorbell.sets_of(broker.instance)) == 4, "their doorbells are theirs"
    for name in ("framed", "durable"):
        os.unlink(f"/dev/shm/{broker.instance}.{name}")
    bells = doctor(broker)[0]["doorbells"]
    assert bells["level"] == OK and "4 that nobody could use any more are removed" in bells["text"]
    assert doorbell.sets_of(broker.instance) == []


def test_a_damaged_wal_is_named_with_its_repair_and_the_clock_is_judged_all_the_same(broker):
    broker.up()
    broker.send_lines([b"t|0||%d" % n for n in range(100)])
    broker.wait_routed(100)
    assert broker.kmq("down").returncode == 0
    [log] = (broker.data / "append").glob("*.log")
    with log.open("r+b") as file:
        file.seek(10)
        file.write(b"#####")
    found, _ = doctor(broker, 1)
    assert found["log"]["level"] == ERROR and "damaged at byte" in found["log"]["text"]
    assert "kmq verify --repair" in found["log"]["advice"] and "user" not in found["log"]["advice"]
    assert found["clock"]["level"] in (OK, NOTE) and "the clock" not in found


def doctor_sees(other, instance):
    """Whether the rings are named, in a /dev/shm without those that other brokers of the machine have left."""
    shm = other.root / "shm"
    shm.mkdir()
    for path in Path("/dev/shm").glob(f"{instance}.*"):
        shutil.copy(path, shm)
    check = machine.leftovers(load(other.env, toml=""), str(shm))
    return check.level == NOTE and instance in check.text and f"rm {shm}/{instance}.*" in check.advice


@pytest.mark.parametrize(
    ("kind", "level", "word"),
    [
        ("ext4", OK, "ext4"),
        ("tmpfs", WARNING, "restart of the machine"),
        ("overlay", WARNING, "lost with the container"),
        ("nfs4", WARNING, "over a network"),
    ],
)
def test_a_disk_that_does_not_keep_what_is_synced_is_named(tmp_path, kind, level, word):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / xfs rw 0 0\nx {tmp_path} {kind} rw 0 0\ny {tmp_path}/data2 xfs rw 0 0\n")
    check = machine.kind(load({"KMQ_DATA": str(tmp_path / "data")}, toml=""), str(mounts))
    assert check.level == level and word in check.text


def test_the_measurement_is_bounded_and_leaves_no_file(tmp_path):
    times = machine.measure(str(tmp_path))
    assert 1 <= len(times) <= machine.MOST_SYNCS and times == sorted(times) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("limit", "level"), [("8388608", ERROR), ("67108864", WARNING), ("4294967296", OK), ("max", OK)]
)
def test_the_memory_limit_of_the_cgroup_is_held_against_the_rings(tmp_path, limit, level):
    (tmp_path / "memory").mkdir()
    for path in (tmp_path / "memory.max", tmp_path / "memory/memory.limit_in_bytes"):
        path.write_text(limit + "\n")
    assert machine.memory(load({}, toml=""), str(tmp_path)).level == level


def test_directories_and_secrets_that_others_may_use_are_named(tmp_path):
    data, key = tmp_path / "data", tmp_path / "key.pem"
    data.mkdir()
    data.chmod(0o777)
    key.write_text("key")
    key.chmod(0o644)
    settings = load({"KMQ_DATA": str(data), "KMQ_PIPES": str(tmp_path / "p"), "KMQ_TLS_KEY": str(key)}, toml="")
    found = {check.name: check for check in machine.permissions(settings)}
    assert found["KMQ_DATA"].level == WARNING and "chmod o-w" in found["KMQ_DATA"].advice
    assert found["KMQ_TLS_KEY"].level == WARNING and found["KMQ_PIPES"].level == OK
    assert not Path(tmp_path / "p").exists()


def test_a_newest_record_in_the_future_makes_the_clock_a_warning():
    assert machine.clock(-7200.0).level == WARNING and "7,200 s in the future" in machine.clock(-7200.0).text
