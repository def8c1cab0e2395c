"""G1 on a disk that fails: after an error of fsync nothing more is acknowledged, the process says so and ends, and the next
one trusts nothing that was not synced. test_fsync.py has the plain protocol and a disk that stays broken.

The error comes once: Linux marks the pages clean and says 0 the next time, so asking again would be believing a lie.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.acked import AckedLoad, account
from chaos.hurry import hurried
from chaos.load import Load
from chaos.pod import RINGS, Pod
from kmq.links import layout

EX_TEMPFAIL = 75

Start = Callable[[Load], Load]


def failing(strace: str, call: str, nth: int, trace: Path) -> list[str]:
    """A command whose nth `call` fails; `trace` gets the syncs and the writes, with the paths they went to."""
    inject = f"inject={call}:error=EIO:when={nth}"
    return [strace, "-f", "-qq", "-y", "-s0", "-o", str(trace), "-e", "trace=fdatasync,fsync,write", "-e", inject]


def around_the_error(trace: Path) -> tuple[str, str]:
    """What was traced before and after the first fsync that failed, which is left out."""
    before, error, after = re.split(r"(.*EIO.*INJECTED.*\n)", trace.read_text(), maxsplit=1)
    assert "sync(" in error
    return before, after


def lose_unsynced(pod: Pod, synced: int) -> None:
    """What a failed fsync may do to the page cache: behind the last synced record the file reads as NULs."""
    active = max((pod.data / "append").glob("*.log"))
    text = active.read_bytes()
    found = re.search(rb"^%d\|" % (synced + 1), text, re.MULTILINE)
    if found:
        os.truncate(active, found.start())
        os.truncate(active, len(text))


@pytest.mark.parametrize("restart", ["durability", "the pod"])
@pytest.mark.parametrize(
    ("call", "nth"),  # fdatasync: a group commit, or a segment that is sealed; fsync: the directory of a new one
    [
        ("fdatasync", 1),
        ("fdatasync", 30),
        ("fsync", 2),
        ("fsync", 7),
        *(pytest.param("fdatasync", n, marks=pytest.mark.soak) for n in range(2, 200, 9)),
        *(pytest.param("fsync", n, marks=pytest.mark.soak) for n in range(3, 40, 3)),
    ],
)
def test_a_failed_sync_acknowledges_nothing_and_retries_store_each_message_once(
    make_pod: Callable[..., Pod], loads: Start, strace: str, tmp_path: Path, call: str, nth: int, restart: str
) -> None:
    pod = make_pod(KMQ_SEGMENT_BYTES="128 KiB", PYTHONPATH=hurried(tmp_path))
    producers = [AckedLoad(pod.pipes, f"eio-{n}", seed=nth + n) for n in range(2)]
    pod.start("framer", "router", "ingress")
    pod.wait(lambda: (pod.data / "id").exists(), "somebody else makes the directory, whose fsyncs would count too")
    pod.start("durability", under=failing(strace, call, nth, tmp_path / "trace"))
    for load in producers:
        loads(load)
    assert pod.wait_exit("durability") == EX_TEMPFAIL
    [said] = re.findall(r"stage=durability event=failed exit_code=75 reason=(.*)", pod.log())
    assert "sync failed: Input/output error" in said and str(pod.data) in said
    before, after = around_the_error(tmp_path / "trace")
    assert "pipes/acks>" not in after, "acknowledged behind the error"
    synced = pod.seq_left("durability")
    assert not synced or "pipes/acks>" in before, "or the assertion before says nothing"
    assert not synced or all(not load.seqs or load.seqs[-1] <= synced for load in producers)
    lose_unsynced(pod, synced)
    if restart == "durability":
        pod.start("durability")
    else:
        pod.kill("framer", "router", "ingress")
        for ring in RINGS:
            layout.remove(pod.instance, ring)
        pod.start()
    told = [len(load.seqs) for load in producers]
    pod.wait(lambda: all(map(AckedLoad.has, producers, [n + 1000 for n in told])), "it goes on")
    for load in producers:
        load.finish()
    pod.judge()
    account(pod.data, *producers)


@pytest.mark.parametrize("nth", [1, 2], ids=["the file", "its directory"])  # of the thread that writes it
def test_a_failed_producers_checkpoint_ends_the_framer_and_nothing_is_stored_twice(
    make_pod: Callable[..., Pod], loads: Start, strace: str, tmp_path: Path, nth: int
) -> None:
    pod = make_pod(PYTHONPATH=hurried(tmp_path))
    load = AckedLoad(pod.pipes, "checkpoint", seed=nth)
    pod.start("durability", "router", "ingress")
    pod.wait(lambda: (pod.data / "id").exists(), "somebody else makes the directory, whose fsyncs would count too")
    pod.start("framer", under=failing(strace, "fsync", nth, tmp_path / "trace"))
    loads(load)
    assert pod.wait_exit("framer") == EX_TEMPFAIL
    assert re.search(r"exit_code=75 reason=.*/data/producers.ckpt: cannot be written", pod.log())
    pod.start("framer")
    told = len(load.seqs)
    pod.wait(lambda: load.has(told + 1000), "it goes on")
    load.finish()
    pod.judge()
    account(pod.data, load)
