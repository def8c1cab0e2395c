"""The terminal of `kmq top`: keys, size, frames, signals. At the end it is restored to its former state.

Invariant   However the command ends (q, Ctrl-C, SIGTERM, SIGHUP, an error), the modes of the terminal, its screen and
            its cursor are as before. Only SIGKILL leaves them: `reset` repairs that.
Signals     INT, TERM and HUP end the loop, even while a frame is being written: a terminal that accepts no output must
            not keep the command. TSTP (Ctrl-Z) restores the terminal, CONT takes it again. WINCH redraws.
Cost        A frame writes only the lines that differ from those shown.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from kmq.cli.top.screen import ScreenLine
from kmq.errors import EXIT_OK, EXIT_SIGINT

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[0m\x1b[?25h\x1b[?1049l"
_STYLES = {
    "": Style.null(),
    "head": Style(bold=True),
    "key": Style(bold=True),
    "dim": Style(dim=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "bar": Style(color="cyan"),
}
_SEQUENCES = {  # what keys send
    "[A": "up",
    "OA": "up",
    "[B": "down",
    "OB": "down",
    "[5~": "page up",
    "[6~": "page down",
    "[H": "home",
    "OH": "home",
    "[1~": "home",
}
_ENDING = {signal.SIGINT: EXIT_SIGINT, signal.SIGTERM: EXIT_OK, signal.SIGHUP: EXIT_OK}
_PATIENCE_S = 0.5  # wait at the end for a terminal that accepts no output


class TerminalEnded(Exception):
    """The command was told to end, or its terminal is gone."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def is_for_people() -> bool:
    """Return True if stdin and stdout are a terminal that can move its cursor."""
    return os.isatty(0) and os.isatty(1) and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def is_ascii() -> bool:
    """Return True if stdout does not support UTF-8: then only ASCII is drawn."""
    return (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "") != "utf8"


def keys(typed: bytes) -> Iterator[str]:
    """Yield the keys in what was typed: a letter each, or a name such as up. Unknown sequences are left out."""
    text = typed.decode(errors="replace")
    while text:
        if text[0] != "\x1b" or len(text) == 1:
            yield "escape" if text[0] == "\x1b" else text[0]
            text = text[1:]
            continue
        end = 2
        if text[1] in "[O":
            while end < len(text) and not "@" <= text[end] <= "~":
                end += 1
            end += 1
        if (name := _SEQUENCES.get(text[1:end])) is not None:
            yield name
        text = text[end:]


class Painter:
    """Converts lines to bytes for a terminal, with its colours; without colours if NO_COLOR is set."""

    def __init__(self, console: Console, is_ascii: bool) -> None:
        name, self.is_ascii = console.color_system, is_ascii
        system = {"standard": ColorSystem.STANDARD, "256": ColorSystem.EIGHT_BIT, "truecolor": ColorSystem.TRUECOLOR}
        self._system = system.get(name or "")
        colourless = {key: style.without_color for key, style in _STYLES.items()}
        self._styles = colourless if console.no_color else _STYLES

    def line(self, line: ScreenLine, width: int) -> str:
        """Return a line of `width` cells."""
        parts = line.fit(width, self.is_ascii)
        if self._system is None:
            return "".join(text for text, _ in parts)
        return "".join(self._styles[style].render(text, color_system=self._system) for text, style in parts)


class Screen:
    """The terminal while the command has it."""

    def __init__(self) -> None:
        self._painter = Painter(Console(), is_ascii())
        self._before = termios.tcgetattr(0)
        self._shown: list[str] = []
        self._is_resized = True
        self._size = (80, 24)
        self._old_handlers: dict[int, object] = {}

    def __enter__(self) -> "Screen":
        # Handle them even if the shell set one to be ignored: the terminal must be restored.
        self._handle({**dict.fromkeys(_ENDING, self._end), signal.SIGTSTP: self._pause, signal.SIGWINCH: self._resize})
        try:
            self._enter()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in (*_ENDING, signal.SIGTSTP):  # a second signal must not interrupt this
            with contextlib.suppress(TerminalEnded):
                signal.signal(number, signal.SIG_IGN)
        self._leave()
        for handled, handler in self._old_handlers.items():
            signal.signal(handled, handler)  # type: ignore[arg-type]

    def _handle(self, handlers: dict[signal.Signals, object]) -> None:
        for number, handler in handlers.items():
            self._old_handlers[number] = signal.signal(number, handler)  # type: ignore[arg-type]

    # --- signals -----------------------------------------------------------------------------------------------------

    def _end(self, number: int, frame: FrameType | None) -> None:
        raise TerminalEnded(_ENDING[signal.Signals(number)])

    def _resize(self, number: int, frame: FrameType | None) -> None:
        self._is_resized = True

    def _pause(self, number: int, frame: FrameType | None) -> None:
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when it is continued
        signal.signal(signal.SIGTSTP, self._pause)
        self._enter()

    def _enter(self) -> None:
        try:
            self._before = termios.tcgetattr(0)
            tty.setcbreak(0, termios.TCSANOW)
        except termios.error:
            raise TerminalEnded(EXIT_OK) from None  # the terminal is gone
        self._write(_ENTER)
        self._is_resized = True

    def _leave(self) -> None:
        with contextlib.suppress(OSError, termios.error):
            if select.select([], [1], [], _PATIENCE_S)[1]:
                os.write(1, _LEAVE.encode())
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(0, termios.TCSANOW, self._before)

    # --- output and input --------------------------------------------------------------------------------------------

    @property
    def size(self) -> tuple[int, int]:
        """Return columns and rows."""
        if self._is_resized:
            with contextlib.suppress(OSError):
                self._size = tuple(os.get_terminal_size(1))  # type: ignore[assignment]
            if 0 in self._size:
                self._size = (80, 24)
        return self._size

    def show(self, lines: list[ScreenLine], size: tuple[int, int]) -> None:
        """Draw a screen of that size."""
        width, height = size
        painted = [self._painter.line(line, width) for line in lines[:height]]
        if self._is_resized:
            self._is_resized, self._shown = False, []
        output = [] if self._shown else ["\x1b[2J"]
        for at, text in enumerate(painted):
            if at >= len(self._shown) or self._shown[at] != text:
                output.append(f"\x1b[{at + 1};1H{text}")
        self._shown = painted
        if output:
            self._write("".join(output))

    def clear(self) -> None:
        """Redraw everything, because another program has written to the terminal."""
        self._is_resized = True

    def _write(self, text: str) -> None:
        data = text.encode("ascii" if self._painter.is_ascii else "utf-8", errors="replace")
        try:
            while data:
                data = data[os.write(1, data) :]
        except OSError:
            raise TerminalEnded(EXIT_OK) from None  # the terminal is gone

    def wait(self, seconds: float) -> list[str]:
        """Wait at most this long for keys, and return them. A new size of the terminal ends the wait too."""
        try:
            if self._is_resized or not select.select([0], [], [], max(0.0, seconds))[0]:
                return []
            typed = os.read(0, 1024)
        except OSError:
            typed = b""
        if not typed:
            raise TerminalEnded(EXIT_OK)  # the terminal is gone
        return list(keys(typed))
