"""Ingress stage: takes lines from TCP, hands the lines of each receive to the framer, and sends replies back.

Example: the lines that one receive brought go into `received`, and one control line in `raw` names their place.

Links       in: TCP lines (KMQ_PORT, over TLS KMQ_TLS_PORT), GET_ACK (KMQ_ACK_PORT), FIFO `acks`
            out: ring `received` (sole writer), and the FIFO `raw`, which announces the lines in it
Owns        the ports, pipes/ingress.owner; it is the only writer of the FIFO's control lines.

Invariant   Only whole lines are handed over, and the lines of a connection stay in order. Memory is bounded: while the
            ring or the FIFO is full no producer's socket is read (that is the backpressure), and unfinished lines and
            unread replies are bounded (kmq/ingress/limits.py). With KMQ_TOKENS no line is taken from a connection
            without a valid token.
Crash       Lines that the FIFO has not announced are unacknowledged, and their producers see a reset. The bytes that
            they left in the ring are free once the framer reads the first line of the next start (received.py).
            Connection names begin with the start of the process, so replies meant for an earlier ingress reach nobody.
"""

import os
import sys

from kmq.broker.stage import Stage, main
from kmq.ingress.loop import Loop, drain
from kmq.ingress.ports import OWN_DESCRIPTORS
from kmq.links.received import Handover

_IDLE_S = 0.5  # longest wait: only the heartbeat needs it
_ROLE_S = 0.1  # longest wait in a shard, where the ports must close as soon as another broker may lead
_HEAP_BYTES = 1 << 20  # twice this much free memory is kept between two receives, as the framer does (stages/framer.py)


def run(stage: Stage) -> None:
    """Promise: see the module. Settings → ports → loop → drain."""
    settings = stage.settings
    bytes(_HEAP_BYTES)
    if settings.intakes:
        from kmq.ingress import intakes

        intakes.check_topics(settings)
    os.makedirs(settings.pipes, exist_ok=True)
    owner = stage.own(f"{settings.pipes}/ingress.owner", f"FIFO {settings.pipes}/raw (ingress)")
    loop = Loop(stage, Handover(stage.raw, stage.open_received()))
    loop.announce()
    stage.ready(port=loop.ports.lines.port, ack_port=loop.ports.questions.port)
    wait_s = _ROLE_S if stage.settings.shard else _IDLE_S
    while not stage.stopping:
        loop.turn(wait_s)
        stage.beat()
    stage.state("draining")
    drain(loop)
    owner.release()


def forward_to_leader(stage: Stage) -> None:
    """While this broker does not lead its shard, forward its connections to the ports of the leader."""
    from kmq.broker import door  # only in a shard
    from kmq.config.intakes import TLS, UDP

    settings = stage.settings
    os.makedirs(settings.pipes, exist_ok=True)
    doors = [
        door.Door("lines", "KMQ_PORT", settings.host, settings.port, door.LINES),
        door.Door("acks", "KMQ_ACK_PORT", settings.host, settings.ack_port),
    ]
    if settings.tls_cert:
        doors.append(door.Door("lines_tls", "KMQ_TLS_PORT", settings.tls_host, settings.tls_port))
    for at, spec in enumerate(settings.intakes, 1):
        if spec.kind != UDP:
            host = settings.tls_host if spec.kind == TLS else settings.host
            setting = f"KMQ_INTAKES: {spec}"
            doors.append(door.Door(f"intake{at}", setting, host, spec.number, door.OTHER, settings.intakes_from))
    most = min(settings.connections, stage.most_files // 2 - OWN_DESCRIPTORS)
    dead_s = settings.session_ttl + settings.replica_lag
    passing = door.FollowerDoors(doors, most, lambda: stage.leader, stage.row, stage.log, dead_s=dead_s)
    passing.write_ports(settings.pipes)
    stage.log.info("doors_passed_on", port=passing.ports["lines"], ack_port=passing.ports["acks"])
    passing.serve(stage.has_work)


if __name__ == "__main__":
    sys.exit(main("ingress", run, forward_to_leader))
