"""`kmq up --foreground` on a terminal: however it is told to stop, what producers have sent is stored first."""

import contextlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

LINES = 100_000  # more than the FIFO takes: the rest waits in the producer's socket


class Terminal:
    """A terminal in which `kmq up --foreground` runs as a shell would run it. What it shows goes to the log of the broker."""

    def __init__(self, broker):
        self.broker = broker
        self.keyboard, inside = pty.openpty()
        broker.pipes.mkdir()  # before the broker does
        command = ["setsid", "--ctty", "kmq", "up", "--foreground", "--no-gateway"]
        self.process = subprocess.Popen(
            command, env=broker.env, cwd=broker.root, stdin=inside, stdout=inside, stderr=inside
        )
        os.close(inside)
        self._log = (broker.pipes / "kmq.log").open("wb", buffering=0)
        self._is_open = True
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        with self._log, contextlib.suppress(OSError):  # the last process of the terminal has gone
            while self._is_open:
                if select.select([self.keyboard], [], [], 0.05)[0]:
                    self._log.write(os.read(self.keyboard, 4096))

    def press_ctrl_c(self):
        os.write(self.keyboard, b"\x03")

    def hang_up(self):
        """As when its window is closed."""
        if self._is_open:
            self._is_open = False
            self._reader.join()
            os.close(self.keyboard)

    def say_sigterm(self):
        """As `kmq down` does."""
        self.process.terminate()

    def wait_for(self, event, count=1):
        self.broker.wait(lambda: self.broker.log().count(f" event={event} ") >= count, f"{count} x {event}")


@pytest.fixture
def terminal(broker):
    made = Terminal(broker)
    try:
        made.wait_for("ready", 4)
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        made.hang_up()


def send_past_a_stopped_framer(broker):
    """Send plain lines that wait in the FIFO and before it, where only a drain can save them. Returns the framer's pid."""
    framer = broker.pids()["framer"]
    os.kill(framer, signal.SIGSTOP)
    port = int((broker.pipes / "ingress.port").read_text())
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"".join(b"test.a|0|%d|%b\n" % (n, b"x" * 20) for n in range(LINES)))
    return framer


def is_pending(signal_number, pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"ShdPnd:\s*(\w+)", status)[1], 16) >> (signal_number - 1) & 1


STOPS = {
    "ctrl-c": [Terminal.press_ctrl_c],
    "hangup": [Terminal.hang_up],
    "sigterm": [Terminal.say_sigterm],
    "sigterm-twice": [Terminal.say_sigterm, Terminal.say_sigterm],  # one who says `kmq down` again
}


@pytest.mark.parametrize("stop", STOPS)
def test_what_waits_in_the_links_is_stored_before_the_end(broker, terminal, stop):
    framer = send_past_a_stopped_framer(broker)
    for act in STOPS[stop]:
        act(terminal)
        broker.wait(lambda: is_pending(signal.SIGTERM, framer), "the framer is told to stop")
        broker.wait(lambda: not is_pending(signal.SIGTERM, terminal.process.pid), "the supervisor has heard it")
    broker.wait(lambda: broker.status()["ingress"]["state"] == "draining", "ingress draining")
    time.sleep(0.5)  # longer than ingress waits for producers that may send more
    os.kill(framer, signal.SIGCONT)
    assert terminal.process.wait(60) == 0, broker.log()
    assert len(broker.wal()) == len(broker.lines("test")) == LINES
    assert broker.processes() == []


def test_a_second_ctrl_c_ends_the_stages_at_once(broker, terminal):
    """Also one that would not drain before its time is over."""
    os.kill(broker.pids()["router"], signal.SIGSTOP)
    broker.send_lines([b"test.a|0|1|x"])
    terminal.press_ctrl_c()
    terminal.wait_for("stopping")
    terminal.press_ctrl_c()
    assert terminal.process.wait(60) == 1, broker.log()
    assert 'event=stage_killed name=router reason="Ctrl-C a second time"' in broker.log()
    assert broker.processes() == []


def test_stages_go_on_when_the_supervisor_is_killed(broker, terminal):
    terminal.process.kill()
    terminal.hang_up()
    broker.send_lines([b"test.a|0|1|x"])
    broker.wait_routed(1)
    broker.down()
    assert broker.processes() == []
