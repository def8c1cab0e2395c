"""`kmq bundle`: everything that a bug report needs, in one file, without payloads and without secrets.

    bundle.tar.gz: MANIFEST, status.json, log/kmq.log (its end), …

Invariant   No payload is ever read: of the data directory only names and sizes are listed, and topic.toml files read.
            Every text passes through `clean`, so a secret is not in the bundle wherever it was typed or logged.
            A piece that fails, hangs or is too large is named in the manifest with the reason, and does not stop the
            others. Each piece has a deadline and a maximum size.
"""

import http.client
import io
import json
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, TextIO

import typer

from kmq import __version__
from kmq.broker.stats import peek
from kmq.cli import config
from kmq.cli.config import HIDDEN, clean
from kmq.cli.output import counting, examples, seconds
from kmq.config.settings import Settings, load
from kmq.config.values import MIB
from kmq.errors import ConfigError, KmqError

MOST_BYTES = MIB  # of one file in the bundle
_MOST_PARTS = 64  # files; together with MOST_BYTES this bounds the bundle
_MODE = 0o600
_COMMAND_S, _METRICS_S, _LISTING_S = 60.0, 10.0, 10.0
_MOST_FILES = 20_000  # in the listing
_PACKAGES = ("aiohttp", "grpcio", "posix_ipc", "prometheus_client", "pyspark", "rich", "sysv_ipc", "typer")
_LOG = re.compile(r"kmq\.log(\.\d+)?")  # logs of the supervisor; <topic>.log in a data directory has payloads
_OOM = ("out of memory", "oom-kill", "oom_kill", "killed process", "oom_reaper")
# Messages about damage quote bytes from the damaged place, which may be part of a payload. The quote ends with the
# line, except in JSON.
_SNIPPET = re.compile(
    r"^(?!\{)(.*?(?:not an index line|not a range of seqs|damaged at byte \d+|a record of|holds):? b?\\?)['\"].*$", re.M
)
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")  # of the store of KMQ_TIER
_WORDS = frozenset(("true", "false", "null", "none", "never", "always"))


def bundle(
    file: Annotated[
        str, typer.Argument(help="Where to write it; -: stdout; default: kmq-bundle-<time>.tar.gz in this directory.")
    ] = "",
    with_verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check the files on disk, too (kmq verify).")
    ] = True,
    verify_for: Annotated[str, typer.Option("--verify-for", help="How long that may take, e.g. 10m.")] = "60s",
) -> None:
    """Pack what a bug report needs into one tar.gz: status, findings, settings, log tails, numbers, sizes.

    It holds no payloads, tokens or keys. Its MANIFEST says what is in it, what
    is not, and why. It works with the broker down, or hanging, and changes nothing.
    In a pod: kubectl exec <pod> -c router -- kmq bundle - > bundle.tar.gz
    """
    limit_s = seconds("--verify-for", verify_for)
    verify_s = limit_s if with_verify else 0.0
    if file == "-":
        if sys.stdout.isatty():
            raise ConfigError("a bundle is no text for a terminal; write it to a file: kmq bundle - > bundle.tar.gz")
        packed = collect(verify_s)
        size = sys.stdout.buffer.write(packed.archive())
        sys.stdout.flush()
        _report(packed, "standard output", size, sys.stderr)
        return
    path = Path(file or time.strftime("kmq-bundle-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime()))
    out = _create(path)
    try:
        with open(out, "wb") as target:
            packed = collect(verify_s)
            size = target.write(packed.archive())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    _report(packed, str(path), size, sys.stdout)


def _report(packed: "Bundle", where: str, size: int, stream: TextIO) -> None:
    print(f"{where}: {len(packed.files)} files, {size:,} bytes", file=stream)
    for name, why in packed.left.items():
        print(f"left out, or cut: {name}: {why}", file=stream)


def _create(path: Path) -> int:
    """Create a file and return its descriptor. Raises ConfigError if it exists, or cannot be created."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    except OSError as error:
        advice = "choose another file, or write to standard output: kmq bundle - > bundle.tar.gz"
        raise ConfigError(f"{path}: {error.strerror}; {advice}") from error


def collect(verify_s: float) -> "Bundle":
    """Return the bundle. `verify_s`: how long verify may take; 0: it is left out."""
    shown = config.collect()
    made = Bundle([*shown.secrets, *filter(None, map(os.environ.get, _CREDENTIALS))])
    made.add("config.json", json.dumps(shown.as_json(), indent=1) + "\n", "kmq config show --json")
    made.attempt("versions.json", versions, "versions of KMQ, Python, system and packages")
    with counting("asking the broker"):
        _of_commands(made)
    try:
        settings = load()
    except ConfigError as error:
        made.leave("log/, metrics.txt, data", f"the settings are wrong: {error}")
    else:
        with counting("collecting logs and numbers"):
            _of_directories(made, settings)
    if verify_s:
        with counting("checking the files on disk"):
            kmq(made, "verify.txt", "kmq verify", "verify", deadline_s=verify_s)
    else:
        made.leave("verify.txt", "--no-verify")
    return made


def _of_commands(made: "Bundle") -> None:
    kmq(made, "status.json", "kmq status --json, with findings", "status", "--json")
    kmq(made, "status.txt", "kmq status", "status")
    kmq(made, "doctor.json", "kmq doctor --json", "doctor", "--json")
    kmq(made, "log-stat.json", "kmq log stat --json", "log", "stat", "--json")
    kmq(made, "topics.json", "kmq topics list --json", "topics", "list", "--all", "--json")
    oom(made)


def _of_directories(made: "Bundle", settings: Settings) -> None:
    logs(made, settings.pipes)
    made.attempt("stats-page.json", lambda: stats_page(settings), "the words of the stats page")
    made.attempt("metrics.txt", lambda: metrics(settings), "/metrics of the gateway")
    if "metrics.txt" in made.files:
        kmq(made, "groups.json", "kmq groups list --json", "groups", "list", "--json")
    else:
        made.leave("groups.json", "not asked for, because the gateway has given no metrics")
    if settings.tier:
        kmq(made, "tier.json", "kmq tier status --json", "tier", "status", "--json")
    declarations(made, settings.data)
    listing(made, "data.txt", settings.data)
    listing(made, "pipes.txt", settings.pipes)


# --- the archive -----------------------------------------------------------------------------------------------------


class Bundle:
    """Files for the archive, and names of what was left out, with the reasons."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """`secrets`: texts that must be in no file."""
        self._secrets = sorted(
            {text for text in secrets if not text.isdigit() and text.lower() not in _WORDS}, key=len, reverse=True
        )
        self.files: dict[str, tuple[bytes, str]] = {}  # name → (content, what it is)
        self.left: dict[str, str] = {}  # name → why it is missing or incomplete

    def add(self, name: str, text: str | bytes, what: str) -> None:
        """Add a file, cleaned of secrets. If it is too long, add only its end."""
        if len(self.files) >= _MOST_PARTS:
            self.leave(name, f"a bundle has at most {_MOST_PARTS} files")
            return
        whole = text.decode(errors="replace") if isinstance(text, bytes) else text
        content = clean(_SNIPPET.sub(rf"\1{HIDDEN}", whole), self._secrets).encode(errors="backslashreplace")
        if len(content) > MOST_BYTES:
            self.leave(name, f"only its last {MOST_BYTES:,} of {len(content):,} bytes are here")
            content = content[-MOST_BYTES:]
        self.files[name] = (content, what)

    def leave(self, name: str, why: object) -> None:
        """Note that something is not in the bundle."""
        reasons = [self.left[name]] if name in self.left else []
        self.left[name] = "; ".join([*reasons, clean(" ".join(str(why).split()), self._secrets)])

    def attempt(self, name: str, collect: Callable[[], str | bytes], what: str) -> None:
        """Add what `collect` returns. A failure is noted."""
        try:
            self.add(name, collect(), what)
        except (OSError, KmqError, ValueError, http.client.HTTPException) as error:
            self.leave(name, _reason(error))

    def manifest(self) -> str:
        """Return the text of MANIFEST."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        lines = [f"KMQ {__version__}, bundle of {now}. It holds no payloads, tokens or keys.", "", "in this bundle:"]
        lines += [f"  {name:24} {len(content):>9,} bytes  {what}" for name, (content, what) in self.files.items()]
        lines += ["", "left out, or cut:"]
        lines += [f"  {name:24} {why}" for name, why in self.left.items()] or ["  nothing"]
        return "\n".join(lines) + "\n"

    def archive(self) -> bytes:
        """Return the whole as tar.gz."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            contents = {name: content for name, (content, _) in self.files.items()}
            for name, content in {"MANIFEST": self.manifest().encode(), **contents}.items():
                entry = tarfile.TarInfo(f"kmq-bundle/{name}")
                entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
                tar.addfile(entry, io.BytesIO(content))
        return packed.getvalue()


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer within its time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# --- commands --------------------------------------------------------------------------------------------------------


def run(bundle: Bundle, name: str, what: str, command: list[str], deadline_s: float = _COMMAND_S) -> None:
    """Add what a command prints; one that does not end in time is left, and what it has printed is kept."""
    with _spool() as out:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            bundle.leave(name, f"{command[0]}: {_reason(error)}")
            return
        try:
            code = child.wait(deadline_s)
            if code > 1:
                bundle.leave(name, f"{what} ended with exit code {code}; what it printed is here")
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # do not wait: a process that hangs in the kernel may stay
            if not isinstance(error, subprocess.TimeoutExpired):
                raise  # Ctrl-C
            bundle.leave(name, f"had not ended after {deadline_s:g} s; only what it had printed by then is here")
        nbytes = out.seek(0, os.SEEK_END)
        out.seek(max(0, nbytes - MOST_BYTES))
        if nbytes > MOST_BYTES:
            bundle.leave(name, f"only the last {MOST_BYTES:,} of {nbytes:,} bytes are here")
        if nbytes:
            bundle.add(name, out.read(MOST_BYTES), what)
        elif name not in bundle.left:
            bundle.leave(name, "nothing was printed")


def _spool() -> IO[bytes]:
    """Return a nameless file for a command's output."""
    try:
        return tempfile.TemporaryFile()
    except FileNotFoundError:  # no directory for temporary files, as in a pod whose root is read-only
        return open(os.memfd_create("kmq-bundle"), "w+b")


def kmq(bundle: Bundle, name: str, what: str, *arguments: str, deadline_s: float = _COMMAND_S) -> None:
    """Add what a command of KMQ prints, run as a process of its own."""
    run(bundle, name, what, [sys.executable, "-m", "kmq", *arguments], deadline_s)


def oom(bundle: Bundle) -> None:
    """Add what the kernel says about processes that it killed for lack of memory."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=_METRICS_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        bundle.leave("dmesg-oom.txt", f"dmesg: {_reason(error)}")
        return
    if done.returncode:
        bundle.leave("dmesg-oom.txt", f"dmesg: {done.stderr.decode(errors='replace')}")
        return
    every = done.stdout.decode(errors="replace").splitlines()
    lines = [line for line in every if any(word in line.lower() for word in _OOM)]
    bundle.add("dmesg-oom.txt", "\n".join(lines[-200:]) + "\n", f"{len(lines)} lines of dmesg on lack of memory")


# --- files -----------------------------------------------------------------------------------------------------------


def tail(path: str) -> bytes:
    """Return the last MOST_BYTES of a regular file; a symlink is not followed, because it may lead to a queue."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError("is no regular file")
    with open(fd, "rb") as file:
        nbytes = os.fstat(fd).st_size
        file.seek(max(0, nbytes - MOST_BYTES))
        text = file.read(MOST_BYTES)
        return text.partition(b"\n")[2] if nbytes > MOST_BYTES else text  # its first line may be cut within a secret


def logs(bundle: Bundle, pipes: str) -> None:
    """Add the ends of the logs that the supervisor writes."""
    try:
        names = sorted(name for name in os.listdir(pipes) if _LOG.fullmatch(name))
    except OSError as error:
        bundle.leave("log/", f"{pipes}: {_reason(error)}")
        return
    if not names:
        bundle.leave("log/", f"{pipes} has no log: in a pod each container has its own (kubectl logs)")
    for name in names[:8]:
        path = f"{pipes}/{name}"
        bundle.attempt(f"log/{name}", lambda path=path: tail(path), "the end of the log")  # type: ignore[misc]


def declarations(bundle: Bundle, data: str) -> None:
    """Add the declarations of all topics, topic by topic."""
    directory, texts = f"{data}/topics", list[str]()
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        bundle.leave("topics.toml.txt", f"{directory}: {_reason(error)}")
        return
    for name in names:
        path = f"{directory}/{name}/topic.toml"
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                texts.append(f"# {name}\n{file.read(8192)}\n")
        except (FileNotFoundError, NotADirectoryError):  # a lock file, or a request for a change
            continue
        except OSError as error:
            bundle.leave(path, _reason(error))
    bundle.add("topics.toml.txt", "".join(texts) or "# no topic is declared\n", "topic.toml of each topic")


def listing(bundle: Bundle, name: str, directory: str) -> None:
    """Add names, sizes, modes and times of the files in a directory, without opening them."""
    rows, deadline = list[str](), time.monotonic() + _LISTING_S
    if not os.path.isdir(directory):
        bundle.leave(name, f"{directory} is no directory")
        return
    for path in _files(bundle, directory):
        if len(rows) >= _MOST_FILES or time.monotonic() > deadline:
            bundle.leave(name, f"only the first {len(rows):,} files are listed")
            break
        try:
            found = os.lstat(path)
        except OSError:
            continue
        changed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.st_mtime))
        shown = os.path.relpath(path, directory)
        rows.append(f"{found.st_mode:06o} {found.st_uid:6} {found.st_size:14} {changed} {shown!a}")
    bundle.add(name, "\n".join(rows) + "\n", "mode, owner, size, time and name of each file; no content")


def _files(bundle: Bundle, directory: str) -> Iterator[str]:
    def note(error: OSError) -> None:
        bundle.leave(str(error.filename), f"cannot be listed: {_reason(error)}")

    for place, directories, names in os.walk(directory, onerror=note):
        directories.sort()
        yield from (f"{place}/{name}" for name in sorted(names))


# --- numbers ---------------------------------------------------------------------------------------------------------


def stats_page(settings: Settings) -> str:
    """Return the numbers of the stats page as JSON. Raises ConfigError without a page."""
    page = peek(settings.instance)
    if page is None:
        raise ConfigError("there is no stats page: no broker of this instance has run since the machine started")
    numbers = {name: {field: getattr(row, field) for field in row.fields} for name, row in page.rows.items()}
    return json.dumps({"identity": page.identity(), "now_ns": time.monotonic_ns(), "rows": numbers}, indent=1)


def metrics(settings: Settings) -> bytes:
    """Return the metrics of the gateway. Raises OSError or ConfigError if it does not serve them in time."""
    from kmq.access import tokens
    from kmq.client.lines import read_port

    token = tokens.local(settings)
    name, host, number = ("metrics", settings.own_host, settings.metrics_port)
    if not host:
        name, host, number = "http", settings.host, settings.http_port
    connection = http.client.HTTPConnection(host, read_port(settings, name, number), timeout=_METRICS_S)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ConfigError(f"the gateway answers with status {response.status}")
        return _read(response)
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse) -> bytes:
    """Return the body. Raises TimeoutError if it arrives too slowly, even if data keeps arriving."""
    deadline, parts = time.monotonic() + _METRICS_S, list[bytes]()
    while (part := response.read1(1 << 16)) and sum(map(len, parts)) < 8 * MOST_BYTES:
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def versions() -> str:
    """Return versions of KMQ, Python, system and packages."""
    rows = {"kmq": __version__, "python": sys.version.replace("\n", " "), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            rows[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            rows[name] = "not installed"
    return json.dumps(rows, indent=1) + "\n"


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.command(epilog=examples("kmq bundle", "kmq bundle report.tar.gz --no-verify", "kmq bundle - > report.tar.gz"))(
        bundle
    )
