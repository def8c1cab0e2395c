"""`kmq produce`, and lines by hand, while the broker accepts nothing, or not all: what the user is told."""

import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from line_client import LineClient
from waiting import until

from kmq.message.text import decode_payload

RETRY, INTERRUPTED = 75, 130
MANY = b"x" * 1000 + b"\n"
ENOUGH = 20_000  # more than sockets, FIFO and rings hold


class Produce:
    """A `kmq produce` that runs; what it says is in `said`, as soon as it says it."""

    def __init__(self, broker, *arguments, stdin=b"", **settings):
        env = broker.env | {name: str(value) for name, value in settings.items()}
        self.broker, self.said = broker, ""
        self.process = subprocess.Popen(
            ["kmq", "produce", *arguments],
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
            env=env,
            cwd=broker.root,
        )
        self._threads = [threading.Thread(target=self._feed, args=[stdin]), threading.Thread(target=self._read)]
        for thread in self._threads:
            thread.start()

    def _feed(self, data):
        try:
            with self.process.stdin as pipe:
                pipe.write(data)
        except BrokenPipeError:
            pass

    def _read(self):
        for line in self.process.stderr:
            self.said += line.decode()

    def wait_said(self, words):
        until(lambda: words in self.said, words, lambda: self.said, process=self.process)

    def end(self):
        """Wait for it; its exit code."""
        printed = self.process.stdout.read().decode()
        for thread in self._threads:
            thread.join()
        self.process.stdout.close()
        self.process.stderr.close()
        self.printed = printed
        return self.process.wait(60)


@pytest.fixture
def produce(broker):
    """A function that starts a `kmq produce` at this broker, which is up."""
    broker.up()
    running = []

    def start(*arguments, **options):
        running.append(Produce(broker, *arguments, **options))
        return running[-1]

    yield start
    for each in running:
        each.process.kill()
        each.process.wait()


@contextlib.contextmanager
def stopped(broker, stage):
    pid = broker.pids()[stage]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def interrupt(*running):
    """Ctrl-C, now that each waits and has said so."""
    for sent in running:
        sent.wait_said("waiting: ")
        sent.process.send_signal(signal.SIGINT)
    assert [sent.end() for sent in running] == [INTERRUPTED] * len(running)
    assert not [sent.said for sent in running if "Traceback" in sent.said or "accepts messages again" in sent.said]


@pytest.mark.parametrize(
    ("stage", "arguments", "count"), [("ingress", [], 1), ("router", ["--acks"], ENOUGH)], ids=["plain", "acks"]
)
def test_produce_says_what_it_waits_for_and_when_it_goes_on(broker, produce, stage, arguments, count):
    with stopped(broker, stage):
        broker.wait(lambda: broker.status()[stage]["state"] == "silent", f"{stage} silent")
        sent = produce("test.a", *arguments, stdin=MANY * count)
        sent.wait_said(f"kmq: waiting: the broker accepts nothing: silent: {stage} has given no sign of life for ")
    assert sent.end() == 0, sent.said
    assert str(count) in sent.printed and sent.said.count("waiting:") == 1
    assert re.search(r"kmq: the broker accepts messages again, after \d+ s\n$", sent.said)
    broker.wait_routed(count)


@pytest.mark.parametrize("with_tokens", [False, True])
def test_produce_says_why_the_broker_refuses_messages(broker, produce, with_tokens):
    broker.down()
    if with_tokens:
        broker.env["KMQ_TOKENS"] = str(broker.root / "tokens")
        broker.kmq("token", "new", "orders")
    assert broker.kmq("up", "--no-gateway", KMQ_DATA_QUOTA=1 << 20).returncode == 1  # too small for any message
    running = [produce("test.a", *how, "-m", "x") for how in ([], ["--acks"])]
    interrupt(*running)
    for sent in running:
        assert "accepts nothing: quota: KMQ_DATA_QUOTA is reached" in sent.said


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "kmq-test", path], capture_output=True).returncode:
        pytest.skip("no mount here (needs root)")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.root
def test_produce_names_the_full_disk(small_disk, new_broker):
    broker = new_broker(small_disk / "data")
    broker.gateway = False
    broker.up()
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while ballast.write(bytes(1 << 16)):
            pass
    sent = Produce(broker, "test.a", "-m", "x")
    interrupt(sent)
    assert "accepts nothing: disk_full: the disk has no room" in sent.said


def test_produce_to_a_broker_elsewhere_says_that_it_does_not_answer(broker):
    """Without a stats page: all that is seen is a listener that accepts nothing."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        sent = Produce(broker, "test.a", "-m", "x", KMQ_PORT=port)
        interrupt(sent)
    assert (
        f"waiting: the broker accepts nothing: 127.0.0.1:{port} does not answer:"
        " the disk there may be full, or a stage stopped; see kmq status there\n"
    ) in sent.said


@pytest.mark.parametrize("greeting", [b"", b"!ok max_line=1048576\n"], ids=["at once", "greeted"])
@pytest.mark.parametrize("name", [["--acks"], ["--producer", "imp"]], ids=["acks", "named"])
def test_a_peer_that_never_ends_a_line_is_left_and_named(broker, greeting, name):
    taken = []  # bytes, of each connection

    def flood():
        with contextlib.suppress(OSError):
            while True:
                sock, _ = peer.accept()
                taken.append(0)
                with sock, contextlib.suppress(OSError):
                    taken[-1] += sock.send(greeting or b"x")
                    while True:
                        taken[-1] += sock.send(b"x" * (1 << 16))

    with socket.create_server(("127.0.0.1", 0)) as peer:
        thread = threading.Thread(target=flood)
        thread.start()
        sent = Produce(broker, "test.a", *name, "--timeout", "4", "-m", "x", KMQ_PORT=peer.getsockname()[1])
        assert sent.end() == RETRY
        peer.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(taken) > 1 and max(taken) < 32 << 20, (taken, sent.said)
    assert "bytes without a newline" in sent.said


def test_produce_gives_up_after_its_timeout_and_says_what_was_handed_over(broker, produce):
    with stopped(broker, "ingress"):
        plain, acked = (produce("test.a", *how, "--timeout", "1", stdin=MANY * ENOUGH) for how in ([], ["--acks"]))
        assert (plain.end(), acked.end()) == (RETRY, RETRY)
    assert re.search(
        r"^kmq: the broker accepted nothing for \d+ s: .* handed over, .*; \d+ not sent$", plain.said, re.M
    )
    words = r"^kmq: timed out waiting for .*: not connected .*; stored 0, last seq 0; \d+ without a reply"
    assert re.search(words, acked.said, re.M)
    assert "Traceback" not in plain.said + acked.said and "accepts messages again" not in plain.said + acked.said


def test_ctrl_c_ends_a_waiting_produce_with_130_and_a_count(broker, produce):
    with stopped(broker, "ingress"):
        plain, acked = (produce("test.a", *how, stdin=MANY * ENOUGH) for how in ([], ["--acks"]))
        interrupt(plain, acked)
    assert re.search(r"kmq: interrupted: \d+ handed over, which nothing confirms; \d+ not sent\n$", plain.said)
    assert re.search(
        r"kmq: interrupted: stored 0, last seq 0; \d+ without a reply, which may or may not be stored\n$", acked.said
    )


def test_produce_sends_what_comes_slowly_at_once(broker):
    """`tail -F … | kmq produce …`: a line is not kept back until many have come."""
    broker.up()
    reader, writer = os.pipe()
    with subprocess.Popen(["kmq", "produce", "test.a"], stdin=reader, env=broker.env, cwd=broker.root) as process:
        os.close(reader)
        for n in (1, 2):
            os.write(writer, b"slow\n")
            broker.wait_routed(n)
        os.close(writer)
        assert process.wait(60) == 0


def test_produce_on_a_terminal_says_that_it_reads_from_it(broker):
    broker.up()
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        ["kmq", "produce", "test.a"], stdin=terminal, stdout=terminal, stderr=terminal, env=broker.env, cwd=broker.root
    )
    os.close(terminal)
    shown = ""
    while "Ctrl-D\r\n" not in shown:
        shown += os.read(controller, 4096).decode()
    os.write(controller, b"typed\n")
    broker.wait_routed(1)
    os.write(controller, b"\x04")
    while "sent 1" not in shown:
        shown += os.read(controller, 4096).decode()
    assert process.wait(60) == 0
    os.close(controller)
    assert shown.startswith("kmq: reading messages from the terminal, one per line; end with Ctrl-D\r\n")
    assert "sending" not in shown
    assert broker.lines("test")[0].endswith(b"|typed")


def values(broker, topic):
    """The values of a topic's messages, in order, of one partition; None: a tombstone."""
    fields = (line.split(b"|", 5) for line in broker.lines(topic))
    return [decode_payload(id, payload) for *_, id, payload in fields]


@pytest.mark.parametrize("acks", [[], ["--acks"]], ids=["plain", "acks"])
def test_a_blank_line_is_an_empty_value_and_only_tombstone_is_null(broker, acks):
    broker.up()
    for stdin, *more in (("Ada\n\n",), ("", "-m", ""), ("", "--tombstone")):
        done = broker.kmq("produce", "users", "--key", "u7", "--header", "a=b", *acks, *more, text=stdin)
        assert done.returncode == 0, done.stderr
    broker.wait_routed(4)
    assert values(broker, "users") == [b"Ada", b"", b"", None]


def test_the_encoding_of_stdin_is_judged_before_anything_is_sent(broker):
    broker.up()
    for codec in ("utf-16", "utf-16-be", "utf-32"):
        mark = b"" if codec != "utf-16-be" else b"\xfe\xff"
        done = subprocess.run(
            ["kmq", "produce", "t"],
            input=mark + "a\nb\n".encode(codec),
            env=broker.env,
            cwd=broker.root,
            capture_output=True,
        )
        assert done.returncode == 78 and b"iconv -f UTF-16 -t UTF-8" in done.stderr, done
    for text, said in (
        (b"\xef\xbb\xbfa\nb\n", b"begins with a byte order mark"),
        ("a line of text\n".encode("utf-16-le"), b"looks like UTF-16"),
        (b"plain, with one NUL \0\n", b""),
    ):
        done = subprocess.run(["kmq", "produce", "t"], input=text, env=broker.env, cwd=broker.root, capture_output=True)
        assert done.returncode == 0 and said in done.stderr and bool(said) == bool(done.stderr), done
    broker.wait(lambda: len(broker.lines("t")) == 5, "what was sent")
    assert values(broker, "t")[:2] == [b"\xef\xbb\xbfa", b"b"]


def test_the_topic_of_lines_that_are_no_messages_is_named_to_its_producer(broker):
    broker.up()
    done = broker.kmq("produce", "dead.letter_1", "-m", "hello")
    assert (done.returncode, done.stdout) == (0, "sent 1\n")
    assert "topic dead is where the broker keeps lines that are no messages" in done.stderr


LONG = 256 << 20


@pytest.mark.parametrize("acks", [[], ["--acks"], ["--producer", "imp"]], ids=["plain", "acks", "named"])
def test_of_a_line_over_the_limit_only_its_beginning_is_kept_in_memory(broker, acks):
    broker.gateway = False
    broker.env["KMQ_MAX_LINE"] = "100000"
    broker.up()
    command = ["kmq", "produce", "app", *acks]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=broker.env, cwd=broker.root, **pipes) as process:
        process.stdin.write(b"before\n")
        for _ in range(LONG >> 20):
            process.stdin.write(b"y" * (1 << 20))
        process.stdin.flush()  # all but what the pipe holds was read
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        process.stdin.write(b"\nafter\n")
        said = process.communicate()[1].decode()
    assert int(peak[1]) < (LONG >> 10) // 2, f"{peak[0]}: {said}"
    assert process.returncode == 1 and "line 2 has 268,435,456 bytes, and the limit is 100,000 (KMQ_MAX_LINE)" in said
    broker.wait_routed(2 if acks else 3)
    assert values(broker, "app") == [b"before", b"after"]
    if not acks:
        [letter] = broker.lines("dead")
        assert re.search(rb";reason=too_long;len=268435\d{3}\|app\|[\d.]+\|\|y{99000}", letter)


# --- by hand ---------------------------------------------------------------------------------------------------------


def by_hand(broker, text):
    """Send text without a newline at its end, and no more; return what ingress replies until it closes."""
    with LineClient(int((broker.pipes / "ingress.port").read_text())) as client:
        client.send_raw(text)
        client.end()
        return client.rest().decode().splitlines()


@pytest.mark.parametrize("hello", ["!hello acks=1", "!hello acks=1 producer=till-7", "!hello acks=1 window=w"])
def test_the_unfinished_last_line_of_an_acknowledged_connection_is_refused(broker, hello):
    broker.up()
    lines = "test.a|0|1|whole\ntest.a|0|2|whole\n"
    replies = by_hand(broker, f"{hello}\n{lines}test.a|0|3|not whole".encode())
    assert replies[0].startswith("!ok ") and replies[-2:-1] == ["!ack 2 2"]
    assert replies[-1].split()[:3] == ["!err", "3", "no_newline"]
    broker.wait(lambda: len(broker.lines("test")) == 2, "the whole lines are in their queue")
    assert [line.rpartition(b"|")[2] for line in broker.lines("test")] == [b"whole", b"whole"]
    assert broker.lines("dead") == []


def test_the_unfinished_last_line_of_a_producer_without_replies_is_a_dead_letter(broker):
    broker.up()
    assert len(by_hand(broker, b"!hello acks=0 producer=till-7\ntest.a|0|1|whole\ntest.a|0|2|not whole")) == 1
    broker.wait(lambda: broker.lines("dead"), "the dead letter")
    assert b"reason=no_newline;len=20|test.a|0|2|not whole" in broker.lines("dead")[0]
    assert [line.rpartition(b"|")[2] for line in broker.lines("test")] == [b"whole"]


def test_an_unfinished_hello_is_refused(broker):
    broker.up()
    assert by_hand(broker, b"!hello acks=1")[0].startswith("!err 0 bad_hello ")
