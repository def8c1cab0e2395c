"""`python -m kmq.probe live|ready <process>`: the exec probes of the pod. Exit code 0, or 1 with the reason on stdout.

live        The process has written a heartbeat within LIVE_S; it may wait or recover. A process that is stopped, hung
            or dead is not live.
ready       Nothing is wrong with this process (broker/health.py): it is in its loop, and not starting, recovering, without
            its peers, refusing messages for lack of space, or draining. For the gateway this is /readyz for the whole
            broker, asked from inside, because its ports may be on loopback or require a certificate; in a shard on the
            port for metrics, which is this broker's own. So a full disk takes the pod out of its Service, and never
            restarts a container.

A kubelet runs this every few seconds for each container, so it imports little. It changes nothing.
"""

import sys

from kmq.broker.health import judge
from kmq.broker.stats import FRESH_S, PROCESSES, Row, peek
from kmq.config.settings import Settings, load
from kmq.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, KmqError

_ANSWER_S = 2.0  # longest wait for the gateway, which is on this machine
# Equal to the kubelet's period: then two failures in a row mean one silence of 20 to 30 s, never two short stalls.
LIVE_S = 10.0


def why_broker_not_ready(settings: Settings, row: Row) -> str:
    """Return why /readyz calls the broker not ready, or why it does not respond; "" if it is ready."""
    import json
    import socket

    host, port = settings.host, row.port
    try:
        if settings.shard:  # a follower passes its other ports to the leader
            with open(f"{settings.pipes}/metrics.port", encoding="ascii") as file:
                host, port = settings.own_host, int(file.read())
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        with socket.create_connection((host, port), _ANSWER_S) as sock, sock.makefile("rb") as answer:
            sock.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            status = answer.readline().split(b" ")[1]
            body = answer.read().partition(b"\r\n\r\n")[2]
            if status == b"200":
                return ""
            report = json.loads(body)
            return f"{report['reason']}; {report['advice']}"
    except (OSError, LookupError, TypeError, ValueError) as err:
        return f"gateway does not answer: {err}"


def reason(kind: str, name: str, settings: Settings) -> str:
    """Return why the process `name` fails the probe; "" if it passes."""
    page = peek(settings.instance)
    if page is None or not page.serves(settings.data):
        return f"{name} has not been started"
    row = page.rows[name]
    found = judge(page, settings).against(name) if kind == "ready" else None
    if found:
        return f"{found}; {found.advice}"
    if silence := row.silence(LIVE_S if kind == "live" else FRESH_S):
        return f"{name} {silence}"
    if kind == "live":
        return ""
    return why_broker_not_ready(settings, row) if name == "gateway" else ""


def main(argv: list[str]) -> int:
    """Run one probe. Returns the exit code."""
    if len(argv) != 2 or argv[0] not in ("live", "ready") or argv[1] not in PROCESSES:
        print(f"usage: python -m kmq.probe live|ready {'|'.join(PROCESSES)}", file=sys.stderr)
        return EXIT_CONFIG
    kind, name = argv
    try:
        found = reason(kind, name, load())
    except KmqError as error:
        print(error)
        return error.exit_code
    if found:
        print(found)  # the kubelet shows it as the event's message
    return EXIT_FAILED if found else EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
