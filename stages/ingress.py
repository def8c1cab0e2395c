"""Ingress stage: takes lines from TCP and passes them, block by block, into the FIFO `raw`; brings replies back.

Links       in: TCP lines (KMQ_PORT, over TLS KMQ_TLS_PORT), GET_ACK (KMQ_ACK_PORT), FIFO `acks`   out: FIFO `raw`
Owns        the ports, pipes/ingress.owner; it is the only writer of the FIFO's control lines.

Invariant   Only whole lines are written to the FIFO, those of each connection in their order. Memory is bounded: while
            the FIFO is full no producer's socket is read (that is the backpressure), and unfinished lines and unread
            replies are bounded (kmq/ingress/budgets.py). With KMQ_TOKENS nothing is taken from a connection without a
            valid token.
Crash       Lines that are not in the FIFO yet are unacknowledged, and their producers see a reset. If only some pieces
            of a long line were written, the framer forgets them when it reads the announcement of the next start
            (`!b`). The names of connections begin with our start, so replies meant for an earlier ingress reach nobody.
"""

import os
import sys

from kmq.broker.stage import Stage, main
from kmq.ingress.drain import drain
from kmq.ingress.loop import Loop
from kmq.links.fifo import FifoWriter
from kmq.links.raw import MAX_GROUP

_IDLE_S = 0.5  # longest wait: only the heartbeat needs it


def run(stage: Stage) -> None:
    """Promise: see the module. Settings → ports → loop → drain."""
    settings = stage.settings
    os.makedirs(settings.pipes, exist_ok=True)
    owner = stage.own(f"{settings.pipes}/ingress.owner", f"FIFO {settings.pipes}/raw (ingress)")
    if settings.unused:  # one stage says it, for all
        stage.log.warn("setting_unused", names=",".join(settings.unused), effect="none: nobody listens there yet")
    fifo = FifoWriter(stage.raw, max(1, min(MAX_GROUP, settings.ring_slots // 4)))
    loop = Loop(stage, fifo)
    loop.announce()
    stage.ready(port=loop.ports.lines.port, ack_port=loop.ports.questions.port)
    while not stage.stopping:
        loop.turn(_IDLE_S)
        stage.beat()
    stage.state("draining")
    drain(loop)
    owner.release()


if __name__ == "__main__":
    sys.exit(main("ingress", run))
