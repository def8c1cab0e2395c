"""The errors of KMQ, and the exit code of each, which says if a restart can help.

    code  name          restart helps?  meaning
    0     EXIT_OK       -               stopped as asked, drained
    1     EXIT_FAILED   no              a command ran, and its result is negative
    2     (Typer's)     no              the command line is wrong
    65    EXIT_CORRUPT  no              what is on disk or in shared memory contradicts itself
    69    EXIT_BUSY     no              another process owns what this one needs
    73    EXIT_EXISTS   no              a directory that has to be empty has something
    75    EXIT_RETRY    yes             input or output failed; nothing unsynced was acknowledged
    78    EXIT_CONFIG   no              a setting, a path or a name is wrong
    130   EXIT_SIGINT   -               a command was interrupted with Ctrl-C

The numbers follow sysexits.h where it defines one. A supervisor that knows them, as kmq/broker/supervisor.py does,
restarts a process after 75 and after a signal, and stops after any other code.
"""

import errno
import os

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CORRUPT = 65
EXIT_BUSY = 69
EXIT_EXISTS = 73
EXIT_RETRY = 75
EXIT_CONFIG = 78
EXIT_SIGINT = 130

NO_RESTART = frozenset({EXIT_CORRUPT, EXIT_BUSY, EXIT_CONFIG})  # a restart fails again

EXIT_NAMES = {
    EXIT_OK: "ok",
    EXIT_FAILED: "failed",
    EXIT_CORRUPT: "corrupt",
    EXIT_BUSY: "busy",
    EXIT_EXISTS: "exists",
    EXIT_RETRY: "retry",
    EXIT_CONFIG: "config",
    EXIT_SIGINT: "interrupted",
}


class KmqError(Exception):
    """Base of every error that KMQ raises on purpose; the process ends with `exit_code`."""

    exit_code = EXIT_FAILED


class ConfigError(KmqError):
    """A setting, path or name is wrong. Names the field and the limit."""

    exit_code = EXIT_CONFIG


class BusyError(KmqError):
    """Another process owns the ring, the directory or the FIFO. Names the holder."""

    exit_code = EXIT_BUSY


class DataExistsError(KmqError):
    """A directory that has to be empty has something; nothing was changed."""

    exit_code = EXIT_EXISTS


class CorruptError(KmqError):
    """Files and rings contradict each other. Names the file and the byte; nothing was changed."""

    exit_code = EXIT_CORRUPT


class RetryError(KmqError):
    """Input or output failed; a new process with new descriptors may succeed."""

    exit_code = EXIT_RETRY


class Stopped(KmqError):
    """Ends a wait: the stage was told to stop, and its time to drain is over."""

    exit_code = EXIT_OK


# The path of a file, link or directory of KMQ holds something of another kind: no restart changes that.
WRONG_KIND = frozenset({errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP})


def of_os_error(err: OSError) -> KmqError:
    """Return the KmqError for a failed system call; it says if a restart can help."""
    if err.errno in WRONG_KIND and err.filename is not None:
        path = err.filename if isinstance(err.filename, str) else repr(err.filename)
        return ConfigError(f"{path}: {err.strerror}, where KMQ keeps something else; move it away")
    return RetryError(str(err))


def exit_code_of(err: BaseException) -> int:
    """Return the exit code of a process that this error ends."""
    error = of_os_error(err) if isinstance(err, OSError) else err
    return error.exit_code if isinstance(error, KmqError) else EXIT_FAILED


_QUOTED = 200  # characters: a token or a table of offsets is long


def quotation(text: str, part: str | None = None, *, is_path: bool = False) -> str:
    """Return how an error quotes the beginning of `text`, and its wrong `part`. A text with a login is not quoted.

    Any part of such a text may belong to a password, even one that looks like another address. A directory may have an
    @ in its name: a path is taken for an address with a login only if it has a colon, too.
    """
    if "@" in text and (not is_path or ":" in text):
        return "… (not shown because of a login)"
    quoted = repr(text[:_QUOTED])
    return quoted if part is None else f"{quoted}: {part!r}"


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this installation. KMQ is in no package index, so its name finds nothing."""
    import json
    import shlex
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    source = "<the checkout or the wheel of KMQ>"
    editable = ""
    try:
        origin = json.loads(metadata.distribution("kmq").read_text("direct_url.json") or "{}")  # pip writes it
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    path = unquote(urlsplit(origin.get("url", "")).path)
    if os.path.exists(path):
        source = path
        editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{source}[{extra}]')}"
