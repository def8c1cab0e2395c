"""Check the machine that a broker runs on: limits, shared memory, memory, clock, ports, Python.

Invariant   Nothing is made, and nothing is changed, except that `doorbells` removes what no broker can use any more. A
            port is tried by binding to it, never by a connection.
"""

import ctypes
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator

from kmq.broker.checks import ERROR, NOTE, OK, WARNING, Check, size
from kmq.broker.ports import wrong_host
from kmq.broker.readiness import LIFELESS, state_of
from kmq.broker.stats import StatsPage, peek
from kmq.config.settings import SHM, Settings
from kmq.config.values import MIB
from kmq.files import LEAST, OWN
from kmq.links import doorbell, layout
from kmq.links.layout import BLOCKS
from kmq.links.received import ring_bytes
from kmq.links.staging import area_bytes

_OLDEST_PYTHON = (3, 11)
_PROCESSES_BYTES = 192 * MIB  # what four stages, the gateway and the supervisor take beside the rings
_EARLIEST = 1_735_689_600  # 2025-01-01: no clock of a running broker is behind that
_STEADY_S = 0.3  # how long the clock is watched
_JUMP_S = 0.05  # more than a slewed clock moves in that time
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_FOREVER = 1 << 60  # a memory limit beyond this is none


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
    """Check that the kernel has semaphores for the doorbells. Remove those that no ring of this instance has any more."""
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
        return True  # another user's: not ours to judge
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
    """Return the time of day less the monotonic clock: of several looks the one that was least interrupted."""
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
    if settings.metrics_host:
        yield "gateway", "KMQ_METRICS_PORT", settings.metrics_host, settings.metrics_port
    if settings.tls_cert:
        yield "ingress", "KMQ_TLS_PORT", tls, settings.tls_port
        yield "gateway", "KMQ_EGRESS_TLS_PORT", tls, settings.egress_tls_port
        yield "gateway", "KMQ_HTTPS_PORT", tls, settings.https_port
        yield "gateway", "KMQ_GRPCS_PORT", tls, settings.grpcs_port


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
