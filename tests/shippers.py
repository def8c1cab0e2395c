"""Debian's rsyslog, syslog-ng and collectd: each a child in the foreground, with files of its own."""

import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import termios
from functools import cache
from pathlib import Path

import pytest
from waiting import PATIENCE_S, until

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
    "collectd": """
BaseDir "{root}"
PIDFile "{root}/pid"
PluginDir "{programs}/usr/lib/collectd"
TypesDB "{programs}/usr/share/collectd/types.db"
Hostname "h1"
LoadPlugin unixsock
<Plugin unixsock>
  SocketFile "{root}/log"
</Plugin>
Include "{root}/recipe.conf"
""",
}


@cache
def _unpacked() -> Path | str:
    """Return the directory under which all lie, or why there is none."""
    done = subprocess.run([ROOT / "scripts/shippers-setup"], capture_output=True, text=True, timeout=300)
    return done.stderr.strip()[-500:] if done.returncode else Path(done.stdout.strip())


def recipe(name: str, root: Path, host: str, port: int) -> str:
    """Return the first block of the shipper's section in docs/ship-logs.md, for an intake at this address."""
    page = (ROOT / "docs/ship-logs.md").read_text()
    found = re.search(rf"(?ms)^## {name}$.*?^```text\n(.*?)^```$", page)
    assert found, f"docs/ship-logs.md has no recipe for {name}"
    text = found[1].replace('"kmq" port', f'"{host}" port').replace("/var/lib/syslog-ng", str(root))
    assert text.count("5140") == 1
    return text.replace("5140", str(port))


class Shipper:
    """A daemon that takes lines at the socket `log` and sends them as its configuration says."""

    def __init__(self, name: str, root: Path, configuration: str) -> None:
        """Skip the test where there is none, and fail it in CI. `name`: rsyslog, syslog-ng or collectd."""
        found = _unpacked()
        if isinstance(found, str):
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{name} is missing: {found}")
        root.mkdir()
        self.root, self._programs = root, found
        (root / "recipe.conf").write_text(configuration)
        (root / "main.conf").write_text(_AROUND[name].format(root=root, programs=found).lstrip())
        self._command = {"rsyslog": self._rsyslog, "syslog-ng": self._syslog_ng, "collectd": self._collectd}[name]()
        # collectd answers each line; the others take datagrams, as at /dev/log.
        self._log = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if name == "collectd" else socket.SOCK_DGRAM)
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

    def _collectd(self) -> list[str]:
        return [str(self._programs / "usr/sbin/collectd"), "-f", "-C", "main.conf"]

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
        path = str(self.root / "log")
        until(lambda: not self._log.connect_ex(path), "its socket", self.said, process=self.process)

    def said(self) -> str:
        return (self.root / "said").read_text(errors="replace")

    def log(self, line: bytes) -> None:
        """Log a line as syslog(3) does; waits while the shipper reads none."""
        self._log.send(b"<13>Nov 27 10:00:00 app: " + line)

    def put_value(self, line: str) -> None:
        """Hand collectd a value in its own protocol."""
        self._log.sendall(line.encode() + b"\n")
        answer = self._log.recv(4096)
        assert answer.startswith(b"0 "), answer

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
