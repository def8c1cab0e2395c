"""What commands print, and where to: pipes whose reader leaves, tables in files, help, completion, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys

import pytest
from brokers import Broker
from command_tree import every_command
from typer.testing import CliRunner

from kmq.cli.app import app
from kmq.links.fifo import waiting_bytes

USAGE, RETRY, INTERRUPTED = 2, 75, 130
NEARLY_FULL = 60 << 10  # bytes of a pipe: no line fits any more
LONG = "a.topic.with.a.name.that.leaves.no.room.for.anything.else.in.eighty.columns"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A broker that is down, with a WAL that no pipe holds. The tests leave it so."""
    broker = Broker(tmp_path_factory.mktemp("log") / "b")
    broker.gateway = False
    broker.up()
    broker.kmq("topics", "create", LONG, "--partitions", "2")
    broker.send_lines([b"test.a|0|%d|some text" % n for n in range(100_000)])
    broker.wait_routed(100_000)
    broker.down()
    yield broker
    broker.close()


def shell(broker, line):
    return broker.run("bash", "-c", f"set -o pipefail; {line}")


# --- pipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1300])  # far more than a pipe holds; a little more
def test_a_reader_that_leaves_is_no_failure_of_a_command_that_prints_much(log, count):
    for _ in range(4):
        result = shell(log, f"kmq log cat append --count {count} | head -n1")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("1|")


def test_the_exit_code_is_that_of_the_command_when_nobody_reads(log):
    for command, code in (
        ("topics list", 0),
        ("log stat", 0),
        ("verify", 0),
        ("status", 1),  # it is down
        ("log find append --seq 200000", 1),
        ("--help", 0),
        ("nosuch", USAGE),
    ):
        assert shell(log, f"kmq {command} 2>&1 | true").returncode == code, command
    index = log.data / "append" / f"{1:020}.idx"
    good = index.read_bytes()
    index.write_bytes(b"no index")
    assert shell(log, "kmq verify | true").returncode == 1
    index.write_bytes(good)


def test_a_full_disk_for_what_is_printed_is_one_line_and_75(log):
    for command in ("topics list", "log cat append"):
        result = shell(log, f"kmq {command} > /dev/full")
        assert (result.returncode, result.stderr) == (RETRY, "kmq: stdout: No space left on device\n")


def test_a_closed_stdout_is_no_traceback(log):
    assert shell(log, "kmq topics list >&-").stderr == shell(log, "kmq log cat append --count 3 >&-").stderr == ""


# --- tables and JSON -------------------------------------------------------------------------------------------------


def test_tables_in_a_pipe_are_as_wide_as_their_rows(log):
    log.up()
    for command, columns in (("topics list", 5), ("log stat", 8)):
        title, *rows = log.kmq(*command.split()).stdout.splitlines()
        assert len(rows) >= 3 and max(map(len, rows)) > 100
        assert all(len(row.split()) == columns for row in rows)
        assert sum(row.startswith(LONG) for row in rows) == 2
        assert len(title.rstrip()) == max(len(row.rstrip()) for row in rows)
    assert log.kmq("status").stdout.splitlines()[0].endswith("waits before it")
    log.down()


@pytest.mark.parametrize(("command", "name"), [("topics list", "topics"), ("log stat", "logs")])
def test_json_says_what_logfmt_says(log, command, name):
    document = json.loads(log.kmq(*command.split(), "--json").stdout)
    assert list(document) == [name]
    lines = log.kmq(*command.split(), "--logfmt").stdout.splitlines()
    texts = [[f"{key}={value}" for key, value in row.items() if not key.endswith("est_s")] for row in document[name]]
    assert texts == [[field for field in line.split() if "est_s=" not in field] for line in lines]
    assert all(isinstance(value, int | float) for row in document[name] for value in list(row.values())[1:])


def test_a_topic_that_is_pending_has_no_seq_in_json(broker):
    broker.kmq("topics", "create", "orders")
    document = json.loads(broker.kmq("topics", "list", "--json").stdout)
    row = {"topic": "orders", "partition": 0, "messages": 0, "bytes": 0, "from_seq": None, "tier_bytes": 0}
    assert document == {"topics": [row]}


# --- help and completion ---------------------------------------------------------------------------------------------


def test_h_is_help_of_every_command():
    for path, _ in every_command():
        short, long = (CliRunner().invoke(app, [*path, option]) for option in ("-h", "--help"))
        assert short.exit_code == 0 and short.stdout == long.stdout, path


def test_a_mistyped_command_is_answered_with_the_right_one_and_2(broker):
    result = broker.kmq("statsu")
    assert result.returncode == USAGE and "Did you mean 'status'?" in result.stderr


def test_bash_completes_commands_and_options(broker):
    script = shell(broker, "kmq --show-completion; true").stdout
    assert "complete -o default -F _kmq_completion kmq" in script
    for words, completed in (
        ("kmq top", ["top", "topics"]),
        ("kmq topics cr", ["create"]),
        ("kmq log stat --js", ["--json"]),
    ):
        typed = f"COMP_WORDS=({words}) COMP_CWORD={len(words.split()) - 1}"
        complete = '_kmq_completion kmq; echo "${COMPREPLY[@]}"'
        result = shell(broker, f'eval "$(kmq --show-completion; true)"; {typed}; {complete}')
        assert result.stdout.split() == completed, result.stderr


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupted(process):
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert b"Traceback" not in said and b"Exception" not in said


def test_ctrl_c_while_a_command_is_still_being_imported_ends_it_with_130(broker):
    command = [sys.executable, "-X", "importtime", "-m", "kmq", "status"]
    # Through a pipe this narrow the command cannot be far ahead of us, however busy the machine is.
    with subprocess.Popen(
        command, env=broker.env, cwd=broker.root, stderr=subprocess.PIPE, pipesize=4096, bufsize=0
    ) as process:
        while not process.stderr.readline().endswith(b" typing\n"):
            assert process.poll() is None
        interrupted(process)


def test_ctrl_c_ends_a_command_whose_output_nobody_takes(log):
    reader, writer = os.pipe()
    with subprocess.Popen(
        ["kmq", "log", "cat", "append"], env=log.env, cwd=log.root, stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        log.wait(lambda: waiting_bytes(reader) > NEARLY_FULL, "a full pipe")
        interrupted(process)
    os.close(reader)
