"""Log lines: `ts=… level=info stage=framer event=seq_resume seq_resume=500`, on stderr; or the same as JSON.

One line is one `write`, so lines of several processes that share a terminal never mix.

Rotation    Where stderr is a file kmq.log, such as `kmq up` makes in KMQ_PIPES, the process that writes a line beyond
            KMQ_LOG_BYTES renames it to kmq.log.1, and so on, under a lock of the directory. Each of the others goes on
            in the new file with its next line: it sees that the name of its own has changed. No line is lost or written
            twice.
"""

import fcntl
import os
import re
import time

QUOTE_IF = frozenset(' "=\n\r\t\\')


def _value(value: object) -> str:
    text = str(value)
    if text and not QUOTE_IF.intersection(text) and text.isprintable():
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in escaped) + '"'


def pairs(**fields: object) -> str:
    """Return `key=value` pairs; a value is quoted if a space or a control character would break it."""
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


LEVELS = ("info", "warn", "error")
FILE = "kmq.log"
FILE_MODE = 0o640  # the user and the group of the broker, as for its FIFOs
_OF_FILE = re.compile(rf"(.*/{re.escape(FILE)})(\.\d+)?( \(deleted\))?")
_form, _least, _most_bytes, _files = "logfmt", 0, 0, 0  # before the settings are read


def obey(form: str, level: str, most_bytes: int, files: int) -> None:
    """Write the lines of this process from now on as these settings say (KMQ_LOG_…)."""
    global _form, _least, _most_bytes, _files
    _form, _least, _most_bytes, _files = form, LEVELS.index(level), most_bytes, files


def _format(fields: dict[str, object]) -> str:
    if _form == "logfmt":
        return pairs(**fields)
    import json  # most brokers never need it

    return json.dumps(fields, ensure_ascii=False, default=str)


def _renew() -> None:
    """Go on in a new file if stderr is the log and is full, or another process has begun a new one."""
    found = _OF_FILE.fullmatch(os.readlink("/proc/self/fd/2"))
    if found is None or (not (found[2] or found[3]) and os.fstat(2).st_size < _most_bytes):
        return
    path = found[1]
    lock = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = [path, *(f"{path}.{number}" for number in range(1, _files + 1))]
        if os.path.exists(path) and os.stat(path).st_size >= _most_bytes:  # else somebody was faster
            for number in reversed(range(_files)):
                if os.path.exists(names[number]):
                    os.replace(names[number], names[number + 1])
        new, old = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE), os.fstat(2)
        for descriptor in (1, 2):
            if os.path.samestat(os.fstat(descriptor), old):
                os.dup2(new, descriptor)
        os.close(new)
        os.fchmod(2, FILE_MODE)  # whatever the umask
    finally:
        os.close(lock)


class Logger:
    """Writes the log lines of one process."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        if LEVELS.index(level) < _least:
            return
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        line = _format({"ts": stamp, "level": level, "stage": self.stage, "event": event, **fields}) + "\n"
        try:
            if _most_bytes:
                _renew()
        except OSError:
            pass  # as below; the file grows
        try:
            os.write(2, line.encode(errors="backslashreplace"))
        except OSError:
            pass  # a closed terminal or a full log disk must not stop the pipeline

    def info(self, event: str, **fields: object) -> None:
        self._write("info", event, fields)

    def warn(self, event: str, **fields: object) -> None:
        self._write("warn", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write("error", event, fields)
