"""Commands from another directory than the broker's: they say which one they look at, and make nothing there by looking."""

import os

import pytest

CONFIG = 78
LOOKING = (
    "status",
    "status --json",
    "down",
    "clock",
    "topics list",
    "log stat",
    "log cat",
    "log find --seq 1",
    "verify",
    "redrive dead --to test.x --dry-run",
    "redrive --dropped --dry-run",
    "token list",
)


@pytest.fixture
def astray(broker):
    """astray(command…) runs it in an empty directory, where KMQ_DATA and KMQ_PIPES are those of that directory."""
    directory = broker.root / "astray"
    directory.mkdir()
    for name in ("KMQ_DATA", "KMQ_PIPES"):
        del broker.env[name]
    return lambda *command: broker.run("env", "-C", directory, "kmq", *command, KMQ_TOKENS="tokens"), directory


@pytest.mark.parametrize("command", LOOKING)
def test_looking_makes_nothing(astray, command):
    run, directory = astray
    result = run(*command.split())
    assert result.returncode and "Traceback" not in result.stderr
    assert os.listdir(directory) == []


@pytest.mark.parametrize("command", ["status", "down", "topics list", "log stat", "verify"])
def test_what_is_not_there_is_named_with_its_directory(astray, command):
    run, directory = astray
    result = run(*command.split())
    said = (result.stdout + result.stderr).strip()
    assert f"{directory}/data is no data directory" in said and "set KMQ_DATA" in said
    if command != "status":
        assert result.returncode == CONFIG


def test_a_broker_of_this_instance_in_another_directory_is_named(broker, astray):
    broker.up(KMQ_DATA=broker.data, KMQ_PIPES=broker.pipes)
    run, directory = astray
    status, down = run("status"), run("down")
    assert (status.returncode, down.returncode) == (1, CONFIG)
    for said in (status.stdout, down.stderr):
        assert f"instance {broker.instance} is up with its data in {broker.data};" in said
    assert os.listdir(directory) == []
    (directory / "data/append").mkdir(parents=True)  # a broker that is down, of the same instance name
    assert run("down").returncode == CONFIG
    there = broker.kmq("status", KMQ_DATA=broker.data, KMQ_PIPES=broker.pipes)
    assert there.returncode == 0


def test_status_and_down_say_where_they_looked_for_a_broker_that_is_down(broker):
    broker.up()
    broker.down()
    shown = broker.kmq("status", KMQ_DATA="data", KMQ_PIPES="./pipes")
    where = f"data in {broker.data}, pipes in {broker.pipes}"
    assert shown.stdout.endswith(f"kmq: instance {broker.instance} is down ({where})\n")
    assert shown.returncode == 1
    down = broker.kmq("down", KMQ_DATA="data", KMQ_PIPES="./pipes")
    assert (down.returncode, down.stdout) == (0, f"kmq: not up (data in {broker.data})\n")


def test_topics_create_says_where_it_declares(astray):
    run, directory = astray
    assert f"declared in {directory}/data" in run("topics", "create", "orders").stdout
    assert "orders" in run("topics", "list").stdout


def test_nobody_else_may_write_what_a_broker_makes_under_an_open_umask(broker):
    def run(command):
        result = broker.run("sh", "-c", f"umask 000; exec kmq {command}")
        assert result.returncode == 0, result.stderr

    run("topics create orders --partitions 2")
    run("up")
    broker.send_lines([b"orders.k%d|0||x" % n for n in range(10)] + [b"made.k|0||x"])
    broker.wait_routed(12)
    run("topics set orders --partitions 3 --force")
    broker.wait_routed(13)
    run("down")
    made = [path for root in (broker.data, broker.pipes) for path in [root, *root.rglob("*")] if not path.is_symlink()]
    assert len(made) > 25 and [path for path in made if path.stat().st_mode & 0o002] == []
