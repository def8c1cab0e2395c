"""Why a broker accepts no messages, as far as a producer can find out: from the stats page, or by asking ingress."""

import socket

from kmq.access import tokens
from kmq.broker import status
from kmq.client.lines import no_connection, read_port
from kmq.config.settings import Settings
from kmq.errors import KmqError
from kmq.message.text import request_line

_ASK_S = 1.0  # longest wait for the reply of ingress


def obstacle(settings: Settings) -> str:
    """Return what keeps the broker from accepting messages, as far as this process can see."""
    return (_is_here(settings.host) and _of_stages(settings)) or _of_greeting(settings)


def _is_here(host: str) -> bool:
    """Return True for an address of this machine: the stats page says nothing about a broker elsewhere."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True


def _of_stages(settings: Settings) -> str:
    try:
        found = status.collect(settings)
    except (OSError, KmqError):  # the stats page belongs to another user
        return ""
    reasons = found.verdict.reasons if found.stages else []  # without stages the page is another broker's
    return "; ".join(f"{reason}; {reason.advice}" for reason in reasons)


def _of_greeting(settings: Settings) -> str:
    """Return the reply of ingress to a new connection: the reason if ingress refuses messages."""
    where = settings.host
    try:
        port = read_port(settings, "ingress", settings.port)
        where = f"{settings.host}:{port}"
        token = f"token={tokens.local(settings)}" if settings.tokens else ""
        with socket.create_connection((settings.host, port), timeout=_ASK_S) as sock:
            sock.sendall(request_line("!hello", "acks=1", token))
            reply = sock.recv(4096).decode(errors="replace").strip()
    except TimeoutError:
        return f"{where} does not answer: the disk there may be full, or a stage stopped; see kmq status there"
    except (OSError, KmqError) as err:
        return no_connection(where, err)
    verb, _, refusal = reply.partition(" ")
    if verb == "!err":
        return f"it refuses messages: {refusal.removeprefix('0 ')}"
    return "it is up, but slow, or one of its stages is stopped; see kmq status there"
