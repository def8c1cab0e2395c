"""The FIFO `raw`: any shell of the pod may write lines into the FIFO, while long lines from TCP pass in pieces."""

import socket
import subprocess
import threading
from collections.abc import Callable

from chaos.checker import Stream
from chaos.pod import Pod

SHELLS, ECHOES = 8, 400
LONG = [5_000, 900 << 10, 4_096, 4_095, 70_000, 300_000, 12_345, 8_190]  # around PIPE_BUF, and far beyond

ECHO = """
pad=$(printf %0{pad}d 0)
i=0
while [ $i -lt {count} ]; do
    echo "test.probe|0|sh{shell}-$i|$pad"
    i=$((i + 1))
done
"""


def echoed(shell: int) -> Stream:
    pad = b"0" * (10 + 500 * shell)  # the longest is near PIPE_BUF
    return Stream(f"sh{shell}", lambda n: b"test.probe|0|sh%d-%d|%b" % (shell, n, pad), ECHOES)


def long_lines(name: str, count: int) -> Stream:
    return Stream(name, lambda n: b"jobs.long|0|%b-%d|%b" % (name.encode(), n, b"%08d" % n * (LONG[n % 8] // 8)), count)


def test_echoes_from_many_shells_and_long_lines_do_not_damage_each_other(make_pod: Callable[..., Pod]) -> None:
    pod = make_pod()
    pod.start()
    pod.wait_ready()
    streams = [long_lines(f"tcp{n}", 24) for n in range(3)]
    senders = [threading.Thread(target=send, args=(pod, stream), daemon=True) for stream in streams]
    for sender in senders:
        sender.start()
    shells = []
    for shell in range(SHELLS):  # `exec` would keep one descriptor; each echo opens the FIFO anew, as people do
        script = ECHO.format(pad=10 + 500 * shell, count=ECHOES, shell=shell).replace('$pad"', '$pad" > raw')
        shells.append(subprocess.Popen(["sh", "-c", script], cwd=pod.pipes))
        streams.append(echoed(shell))
    assert [shell.wait(60) for shell in shells] == [0] * SHELLS
    for sender in senders:
        sender.join(60)
    assert pod.judge(streams).records == SHELLS * ECHOES + 3 * 24


def send(pod: Pod, stream: Stream) -> None:
    port = int((pod.pipes / "ingress.port").read_text())
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        for n in range(stream.count):
            sock.sendall(stream.line(n) + b"\n")
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
