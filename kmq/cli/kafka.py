"""`kmq kafka transactions …`: transactions of Kafka clients. Lists read files; an abort is sent to the Kafka port."""

import json
import socket
import struct
import time
from typing import Annotated, Any

import typer

from kmq.access import local_token
from kmq.cli.output import examples, print_table
from kmq.client.lines import read_port
from kmq.config.settings import Settings, load
from kmq.errors import ConfigError, RetryError

kafka_app = typer.Typer(
    no_args_is_help=True,
    help="What clients of Kafka have at this broker.",
    epilog=examples("kmq kafka transactions ls"),
)
transactions_app = typer.Typer(
    no_args_is_help=True,
    help="Transactions of Kafka's clients: which are open, what they hold back; end one.",
    epilog=examples("kmq kafka transactions ls"),
)
kafka_app.add_typer(transactions_app, name="transactions")

_ID = Annotated[str, typer.Argument(help="A transactional id; see kmq kafka transactions ls.")]
_JSON = Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")]
_PATIENCE_S = 30.0
_PAUSE_S = 0.2


def _rows(settings: Settings) -> list[dict[str, Any]]:
    """Return what is known of each transactional id, in order."""
    from kmq.gateway.kafka import transaction_log as log  # imports modules that else only the gateway needs

    states = log.read_states(settings.data)
    held = log.read_held(settings.data, [state.held_key for state in states.values()])
    rows = []
    for id, state in sorted(states.items()):
        lines = held.get(state.held_key)
        ended = {log.EMPTY: "idle", log.ABORT: "aborted", log.COMMIT: "committing"}[state.state]
        rows.append(
            {
                "id": id,
                "state": "open" if lines and state.state != log.COMMIT else ended,
                "pid": state.pid,
                "epoch": state.epoch,
                "number": state.number,
                "since": state.seconds,
                "timeoutMs": state.timeout_ms,
                "held": lines.lines if lines else 0,
                "heldBytes": lines.nbytes if lines else 0,
                "partitions": sorted(f"{topic}/{number}" for topic, number in lines.first_ids) if lines else [],
                "offsets": sorted(f"{group}: {topic}/{n}" for group, (topic, n) in lines.offsets) if lines else [],
            }
        )
    return rows


def _row(settings: Settings, id: str) -> dict[str, Any]:
    found = next((row for row in _rows(settings) if row["id"] == id), None)
    if found is None:
        raise ConfigError(f"transactional id {id!r}: is not known; see: kmq kafka transactions ls")
    return found


def _moment(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


@transactions_app.command("ls", epilog=examples("kmq kafka transactions ls", "kmq kafka transactions ls --json"))
def list_all(as_json: _JSON = False) -> None:
    """List the transactional ids: what has become of the last transaction, and what an open one holds back."""
    rows = _rows(load())
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print("no transactions yet; a client of Kafka begins them with transactional.id")
        return
    print_table(
        ("id", "state", ">producer id", ">epoch", ">lines held", ">bytes", "last decided"),
        (
            (
                row["id"],
                row["state"],
                str(row["pid"]),
                str(row["epoch"]),
                row["held"],
                row["heldBytes"],
                _moment(row["since"]),
            )
            for row in rows
        ),
    )


@transactions_app.command("show", epilog=examples("kmq kafka transactions ls"))
def show(id: _ID, as_json: _JSON = False) -> None:
    """Show a transactional id: whose it is, and for which partitions and groups it holds lines and offsets back."""
    row = _row(load(), id)
    if as_json:
        print(json.dumps(row))
        return
    print(f"{id}: {row['state']}, producer id {row['pid']}, epoch {row['epoch']}, transaction {row['number']}")
    print(f"last decided {_moment(row['since'])}, aborted after {row['timeoutMs']} ms")
    if row["held"]:
        print(f"held back: {row['held']:,} lines, {row['heldBytes']:,} bytes")
    for name in ("partitions", "offsets"):
        for place in row[name]:
            print(f"{name[:-1]} {place}")


@transactions_app.command("abort", epilog=examples("kmq kafka transactions ls"))
def abort(
    id: _ID,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Abort what an id has open, and fence its producer: it has to start again."""
    settings = load()
    row = _row(settings, id)
    if not yes:
        typer.confirm(f"Abort the transaction of {id}, and fence its producer?", abort=True)
    _fence(settings, id, row["timeoutMs"])
    print(f"{id}: nothing is open; its producer is fenced")


# --- the Kafka port --------------------------------------------------------------------------------------------------
# Old versions of three requests: each field is a number, or a text after its length.

_HANDSHAKE, _AUTHENTICATE, _INIT_PRODUCER_ID = 17, 36, 22
_LOADING, _CONCURRENT = 14, 51


def _ask(connection: socket.socket, key: int, version: int, body: bytes) -> bytes:
    """Return the response to a request, without its header. Raises OSError."""
    request = struct.pack(">hhih", key, version, 1, 3) + b"kmq" + body
    connection.sendall(struct.pack(">i", len(request)) + request)
    with connection.makefile("rb", buffering=0) as stream:
        response = b""
        length = int.from_bytes(stream.read(4) or b"")
        while len(response) < length and (part := stream.read(length - len(response))):
            response += part
    if len(response) < 4:
        raise ConnectionResetError("the broker has ended the connection")
    return response[4:]


def _show_token(connection: socket.socket, token: str) -> None:
    _ask(connection, _HANDSHAKE, 1, struct.pack(">h", 5) + b"PLAIN")
    said = b"\0kmq\0" + token.encode()
    (code,) = struct.unpack_from(">h", _ask(connection, _AUTHENTICATE, 0, struct.pack(">i", len(said)) + said))
    if code:
        raise ConfigError("the broker does not take the token of this machine; is KMQ_PIPES that of the broker?")


def _fence(settings: Settings, id: str, timeout_ms: int) -> None:
    """Take the next epoch of an id, which aborts its open transaction."""
    port = read_port(settings, "kafka", settings.kafka_port if "kafka_port" in settings.given else 0)
    body = struct.pack(">h", len(id.encode())) + id.encode() + struct.pack(">i", timeout_ms)
    until = time.monotonic() + _PATIENCE_S
    try:
        with socket.create_connection((settings.host, port), _PATIENCE_S) as connection:
            if settings.tokens:
                _show_token(connection, local_token.read(settings))
            while True:
                _, code = struct.unpack_from(">ih", _ask(connection, _INIT_PRODUCER_ID, 1, body))
                if not code:
                    return
                if code not in (_LOADING, _CONCURRENT) or time.monotonic() > until:
                    raise RetryError(
                        f"{id}: was not aborted: Kafka's error {code}; see the log of the gateway: kmq logs"
                    )
                time.sleep(_PAUSE_S)  # the outcome of the transaction is being written
    except OSError as err:
        raise RetryError(f"the Kafka port: {err}; is the broker up? (kmq status)") from err


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.add_typer(kafka_app, name="kafka")
