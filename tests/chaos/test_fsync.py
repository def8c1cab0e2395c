"""G7: after a failed fdatasync nothing unsynced is trusted: the process ends, the next one goes on in a new segment."""

import os
import signal
from collections.abc import Callable

import pytest

from chaos.load import FifoLoad, Load
from chaos.pod import Pod


@pytest.mark.parametrize("nth", [3, 40])
@pytest.mark.parametrize("lost", [False, True], ids=["the page cache keeps it", "the page cache loses it"])
def test_after_a_failed_fdatasync_durability_ends_and_goes_on_in_a_new_segment(
    make_pod: Callable[..., Pod], loads: Callable[[Load], Load], strace: str, nth: int, lost: bool
) -> None:
    pod = make_pod()
    load = loads(FifoLoad(pod.pipes, "fifo", seed=nth))
    inject = f"inject=fdatasync,fsync:error=EIO:when={nth}+"
    pod.start("framer", "router", "ingress")
    pod.wait(lambda: (pod.data / "id").exists(), "somebody else makes the directory, whose fsyncs would count too")
    pod.start("durability", under=[strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync,fsync", "-e", inject])
    assert pod.wait_exit("durability") == 75
    synced = pod.seq_left("durability")
    [failed] = (pod.data / "append").glob("*.log")
    text = failed.read_bytes()
    end = text.index(b"\n%d|" % (synced + 1)) + 1  # the write was done, the sync was not
    if lost:  # the kernel may mark failed pages clean and forget them
        os.truncate(failed, end)
        os.truncate(failed, len(text))
    pod.start("durability")
    pod.wait_ready("durability")
    pod.wait(lambda: pod.seq("router") > synced + 20_000, "messages flow again")
    load.finish()
    pod.judge(load.sent)
    segments = sorted((pod.data / "append").glob("*.log"))
    assert [path.name for path in segments] == [f"{1:020d}.log", f"{synced + 1:020d}.log"]
    assert segments[0].read_bytes() == text[:end], "the old file is not trusted with another byte"


def test_what_a_failed_checkpoint_leaves_is_made_good(
    make_pod: Callable[..., Pod], loads: Callable[[Load], Load], strace: str
) -> None:
    """The router's fsyncs fail: it may not claim that its logs are on disk."""
    pod = make_pod()
    load = loads(FifoLoad(pod.pipes, "fifo", seed=1))
    pod.start("framer", "durability", "ingress")
    pod.wait_ready("framer", "durability", "ingress")  # somebody else makes the directory, whose fsyncs would fail too
    pod.start(
        "router", under=[strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync", "-e", "inject=fsync:error=EIO"]
    )
    pod.wait(lambda: load.count > 20_000, "messages flow")
    load.finish()
    pod.wait(lambda: pod.seq("router") >= load.count, "the router routes")
    router = pod.row("router").pid
    pod.stop("ingress", "framer", "durability")
    os.kill(router, signal.SIGTERM)
    assert pod.wait_exit("router") == 75
    assert not (pod.data / "router.ckpt").exists()
    pod.start()
    pod.judge(load.sent)
