"""The way out of ingress: producers are given what an orderly end promises them.

Order       No new connections; then what connected producers had sent before; then the replies to it; then an orderly
            end. An orderly end says that the framer will have every line, so everything must be handed over first.
Time        At most _HANDOVER_S and _REPLIES_S, less than DRAIN_S together: the other stages have to drain after
            ingress. A FIFO that takes nothing ends the drain after DRAIN_S (Stage.check).
"""

import time

from kmq.config.settings import DRAIN_S
from kmq.ingress.loop import Loop
from kmq.links.fifo import waiting_bytes

_TURN_S = 0.05
_GRACE_S = 0.2  # how long connected producers may still send
_HANDOVER_S = DRAIN_S / 2  # how long is taken, at most, what they had sent before
_REPLIES_S = 2.0  # how long replies to it are waited for
_FULL = 64 << 10  # bytes: a producer with more than this in its socket may have more in its kernel,
_BEHIND = 8 << 20  # at most this much (tcp_wmem)


def drain(loop: Loop) -> None:
    """Stop accepting, take what connected producers have already sent, then let them go."""
    loop.stop_accepting()
    _take_over(loop)
    producers, until = loop.producers, time.monotonic() + _REPLIES_S
    while producers.table.owes_replies and time.monotonic() < until:
        _turn(loop)
    while loop.handover.clogged:
        _turn(loop)
    loop.incidents.say()
    producers.let_go()


def _take_over(loop: Loop) -> None:
    """Take what producers had sent when we were told to stop, and no more than that of those that keep sending.

    Many of them have ended, so nobody would send it again.
    """
    intake, table = loop.producers.intake, loop.producers.table
    waiting = [waiting_bytes(connection.sock.fileno()) for connection in table]
    most = intake.bytes + sum(waiting) + sum(_BEHIND for nbytes in waiting if nbytes > _FULL)
    quiet, latest = time.monotonic() + _GRACE_S, time.monotonic() + _HANDOVER_S

    def is_sent_before() -> bool:
        if loop.gate.refusal or intake.bytes >= most:
            return False
        return any(waiting_bytes(connection.sock.fileno()) for connection in table)

    while table and (time.monotonic() < quiet or (is_sent_before() and time.monotonic() < latest)):
        _turn(loop)


def _turn(loop: Loop) -> None:
    loop.turn(_TURN_S)
    loop.stage.check()
