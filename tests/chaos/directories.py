"""A data directory after damage: what readers get out of it, what verify finds, whether a broker goes on."""

import contextlib
from pathlib import Path

from chaos.checker import Stream
from chaos.load import Lines
from chaos.pod import Pod
from kmq.log import reader
from kmq.log.damage import DamageError
from kmq.log.segment import seqs_of
from kmq.repair import verify
from kmq.repair.scan import Finding

AFTER = Stream("after", Lines("after").line, 1)


def everything(log: reader.LogReader) -> dict[int, bytes]:
    """All that a reader gets out of a log; behind what it refuses it goes on."""
    offset, found = 0, dict[int, bytes]()
    while True:
        try:
            first, text = log.read(offset)
        except DamageError as err:
            if err.next_offset <= offset:
                return found
            offset = err.next_offset
            continue
        lines = text.split(b"\n")[:-1]
        if not lines:
            return found
        numbers = seqs_of(text) if log.by_seq else range(first, first + len(lines))
        found.update(zip(numbers, lines, strict=True))
        offset = numbers[-1] + 1


def findings(data: Path, notes: bool = False) -> list[Finding]:
    return [each for each in verify.Verifier(str(data), is_live=False).findings() if each.is_damage or notes]


def goes_on(pod: Pod, sent: list[Stream]) -> bool:
    """Start the broker and send one more message; False where it refuses to start, and says why."""
    pod.start()
    if not is_ready_or_refused(pod):
        for process in pod.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        assert "kmq verify --repair" in pod.log() or "/data': format" in pod.log()
        return False
    (pod.pipes / "raw").write_bytes(AFTER.line(0) + b"\n")
    pod.wait(lambda: pod.seq("router") > sum(stream.count for stream in sent), "the message after it")
    pod.stop()
    return True


def is_ready_or_refused(pod: Pod) -> bool:
    """True when all stages are ready, False when one has ended with 65."""
    refused = False

    def is_decided() -> bool:
        nonlocal refused
        codes = {process.poll() for process in pod.processes.values()}
        refused = not codes.isdisjoint({65, 78})
        assert refused or codes == {None}, f"{codes}\n{pod.tail()}"
        return refused or all(pod.state(name) == "ready" for name in pod.processes)

    pod.wait(is_decided, "it is ready or refuses to start")
    return not refused
