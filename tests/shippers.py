"""Debian's rsyslog and syslog-ng, each with its recipe of docs/ship-logs.md: a child in the foreground, with files of its own."""

import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import termios
import time
from functools import cache
from pathlib import Path

import pytest
from brokers import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("rsyslog", "syslog-ng")
# What a distribution has around a recipe: where programs log to, and where the daemon keeps its state.
_AROUND = {
    "rsyslog": """
global(workDirectory="{root}")
module(load="imuxsock" SysSock.Use="off")
input(type="imuxsock" Socket="{root}/log")
include(file="{root}/recipe.conf")
""",
    "syslog-ng": """
@version: 3.38
source s_src {{ unix-dgram("{root}/log"); }};
@include "{root}/recipe.conf"
""",
}


@cache
def _unpacked() -> Path | str:
    """Return the directory under which both lie, or why there is none."""
    done = subprocess.run([ROOT / "scripts/shippers-setup"], capture_output=True, text=True, timeout=300)
    return done.stderr.strip()[-500:] if done.returncode else Path(done.stdout.strip())


def recipe(name: str) -> str:
    """Return the first block of the shipper's section."""
    page = (ROOT / "docs/ship-logs.md").read_text()
    found = re.search(rf"(?ms)^## {name}$.*?^```text\n(.*?)^```$", page)
    assert found, f"docs/ship-logs.md has no recipe for {name}"
    return found[1]


class Shipper:
    """One of NAMES. It takes lines at a socket as /dev/log is one, and sends them to an intake."""

    def __init__(self, name: str, root: Path, host: str, port: int) -> None:
        """Skip the test where there is none, and fail it in CI."""
        found = _unpacked()
        if isinstance(found, str):
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{name} is missing: {found}")
        root.mkdir()
        self.root, self._programs = root, found
        text = recipe(name).replace('"kmq" port', f'"{host}" port').replace("/var/lib/syslog-ng", str(root))
        assert text.count("5140") == 1
        (root / "recipe.conf").write_text(text.replace("5140", str(port)))
        (root / "main.conf").write_text(_AROUND[name].format(root=root).lstrip())
        self._command = self._rsyslog() if name == "rsyslog" else self._syslog_ng()
        self._log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._log.settimeout(PATIENCE_S)
        self.start()

    def _rsyslog(self) -> list[str]:
        modules = next(self._programs.glob("usr/lib/*/rsyslog"))
        return [*(str(self._programs / "usr/sbin/rsyslogd"), "-n", "-f", "main.conf"), "-i", "pid", "-M", str(modules)]

    def _syslog_ng(self) -> list[str]:
        modules = next(self._programs.glob("usr/lib/syslog-ng/*/"))
        files = ["--cfgfile=main.conf", "--persist-file=persist", "--pidfile=pid", "--control=control"]
        program = str(self._programs / "usr/sbin/syslog-ng")
        return [program, "--foreground", "--no-caps", "--stderr", f"--module-path={modules}", *files]

    def start(self) -> None:
        """Start it; returns when it takes lines."""
        libraries = {str(path.parent) for path in self._programs.rglob("*.so*")}
        with (self.root / "said").open("ab") as said:
            self.process = subprocess.Popen(
                self._command,
                cwd=self.root,
                env=os.environ | {"LD_LIBRARY_PATH": ":".join(sorted(libraries))},
                stdout=said,
                stderr=said,
            )
        deadline = time.monotonic() + PATIENCE_S
        while self._log.connect_ex(str(self.root / "log")):
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def said(self) -> str:
        return (self.root / "said").read_text(errors="replace")

    def log(self, line: bytes) -> None:
        """Log a line as syslog(3) does; waits while the shipper reads none."""
        self._log.send(b"<13>Nov 27 10:00:00 app: " + line)

    def has_taken_all(self) -> bool:
        """Return True if it has read every line that was logged."""
        (unread,) = struct.unpack("i", fcntl.ioctl(self._log, termios.TIOCOUTQ, bytes(4)))
        return not unread

    def end(self) -> None:
        """End it in order."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self._log.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
