"""Log lines: `ts=… level=info stage=framer event=seq_resume seq_resume=500`, on stderr.

One line is one `write`, so lines of several processes that share a terminal never mix.
"""

import os
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


class Logger:
    """Writes the log lines of one process."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        line = pairs(ts=stamp, level=level, stage=self.stage, event=event, **fields) + "\n"
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
