"""Messages of thousands of connections without the connections, which would take long to make."""

import os
from collections.abc import Iterable

from fake_logger import FakeLogger

from chaos.pod import Pod
from kmq.config.values import MIB
from kmq.links import received
from kmq.links.fifo import Sender
from kmq.links.received import Handover, ReceivedWriter
from kmq.log.identity import open_data


def hand_over(pod: Pod, pieces: Iterable[tuple[Sender, bytes, int]]) -> None:
    """Hand over messages, each piece with its sender and their number. Ingress is killed, and started again afterwards."""
    pod.kill("ingress")
    ring = ReceivedWriter(pod.instance, received.identity(open_data(str(pod.data)), MIB), "the test", FakeLogger())
    fd = os.open(pod.pipes / "raw", os.O_WRONLY | os.O_NONBLOCK)
    end = Handover(fd, ring)

    def is_taken() -> bool:
        end.flush()
        return not end.clogged

    for sender, lines, count in pieces:
        end.put([lines], sender, count)
        pod.wait(is_taken, "the framer takes it")
    os.close(fd)
    ring.close()
    pod.start("ingress")
    pod.wait_ready("ingress")
