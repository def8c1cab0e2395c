"""Check the machine that a broker runs on: Python, limits, shared memory, memory, clock, ports, disk and permissions.

    memory(settings)   → Check("memory", "ok", "…", "")

Invariant   Nothing is changed, and no directory is created, except that `doorbells` removes doorbells that no broker
            can use any more. A port is tried by binding to it, never by a connection. The file for measuring has no
            name, or is removed at once, and has at most MOST_SYNCS blocks. If a disk hangs, the check gives up after
            WAIT_S and leaves the child process that measures.
"""

import ctypes
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from kmq.broker import concerns
from kmq.broker.health import LIFELESS, state_of
from kmq.broker.ports import wrong_host
from kmq.broker.stats import REPLICA, StatsPage, peek
from kmq.broker.supervisor import is_data
from kmq.config.intakes import TLS, UDP
from kmq.config.settings import SHM, Settings
from kmq.config.values import FOREVER, GIB, MIB
from kmq.files import LEAST, OWN
from kmq.links import doorbell, layout
from kmq.links.layout import BLOCKS
from kmq.links.received import ring_bytes
from kmq.links.staging import area_bytes

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
LEVELS = (ERROR, WARNING, NOTE, OK)  # the most important first

_OLDEST_PYTHON = (3, 11)
_PROCESSES_BYTES = 192 * MIB  # used by four stages, the gateway and the supervisor besides the rings
_EARLIEST = 1_735_689_600  # 2025-01-01: no clock of a running broker is behind that
_STEADY_S = 0.3  # how long the clock is watched
_JUMP_S = 0.05  # more than a slewed clock can move in that time
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_FOREVER = 1 << 60  # a memory limit above this means no limit


class Check(NamedTuple):
    """The result of one check. `advice`: what to do; "" if nothing is to do."""

    name: str
    level: str
    text: str
    advice: str = ""


def size(nbytes: float) -> str:
    """Return a number of bytes for people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.1f} {unit}"
    return f"{nbytes:,.0f} B"


def python() -> Check:
    """Check the version of Python."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _OLDEST_PYTHON:
        return Check("python", ERROR, f"Python {version} is too old", "install Python 3.11 or newer")
    return Check("python", OK, f"Python {version}")


# --- limits ----------------------------------------------------------------------------------------------------------


def open_files(settings: Settings, pid: int = 0) -> Check:
    """Check the limit on open files: of ingress, if its pid is given and visible, else of this shell."""
    limit, whose = resource.getrlimit(resource.RLIMIT_NOFILE)[1], "this shell"
    try:
        with open(f"/proc/{pid}/limits", encoding="ascii") as file:
            row = next(line.split() for line in file if line.startswith("Max open files"))
        limit, whose = int(row[4]), "the running broker"
    except (OSError, ValueError, StopIteration):
        pass
    if limit == resource.RLIM_INFINITY:
        return Check("open files", OK, f"no limit in {whose}")
    wanted = settings.connections + OWN
    text = f"at most {limit:,} in {whose}"
    advice = "raise it: ulimit -n, or LimitNOFILE of the unit"
    if limit < LEAST:
        return Check("open files", ERROR, f"{text}; a stage needs {LEAST}", advice)
    if limit < wanted:
        text += f"; KMQ_CONNECTIONS={settings.connections} would need {wanted:,}, so fewer producers can connect"
        return Check("open files", WARNING, text, f"{advice}, or lower KMQ_CONNECTIONS")
    return Check("open files", OK, text)


def links_bytes(settings: Settings) -> int:
    """Return what the links of these settings take in shared memory."""
    rings = 2 * (BLOCKS + settings.ring_bytes) + 2 * area_bytes(settings.max_line)
    return rings + BLOCKS + ring_bytes(settings.max_line)


def shared_memory(settings: Settings, is_up: bool) -> Check:
    """Check that /dev/shm has room for the rings."""
    needed = links_bytes(settings)
    try:
        found = os.statvfs(SHM)
    except OSError as error:
        return Check("shared memory", ERROR, f"{SHM}: {error.strerror}", f"mount a tmpfs at {SHM}")
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{SHM} has {size(free)} free of {size(total)}; the links take {size(needed)}"
    advice = f"enlarge {SHM}, or lower RB_BYTES and KMQ_MAX_LINE"
    if not is_up and free < needed:
        return Check("shared memory", ERROR, text, advice)
    if free < (needed // 4 if is_up else 2 * needed):
        return Check("shared memory", WARNING, text, advice)
    if not os.access(SHM, os.W_OK | os.X_OK):
        return Check("shared memory", ERROR, f"{SHM} cannot be written by this user", "run as the broker's user")
    return Check("shared memory", OK, text)


def doorbells(settings: Settings, is_up: bool) -> Check:
    """Check that the kernel has semaphores for the doorbells. Remove doorbells of this instance that have no ring
    any more.
    """
    removed = layout.remove_left_bells(settings.instance)
    used, limit = doorbell.usage()
    needed = 0 if is_up else 2 * len(layout.RINGS)
    text = f"{used:,} of {limit:,} sets of semaphores are in use"
    if removed:
        text += f"; {removed} that nobody could use any more are removed"
    if used + needed > limit:
        return Check("doorbells", ERROR, f"{text}; the doorbells take {needed}", doorbell.advice())
    return Check("doorbells", OK, text)


def leftovers(settings: Settings, shm: str = SHM) -> Check:
    """Find shared memory of other instances whose processes have all ended."""
    try:
        names = sorted(os.listdir(shm))
    except OSError:
        names = []
    found, nbytes = [], 0
    for name in (name.removesuffix(".stats") for name in names if name.endswith(".stats")):
        rings = [each for each in (f"{name}.framed", f"{name}.durable", f"{name}.received") if each in names]
        if name != settings.instance and rings and not _is_alive(name, shm):
            found.append(name)
            nbytes += sum(_bytes_of(f"{shm}/{each}") for each in rings)
    if not found:
        return Check("leftovers", OK, "no shared memory of brokers that have ended")
    shown = ", ".join(found[:5]) + (" …" if len(found) > 5 else "")
    files = " ".join(f"{shm}/{name}.*" for name in found[:5])
    return Check(
        "leftovers",
        NOTE,
        f"{size(nbytes)} of shared memory belong to brokers that do not run: {shown}",
        f"start them again, which keeps their messages; or, if they are gone for good: rm {files}, and then"
        " KMQ_INSTANCE=<name> kmq doctor, which removes their doorbells",
    )


def _is_alive(instance: str, shm: str) -> bool:
    try:
        page = peek(instance, shm)
    except OSError:
        return True  # it belongs to another user, and is not judged here
    return page is None or any(state_of(name, row) not in LIFELESS for name, row in page.rows.items())


def _bytes_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def memory(settings: Settings, root: str = "/sys/fs/cgroup") -> Check:
    """Check the memory limit of the cgroup, or the machine's memory, against the rings: they count towards it."""
    limit, whose = _memory_limit(root), "the cgroup's limit"
    if limit is None:
        limit, whose = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the machine's memory"
    needed = links_bytes(settings)
    text = f"{whose} is {size(limit)}; the links take {size(needed)}, the processes about {size(_PROCESSES_BYTES)}"
    advice = "raise the limit, or lower RB_BYTES and KMQ_MAX_LINE"
    if limit < needed:
        return Check("memory", ERROR, text, advice)
    if limit < needed + _PROCESSES_BYTES:
        return Check("memory", WARNING, text, advice)
    return Check("memory", OK, text)


def _memory_limit(root: str) -> int | None:
    """Return the lowest memory limit of this process's cgroups; None if there is none."""
    limits = []
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            rows = [line.strip().split(":", 2) for line in file]
    except OSError:
        rows = []
    for _, controllers, path in (row for row in rows if len(row) == 3):
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (f"{root}/memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        parts = path.strip("/").split("/")
        for depth in range(len(parts) + 1):
            limits.append(_number(os.path.join(base, *parts[:depth], name)))
    return min((limit for limit in limits if limit is not None), default=None)


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            number = int(file.read())
    except (OSError, ValueError):  # "max": no limit
        return None
    return number if number < _FOREVER else None


# --- clock -----------------------------------------------------------------------------------------------------------


def clock(newest_s: float | None = None) -> Check:
    """Check the time of day. `newest_s`: age of the newest record by this clock; negative: it is in the future."""
    advice = "set the clock, and let chrony or systemd-timesyncd keep it; then see: kmq clock"
    if time.time() < _EARLIEST:
        return Check("clock", ERROR, f"the time of day is {time.strftime('%Y-%m-%d', time.gmtime())}", advice)
    if newest_s is not None and newest_s < -1:
        return Check("clock", WARNING, f"the newest record is {-newest_s:,.0f} s in the future", advice)
    before = _offset()
    time.sleep(_STEADY_S)
    moved = _offset() - before
    if abs(moved) > _JUMP_S:
        return Check("clock", WARNING, f"the time of day has just jumped by {moved:+.3f} s", advice)
    synced = _is_synced()
    if synced is None:
        return Check("clock", OK, "steady; whether it is synchronised is not known here")
    if not synced:
        text = "steady, but the kernel is not told that it is synchronised (NTP)"
        return Check("clock", NOTE, text, "let chrony or systemd-timesyncd keep it: limits by age depend on it")
    return Check("clock", OK, "steady and synchronised")


def _offset() -> float:
    """Return the time of day minus the monotonic clock, from the quickest of several readings."""
    looks = []
    for _ in range(10):
        begin, now, end = time.monotonic(), time.time(), time.monotonic()
        looks.append((end - begin, now - begin))
    return min(looks)[1]


def _is_synced() -> bool | None:
    buffer = ctypes.create_string_buffer(512)  # struct timex, all zero: it is only read
    try:
        state = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


# --- ports -----------------------------------------------------------------------------------------------------------


def ports(settings: Settings, page: StatsPage | None, has_gateway: bool) -> Iterator[Check]:
    """Check each port: it is free, or our own process listens there. `page`: None if the broker is down."""
    for process, name, host, number in _listeners(settings):
        if process == "gateway" and not has_gateway:
            continue
        row = page.rows[process] if page else None
        is_ours = row is not None and state_of(process, row) not in LIFELESS
        if is_ours:
            yield Check(f"port {number}", OK, f"{name}: {process} of this broker has it")
        elif number:
            yield _port(name, host, number)


def _listeners(settings: Settings) -> Iterator[tuple[str, str, str, int]]:
    plain, tls = settings.host, settings.tls_host
    yield "ingress", "KMQ_PORT", plain, settings.port
    yield "ingress", "KMQ_ACK_PORT", plain, settings.ack_port
    yield "gateway", "KMQ_EGRESS_PORT", plain, settings.egress_port
    yield "gateway", "KMQ_STATUS_PORT", plain, settings.status_port
    yield "gateway", "KMQ_HTTP_PORT", plain, settings.http_port
    yield "gateway", "KMQ_GRPC_PORT", plain, settings.grpc_port
    has_kafka = settings.has_kafka()
    if has_kafka:
        yield "gateway", "KMQ_KAFKA_PORT", plain, settings.kafka_number
    if settings.own_host:
        yield "gateway", "KMQ_METRICS_PORT", settings.own_host, settings.metrics_port
    if settings.shard:
        yield REPLICA, "KMQ_REPLICA_PORT", tls if settings.tls_cert else plain, settings.replica_port
    if settings.tls_cert:
        yield "ingress", "KMQ_TLS_PORT", tls, settings.tls_port
        yield "gateway", "KMQ_EGRESS_TLS_PORT", tls, settings.egress_tls_port
        yield "gateway", "KMQ_HTTPS_PORT", tls, settings.https_port
        yield "gateway", "KMQ_GRPCS_PORT", tls, settings.grpcs_port
        if has_kafka:
            yield "gateway", "KMQ_KAFKA_TLS_PORT", tls, settings.kafka_tls_port
    for intake in settings.intakes:
        if intake.kind != UDP:
            yield "ingress", "KMQ_INTAKES", tls if intake.kind == TLS else plain, intake.number


def _port(name: str, host: str, number: int) -> Check:
    title = f"port {number}"
    try:
        with socket.create_server((host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return Check(title, OK, f"{name}: free on {host}")
    except PermissionError:
        return Check(title, ERROR, f"{name}: this user may not open it", f"choose {name} above 1023, or run as root")
    except OSError as error:
        text = f"{name}: {host}:{number}: {os.strerror(error.errno) if error.errno else error}"
        if address := wrong_host(name, error):
            return Check(title, ERROR, text, f"correct {address}: this machine has no such address")
        return Check(title, ERROR, text, f"see who has it: ss -ltnp 'sport = :{number}'; or choose another {name}")


_CONNECT_S = 3.0


def advertised(settings: Settings, is_up: bool) -> Iterator[Check]:
    """Check that the addresses that Kafka clients are given can be reached, as seen from this machine."""
    name = "KMQ_KAFKA_ADVERTISE"
    for host, port in (settings.kafka_advertise or {}).values():
        where, advice = (
            f"{host}:{port}",
            f"correct {name}: clients connect there after they have asked where the broker is",
        )
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
            if is_up:
                socket.create_connection((host, port), _CONNECT_S).close()
        except socket.gaierror:
            yield Check(name, WARNING, f"{where}: {host} does not resolve on this machine", advice)
        except OSError as error:
            text = f"{where}: no connection from this machine ({error.strerror or error})"
            yield Check(name, WARNING, text, f"if clients elsewhere cannot connect either: {advice}")
        else:
            yield Check(name, OK, f"{where}: {'takes connections' if is_up else f'resolves to {found[0]}'}")


# --- disk ------------------------------------------------------------------------------------------------------------

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
        [sys.executable, "-m", "kmq.cli.machine", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        said, _ = child.communicate(timeout=WAIT_S)
        times: list[float] = json.loads(said)["seconds"]
    except subprocess.TimeoutExpired:
        child.kill()  # do not wait: a process that hangs in the kernel ends when the disk answers
        advice = f"look at the disk of {path}: {concerns.of_kernel()}, iostat"
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
    """Return the seconds of each sync of a nameless file in `path`, the shortest first."""
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
    """Check that this user can use the directories, and that other users cannot read secrets."""
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
