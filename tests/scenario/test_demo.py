"""`scripts/demo` as a person runs it: a broker of its own on free ports, real input, and what it prints."""

import bz2
import contextlib
import gzip
import json
import lzma
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from brokers import FREE_PORTS, environment, remove_shared_memory

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "scripts" / "demo")

AWKWARD = {
    "crlf.log": b"one\r\ntwo\r\n\r\nthree\r\n",
    "cr-inside.log": b"10%\r50%\r100%\ndone\rreally\n",
    "not-utf8.log": b"caf\xe9 \xff\xfe\xc3\x28\nplain\n",
    "tabs-and-bars.log": b"a\tb|c||d|\n|leading\n||||||\n!bang\n+plus\n-minus\n",
    "long.log": b"x" * 5000 + b"\n" + bytes(range(1, 10)) + b"y" * 70_000 + b"|\n",
    "nul.log": b"be\0fore\n\0\nafter\n",
    "no-newline.log": b"first\nlast without newline",
    "blank-lines.log": b"\n\n\nx\n\n",
    "empty.log": b"",
    "append.log": b"a name that is the broker's own\n",
    "dead.log": b"a name where dead letters go\n",
}


@pytest.fixture
def env(tmp_path):
    """The environment of a private broker; its shared memory is removed afterwards."""
    instance = f"demo{os.getpid()}"
    where = {"KMQ_DATA": tmp_path / "data", "KMQ_PIPES": tmp_path / "pipes"}
    yield environment(KMQ_INSTANCE=instance, **FREE_PORTS, **where)
    remove_shared_memory(instance)


def run(env, *inputs, cwd=ROOT):
    command = [DEMO, "--no-group", "--no-spark", *map(str, inputs)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=280)


def kmq(env, *arguments):
    command = [sys.executable, "-m", "kmq", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def write_awkward(directory):
    directory.mkdir()
    for name, content in AWKWARD.items():
        (directory / name).write_bytes(content)
    return directory


def table(stdout):
    """queue → (messages, bytes, first seq, last seq), as printed."""
    rows = re.findall(r"^(\S+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", stdout, re.M)
    return {name: tuple(int(n.replace(",", "")) for n in numbers) for name, *numbers in rows}


def payloads(data, topic):
    return [line.split(b"|", 5)[5] for line in (data / f"{topic}.log").read_bytes().split(b"\n")[:-1]]


def printed_commands(stdout):
    return [line.strip() for line in stdout.partition("look further:\n")[2].splitlines()]


@pytest.mark.java
def test_the_default_input_comes_out_as_it_went_in_and_is_audited_and_archived(env, tmp_path):
    """The last check must be able to fail: in the same session it is asked about one message more than was shipped."""
    lie = """
honest = demo.demo_spark.archive_new
def once_more(job, data, to, run_id, since, sent, out):
    good, last = honest(job, data, to, run_id, since, sent, out), max(sent)
    return good and not honest(job, data, to, run_id, since, sent | {last: sent[last] + 1}, out)
demo.demo_spark.archive_new = once_more
"""
    done = run_changed(env, lie, spark=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT as many as in the queues: " in done.stdout
    assert "gaps 0, duplicates 0" in done.stdout
    assert "as sent, byte for byte" in done.stdout
    shipped = sum(messages for messages, *_ in table(done.stdout).values())
    assert shipped >= 5000
    wal = (tmp_path / "data" / "append.log").read_bytes()
    assert wal.count(b"\n") == shipped
    assert not json.loads(kmq(env, "status", "--json").stdout)["ready"], "it stops the broker that it started"
    assert f"audit: {shipped:,} records, all good" in done.stdout
    assert f"archive    {shipped:,} rows as Parquet" in done.stdout
    assert "as many as in the queues, each source" in done.stdout
    assert (tmp_path / "data-demo" / "audit.html").read_text().startswith("<!doctype html>")


def test_awkward_files_come_out_byte_for_byte_and_a_second_run_counts_only_its_own(env, tmp_path):
    inputs = write_awkward(tmp_path / "in")
    lines = {name: content.removesuffix(b"\n").split(b"\n") if content else [] for name, content in AWKWARD.items()}
    total = sum(map(len, lines.values()))
    for number in range(2):
        done = run(env, inputs)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"WAL        seq {number * total + 1} to {(number + 1) * total}, {total} records" in done.stdout
        assert {name: row[0] for name, row in table(done.stdout).items()} == {
            topic_of(name): len(rows) for name, rows in lines.items() if rows
        }
    data = tmp_path / "data"
    for name, rows in lines.items():
        if rows and name != "nul.log":  # those are base64, as the line format asks for
            assert payloads(data, topic_of(name)) == rows * 2, name
    assert not (data / "empty.log").exists()
    assert not (data / "dead.log").exists()


def topic_of(name):
    stem = name.removesuffix(".log")
    return {"append": "log-append", "dead": "in-dead"}.get(stem, stem)


def test_the_three_printed_commands_work_when_pasted(env, tmp_path):
    relative = {**env, "KMQ_DATA": "./data", "KMQ_PIPES": "./pipes"}
    log = tmp_path / "app.log"
    log.write_bytes(b"2026-01-02 03:04:05 WARN disk | is almost full\n2026-01-02 03:04:06 ERROR it is full\n")
    done = run(relative, log, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    commands = printed_commands(done.stdout)
    assert [command.split()[0] for command in commands] == ["tail", "awk", "cat"]
    tail, awk, cat = (
        subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, check=True) for command in commands
    )
    assert not tail.stderr + awk.stderr + cat.stderr
    assert tail.stdout == (tmp_path / "data" / "app.log").read_bytes()
    assert sorted(awk.stdout.splitlines()) == [b"1 app.error", b"1 app.warn"]
    assert cat.stdout == log.read_bytes()


def test_a_line_that_is_cut_is_counted_and_never_called_as_sent(env, tmp_path):
    (tmp_path / "big.log").write_bytes(b"z" * 3_000_000 + b"\n")
    done = run(env, tmp_path / "big.log")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "big: 1 of 1 lines is longer than KMQ_MAX_LINE (1 MiB): kept in dead.log, cut" in done.stdout
    assert "as sent, byte for byte: 0 of 1 source(s)" in done.stdout
    assert "does NOT hold" not in done.stdout, "what is kept is the beginning of the line"
    done = run({**env, "KMQ_MAX_LINE": "3 MiB", "RB_BYTES": "9 MiB"}, tmp_path / "big.log")
    assert done.returncode == 0, "the limit was raised as the output said: " + done.stdout + done.stderr
    assert "as sent, byte for byte: 1 of 1 source(s)" in done.stdout


def test_the_other_lines_of_a_source_with_a_long_one_are_checked_and_shipped(env, tmp_path):
    log = tmp_path / "big.log"
    log.write_bytes(b"short\n" + b"z" * 9000 + b"\n" + b"short too\n")
    (tmp_path / "small.log").write_bytes(b"small\n")
    done = run({**env, "KMQ_MAX_LINE": "8 KiB"}, log, tmp_path / "small.log")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "big: 1 of 3 lines is longer than KMQ_MAX_LINE (8 KiB): kept in dead.log, cut" in done.stdout
    assert "as sent, byte for byte: 1 of 2 source(s)" in done.stdout
    assert "NOT as sent" not in done.stdout
    assert {name: row[0] for name, row in table(done.stdout).items()} == {"big": 2, "small": 1, "dead": 1}


def test_a_lost_dead_letter_is_found(env, tmp_path):
    (tmp_path / "big.log").write_bytes(b"z" * 9000 + b"\n")
    lie = "honest = demo.note; demo.note = lambda found, run, line: honest(found, run, line[:-2] + b'y\\n')"
    done = run_changed({**env, "KMQ_MAX_LINE": "8 KiB"}, lie, tmp_path / "big.log")
    assert done.returncode == 1
    assert "dead.log does NOT hold the beginning of each" in done.stdout


def test_packed_files_are_shipped_unpacked_and_what_cannot_be_read_is_named(env, tmp_path):
    lines = b"one\ntwo\n" * 500
    packed = {"a.log.gz": gzip.compress(lines), "b.xz": lzma.compress(lines), "c.bz2": bz2.compress(lines)}
    left_out = {
        "cut.gz": (gzip.compress(os.urandom(4000))[:2000], "damaged gzip"),
        "d.zst": (b"\x28\xb5\x2f\xfd and more", "packed with zstd, which the demo does not unpack"),
        "e.zip": (b"PK\x03\x04 and more", "packed with zip, which the demo does not unpack"),
    }
    inputs = tmp_path / "in"
    inputs.mkdir()
    for name, content in (packed | {name: content for name, (content, _) in left_out.items()}).items():
        (inputs / name).write_bytes(content)
    (inputs / "f.bin").write_bytes(b"\0\1\2\nplain\n")
    done = run(env, inputs)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, packing in (("a.log.gz", "gzip"), ("b.xz", "xz"), ("c.bz2", "bzip2")):
        assert f"{inputs / name} (1,000, unpacked from {packing})" in done.stdout
    assert payloads(tmp_path / "data", "a-log-gz") == lines.splitlines()
    assert f"{inputs / 'f.bin'} (2, binary: 1 with a NUL, stored as base64)" in done.stdout
    for name, (_, reason) in left_out.items():
        assert f"skipped {inputs / name}: {reason}" in done.stdout
        alone = run(env, inputs / name)
        assert alone.returncode == 78
        assert reason in alone.stderr and "Traceback" not in alone.stderr


def run_changed(env, change, *inputs, group=False, spark=False):
    """The demo with a line of Python run between its import and its start."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import demo; from pathlib import Path\n{change}\n"
    )
    command = [
        sys.executable,
        "-c",
        code + "sys.exit(demo.main())",
        *([] if group else ["--no-group"]),
        *([] if spark else ["--no-spark"]),
        *map(str, inputs),
    ]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)


def test_a_machine_with_few_logs_ships_live_process_events_too(env, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "small.log").write_bytes(b"one\ntwo\n")
    (tmp_path / "logs" / "old.log.gz").write_bytes(b"\x1f\x8b\x08")
    (tmp_path / "logs" / "link.log").symlink_to("small.log")
    done = run_changed(env, f"demo.machine_logs.__globals__['LOGS'] = Path({str(tmp_path / 'logs')!r})")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 compressed" in done.stdout
    assert {name: row[0] for name, row in table(done.stdout).items()} == {"small": 2, "process": 4998}
    ours = [event for event in payloads(tmp_path / "data", "process") if b" pid=%d " % os.getpid() in event]
    assert ours, "this very process is among them"


def test_a_changed_byte_in_a_queue_is_found(env, tmp_path):
    """The check must be able to fail: the WAL is compared while a queue lies."""
    (tmp_path / "app.log").write_bytes(b"hay\nneedle\nhay\n")
    lie = """
honest = demo.queued_lines
demo.queued_lines = lambda path, start: (line.replace(b"needle", b"noodle") for line in honest(path, start))
"""
    done = run_changed(env, lie, tmp_path / "app.log")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gaps 1" in done.stdout
    assert "NOT as sent: app" in done.stdout


def test_without_java_a_group_reads_all_though_a_member_is_killed_and_spark_is_left_out(env, tmp_path):
    """A machine without Java: none on the path, no JAVA_HOME, none where Debian has them."""
    (tmp_path / "app.log").write_bytes(b"hello\n" * 300)
    (tmp_path / "other.log").write_bytes(b"hello\n" * 90)
    (tmp_path / "bin").mkdir()
    env = {name: value for name, value in env.items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path / "bin")}
    lie = "from kmq.spark import sessions; sessions._JVMS = Path('/nonexistent')"
    done = run_changed(env, lie, tmp_path / "app.log", tmp_path / "other.log", group=True, spark=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as sent, byte for byte: 2 of 2 source(s)" in done.stdout
    found = {name: (int(read), int(again)) for name, read, again in re.findall(GROUP_ROW, done.stdout, re.M)}
    again = {name: again for name, (_, again) in found.items()}
    assert found == {"app": (300, again["app"]), "other": (90, again["other"])}
    assert sum(again.values()) > 0, "the killed member had read a batch that it could not commit"
    assert re.search(r"^killed     consumer-[123], before it could commit its last ", done.stdout, re.M)
    assert f"group      read 390, everything that was shipped; redelivered {sum(again.values())}; lag 0;" in done.stdout
    assert len(re.findall("Traceback", done.stderr)) == 0, done.stderr
    first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    for line in (first, last):
        assert line.startswith("spark ") and "skipped" in line
        assert "none was found; apt-get install openjdk-17-jre-headless" in line


GROUP_ROW = r"^(\S+) +(\d+) +(\d+) +0$"  # topic, read, redelivered; lag 0


def test_what_a_group_reads_again_is_counted_apart_and_what_it_misses_is_missed():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import demo_group
    finally:
        sys.path.pop(0)
    reading = demo_group.Reading()
    assert [reading.add([("a", 0, 7, 9), ("b", 0, 0, 0)]), reading.add([("a", 0, 8, 11)])] == [4, 4]
    assert reading.add([("a", 1, 8, 9)]) == 2
    assert (dict(reading.read), dict(reading.again)) == ({"a": 7, "b": 1}, {"a": 2, "b": 0})
    assert reading.count == 8


def test_a_broker_that_is_up_is_used_and_left_up(env, tmp_path):
    assert kmq(env, "up").returncode == 0
    try:
        (tmp_path / "app.log").write_bytes(b"hello\n")
        done = run(env, tmp_path / "app.log")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "was up" in done.stdout
        assert kmq(env, "status", "--logfmt").returncode == 0, "it is still up"
    finally:
        assert kmq(env, "down").returncode == 0


def test_it_works_after_a_crash_that_left_fifos_and_shared_memory(env, tmp_path):
    (tmp_path / "app.log").write_bytes(b"hello\n")
    assert kmq(env, "up").returncode == 0
    kill_pod(env)
    assert list(Path("/dev/shm").glob(f"{env['KMQ_INSTANCE']}.*")), "the crash left its rings"
    done = run(env, tmp_path / "app.log")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run({**env, "KMQ_DATA": str(tmp_path / "other-data")}, tmp_path / "app.log")
    assert done.returncode == 0, "another directory behind the same instance name: " + done.stdout + done.stderr


def kill_pod(env):
    """SIGKILL supervisor, stages and gateway, and wait until they are gone."""
    import psutil

    owner = (Path(env["KMQ_PIPES"]) / "supervisor.owner").read_text()
    supervisor = psutil.Process(int(re.search(r"pid=(\d+)", owner)[1]))
    pod = [supervisor, *supervisor.children()]
    assert len(pod) == 6
    for process in pod:
        with contextlib.suppress(psutil.NoSuchProcess):  # the gateway ends with its supervisor
            process.kill()
    _, alive = psutil.wait_procs(pod, timeout=60)
    assert not alive


def test_a_taken_port_is_named_without_a_traceback(env, tmp_path):
    (tmp_path / "app.log").write_bytes(b"hello\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run({**env, "KMQ_PORT": str(port)}, tmp_path / "app.log")
    assert done.returncode == 78
    assert f"KMQ_PORT={port}: cannot listen" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_second_broker_shares_with_the_first_is_named(env, tmp_path):
    (tmp_path / "app.log").write_bytes(b"hello\n")
    own = {"KMQ_INSTANCE": f"demo_second{os.getpid()}", "KMQ_DATA": f"{tmp_path}/2", "KMQ_PIPES": f"{tmp_path}/pipes2"}
    assert kmq(env, "up").returncode == 0
    try:
        for shared, said in (
            ("KMQ_INSTANCE", "is in use by another data directory"),
            ("KMQ_DATA", "pid="),
            ("KMQ_PIPES", "serves another broker"),
        ):
            done = run({**env, **own, shared: env[shared]}, tmp_path / "app.log")
            assert done.returncode == 69, done.stdout + done.stderr
            assert said in done.stderr, done.stdout + done.stderr
            assert "Traceback" not in done.stderr
        assert kmq(env, "status", "--logfmt").returncode == 0, "the first one goes on"
    finally:
        assert kmq(env, "down").returncode == 0
        remove_shared_memory(own["KMQ_INSTANCE"])


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        (["missing.log"], {}, "INPUT 'missing.log': not a readable file or directory"),
        ([os.devnull], {}, "not a readable file or directory"),
        ([], {"KMQ_PROT": "1"}, "unknown setting KMQ_PROT; did you mean KMQ_PORT?"),
        ([], {"KMQ_DATA": "/proc/no"}, "KMQ_DATA='/proc/no': cannot be written"),
    ],
)
def test_a_mistake_is_named_in_one_line(env, arguments, settings, said):
    done = run({**env, **settings}, *arguments)
    assert done.returncode == 78
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_names_with_spaces_or_given_twice_make_topics_and_commands_that_still_work(env, tmp_path):
    home = tmp_path / "my data"
    home.mkdir()
    (tmp_path / "the app.log").write_bytes(b"hello\nhello\n")
    same = [tmp_path / directory / "app.log" for directory in ("one", "two")]
    for path in same:
        path.parent.mkdir()
        path.write_bytes(path.parent.name.encode() + b"\n")
    done = run({**env, "KMQ_DATA": str(home)}, tmp_path / "the app.log", *same)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [payloads(home, topic) for topic in ("app", "two-app")] == [[b"one"], [b"two"]]
    tail = printed_commands(done.stdout)[0]
    assert Path(shlex.split(tail)[-1]) == home / "the-app.log"
    assert subprocess.run(tail, shell=True, capture_output=True, check=True).stdout.endswith(b"|hello\n")
