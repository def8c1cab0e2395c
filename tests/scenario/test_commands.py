"""The commands as a user meets them: what they say, what they end with, and what they leave behind."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest
import typer.main
from brokers import PATIENCE_S
from command_tree import every_command
from consuls import free_ports
from typer.testing import CliRunner
from waiting import until

from kmq.cli.app import MODULES, app
from kmq.links import doorbell

FAILED, BUSY, RETRY, CONFIG, CORRUPT = 1, 69, 75, 78, 65


def shared_memory(broker):
    return sorted(path.name for path in Path("/dev/shm").glob(f"{broker.instance}.*"))


def refused(result, code, *words):
    """The command ended with `code`, and stderr has these words, in an unbroken line each and without a traceback."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    return True


# --- up and down -----------------------------------------------------------------------------------------------------


def test_up_says_where_it_listens_and_down_leaves_no_process_and_no_ring(broker):
    result = broker.kmq("up")
    names = "ingress", "grpc", "http", "kafka"
    port, grpc, http, kafka = ((broker.pipes / f"{name}.port").read_text().strip() for name in names)
    assert result.stdout == (
        f"kmq: up; lines in on 127.0.0.1:{port}, data in {broker.data}, log in {broker.pipes}/kmq.log\n"
        f"kmq: gRPC on 127.0.0.1:{grpc}, HTTP on http://127.0.0.1:{http}, Kafka on 127.0.0.1:{kafka}\n"
    )
    assert broker.kmq("down").stdout == "kmq: down\n"
    assert broker.processes() == []
    assert shared_memory(broker) == [f"{broker.instance}.stats"]
    assert doorbell.sets_of(broker.instance) == []


def test_down_removes_the_doorbells_of_rings_that_are_gone_and_nobody_elses(broker, new_broker):
    other = new_broker()
    for each in (broker, other):
        each.up()
    broker.kill()
    for name in shared_memory(broker):
        os.unlink(f"/dev/shm/{name}")
    assert len(doorbell.sets_of(broker.instance)) == len(doorbell.sets_of(other.instance)) == 4
    assert broker.kmq("down").returncode == 0
    assert doorbell.sets_of(broker.instance) == []
    assert len(doorbell.sets_of(other.instance)) == 4
    assert other.kmq("status").returncode == 0


def test_up_where_the_kernel_has_no_semaphores_left_says_what_to_do(broker):
    """In an IPC namespace of its own, with room for three sets; a broker has four doorbells."""
    narrow = "import os, sys; open('/proc/sys/kernel/sem', 'w').write('250 32000 32 3'); os.execvp('kmq', ['kmq', *sys.argv[1:]])"
    unshared = ["unshare", "--ipc", sys.executable, "-c", narrow]

    def kmq(*args):
        return subprocess.run([*unshared, *args], env=broker.env, cwd=broker.root, capture_output=True, text=True)

    if not shutil.which("unshare") or kmq("--version").returncode:
        pytest.skip("needs an IPC namespace of its own")
    refused(
        kmq("up"), CONFIG, "the limit of the kernel is reached (kernel.sem = 250 32000 32 3)", "sysctl -w kernel.sem="
    )
    checks = kmq("doctor")
    assert checks.returncode == 1 and "0 of 3 sets of semaphores are in use; the doorbells take 4" in checks.stdout


def test_what_waits_in_a_ring_outlives_the_ipc_namespace_of_its_doorbells(broker):
    """As where a kubelet makes the sandbox of a pod again: /dev/shm stays, the namespace is new."""
    if not shutil.which("unshare") or broker.run("unshare", "--ipc", "true").returncode:
        pytest.skip("needs an IPC namespace of its own")
    up = ("unshare", "--ipc", "kmq", "up", "--no-gateway")
    assert broker.run(*up).returncode == 0
    os.kill(broker.pids()["durability"], signal.SIGSTOP)
    broker.send_lines([b"t|0|%d|x" % n for n in range(100)])
    broker.wait(lambda: broker.status()["framer"]["seq"] == "100", "100 messages in the ring")
    broker.kill()
    assert broker.run(*up).returncode == 0
    broker.wait_routed(100)
    assert len(broker.lines("t")) == 100


def test_up_twice_names_the_one_that_is_up(broker):
    broker.up()
    before = broker.pids()
    refused(broker.kmq("up"), BUSY, f"up already (pid={before['supervisor']} ", "see: kmq status")
    refused(broker.kmq("up", "--foreground"), BUSY, f"held by pid={before['supervisor']} ")
    assert broker.pids() == before


def test_up_that_down_overtakes_says_so_and_fails(broker):
    (broker.root / "sitecustomize.py").write_text(
        "import sys, time\nif 'stages.router' in sys.orig_argv:\n    time.sleep(600)\n"
    )
    broker.env["PYTHONPATH"] = str(broker.root)  # it is not ready before
    up = subprocess.Popen(["kmq", "up"], env=broker.env, cwd=broker.root, stderr=subprocess.PIPE, text=True)
    owner = broker.pipes / "supervisor.owner"
    broker.wait(lambda: owner.exists() and owner.read_text().startswith("pid="), "the supervisor")
    os.kill(int(owner.read_text().split()[0][len("pid=") :]), signal.SIGTERM)  # as `kmq down` does
    _, said = up.communicate(timeout=60)
    assert up.returncode == RETRY
    assert "kmq: was told to stop (kmq down) before it was ready" in said and "could not start" not in said
    assert broker.processes() == []


def test_the_log_is_for_the_group_of_the_broker_only(broker):
    broker.pipes.mkdir()
    log = broker.pipes / "kmq.log"
    log.touch(0o644)  # as an older release made it
    broker.up()
    assert log.stat().st_mode & 0o777 == 0o640


def test_down_twice_is_no_error(broker):
    broker.up()
    broker.down()
    assert (broker.kmq("down").returncode, broker.kmq("down").stdout) == (0, f"kmq: not up (data in {broker.data})\n")


def test_a_second_instance_on_the_same_directory_is_refused_before_it_starts(broker, new_broker):
    broker.up()
    second = new_broker(broker.data)
    refused(second.kmq("up"), BUSY, f"KMQ_DATA={broker.data} is held by pid={broker.pids()['durability']} ")
    assert second.processes() == [] and shared_memory(second) == []
    assert broker.kmq("status").returncode == 0
    held = f"KMQ_DATA={broker.data} is held by another broker (pid={broker.pids()['durability']} "
    for command in (("status",), ("status", "--json"), ("top", "--once", "--json"), ("doctor",)):
        shown = second.kmq(*command).stdout
        assert held in shown and "start it with" not in shown, command


def test_another_data_directory_behind_the_same_instance_name_is_refused(broker, new_broker):
    broker.up()
    other = new_broker()
    result = broker.kmq("up", KMQ_DATA=other.data, KMQ_PIPES=other.pipes)
    refused(result, BUSY, f"KMQ_INSTANCE={broker.instance} is in use by another data directory", str(broker.data))
    assert broker.kmq("status").returncode == 0
    for command in (("status",), ("status", "--json"), ("top", "--once", "--json"), ("doctor",)):
        shown = broker.kmq(*command, KMQ_DATA=other.data, KMQ_PIPES=other.pipes).stdout
        assert f"instance {broker.instance} is up with its data in {broker.data}" in shown, command
        assert "a KMQ_INSTANCE of its own" in shown and "start it with" not in shown, command
    assert str(broker.data) in broker.kmq("status", KMQ_DATA=other.data).stdout  # with the pipes of the other broker


def test_an_instance_name_may_move_to_another_directory_once_its_pod_is_down(broker, new_broker):
    broker.up()
    broker.send_lines([b"test.a|0|1|here"])
    broker.wait_routed(1)
    broker.kill()
    other = new_broker()
    result = broker.kmq("up", KMQ_DATA=other.data, KMQ_PIPES=other.pipes)
    assert result.returncode == 0, result.stderr
    assert other.wal() == []


def test_a_port_that_is_taken_is_named_with_its_setting(broker):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(broker.kmq("up", KMQ_PORT=port), CONFIG, f"KMQ_PORT={port}: cannot listen on 127.0.0.1:{port}")
        refused(broker.kmq("up", KMQ_ACK_PORT=port), CONFIG, f"KMQ_ACK_PORT={port}: cannot listen")
    refused(broker.kmq("up", KMQ_HOST="192.0.2.1"), CONFIG, "cannot listen on 192.0.2.1:", "correct KMQ_HOST")
    assert broker.processes() == []
    broker.up(KMQ_PORT=port)


@pytest.mark.parametrize("setting", ["KMQ_DATA", "KMQ_PIPES"])
def test_a_directory_that_cannot_be_made_is_named_with_its_setting(broker, setting):
    (broker.root / "file").write_text("")
    path = str(broker.root / "file" / "inside")
    refused(broker.kmq("up", **{setting: path}), CONFIG, f"{setting}='{path}': cannot", "Not a directory")
    refused(broker.kmq("up", "--foreground", **{setting: path}), CONFIG, f"{setting}='{path}': cannot")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("setting", ["KMQ_DATA", "KMQ_PIPES"])
def test_a_directory_without_write_permission_is_named_with_its_setting(broker, setting):
    path = broker.root / "readonly"
    path.mkdir(mode=0o500)
    refused(broker.kmq("up", **{setting: path}), CONFIG, f"{setting}='{path}': cannot")


def test_a_file_where_the_fifo_should_be_is_named(broker):
    broker.pipes.mkdir()
    (broker.pipes / "raw").write_text("not a pipe")
    refused(broker.kmq("up"), CONFIG, f"{broker.pipes}/raw is not a FIFO")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("KMQ_PROT", "5673", "unknown setting KMQ_PROT; did you mean KMQ_PORT?"),
        ("RB_SLOTS", "many", "RB_SLOTS='many': expected a whole number"),
        ("RB_BYTES", "4 bananas", "RB_BYTES='4 bananas': expected a number of bytes"),
        ("KMQ_MAX_LINE", "1Mb", "KMQ_MAX_LINE='1Mb': Mb are bits; write MiB for bytes"),
        ("RB_OVERFLOW_POLICY", "drop", "RB_OVERFLOW_POLICY='drop': must be block or drop_oldest"),
        ("KMQ_INSTANCE", "a/b", "KMQ_INSTANCE='a/b': must be 1 to 64 of"),
        ("KMQ_PORT", "70000", "KMQ_PORT='70000': must be between 0 and 65535"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_starts(broker, setting, value, words):
    refused(broker.kmq("up", **{setting: value}), CONFIG, words)
    assert not broker.data.exists()


@pytest.mark.parametrize("command", ["status", "down", "produce test.a -m x", "topics list", "redrive dead --to a"])
def test_every_command_refuses_a_wrong_setting(broker, command):
    refused(broker.kmq(*command.split(), KMQ_DAAT="x"), CONFIG, "KMQ_DAAT; did you mean KMQ_DATA?")


def test_a_wrong_line_in_kmq_toml_is_named_with_the_file(broker):
    (broker.root / "kmq.toml").write_text('KMQ_DAAT = "/tmp"\n')
    refused(broker.kmq("up"), CONFIG, "kmq.toml: unknown setting KMQ_DAAT; did you mean KMQ_DATA?")


# --- after a crash ---------------------------------------------------------------------------------------------------


def test_up_after_everything_was_killed_just_works_and_keeps_what_was_durable(broker):
    broker.up()
    broker.send_lines([b"test.a|0|%d|x" % n for n in range(100)])
    broker.wait_routed(100)
    broker.kill()
    assert (broker.pipes / "raw").is_fifo() and f"{broker.instance}.framed" in shared_memory(broker)
    broker.up()
    broker.send_lines([b"test.a|0|100|y"])
    broker.wait_routed(101)
    assert [int(line.split(b"|")[0]) for line in broker.lines("test")] == list(range(1, 102))


def test_up_after_a_crash_with_other_settings_works_when_the_rings_hold_nothing(broker):
    broker.up()
    broker.send_lines([b"test.a|0|1|x"])
    broker.wait_routed(1)  # which durability shows to the router before it gives the room back
    broker.wait(lambda: set(broker.status()["backlog"].values()) == {"0"}, "empty rings")
    broker.kill()
    broker.up(RB_SLOTS=64, RB_OVERFLOW_POLICY="drop_oldest")


def test_messages_in_a_ring_of_other_settings_are_not_thrown_away(broker):
    broker.up()
    os.kill(broker.pids()["router"], signal.SIGSTOP)
    broker.send_lines([b"test.a|0|1|x"])
    broker.wait(lambda: broker.status()["durability"]["seq"] == "1", "seq 1 durable")
    broker.kill()
    result = broker.kmq("up", RB_SLOTS=64)
    refused(result, CONFIG, "bytes of messages under other settings", "slots=8192", "start once with those settings")
    broker.up()
    broker.wait_routed(1)
    broker.down()
    broker.up(RB_SLOTS=64)
    assert len(broker.lines("test")) == 1


def test_down_finds_the_stages_of_a_supervisor_that_was_killed(broker):
    broker.up()
    stages = broker.pids()
    broker.kill("supervisor")
    result = broker.kmq("up")
    refused(result, BUSY, "without their supervisor", "stop them with: kmq down")
    assert all(str(stages[name]) in result.stderr for name in ("ingress", "framer", "durability", "router"))
    broker.send_lines([b"test.a|0|1|still served"])
    broker.down()
    assert broker.processes() == []
    broker.up()
    broker.wait_routed(1)


def test_a_stage_that_is_killed_comes_back_and_status_counts_it(broker):
    broker.up()
    broker.kill("framer")
    broker.wait(lambda: broker.status()["framer"]["restarts"] == "1", "framer restarted")
    broker.wait(lambda: broker.kmq("status").returncode == 0, "all ready")
    broker.send_lines([b"test.a|0|1|x"])
    broker.wait_routed(1)


def test_an_instance_that_comes_back_to_a_directory_used_meanwhile_goes_on(broker, new_broker):
    """Its drained ring from before the crash is behind the WAL by now; it once made durability cut the WAL."""
    broker.up()
    broker.send_lines([b"test.a|0|1|x"])
    broker.wait_routed(1)
    broker.kill()
    other = new_broker(broker.data)
    other.up()
    other.send_lines([b"test.a|0|%d|x" % n for n in range(9)])
    other.wait_routed(10)
    other.down()
    broker.up()
    broker.send_lines([b"test.a|0|1|y"])
    broker.wait_routed(11)
    assert [int(line.split(b"|")[0]) for line in broker.wal()] == list(range(1, 12))


def test_a_ring_with_messages_older_than_the_wal_is_refused_and_the_wal_stays_whole(broker, new_broker):
    broker.up()
    os.kill(broker.pids()["durability"], signal.SIGSTOP)
    broker.send_lines([b"test.a|0|1|in the ring only"])
    broker.wait(lambda: broker.status()["framer"]["seq"] == "1", "seq 1 numbered")
    broker.kill()
    other = new_broker(broker.data)
    other.up()
    other.send_lines([b"test.a|0|%d|x" % n for n in range(9)])
    other.wait_routed(9)
    other.down()
    before = broker.wal()
    alone = broker.run("timeout", "50", "python", "-m", "stages.durability")  # it has no framer to stop it in time
    refused(alone, CORRUPT, "the WAL ends at seq 9, but the ring", "remove")
    refused(broker.run("kmq", "up"), CORRUPT, "but the ring", "remove")  # whichever stage sees it first
    assert broker.wal() == before and len(before) == 9


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_of_a_broker_that_was_never_up_says_down_and_fails(broker):
    result = broker.kmq("status")
    assert result.returncode == 1
    assert result.stdout.startswith(
        f"kmq: instance {broker.instance} is down (data in {broker.data}, pipes in {broker.pipes})\n"
    )


def test_status_shows_each_stage_in_one_line_of_an_80_column_terminal(broker):
    broker.gateway = True
    broker.up()
    broker.send_lines([b"test.a|0|%d|x" % n for n in range(1000)])
    broker.wait_routed(1000)
    result = broker.kmq("status")
    assert result.returncode == 0
    title, *rows = result.stdout.splitlines()
    assert title.split()[:4] == ["stage", "pid", "state", "restarts"]
    pids = broker.pids()
    assert [row.split()[:4] for row in rows] == [
        [name, str(pids[name]), "ready", "0"] for name in ("ingress", "framer", "durability", "router", "gateway")
    ]
    assert all("1,000" in row for row in rows[1:4])


def test_status_says_which_stage_is_silent_or_dead(broker):
    broker.up()
    pids = broker.pids()
    os.kill(pids["router"], signal.SIGSTOP)
    broker.wait(lambda: broker.status()["router"]["state"] == "silent", "router silent")
    assert broker.kmq("status").returncode == 1
    broker.kill("supervisor", "framer")
    broker.wait(lambda: broker.status()["framer"]["state"] == "dead", "framer dead")


# --- produce, topics -------------------------------------------------------------------------------------------------


def test_produce_sends_messages_lines_of_stdin_or_whole_lines(broker):
    broker.up()
    assert broker.kmq("produce", "test.a", "-m", "one", "-m", "two|2").stdout == "sent 2\n"
    assert broker.kmq("produce", "test.b", text="three\nfour\n").stdout == "sent 2\n"
    assert broker.kmq("produce", "--raw", text="test.c|0|id|five\n").stdout == "sent 1\n"
    broker.wait_routed(5)
    found = [line.split(b"|", 5) for line in broker.lines("test")]
    assert [(key, payload) for _, _, key, _, _, payload in found] == [
        (b"test.a", b"one"),
        (b"test.a", b"two|2"),
        (b"test.b", b"three"),
        (b"test.b", b"four"),
        (b"test.c", b"five"),
    ]


def test_produce_says_when_nobody_listens(broker):
    refused(broker.kmq("produce", "test.a", "-m", "x"), CONFIG, "is the broker up?")
    (port,) = free_ports(1)
    refused(broker.kmq("produce", "test.a", "-m", "x", KMQ_PORT=port), RETRY, f"127.0.0.1:{port}", "is the broker up?")


def test_produce_wants_a_routing_key_or_raw_and_not_both(broker):
    for arguments in ([], ["test.a", "--raw"], ["a|b"]):
        refused(broker.kmq("produce", *arguments), CONFIG, "routing key")


def test_topics_are_declared_listed_and_used(broker):
    broker.up()
    assert broker.kmq("topics", "create", "orders", "--partitions", "4").stdout == (
        "topic orders: 4 partition(s), in force from seq 1\n"
    )
    broker.send_lines([b"orders.k%d|0|%d|x" % (n % 7, n) for n in range(100)])
    broker.wait_routed(1 + 100)  # the declaration has a seq, too
    rows = [
        dict(f.split("=") for f in line.split())
        for line in broker.kmq("topics", "list", "--logfmt").stdout.splitlines()
    ]
    assert [(row["topic"], row["partition"]) for row in rows] == [("orders", str(n)) for n in range(4)]
    assert sum(int(row["messages"]) for row in rows) == 100
    assert broker.kmq("topics", "list").stdout.count("orders") == 4


def test_a_topic_that_cannot_be_declared_is_refused_with_the_reason(broker):
    broker.up()
    for name, words in (
        ("append", "not begin with append"),
        ("../x", "must match"),
        ("__offsets", "must match"),
    ):
        refused(broker.kmq("topics", "create", name), CONFIG, f"topic '{name}'", words)
    refused(broker.kmq("topics", "create", "many", "-p", "0"), CONFIG, "partitions=0: must be between 1 and 1024")
    broker.kmq("topics", "create", "orders")
    refused(broker.kmq("topics", "create", "orders"), CONFIG, "topic 'orders' already exists with 1 partition(s)")


HELD = """
import sys
from kmq.__main__ import main
from kmq.log import topics
declare = topics.declare
def held(*args, **more):
    declare(*args, **more)
    sys.stdin.read()
topics.declare = held
main()
"""


def test_a_declaration_that_comes_behind_a_message_says_that_it_failed(broker):
    """Commands held between asking and looking, however long each takes to start. The second looks when all has ended."""
    broker.gateway = False
    broker.up()
    router = broker.pids()["router"]
    os.kill(router, signal.SIGSTOP)
    broker.send_lines([b"orders.k|0|1|x", b"jobs.k|0|1|x"])
    broker.wait(lambda: broker.status()["durability"]["seq"] == "2", "both are numbered")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with ExitStack() as stack:
        held = []
        for way in (("orders", "--set", "retention_age=30d"), ("jobs", "--partitions", "4")):
            command = [sys.executable, "-c", HELD, "topics", "create", *way]
            held.append(
                stack.enter_context(subprocess.Popen(command, env=broker.env, cwd=broker.root, text=True, **pipes))
            )
            stack.callback(held[-1].kill)
            declared = broker.data / "topics" / way[0] / "topic.toml"
            broker.wait(declared.exists, "it is asked for")
        assert len(list(broker.data.glob("topics/.request-*"))) == 2
        os.kill(router, signal.SIGCONT)
        broker.wait_routed(2)
        for command in held:
            _, said = command.communicate(timeout=PATIENCE_S)
            done = subprocess.CompletedProcess(command.args, command.returncode, "", said)
            refused(done, FAILED, "exists with 1 partition(s): a message or another command was first")
            broker.down()


# --- redrive ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def dead_letters(broker):
    """A broker that is up and has ten dead letters, seqs 1 to 10, and one that no topic can be made of."""
    broker.up()
    broker.send_lines([b"dead.letter_%d|0|%d|a|b %d" % (n, n, n) for n in range(10)] + [b"dead.-bad|0|0|x"])
    broker.wait_routed(11)
    return broker


def test_redrive_shows_first_and_sends_then(dead_letters):
    command = ["redrive", "dead", "--to", "test.recovered_{key}", "--key", "letter_*", "--from-seq", "6"]
    before = dead_letters.lines("dead")
    shown = dead_letters.kmq(*command, "--dry-run").stdout.splitlines()
    assert shown[0] == "dead.letter_5 -> test.recovered_letter_5"
    assert shown[-1] == "would redrive 5 of dead"
    assert int(dead_letters.status()["framer"]["seq"]) == 11
    assert dead_letters.kmq(*command).stdout == "redriven 5 of dead\n"
    dead_letters.wait_routed(16)
    sent = [re.sub(rb";p=redrive-[^;]*", b"", line.split(b"|", 2)[2]) for line in dead_letters.lines("test")]
    assert sent == [
        b"test.recovered_letter_%d|0|%d;orig_id=%d;orig_seq=%d|a|b %d" % (n, n + 1, n, n + 1, n) for n in range(5, 10)
    ]
    assert dead_letters.lines("dead") == before


def test_redrive_into_the_same_queue_ends(dead_letters):
    assert dead_letters.kmq("redrive", "dead", "--to", "dead.again").stdout == "redriven 11 of dead\n"
    dead_letters.wait_routed(22)
    assert len(dead_letters.lines("dead")) == 22


def test_redrive_sends_nothing_when_one_key_cannot_be_rewritten(dead_letters):
    refused(dead_letters.kmq("redrive", "dead", "--to", "{key}"), CONFIG, "'-bad', which is no routing key")
    assert int(dead_letters.status()["framer"]["seq"]) == 11


def test_redrive_says_what_is_wrong_with_its_arguments(dead_letters):
    for topic, template, words in (
        ("nosuch", "test.{key}", "topic 'nosuch' does not exist"),
        ("dead", "test.{kee}", "the fields are {routing_key}, {topic}, {key}"),
        ("dead", "a|b", "no routing key: it must not hold | or a newline"),
        ("dead", "", "no routing key: the routing key is empty"),
        ("dead", "append.{key}", "no routing key: append, dropped and names that begin with __"),
    ):
        refused(dead_letters.kmq("redrive", topic, "--to", template), CONFIG, words)


def test_redrive_carries_any_bytes_of_a_key(broker):
    broker.up()
    broker.send_lines(["dead.größe|0|1|x".encode(), b"dead.\xff|0|2|y"])
    broker.wait_routed(2)
    broker.kmq("redrive", "dead", "--to", "test.ü_{key}")
    broker.wait_routed(4)
    keys = [line.split(b"|")[2] for line in broker.lines("test")]
    assert keys == ["test.ü_größe".encode(), "test.ü_".encode() + b"\xff"]


# --- help ------------------------------------------------------------------------------------------------------------


def examples(path):
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
    text = result.stdout.partition("Examples:")[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


EVERY_COMMAND = sorted(words for words, _ in every_command())
ON_SPARK = ("sql", "audit", "pipeline")  # pasted in tests/spark: each starts a JVM
# Each needs a Consul: docs/broadcast-queue.md is pasted, test_fleet.py and test_shard.py paste those of kmq fleet and
# kmq cluster.
ON_CONSUL = ("bq", "fleet", "cluster")
ON_TIER = ("tier", "restore")  # need a copy, or a broker that is down: test_tier.py and test_forked_broker.py run them


def test_every_help_has_examples_and_all_of_them_work_when_pasted(broker, new_broker):
    found = {path: examples(path) for path in EVERY_COMMAND}
    assert len(found) >= 9
    assert [path for path, lines in found.items() if not lines] == []
    found = {path: lines for path, lines in found.items() if not set(path[:1]) & {*ON_SPARK, *ON_CONSUL, *ON_TIER}}
    second = new_broker()
    apart = ("kmq up", "kmq down", "kmq gateway", "kmq verify --repair")
    lines = [line for line in dict.fromkeys(chain(*found.values())) if not line.endswith(apart) and line != FOREGROUND]

    def paste(line):
        line = line.replace("--host 127.0.0.1", '--url "http://127.0.0.1:$(cat $KMQ_PIPES/http.port)"')
        result = broker.run("bash", "-c", f"set -o pipefail; {line}")
        told, silent = (result.stderr, result.stdout) if " - > " in line else (result.stdout, result.stderr)
        assert (result.returncode, silent) == (0, ""), f"{line}\n{result.stdout}{result.stderr}"
        assert told.strip(), line

    paste("kmq up")
    origin = b"origin_topic=test;origin_partition=0;origin_offset=0;origin_seq=2;group=g;error=timeout"
    letter = b"test.dlq.@.probe|0|g.test.0.0;%b;attempts=4;first_failure=1.000;last_failure=2.000|hi" % origin
    broker.send_lines([b"dead.letter_1|0|1|x", *[b"test.probe|0|1|hi"] * 3, letter])
    broker.wait_routed(5)
    for line in lines:
        paste(line)
    paste("kmq down")
    paste("kmq verify --repair")

    starts = [line for line in chain(*found.values()) if "kmq up" in line and line != "kmq up"]
    assert sorted(starts) == ["KMQ_INSTANCE=b KMQ_DATA=b/d KMQ_PIPES=b/p KMQ_PORT=0 KMQ_ACK_PORT=0 kmq up", FOREGROUND]
    paste("kmq up")
    beside = starts[0].replace("KMQ_INSTANCE=b ", f"KMQ_INSTANCE={second.instance} ")
    paste(beside)
    paste(beside.replace("kmq up", "kmq down"))
    paste("kmq down")


FOREGROUND = "kmq up --foreground"


def test_up_in_the_foreground_logs_to_stderr_and_ends_with_ctrl_c(broker):
    with subprocess.Popen(shlex.split(FOREGROUND), env=broker.env, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: broker.kmq("status").returncode == 0, "a broker that is ready", process=process)
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert log.splitlines()[-1].endswith("stage=supervisor event=stopped exit_code=0")
    assert broker.processes() == []


def test_each_word_is_added_by_its_module():
    for module in set(MODULES.values()):
        family = typer.Typer()
        import_module(f"kmq.cli.{module}").add_to(family)
        added = typer.main.get_group(family).commands
        assert set(added) == {word for word, name in MODULES.items() if name == module}


@pytest.mark.parametrize("command", [["--version"], ["topics", "list", "--json"], ["status", "--json"]], ids=" ".join)
def test_a_command_imports_what_it_uses(broker, command):
    code = f"""if True:
        import atexit, sys
        from kmq.__main__ import main
        atexit.register(lambda: print(*sys.modules, file=sys.stderr))
        sys.argv[1:] = {command!r}
        main()"""
    loaded = set(broker.run(sys.executable, "-c", code).stderr.split())
    assert "kmq.cli.app" in loaded
    families = {f"kmq.cli.{module}" for module in MODULES.values() if module != MODULES.get(command[0])}
    heavy = {"asyncio", "email", "http.client", "multiprocessing", "psutil", "pydantic", "rich.table", "ssl"}
    assert loaded & (families | heavy) == set()
