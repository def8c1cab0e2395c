"""Runs `kmq` commands in forks of one process that has imported the CLI: 0.07 CPU seconds each instead of 0.2.

    run(["topics", "list"], env, cwd, text="", patience_s=60.0)  ->  CompletedProcess(returncode=0, stdout="…", stderr="…")

The first command of a pytest process starts the server, which ends with that process. A request is one message with five
descriptors: a pipe for the answer, the request as JSON, stdin, stdout, stderr. A fork goes on as an interpreter would: it calls
`kmq.__main__.main` and ends as that ends. The answer is its pid, and later its exit code.

Not for     What only a process of its own shows: the entry point, what a command imports, signals, terminals, closed pipes,
            the environment of another Python or another locale. Such tests run `kmq` themselves (`Broker.run`).
"""

import atexit
import gc
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_PIPE = 64 << 10  # bytes that a pipe takes before anybody reads
_NUMBER = struct.Struct("<i")


def run(
    arguments: list[str], env: dict[str, str], cwd: Path, text: str, patience_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `kmq` with these arguments. Raises TimeoutExpired, and then the command was killed."""
    command = ["kmq", *arguments]
    with ExitStack() as opened:

        def kept(file: int) -> int:
            opened.callback(os.close, file)
            return file

        def memory(content: bytes = b"") -> int:
            file = kept(os.memfd_create("kmq"))
            os.pwrite(file, content, 0)
            return file

        request = memory(json.dumps({"argv": command, "env": env, "cwd": str(cwd)}).encode())
        stdin, out, err = _stdin(opened, text.encode()), memory(), memory()
        answers, answering = os.pipe()
        kept(answers)
        try:
            socket.send_fds(_server(), [b"run"], [answering, request, stdin, out, err])
        finally:
            os.close(answering)
        [pid] = _NUMBER.unpack(os.read(answers, _NUMBER.size))
        in_time = bool(select.select([answers], [], [], patience_s)[0])
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        [code] = _NUMBER.unpack(os.read(answers, _NUMBER.size))
        said = [_text(os.pread(file, os.fstat(file).st_size, 0)) for file in (out, err)]
    if not in_time:
        raise subprocess.TimeoutExpired(command, patience_s, *said)
    return subprocess.CompletedProcess(command, code, *said)


def _stdin(opened: ExitStack, content: bytes) -> int:
    """A pipe that has ended, as of a shell, or a file if a pipe does not take so much at once."""
    if len(content) > _PIPE:
        file = os.memfd_create("stdin")
        os.write(file, content)
        os.lseek(file, 0, os.SEEK_SET)
    else:
        file, end = os.pipe()
        os.write(end, content)
        os.close(end)
    opened.callback(os.close, file)
    return file


def _text(data: bytes) -> str:
    return io.TextIOWrapper(io.BytesIO(data)).read()  # any newline is \n, as subprocess gives it


@cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(number)], pass_fds=[number], stdin=subprocess.DEVNULL
        )

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


# --- the server ------------------------------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Return a request in the process that is to carry it out; None once nobody can send another."""
    wake, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking)
    running: dict[int, int] = {}  # pid → where its exit code is waited for
    while True:
        ready, _, _ = select.select([requests.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap(running)
        if requests.fileno() not in ready:
            continue
        message, files, _, _ = socket.recv_fds(requests, 16, 5)
        if not message:
            return None
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, file in enumerate(files[2:]):
                os.dup2(file, number)
            with open(files[1], "rb", closefd=False) as text:
                request: dict[str, Any] = json.load(text)
            requests.close()
            for file in (wake, waking, *running.values(), *files):
                os.close(file)
            return request
        _say(files[0], pid)
        running[pid] = files[0]
        for file in files[1:]:
            os.close(file)


def _reap(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        answering = running.pop(pid)
        _say(answering, os.waitstatus_to_exitcode(status))
        os.close(answering)


def _say(answering: int, number: int) -> None:
    with suppress(BrokenPipeError):  # whoever asked is gone
        os.write(answering, _NUMBER.pack(number))


def _main() -> None:
    from kmq.__main__ import main
    from kmq.cli.app import MODULES

    for module in {*MODULES.values()}:
        import_module(f"kmq.cli.{module}")
    for module in ("typer.rich_utils", "rich.table", "rich.console", "urllib.request"):
        import_module(module)
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv = request["argv"]
        main()


if __name__ == "__main__":
    _main()
