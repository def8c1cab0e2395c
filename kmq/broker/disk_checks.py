"""Check the disk of a broker: its kind, free space, the time of a sync, and who may read and write the directories.

Invariant   A directory is never made. The file that is measured with has no name, or one that is removed at once, and
            holds at most MOST_SYNCS blocks. A disk that hangs is given up after WAIT_S, by leaving the child process
            that measures.
"""

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from kmq.broker import findings
from kmq.broker.checks import ERROR, NOTE, OK, WARNING, Check, size
from kmq.broker.supervision import is_data
from kmq.config.settings import Settings
from kmq.config.values import FOREVER, GIB

MOST_SYNCS, SPAN_S = 100, 1.5  # the measurement ends at whichever comes first
WAIT_S = 30.0
_BLOCK = b"\0" * 4096
_SLOW_S, _VERY_SLOW_S = 0.05, 0.5  # median of a sync
_SHORT, _SHARE = GIB, 0.05  # free space below both is called short
_VOLATILE = {
    "tmpfs": "is lost at a restart of the machine",
    "ramfs": "is lost at a restart of the machine",
    "overlay": "is lost with the container",
    "aufs": "is lost with the container",
}
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "fuse.sshfs", "fuse.s3fs", "lustre")


def existing(path: str) -> str:
    """Return `path`, or the nearest directory above it that exists."""
    path = os.path.abspath(path)
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def kind(settings: Settings, mounts: str = "/proc/self/mounts") -> Check:
    """Check the file system of the data directory: it must keep what was synced."""
    path = existing(settings.data)
    found = _file_system(os.path.realpath(path), mounts)
    text = f"{path} is on {found or 'a file system of unknown kind'}"
    if found in _VOLATILE:
        return Check("disk", WARNING, f"{text}: what is stored there {_VOLATILE[found]}", "set KMQ_DATA to a real disk")
    if found in _REMOTE:
        advice = "set KMQ_DATA to a disk of this machine, or be sure that a sync there is one"
        return Check("disk", WARNING, f"{text}, over a network: locks and syncs may mean little", advice)
    return Check("disk", OK, text)


def _file_system(path: str, mounts: str) -> str:
    best, found = "", ""
    try:
        with open(mounts, encoding="utf-8", errors="replace") as file:
            rows = [line.split() for line in file]
    except OSError:
        return ""
    for row in (row for row in rows if len(row) > 2):
        place = row[1].replace("\\040", " ")
        is_above = path == place or path.startswith(place.rstrip("/") + "/")
        if is_above and len(place) >= len(best):
            best, found = place, row[2]
    return found


def space(settings: Settings) -> Check:
    """Check bytes and inodes of the data directory's disk."""
    path = existing(settings.data)
    found = os.statvfs(path)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{size(free)} free of {size(total)}"
    advice = "make room, or bound what is kept by KMQ_RETENTION_BYTES or KMQ_RETENTION_AGE (kmq log stat shows it)"
    if found.f_files:
        text += f", {found.f_favail:,} inodes free of {found.f_files:,}"
    if not free or (found.f_files and not found.f_favail):
        return Check("space", ERROR, text, advice)
    is_short = free < min(_SHORT, _SHARE * total) or (found.f_files and found.f_favail < _SHARE * found.f_files / 5)
    return Check("space", WARNING, text, advice) if is_short else Check("space", OK, text)


# --- speed -----------------------------------------------------------------------------------------------------------


def speed(settings: Settings) -> Check:
    """Measure how long fdatasync takes in the data directory: an acknowledged message waits for one."""
    path, name = existing(settings.data), "sync"
    if not os.access(path, os.W_OK | os.X_OK):
        return Check(name, NOTE, f"not measured: {path} cannot be written by this user")
    child = subprocess.Popen(
        [sys.executable, "-m", "kmq.broker.disk_checks", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        said, _ = child.communicate(timeout=WAIT_S)
        times: list[float] = json.loads(said)["seconds"]
    except subprocess.TimeoutExpired:
        child.kill()  # not waited for: what hangs in the kernel ends when the disk answers
        advice = f"look at the disk of {path}: {findings.of_kernel()}, iostat"
        return Check(name, ERROR, f"a sync in {path} has not returned within {WAIT_S:.0f} s", advice)
    except (ValueError, KeyError):
        text = f"a file in {path} cannot be written and synced: {' '.join(said.split()) or 'no reason is known'}"
        return Check(name, WARNING, text, f"look at the disk of {path}")
    median, worst = times[len(times) // 2], times[-1]
    text = f"fdatasync of 4 KiB in {path}: median {_ms(median)}, longest {_ms(worst)} of {len(times)}"
    if settings.fsync == FOREVER:
        return Check(name, NOTE, f"{text}; KMQ_FSYNC=never: nothing is synced", "a power cut loses what is recent")
    if median >= _VERY_SLOW_S or worst >= 4 * _VERY_SLOW_S:
        return Check(name, WARNING, f"{text}: very slow", "use a faster disk, or one that other programs leave alone")
    if median >= _SLOW_S:
        return Check(name, NOTE, f"{text}: slow", "producers wait that long for each reply; a faster disk helps")
    return Check(name, OK, text)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def measure(path: str) -> list[float]:
    """Return the seconds of each sync, the shortest first, of a file without a name in `path`."""
    times: list[float] = []
    with tempfile.TemporaryFile(prefix=".kmq-doctor-", dir=path) as file:
        deadline = time.monotonic() + SPAN_S
        while len(times) < MOST_SYNCS and time.monotonic() < deadline:
            os.write(file.fileno(), _BLOCK)
            begin = time.monotonic()
            os.fdatasync(file.fileno())
            times.append(time.monotonic() - begin)
    return sorted(times)


# --- permissions -----------------------------------------------------------------------------------------------------


def permissions(settings: Settings) -> Iterator[Check]:
    """Check that the directories can be used by this user, and that secrets are read by nobody else."""
    for name, path in (("KMQ_DATA", settings.data), ("KMQ_PIPES", settings.pipes)):
        yield _directory(name, path, name == "KMQ_DATA" and not is_data(path))
    secrets = [("KMQ_TOKENS", settings.tokens), ("KMQ_TLS_KEY", settings.tls_key)]
    secrets.append(("local token", f"{settings.pipes}/local.token"))
    for name, path in secrets:
        if path and (name != "local token" or os.path.exists(path)):
            yield _secret(name, path)
    for name, path in (("KMQ_TLS_CERT", settings.tls_cert), ("KMQ_TLS_CLIENT_CA", settings.tls_client_ca)):
        if path and not os.access(path, os.R_OK):
            yield Check(name, ERROR, "the file is missing, or not readable", f"make it readable, or correct {name}")


def _directory(name: str, path: str, is_new: bool) -> Check:
    shown = os.path.abspath(path)
    if os.path.exists(path) and not os.path.isdir(path):
        return Check(name, ERROR, f"{shown} is no directory", "move it away, or choose another place")
    if not os.path.isdir(path):
        above = existing(path)
        if not os.access(above, os.W_OK | os.X_OK):
            return Check(name, ERROR, f"{shown} cannot be made: no right to write {above}", f"correct {name}")
        return Check(name, OK, f"{shown} is not there yet; kmq up makes it")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        advice = "run as the broker's user, or correct the owner"
        return Check(name, ERROR, f"{shown} cannot be read and written by this user", advice)
    found = os.stat(path)
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        return Check(name, WARNING, f"{shown} can be written by everybody", f"chmod o-w {shown}")
    if found.st_uid != os.geteuid():
        return Check(name, NOTE, f"{shown} belongs to uid {found.st_uid}, this is uid {os.geteuid()}")
    return Check(name, OK, f"{shown} {'holds no data yet' if is_new else 'can be read and written'}")


def _secret(name: str, path: str) -> Check:
    """Check a file with a secret. Its path is not shown: it may be the secret itself, typed into the wrong place."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return Check(name, ERROR, f"its file: {error.strerror}", f"make it, or correct {name}")
    if not os.access(path, os.R_OK):
        return Check(name, ERROR, "its file is not readable by this user", "run as the broker's user, or correct it")
    if mode & stat.S_IROTH:
        return Check(name, WARNING, f"its file is readable by everybody (mode {mode & 0o777:o})", "chmod o-r it")
    return Check(name, OK, "its file is readable, and not by everybody")


if __name__ == "__main__":
    try:
        print(json.dumps({"seconds": measure(sys.argv[1])}))
    except OSError as error:
        print(error.strerror)
