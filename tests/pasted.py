"""A page as a newcomer pastes it: every block in order, in a fresh clone, and what is printed compared by its shape.

    python tests/pasted.py <checkout> <empty directory> <page>       as root; pages.py runs it

Place       A network, /dev/shm and process ids of its own (unshare), so that the page's ports and names are free. The clone
            lies over the checkout, with the checkout's .venv in it: the paths in there are right. All processes end with this.
            The README puts .venv/bin on the PATH itself; every other page is read after it.
Console     One bash for all blocks. Lines that begin with `$ ` are commands, those below them what is printed; a command with
            nothing below may print what it likes. Exit code 0 is demanded. Nothing is typed before the broker is idle.
Python      One process for all blocks, like a notebook: lines of comment at the margin are what is printed above them.
Shape       Numbers, times and ids are equal, except that 0 is not 1; blanks between columns count once; `…` stands for any text,
            a line of its own for any lines.
Marks       `<!-- not pasted: why -->` before a block leaves it out, and the report says so.
"""

import ast
import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kmq.broker import status
from kmq.config.settings import load

PATIENCE_S = 300.0  # for one command; reached only by a bug
_BLOCK = re.compile(r"(?ms)(?:^<!-- not pasted: ([^\n]*) -->\n+)?^```(\w*)\n(.*?)^```$")
_LIBRDKAFKA = re.compile(r"%[4-7]\|")  # its log: on a busy machine it warns of connections that it makes anew
_NOT_TYPED = ("", "text", "json")  # drawings and formats: nothing for a shell or for Python
# Not of the page: progress, which on a terminal is a bar that goes away, and the options that make short JVMs quick.
_ASIDE = re.compile(r"ts=\S+ level=info stage=\S+ event=(?:step|progress|batch) |Picked up JAVA_TOOL_OPTIONS")
_FOLLOWS = re.compile(r"\btail -[fF]\b|--follow\b")
_DONE = "--done--"
OUT_OF_STEP = -1  # a command that does not end: what is said from then on belongs to no command


@dataclass
class Block:
    """A block of a page: what language, where, what for, and why it is left out."""

    language: str
    line: int
    text: str
    mark: str = ""


@dataclass
class Step:
    """Something to paste, and the lines that the page prints below it."""

    line: int
    code: str
    printed: list[str]


def blocks(page: str) -> list[Block]:
    """The blocks that somebody may type."""
    return [
        Block(match[2], page.count("\n", 0, match.start(3)) + 1, match[3], match[1] or "")
        for match in _BLOCK.finditer(page)
        if match[2] not in _NOT_TYPED
    ]


def unpasted(page: str) -> list[str]:
    """Lines that look like commands and stand where nothing pastes them: indented, or in a block that is no console."""
    outside = _BLOCK.sub("", page)
    indented = re.findall(r"(?m)^\n((?: {4}|\t)\S.*)", outside)
    hidden = [line for match in _BLOCK.finditer(page) if match[2] in _NOT_TYPED for line in match[3].splitlines()]
    return indented + [line for line in hidden if re.match(r"\s*(?:\$|kmq|make|kubectl|python|pip) ", line)]


def steps(block: Block) -> Iterator[Step]:
    """What a block asks to paste, piece by piece."""
    prompt, answer = ("$ ", "") if block.language == "console" else ("", "# ")
    step: Step | None = None
    for number, line in enumerate(block.text.splitlines(), block.line):
        is_answer = line.startswith(answer) and not (prompt and line.startswith(prompt))
        if is_answer and step:
            step.printed.append(line.removeprefix(answer))
        elif step and not prompt and not step.printed:
            step.code += "\n" + line
        else:
            if step:
                yield step
            step = Step(number, line.removeprefix(prompt), [])
    if step:
        yield step


# --- shapes ------------------------------------------------------------------------------------------------------


def shape(line: str) -> str:
    """A line with its numbers, times, ids and blanks made equal."""
    line = re.sub(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", "N", line)
    line = re.sub(r"\d+(?:[-.,:T]\d+)*Z?", lambda match: "N" if match[0].strip("0.,:") else "0", line)
    line = re.sub(r"\b([0N]) ?(?:B|[KMG]i?B)\b", r"\1 BYTES", line)
    line = re.sub(r"-{2,}|─+", "-", line)
    return " ".join(line.split())


def is_like(printed: list[str], said: list[str]) -> bool:
    """Whether what was said has the shape of what the page prints."""
    pattern = ""
    for line in printed:
        escaped = ".*".join(re.escape(shape(part)) for part in line.split("…"))
        pattern += r"(?:.*\n)*" if line.strip() == "…" else escaped + r"\n"
    return re.fullmatch(pattern, "".join(shape(line) + "\n" for line in said)) is not None


# --- sessions ----------------------------------------------------------------------------------------------------


class Session:
    """A process that is given one piece of text after another and says after each how it ended."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
        self._heard = b""

    def ask(self, text: str, follows: int = 0) -> tuple[int, list[str]]:
        """The exit code, and the lines said. What follows a file for ever is ended after `follows` lines."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(text.encode())
        deadline, self._heard = time.monotonic() + PATIENCE_S, b""
        while not (done := re.search(rf"^(.*?){_DONE} (\d+)\n$".encode(), self._heard, re.S)):
            if follows and self._heard.count(b"\n") >= follows:
                follows = 0
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    child.terminate()
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return OUT_OF_STEP, [*self._lines(self._heard), f"(no end within {PATIENCE_S:.0f} s)"]
            if not (chunk := os.read(self._process.stdout.fileno(), 1 << 16)):
                return OUT_OF_STEP, [*self._lines(self._heard), "(the session has ended)"]
            self._heard += chunk
        return int(done[2]), self._lines(done[1])

    def _lines(self, heard: bytes) -> list[str]:
        lines = heard.decode(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip() and not _ASIDE.match(line)]


class Shell(Session):
    def __init__(self) -> None:
        super().__init__(["bash", "--norc", "--noprofile"])

    def paste(self, step: Step) -> tuple[int, list[str]]:
        follows = max(1, len(step.printed)) if _FOLLOWS.search(step.code) else 0
        code, said = self.ask(f"{{ {step.code}\n}} </dev/null\nprintf '%s %d\\n' {_DONE} $?\n", follows)
        return (0, said[:follows]) if follows and code == 128 + signal.SIGTERM else (code, said)


class Notebook(Session):
    def __init__(self) -> None:
        super().__init__([sys.executable, "-u", __file__, "--notebook"])

    def paste(self, step: Step) -> tuple[int, list[str]]:
        return self.ask(json.dumps(step.code) + "\n")


def notebook() -> None:
    """Run what comes on stdin, a JSON string a line; show what an expression at the margin gives."""
    import traceback

    sys.path[0] = ""
    names: dict[str, object] = {"__name__": "__main__"}
    for line in sys.stdin:
        code = 0
        try:
            for statement in ast.parse(json.loads(line)).body:
                if isinstance(statement, ast.Expr):
                    exec(compile(ast.Interactive([statement]), "page", "single"), names)
                else:
                    exec(compile(ast.Module([statement], []), "page", "exec"), names)
        except BaseException:
            code = 1
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        print(f"{_DONE} {code}", flush=True)


# --- a place of its own ------------------------------------------------------------------------------------------


def copy_files(checkout: Path, clone: Path) -> None:
    """What a clone would hold, as a repository of its own; also what is not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=checkout, check=True, capture_output=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (checkout / name).exists():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkout / name, clone / name, follow_symlinks=False)
    git = ["git", "-c", "user.name=newcomer", "-c", "user.email=newcomer@example.com"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "clone"]):
        subprocess.run([*git, *words], cwd=clone, check=True)
    for name in ("pyproject.toml", "scripts/setup"):  # older than the .venv that is borrowed: nothing is installed
        os.utime(clone / name, (0, 0))


def move_in(checkout: Path, clone: Path) -> None:
    """Lay the clone over the checkout, its .venv borrowed, with a loopback and a /dev/shm that are new."""
    (clone / ".venv").mkdir()
    subprocess.run(["mount", "--bind", checkout / ".venv", clone / ".venv"], check=True)
    if (checkout / "build/consul").is_dir():  # where scripts/consul-setup has put it, because there is no network here
        (clone / "build/consul").mkdir(parents=True)
        subprocess.run(["mount", "--bind", checkout / "build/consul", clone / "build/consul"], check=True)
    subprocess.run(["mount", "--rbind", clone, checkout], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    with socket.socket() as sock:  # SIOCSIFFLAGS lo IFF_UP
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 1))
    os.chdir(checkout)


def wait_idle() -> None:
    """As slow as a person: what was sent has arrived before the next command. Not for a broker that is down or held up."""
    deadline, seen = time.monotonic() + 5, 0
    while time.monotonic() < deadline and seen < 5:  # a line may be between two looks at the FIFO and at the framer
        found = status.collect(load({}))
        if not any(stage.pid for stage in found.stages):
            return
        seqs = {stage.seq for stage in found.stages if stage.name in ("framer", "durability", "router")}
        seen = seen + 1 if len(seqs) == 1 and not found.backlog["raw_bytes"] else 0
        time.sleep(0.05)


def paste_all(name: str, page: str) -> list[str]:
    """What is not as the page says, step by step."""
    wrong: list[str] = []
    shell, python = Shell(), Notebook()
    for block in blocks(page):
        if block.mark:
            print(f"{name}:{block.line}: not pasted: {block.mark}")
            continue
        if block.language not in ("console", "python"):
            wrong.append(f"{name}:{block.line}: nothing here runs a block of {block.language}; mark it, and say why")
            continue
        for step in steps(block):
            begin = time.monotonic()
            code, said = (shell if block.language == "console" else python).paste(step)
            said = [line for line in said if not _LIBRDKAFKA.match(line)]
            print(
                f"{name}:{step.line}: {time.monotonic() - begin:.1f} s: {step.code.strip().splitlines()[0]}",
                flush=True,
            )
            if code or (step.printed and not is_like(step.printed, said)):
                parts = [f"{name}:{step.line}: exit code {code}", step.code, "--- the page", *step.printed]
                wrong.append("\n".join([*parts, "--- printed here", *said]))
                print(wrong[-1], flush=True)
            if code == OUT_OF_STEP:
                return wrong
            wait_idle()
    if any(stage.state not in ("down", "stopped") for stage in status.collect(load({})).stages):
        wrong.append(f"{name}: the page leaves a broker running")
    left = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return [
        *wrong,
        *([f"git status is not empty; .gitignore must name what the blocks leave:\n{left}"] if left else []),
    ]


def main(checkout: Path, scratch: Path, name: str) -> int:
    clone = scratch / "clone"
    clone.mkdir()
    copy_files(checkout, clone)
    move_in(checkout, clone)
    os.environ |= {"HOME": str(scratch), "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    if name != "README.md":
        os.environ["PATH"] = f"{checkout}/.venv/bin:{os.environ['PATH']}"
    wrong = paste_all(name, (checkout / name).read_text())
    times = [process.cpu_times() for process in psutil.process_iter()]  # of this namespace
    print(f"{sum(t.user + t.system + t.children_user + t.children_system for t in times):.0f} s of CPU")
    print(*wrong, sep="\n\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--notebook"]:
        notebook()
    else:
        sys.exit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3]))
